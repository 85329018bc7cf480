"""The training step: exact means, accumulation, clipping, skipped steps, and what it refuses."""

import math

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
from tests.models_small import VOCAB, Block, Tower, make_batches, token_loss
from tests.refusals import refuses, refusing
from tests.steps import fully_shard
from tests.thin import thin

TX = optax.adam(1e-2)


def make(**options):
    return fully_shard(Tower, units=[Block], **{"min_size": 20, **options})


@pytest.fixture(scope="module")
def model():
    return make()


def test_a_token_weighted_mean_is_exact_under_uneven_masks(model):
    batch = make_batches(1, rows=32)[0]
    step = model.train_step(token_loss, TX, accumulate=2)
    _, metrics = step(model.init(TX), batch)
    logits = model.forward(lambda model, x: model(x))(model.init(TX), batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    exact = (losses * batch["weights"]).sum() / batch["weights"].sum()
    rows = (losses * batch["weights"]).sum(1) / np.maximum(batch["weights"].sum(1), 1)
    np.testing.assert_allclose(metrics["loss"], exact, rtol=1e-6)
    assert abs(float(rows.mean()) - float(exact)) > 1e-2, "the masks do not tell a mean of means from the mean"
    np.testing.assert_allclose(metrics["weight"], batch["weights"].sum())
    assert 0 <= float(metrics["accuracy"]) <= 1


def test_a_scalar_loss_is_a_mean_over_microbatches(model):
    def scalar(model, batch):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()

    batch = make_batches(1)[0]
    once, metrics = model.train_step(scalar, TX)(model.init(TX), batch)
    twice, metrics_twice = model.train_step(scalar, TX, accumulate=2)(model.init(TX), batch)
    np.testing.assert_allclose(metrics["loss"], metrics_twice["loss"], rtol=1e-6)
    for name in once.params:
        np.testing.assert_allclose(once.params[name], twice.params[name], atol=1e-4, err_msg=name)


def test_clipping_scales_the_update_and_reports_the_norm_before_it(model):
    sgd = optax.sgd(1.0)
    batch, start = make_batches(1)[0], model.init(sgd)
    before = {name: np.asarray(x) for name, x in start.params.items()}
    after, metrics = model.train_step(token_loss, sgd, max_grad_norm=0.25)(start, batch)
    assert float(metrics["grad_norm"]) > 0.25
    moved = np.sqrt(sum(np.sum((np.asarray(x) - before[name]) ** 2) for name, x in after.params.items()))
    np.testing.assert_allclose(moved, 0.25, rtol=1e-5)


def test_a_step_with_a_non_finite_gradient_is_skipped_and_counted(model):
    def poisoned(model, batch):
        loss = token_loss(model, batch)
        return loss._replace(total=loss.total * batch["poison"].max())

    step = model.train_step(poisoned, TX, skip_nonfinite=True)
    good = make_batches(1)[0] | {"poison": np.ones((16,), np.float32)}
    bad = good | {"poison": np.full((16,), np.nan, np.float32)}
    state, _ = step(model.init(TX), good)
    before = jax.tree.map(np.asarray, state.params), np.asarray(state.opt_state[0].count)
    state, metrics = step(state, bad)
    jax.tree.map(np.testing.assert_array_equal, jax.tree.map(np.asarray, state.params), before[0])
    assert (int(state.step), int(state.num_skipped), int(metrics["num_skipped"])) == (2, 1, 1)
    assert int(state.opt_state[0].count) == int(before[1])
    state, metrics = step(state, good)
    assert np.isfinite(float(metrics["loss"])) and int(state.num_skipped) == 1


def test_the_state_given_is_donated(model):
    state = model.init(TX)
    model.train_step(token_loss, TX)(state, make_batches(1)[0])
    assert state.params["embed.embedding"].is_deleted()


def test_the_step_lowers_without_devices():
    model = make(mesh=jfsdp.make_mesh())
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batches(1)[0])
    lowered = model.train_step(token_loss, TX).lower(model.abstract_state(TX), batch)
    assert (
        "donated" in lowered.as_text() or "jax.buffer_donor" in lowered.as_text() or "tf.aliasing" in lowered.as_text()
    )


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"accumulate": 0}, "accumulate=0"),
        ({"sync": "never"}, "never"),
        ({"max_grad_norm": -1.0}, "max_grad_norm=-1.0"),
    ],
)
def test_bad_options_are_named(model, options, match):
    with pytest.raises(ValueError, match=match):
        model.train_step(token_loss, TX, **options)


def test_numbers_of_numpy_and_jax_are_numbers(model):
    given = {"accumulate": jnp.int32(2), "pipe_repeats": np.int64(1), "max_grad_norm": jnp.float32(0.25)}
    batch, plain = make_batches(1)[0], {"accumulate": 2, "max_grad_norm": 0.25}
    step, same = (model.train_step(token_loss, TX, **how) for how in (given, plain))
    _, metrics = step(model.init(TX, seed=np.int32(3)), batch)
    assert metrics["loss"] == same(model.init(TX, seed=3), batch)[1]["loss"]


@pytest.mark.parametrize(("rows", "accumulate"), [(12, 1), (16, 4), (0, 1)])
def test_a_batch_that_cannot_be_split_names_sizes_and_axes(model, rows, accumulate):
    batch = make_batches(1, rows=rows)[0]
    step = model.train_step(token_loss, TX, accumulate=accumulate)
    with refusing("dim 0", f"size {rows}", f"{accumulate} microbatches"):
        step(model.init(TX), batch)


@pytest.mark.parametrize("rows", [0, -8, 7])
def test_own_rows_of_a_number_that_cannot_be_split_are_refused(model, rows):
    step = model.train_step(lambda model, x: jfsdp.Loss(model(x).sum(), x.size), optax.sgd(1.0))
    assert step.own_rows(64) == range(64)
    with refusing("own_rows", f"num_rows={rows}", "multiple of"):
        step.own_rows(rows)


def test_a_batch_of_another_structure_is_refused(model):
    step, batch = model.train_step(token_loss, TX), make_batches(1)[0]
    state, _ = step(model.init(TX), batch)
    with pytest.raises(ValueError, match="the batch changed"):
        step(state, {name: x for name, x in batch.items() if name != "weights"})


def test_a_loss_that_is_not_a_scalar_is_refused(model):
    with pytest.raises(ValueError, match="total has shape"):
        model.train_step(lambda model, batch: model(batch["tokens"]).sum(-1), TX)(model.init(TX), make_batches(1)[0])


@pytest.mark.parametrize(
    ("loss", "match"),
    [
        ("low", r"total is a str; return a scalar, or jfsdp\.Loss\("),
        (jfsdp.Loss(1.0, 1.0, np.ones(3)), "aux is a ndarray; make it a dict of scalars"),  # type: ignore[arg-type]
        (jfsdp.Loss(1.0, 1.0, {1: 1.0}), "aux has the key 1; name its metrics by texts"),  # type: ignore[dict-item]
        (jfsdp.Loss(1.0, 1.0, {"parts": {"a": 1.0}}), r"aux\['parts'\] is a dict"),
    ],
)
def test_what_is_no_number_in_a_loss_is_refused(loss, match):
    with pytest.raises(TypeError, match=match):
        as_loss(loss)


def test_an_aux_name_of_the_steps_own_metrics_is_refused(model):
    step = model.train_step(lambda model, batch: jfsdp.Loss(1.0, 1.0, {"grad_norm": 0.0}), TX)
    with refusing("grad_norm"):
        step(model.init(TX), make_batches(1)[0])


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"strategy": "zero9"}, "ddp, zero1"),
        ({"frozen": ["embd"]}, "frozen 'embd' matches no parameter; parameters: blocks.down.kernel"),
        ({"ignored": nnx.BatchStat}, "placements BatchStat matches no parameter.*classes of variables: Param"),
        ({"mesh": jfsdp.make_mesh(pipe=2)}, r"3 layers .* cannot be cut over mesh axis 'pipe' \(size 2\)"),
        ({"mesh": jfsdp.make_mesh(pipe=2)}, r"axis 'pipe' \(size 2\)"),
        ({"remat": "some"}, "none, full, dots"),
        ({"reshard_after_forward": 3}, "=3 does not divide the 8 devices of axes fsdp .*use one of 1, 2, 4, 8"),
        ({"opt_over": ["fsdp"], "strategy": "ddp"}, "opt_over=.fsdp. splits .* and so does strategy 'ddp'"),
        ({"placements": {"**": jfsdp.Shard(9)}}, r"placements '\*\*': dim 9 is not a dim of shape \("),
        ({"reshard_after_forward": True, "strategy": "ddp"}, "contradicts strategy 'ddp'"),
    ],
)
def test_settings_that_cannot_be_had_are_refused(options, match):
    with pytest.raises(ValueError, match=match):
        make(**options)


def test_settings_of_a_wrong_type_are_refused():
    refuses(lambda: make(mp_policy="bfloat16"), "mp_policy='bfloat16'", "MixedPrecisionPolicy", error=TypeError)
    refuses(lambda: make(min_size="1024"), "min_size='1024'", "a whole number", error=TypeError)


def test_an_unknown_dtype_lists_the_valid_ones():
    with refusing("'float99'", "float32", "bfloat16", "float16"):
        jfsdp.MixedPrecisionPolicy(param_dtype="float99")


def test_an_optimizer_that_asks_for_more_than_gradients_is_refused(model):
    model.train_step(token_loss, optax.contrib.momo(1e-3))  # takes the loss
    with pytest.raises(ValueError, match=r"optimizer: .*linesearch"):
        model.train_step(token_loss, optax.lbfgs(1e-3))


def test_a_vocabulary_sized_leaf_is_never_replicated_silently(model):
    for leaf in model.layout.leaves:
        if VOCAB in leaf.shape:
            assert leaf.dim is not None and leaf.stage("param").axes, leaf.reason


def test_jax_dtype_objects_are_taken_as_names():
    assert jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16).param_dtype == "bfloat16"


def test_what_is_no_state_and_no_function_is_refused_by_an_evaluation(model):
    with refusing("NoneType", "*inputs", error=TypeError):
        model.forward(lambda model, x: model(x))(None, np.zeros((8, 4), np.int32))
    with refusing("forward:", "TrainState", error=TypeError):
        model.forward(model.abstract_state(TX))


@pytest.mark.parametrize("kind", ["train_step", "grads", "apply_gradients"])
def test_a_step_inside_of_jit_is_refused_with_the_reason(model, kind):
    """It would meet a tracer, of which JAX says neither what is wrong nor what to do."""
    state, batch = model.init(TX), make_batches(1)[0]
    calls = {
        "train_step": model.train_step(token_loss, TX),
        "grads": model.grads(token_loss),
        "apply_gradients": lambda state, batch: model.apply_gradients(state, None, TX),
    }
    with refusing("jax.jit"):
        jax.jit(calls[kind])(state, batch)


def test_a_donated_state_is_refused_before_it_reaches_xla(model):
    step, batch, state = model.train_step(token_loss, TX), make_batches(1)[0], model.init(TX)
    step(state, batch)
    with pytest.raises(ValueError, match="was donated to an earlier step"):
        step(state, batch)


def test_a_state_of_another_strategy_is_refused(model):
    other = make(strategy="ddp").init(TX)
    with refusing("fsdp=8", "full_shard"):
        model.train_step(token_loss, TX)(other, make_batches(1)[0])


def test_a_state_with_other_frozen_leaves_is_refused_by_their_names(model, tmp_path):
    state = make(frozen=["embed"]).init(TX)
    jfsdp.checkpoint.save(tmp_path / "c", state)
    for other, given in ((model, state), (make(frozen=["embed"]), model.init(TX))):
        there, here = ("frozen", "trained") if other is model else ("trained", "frozen")
        with refusing(f"{there} there and {here} here", "embed.embedding", "init_from"):
            other.train_step(token_loss, TX)(given, make_batches(1)[0])
    with refusing("embed.embedding", "load_pretrained"):
        jfsdp.checkpoint.restore(tmp_path / "c", like=model.abstract_state(TX))


def test_a_batch_that_fails_does_not_spoil_the_step(model):
    step, batch, state = model.train_step(token_loss, TX), make_batches(1)[0], model.init(TX)
    with pytest.raises(KeyError, match="targets"):
        step(state, {"tokens": batch["tokens"]})
    step(state, batch)


def test_a_batch_in_which_nothing_counts_gives_no_loss_and_no_gradient(model):
    batch = make_batches(1)[0]
    state, metrics = model.train_step(token_loss, TX)(model.init(TX), batch | {"weights": 0 * batch["weights"]})
    assert (float(metrics["loss"]), float(metrics["grad_norm"])) == (0.0, 0.0)
    assert all(np.isfinite(np.asarray(x)).all() for x in state.params.values())


@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_total_of_nothing_counted_is_not_finite_as_on_one_device(program):
    def uncounted(model, batch):
        return token_loss(model, batch)._replace(weight=0 * batch["weights"].sum())

    model, batch = make(program=program), make_batches(1)[0]
    state, metrics = model.train_step(uncounted, TX, skip_nonfinite=True)(model.init(TX), batch)
    assert np.isinf(metrics["loss"])
    assert int(state.num_skipped) == 1


@pytest.mark.parametrize("weight", [0.0, -1, math.nan, math.inf])
def test_a_weight_that_always_divides_into_nonsense_is_refused(model, weight):
    step = model.train_step(lambda model, batch: token_loss(model, batch)._replace(weight=weight), TX)
    with refusing("loss_fn", f"weight is {weight}"):
        step(model.init(TX), make_batches(1)[0])


def test_an_option_that_xla_does_not_have_is_named(model):
    step = model.train_step(token_loss, TX, compiler_options={"xla_nope": True})
    with refusing("compiler_options['xla_nope']", "XLA"):
        step(model.init(TX), make_batches(1)[0])


def test_weights_may_be_arrays_of_numpy(model):
    start = model.init(TX)
    given = model.init_from(TX, {name: np.asarray(x) for name, x in start.params.items()})
    assert all(np.array_equal(x, given.params[name]) for name, x in start.params.items())


def low_precision(dtype):
    from flax import nnx

    class Low(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(16, 16, rngs=rngs, param_dtype=dtype)

        def __call__(self, x):
            return abs(self.linear(x)).astype(jnp.float32)

    return Low


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.complex64])
def test_masters_of_any_inexact_dtype_are_trained_and_keep_their_dtypes(dtype, tmp_path):
    model = fully_shard(low_precision(dtype), min_size=1)
    step = model.train_step(lambda model, x: model(x).mean(), TX, max_grad_norm=1.0, accumulate=2)
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
    with pytest.raises(ValueError, match=r"opt_state.*turns int32.* into float32"):
        model.train_step(token_loss, drifting)(model.init(drifting), make_batches(1)[0])


class Drifting(nnx.Module):
    def __init__(self, rngs):
        self.up, self.seen = nnx.Linear(8, 8, rngs=rngs), nnx.BatchStat(jnp.zeros((), jnp.int32))

    def __call__(self, x):
        self.seen.set_value(self.seen.get_value() + 0.5)
        return self.up(x)


def test_a_model_whose_state_changes_its_types_is_refused():
    model, tx = fully_shard(Drifting), optax.sgd(0.1)
    step = model.train_step(lambda model, x: (model(x) ** 2).mean(), tx)
    with refusing("model_state", "int32", "float32"):
        step(model.init(tx), jnp.ones((8, 8)))


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
        with pytest.raises(ValueError, match="the mesh has no devices"):
            call(TX)
    with pytest.raises(ValueError, match="no platform to lower for"):
        model.train_step(token_loss, TX).lower(state, make_batches(1)[0])


@pytest.mark.parametrize("strategy", ["ddp", "zero1", "full_shard"])
def test_a_save_asks_for_the_bytes_that_it_writes(strategy):
    from jfsdp.checkpoint.disk.pieces import copy_pieces
    from jfsdp.checkpoint.store import bytes_of

    state = make(strategy=strategy).init(TX)
    written = [data.nbytes for pieces in copy_pieces(state).values() for _, data in pieces.parts]
    assert sum(written) == bytes_of(state)


def test_what_is_no_state_no_mesh_no_optimizer_is_named(model):
    step, batch = model.train_step(token_loss, TX), make_batches(1)[0]
    state = model.init(TX)
    for call, match in [
        (lambda: step(None, batch), r"state given is a NoneType; a step takes \(state, batch\)"),
        (lambda: step(state.params, batch), "state given is a dict"),
        (lambda: jfsdp.checkpoint.gather_leaf(state.params, "embed"), r"state \(a dict\) must be a TrainState"),
        (lambda: make(mesh="fsdp=8"), "mesh='fsdp=8' must be a mesh of jfsdp.make_mesh"),
        (lambda: jfsdp.fully_shard(Tower, placements=["embed"]), r"placements \(a list\) must be a dict or None"),  # type: ignore[arg-type]
        (lambda: fully_shard(Tower, units=3), "units=3 is neither"),
        (lambda: fully_shard(model), "model: a ShardedModel is sharded already"),
        (
            lambda: model.train_step(TX, token_loss),
            r"train_step: loss_fn \(a GradientTransformationExtraArgs\) must be a function",
        ),
        (lambda: model.init(TX, seed=jax.random.key(0)), "must be a whole number"),
    ]:
        with pytest.raises(TypeError, match=match):
            call()
    refuses(lambda: jfsdp.checkpoint.gather_leaf(state, "blocks.up"), "below it are blocks.up.bias, blocks.up.kernel")
    refuses(lambda: make(remat="ful"), "remat 'ful' is unknown")


@pytest.mark.parametrize(
    ("extra", "match"),
    [
        ({"name": np.array(["a"] * 16)}, r"batch\['name'\]: is ndarray; a leaf of a batch is an array of rows"),
        ({"name": "a"}, r"batch\['name'\]: is str; a leaf of a batch is an array of rows"),
        ({"key": jax.random.key(0)}, r"batch\['key'\]: .*rng keys are the model's"),
        ({"more": np.zeros((8, 2), np.float32)}, r"batch\['targets'\] has 16 rows and batch\['more'\] has 8"),
    ],
)
def test_leaves_of_a_batch_that_are_no_rows_or_not_as_many_are_named(model, extra, match):
    step = model.train_step(token_loss, TX)
    with pytest.raises(ValueError if "more" in extra else TypeError, match=match):
        step(model.init(TX), make_batches(1)[0] | extra)


def noisy(model, batch):
    noise = jax.vmap(lambda key: jax.random.normal(key, (8,)))(batch["key"])
    errors = ((model(batch["x"]) - noise) ** 2).sum(-1)
    return jfsdp.Loss(errors.sum(), errors.size)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("program", ["xla", "manual"])
def test_rows_may_have_a_key_each(program, accumulate):
    """Each row draws what it draws on one device, and no warning says that devices draw the same."""
    factory = lambda rngs: nnx.Linear(8, 8, rngs=rngs)  # noqa: E731
    batch = {"x": np.ones((16, 8), np.float32), "key": jax.random.split(jax.random.key(3), 16)}
    found = noisy(factory(nnx.Rngs(0)), batch)
    model = fully_shard(factory, min_size=1, program=program)
    _, metrics = model.train_step(noisy, TX, accumulate=accumulate)(model.init(TX), batch)
    np.testing.assert_allclose(metrics["loss"], found.total / found.weight, rtol=1e-5)


def test_a_loss_that_returns_nothing_is_told_what_to_return(model):
    step = model.train_step(lambda model, batch: None, TX)
    with refusing("loss_fn:", "jfsdp.Loss", error=TypeError):
        step(model.init(TX), make_batches(1, rows=8)[0])


@pytest.mark.parametrize(("program", "accumulate"), thin([("manual", 2), ("xla", 1), ("manual", 1), ("xla", 2)], 4))
def test_a_number_in_a_batch_holds_for_all_rows(program, accumulate):
    """A temperature, as Python's number (of a weak type, as in plain `jit`), numpy's or JAX's."""
    dtypes = []

    def scaled(model, batch):
        found = token_loss(model, batch)
        dtypes.append((jnp.ones((), jnp.bfloat16) * batch["scale"]).dtype)
        return found._replace(total=found.total * batch["scale"], aux={"seen": jfsdp.Max(batch["scale"])})

    model = fully_shard(Tower, units=[Block], program=program)
    batch = make_batches(1)[0]
    plain = model.train_step(token_loss, TX, accumulate=accumulate)(model.init(TX), batch)[1]
    for scale, dtype in ((2.0, jnp.bfloat16), (np.float32(2.0), jnp.float32), (jnp.float32(2.0), jnp.float32)):
        dtypes.clear()
        _, metrics = model.train_step(scaled, TX, accumulate=accumulate)(model.init(TX), batch | {"scale": scale})
        np.testing.assert_allclose(metrics["loss"], 2 * plain["loss"], rtol=1e-5)
        assert float(metrics["seen"]) == 2.0
        assert set(dtypes) == {jnp.dtype(dtype)}


def test_the_learning_rate_is_among_the_metrics_where_the_state_holds_it(model):
    tx = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.0, 1.0, 4))
    step, state = model.train_step(token_loss, tx), model.init(tx)
    for wanted in (0.0, 0.25):
        state, metrics = step(state, make_batches(1)[0])
        assert float(metrics["learning_rate"]) == wanted


def test_a_step_that_trains_nothing_is_refused():
    model = fully_shard(Tower, frozen="**")
    with pytest.raises(ValueError, match="nothing is trained"):
        model.train_step(token_loss, TX)


def test_a_weight_below_zero_divides_as_it_does_on_one_device(model):
    def signed(model, batch):
        found = token_loss(model, batch)
        return jfsdp.Loss(-found.total, -found.weight)

    batch = make_batches(1)[0]
    found, wanted = (model.train_step(of, TX)(model.init(TX), batch)[1] for of in (signed, token_loss))
    for name in ("loss", "grad_norm"):
        np.testing.assert_allclose(found[name], wanted[name], rtol=1e-5)


class Scaled(nnx.Module):
    """A layer with a scalar of its own; stacked it has the shape of its layers."""

    def __init__(self, rngs):
        self.linear, self.scale = nnx.Linear(16, 16, rngs=rngs), nnx.Param(jnp.array(0.7))

    def __call__(self, x):
        return x + self.scale[...] * jnp.tanh(self.linear(x))


class ScaledStack(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.split_rngs(splits=3)(nnx.vmap(Scaled, in_axes=0, out_axes=0))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)


def squares(model, batch):
    return jfsdp.Loss((model(batch["x"]) ** 2).sum(), batch["x"].size)


def test_a_stack_that_is_not_seen_as_one_is_told_how_to_be_declared():
    batch = {"x": np.ones((16, 16), np.float32)}
    model = fully_shard(ScaledStack, units=[Scaled], min_size=0)
    with refusing("layers.scale", "dim 0", "jfsdp.Unit", "stacked=1"):
        model.train_step(squares, TX)(model.init(TX), batch)
    model = fully_shard(ScaledStack, units=[jfsdp.Unit(Scaled, stacked=1)], min_size=0)
    _, metrics = model.train_step(squares, TX)(model.init(TX), batch)
    plain = ScaledStack(nnx.Rngs(jax.random.key(0)))
    np.testing.assert_allclose(metrics["loss"], squares(plain, batch).total / batch["x"].size, rtol=1e-5)


def forward(kind, model, x):
    if kind == "jvp":
        return jax.jvp(model, (x,), (jnp.ones_like(x),))[1]
    if kind == "vmap of jvp":
        return jax.vmap(lambda v: jax.jvp(model, (x,), (v,))[1])(jnp.stack([x, x]))
    return jax.vmap({"jacfwd": jax.jacfwd, "jacrev": jax.jacrev}[kind](model))(x)


@pytest.mark.parametrize("kind", ["jvp", "vmap of jvp", "jacfwd"])
@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_forward_mode_derivative_of_a_unit_is_refused_by_name(program, kind):
    def tangent(kind):
        return lambda model, batch: jfsdp.Loss((forward(kind, model, batch["x"]) ** 2).sum(), batch["x"].size)

    source = lambda rngs: nnx.Sequential(Scaled(rngs))  # noqa: E731
    prefetch = 0 if program == "manual" else None  # no schedule reaches a unit inside of a derivative
    model = fully_shard(source, units=[Scaled], program=program, prefetch=prefetch)
    batch = {"x": np.ones((16, 16), np.float32)}
    with refusing("jax.vjp", "jax.jacrev", "units="):
        model.train_step(tangent(kind), TX)(model.init(TX), batch)
    if kind == "jacfwd":
        model.train_step(tangent("jacrev"), TX)(model.init(TX), batch)


@pytest.mark.parametrize("remedy", ["batch", "variable", "numpy", "take"])
def test_an_array_on_the_mesh_that_is_closed_over_and_indexed_is_refused_with_what_to_do(remedy):
    table = jax.device_put(np.arange(64.0, dtype=np.float32).reshape(4, 16), NamedSharding(jfsdp.make_mesh(), P()))
    batch = {"x": np.ones((16, 16), np.float32), "i": np.arange(16) % 4}

    class Looking(Scaled):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.table = nnx.Variable(jnp.asarray(np.asarray(table)))

    how = {
        "batch": lambda model, batch: batch["row"],
        "variable": lambda model, batch: model.table[...][batch["i"]],
        "numpy": lambda model, batch: jnp.asarray(np.asarray(table))[batch["i"]],
        "take": lambda model, batch: jnp.take(table, batch["i"], axis=0),
        "index": lambda model, batch: table[batch["i"]],
    }

    def loss(how):
        return lambda model, batch: jfsdp.Loss((model(batch["x"] + how(model, batch)) ** 2).sum(), batch["x"].size)

    model = fully_shard(Looking, program="manual")
    state = model.init(TX)
    if remedy == "take":
        with refusing("np.asarray", "jnp.take"):
            model.train_step(loss(how["index"]), TX)(state, batch)
    batch["row"] = np.asarray(table)[batch["i"]]
    found = model.train_step(loss(how[remedy]), TX)(state, batch)[1]["loss"]
    xla = fully_shard(Looking, program="xla")
    np.testing.assert_allclose(found, xla.train_step(loss(how["index"]), TX)(xla.init(TX), batch)[1]["loss"], rtol=1e-5)


def test_an_array_of_another_library_is_read_by_numpy_or_refused_by_its_leaf(model):
    tensors = {name: torch.from_numpy(x) for name, x in make_batches(1)[0].items()}
    wanted = model.train_step(token_loss, TX)(model.init(TX), make_batches(1)[0])[1]["loss"]
    step = model.train_step(token_loss, TX)
    step.resolve(tensors)
    assert step(model.init(TX), tensors)[1]["loss"] == wanted
    wrong = {**tensors, "weights": tensors["weights"].bfloat16()}
    with refusing("batch['weights']", "NumPy", "x.float()"):
        step(model.init(TX), wrong)
    right = {**tensors, "weights": wrong["weights"].float().detach().cpu().numpy()}
    assert step(model.init(TX), right)[1]["loss"] == wanted


@pytest.mark.parametrize("make", ["train_step", "grads"])
def test_a_loss_of_more_arguments_is_told_how_to_bind_them(model, make):
    given = {"train_step": (TX,), "grads": ()}[make]
    with refusing("loss_fn", "'rng'"):
        getattr(model, make)(lambda model, batch, rng: token_loss(model, batch), *given)


@pytest.mark.parametrize("where", ["mp_policy", "per_unit"])
def test_a_text_in_place_of_a_policy_is_told_the_policy(where):
    options = {"mp_policy": "bf16"} if where == "mp_policy" else {"per_unit": {"blocks": {"mp_policy": "bf16"}}}
    with refusing("mp_policy='bf16'", "jfsdp.MixedPrecisionPolicy('bfloat16')", error=TypeError):
        make(**options)


def test_a_call_of_the_sharded_model_is_told_how_to_evaluate(model):
    tokens = make_batches(1)[0]["tokens"]
    with refusing("model.forward(lambda", error=TypeError):
        model(tokens)
    model.forward(lambda model, x: model(x))(model.init(TX), tokens)


def test_batches_of_another_form_are_put_on_the_devices_for_an_evaluation(model):
    batch = make_batches(1)[0]
    step = model.train_step(token_loss, TX, accumulate=2)
    state, _ = step(model.init(TX), batch)
    other = step.shard_batch({"tokens": batch["tokens"][:8, :3]})  # 8 rows are none for two microbatches of 8 devices
    assert len({shard.index for shard in other["tokens"].addressable_shards}) == 8
    model.forward(lambda model, batch: model(batch["tokens"]))(state, other)
    with pytest.raises(ValueError, match="the batch changed"):
        step(state, {"tokens": batch["tokens"]})
    with refusing("dim 0", "size 8", "2", "16"):
        step(state, jax.tree.map(lambda x: x[:8], batch))


def test_metrics_beside_a_weight_of_nothing_are_0(model):
    def nothing(model, batch):
        total = 0.0 * model(batch["tokens"]).sum()
        return jfsdp.Loss(total, jnp.sum(batch["weights"] > 9), {"a": 3.0 + total, "b": jfsdp.Mean(3.0 + total, total)})

    _, metrics = model.train_step(nothing, TX, check_loss=False)(model.init(TX), make_batches(1)[0])
    assert (metrics["a"], metrics["b"], metrics["loss"]) == (0.0, 0.0, 0.0)
