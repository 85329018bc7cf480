"""Documents to batches: shuffle, share out, pack, batch, prefetch; with a state that can be saved and restored.

[Note: batches of tokens] Arrays [B T]:

    tokens       int32    inputs; 0 in padding
    targets      int32    the next token of the same document (see [Note: pairs]); 0 in padding
    segment_ids  int32    1, 2, .. in each row; 0 in padding: attend only within equal ids
    positions    int32    from 0 in every segment of a row
    weights      float32  1 where the target counts, 0 in padding
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np

from jfsdp.extras import load
from jfsdp.trainer.data.documents import INPUT, START, TARGET, DataConfig, TokenData
from jfsdp.trainer.data.iterator import Batch, DataIterator, check_share, prefetch, read_in_caller
from jfsdp.trainer.data.lanes import batch_lanes, count_lanes, join_lanes
from jfsdp.trainer.data.rows import PADDING, end_rows


def make_train_iterator(
    data: TokenData, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch_batches: int = 2
) -> DataIterator:
    """Return an endless iterator over this process's rows of the training batches.

    The rows of all processes together are the same for any number of them that shares the global batch; see
    [Note: lanes]. Each epoch of a lane has its own order, drawn from `seed`, and every document is in exactly one lane
    in it.

    Rows cut from one document would otherwise follow each other, so that a batch is one topic: the rows of a window are
    shuffled again.

    Memory: the batches read ahead; of each lane read, one document and its part of `shuffle_rows` rows as pairs, 12
      bytes per token.

    Args:
      data: from `open_data`.
      batch_size: rows per batch of *this process*.
      process_index: which share; processes that hold the same rows of the batch (tensor parallelism) pass the same one.
      process_count: number of shares.
      prefetch_batches: how many are read ahead by one thread; 0 reads in the caller. No influence on the batches.

    Raises:
      ValueError: for numbers that make no sense.
    """
    check_share(batch_size, process_index, process_count)
    grain, config, num_rows = load("grain"), data.config, batch_size * process_count
    documents = grain.MapDataset.source(data.train).shuffle(seed=config.seed)
    own = range(process_index * batch_size, (process_index + 1) * batch_size)
    to_batch = functools.partial(_to_batch, cross_documents=config.cross_documents)

    def open_lanes(num_lanes: int) -> tuple[Any, dict[str, Any]]:
        def open_lane(lane: int) -> Any:
            return _shuffle_rows(_pack(documents[lane::num_lanes].repeat(), config), config, lane, num_lanes)

        batches = batch_lanes(open_lane, num_lanes, num_rows, own).map(to_batch)
        return prefetch(batches, prefetch_batches), _describe(data, "train", num_rows) | {"num_lanes": num_lanes}

    opened = open_lanes(count_lanes(len(data.train), num_rows))
    return DataIterator(*opened, join=join_lanes, lanes=open_lanes)


def make_eval_iterator(
    data: TokenData, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch_batches: int = 2
) -> DataIterator:
    """Return an iterator that passes once over the held-out documents, in the order of the corpus.

    Every process packs the same rows and takes its part of each global batch: so all have equally many batches
    (processes that run a step together must), and the rows do not depend on the number of processes. The last batch is
    filled with rows of weight 0. The price is that every process reads the whole held-out set.

    Args: as for `make_train_iterator`.

    Raises:
      ValueError: if no documents are held out, or numbers that make no sense.
    """
    check_share(batch_size, process_index, process_count)
    if not len(data.eval):
        raise ValueError(f"data {data.config.data!r}: no documents are held out; set eval_fraction above 0 (now 0)")
    grain = load("grain")

    global_size = batch_size * process_count
    rows = _pack(grain.MapDataset.source(data.eval), data.config)
    from jfsdp.compat import grain_experimental

    pad = functools.partial(grain_experimental().batch_and_pad, batch_size=global_size)
    mine = slice(process_index * batch_size, (process_index + 1) * batch_size)
    to_batch = functools.partial(_to_batch, cross_documents=data.config.cross_documents, rows=mine)
    stream = _describe(data, "eval", global_size)
    return DataIterator(prefetch(rows.batch(global_size, batch_fn=pad).map(to_batch), prefetch_batches), stream)


def _pack(documents: Any, config: DataConfig) -> Any:
    """Lay documents end to end and cut the stream into rows of `seq_len` pairs, of a bounded number of documents.

    grain's concat-then-split does exactly this for one feature, padding only the last row of a finite stream, and its
    state is a document number and a place in it. Its own positions and segment ids (one per element) would do for text,
    but a piece of a token file holds many documents: `_to_batch` takes both from the START column instead. First-fit
    packing was not taken: it pads rows, and leaves the cutting of long documents to others.
    """

    elements = documents.map(_named_pairs).to_iter_dataset(read_in_caller())
    if config.documents_per_row is not None and not config.cross_documents:
        elements = end_rows(elements, config.seq_len, config.documents_per_row)
    from jfsdp.compat import grain_experimental

    return grain_experimental().ConcatThenSplitIterDataset(elements, length_struct={"pairs": config.seq_len})


def _shuffle_rows(rows: Any, config: DataConfig, lane: int, num_lanes: int) -> Any:
    window, seed = config.shuffle_rows // num_lanes, (config.seed + lane) % 2**32
    if window < 2:
        return rows

    from jfsdp.compat import grain_experimental

    return grain_experimental().WindowShuffleIterDataset(rows, window_size=window, seed=seed)


def _named_pairs(pairs: np.ndarray) -> Batch:
    return {"pairs": pairs}


def _to_batch(packed: Batch, *, cross_documents: bool, rows: slice = slice(None)) -> Batch:
    """Split pairs [B T 3] into the arrays of [Note: batches of tokens]."""
    pairs = packed["pairs"][rows]
    is_real = (packed["pairs_segment_ids"][rows] > 0) & (pairs[:, :, START] != PADDING)
    is_start = np.zeros_like(is_real) if cross_documents else pairs[:, :, START] > 0
    is_start[:, 0] = True
    column = np.arange(pairs.shape[1], dtype=np.int32)
    first = np.maximum.accumulate(np.where(is_start, column, 0), axis=1)
    return {
        "tokens": np.ascontiguousarray(pairs[:, :, INPUT]),
        "targets": np.ascontiguousarray(pairs[:, :, TARGET]),
        "segment_ids": np.cumsum(is_start, axis=1, dtype=np.int32) * is_real,
        "positions": (column - first) * is_real,
        "weights": is_real.astype(np.float32),
    }


def _describe(data: TokenData, split: str, global_batch: int) -> dict[str, Any]:
    """Return all that the order and content of the batches depend on."""
    config = data.config
    return {
        "split": split,
        "data": data.digest,
        "tokenizer": data.encoding,
        "seq_len": config.seq_len,
        "max_document_bytes": config.max_document_bytes,
        "cross_documents": config.cross_documents,
        "eval_fraction": config.eval_fraction,
        "split_seed": config.split_seed,
        "seed": config.seed,
        "shuffle_rows": config.shuffle_rows,
        "documents_per_row": None if config.cross_documents else config.documents_per_row,
        "global_batch": global_batch,
    }
