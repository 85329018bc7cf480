"""Program "manual": steps under every strategy, model, mesh and prefetch equal the single-device reference.

Limits as in test_parity.py. Between prefetch depths no bit differs: only the order of the gathers does.
"""

import itertools

import jax
import numpy as np
import pytest

import jfsdp
from tests.engine.test_parity import MESHES, MODELS, ROWS, TX, batches, check, check_or_refuse, shard
from tests.pairwise import cover
from tests.thin import each_value, thin
from tests.ways import WAYS

COLUMNS = {
    "strategy": list(WAYS),
    "model": ["tower-deep", "tower-list", "tied"],
    "mesh": list(MESHES),
    "prefetch": [0, 1, 2],
    "accumulate": [1, 2],
    "storage": ["per_parameter", "flat"],
}
PUBLISHED = COLUMNS | {"model": ["llama-deep", "llama-list", "gpt2"]}


def run(strategy, model, mesh, prefetch, accumulate, storage):
    options = {"program": "manual", "prefetch": prefetch, "storage": storage}
    check_or_refuse(model, mesh, strategy, accumulate, options)


@pytest.mark.parametrize(tuple(COLUMNS), each_value(cover(COLUMNS)))
def test_steps_equal_one_device(strategy, model, mesh, prefetch, accumulate, storage):
    """In the proofs every pair of values of two columns is in a row."""
    run(strategy, model, mesh, prefetch, accumulate, storage)


@pytest.mark.proof
@pytest.mark.parametrize(tuple(PUBLISHED), cover(PUBLISHED))
def test_published_models_equal_one_device(strategy, model, mesh, prefetch, accumulate, storage):
    run(strategy, model, mesh, prefetch, accumulate, storage)


# What the engine itself may do differently; the model and accumulation are covered by pairs above.
TABLE = [
    (strategy, model, mesh, prefetch, 1 + place % 2, storage)
    for place, (strategy, model, mesh, prefetch, storage) in enumerate(
        itertools.product(
            COLUMNS["strategy"], ("llama-deep", "llama-list"), COLUMNS["mesh"], COLUMNS["prefetch"], COLUMNS["storage"]
        )
    )
]


@pytest.mark.proof
@pytest.mark.parametrize(tuple(COLUMNS), TABLE)
def test_every_combination_equals_one_device(strategy, model, mesh, prefetch, accumulate, storage):
    run(strategy, model, mesh, prefetch, accumulate, storage)


LAST, ONCE = {"sync": "last"}, {"reshard_after_backward": False}
FLAT, OFFLOADED = {"storage": "flat"}, {"offload_policy": jfsdp.OffloadPolicy(True, True, True)}
CASES = {
    "gathered once": ("tower-deep", "4", "full_shard", {}, ONCE),
    "reduced once": ("tower-list", "4", "full_shard", {}, LAST),
    "reduced and gathered once": ("tied", "2x4", "full_shard", {}, LAST | ONCE),
    "hpz, root too": ("tower-deep", "4", "full_shard", {"reshard_after_forward": 2}, {}),
    "neighbours over groups": ("tower-deep", "2x4", "all", {"reshard_after_forward": 2, "prefetch": 2}, {}),
    "root freed after forward": ("tied", "4", "full_shard", {"reshard_after_forward": True}, {}),
    "flat, root freed": ("tower-list", "4", "full_shard", FLAT | {"reshard_after_forward": True}, {}),
    "root held over microbatches": ("gpt2", "2x4", "full_shard", {}, {"reshard_after_backward": {"": False}}),
    "flat, blocks held": ("tower-deep", "4", "full_shard", FLAT, {"reshard_after_backward": {"blocks": False}}),
    "dots saved": ("tower-deep", "4", "full_shard", {"remat": "dots"}, {}),
    "nothing recomputed": ("tied", "3", "full_shard", {"remat": "none"}, {}),
    "flat, gathered once": ("tied", "4", "full_shard", FLAT, ONCE),
    "flat, reduced once": ("tower-deep", "2x4", "full_shard", FLAT, LAST),
    "flat, hpz": ("tower-deep", "4", "full_shard", FLAT | {"reshard_after_forward": 2}, {}),
    "flat, offloaded": ("tower-list", "4", "zero2", FLAT | OFFLOADED, {}),
    "gathered once, Llama": ("llama-deep", "4", "full_shard", {}, ONCE),
    "offloaded": ("tower-deep", "4", "full_shard", OFFLOADED, {}),
}


# The others repeat these for another model, form or half of the two options.
QUICK = ("reduced and gathered once", "neighbours over groups", "flat, blocks held", "offloaded")


@pytest.mark.parametrize("case", [pytest.param(x, marks=[pytest.mark.proof] * (x not in QUICK)) for x in CASES])
def test_every_setting_equals_one_device(case):
    model, mesh, strategy, options, step_options = CASES[case]
    check(model, mesh, strategy, 2, {"program": "manual", "prefetch": 1} | options, **step_options)


@pytest.mark.parametrize("model", thin(["tower-deep", "tower-list", "llama-deep", "llama-list"], 4))
def test_the_depth_of_prefetch_changes_no_bit(model):
    found, other = (train(model, prefetch) for prefetch in (0, jfsdp.Prefetch(2, 1)))
    jax.tree.map(np.testing.assert_array_equal, found, other)


def train(model, prefetch):
    sharded = shard(model, "4", "full_shard", program="manual", prefetch=prefetch)
    state, step = sharded.init(TX), sharded.train_step(MODELS[model].loss, TX, check_loss=False)
    for batch in batches(model, 2, ROWS):
        state, metrics = step(state, batch)
    return jax.device_get((state.params, metrics))
