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
from tests.refusals import refuses, refusing
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


def test_batch_statistics_and_rng_counts_come_out_of_the_units():
    model = shard()
    state = model.init(TX)
    wanted = nnx.jit(lambda: Net(nnx.Rngs(0)))()
    mean_square(wanted, batch())
    after, _ = model.train_step(mean_square, TX)(state, batch())
    assert set(after.model_state) == set(model.model.state)
    for path, variable in nnx.to_flat_state(nnx.state(wanted, nnx.Not(nnx.Param))):
        found, value = after.model_state[".".join(map(str, path))], variable.get_value()
        if jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
            found, value = jax.random.key_data(found), jax.random.key_data(value)
        np.testing.assert_allclose(found, value, rtol=1e-5, atol=1e-6, err_msg=str(path))


def test_dropout_masks_differ_between_steps_rows_and_layers():
    class Masks(nnx.Module):
        def __init__(self, rngs):
            self.weight = nnx.Param(jnp.ones((DIM,)))
            self.dropout = nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, x):
            return self.dropout(x * self.weight)

    def keep(model, x):
        masks = jnp.stack([layer(jnp.ones_like(x)) for layer in model.layers])
        total = masks.sum() + 0 * model.head(x).sum()
        columns = masks.sum(1).reshape(-1)[:16]  # sums over rows: by layer and column
        return jfsdp.Loss(total, x.shape[0], {f"m{i}": column for i, column in enumerate(columns)})

    model = shard(lambda rngs: Net(rngs, Masks), (Masks,))
    step, state = model.train_step(keep, TX), model.init(TX)
    seen = []
    for _ in range(2):
        state, metrics = step(state, batch())
        seen += [float(metrics[f"m{i}"]) for i in range(16)]
    assert len(set(seen)) > 4


def test_a_given_instance_keeps_its_weights_and_is_not_touched():
    instance = Net(nnx.Rngs(7))
    before = [np.asarray(x) for x in jax.tree.leaves(nnx.state(instance, nnx.Param))]
    model = shard(instance)
    state = model.init(TX, seed=3)
    kernel = instance.layers[0].linear.kernel.get_value()
    np.testing.assert_array_equal(state.params["layers.0.linear.kernel"], kernel)
    model.train_step(mean_square, TX)(state, batch())
    assert type(instance.layers[0]) is Stateful
    assert all(
        np.array_equal(a, b) for a, b in zip(before, jax.tree.leaves(nnx.state(instance, nnx.Param)), strict=True)
    )


def test_an_instance_of_shapes_takes_weights_and_makes_none():
    model = shard(nnx.eval_shape(lambda: Net(nnx.Rngs(7))))
    refuses(lambda: model.init(TX), "head.bias", "nnx.eval_shape", "fully_shard")
    assert model.abstract_state(TX).params["layers.0.linear.kernel"].shape == (DIM, DIM)
    params = dict(shard(lambda rngs: Net(rngs)).init(TX).params)
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

    model = shard(lambda rngs: Net(rngs, Spy, 1), (Spy,), mp_policy=jfsdp.MixedPrecisionPolicy(**policy))
    state, _ = model.train_step(loss, TX)(model.init(TX), batch())
    assert state.params["layers.0.linear.kernel"].dtype == jnp.float32
    return {key: jnp.dtype(value).name for key, value in (Spy.seen | outputs).items()}


def test_parameters_in_use_and_inputs_have_param_dtype_and_integers_and_statistics_do_not():
    seen = dtypes_seen(param_dtype="bfloat16")
    assert seen == {
        "x": "bfloat16",
        "w": "bfloat16",
        "int": "int32",
        "stat": "float32",
        "out": "bfloat16",
        "model": "bfloat16",
    }


def test_inputs_stay_as_they_are_when_not_asked_to_be_cast():
    assert dtypes_seen(param_dtype="bfloat16", cast_forward_inputs=False)["x"] == "float32"


def test_output_dtype_is_that_of_the_model_and_not_of_its_units():
    seen = dtypes_seen(param_dtype="bfloat16", output_dtype="float32")
    assert (seen["out"], seen["model"]) == ("bfloat16", "float32")


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
    model = shard(lambda rngs: Net(rngs, Layer), (Layer,), per_unit=per_unit)
    assert {leaf.unit: leaf.stage("use").dtype for leaf in model.layout.leaves} == policies
    state = model.init(TX)
    wanted = shard(lambda rngs: Net(rngs, Layer), (Layer,)).train_step(mean_square, TX)(model.init(TX), batch())
    seen.clear()
    state, metrics = model.train_step(mean_square, TX)(state, batch())
    assert seen[:2] == seen[-2:] == [("bfloat16",) * 3, ("float32",) * 3]
    assert {x.dtype.name for x in state.params.values()} == {"float32"}
    np.testing.assert_allclose(metrics["grad_norm"], wanted[1]["grad_norm"], rtol=2e-2)
    assert metrics["grad_norm"] != wanted[1]["grad_norm"]


def test_integer_parameters_survive_a_step():
    model = shard(lambda rngs: Net(rngs, Spy, 1), (Spy,))
    state, _ = model.train_step(mean_square, TX)(model.init(TX), batch())
    np.testing.assert_array_equal(state.params["layers.0.table"], np.arange(DIM))


def test_evaluation_gives_what_the_plain_model_gives():
    model = shard(lambda rngs: Net(rngs, Spy), (Spy,))
    found = model.forward(lambda model, x: model(x))(model.init(TX), batch())
    wanted = nnx.jit(lambda: Net(nnx.Rngs(0), Spy))()(batch())
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


def expect(match, factory, units, **options):
    model = shard(factory, units, **options)
    with pytest.raises(ValueError, match=match):
        model.train_step(mean_square, TX)(model.init(TX), batch())


def test_a_unit_that_is_never_called_gets_no_gradient():
    class Unused(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.extra = Stateful(rngs)

    model = shard(Unused, (Stateful,))
    start = model.init(TX)
    before = np.asarray(start.params["extra.linear.kernel"])
    state, _ = model.train_step(mean_square, TX)(start, batch())
    np.testing.assert_array_equal(state.params["extra.linear.kernel"], before)


class TiedNet(nnx.Module):
    def __init__(self, rngs, dim=DIM):
        self.embed = nnx.Embed(37, dim, rngs=rngs)

    def __call__(self, x):
        return self.embed.attend(self.embed(jnp.abs(x[:, :4]).astype(jnp.int32)))


@pytest.mark.parametrize("units", [(), (nnx.Embed,)], ids=["root", "unit"])
def test_a_weight_read_by_two_methods_of_its_module_is_gathered_for_both(units):
    model = shard(TiedNet, units)
    _, metrics = model.train_step(mean_square, TX)(model.init(TX), batch())
    wanted = mean_square(nnx.jit(lambda: TiedNet(nnx.Rngs(0)))(), batch())
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


def test_a_penalty_on_the_weights_of_a_unit_is_refused():
    def penalized(model, x):
        return mean_square(model, x) + jnp.sum(model.layers[0].linear.kernel[...] ** 2)

    model = shard(lambda rngs: Net(rngs, Spy), (Spy,))
    with pytest.raises(ValueError, match=r"layers\.0\.linear\.kernel: read outside"):
        model.train_step(penalized, TX)(model.init(TX), batch())


def test_padding_is_not_read_with_all_weights_at_once():
    def penalized(model, x):
        weights = jax.tree.leaves(nnx.state(model, nnx.Param))
        return mean_square(model, x) + sum(jnp.mean((weight - 1) ** 2) for weight in weights)

    make = functools.partial(TiedNet, dim=3)
    model = shard(make, (nnx.Embed,))
    match = r"embed\.embedding: read outside .* dim 0 \(size 37\) is padded to 40, .* over fsdp; .* weight decay"
    with pytest.raises(ValueError, match=match):
        model.train_step(penalized, TX)(model.init(TX), batch())
    with pytest.raises(ValueError, match=match):
        model.forward(penalized)(model.init(TX), batch())
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
    model, x = shard(Unrolled, (nnx.Linear,)), jnp.ones((8, 37))
    assert all(leaf.padding for leaf in model.layout.leaves)
    _, metrics = model.train_step(mean_square, TX)(model.init(TX), x)
    wanted = mean_square(nnx.jit(lambda: Unrolled(nnx.Rngs(0)))(), x)
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


@pytest.mark.parametrize(
    "cut", [lambda stack: stack[0], lambda stack: jax.lax.map(lambda at: stack[at], jnp.arange(3))]
)
def test_padding_is_not_read_in_layers_cut_out_of_a_stack(cut):
    def penalized(model, x):
        return mean_square(model, x) + sum(cut(stack).mean() for stack in jax.tree.leaves(nnx.state(model, nnx.Param)))

    model = shard(Unrolled, (nnx.Linear,))
    with pytest.raises(ValueError, match="read outside the calls of its unit"):
        model.train_step(penalized, TX)(model.init(TX), jnp.ones((8, 37)))


def wrapped(transform):
    class Wrapped(Spy):
        def __call__(self, x):
            return transform(lambda module, x: jnp.tanh(module(x)))(self.linear, x)

    return Wrapped


@pytest.mark.parametrize(
    "transform", [nnx.remat, nnx.jit, lambda f: nnx.remat(nnx.jit(f))], ids=["remat", "jit", "both"]
)
def test_flax_transforms_inside_a_unit_are_no_writes(transform):
    factory = lambda rngs: Net(rngs, wrapped(transform))  # noqa: E731
    model = shard(factory, ("layers.*",))
    state, metrics = model.train_step(mean_square, TX)(model.init(TX), batch())
    plain = nnx.jit(lambda: Net(nnx.Rngs(0), wrapped(lambda f: f)))()
    np.testing.assert_allclose(metrics["loss"], mean_square(plain, batch()), rtol=1e-5)
    assert state is not None


@pytest.mark.parametrize(
    "around",
    [jax.checkpoint, jax.jit, lambda f: lambda x: jax.lax.cond(x.sum() > -1e9, f, lambda x: x, x)],
    ids=["checkpoint", "jit", "cond"],
)
def test_jax_transforms_around_a_unit_work(around):
    class Around(Net):
        def __call__(self, x):
            for layer in self.layers:
                x = around(layer.__call__)(x)
            return self.head(x)

    model = shard(lambda rngs: Around(rngs, Plain), (Plain,))
    _, metrics = model.train_step(mean_square, TX)(model.init(TX), batch())
    wanted = mean_square(nnx.jit(lambda: Net(nnx.Rngs(0), Plain))(), batch())
    np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)


class Plain(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return jnp.tanh(self.linear(x))


def test_a_write_to_a_parameter_of_the_root_is_refused():
    class RootWriter(Net):
        def __call__(self, x):
            self.head.kernel[...] = self.head.kernel[...] * 0.9
            return super().__call__(x)

    expect("unit \\(root\\): its call writes to 1 of its parameters", RootWriter, (Stateful,))


def test_a_debug_callback_in_a_unit_sees_real_values_only():
    seen = []

    class Watched(Plain):
        def __call__(self, x):
            out = super().__call__(x)
            jax.debug.callback(lambda value: seen.append(float(value)), jnp.abs(out).sum())
            return out

    model = shard(lambda rngs: Net(rngs, Watched, 1), (Watched,), remat="none")
    _, metrics = model.train_step(mean_square, TX)(model.init(TX), batch())
    jax.block_until_ready(metrics)
    jax.effects_barrier()
    assert seen and 0.0 not in seen


def test_a_call_that_writes_parameters_is_refused():
    class Writer(Spy):
        def __call__(self, x):
            self.linear.kernel[...] = self.linear.kernel[...] * 0.9
            return super().__call__(x)

    expect("writes to 1 of its parameters", lambda rngs: Net(rngs, Writer), (Writer,))


@pytest.mark.parametrize(
    ("make", "match"),
    [
        (lambda x: nnx.BatchStat(x.mean()), r"created or removed state: layers\.0\.made"),
        (lambda x: x.ndim, r"unit 'layers\.0': its call created, removed or replaced attributes"),
    ],
    ids=["variable", "attribute"],
)
def test_a_call_that_leaves_something_new_behind_is_refused(make, match):
    class Creator(Spy):
        def __call__(self, x):
            self.made = make(x)
            return super().__call__(x)

    expect(match, lambda rngs: Net(rngs, Creator), (Creator,))


def test_an_undeclared_stack_whose_layer_dim_is_split_is_named():
    class Scanned(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: nnx.Linear(5, 5, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=8)(make)(rngs)

        def __call__(self, x):
            scan = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return scan(x[:, :5], self.layers)

    expect("declare the layer dim", Scanned, (jfsdp.Unit(nnx.Linear, stacked=0),))
    model = shard(Scanned, (nnx.Linear,))
    model.train_step(mean_square, TX)(model.init(TX), batch())


def test_an_undeclared_ensemble_with_a_padded_leaf_is_named():
    """Of three members a matrix is padded in a dim of its own, and a scalar along the members."""

    class Scaled(nnx.Module):
        def __init__(self, rngs):
            self.linear, self.scale = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Param(jnp.ones(()))

        def __call__(self, x):
            return self.linear(x) * self.scale

    class Ensemble(nnx.Module):
        def __init__(self, rngs):
            make = nnx.vmap(lambda rngs: Scaled(rngs), in_axes=0, out_axes=0)
            self.members = nnx.split_rngs(splits=3)(make)(rngs)

        def __call__(self, x):
            return nnx.vmap(lambda member, x: member(x), in_axes=(0, None), out_axes=0)(self.members, x)

    match = r"members\.scale: dim 0 \(size 3\) is padded to 8.*'members' is a stack, declare .*stacked=1"
    expect(match, Ensemble, (Scaled,))
    model = shard(Ensemble, (jfsdp.Unit(Scaled, stacked=1),))
    model.train_step(mean_square, TX)(model.init(TX), batch())


class Named(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        named = functools.partial(checkpoint_name, name="hidden")
        return jax.lax.cond(x.sum() > 0, named, jnp.tanh, self.linear(x))


def step_saving(remat, **options):
    model = shard(lambda rngs: Net(rngs, Named), units=[Named, "head"], remat=remat, **options)
    return model.train_step(mean_square, TX)(model.init(TX), batch())


@pytest.mark.parametrize("remat", [("hiden",), jfsdp.SaveNames(("hidden",), ("hiden",))])
def test_a_name_to_save_that_no_value_has_is_refused_with_the_names_there_are(remat):
    with refusing("checkpoint_name:"):
        step_saving(remat)


def test_a_name_to_save_need_not_be_in_every_unit():
    _, metrics = step_saving(("hidden",))
    assert np.isfinite(metrics["loss"])


def test_an_evaluation_may_pass_by_the_names_to_save():
    model = shard(lambda rngs: Net(rngs, Named), units=[Named, "head"], remat=("hidden",))
    assert model.forward(lambda model, x: model.head(x))(model.init(TX), batch()).shape == (16, 1)


def test_a_program_that_is_traced_again_has_the_same_text():
    """Else evaluation would compile anew in every run: the compilation cache goes by the text."""
    from tests import models_small as small

    model = fully_shard(small.Tower, mesh=jfsdp.make_mesh(fsdp=-1), units=[small.Block], min_size=1)
    state = model.abstract_state(optax.sgd(0.1))
    tokens = jax.ShapeDtypeStruct((8, 6), np.int32)
    texts = [jax.jit(model.forward(lambda model, x: model(x).sum())).lower(state, tokens).as_text() for _ in range(2)]
    assert texts[0] == texts[1]
