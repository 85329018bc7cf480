"""The checkpoints of a run: asynchronous saves by step, the chosen ones kept, each complete or not listed."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jfsdp.arguments import PathLike, Size, checked
from jfsdp.checkpoint.disk.errors import check_path, readable_errors
from jfsdp.checkpoint.disk.files import UNFINISHED, DamagedError, read_manifest, step_paths
from jfsdp.checkpoint.disk.lock import Lock
from jfsdp.checkpoint.disk.paths import local_path
from jfsdp.checkpoint.disk.processes import only_first
from jfsdp.checkpoint.policy import Keep, parse_best
from jfsdp.checkpoint.store import bytes_of, restore, start_save, wait_for
from jfsdp.compat import warn
from jfsdp.train.state import TrainState

_DELETED, _LOCK = "to-delete", "lock"


@checked
class Checkpointer:
    """Checkpoints in `directory/<step>`, written in the background.

    A save copies to the host what this process writes and returns; the files appear under a temporary name and are
    renamed once all are there with their digests, so a listed step is a whole one. Older steps are deleted only after
    a newer one is complete, and moved aside first: a process that is killed in between leaves no half of a step.

    Args:
      directory: where steps stand; made if it is missing. One writer at a time.
      keep: how many of the newest steps to keep; None keeps all.
      keep_every: keep, beside these, every step that is a multiple of this.
      keep_best: keep, beside these, the best by a metric given to `save`; `METRIC[:min|max[:N]]`.
      every_steps: when `is_due` says that it is time to save; 0: never.
      frozen: False leaves out the leaves that are not trained, as `save` does.

    Raises:
      OSError: if the directory cannot be made or written to.
      ValueError: for policies that make no sense, and a path that cannot be written to.
    """

    def __init__(
        self,
        directory: PathLike,
        keep: int | None = 3,
        *,
        keep_every: int | None = None,
        keep_best: str | None = None,
        every_steps: Size = 0,
        frozen: bool = True,
    ):
        self._frozen = frozen
        self._every_steps = every_steps
        self._keep = Keep(keep, keep_every, None if keep_best is None else parse_best(keep_best))
        self.directory = local_path(directory)
        check_path(self.directory)
        with readable_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
        self._writer: Any = None
        self._lock: Lock | None = None
        self._needed: int | None = None

    def steps(self) -> list[int]:
        """List the complete steps, oldest first."""
        return [int(path.name) for path in step_paths(self.directory)]

    def latest(self) -> int | None:
        """Return the newest complete step, or None."""
        return max(self.steps(), default=None)

    def is_due(self, step: int) -> bool:
        """Tell whether it is time to save after a step."""
        return bool(self._every_steps) and step % self._every_steps == 0

    def save(
        self,
        step: Size,
        state: TrainState,
        extra: Any = None,
        *,
        config: Any = None,
        metrics: Mapping[str, Any] | None = None,
    ) -> float:
        """Start writing a step; return the seconds that this blocked.

        Waits for the save before it, if that is still being written, and raises what went wrong with it. Every process
        calls this.

        Layout:  as `save` of one checkpoint: each process writes what it owns, in logical shapes.
        Memory:  one host copy of what this process writes, until the step is complete.

        Args:
          extra: anything `json` writes, of this process (where it stands in the data, say).
          config: anything `json` writes; stands beside the arrays, to read.
          metrics: numbers by name, for `keep_best`; scalar arrays will do.

        Raises:
          OSError: if the disk is full or not writable; earlier checkpoints stand.
          ValueError: if the step is there already or is older than one that is, another run writes to the directory, or
            what goes beside the state is not plain JSON.
        """
        start, step = time.perf_counter(), int(step)
        self.wait()
        best = self._keep.best
        if best is not None and best.metric not in (metrics or {}):
            problem = f"step {step} is saved without the metric {best.metric!r}, so it is not among the best"
            warn(f"{problem}; its metrics are {', '.join(metrics or ()) or 'none'}")
        only_first(lambda: self._prepare(step))
        if self._writer is None:
            from jfsdp.checkpoint.disk.writer import Writer

            self._writer = Writer()
        path, on_commit = self.directory / str(step), self._prune_or_warn
        start_save(self._writer, path, state, extra, config, metrics, frozen=self._frozen, on_commit=on_commit)
        self._needed = bytes_of(state)
        return time.perf_counter() - start

    def _prepare(self, step: int) -> None:
        """Check the step, and become the only writer."""
        latest = self.latest()
        if self._lock is not None and not self.directory.is_dir():
            raise FileNotFoundError(errno.ENOENT, "was removed while a run saved to it", str(self.directory))
        if step in self.steps():
            raise ValueError(f"checkpoint {self.directory / str(step)}: exists already; nothing is overwritten")
        if latest is not None and step < latest:
            raise ValueError(f"checkpoint {self.directory}: step {step} is older than {latest}; move later steps away")
        self._become_writer()

    def remove_unfinished(self) -> None:
        """Remove the unfinished save of a writer that was killed, or whose disk was full: it takes space on the disk.

        Raises:
          ValueError: if another run writes to the directory.
        """
        if any(self.directory.glob(f"*{UNFINISHED}")):
            self._become_writer()

    def _become_writer(self) -> None:
        """Be the only one who writes here, and remove what a killed writer left half written."""
        if self._lock is None:
            what = f"checkpoints {self.directory}: are written by"
            with readable_errors(self.directory):
                self._lock = Lock(self.directory / _LOCK, what, "or save to another directory")
            for left in [*self.directory.glob(f"*{UNFINISHED}"), *self.directory.glob("*.orbax-checkpoint-tmp*")]:
                shutil.rmtree(left, ignore_errors=True)
            shutil.rmtree(self.directory / _DELETED, ignore_errors=True)

    def prune(self, *, dry_run: bool = False) -> list[int]:
        """Delete the steps that are not to be kept; return them. For one process, when nothing is being saved.

        Args:
          dry_run: only return them.

        Raises:
          ValueError: if another run writes to the directory, or no step has the metric that chooses the best; lists
            those there are.
        """
        best, found = self._keep.best, {name for step in self.steps() for name in self._metrics(step)}
        if best is not None and best.metric not in found:
            there = ", ".join(sorted(found)) or "none"
            raise ValueError(f"keep_best: no step has a metric {best.metric!r}; there are {there}")
        if dry_run:
            return self._surplus()
        self._become_writer()
        return self._prune()

    def _surplus(self) -> list[int]:
        metrics = {step: self._metrics(step) for step in self.steps()}
        return sorted(metrics.keys() - self._keep.kept(metrics))

    def _prune(self) -> list[int]:
        surplus, aside = self._surplus(), self.directory / _DELETED
        for step in surplus:
            aside.mkdir(exist_ok=True)
            os.rename(self.directory / str(step), aside / str(step))
        shutil.rmtree(aside, ignore_errors=True)
        return surplus

    def _prune_or_warn(self) -> None:
        """Do what `_prune` does, where nobody is to think that the newest step was not written."""
        try:
            self._prune()
        except OSError as error:
            warn(f"checkpoints {self.directory}: older steps cannot be deleted: {error}")

    def _metrics(self, step: int) -> dict[str, float]:
        if self._keep.best is None:
            return {}
        try:
            return read_manifest(self.directory / str(step))["metrics"] or {}
        except ValueError:  # damaged: it goes when it is no longer among the newest
            return {}

    def restore(
        self,
        like: TrainState,
        step: int | None = None,
        *,
        only: str | Sequence[str] | None = None,
        skip: str | Sequence[str] | None = None,
        one_replica: bool = False,
        fall_back: bool = False,
    ) -> tuple[TrainState, Any]:
        """Read a step (default the newest) into the layout of `like`; return it and this process's `extra`.

        Waits for a save of its own that is still being written, and raises what went wrong with it.

        Args:
          only, skip, one_replica: as in `restore` of one checkpoint.
          fall_back: where the step is damaged, warn and take the newest whole one before it.

        Raises:
          ValueError: if there is no such step (lists those there are), it is damaged, or of another model.
        """
        self.wait()
        steps = only_first(self.steps)
        if not steps:
            raise ValueError(f"checkpoint {self.directory}: holds no complete step yet")
        found = steps[-1] if step is None else step
        if found not in steps:
            there = ", ".join(map(str, steps))
            raise ValueError(f"checkpoint {self.directory}: has no step {found}; the complete steps are {there}")
        while True:
            try:
                state = restore(self.directory / str(found), like, only=only, skip=skip, one_replica=one_replica)
                break
            except DamagedError as error:
                earlier = [other for other in steps if other < found]
                if not fall_back or not earlier:
                    raise
                found = earlier[-1]
                warn(f"{error}. Falling back to step {found}")
        extras, index = self.extras(found), jax.process_index()
        return state, extras[index if index < len(extras) else 0]

    def extras(self, step: int) -> list[Any]:
        """Return what each process that saved a step gave as `extra`, in their order."""
        return read_manifest(self.directory / str(step))["extra"]

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with contextlib.suppress(*[Exception] * (kind is not None)):  # the first error is the one to be told
            self.close(alone=kind is not None)

    def wait(self) -> None:
        """Wait until the last save is complete; raises what went wrong with it. Every process calls this."""
        if self._writer is not None:
            with readable_errors(self.directory, self._needed):
                wait_for(self._writer)

    def num_bytes(self) -> int:
        """Return how many bytes of the save under way are on disk, of all processes; 0 where there is none."""
        return 0 if self._writer is None else self._writer.num_bytes()

    def close(self, *, alone: bool = False) -> None:
        """Wait for the last save and stop the writing threads. Every process calls this.

        Args:
          alone: wait for this process's part and ask no other: after an error that the others may not have.
        """
        try:
            if not alone:
                self.wait()
        finally:
            with contextlib.ExitStack() as stack:
                if self._lock is not None:
                    stack.callback(self._lock.release)
                if self._writer is not None:
                    stack.callback(self._writer.close)
                self._writer = self._lock = None
