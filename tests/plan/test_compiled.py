"""The matmuls and the time of a compiled step: a narrow Llama of two layers, for 8 H100s that are not there."""

import pytest

from jfsdp.plan.cluster import hardware
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.hlo.trip_counts import walk
from jfsdp.plan.time.timeline import Rates, simulate
from jfsdp.plan.time.work import Kind, work_of
from tests.plan import programs

DIM, FFN, KV, VOCAB, SEQ = 1024, 2048, 512, 4096, programs.SEQ_LEN


def test_a_compiled_llama_step_computes_the_flops_of_its_matrices_and_its_time_adds_up():
    """By formula: weights forward, twice backward, and once more in the layers (full remat), but not the last of them.

    Attention that is not fused has two matmuls forward, two again, and four backward; its mask saves nothing.
    """
    module = parse_module(programs.program(config=(("attention", "xla"),))[0])
    works = ((work_of(module, computation, line), times) for computation, line, times in walk(module))
    flops = sum(times * work.num_flops for work, times in works if work.kind is Kind.MATMUL)
    layer, down, head = 2 * DIM * (DIM + KV) + 3 * DIM * FFN, DIM * FFN, VOCAB * DIM
    assert flops == 2 * SEQ * (2 * (4 * layer - down) + 3 * head) + 2 * 2 * 8 * (SEQ * SEQ * DIM)
    found = simulate(module, find_collectives(module, 8), Rates(hardware.Cluster(hardware.find_gpu("h100"))))
    assert found.step_s == pytest.approx(sum(found.critical.values()))
    assert 0 < (found.overlapped_share or 0) < 1, "by default XLA hides a part"
    assert 0 < found.exposed_s < found.wire_s
