"""What a plan advises: estimates against what XLA compiles, and the order of what makes a job fit."""

import dataclasses

import pytest

from jfsdp.plan.advice import advise_job
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.jobs import bound_job, plan_job
from jfsdp.trainer.options import StepOptions
from tests.options import made

H100 = Cluster(find_gpu("h100"), 1)
LLAMA = {"model": "llama-1b", "model_config": (("num_layers", 2),), "seq_len": 4096}


def compiled_bytes(options, changes):
    return plan_job(dataclasses.replace(options, **changes), H100).needed_bytes


@pytest.mark.parametrize(
    ("more", "names"),
    [
        ({"batch_per_device": 8, "lora": ("rank=16,targets=**.kernel",)}, ["remat", "batch_per_device"]),
        ({"batch_per_device": 8, "accumulate": 4, "remat": "dots"}, ["accumulate", "reshard_after_forward"]),
    ],
    ids=["adapters", "microbatches"],
)
def test_what_uses_free_memory_needs_about_what_was_estimated(more, names):
    options = made(StepOptions, **LLAMA, **more)
    plan = plan_job(options, H100)
    advice = advise_job(options, H100, plan.limit_bytes, plan)
    assert [list(one.changes) for one in advice] == [[name] for name in names]
    assert advise_job(options, H100, int(1.9 * plan.needed_bytes), plan) == []
    for one in advice:
        assert plan.needed_bytes < one.needed_bytes < plan.limit_bytes
        assert one.needed_bytes == pytest.approx(compiled_bytes(options, one.changes), rel=0.15)


def test_what_makes_a_job_fit_is_tried_from_what_costs_least():
    options = StepOptions(**LLAMA, batch_per_device=8, strategy="ddp", remat="none")
    plan = plan_job(options, H100)
    needed = lambda **changes: compiled_bytes(options, changes)  # noqa: E731
    limit_bytes = int(1.2 * needed(strategy="full_shard", remat="full", accumulate=8))
    advice = advise_job(options, H100, limit_bytes, plan)
    assert [one.changes for one in advice] == [
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "remat": "full"},
        {"strategy": "full_shard", "remat": "full", "accumulate": 8},
    ]
    assert plan.needed_bytes > advice[0].needed_bytes > advice[1].needed_bytes > limit_bytes > advice[2].needed_bytes


def test_without_a_compiled_plan_the_state_decides_and_more_nodes_are_the_other_way():
    options = StepOptions(model="llama-70b", strategy="zero2")
    advice = advise_job(options, H100, 40 * 2**30, bound_job(options, H100))
    assert [one.changes for one in advice] == [
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "offload": ("opt_state",)},
        {"strategy": "full_shard", "nodes": 4},
    ]
    assert advice[0].needed_bytes > 40 * 2**30 > max(one.needed_bytes for one in advice[1:])
