"""Loading the arrays of a state from any source. Each process reads only the slices of its devices."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import numpy as np

from jfsdp.checkpoint.disk.logical_arrays import Stored, without_padding
from jfsdp.checkpoint.disk.processes import in_all
from jfsdp.checkpoint.one_replica import from_first_replica, is_first_replica
from jfsdp.checkpoint.source import Index, Source, read_ahead

IN_FLIGHT_BYTES = 1 << 30
"""Maximum size of the blocks that are read at once; a single block may be larger."""
_THREADS = 16


def place(arrays: list[Stored], source: Source, *, one_replica: bool = False) -> list[jax.Array]:
    """Read the blocks of stored arrays and put them on their devices.

    Layout:  logical arrays by name -> each stored array in its own sharding; padding is zero.
    Cost:    each process reads each block of its devices once, also if several of its devices need it.
    Memory:  `peak_bytes` on the host, in addition to the source's memory.

    Every process must call this. A read error in one process is raised in all.

    Args:
      one_replica: only the first device with a block reads it, and sends it to the others.
    """
    blocks = [block for stored in arrays for block in local_blocks(stored, one_replica)]
    placed: dict[int, list[jax.Array]] = {id(stored): [] for stored in arrays}

    def read() -> None:
        tasks = ((block.num_bytes, functools.partial(block.read, source)) for block in blocks)
        for block, values in zip(blocks, read_ahead(tasks, IN_FLIGHT_BYTES, threads=_THREADS), strict=True):
            placed[id(block.array)] += block.put(values)

    in_all(read)
    made: list[jax.Array] = [
        jax.make_array_from_single_device_arrays(tuple(x.value.shape), x.value.sharding, placed[id(x)]) for x in arrays
    ]
    return [from_first_replica(array) for array in made] if one_replica else made


def peak_bytes(arrays: list[Stored]) -> int:
    """Return the most host memory that reading these arrays takes, in addition to the source's memory.

    It consists of the blocks in flight and the slices that are copied into them.
    """
    sizes = [block.num_bytes for stored in arrays for block in local_blocks(stored)]
    return 2 * min(max([IN_FLIGHT_BYTES, *sizes]), sum(sizes))


@dataclasses.dataclass(frozen=True)
class _Block:
    """A part of a stored array on one or more devices of this process."""

    array: Stored
    index: Index
    devices: list[Any]
    is_read: bool

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(part.stop - part.start for part in self.index)

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * self.array.value.dtype.itemsize

    @property
    def inside(self) -> Index:
        """The part of the logical array that it contains."""
        return self.array.inside(self.index)

    @property
    def has_values(self) -> bool:
        """Whether it contains more than padding."""
        return all(part.stop > part.start for part in self.inside)

    def read(self, source: Source) -> np.ndarray:
        """Read the block; padding, and blocks that another device reads, are zeros."""
        block = np.zeros(self.shape, self.array.value.dtype)
        if self.is_read and self.has_values:
            without_padding(block, self.inside)[...] = source.read(self.array.name, self.inside)
        return block

    def put(self, block: np.ndarray) -> list[jax.Array]:
        """Copy the block to its devices and wait until it is there."""
        kind = self.array.value.sharding.memory_kind
        shardings = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in self.devices]
        return jax.block_until_ready([jax.device_put(block, sharding) for sharding in shardings])


def local_blocks(stored: Stored, one_replica: bool = False) -> list[_Block]:
    """List the blocks of a stored array on this process's devices, each with these devices."""
    sharding, shape = stored.value.sharding, tuple(stored.value.shape)
    devices_of: dict[tuple[Any, bool], list[Any]] = {}
    for device, index in sharding.addressable_devices_indices_map(shape).items():
        bounds = tuple(part.indices(size)[:2] for part, size in zip(index, shape, strict=True))
        is_read = not one_replica or is_first_replica(sharding, device)
        devices_of.setdefault((bounds, is_read), []).append(device)
    return [
        _Block(stored, tuple(slice(*pair) for pair in bounds), devices, is_read)
        for (bounds, is_read), devices in devices_of.items()
    ]
