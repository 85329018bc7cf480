"""What a strategy holds: bytes by formula, frozen leaves, offloaded memory, evaluation on any."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.train.state_bytes import account
from tests import reference
from tests.models_published import MODELS, batches
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.thin import thin
from tests.ways import WAYS

TX = optax.adamw(1e-2, eps=1e-4)
MESH: dict[str, Any] = {"replica": 2, "fsdp": 4}
# Of P parameters in float32, bytes of (masters, copy in bfloat16, Adam's two moments) per parameter: n shards in all, g
# in a group. The second line of ZeRO-1 is its own formula: 2P whole, 12P split.
FORMULAS = {
    "ddp": (4, 0, 8),
    "zero1": (4 / 4, 2, 8 / 4),
    "zero2": (4 / 4, 2, 8 / 4),
    "full_shard": (4 / 4, 0, 8 / 4),
    "kept": (4 / 4, 0, 8 / 4),
    "node": (4 / 4, 0, 8 / 4),
    "hfsdp": (4 / 8, 2 / 4, 8 / 8),
    "all": (4 / 8, 0, 8 / 8),
}


def tower(rngs):
    return Tower(rngs, stacked=False, num_layers=1)


def make(strategy="full_shard", param_dtype=None, mesh: Any = None, **options: Any):
    if strategy == "node":
        options = {"reshard_after_forward": 2} | options
    return fully_shard(
        tower,
        mesh=jfsdp.make_mesh(**(mesh or MESH)),
        strategy=WAYS.get(strategy, strategy),
        units=[Block],
        min_size=0,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype),
        **options,
    )


@pytest.mark.parametrize("strategy", FORMULAS)
def test_a_device_holds_the_bytes_of_the_formula(strategy):
    """By the account, which test_state_bytes.py compares with live arrays."""
    model = make(strategy, "bfloat16")
    count = account(model.abstract_state(TX))
    stored = sum(math.prod(leaf.stored_shape) for leaf in model.layout.leaves)
    assert (count.params / stored, count.work / stored, count.opt / stored) == FORMULAS[strategy]
    padding = stored - sum(math.prod(leaf.shape) for leaf in model.layout.leaves)
    assert padding == (0 if strategy == "ddp" else sum(leaf.padding for leaf in model.layout.leaves))


def test_one_precision_needs_no_copy():
    state = make("zero1").abstract_state(TX)
    assert state.work == {}
    assert account(state).params == 4 * sum(math.prod(leaf.stored_shape) for leaf in state.layout.leaves)


FROZEN: dict[str, Any] = {
    "glob": ["embed", "blocks.*.up"],
    "leaf": "embed.embedding",
    "predicate": lambda path, leaf: path.startswith("blocks") and len(leaf.shape) == 2,
}


@pytest.mark.parametrize(
    ("name", "strategy"),
    thin(
        [(name, strategy) for strategy in ("zero1", "full_shard", "all") for name in ("glob", "predicate", "leaf")],
        9,
    ),
)
def test_frozen_leaves_keep_their_bits_and_have_no_optimizer_state(name, strategy):
    model = make(strategy, frozen=FROZEN[name])
    state = model.init(TX)
    first = {name: np.asarray(x) for name, x in state.params.items()}
    step = model.train_step(token_loss, TX, accumulate=2, check_loss=False)
    for batch in make_batches(2):
        state, _ = step(state, batch)
    trained = {leaf.path for leaf in model.layout.leaves if leaf.trainable}
    assert trained and len(trained) < len(first)
    moments = {role.leaf for role in state.roles.arrays if role.name.startswith("opt_state.0.mu.")}
    assert moments == trained
    for name, value in state.params.items():
        assert (np.asarray(value).tobytes() == first[name].tobytes()) == (name not in trained), name


def test_training_beside_frozen_leaves_equals_one_device():
    tx = optax.sgd(0.1, momentum=0.9)
    wanted = reference.train(tower, token_loss, tx, make_batches(3), frozen=["blocks"]).params
    model = make(frozen="blocks")
    state = model.init(tx)
    step = model.train_step(token_loss, tx, check_loss=False)
    for batch in make_batches(3):
        state, _ = step(state, batch)
    found = {name: reference.logical(state, name, x) for name, x in state.params.items()}
    error, name = reference.worst_leaf(found, wanted, 3e-2)
    assert error < 1e-3, f"{name}: {error:.1e}"


def memories(arrays):
    return {x.sharding.memory_kind for x in jax.tree.leaves(arrays) if x.ndim}


@pytest.mark.parametrize(
    ("part", "strategy"),
    [("params", "zero1"), pytest.param("opt_state", "full_shard", marks=pytest.mark.proof)],
)
def test_what_is_offloaded_stands_in_host_memory_before_and_after_a_step(strategy, part):
    model = make(strategy, "bfloat16", offload_policy=jfsdp.OffloadPolicy(**{part: True}))
    before, gone = model.init(TX), model.init(TX)
    after, _ = model.train_step(token_loss, TX, check_loss=False)(gone, make_batches(1)[0])
    assert all(x.is_deleted() for x in gone.params.values())
    for state in (before, after):
        assert memories(state.params) == {"pinned_host" if part == "params" else "device"}
        assert memories(state.work) <= {"pinned_host" if part == "params" else "device"}
        assert memories(state.opt_state) == {"pinned_host" if part == "opt_state" else "device"}
        assert memories(model.abstract_state(TX).opt_state) == memories(state.opt_state)


def test_small_leaves_are_not_offloaded():
    model = fully_shard(Tower, units=[Block], min_size=100, offload_policy=jfsdp.OffloadPolicy(params=True))
    kinds = {name: x.sharding.memory_kind for name, x in model.init(TX).params.items()}
    assert kinds["blocks.norm.scale"] == "device"
    assert kinds["blocks.up.kernel"] == "pinned_host"


@pytest.mark.parametrize(
    ("name", "strategy"), thin([(("tower-list", "tied")[i % 2], name) for i, name in enumerate(reversed(FORMULAS))], 8)
)
def test_evaluation_gives_the_logits_of_one_device(name, strategy):
    case = MODELS[name]
    options: dict[str, Any] = {"reshard_after_forward": 2} if strategy == "node" else {}
    model = fully_shard(
        case.source, mesh=jfsdp.make_mesh(**MESH), strategy=WAYS[strategy], units=case.units, min_size=20, **options
    )
    batch = batches(name, 1, 8)[0]
    logits = model.forward(lambda model, tokens: model(tokens))(model.init(TX), batch["tokens"])
    plain = reference.plain(case.source)
    logits_of = functools.partial(plain.loss, lambda model, batch: model(batch["tokens"]))
    wanted = jax.jit(lambda *args: logits_of(*args)[0])(plain.params, plain.state, batch)
    np.testing.assert_allclose(logits, wanted, rtol=1e-4, atol=1e-5)


@jax.jit
def summed_by_jit(values):
    return jnp.sum(values), values.size


@jax.checkpoint
def summed_by_remat(values):
    return jnp.sum(values), jnp.float32(values.size)


def summed_by_scan(values):
    return jax.lax.scan(lambda sums, row: ((sums[0] + row.sum(), sums[1] + row.size), None), (0.0, 0.0), values)[0]


@pytest.mark.parametrize("summed", [summed_by_jit, summed_by_remat, summed_by_scan])
def test_a_weight_that_is_counted_beside_the_loss_in_one_call_follows_the_rows(summed):
    def loss(model, batch):
        return jfsdp.Loss(*summed(model(batch["tokens"]) ** 2))

    model, batch = fully_shard(Tower, units=[Block], strategy="zero1", min_size=1), make_batches(1)[0]
    assert model.train_step(loss, TX, accumulate=2).resolve(batch).program == "manual"


def test_a_weight_is_computed_where_there_is_no_backend_but_the_meshs_own(monkeypatch):
    """As under JAX_PLATFORMS=cuda: asked for the CPU's devices, JAX raises."""
    model, devices = make(), jax.local_devices()

    def only_theirs(backend=None):
        assert backend is None
        return devices

    monkeypatch.setattr(jax, "local_devices", only_theirs)
    loss = lambda model, batch: jfsdp.Loss((model(batch["tokens"]) ** 2).sum(), batch["tokens"].size)  # noqa: E731
    model.train_step(loss, TX).lower(model.abstract_state(TX), make_batches(1)[0])


class DrawsKey(Tower):
    """A model that replaces its rng key at each call."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.key = nnx.Variable(jax.random.key(0))

    def __call__(self, tokens):
        self.key[...] = jax.random.split(self.key[...])[0]
        return super().__call__(tokens)


def test_a_key_that_the_model_replaces_cannot_be_the_same_on_devices_with_other_keys():
    model = fully_shard(DrawsKey, units=[Block], strategy="zero1", min_size=20)
    step = model.train_step(token_loss, TX, accumulate=2, sync="last")
    refuses(lambda: step.resolve(make_batches(1)[0]), "rng key key")
