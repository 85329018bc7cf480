"""The account of state bytes: exactly what live arrays occupy, and the formula of ZeRO at real size."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.layout.report import padding_elements
from jfsdp.layout.strategy import STRATEGIES
from jfsdp.train.state_bytes import StateBytes, account, explain_to_dict
from tests.sharding import fully_shard
from tests.thin import thin
from tests.ways import WAYS

COUNTERS = 3 * 4  # step, num_skipped, Adam's count
MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}}


class Net(nnx.Module):
    """A matrix that divides by 8, one that divides by nothing, a small vector, and state beside the parameters."""

    def __init__(self, rngs):
        self.even, self.odd = nnx.Param(jnp.ones((16, 24))), nnx.Param(jnp.ones((13, 11)))
        self.scale = nnx.Param(jnp.ones(5))
        self.seen = nnx.BatchStat(jnp.zeros((3, 3)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)


MODEL_STATE = 9 * 4 + 8 + 4  # batch statistics, a key, its count


def sharded(strategy: str, mesh: Any, param_dtype: str | None = None) -> jfsdp.ShardedModel:
    mp_policy = jfsdp.MixedPrecisionPolicy(param_dtype)
    return fully_shard(Net, mesh=mesh, strategy=WAYS[strategy], mp_policy=mp_policy, min_size=8)


def device_mesh(sizes: dict[str, int]) -> Any:
    return jfsdp.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])


def live_bytes(tree: Any) -> set[int]:
    """The bytes of a tree's arrays on each device; one number where all hold the same."""
    held = dict.fromkeys(next(iter(jax.tree.leaves(tree))).sharding.device_set, 0)
    for array in jax.tree.leaves(tree):
        data = jax.random.key_data(array) if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else array
        for shard in data.addressable_shards:
            held[shard.device] += shard.data.nbytes
    return set(held.values())


SETUPS = [("8", "bfloat16"), ("2x4", "bfloat16"), ("2x4", None)]


@pytest.mark.parametrize(
    ("strategy", "mesh", "param_dtype"),
    [
        # Every strategy with copies over groups; the proofs have the others.
        pytest.param(strategy, *way, marks=[pytest.mark.proof] * (way != SETUPS[1]))
        for strategy in [*STRATEGIES, "hfsdp"]
        for way in SETUPS
    ],
)
def test_account_is_what_the_live_arrays_occupy(strategy, mesh, param_dtype):
    tx = optax.adamw(1e-3)
    model = sharded(strategy, device_mesh(MESHES[mesh]), param_dtype)
    state, count = model.init(tx), account(model.abstract_state(tx))
    assert live_bytes(state) == {count.total}
    assert live_bytes(state.params) == {count.params}
    assert (live_bytes(state.work) if state.work else {0}) == {count.work}
    assert live_bytes(state.opt_state) == {count.opt + 4}
    assert live_bytes(state.model_state) == {count.model_state} == {MODEL_STATE}
    assert count.counters == COUNTERS
    assert sum(count.by_leaf.values()) == count.params + count.work + count.opt
    assert count == account(state)


def test_account_of_the_same_mesh_without_devices_is_the_same():
    tx = optax.adamw(1e-3)
    for strategy in ("zero1", "full_shard"):
        abstract = sharded(strategy, jfsdp.make_abstract_mesh(MESHES["8"]), "bfloat16").abstract_state(tx)
        concrete = sharded(strategy, device_mesh(MESHES["8"]), "bfloat16").abstract_state(tx)
        assert account(abstract) == account(concrete)


@functools.cache
def count_on(strategy: str, mesh: str, param_dtype: str | None = None) -> StateBytes:
    return account(
        sharded(strategy, jfsdp.make_abstract_mesh(MESHES[mesh]), param_dtype).abstract_state(optax.adam(1e-3))
    )


EVEN, ODD, SCALE = 16 * 24, 13 * 11, 5
ODD_ON_8, ODD_ON_4 = 16 * 11, 13 * 12  # the dim that grows by the smaller share is padded


def test_full_sharding_holds_an_eighth_and_what_is_below_min_size():
    count = count_on("full_shard", "8")
    stored = EVEN + ODD_ON_8
    assert count.params == 4 * stored // 8 + 4 * SCALE
    assert count.opt == 2 * count.params
    assert count.replicated == 12 * SCALE
    assert count.padding == 3 * (4 * (ODD_ON_8 - ODD) // 8)  # masters and two moments, each rounded down


def test_zero1_in_mixed_precision_holds_two_bytes_whole_and_twelve_split():
    """2P + 12P/N, the formula of the ZeRO paper; what is below min_size has no second copy."""
    count, stored = count_on("zero1", "8", "bfloat16"), EVEN + ODD_ON_8
    assert count.work == 2 * stored
    assert count.params + count.opt == 12 * stored // 8 + 12 * SCALE
    assert count.replicated == count.work + 12 * SCALE


@pytest.mark.parametrize(
    ("tx", "opt", "counters"),
    [
        (optax.sgd(1e-3), 0, 8),
        (optax.sgd(1e-3, momentum=0.9), 4, 8),
        (optax.adam(1e-3), 8, 12),
        (optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(optax.constant_schedule(1e-3))), 8, 16),
        (optax.adafactor(1e-3), None, 16),
    ],
    ids=["sgd", "momentum", "adam", "chain", "adafactor"],
)
def test_every_optimizers_states_are_counted(tx, opt, counters):
    model = sharded("full_shard", jfsdp.make_abstract_mesh({"fsdp": 1}))
    count = account(model.abstract_state(tx))
    if opt is not None:
        assert count.opt == opt * (EVEN + ODD + SCALE)
        assert count.counters == counters


def test_explain_rows_count_parameters_copies_and_optimizer():
    model = sharded("zero1", jfsdp.make_abstract_mesh(MESHES["8"]), "bfloat16")
    state = model.abstract_state(optax.adam(1e-3))
    table, count = explain_to_dict(state), account(state)
    rows = {row["path"]: row for row in table["leaves"]}
    assert {path: row["bytes_per_device"] for path, row in rows.items()} == count.by_leaf
    assert rows["even"]["bytes_per_device"] == 12 * EVEN // 8 + 2 * EVEN
    assert rows["even"]["param_bytes_per_device"] == 4 * EVEN // 8 + 2 * EVEN
    assert table["num_parameters"] == EVEN + ODD + SCALE
    assert table["state_bytes_per_device"] == count.total
    parts = ("param", "work", "opt", "counter", "model_state")
    assert sum(table[f"{part}_bytes_per_device"] for part in parts) == count.total


def llama_8b(num_devices: int, tx: Any = None) -> tuple[StateBytes, int]:
    job = jfsdp.trainer.find_job("llama-8b")
    mesh = jfsdp.make_abstract_mesh({"fsdp": num_devices})
    model = fully_shard(job.model, mesh=mesh, units=job.units)
    return account(model.abstract_state(tx or optax.adamw(1e-3))), sum(map(padding_elements, model.layout.leaves))


@pytest.mark.parametrize("num_devices", [64, 512])
def test_llama_8b_state_is_twelve_bytes_times_p_over_n_and_counters(num_devices):
    count, _ = llama_8b(num_devices)
    assert count.total == 12 * 8_030_261_248 // num_devices + COUNTERS
    assert (count.padding, count.replicated, count.model_state) == (0, 0, 0)


def test_llama_8b_on_24_lists_its_padding():
    count, padding = llama_8b(24)
    assert count.padding == pytest.approx(12 * padding / 24, abs=3 * 12)  # rounded down for every array
    assert 0 < count.padding < 0.01 * count.total
    assert count.total == 12 * (8_030_261_248 + padding) // 24 + COUNTERS


@pytest.mark.parametrize(
    ("strategy", "what"),
    thin(
        [
            ("zero1", ("params", "grads", "opt_state")),
            ("zero1", ("params",)),
            ("full_shard", ("opt_state",)),
            ("zero1", ("opt_state",)),
            ("full_shard", ("params",)),
            ("full_shard", ("params", "grads", "opt_state")),
        ]
    ),
)
def test_what_is_offloaded_is_counted_apart_and_is_what_the_live_arrays_occupy(strategy, what):
    tx, mesh = optax.adamw(1e-3), device_mesh(MESHES["8"])
    policy = jfsdp.OffloadPolicy(**dict.fromkeys(what, True))
    here = sharded(strategy, mesh, "bfloat16")
    mp_policy = jfsdp.MixedPrecisionPolicy("bfloat16")
    there = fully_shard(Net, mesh=mesh, strategy=WAYS[strategy], mp_policy=mp_policy, min_size=8, offload_policy=policy)
    state, count, plain = there.init(tx), account(there.abstract_state(tx)), account(here.abstract_state(tx))
    kinds: dict[str, list[Any]] = {"device": [], "pinned_host": []}
    for array in jax.tree.leaves(state):
        kinds["pinned_host" if array.sharding.memory_kind == "pinned_host" else "device"].append(array)
    assert live_bytes(kinds["device"]) == {count.total}
    assert live_bytes(kinds["pinned_host"]) == {count.host_total}
    assert count == account(state)
    assert count.total + count.host_total == plain.total
    assert (count.padding, count.replicated) == (plain.padding, plain.replicated)
    assert bool(count.host_params) == bool(count.params != plain.params) == ("params" in what)
    assert bool(count.host_opt) == bool(count.opt != plain.opt) == ("opt_state" in what)
    assert bool(count.host_work) == ("params" in what and strategy == "zero1")
    both = {path: count.by_leaf[path] + count.host_by_leaf[path] for path in count.by_leaf}
    assert both == plain.by_leaf and count.host_by_leaf["scale"] == 0, "small leaves stay on the device"
    assert plain.host_total == 0 and set(plain.host_by_leaf.values()) == {0}


def test_a_frozen_leaf_has_parameters_and_no_more():
    mesh = jfsdp.make_abstract_mesh(MESHES["8"])
    model = fully_shard(Net, mesh=mesh, min_size=8, frozen="even")
    count = account(model.abstract_state(optax.adam(1e-3)))
    assert count.by_leaf["even"] == 4 * EVEN // 8


def test_the_loss_scale_is_among_the_counters():
    mesh = jfsdp.make_abstract_mesh(MESHES["8"])
    model = fully_shard(Net, mesh=mesh, mp_policy=jfsdp.MixedPrecisionPolicy("float16"))
    assert account(model.abstract_state(optax.adam(1e-3))).counters == COUNTERS + 2 * 4
