"""Whether a checkpoint is what was written, and how two differ."""

import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from jfsdp.checkpoint.convert import write_source
from jfsdp.checkpoint.diff import diff
from jfsdp.checkpoint.disk.digest import hash_files, list_files, write_digests
from jfsdp.checkpoint.disk.files import ARRAYS, CONFIG, EXTRA, LAYOUT, SUMS, DamagedError
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.verify import verify
from tests.checkpoint.arrays import Arrays
from tests.refusals import refusing


def write(path, values):
    write_source(path, Arrays(values), {}, {LAYOUT: None, CONFIG: None, EXTRA: [None]})
    return path


def hash_again(path):
    """Make digests fit what the files are now."""
    write_digests(path, hash_files(path, list_files(path)))


@pytest.fixture
def values():
    rng = np.random.default_rng(0)
    return {
        "params.w": rng.normal(size=(6, 8)).astype(np.float32),
        "params.b": rng.normal(size=8).astype(jnp.bfloat16),
        "params.none": np.zeros((0, 4), np.float32),
        "step": np.int32(3).reshape(()),
    }


def test_what_was_written_is_well_and_all_of_it_is_looked_at(values, tmp_path):
    seen = []
    path = write(tmp_path / "a", values)
    (path / "notes.txt").write_text("mine")
    found = verify(path, progress=lambda name, num_bytes: seen.append((name, num_bytes)))
    assert found.is_ok and (found.problems, found.num_arrays) == ((), 4)
    assert found.remarks == ("notes.txt is not part of the checkpoint",)
    assert {name: size for name, size in seen if name in values} == {"params.w": 192, "params.b": 16, "step": 4}


@pytest.mark.parametrize(("name", "bad"), [("params.w", np.nan), ("params.b", -np.inf)])
def test_what_is_not_finite_is_counted_by_name(name, bad, values, tmp_path):
    values[name].reshape(-1)[[1, 5]] = bad
    found = verify(write(tmp_path / "a", values))
    assert found.problems == (f"{name}: 2 of {values[name].size} elements are not finite",)
    assert not found.is_ok and not found.is_damaged


@pytest.mark.parametrize("gone", ["file", "entry"])
def test_a_chunk_that_is_gone_is_named_though_all_digests_fit(gone, values, tmp_path):
    path = write(tmp_path / "a", values)
    params = path / ARRAYS / "params"
    if gone == "entry":
        store = ts.KvStore.open({"driver": "ocdbt", "base": f"file://{params}/"}).result()
        store.write("params.w/0.0", None).result()
    else:
        for file in params.rglob("d/*"):
            file.unlink()
    hash_again(path)
    found = verify(path)
    assert not found.is_ok and found.is_damaged
    assert any("params.w cannot be read" in line for line in found.problems)
    assert not any("step cannot be read" in line for line in found.problems)


def test_damage_is_named_and_arrays_are_not_read_then(values, tmp_path):
    path = write(tmp_path / "a", values)
    file = max((path / ARRAYS / "params").rglob("d/*"), key=lambda file: file.stat().st_size)
    file.write_bytes(file.read_bytes() + b"x")
    assert verify(path).problems == (
        f"{file.relative_to(path)} has changed since it was written (its SHA-256 differs)",
    )
    (path / SUMS).unlink()
    assert f"{SUMS} is missing" in verify(path).problems[0]


def test_nan_equals_nan_and_differs_from_a_number_by_infinity(values):
    one, two = {"w": values["params.w"]}, {"w": values["params.w"].copy()}
    one["w"][0, 0] = np.nan
    assert np.isinf(diff(Arrays(one), Arrays(two)).values[0].max_abs)
    two["w"][0, 0] = np.nan
    assert diff(Arrays(one), Arrays(two)).is_empty


def test_the_largest_difference_is_found_across_pieces_with_its_place(monkeypatch):
    monkeypatch.setattr("jfsdp.checkpoint.diff.pieces_of", lambda array: rows_of(array))
    one = {"w": np.full((5, 4), 2, np.float32), "v": np.full(3, 10, np.float32)}
    two = {name: value.copy() for name, value in one.items()}
    two["w"][1, 2] += 0.5
    two["w"][3, 1] -= 0.75
    two["w"][4, 0] += 0.25
    two["v"][2] += 1
    found = diff(Arrays(one), Arrays(two)).values
    assert [(row.name, row.max_abs, row.max_rel, row.num_elements, row.at) for row in found] == [
        ("w", 0.75, 0.375, 3, (3, 1)),  # the largest relative difference stands first
        ("v", 1.0, pytest.approx(0.1), 1, (2,)),
    ]


def rows_of(array):
    return [(slice(row, row + 1), *(slice(0, size) for size in array.shape[1:])) for row in range(array.shape[0])]


def test_stacked_and_listed_layers_are_compared():
    stack = np.random.default_rng(0).normal(size=(3, 4)).astype(np.float32)
    one = {"params.layers.w": stack}
    two = {f"params.layers.{layer}.w": stack[layer].copy() for layer in range(3)}
    assert diff(Arrays(one), Arrays(two)).is_empty
    assert diff(Arrays(two), Arrays(one)).is_empty
    two["params.layers.2.w"][1] += 1
    assert [row.at for row in diff(Arrays(one), Arrays(two)).values] == [(2, 1)]


def test_dtypes_and_shapes_are_told_and_values_of_other_dtypes_compared(values):
    w = values["params.w"]
    found = diff(Arrays({"w": w, "v": w}), Arrays({"w": w.astype(jnp.bfloat16), "v": w[:3]}))
    assert found.kinds == (("w", "float32[6, 8]", "bfloat16[6, 8]"), ("v", "float32[6, 8]", "float32[3, 8]"))
    assert [row.name for row in found.values] == ["w"]
    assert found.values[0].max_rel < 2**-8
    assert diff(Arrays(values), Arrays(dict(values))).num_equal == 4
    found = diff(Arrays({"a": w, "c": w}), Arrays({"b": w, "c": w}))
    assert (found.only_first, found.only_second, found.num_equal) == (("a",), ("b",), 1)
    same = diff(Arrays({"w": w.astype(jnp.bfloat16)}), Arrays({"w": w.astype(jnp.bfloat16).astype(np.float32)}))
    assert (same.values, same.num_equal, same.is_empty) == ((), 0, False)


def test_digests_that_name_no_file_of_a_part_are_damage(values, tmp_path):
    path = write(tmp_path / "c", values)
    write_digests(
        path, {name: digest for name, digest in hash_files(path, list_files(path)).items() if ARRAYS not in name}
    )
    (problem,) = [line for line in verify(path).problems if "arrays/params" in line]
    assert problem == f"{SUMS} names no file of {ARRAYS}/params"
    with refusing("SHA256SUMS", "arrays/params", error=DamagedError):
        CheckpointSource(path).check(values)
