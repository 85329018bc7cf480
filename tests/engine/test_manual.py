"""Program "manual" on models of every shape: what it schedules, what it leaves in place, what it refuses."""

import collections
import contextlib
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.jaxprs import all_eqns, inner_jaxprs, is_literal
from tests import hlo
from tests.models_small import Block, Tower, linear, make_batches, token_loss
from tests.refusals import refuses, refusing, warning
from tests.steps import fully_shard
from tests.thin import thin

TX = optax.sgd(0.1)
PREFETCH = jfsdp.Prefetch


class Chain(nnx.Module):
    """Residual blocks, each called as one of `hows` says."""

    def __init__(self, rngs, *hows):
        self.hows = hows or ("once",) * 3
        self.blocks = nnx.List([Block(16, rngs) for _ in self.hows])
        self.pair = Pair(rngs) if "nested" in hows else None

    def __call__(self, x):
        for how, block in zip(self.hows, self.blocks, strict=True):
            x = CALLS[how](self, block, x)
        return x


class Pair(nnx.Module):
    """A unit within which another unit is called."""

    def __init__(self, rngs):
        self.inner, self.outer = Block(16, rngs), linear(16, 16, rngs)

    def __call__(self, x):
        return self.outer(self.inner(x))


CALLS = {
    "once": lambda model, block, x: block(x),
    "twice": lambda model, block, x: block(block(x)),
    "never": lambda model, block, x: x,
    "jit": lambda model, block, x: nnx.jit(lambda block, x: block(x))(block, x),
    "remat": lambda model, block, x: nnx.remat(lambda block, x: block(x))(block, x),
    "vmap": lambda model, block, x: nnx.vmap(lambda b, x: b(x), in_axes=(None, 0))(block, x),
    "nested": lambda model, block, x: model.pair(block(x)),
}


def square(model, batch):
    out = model(batch)
    return jfsdp.Loss((out**2).sum(), jnp.asarray(out.size, jnp.float32), {})


def rows():
    return np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)


def train(source, loss, batches, units=(Block,), step=(), **options):
    model = fully_shard(source, units=list(units), min_size=1, **options)
    state, step = model.init(TX), model.train_step(loss, TX, check_loss=False, **dict(step))
    for batch in batches:
        state, metrics = step(state, batch)
    return jax.device_get((state.params, metrics))


def traced(source, loss, batch, units=(Block,), **options):
    """Trace a step for shapes alone, as one that is refused is."""
    model = fully_shard(source, units=list(units), min_size=1, **options)
    return model.train_step(loss, TX).trace(model.abstract_state(TX), batch)


def listed(rngs):
    return Tower(rngs, stacked=False)


def assert_close(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-6), found, wanted)


# How blocks are called, and the units that stay in place.
CHAINS = {
    "by schedule": (("twice", "never", "jit", "once"), ()),
    "in place": (("remat", "once", "vmap"), ("blocks.0", "blocks.2")),
    "nested": (("nested", "once"), ("pair.inner",)),
}


@pytest.mark.parametrize("name", CHAINS)
def test_units_called_in_any_way_train_as_under_xla(name):
    hows, in_place = CHAINS[name]
    source, units = (lambda rngs: Chain(rngs, *hows)), (Block, Pair) if "nested" in hows else (Block,)
    wanted = train(source, square, [rows()] * 2, units, program="xla")
    with warning("units", *in_place, "nested") if in_place else contextlib.nullcontext():
        found = train(source, square, [rows()] * 2, units, program="manual")
    assert_close(found, wanted)


@pytest.mark.parametrize(
    ("sizes", "options", "step"),
    [({"replica": 2}, {"opt_over": ("replica", "fsdp")}, {}), ({}, {}, {"accumulate": 2, "sync": "last"})],
)
def test_gradients_in_place_are_summed_once_over_every_axis(sizes, options, step):
    """Where the accumulator is split further than the weights, and where it is whole until the last microbatch."""
    hows, in_place = CHAINS["in place"]
    source = lambda rngs: Chain(rngs, *hows)  # noqa: E731
    wanted = train(source, square, [rows()] * 2, program="xla")
    with warning("units", *in_place):
        found = train(
            source, square, [rows()] * 2, program="manual", mesh=jfsdp.make_mesh(**sizes), step=step, **options
        )
    assert_close(found, wanted)


def behind(jaxpr, kind, before):
    """Count for each equation of a kind those of another that its operands are computed from, barriers counted."""
    found, known = [], collections.defaultdict(frozenset)
    for eqn in jaxpr.eqns:
        names = {inner.primitive.name for one in inner_jaxprs(eqn) for inner in all_eqns(one)}
        needs = frozenset().union(*(known[var] for var in eqn.invars if not is_literal(var)))
        names.add(eqn.primitive.name)
        found += [len(needs)] if kind in names else []
        known.update(dict.fromkeys(eqn.outvars, needs | {id(eqn)} if before in names else needs))
    return found


def test_no_gather_and_no_call_starts_before_what_it_is_to_wait_for():
    """Else XLA may gather all weights at first, and reduce all gradients at last."""
    batch = make_batches(1)[0]
    outer = traced(listed, token_loss, batch, program="manual", prefetch=0).jaxpr.jaxpr
    (jaxpr,) = [eqn.params["jaxpr"] for eqn in all_eqns(outer) if eqn.primitive.name == "shard_map"]
    assert len({*behind(jaxpr, "all_gather", "dot_general")}) == 2 * 3, "those of three blocks, forward and backward"
    assert any(behind(jaxpr, "dot_general", "reduce_scatter"))


def test_lists_of_units_change_no_bit():
    lists = PREFETCH({"blocks.0": ["blocks.1", "blocks.2"]}, {"blocks.2": ["blocks.1"]})
    found, wanted = (train(listed, token_loss, make_batches(2), program="manual", prefetch=x) for x in (lists, 0))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(
    ("prefetch", "facts"),
    [
        (4, ("forward=4", "3 units")),
        (PREFETCH({"blocks.0": ["blocks.2"]}), ("'blocks.0'", "'blocks.1'")),
        (PREFETCH(1, {"blocks.0": ["blocks.1"]}), ("backward['blocks.0']",)),
        (PREFETCH({"block.0": []}), ("'block.0'", "'blocks.0'")),
    ],
)
def test_a_prefetch_that_the_step_cannot_follow_is_refused(prefetch, facts):
    refuses(lambda: traced(listed, token_loss, make_batches(1)[0], program="manual", prefetch=prefetch), *facts)


def test_names_of_program_and_prefetch_are_checked():
    def step(**how):
        return lambda: jfsdp.fully_shard(Tower).train_step(token_loss, optax.sgd(0.1), **how)

    refuses(step(program="hand"), "program='hand'", "xla", "manual")
    refuses(step(prefetch=1, program="xla"), "prefetch=1", "program='xla'", "program='manual'")
    refuses(step(program="manual", prefetch=-1), "prefetch=-1", "at least 0")


def test_a_model_whose_state_depends_on_the_rows_is_refused():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.norm = linear(16, 16, rngs), nnx.BatchNorm(16, rngs=rngs)

        def __call__(self, x):
            return self.norm(self.linear(x))

    refuses(lambda: traced(Normed, square, rows(), (nnx.Linear,), program="manual"), "norm.mean", "program='xla'")


def test_a_loss_that_names_a_mesh_axis_is_refused():
    def loss(model, batch):
        return jax.lax.pmean((model(batch) ** 2).mean(), "fsdp")

    refuses(lambda: traced(Chain, loss, rows(), program="manual"), "'fsdp'")


class Gated(nnx.Module):
    """Frozen layers on a constant, whose result a trainable gate scales, before trainable layers."""

    def __init__(self, rngs):
        make = nnx.split_rngs(splits=4)(nnx.vmap(lambda rngs: Block(16, rngs), in_axes=0, out_axes=0))
        self.frozen, self.blocks, self.gate = make(rngs), make(rngs), nnx.Param(jnp.ones((16,)))

    def __call__(self, x):
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        def gated(x, block, gate):
            return x + gate[...] * block(jnp.ones((1, 16)))

        return run(gated(x, self.frozen, self.gate), self.blocks)


GATED: dict[str, Any] = {"units": ("frozen", "blocks"), "frozen": ["frozen"]}


@pytest.mark.parametrize("prefetch", thin([2, 0, 1], 3))
def test_a_loop_whose_calls_need_no_gradient_keeps_that_of_others_apart(prefetch):
    wanted = train(Gated, square, [rows()] * 2, program="xla", **GATED)
    assert_close(train(Gated, square, [rows()] * 2, program="manual", prefetch=prefetch, **GATED), wanted)


@pytest.mark.parametrize("depends", ["rows", "nothing"])
def test_units_under_a_condition_are_refused_since_devices_may_disagree(depends):
    class Skipping(nnx.Module):
        def __init__(self, rngs):
            self.block = Block(16, rngs)

        def __call__(self, x):
            is_on = x.sum() > 0 if depends == "rows" else jnp.zeros(()) < 1
            return nnx.cond(is_on, lambda b, x: b(x), lambda b, x: x, self.block, x)

    refuses(lambda: traced(Skipping, square, rows(), program="manual"), "(cond, while)")


def test_a_weight_that_is_only_shown_is_there():
    class Shown(nnx.Module):
        def __init__(self, rngs):
            self.block, self.temperature = Block(16, rngs), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return self.block(x)

    def loss(model, batch):
        out = square(model, batch)
        return jfsdp.Loss(out.total, out.weight, {"temperature": model.temperature[...] * batch.shape[0]})

    _, metrics = train(Shown, loss, [rows()], program="manual")
    assert metrics["temperature"] == pytest.approx(16 / metrics["weight"])


@pytest.mark.proof
def test_the_gradient_of_a_gradient_is_summed_once():
    def loss(model, batch):
        slope = jax.grad(lambda x: (model(x) ** 2).sum())(batch)
        return jfsdp.Loss((slope**2).sum(), jnp.asarray(batch.size, jnp.float32), {})

    for strategy in ("ddp", "full_shard"):
        with pytest.warns(UserWarning, match="without prefetch"):
            found = train(Chain, loss, [rows()], program="manual", strategy=strategy)
        assert_close(found, train(Chain, loss, [rows()], strategy=strategy, program="xla"))


def compiled_for_one_node(model, batch):
    """Compile a step for eight H100 so that no collectives are combined."""
    apart = {f"xla_gpu_{kind}_combine_threshold_bytes": 1 for kind in ("all_gather", "reduce_scatter", "all_reduce")}
    step = model.train_step(square, TX, compiler_options=apart)
    return step.lower(model.abstract_state(TX), batch).compile().as_text()


class Bare(nnx.Module):
    """Four matrices, of which the outer two are the root's."""

    def __init__(self, rngs):
        make = lambda: linear(64, 64, rngs, use_bias=False)  # noqa: E731
        self.first, self.last, self.layers = make(), make(), nnx.List([make(), make()])

    def __call__(self, x):
        x = nnx.relu(self.first(x))
        for layer in self.layers:
            x = nnx.relu(layer(x))
        return self.last(x)


@pytest.mark.parametrize(
    ("reshard", "groups"),
    thin(
        [
            (4, {8: 6, 4: 1}),
            (False, {8: 6}),
            (True, {8: 7}),
        ],
        3,
    ),
)
def test_a_root_that_is_resharded_is_gathered_again_where_its_backward_reads_it(reshard, groups):
    """The layers are gathered twice, the last matrix twice if it is resharded; the first one's backward reads none."""
    per_unit = {"": {"reshard_after_forward": reshard}}
    mesh = jfsdp.make_mesh(devices=hlo.h100s(1))
    model = fully_shard(Bare, mesh=mesh, units=["layers.*"], program="manual", per_unit=per_unit)
    text = compiled_for_one_node(model, jax.ShapeDtypeStruct((16, 64), jnp.float32))
    found = collections.Counter()
    for item in hlo.collectives(text, 8):
        found[item.group_size] += item.count * len(item.parts) * (item.kind == "all-gather")
    assert found == groups


@pytest.mark.parametrize("held", thin([{"": False}, {}, {"layers.*": False}, False]))
def test_units_that_are_held_are_gathered_once_for_all_microbatches(held):
    batch = np.random.default_rng(0).normal(size=(32, 64)).astype(np.float32)
    model = fully_shard(Bare, units=["layers.*"], min_size=1, program="manual")
    step = model.train_step(square, TX, accumulate=2, reshard_after_backward=held, check_loss=False)
    _, metrics = step(model.init(TX), batch)
    wanted, grads = nnx.jit(nnx.value_and_grad(lambda model: (model(batch) ** 2).mean()))(Bare(nnx.Rngs(0)))
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(grads), rtol=1e-5)


def test_units_to_be_held_are_checked():
    model = fully_shard(Bare, units=["layers.*"], min_size=1, program="manual")
    with refusing("reshard_after_backward['layer']", "''", "'layers.0'"):
        model.train_step(square, TX, reshard_after_backward={"layer": False})
    with refusing("reshard_after_backward['']", "=2", error=TypeError):
        model.train_step(square, TX, reshard_after_backward={"": 2})  # type: ignore[dict-item]
    with refusing("'layers.0'", "reshard_after_backward"):
        model.train_step(square, TX, reshard_after_backward={"layers.*": False, "layers.0": True})


@pytest.mark.parametrize("storage", thin(["per_parameter", "flat"]))
def test_on_one_device_the_step_is_that_of_program_xla(storage):
    def compiled(**options):
        mesh = jfsdp.make_mesh(devices=jax.devices()[:1])
        model = fully_shard(Tower, mesh=mesh, units=[Block], **options)
        step = model.train_step(token_loss, TX)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batches(1)[0])
        return step.lower(model.abstract_state(TX), batch).compile()

    found, wanted = compiled(program="manual", storage=storage), compiled(program="xla")
    assert not hlo.collectives(found.as_text(), 1)
    numbers = [
        (text.as_text().count(" dot("), text.cost_analysis()["flops"], text.memory_analysis().peak_memory_in_bytes)
        for text in (found, wanted)
    ]
    assert numbers[0][0] == numbers[1][0] > 0
    if storage == "per_parameter":
        assert numbers[0] == numbers[1]


def decayed(model, batch):
    """A penalty on all weights, through the tree: past every guard of single variables."""
    out = square(model, batch)
    penalty = sum((leaf**2).sum() for leaf in jax.tree.leaves(nnx.state(model, nnx.Param)))
    return jfsdp.Loss(out.total + penalty * out.weight, out.weight)


def peeked(model, batch):
    out = square(model, batch)
    return jfsdp.Loss(out.total + model.blocks[1].up.kernel.sum() * out.weight, out.weight)


@pytest.mark.parametrize("loss", [decayed, peeked])
@pytest.mark.parametrize("storage", ["per_parameter", "flat"])
def test_a_weight_that_is_read_outside_its_units_calls_is_refused_since_a_device_has_a_shard_of_it(loss, storage):
    call = lambda: traced(Chain, loss, rows(), program="manual", storage=storage)  # noqa: E731
    refuses(call, "unit 'blocks.", "weight decay")


def test_a_weight_that_is_read_outside_its_units_calls_counts_once_where_a_device_has_all_of_it():
    def both(model, batch):
        found = decayed(model, batch)
        return found._replace(total=found.total + model.blocks[1].up.kernel.sum() * found.weight)

    found = train(Chain, both, [rows()], program="manual", strategy="ddp")
    plain = Chain(nnx.Rngs(0))
    wanted = both(plain, rows())
    np.testing.assert_allclose(found[1]["loss"], wanted.total / wanted.weight, rtol=1e-5)
    groups: dict[str, Any] = {"mesh": jfsdp.make_mesh(replica=2, fsdp=4)}
    assert_close(train(Chain, both, [rows()], program="xla", **groups), found)


def test_gradients_are_summed_in_reduce_dtype():
    """Sums of eight bfloat16 gradients: in float32 they are those of float32, but for the rounding of each."""

    def gradient(reduce_dtype):
        policy = jfsdp.MixedPrecisionPolicy("bfloat16", reduce_dtype)
        before = fully_shard(Chain, units=[Block], min_size=1).init(TX).params
        after, _ = train(Chain, square, [rows()], program="manual", mp_policy=policy)
        return {path: np.asarray(before[path]) - value for path, value in after.items()}

    wide, narrow, exact = gradient("float32"), gradient("bfloat16"), gradient(None)
    path = "blocks.1.up.kernel"
    np.testing.assert_array_equal(narrow[path], exact[path])
    assert np.abs(wide[path] - narrow[path]).max() > 0
    assert np.abs(wide[path] - narrow[path]).max() < 0.02 * np.abs(wide[path]).max()


class Turned(nnx.Module):
    """Layers that get a constant next to their activations, as a rotary embedding: in float32, cast for each layer."""

    def __init__(self, rngs):
        self.blocks = nnx.vmap(lambda key: Block(16, nnx.Rngs(params=key)))(jax.random.split(rngs.params(), 4))
        self.head = nnx.Linear(16, 1, rngs=rngs)

    def __call__(self, x):
        shift = jnp.cos(jnp.arange(x.shape[-2], dtype=jnp.float32))[:, None]

        @nnx.scan(in_axes=(nnx.Carry, 0, None), out_axes=nnx.Carry)
        def layers(x, block, shift):
            return self.layer(x, block, shift)

        return self.head(layers(x, self.blocks, shift))

    @staticmethod
    def layer(x, block, shift):
        return block(x * 1.0, shift)


@pytest.mark.parametrize("program", ["xla", "manual"])
@pytest.mark.parametrize("wrap", [jax.jit, jax.checkpoint])
def test_code_of_a_loop_may_make_an_equal_and_a_varying_value_in_one_call(program, wrap, monkeypatch):
    """A call that makes both is not taken apart."""
    monkeypatch.setattr(Block, "__call__", lambda self, x, shift: x + jnp.sin(self.up(x)[..., :16] * shift))
    both = wrap(lambda x, shift: (1.5 * x, jnp.cos(shift)))
    monkeypatch.setattr(Turned, "layer", staticmethod(lambda x, block, shift: block(*both(x, shift))))
    model = fully_shard(Turned, units=[jfsdp.Unit(Block, 1)], program=program, remat="full")
    step = model.train_step(
        lambda model, x: jfsdp.Loss(jnp.sum(model(x) ** 2), jnp.float32(x.shape[0])), TX, check_loss=False
    )
    x = jnp.linspace(-1, 1, 8 * 6 * 16).reshape(8, 6, 16)
    _, metrics = step(model.init(TX), x)
    assert float(metrics["loss"]) == pytest.approx(float(jnp.sum(Turned(nnx.Rngs(0))(x) ** 2) / 8), rel=1e-5)


@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_constant_that_is_cast_for_every_layer_is_saved_once(program, monkeypatch):
    monkeypatch.setattr(Block, "__call__", lambda self, x, shift: x + jnp.sin(self.up(x)[..., :16] * shift))
    policy = jfsdp.MixedPrecisionPolicy("bfloat16")
    model = fully_shard(Turned, units=[jfsdp.Unit(Block, 1)], program=program, mp_policy=policy, remat="full")
    step = model.train_step(
        lambda model, x: jfsdp.Loss(jnp.sum(model(x)), jnp.float32(x.shape[0])), TX, check_loss=False
    )
    x = jax.ShapeDtypeStruct((8, 6, 16), jnp.float32)
    text = step.lower(model.abstract_state(TX), x).as_text()
    assert "tensor<6x1xbf16>" in text
    assert not re.search(r"tensor<[2-4]x6x1xbf16>", text), "stacked by layers"
