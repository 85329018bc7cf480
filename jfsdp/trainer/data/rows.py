"""Rows of a bounded number of documents: padding in the stream of pairs that is cut into rows."""

from __future__ import annotations

from typing import Any

import numpy as np

from jfsdp.extras import load
from jfsdp.trainer.data.documents import COLUMNS, PADDING, START


class RowEnds:
    """Where in a row a stream of pairs is, and how many documents the row holds so far.

    A row that holds all but one of the documents that it may is filled with padding where another would begin. Padding
    counts as a document: attention needs every token to be in one.

    Args:
      seq_len: pairs of a row.
      most: documents of a row, at least 2.
    """

    def __init__(self, seq_len: int, most: int):
        self.seq_len, self.most = seq_len, most
        self.place, self.documents = 0, 0

    def fill(self, pairs: np.ndarray) -> np.ndarray:
        """Return pairs [n 4], the next of the stream, with padding where rows are to end."""
        begins = np.flatnonzero(pairs[:, START] > 0)
        pieces = np.split(pairs, begins[begins > 0])
        return np.concatenate([part for piece in pieces for part in self._place(piece)])

    def _place(self, piece: np.ndarray) -> list[np.ndarray]:
        parts = [piece]
        if self.place and self.documents >= self.most - 1 and len(piece) and piece[0, START] > 0:
            padding = np.zeros((self.seq_len - self.place, len(COLUMNS)), np.int32)
            padding[:, START] = PADDING
            parts, self.place = [padding, piece], 0
        self.documents = self.documents + 1 if self.place else 1
        self.place += len(piece)
        if self.place > self.seq_len:
            self.documents = 1  # the rest of the same one
        self.place %= self.seq_len
        return parts


def end_rows(elements: Any, seq_len: int, most: int) -> Any:
    """Fill rows of a grain dataset of `pairs` so that none holds more than `most` documents; see `RowEnds`."""
    grain = load("grain")

    class Iterator(grain.DatasetIterator):
        def __init__(self, parent: Any):
            super().__init__(parent)
            self._ends = RowEnds(seq_len, most)

        def __next__(self) -> dict[str, np.ndarray]:
            return {"pairs": self._ends.fill(next(self._parent)["pairs"])}

        def get_state(self) -> dict[str, Any]:
            return {"parent": self._parent.get_state(), "place": self._ends.place, "documents": self._ends.documents}

        def set_state(self, state: dict[str, Any]) -> None:
            self._parent.set_state(state["parent"])
            self._ends.place, self._ends.documents = state["place"], state["documents"]

    class Dataset(grain.IterDataset):
        def __iter__(self) -> Iterator:
            return Iterator(self._parent.__iter__())

    return Dataset(elements)
