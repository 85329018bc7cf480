"""A table of optimizers: where their states stand, and how many bytes they take. test_recipes.py trains with them."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jfsdp
from tests import reference
from tests.models_small import Block, Tower
from tests.sharding import fully_shard

RATE = 1e-2
SCHEDULE = optax.linear_schedule(0.0, RATE, 3)


def by_name(decide: Callable[[str, Any], Any]) -> Callable[[Any], Any]:
    """A mask or labels, decided leaf by leaf by the dotted name."""
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, x: decide(reference.dotted(path), x), params)


@by_name
def muon_dims(name: str, x: Any) -> Any:
    """Which leaves are matrices for Muon: the last two dims of the blocks' kernels, a layer dim before them or not."""
    is_matrix = name.startswith("blocks.") and name.endswith("kernel")
    return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if is_matrix else None


@by_name
def by_kind(name: str, x: Any) -> str:
    return "embed" if "embed" in name else "matrix" if "kernel" in name else "vector"


@by_name
def kernels(name: str, x: Any) -> bool:
    return name.endswith("kernel")


@dataclasses.dataclass(frozen=True)
class Case:
    """An optimizer, the specs of some of its arrays on 8 devices (full_shard, stacked), and its bytes per device.

    `num_bytes` is a formula over SPLIT (elements of split leaves, padding included) and WHOLE (of replicated ones).
    """

    make: Callable[[], Any]
    specs: dict[str, P]
    num_bytes: int


# Tower, 16 wide, 3 layers: embed (37, 16) by dim 1; kernels (3, 16, 64), (3, 64, 16) by dim 1; bias of blocks (3, 64);
# head kernel (16, 37) by 16; head bias (37,) padded to 40. The norms (3, 16) are below min_size=20 per layer.
SPLIT = 37 * 16 + 2 * 3 * 16 * 64 + 3 * 64 + 16 * 37 + 40
WHOLE = 3 * 16
COUNT = 4
EMBED, UP, BIAS = P(None, "fsdp"), P(None, "fsdp", None), P("fsdp")
MOMENT = 4 * (SPLIT // 8 + WHOLE)

CASES = {
    "momentum": Case(
        lambda: optax.sgd(RATE, momentum=0.9, nesterov=True),
        {"opt_state.0.trace.embed.embedding": EMBED, "opt_state.0.trace.head.bias": BIAS},
        MOMENT,
    ),
    "lion": Case(
        lambda: optax.lion(RATE),
        {"opt_state.0.mu.blocks.up.kernel": UP, "opt_state.0.count": P()},
        MOMENT + COUNT,
    ),
    "adagrad": Case(lambda: optax.adagrad(RATE), {"opt_state.0.sum_of_squares.head.bias": BIAS}, MOMENT),
    # Of embed (37, 16) and head (16, 37) the 16 stays split and 37 divides by nothing; of up (3, 16, 64) the 16 stays
    # split, and 64 is split by itself; of down the 64 stays split, and 16 is below min_size; vectors are not factored.
    # 10 places of one element are left empty.
    "adafactor": Case(
        lambda: optax.adafactor(RATE, min_dim_size_to_factor=8, momentum=None),
        {
            "opt_state.0.v_row.blocks.up.kernel": P(None, "fsdp"),
            "opt_state.0.v_col.blocks.up.kernel": P(None, "fsdp"),
            "opt_state.0.v_row.embed.embedding": P("fsdp"),
            "opt_state.0.v_col.embed.embedding": P(None),
            "opt_state.0.v.head.bias": BIAS,
            "opt_state.0.v.embed.embedding": P(None),
        },
        4 * (2 * (16 // 8 + 37) + 3 * (16 // 8 + 64 // 8) + 3 * (64 // 8 + 16) + 3 * 64 // 8 + 40 // 8 + WHOLE + 10)
        + COUNT,
    ),
    "muon": Case(
        lambda: optax.contrib.muon(RATE, muon_weight_dimension_numbers=muon_dims, adam_weight_decay=0.1),
        {
            "opt_state.inner_states.muon.inner_state.0.mu.blocks.up.kernel": UP,
            "opt_state.inner_states.muon.inner_state.0.ns_coeffs": P(None),
            "opt_state.inner_states.adam.inner_state.0.nu.head.bias": BIAS,
        },
        4 * (2 * 3 * 16 * 64) // 8 + 8 * ((SPLIT - 2 * 3 * 16 * 64) // 8 + WHOLE) + 3 * 4 + 2 * COUNT,
    ),
    "partition": Case(
        lambda: optax.partition(
            {"embed": optax.adam(RATE), "matrix": optax.lamb(RATE), "vector": optax.sgd(RATE, 0.9)}, by_kind
        ),
        {
            "opt_state.inner_states.embed.inner_state.0.mu.embed.embedding": EMBED,
            "opt_state.inner_states.vector.inner_state.0.trace.head.bias": BIAS,
        },
        8 * (SPLIT - 3 * 64 - 40) // 8 + 4 * ((3 * 64 + 40) // 8 + WHOLE) + 2 * COUNT,
    ),
    "lamb": Case(lambda: optax.lamb(RATE), {"opt_state.0.mu.head.bias": BIAS}, 2 * MOMENT + COUNT),
    "masked decay": Case(
        lambda: optax.adamw(RATE, weight_decay=0.5, mask=kernels),
        {"opt_state.0.nu.head.bias": BIAS},
        2 * MOMENT + COUNT,
    ),
    "schedule": Case(lambda: optax.adamw(SCHEDULE), {"opt_state.2.count": P()}, 2 * MOMENT + 2 * COUNT),
    "hyperparameters": Case(
        lambda: optax.inject_hyperparams(optax.adamw)(learning_rate=SCHEDULE),
        {"opt_state.hyperparams.learning_rate": P(), "opt_state.inner_state.0.mu.embed.embedding": EMBED},
        2 * MOMENT + 3 * COUNT + 6 * 4,
    ),
    "clip": Case(
        lambda: optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(RATE)),
        {"opt_state.1.0.mu.embed.embedding": EMBED},
        2 * MOMENT + COUNT,
    ),
    "noise": Case(
        lambda: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(RATE)),
        {"opt_state.0.rng_key": P()},
        COUNT + 8,
    ),
    "every second": Case(
        lambda: optax.MultiSteps(optax.chain(optax.clip_by_block_rms(0.01), optax.adam(RATE)), 2),
        {"opt_state.acc_grads.blocks.up.kernel": UP, "opt_state.mini_step": P()},
        3 * MOMENT + 3 * COUNT,
    ),
    # One vector of all logical elements, without a name, which 8 does not divide.
    "flatten": Case(
        lambda: optax.flatten(optax.adam(RATE)), {"opt_state.0.mu": P(None)}, 2 * 4 * (SPLIT - 3 + WHOLE) + COUNT
    ),
    "ema": Case(
        lambda: optax.chain(optax.adam(RATE), jfsdp.optim.track_ema(0.9)),
        {"opt_state.1.ema.embed.embedding": EMBED, "opt_state.1.ema.head.bias": BIAS},
        3 * MOMENT + COUNT,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_states_stand_where_the_table_says_and_take_the_bytes_of_its_formula(case):
    """Shapes will do: test_state_bytes.py compares them with live arrays."""
    model = fully_shard(Tower, mesh=jfsdp.make_abstract_mesh({"fsdp": 8}), units=[Block], min_size=20)
    state = model.abstract_state(CASES[case].make())
    leaves = jax.tree.leaves(state.opt_state)
    arrays = dict(zip((role.name for role in state.roles.arrays), leaves, strict=True))
    assert {name: arrays[name].sharding.spec for name in CASES[case].specs} == CASES[case].specs
    held = sum(math.prod(x.sharding.shard_shape(x.shape)) * x.dtype.itemsize for x in leaves)
    assert held == CASES[case].num_bytes
