"""Awkward leaves and every kind of optimizer's state, out of and into every storage form, with and without padding."""

import functools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.checkpoint.disk.files import read_manifest
from tests.checkpoint.elastic import bits, lived_in
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.thin import thin


class Zoo(nnx.Module):
    """One of each; trained but for the booleans, the integers and the frozen one. Statistics and keys stand beside."""

    def __init__(self, rngs):
        normal = functools.partial(jax.random.normal, rngs.params())
        self.scalar = nnx.Param(normal(()))
        self.empty = nnx.Param(normal((0, 8)))
        self.prime = nnx.Param(normal((31,)))
        self.prime_matrix = nnx.Param(normal((13, 11)))
        self.matrix = nnx.Param(normal((16, 24)))
        self.kernel = nnx.Param(normal((3, 3, 8, 5)))
        self.flags = nnx.Param(normal((9, 8)) > 0)
        self.complex = nnx.Param(normal((8, 5), jnp.complex64))
        self.integers = nnx.Param(jnp.arange(40).reshape(8, 5))
        self.half = nnx.Param(normal((8, 10), jnp.bfloat16))
        self.frozen = nnx.Param(normal((8, 8)))
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)
        self.keys = nnx.Variable(jax.random.split(jax.random.key(3, impl="rbg"), 4))
        self.empty_statistics = nnx.BatchStat(jnp.zeros((4, 0)))


def real_or_complex(params: Any) -> Any:
    return jax.tree.map(lambda x: "complex" if jnp.iscomplexobj(x) else "real", params)


def parts_of(params: Any) -> Any:
    return jax.tree.map(lambda x: "matrices" if x.ndim > 1 else "other", params)


OPTIMIZERS = {
    "adam": optax.adamw(1e-2),
    "adafactor": optax.partition(
        {"real": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9), "complex": optax.sgd(1e-2, 0.9)},
        real_or_complex,
    ),
    "partition": optax.partition({"matrices": optax.adam(1e-2), "other": optax.sgd(1e-2, 0.9)}, parts_of),
    "averages, bfloat16 moments": optax.chain(
        jfsdp.optim.low_precision_state(optax.adam(1e-2)), jfsdp.optim.track_ema(0.9)
    ),
}
FORMS: dict[str, dict[str, Any]] = {
    "by leaf, 4": {"devices": 4, "program": "xla"},
    "flat, 3": {"devices": 3, "program": "manual", "storage": "flat"},
    "flat, 4, copies": {"devices": 4, "program": "manual", "storage": "flat", "strategy": "zero1"},
}


@functools.cache
def model(form: str) -> jfsdp.ShardedModel:
    options = dict(FORMS[form])
    mesh = jfsdp.make_mesh(devices=jax.devices()[: options.pop("devices")])
    policy = jfsdp.MixedPrecisionPolicy("bfloat16" if "copies" in form else None)
    return fully_shard(Zoo, mesh=mesh, mp_policy=policy, frozen=["frozen"], min_size=8, **options)


@functools.cache
def trained(form: str, optimizer: str) -> jfsdp.TrainState:
    """A state whose moments, statistics and counts are not those of the first."""
    first, tx = next(iter(FORMS)), OPTIMIZERS[optimizer]
    if form != first:
        return jfsdp.checkpoint.reshard(trained(first, optimizer), model(form))
    return lived_in(model(form).init(tx, seed=1))


@pytest.fixture(scope="module")
def saved(tmp_path_factory) -> Any:
    @functools.cache
    def save(form: str, optimizer: str) -> Path:
        path = tmp_path_factory.mktemp("zoo") / "c"
        jfsdp.checkpoint.save(path, trained(form, optimizer))
        return path

    return save


PAIRS = [(source, target) for source in list(FORMS)[:2] for target in FORMS]


CASES = [
    # Each pair of forms with one optimizer, and each optimizer in one or two pairs.
    pytest.param(*pair, name, marks=[pytest.mark.proof] * (i % 4 != j), id=f"{pair[0]} to {pair[1]}, {name}")
    for i, pair in enumerate(PAIRS)
    for j, name in enumerate(OPTIMIZERS)
]


@pytest.mark.parametrize(("source", "target", "optimizer"), CASES)
def test_every_bit_comes_back_in_every_form(source, target, optimizer, saved):
    like = model(target).abstract_state(OPTIMIZERS[optimizer])
    state = jfsdp.checkpoint.restore(saved(source, optimizer), like=like)
    assert bits(state) == bits(trained(source, optimizer))
    assert jax.tree.structure(state) == jax.tree.structure(like)
    assert set(state.work) == set(like.work)


def test_every_kind_of_leaf_is_stored_as_it_is(saved):
    arrays = read_manifest(saved("flat, 3", "adafactor"))["arrays"]
    kinds = [tuple(arrays[name].values()) for name in ("params.complex", "params.flags", "model_state.keys")]
    assert kinds == [([8, 5], "complex64", None), ([9, 8], "bool", None), ([4, 4], "uint32", "rbg")]


# ---- parts of a state ----


CHOICES: dict[str, tuple[dict[str, Any], Any]] = {
    "params": ({"only": "params"}, lambda name: name.startswith("params.")),
    "three leaves": (
        {"only": ["params.matrix", "params.prime*"]},
        lambda name: name in ("params.matrix", "params.prime", "params.prime_matrix"),
    ),
    "all but one": ({"skip": "params.matrix"}, lambda name: name != "params.matrix"),
    "no optimizer": (
        {"skip": ["opt_state", "step"]},
        lambda name: not name.startswith("opt_state.") and name != "step",
    ),
    "both": (
        {"only": ["params", "opt_state"], "skip": ["params.matrix", "opt_state.0.*.matrix"]},
        lambda name: name.startswith(("params.", "opt_state.")) and not name.endswith(".matrix"),
    ),
}


@pytest.mark.parametrize("target", thin(FORMS, 3))
@pytest.mark.parametrize("choice", list(CHOICES))
def test_what_is_chosen_is_read_and_the_rest_stays(target, choice, saved):
    """Also where one flat buffer holds leaves of both kinds."""
    how, is_read = CHOICES[choice]
    like = model(target).init(OPTIMIZERS["adam"], seed=5)
    ours, theirs = bits(like), bits(trained("by leaf, 4", "adam"))
    state = jfsdp.checkpoint.restore(saved("by leaf, 4", "adam"), like=like, **how)
    found = bits(state)
    assert found == {name: theirs[name] if is_read(name) else ours[name] for name in ours}
    assert {name for name in ours if ours[name] != theirs[name] and is_read(name)}, "something was read"
    assert bits(like) == ours
    for name, copy in state.work.items():
        np.testing.assert_array_equal(np.asarray(copy), np.asarray(state.params[name].astype("bfloat16")))


def test_a_pattern_that_chooses_nothing_and_shapes_alone_are_refused(saved):
    path, live = saved("by leaf, 4", "adam"), trained("flat, 3", "adam")
    abstract = model("flat, 3").abstract_state(OPTIMIZERS["adam"])
    for like, how, fact in (
        (live, {"only": "params.matrx"}, "'params.matrx'"),
        (live, {"only": "params.matrix", "skip": "params"}, "nothing to read"),
        (abstract, {"only": "params"}, "live state"),
    ):
        refuses(functools.partial(jfsdp.checkpoint.restore, path, like=like, **how), fact)
