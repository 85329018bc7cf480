"""Unmodified models under hooks: state comes back, precision is FSDP2's, misuse is named."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jfsdp
from tests.refusals import refuses
from tests.sharding import fully_shard

DIM = 16
TX = optax.sgd(0.1)


class Stateful(nnx.Module):
    """Dropout and batch statistics: state that a unit's call changes."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=0.9, rngs=rngs)

    def __call__(self, x, *, scale=1.0):
        return self.norm(self.dropout(self.linear(x))) * scale


class Net(nnx.Module):
    def __init__(self, rngs, cls: Any = Stateful, num=2):
        self.layers = nnx.List([cls(rngs) for _ in range(num)])
        self.head = nnx.Linear(DIM, 1, rngs=rngs)

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def mean_square(model, batch):
    return (model(batch) ** 2).mean()


def batch():
    return np.random.default_rng(0).normal(size=(16, DIM)).astype(np.float32)


def shard(factory: Any = Net, units: Any = (Stateful,), **options):
    return fully_shard(factory, units=units, min_size=1, **options)


def of(kind, num=2):
    """Return a factory of the net with layers of this kind."""
    return lambda rngs: Net(rngs, kind, num)


def trace(model, loss=mean_square, x=None):
    """Trace a step for shapes alone, as one that is refused is, or that only shows what it sees."""
    return model.train_step(loss, TX).trace(model.abstract_state(TX), batch() if x is None else x)


def expect(facts, factory, units, **options):
    refuses(lambda: trace(shard(factory, units, **options)), *facts)


def check_loss(model, plain, x=None):
    """Check the loss of a first step against a model that was made without jfsdp."""
    x = batch() if x is None else x
    _, metrics = model.train_step(mean_square, TX, check_loss=False)(model.init(TX), x)
    np.testing.assert_allclose(metrics["loss"], mean_square(nnx.jit(lambda: plain(nnx.Rngs(0)))(), x), rtol=1e-5)


def test_a_given_instance_keeps_its_weights_and_is_not_touched():
    instance = Net(nnx.Rngs(7))
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(instance, nnx.Param))]
    model = shard(instance)
    state = model.init(TX, seed=3)
    kernel = instance.layers[0].linear.kernel.get_value()
    np.testing.assert_array_equal(state.params["layers.0.linear.kernel"], kernel)
    trace(model)
    assert type(instance.layers[0]) is Stateful
    jax.tree.map(np.testing.assert_array_equal, before, jax.tree.leaves(nnx.state(instance, nnx.Param)))


def test_an_instance_of_shapes_takes_weights_and_makes_none():
    model = shard(nnx.eval_shape(lambda: Net(nnx.Rngs(7))))
    refuses(lambda: model.init(TX), "head.bias", "nnx.eval_shape", "fully_shard")
    assert model.abstract_state(TX).params["layers.0.linear.kernel"].shape == (DIM, DIM)
    params = dict(shard().init(TX).params)
    refuses(lambda: model.init_from(TX, params), "nnx.eval_shape")  # of the keys and counters of its state


class Spy(nnx.Module):
    """Records the dtypes that its call sees."""

    seen: dict = {}  # noqa: RUF012

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.table = nnx.Param(jnp.arange(DIM))
        self.stat = nnx.BatchStat(jnp.zeros((DIM,)))

    def __call__(self, x):
        out = self.linear(x)
        Spy.seen = {"x": x.dtype, "w": self.linear.kernel.get_value().dtype, "int": self.table.get_value().dtype}
        Spy.seen |= {"stat": self.stat.get_value().dtype, "out": out.dtype}
        return out


def dtypes_seen(**policy):
    outputs = {}

    def loss(model, x):
        out = model(x)
        outputs["model"] = out.dtype
        return (out.astype(jnp.float32) ** 2).mean()

    trace(shard(of(Spy, 1), (Spy,), mp_policy=jfsdp.MixedPrecisionPolicy(**policy)), loss)
    return {key: jnp.dtype(value).name for key, value in (Spy.seen | outputs).items()}


def test_parameters_in_use_and_inputs_have_param_dtype_and_integers_and_statistics_do_not():
    seen = {**dict.fromkeys(("x", "w", "out", "model"), "bfloat16"), "int": "int32", "stat": "float32"}
    assert dtypes_seen(param_dtype="bfloat16") == seen
    assert dtypes_seen(param_dtype="bfloat16", cast_forward_inputs=False)["x"] == "float32"
    assert dtypes_seen(param_dtype="bfloat16", output_dtype="float32") == seen | {"model": "float32"}


def test_each_unit_computes_in_its_own_precision():
    seen = []

    class Layer(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

        def __call__(self, x):
            out = self.linear(x)
            seen.append((x.dtype.name, self.linear.kernel[...].dtype.name, out.dtype.name))
            return out

    policies = {"": "float32", "layers.0": "bfloat16", "layers.1": "float32"}
    per_unit = {name: {"mp_policy": jfsdp.MixedPrecisionPolicy(dtype)} for name, dtype in policies.items()}
    model = shard(of(Layer), (Layer,), per_unit=per_unit)
    assert {leaf.unit: leaf.stage("use").dtype for leaf in model.layout.leaves} == policies
    seen.clear()
    state, metrics = model.train_step(mean_square, TX)(model.init(TX), batch())
    assert seen[:2] == seen[-2:] == [("bfloat16",) * 3, ("float32",) * 3]
    assert {x.dtype.name for x in state.params.values()} == {"float32"}
    wanted = mean_square(Net(nnx.Rngs(0), Layer), batch())
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=2e-2)
    assert metrics["loss"] != wanted


def test_integers_and_a_unit_that_is_never_called_survive_a_step_and_an_evaluation_is_the_plain_models():
    class Unused(Net):
        def __init__(self, rngs):
            super().__init__(rngs, Spy, 1)
            self.extra = Stateful(rngs)

    model = shard(Unused, (Spy, Stateful))
    state = model.init(TX)
    found = model.forward(lambda model, x: model(x))(state, batch())
    np.testing.assert_allclose(found, nnx.jit(lambda: Unused(nnx.Rngs(0)))()(batch()), rtol=1e-5, atol=1e-6)
    before = np.asarray(state.params["extra.linear.kernel"])
    state, _ = model.train_step(mean_square, TX)(state, batch())
    np.testing.assert_array_equal(state.params["extra.linear.kernel"], before)
    np.testing.assert_array_equal(state.params["layers.0.table"], np.arange(DIM))


class TiedNet(nnx.Module):
    def __init__(self, rngs, dim=DIM):
        self.embed = nnx.Embed(37, dim, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(self.embed(jnp.abs(x[:, :4]).astype(jnp.int32)))


def penalized(model, x):
    weights = jax.tree.leaves(nnx.state(model, nnx.Param))
    return mean_square(model, x) + sum(jnp.mean((weight - 1) ** 2) for weight in weights)


def test_padding_is_not_read_with_all_weights_at_once():
    make = functools.partial(TiedNet, dim=3)
    model, facts = shard(make, (nnx.Embed,)), ("embed.embedding", "size 37", "padded to 40", "fsdp", "weight decay")
    refuses(lambda: trace(model, penalized), *facts)
    forward = model.forward(penalized)
    refuses(lambda: jax.eval_shape(forward, model.abstract_state(TX), batch()), *facts)
    root = shard(make, ())
    _, metrics = root.train_step(penalized, TX)(root.init(TX), batch())
    np.testing.assert_allclose(metrics["loss"], penalized(nnx.jit(lambda: make(nnx.Rngs(0)))(), batch()), rtol=1e-5)


class Unrolled(nnx.Module):
    """A stack whose layers are called one by one: whole in the padded dim."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda key: nnx.Linear(37, 37, rngs=nnx.Rngs(key)), in_axes=0)
        self.layers = make(jax.random.split(rngs.params(), 3))

    def layer(self, at):
        graph, state = nnx.split(self.layers)
        return nnx.merge(graph, jax.tree.map(lambda stack: stack[at], state))

    def __call__(self, x):
        return jax.lax.fori_loop(1, 3, lambda at, x: self.layer(at)(x), self.layer(0)(x))


def test_layers_are_cut_out_of_a_padded_stack_and_called():
    model = shard(Unrolled, (nnx.Linear,))
    assert all(leaf.padding for leaf in model.layout.leaves)
    check_loss(model, Unrolled, jnp.ones((8, 37)))


@pytest.mark.parametrize(
    "cut", [lambda stack: stack[0], lambda stack: jax.lax.map(lambda at: stack[at], jnp.arange(3))]
)
def test_padding_is_not_read_in_layers_cut_out_of_a_stack(cut):
    def loss(model, x):
        return mean_square(model, x) + sum(cut(stack).mean() for stack in jax.tree.leaves(nnx.state(model, nnx.Param)))

    model = shard(Unrolled, (nnx.Linear,))
    refuses(lambda: trace(model, loss, jnp.ones((8, 37))), "read outside the calls of its unit")


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


class Inside(Plain):
    """Flax's transforms inside of a unit: their writes are none."""

    def __call__(self, x):
        for transform in (nnx.remat, nnx.jit, lambda f: nnx.remat(nnx.jit(f))):
            x = transform(lambda module, x: jnp.tanh(module(x)))(self.linear, x)
        return x


class Thrice(Plain):
    def __call__(self, x):
        for _ in range(3):
            x = jnp.tanh(self.linear(x))
        return x


def test_transforms_of_flax_inside_units_compute_what_the_plain_model_does():
    check_loss(shard(of(Inside), (Inside,)), of(Thrice))


def test_a_debug_callback_in_a_unit_sees_real_values_only():
    seen = []

    class Watched(Plain):
        def __call__(self, x):
            out = super().__call__(x)
            jax.debug.callback(lambda value: seen.append(float(value)), jnp.abs(out).sum())
            return out

    model = shard(of(Watched, 1), (Watched,), remat="none")
    _, metrics = model.train_step(mean_square, TX)(model.init(TX), batch())
    jax.block_until_ready(metrics)
    jax.effects_barrier()
    assert seen and 0.0 not in seen


class Writer(Plain):
    def __call__(self, x):
        self.linear.kernel[...] = self.linear.kernel[...] * 0.9
        return super().__call__(x)


class RootWriter(Net):
    def __call__(self, x):
        self.head.kernel[...] = self.head.kernel[...] * 0.9
        return super().__call__(x)


class Creator(Plain):
    def __call__(self, x):
        self.made = nnx.BatchStat(x.mean())
        return super().__call__(x)


class Setter(Plain):
    def __call__(self, x):
        self.made = x.ndim
        return super().__call__(x)


@pytest.mark.parametrize(
    ("factory", "kind", "facts"),
    [
        (of(Writer), Writer, ("layers.0", "writes to 1 of its parameters")),
        (RootWriter, Stateful, ("(root)", "writes to 1 of its parameters")),
        (of(Creator), Creator, ("layers.0.made",)),
        (of(Setter), Setter, ("'layers.0'", "attributes")),
    ],
)
def test_a_call_that_writes_parameters_or_leaves_something_new_behind_is_refused(factory, kind, facts):
    expect(facts, factory, (kind,))


class Scanned(nnx.Module):
    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: nnx.Linear(5, 5, rngs=rngs), in_axes=0, out_axes=0)
        self.layers = nnx.split_rngs(splits=8)(make)(rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x[:, :5], self.layers)


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.scale = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Param(jnp.ones(()))

    def __call__(self, x):
        return self.linear(x) * self.scale


class Ensemble(nnx.Module):
    """Of three members a matrix is padded in a dim of its own, and a scalar along the members."""

    def __init__(self, rngs):
        make = nnx.vmap(lambda rngs: Scaled(rngs), in_axes=0, out_axes=0)
        self.members = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, x):
        return nnx.vmap(lambda member, x: member(x), in_axes=(0, None), out_axes=0)(self.members, x)


@pytest.mark.parametrize(
    ("source", "unit", "declared", "facts"),
    [
        (Scanned, jfsdp.Unit(nnx.Linear, stacked=0), nnx.Linear, ("layer dim",)),
        (Ensemble, Scaled, jfsdp.Unit(Scaled, stacked=1), ("members.scale", "size 3", "padded to 8", "stacked=1")),
    ],
)
def test_an_undeclared_stack_whose_layer_dim_is_split_or_padded_is_named(source, unit, declared, facts):
    expect(facts, source, (unit,))
    trace(shard(source, (declared,)))


class Named(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        named = functools.partial(checkpoint_name, name="hidden")
        return jax.lax.cond(x.sum() > 0, named, jnp.tanh, self.linear(x))


def saving(remat):
    return shard(of(Named), units=[Named, "head"], remat=remat)


@pytest.mark.parametrize("remat", [("hiden",), jfsdp.SaveNames(("hidden",), ("hiden",))])
def test_a_name_to_save_that_no_value_has_is_refused_with_the_names_there_are(remat):
    refuses(lambda: trace(saving(remat)), "hiden", "checkpoint_name: hidden")


def test_the_name_of_fused_attention_is_refused_without_one():
    refuses(lambda: trace(saving(("hidden", "attention"))), "attention", "XLA", "checkpoint_name: hidden")


@pytest.mark.parametrize("remat", [(jfsdp.UNIT_INPUT,), jfsdp.SaveNames(("hidden",), (jfsdp.UNIT_INPUT,))])
def test_the_name_of_inputs_is_reserved(remat, monkeypatch):
    trace(saving(remat))
    monkeypatch.setattr(Named, "__call__", lambda self, x: checkpoint_name(self.linear(x), jfsdp.UNIT_INPUT))
    refuses(
        lambda: trace(shard(of(Named), units=[Named], remat=(jfsdp.UNIT_INPUT,))),
        "input",
        "reserved",
        "checkpoint_name",
    )


def test_a_name_to_save_need_not_be_in_every_unit_nor_in_an_evaluation():
    model = saving(("hidden",))
    trace(model)
    evaluate = model.forward(lambda model, x: model.head(x))
    assert jax.eval_shape(evaluate, model.abstract_state(TX), batch()).shape == (16, 1)


def test_a_program_that_is_traced_again_has_the_same_text():
    """Else evaluation would compile anew in every run: the compilation cache goes by the text."""
    from tests import models_small as small

    model = fully_shard(small.Tower, mesh=jfsdp.make_mesh(fsdp=-1), units=[small.Block], min_size=1)
    state = model.abstract_state(optax.sgd(0.1))
    tokens = jax.ShapeDtypeStruct((8, 6), np.int32)
    texts = [jax.jit(model.forward(lambda model, x: model(x).sum())).lower(state, tokens).as_text() for _ in range(2)]
    assert texts[0] == texts[1]
