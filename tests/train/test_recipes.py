"""Optimizers as the documentation of optax and Flax writes them mean what they mean on one device.

Every recipe reads the tree that it is given: by key path, by first key, by shape, by type, by a static tree or a prefix
of one. Limits: 1e-3 of `max(lr * steps, max|ref|)` for each parameter, and of max|ref| for each array of the state.
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
from flax import nnx, traverse_util
from jax.tree_util import tree_map_with_path

import jfsdp
from tests import reference
from tests.models_small import Block, LinenBlock, Tower, linen_tower, make_batches, token_loss
from tests.refusals import refuses
from tests.states import logical
from tests.steps import fully_shard

STEPS, RATE, LIMIT = 3, 1e-2, 1e-3
path_aware_map: Any = traverse_util.path_aware_map


def source(api: str, form: str) -> Any:
    return linen_tower(form == "stacked", 2) if api == "linen" else lambda rngs: Tower(rngs, form == "stacked", 16, 2)


def first_key_labels(params: Any) -> Any:
    """A prefix of the tree: one label for all below a first key."""
    labels = {key: "embed" if key == "embed" else "rest" for key in params}
    return labels if isinstance(params, dict) else nnx.State(labels)


def static_tree(api: str, form: str) -> Any:
    """A mask written down before training, from the parameters of the plain model."""
    return jax.tree.map(lambda x: x.ndim > 1, reference.plain(source(api, form)).params)


def kernels_nnx(params: Any) -> Any:
    return nnx.map_state(lambda path, _: path[-1] == "kernel", params)


def biases_by_key(params: Any) -> Any:
    name = lambda path: [key.key for key in path if hasattr(key, "key")][-1]  # noqa: E731
    return tree_map_with_path(lambda path, _: name(path) != "bias", params)


def frozen_labels(params: Any) -> Any:
    """Flax's guide on transfer learning: what is below the backbone is not trained."""
    if isinstance(params, dict):
        return path_aware_map(lambda path, _: "frozen" if path[0].startswith("blocks") else "trained", params)
    return nnx.map_state(lambda path, _: "frozen" if path[0] == "blocks" else "trained", params)


def by_type(params: Any) -> Any:
    """By the class of the variable, as for LoRA's."""
    is_variable = lambda x: isinstance(x, nnx.Variable)  # noqa: E731
    return jax.tree.map(lambda x: type(x) is nnx.Param and getattr(x, "ndim", 0) > 1, params, is_leaf=is_variable)


def by_shape(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim != 1, params)


COSINE = optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10)
BOTH = ("linen", "nnx")


@dataclasses.dataclass(frozen=True)
class Recipe:
    """An optimizer, made for an API and a form of layers, and the APIs that it is written for."""

    make: Callable[[str, str], Any]
    apis: tuple[str, ...] = BOTH


RECIPES = {
    "decay kernels": Recipe(
        lambda api, form: optax.adamw(
            RATE, weight_decay=0.5, mask=lambda p: path_aware_map(lambda k, _: k[-1] == "kernel", p)
        ),
        ("linen",),
    ),
    "decay kernels of nnx": Recipe(lambda api, form: optax.adamw(RATE, weight_decay=0.5, mask=kernels_nnx), ("nnx",)),
    "decay all but biases": Recipe(lambda api, form: optax.adamw(RATE, weight_decay=0.5, mask=biases_by_key)),
    "decay by rank": Recipe(lambda api, form: optax.adamw(RATE, weight_decay=0.5, mask=by_shape)),
    "decay by a static tree": Recipe(
        lambda api, form: optax.adamw(RATE, weight_decay=0.5, mask=static_tree(api, form))
    ),
    "decay by type": Recipe(lambda api, form: optax.adamw(RATE, weight_decay=0.5, mask=by_type), ("nnx",)),
    "labels by first key": Recipe(
        lambda api, form: optax.multi_transform(
            {"embed": optax.sgd(RATE, 0.9), "rest": optax.adam(RATE)}, first_key_labels
        )
    ),
    "freeze a backbone": Recipe(
        lambda api, form: optax.partition({"trained": optax.adam(RATE), "frozen": optax.set_to_zero()}, frozen_labels)
    ),
    "freeze": Recipe(lambda api, form: optax.chain(optax.adam(RATE), optax.transforms.freeze(static_tree(api, form)))),
    "clip a part": Recipe(
        lambda api, form: optax.chain(optax.masked(optax.clip_by_global_norm(0.05), biases_by_key), optax.sgd(RATE))
    ),
    "schedule": Recipe(
        lambda api, form: optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(COSINE, mask=biases_by_key))
    ),
    "hyperparameters": Recipe(lambda api, form: optax.inject_hyperparams(optax.adam)(learning_rate=COSINE)),
    "every second step": Recipe(
        lambda api, form: optax.MultiSteps(optax.adamw(RATE, mask=by_shape), 2).gradient_transformation()
    ),
    "only finite": Recipe(lambda api, form: optax.apply_if_finite(optax.adamw(RATE, mask=by_shape), 3)),
    "factored": Recipe(lambda api, form: optax.adafactor(RATE, min_dim_size_to_factor=8, weight_decay_mask=by_shape)),
    "matrices for muon": Recipe(lambda api, form: jfsdp.optim.by_matrix(optax.contrib.muon(RATE))),
    "trust ratio": Recipe(lambda api, form: optax.lamb(RATE, mask=biases_by_key)),
    "plateau": Recipe(
        lambda api, form: optax.chain(optax.adam(RATE), optax.contrib.reduce_on_plateau(factor=0.5, patience=1))
    ),
    "step size from the loss": Recipe(lambda api, form: optax.polyak_sgd(RATE)),
    "step size from the loss, in bfloat16": Recipe(
        lambda api, form: jfsdp.optim.low_precision_state(optax.polyak_sgd(RATE))
    ),
    "average": Recipe(lambda api, form: optax.chain(optax.adam(RATE), jfsdp.optim.track_ema(0.9))),
    "momentum": Recipe(lambda api, form: optax.sgd(RATE, momentum=0.9, nesterov=True)),
    "noise": Recipe(lambda api, form: optax.chain(optax.add_noise(0.1, 0.5, jax.random.key(3)), optax.sgd(RATE))),
    "flatten": Recipe(lambda api, form: optax.flatten(optax.adam(RATE))),
    "sharpness": Recipe(lambda api, form: optax.contrib.sam(optax.sgd(RATE), optax.sgd(0.05), sync_period=2)),
}

# Mesh, form of layers, options of fully_shard, selectors of frozen leaves.
PLACES = {
    "3, stacked, full_shard": (3, "stacked", {}, ()),
    "4, list, manual": (4, "list", {"program": "manual"}, ()),
    "4, stacked, flat": (4, "stacked", {"program": "manual", "storage": "flat"}, ()),
    "3, list, zero1, frozen": (3, "list", {"strategy": "zero1"}, ("head", "embed")),
    "4, stacked, flat, frozen": (4, "stacked", {"program": "manual", "storage": "flat"}, ("blocks.norm", "embed")),
}
CASES = [(name, api) for name, recipe in RECIPES.items() for api in recipe.apis]
# In one API each, and in either in the proofs.
PLACED = [
    (name, recipe.apis[i % len(recipe.apis)], list(PLACES)[i % len(PLACES)])
    for i, (name, recipe) in enumerate(RECIPES.items())
]


@functools.cache
def oracle(name: str, api: str, form: str, frozen: tuple[str, ...]) -> reference.Trajectory:
    tx, batches = RECIPES[name].make(api, form), make_batches(STEPS, rows=12)
    return reference.train(source(api, form), token_loss, tx, batches, frozen=frozen)


def train(name: str, api: str, place: str) -> jfsdp.TrainState:
    num_devices, form, options, frozen = PLACES[place]
    mesh = jfsdp.make_mesh(devices=jax.devices()[:num_devices])
    units = [LinenBlock if api == "linen" else Block]
    model = fully_shard(
        source(api, form), mesh=mesh, units=units, min_size=4, frozen=[f"{path}.**" for path in frozen], **options
    )
    tx = RECIPES[name].make(api, form)
    state, step = model.init(tx), model.train_step(token_loss, tx, check_loss=False)
    for batch in make_batches(STEPS, rows=12):
        state, _ = step(state, batch)
    return state


def error(found: Any, wanted: Any, floor: float) -> float:
    if jnp.issubdtype(wanted.dtype, jax.dtypes.prng_key):
        wanted = jax.random.key_data(wanted)
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    if not wanted.size:
        return 0.0
    return float(np.abs(found - wanted).max() / max(floor, np.abs(wanted).max()))


def check(name: str, api: str, place: str) -> None:
    _, form, _, frozen = PLACES[place]
    state, wanted = train(name, api, place), oracle(name, api, form, frozen)
    assert {role.name for role in state.roles.arrays} == {f"opt_state.{key}" for key in wanted.opt_state}
    found = logical(state)
    params = {key: error(found[f"params.{key}"], x, RATE * STEPS) for key, x in wanted.params.items()}
    arrays = {key: error(found[f"opt_state.{key}"], x, 1e-6) for key, x in wanted.opt_state.items()}
    worst, leaf = max((value, key) for key, value in (params | arrays).items())
    assert worst < LIMIT, f"{leaf}: {worst:.1e}"


QUICK = ("freeze a backbone",)


@pytest.mark.parametrize(
    ("name", "api", "place"), [pytest.param(*x, marks=[pytest.mark.proof] * (x[0] not in QUICK)) for x in PLACED]
)
def test_a_recipe_equals_one_device(name, api, place):
    check(name, api, place)


@pytest.mark.proof
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(("name", "api"), CASES)
def test_every_recipe_equals_one_device_everywhere(name, api, place):
    check(name, api, place)


@pytest.mark.parametrize("api", BOTH)
def test_the_tree_that_an_optimizer_gets_is_the_models_own(api):
    given = []

    def see(*trees: Any) -> Any:
        given.extend(jax.tree.map(lambda x: x.shape, tree) for tree in trees)
        return optax.EmptyState()

    tx = optax.GradientTransformation(see, lambda grads, state, params: (grads, see(grads, params)))  # type: ignore[arg-type]
    model = fully_shard(source(api, "stacked"), mesh=jfsdp.make_mesh(devices=jax.devices()[:3]))
    model.train_step(token_loss, tx)
    wanted = jax.tree.map(lambda x: x.shape, reference.plain(source(api, "stacked")).params)
    assert len(given) > 2 and all(tree == wanted for tree in given)


@pytest.mark.parametrize(
    ("tx", "named"),
    [
        (optax.lbfgs(RATE), "linesearch"),
        (optax.chain(optax.sgd(RATE), optax.scale_by_backtracking_linesearch(3)), "linesearch"),
        (optax.lookahead(optax.adam(RATE), 5, 0.5), "lookahead"),
        (optax.masked(optax.adam(RATE), {"nothing": True}), "masked"),
        (optax.contrib.sam(optax.sgd(RATE), optax.sgd(RATE), opaque_mode=True), "sam"),
        (optax.chain(optax.monitor({"norm": lambda updates, *_, **__: optax.tree.norm(updates)})), "structure"),
    ],
)
def test_what_a_step_cannot_give_is_refused_by_name(tx, named):
    model = fully_shard(Tower)
    refuses(lambda: model.train_step(token_loss, tx), "optimizer:", named)


def test_frozen_and_integer_parameters_are_masked_nodes():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.tower, self.table = Tower(rngs), nnx.Param(jnp.arange(8))

    model = fully_shard(Mixed, frozen="tower.head.**")
    moments = model.abstract_state(optax.adam(RATE)).opt_state[0].mu
    assert moments["table"].get_raw_value() == optax.MaskedNode() == moments["tower"]["head"]["bias"].get_raw_value()
    assert moments["tower"]["embed"]["embedding"].shape == (37, 16)
