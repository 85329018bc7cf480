"""Killed with SIGKILL at random moments and started again with `--resume`: nothing is lost beyond the last save."""

import random
import re
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from jfsdp.checkpoint.disk.digest import find_damage, list_files, read_digests
from jfsdp.checkpoint.disk.files import content_path
from jfsdp.objects.path import ObjectPath
from jfsdp.trainer.run.directory import checkpoint_steps
from tests.objects.faulty import s3_server
from tests.scripts.command import ONE_LAYER, command, environment, read_losses, train, write_corpus

EVERY = 2  # steps between checkpoints


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    root = tmp_path_factory.mktemp("killed")
    write_corpus(root / "corpus")
    model = ["--model", "llama-tiny", "--model-config", *ONE_LAYER, "--seq-len", 32, "--batch-per-device", 2]
    data = ["--data", root / "corpus", "--eval-fraction", 0, "--sample-tokens", 0]
    when = ["--log-every", 1, "--checkpoint-every", EVERY, "--keep", 2, "--decay-steps", 1000, "--warmup", 10]
    where = ["--simulate-devices", 2, "--cache-dir", root / "cache"]
    return [*model, *data, *when, *where, "--remat", "none", "--no-check-loss"]


def logged(run_dir: Any) -> int:
    """How many lines of metrics there are: one for each step."""
    file = run_dir / "metrics.jsonl"
    return file.read_bytes().count(b"\n") if file.is_file() else 0


class Life:
    """One process of the run, from its start to its kill."""

    def __init__(self, options, run_dir: Any, log: Path, rng: random.Random):
        self.run_dir, self.rng, self.newest, self.log = run_dir, rng, 0, log
        arguments = command(*options, "--run-dir", run_dir, "--resume", "--steps", 100_000)
        with self.log.open("w") as file:
            self.process = subprocess.Popen(arguments, stdout=file, stderr=file, env=environment())

    def end(self, while_starting: bool, within_s: float) -> None:
        """Kill it at a random moment: while it starts, or in its first seconds of steps and saves."""
        if while_starting:
            self._watch(time.monotonic() + self.rng.uniform(0, 8))
        else:
            while "first step:" not in self.log.read_text() or not checkpoint_steps(self.run_dir):
                self._watch(time.monotonic() + 0.01)
            self._watch(time.monotonic() + self.rng.uniform(0, within_s))
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()

    def _watch(self, until: float) -> None:
        """See which checkpoints are complete, until a moment."""
        while True:
            self.newest = max(self.newest, *checkpoint_steps(self.run_dir), 0)
            assert self.process.poll() is None, self.log.read_text()
            if time.monotonic() >= until:
                return
            time.sleep(min(0.002, max(0, until - time.monotonic())))

    @property
    def resumed_after(self) -> int | None:
        match = re.search(r"resumed after step (\d+)", self.log.read_text())
        return int(match[1]) if match else None


def check_whole(run_dir: Any) -> int:
    """Every checkpoint that is listed is complete; return the newest step, 0 if there is none."""
    for step in checkpoint_steps(run_dir):
        path = content_path(run_dir / "checkpoints" / str(step))
        digests = read_digests(path)
        assert set(digests) == set(list_files(path)) and find_damage(path, digests, digests) == []
    return max(checkpoint_steps(run_dir), default=0)


def run_and_kill(
    options, train, root: Path, num_kills: int, seed: int, within_s: float, run_dir: Any = None
) -> list[int]:
    """Kill a run so often, and let it end; return after which steps it was resumed."""
    rng, run_dir, resumed = random.Random(seed), run_dir or root / "run", []
    for number in range(num_kills):
        saved = check_whole(run_dir)
        life = Life(options, run_dir, root / "run.log", rng)
        life.end(number % 5 == 3, within_s)
        newest = check_whole(run_dir)
        assert newest >= life.newest >= saved, "a step that was complete is there"
        # The save of a step waits for the one before it, and a step is logged before it is saved.
        assert newest >= logged(run_dir) - 2 * EVERY
        if life.resumed_after is not None:
            assert life.resumed_after == saved, "from the newest complete checkpoint"
            resumed.append(saved)
    total = check_whole(run_dir) + 2 * EVERY
    for where, more in ((run_dir, ["--resume"]), (root / "unbroken", [])):
        done = train(*options, *more, "--run-dir", where, "--steps", total)
        assert done.returncode == 0, done.stderr
    found, wanted = read_losses(run_dir), read_losses(root / "unbroken")
    assert found == wanted and [line[0] for line in wanted] == list(range(1, total + 1))
    left = [path.name for path in (run_dir / "checkpoints").iterdir() if path.name != "lease"]
    assert sorted(left) == sorted(map(str, checkpoint_steps(run_dir))), "what the kills left is cleaned up"
    return resumed


@pytest.mark.proof  # test_train.py stops one by SIGTERM with the tests, and checkpoint/test_manager.py kills saves
def test_a_run_that_is_killed_is_the_unbroken_run(options, serve, tmp_path):
    run_and_kill(options, serve, tmp_path, num_kills=1, seed=0, within_s=0.2)  # the unbroken run takes as many steps


@pytest.mark.proof
def test_a_run_that_is_killed_fifty_times_is_the_unbroken_run(options, serve, tmp_path):
    resumed = run_and_kill(options, serve, tmp_path, num_kills=50, seed=1, within_s=1.5)
    assert len(set(resumed)) > 30, "it got on between the kills"


@pytest.mark.proof
@pytest.mark.parametrize("num_kills", [1, 10])
def test_a_run_in_a_store_that_is_killed_is_the_unbroken_run(num_kills, options, tmp_path, monkeypatch):
    with s3_server(monkeypatch) as bucket:
        run_dir = ObjectPath(f"{bucket}/runs/killed")
        run_and_kill(options, train, tmp_path, num_kills, seed=2, within_s=1.5, run_dir=run_dir)
        names = {name.partition("/")[0] for name in run_dir.walk()}
        assert {"config.json", "metrics.jsonl", "summary.json", "loss.png", "tensorboard", "checkpoints"} <= names
        assert "secret" not in (run_dir / "config.json").read_text()
