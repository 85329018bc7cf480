"""Casts while arrays are read: no value becomes an infinite one unseen, and integers are not made of fractions."""

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.checkpoint.convert import convert
from jfsdp.checkpoint.foreign.export import write_safetensors
from jfsdp.checkpoint.source import Recast, read_whole
from jfsdp.checkpoint.store import open_writer
from tests.checkpoint.arrays import Arrays
from tests.refusals import refuses, refusing
from tests.sharding import fully_shard


@pytest.mark.parametrize("wide", [np.float64, np.float32, ml_dtypes.bfloat16])
def test_a_value_beyond_the_range_is_refused_though_others_were_infinite_before(wide, tmp_path):
    values = np.asarray([1, -np.inf, np.nan, 1e30], wide)
    for narrow in (np.float16, ml_dtypes.float8_e4m3fn):
        source = Recast(Arrays({"x": values}), {"x": narrow})
        refuses(lambda source=source: read_whole(source, "x"), "x:", "1e+30")
    cast = read_whole(Recast(Arrays({"x": values[:3]}), {"x": np.float16}), "x")
    assert np.array_equal(cast, values[:3].astype(np.float16), equal_nan=True)
    export = lambda: write_safetensors(Arrays({"x": values[3:]}), tmp_path / "out", dtype="float16")  # noqa: E731
    refuses(export, "beyond the range of float16")


class Net(nnx.Module):
    def __init__(self, rngs, dtype="float32", value=1e30):
        self.w = nnx.Param(jnp.full((8, 8), value, dtype))


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    path = tmp_path_factory.mktemp("large") / "c"
    jfsdp.checkpoint.save(path, fully_shard(Net, min_size=4).init(optax.sgd(1.0)))
    return path


def test_weights_of_ours_are_not_cast_beyond_the_range(large, tmp_path):
    half = fully_shard(lambda rngs: Net(rngs, "float16", 1), min_size=4)
    with refusing("w:", "1e+30", "float16"):
        jfsdp.checkpoint.load_pretrained(large, half, optax.sgd(1.0))
    with refusing("params.w", "1e+30", "float16"):
        convert(large, tmp_path / "half", casts=["float16"])
    assert list(tmp_path.iterdir()) == []


def test_fractions_are_not_made_integers(large):
    whole = fully_shard(lambda rngs: Net(rngs, "int32", 1), min_size=4, frozen=["w"])
    with refusing("[8, 8]", "int32"):
        jfsdp.checkpoint.load_pretrained(large, whole, optax.sgd(1.0))


def test_a_target_that_another_one_writes_is_left_alone(large, tmp_path):
    with open_writer(tmp_path / "t"):
        (tmp_path / "t.jfsdp-tmp").mkdir()
        refuses(lambda: convert(large, tmp_path / "t"), tmp_path / "t", "is being written by process")
        assert (tmp_path / "t.jfsdp-tmp").exists()
    convert(large, tmp_path / "t")
    assert [path.name for path in tmp_path.iterdir()] == ["t"]
