"""The checkpoints of a run: asynchronous saves by step, and deletion of those that the run does not keep."""

from __future__ import annotations

import contextlib
import errno
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jfsdp.arguments import PathLike, Size, checked
from jfsdp.checkpoint.disk.files import DamagedError, read_manifest, step_paths
from jfsdp.checkpoint.disk.paths import absolute_path
from jfsdp.checkpoint.disk.processes import only_first
from jfsdp.checkpoint.policy import Keep, parse_best
from jfsdp.checkpoint.store import place_of, restore, start_save, wait_for
from jfsdp.compat import warn
from jfsdp.train.state import TrainState


@checked
class Checkpointer:
    """Checkpoints in `directory/<step>`, written in the background.

    A save copies this process's pieces to the host and returns. The files are written under a temporary name and
    renamed when all are complete with their digests, so a listed step is complete. Older steps are deleted only after
    a newer one is complete. They are moved aside first, so a killed process leaves no incomplete step.

    Args:
      directory: contains the steps; created if it is missing. It has one writer at a time.
      keep: number of newest steps to keep; None: all.
      keep_every: in addition, keep every step that is a multiple of this.
      keep_best: in addition, keep the best steps by a metric passed to `save`; `METRIC[:min|max[:N]]`.
      every_steps: interval of `is_due`, in steps; 0: never.
      frozen: False omits leaves that are not trained, as in `save`.

    Raises:
      OSError: if the directory cannot be created or written to.
      ValueError: if a policy is invalid, or the path cannot be written to.
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
        self.directory = absolute_path(directory)
        self._place = place_of(self.directory)
        self._place.prepare(self.directory)
        self._writer: Any = None
        self._lock: Any = None

    def steps(self) -> list[int]:
        """List the complete steps, oldest first."""
        return [int(path.name) for path in step_paths(self.directory)]

    def latest(self) -> int | None:
        """Return the newest complete step, or None."""
        return max(self.steps(), default=None)

    def is_due(self, step: int) -> bool:
        """Return whether to save after a step."""
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
        """Start to write a step; return the seconds for which this call blocked.

        Waits for the previous save, and raises its errors. Every process must call this.

        Layout:  as in `save` of one checkpoint: each process writes its own pieces, in logical shapes.
        Memory:  one host copy of this process's pieces, until the step is complete.

        Args:
          extra: JSON data of this process, such as its position in the data.
          config: JSON data saved for human readers.
          metrics: numbers or scalar arrays by name, for `keep_best`.

        Raises:
          OSError: if the disk is full or not writable; earlier checkpoints are kept.
          ValueError: if the step exists or is older than an existing one, another run writes to the directory, or
            `extra`, `config` or `metrics` is not plain JSON.
        """
        start, step = time.perf_counter(), int(step)
        self.wait()
        best = self._keep.best
        if best is not None and best.metric not in (metrics or {}):
            problem = f"step {step} is saved without the metric {best.metric!r}, so it is not among the best"
            warn(f"{problem}; its metrics are {', '.join(metrics or ()) or 'none'}")
        only_first(lambda: self._prepare(step))
        if self._writer is None:
            self._writer = self._place.make_writer(self._lock)
        given, path = {"frozen": self._frozen, "on_commit": self._prune_or_warn}, self.directory / str(step)
        start_save(self._writer, path, state, extra, config, metrics, **given)
        return time.perf_counter() - start

    def _prepare(self, step: int) -> None:
        """Check the step, and lock the directory."""
        steps = self.steps()
        if self._lock is not None and not self.directory.exists():
            raise FileNotFoundError(errno.ENOENT, "was removed while a run saved to it", str(self.directory))
        if step in steps:
            raise ValueError(
                f"checkpoint {self.directory / str(step)}: already exists and is not overwritten; save another step"
            )
        if steps and step < steps[-1]:
            raise ValueError(
                f"checkpoint {self.directory}: step {step} is older than {steps[-1]}; move later ones away"
            )
        self._become_writer()

    def remove_unfinished(self) -> None:
        """Remove the unfinished save of a writer that was killed or ran out of disk space. Without one, touch nothing.

        Raises:
          ValueError: if another run writes to the directory.
        """
        if self._place.has_unfinished(self.directory):
            self._become_writer()

    def _become_writer(self) -> None:
        """Lock the directory, and remove the incomplete files of a killed writer."""
        if self._lock is None:
            self._lock = self._place.lock(self.directory)

    def prune(self, *, dry_run: bool = False) -> list[int]:
        """Delete the steps that the policy does not keep; return them. For one process, while nothing is being saved.

        Args:
          dry_run: return the steps without deleting them.

        Raises:
          ValueError: if another run writes to the directory, or no step has the metric of `keep_best`; lists the
            metrics found.
        """
        best, found = self._keep.best, {name for step in self.steps() for name in self._metrics(step)}
        if best is not None and best.metric not in found:
            names = ", ".join(sorted(found)) or "none"
            raise ValueError(f"keep_best: no step has the metric {best.metric!r}; the metrics are: {names}")
        if dry_run:
            return self._surplus()
        self._become_writer()
        return self._prune()

    def _surplus(self) -> list[int]:
        metrics = {step: self._metrics(step) for step in self.steps()}
        return sorted(metrics.keys() - self._keep.kept(metrics))

    def _prune(self) -> list[int]:
        surplus = self._surplus()
        self._place.remove(self.directory, surplus)
        return surplus

    def _prune_or_warn(self) -> None:
        """Prune; warn on errors, which do not concern the newest step."""
        try:
            self._prune()
        except OSError as error:
            warn(f"checkpoints {self.directory}: older steps cannot be deleted: {error}")

    def _metrics(self, step: int) -> dict[str, float]:
        if self._keep.best is None:
            return {}
        try:
            return read_manifest(self.directory / str(step))["metrics"] or {}
        except ValueError:  # damaged: deleted when it is no longer among the newest
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
        """Read a step (default: the newest) into the layout of `like`; return the state and this process's `extra`.

        Waits for the last save of this object, and raises its errors.

        Args:
          only, skip, one_replica: as in `restore` of one checkpoint.
          fall_back: if the step is damaged, warn and read the newest intact step before it.

        Raises:
          ValueError: if the step does not exist (lists the complete steps), is damaged, or is of another model.
        """
        self.wait()
        steps = only_first(self.steps)
        if not steps:
            raise ValueError(f"checkpoint {self.directory}: has no complete step; save one first")
        found = steps[-1] if step is None else step
        if found not in steps:
            complete = ", ".join(map(str, steps))
            raise ValueError(f"checkpoint {self.directory}: has no step {found}; the complete steps are {complete}")
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
        """Return the `extra` of each process that saved a step, in process order."""
        return read_manifest(self.directory / str(step))["extra"]

    def __enter__(self) -> Checkpointer:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        with contextlib.suppress(*[Exception] * (kind is not None)):  # does not hide the first error
            self.close(alone=kind is not None)

    def wait(self) -> None:
        """Wait until the last save is complete; raise its errors. Every process must call this."""
        if self._writer is not None:
            wait_for(self._writer)

    def num_bytes(self) -> int:
        """Return the bytes on disk, of all processes, of the save in progress; 0 if there is none."""
        return 0 if self._writer is None else self._writer.num_bytes()

    def close(self, *, alone: bool = False) -> None:
        """Wait for the last save and stop the writing threads. Every process must call this, except with `alone`.

        Args:
          alone: wait only for this process's part, after an error that other processes may not have.
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
