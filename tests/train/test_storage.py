"""Flat storage: a unit moves as one array per dtype and life, and a state has its leaves by name all the same.

Parity with one device stands in tests/engine/test_manual_parity.py, checkpoints and `reshard` between storage forms in
their own tests; optimizers that read the leaves by name and shape are in test_recipes.py.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jfsdp
from jfsdp.layout.flat import pack, unpack
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.plan.traffic.ledger import make_ledger
from tests import hlo
from tests.models_small import VOCAB, Block, Tower, make_batches, token_loss
from tests.refusals import refuses, refusing
from tests.steps import fully_shard
from tests.thin import thin

TX = optax.sgd(1e-2, momentum=0.9)
MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "3": {"fsdp": 3}, "1": {"fsdp": 1}}


def make(source: Any = Tower, mesh="8", **options: Any):
    sizes = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    options = {"units": [Block], "program": "manual", "storage": "flat"} | options
    return fully_shard(source, mesh=jfsdp.make_mesh(**sizes, devices=devices), **options)


def train(model, tx=TX, num=2):
    state, step = model.init(tx), model.train_step(token_loss, tx, check_loss=False)
    for batch in make_batches(num, rows=24):
        state, metrics = step(state, batch)
    return state, metrics


def assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def test_a_unit_moves_as_one_array():
    buffers = {buffer.path: buffer for buffer in make().layout.buffers}
    assert set(buffers) == {"blocks.flat_param", "flat_param"}
    # Per layer a norm [16], up [16 64] and its bias [64], down [64 16]: all divide by 8.
    assert buffers["blocks.flat_param"].shape == (3, 16 + 16 * 64 + 64 + 64 * 16)
    # embed [37 16], head [16 37] and its bias [37], padded to 40.
    assert buffers["flat_param"].shape == (37 * 16 + 16 * 37 + 40,)


def test_a_device_makes_its_chunk_of_its_own_shards():
    """So no byte moves between devices before a gather: the chunk of device n is what `pack` makes of its shards."""
    model = make()
    params = model.init(TX).params
    for buffer in model.layout.buffers:
        whole = np.asarray(pack(buffer, jax.device_get(params)))
        for place, device in enumerate(model.mesh.devices.flat):
            own: dict[str, Any] = {
                view.path: next(np.asarray(x.data) for x in params[view.path].addressable_shards if x.device == device)
                for view in buffer.views
            }
            chunk = whole[..., place * buffer.chunk : (place + 1) * buffer.chunk]
            np.testing.assert_array_equal(pack(buffer, own), chunk)


@pytest.mark.parametrize(
    ("mesh", "stacked"), thin([("3", True), ("3", False), ("1", True), ("2x4", False), ("8", True), ("2x4", True)], 3)
)
def test_the_first_state_is_bitwise_that_of_per_parameter_storage(mesh, stacked):
    source = lambda rngs: Tower(rngs, stacked=stacked)  # noqa: E731
    wanted = make(source, mesh, storage="per_parameter", min_size=0).init(TX)
    found = dataclasses.replace(make(source, mesh).init(TX), layout=wanted.layout)
    assert found.roles == wanted.roles
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, wanted)
    assert_equal(found, wanted)


def test_a_model_given_with_its_weights_keeps_them():
    plain: Any = Tower(nnx.Rngs(3))
    state = make(plain).init(TX)
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, "head.bias"), plain.head.bias[...])
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, "blocks.up.kernel"), plain.blocks.up.kernel[...])


def test_frozen_leaves_have_a_buffer_of_their_own_and_are_not_reduced():
    model = make(frozen=["blocks.up"])
    names = {buffer.path for buffer in model.layout.buffers}
    assert names == {"flat_param", "blocks.flat_param", "blocks.flat_param_2"}
    frozen = next(buffer for buffer in model.layout.buffers if not buffer.trainable)
    assert [view.path for view in frozen.views] == ["blocks.up.bias", "blocks.up.kernel"]
    before = jax.device_get(model.init(TX).params)
    after = jax.device_get(train(model)[0].params)
    assert not [role for role in model.init(TX).roles.arrays if (role.leaf or "").startswith("blocks.up")]
    changed = {name: bool((after[name] != before[name]).any()) for name in after}
    assert changed == {leaf.path: leaf.trainable for leaf in model.layout.leaves}


def test_leaves_of_other_dtypes_have_buffers_of_their_own():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCAB, VOCAB, rngs=rngs)
            self.table = nnx.Param(jnp.arange(16))
            self.half = nnx.Param(jnp.ones((8, 8), jnp.bfloat16))

        def __call__(self, tokens):
            return self.embed(tokens) * self.half[...].astype(jnp.float32).mean() + self.table[...].sum() * 0

    model = make(Mixed, units=())
    assert {buffer.dtype for buffer in model.layout.buffers} == {"float32", "bfloat16", "int32"}
    _, metrics = train(model, num=1)
    wanted = token_loss(Mixed(nnx.Rngs(0)), make_batches(1, rows=24)[0])
    np.testing.assert_allclose(metrics["loss"], wanted.total / wanted.weight, rtol=1e-5)


def test_averages_evaluation_and_full_see_the_leaves():
    tx = optax.chain(TX, jfsdp.optim.track_ema(0.5))
    model, plain = make(), make(storage="per_parameter", min_size=0, program=None)
    state = train(model, tx)[0]
    moved = jfsdp.checkpoint.reshard(state, plain)
    fn = lambda model, tokens: model(tokens)  # noqa: E731
    tokens = make_batches(1)[0]["tokens"]
    for change in (lambda s: s, jfsdp.optim.with_ema):
        found, wanted = model.forward(fn)(change(state), tokens), plain.forward(fn)(change(moved), tokens)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    name = "opt_state.0.0.trace.blocks.down.kernel"
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, name), jfsdp.checkpoint.gather_leaf(moved, name))
    with refusing("blocks.dwn.kernel"):
        jfsdp.checkpoint.gather_leaf(state, "blocks.dwn.kernel")


shapes = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=4)


buffers = given(shapes=shapes, num_layers=st.none() | st.integers(1, 3), num_devices=st.integers(1, 5))


@buffers
@settings(max_examples=8, deadline=None)
def test_any_leaves_come_back_from_a_buffer(shapes, num_layers, num_devices):
    check_buffers(shapes, num_layers, num_devices)


@pytest.mark.proof
@buffers
@settings(max_examples=300, deadline=None)
def test_very_many_leaves_come_back_from_a_buffer(shapes, num_layers, num_devices):
    check_buffers(shapes, num_layers, num_devices)


def check_buffers(shapes, num_layers, num_devices):
    lead = () if num_layers is None else (num_layers,)

    class Odd(nnx.Module):
        def __init__(self, rngs):
            for place, shape in enumerate(shapes):
                setattr(self, f"leaf{place}", nnx.Param(jnp.zeros((*lead, *shape))))

        def __call__(self, x):
            return x

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.odd = Odd(rngs)

    layout = fully_shard(
        Model,
        mesh=make_abstract_mesh({"fsdp": num_devices}),
        units=[jfsdp.Unit(Odd, stacked=len(lead))],
        program="manual",
        storage="flat",
    ).layout
    for buffer in layout.buffers:
        leaves = {view.path: layout.by_path[view.path] for view in buffer.views}
        draw = np.random.default_rng(0)
        values: dict[str, Any] = {path: draw.random(x.stored_shape, np.float32) for path, x in leaves.items()}
        packed = pack(buffer, values)
        assert packed.shape == buffer.shape
        found = unpack(buffer, packed)
        for path, value in values.items():
            np.testing.assert_array_equal(found[path], value)


def test_xla_refuses_it_and_a_step_refuses_a_state_of_the_other_form():
    with refusing("storage='flat'", "program='xla'", "XLA"):
        fully_shard(Tower, storage="flat", program="xla").train_step(token_loss, TX)
    with refusing("'round'", "per_parameter"):
        fully_shard(Tower, storage="round")
    step = make().train_step(token_loss, TX)
    refuses(lambda: step(make(storage="per_parameter").init(TX), make_batches(1)[0]), "another layout")


class Mixed(nnx.Module):
    """A block that is called by schedule, and inside a vmap, where no schedule reaches it."""

    def __init__(self, rngs):
        self.block = Block(16, rngs)

    def __call__(self, x):
        x = self.block(x)
        return x + jax.vmap(self.block)(x[None])[0]


@pytest.mark.parametrize("storage", thin(["flat", "per_parameter"]))
@pytest.mark.filterwarnings("ignore:units block are called inside:UserWarning")
def test_offloaded_weights_of_a_unit_that_is_also_called_in_place(storage):
    def loss(model, batch):
        out = model(batch)
        return jfsdp.Loss((out**2).sum(), jnp.asarray(out.size, jnp.float32))

    rows = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    found = []
    for offload in (None, jfsdp.OffloadPolicy(params=True)):
        model = make(Mixed, storage=storage, min_size=0, offload_policy=offload)
        found.append(model.train_step(loss, TX, check_loss=False)(model.init(TX), rows)[1])
    np.testing.assert_allclose(found[0]["grad_norm"], found[1]["grad_norm"], rtol=1e-6)


def test_an_undeclared_stack_is_named():
    model = make(units=[jfsdp.Unit(Block, stacked=0)], strategy="ddp")
    step = model.train_step(token_loss, TX)
    refuses(lambda: step.trace(model.abstract_state(TX), make_batches(1)[0]), "blocks.down.kernel", "stacked=1")


def test_averages_of_some_leaves_in_another_dtype():
    class Half(Tower):
        def __init__(self, rngs):
            super().__init__(rngs)
            for leaf in jax.tree.leaves(self.head, is_leaf=lambda x: isinstance(x, nnx.Param)):
                leaf[...] = leaf[...].astype(jnp.bfloat16)

    mask = lambda params: jax.tree.map(lambda x: x.ndim == 1, params)  # noqa: E731
    tx = optax.chain(TX, optax.masked(jfsdp.optim.track_ema(0.5), mask))
    model = make(Half)
    state = jfsdp.optim.with_ema(model.init(tx))
    assert jax.tree.structure(state) == jax.tree.structure(model.init(tx))


def test_theory_shows_the_padding_of_leaves():
    layout = make(mesh="3").layout
    assert sum(row.expected_bytes for row in make_ledger(layout, []).rows if row.what == "padding") > 0


def test_a_step_has_one_gather_and_one_reduction_per_unit():
    devices = hlo.h100s(1)
    source = lambda rngs: Tower(rngs, stacked=False, dim=64, num_layers=2)  # noqa: E731
    model = fully_shard(source, mesh=jfsdp.make_mesh(devices=devices), units=[Block], program="manual", storage="flat")
    # Thresholds of one byte: what XLA would combine by itself stays apart, so that what is counted is ours.
    apart = {f"xla_gpu_{k}_combine_threshold_bytes": 1 for k in ("all_gather", "reduce_scatter", "all_reduce")}
    step = model.train_step(token_loss, TX, compiler_options=apart)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batches(1)[0])
    text = step.lower(model.abstract_state(TX), batch).compile().as_text()
    counts = dict.fromkeys(("all-gather", "reduce-scatter"), 0)
    for item in hlo.collectives(text, 8):
        if item.kind in counts:
            counts[item.kind] += item.count * len(item.parts)
    assert counts == {"all-gather": 2 * 2 + 1, "reduce-scatter": 2 + 1}
