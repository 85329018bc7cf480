"""The training script as one process and as several of `jfsdp launch`: the same rows, the same losses."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from tests.scripts.command import environment, read_metrics, write_corpus

ROOT = Path(__file__).parents[2]
SMALL = ("--model", "llama-tiny", "--model-config", "dim=32", "num_layers=1", "ffn_dim=64", "--seq-len", "32")
QUIET = ("--sample-tokens", "0", "--eval-batches", "1", "--log-every", "1", "--global-batch", "12")
STRATEGIES = {
    "full_shard": ("--mesh", "fsdp=-1"),
    "zero1": ("--mesh", "fsdp=-1", "--strategy", "zero1"),
    "replicas": ("--mesh", "replica=2,fsdp=-1"),
    "node": ("--mesh", "fsdp=-1", "--reshard-after-forward", "node"),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    directory = tmp_path_factory.mktemp("data") / "corpus"
    write_corpus(directory)
    return str(directory)


@pytest.fixture
def start(tmp_path, corpus):
    """Start the script as `nproc` processes of so many devices each; its run directory is `name`."""

    def start(name, nproc, devices, *options, launch=(), script="scripts/train.py"):
        command = [sys.executable, "-m", "jfsdp", "launch", "--nproc", str(nproc), "--devices-per-proc", str(devices)]
        command += ["--log-dir", str(tmp_path / f"{name}-logs"), *launch, script, *SMALL, *QUIET]
        command += ["--run-dir", str(tmp_path / name), "--data", corpus, *options]
        return subprocess.Popen(
            command, cwd=ROOT, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    return start


def finish(process, timeout_s=300):
    out, _ = process.communicate(timeout=timeout_s)
    return process.returncode, out


def losses(run_dir):
    return [json.loads(line)["loss"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.proof  # checkpoint/test_elastic.py goes on with another number of processes with the tests
def test_a_run_goes_on_with_another_number_of_processes(start, serve, corpus, tmp_path):
    """Two processes of one device each, and then one of two devices."""
    schedule = ("--decay-steps", "6", "--mesh", "fsdp=-1")
    status, out = finish(start("parts", 2, 1, *schedule, "--steps", "3"))
    assert status == 0, out
    for name, more in (("parts", ["--resume"]), ("whole", [])):
        done = serve(*SMALL, *QUIET, *schedule, "--steps", 6, "--data", corpus, "--run-dir", tmp_path / name, *more)
        assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "parts")] == [*range(1, 7)]
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=2e-6)


@pytest.mark.proof
@pytest.mark.parametrize("program", ["xla", "manual"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_losses_do_not_depend_on_the_number_of_processes(start, tmp_path, strategy, program):
    options = (*STRATEGIES[strategy], "--program", program, "--steps", "20")
    for nproc, devices in ((1, 4), (2, 2), (4, 1)):
        status, out = finish(start(str(nproc), nproc, devices, *options))
        assert status == 0, out
        np.testing.assert_allclose(losses(tmp_path / str(nproc)), losses(tmp_path / "1"), rtol=2e-6)


def ranks(run_dir):
    """Return the process id of each rank of a run that is there, and its attempt."""
    found = {}
    for process in Path("/proc").iterdir():
        if not process.name.isdecimal():
            continue
        try:
            line = (process / "cmdline").read_text()
            told = dict(one.split("=", 1) for one in (process / "environ").read_text().split("\0") if "=" in one)
        except OSError:
            continue
        if str(run_dir) in line and "RANK" in told:
            found[int(told["RANK"])] = int(process.name), int(told["JFSDP_RESTART"])
    return found


def run_and_hurt(start, tmp_path, nproc, devices, options, rank, number=signal.SIGKILL, after=5):
    """Run as "whole", and as "hurt", of which one process is hurt after so many steps; return what that one said."""
    options = (*options, "--resume", "auto", "--timeout", "15")
    assert finish(start("whole", nproc, devices, *options))[0] == 0
    process = start("hurt", nproc, devices, *options, launch=("--max-restarts", "2", "--grace", "10"))
    metrics = tmp_path / "hurt" / "metrics.jsonl"
    until = time.monotonic() + 200
    while time.monotonic() < until and (not metrics.exists() or len(losses(metrics.parent)) < after):
        time.sleep(0.05)
    os.kill(ranks(metrics.parent)[rank][0], number)
    begin = time.monotonic()
    while any(attempt == 0 for _, attempt in ranks(metrics.parent).values()):
        assert time.monotonic() - begin < 60, "all of the attempt end within --timeout, --grace and some seconds"
        time.sleep(0.1)
    status, out = finish(process)
    assert status == 0, out
    return out


@pytest.mark.proof
@pytest.mark.parametrize("snapshots", [(), ("--snapshot-every", "2")], ids=["disk", "snapshot"])
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_run_survives_what_happens_to_one_of_its_processes(start, tmp_path, number, rank, snapshots):
    options = ("--steps", "60", "--checkpoint-every", "5", *snapshots)
    out = run_and_hurt(start, tmp_path, 2, 1, options, rank, number, after=12)
    assert losses(tmp_path / "hurt") == losses(tmp_path / "whole")
    assert ("restored from the snapshot of step" in out) == bool(snapshots)
    told = json.loads((tmp_path / "hurt" / "goodput.json").read_text())
    assert told["in_order"] and told["seconds"]["down"] > 0 and 0 < told["goodput"] < 1


STACKED = ("--model-config", "dim=32", "num_layers=4", "ffn_dim=64", "stacked=True", "--checkpoint-every", "2")


@pytest.mark.proof
def test_a_run_goes_on_from_stages_to_none_and_back(start, tmp_path):
    options = (*STACKED, "--decay-steps", "6", "--resume", "auto", "--param-dtype", "none", "--global-batch", "16")
    for steps, mesh in ((2, "pipe=2,fsdp=2"), (4, "fsdp=4"), (6, "pipe=4")):
        status, out = finish(start("parts", 1, 4, *options, "--steps", str(steps), "--mesh", mesh))
        assert status == 0, out
    status, out = finish(start("whole", 1, 4, *options, "--steps", "6", "--mesh", "fsdp=4"))
    assert status == 0, out
    np.testing.assert_allclose(losses(tmp_path / "parts"), losses(tmp_path / "whole"), rtol=1e-5)


@pytest.mark.proof
@pytest.mark.parametrize(("nproc", "devices"), [(2, 1), (2, 2), (4, 1)])
def test_stages_of_several_processes_are_those_of_one_and_all_end_with_one(start, tmp_path, nproc, devices):
    """Neighbours along `pipe` read the same rows; a stage that is killed ends all, and the run goes on."""
    # Four processes sum in another order than one, and bfloat16 makes more of it.
    options = (*STACKED, "--mesh", f"pipe={nproc},fsdp=-1", "--steps", "24", "--param-dtype", "none")
    run_and_hurt(start, tmp_path, nproc, devices, options, nproc - 1)
    assert finish(start("one", 1, nproc * devices, *options))[0] == 0
    np.testing.assert_allclose(losses(tmp_path / "hurt"), losses(tmp_path / "one"), rtol=1e-5)


FLAKY = """
import os, runpy, signal, sys, threading, time
run_dir = sys.argv[sys.argv.index("--run-dir") + 1]

def die():
    while not os.path.exists(f"{run_dir}/metrics.jsonl") or open(f"{run_dir}/metrics.jsonl").read().count("step_s") < 8:
        time.sleep(0.05)
    os.kill(os.getpid(), signal.SIGKILL)

if os.environ["LOCAL_RANK"] == "1":
    if os.environ["JFSDP_RESTART"] != "0":
        sys.exit(9)
    threading.Thread(target=die, daemon=True).start()
runpy.run_path("scripts/train.py", run_name="__main__")
"""


@pytest.mark.proof
def test_a_run_goes_on_without_a_process_that_does_not_come_back(start, tmp_path):
    script = tmp_path / "flaky.py"
    script.write_text(FLAKY)
    options = ("--steps", "20", "--checkpoint-every", "5", "--resume", "auto")
    enough = ("--max-restarts", "3", "--min-nproc", "2")
    status, out = finish(start("fewer", 3, 1, *options, launch=enough, script=str(script)))
    assert status == 0 and "continuing with 2 of 3 processes: [0, 2]" in out, out
    assert finish(start("whole", 3, 1, *options))[0] == 0
    np.testing.assert_allclose(losses(tmp_path / "fewer"), losses(tmp_path / "whole"), rtol=1e-3)


STOPPING = """
import contextlib, os, runpy, signal
from jfsdp.launch.watch import Watch

before = Watch.at

@contextlib.contextmanager
def at(self, place, *rest):
    with before(self, place, *rest):
        if os.environ["RANK"] == os.environ["STOP_RANK"] and place == os.environ["STOP_AT"]:
            open(os.environ["STOP_FILE"], "w").close()
            os.kill(os.getpid(), signal.SIGSTOP)
        yield

Watch.at = at
runpy.run_path("scripts/train.py", run_name="__main__")
"""
PLACES = ["the start", "the data of step 6", "step 6", "saving step 5", "the snapshot of step 6"]
PLACES += ["logging step 6"]


@pytest.mark.proof
@pytest.mark.parametrize("rank", ["0", "1"])
@pytest.mark.parametrize("place", PLACES)
def test_wherever_a_process_stops_all_end_and_say_where_they_were(start, tmp_path, place, rank, monkeypatch):
    script, stopped = tmp_path / "stopping.py", tmp_path / "mark"
    script.write_text(STOPPING)
    for name, value in (("STOP_AT", place), ("STOP_RANK", rank), ("STOP_FILE", str(stopped))):
        monkeypatch.setenv(name, value)
    options = ("--steps", "9", "--checkpoint-every", "5", "--snapshot-every", "3", "--timeout", "10")
    process = start("stopped", 2, 1, *options, launch=("--grace", "5"), script=str(script))
    while not stopped.exists() and process.poll() is None:
        time.sleep(0.02)
    begin = time.monotonic()
    status, out = finish(process)
    told = [line for line in out.splitlines() if "no progress" in line or "were killed" in line]
    assert status == 75 and any("no progress: " in line for line in told), out
    assert any(f"were killed: [{rank}]" in line for line in told), out
    assert time.monotonic() - begin < 60, "three times --timeout, --grace, and some seconds"
