"""What a plan advises: estimates against what XLA compiles, and the order of what makes a job fit."""

import dataclasses

import pytest

from jfsdp.plan.advice import advise_job
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.jobs import INPUTS, bound_job, plan_job
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.trainer.options import StepOptions
from tests.options import made

H100 = Cluster(find_gpu("h100"), 1)
LIMIT = H100.gpu.memory_bytes - RESERVE_BYTES
LLAMA = {"model": "llama-1b", "model_config": (("num_layers", 2),), "seq_len": 4096}


def compiled_bytes(options, changes):
    return plan_job(dataclasses.replace(options, **changes), H100).needed_bytes


@pytest.mark.proof
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


@pytest.mark.proof
@pytest.mark.parametrize("seq_len", [65536, 262144])
def test_a_long_row_fits_by_chunks_and_offloaded_inputs(seq_len):
    options = StepOptions(model="llama-8b", seq_len=seq_len, model_config=(("num_layers", 6),))
    plan = plan_job(options, H100)
    advice = advise_job(options, H100, int(0.7 * plan.needed_bytes), plan)
    config = {"model_config": (("num_layers", 6), ("token_chunk", 16384))}
    assert [one.changes for one in advice[:2]] == [config, config | {"remat": INPUTS}][: len(advice)]
    assert advice[-1].needed_bytes == pytest.approx(compiled_bytes(options, advice[-1].changes), rel=0.15)


@pytest.mark.proof
def test_rows_are_limited_by_the_passes_where_the_peak_is_in_the_update_of_an_offloaded_state():
    options = StepOptions(model="llama-8b", offload=("opt_state", "params"))
    plan = plan_job(options, H100)
    assert plan.memory.parts == plan.memory.update
    rows = next(one for one in advise_job(options, H100, LIMIT, plan) if "batch_per_device" in one.changes)
    many = dataclasses.replace(options, **rows.changes)
    grown = plan_job(many, H100)
    assert rows.needed_bytes == pytest.approx(grown.needed_bytes, rel=0.15)
    fewer = advise_job(many, H100, grown.needed_bytes // 8, grown)[0]
    assert fewer.changes == {"accumulate": many.batch_per_device}
    assert fewer.needed_bytes == pytest.approx(plan.needed_bytes, rel=0.15)


@pytest.mark.proof
def test_host_memory_comes_before_a_smaller_global_batch_and_what_is_said_to_fit_does():
    options = StepOptions(**LLAMA)
    plan = plan_job(options, H100)
    limit_bytes = int(1.1 * compiled_bytes(options, {"offload": ("opt_state", "params")}))
    *_, last, nodes = advise_job(options, H100, limit_bytes, plan)
    assert last.changes == {"offload": ("opt_state",)} and list(nodes.changes) == ["nodes"]
    assert last.needed_bytes == pytest.approx(compiled_bytes(options, last.changes), rel=0.15)


@pytest.mark.parametrize("offload", [(), ("opt_state", "params")], ids=["resident", "offloaded"])
def test_where_no_option_fits_the_last_one_says_on_how_many_nodes_the_job_would(offload):
    options = StepOptions(model="llama-405b", strategy="zero2", offload=offload)
    advice = advise_job(options, H100, LIMIT, bound_job(options, H100))
    assert {one.needed_bytes <= LIMIT for one in advice if "nodes" not in one.changes} == {False}
    last = advice[-1]
    assert last.needed_bytes <= LIMIT
    more = dataclasses.replace(H100, nodes=last.changes["nodes"])
    fitting = dataclasses.replace(options, strategy="full_shard", offload=last.changes.get("offload", offload))
    assert not advise_job(fitting, more, LIMIT, bound_job(fitting, more))


def test_without_a_compiled_plan_the_state_decides_and_more_nodes_are_the_other_way():
    options = StepOptions(model="llama-70b", strategy="zero2")
    advice = advise_job(options, H100, 70 * 2**30, bound_job(options, H100))
    assert [one.changes for one in advice] == [
        {"strategy": "full_shard"},
        {"strategy": "full_shard", "offload": ("opt_state",)},
        {"strategy": "full_shard", "offload": ("opt_state", "params")},
        {"strategy": "full_shard", "nodes": 2},
    ]
    assert advice[1].needed_bytes > 70 * 2**30 > max(one.needed_bytes for one in advice[2:])
