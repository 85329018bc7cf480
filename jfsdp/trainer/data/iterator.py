"""An iterator over batches whose position can be saved and restored, for every kind of data."""

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
    """Iterator over batches, dicts of arrays, with a saved position. Moves no data to devices.

    [Note: batches of tokens] describes the arrays.

    Args:
      dataset: grain dataset of batches; its iterator has `get_state`, `set_state` and `close`.
      stream: all settings that decide the order and content of the batches. A state is restored only into an equal
        stream.
      join: `f(positions) -> position`, if the state of a process covers only its rows; None: all states are equal.
      lanes: `f(num_lanes) -> (dataset, stream)`, the same data in another number of lanes; None: no lanes.
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
        """Stop the prefetch thread. Garbage collection and interpreter exit also stop it."""
        self._close()

    @property
    def _iterator(self) -> Any:
        if not self._open:
            raise ValueError("this data iterator was closed; make a new one and restore its state")
        return self._open[0]

    def get_state(self) -> dict[str, Any]:
        """Return the position after the last batch, for `set_state`, as JSON of about 1 kB."""
        state = {"version": _STATE_VERSION, "stream": self._stream, "position": self._iterator.get_state()}
        return json.loads(json.dumps(state))

    def set_state(self, *states: dict[str, Any]):
        """Continue from a saved position, bit for bit, with any number of processes.

        Cost: for tokens, reads and tokenizes the documents of one window of `shuffle_rows` rows again.

        Args:
          states: the states of all processes after the same batch.

        Raises:
          ValueError: if a state belongs to another stream (data, seed, seq_len, global batch, ..); names the
            differences.
        """
        num_lanes = states[0]["stream"].get("num_lanes")
        if self._lanes is not None and num_lanes != self._stream["num_lanes"]:
            dataset, self._stream = self._lanes(num_lanes)  # a run keeps its number of lanes
            _close_all(self._open)
            self._open.append(iter(dataset))
        for state in states:
            self._check(state)
        positions = [_tuples(state["position"]) for state in states]
        self._iterator.set_state(self._join(positions) if self._join else positions[0])

    def _check(self, state: dict[str, Any]) -> None:
        if state.get("version") != _STATE_VERSION:
            raise ValueError(
                f"the checkpoint's position in the data has version {state.get('version')}, but this jfsdp reads "
                f"{_STATE_VERSION}; --resume STEP --restart-data restarts the data"
            )
        theirs, ours = state["stream"], self._stream
        differing = [name for name in ours | theirs if theirs.get(name) != ours.get(name)]
        if differing:
            pairs = ", ".join(f"{n} was {theirs.get(n)!r}, is {ours.get(n)!r}" for n in differing)
            raise ValueError(
                f"the checkpoint's position is in other data: {pairs}; resume with the same settings, or restart the "
                "data with --resume STEP --restart-data"
            )


def _close_all(iterators: list[Any]):
    while iterators:
        iterators.pop().close()


def read_in_caller() -> Any:
    """Return options for `to_iter_dataset` without a thread pool.

    One thread reads faster than a host trains. With pools (grain 0.2.18), two test runs hung when iterators were
    garbage collected: a thread waited for a lock in `submit`.
    """
    grain = load("grain")

    return grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)


def experimental() -> Any:
    """Return grain's module `experimental`. Importing it imports JAX."""
    from jfsdp.compat import grain_experimental

    return grain_experimental()


def prefetch(batches: Any, prefetch_batches: int) -> Any:
    """Return a dataset that reads `prefetch_batches` batches ahead in one thread; 0 reads in the caller."""
    return experimental().ThreadPrefetchIterDataset(batches, prefetch_buffer_size=prefetch_batches)


def _tuples(state: Any) -> Any:
    # JSON has no tuples, and grain (0.2.18, ConcatThenSplit) compares its "no remainder" slice with the tuple (-1, -1).
    # With the list [-1, -1] it drops a document. Remove this when grain accepts its state after a JSON round trip.
    if isinstance(state, dict):
        return {key: _tuples(value) for key, value in state.items()}
    return tuple(_tuples(value) for value in state) if isinstance(state, list) else state
