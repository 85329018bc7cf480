"""Runs that others published: what is in them, and what a plan of them says."""

import dataclasses
import shlex

import pytest

from jfsdp.cli.commands import parse
from jfsdp.layout.layout import num_parameters
from jfsdp.layout.mesh import num_data_shards
from jfsdp.plan.cluster.gpus import find_gpu
from jfsdp.plan.cluster.hardware import Cluster, matmul_rate
from jfsdp.plan.jobs import plan_job, shard_planned
from jfsdp.plan.time.rates import Rates
from jfsdp.plan.time.work import Kind, Matmul, Work
from scripts.published import EAGER, predict, program_of, published_runs

RUNS = published_runs()


def test_runs_say_who_measured_what():
    assert len({run.id for run in RUNS}) == len(RUNS) > 80
    for run in RUNS:
        assert run.source["repository"] and run.source["path"] and run.source["date"], run.id
        assert run.step_s or run.memory, run.id
        assert num_data_shards(dict(run.step_options.mesh)) == run.cluster.num_devices, run.id


@pytest.mark.parametrize("run", RUNS[::10], ids=lambda run: run.id)
def test_the_command_of_a_run_is_what_is_planned(run):
    words = shlex.split(run.command)[1:]
    given = parse(words)
    assert given.gpu == run.gpu and given.nodes == run.nodes and given.network == (run.network or 0.0)
    for field in dataclasses.fields(run.step_options):
        assert getattr(given, field.name) == getattr(run.step_options, field.name), field.name


@pytest.mark.parametrize(
    ("name", "published"),  # as the models' own papers and cards count them
    [
        ("jaxtoolbox-maxtext-llama2-7b-8", 6_738_415_616),
        ("torchtitan-8b-8-chunked-ce", 8_030_261_248),
        ("tinyllama-1.1b-a100-16", 1_100_048_384),
    ],
)
def test_models_have_the_published_number_of_parameters(name, published):
    (run,) = (run for run in RUNS if run.id == name)
    planned = shard_planned(run.step_options, num_devices=run.cluster.num_devices)
    assert num_parameters(planned.model.layout.leaves) == published


@pytest.mark.proof
def test_a_run_planned_again_takes_as_long():
    (run,) = (run for run in RUNS if run.id == "maxtext-a3-llama2-7b-8")
    plan = plan_job(run.step_options, run.cluster)
    assert predict(run, *program_of(run, plan.compiled.text)) == pytest.approx(1.072 * 1.4536, rel=0.02)
    assert run.step_s == pytest.approx(1.4536, abs=1e-4)


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
