"""A process that runs the training script for many tests, whose start is most of their time."""

import json
import select
import subprocess
import sys

import pytest

from tests.scripts.command import ROOT, environment


@pytest.fixture(scope="session")
def serve():
    """Run a command line of the training script, on two devices, in a process that has run others before."""
    command = [sys.executable, "-m", "tests.scripts.server"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen(command, **pipes, env=environment(), cwd=ROOT) as process:
        given, told = process.stdin, process.stdout
        assert given is not None and told is not None

        def run(*options, cwd=None, **environment):
            given.write(json.dumps([cwd and str(cwd), [str(option) for option in options], environment]) + "\n")
            given.flush()
            assert select.select([told], [], [], 300)[0], f"no answer in 300 s: {options}"
            return subprocess.CompletedProcess(options, *json.loads(told.readline()))

        yield run
        given.close()
