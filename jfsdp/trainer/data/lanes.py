"""Rows of a global batch that are the same however many processes read them.

[Note: lanes]
Documents are dealt out to lanes, and each lane packs and shuffles its own. A batch of G rows takes G/L rows, one after
the other, from each of L lanes. L follows from the data and from G alone, so the rows of a batch, and their order, do
not depend on how many processes there are. A process reads the lanes that its own rows come from, and no others.

Lanes hold unequal numbers of tokens, and one with fewer begins its next epoch sooner. So a lane has at least
`DOCUMENTS_PER_LANE` documents: fewer would be seen unequally often. With few documents there are thus fewer lanes than
processes, several processes read the same one, and each keeps its own rows of it. MosaicML's StreamingDataset has the
like in its canonical nodes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jfsdp.extras import load

DOCUMENTS_PER_LANE = 1000


def count_lanes(num_documents: int, num_rows: int) -> int:
    """Return how many lanes a batch of so many rows takes its rows from: a divisor of that number."""
    most = max(1, min(num_rows, num_documents // DOCUMENTS_PER_LANE))
    return next(count for count in range(most, 0, -1) if num_rows % count == 0)


def batch_lanes(open_lane: Callable[[int], Iterable[Any]], num_lanes: int, num_rows: int, local_rows: range) -> Any:
    """Return a grain dataset of a process's own rows of each batch, stacked by name.

    Its state is `{"taken": batches, "lanes": {lane: [rows, state of the lane after them]}}`; see `join_lanes`.

    Args:
      open_lane: starts the endless rows of a lane, dicts of arrays, as a grain dataset.
      num_lanes, num_rows: L, which divides G, and G of [Note: lanes].
      local_rows: which rows of 0..G-1 are the process's.
    """
    grain = load("grain")
    per_lane = num_rows // num_lanes

    class Iterator(grain.DatasetIterator):
        def __init__(self) -> None:
            super().__init__()
            self._lanes: dict[int, Any] = {
                lane: iter(open_lane(lane)) for lane in sorted({row // per_lane for row in local_rows})
            }
            self._rows = dict.fromkeys(self._lanes, 0)
            self._taken = 0

        def __next__(self) -> dict[str, np.ndarray]:
            rows = [self._row(*divmod(row, per_lane)) for row in local_rows]
            self._taken += 1
            return {name: np.stack([row[name] for row in rows]) for name in rows[0]}

        def _row(self, lane: int, place: int) -> Mapping[str, np.ndarray]:
            row = self._taken * per_lane + place
            for _ in range(self._rows[lane], row):  # rows of other processes
                next(self._lanes[lane])
            self._rows[lane] = row + 1
            return next(self._lanes[lane])

        def get_state(self) -> dict[str, Any]:
            lanes = {str(lane): [self._rows[lane], rows.get_state()] for lane, rows in self._lanes.items()}
            return {"taken": self._taken, "lanes": lanes}

        def set_state(self, state: dict[str, Any]) -> None:
            self._taken = state["taken"]
            for lane, rows in self._lanes.items():
                self._rows[lane], position = state["lanes"][str(lane)]
                rows.set_state(position)

    class Dataset(grain.IterDataset):
        def __iter__(self) -> Iterator:
            return Iterator()

    return Dataset()


def join_lanes(positions: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the state for any process, of the states of all processes after the same batch."""
    lanes: dict[str, Any] = {}
    for position in positions:
        for lane, found in position["lanes"].items():
            lanes[lane] = max(lanes.get(lane, found), found, key=lambda one: one[0])
    return {"taken": positions[0]["taken"], "lanes": lanes}
