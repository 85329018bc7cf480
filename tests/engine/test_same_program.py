"""Processes with other hash seeds, and other histories of memory, build the same: else hosts wait, or mix arrays up."""

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.programs import ROWS

SOME = [
    "manual, chosen by functions: list",
    "flat, hybrid, kept: scan",
    "manual, lists: linen",
]


def build(seed, rows):
    """Build in a process of its own; return a digest by row and part."""
    environment = os.environ | {"PYTHONHASHSEED": str(seed), "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-m", "tests.programs", str(seed), *rows]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def check(seeds, rows):
    with ThreadPoolExecutor(2) as pool:
        first, *others = pool.map(lambda seed: build(seed, rows), seeds)
    assert sorted(first) == sorted(rows)
    different = {
        f"{row}: {part}"
        for other in others
        for row in rows
        for part in first[row].keys() | other[row].keys()
        if first[row].get(part) != other[row].get(part)
    }
    assert not different


def test_two_processes_build_the_same_programs():
    check(range(1, 3), SOME)


@pytest.mark.proof
def test_six_processes_build_the_same_of_every_setting():
    check(range(1, 7), ROWS)
