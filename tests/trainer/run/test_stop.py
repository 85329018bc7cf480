"""Which signals stop a run, and which do not."""

import os
import pty
import signal
import subprocess
import sys

import pytest

from jfsdp.trainer.run.stop import SIGNALS, StopSignal


@pytest.mark.parametrize("number", SIGNALS)
def test_a_signal_is_remembered_and_the_old_handler_comes_back(number, monkeypatch):
    monkeypatch.setattr("jfsdp.trainer.run.stop.leave_terminal", lambda: None)
    before = signal.signal(number, signal.default_int_handler)  # under nohup SIGHUP is ignored
    try:
        with StopSignal() as stop:
            assert not stop.is_agreed(may_gather=True)
            signal.raise_signal(number)
            assert stop.is_agreed(may_gather=True) and stop.name == number.name
        assert signal.getsignal(number) is signal.default_int_handler
    finally:
        signal.signal(number, before)


def test_a_hangup_that_nohup_ignores_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with StopSignal() as stop:
            signal.raise_signal(signal.SIGHUP)
            assert stop.name is None
    finally:
        signal.signal(signal.SIGHUP, before)


CHILD = """
import fcntl, os, signal, sys, termios, time
os.setsid()
signal.signal(signal.SIGHUP, signal.SIG_DFL)  # it is ignored where the tests run under nohup
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from jfsdp.trainer.run.stop import StopSignal
with StopSignal() as stop:
    print("ready", flush=True)
    while stop.name is None:
        time.sleep(0.01)
    print("after the terminal is gone", flush=True)
    sys.exit(7 if stop.name == "SIGHUP" else 8)
"""


def test_a_run_whose_terminal_is_gone_goes_on_to_its_end():
    terminal, inner = pty.openpty()
    process = subprocess.Popen([sys.executable, "-c", CHILD], stdin=inner, stdout=inner, stderr=inner)
    os.close(inner)
    said = b""
    while b"ready" not in said:
        said += os.read(terminal, 1 << 16)
    os.close(terminal)  # hangs up
    try:
        assert process.wait(timeout=60) == 7
    finally:
        process.kill()
