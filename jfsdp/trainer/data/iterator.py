"""An iterator over batches whose place can be saved and restored, for every kind of data."""

from __future__ import annotations

import json
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from jfsdp.extras import load

_STATE_VERSION = 2
Batch = dict[str, np.ndarray]


class DataIterator(Iterator[Batch]):
    """Batches of arrays by name, and where in the data they are. Moves no data to devices.

    What the arrays are: [Note: batches of tokens].

    Args:
      dataset: of grain; yields batches, and its iterator has `get_state`, `set_state` and `close`.
      stream: all that order and content of the batches depend on; a state is restored into the same stream only.
      join: `f(positions) -> position` where a process's state knows of its own rows only; None: they are all equal.
      lanes: `f(num_lanes) -> (dataset, stream)`, the same in another number of lanes; None: it has none.
    """

    def __init__(
        self,
        dataset: Any,
        stream: dict[str, Any],
        join: Callable[[list[Any]], Any] | None = None,
        lanes: Callable[[int], tuple[Any, dict[str, Any]]] | None = None,
    ):
        self._open = [iter(dataset)]
        self._stream, self._join, self._lanes = stream, join, lanes
        # Not left to grain's __del__, which at interpreter exit prints an ignored TypeError (0.2.18).
        self._close = weakref.finalize(self, _close_all, self._open)

    def __next__(self) -> Batch:
        return next(self._iterator)

    def close(self):
        """Stop the thread that reads ahead; garbage collection and interpreter exit do the same."""
        self._close()

    @property
    def _iterator(self) -> Any:
        if not self._open:
            raise ValueError("this data iterator was closed; make a new one and restore its state")
        return self._open[0]

    def get_state(self) -> dict[str, Any]:
        """Return what `set_state` needs to continue after the last batch taken; plain JSON, about 1 kB."""
        state = {"version": _STATE_VERSION, "stream": self._stream, "position": self._iterator.get_state()}
        return json.loads(json.dumps(state))

    def set_state(self, *states: dict[str, Any]):
        """Continue where `get_state` was called, bit for bit, in this or another process, or another number of them.

        Cost: for tokens, reads and tokenizes again the documents of one window of `shuffle_rows` rows.

        Args:
          states: of every process, after the same batch; of one alone, where there was one.

        Raises:
          ValueError: if a state belongs to another stream (data, seed, seq_len, global batch..); names what differs.
        """
        num_lanes = states[0]["stream"].get("num_lanes")
        if self._lanes is not None and num_lanes != self._stream["num_lanes"]:
            dataset, self._stream = self._lanes(num_lanes)  # a run goes on with the lanes that it began with
            _close_all(self._open)
            self._open.append(iter(dataset))
        for state in states:
            self._check(state)
        positions = [_tuples(state["position"]) for state in states]
        self._iterator.set_state(self._join(positions) if self._join else positions[0])

    def _check(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the checkpoint's place in the data has version {state.get('version')}, and this jfsdp reads "
                f"{_STATE_VERSION}; --resume STEP --restart-data begins them anew"
            )
        theirs, ours = state["stream"], self._stream
        differing = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
        if differing:
            pairs = ", ".join(f"{n} was {theirs.get(n)!r}, is {ours.get(n)!r}" for n in differing)
            raise ValueError(
                f"the checkpoint's place is in other data: {pairs}; resume with the same settings, or begin the data "
                "anew with --resume STEP --restart-data"
            )


def _close_all(iterators: list[Any]):
    while iterators:
        iterators.pop().close()


def read_in_caller() -> Any:
    """Return options for `to_iter_dataset`: no thread pool.

    One thread reads faster than a host trains; and with pools (grain 0.2.18) two test runs in which iterators were
    garbage collected hung, a thread waiting for a lock in `submit`.
    """
    grain = load("grain")

    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def experimental() -> Any:
    """Return what grain calls experimental. Importing it imports JAX."""
    from jfsdp.compat import grain_experimental

    return grain_experimental()


def prefetch(batches: Any, prefetch_batches: int) -> Any:
    """Read so many batches ahead by one thread; 0 reads in the caller."""
    return experimental().ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch_batches)


def _tuples(state: Any) -> Any:
    # JSON has no tuples, and grain (0.2.18, ConcatThenSplit) compares its "no remainder" slice with the tuple (-1, -1):
    # given the list [-1, -1], it drops a document. To go when grain accepts its own state after JSON.
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list) else state
