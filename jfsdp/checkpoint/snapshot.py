"""Snapshots of a state in the memory of its hosts: a restart on the same hosts reads no file system.

[Note: what a snapshot is] Each process writes one file into a directory in memory (`/dev/shm`): of what the devices of
its host hold, each block once, in logical arrays as checkpoints have them, with a digest of each block. So a host has
all that its own processes need, and nothing of the others. A step is gone on from where every process of as many finds
on its host whatever its devices are to hold; after a lost host, on another mesh, or under another strategy it is not,
and the last checkpoint is. The snapshot before is removed when all processes have written the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import stat
import threading
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfsdp.arguments import PathLike, Size, checked
from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.checkpoint.disk.logical_arrays import Part, Stored, contents, holders, logical_arrays
from jfsdp.checkpoint.disk.pieces import Pieces, copy_pieces
from jfsdp.checkpoint.disk.processes import in_all, together
from jfsdp.checkpoint.source import Index
from jfsdp.checkpoint.store import fill
from jfsdp.checkpoint.to_devices import own_blocks
from jfsdp.compat import warn
from jfsdp.launch.environment import SNAPSHOTS, memory_dir
from jfsdp.launch.hosts import gather_json, hosts, wait_for_all
from jfsdp.train.state import TrainState

_DIGEST = 32  # bytes of a SHA-256
_COPIES = 2  # in the directory: a whole one, and the next, which is being written


def snapshot_dir(run_dir: PathLike) -> Path:
    """Return where the snapshots of a run are on this host."""
    name = hashlib.sha256(str(Path(run_dir).resolve()).encode()).hexdigest()[:16]
    return Path(os.environ.get(SNAPSHOTS) or memory_dir()) / name


@checked
class Snapshots:
    """The newest state of a run in the memory of its hosts; see [Note: what a snapshot is]. All processes make one.

    Args:
      directory: in memory, for this run alone; the processes of a host share it. `snapshot_dir(run_dir)` is one.
      run: what tells the run from another that used the directory; plain JSON, equal in all processes.

    Raises:
      ValueError: for a directory of no name.
    """

    def __init__(self, directory: PathLike, run: Any):
        if not str(directory):
            raise ValueError("Snapshots: directory='' is no path; name one in memory, such as '/dev/shm/my-run'")
        self.directory, self.run = Path(directory), run
        self._step: int | None = None  # that is being written
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._start: str | None = None  # of the process that takes them: a step may be taken again, with other numbers

    def check_room(self, like: TrainState) -> None:
        """Refuse to begin where the directory cannot hold two snapshots.

        Args:
          like: a state, or `model.abstract_state(tx)`.

        Raises:
          ValueError: in every process: with the arithmetic, or for a directory that is another user's.
        """

        def check() -> None:
            self._make()
            needed = _COPIES * sum(_block_bytes(stored) for stored, _ in _host_blocks(contents(like)))
            there = sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())
            free = shutil.disk_usage(self.directory).free + there
            if needed > free:
                raise ValueError(
                    f"{self.directory} has {free / 2**20:,.1f} MiB free, and two snapshots of what this host holds "
                    f"need {needed / 2**20:,.1f} MiB; make it larger (mount -o remount,size=), name a larger directory "
                    f"in {SNAPSHOTS}, or leave --snapshot-every out"
                )

        together(check)

    def take(self, step: Size, state: TrainState, extra: Any = None) -> float:
        """Copy a state to the host and begin to write it; return the seconds that this blocked. All processes call it.

        Where the one before could not be written (its memory is full), it warns, and that before it stays.

        Cost:    one small exchange between the processes.
        Memory:  of the host: three times what its devices hold, two of them in the directory.

        Args:
          extra: plain JSON, of this process.
        """
        begin = time.perf_counter()
        self.wait()
        if self._start is None:
            self._start = gather_json(uuid.uuid4().hex)[0]
        pieces = copy_pieces(state, _first_of_host)
        arrays = {name: array.to_dict() for name, array in logical_arrays(state).items()}
        footer = {"run": self.run, "start": self._start, "processes": jax.process_count(), "arrays": arrays}
        footer["extra"] = json.loads(json.dumps(extra))
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(step, footer, pieces), name="jfsdp-snapshot")
        self._thread.start()
        return time.perf_counter() - begin

    def newest(self, like: TrainState) -> int | None:
        """Return the newest step that all processes can go on from; None: there is none. All processes call it.

        It warns where there are snapshots, and none that can be used.
        """
        arrays = {name: array.to_dict() for name, array in logical_arrays(like).items()}
        parts = [part for stored in contents(like) for block in own_blocks(stored) for part in block.parts]
        usable = together(
            lambda: [[step, start] for step in self._steps() if (start := self._usable_start(step, arrays, parts))]
        )
        common = set.intersection(*(set(map(tuple, found)) for found in usable))
        if not common and (steps := self._steps()):
            warn(
                f"{self.directory}: the snapshots of steps {sorted(steps)} cannot be used: they are of another run, "
                "number of processes, mesh or strategy, or some hosts have none"
            )
        return max((step for step, _ in common), default=None)

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, list[Any]]:
        """Read a step that `newest` named; return it, and the `extra` of all processes. All processes call it.

        Raises:
          ValueError: in every process, if one has none of this step.
          DamagedError: in every process, for a block that is not as it was written.
        """

        def open_own() -> dict[int, _File]:
            files = self._open(step)
            if jax.process_index() not in files:
                raise ValueError(
                    f"{self.directory} has no snapshot of step {step} to go on from; ask `newest` which there is"
                )
            return files

        files = in_all(open_own)
        source = _Source(files)
        state = fill(like, source, list(source.arrays))
        return state, gather_json(files[jax.process_index()].footer["extra"])

    def keep(self, step: int | None) -> None:
        """Remove all snapshots but one (None: all), where a run begins to write others.

        All processes call it, after `restore`.
        """
        wait_for_all("before old snapshots are removed")  # nobody reads on
        if jax.process_index() in hosts(jax.devices()):  # the first of its host
            for other in set(self._steps()) - {step}:
                shutil.rmtree(self.directory / str(other), ignore_errors=True)
        wait_for_all("after old snapshots are removed")

    def clear(self) -> None:
        """Remove what this process has written: the run is saved elsewhere, or is not to go on."""
        if self._thread is not None:
            self._thread.join()
        for step in self._steps():
            self._drop(step)
        with contextlib.suppress(OSError):
            self.directory.rmdir()
            if self.directory.parent == memory_dir():
                self.directory.parent.rmdir()

    def _make(self) -> None:
        try:
            self.directory.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self.directory.mkdir(mode=0o700, exist_ok=True)
        except OSError as error:
            raise ValueError(
                f"{self.directory} cannot be made ({error.strerror}); name a directory in memory in {SNAPSHOTS}"
            ) from error
        self._check_owner()

    def _check_owner(self) -> None:
        """Refuse a directory that another user could put files or links into."""
        for path in (self.directory.parent, self.directory):
            found = os.lstat(path)
            is_closed = not found.st_mode & 0o022
            is_own = is_closed and found.st_uid == os.getuid()
            is_roots = (is_closed or found.st_mode & stat.S_ISVTX) and found.st_uid == 0  # the parent may be
            if not stat.S_ISDIR(found.st_mode) or not (is_own or (is_roots and path != self.directory)):
                problem = f"{path} is not a directory that this user alone can write to"
                raise ValueError(f"{problem}; name one in {SNAPSHOTS}, or remove it")

    def wait(self) -> None:
        """Wait until the last is written in all processes; then those before it go. All processes call it."""
        if self._thread is None or self._step is None:
            return
        self._thread.join()
        self._thread, last = None, self._step
        problems = [f"process {process}: {text}" for process, text in enumerate(gather_json(self._problem)) if text]
        if problems:
            problem = f"no snapshot of step {last}: {problems[0]}"
            warn(f"{problem}; the run goes on, and a restart reads what was saved before")
        for step in [last] if problems else set(self._steps()) - {last}:
            self._drop(step)

    def _steps(self) -> list[int]:
        if not os.path.lexists(self.directory):
            return []
        self._check_owner()
        return [int(path.name) for path in self.directory.glob("*") if path.name.isdecimal()]

    def _drop(self, step: int) -> None:
        path = self.directory / str(step)
        for name in (str(jax.process_index()), _partial(jax.process_index())):
            with contextlib.suppress(OSError):
                (path / name).unlink()
        with contextlib.suppress(OSError):  # others have files in it
            path.rmdir()

    def _write(self, step: int, footer: dict[str, Any], pieces: Mapping[str, Pieces]) -> None:
        where, blocks, self._problem = self.directory / str(step), [], "it was not finished"
        try:
            self._make()
            where.mkdir(exist_ok=True)
            partial = where / _partial(jax.process_index())
            with partial.open("wb") as file:
                for name, piece in pieces.items():
                    for index, data in piece.parts:
                        raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8).data
                        blocks.append([name, _bounds(index), file.tell(), raw.nbytes, hashlib.sha256(raw).hexdigest()])
                        file.write(raw)
                end = json.dumps(footer | {"blocks": blocks}).encode()
                file.write(end + hashlib.sha256(end).digest() + len(end).to_bytes(8, "little"))
            os.replace(partial, where / str(jax.process_index()))
            self._problem = ""
        except (OSError, ValueError) as error:
            self._problem = f"{where}: {getattr(error, 'strerror', None) or error}"

    def _open(self, step: int) -> dict[int, _File]:
        """Open what this host has of a step, by the process that wrote it."""
        found: dict[int, _File] = {}
        for path in (self.directory / str(step)).glob("*"):
            if path.name.isdecimal():
                with contextlib.suppress(OSError, ValueError, KeyError):
                    file = _File(path)
                    if file.footer["run"] == self.run and file.footer["processes"] == jax.process_count():
                        found[int(path.name)] = file
        own = found.get(jax.process_index())
        return {process: file for process, file in found.items() if own and file.start == own.start}

    def _usable_start(self, step: int, arrays: dict[str, Any], parts: Sequence[Part]) -> str | None:
        """Return in which start a step was taken; None where this process does not find all these parts of it."""
        files = self._open(step)
        own = files.get(jax.process_index())
        if own is None or own.footer["arrays"] != arrays:
            return None
        source = _Source(files)
        return own.start if all(source.find(part.name, part.index) is not None for part in parts) else None


class _File:
    """What one process wrote of a step."""

    def __init__(self, path: Path):
        self.path = path
        with path.open("rb") as file:
            file.seek(-8, os.SEEK_END)
            size = int.from_bytes(file.read(8), "little")
            file.seek(-_DIGEST - 8 - size, os.SEEK_END)
            end, digest = file.read(size), file.read(_DIGEST)
            if hashlib.sha256(end).digest() != digest:
                raise ValueError(f"{path} is not as it was written")
            self.footer: dict[str, Any] = json.loads(end)
            self.start: str = self.footer["start"]

    def read(self, start: int, size: int, digest: str) -> np.ndarray:
        raw = np.fromfile(self.path, np.uint8, size, offset=start)
        if raw.size != size or hashlib.sha256(raw.data).hexdigest() != digest:
            raise DamagedError(f"snapshot {self.path}: bytes {start} to {start + size} are not as they were written")
        return raw


class _Source:
    """The blocks of all files of a host as a source of arrays, which has no more than they."""

    def __init__(self, files: Mapping[int, _File]):
        self._blocks = {
            (name, json.dumps(bounds)): (file, rest)
            for file in files.values()
            for name, bounds, *rest in file.footer["blocks"]
        }
        arrays = next(iter(files.values())).footer["arrays"]
        self.arrays = {
            name: jax.ShapeDtypeStruct(tuple(array["shape"]), jax.numpy.dtype(array["dtype"]))
            for name, array in arrays.items()
        }

    def find(self, name: str, index: Index) -> Any:
        return self._blocks.get((name, json.dumps(_bounds(index))))

    def read(self, name: str, index: Index) -> np.ndarray:
        file, where = self.find(name, index)
        shape = tuple(dim.stop - dim.start for dim in index)
        return file.read(*where).view(self.arrays[name].dtype).reshape(shape)


def _bounds(index: Index) -> list[list[int]]:
    return [[int(dim.start), int(dim.stop)] for dim in index]


def _partial(process: int) -> str:
    return f"{process}.partial"


def _host_blocks(arrays: list[Stored]) -> Iterator[tuple[Stored, Any]]:
    """Yield each block that this host holds of each array, once, by the device whose process writes it.

    Of the devices that hold it that is the one that has least to write so far, the largest arrays first; all processes
    of the host come to the same answer.
    """
    devices = list(set[Any]().union(*(stored.value.sharding.device_set for stored in arrays)))
    host_of = dict(zip(devices, hosts(devices), strict=True))
    own = next(host_of[device] for device in devices if device.process_index == jax.process_index())
    load = {device: 0 for device, host in host_of.items() if host == own}
    for stored in sorted(arrays, key=_block_bytes, reverse=True):
        for copies in holders(stored.value).values():
            if on_host := [device for device in copies if device in load]:
                device = min(on_host, key=load.__getitem__)
                load[device] += _block_bytes(stored)
                yield stored, device


def _first_of_host(arrays: list[Stored]) -> list[list[Any]]:
    """List the shards of each array that this process writes."""
    chosen = {(id(stored), device) for stored, device in _host_blocks(arrays)}
    return [
        [shard for shard in stored.value.addressable_shards if (id(stored), shard.device) in chosen]
        for stored in arrays
    ]


def _block_bytes(stored: Stored) -> int:
    shape = stored.value.sharding.shard_shape(tuple(stored.value.shape))
    return int(np.prod(shape, dtype=np.int64)) * stored.value.dtype.itemsize
