"""The training step: clipping, numbers in batches, skipped steps, and what it refuses."""

import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.train.step.loss import as_loss
from jfsdp.train.update.update import clip_by_norm
from tests.models_small import Block, Lookup, Tower, make_batches, token_loss
from tests.refusals import check_facts, refuses, refusing
from tests.steps import fully_shard
from tests.thin import thin

TX, ADAM = optax.sgd(1e-2), optax.adam(1e-2)


def make(**options):
    return fully_shard(Tower, units=[Block], **{"min_size": 20, **options})


@pytest.fixture(scope="module")
def model():
    return make()


@pytest.fixture(scope="module")
def small():
    """What is compiled and run."""
    return fully_shard(Lookup, min_size=20)


def shapes(**more):
    """A batch without arrays; `more` are leaves besides."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batches(1)[0] | more)


def refused(model: Any, loss, *facts, error: Any = ValueError, batch: Any = None, tx: Any = TX, **options):
    """Check that a step is refused before anything is made or compiled."""
    batch = shapes() if batch is None else batch
    refuses(lambda: model.train_step(loss, tx, **options).trace(model.abstract_state(tx), batch), *facts, error=error)


def test_clipping_scales_the_update_and_reports_the_norm_before_it(small):
    sgd = optax.sgd(1.0)
    batch, start = make_batches(1)[0], small.init(sgd)
    before = {name: np.asarray(x) for name, x in start.params.items()}
    after, metrics = small.train_step(token_loss, sgd, max_grad_norm=0.125, check_loss=False)(start, batch)
    assert float(metrics["grad_norm"]) > 0.2
    moved = np.sqrt(sum(np.sum((np.asarray(x) - before[name]) ** 2) for name, x in after.params.items()))
    np.testing.assert_allclose(moved, 0.125, rtol=1e-5)
    weight = {"weight": jnp.ones(2)}
    np.testing.assert_array_equal(clip_by_norm(weight, jnp.float32(0.1), 0.25)["weight"], weight["weight"])


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(small):
    """The rate of a schedule is among the metrics, and does not move."""

    def poisoned(model, batch):
        loss = token_loss(model, batch)
        return loss._replace(total=loss.total * batch["poison"].max() + batch["added"].sum())

    tx = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.0, 1.0, 4))
    step = small.train_step(poisoned, tx, skip_nonfinite=True, check_loss=False)
    good = make_batches(1)[0] | {"poison": np.ones((16,), np.float32), "added": np.zeros((16,), np.float32)}
    bad = good | {"poison": np.full((16,), np.nan, np.float32)}
    endless = good | {"added": np.full((16,), np.inf, np.float32)}
    state, metrics = step(small.init(tx), good)
    assert float(metrics["learning_rate"]) == 0.0
    before = jax.tree.map(np.asarray, (state.params, state.opt_state))
    state, metrics = step(state, bad)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, (state.params, state.opt_state)), before)
    assert (int(state.step), int(state.num_skipped), int(metrics["num_skipped"])) == (2, 1, 1)
    state, metrics = step(state, endless)
    assert np.isfinite(float(metrics["grad_norm"])) and int(state.num_skipped) == 2
    state, metrics = step(state, good)
    assert np.isfinite(float(metrics["loss"])) and int(state.num_skipped) == 2
    assert float(metrics["learning_rate"]) == 0.25


def test_a_state_is_donated_and_then_refused_before_it_reaches_xla(small):
    """And a batch that fails does not spoil the step; what is on the mesh may have another number of rows.

    What is printed of a state says so too.
    """
    step, batch, state = small.train_step(token_loss, TX, check_loss=False), make_batches(1)[0], small.init(TX)
    assert (repr(step), repr(small)) == (
        "TrainStep(not traced)",
        "ShardedModel(Lookup, full_shard on fsdp=8: 1,221 parameters, 1 units)",
    )
    with pytest.raises(KeyError, match="targets"):
        step(state, {"tokens": batch["tokens"]})
    new, _ = step(state, batch)
    assert state.params["embed.embedding"].is_deleted()
    arrays = f"{len(jax.tree.leaves(new))} arrays, "
    check_facts(repr(state), "TrainState(donated, ", arrays, " on each of 8 devices)")
    check_facts(repr(new), "TrainState(step=1, ", arrays)
    check_facts(repr(small.abstract_state(TX)), "TrainState(shapes only, ", arrays)
    assert repr(jax.tree.map(np.shape, new)) == f"TrainState({arrays[:-2]})"
    assert repr(step) == "TrainStep(program='manual')"
    refuses(lambda: step(state, batch), "donated to an earlier step")
    refuses(lambda: step(new, {"tokens": batch["tokens"]}), "the batch changed")
    tensors = {name: torch.from_numpy(x) for name, x in batch.items()}
    wrong = {**tensors, "weights": tensors["weights"].bfloat16()}
    refuses(lambda: step.resolve(wrong), "batch['weights']", "NumPy", "x.float()")
    found, wanted = (step(small.init(TX), rows)[1]["loss"] for rows in (tensors, batch))
    assert found == wanted
    state, metrics = step(new, batch | {"weights": 0 * batch["weights"]})
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (0.0, 0.0)
    assert all(np.isfinite(np.asarray(x)).all() for x in state.params.values())


@pytest.mark.parametrize("options", [{"accumulate": 0}, {"sync": "never"}, {"max_grad_norm": -1.0}])
def test_bad_options_are_named(model, options):
    refused(model, token_loss, *options, *options.values(), **options)


def test_numbers_of_numpy_and_jax_are_numbers(model):
    given = {"accumulate": jnp.int32(2), "pipe_repeats": np.int64(1), "max_grad_norm": jnp.float32(0.25)}
    plain = {"accumulate": 2, "max_grad_norm": 0.25}
    step, same = (model.train_step(token_loss, TX, **how) for how in (given, plain))
    assert step.resolve(shapes()) == same.resolve(shapes()) and step.config == same.config
    found, wanted = (model.init(TX, seed=seed).params for seed in (np.int32(3), 3))
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.parametrize(("rows", "accumulate"), [(12, 1), (16, 4), (0, 1)])
def test_a_batch_that_cannot_be_split_names_sizes_and_axes(model, rows, accumulate):
    batch = make_batches(1, rows=rows)[0]
    facts = "dim 0", f"size {rows}", f"{accumulate} microbatches"
    refused(model, token_loss, *facts, batch=batch, accumulate=accumulate)


@pytest.mark.parametrize("rows", [0, -8, 7])
def test_own_rows_of_a_number_that_cannot_be_split_are_refused(model, rows):
    step = model.train_step(lambda model, x: jfsdp.Loss(model(x).sum(), x.size), optax.sgd(1.0))
    assert step.own_rows(64) == range(64)
    with refusing("own_rows", f"num_rows={rows}", "multiple of"):
        step.own_rows(rows)


def test_a_loss_that_is_no_loss_is_refused(model):
    refused(model, lambda model, batch: model(batch["tokens"]).sum(-1), "total has shape")
    refused(model, lambda model, batch: None, "loss_fn:", "jfsdp.Loss", error=TypeError)
    refused(model, lambda model, batch: jfsdp.Loss(1.0, 1.0, {"grad_norm": 0.0}), "grad_norm")


@pytest.mark.parametrize(
    ("loss", "facts"),
    [
        ("low", ("total is a str", "jfsdp.Loss(")),
        (jfsdp.Loss(1.0, 1.0, np.ones(3)), ("aux is an array", "a dict")),  # type: ignore[arg-type]
        (jfsdp.Loss(1.0, 1.0, {1: 1.0}), ("the key 1",)),  # type: ignore[dict-item]
        (jfsdp.Loss(1.0, 1.0, {"parts": {"a": 1.0}}), ("aux['parts']", "a dict")),
    ],
)
def test_what_is_no_number_in_a_loss_is_refused(loss, facts):
    refuses(lambda: as_loss(loss), *facts, error=TypeError)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"strategy": "zero9"}, ("ddp", "zero1")),
        ({"frozen": ["embd"]}, ("frozen 'embd'", "blocks.down.kernel")),
        ({"ignored": nnx.BatchStat}, ("BatchStat", "Param")),
        ({"mesh": jfsdp.make_mesh(pipe=2)}, ("3 layers", "'pipe'", "size 2")),
        ({"remat": "some"}, ("none", "full", "dots")),
        ({"reshard_after_forward": 3}, ("=3", "8 devices", "fsdp", "1, 2, 4, 8")),
        ({"opt_over": ["fsdp"], "strategy": "ddp"}, ("opt_over=", "'ddp'")),
        ({"placements": {"**": jfsdp.Shard(9)}}, ("'**'", "dim 9")),
        ({"reshard_after_forward": True, "strategy": "ddp"}, ("'ddp'",)),
    ],
)
def test_settings_that_cannot_be_had_are_refused(options, facts):
    refuses(lambda: make(**options), *facts)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"mp_policy": "bf16"}, ("mp_policy='bf16'", "jfsdp.MixedPrecisionPolicy('bfloat16')")),
        ({"per_unit": {"blocks": {"mp_policy": "bf16"}}}, ("mp_policy='bf16'", "jfsdp.MixedPrecisionPolicy")),
        ({"min_size": "1024"}, ("min_size='1024'", "a whole number")),
        ({"mesh": "fsdp=8"}, ("mesh='fsdp=8'", "jfsdp.make_mesh")),
    ],
)
def test_settings_of_a_wrong_type_are_refused(options, facts):
    refuses(lambda: make(**options), *facts, error=TypeError)


def test_an_unknown_dtype_lists_the_valid_ones():
    refuses(lambda: jfsdp.MixedPrecisionPolicy("float99"), "'float99'", "float32", "bfloat16", "float16")


def test_what_is_no_state_and_no_function_is_refused_by_an_evaluation(model):
    with refusing("NoneType", "*inputs", error=TypeError):
        model.forward(lambda model, x: model(x))(None, np.zeros((8, 4), np.int32))
    with refusing("forward:", "TrainState", error=TypeError):
        model.forward(model.abstract_state(TX))


@pytest.mark.parametrize("kind", ["train_step", "grads", "apply_gradients"])
def test_a_step_inside_of_jit_is_refused_with_the_reason(model, kind):
    """It would meet a tracer, of which JAX says neither what is wrong nor what to do."""
    calls = {
        "train_step": model.train_step(token_loss, TX),
        "grads": model.grads(token_loss),
        "apply_gradients": lambda state, batch: model.apply_gradients(state, None, TX),
    }
    refuses(lambda: jax.eval_shape(calls[kind], model.abstract_state(TX), shapes()), "jax.jit")


def test_a_state_of_another_strategy_is_refused(model):
    other = make(strategy="ddp").init(TX)
    with refusing("fsdp=8", "full_shard"):
        model.train_step(token_loss, TX)(other, make_batches(1)[0])


@pytest.mark.parametrize("took_steps", [False, True])
def test_a_state_of_another_optimizer_is_refused_and_the_step_still_works(took_steps):
    model, batch = fully_shard(Lookup, min_size=20), make_batches(1)[0]
    step, state = model.train_step(token_loss, ADAM, check_loss=False), model.init(ADAM)
    for _ in range(took_steps):
        state, _ = step(state, batch)
    refuses(lambda: step(model.init(TX), batch), "another optimizer", "the optimizer ()", "one tx")
    refuses(lambda: step(model.init(optax.chain(ADAM)), batch), "another optimizer", "one tx")
    step(state, batch)


def test_a_state_with_other_frozen_leaves_is_refused_by_their_names(model, tmp_path):
    state = make(frozen=["embed"]).init(ADAM)
    jfsdp.checkpoint.save(tmp_path / "c", state)
    for other, given in ((model, state), (make(frozen=["embed"]), model.init(ADAM))):
        there, here = ("frozen", "trained") if other is model else ("trained", "frozen")
        with refusing(f"{there} there and {here} here", "embed.embedding", "init_from"):
            other.train_step(token_loss, ADAM)(given, make_batches(1)[0])
    with refusing("embed.embedding", "load_pretrained"):
        jfsdp.checkpoint.restore(tmp_path / "c", like=model.abstract_state(ADAM))


@pytest.mark.parametrize("program", thin(["manual", "xla"]))
def test_a_total_of_nothing_counted_is_not_finite_as_on_one_device(program):
    def uncounted(model, batch):
        return token_loss(model, batch)._replace(weight=0 * batch["weights"].sum())

    model, batch = fully_shard(Lookup, min_size=20, program=program), make_batches(1)[0]
    state, metrics = model.train_step(uncounted, TX, skip_nonfinite=True)(model.init(TX), batch)
    assert np.isinf(metrics["loss"])
    assert int(state.num_skipped) == 1


@pytest.mark.parametrize("weight", [0.0, -1, math.nan, math.inf])
def test_a_weight_that_always_divides_into_nonsense_is_refused(model, weight):
    loss = lambda model, batch: token_loss(model, batch)._replace(weight=weight)  # noqa: E731
    refused(model, loss, "loss_fn", f"weight is {weight}")


def test_an_option_that_xla_does_not_have_is_named(small):
    step = small.train_step(token_loss, TX, compiler_options={"xla_nope": True}, check_loss=False)
    with refusing("compiler_options['xla_nope']", "XLA"):
        step(small.init(TX), make_batches(1)[0])


def test_weights_may_be_arrays_of_numpy(small):
    start = small.init(TX)
    given = small.init_from(TX, {name: np.asarray(x) for name, x in start.params.items()})
    assert all(np.array_equal(x, given.params[name]) for name, x in start.params.items())


def low_precision(dtype):
    class Low(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs, param_dtype=dtype)

        def __call__(self, x):
            return abs(self.linear(x)).astype(jnp.float32)

    return Low


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_masters_of_any_inexact_dtype_are_trained_and_keep_their_dtypes(dtype, tmp_path):
    model = fully_shard(low_precision(dtype), min_size=1)
    step = model.train_step(lambda model, x: model(x).mean(), TX, max_grad_norm=1.0, accumulate=2, check_loss=False)
    start = model.init(TX)
    before = {name: np.asarray(x) for name, x in start.params.items()}
    types = jax.tree.map(lambda x: x.dtype, start)
    state, _ = step(start, np.ones((16, 16), np.float32))
    assert jax.tree.map(lambda x: x.dtype, state) == types
    assert all((np.asarray(state.params[name]) != before[name]).any() for name in before)
    jfsdp.checkpoint.save(tmp_path / "c", state)
    jfsdp.checkpoint.restore(tmp_path / "c", model.abstract_state(TX))


def test_an_optimizer_whose_state_changes_its_types_is_refused(model):
    def update(updates, state, params=None):
        return updates, state + 0.5

    drifting = optax.GradientTransformation(lambda params: jnp.zeros((), jnp.int32), update)
    refused(model, token_loss, "opt_state", "int32", "float32", tx=drifting)


class Drifting(nnx.Module):
    def __init__(self, rngs):
        self.up, self.seen = nnx.Linear(8, 8, rngs=rngs), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.seen.set_value(self.seen.get_value() + 0.5)
        return self.up(x)


def test_a_model_whose_state_changes_its_types_is_refused():
    loss = lambda model, x: (model(x) ** 2).mean()  # noqa: E731
    refused(fully_shard(Drifting), loss, "model_state", "int32", "float32", batch=jnp.ones((8, 8)))


def test_labels_by_leaf_and_padded_leaves_go_together():
    model = make(mesh=jfsdp.make_mesh(devices=jax.devices()[:3]))
    labels = model.model.tree.build({x.path: "adam" if x.padding else "muon" for x in model.layout.leaves})
    model.train_step(token_loss, optax.multi_transform({"adam": TX, "muon": optax.sgd(0.1)}, labels))
    model.train_step(token_loss, optax.apply_if_finite(TX, 3))
    model.train_step(token_loss, optax.adam(1e-3, mu_dtype="bfloat16"))


def test_a_lone_unit_need_not_stand_in_a_list():
    assert fully_shard(Tower, units=Block).layout == fully_shard(Tower, units="blocks").layout
    assert len(fully_shard(Tower, units=jfsdp.by_size(100)).layout.units) > 1


def test_a_model_on_a_mesh_without_devices_has_shapes_only():
    model = make(mesh=jfsdp.make_abstract_mesh({"fsdp": 8}))
    state = model.abstract_state(TX)
    for call in (model.init, model.lower_init):
        refuses(lambda call=call: call(TX), "the mesh has no devices")
    refuses(lambda: model.train_step(token_loss, TX).lower(state, make_batches(1)[0]), "no platform")


def test_a_save_asks_for_the_bytes_that_it_writes():
    from jfsdp.checkpoint.disk.pieces import copy_pieces
    from jfsdp.checkpoint.store import bytes_of

    state = make(strategy="zero1").init(TX)
    written = [data.nbytes for pieces in copy_pieces(state).values() for _, data in pieces.parts]
    assert sum(written) == bytes_of(state)


def test_what_is_no_state_no_mesh_no_optimizer_is_named(model):
    step, batch = model.train_step(token_loss, TX), make_batches(1)[0]
    state: Any = model.abstract_state(TX)
    for call, *facts in [
        (lambda: step(None, batch), "NoneType", "(state, batch)"),
        (lambda: step(state.params, batch), "dict"),
        (lambda: jfsdp.checkpoint.gather_leaf(state.params, "embed"), "dict", "TrainState"),
        (lambda: jfsdp.fully_shard(Tower, placements=["embed"]), "placements", "list"),  # type: ignore[arg-type]
        (lambda: fully_shard(Tower, units=3), "units=3"),
        (lambda: fully_shard(model), "ShardedModel"),
        (lambda: model.train_step(TX, token_loss), "loss_fn"),
        (lambda: model.init(TX, seed=jax.random.key(0)), "a whole number"),
        (lambda: model(batch["tokens"]), "model.forward(lambda"),
    ]:
        refuses(call, *facts, error=TypeError)
    refuses(lambda: jfsdp.checkpoint.gather_leaf(model.init(TX), "blocks.up"), "blocks.up.bias", "blocks.up.kernel")


@pytest.mark.parametrize(
    ("extra", "facts", "error"),
    [
        ({"name": np.array(["a"] * 16)}, ("batch['name']", "ndarray"), TypeError),
        ({"name": "a"}, ("batch['name']", "str"), TypeError),
        ({"key": jax.random.key(0)}, ("batch['key']", "rng keys"), TypeError),
        ({"more": np.zeros((8, 2), np.float32)}, ("batch['targets']", "16", "batch['more']", "8"), ValueError),
    ],
)
def test_leaves_of_a_batch_that_are_no_rows_or_not_as_many_are_named(model, extra, facts, error):
    step = model.train_step(token_loss, TX)
    refuses(lambda: step.shard_batch(make_batches(1)[0] | extra), *facts, error=error)


def linear(rngs):
    return nnx.Linear(8, 8, rngs=rngs)


def noisy(model, batch):
    noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(batch["key"])
    errors = ((model(batch["x"]) - noise) ** 2).sum(-1)
    return jfsdp.Loss(errors.sum(), errors.size)


@pytest.mark.parametrize(("program", "accumulate"), thin([("manual", 2), ("manual", 1), ("xla", 1), ("xla", 2)]))
def test_rows_may_have_a_key_each(program, accumulate):
    """Each row draws what it draws on one device, and no warning says that devices draw the same."""
    batch = {"x": np.ones((16, 8), np.float32), "key": jax.random.split(jax.random.key(3), 16)}
    found = noisy(linear(nnx.Rngs(0)), batch)
    model = fully_shard(linear, min_size=1, program=program)
    _, metrics = model.train_step(noisy, TX, accumulate=accumulate)(model.init(TX), batch)
    np.testing.assert_allclose(metrics["loss"], found.total / found.weight, rtol=1e-5)


@pytest.mark.parametrize(("program", "accumulate"), thin([("manual", 2), ("xla", 1), ("manual", 1), ("xla", 2)], 4))
def test_a_number_in_a_batch_holds_for_all_rows(program, accumulate):
    """A temperature, as Python's number (of a weak type, as in plain `jit`), numpy's or JAX's."""
    dtypes = []

    def scaled(model, batch):
        dtypes.append((jnp.ones((), jnp.bfloat16) * batch["scale"]).dtype)
        total = (model(batch["x"]) ** 2).sum() * batch["scale"]
        return jfsdp.Loss(total, len(batch["x"]), {"seen": jfsdp.Max(batch["scale"])})

    x = np.random.default_rng(0).normal(size=(16, 8)).astype(np.float32)
    model = fully_shard(linear, min_size=1, program=program)
    wanted = 2 * (linear(nnx.Rngs(0))(jnp.asarray(x)) ** 2).sum() / 16
    for scale, dtype in ((2.0, jnp.bfloat16), (np.float32(2.0), jnp.float32), (jnp.float32(2.0), jnp.float32)):
        dtypes.clear()
        step = model.train_step(scaled, TX, accumulate=accumulate, check_loss=False)
        _, metrics = step(model.init(TX), {"x": x, "scale": scale})
        np.testing.assert_allclose(metrics["loss"], wanted, rtol=1e-5)
        assert float(metrics["seen"]) == 2.0
        assert set(dtypes) == {jnp.dtype(dtype)}


def test_a_step_that_trains_nothing_is_refused():
    refuses(lambda: fully_shard(Tower, frozen="**").train_step(token_loss, TX), "nothing is trained")


def test_a_weight_below_zero_divides_as_it_does_on_one_device():
    def squares(model, x, sign=1.0):
        return jfsdp.Loss(sign * (model(x) ** 2).sum(), sign * x[:, 0].sum())

    model, x = fully_shard(linear, min_size=1), np.ones((16, 8), np.float32)
    signed = lambda *given: squares(*given, sign=-1.0)  # noqa: E731
    found, wanted = (model.train_step(of, TX, check_loss=False)(model.init(TX), x)[1] for of in (signed, squares))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.linear, self.scale = nnx.Linear(16, 16, rngs=rngs), nnx.Param(jnp.array(0.7))
        self.table = nnx.Variable(jnp.zeros((4, 16)))

    def __call__(self, x):
        return x + self.scale[...] * jnp.tanh(self.linear(x))


DERIVATIVES = {
    "jvp": lambda model, x: jax.jvp(model, (x,), (jnp.ones_like(x),))[1],
    "vmap of jvp": lambda model, x: jax.vmap(lambda v: jax.jvp(model, (x,), (v,))[1])(jnp.stack([x, x])),
    "jacfwd": lambda model, x: jax.vmap(jax.jacfwd(model))(x),
    "jacrev": lambda model, x: jax.vmap(jax.jacrev(model))(x),
}


@pytest.mark.parametrize("kind", DERIVATIVES)
@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_forward_mode_derivative_of_a_unit_is_refused_by_name(program, kind):
    def loss(model, batch):
        return jfsdp.Loss((DERIVATIVES[kind](model, batch) ** 2).sum(), batch.size)

    prefetch = 0 if program == "manual" else None  # no schedule reaches a unit inside of a derivative
    model = fully_shard(lambda rngs: nnx.Sequential(Scaled(rngs)), units=[Scaled], program=program, prefetch=prefetch)
    x = jax.ShapeDtypeStruct((16, 16), jnp.float32)
    if kind == "jacrev":
        model.train_step(loss, TX).trace(model.abstract_state(TX), x)
    else:
        refused(model, loss, "jax.vjp", "jax.jacrev", "units=", batch=x)


def test_an_array_on_the_mesh_that_is_closed_over_and_indexed_is_refused_with_what_to_do():
    table = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(4, 16), NamedSharding(jfsdp.make_mesh(), P()))
    batch = {"x": np.ones((16, 16), np.float32), "i": np.arange(16) % 4, "row": np.ones((16, 16), np.float32)}
    model = fully_shard(Scaled, program="manual")

    def loss(look):
        return lambda model, batch: jfsdp.Loss((model(batch["x"] + look(model, batch)) ** 2).sum(), batch["x"].size)

    refused(model, loss(lambda model, batch: table[batch["i"]]), "np.asarray", "jnp.take", batch=batch)
    for remedy in (
        lambda model, batch: batch["row"],
        lambda model, batch: model.table[...][batch["i"]],
        lambda model, batch: jnp.asarray(np.asarray(table))[batch["i"]],
        lambda model, batch: jnp.take(table, batch["i"], axis=0),
    ):
        model.train_step(loss(remedy), TX).trace(model.abstract_state(TX), batch)


@pytest.mark.parametrize("make", ["train_step", "grads"])
def test_a_loss_of_more_arguments_is_told_how_to_bind_them(model, make):
    given = {"train_step": (TX,), "grads": ()}[make]
    with refusing("loss_fn", "'rng'"):
        getattr(model, make)(lambda model, batch, rng: token_loss(model, batch), *given)


def test_batches_of_another_form_are_put_on_the_devices_for_an_evaluation(small):
    batch = make_batches(1)[0]
    step = small.train_step(token_loss, TX, accumulate=2)
    refuses(lambda: step.resolve(jax.tree.map(lambda x: x[:8], batch)), "dim 0", "size 8", "2", "16")
    other = step.shard_batch({"tokens": batch["tokens"][:8, :3]})  # 8 rows are none for two microbatches of 8 devices
    assert len({str(shard.index) for shard in other["tokens"].addressable_shards}) == 8
    small.forward(lambda model, batch: model(batch["tokens"]))(small.init(TX), other)


def test_metrics_beside_a_weight_of_nothing_are_0(small):
    def nothing(model, batch):
        total = 0.0 * model(batch["tokens"]).sum()
        return jfsdp.Loss(total, jnp.sum(batch["weights"] > 9), {"a": 3.0 + total, "b": jfsdp.Mean(3.0 + total, total)})

    _, metrics = small.train_step(nothing, TX, check_loss=False)(small.init(TX), make_batches(1)[0])
    assert (metrics["a"], metrics["b"], metrics["loss"]) == (0.0, 0.0, 0.0)


def test_an_optimizer_that_asks_for_more_than_gradients_is_refused(model):
    model.train_step(token_loss, optax.contrib.momo(1e-3))  # takes the loss
    with pytest.raises(ValueError, match=r"optimizer: .*linesearch"):
        model.train_step(token_loss, optax.lbfgs(1e-3))
