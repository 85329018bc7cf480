"""Values that the models split over mesh axis `tensor`: only where a mesh in context has it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

import jfsdp
from jfsdp_models.over_tensor import (  # pyright: ignore[reportMissingImports] (installed as an import hook)
    by_heads,
    over_tensor,
)

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
    abstract = mesh(2).abstract_mesh
    with (
        jax.sharding.use_abstract_mesh(abstract),
        pytest.raises(ValueError, match=r"dim 1 \(size 3\) of a value cannot be split over mesh axis 'tensor'"),
    ):
        over_tensor(HEADS, 1)


@pytest.mark.parametrize("mask", [None, MASK])
def test_attention_by_heads_is_attention(mask):
    rows = PartitionSpec("fsdp")

    def local(heads, mask):
        return by_heads(attend, heads, heads, heads, documents=mask)

    specs = (rows, None if mask is None else rows)
    names = {"pipe", "replica", "fsdp"}
    run = jax.shard_map(local, mesh=mesh(2), in_specs=specs, out_specs=rows, axis_names=names, check_vma=False)
    np.testing.assert_allclose(jax.jit(run)(HEADS, mask), attend(HEADS, HEADS, HEADS, mask), rtol=1e-5)
