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
from jfsdp.checkpoint.source import cell_of
from jfsdp.checkpoint.verify import verify
from tests.checkpoint.arrays import Arrays, arrays_of, assert_same_bits
from tests.refusals import refuses


def write(path, values, **options):
    write_source(path, Arrays(values), {"step": 7}, {LAYOUT: None, CONFIG: {"a": 1}, EXTRA: [5]}, **options)
    return path


def read(path):
    return arrays_of(CheckpointSource(path))


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


@pytest.mark.parametrize(("layers", "mark"), [("layers", "."), ("h", "_")])
def test_layers_are_stacked_and_listed_again_bitwise_with_adams(layers, mark, tmp_path):
    values = make_values(layers)
    convert(write(tmp_path / "listed", values), tmp_path / "stacked", stack=layers)
    stack = read(tmp_path / "stacked")[f"opt_state.0.nu.{layers}.up.kernel"]
    assert stack.shape == (11, 4, 6)
    assert np.array_equal(stack[10], values[f"opt_state.0.nu.{layers}{mark}10.up.kernel"])
    convert(tmp_path / "stacked", tmp_path / "again", unstack=layers if mark == "." else "h_")
    assert_same_bits(read(tmp_path / "again"), values)


def test_casts_take_parameters_or_what_a_glob_names_and_never_integers(tmp_path):
    values = make_values("layers")
    path = write(tmp_path / "a", values)
    convert(path, tmp_path / "b", casts=["bfloat16", "opt_state=float16", "params.norm=float32"])
    found = read(tmp_path / "b")
    dtypes = {name: str(value.dtype) for name, value in found.items()}
    assert {dtype for name, dtype in dtypes.items() if name.startswith("params.layers")} == {"bfloat16"}
    assert {dtype for name, dtype in dtypes.items() if ".mu." in name} == {"float16"}
    assert (dtypes["params.norm.scale"], dtypes["step"], dtypes["opt_state.0.count"]) == ("float32", "int32", "int32")
    name = "opt_state.0.mu.layers.3.up.kernel"
    assert found[name].tobytes() == values[name].astype(np.float16).tobytes()
    manifest = CheckpointSource(tmp_path / "b").manifest
    assert (manifest["step"], manifest["config"], manifest["extra"]) == (7, {"a": 1}, [5])
    assert manifest["converted"]["from"] == str(path) and "bfloat16" in manifest["converted"]["casts"]
    assert verify(tmp_path / "b").is_ok


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
    refuses(lambda: convert(path, tmp_path / "b", stack="layers"), "params.layers.up")
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
    monkeypatch.setattr("jfsdp.checkpoint.source.cell_of", lambda block, itemsize, **how: (1, *block[1:]))
    path = write(tmp_path / "a", {"params.layers.w": np.zeros((64, 1 << 18), np.float32)})
    tracemalloc.start()
    try:
        convert(path, tmp_path / "b", casts=["bfloat16"])
        assert tracemalloc.get_traced_memory()[1] < 24 << 20  # of 64 MiB
    finally:
        tracemalloc.stop()


def test_cells_are_at_most_16_mib_layer_by_layer_and_square():
    for block, shape, cell in (
        ((37, 2048, 8192), None, (1, 2048, 2048)),  # layers first, then squares
        ((37, 256, 8192), (37, 2048, 8192), (2, 256, 8192)),
        ((2048, 128256), None, (2048, 2004)),
        ((12, 50257), (24, 50257), (12, 50257)),
        ((3, 1 << 22), (9, 1 << 22), (3, 1 << 20)),
        ((9 << 20,), (18 << 20,), (9 << 18,)),  # a part of the array: divided without remainder
        ((), None, ()),
    ):
        assert cell_of(block, 4, shape=shape) == cell
        assert math.prod(cell) * 4 <= 16 << 20
