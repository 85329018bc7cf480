"""Checkpoints and `reshard` do not know stages: from any number of them to any other, bitwise."""

import itertools

import jax
import numpy as np
import optax
import pytest

import jfsdp
from tests import models_published as published
from tests import reference
from tests.checkpoint.test_store import lived_in
from tests.sharding import fully_shard

TX = optax.adamw(1e-2)
CASE = published.llama(True, num_layers=4, vocab=64)
MESHES = [sizes for sizes in itertools.product((1, 2, 4), (1, 2), (1, 2)) if np.prod(sizes) <= 8]


def make(pipe, fsdp, tensor):
    mesh = jfsdp.make_mesh(pipe=pipe, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: pipe * fsdp * tensor])
    return fully_shard(CASE.source, mesh=mesh, units=CASE.units, min_size=20, placements=CASE.placements)


def bits(state):
    """Return parameters and moments, by name, in logical shapes."""
    pairs = zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True)
    found = {f"optimizer {role.name}": np.asarray(x)[tuple(map(slice, role.shape))] for role, x in pairs}
    return found | {name: reference.logical(state, name, x) for name, x in state.params.items()}


def same(state, wanted):
    found = bits(state)
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(found[name], value, err_msg=name)


@pytest.mark.parametrize(
    "pairs",
    [
        [((2, 2, 1), (1, 2, 2)), ((1, 2, 2), (4, 1, 2)), ((4, 1, 2), (2, 2, 1))],
        pytest.param([*itertools.product(MESHES, MESHES)], marks=pytest.mark.proof),
    ],
    ids=["some", "all"],
)
@pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")
def test_a_state_of_any_mesh_is_that_of_any_other(pairs, tmp_path):
    first = lived_in(make(2, 2, 1).init(TX))  # moments that are not zeros
    wanted, models = bits(first), {sizes: make(*sizes) for pair in pairs for sizes in pair}
    for sizes in dict.fromkeys(sizes for sizes, _ in pairs):
        state = jfsdp.checkpoint.reshard(first, models[sizes])
        same(state, wanted)
        path = tmp_path / "-".join(map(str, sizes))
        jfsdp.checkpoint.save(path, state)
        for other in [b for a, b in pairs if a == sizes]:
            same(jfsdp.checkpoint.restore(path, like=models[other].abstract_state(TX)), wanted)
