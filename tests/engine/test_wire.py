"""What both programs send at real size, read from HLO that XLA:GPU compiled for H100s."""

import functools

import jax
import pytest

import jfsdp
from jfsdp.layout.layout import num_parameters
from jfsdp.trainer.job import find_job
from jfsdp_models.losses import next_token_loss  # pyright: ignore[reportMissingImports]
from tests import hlo
from tests.steps import fully_shard
from tests.thin import thin

NUM_DEVICES = 64
PARAMETERS, ROOT_PARAMETERS = 8_030_261_248, 1_050_677_248
NORM_PARAMETERS = 65 * 4096
SHARE = (NUM_DEVICES - 1) / NUM_DEVICES


def shard(job=None, strategy="full_shard", param_dtype="bfloat16", program: str | None = "xla"):
    job = job or find_job("llama-8b")
    return fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(NUM_DEVICES // 8)),
        strategy=strategy,
        units=job.units,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype=param_dtype),
        program=program,
    )


@functools.cache
def lower(strategy="full_shard", param_dtype="bfloat16", seq_len=8192, program="xla", **config):
    attention = "cudnn" if param_dtype == "bfloat16" else "xla"
    job = find_job("llama-8b").with_config(attention=attention, **config)
    loss = job.loss if program is None else next_token_loss  # of logits, for the closed forms of both programs
    model = shard(job, strategy, param_dtype, program)
    tx = job.optimizer(3e-4)
    step = model.train_step(loss, tx, max_grad_norm=1.0)
    return step.lower(model.abstract_state(tx), job.batch(NUM_DEVICES, seq_len))


@functools.cache
def compiled(**options):
    return lower(**options).compile()


@functools.cache
def compiled_wire(**options):
    found = hlo.collectives(compiled(**options).as_text(), NUM_DEVICES)
    return found, hlo.wire_bytes(found)


@pytest.mark.proof  # of program `xla`; the step of the script sends as much
def test_llama_8b_on_64_gathers_29_551_and_scatters_15_810_gb():
    """FSDP's formula: gather P twice but the root once, scatter P once, all in bfloat16.

    The one exception is the norms' scales (0.003 % of P): XLA sums their gradients in the float32 in which the model
    computes them, and reduces before it casts.
    """
    _, wire = compiled_wire()
    gathered = 2 * (2 * PARAMETERS - ROOT_PARAMETERS) * SHARE
    assert wire["all-gather", "bf16"] == gathered
    assert round(gathered / 1e9, 3) == 29.551
    matrices, norms = 2 * (PARAMETERS - NORM_PARAMETERS) * SHARE, 4 * NORM_PARAMETERS * SHARE
    assert wire["reduce-scatter", "bf16"] == matrices
    assert wire["reduce-scatter", "f32"] == norms
    assert round((matrices + norms) / 1e9, 3) == 15.810
    assert set(wire) == {
        ("all-gather", "bf16"),
        *(("reduce-scatter", d) for d in ("bf16", "f32")),
        ("all-reduce", "f32"),
    }
    assert wire["all-reduce", "f32"] < 100, "only the loss, its weight and the gradient norm are summed"


@pytest.mark.proof
def test_a_layer_list_puts_the_same_bytes_on_the_wire_as_a_stack():
    stacked, listed = (compiled_wire(num_layers=2, seq_len=1024, stacked=stacked)[1] for stacked in (True, False))
    assert {key: size for key, size in listed.items() if size > 1e4} == {
        k: size for k, size in stacked.items() if size > 1e4
    }


@pytest.mark.proof  # test_accumulation.py has ZeRO-1 with the tests
@pytest.mark.parametrize("strategy", ["zero1", "SHARD_GRAD_OP"])
def test_strategies_that_keep_parameters_gather_and_scatter_each_once(strategy):
    _, wire = compiled_wire(strategy=strategy, num_layers=2, seq_len=1024)
    total = ROOT_PARAMETERS + 2 * (PARAMETERS - ROOT_PARAMETERS) // 32
    assert wire["all-gather", "bf16"] == pytest.approx(2 * total * SHARE, rel=1e-4)
    assert wire["reduce-scatter", "bf16"] == pytest.approx(2 * total * SHARE, rel=1e-4)
    assert sum(size for (kind, _), size in wire.items() if kind == "all-reduce") < 100


@pytest.mark.proof
def test_ddp_only_reduces_gradients():
    _, wire = compiled_wire(strategy="ddp", num_layers=2, seq_len=1024)
    total = ROOT_PARAMETERS + 2 * (PARAMETERS - ROOT_PARAMETERS) // 32
    assert wire["all-reduce", "bf16"] == pytest.approx(2 * 2 * total * SHARE, rel=1e-4)
    assert not {kind for kind, _ in wire} - {"all-reduce"}


@pytest.mark.proof
def test_float32_parameters_move_in_float32():
    _, wire = compiled_wire(param_dtype="float32", num_layers=2, seq_len=256)
    total = ROOT_PARAMETERS + 2 * (PARAMETERS - ROOT_PARAMETERS) // 32
    assert wire["all-gather", "f32"] == pytest.approx(4 * (2 * total - ROOT_PARAMETERS) * SHARE, rel=1e-6)
    assert wire["reduce-scatter", "f32"] == pytest.approx(4 * total * SHARE, rel=1e-6)


@pytest.mark.proof
def test_the_program_does_not_grow_with_depth():
    """Compile time is flat in depth because the program is: 64 layers lower to as many lines as 8."""
    sizes = [len(lower(num_layers=num, seq_len=256).as_text().splitlines()) for num in (8, 64)]
    assert sizes[0] == sizes[1]


def test_state_arguments_take_12_bytes_per_parameter_over_the_devices():
    arguments = compiled(program=None).memory_analysis().argument_size_in_bytes
    batch = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(find_job("llama-8b").batch(1, 8192)))
    assert arguments == pytest.approx(12 * PARAMETERS / NUM_DEVICES + batch, abs=4096)


@pytest.mark.parametrize(("name", "num_devices"), thin([("llama-8b", 64), ("llama-405b", 1024)]))
def test_init_computes_on_each_device_only_what_it_keeps(name, num_devices):
    job = find_job(name)
    model = fully_shard(job.model, mesh=jfsdp.make_mesh(devices=hlo.h100s(num_devices // 8)), units=job.units)
    tx = job.optimizer(3e-4)
    compiled = model.lower_init(tx).compile()
    memory = compiled.memory_analysis()
    assert memory.temp_size_in_bytes < 2**20
    assert memory.output_size_in_bytes == pytest.approx(
        12 * num_parameters(model.layout.leaves) / num_devices, rel=1e-5
    )
    assert not hlo.collectives(compiled.as_text(), num_devices)


def test_the_step_of_the_script_sends_what_theory_says_in_one_collective_per_unit_and_direction():
    """With its own loss, which forms the head's gradient itself: the program is `manual`, and all sums are bfloat16."""
    found, wire = compiled_wire(program=None)
    assert wire["all-gather", "bf16"] == 2 * (2 * PARAMETERS - ROOT_PARAMETERS) * SHARE
    assert wire["reduce-scatter", "bf16"] == 2 * PARAMETERS * SHARE
    assert wire.keys() <= {("all-gather", "bf16"), ("reduce-scatter", "bf16"), ("all-reduce", "f32")}
    assert wire.get(("all-reduce", "f32"), 0) < 100
    sizes = [(one.count, sum(one.wire_by_dtype.values())) for one in found if one.kind == "all-gather"]
    layer = 2 * (PARAMETERS - ROOT_PARAMETERS) // 32 * SHARE
    assert sum(count for count, size in sizes if size == layer) == 64, "32 layers, each twice"
    assert not jfsdp.plan.audit(compiled(program=None), shard(program=None).layout, min_overlap=0.99).findings
