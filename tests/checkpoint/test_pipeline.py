"""Checkpoints and `reshard` do not know stages: from any number of them to any other, bitwise."""

import itertools

import jax
import numpy as np
import optax
import pytest

import jfsdp
from tests import models_published as published
from tests.checkpoint.elastic import bits, lived_in
from tests.sharding import fully_shard

TX = optax.adamw(1e-2)
CASE = published.llama(True, num_layers=4, vocab=64)
MESHES = [sizes for sizes in itertools.product((1, 2, 4), (1, 2), (1, 2)) if np.prod(sizes) <= 8]


def make(pipe, fsdp, tensor):
    mesh = jfsdp.make_mesh(pipe=pipe, fsdp=fsdp, tensor=tensor, devices=jax.devices()[: pipe * fsdp * tensor])
    return fully_shard(CASE.source, mesh=mesh, units=CASE.units, min_size=20, placements=CASE.placements)


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
    first = lived_in(make(2, 2, 1).init(TX))
    wanted, models = bits(first), {sizes: make(*sizes) for pair in pairs for sizes in pair}
    for sizes in dict.fromkeys(sizes for sizes, _ in pairs):
        state = jfsdp.checkpoint.reshard(first, models[sizes])
        assert bits(state) == wanted
        path = tmp_path / "-".join(map(str, sizes))
        jfsdp.checkpoint.save(path, state)
        for other in [b for a, b in pairs if a == sizes]:
            assert bits(jfsdp.checkpoint.restore(path, like=models[other].abstract_state(TX))) == wanted
