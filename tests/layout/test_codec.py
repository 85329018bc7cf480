"""Codecs: what a code stands for, on the device and on the host, and which leaves can have one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfsdp
from jfsdp.layout.codec import CODECS
from jfsdp.layout.layout import num_parameters
from tests.models_small import Block, Tower
from tests.sharding import fully_shard

RNG = np.random.default_rng(0)
VALUES = {
    "normal": RNG.normal(size=(3, 5, 128)).astype(np.float32),
    "zero": np.zeros((2, 64), np.float32),
    "one large": np.where(np.arange(64) == 7, 1e4, 1e-4)[None].astype(np.float32),
    "bfloat16": np.asarray(jnp.asarray(RNG.normal(size=(4, 192)), jnp.bfloat16)),
}


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", VALUES)
def test_codes_are_the_same_bits_on_device_and_host_and_of_the_stated_size(name, kind):
    codec, values = CODECS[name], VALUES[kind]
    here, there = codec.encode(jnp.asarray(values)), codec.encode(values, np)
    for one, other, shape in zip(here, there, (codec.code_shape, codec.scale_shape), strict=True):
        assert one.shape == shape(values.shape)
        np.testing.assert_array_equal(np.asarray(one), other)
    assert here[0].dtype == codec.dtype
    bits = 8 * sum(x.size * x.dtype.itemsize for x in here) / values.size
    assert bits == codec.bits + 16 / codec.block


@pytest.mark.parametrize("name", CODECS)
@pytest.mark.parametrize("kind", VALUES)
def test_no_value_is_off_by_more_than_half_a_level(name, kind):
    codec, values = CODECS[name], VALUES[kind].astype(np.float32)
    codes, scales = codec.encode(jnp.asarray(values))
    found = np.asarray(codec.decode(codes, scales.astype(jnp.float32)))
    scale = np.repeat(np.asarray(scales, np.float32), codec.block, -1)
    levels = np.asarray(codec.levels or np.arange(-127, 128) / 127)
    widest = np.diff(levels).max() / 2
    assert (np.abs(found - values) <= scale * (widest + 2**-8)).all(), "and the rounding of the scale"


@pytest.mark.parametrize("name", CODECS)
def test_what_was_decoded_has_the_same_codes_again(name):
    codec = CODECS[name]
    first = codec.encode(jnp.asarray(VALUES["normal"]))
    again = codec.encode(codec.decode(first[0], first[1].astype(jnp.float32)))
    np.testing.assert_array_equal(codec.decode(*first), codec.decode(*again))


def shard(quantized, **options):
    mesh = jfsdp.make_mesh(fsdp=4, devices=jax.devices()[:4])
    given = {"units": [Block], "frozen": "**", "min_size": 0} | options
    return fully_shard(lambda rngs: Tower(rngs, dim=64), mesh=mesh, quantized=quantized, **given)


def test_codes_and_scales_are_leaves_that_nobody_trains():
    layout = shard({"**.up.kernel": "nf4"}).layout
    codes, scales = (layout.by_path[f"blocks.up.kernel{end}"] for end in ("", ".scales"))
    assert (codes.shape, codes.dtype, scales.shape, scales.dtype) == ((3, 64, 128), "uint8", (3, 64, 4), "bfloat16")
    assert not codes.trainable
    assert not scales.trainable
    assert codes.dim == scales.dim
    assert "nf4" in codes.reason
    assert num_parameters(layout.leaves) == num_parameters(shard(None).layout.leaves)


@pytest.mark.parametrize(
    ("quantized", "options", "message"),
    [
        ({"**.up.kernel": "fp3"}, {}, r"codec 'fp3' is unknown; the codecs are nf4"),
        ({"**.up.bias": "nf4"}, {}, r"up\.bias: .* not a floating-point matrix"),
        ({"head.kernel": "nf4"}, {}, r"head\.kernel: dim 1 \(size 37\) is not a multiple of 64"),
        ({"**.nothing": "nf4"}, {}, "matches no parameter"),
        ({"**.up.kernel": "nf4", "blocks.**": "int8"}, {}, "differ|not a floating-point matrix"),
        ({"**.up.kernel": "nf4"}, {"frozen": "embed"}, r"up\.kernel: is quantized, but codes cannot be trained"),
    ],
)
def test_what_cannot_be_coded_is_refused_by_name(quantized, options, message):
    with pytest.raises(ValueError, match=message):
        shard(quantized, **options)
