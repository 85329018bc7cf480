"""`jfsdp.prove`: what it covers, compares and prints. tests/proof/test_faults.py seeds faults."""

import itertools
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jfsdp
from jfsdp.cli import main
from jfsdp.proof.cases import STRATEGIES, choose_cases
from jfsdp.proof.jobs import MOST_PARAMETERS, cut_to_size, num_parameters, random_batch
from jfsdp.trainer.job import find_job
from tests.models_small import Lookup
from tests.refusals import refuses

COLUMNS = {"strategy": STRATEGIES, "program": ("manual", "xla"), "accumulate": (1, 2), "remat": ("none", "full")}
ONE = {"accumulate": (1,), "reshard_after_forward": (None,), "remat": ("none",)}


def batch(rows=16, tokens=4):
    rng = np.random.default_rng(0)
    drawn = {name: rng.integers(0, 37, (rows, tokens)) for name in ("x", "y")}
    return {**drawn, "weights": (rng.random((rows, tokens)) < 0.7).astype(np.float32)}


def sums(model, rows):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(rows["x"]), rows["y"])
    return jfsdp.Loss(jnp.sum(losses * rows["weights"]), jnp.sum(rows["weights"]))


def mean(model, rows):
    return jnp.mean(optax.softmax_cross_entropy_with_integer_labels(model(rows["x"]), rows["y"]))


@pytest.mark.parametrize("axes", [(), ("tensor",), ("context", "tensor", "pipe", "expert")])
def test_cases_contain_every_pair_that_exists(axes):
    cases = choose_cases(COLUMNS, None, 8, axes)
    sizes = [dict(case.mesh) for case in cases]
    assert all(np.prod(list(size.values())) == 8 and size["fsdp"] >= 2 for size in sizes)
    for one, other in itertools.combinations(("replica", *axes), 2):
        assert any({one, other} <= size.keys() for size in sizes) == ({one, other} != {"context", "pipe"})
    for axis, strategy in itertools.product(("replica", *axes), STRATEGIES):
        assert any(case.strategy == strategy and axis in dict(case.mesh) for case in cases)
    assert len(cases) <= 16 and len(choose_cases(COLUMNS, [{"fsdp": 8}], 8, every=True)) == 32


def test_a_sum_equals_one_device_in_float64():
    shown = []
    options = {"meshes": [{"fsdp": 4}, {"replica": 2, "fsdp": 4}], "strategies": ("full_shard", "zero1"), **ONE}
    proof = jfsdp.prove(Lookup, sums, optax.adamw(1e-3), batch(), **options, on_case=shown.append)
    assert proof.is_ok and proof.dtype == "float64" and proof.cases == tuple(shown)
    assert {case.case.program for case in proof.cases} == {"manual", "xla"}
    assert all(case.worst < 1e-6 for case in proof.cases)
    found = json.loads(json.dumps(proof.to_dict(), default=str))
    assert found["ok"] and len(found["cases"]) == len(proof.cases)


def test_a_mean_is_proved_in_program_xla():
    class Net(linen.Module):
        @linen.compact
        def __call__(self, tokens):
            return linen.Dense(37)(linen.Embed(37, 16)(tokens))

    source = Net(), (np.zeros((1, 4), np.int32),)
    proof = jfsdp.prove(source, mean, optax.sgd(0.1), batch(), meshes=[{"fsdp": 8}], strategies=("zero2",), **ONE)
    assert proof.is_ok and [one.case.program for one in proof.cases] == ["xla"]


def test_a_refusal_is_no_proof():
    def unequal(model, rows):
        losses = optax.softmax_cross_entropy_with_integer_labels(model(rows["x"]), rows["y"])
        return jfsdp.Loss(jnp.sum(losses) / jnp.sum(rows["weights"]), jnp.ones(()))

    options = {"meshes": [{"fsdp": 8}], "programs": ("manual",), "strategies": ("full_shard",), **ONE}
    (one,) = (proof := jfsdp.prove(Lookup, unequal, optax.sgd(0.1), batch(), **options)).cases
    assert not proof.is_ok and one.status == "refused" and one.cause and "weight" in one.cause.text


class Shifted(nnx.Module):
    """Logits plus a number that their softmax ignores: its gradient is zero except for rounding."""

    def __init__(self, rngs):
        self.net, self.shift = Lookup(rngs), nnx.Param(jnp.zeros((1,)))

    def __call__(self, tokens):
        return self.net(tokens) + self.shift[...]


def test_rounding_of_a_zero_gradient_is_no_difference():
    options = {"meshes": [{"fsdp": 8}], "programs": ("manual",), "strategies": ("zero2",), **ONE}
    (one,) = jfsdp.prove(Shifted, sums, optax.adam(1e-3), batch(), **options).cases
    assert one.status == "equal" and one.worst < 1e-6


class Narrow(nnx.Module):
    """Relu layers in bfloat16, where a rounding error changes moments of Adam by more than 1 %."""

    def __init__(self, rngs):
        options = {"dtype": jnp.bfloat16, "rngs": rngs}
        self.embed, self.head = nnx.Embed(37, 16, **options), nnx.Linear(16, 37, **options)
        self.layers = nnx.List([nnx.Linear(16, 16, **options) for _ in range(3)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + nnx.relu(layer(x))
        return self.head(x).astype(jnp.float32)


@pytest.mark.parametrize(("scale", "status"), [(1.0, "equal"), (1.5, "differs")])
def test_bfloat16_is_compared_by_the_effect_of_its_rounding(scale, status):
    def scaled(model, rows):
        loss = sums(model, rows)
        factor = scale if rows["x"].shape[0] < 16 else 1.0
        return jfsdp.Loss(loss.total * factor, loss.weight)

    options = {"meshes": [{"fsdp": 8}], "programs": ("manual",), "strategies": ("zero2",), **ONE}
    (one,) = jfsdp.prove(Narrow, scaled, optax.adam(1e-3), batch(), **options).cases
    assert one.status == status and one.worst > 5e-3


@pytest.mark.parametrize(
    ("rows", "error", "name"),
    [({**batch(), "name": "a"}, TypeError, "name"), ({**batch(), "edges": np.zeros((2, 8))}, ValueError, "edges")],
)
def test_a_batch_is_checked_before_a_model_is_made(rows, error, name):
    with pytest.raises(error, match=name):
        jfsdp.prove(lambda rngs: pytest.fail("a model was made"), mean, optax.sgd(0.1), rows)


def test_a_size_of_minus_1_is_the_rest_of_the_devices():
    options = {"meshes": [{"replica": 2, "fsdp": -1}], "programs": ("manual",), "strategies": ("zero2",), **ONE}
    (one,) = (proof := jfsdp.prove(Lookup, sums, optax.sgd(0.1), batch(), **options)).cases
    assert dict(one.case.mesh) == {"replica": 2, "fsdp": 4} and one.status == "equal"
    assert str(proof).startswith("EQUAL  1 of 1 cases")


@pytest.mark.parametrize(
    ("options", "facts"),
    [
        ({"meshes": [{"fsdps": 8}]}, ("fsdps", "replica")),
        ({"meshes": [{"fsdp": 16}]}, ("16", "8", "--devices")),
        ({"meshes": [{"fsdp": 0}]}, ("'fsdp': 0",)),
        ({"meshes": []}, ("meshes",)),
        ({"strategies": ("zero9",)}, ("zero9", "zero2")),
    ],
)
def test_what_no_case_can_have_is_refused_before_any_case(options, facts):
    never = lambda case: pytest.fail("a case ran")  # noqa: E731
    refuses(lambda: jfsdp.prove(Lookup, sums, optax.sgd(0.1), batch(), **options, on_case=never), *facts)


def test_callbacks_of_the_host_are_refused():
    def counted(model, rows):
        loss = sums(model, rows)
        return jfsdp.Loss(jax.pure_callback(lambda x: x, loss.total, loss.total), loss.weight)

    with pytest.raises(ValueError, match="pure_callback"):
        jfsdp.prove(Lookup, counted, optax.sgd(0.1), batch())


def test_adapters_are_refused():
    adapted = jfsdp.lora(Lookup, jfsdp.LoRA(rank=2, targets="**.kernel"))
    with pytest.raises(ValueError, match=r"jfsdp\.lora"):
        jfsdp.prove(adapted, sums, optax.sgd(0.1), batch())


@pytest.mark.parametrize("name", ["llama-8b", pytest.param("mixtral-8x7b", marks=pytest.mark.proof), "gpt2"])
def test_models_are_cut_to_size(name):
    job, changed = cut_to_size(find_job(name))
    assert changed and (num_parameters(job) or 0) <= 2 * MOST_PARAMETERS
    assert {getattr(job.config, field) for field in changed} == {*changed.values()}
    rows = random_batch(job, 8, 32)
    assert rows["tokens"].shape == (8, 32) and rows["tokens"].max() < job.config.vocab_size


def test_the_command_prints_the_cases_and_ends_with_a_status(capsys):
    options = ["--mesh", "fsdp=8", "--strategy", "zero1", "--accumulate", "1", "--remat", "none", "--program", "xla"]
    assert main(["prove", "--model", "gpt2-tiny", "--reshard-after-forward", "false", *options, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["model"] == "gpt2-tiny" and found["config"] and found["ok"]
    (case,) = found["cases"]
    assert case["case"]["mesh"] == [["fsdp", 8]] and case["status"] == "equal"
    assert main(["prove", "--model", "gpt2-tiny", "--lora", "rank=2,targets=**.kernel", *options]) == 2
    assert "--lora" in capsys.readouterr().err
