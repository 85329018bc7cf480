"""`jfsdp launch`: its command line, and where a host stands. What it starts is tested in tests/launch."""

import os
import re

import pytest

from jfsdp.cli.commands import main
from jfsdp.cli.launch import Launch, split_command
from jfsdp.launch.supervisor import Hosts
from tests.cli.refused import refused


@pytest.mark.parametrize(
    ("args", "own", "command"),
    [
        (["--nproc", "2", "a.py", "--nproc", "9"], ["--nproc", "2"], ["a.py", "--nproc", "9"]),
        (["--nproc=2", "a.py"], ["--nproc=2"], ["a.py"]),
        (["--log-dir", "x", "--", "python", "-m", "a"], ["--log-dir", "x"], ["python", "-m", "a"]),
        (["a.py", "--help"], [], ["a.py", "--help"]),
        (["--help"], ["--help"], []),
    ],
)
def test_options_before_the_script_are_the_launchers(args, own, command):
    assert split_command(args) == (own, command)


SLURM = {
    "SLURM_JOB_ID": "1",
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_NUM_TASKS": "4",
    "SLURM_STEP_TASKS_PER_NODE": "2(x2)",
    "SLURM_STEP_NODELIST": "n[1-2]",
}


@pytest.mark.parametrize(
    ("options", "environment", "expected"),
    [
        ({"nnodes": 2, "node_rank": 1, "rendezvous": "a:5"}, {}, Hosts(2, 1, "a:5")),
        ({"rendezvous": "a:5"}, SLURM, Hosts(1, 0, "a:5")),
        ({}, SLURM, Hosts(4, 3, "n1:61441", 2, 1)),
        ({}, SLURM | {"JAX_COORDINATOR_ADDRESS": "ib1:7"}, Hosts(4, 3, "ib1:7", 2, 1)),
        ({}, {"JAX_COORDINATOR_ADDRESS": "ib1:7"}, Hosts(1, 0, "ib1:7")),
        ({"rendezvous": "a:5"}, {"JAX_COORDINATOR_ADDRESS": "ib1:7"}, Hosts(1, 0, "a:5")),
    ],
)
def test_a_host_stands_where_options_or_slurm_say(options, environment, expected, monkeypatch):
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    assert Launch(**options)._hosts() == expected


@pytest.mark.parametrize(
    ("args", "words"),
    [
        ([], "no script is given"),
        (["--nproc", "0", "train.py"], "--nproc 0 must be"),
        (["--nprocs", "2", "train.py"], "--nprocs: there is no such option; there is --nproc"),
        (["nothere.py"], "script 'nothere.py' is not a file"),
        (["--nnodes", "2", "scripts/train.py"], "need --nnodes, --node-rank and --rendezvous"),
        (
            ["--nnodes", "2", "--node-rank", "2", "--rendezvous", "a:5", "scripts/train.py"],
            "--node-rank 2 must be below --nnodes 2",
        ),
        (["--rendezvous", "a", "scripts/train.py"], "--rendezvous 'a' must be HOST:PORT"),
    ],
)
def test_what_cannot_be_launched_is_refused(args, words, capsys):
    assert words in refused(capsys, "launch", *args)


def test_processes_are_told_their_devices_and_when_their_launcher_began(tmp_path, monkeypatch):
    names = ("JFSDP_DEVICES", "XLA_FLAGS", "JFSDP_LAUNCHED")
    (tmp_path / "tell.py").write_text(f"import os; print(*[os.environ[name] for name in {names}], sep='|')")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--nproc", "2", "--devices-per-proc", "3", "--log-dir", "logs", "tell.py"]) == 0
    told = [(tmp_path / "logs" / "0" / f"{rank}.log").read_text().strip().split("|") for rank in range(2)]
    assert told[0] == told[1] and told[0][0] == "3" and "device_count=3" in told[0][1]
    assert re.fullmatch(r"\d{8}-\d{6}", told[0][2])


def test_processes_run_and_their_status_is_returned(tmp_path, monkeypatch):
    (tmp_path / "fail.py").write_text("import os, sys; sys.exit(7 * (os.environ['RANK'] == '1'))")
    monkeypatch.chdir(tmp_path)
    assert main(["launch", "--nproc", "2", "--grace", "5", "fail.py"]) == 7
    assert len(os.listdir("logs")) == 1
