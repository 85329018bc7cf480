"""Snapshots of a state in host memory: a restart on the same hosts reads no file system.

[Note: snapshots] Each process writes one file into a directory in memory (`/dev/shm`). Together the files of a host
contain each block on the host's devices once, in logical arrays as in checkpoints, with a digest per block. So a host
has exactly the blocks that its processes need. A run continues from a snapshot if it has the same number of processes,
and each finds the blocks of its devices on its host. After the loss of a host, on another mesh or under another
strategy, it continues from the last checkpoint instead. The previous snapshot is removed when all processes have
written the next one.
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
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfsdp.arguments import PathLike, Size, checked
from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.checkpoint.disk.logical_arrays import Stored, choose_writers, contents, logical_arrays, read_shapes
from jfsdp.checkpoint.disk.paths import absolute_path
from jfsdp.checkpoint.disk.pieces import Pieces, copy_pieces
from jfsdp.checkpoint.disk.processes import in_all, together
from jfsdp.checkpoint.source import Index
from jfsdp.checkpoint.store import fill
from jfsdp.checkpoint.to_devices import local_blocks
from jfsdp.compat import warn
from jfsdp.launch.environment import SNAPSHOTS, memory_dir
from jfsdp.launch.hosts import gather_json, hosts, wait_for_all
from jfsdp.objects.path import is_address
from jfsdp.train.state import TrainState, array_bytes

_DIGEST = 32  # bytes of a SHA-256


def snapshot_dir(run_dir: PathLike) -> Path:
    """Return the directory of a run's snapshots on this host."""
    place = str(run_dir) if is_address(run_dir) else str(Path(run_dir).resolve())
    name = hashlib.sha256(place.encode()).hexdigest()[:16]
    return Path(os.environ.get(SNAPSHOTS) or memory_dir()) / name


@checked
class Snapshots:
    """The newest state of a run in the memory of its hosts; see [Note: snapshots]. All processes create one.

    Args:
      directory: a directory in memory, used by this run only and shared by the processes of a host, such as
        `snapshot_dir(run_dir)`.
      run: identifies the run among others that used the directory; plain JSON, equal in all processes.

    Raises:
      ValueError: if the directory has no name.
    """

    def __init__(self, directory: PathLike, run: Any):
        self.directory, self.run = absolute_path(directory), run
        self._step: int | None = None  # the step being written
        self._thread: threading.Thread | None = None
        self._problem = ""
        self._start: str | None = None  # id of this start; a restart may take the same step with other values

    def check_room(self, like: TrainState) -> None:
        """Check that the directory has space for two snapshots.

        Args:
          like: a state, or `model.abstract_state(tx)`.

        Raises:
          ValueError: in every process: if there is not enough memory (states both sizes), or the directory belongs to
            another user.
        """

        def check() -> None:
            self._make()
            arrays = contents(like)
            writers = choose_writers(arrays, _host_devices(arrays))
            needed = 2 * sum(array_bytes(x.value) * len(devices) for x, devices in zip(arrays, writers, strict=True))
            existing = sum(file.stat().st_size for file in self.directory.rglob("*") if file.is_file())
            free = shutil.disk_usage(self.directory).free + existing
            if needed > free:
                raise ValueError(
                    f"{self.directory} has {free / 2**20:,.1f} MiB free, and two snapshots of the arrays on this host "
                    f"need {needed / 2**20:,.1f} MiB; name a larger one in {SNAPSHOTS}, or omit --snapshot-every"
                )

        together(check)

    def take(self, step: Size, state: TrainState, extra: Any = None) -> float:
        """Copy a state to the host and begin to write it; return the seconds for which this call blocked.

        Every process must call this. Warns if the previous snapshot could not be written because memory is full; the
        one before it is then kept.

        Cost:    one small exchange between the processes.
        Memory:  on the host, three times the arrays on its devices; two copies are in the directory.

        Args:
          extra: plain JSON of this process.
        """
        begin = time.perf_counter()
        self.wait()
        if self._start is None:
            self._start = gather_json(uuid.uuid4().hex)[0]
        pieces = copy_pieces(state, _host_devices(contents(state)))
        arrays = {name: array.to_dict() for name, array in logical_arrays(state).items()}
        footer = {"run": self.run, "start": self._start, "processes": jax.process_count(), "arrays": arrays}
        footer["extra"] = json.loads(json.dumps(extra))
        self._step = step
        self._thread = threading.Thread(target=self._write, args=(step, footer, pieces), name="jfsdp-snapshot")
        self._thread.start()
        return time.perf_counter() - begin

    def newest(self, like: TrainState) -> int | None:
        """Return the newest step from which all processes can continue; None: there is none.

        Every process must call this. Warns if there are snapshots but none is usable.
        """
        arrays = {name: array.to_dict() for name, array in logical_arrays(like).items()}
        blocks = [block for stored in contents(like) for block in local_blocks(stored)]
        parts = [(block.array.name, block.inside) for block in blocks if block.has_values]

        def find_usable() -> list[tuple[int, str]]:
            sources = [(step, source) for step in self._steps() if (source := self._open(step))]
            return [
                (step, source.footer["start"])
                for step, source in sources
                if source.footer["arrays"] == arrays and all(source.has(*part) for part in parts)
            ]

        usable = together(find_usable)
        common = set.intersection(*(set(map(tuple, found)) for found in usable))
        if not common and (steps := self._steps()):
            warn(
                f"{self.directory}: the snapshots of steps {sorted(steps)} cannot be used: they are of another run, "
                "number of processes, mesh or strategy, or some hosts have none"
            )
        return max((step for step, _ in common), default=None)

    def restore(self, like: TrainState, step: int) -> tuple[TrainState, list[Any]]:
        """Read a step that `newest` returned. Return the state, and the `extra` of all processes.

        Every process must call this.

        Raises:
          ValueError: in every process, if a process has no snapshot of this step.
          DamagedError: in every process, if a block differs from its digest.
        """

        def open_own() -> _Source:
            if source := self._open(step):
                return source
            raise ValueError(f"{self.directory} has no usable snapshot of step {step}; call `newest` for one")

        source = in_all(open_own)
        return fill(like, source, list(source.arrays)), gather_json(source.footer["extra"])

    def keep(self, step: int | None) -> None:
        """Remove all snapshots except one (None: all), before the run writes new ones.

        Every process must call this, after `restore`.
        """
        wait_for_all("before old snapshots are removed")  # until no process reads them
        if jax.process_index() in hosts(jax.devices()):  # the first of its host
            for other in set(self._steps()) - {step}:
                shutil.rmtree(self.directory / str(other), ignore_errors=True)
        wait_for_all("after old snapshots are removed")

    def clear(self) -> None:
        """Remove the files of this process, when the run is saved elsewhere or will not continue."""
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
            problem = f"{self.directory} cannot be created ({error.strerror})"
            raise ValueError(f"{problem}; name another in {SNAPSHOTS}") from error
        self._check_owner()

    def _check_owner(self) -> None:
        """Check that no other user can create files or links in the directory."""
        for path in (self.directory.parent, self.directory):
            found = os.lstat(path)
            is_closed = not found.st_mode & 0o022
            is_own = is_closed and found.st_uid == os.getuid()
            is_roots = (is_closed or found.st_mode & stat.S_ISVTX) and found.st_uid == 0  # the parent may be
            if not stat.S_ISDIR(found.st_mode) or not (is_own or (is_roots and path != self.directory)):
                problem = f"{path} is not a directory that only this user can write to"
                raise ValueError(f"{problem}; name another in {SNAPSHOTS}, or remove it")

    def wait(self) -> None:
        """Wait until all processes have written the last snapshot, then remove older ones.

        Every process must call this.
        """
        if self._thread is None or self._step is None:
            return
        self._thread.join()
        self._thread, last = None, self._step
        problems = [f"process {process}: {text}" for process, text in enumerate(gather_json(self._problem)) if text]
        if problems:
            problem = f"no snapshot of step {last}: {problems[0]}"
            warn(f"{problem}; the run continues, and a restart reads the last save")
        for step in [last] if problems else set(self._steps()) - {last}:
            self._drop(step)

    def _steps(self) -> list[int]:
        if not os.path.lexists(self.directory):
            return []
        self._check_owner()
        return [int(path.name) for path in self.directory.glob("*") if path.name.isdecimal()]

    def _drop(self, step: int) -> None:
        path = self.directory / str(step)
        files = [path / name for name in (f"{jax.process_index()}", f"{jax.process_index()}.partial")]
        if not any(map(os.path.lexists, files)):
            return  # another process may have made the directory just now, for the step that it begins to write
        for file in files:
            with contextlib.suppress(OSError):
                file.unlink()
        with contextlib.suppress(OSError):  # other processes have files in it
            path.rmdir()

    def _write(self, step: int, footer: dict[str, Any], pieces: Mapping[str, Pieces]) -> None:
        where, blocks, self._problem = self.directory / str(step), [], "it was not finished"
        try:
            self._make()
            where.mkdir(exist_ok=True)
            partial = where / f"{jax.process_index()}.partial"
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

    def _open(self, step: int) -> _Source | None:
        """Open the files of a step on this host; None if this process has written none in this run."""
        found: dict[Path, dict[str, Any]] = {}
        for path in (self.directory / str(step)).glob("*"):
            if path.name.isdecimal():
                with contextlib.suppress(OSError, ValueError, KeyError):
                    footer = _read_footer(path)
                    if footer["run"] == self.run and footer["processes"] == jax.process_count():
                        found[path] = footer
        own = found.get(self.directory / str(step) / str(jax.process_index()))
        if own is None:
            return None
        return _Source(own, {path: footer for path, footer in found.items() if footer["start"] == own["start"]})


def _read_footer(path: Path) -> dict[str, Any]:
    """Read the footer of one process's file of a step."""
    with path.open("rb") as file:
        file.seek(-8, os.SEEK_END)
        size = int.from_bytes(file.read(8), "little")
        file.seek(-_DIGEST - 8 - size, os.SEEK_END)
        end, digest = file.read(size), file.read(_DIGEST)
    if hashlib.sha256(end).digest() != digest:
        raise ValueError(f"{path} is damaged: its footer differs from its digest")
    return json.loads(end)


class _Source:
    """The blocks in all files of a host as a source that can read exactly these blocks.

    Args:
      footer: footer of this process's file.
      footers: footers of all files.
    """

    def __init__(self, footer: dict[str, Any], footers: Mapping[Path, dict[str, Any]]):
        self.footer = footer
        self._blocks = {
            (name, json.dumps(bounds)): (path, *rest)
            for path, found in footers.items()
            for name, bounds, *rest in found["blocks"]
        }
        self.arrays = read_shapes(footer["arrays"])

    def has(self, name: str, index: Index) -> bool:
        return (name, json.dumps(_bounds(index))) in self._blocks

    def read(self, name: str, index: Index) -> np.ndarray:
        path, start, size, digest = self._blocks[name, json.dumps(_bounds(index))]
        raw = np.fromfile(path, np.uint8, size, offset=start)
        if raw.size != size or hashlib.sha256(raw.data).hexdigest() != digest:
            raise DamagedError(f"snapshot {path}: bytes {start} to {start + size} differ from their digest")
        return raw.view(self.arrays[name].dtype).reshape([dim.stop - dim.start for dim in index])


def _bounds(index: Index) -> list[list[int]]:
    return [[int(dim.start), int(dim.stop)] for dim in index]


def _host_devices(arrays: list[Stored]) -> set[Any]:
    """Return the devices of this host on which the arrays are placed."""
    devices = list(set[Any]().union(*(stored.value.sharding.device_set for stored in arrays)))
    host_of = dict(zip(devices, hosts(devices), strict=True))
    own = next(host_of[device] for device in devices if device.process_index == jax.process_index())
    return {device for device, host in host_of.items() if host == own}
