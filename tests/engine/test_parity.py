"""Five steps of every strategy, mesh and form equal the single-device reference; first parameters are bit-identical.

Limits: loss 1e-5 relative; parameters and moments 1e-3 of `max(lr * steps, max|ref|)` per leaf (moments: of max|ref|).
Sums over devices differ in order, and Adam divides small gradients by their own size.
"""

import functools
import itertools

import jax
import numpy as np
import optax
import pytest

import jfsdp
from tests import reference
from tests.models_small import Block, Tower, make_batches, token_loss

STEPS, LEARNING_RATE = 5, 1e-2
LOSS_LIMIT, LEAF_LIMIT = 1e-5, 1e-3
TX = optax.adamw(LEARNING_RATE)
MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "1": {"fsdp": 1}, "3": {"fsdp": 3}}
FORMS = {"stacked": True, "list": False}


def rows(mesh):
    return 18 if mesh == "3" else 16


@functools.cache
def oracle(form, clip, num_rows):
    batches = make_batches(STEPS, rows=num_rows)
    return reference.train(lambda rngs: Tower(rngs, FORMS[form]), token_loss, TX, batches, max_grad_norm=clip)


def shard(mesh, strategy, form, **options):
    sizes = MESHES[mesh]
    num_devices = int(np.prod(list(sizes.values())))
    return jfsdp.fully_shard(
        lambda rngs: Tower(rngs, FORMS[form]),
        mesh=jfsdp.make_mesh(**sizes, devices=jax.devices()[:num_devices]),
        strategy=strategy,
        units=[Block],
        min_size=20,
        **options,
    )


def check_parity(mesh, strategy, form, accumulate, clip, **options):
    model = shard(mesh, strategy, form, **options)
    state = model.init(TX)
    step = model.train_step(token_loss, TX, accumulate=accumulate, max_grad_norm=clip)
    wanted = oracle(form, clip, rows(mesh))
    losses, norms = [], []
    for batch in make_batches(STEPS, rows=rows(mesh)):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    np.testing.assert_allclose(losses, wanted.losses, rtol=LOSS_LIMIT)
    np.testing.assert_allclose(norms, wanted.grad_norms, rtol=LEAF_LIMIT)
    params = {name: reference.logical(state, name, value) for name, value in state.params.items()}
    error, name = reference.worst_leaf(params, wanted.params, LEARNING_RATE * STEPS)
    assert error < LEAF_LIMIT, f"parameter {name}: {error:.2e}"
    adam = state.opt_state[0]
    moments = {
        f"{kind}.{name}": reference.logical(state, name, value)
        for kind in ("mu", "nu")
        for name, value in getattr(adam, kind).items()
    }
    error, name = reference.worst_leaf(moments, wanted.moments, 1e-6)
    assert error < LEAF_LIMIT, f"moment {name}: {error:.2e}"


CASES = [
    # mesh, strategy, form, accumulate, clip: every pair of values of two columns that can meet stands in some row.
    ("8", "full_shard", "stacked", 1, 0.5),
    ("2x4", "full_shard", "list", 2, None),
    ("1", "full_shard", "stacked", 2, 0.5),
    ("3", "full_shard", "list", 1, None),
    ("8", "ddp", "list", 2, None),
    ("2x4", "ddp", "stacked", 1, 0.5),
    ("8", "zero1", "list", 2, 0.5),
    ("3", "zero1", "stacked", 2, None),
    ("2x4", "zero2", "stacked", 1, None),
    ("8", "shard_grad_op", "stacked", 2, None),
    ("2x4", "shard_grad_op", "list", 1, 0.5),
    ("2x4", "hybrid_shard", "stacked", 2, None),
    ("2x4", "hybrid_shard", "list", 1, 0.5),
    ("2x4", "hybrid_shard_zero2", "stacked", 1, 0.5),
    ("2x4", "hfsdp", "list", 2, None),
]


@pytest.mark.parametrize(("mesh", "strategy", "form", "accumulate", "clip"), CASES)
def test_five_steps_equal_one_device(mesh, strategy, form, accumulate, clip):
    check_parity(mesh, strategy, form, accumulate, clip)


@pytest.mark.parametrize(
    "options",
    [
        {"remat": "none"},
        {"remat": "dots"},
        {"remat": jax.checkpoint_policies.everything_saveable},
        {"reshard_after_forward": False},
        {"per_unit": {"": {"reshard_after_forward": True}}},
    ],
    ids=lambda options: "-".join(options),
)
def test_what_a_unit_saves_does_not_change_the_result(options):
    check_parity("8", "full_shard", "stacked", 1, 0.5, **options)


UNITS = {"root": [], "glob": ["blocks.*"], "size": [jfsdp.by_size(1000)], "nested": [Block, "blocks.*.up", "embed"]}


@pytest.mark.parametrize("units", list(UNITS.values()), ids=list(UNITS))
def test_the_choice_of_units_does_not_change_the_result(units):
    model = jfsdp.fully_shard(lambda rngs: Tower(rngs, False), units=units, min_size=20)
    state = model.init(TX)
    step = model.train_step(token_loss, TX)
    for batch, wanted in zip(make_batches(2), oracle("list", None, 16).losses, strict=False):
        state, metrics = step(state, batch)
        np.testing.assert_allclose(float(metrics["loss"]), wanted, rtol=LOSS_LIMIT)


@pytest.mark.parametrize(("mesh", "strategy"), [*itertools.product(MESHES, ["full_shard", "zero1", "hybrid_shard"])])
def test_the_same_seed_gives_the_same_bits_everywhere(mesh, strategy):
    wanted = reference.named(tower_params())
    params = shard(mesh, strategy, "stacked").init(TX).params
    for name, leaf in shard(mesh, strategy, "stacked").layout.by_path.items():
        stored = np.asarray(params[name])
        logical = stored[tuple(slice(0, size) for size in leaf.shape)]
        np.testing.assert_array_equal(logical, wanted[name], err_msg=name)
        assert np.count_nonzero(stored) == np.count_nonzero(logical), f"{name}: padding is not zero"


@functools.cache
def tower_params():
    from flax import nnx

    # Compiled as `init` compiles on CPU: with optimization the last bit depends on the shape of a loop.
    make = jax.jit(
        lambda key: nnx.state(Tower(nnx.Rngs(key)), nnx.Param), compiler_options={"xla_backend_optimization_level": 0}
    )
    return make(jax.random.key(0))


@pytest.mark.proof
@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("strategy", list(jfsdp.STRATEGIES))
def test_every_combination_equals_one_device(mesh, strategy, form, accumulate, clip):
    check_parity(mesh, strategy, form, accumulate, clip)
