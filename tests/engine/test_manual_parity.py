"""Program "manual": flat storage, the proofs' table, and prefetch, which changes no bit; limits as in test_parity.py.

Every strategy under this program is in test_parity.py.
"""

import itertools

import jax
import numpy as np
import pytest

import jfsdp
from tests.engine.test_parity import FLAT, HELD, MANUAL, MESHES, ROWS, TX, batches, check, shard
from tests.models_small import token_loss
from tests.ways import WAYS


@pytest.mark.parametrize(
    ("model", "mesh", "strategy", "accumulate", "options", "step_options"),
    [
        ("tower-deep", "3", "full_shard", 2, {"prefetch": 2}, HELD),
        ("tied", "2x4", "all", 2, {}, {}),
        ("tower-list", "4", "zero1", 1, {"prefetch": 0}, {}),
    ],
)
def test_steps_of_flat_storage_equal_one_device(model, mesh, strategy, accumulate, options, step_options):
    check(model, mesh, strategy, accumulate, FLAT | options, **step_options)


TABLE = [
    (model, mesh, strategy, 1 + place % 2, form | {"prefetch": prefetch})
    for place, (model, mesh, strategy, prefetch, form) in enumerate(
        itertools.product(("llama-deep", "llama-list", "gpt2"), MESHES, WAYS, [0, 1, 2], [MANUAL, FLAT])
    )
    if (mesh, strategy) != ("3", "node")
]


@pytest.mark.proof
@pytest.mark.parametrize("row", TABLE)
def test_every_combination_equals_one_device(row):
    check(*row)


def test_the_depth_of_prefetch_changes_no_bit():
    found, other = (train(prefetch) for prefetch in (0, jfsdp.Prefetch(2, 1)))
    jax.tree.map(np.testing.assert_array_equal, found, other)


def train(prefetch):
    sharded = shard("tower-deep", "4", "full_shard", program="manual", prefetch=prefetch)
    state, step = sharded.init(TX), sharded.train_step(token_loss, TX, check_loss=False)
    for batch in batches("tower-deep", 2, ROWS):
        state, metrics = step(state, batch)
    return jax.device_get((state.params, metrics))
