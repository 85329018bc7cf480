"""Safetensors files read by slices and written in pieces, against the library's own reader and writer."""

import functools
import json
import os
import shutil
import tracemalloc
from typing import Any

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from jfsdp.checkpoint.foreign import export
from jfsdp.checkpoint.foreign.export import write_safetensors
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.source import read_whole
from tests.checkpoint.arrays import Arrays
from tests.refusals import refuses, refusing

SHAPES = {
    "scalar": (),
    "vector": (7,),
    "matrix": (5, 9),
    "wide": (12, 3000),
    "stack": (3, 4, 5),
    "four": (2, 3, 4, 5),
    "empty": (0, 4),
}


def make_arrays(dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    return {name: np.asarray(rng.integers(0, 100, shape)).astype(dtype) for name, shape in SHAPES.items()}


def make_file(path, dtype: Any = "float32"):
    arrays = make_arrays(dtype)
    safetensors.numpy.save_file(arrays, path)
    return arrays


def some_slices(shape, rng):
    bounds = [sorted(rng.integers(0, size + 1, 2)) for size in shape]
    return tuple(slice(0, size) if rng.random() < 0.3 else slice(int(a), int(b)) for (a, b), size in zip(bounds, shape))


@pytest.fixture
def bytes_read(monkeypatch):
    """How many bytes each read from a file took."""
    counts = []

    def preadv(fd, buffers, offset):
        count = real(fd, buffers, offset)
        counts.append(count)
        return count

    real = os.preadv
    monkeypatch.setattr(os, "preadv", preadv)
    return counts


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "int64", "bool"])
def test_any_slice_is_what_numpy_cuts(tmp_path, dtype):
    arrays = make_file(tmp_path / "x.safetensors", np.dtype(getattr(ml_dtypes, dtype, dtype)))
    source, rng = SafetensorsSource(tmp_path / "x.safetensors"), np.random.default_rng(1)
    assert set(source.arrays) == set(arrays)
    for name, array in arrays.items():
        assert (source.arrays[name].shape, source.arrays[name].dtype) == (array.shape, array.dtype)
        for _ in range(30):
            index = some_slices(array.shape, rng)
            part = source.read(name, index)
            assert part.dtype == array.dtype and part.shape == array[index].shape
            assert part.tobytes() == array[index].tobytes()


def test_a_slice_of_leading_dims_is_one_read_of_its_bytes(tmp_path, bytes_read):
    make_file(tmp_path / "x.safetensors")
    source = SafetensorsSource(tmp_path / "x.safetensors")
    assert bytes_read == []
    source.read("four", (slice(1, 2), slice(0, 3), slice(0, 4), slice(0, 5)))
    source.read("wide", (slice(3, 7), slice(0, 3000)))
    assert bytes_read == [60 * 4, 4 * 3000 * 4]


def test_an_index_joins_its_files(tmp_path):
    """An array that it does not name is there, and none of another file than it says."""
    files = {name: {name: np.arange(6.0), "inv_freq": np.zeros(3)} for name in ("one", "two")}
    for name, arrays in files.items():
        safetensors.numpy.save_file(arrays, tmp_path / f"{name}.safetensors")
    index, named = tmp_path / "model.safetensors.index.json", {name: f"{name}.safetensors" for name in files}
    index.write_text(json.dumps({"weight_map": named}))
    for path in (tmp_path, index):
        source = SafetensorsSource(path)
        assert set(source.arrays) == {"one", "two", "inv_freq"}
        assert all(np.array_equal(read_whole(source, name), files[name][name]) for name in files)
    index.write_text(json.dumps({"weight_map": named | {"inv_freq": "one.safetensors"}}))
    refuses(lambda: SafetensorsSource(tmp_path), "two.safetensors", "inv_freq")


def make_index(directory, weight_map):
    safetensors.numpy.save_file({"a": np.zeros(3)}, directory / "one.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def test_an_index_that_does_not_fit_its_files_is_refused(tmp_path):
    for weight_map, facts in (
        ({"a": "one.safetensors", "b": "two.safetensors"}, ["index.json", "two.safetensors"]),
        ({"a": "one.safetensors", "b": "one.safetensors"}, ["one.safetensors", "missing: b"]),
        ({}, []),
        ("no dict", ["index"]),
        ({"a": "../one.safetensors"}, ["'../one.safetensors'"]),
        ({"a": "/etc/passwd"}, ["'/etc/passwd'"]),
        ({"a": 7}, ["7"]),
    ):
        make_index(tmp_path, weight_map)
        refuses(lambda: SafetensorsSource(tmp_path), *facts)


def test_the_links_of_a_cache_are_followed(tmp_path):
    """Hugging Face keeps files by their digest, and links to them: the name is inside, and what it links to is not."""
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "main"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    make_index(blobs, {"a": "one.safetensors"})
    for file in blobs.iterdir():
        (snapshot / file.name).symlink_to(f"../../blobs/{file.name}")
    assert list(SafetensorsSource(snapshot).arrays) == ["a"]


HEADER = (1 << 60).to_bytes(8, "little")
HARM = {
    "cut off": lambda data: data[:-10],
    "cut off at 0 bytes": lambda data: b"",
    "damaged": lambda data: data[:8] + b"?" + data[9:],
    "damaged:": lambda data: HEADER + data[8:],
    "Git LFS": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n",
}


def test_a_damaged_file_is_refused_by_its_path(tmp_path):
    path = tmp_path / "model.safetensors"
    make_file(path)
    whole, source = path.read_bytes(), SafetensorsSource(tmp_path)
    for fact, harm in HARM.items():
        path.write_bytes(harm(whole))
        refuses(lambda: SafetensorsSource(tmp_path), path, fact.strip(":"))
    path.write_bytes(whole[:1000])
    refuses(lambda: read_whole(source, "wide"), path, "ended at byte")


def test_a_directory_without_weights_is_refused_with_what_is_there(tmp_path):
    with refusing(tmp_path, "model.safetensors"):
        SafetensorsSource(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    refuses(lambda: SafetensorsSource(tmp_path), "pytorch_model.bin")
    refuses(lambda: SafetensorsSource(tmp_path / "nowhere"), tmp_path / "nowhere")


def test_what_is_written_the_library_reads(tmp_path):
    arrays = make_arrays() | {"half": np.ones((3, 5), np.float16), "count": np.arange(3)}
    written = write_safetensors(Arrays(arrays), tmp_path / "out", config={"model_type": "mine"})
    assert (written.directory, written.files) == (tmp_path / "out", ("model.safetensors",))
    assert (written.num_arrays, written.total_bytes) == (len(arrays), sum(x.nbytes for x in arrays.values()))
    there = safetensors.numpy.load_file(tmp_path / "out" / "model.safetensors")
    assert {name: x.dtype for name, x in there.items()} == {name: x.dtype for name, x in arrays.items()}
    assert all(np.array_equal(there[name], arrays[name]) for name in arrays)
    with safetensors.safe_open(tmp_path / "out" / "model.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "pt"}
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {"model_type": "mine"}
    assert sorted(os.listdir(tmp_path)) == ["out"]


def test_no_file_exceeds_the_limit_but_for_an_array_that_does(tmp_path):
    arrays = {f"x{i}": np.full((i + 1, 100), i, np.float32) for i in range(8)}
    written = write_safetensors(Arrays(arrays), tmp_path / "out", max_shard_bytes=1300)
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == written.total_bytes == 36 * 400
    assert set(index["weight_map"].values()) == set(written.files)
    assert written.files[0] == f"model-00001-of-{len(written.files):05d}.safetensors"
    for file in written.files:
        held = [arrays[name].nbytes for name in index["weight_map"] if index["weight_map"][name] == file]
        assert sum(held) <= 1300 or len(held) == 1
    source = SafetensorsSource(tmp_path / "out")
    assert all(np.array_equal(read_whole(source, name), arrays[name]) for name in arrays)


def test_a_dtype_changes_floating_arrays_alone(tmp_path):
    arrays = {"w": np.random.default_rng(0).normal(size=(5, 6)).astype(np.float32), "count": np.arange(3)}
    for dtype in ("float32", "bfloat16", "float16"):
        write_safetensors(Arrays(arrays), tmp_path / dtype, dtype=dtype, config={})
        source, target = SafetensorsSource(tmp_path / dtype), np.dtype(getattr(ml_dtypes, dtype, dtype))
        assert source.arrays["w"].dtype == target and source.arrays["count"].dtype == np.int64
        assert np.array_equal(read_whole(source, "w"), arrays["w"].astype(target))
        assert json.loads((tmp_path / dtype / "config.json").read_text()) == {"torch_dtype": dtype}


def test_a_value_beyond_the_range_is_refused_and_nothing_stays(tmp_path):
    arrays = {"a": np.zeros(3, np.float32), "w": np.full((2, 2), 1e5, np.float32)}
    with refusing("w:", "1e+05", "float16"):
        write_safetensors(Arrays(arrays), tmp_path / "out", dtype="float16")
    assert os.listdir(tmp_path) == []
    arrays["w"][0, 0] = np.inf
    infinite = Arrays({"w": np.full(2, np.inf, np.float32)})
    assert write_safetensors(infinite, tmp_path / "out", dtype="float16", allow_nonfinite=True).nonfinite


def test_what_cannot_be_written_is_refused_and_nothing_is_overwritten(tmp_path, monkeypatch):
    out, counts = tmp_path / "out", {"counts": np.zeros(2, np.int32)}
    for arrays, options, facts in (
        ({"w": np.zeros(2, np.complex64)}, {}, ["w:", "complex64"]),
        (make_arrays(), {"dtype": "int8"}, ["'int8'"]),
        (counts, {"dtype": "int4096"}, ["'int4096'"]),
        (make_arrays(), {"max_shard_bytes": 0}, ["max_shard_bytes=0"]),
    ):
        refuses(functools.partial(write_safetensors, Arrays(arrays), out, **options), *facts)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(100, 90, 10))
    refuses(
        lambda: write_safetensors(Arrays(make_arrays()), tmp_path / "new" / "out"), "1,196,406", "10", error=OSError
    )
    assert os.listdir(tmp_path) == []
    out.mkdir()
    refuses(lambda: write_safetensors(Arrays(make_arrays()), out), out, "exists")
    assert os.listdir(out) == []


@pytest.mark.parametrize(
    ("given", "written", "size"), [("float32", "bfloat16", 2 + 1 / 2), ("float8_e4m3fn", "float32", 1 + 1)]
)
def test_an_export_holds_no_more_than_it_says(given, written, size, monkeypatch, tmp_path):
    values = np.zeros((1 << 16, 64), jax.numpy.dtype(given)).T  # as of a matrix that is stored the other way around
    source, piece_bytes = Arrays({"w": values, "b": np.zeros(10, np.float32)}), 1 << 20
    assert export.PIECE_BYTES == 1 << 25
    monkeypatch.setattr(export, "PIECE_BYTES", piece_bytes)
    bound = 3 * size * piece_bytes  # one is written while two are read
    assert bound <= export.MEMORY_BYTES / 32
    tracemalloc.start()
    try:
        write_safetensors(source, tmp_path / "out", dtype=written)
        assert tracemalloc.get_traced_memory()[1] < bound + 200_000
    finally:
        tracemalloc.stop()
    assert source.most_bytes <= piece_bytes
