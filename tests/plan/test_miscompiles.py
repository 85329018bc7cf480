"""Known miscompiles: each is compiled where the installed JAX has it, else a fragment of a program states it."""

import functools

import jax
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.miscompiles import MISCOMPILES, find_miscompiles
from tests import hlo

ELSEWHERE = {"wrong-slice": "test_slices.py", "product-dtype": "test_formats.py", "rematerialized": "test_audit.py"}


@functools.cache
def mesh():
    return Mesh(hlo.h100s(1), "fsdp")


def compiled(fn, *shapes):
    """Compile `fn`, mapped over 8 devices with one row each, for H100s."""
    specs = {"in_specs": PartitionSpec("fsdp"), "out_specs": PartitionSpec("fsdp"), "check_vma": False}
    mapped = jax.shard_map(fn, mesh=mesh(), **specs)
    sharding = NamedSharding(mesh(), PartitionSpec("fsdp"))
    given = [jax.ShapeDtypeStruct((8, *shape), dtype, sharding=sharding) for shape, dtype in shapes]
    return parse_module(jax.jit(mapped).lower(*given).compile().as_text() or "")


def names(module, jaxpr=None):
    return [found.trap for found in find_miscompiles(module, jaxpr)]


@pytest.mark.parametrize(("dtype", "wanted"), [("float8_e4m3fn", ["narrow-sum"]), ("bfloat16", [])])
def test_sums_in_8_bits(dtype, wanted):
    scatter = functools.partial(jax.lax.psum_scatter, axis_name="fsdp", scatter_dimension=1, tiled=True)
    assert names(compiled(scatter, ((1024, 1024), dtype))) == wanted


def test_gathers_of_8_bits_are_no_sums():
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", axis=1, tiled=True)
    assert names(compiled(gather, ((1024, 1024), "float8_e4m3fn"))) == []


def test_collectives_in_a_branch():
    def branch(x):
        total = lambda x: jax.lax.psum(x * 2, "fsdp")  # noqa: E731
        return jax.lax.cond(x.sum() > 0, total, lambda x: x, x)

    (found,) = find_miscompiles(compiled(branch, ((1024, 1024), "float32")))
    assert found.trap == "branch" and "all-reduce" in found.message


def attention(query, key, value, *, use):
    options = {"implementation": "cudnn", "return_residual": True}
    if use == "none":
        return jax.nn.dot_product_attention(query, key, value, **options)[0].sum()
    output, statistics = jax.nn.dot_product_attention(query, key, value, **options)
    if use == "logged":
        return output.sum(), jax.lax.stop_gradient(statistics).max()
    return (output * jax.nn.sigmoid(statistics)[..., None]).sum()


@pytest.mark.parametrize(("use", "wanted"), [("merged", ["dropped-gradient"]), ("none", []), ("logged", [])])
def test_statistics_of_cudnn_whose_derivative_is_dropped(use, wanted):
    device = hlo.h100s(1)[0]
    shapes = [jax.ShapeDtypeStruct((2, 256, 4, 64), "bfloat16", sharding=jax.sharding.SingleDeviceSharding(device))] * 3
    with jax.default_device(device):
        gradient = jax.grad(functools.partial(attention, use=use), (0, 1, 2), has_aux=use == "logged")
        traced = jax.jit(gradient).trace(*shapes)
    empty = parse_module("HloModule m, is_scheduled=true\nENTRY %main () -> f32[] {\n  ROOT %c = f32[] constant(0)\n}")
    assert names(empty, traced.jaxpr.jaxpr) == wanted


RAGGED = """HloModule m, is_scheduled=true, num_partitions=8
%body (p: f32[8], s: s64[8]) -> f32[8] {
  %p = f32[8]{0} parameter(0)
  %s = s64[8]{0} parameter(1)
  ROOT %r = f32[8]{0} ragged-all-to-all(%p, %p, %s, %s, %s, %s), replica_groups={{0,1,2,3,4,5,6,7}}
}
ENTRY %main (x: f32[8], n: s64[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %n = s64[8]{0} parameter(1)
  %start = ((f32[8], s64[8]), f32[8]) async-start(%x, %n), calls=%body
  %y = f32[8]{0} add(%x, %x)
  %done = f32[8]{0} async-done(%start)
  ROOT %z = f32[8]{0} add(%done, %y)
}
"""


def test_a_ragged_all_to_all_that_overlaps():
    assert names(parse_module(RAGGED)) == ["ragged-overlap"]
    alone = RAGGED.replace("  %y = f32[8]{0} add(%x, %x)\n", "").replace("%done, %y", "%done, %done")
    assert names(parse_module(alone)) == []


def test_every_miscompile_has_a_test():
    here = {"narrow-sum", "branch", "dropped-gradient", "ragged-overlap"}
    assert here | ELSEWHERE.keys() == {one.name for one in MISCOMPILES}
