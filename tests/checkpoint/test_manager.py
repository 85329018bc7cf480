"""The checkpoints of a run: which steps are kept and listed, what comes back, and what an interruption leaves."""

import errno
import functools
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jfsdp
from tests.checkpoint.test_damage import TX, model, state_of
from tests.refusals import refuses
from tests.thin import thin


def step_of(state: jfsdp.TrainState) -> int:
    """Which step a state says it is; its weights must agree."""
    np.testing.assert_array_equal(state.params["weight"], state_of(int(state.step)).params["weight"])
    return int(state.step)


@pytest.fixture
def checkpoints(tmp_path) -> Any:
    made: list[jfsdp.checkpoint.Checkpointer] = []

    def make(keep: int | None = 3, directory: Any = tmp_path / "run") -> jfsdp.checkpoint.Checkpointer:
        made.append(jfsdp.checkpoint.Checkpointer(directory, keep=keep))
        return made[-1]

    yield make
    for one in made:
        one.close()


def save_steps(checkpointer: jfsdp.checkpoint.Checkpointer, *steps: int) -> None:
    for step in steps:
        checkpointer.save(step, state_of(step), extra={"position": step})
    checkpointer.wait()


def test_the_newest_steps_are_kept_listed_in_order_and_restored_with_their_extra(checkpoints):
    run = checkpoints(keep=2)
    assert (run.steps(), run.latest(), run.directory.is_dir()) == ([], None, True)
    save_steps(run, 5, 10)
    extra = {"iterator": [1, {"a": None}], "text": "ü", "large": 2**60, "half": 0.5}
    assert run.save(np.int64(20), state_of(20)) > 0, "how long it blocked"
    run.save(state_of(100).step, state_of(100), extra=extra)
    run.wait()
    assert (run.steps(), run.latest()) == ([20, 100], 100)
    state, found = run.restore(state_of(0))
    assert (step_of(state), found) == (100, extra)
    state, found = run.restore(model().abstract_state(TX), step=20)
    assert (step_of(state), found) == (20, None)
    run.close()
    again = checkpoints(keep=2)
    save_steps(again, 101)
    assert again.steps() == [100, 101], "what another one saved is counted"


def test_a_step_is_written_from_the_values_at_the_time_of_the_call(checkpoints):
    """The training step donates its state, so the buffers are overwritten while the writing threads are at work."""
    run, first = checkpoints(keep=None), np.asarray(state_of(1).params["weight"])
    state = jax.tree.map(jnp.copy, state_of(1))
    increment = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for step in range(1, 6):
        run.save(step, state)
        state = increment(state)
    assert int(run.restore(state_of(0))[0].step) == 5, "the one just saved, though it is still being written"
    run.wait()
    for step in range(1, 6):
        found = run.restore(state_of(0), step=step)[0]
        assert int(found.step) == step
        np.testing.assert_allclose(found.params["weight"], first + (step - 1), rtol=1e-5)


def test_a_step_that_is_being_written_is_counted_in_bytes_and_not_listed_yet(checkpoints, monkeypatch):
    """Renaming is what completes a step; until then nobody may see it."""
    run, seen = checkpoints(), []
    rename = os.rename

    def watched(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if Path(target).parent == run.directory:
            seen.append((Path(target).name, run.steps(), run.num_bytes() > 40 * 33 * 4))
        rename(source, target, *args, **kwargs)

    monkeypatch.setattr(os, "rename", watched)
    assert run.num_bytes() == 0
    save_steps(run, 1, 2)
    assert seen == [("1", [], True), ("2", [1], True)]


def test_a_step_that_is_there_or_older_or_no_number_is_refused_and_nothing_is_deleted(checkpoints):
    run, number = checkpoints(keep=2), ("step", "whole number")
    save_steps(run, 20, 30)
    for step, facts in (
        (30, ["run/30"]),
        (15, ["older", "30"]),
        (-1, ["step=-1", "at least 0"]),
        (1.5, number),
        (None, number),
        (jnp.ones(2, jnp.int32), number),
    ):
        error = TypeError if facts is number else ValueError
        refuses(functools.partial(run.save, step, state_of(1)), *facts, error=error)
    assert run.steps() == [20, 30] and len(list(run.directory.iterdir())) == 3, "nothing is written where nobody looks"
    assert step_of(run.restore(state_of(0))[0]) == 30


def test_what_is_no_state_and_no_metric_is_refused(checkpoints, tmp_path):
    run, taken = checkpoints(), jax.tree.map(jnp.copy, state_of(1))
    for value in ("low", None, jnp.ones(2)):
        wrong = {"loss": 1, "eval_loss": value}
        refuses(lambda wrong=wrong: run.save(1, state_of(1), metrics=wrong), "metrics:", "'eval_loss'")
    abstract: Any = model().abstract_state(TX)
    for what, told in (({"w": 1}, "dict"), (abstract, "without arrays")):
        for save in (functools.partial(run.save, 1), functools.partial(jfsdp.checkpoint.save, tmp_path / "one")):
            refuses(functools.partial(save, what), "state", told, error=TypeError)
    taken.step.delete()
    refuses(lambda: run.save(1, taken), "/run/1", "save the state that it returned")
    assert run.steps() == []


def test_a_step_that_is_not_there_lists_those_that_are(checkpoints):
    run = checkpoints()
    refuses(lambda: run.restore(state_of(0)), "run: has no complete step")
    save_steps(run, 1, 2)
    refuses(lambda: run.restore(state_of(0), step=3), "run:", "step 3", "1", "2")


def test_a_full_disk_is_told_in_bytes_and_leaves_earlier_steps_and_the_run_usable(checkpoints, monkeypatch):
    run = checkpoints(keep=1)
    save_steps(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, used=10**6, free=100))
        error = refuses(lambda: run.save(2, state_of(2)), "needs about", "100", "earlier", error=OSError)
    assert isinstance(error, OSError) and error.errno == errno.ENOSPC
    assert run.steps() == [1]
    save_steps(run, 3)
    assert run.steps() == [3] and step_of(run.restore(state_of(0))[0]) == 3


# What the interrupted process runs: it saves step after step until it is killed.
ENDLESS = """
import itertools, sys
from tests.checkpoint.test_damage import jfsdp, state_of

run = jfsdp.checkpoint.Checkpointer(sys.argv[1], keep=3)
for step in itertools.count(1):
    run.save(step, state_of(step), extra={"position": step})
"""


def complete(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]


def unfinished(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if not path.name.isdigit() and path.name != "lock"]


def kill_while_saving(directory: Path, delay_s: float) -> None:
    """Run a script that saves into a directory; kill it after some whole steps, `delay_s` into another one."""
    command = [sys.executable, "-c", ENDLESS, directory]
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL, cwd=Path(__file__).parents[2])
    deadline = time.monotonic() + 300
    try:
        while max(complete(directory), default=0) < 3 or not unfinished(directory):
            assert process.poll() is None, f"the saving process ended by itself: {process.returncode}"
            assert time.monotonic() < deadline, "the saving process saved nothing"
            time.sleep(0.0005)
        time.sleep(delay_s)
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize("delay_s", thin([0.01, 0, 0.03], 3))
def test_kill_in_the_middle_of_saves_leaves_only_steps_that_restore(delay_s, tmp_path, checkpoints):
    directory = tmp_path / "run"
    directory.mkdir()
    kill_while_saving(directory, delay_s)
    run = checkpoints()
    steps = run.steps()
    assert steps
    for step in steps:
        state, extra = run.restore(state_of(0), step=step)
        assert (step_of(state), extra) == (step, {"position": step})
    save_steps(run, steps[-1] + 10)
    assert run.latest() == steps[-1] + 10
    assert not unfinished(directory), "what the interruption left is cleaned up before the next save"


def test_old_steps_are_moved_aside_before_they_are_deleted(tmp_path, checkpoints, monkeypatch):
    """Deleting takes many calls: a process killed between them must not leave a step that is listed and not whole."""
    run = checkpoints()
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: None)
        save_steps(run, 1, 2, 3, 4)
        assert run.steps() == [2, 3, 4]
        assert unfinished(tmp_path / "run") == ["to-delete"]
    save_steps(run, 5)
    assert run.steps() == [3, 4, 5]
    assert not unfinished(tmp_path / "run")


def test_an_older_step_that_cannot_be_deleted_does_not_undo_the_newest(checkpoints, monkeypatch):
    run = checkpoints(keep=1)
    save_steps(run, 1)
    rename = os.rename

    def fail(source: Any, target: Any) -> None:
        if Path(target).parent.name == "to-delete":
            raise PermissionError(errno.EACCES, "Permission denied")
        rename(source, target)

    monkeypatch.setattr(os, "rename", fail)
    with pytest.warns(UserWarning, match="older steps cannot be deleted"):
        save_steps(run, 2)
    assert run.steps() == [1, 2]
