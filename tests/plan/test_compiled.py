"""A train step at Llama-3-8B's dims with two layers, compiled once for 64 H100s that are not there: bytes and time."""

import collections
import functools

import pytest

import jfsdp
from jfsdp.plan.cluster import hardware
from jfsdp.plan.hlo import parse as plan_hlo
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.trip_counts import walk
from jfsdp.plan.time.timeline import Rates, simulate
from jfsdp.plan.time.work import Kind, work_of
from jfsdp.trainer.job import find_job
from jfsdp_models.losses import next_token_loss  # pyright: ignore[reportMissingImports]
from tests import hlo

NUM_DEVICES, SEQ_LEN = 64, 1024
SHARE = 63 / 64
ROOT_PARAMETERS, LAYER_PARAMETERS = 1_050_677_248, 218_112_000
NORM_PARAMETERS = 5 * 4096
H100S = hardware.Cluster(hardware.find_gpu("h100"), 8)


@functools.cache
def two_layers(strategy, **mesh):
    """Return the scheduled module, read."""
    job = find_job("llama-8b").with_config(num_layers=2, attention="xla")
    model = jfsdp.fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(8), **(mesh or {"fsdp": -1})),
        strategy=strategy,
        units=job.units,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16"),
        remat="full",
    )
    tx = job.optimizer(3e-4)
    step = model.train_step(next_token_loss, tx, max_grad_norm=1.0, program="xla")
    compiled = step.lower(model.abstract_state(tx), job.batch(NUM_DEVICES, SEQ_LEN)).compile()
    return plan_hlo.parse_module(compiled.as_text())


def total(found):
    """Bytes by (kind, element type, size of group)."""
    sums = collections.Counter()
    for one in found:
        for dtype, sent in one.wire_by_dtype.items():
            sums[one.kind, dtype, one.group_size] += one.count * sent
    return dict(sums)


def test_two_llama_layers_on_64_gather_twice_the_root_once_and_scatter_once():
    sums = total(find_collectives(two_layers("full_shard"), NUM_DEVICES))
    parameters = ROOT_PARAMETERS + 2 * LAYER_PARAMETERS
    assert sums["all-gather", "bf16", 64] == 2 * (2 * parameters - ROOT_PARAMETERS) * SHARE
    assert sums["reduce-scatter", "bf16", 64] == 2 * (parameters - NORM_PARAMETERS) * SHARE
    assert sums["reduce-scatter", "f32", 64] == 4 * NORM_PARAMETERS * SHARE
    assert sums.pop(("all-reduce", "f32", 64)) < 100
    assert len(sums) == 3


def matmul_flops(module):
    works = ((work_of(module, computation, line), times) for computation, line, times in walk(module))
    return sum(times * work.num_flops for work, times in works if work.kind is Kind.MATMUL)


def test_a_compiled_llama_step_computes_the_flops_of_its_matrices_and_its_time_adds_up():
    """By formula: weights forward, twice backward, and once more in the layers (full remat), but not the last of them.

    Attention that is not fused has two matmuls forward, two again, and four backward; its mask saves nothing.
    """
    module = two_layers("full_shard")
    found = simulate(module, find_collectives(module, NUM_DEVICES), Rates(H100S))
    layer, down, head = 218_112_000 - 2 * 4096, 4096 * 14336, 128256 * 4096
    scores = 32 * SEQ_LEN * SEQ_LEN * 128
    assert matmul_flops(module) == 2 * SEQ_LEN * (2 * (4 * layer - down) + 3 * head) + 2 * 2 * 8 * scores
    assert found.step_s == pytest.approx(sum(found.critical.values()))
    assert 0 < (found.overlapped_share or 0) < 1, "by default XLA hides a part"
    assert 0 < found.exposed_s < found.wire_s
