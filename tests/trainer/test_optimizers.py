"""`--optimizer`: steps equal those of one device with optax, decay keeps the job's mask, and what is refused."""

import functools
from typing import Any

import jax
import numpy as np
import optax
import pytest

import jfsdp
from examples import vit
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.trainer import optimizers
from jfsdp.trainer.job import Job, as_job
from jfsdp.trainer.options import ShardingOptions, make_optimizer
from jfsdp_models import gpt2, llama  # pyright: ignore[reportMissingImports]
from tests import reference
from tests.models_small import Block, LinenBlock, Tower, linen_tower, make_batches, token_loss
from tests.options import made
from tests.refusals import refuses
from tests.sharding import fully_shard

RATE, STEPS = 1e-2, 3
SOURCES: dict[str, tuple[Any, Any]] = {
    "stacked": (Tower, Block),
    "listed": (functools.partial(Tower, stacked=False), Block),
    "linen": (linen_tower(), LinenBlock),
}


def by_name(decide: Any) -> Any:
    return lambda params: jax.tree_util.tree_map_with_path(lambda path, x: decide(reference.dotted(path), x), params)


@by_name
def mask(name: str, x: Any) -> bool:
    """Decay matrices and vectors of both of Muon's parts, and spare some of each."""
    return name.endswith(("up.kernel", "embedding", "head.bias"))


def is_matrix(name: str) -> bool:
    return "blocks" in name and name.endswith("kernel")


@by_name
def dims(name: str, x: Any) -> Any:
    return optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1) if is_matrix(name) else None


@by_name
def decayed_by_adam(name: str, x: Any) -> bool:
    return name.endswith(("embedding", "head.bias"))


def plain_muon(decay: float, **options: float) -> Any:
    tx = optax.contrib.muon(
        RATE,
        weight_decay=decay,
        weight_decay_mask=mask,
        consistent_rms=0.2,
        muon_weight_dimension_numbers=dims,
        **options,  # type: ignore[arg-type]
    )
    return optax.chain(tx, optax.add_decayed_weights(-RATE * decay, decayed_by_adam))


ADAM: dict[str, Any] = {"b1": 0.9, "b2": 0.95, "eps": 1e-8}
# By case: the optimizer, its options, and the transformation of one device.
CASES: dict[str, tuple[str, dict[str, float], Any]] = {
    "adamw": ("adamw", {}, lambda: optax.adamw(RATE, **ADAM, weight_decay=0.1, mask=mask)),
    "adamw, all": (
        "adamw",
        {"weight_decay": 2.0, "beta1": 0.5, "beta2": 0.7, "eps": 1e-2},
        lambda: optax.adamw(RATE, 0.5, 0.7, 1e-2, weight_decay=2.0, mask=mask),
    ),
    "muon": ("muon", {}, lambda: plain_muon(0.1, beta=0.95, adam_b1=0.9, adam_b2=0.95)),
    "muon, all": (
        "muon",
        {"weight_decay": 2.0, "momentum": 0.5, "beta1": 0.6, "beta2": 0.7, "eps": 1e-2},
        lambda: plain_muon(2.0, beta=0.5, adam_b1=0.6, adam_b2=0.7, eps=1e-2),
    ),
    "lion": ("lion", {}, lambda: optax.lion(RATE, 0.9, 0.99, weight_decay=1e-3, mask=mask)),
    "lion, all": (
        "lion",
        {"weight_decay": 2.0, "beta1": 0.6, "beta2": 0.7},
        lambda: optax.lion(RATE, 0.6, 0.7, weight_decay=2.0, mask=mask),
    ),
    "adafactor": ("adafactor", {}, lambda: optax.adafactor(RATE, multiply_by_parameter_scale=False)),
    "adafactor, all": (
        "adafactor",
        {"weight_decay": 2.0, "momentum": 0.5},
        lambda: optax.chain(  # its momentum averages updates, and its decay is not scaled by the rate
            optax.adafactor(
                RATE,
                multiply_by_parameter_scale=False,
                momentum=0.5,
                weight_decay_rate=2.0 * RATE,
                weight_decay_mask=mask,
            )
        ),
    ),
    "sgd": ("sgd", {}, lambda: optax.sgd(RATE)),
    "sgd, all": (
        "sgd",
        {"weight_decay": 2.0, "momentum": 0.5},
        lambda: optax.chain(optax.add_decayed_weights(2.0, mask), optax.sgd(RATE, 0.5)),
    ),
}


def job_of(source: Any = Tower, unit: Any = Block, decay_mask: Any = None) -> Job:
    return Job(source, token_loss, lambda b, t: None, [unit], optax.sgd, decay_mask=decay_mask)


def optimizer(model: Any, decay_mask: Any = mask, rate: Any = RATE, **options: Any) -> Any:
    return make_optimizer(ShardingOptions(**options), job_of(decay_mask=decay_mask), model, rate)


def run(model: Any, tx: Any) -> tuple[list[float], dict[str, Any]]:
    state, step, losses = model.init(tx), model.train_step(token_loss, tx, check_loss=False), []
    for batch in make_batches(STEPS):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, {name: np.asarray(jfsdp.checkpoint.gather_leaf(state, name)) for name in state.params}


def updated_by_muon(model: Any, tx: Any) -> set[str]:
    roles = model.abstract_state(tx).roles.arrays
    return {str(role.leaf) for role in roles if ".muon." in role.name and role.leaf}


PAIRS = [(case, "stacked") for case in CASES] + [("muon, all", "listed"), ("muon, all", "linen"), ("adamw", "linen")]
SLOW = [(case, form) for case, form in PAIRS if not (case.endswith(", all") and form == "stacked")]


@pytest.mark.parametrize(
    ("case", "form"), [pytest.param(*pair, marks=[pytest.mark.proof] * (pair in SLOW)) for pair in PAIRS]
)
def test_steps_equal_those_of_one_device_with_optax(case, form):
    (name, options, plain), (source, unit) = CASES[case], SOURCES[form]
    model = fully_shard(source, units=[unit], min_size=20)
    losses, params = run(model, optimizer(model, optimizer=name, **options))
    expected = reference.train(source, token_loss, plain(), make_batches(STEPS))
    np.testing.assert_allclose(losses, expected.losses, rtol=1e-5)
    for path, value in expected.params.items():
        np.testing.assert_allclose(params[path], value, atol=1e-3 * RATE, rtol=1e-4, err_msg=path)


def test_every_optimizer_has_a_case_with_all_its_options():
    for name, (_, defaults) in optimizers.OPTIMIZERS.items():
        assert CASES[f"{name}, all"][1].keys() == defaults.keys() <= set(optimizers.OPTIONS)


@pytest.mark.parametrize("form", SOURCES)
def test_muon_updates_matrices_of_layers(form):
    source, unit = SOURCES[form]
    model = fully_shard(source, units=[unit])
    found = updated_by_muon(model, optimizer(model, optimizer="muon"))
    assert found == {path for path in model.layout.by_path if is_matrix(path)} and len(found) in (2, 6)


@pytest.mark.parametrize(
    ("options", "trained"),
    [
        ({"frozen": ["**.up.kernel"]}, {"blocks.down.kernel"}),
        pytest.param(
            {"lora": jfsdp.LoRA("blocks.up.kernel", rank=2)},
            {"blocks.up.kernel.lora_a", "blocks.up.kernel.lora_b"},
            marks=pytest.mark.proof,
        ),
        (
            {"lora": jfsdp.LoRA("blocks.up.kernel", rank=2), "quantized": {"blocks.up.kernel": "int8"}},
            {"blocks.up.kernel.lora_a", "blocks.up.kernel.lora_b"},
        ),
    ],
)
def test_muon_updates_only_trained_matrices(options, trained):
    model = fully_shard(Tower, units=[Block], **options)
    tx = optimizer(model, optimizer="muon", decay_mask=None)
    assert updated_by_muon(model, tx) == trained
    losses, _ = run(model, tx)
    assert np.isfinite(losses).all() and losses[-1] != losses[0]


def test_muon_moves_matrices_by_all_to_all():
    model = fully_shard(Tower, units=[Block])
    tx = optimizer(model, optimizer="muon")
    step, (batch,) = model.train_step(token_loss, tx, check_loss=False), make_batches(1)
    assert str(step.trace(model.abstract_state(tx), batch).jaxpr).count("all_to_all[") >= 2


@pytest.mark.parametrize("form", SOURCES)
def test_without_a_mask_of_the_job_matrices_and_embeddings_decay(form):
    source, unit = SOURCES[form]
    model = fully_shard(source, units=[unit])
    tx = optimizer(model, optimizer="sgd", weight_decay=1.0, rate=1.0, decay_mask=None)
    params = model.model.tree.build({leaf.path: np.ones(leaf.shape, np.float32) for leaf in model.layout.leaves})
    zeros = jax.tree.map(np.zeros_like, params)
    updates = model.model.tree.by_name(tx.update(zeros, tx.init(params), params)[0])
    decayed = {path for path, x in updates.items() if np.ravel(jax.tree.leaves(x)[0])[0] == -1}
    assert decayed == {path for path in updates if path.endswith(("kernel", "embedding"))}


@pytest.mark.parametrize(
    ("make_job", "options"),
    [
        (lambda: as_job(llama.JOBS["llama-tiny"], "tiny").with_config(num_layers=2), {}),
        (lambda: as_job(gpt2.JOBS["gpt2-tiny"], "tiny").with_config(num_layers=2), {}),
        (vit.job, {"beta2": 0.999}),
    ],
)
def test_adamw_is_the_optimizer_of_the_models_here(make_job, options):
    job = make_job()
    model = jfsdp.fully_shard(job.model, mesh=make_abstract_mesh({"fsdp": 8}), units=job.units)
    shapes = model.model.tree.build({x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in model.layout.leaves})

    def update(tx):
        state = jax.eval_shape(tx.init, shapes)
        return str(jax.make_jaxpr(tx.update)(shapes, state, shapes))

    unmasked = optax.adamw(1e-3, 0.9, options.get("beta2", 0.95), weight_decay=0.1)
    named = make_optimizer(ShardingOptions(optimizer="adamw", **options), job, model, 1e-3)
    assert update(named) == update(job.optimizer(1e-3)) != update(unmasked)


SCHEDULE = optax.linear_schedule(RATE, 0.0, 10)


def combined(name: str, model: Any) -> Any:
    more = made(ShardingOptions, optimizer=name, opt_state_dtype="bfloat16", ema=0.5, rate_scale=("embed=0", "head=2"))
    return make_optimizer(more, job_of(), model, SCHEDULE)


@pytest.mark.proof
def test_muon_with_averages_and_rates_trains():
    model = fully_shard(Tower, units=[Block])
    losses, params = run(model, combined("muon", model))
    plain = reference.first_params(Tower)
    np.testing.assert_array_equal(params["embed.embedding"], reference.named(plain)["embed.embedding"])
    np.testing.assert_allclose(losses, run(model, optimizer(model, None, SCHEDULE, optimizer="muon"))[0], rtol=0.1)


@pytest.mark.parametrize("name", optimizers.OPTIMIZERS)
def test_moments_averages_and_rates_combine_with_every_optimizer(name):
    model = fully_shard(Tower, units=[Block])
    tx = combined(name, model)
    state = model.abstract_state(tx)
    kinds = {role.name: x.dtype for role, x in zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True)}
    assert {str(x) for path, x in kinds.items() if ".mu." in path} <= {"bfloat16"}
    assert sum(".ema." in path for path in kinds) == len(model.layout.leaves)


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"optimizer": "adam"}, ["--optimizer 'adam'", "'adamw'", "muon, lion, adafactor, sgd"]),
        ({"optimizer": "sgd", "beta2": 0.9}, ["--beta2 0.9", "sgd", "--weight-decay, --momentum"]),
        ({"optimizer": "adamw", "momentum": 0.9}, ["--momentum 0.9", "--weight-decay, --beta1, --beta2, --eps"]),
        ({"weight_decay": 0.1}, ["--weight-decay 0.1", "--optimizer adamw"]),
        ({"optimizer": "lion", "beta1": 1.0}, ["--beta1 1", "below 1", "0.9"]),
    ],
)
def test_options_that_an_optimizer_does_not_have_are_refused(options, facts):
    model = fully_shard(Tower, units=[Block])
    refuses(lambda: optimizer(model, **options), *facts)


def test_without_a_name_the_optimizer_is_the_jobs():
    model = fully_shard(Tower, units=[Block])
    assert len(jax.tree.leaves(model.abstract_state(optimizer(model)).opt_state)) == 0
