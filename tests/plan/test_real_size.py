"""Bytes on the wire, overlap, memory and size of programs at real size, for the models and clusters of docs/log.md."""

import re

import pytest

from jfsdp.plan.cluster.compile import compile_step, without_cache
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.jobs import plan_job, shard_planned
from jfsdp.trainer.options import StepOptions
from tests.options import made

pytestmark = pytest.mark.proof

FORMS = ("per_parameter", "flat")
STRATEGIES = ("ddp", "zero1", "zero2", "full_shard", "SHARD_GRAD_OP", "HYBRID_SHARD", "hfsdp")


def cluster_of(num_devices):
    per_node = 8 if num_devices % 8 == 0 else num_devices
    return Cluster(find_gpu("h100"), num_devices // per_node, per_node)


def plan(num_devices, **options):
    cluster = cluster_of(num_devices)
    mesh = options.get("mesh") or (
        "replica=-1,fsdp=8" if options.get("strategy", "").lower().startswith("h") else "fsdp=-1"
    )
    return plan_job(made(StepOptions, **{"seq_len": 8192, **options, "mesh": mesh}), cluster)


@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("num_devices", [8, 24, 64, 512])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_llama_8b_sends_what_theory_says(strategy, num_devices, param_dtype):
    seq_len = 8192 if param_dtype == "bfloat16" else 1024  # without fused attention, scores of 8192 tokens are 8 GiB
    found = plan(num_devices, model="llama-8b", strategy=strategy, param_dtype=param_dtype, seq_len=seq_len)
    assert round(found.ledger.wire_ratio, 3) == 1, found.ledger.to_dict()
    assert not found.ledger.unknown


@pytest.mark.parametrize("program", ["xla", "manual"])
@pytest.mark.parametrize(("model", "num_devices"), [("llama-8b", 64), ("llama-70b", 256), ("llama-405b", 1024)])
def test_large_models_hide_their_bytes(model, num_devices, program):
    found = plan(num_devices, model=model, program=program)
    assert round(found.ledger.wire_ratio, 3) == 1
    assert (found.timeline.overlapped_share or 0) >= 0.98
    assert found.memory.parts["unattributed"] <= 0.05 * found.memory.peak_bytes


@pytest.mark.parametrize("num_devices", [8, 24])
@pytest.mark.parametrize(
    "options",
    [
        # Dropout keeps the masks of one device, and with them padded and tied leaves to XLA's all-reduces.
        {"model": "gpt2-xl", "seq_len": 1024, "model_config": ("dropout=0", "attention_dropout=0")},
        {"model": "gpt2-xl", "seq_len": 1024, "program": "manual"},
        {"model": "llama-1b", "model_config": ("stacked=false",), "seq_len": 4096},
    ],
    ids=["gpt2-xl", "gpt2-xl manual", "list"],
)
def test_other_models_send_what_theory_says(options, num_devices):
    found = plan(num_devices, **options)
    assert round(found.ledger.wire_ratio, 3) == 1, found.ledger.to_dict()


def program_size(num_devices, num_layers, storage):
    """Return the lines of a step's StableHLO, and the instructions of its compiled HLO."""
    config = (f"num_layers={num_layers}",)
    options = made(StepOptions, model="llama-8b", program="manual", seq_len=8192, storage=storage, model_config=config)
    planned = shard_planned(options, topology_devices(cluster_of(num_devices)))
    with without_cache():
        lowered = planned.step.lower(planned.step.abstract_state(), planned.batch)
        text = compile_step(lowered, planned.step.compiler_options).text
    return lowered.as_text().count("\n"), len(re.findall(r"^\s+(?:ROOT )?%\S+ = ", text, re.MULTILINE))


@pytest.mark.filterwarnings("ignore:padding is:jfsdp.layout.lint.LayoutWarning")
@pytest.mark.parametrize("storage", FORMS)
def test_the_manual_engines_program_grows_neither_with_depth_nor_with_devices(storage):
    lines, instructions = program_size(8, 16, storage)
    deeper = program_size(8, 64, storage)
    assert deeper[0] == lines
    assert abs(deeper[1] - instructions) <= 0.005 * instructions
    # Over 16384 devices leaves are padded: a few operations for each, as many as for any other number of devices.
    wider = program_size(16384, 16, storage)
    assert wider[0] <= 1.2 * lines
    assert wider[1] <= 1.05 * instructions
