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
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.checkpoint.disk import writer
from tests.refusals import refuses, refusing
from tests.sharding import fully_shard
from tests.thin import thin

TX = optax.sgd(1e-3)


class Net(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (16, 13)))


@functools.cache
def model() -> jfsdp.ShardedModel:
    return fully_shard(Net, mesh=jfsdp.make_mesh(), min_size=8)


@functools.cache
def first_state() -> jfsdp.TrainState:
    return model().init(TX)


def state_of(step: int) -> jfsdp.TrainState:
    """A state whose weights say which step it is."""
    first = first_state()
    weight = jax.device_put(jnp.full((16, 13), float(step)), first.params["weight"].sharding)
    return jfsdp.TrainState(**{**vars(first), "params": {"weight": weight}, "step": first.step + step})


def step_of(state: jfsdp.TrainState) -> int:
    """Which step a state says it is; every weight must agree."""
    weight = np.asarray(state.params["weight"])
    assert weight.min() == weight.max() == float(state.step)
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


def test_an_empty_run_has_no_steps_and_makes_its_directory(checkpoints, tmp_path):
    empty = checkpoints()
    assert (empty.steps(), empty.latest()) == ([], None)
    assert (tmp_path / "run").is_dir()


def test_the_newest_steps_are_kept_and_listed_in_order(checkpoints):
    run = checkpoints(keep=2)
    save_steps(run, 5, 10, 100)
    assert (run.steps(), run.latest()) == ([10, 100], 100)


def test_keep_none_keeps_all(checkpoints):
    run = checkpoints(keep=None)
    save_steps(run, *range(1, 6))
    assert run.steps() == [1, 2, 3, 4, 5]


def test_what_is_on_disk_of_a_save_under_way_is_counted(checkpoints, monkeypatch):
    run, commit, seen = checkpoints(), writer.commit, []
    monkeypatch.setattr(writer, "commit", lambda *args: (seen.append(run.num_bytes()), commit(*args)))
    assert run.num_bytes() == 0
    save_steps(run, 1)
    assert seen[0] > 16 * 13 * 4


@pytest.mark.parametrize("keep", [0, -1])
def test_keeping_none_at_all_is_refused(checkpoints, keep):
    with pytest.raises(ValueError, match=f"keep={keep} must be at least 1, or None"):
        checkpoints(keep=keep)


def test_restore_gives_the_newest_step_or_the_one_asked_for_with_its_extra(checkpoints):
    run = checkpoints()
    save_steps(run, 1, 2, 3)
    state, extra = run.restore(first_state())
    assert (step_of(state), extra) == (3, {"position": 3})
    state, extra = run.restore(model().abstract_state(TX), step=2)
    assert (step_of(state), extra) == (2, {"position": 2})


def test_extra_may_be_left_out_or_be_anything_that_json_writes(checkpoints):
    run = checkpoints()
    run.save(1, state_of(1))
    run.wait()
    assert run.restore(first_state())[1] is None
    extra = {"iterator": [1, {"a": None}], "text": "ü", "large": 2**60, "half": 0.5}
    run.save(2, state_of(2), extra=extra)
    run.wait()
    assert run.restore(first_state())[1] == extra


def test_a_run_is_found_again_by_another_checkpointer(checkpoints):
    first = checkpoints()
    save_steps(first, 1, 2)
    first.close()
    again = checkpoints()
    assert again.steps() == [1, 2]
    save_steps(again, 3, 4)
    assert again.steps() == [2, 3, 4]


def test_a_step_of_a_run_is_a_checkpoint_like_any_other(checkpoints, tmp_path):
    save_steps(checkpoints(), 7)
    assert step_of(jfsdp.checkpoint.restore(tmp_path / "run" / "7", like=first_state())) == 7


def test_a_step_is_written_from_the_values_at_the_time_of_the_call(checkpoints):
    """The training step donates its state, so the buffers are overwritten while the writing threads are at work."""
    run = checkpoints(keep=None)
    state = jax.tree.map(jnp.copy, state_of(1))
    increment = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s), donate_argnums=0)
    for step in range(1, 6):
        run.save(step, state)
        state = increment(state)
    run.wait()
    assert [step_of(run.restore(first_state(), step=step)[0]) for step in range(1, 6)] == [1, 2, 3, 4, 5]


def test_save_says_how_long_it_blocked(checkpoints):
    start = time.perf_counter()
    blocked = checkpoints().save(1, state_of(1))
    assert 0 < blocked <= time.perf_counter() - start


def test_a_step_that_is_being_written_is_not_listed_yet(checkpoints, monkeypatch):
    """Renaming is what completes a step; until then nobody may see it."""
    run, seen = checkpoints(), []
    rename = os.rename

    def watched(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if Path(target).parent == run.directory:
            seen.append((Path(target).name, run.steps()))
        rename(source, target, *args, **kwargs)

    monkeypatch.setattr(os, "rename", watched)
    save_steps(run, 1, 2)
    assert seen == [("1", []), ("2", [1])]


def test_a_step_that_is_there_is_not_overwritten(checkpoints):
    run = checkpoints()
    save_steps(run, 1)
    with refusing("run/1"):
        run.save(1, state_of(2))
    assert step_of(run.restore(first_state())[0]) == 1


@pytest.mark.parametrize("older", [15, 5, -1])
def test_a_step_older_than_the_newest_is_refused_and_nothing_is_deleted(checkpoints, older):
    run = checkpoints(keep=2)
    save_steps(run, 20, 30)
    words = "is older than 30" if older > 0 else "step=-1 must be a whole number, at least 0"
    with pytest.raises(ValueError, match=words):
        save_steps(run, older)
    assert run.steps() == [20, 30]


@pytest.mark.parametrize("step", [1.5, "7", None, jnp.ones(2, jnp.int32)])
def test_a_step_that_is_no_number_is_refused_and_not_written_where_nobody_looks(checkpoints, step):
    run = checkpoints()
    with pytest.raises(TypeError, match=r"save: step.* must be a whole number"):
        run.save(step, state_of(1))
    assert not list(run.directory.iterdir())


def test_a_step_may_be_a_scalar_array(checkpoints):
    run = checkpoints()
    run.save(np.int64(1), state_of(1))
    run.save(state_of(2).step, state_of(2))
    run.wait()
    assert run.steps() == [1, 2] and run.latest() == 2


@pytest.mark.parametrize("value", ["low", None, jnp.ones(2)])
def test_a_metric_that_is_no_number_is_named(checkpoints, value):
    run = checkpoints()
    with refusing("metrics:", "'eval_loss'"):
        run.save(1, state_of(1), metrics={"loss": 1, "eval_loss": value})
    assert run.steps() == []


@pytest.mark.parametrize(
    ("what", "told"),
    [({"w": 1}, r"state \(a dict\) must be a"), (None, "`state` is a state without arrays; pass what")],
)
def test_what_is_no_state_is_refused_by_its_kind(checkpoints, what, told, tmp_path):
    what = what or model().abstract_state(TX)
    for save in (functools.partial(checkpoints().save, 1), functools.partial(jfsdp.checkpoint.save, tmp_path / "one")):
        with pytest.raises(TypeError, match=told):
            save(what)


def test_a_state_that_a_step_took_is_refused_with_what_to_save(checkpoints):
    state = state_of(1)
    state.step.delete()
    refuses(lambda: checkpoints().save(1, state), "/run/1: a step took", "save the state that it returned")


def test_a_step_that_is_not_there_lists_those_that_are(checkpoints):
    run = checkpoints()
    with pytest.raises(ValueError, match=r"run: holds no complete step yet"):
        run.restore(first_state())
    save_steps(run, 1, 2)
    with refusing("run:", "step 3", "1", "2"):
        run.restore(first_state(), step=3)


def test_a_checkpoint_of_another_model_is_refused_by_name(checkpoints):
    class Other(Net):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.bias = nnx.Param(jnp.ones(3))

    run = checkpoints()
    save_steps(run, 1)
    like = fully_shard(Other, mesh=jfsdp.make_mesh()).abstract_state(TX)
    with refusing("params.bias"):
        run.restore(like)


def test_a_full_disk_leaves_earlier_steps_and_the_run_usable(checkpoints, monkeypatch):
    run = checkpoints(keep=1)
    save_steps(run, 1)
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, used=10**6, free=100))
        with pytest.raises(OSError, match=r"earlier .* are untouched") as error:
            run.save(2, state_of(2))
    assert error.value.errno == errno.ENOSPC
    assert run.steps() == [1]
    save_steps(run, 3)
    assert run.steps() == [3]
    assert step_of(run.restore(first_state())[0]) == 3


def test_a_full_disk_is_told_in_bytes_needed_and_free(checkpoints, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=10**6, used=10**6, free=100))
    with pytest.raises(OSError, match=r"needs about [\d,]+ bytes, 100 are free"):
        checkpoints().save(1, state_of(1))


def test_a_directory_that_cannot_be_made_is_an_os_error(checkpoints, tmp_path):
    (tmp_path / "file").write_text("mine")
    for directory in (tmp_path / "file", tmp_path / "file" / "run"):
        with pytest.raises(OSError, match="file"):
            checkpoints(directory=directory)
    assert (tmp_path / "file").read_text() == "mine"


def test_what_goes_wrong_in_the_background_is_raised_and_the_step_not_listed(checkpoints, monkeypatch):
    """The disk fills up while the writing threads are at work."""
    run = checkpoints()
    save_steps(run, 1)
    rename = os.rename

    def fail(source: Any, target: Any, *args: Any, **kwargs: Any) -> None:
        if Path(target).name == "2":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail)
        with refusing("No space left on device", "earlier", error=OSError):
            run.save(2, state_of(2))
            run.wait()
    assert run.steps() == [1]
    assert step_of(run.restore(first_state())[0]) == 1
    save_steps(run, 3)
    assert run.steps() == [1, 3]


# What the interrupted process runs: it saves step after step until it is killed.
ENDLESS = """
import itertools, sys
import jax, jax.numpy as jnp
import jfsdp
from flax import nnx
import optax

class Net(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros((16, 13)))

model = jfsdp.fully_shard(Net, mesh=jfsdp.make_mesh(), placements=jfsdp.placements(min_size=8))
state = model.init(optax.sgd(1e-3))
increment = jax.jit(lambda s: jax.tree.map(lambda x: x + 1, s))
run = jfsdp.checkpoint.Checkpointer(sys.argv[1], keep=3)
for step in itertools.count(1):
    state = increment(state)
    run.save(step, state, extra={"position": step})
"""


def complete(directory: Path) -> list[int]:
    return [int(path.name) for path in directory.iterdir() if path.name.isdigit()]


def unfinished(directory: Path) -> list[str]:
    return [path.name for path in directory.iterdir() if not path.name.isdigit() and path.name != "lock"]


def kill_while_saving(script: Path, directory: Path, delay_s: float) -> None:
    """Run a script that saves into a directory; kill it after some whole steps, `delay_s` into another one."""
    process = subprocess.Popen([sys.executable, script, directory], stderr=subprocess.DEVNULL)
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


@pytest.mark.parametrize("delay_s", thin([0, 0.01, 0.03]))
def test_kill_in_the_middle_of_saves_leaves_only_steps_that_restore(delay_s, tmp_path, checkpoints):
    directory, script = tmp_path / "run", tmp_path / "endless.py"
    directory.mkdir()
    script.write_text(ENDLESS)
    kill_while_saving(script, directory, delay_s)
    run = checkpoints()
    steps = run.steps()
    assert steps
    for step in steps:
        state, extra = run.restore(first_state(), step=step)
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


def test_an_unfinished_step_is_not_listed_and_makes_way_for_a_whole_one(tmp_path, checkpoints):
    """What a kill leaves, made by hand: the temporary directory of a step, with a part of its files."""
    first = checkpoints()
    save_steps(first, 1, 2)
    first.close()
    whole = tmp_path / "run" / "2"
    partial = tmp_path / "run" / "3.jfsdp-tmp"
    shutil.copytree(whole, partial)
    (partial / "SHA256SUMS").unlink()
    run = checkpoints()
    assert run.steps() == [1, 2]
    assert step_of(run.restore(first_state())[0]) == 2
    save_steps(run, 3)
    assert step_of(run.restore(first_state())[0]) == 3


def test_the_newest_step_is_the_one_just_saved_though_it_is_still_being_written(checkpoints):
    run = checkpoints()
    for step in (1, 2, 3):
        run.save(step, state_of(step))
        assert step_of(run.restore(first_state())[0]) == step


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
