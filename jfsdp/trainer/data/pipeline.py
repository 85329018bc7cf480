"""Iterators over batches of documents: shuffling, sharding, packing, batching, prefetch, with a saved position.

[Note: batches of tokens] Arrays [B T]:

    tokens       int32    inputs; 0 in padding
    targets      int32    the next token of the same document (see [Note: pairs]); 0 in padding
    segment_ids  int32    1, 2, .. in each row; 0 in padding: attend only within equal ids
    positions    int32    from 0 in every segment of a row
    weights      float32  1 where the target is trained, 0 elsewhere and in padding

For pairs of answers: tokens, targets and weights [B 2 T], the chosen answer first, each as prompt, answer, padding; and
index int32 [B], the document number.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from jfsdp.extras import load
from jfsdp.trainer.data.documents import COLUMNS, INPUT, PADDING, START, TARGET, TRAINED, Documents, Joined
from jfsdp.trainer.data.iterator import Batch, DataIterator, experimental, prefetch, read_in_caller
from jfsdp.trainer.data.lanes import batch_lanes, count_lanes, join_lanes
from jfsdp.trainer.data.tokens import DataConfig, TokenData


def make_train_iterator(
    data: TokenData, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch_batches: int = 2
) -> DataIterator:
    """Return an endless iterator over this process's rows of the training batches.

    The global batches do not depend on the number of processes; see [Note: lanes]. Each epoch of a lane is shuffled
    with another seed derived from `seed`, and every document is in one lane. Several sources have separate orders and
    epochs, and are mixed by their weights.

    Rows are shuffled again within a window. Otherwise consecutive rows would come from the same document.

    Memory: the prefetched batches; per lane one document and its part of `shuffle_rows` rows as pairs, 16 bytes per
      token; for records also `OPEN_ROWS` rows.

    Args:
      data: from `open_data`.
      batch_size: rows per batch of *this process*.
      process_index: number of the share. Processes with the same rows (tensor parallelism) pass the same number.
      process_count: number of shares.
      prefetch_batches: batches read ahead in one thread; 0 reads in the caller. The batches do not depend on it.
    """
    grain, config, num_rows = load("grain"), data.config, batch_size * process_count
    sources = [source.shuffle(seed=config.seed) for source in _sources(data.train, data.form)]
    local_rows = range(process_index * batch_size, (process_index + 1) * batch_size)
    to_batch = functools.partial(_to_batch, cross_documents=config.cross_documents)

    def open_lanes(num_lanes: int) -> tuple[Any, dict[str, Any]]:
        def open_lane(lane: int) -> Any:
            shares = [source[lane::num_lanes].repeat() for source in sources]
            documents = shares[0] if len(shares) == 1 else grain.MapDataset.mix(shares, weights=data.weights)
            return _shuffle_rows(_pack(documents, data), config, lane, num_lanes)

        batches = batch_lanes(open_lane, num_lanes, num_rows, local_rows).map(to_batch)
        return prefetch(batches, prefetch_batches), _describe(data, "train", num_rows) | {"num_lanes": num_lanes}

    num_lanes = count_lanes(min(map(len, sources)), num_rows)
    return DataIterator(*open_lanes(num_lanes), join=join_lanes, lanes=open_lanes)


def make_eval_iterator(data: TokenData, **share: int) -> DataIterator:
    """Return an iterator over the held-out documents, once; see `make_pass_iterator`.

    Raises:
      ValueError: if no documents are held out.
    """
    if not len(data.eval):
        raise ValueError(f"data {data.config.data!r}: no documents are held out; set eval_fraction above 0 (now 0)")
    return make_pass_iterator(data, data.eval, **share)


def make_pass_iterator(
    data: TokenData,
    documents: Joined,
    *,
    batch_size: int,
    process_index: int = 0,
    process_count: int = 1,
    prefetch_batches: int = 2,
) -> DataIterator:
    """Return an iterator over documents of `data`, once, in the order of the corpus.

    Every process packs all rows and takes its part of each global batch. So all processes have the same number of
    batches, as a step requires, and rows do not depend on the number of processes. The last batch is padded with rows
    of weight 0.

    Cost: every process reads all documents.

    Args: as for `make_train_iterator`.
    """
    grain, sources = load("grain"), _sources(documents, data.form)

    global_size = batch_size * process_count
    rows = _pack(sources[0] if len(sources) == 1 else grain.MapDataset.concatenate(sources), data)
    pad = functools.partial(experimental().batch_and_pad, batch_size=global_size)
    local_rows = slice(process_index * batch_size, (process_index + 1) * batch_size)
    to_batch = functools.partial(_to_batch, cross_documents=data.config.cross_documents, rows=local_rows)
    stream = _describe(data, "eval", global_size)
    return DataIterator(prefetch(rows.batch(global_size, batch_fn=pad).map(to_batch), prefetch_batches), stream)


def _sources(documents: Joined, form: str) -> list[Any]:
    """Return a grain dataset of each source's documents: dicts of `pairs`, and for pairs of answers `index`."""
    grain = load("grain")

    def open_part(part: Documents) -> Any:
        def read(index: int) -> Batch:
            pairs = {"pairs": part[index]}
            return pairs | {"index": np.asarray(part.number(index), np.int32)} if form == "pairs" else pairs

        return grain.MapDataset.range(len(part)).map(read)

    return [open_part(part) for part in documents.parts]


def _pack(documents: Any, data: TokenData) -> Any:
    """Pack documents into rows of `seq_len` pairs. Texts are cut at the end of a row. Records are kept whole."""
    config = data.config
    if data.form == "pairs":
        return documents.to_iter_dataset(read_in_caller())
    return _concatenate(documents, config) if data.form == "text" else _fit(documents, config)


OPEN_ROWS = 32


def _fit(documents: Any, config: DataConfig) -> Any:
    """Put each document whole into the first of `OPEN_ROWS` rows with enough space (first fit).

    Texts that are mixed with records may be longer than a row; they are cut into several parts.
    """
    most = None if config.documents_per_row is None else config.documents_per_row - 1  # padding counts as one
    return experimental().FirstFitPackIterDataset(
        experimental().FlatMapIterDataset(documents.to_iter_dataset(read_in_caller()), _Cut(config.seq_len)),
        length_struct={"pairs": config.seq_len},
        num_packing_bins=OPEN_ROWS,
        shuffle_bins=False,
        max_sequences_per_bin=most,
    )


@dataclasses.dataclass(frozen=True)
class _Cut:
    """Cuts a document into parts of at most `size` pairs, each with a separate segment."""

    size: int

    def flat_map(self, document: Batch) -> list[Batch]:
        pairs = document["pairs"]
        parts = [pairs[at : at + self.size].copy() for at in range(0, len(pairs), self.size)]
        for part in parts[1:]:
            part[0, START] = 1
        return [{"pairs": part} for part in parts]


def _concatenate(documents: Any, config: DataConfig) -> Any:
    """Concatenate documents and cut the stream into rows of `seq_len` pairs, with a bounded number of documents.

    grain's concat-then-split does this for one feature, pads only the last row of a finite stream, and its state is a
    document number and an offset. Its positions and segment ids count elements, but a piece of a token file has many
    documents, so `_to_batch` computes both from the START column. First-fit packing is not used for text, because it
    pads rows and does not cut long documents.
    """
    elements = documents.to_iter_dataset(read_in_caller())
    if config.documents_per_row is not None and not config.cross_documents:
        elements = _end_rows(elements, config.seq_len, config.documents_per_row)
    return experimental().ConcatThenSplitIterDataset(elements, length_struct={"pairs": config.seq_len})


class RowEnds:
    """Pads rows of a stream of pairs so that none has more than `most` documents.

    A row with `most` - 1 documents is padded when another document begins. Padding counts as a document, because
    attention needs a segment for every token.

    Args:
      seq_len: pairs of a row.
      most: largest number of documents of a row, at least 2.

    Attributes:
      place, documents: position in the current row, and its number of documents so far.
    """

    def __init__(self, seq_len: int, most: int):
        self.seq_len, self.most = seq_len, most
        self.place, self.documents = 0, 0

    def fill(self, pairs: np.ndarray) -> np.ndarray:
        """Return the next pairs of the stream, [n 4], with padding inserted."""
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
            self.documents = 1  # the rest of the same document
        self.place %= self.seq_len
        return parts


def _end_rows(elements: Any, seq_len: int, most: int) -> Any:
    """Pad the rows of a grain dataset of `pairs` so that none has more than `most` documents; see `RowEnds`."""
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


def _shuffle_rows(rows: Any, config: DataConfig, lane: int, num_lanes: int) -> Any:
    window, seed = config.shuffle_rows // num_lanes, (config.seed + lane) % 2**32
    if window < 2:
        return rows

    return experimental().WindowShuffleIterDataset(rows, window_size=window, seed=seed)


def _to_batch(given: Batch, *, cross_documents: bool, rows: slice = slice(None)) -> Batch:
    """Split pairs [B T 4], or [B 2 T 4] for pairs of answers, into the arrays of [Note: batches of tokens]."""
    pairs = given["pairs"][rows]
    if "index" in given:
        is_real = pairs[..., START] != PADDING
        arrays = {"tokens": pairs[..., INPUT], "targets": pairs[..., TARGET], "index": given["index"][rows]}
        arrays["weights"] = (is_real * pairs[..., TRAINED]).astype(np.float32)
        return {name: np.ascontiguousarray(array) for name, array in arrays.items()}
    is_real = (given["pairs_segment_ids"][rows] > 0) & (pairs[:, :, START] != PADDING)
    is_start = np.zeros_like(is_real) if cross_documents else pairs[:, :, START] > 0
    is_start[:, 0] = True
    column = np.arange(pairs.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(is_start, column, 0), axis=1)
    return {
        "tokens": np.ascontiguousarray(pairs[:, :, INPUT]),
        "targets": np.ascontiguousarray(pairs[:, :, TARGET]),
        "segment_ids": np.cumsum(is_start, axis=1, dtype=np.int32) * is_real,
        "positions": (column - first) * is_real,
        "weights": (is_real * pairs[:, :, TRAINED]).astype(np.float32),
    }


def _describe(data: TokenData, split: str, global_batch: int) -> dict[str, Any]:
    """Return all settings that decide the order and content of the batches."""
    config = data.config
    names = ("seq_len", "max_document_bytes", "cross_documents", "eval_fraction", "split_seed", "seed", "shuffle_rows")
    return {
        "split": split,
        "data": data.digest,
        "tokenizer": data.encoding,
        **{name: getattr(config, name) for name in names},
        "documents_per_row": None if config.cross_documents else config.documents_per_row,
        "global_batch": global_batch,
        **({} if len(data.weights) == 1 else {"weights": list(data.weights)}),
    }
