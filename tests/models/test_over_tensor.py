"""Values that the models split over mesh axis `tensor`: only where a mesh in context has it."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jfsdp
from examples import vit
from jfsdp.jaxprs import all_eqns
from jfsdp_models import gpt2, llama  # pyright: ignore[reportMissingImports]
from jfsdp_models.over_tensor import (  # pyright: ignore[reportMissingImports] (installed as an import hook)
    by_heads,
    fused_heads,
    over_tensor,
    split_tokens,
    whole_rows,
)
from tests.refusals import refusing
from tests.sharding import fully_shard

FREE = PartitionSpec.UNCONSTRAINED
STATED = {split_tokens: PartitionSpec(FREE, "tensor", FREE), whole_rows: PartitionSpec(FREE, None, FREE)}
HEADS = jnp.arange(4 * 3 * 4 * 5.0).reshape(4, 3, 4, 5)
MASK = jnp.ones((4, 1, 3, 3), bool)


def mesh(tensor):
    return jfsdp.make_mesh(fsdp=-1, tensor=tensor)


def attend(query, key, value, mask):
    return jax.nn.dot_product_attention(query, key, value, mask=mask)


def test_without_a_mesh_nothing_is_stated():
    assert over_tensor(HEADS, 2) is HEADS
    with jax.sharding.use_abstract_mesh(mesh(1).abstract_mesh):
        assert over_tensor(HEADS, 2) is HEADS


def test_the_dim_is_split_and_others_are_left_to_the_compiler():
    with jax.sharding.use_abstract_mesh(mesh(2).abstract_mesh):
        jaxpr = jax.make_jaxpr(lambda x: over_tensor(x, -2))(HEADS)
    stated = jaxpr.eqns[0].params
    assert stated["sharding"].spec[2] == "tensor"
    assert stated["unconstrained_dims"] == {0, 1, 3}


def test_a_dim_that_does_not_divide_is_refused_with_a_remedy():
    with jax.sharding.use_abstract_mesh(mesh(2).abstract_mesh), refusing("dim 1", "size 3", "'tensor'"):
        over_tensor(HEADS, 1)


@pytest.mark.parametrize("state", STATED)
def test_tokens_are_split_and_whole_where_the_axis_is(state):
    """And their gradients the other way round."""
    (split, whole), x = (STATED[state], STATED[({*STATED} - {state}).pop()]), jnp.ones((2, 6, 4))
    assert specs(state, x, 2) == [split]
    assert specs(jax.grad(lambda x: state(x).sum()), x, 2) == [split, whole]


@pytest.mark.parametrize("state", STATED)
@pytest.mark.parametrize(("length", "tensor"), [(6, 1), (5, 2), (6, 4)])
def test_rows_stay_where_there_is_no_axis_or_it_does_not_divide_their_length(state, length, tensor):
    x = jnp.ones((2, length, 4))
    assert state(x) is x
    with jax.sharding.use_abstract_mesh(mesh(tensor).abstract_mesh):
        assert state(x) is x


def specs(body, x, tensor):
    """Return what a program states of its values, in its order."""
    with jax.sharding.use_abstract_mesh(mesh(tensor).abstract_mesh):
        eqns = all_eqns(jax.make_jaxpr(body)(x).jaxpr)
    stated = [eqn.params for eqn in eqns if eqn.primitive.name == "sharding_constraint"]
    return [
        PartitionSpec(
            *(FREE if dim in found["unconstrained_dims"] else found["sharding"].spec[dim] for dim in range(3))
        )
        for found in stated
    ]


def test_a_fused_kernel_is_taken_apart_by_heads():
    """A device's part of it has other columns than those of its heads."""
    rng = np.random.default_rng(0)
    x, kernel, bias = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((4, 3, 8), (8, 24), (24,)))
    wanted = [part.reshape(4, 3, 4, 2) for part in jnp.split(x @ kernel + bias, 3, axis=-1)]
    cut = jax.NamedSharding(mesh(2), PartitionSpec(None, "tensor"))
    with jax.set_mesh(mesh(2)):
        found = jax.jit(fused_heads, static_argnums=3)(x, jax.device_put(kernel, cut), bias, 4)
    for part, other in zip(found, wanted, strict=True):
        assert part.sharding.shard_shape(part.shape)[2] == 2
        np.testing.assert_allclose(part, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("mask", [None, MASK])
def test_attention_by_heads_is_attention(mask):
    rows = PartitionSpec("fsdp")

    def local(heads, mask):
        return by_heads(attend, heads, heads, heads, documents=mask)

    specs = (rows, None if mask is None else rows)
    names = {"pipe", "replica", "fsdp"}
    run = jax.shard_map(local, mesh=mesh(2), in_specs=specs, out_specs=rows, axis_names=names, check_vma=False)
    np.testing.assert_allclose(jax.jit(run)(HEADS, mask), attend(HEADS, HEADS, HEADS, mask), rtol=1e-5)


@pytest.mark.parametrize(("sizes", "is_written_out"), [({"tensor": 4}, True), ({"fsdp": 2, "tensor": 2}, False)])
def test_attention_is_written_out_where_no_other_axis_splits_anything(sizes, is_written_out):
    devices = jax.devices()[:4]
    with jax.set_mesh(jfsdp.make_mesh(devices=devices, **({"fsdp": 1} | sizes))):
        run = lambda x, mask: by_heads(attend, x, x, x, documents=mask)  # noqa: E731
        jaxpr = jax.make_jaxpr(run)(HEADS, MASK).jaxpr
        found = jax.jit(run)(HEADS, MASK)
    assert any(eqn.primitive.name == "shard_map" for eqn in all_eqns(jaxpr)) == is_written_out
    np.testing.assert_allclose(found, attend(HEADS, HEADS, HEADS, MASK), rtol=1e-5)


WHOLE = {
    "gpt2": {"wte.embedding", "wpe.embedding"},  # 50257 words
    "gpt2-tiny": {"wpe.embedding"},
    "vit": {"embed.patch.kernel", "head.kernel"},
    "llama-tiny": set(),
}


@pytest.mark.filterwarnings("ignore:mesh axis .tensor. .* repeats")
@pytest.mark.parametrize("name", WHOLE)
def test_the_jobs_cut_all_kernels_of_their_layers(name):
    job = (llama.JOBS | gpt2.JOBS | {"vit": dataclasses.asdict(vit.job())})[name]
    leaves = fully_shard(job["model"], mesh=mesh(2), units=job["units"], placements=job["placements"]).layout.leaves
    wide = [leaf for leaf in leaves if leaf.path.endswith(("kernel", "embedding"))]
    assert {leaf.path for leaf in wide if not leaf.cuts} == WHOLE[name]
