"""Stopping on request: SIGINT, SIGTERM, SIGUSR1 and SIGHUP finish the step, save, and leave."""

from __future__ import annotations

import os
import signal
import stat
import time
from types import FrameType
from typing import Any

from jfsdp.launch.hosts import gather_json
from jfsdp.launch.watch import heard

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # USR1: Slurm's --signal; HUP: no terminal

_SAME_S = 1.0  # a manager of jobs and a launcher may both send the same signal: that is one


class StopSignal:
    """Remembers the first of `SIGNALS`; the second one acts as if nobody listened. A context manager.

    A SIGHUP that is ignored, as under nohup, stays so.

    Several processes must stop at the same step, or some would wait for others in a collective for ever. Whether any
    was asked is therefore gathered, and only at the steps that the loop names: at most `log_every` steps late.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._remember) for number in heard(SIGNALS)}
        return self

    def __exit__(self, *_: Any) -> None:
        self._restore()

    def _remember(self, number: int, _: FrameType | None) -> None:
        if self.name is None:
            self.name, self._since = signal.Signals(number).name, time.monotonic()
            if number == signal.SIGHUP:
                leave_terminal()
        elif time.monotonic() - self._since > _SAME_S:
            self._restore()
            signal.raise_signal(number)

    def _restore(self) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        self._before = {}

    def is_agreed(self, *, may_gather: bool) -> bool:
        """Tell whether to stop now; the same in every process.

        Cost: with several processes, what `gather_json` costs where `may_gather` says so.
        """
        import jax

        if jax.process_count() == 1:
            return self.name is not None
        if not may_gather:
            return False
        is_asked = any(gather_json(self.name is not None))
        self.name = self.name or ("another process" if is_asked else None)
        return is_asked


def leave_terminal() -> None:
    """Write to no terminal any more: where it is gone, a line would end the run before it has saved."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)
