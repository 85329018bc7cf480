"""Images to batches: shuffle, share out, batch, prefetch; with a state that can be saved and restored.

[Note: batches of images] Arrays:

    images   [B H W C]  float32  bytes as 0..1, anything else as it is in the data; 0 in rows of padding
    labels   [B]        int32    0 in rows of padding
    weights  [B]        float32  1, and 0 in rows of padding
"""

from __future__ import annotations

import functools
import sys
from typing import Any

import numpy as np

from jfsdp.extras import load
from jfsdp.trainer.data.images import ImageData
from jfsdp.trainer.data.iterator import Batch, DataIterator, check_share, prefetch, read_in_caller

_PADDING = -1


def make_image_train_iterator(
    data: ImageData, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch_batches: int = 2
) -> DataIterator:
    """Return an endless iterator over this process's rows of the training batches.

    The rows of all processes together are the same for any number of them that shares the global batch. Each epoch has
    its own order, drawn from `seed`, and every image once. A batch may hold the end of one epoch and the beginning of
    the next.

    Memory: the batches read ahead.

    Args:
      data: from `open_images`.
      batch_size: images per batch of *this process*.
      process_index: which share; processes that hold the same rows of the batch pass the same one.
      process_count: number of shares.
      prefetch_batches: how many are read ahead by one thread; 0 reads in the caller. No influence on the batches.

    Raises:
      ValueError: for numbers that make no sense.
    """
    check_share(batch_size, process_index, process_count)
    grain, num_rows = load("grain"), batch_size * process_count

    shuffled = grain.MapDataset.source(data.train.tolist()).shuffle(seed=data.config.seed).repeat()
    own = range(process_index * batch_size, (process_index + 1) * batch_size)
    take = lambda batch: _take(data, np.array([shuffled[batch * num_rows + row] for row in own]))  # noqa: E731
    batches = grain.MapDataset.range(sys.maxsize // num_rows).map(take).to_iter_dataset(read_in_caller())
    return DataIterator(prefetch(batches, prefetch_batches), _describe(data, "train", num_rows))


def make_image_eval_iterator(
    data: ImageData, *, batch_size: int, process_index: int = 0, process_count: int = 1, prefetch_batches: int = 2
) -> DataIterator:
    """Return an iterator that passes once over the held-out images, in the order of the data.

    Every process takes its part of each global batch, so all have equally many. The last batch is filled with rows of
    weight 0.

    Args: as for `make_image_train_iterator`.

    Raises:
      ValueError: if no images are held out, or numbers that make no sense.
    """
    check_share(batch_size, process_index, process_count)
    if not len(data.eval):
        raise ValueError(f"data {data.config.data!r}: no images are held out; set eval_fraction above 0 (now 0)")
    grain = load("grain")

    global_size = batch_size * process_count
    filling = np.full(-len(data.eval) % global_size, _PADDING)
    rows = np.concatenate([data.eval, filling]).reshape(-1, process_count, batch_size)[:, process_index]
    batches = grain.MapDataset.source(list(rows)).map(functools.partial(_take, data)).to_iter_dataset(read_in_caller())
    return DataIterator(prefetch(batches, prefetch_batches), _describe(data, "eval", global_size))


def _take(data: ImageData, indices: np.ndarray) -> Batch:
    """Return the images of the indices [B] as [Note: batches of images] says."""
    is_real = indices != _PADDING
    images, labels = data.images[indices], data.labels[indices]
    pixels = images.astype(np.float32) / np.float32(255) if images.dtype == np.uint8 else images
    return {
        "images": np.where(is_real[:, None, None, None], pixels, np.float32(0)),
        "labels": np.where(is_real, labels, np.int32(0)),
        "weights": is_real.astype(np.float32),
    }


def _describe(data: ImageData, split: str, global_batch: int) -> dict[str, Any]:
    """Return all that the order and content of the batches depend on."""
    return {
        "split": split,
        "data": data.digest,
        "eval_fraction": data.config.eval_fraction,
        "split_seed": data.config.split_seed,
        "seed": data.config.seed,
        "global_batch": global_batch,
    }
