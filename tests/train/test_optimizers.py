"""A table of optimizers x properties: five steps equal optax on one device, and states stand where they should.

Limits: 1e-3 of `max(lr * steps, max|ref|)` for each parameter, and of max|ref| for each array of the optimizer.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jfsdp
from tests import reference
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.sharding import fully_shard
from tests.ways import WAYS

STEPS, RATE, LIMIT = 5, 1e-2, 1e-3
MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "3": {"fsdp": 3}}
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
    `share` of an array's elements must be within `limit`. Less than all, and wider, where updates are signs: a momentum
    that is nothing but rounding has either (of 40,000 in five steps none or one), and what comes after it differs.
    """

    make: Callable[[], Any]
    specs: dict[str, P]
    num_bytes: int
    share: float = 1.0
    limit: float = LIMIT


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
        share=0.95,
        limit=2e-2,
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


def shard(mesh: str, strategy: str, form: str, **options: Any) -> jfsdp.ShardedModel:
    num_devices = int(np.prod(list(MESHES[mesh].values())))
    return fully_shard(
        lambda rngs: Tower(rngs, form == "stacked"),
        mesh=jfsdp.make_mesh(**MESHES[mesh], devices=jax.devices()[:num_devices]),
        strategy=WAYS[strategy],
        units=[Block],
        min_size=20,
        **options,
    )


def rows(mesh: str) -> int:
    return 18 if mesh == "3" else 16


@functools.cache
def oracle(case: str, form: str, num_rows: int) -> tuple[dict[str, Any], dict[str, Any]]:
    batches = make_batches(STEPS, rows=num_rows)
    wanted = reference.train(lambda rngs: Tower(rngs, form == "stacked"), token_loss, CASES[case].make(), batches)
    return wanted.params, wanted.opt_state


def run(case: str, mesh: str, strategy: str, form: str) -> jfsdp.TrainState:
    model, tx = shard(mesh, strategy, form), CASES[case].make()
    state, step = model.init(tx), model.train_step(token_loss, tx, check_loss=False)
    for batch in make_batches(STEPS, rows=rows(mesh)):
        state, _ = step(state, batch)
    return state


def error(found: Any, wanted: Any, scale: float, share: float = 1.0) -> float:
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        found, wanted = jax.random.key_data(found), jax.random.key_data(wanted)
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    return float(np.quantile(np.abs(found - wanted), share) / max(scale, np.abs(wanted).max()))


def check_parity(case: str, mesh: str, strategy: str, form: str) -> None:
    state = run(case, mesh, strategy, form)
    params, arrays = oracle(case, form, rows(mesh))
    share, limit = CASES[case].share, CASES[case].limit
    errors = {
        name: error(jfsdp.checkpoint.gather_leaf(state, name), params[name], RATE * STEPS, share) for name in params
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < limit, f"{worst}: {errors[worst]:.1e}"
    assert {role.name for role in state.roles.arrays} == {f"opt_state.{name}" for name in arrays}
    errors = {
        name: error(jfsdp.checkpoint.gather_leaf(state, f"opt_state.{name}"), x, 1e-6, share)
        for name, x in arrays.items()
    }
    worst = max(errors, key=errors.__getitem__)
    assert errors[worst] < limit, f"{worst}: {errors[worst]:.1e}"
    for role, x in zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True):
        if role.padding:
            padding = np.array(x)
            padding[tuple(map(slice, role.shape))] = 0
            assert not padding.any(), f"{role.name}: padding is not zero"


PLACES = [("3", "full_shard", "stacked"), ("8", "zero1", "list"), ("2x4", "full_shard", "list")]
PLACED = [(case, PLACES[(i + i // 3) % len(PLACES)]) for i, case in enumerate(CASES)]


# Others are in test_recipes.py, and all in the proofs.
HERE = ("adafactor", "lamb", "hyperparameters")


@pytest.mark.parametrize(
    ("case", "place"),
    [pytest.param(*placed, marks=[] if placed[0] in HERE else pytest.mark.proof) for placed in PLACED],
    ids=lambda x: x if isinstance(x, str) else "-".join(x),
)
def test_five_steps_equal_optax_on_one_device(case, place):
    check_parity(case, *place)


@pytest.mark.proof
@pytest.mark.parametrize("form", ["stacked", "list"])
@pytest.mark.parametrize("strategy", ["full_shard", "zero1", "all", "hfsdp", "ddp"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("case", CASES)
def test_every_optimizer_equals_optax_on_one_device(case, mesh, strategy, form):
    check_parity(case, mesh, strategy, form)


def live_bytes(tree: Any) -> set[int]:
    """The bytes of a tree's arrays on each device; one number where all hold the same."""
    held = dict.fromkeys(jax.devices(), 0)
    for x in jax.tree.leaves(tree):
        data = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
        for piece in data.addressable_shards:
            held[piece.device] += piece.data.nbytes
    return set(held.values())


@pytest.mark.parametrize("case", CASES)
def test_states_stand_where_the_table_says_and_take_the_bytes_of_its_formula(case):
    tx = CASES[case].make()
    state = shard("8", "full_shard", "stacked").init(tx)
    arrays = dict(zip((role.name for role in state.roles.arrays), jax.tree.leaves(state.opt_state), strict=True))
    assert {name: arrays[name].sharding.spec for name in CASES[case].specs} == CASES[case].specs
    assert live_bytes(state.opt_state) == {CASES[case].num_bytes}
