"""`scripts/bench.py` times what it says, and refuses what it cannot time."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[2] / "scripts" / "bench.py"


def run(*args):
    command = [sys.executable, "-W", "ignore", str(BENCH), "--model", "llama-tiny", "--seq-len", "16", *args]
    return subprocess.run(command, capture_output=True, text=True, env=os.environ | {"XLA_FLAGS": ""})


@pytest.mark.proof
def test_every_setting_has_a_row():
    done = run("--rounds", "2", "--param-dtype", "float32")
    assert done.returncode == 0, done.stderr
    rows = {line.split()[0]: line.split() for line in done.stdout.splitlines() if line}
    assert [float(rows[name][2]) > 0 for name in ("plain", "xla", "manual", "flat")] == [True] * 4
    assert rows["plain"][2] == "1.0000"


@pytest.mark.parametrize(
    ("args", "message"), [(["--settings", "fast"], "--settings fast: use plain, xla, manual, flat")]
)
def test_what_cannot_be_timed_is_named(args, message):
    done = run(*args)
    assert done.returncode == 2
    assert message in done.stderr
