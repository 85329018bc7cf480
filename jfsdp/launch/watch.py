"""Watchdog: ends this process, with a message, if it makes no progress or another process of the run failed.

[Note: how processes end together] A process that fails writes its error to the key-value store of JAX's coordination
service. All others read it and end within seconds, with that error in their messages. If the error is one of usage,
they end with status `USAGE` too, so that no launcher on any host restarts them. JAX would end them only after
missed heartbeats (100 s), or after the 300 s that a failing process waits for the others at its exit, and would not
report the cause. A process that waits in a collective still sends heartbeats. So each process declares its next
operation and how long that may take (`Watch.at`), and a thread ends the process if it takes longer. A hung GPU is not
repaired; the launcher restarts all processes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import faulthandler
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, NoReturn

from jfsdp.launch.environment import RESTART, Place

USAGE, DAMAGED, STUCK, ENDED_BY_OTHERS = 2, 4, 75, 76  # exit statuses; USAGE is not restarted
PATIENT = 3  # multiple of the limit for operations that happen once: the first step, restoring, saving
_PERIOD_S = 1.0
_REPORT_S = 2.0  # time for a process with the same error to report it itself
ANSWER_S = 60.0  # time for a file system to report the bytes written
_LINGER_S = 5.0  # process 0 stays after its failure: the store, which the others read, ends with it
_KEY = "jfsdp/failed"


class Watch:
    """Watchdog of this process and the other processes of the run. A context manager; enter it after JAX starts.

    Args:
      limit_s: seconds that a step, a batch or a part of an evaluation may take; 0: no limit.
      place: the result of `jfsdp.launch.initialize`; None: a run of one process.

    Attributes:
      show: called every second with the current operation and the seconds since it began.
    """

    def __init__(self, limit_s: float, place: Place | None = None):
        self.limit_s = limit_s
        self.show: Callable[[str, float], None] = lambda what, seconds: None
        self.store: Any = None
        self.process, self.count = 0, 1
        if place is not None:
            from jfsdp.compat import coordination_store

            self.store, self.process, self.count = coordination_store()
        self._name = _name(self.process, self.count)
        self._operations: list[_Operation] = []  # current operations, innermost last
        self._done = threading.Event()

    def __enter__(self) -> Watch:
        # Separate threads, because the store blocks while process 0 is stopped, and a stopped terminal blocks too.
        watches = [self._watch_self] * bool(self.limit_s) + [self._watch_others] * (self.count > 1) + [self._show_waits]
        for watch in watches:
            threading.Thread(target=watch, name="jfsdp-watch", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()

    @contextlib.contextmanager
    def at(self, name: str, times: float = 1, progress: Callable[[], Any] | None = None) -> Iterator[None]:
        """Declare an operation that may take `times` the limit. Nested operations have separate limits.

        Args:
          progress: called in a separate thread at the beginning and when the time is over. If it returns another value
            than before, the time starts again.
        """
        operation = _Operation(name, times * self.limit_s, time.monotonic(), progress)
        self._operations.append(operation)
        try:
            yield
        finally:
            self._operations.remove(operation)
            if self._operations:
                self._operations[-1].begin = time.monotonic()

    def _watch_self(self) -> None:
        while not self._done.wait(_PERIOD_S):
            for operation in self._operations[-1:]:
                if operation.progress and operation.seen is None:
                    operation.seen = operation.query()
                if operation.is_reported or not operation.is_over() or operation.has_progressed():
                    continue
                if self._operations[-1:] == [operation] and operation.is_over():  # it may have ended during the query
                    operation.is_reported = True
                    self._report_stuck(operation)

    def _show_waits(self) -> None:
        """Call `show` in a separate thread, which may block on a terminal or a disk."""
        while not self._done.wait(_PERIOD_S):
            for operation in self._operations[-1:]:
                with contextlib.suppress(Exception):
                    self.show(operation.name, time.monotonic() - operation.begin)

    def _watch_others(self) -> None:
        while not self._done.wait(_PERIOD_S):
            failure = None
            with contextlib.suppress(Exception):  # no process has failed
                failure = _Failure(*json.loads(self.store.key_value_try_get(_KEY)))
            if failure:
                if self._done.wait(_REPORT_S + _LINGER_S * failure.text.startswith(self._name)):
                    return  # this process has finished in the meantime
                say(f"error: another process failed, so this one ends: {failure.text}")
                end_process(self.process, failure.status_of_others)

    def _report_stuck(self, operation: _Operation) -> None:
        message = f"no progress: {operation.name} takes more than {operation.limit_s:g} s (--timeout {self.limit_s:g})"
        say(f"error: {self._name} {message}; all threads:")
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        say(f"error: {self._name} {message}; stacks of all threads are above")  # again, at the end of a long log
        tell_and_end(message, STUCK)
        if RESTART in os.environ:  # a single process without launcher continues: it may be in a debugger
            end_process(self.process, STUCK)


@dataclasses.dataclass(eq=False)
class _Operation:
    """A current operation, its beginning on this process's clock, and its limit in seconds."""

    name: str
    limit_s: float
    begin: float
    progress: Callable[[], Any] | None = None
    seen: Any = None
    is_reported: bool = False

    def is_over(self) -> bool:
        return time.monotonic() > self.begin + self.limit_s

    def query(self) -> Any:
        """Return the progress; None if it is unknown or the file system does not answer."""
        answers: list[Any] = []
        if (progress := self.progress) is not None:
            thread = threading.Thread(target=lambda: answers.append(progress()), daemon=True)
            thread.start()
            thread.join(ANSWER_S)
        return answers[0] if answers else None

    def has_progressed(self) -> bool:
        """Query the progress, and restart the time if there is any."""
        found = self.query()
        if found is None or found == self.seen:
            return False
        self.seen, self.begin = found, time.monotonic()
        return True


class _Failure(NamedTuple):
    """The first failure of the run, kept in the store as JSON: exit status, and error with the process's name."""

    status: int
    text: str

    @property
    def status_of_others(self) -> int:
        return USAGE if self.status == USAGE else ENDED_BY_OTHERS


def tell_and_end(message: str, status: int, explain: Callable[[], Any] | None = None) -> None:
    """Report an error to the other processes of the run and end this one at once; at its exit JAX would wait for them.

    If another process failed before, its error is the cause of this one. Then it is printed last, and the exit status
    is `ENDED_BY_OTHERS`, or `USAGE` if the first failure's was. Only calls `explain` in a run of one process. Does
    nothing if `jax` is not imported.

    Args:
      explain: called in process 0 once the others can read the error, so that they do not wait. Its errors are printed.
    """
    if "jax" not in sys.modules:
        return
    from jfsdp.compat import coordination_store

    store, process, count = coordination_store()
    own = _Failure(status, f"{_name(process, count)} {message}")
    first: list[_Failure] = []

    def report() -> None:
        with contextlib.suppress(Exception):  # another process was first, or the store has ended
            store.key_value_set(_KEY, json.dumps(own))
        with contextlib.suppress(Exception):
            first.append(_Failure(*json.loads(store.key_value_try_get(_KEY))))

    if count > 1:
        reporter = threading.Thread(target=report, daemon=True)  # the store may not answer
        reporter.start()
        reporter.join(_LINGER_S)
        if first and first[0] != own:
            say(f"error: another process failed before: {first[0].text}")
            status = first[0].status_of_others
    if explain is not None and process == 0:
        try:
            explain()
        except Exception as error:
            say(f"note: the error is not explained further: {type(error).__name__}: {error}")
    if count > 1:
        end_process(process, status)


def _name(process: int, count: int) -> str:
    return f"process {process} of {count}:"


def not_ignored(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that a process may handle: not an ignored SIGHUP, as under nohup."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def say(text: str) -> None:
    """Print to standard error. A full disk, which takes no more of a log, must not keep a process from ending."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def end_process(process: int, status: int) -> NoReturn:
    """Flush the output and end this process; process 0 first waits for others to read the store."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    time.sleep(_LINGER_S if process == 0 else 0)
    os._exit(status)
