"""Wire formats of leaves: which have one, how they are written, and formats that are refused."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest

import jfsdp
from jfsdp.engine.movements import ALL_TO_ALL, CALL, FORWARD, GATHER, LAST, REDUCE, SCATTER, movements
from jfsdp.layout.codec import power_of_two
from jfsdp.layout.lint import LayoutWarning, advise
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.layout.wire import Wire, as_wire, num_inside
from jfsdp.train.step.resolve import check_needs
from tests.models_small import Block, Tower, token_loss
from tests.refusals import refuses
from tests.sharding import fully_shard
from tests.steps import spec_of

MATRICES = {"blocks.up.kernel", "blocks.down.kernel"}


def shard(gather=None, reduce=None, *, mesh=None, dim=32, units=(Block,), param_dtype="bfloat16", **options):
    policy = options.pop("mp_policy", None) or jfsdp.MixedPrecisionPolicy(
        param_dtype, gather_wire=gather, reduce_wire=reduce
    )
    mesh = make_abstract_mesh(mesh or {"replica": 2, "fsdp": 4})
    return fully_shard(lambda rngs: Tower(rngs, dim=dim), mesh=mesh, units=units, mp_policy=policy, **options)


@pytest.mark.parametrize(
    ("text", "fields"),
    [
        ("float8", ("float8_e4m3fn", 0, "power_of_two", None)),
        ("int8", ("int8", 256, "bfloat16", None)),
        ("int8:64@node", ("int8", 64, "bfloat16", "node")),
        ("float8:128@8", ("float8_e4m3fn", 128, "power_of_two", 8)),
        (jnp.float8_e4m3fn, ("float8_e4m3fn", 0, "power_of_two", None)),
        (jnp.int8, ("int8", 256, "bfloat16", None)),
    ],
)
def test_a_format_is_a_dtype_or_short_text(text, fields):
    wire = as_wire("gather_wire", text)
    assert wire is not None
    assert (wire.dtype, wire.block, wire.scale, wire.between) == fields


def test_matrices_of_units_have_the_format_and_the_root_only_by_request():
    layout = shard("float8", "int8:32").layout
    assert {leaf.path for leaf in layout.leaves if leaf.gather_wire} == MATRICES
    assert {leaf.path for leaf in layout.leaves if leaf.reduce_wire} == MATRICES
    root = {"": {"mp_policy": jfsdp.MixedPrecisionPolicy(gather_wire="float8")}}
    layout = shard(units=(Block,), per_unit=root).layout
    assert {leaf.path for leaf in layout.leaves if leaf.gather_wire} == {"embed.embedding", "head.kernel"}


def test_adapters_have_no_format_and_a_short_last_dim_is_one_block():
    layout = shard("int8:64", lora=jfsdp.LoRA(rank=4, alpha=8, targets=["**.up.kernel"])).layout
    formats = {leaf.path: (leaf.gather_wire, leaf.reduce_wire) for leaf in layout.leaves if leaf.unit}
    assert formats["blocks.up.kernel.lora_a"] == formats["blocks.up.kernel.lora_b"] == (None, None)
    assert formats["blocks.up.kernel"] == (Wire("int8", 64), None)
    assert formats["blocks.down.kernel"] == (Wire("int8", 32), None)


def test_a_frozen_matrix_has_no_format_of_gradients():
    layout = shard("float8", "int8:32", frozen="**.up.kernel").layout
    assert {leaf.path for leaf in layout.leaves if leaf.gather_wire} == MATRICES
    assert {leaf.path for leaf in layout.leaves if leaf.reduce_wire} == {"blocks.down.kernel"}


def test_the_format_of_a_unit_replaces_the_models():
    layout = shard(
        "float8", per_unit={"blocks": {"mp_policy": jfsdp.MixedPrecisionPolicy(gather_wire="int8:32")}}
    ).layout
    assert {leaf.gather_wire.dtype for leaf in layout.leaves if leaf.gather_wire} == {"int8"}


@pytest.mark.parametrize(
    ("axes", "between", "inside"),
    [
        (("fsdp",), None, 1),
        (("fsdp",), 2, 2),
        (("fsdp",), 4, 4),
        (("fsdp",), 8, 4),
        (("replica",), 4, 1),
        (("replica",), 8, 2),
        (("replica", "fsdp"), 2, 2),
        (("replica", "fsdp"), 8, 8),
    ],
)
def test_neighbours_are_counted_from_the_inner_axis(axes, between, inside):
    assert num_inside({"replica": 4, "fsdp": 4, "context": 1}, axes, between) == inside


def bytes_of(layout, when, **step):
    """Bytes per matrix element of a layer stack, by kind, dtype and devices of a group."""
    found = {}
    for move in movements(layout, spec_of(layout, **step)):
        if move.leaf.path == "blocks.up.kernel" and move.when == when:
            key = move.kind, move.dtype, move.group_size
            found[key] = found.get(key, 0) + move.wire_bytes / np.prod(move.leaf.shape)
    return found


def test_bytes_of_gathers_are_those_of_codes_scales_and_levels():
    assert bytes_of(shard("float8").layout, FORWARD) == {(GATHER, "float8_e4m3fn", 4): 3 / 4}
    assert bytes_of(shard("int8:32").layout, FORWARD) == {
        (GATHER, "int8", 4): 3 / 4,
        (GATHER, "bfloat16", 4): 3 / 4 * 2 / 32,
    }
    between = bytes_of(shard("float8@4", mesh={"fsdp": 16}).layout, FORWARD)
    assert between == {(GATHER, "float8_e4m3fn", 4): 3 / 4 / 4, (GATHER, "bfloat16", 4): 3 / 4 * 2}


def test_bytes_of_reductions_are_those_of_exchanges_and_of_the_sums():
    reduced = bytes_of(shard(reduce="int8:32@4", mesh={"fsdp": 16}).layout, CALL)
    scales = 2 / 32
    assert reduced == {
        (SCATTER, "bfloat16", 4): 3 / 4 * 2,
        (ALL_TO_ALL, "int8", 4): 3 / 4 / 4,
        (ALL_TO_ALL, "bfloat16", 4): 3 / 4 / 4 * scales,
    }
    hybrid = shard(reduce="int8:32@4").layout
    assert bytes_of(hybrid, CALL, accumulate=2) == {(SCATTER, "bfloat16", 4): 2 * 3 / 4 * 2}
    assert bytes_of(hybrid, LAST, accumulate=2) == {
        (ALL_TO_ALL, "int8", 2): 1 / 2 / 4,
        (ALL_TO_ALL, "bfloat16", 2): 1 / 2 / 4 * scales,
        (GATHER, "bfloat16", 2): 1 / 2 / 4 * 2,
    }
    assert all(kind != REDUCE for kind, _, _ in bytes_of(hybrid, LAST, accumulate=2))


def test_without_gathers_a_format_only_rounds_and_is_warned_of():
    with pytest.warns(LayoutWarning, match="blocks.down.kernel"):
        shard("float8", strategy="ddp", mesh={"fsdp": 4})
    assert not [text for text in advise(shard("float8").layout) if "float8" in text]


REFUSED = [
    (lambda: Wire("float4"), "float4", "float8", "int8"),
    (lambda: Wire("int8", scale="float32"), "float32", "power_of_two", "bfloat16"),
    (lambda: Wire("int8", between="rack"), "rack", "node"),
    (lambda: jfsdp.MixedPrecisionPolicy(gather_wire="int9"), "gather_wire", "int9"),
    (lambda: jfsdp.MixedPrecisionPolicy(reduce_wire="float8"), "reduce_wire", "block=256"),
    (lambda: jfsdp.MixedPrecisionPolicy("bfloat16", "float32", reduce_wire="int8"), "reduce_wire", "reduce_dtype"),
    (lambda: shard("int8", dim=96), "blocks.up.kernel", "dim 2", "384", "256", "block=128", "gather_wire"),
    (lambda: Wire("int8", block=0), "int8", "block=0", "block=256"),
    (lambda: shard(reduce="int8:24"), "blocks.down.kernel", "dim 2", "32", "24", "block=8", "reduce_wire"),
    (
        lambda: shard("int8:32", shard_dim=lambda path, shape: -1 if "up" in path else None, mesh={"fsdp": 8}),
        "16",
        "block=16",
    ),
    (
        lambda: shard("int8:128", cuts={"**.up.kernel": (1, "tensor")}, mesh={"fsdp": 1, "tensor": 8}, dim=128),
        "up.kernel",
        "block=64",
    ),
    (lambda: shard("float8", units=()), "gather_wire", "per_unit"),
    (lambda: shard("float8", storage="flat"), "flat", "per_parameter", "blocks"),
    (lambda: shard("float8@3", mesh={"fsdp": 8}), "between=3", "fsdp", "8"),
    (lambda: shard("float8@node"), "gather_wire", "node", "between=n"),
    (lambda: shard("float8", frozen="**", quantized={"**.up.kernel": "int8"}, dim=64), "up.kernel", "gather_wire"),
]


@pytest.mark.parametrize("row", REFUSED)
def test_formats_that_do_not_fit_are_refused(row):
    call, *facts = row
    refuses(call, *facts)


def test_program_xla_has_no_formats_of_gradients_and_no_levels():
    for options in ({"reduce": "int8:32"}, {"gather": "float8@2"}):
        model = shard(options.get("gather"), options.get("reduce"))
        (need,) = check_needs(model.layout, model.train_step(token_loss, optax.sgd(0.1)).config)
        assert need.startswith(f"{next(iter(options))}_wire=")


@pytest.mark.parametrize("top", [127, 448])
def test_scales_are_the_smallest_powers_of_two_that_fit(top):
    amax = np.float32(top) * np.float32(2.0) ** np.arange(-20, 20, dtype=np.float32)
    amax = np.concatenate([amax, amax * np.float32(1.0001), [0.0]]).astype(np.float32)
    expected = np.concatenate([2.0 ** np.arange(-20, 20), 2.0 ** np.arange(-19, 21), [1]])
    for xp in (np, jnp):
        np.testing.assert_array_equal(np.asarray(power_of_two(xp.asarray(amax), top, xp)), expected)
    assert not np.isfinite(np.asarray(power_of_two(jnp.asarray([np.inf, np.nan]), top))).any()


def test_decoded_values_have_the_same_codes_again():
    values = np.random.default_rng(0).normal(size=(3, 64, 128)).astype(np.float32)
    codec = Wire("float8").codec
    scales = codec.to_scales(jnp.abs(values).max((1, 2)))
    codes, _ = codec.encode(jnp.asarray(values), scales=scales)
    there = codec.decode(codes, scales, jnp.bfloat16)
    again, _ = codec.encode(there, scales=codec.to_scales(jnp.abs(there).max((1, 2)).astype(jnp.float32)))
    np.testing.assert_array_equal(np.asarray(codes).view(np.uint8), np.asarray(again).view(np.uint8))
    assert codes.dtype == ml_dtypes.float8_e4m3fn


@pytest.mark.parametrize(
    "wire", [Wire("float8"), Wire("int8", 32), Wire("float8", 32), Wire("int8", 32, "power_of_two")]
)
def test_values_that_are_not_finite_are_counted_and_stay_so(wire):
    values = np.ones((8, 64), np.float32)
    values[3, 5], values[4, 40] = np.inf, np.nan
    codec = wire.codec
    scales = None if wire.block else codec.to_scales(jnp.abs(values).max())
    codes, scales = codec.encode(jnp.asarray(values), scales=scales)
    found = np.asarray(codec.decode(codes, scales, jnp.float32))
    assert not np.isfinite(found[3, 5]) and not np.isfinite(found[4, 40])
    assert codec.rounding(jnp.asarray(values), codes, scales)[2] >= 2
    finite = jax.random.normal(jax.random.key(0), (8, 64)) * 1e3
    coded = codec.encode(finite, scales=None if wire.block else codec.to_scales(jnp.abs(finite).max()))
    assert codec.rounding(finite, *coded)[2] == 0
