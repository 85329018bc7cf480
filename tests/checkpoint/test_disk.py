"""Disks that are full or cannot be written, and two who write to one place."""

import contextlib
import errno
import resource
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

import jfsdp
from jfsdp.checkpoint.disk import commit, errors, lock, pieces, writer
from jfsdp.checkpoint.disk.errors import check_open_files
from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.checkpoint.disk.lock import Lock
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.metrics import closing
from jfsdp.trainer.run.training import Run
from tests.checkpoint.test_damage import state_of
from tests.refusals import refuses, refusing, warning

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(tmp_path) -> Any:
    with_step = jfsdp.checkpoint.Checkpointer(tmp_path / "run")
    with_step.save(1, state_of(1))
    with_step.wait()
    yield with_step
    with_step.close()


FULL = OSError(errno.ENOSPC, "No space left on device")
PLACES: dict[str, Any] = {
    "an array": (writer.ts, "open", FULL),
    "an array, as TensorStore says it": (writer.ts, "open", ValueError("RESOURCE_EXHAUSTED: Failed to write")),
    "the digests of a process": (writer, "hash_local_files", FULL),
    "a document": (commit, "write_json", FULL),
    "the digests": (commit, "write_digests", FULL),
    "the last sync": (commit, "sync", FULL),
    "the rename": (commit.os, "rename", FULL),
}


@pytest.mark.parametrize("place", list(PLACES))
def test_a_disk_that_fills_up_while_writing_costs_that_save_alone(place, run, monkeypatch):
    """Simulated at each kind of write; for real in the proof below."""
    where, name, error = PLACES[place]

    def save() -> None:
        run.save(2, state_of(2))
        run.wait()

    with monkeypatch.context() as patch:
        patch.setattr(where, name, mock.Mock(side_effect=error))
        told: Any = refuses(save, "No space left on device", "bytes", "earlier", error=OSError)
    assert told.errno == errno.ENOSPC and told.filename == str(run.directory / "2")
    assert run.steps() == [1] and int(run.restore(state_of(3))[0].step) == 1
    save()
    assert run.steps() == [1, 2] and int(run.restore(state_of(3))[0].step) == 2
    assert sorted(path.name for path in run.directory.iterdir()) == ["1", "2", "lock"], "nothing is left behind"


IN_A_SMALL_FILE_SYSTEM = """
import errno, os, shutil, subprocess, sys
from pathlib import Path
from types import SimpleNamespace
import jax, jax.numpy as jnp, optax
from flax import nnx
import jfsdp

disk = Path(sys.argv[1])
subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", disk], check=True)

class Net(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (512, 512)))  # a mebibyte

model = jfsdp.fully_shard(Net)
state = model.init(optax.sgd(1.0))
run = jfsdp.checkpoint.Checkpointer(disk / "run")
run.save(1, state); run.wait()

def refused(action, code, *words):
    try:
        action()
    except OSError as error:
        assert error.errno == code and all(word in str(error) for word in words), error
    else:
        raise AssertionError("it was not refused")

def save(step):
    run.save(step, state); run.wait()

ballast = disk / "ballast"
ballast.write_bytes(bytes(2_700_000))
refused(lambda: save(2), errno.ENOSPC, "needs about 2,118,", "are free")  # with what stands beside the arrays
before, shutil.disk_usage = shutil.disk_usage, lambda path: SimpleNamespace(free=10**12)  # it fills up just after
refused(lambda: save(2), errno.ENOSPC, "No space left on device", "needs about 1,048,5", "earlier checkpoints")
refused(lambda: jfsdp.checkpoint.save(disk / "c", state), errno.ENOSPC, "No space left on device")
assert run.steps() == [1] and not (disk / "c").exists()
jax.tree.map(lambda a, b: (a == b).all() or 1 / 0, run.restore(state)[0].params, state.params)
ballast.unlink()
save(3)
assert run.steps() == [1, 3]
run.close()

subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
run = jfsdp.checkpoint.Checkpointer(disk / "run")
assert run.steps() == [1, 3]
assert run.restore(state)[0].params["weight"].shape == (512, 512), "reading needs no writing"
refused(lambda: save(4), errno.EROFS, "Read-only file system", str(disk / "run"))
refused(lambda: jfsdp.checkpoint.save(disk / "c", state), errno.EROFS, "Read-only file system", str(disk / "c"))
print("proved")
"""


@pytest.mark.proof
def test_a_disk_that_is_full_and_then_read_only_for_real(tmp_path):
    """A file system of 4 MiB in memory, mounted in a name space of its own."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "script.py").write_text(IN_A_SMALL_FILE_SYSTEM)
    command = ["unshare", "-Urm", sys.executable, tmp_path / "script.py", tmp_path / "disk"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.stdout == "proved\n", done.stderr


def test_a_read_only_place_is_named_before_anything_is_copied(tmp_path, monkeypatch):
    """Simulated, since permissions do not stop root."""
    other = jfsdp.checkpoint.Checkpointer(tmp_path / "other")
    monkeypatch.setattr(Path, "open", mock.Mock(side_effect=OSError(errno.EROFS, "Read-only file system", "/other")))
    monkeypatch.setattr(pieces, "copy_pieces", lambda state: pytest.fail("copied"))
    told: Any = refuses(lambda: other.save(1, state_of(1)), "Read-only file system", "/other", error=OSError)
    assert told.errno == errno.EROFS and other.steps() == []


# ---- two who write to one place ----


def test_a_second_writer_of_a_run_is_told_who_the_first_is(run, tmp_path):
    second = jfsdp.checkpoint.Checkpointer(tmp_path / "run")
    assert int(second.restore(state_of(3))[0].step) == 1, "reading is free"
    with refusing("/run"):
        second.save(2, state_of(2))
    assert second.steps() == [1]
    run.close()
    second.save(2, state_of(2))
    second.close()
    assert run.steps() == [1, 2]


WRITER = """
import sys, time
import jfsdp
from jfsdp.checkpoint.disk import commit
from tests.checkpoint.test_damage import state_of

run = jfsdp.checkpoint.Checkpointer(sys.argv[1] + "/run")
run.save(7, state_of(1))
run.wait()
commit.write_digests = lambda *args: (print("holds", flush=True), time.sleep(600))
jfsdp.checkpoint.save(sys.argv[1] + "/c", state_of(1))
"""


def test_a_writer_in_another_process_is_named_and_its_end_frees_what_it_wrote(tmp_path):
    """It holds a run, and is just writing a checkpoint: a second one would take the files of the first away."""
    command = [sys.executable, "-c", WRITER, tmp_path]
    second = jfsdp.checkpoint.Checkpointer(tmp_path / "run")
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as first:
        try:
            assert first.stdout is not None and first.stdout.readline() == "holds\n"
            refuses(lambda: second.save(8, state_of(1)), "/run", f"process {first.pid}")
            assert second.steps() == [7]
            refuses(lambda: jfsdp.checkpoint.save(tmp_path / "c", state_of(1)), "/c", f"process {first.pid}")
        finally:
            first.kill()
    second.save(8, state_of(1))
    second.close()
    assert second.steps() == [7, 8]
    jfsdp.checkpoint.save(tmp_path / "c", state_of(1))
    assert int(jfsdp.checkpoint.restore(tmp_path / "c", like=state_of(2)).step) == 1
    assert not list(tmp_path.glob("c.*")), "what the killed one left is cleaned up"


def test_a_save_that_would_run_out_of_open_files_is_refused_before_it_begins(tmp_path, monkeypatch):
    monkeypatch.setattr("jfsdp.checkpoint.disk.errors.OPEN_FILES", 1 << 40)
    monkeypatch.setattr("resource.getrlimit", lambda what: (4096, 4096))
    told: Any = refuses(lambda: check_open_files(tmp_path / "1"), "ulimit -n", "4096", error=OSError)
    assert told.errno == errno.EMFILE and told.filename == str(tmp_path / "1")


@pytest.fixture
def small_disk(tmp_path, monkeypatch):
    """A disk that has room for nothing as long as an unfinished save is on it, and then for everything."""
    real, usage = tempfile.TemporaryFile, shutil.disk_usage

    def write(**options: Any) -> Any:
        if list(tmp_path.rglob("*.jfsdp-tmp")):
            raise FULL
        return real(**options)

    def free(path: Path) -> Any:
        return SimpleNamespace(free=100) if list(tmp_path.rglob("*.jfsdp-tmp")) else usage(path)

    monkeypatch.setattr(tempfile, "TemporaryFile", write)
    monkeypatch.setattr(shutil, "disk_usage", free)
    return tmp_path


def test_what_a_full_disk_left_is_removed_before_the_next_save_needs_its_room(small_disk, run):
    (small_disk / "run" / "9.jfsdp-tmp").mkdir()
    run.close()
    again = jfsdp.checkpoint.Checkpointer(small_disk / "run")
    again.save(2, state_of(2))
    again.close()
    assert again.steps() == [1, 2]
    (small_disk / "one.jfsdp-tmp").mkdir()
    (small_disk / "one.jfsdp-tmp" / "half").write_bytes(bytes(2_000_000))
    jfsdp.checkpoint.save(small_disk / "one", state_of(1))


def test_a_run_removes_what_a_full_disk_left_before_it_writes_anything(small_disk):
    held = object.__new__(Run)
    held.run_dir, held.is_writer, held.config = small_disk, True, TrainConfig(resume="7")
    (small_disk / "checkpoints" / "9.jfsdp-tmp").mkdir(parents=True)
    refuses(held._check_directory, "no checkpoint", "7")
    assert not list(small_disk.rglob("*.jfsdp-tmp"))


def test_a_save_that_failed_is_removed_though_nobody_waits_for_the_others(run, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(writer, "hash_local_files", mock.Mock(side_effect=FULL))
        run.save(2, state_of(2))
        with pytest.raises(OSError, match="No space left"):
            run.close(alone=True)
    assert sorted(path.name for path in run.directory.iterdir()) == ["1"]


def test_an_error_while_cleaning_up_does_not_replace_the_first(run, monkeypatch):
    fail = mock.Mock(side_effect=PermissionError(errno.EACCES, "Permission denied", "lock"))
    run.save(2, state_of(2))
    run.wait()
    monkeypatch.setattr(Path, "unlink", fail)
    with pytest.raises(ValueError, match="the first"), run:  # noqa: PT012
        monkeypatch.setattr(writer, "hash_local_files", mock.Mock(side_effect=FULL))
        run.save(3, state_of(3))
        raise ValueError("the first")
    run.close()
    closed = []
    with pytest.raises(DamagedError), contextlib.ExitStack() as stack:  # noqa: PT012
        stack.push(closing(lambda: closed.append(fail())))
        stack.push(closing(lambda: closed.append(1)))
        raise DamagedError("the first")
    assert closed == [1]
    with pytest.raises(PermissionError), contextlib.ExitStack() as stack:
        stack.push(closing(fail))


def test_a_lock_file_that_its_holder_has_just_removed_is_not_held(tmp_path, monkeypatch):
    def released_meanwhile(file: Any) -> bool:
        (tmp_path / "lock").unlink()
        return True

    monkeypatch.setattr(lock, "_lock", released_meanwhile)
    refuses(lambda: Lock(tmp_path / "lock", "x is held by", "or go"), "x is held by", "or go")


def test_a_lock_on_a_full_disk_is_held_without_a_name(tmp_path):
    limit = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, limit[1]))
    try:
        held = Lock(tmp_path / "lock", "x is held by", "or go")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    with refusing("x is held by", "or go"):
        Lock(tmp_path / "lock", "x is held by", "or go")
    held.release()
    assert not list(tmp_path.iterdir())


def test_a_mounted_object_store_is_told_by_its_file_system(tmp_path, monkeypatch):
    mounts = tmp_path / "mounts"
    rows = ["/dev/vda / ext4 rw 0 0", "bucket /mnt/a\\040b fuse.s3fs rw 0 0", "disk /mnt/a\\040b/local ext4 rw 0 0"]
    mounts.write_text("\n".join(rows))
    places = ("/mnt/a b/run", "/mnt/a b/local/run", "/mnt/a", "/home")
    assert [errors._mounted_store(Path(place), mounts) for place in places] == ["fuse.s3fs", "", "", ""]
    monkeypatch.setattr(errors, "_mounted_store", lambda path: "fuse.s3fs")
    with warning("fuse.s3fs", "s3://BUCKET/PATH"):
        errors.check_path(tmp_path)
