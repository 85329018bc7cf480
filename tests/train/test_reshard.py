"""Resharding a live state: bitwise into any mesh and strategy, in bounded memory; and one whole array by name."""

import functools
import math
import warnings
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from tests.models_small import Block, Tower
from tests.refusals import refuses
from tests.states import logical
from tests.steps import fully_shard
from tests.thin import thin

TX = optax.chain(optax.adafactor(1e-2, min_dim_size_to_factor=8), jfsdp.optim.track_ema(0.9))

LAYOUTS: dict[str, dict[str, Any]] = {
    "full8": {"sizes": {"fsdp": 8}},
    "full3": {"sizes": {"fsdp": 3}},
    "one": {"sizes": {"fsdp": 1}},
    "hybrid2x4": {"sizes": {"replica": 2, "fsdp": 4}},
    "zero1bf16": {"sizes": {"fsdp": 8}, "strategy": "zero1", "param_dtype": "bfloat16"},
    "hfsdp2x3bf16": {"sizes": {"replica": 2, "fsdp": 3}, "opt_over": ("replica", "fsdp"), "param_dtype": "bfloat16"},
    "zero1replica": {"sizes": {"replica": 8, "fsdp": 1}, "strategy": "zero1"},
    "flat8": {"sizes": {"fsdp": 8}, "program": "manual", "storage": "flat"},
    "flathfsdp2x3bf16": {
        "sizes": {"replica": 2, "fsdp": 3},
        "opt_over": ("replica", "fsdp"),
        "param_dtype": "bfloat16",
        "program": "manual",
        "storage": "flat",
    },
}


class Net(nnx.Module):
    """A tower, and beside it integers, statistics, a key and a leaf that divides by nothing in any dim."""

    def __init__(self, rngs, dim=16):
        self.tower = Tower(rngs, dim=dim)
        self.tower.embed.dtype = None  # that of its weight in use: a scan wants one dtype
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (13, 11)))
        self.table = nnx.Param(jax.random.randint(rngs.params(), (8, 8), 0, 99))
        self.seen = nnx.BatchStat(jax.random.normal(rngs.params(), (3, 3)))
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, tokens):
        return self.dropout(self.tower(tokens)) * (1 + self.odd[...].mean())


def make(name: str, factory: Any = Net) -> jfsdp.ShardedModel:
    settings = dict(LAYOUTS[name])
    sizes = settings.pop("sizes")
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    mp_policy = jfsdp.MixedPrecisionPolicy(settings.pop("param_dtype", None))
    return fully_shard(factory, mesh=mesh, units=[Block], mp_policy=mp_policy, min_size=20, **settings)


@functools.cache
def lived_in(name: str) -> jfsdp.TrainState:
    """Return a state whose optimizer has taken a step: with the weights for gradients, as any numbers will do."""
    model = make(name)
    state = model.init(TX, seed=list(LAYOUTS).index(name))
    return model.apply_gradients(state, model.model.tree.build(model.trained_arrays(state)), TX)


def assert_same_bits(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert (value.dtype, value.shape) == (other[name].dtype, other[name].shape), name
        assert value.tobytes() == other[name].tobytes(), name


def assert_stands_like(state: jfsdp.TrainState, like: jfsdp.TrainState) -> None:
    assert jax.tree.structure(state) == jax.tree.structure(like)
    for value, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like), strict=True):
        assert (value.shape, value.dtype, value.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)


QUICK = [("full8", "full3"), ("hfsdp2x3bf16", "full8"), ("full8", "flathfsdp2x3bf16")]
PAIRS = [(source, target) for source in ("full8", "hfsdp2x3bf16") for target in LAYOUTS if target != source]
PAIRS += [
    ("full3", "full8"),
    ("zero1bf16", "full3"),
    ("one", "hybrid2x4"),
    ("flat8", "full3"),
    ("flathfsdp2x3bf16", "flat8"),
]


@pytest.mark.parametrize(
    ("source", "target"), [pytest.param(*x, marks=[pytest.mark.proof] * (x not in QUICK)) for x in PAIRS]
)
def test_reshard_is_bitwise_into_any_mesh_and_strategy(source, target):
    model = make(target)
    before = logical(lived_in(source))
    state = jfsdp.checkpoint.reshard(lived_in(source), model)
    assert_same_bits(logical(state), before)
    assert_stands_like(state, model.abstract_state(TX))
    for name, copy in state.work.items():
        assert np.asarray(copy).tobytes() == np.asarray(state.params[name].astype("bfloat16")).tobytes()
    assert_same_bits(logical(lived_in(source)), before)


def test_there_and_back_again_changes_no_bit_and_no_padding():
    state = jfsdp.checkpoint.reshard(jfsdp.checkpoint.reshard(lived_in("full8"), make("full3")), make("full8"))
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(lived_in("full8")), strict=True)
    for value, wanted in pairs:
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            value, wanted = jax.random.key_data(value), jax.random.key_data(wanted)
        assert np.asarray(value).tobytes() == np.asarray(wanted).tobytes()


def test_a_layout_alone_takes_the_devices_of_the_state_in_their_order():
    devices = jax.devices()[::-1]
    mesh = jax.sharding.Mesh(np.array(devices).reshape(1, 8, 1, 1), ("replica", "fsdp", "pipe", "tensor"))
    state = jfsdp.checkpoint.reshard(lived_in("full8"), make("full8"), mesh=mesh)
    again = jfsdp.checkpoint.reshard(state, make("hybrid2x4").layout)
    assert list(again.step.sharding.mesh.devices.flat) == devices  # type: ignore[attr-defined]
    assert_same_bits(logical(again), logical(lived_in("full8")))


def test_donating_frees_the_old_state_as_it_goes():
    old = jfsdp.checkpoint.reshard(lived_in("hfsdp2x3bf16"), make("zero1bf16"))
    wanted = logical(old)
    new = jfsdp.checkpoint.reshard(old, make("hfsdp2x3bf16"), donate=True)
    assert all(x.is_deleted() for x in jax.tree.leaves(old))
    assert_same_bits(logical(new), wanted)
    same = jfsdp.checkpoint.reshard(new, make("hfsdp2x3bf16"), donate=True)
    assert_same_bits(logical(same), wanted)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert_same_bits(logical(jfsdp.checkpoint.reshard(same, make("full3"), donate=True)), wanted)


def test_the_result_shares_no_buffer_with_the_state_given():
    old = jfsdp.checkpoint.reshard(lived_in("full8"), make("full8"))
    new = jfsdp.checkpoint.reshard(old, make("full8"))
    for x in jax.tree.leaves(new):
        x.delete()
    assert_same_bits(logical(old), logical(lived_in("full8")))


def test_layouts_of_other_models_are_refused_with_what_differs():
    move = jfsdp.checkpoint.reshard
    other = make("full8", lambda rngs: Net(rngs, dim=24))
    facts = "another model", "tower.embed.embedding", "float32[37, 16]", "float32[37, 24]"
    refuses(lambda: move(lived_in("full8"), other), *facts)
    facts = "another model", "odd, table, tower.blocks.down", "layout: blocks.down.kernel"
    refuses(lambda: move(lived_in("full8"), make("full8", Tower)), *facts)


def test_what_is_no_state_and_no_layout_is_refused():
    move: Any = jfsdp.checkpoint.reshard
    refuses(lambda: move(lived_in("full8"), "full_shard"), "layout='full_shard'", "ShardedModel", error=TypeError)
    refuses(lambda: move({}, make("full8").layout), "reshard:", "TrainState", error=TypeError)


def test_a_mesh_that_does_not_fit_is_refused():
    move: Any = jfsdp.checkpoint.reshard
    refuses(lambda: move(lived_in("full8"), make("full3").layout), "3", "8", "mesh=")
    refuses(lambda: move(lived_in("full8"), make("full3").layout, mesh=make("full8").mesh), "'fsdp'", "8", "3")
    refuses(lambda: move(make("full8").abstract_state(TX), make("full3")), "shapes only")


@pytest.mark.parametrize("name", thin(["hfsdp2x3bf16", "full3", "full8"], 3))
def test_full_returns_one_whole_array_of_logical_shape(name):
    state = lived_in(name)
    for path, wanted in logical(state).items():
        if path.startswith(("params.", "opt_state.")):
            found = jfsdp.checkpoint.gather_leaf(state, path)
            assert found.sharding.is_fully_replicated
            assert np.asarray(found).tobytes() == wanted.tobytes(), path
    assert jfsdp.checkpoint.gather_leaf(state, "tower.embed.embedding").shape == (37, 16)


def test_full_gathers_only_what_is_asked_for():
    before = {id(x) for x in jax.live_arrays()}
    state = lived_in("full8")
    value = jfsdp.checkpoint.gather_leaf(state, "tower.head.kernel")
    new = [x for x in jax.live_arrays() if id(x) not in before and x.is_fully_replicated and x.size > 100]
    assert [x.shape for x in new] == [value.shape] == [(16, 37)]


def test_full_names_what_is_close_to_an_unknown_name():
    find = functools.partial(jfsdp.checkpoint.gather_leaf, lived_in("full8"))
    refuses(lambda: find("tower.embed.embeding"), "tower.embed.embedding")
    refuses(lambda: find("opt_state.1.ema.od"), "opt_state.1.ema.odd")
    refuses(lambda: jfsdp.checkpoint.gather_leaf(make("full8").abstract_state(TX), "odd"), "shapes only")
