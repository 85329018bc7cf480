"""Steps of every strategy, program, model and mesh equal the single-device reference, from bit-identical parameters.

Limits: loss 1e-5 relative, gradient norm 1e-4 relative; parameters 1e-3 of `max(lr * steps, max|ref|)` per leaf,
moments and batch statistics 1e-3 of `max(floor, max|ref|)` with a floor of 1e-3 of the largest leaf. Sums over devices
differ in order, and Adam divides small gradients by their own size. Where a gradient is zero in truth (a key's bias, a
bias before a BatchNorm) it is noise here and there: the floor and Adam's epsilon keep that from counting.
"""

import dataclasses
import functools
import itertools
import warnings
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jfsdp
from tests import reference
from tests.models_published import MODELS, PUBLISHED, batches
from tests.models_small import Block, token_loss
from tests.refusals import refuses
from tests.steps import fully_shard
from tests.ways import WAYS

STEPS, ROWS, LEARNING_RATE = 3, 48, 1e-2
LIMITS = {"loss": 1e-5, "grad_norm": 1e-4, "params": 1e-3, "moments": 1e-3, "model_state": 1e-3}
TX = optax.adamw(LEARNING_RATE, eps=1e-4)
MESHES = {"4": {"fsdp": 4}, "2x4": {"replica": 2, "fsdp": 4}, "3": {"fsdp": 3}}
STATISTICS = ("vit", "norm")  # of rows: only there do those of a microbatch matter for more than their sums


def make_mesh(mesh):
    sizes = MESHES[mesh]
    return jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def shard(model, mesh, strategy, **options):
    case = MODELS[model]
    named: dict[str, Any] = dict(options)
    units = named.pop("units", case.units)
    if strategy == "node":  # the processes of this test are one host: say how many devices share a copy
        named = PAIRS | named
    if "tensor" in MESHES[mesh]:
        named = {"placements": case.placements} | named
    way = WAYS.get(strategy, strategy)
    return fully_shard(case.source, mesh=make_mesh(mesh), strategy=way, units=units, min_size=20, **named)


@functools.cache
def oracle(model, clip, accumulate):
    case, data = MODELS[model], batches(model, STEPS, ROWS)
    return reference.train(case.source, case.loss, TX, data, max_grad_norm=clip, accumulate=accumulate)


def measure(model, mesh, strategy, accumulate, clip, options=None, **step_options):
    """Train; return the largest error of each property, and the leaf that has it."""
    sharded = shard(model, mesh, strategy, **(options or {}))
    state = sharded.init(TX)
    if sharded.layout.storage == "per_parameter":
        compare_first_bits(sharded.layout, state.params, first_parameters(model))
    # Here one device is what a step is compared with; the check of the loss would compile two more programs.
    options = {"accumulate": accumulate, "max_grad_norm": clip, "check_loss": False} | step_options
    step = sharded.train_step(MODELS[model].loss, TX, **options)
    wanted = oracle(model, clip, accumulate if model in STATISTICS else 1)
    losses, norms = [], []
    for batch in batches(model, STEPS, ROWS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
        norms.append(float(metrics["grad_norm"]))
    params = {name: reference.logical(state, name, value) for name, value in state.params.items()}
    arrays = {
        role.name.removeprefix("opt_state.0."): np.asarray(value)[tuple(map(slice, role.shape))]
        for role, value in zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True)
    }
    moments = {kind: {k: x for k, x in arrays.items() if k.startswith(f"{kind}.")} for kind in ("mu", "nu")}
    found = {name: np.asarray(x) for name, x in state.model_state.items() if name in wanted.model_state}
    return {
        "loss": (np.abs(np.array(losses) / wanted.losses - 1).max(), ""),
        "grad_norm": (np.abs(np.array(norms) / wanted.grad_norms - 1).max(), ""),
        "params": reference.worst_leaf(params, wanted.params, LEARNING_RATE * STEPS),
        "moments": max(worst(found, wanted.moments) for found in moments.values()),
        "model_state": worst(found, wanted.model_state),
    }


def worst(found, wanted):
    """Compare leaves of one kind, with a floor of 1e-3 of the largest."""
    if not found:
        return 0.0, ""
    wanted = {name: wanted[name] for name in found}
    return reference.worst_leaf(found, wanted, 1e-3 * max(float(np.abs(x).max()) for x in wanted.values()))


def check(model, mesh, strategy, accumulate, options=None, **step_options):
    clip = 0.5 if model in ("tied", "vit") else None
    for name, (error, leaf) in measure(model, mesh, strategy, accumulate, clip, options, **step_options).items():
        assert error < LIMITS[name], f"{name} {leaf}: {error:.2e}"


Split, Strategy, P = jfsdp.Split, jfsdp.Strategy, jax.sharding.PartitionSpec
BY_HAND = Strategy("own", ("fsdp",), ("replica", "fsdp"), ("replica", "fsdp"), reshard_after_forward=False)
SHARDED_ACCUMULATOR = Strategy("x", Split.WHOLE, Split.GROUP, Split.ALL)
XLA: dict[str, Any] = {"program": "xla"}
MANUAL: dict[str, Any] = {"program": "manual"}
FLAT = MANUAL | {"storage": "flat"}
LAST, ONCE, HELD = {"sync": "last"}, {"reshard_after_backward": False}, {"reshard_after_backward": {"blocks": False}}
PAIRS, FREED = {"reshard_after_forward": 2}, {"reshard_after_forward": True}
OFFLOADED = {"offload_policy": jfsdp.OffloadPolicy(True, True, True)}
NAMES = {"remat": jfsdp.SaveNames(("normed",), ("hidden",))}
INPUTS = {"remat": jfsdp.SaveNames(offload=(jfsdp.UNIT_INPUT,))}
PLACED = {"embed": P(None, "fsdp"), "head.kernel": "ddp", "head.bias": jfsdp.Ignore(), "blocks.0": "zero1"}
# Model, mesh, strategy and microbatches; and for each program the options of fully_shard and of the step. Every
# strategy is here under one program, and in `PROOFS` under the other.
CASES: dict[str, Any] = {
    "ddp": ("tower-deep", "2x4", "ddp", 2, (MANUAL, LAST)),
    "zero1, offloaded": ("tower-list", "2x4", "zero1", 2, (XLA | OFFLOADED, {})),
    "zero1, statistics": ("norm", "3", "zero1", 2, (XLA, {})),
    "zero2": ("tied", "3", "zero2", 1, (XLA | NAMES, {})),
    "full_shard": ("tower-deep", "4", "full_shard", 1, (XLA, {}), (MANUAL | {"prefetch": 0}, {})),
    "kept": ("tower-list", "3", "kept", 2, (MANUAL, {})),
    "node": ("tied", "4", "node", 1, (XLA, {}), (MANUAL, {})),
    "hfsdp": ("tied", "2x4", "hfsdp", 2, (MANUAL, LAST | ONCE)),
    "all": ("tower-deep", "2x4", "all", 2, (XLA, {})),
    "accumulator split further than parameters": ("tied", "2x4", SHARDED_ACCUMULATOR, 2, (MANUAL, {})),
    "inputs offloaded": ("tower-deep", "4", "full_shard", 2, (MANUAL | INPUTS, {})),
    "leaf by leaf": ("tower-list", "2x4", "full_shard", 2, (XLA | {"placements": PLACED}, {})),
}
PROOFS: dict[str, Any] = {
    "ddp, xla": ("tower-deep", "2x4", "ddp", 2, (XLA, {})),
    "zero1, offloaded, manual": ("tower-list", "2x4", "zero1", 2, (MANUAL | OFFLOADED, {})),
    "zero2, manual": ("tied", "3", "zero2", 1, (MANUAL | {"prefetch": 2}, {})),
    "kept, xla": ("tower-list", "3", "kept", 2, (XLA, {})),
    "hfsdp, xla": ("tied", "2x4", "hfsdp", 2, (XLA, {})),
    "all, manual": ("tower-deep", "2x4", "all", 2, (MANUAL | PAIRS | {"prefetch": 2}, {})),
    "inputs offloaded, xla": ("tower-deep", "4", "full_shard", 2, (XLA | INPUTS, {})),
    "by hand": ("llama", "2x4", BY_HAND, 2, (XLA, {})),
    "zero1 every": ("norm", "4", "zero1", 2, (XLA, {"sync": "every"})),
    "ddp once, uneven": ("tied", "3", "ddp", 2, (MANUAL, LAST)),
    "reduced once": ("tower-list", "4", "full_shard", 2, (MANUAL, LAST), (FLAT, LAST)),
    "gathered once": ("llama-deep", "4", "full_shard", 2, (XLA, ONCE), (MANUAL, ONCE), (FLAT, ONCE)),
    "reduced and gathered once": ("tower-deep", "2x4", "full_shard", 2, (XLA, LAST | ONCE), (MANUAL, LAST | ONCE)),
    "neighbours": ("tower-deep", "4", "full_shard", 2, (XLA | PAIRS, {}), (MANUAL | PAIRS, {}), (FLAT | PAIRS, {})),
    "neighbours, once": ("tied", "4", "full_shard", 2, (MANUAL | PAIRS, LAST | ONCE)),
    "neighbours over groups": ("tied", "2x4", "all", 2, (XLA | {"reshard_after_forward": 4}, {})),
    "root freed": ("tied", "4", "full_shard", 2, (XLA | FREED, {}), (MANUAL | FREED, {}), (FLAT | FREED, {})),
    "root held": ("gpt2", "2x4", "full_shard", 2, (MANUAL, {"reshard_after_backward": {"": False}})),
    "zero1 over both axes": ("tied", "2x4", "zero1", 2, (XLA | {"opt_over": ("replica", "fsdp")}, {})),
    "zero2 over both axes": ("tower-deep", "2x4", "zero2", 2, (XLA | {"opt_over": ("replica", "fsdp")}, {})),
    "zero1, one leaf split": ("tower-list", "4", "zero1", 2, (XLA | {"placements": {"head": "full_shard"}}, {})),
    "ignored": ("vit", "4", "full_shard", 2, (XLA | {"ignored": ["head"]}, {})),
    "offloaded": ("tower-list", "4", "zero2", 2, *((form | OFFLOADED, {}) for form in (XLA, MANUAL, FLAT))),
    "chunks": ("llama-chunks", "4", "full_shard", 2, *((form | INPUTS, {}) for form in (XLA, MANUAL, FLAT))),
    "chunks, list": ("llama-chunks-list", "2x4", "hfsdp", 1, (XLA | INPUTS, {}), (MANUAL | INPUTS, {})),
    "no units": ("tower-list", "4", "full_shard", 2, (MANUAL | {"units": []}, {})),
    "units by size": ("tower-list", "4", "full_shard", 2, (MANUAL | {"units": [jfsdp.by_size(1000)]}, {})),
    "nested units": ("tower-list", "4", "full_shard", 2, (MANUAL | {"units": [Block, "blocks.*.up", "embed"]}, {})),
} | {
    f"remat {name}": ("llama", "4", "full_shard", 2, (XLA | {"remat": remat}, {}), (MANUAL | {"remat": remat}, {}))
    for name, remat in {
        "none": "none",
        "dots": "dots",
        "names": ("qkv",),
        "offloaded": jfsdp.SaveNames(("qkv",), ("mlp_hidden",)),
        "own": jax.checkpoint_policies.everything_saveable,
    }.items()
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.proof) for case in PROOFS)])
def test_steps_equal_one_device(case):
    model, mesh, strategy, accumulate, *programs = (CASES | PROOFS)[case]
    for options, step_options in programs:
        check(model, mesh, strategy, accumulate, options, **step_options)


def test_neighbours_that_do_not_divide_an_axis_are_refused():
    refuses(lambda: shard("tied", "3", "node"), "reshard_after_forward=2", "3 devices")


@pytest.mark.proof
@pytest.mark.parametrize(
    ("model", "mesh", "strategy", "accumulate"), list(itertools.product(PUBLISHED, MESHES, WAYS, [1, 2]))
)
def test_every_combination_equals_one_device(model, mesh, strategy, accumulate):
    """Under program `xla`; test_manual_parity.py has the other."""
    if (mesh, strategy) != ("3", "node"):
        check(model, mesh, strategy, accumulate, XLA)


def test_a_mean_trains_as_the_sum_with_its_weight(monkeypatch):
    """Under program `xla`, which is chosen for it."""

    def mean(model, batch):
        loss = token_loss(model, batch)
        return loss.total / loss.weight, {"accuracy": (loss.aux or {})["accuracy"] / loss.weight}

    oracle("tower-deep", None, 1)  # of the sum
    monkeypatch.setitem(MODELS, "tower-deep", dataclasses.replace(MODELS["tower-deep"], loss=mean))
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "the loss is a scalar")
        check("tower-deep", "4", "full_shard", 1)


@functools.cache
def first_parameters(model):
    """The parameters that Flax makes: what `init` makes, too, to the last bit."""
    return reference.named(reference.first_params(MODELS[model].source))


def compare_first_bits(layout, params, wanted):
    for name, leaf in layout.by_path.items():
        stored = np.asarray(params[name])
        logical = stored[tuple(slice(0, size) for size in leaf.shape)]
        np.testing.assert_array_equal(logical, wanted[name], err_msg=name)
        assert np.count_nonzero(stored) == np.count_nonzero(logical), f"{name}: padding is not zero"
