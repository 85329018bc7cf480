"""One checkpoint into another: casts, stacks and lists, some of the arrays, other chunks, and what it holds."""

import math
import threading
import time
import tracemalloc

import jax.numpy as jnp
import numpy as np
import pytest

from jfsdp.checkpoint.convert import convert, write_source
from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT, DamagedError
from jfsdp.checkpoint.disk.reader import CheckpointSource
from jfsdp.checkpoint.source import cell_of, read_whole
from jfsdp.checkpoint.verify import verify
from tests.checkpoint.arrays import Arrays
from tests.refusals import refuses


def write(path, values, **options):
    write_source(path, Arrays(values), {"step": 7}, {LAYOUT: None, CONFIG: {"a": 1}, EXTRA: [5]}, **options)
    return path


def read(path):
    source = CheckpointSource(path)
    return {name: read_whole(source, name) for name in source.arrays}


def assert_same_bits(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name


def make_values(layers):
    """A state as a list of layers, `layers.0` of NNX or `h_0` of flax.linen, with Adam's."""
    rng, marks = np.random.default_rng(0), {"layers": ".", "h": "_"}
    values = {"step": np.int32(3).reshape(()), "params.norm.scale": rng.normal(size=5).astype(np.float32)}
    for tree in ("params", "opt_state.0.mu", "opt_state.0.nu"):
        for layer in range(11):  # two digits: 10 comes after 9, and not after 1
            values[f"{tree}.{layers}{marks[layers]}{layer}.up.kernel"] = rng.normal(size=(4, 6)).astype(np.float32)
            values[f"{tree}.{layers}{marks[layers]}{layer}.scale"] = rng.normal(size=4).astype(jnp.bfloat16)
    values["opt_state.0.count"] = np.int32(9).reshape(())
    return values


@pytest.mark.parametrize("layers", ["layers", "h"])
def test_layers_are_stacked_and_listed_again_bitwise_with_adams(layers, tmp_path):
    values = make_values(layers)
    listed = write(tmp_path / "listed", values)
    convert(listed, tmp_path / "stacked", stack=layers)
    stacked = read(tmp_path / "stacked")
    assert stacked[f"opt_state.0.nu.{layers}.up.kernel"].shape == (11, 4, 6)
    mark = "." if layers == "layers" else "_"
    last = values[f"opt_state.0.nu.{layers}{mark}10.up.kernel"]
    assert np.array_equal(stacked[f"opt_state.0.nu.{layers}.up.kernel"][10], last)
    convert(tmp_path / "stacked", tmp_path / "again", unstack=layers if layers == "layers" else "h_")
    assert_same_bits(read(tmp_path / "again"), values)


def test_what_stands_beside_the_arrays_comes_along_with_where_it_is_from(tmp_path):
    path = write(tmp_path / "a", make_values("layers"))
    convert(path, tmp_path / "b", casts=["bfloat16"])
    manifest = CheckpointSource(tmp_path / "b").manifest
    assert (manifest["step"], manifest["config"], manifest["extra"]) == (7, {"a": 1}, [5])
    assert manifest["converted"]["from"] == str(path) and manifest["converted"]["casts"] == ["bfloat16"]
    assert verify(tmp_path / "b").is_ok


def test_casts_take_parameters_or_what_a_glob_names_and_never_integers(tmp_path):
    values = make_values("layers")
    path = write(tmp_path / "a", values)
    convert(path, tmp_path / "b", casts=["bfloat16", "opt_state=float16", "params.norm=float32"])
    found = read(tmp_path / "b")
    assert {str(value.dtype) for name, value in found.items() if name.startswith("params.layers")} == {"bfloat16"}
    assert {str(value.dtype) for name, value in found.items() if ".mu." in name} == {"float16"}
    assert [str(found[name].dtype) for name in ("params.norm.scale", "step", "opt_state.0.count")] == [
        "float32",
        "int32",
        "int32",
    ]
    name = "opt_state.0.mu.layers.3.up.kernel"
    assert found[name].tobytes() == values[name].astype(np.float16).tobytes()


def test_what_is_damaged_is_not_converted_and_nothing_stays(tmp_path):
    path = write(tmp_path / "a", make_values("layers"))
    file = max((path / "arrays" / "params").rglob("*"), key=lambda file: file.stat().st_size if file.is_file() else 0)
    file.write_bytes(file.read_bytes()[:-1])
    refuses(lambda: convert(path, tmp_path / "b"), "damaged", "arrays/params", error=DamagedError)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a"]
    convert(path, tmp_path / "b", skip="params")
    convert(tmp_path / "b", tmp_path / "c", only="opt_state", skip="**.scale")
    assert {name.rpartition(".")[2] for name in read(tmp_path / "c")} == {"kernel", "count"}


def test_what_cannot_be_done_is_refused_before_anything_is_written(tmp_path):
    values = {"params.layers.0.up": np.ones((2, 3), np.float32), "params.layers.1.up": np.ones((2, 4), np.float32)}
    path = write(tmp_path / "a", values)
    refuses(lambda: convert(path, tmp_path / "b", stack="blocks"), "blocks.0 or blocks_0")
    refuses(lambda: convert(path, tmp_path / "b", unstack="blocks"), "blocks")
    refuses(lambda: convert(path, tmp_path / "b", stack="layers"), "params.layers.up")
    refuses(lambda: convert(path, tmp_path / "b", casts=["int4096"]), "'int4096'")
    assert not (tmp_path / "b").exists()


def test_what_takes_long_is_not_given_up(tmp_path, monkeypatch):
    """Orbax waits for 20 minutes unless it is told otherwise."""
    begin, now = time.time(), time.time

    class Slow(Arrays):
        def read(self, name, index):
            monkeypatch.setattr(time, "time", lambda: now() + 3600)
            threading.Event().wait(0.5)
            return super().read(name, index)

    values = {"params.w": np.ones(3, np.float32)}
    documents = {LAYOUT: None, CONFIG: None, EXTRA: [None]}
    write_source(tmp_path / "a", Slow(values), {"step": 7}, documents)
    assert time.time() - begin > 3600
    monkeypatch.undo()
    assert_same_bits(read(tmp_path / "a"), values)


def test_no_more_than_some_pieces_are_held_at_once(tmp_path, monkeypatch):
    """Python's share of what the bound states; TensorStore's own is measured by scripts/checkpoint_bench.py."""
    monkeypatch.setattr("jfsdp.checkpoint.convert.cell_of", lambda block, itemsize, **how: (1, *block[1:]))
    path = write(tmp_path / "a", {"params.layers.w": np.zeros((64, 1 << 18), np.float32)})
    tracemalloc.start()
    try:
        convert(path, tmp_path / "b", casts=["bfloat16"])
        assert tracemalloc.get_traced_memory()[1] < 24 << 20  # of 64 MiB
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("block", "shape", "cell"),
    [
        ((37, 2048, 8192), None, (1, 2048, 2048)),  # layers first, then squares
        ((37, 256, 8192), (37, 2048, 8192), (2, 256, 8192)),
        ((2048, 128256), None, (2048, 2004)),
        ((12, 50257), (24, 50257), (12, 50257)),
        ((1 << 23,), None, (1 << 22,)),
        ((3, 1 << 22), (9, 1 << 22), (3, 1 << 20)),
        ((9 << 20,), (18 << 20,), (9 << 18,)),  # a part of the array: divided without remainder
        ((), None, ()),
    ],
)
def test_cells_are_at_most_16_mib_layer_by_layer_and_square(block, shape, cell):
    found = cell_of(block, 4, shape=shape)
    assert found == cell
    assert math.prod(found) * 4 <= 16 << 20
