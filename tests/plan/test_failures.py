"""Goodput of runs that fail: the formula against simulated runs, the best interval, and what `jfsdp plan` prints."""

import itertools
import json
import math
import random
import types
from typing import Any

import pytest

from jfsdp.cli import main
from jfsdp.cli.report import describe_training
from jfsdp.plan.failures import Failures
from jfsdp.plan.plan import Training
from tests.cli.refused import refused
from tests.refusals import check_facts

# Seconds between failures, of a step, of a copy, of a write, of a restart; steps between checkpoints.
RUNS = {
    "usual": (Failures(3600, 2.0, 5.0, 60.0, 300.0), 100),
    "write longer than the interval": (Failures(3600, 2.0, 5.0, 400.0, 300.0), 100),
    "restart longer than a failure": (Failures(600, 1.0, 3.0, 20.0, 900.0), 50),
    "rarely saved": (Failures(1800, 3.0, 1.0, 30.0, 100.0), 900),
}


def simulate(run, every, cycles=300_000):
    """Play restarts, intervals, copies and writes one after another until each failure; return the share kept."""
    rng = random.Random(0)
    kept = total = 0.0
    for _ in range(cycles):
        failure = rng.expovariate(1 / run.mtbf_s)
        total += failure
        now, written = run.restart_s, 0.0
        for interval in itertools.count(1):
            now = max(now + every * run.step_s, written) + run.copy_s  # a save waits for the write before it
            written = now + run.write_s
            if written > failure:
                break
            kept += every * run.step_s
            assert interval < 10**6
    return kept / total


@pytest.mark.parametrize("name", RUNS)
def test_goodput_is_that_of_simulated_runs(name):
    run, every = RUNS[name]
    assert run.goodput(every) == pytest.approx(simulate(run, every), rel=0.01)


@pytest.mark.parametrize("mtbf_s", [100.0, 3600.0, 1e6])
@pytest.mark.parametrize("copy_s", [0.01, 5.0, 300.0])
def test_no_interval_is_better_than_the_best(mtbf_s, copy_s):
    run = Failures(mtbf_s, 0.1, copy_s, 1.0, 10.0)
    best = run.goodput(run.best_every)
    assert all(run.goodput(every) <= best * 1.01 for every in {int(1.2**n) for n in range(80)})
    if copy_s < mtbf_s / 100:
        assert run.best_every * run.step_s == pytest.approx(math.sqrt(2 * copy_s * mtbf_s), rel=0.1)


def test_the_best_interval_is_no_shorter_than_a_write():
    assert Failures(3600, 2.0, 0.001, 401.0, 0.0).best_every == 201


def test_llama_3_is_in_the_published_range():
    """16,384 H100s, 419 interruptions in 54 days, more than 90 % effective training time (arXiv 2407.21783)."""
    bytes_saved, nodes = 12 * 405e9, 2048
    run = Failures(54 * 86400 / 419, 6.0, bytes_saved / (16384 * 55e9), bytes_saved / (nodes * 1e9), 600.0)
    assert 0.9 < run.goodput(run.best_every) < 1


def test_plan_reports_failures_of_a_training(capsys):
    options = ["--model", "llama-tiny", "--seq-len", "128", "--nodes", "2", "--tokens", "1e9", "--checkpoint-gbs", "1"]
    failing = ["--mtbf-hours", "1", "--restart-s", "60", "--checkpoint-every", "1000000"]
    assert main(["plan", *options, *failing, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    failures, training = found["failures"], found["training"]
    assert failures["mtbf_s"] == 1800 and failures["write_s"] == training["checkpoint_s"]
    assert training["checkpoint_s"] == pytest.approx(training["checkpoint_bytes"] / 2e9)
    assert failures["restart_s"] == pytest.approx(60 + training["checkpoint_s"])
    assert 0 < failures["goodput"] < failures["best_goodput"] < 1
    plan: Any = types.SimpleNamespace(compiled=types.SimpleNamespace(compile_s=3.0))
    told = describe_training(plan, Training(**training), failures)
    check_facts(told["goodput"], f"--checkpoint-every {failures['best_every']}", f"{failures['best_goodput']:.2%}")
    check_facts(told["failures"], "30.0 min")


def test_plan_refuses_failures_without_tokens_and_the_old_name(capsys):
    assert "--tokens" in refused(capsys, "plan", "--model", "llama-tiny", "--mtbf-hours", "1")
    assert "use --checkpoint-gbs" in refused(capsys, "plan", "--model", "llama-tiny", "--checkpoint-bandwidth", "1")
