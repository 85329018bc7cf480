"""Processes that are started, ended together and started again. They import no JAX."""

import os
import signal
import subprocess
import sys
import threading
import time
from typing import Any

import pytest

from jfsdp.launch.environment import find_place
from jfsdp.launch.supervisor import Hosts, Supervisor
from tests.refusals import check_facts

SAYS = "import os, sys, time; rank, attempt = int(os.environ['RANK']), int(os.environ['JFSDP_RESTART'])\n"


@pytest.fixture
def supervise(tmp_path):
    def run(code, nproc=3, hosts=None, **options: Any):
        options.setdefault("grace_s", 5.0)
        command = [sys.executable, "-u", "-c", SAYS + code]
        hosts = hosts or Hosts(1, 0, "localhost:5000")
        supervisor = Supervisor(command, nproc, hosts, tmp_path / "logs", **options)
        return supervisor, supervisor.run()

    return run


def log(supervisor, rank, attempt=0):
    return (supervisor.log_dir / str(attempt) / f"{rank}.log").read_text()


def test_each_process_knows_its_place_and_has_a_log(supervise, capfd):
    hosts = Hosts(2, 1, "node0:5000", num_siblings=2, sibling=1)
    names = "RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE MASTER_ADDR MASTER_PORT"
    supervisor, status = supervise(f"print(*(os.environ[name] for name in '{names}'.split()))", 2, hosts)
    assert status == 0
    assert [log(supervisor, rank).strip() for rank in (2, 3)] == ["2 4 2 4 node0 5000", "3 4 3 4 node0 5000"]
    told = dict(zip(map(str, names.split()), log(supervisor, 3).split(), strict=True))
    place = find_place(told)
    assert place is not None and (place.process_id, place.local_id) == (3, 3)
    assert "2 4 2 4 node0 5000" in capfd.readouterr().out, "the first of a host prints to the terminal too"


@pytest.mark.parametrize(
    ("nproc", "own", "told"), [(2, {}, "1"), (2, {"NCCL_LAUNCH_ORDER_IMPLICIT": "0"}, "0"), (1, {}, None)]
)
def test_processes_that_share_a_host_start_kernels_of_nccl_in_one_order(supervise, nproc, own, told):
    own = {name: text for name, text in os.environ.items() if not name.startswith("NCCL")} | own
    supervisor, _ = supervise("print(os.environ.get('NCCL_LAUNCH_ORDER_IMPLICIT'))", nproc, environment=own)
    assert log(supervisor, nproc - 1).strip() == str(told)


def test_processes_meet_where_their_launcher_says_and_not_where_its_own_environment_does(supervise):
    own = {"JAX_COORDINATOR_ADDRESS": "elsewhere:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}
    code = "from jfsdp.launch.environment import find_place; print(find_place(os.environ).address)"
    supervisor, status = supervise(code, 2, environment=dict(os.environ) | own)
    assert status == 0 and log(supervisor, 1).strip() == "localhost:5000"


def test_the_first_to_fail_is_named_last_with_what_it_said(supervise, capfd):
    code = "time.sleep(0.5) if rank == 1 else time.sleep(60)\nprint('disk', 'full') if rank == 1 else 0\nsys.exit(rank)"
    begin = time.monotonic()
    _, status = supervise(code, grace_s=0.5)
    assert status == 1 and time.monotonic() - begin < 30
    said = capfd.readouterr().err
    check_facts(said, "process 1", "status 1", "{0: 137, 2: 137}")
    assert "were killed: [0, 2]" in said and said.index("    disk full") > said.index("the last lines of process 1")


def test_those_that_others_ended_are_not_to_blame_nor_one_that_hangs(supervise, capfd):
    _, status = supervise("time.sleep(0.2 * rank); sys.exit({0: 76, 1: 76, 2: 4}[rank])")
    assert status == 4 and "process 2 failed first, with status 4" in capfd.readouterr().err
    code = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\ntime.sleep(60 * (rank == 1)); sys.exit(76)"
    _, status = supervise(code, 2, grace_s=0.5)
    said = capfd.readouterr().err
    assert status == 76 and "process 0 failed first, with status 76" in said and "were killed: [1]" in said


def test_all_are_started_again_until_they_end_well(supervise, capfd):
    code = "print(attempt, os.environ['MASTER_PORT'])\nsys.exit(1 if attempt < 2 and rank == 2 else 0)"
    supervisor, status = supervise(code, max_restarts=5)
    assert status == 0 and [log(supervisor, 1, attempt) for attempt in range(3)] == ["0 5000\n", "1 5000\n", "2 5000\n"]
    assert "starting again, 4 restarts left" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("code", "options", "status", "attempts", "said"),
    [
        ("sys.exit(3)", {"nproc": 1, "max_restarts": 2}, 3, 3, "no restart is left"),
        ("sys.exit(2)", {"max_restarts": 5}, 2, 1, "status 2"),  # what cannot begin
        ("sys.exit(9 * (rank == 1))", {"max_restarts": 2, "min_nproc": 3}, 9, 3, "status 9"),  # all are needed
    ],
)
def test_no_more_restarts_than_asked_for_and_none_where_none_helps(
    supervise, capfd, code, options, status, attempts, said
):
    supervisor, found = supervise(code, **options)
    assert found == status and len(os.listdir(supervisor.log_dir)) == attempts and said in capfd.readouterr().err
    assert len(os.listdir(supervisor.log_dir / str(attempts - 1))) == options.get("nproc", 3)


def test_a_stopped_process_is_killed_and_named(supervise, capfd):
    code = "import signal\nif rank == 0: os.kill(os.getpid(), signal.SIGSTOP)\ntime.sleep(0.5); sys.exit(75)"
    _, status = supervise(code, grace_s=0.5)
    assert status == 75 and "killed: [0]" in capfd.readouterr().err


def test_one_that_fails_first_twice_in_a_row_is_left_out_where_fewer_are_enough(supervise, capfd):
    told = "print(os.environ['JFSDP_ABSENT'], os.environ['LOCAL_RANK'])\n"
    supervisor, status = supervise(
        f"{told}sys.exit(9 if rank == 1 else 76 * (attempt < 2))", max_restarts=5, min_nproc=2
    )
    assert status == 0 and sorted(os.listdir(supervisor.log_dir)) == ["0", "1", "2"]
    assert sorted(os.listdir(supervisor.log_dir / "2")) == ["0.log", "2.log"]
    assert log(supervisor, 2, 1) == " 2\n" and log(supervisor, 2, 2) == "1 2\n", "it keeps its GPUs"
    check_facts(capfd.readouterr().err, "twice", "[1]")


def test_one_that_hangs_twice_in_a_row_is_left_out_and_not_those_that_fail_by_turns(supervise):
    hangs = "time.sleep(60 if rank == 0 else 0.2); sys.exit(75)"
    supervisor, status = supervise(hangs, max_restarts=2, min_nproc=2, grace_s=0.5)
    assert status == 75 and sorted(os.listdir(supervisor.log_dir / "2")) == ["1.log", "2.log"]
    supervisor, _ = supervise("time.sleep(60) if rank else os.abort()", max_restarts=2, min_nproc=1, grace_s=0.5)
    assert len(os.listdir(supervisor.log_dir / "2")) == 3, "those that wait for one that aborts are not the cause"
    supervisor, _ = supervise("sys.exit(9 if rank == attempt else 76)", max_restarts=4, min_nproc=1)
    assert len(os.listdir(supervisor.log_dir / "2")) == 3


def test_a_launcher_whose_output_nobody_reads_goes_on(tmp_path):
    script = tmp_path / "script.py"
    text = SAYS + "for i in range(10): print('line', i, flush=True); time.sleep(0.1)\nopen(f'{rank}.done', 'w')"
    script.write_text(text)
    command = f"{sys.executable} -m jfsdp launch --nproc 2 --log-dir logs script.py 2>&1 | head -1"
    subprocess.run(command, shell=True, cwd=tmp_path, timeout=60, check=True, stdout=subprocess.DEVNULL)
    until = time.monotonic() + 30
    while time.monotonic() < until and len(list(tmp_path.glob("*.done"))) < 2:
        time.sleep(0.1)
    assert len(list(tmp_path.glob("*.done"))) == 2


def test_a_signal_reaches_all_processes_and_nothing_is_started_again(supervise, tmp_path):
    code = (
        f"import signal\nsignal.signal({int(signal.SIGUSR1)}, lambda *_: sys.exit(9))\nprint('ready')\ntime.sleep(60)"
    )

    def signal_when_ready():
        until = time.monotonic() + 30
        while time.monotonic() < until and sum("ready" in x.read_text() for x in tmp_path.glob("logs/0/*.log")) < 3:
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGUSR1)

    threading.Thread(target=signal_when_ready).start()
    supervisor, status = supervise(code, max_restarts=5)
    assert status == 9 and os.listdir(supervisor.log_dir) == ["0"]


def test_a_log_that_was_moved_away_does_not_keep_the_launcher_from_starting_again(supervise, tmp_path, capfd):
    code = f"os.remove({str(tmp_path / 'logs' / '0' / '0.log')!r}) if attempt == 0 else 0\nsys.exit(3 * (attempt == 0))"
    _, status = supervise(code, 1, max_restarts=1)
    assert status == 0 and "its log cannot be read" in capfd.readouterr().err


def test_a_hangup_that_nohup_ignores_ends_nothing(supervise):
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        threading.Timer(0.5, os.kill, [os.getpid(), signal.SIGHUP]).start()
        _, status = supervise("import signal\ntime.sleep(1); sys.exit(signal.getsignal(signal.SIGHUP) == 0)")
    finally:
        signal.signal(signal.SIGHUP, before)
    assert status == 0  # and the processes ignore it too


def test_a_signal_while_processes_are_started_reaches_them_all(supervise, monkeypatch):
    start = Supervisor.start_process

    def slow(self, local, attempt):
        if local == 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return start(self, local, attempt)

    monkeypatch.setattr(Supervisor, "start_process", slow)
    begin = time.monotonic()
    _, status = supervise("time.sleep(60)", max_restarts=3)
    assert status == 128 + signal.SIGTERM and time.monotonic() - begin < 30


def test_the_processes_end_with_their_launcher(tmp_path):
    code = (
        "from pathlib import Path; import signal, sys; from jfsdp.launch.supervisor import *\n"
        "signal.signal(signal.SIGHUP, signal.SIG_DFL)\n"  # it is ignored where the tests run under nohup
        "command = [sys.executable, '-c', 'import os, time; print(os.getpid(), flush=True); time.sleep(60)']\n"
        f"sys.exit(Supervisor(command, 2, Hosts(1, 0, 'localhost:1'), Path({str(tmp_path)!r})).run())"
    )
    launcher = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    logs = [tmp_path / "0" / f"{rank}.log" for rank in range(2)]
    until = time.monotonic() + 30
    while time.monotonic() < until and not all(log.exists() and log.read_text().strip() for log in logs):
        time.sleep(0.05)
    launcher.send_signal(signal.SIGHUP)
    assert launcher.wait(timeout=30) == 128 + signal.SIGHUP
    for log in logs:
        with pytest.raises(ProcessLookupError):
            os.kill(int(log.read_text()), 0)
