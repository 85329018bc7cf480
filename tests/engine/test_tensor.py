"""Mesh axis `tensor`: a model that splits its own computation over it trains as on one device, under both programs.

Steps are of SGD, so that a sum too many or too few shows. A device's weights are gathered from those that share its
place along `tensor`.
"""

import functools
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import jfsdp
from jfsdp.layout.lint import LayoutWarning
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.traffic.attribution import group_axes
from tests import models_published, reference
from tests.engine import test_parity
from tests.engine.test_parity import LIMITS
from tests.models_published import CUT
from tests.models_small import VOCAB, Block, Tower, make_batches, token_loss
from tests.refusals import refusing, warning
from tests.steps import fully_shard
from tests.thin import thin

U = PartitionSpec.UNCONSTRAINED
MESHES = {"4x2": {"fsdp": 4, "tensor": 2}, "2x2x2": {"replica": 2, "fsdp": 2, "tensor": 2}}
STEPS, TX = 2, optax.sgd(0.3)
pytestmark = pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")


def split(x, *, free=U):
    """State that the last dim is split over `tensor`, where there is such an axis."""
    if jax.sharding.get_abstract_mesh().shape.get("tensor", 1) == 1:
        return x
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*[free] * (x.ndim - 1), "tensor"))


class SplitBlock(Block):
    def __call__(self, x):
        return x + self.down(split(nnx.relu(self.up(self.norm(x)))))


class SplitTower(Tower):
    """A tower whose blocks are wide along `tensor`."""

    def __init__(self, rngs, stacked=True, dim=16, num_layers=3):
        super().__init__(rngs, stacked, dim, num_layers)
        for _, node in nnx.iter_graph(self):
            if type(node) is Block:
                node.__class__ = SplitBlock


class Listed(SplitTower):
    def __init__(self, rngs):
        super().__init__(rngs, stacked=False, num_layers=2)


class Tied(SplitTower):
    """Its head is its embedding: a weight with two gradients."""

    def __call__(self, tokens):
        x = self.embed(tokens)
        x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        return self.embed.attend(x)


class LinenBlock(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x + linen.Dense(16)(split(linen.relu(linen.Dense(64)(x))))


class LinenTower(linen.Module):
    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, 16)(tokens)
        for _ in range(2):
            x = LinenBlock()(x)
        return linen.Dense(VOCAB)(x)


LINEN = (LinenTower(), (jax.ShapeDtypeStruct((16, 6), np.int32),))
MODELS = {
    "stacked": (SplitTower, [SplitBlock]),
    "listed": (Listed, [SplitBlock]),
    "tied": (Tied, [SplitBlock]),
    "linen": (LINEN, [LinenBlock]),
}


def make_mesh(sizes):
    return jfsdp.make_mesh(**sizes, devices=jax.devices()[: int(np.prod(list(sizes.values())))])


def shard(model, sizes, **options: Any):
    source, units = MODELS.get(model, (model, [SplitBlock]))
    return fully_shard(source, mesh=make_mesh(sizes), units=units, min_size=20, **options)


def train(model, *, accumulate=1, loss=token_loss, step_options=None):
    """Take a few steps; return the state and the metrics."""
    step = model.train_step(loss, TX, accumulate=accumulate, check_loss=False, **(step_options or {}))
    metrics: list[Any] = []
    state = model.init(TX)
    for batch in make_batches(STEPS):
        state, found = step(state, batch)
        metrics.append({name: float(value) for name, value in found.items()})
    return state, metrics


@functools.cache
def oracle(source):
    return reference.train(source, token_loss, TX, make_batches(STEPS))


def check_model(model, source, **step: Any):
    """Check that a model trains as its source on one device."""
    state, metrics = train(model, **step)
    wanted = oracle(source)
    for name, series in (("loss", wanted.losses), ("grad_norm", wanted.grad_norms)):
        found = np.array([step[name] for step in metrics])
        assert np.abs(found / np.array(series) - 1).max() < LIMITS[name], name
    first = reference.named(reference.plain(source).params)
    moved = {name: reference.logical(state, name, value) - first[name] for name, value in state.params.items()}
    error, leaf = reference.worst_leaf(moved, {name: x - first[name] for name, x in wanted.params.items()}, 1e-3)
    assert error < LIMITS["params"], leaf


def check(model, sizes, *, accumulate=1, step_options=None, **options: Any):
    check_model(shard(model, sizes, **options), MODELS[model][0], accumulate=accumulate, step_options=step_options)


@pytest.mark.proof  # test_cuts.py has them with the tests, of weights that are cut
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("program", ["xla", "manual"])
@pytest.mark.parametrize("mesh", MESHES)
@pytest.mark.parametrize("model", MODELS)
def test_steps_equal_one_device(model, mesh, program, accumulate):
    check(model, MESHES[mesh], program=program, accumulate=accumulate)


WEIGHTS_CUT = list(itertools.product((*CUT, "llama-list", "gpt2"), MESHES, ("manual", "xla")))
WEIGHTS_CUT += [("vit", mesh, "xla") for mesh in MESHES]  # its norms are of the whole batch


@pytest.mark.proof  # tests/context/test_models.py has a Llama over `tensor` with the tests, test_cuts.py small models
@pytest.mark.parametrize(("model", "mesh", "program"), WEIGHTS_CUT)
def test_published_models_are_cut_and_equal_one_device(monkeypatch, model, mesh, program):
    """Their attention is inside a `shard_map` of its own where the engine has one around it."""
    monkeypatch.setitem(test_parity.MESHES, mesh, MESHES[mesh])
    test_parity.check(model, mesh, "full_shard", 1, {"program": program})


@pytest.mark.proof  # tests/models/test_over_tensor.py has what a model states of such rows
@pytest.mark.parametrize("program", ["xla", "manual"])
@pytest.mark.parametrize("model", ["gpt2-cut", "llama-cut"])
def test_rows_that_the_axis_does_not_divide_are_whole_between_the_layers(monkeypatch, model, program):
    monkeypatch.setattr(models_published, "LENGTH", 5)
    monkeypatch.setitem(test_parity.MESHES, "4x2", MESHES["4x2"])
    test_parity.check(model, "4x2", "full_shard", 1, {"program": program})


@pytest.mark.parametrize(
    ("program", "strategy"), thin([("manual", "hfsdp"), ("manual", "full_shard"), (None, "zero1")], 3)
)
def test_sums_in_low_precision_are_those_of_the_data_axes_alone(program, strategy):
    """XLA:CPU aborts at a sum of 16 bits in a partly manual `shard_map`, so each has a whole one of its own."""
    policy = jfsdp.MixedPrecisionPolicy("bfloat16", "bfloat16")
    model = shard("listed", MESHES["2x2x2"], program=program, strategy=strategy, mp_policy=policy)
    _, metrics = train(model, accumulate=2)
    wanted = oracle(Listed)
    np.testing.assert_allclose([step["loss"] for step in metrics], wanted.losses, rtol=5e-3)
    np.testing.assert_allclose([step["grad_norm"] for step in metrics], wanted.grad_norms, rtol=2e-2)


@pytest.mark.parametrize("program", ["xla", "manual"])
def test_weights_are_gathered_over_the_data_axes_alone(program):
    """And the wide matrix products are split: half as wide on each of two devices."""
    found, layout, text = compiled(SplitTower, program)
    for item in found:
        if program == "xla" and item.kind == "collective-permute":  # XLA puts the slices of a bias in order
            assert [shape.dims for shape in item.parts] == [(16,)], item
            continue
        axes = group_axes(layout, item.group)
        assert axes in (("fsdp",), ("tensor",), ("fsdp", "tensor")), item
        if ".gather." in item.op_name and "all_gather" in item.op_name.rpartition("/")[2]:
            assert axes == ("fsdp",), item.op_name
    gathers = [item for item in found if item.kind == "all-gather" and group_axes(layout, item.group) == ("fsdp",)]
    assert len(gathers) >= 6
    assert "f32[4,6,32]" in text.replace("f32[24,32]", "f32[4,6,32]")


def compiled(source, program):
    model = fully_shard(source, mesh=make_mesh(MESHES["4x2"]), units=[SplitBlock], min_size=20, program=program)
    step = model.train_step(token_loss, TX)
    text = step.lower(model.abstract_state(TX), make_batches(1)[0]).compile().as_text()
    return find_collectives(parse_module(text), 8), model.layout, text


class Dropping(nnx.Module):
    """Drops a third of a wide value, by keys that it never changes."""

    def __init__(self, rngs):
        self.embed, self.block = nnx.Embed(VOCAB, 16, rngs=rngs), SplitBlock(16, rngs)
        self.head, self.key = nnx.Linear(16, VOCAB, rngs=rngs), nnx.Variable(jax.random.key(3))

    def __call__(self, tokens):
        x = self.block(self.embed(tokens))
        keep = jax.random.bernoulli(self.key[...], 0.7, x.shape)
        return self.head(jax.numpy.where(keep, x / 0.7, 0.0))


@pytest.mark.parametrize("program", thin(["manual", "xla"]))
def test_devices_along_the_models_axis_draw_the_same_masks(program):
    """So masks are those of the same data axes without it."""
    meshes = MESHES["4x2"], {"fsdp": 4}
    wide, narrow = (train(shard(Dropping, sizes, program=program))[1] for sizes in meshes)
    np.testing.assert_allclose([m["loss"] for m in wide], [m["loss"] for m in narrow], rtol=1e-5)
    np.testing.assert_allclose([m["grad_norm"] for m in wide], [m["grad_norm"] for m in narrow], rtol=1e-4)


def test_evaluation_runs_on_the_models_axes_too():
    model = fully_shard(SplitTower, mesh=make_mesh(MESHES["4x2"]), units=[SplitBlock], min_size=20)
    state, batch = model.init(TX), make_batches(1)[0]
    found = model.forward(lambda model, rows: token_loss(model, rows).total)(state, batch)
    plain = jax.jit(lambda batch: token_loss(SplitTower(nnx.Rngs(0)), batch).total)(batch)
    assert float(found) == pytest.approx(float(plain), rel=1e-3)


def stating(spec):
    class Stating(Tower):
        def __call__(self, tokens):
            return jax.lax.with_sharding_constraint(super().__call__(tokens), spec)

    return Stating


def lower(source, program=None, *, loss=token_loss, min_size=1024, **options: Any):
    model = fully_shard(source, mesh=make_mesh(MESHES["4x2"]), units=[Block], program=program, min_size=min_size)
    step = model.train_step(loss, TX, **options)
    return step.lower(model.abstract_state(TX), make_batches(1)[0])


ONCE = {"accumulate": 2, "sync": "last", "reshard_after_backward": False}


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* states no sharding")
@pytest.mark.parametrize(("program", "options"), [("manual", {}), (None, ONCE)])
def test_a_data_axis_in_the_model_is_refused_by_name(program, options):
    source = stating(PartitionSpec("fsdp", None, U))
    with refusing("'fsdp'"):
        lower(source, program, **options)


@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_model_that_states_nothing_is_told_that_its_devices_repeat_work(program):
    with warning("'tensor'", "size 2"):
        lower(Tower, program)


def scalar_loss(model, batch):
    return token_loss(model, batch).total / 16


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* states no sharding")
def test_rows_that_a_model_gathers_unasked_are_told():
    """None in a spec is whole: in program "xla" the rows of all devices come to each."""
    with warning("None for dim 0", "UNCONSTRAINED"):
        lower(stating(PartitionSpec(None, U, None)), loss=scalar_loss)
    lower(stating(PartitionSpec(U, U, None)), loss=scalar_loss)


def test_that_no_memory_is_saved_is_told():
    with warning("'tensor'", "size 2", "100.0", error=LayoutWarning):
        fully_shard(Tower, mesh=make_mesh(MESHES["4x2"]), units=[Block])


def test_a_mesh_that_the_axis_has_size_1_on_says_nothing():
    model = fully_shard(SplitTower, mesh=make_mesh({"fsdp": 8}), units=[SplitBlock], program="manual")
    model.train_step(token_loss, TX).lower(model.abstract_state(TX), make_batches(1)[0])


def test_batches_are_split_over_the_data_axes():
    model = fully_shard(SplitTower, mesh=make_mesh(MESHES["4x2"]), units=[SplitBlock])
    rows = model.train_step(token_loss, TX).shard_batch(make_batches(1)[0])["tokens"]
    assert rows.sharding.shard_shape(rows.shape) == (4, 6)
