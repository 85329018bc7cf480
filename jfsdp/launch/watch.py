"""Nothing hangs without a word: a thread that watches whether this process gets on, and whether the others live.

[Note: how processes end together] A process that fails leaves its error in the key-value store of JAX's coordination
service, which every process has joined, and all others read it there: they end within seconds, with that error as
theirs, and where what was asked cannot begin with that status too: no launcher, on whatever host, starts them again.
JAX by itself ends them after its heartbeats stop (100 s), or after the 300 s that a failing process waits for the
others at its exit, and without a word about the cause. A process that waits in a collective still sends heartbeats;
so each says what it is about to do and how long that may take (`Watch.at`), and the thread ends it when it takes
longer. A hung GPU is not repaired: the process ends, and its launcher starts all again.
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

USAGE, DAMAGED, STUCK, ENDED_BY_OTHERS = 2, 4, 75, 76  # exit statuses; restarting does not mend USAGE
PATIENT = 3  # how much longer what comes once may take: the first step, restoring, saving
_PERIOD_S = 1.0
_OWN_WORD_S = 2.0  # for a process that has met the same error to say so itself
ANSWER_S = 60.0  # how long a file system may take to say how much is written
_LINGER_S = 5.0  # of process 0 after it failed: the store, which the others read, ends with it
_KEY = "jfsdp/failed"


class Watch:
    """Says when this process, or another of the run, does not get on. A context manager; start it after JAX.

    Args:
      limit_s: seconds that a step, a batch or a part of an evaluation may take; 0: any number.
      place: what `jfsdp.launch.initialize` returned; None: there are no other processes.

    Attributes:
      show: called every second with what is under way, and for how many seconds it has been.
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
        self._places: list[_Place] = []  # what this process is about, innermost last
        self._done = threading.Event()

    def __enter__(self) -> Watch:
        # Several threads: the store does not answer where process 0 is stopped, nor a terminal that is stopped.
        watches = [self._watch_self] * bool(self.limit_s) + [self._watch_others] * (self.count > 1) + [self._show_waits]
        for watch in watches:
            threading.Thread(target=watch, name="jfsdp-watch", daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self._done.set()

    @contextlib.contextmanager
    def at(self, place: str, times: float = 1, progress: Callable[[], Any] | None = None) -> Iterator[None]:
        """Say what begins here, and that it may take `times` the limit. What is inside it counts for itself.

        Args:
          progress: called, in a thread of its own, at the begin and when the time is over, which counts anew where this
            returns another value than the last time.
        """
        here = _Place(place, times * self.limit_s, time.monotonic(), progress)
        self._places.append(here)
        try:
            yield
        finally:
            self._places.remove(here)
            if self._places:
                self._places[-1].begin = time.monotonic()

    def _watch_self(self) -> None:
        while not self._done.wait(_PERIOD_S):
            for place in self._places[-1:]:
                if place.progress and place.seen is None:
                    place.seen = place.ask()
                if place.is_told or not place.is_over() or place.has_got_on():
                    continue
                if self._places[-1:] == [place] and place.is_over():  # else it has ended while it was asked
                    place.is_told = True
                    self._say_stuck(place)

    def _show_waits(self) -> None:
        """Run in a separate thread, which may wait for a terminal or a disk."""
        while not self._done.wait(_PERIOD_S):
            for place in self._places[-1:]:
                with contextlib.suppress(Exception):
                    self.show(place.name, time.monotonic() - place.begin)

    def _watch_others(self) -> None:
        while not self._done.wait(_PERIOD_S):
            told = None
            with contextlib.suppress(Exception):  # nobody has told anything
                told = _Told(*json.loads(self.store.key_value_try_get(_KEY)))
            if told:
                if self._done.wait(_OWN_WORD_S + _LINGER_S * told.text.startswith(self._name)):
                    return  # this process has come to its end meanwhile
                say(f"error: another process failed, so this one ends: {told.text}")
                end_process(self.process, told.status_of_others)

    def _say_stuck(self, place: _Place) -> None:
        message = f"no progress: {place.name} takes more than {place.limit_s:g} s (--timeout {self.limit_s:g})"
        say(f"error: {self._name} {message}; all threads:")
        with contextlib.suppress(Exception):
            faulthandler.dump_traceback(file=sys.__stderr__ or sys.stderr, all_threads=True)
        say(f"error: {self._name} {message}; the stacks of all threads stand above")  # last: of long logs it is the end
        tell_and_end(message, STUCK)
        if RESTART in os.environ:  # else one that is alone goes on: it may be in a debugger
            end_process(self.process, STUCK)


@dataclasses.dataclass(eq=False)
class _Place:
    """What is under way, since when on this process's clock, and how many seconds it may take."""

    name: str
    limit_s: float
    begin: float
    progress: Callable[[], Any] | None = None
    seen: Any = None
    is_told: bool = False

    def is_over(self) -> bool:
        return time.monotonic() > self.begin + self.limit_s

    def ask(self) -> Any:
        """Ask for progress; None where that cannot be asked, or a file system does not answer."""
        answers: list[Any] = []
        if (progress := self.progress) is not None:
            thread = threading.Thread(target=lambda: answers.append(progress()), daemon=True)
            thread.start()
            thread.join(ANSWER_S)
        return answers[0] if answers else None

    def has_got_on(self) -> bool:
        """Ask for progress, and begin anew with it."""
        found = self.ask()
        if found is None or found == self.seen:
            return False
        self.seen, self.begin = found, time.monotonic()
        return True


class _Told(NamedTuple):
    """What the first process to fail leaves for the others, as JSON: its exit status, and its error with its name."""

    status: int
    text: str

    @property
    def status_of_others(self) -> int:
        return USAGE if self.status == USAGE else ENDED_BY_OTHERS


def tell_and_end(message: str, status: int) -> None:
    """Tell the other processes of the run why this one ends, and end it at once: at its exit JAX would wait for them.

    Where another has told before, what failed here is what followed from it: that is said last, and the exit status is
    `ENDED_BY_OTHERS`, or `USAGE` where that was the first's. Does nothing in a run of one process, or where `jax` was
    not imported.
    """
    if "jax" not in sys.modules:
        return
    from jfsdp.compat import coordination_store

    store, process, count = coordination_store()
    own = _Told(status, f"{_name(process, count)} {message}")
    first: list[_Told] = []

    def tell() -> None:
        with contextlib.suppress(Exception):  # another was first, or the store has gone: then nobody reads it
            store.key_value_set(_KEY, json.dumps(own))
        with contextlib.suppress(Exception):
            first.append(_Told(*json.loads(store.key_value_try_get(_KEY))))

    if count > 1:
        teller = threading.Thread(target=tell, daemon=True)  # the store may not answer
        teller.start()
        teller.join(_LINGER_S)
        if first and first[0] != own:
            say(f"error: another process failed before: {first[0].text}")
            status = first[0].status_of_others
        end_process(process, status)


def _name(process: int, count: int) -> str:
    return f"process {process} of {count}:"


def heard(numbers: Iterable[signal.Signals]) -> list[signal.Signals]:
    """Return the signals that a process may listen to: not a SIGHUP that is ignored, as it is under nohup."""
    return [number for number in numbers if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN]


def say(text: str) -> None:
    """Print to standard error. A disk that is full, and takes no more of a log, must not keep a process from ending."""
    with contextlib.suppress(OSError, ValueError):
        print(text, file=sys.stderr, flush=True)


def end_process(process: int, status: int) -> NoReturn:
    """End this process at once, its last lines printed."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    time.sleep(_LINGER_S if process == 0 else 0)
    os._exit(status)
