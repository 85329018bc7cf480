"""Runs that others published: what is in them, what a plan of them says, and what a plan says of itself."""

import dataclasses
import json
import re
import shlex

import jax
import pytest

from jfsdp.cli import main
from jfsdp.cli.commands import parse
from jfsdp.layout.mesh import num_data_shards, parse_mesh
from jfsdp.layout.table import num_parameters
from jfsdp.plan.cluster.gpus import GPUS, find_gpu
from jfsdp.plan.cluster.hardware import Cluster, matmul_rate
from jfsdp.plan.published import trust
from jfsdp.plan.published.runs import EAGER, XLA, find_runs, published_runs
from jfsdp.plan.published.trust import left_out, trust_in
from jfsdp.plan.search.jobs import find_planned_job, shard_planned
from jfsdp.plan.time.rates import Rates
from jfsdp.plan.time.work import Kind, Matmul, Work

RUNS = published_runs()


def test_runs_say_who_measured_what():
    assert len({run.id for run in RUNS}) == len(RUNS) > 80
    for run in RUNS:
        assert run.source["repository"] and run.source["path"] and run.source["date"], run.id
        assert run.step_s or run.memory, run.id
        assert num_data_shards(parse_mesh(run.options["mesh"])) == run.cluster.num_devices, run.id


@pytest.mark.parametrize("run", RUNS, ids=lambda run: run.id)
def test_the_command_of_a_run_is_what_is_planned(run):
    words = shlex.split(run.command)[1:]
    given = parse(words)
    assert given.gpu == run.gpu and given.nodes == run.nodes and given.network == (run.network or 0.0)
    for field in dataclasses.fields(run.step_options):
        assert getattr(given, field.name) == getattr(run.step_options, field.name), field.name


@pytest.mark.parametrize(
    ("pattern", "published"),  # as the models' own papers and cards count them
    [
        ("jaxtoolbox-maxtext-llama2-7b-8", 6_738_415_616),
        ("torchtitan-8b-8-chunked-ce", 8_030_261_248),
        ("tinyllama*", 1_100_048_384),
    ],
)
def test_models_have_the_published_number_of_parameters(pattern, published):
    (run,) = find_runs(pattern)
    planned = shard_planned(run.step_options, find_planned_job(run.step_options), num_devices=run.cluster.num_devices)
    assert num_parameters(planned.model.layout.leaves) == published


def test_every_run_was_compared_with_its_source_left_out():
    errors = trust._errors()
    assert errors.keys() == {run.id for run in RUNS}
    for run in RUNS:
        assert ("seconds" in errors[run.id]) == ("seconds_left_out" in errors[run.id]) == bool(run.step_s), run.id
        assert ("memory" in errors[run.id]) == bool(run.memory), run.id


def test_a_run_planned_again_is_what_was_written(capsys):
    name = "maxtext-a3-llama2-7b-8"
    assert main(["published", "--runs", name, "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)
    same_compiler = trust._written()["jax"] == jax.__version__
    assert found["ratio"] == pytest.approx(trust._errors()[name]["seconds"], rel=0.005 if same_compiler else 0.1)
    assert found["step_s"] == pytest.approx(1.4536, abs=1e-4) and found["command"].startswith("jfsdp plan --gpu h100")


def test_runs_of_a_chip_speak_for_its_gpus():
    h100, h200, a100 = (trust_in(find_gpu(name)) for name in ("h100", "h200", "a100-40"))
    assert h100 == h200 and h100.chip == "H100" and a100.chip == "A100"
    for found, mark in ((h100, "h100"), (a100, "a100")):
        timed = [run for run in RUNS if run.step_s and run.basis and mark in run.gpu]
        near = [run for run in timed if abs(left_out(run) - 1) <= found.percent / 100]
        assert len(near) >= 0.8 * len(timed)
        percent, within, of = map(int, re.findall(r"within (\d+)% of (\d+) of (\d+)", found.seconds)[0])
        assert (percent, within, of) == (found.percent, len(near), len(timed))
        assert found.xla and found.torch
        assert (found.xla.runs, found.xla.within) == tuple(
            sum(run.software == XLA for run in own) for own in (timed, near)
        )
        assert found.torch.runs == len(timed) - found.xla.runs
    assert h100.reserved and a100.reserved
    assert h100.reserved[2] == 10 and a100.reserved[2] == 2 and "1.17 to" in h100.memory
    for gpu in GPUS:
        if gpu.capability not in ((8, 0), (9, 0)) or "PCIe" in gpu.link:
            assert not trust_in(gpu).chip and "no published run" in trust_in(gpu).seconds


def test_runs_whose_time_depends_on_what_nobody_said_are_no_basis():
    assert {run.id.partition("-")[0] for run in RUNS if not run.basis} == {"fms", "atorch"}


def matmul(rows, depth=4096, columns=4096):
    one = Matmul(1, rows, columns, depth, "bf16")
    size = 2 * (rows * depth + depth * columns + rows * columns)
    return Work(Kind.MATMUL, one.num_flops, size, (one,), dtype="bf16")


def test_load_and_slow_gpus_take_their_part_of_what_the_cores_do_and_no_more():
    h100, a100 = find_gpu("h100"), find_gpu("a100")
    one, node, many = (Rates(Cluster(h100, nodes, size)) for nodes, size in ((1, 1), (1, 8), (64, 8)))
    large, small = matmul(4096), matmul(8, columns=32768)
    quiet_s = large.num_flops / matmul_rate(h100, "bfloat16", 4096, 4096, 4096)
    assert one.work_s(large) == pytest.approx(quiet_s / h100.sustained + 3e-6)
    assert one.work_s(large) < node.work_s(large) < many.work_s(large) < 1.2 * one.work_s(large)
    assert one.work_s(small) == many.work_s(small)  # as fast as memory, which has no such limit
    copy = Work(Kind.MEMORY, num_bytes=1e9)
    assert one.work_s(copy) == many.work_s(copy)
    assert Rates(Cluster(a100, 1, 1)).work_s(large) > one.work_s(large)


def test_eager_kernels_move_their_bytes_more_often():
    run = next(run for run in RUNS if run.software == EAGER)
    fused = dataclasses.replace(run, software="torch-compiled")
    copy = Work(Kind.MEMORY, num_bytes=1e9)
    assert run.rates().work_s(copy) > 1.3 * fused.rates().work_s(copy)
    assert run.rates().work_s(matmul(4096)) == fused.rates().work_s(matmul(4096))
    attention = Work(Kind.ATTENTION, num_flops=1e12, dtype="bf16")
    assert fused.rates().work_s(attention) > Rates(run.cluster).work_s(attention)  # FlashAttention-2 on Hopper


def test_a_name_that_no_run_has(capsys):
    assert main(["published", "--runs", "gpt5*"]) == 2
    assert "--runs gpt5*" in capsys.readouterr().err
    assert main(["published", "--runs", "fms*", "--list"]) == 0
    out = capsys.readouterr().out
    assert "foundation-model-stack/fms-fsdp" in out and "jfsdp plan --gpu h100" in out
