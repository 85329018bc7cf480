"""Global batches whose rows do not depend on the number of processes.

[Note: lanes]
Documents are distributed to lanes, and each lane packs and shuffles its documents. A batch of G rows takes G/L
consecutive rows from each of L lanes. L depends only on the data and G, so the rows of a batch and their order do not
depend on the number of processes. A process reads only the lanes that contain its rows.

Lanes have different numbers of tokens, and shorter lanes begin their next epoch earlier. A lane has at least
`DOCUMENTS_PER_LANE` documents, so that documents are read about equally often. With few documents there are fewer lanes
than processes: several processes read the same lane, and each keeps its rows. The canonical nodes of MosaicML's
StreamingDataset are similar.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from jfsdp.extras import load

DOCUMENTS_PER_LANE = 1000


def count_lanes(num_documents: int, num_rows: int) -> int:
    """Return the number of lanes for a batch of `num_rows` rows, a divisor of `num_rows`."""
    most = max(1, min(num_rows, num_documents // DOCUMENTS_PER_LANE))
    return next(count for count in range(most, 0, -1) if num_rows % count == 0)


def batch_lanes(open_lane: Callable[[int], Iterable[Any]], num_lanes: int, num_rows: int, local_rows: range) -> Any:
    """Return a grain dataset of a process's rows of each batch, stacked by name.

    Its state is `{"taken": batches, "lanes": {lane: [rows, state of the lane after them]}}`; see `join_lanes`.

    Args:
      open_lane: `f(lane)` returns a grain dataset of the lane's endless rows, dicts of arrays.
      num_lanes, num_rows: L and G of [Note: lanes]; L divides G.
      local_rows: the process's rows of 0..G-1.
    """
    grain = load("grain")
    per_lane = num_rows // num_lanes

    class Iterator(grain.DatasetIterator):
        def __init__(self) -> None:
            super().__init__()
            lanes = sorted({row // per_lane for row in local_rows})
            self._lanes: dict[int, Any] = {lane: iter(open_lane(lane)) for lane in lanes}
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
    """Join the states of all processes after the same batch into a state for any process."""
    lanes: dict[str, Any] = {}
    for position in positions:
        for lane, found in position["lanes"].items():
            lanes[lane] = max(lanes.get(lane, found), found, key=lambda one: one[0])
    return {"taken": positions[0]["taken"], "lanes": lanes}
