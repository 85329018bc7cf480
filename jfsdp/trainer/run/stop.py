"""Stop signals: after SIGINT, SIGTERM, SIGUSR1 or SIGHUP a run finishes its step, saves and exits."""

from __future__ import annotations

import os
import signal
import stat
import time
from types import FrameType
from typing import Any

from jfsdp.launch.hosts import gather_json
from jfsdp.launch.watch import not_ignored

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)  # USR1: Slurm's --signal; HUP: no terminal

_SAME_S = 1.0  # a job manager and a launcher may both send the signal, which counts once


class StopSignal:
    """Context manager that records the first of `SIGNALS`. The second signal has its usual effect.

    A SIGHUP that is ignored, as under nohup, remains ignored.

    All processes must stop at the same step; otherwise a collective would wait forever. They gather their signals only
    at the steps chosen by the loop, so a stop is at most `log_every` steps late.
    """

    def __init__(self) -> None:
        self.name: str | None = None
        self._since = 0.0
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignal:
        self._before = {number: signal.signal(number, self._remember) for number in not_ignored(SIGNALS)}
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
        """Return whether to stop now; equal in all processes.

        Cost: with several processes and `may_gather`, one `gather_json`.
        """
        import jax

        if jax.process_count() == 1:
            return self.name is not None
        if not may_gather:
            return False
        is_requested = any(gather_json(self.name is not None))
        self.name = self.name or ("another process" if is_requested else None)
        return is_requested


def leave_terminal() -> None:
    """Redirect output from a closed terminal to /dev/null, because printing would fail before the run has saved."""
    for stream in (1, 2):
        if stat.S_ISCHR(os.fstat(stream).st_mode):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, stream)
            os.close(nowhere)
