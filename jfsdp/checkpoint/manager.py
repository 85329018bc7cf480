"""The checkpoints of a run: asynchronous saves by step, the newest kept, each complete or not listed."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.store import check_space, read_manifest, readable_errors, restore, save_args
from jfsdp.train.state import TrainState
from jfsdp.train.storage import by_leaf

_DELETED = "to-delete"


class Checkpointer:
    """Checkpoints in `directory/<step>`, written in the background.

    A save copies this process's shards to host memory and returns; the files appear under a temporary name and are
    renamed once complete, so a listed step is a whole one. Older steps are deleted only after a newer one is
    complete, and moved aside first: a process that is killed in between leaves no half of a step. A state in flat
    storage is copied leaf by leaf on the devices first.

    Args:
      directory: where steps stand; made if it is missing.
      keep: how many of the newest steps to keep; None keeps all.

    Raises:
      OSError: if the directory cannot be made or written to.
    """

    def __init__(self, directory: Any, keep: int | None = 3):
        import orbax.checkpoint as ocp

        if keep is not None and keep < 1:
            raise ValueError(f"keep={keep} must be at least 1, or None to keep all checkpoints")
        self.directory = Path(directory).absolute()
        with readable_errors(self.directory):
            self.directory.mkdir(parents=True, exist_ok=True)
            options = ocp.CheckpointManagerOptions(max_to_keep=keep, todelete_subdir=_DELETED)
            self._is_writer = False
            self._manager = ocp.CheckpointManager(self.directory, options=options)

    def steps(self) -> list[int]:
        """List the complete steps, oldest first."""
        import orbax.checkpoint as ocp

        return sorted(ocp.utils.checkpoint_steps(self.directory))

    def latest(self) -> int | None:
        """Return the newest complete step, or None."""
        return max(self.steps(), default=None)

    def save(self, step: int, state: TrainState, extra: Any = None) -> float:
        """Start writing a step; return the seconds that this blocked.

        Waits for the save before it, if that is still being written, and raises what went wrong with it.

        Args:
          extra: anything `json` writes, of this process (where it stands in the data, say).

        Raises:
          OSError: if the disk is full or not writable; earlier checkpoints stand.
          ValueError: if the step is there already or is older than one that is, or `extra` is not plain JSON.
        """
        start = time.perf_counter()
        state = by_leaf(state)
        args = save_args(state, _gather_json(extra))
        self.wait()
        self._check_step(step)
        check_space(self.directory, state)
        with readable_errors(self.directory / str(step)):
            self._remove_leftovers()
            self._manager.save(step, args=args, force=True)
        return time.perf_counter() - start

    def _check_step(self, step: int) -> None:
        latest = self.latest()
        if step in self.steps():
            raise ValueError(f"checkpoint {self.directory / str(step)}: exists already; nothing is overwritten")
        if step < 0 or (latest is not None and step < latest):
            raise ValueError(
                f"checkpoint {self.directory / str(step)}: steps must grow, and {latest} is there; move later "
                "steps away, or save to another directory"
            )

    def _remove_leftovers(self) -> None:
        """Remove what a killed writer left half written. Only a writer may: a reader may be looking at a live run."""
        if not self._is_writer and jax.process_index() == 0:
            for path in [*self.directory.glob("*.orbax-checkpoint-tmp*"), self.directory / _DELETED]:
                shutil.rmtree(path, ignore_errors=True)
        self._is_writer = True

    def restore(self, like: TrainState, step: int | None = None) -> tuple[TrainState, Any]:
        """Read a step (default the newest) into the layout of `like`; return it and this process's `extra`.

        Raises:
          ValueError: if there is no such step (lists those there are), or it is of another model.
        """
        step = self.latest() if step is None else step
        if step is None or step not in self.steps():
            there = ", ".join(map(str, self.steps())) or "none"
            raise ValueError(f"checkpoint {self.directory}: has no step {step}; the complete steps are {there}")
        path = self.directory / str(step)
        extras = read_manifest(path)["extra"]
        index = jax.process_index()
        return restore(path, like), extras[index if index < len(extras) else 0]

    def wait(self) -> None:
        """Wait until the last save is complete; raises what went wrong with it."""
        with readable_errors(self.directory):
            self._manager.wait_until_finished()
        if self._is_writer and jax.process_index() == 0:
            shutil.rmtree(self.directory / _DELETED, ignore_errors=True)

    def close(self) -> None:
        """Wait for the last save and stop the writing threads."""
        self.wait()
        self._manager.close()


def _gather_json(extra: Any) -> list[Any]:
    """Collect every process's extra, in the order of the processes, on all of them."""
    if jax.process_count() == 1:
        return [extra]
    from jax.experimental import multihost_utils

    data = np.frombuffer(json.dumps(extra).encode(), np.uint8)
    length = int(np.max(multihost_utils.process_allgather(np.asarray(data.size))))
    rows = multihost_utils.process_allgather(np.pad(data, (0, length - data.size), constant_values=ord(" ")))
    return [json.loads(bytes(row).decode()) for row in rows]
