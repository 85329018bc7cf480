"""The pieces of a state that one process writes, copied to the host."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import tensorstore as ts

from jfsdp.checkpoint.disk.logical_arrays import Stored, choose_writers, contents, without_padding
from jfsdp.checkpoint.source import Index
from jfsdp.train.state import TrainState


@dataclasses.dataclass
class Pieces:
    """The parts of one logical array that this process writes, each at most as large as `block`.

    Attributes:
      parts: each part's index, and its values on the host or a function that reads them.
    """

    shape: tuple[int, ...]
    dtype: np.dtype
    block: tuple[int, ...]
    parts: Sequence[tuple[Index, np.ndarray | Callable[[], np.ndarray]]]


def check_dtypes(arrays: Mapping[str, Any]) -> None:
    """Check that all dtypes can be stored, before anything is copied.

    Raises:
      ValueError: if one cannot; names array and dtype.
    """
    for name, array in arrays.items():
        try:
            ts.dtype(np.dtype(array.dtype).name)
        except (TypeError, ValueError) as error:
            kind = np.dtype(array.dtype).name
            raise ValueError(f"{name}: dtype {kind} cannot be stored; use another, such as int8") from error


def copy_pieces(state: TrainState, devices: Collection[Any] | None = None) -> dict[str, Pieces]:
    """Copy to the host this process's share of the blocks on these devices (default: all).

    Layout:  padding is left out.
    Memory:  one host copy of this share.
    """
    arrays = contents(state)
    owned = [
        [shard for shard in stored.value.addressable_shards if shard.device in writers]
        for stored, writers in zip(arrays, choose_writers(arrays, devices), strict=True)
    ]
    for shards in owned:
        for shard in shards:
            shard.data.copy_to_host_async()
    return {stored.name: _copy(stored, shards) for stored, shards in zip(arrays, owned, strict=True)}


def _copy(stored: Stored, shards: Sequence[Any]) -> Pieces:
    parts = [(stored.inside(shard.index), copy_shard(shard)) for shard in shards]
    inside = [(index, without_padding(block, index)) for index, block in parts]
    parts = [(index, data) for index, data in inside if data.size]
    return Pieces(stored.logical.shape, np.dtype(stored.logical.dtype), stored.block, parts)


def copy_shard(shard: Any) -> np.ndarray:
    """Return a copy of a device's shard in host memory."""
    block = np.asarray(shard.data)
    if shard.device.platform == "cpu" or "host" in str(shard.data.sharding.memory_kind):
        block = block.copy()  # it is a view of memory that is donated to the next step
    return block
