"""Comparison of replicated arrays by digests, which finds devices that compute wrong results."""

from __future__ import annotations

import collections

import jax

from jfsdp.arguments import checked
from jfsdp.engine.engine import to_device
from jfsdp.launch.hosts import gather_json
from jfsdp.layout.precision import is_key
from jfsdp.train.digest import digest
from jfsdp.train.state import TrainState


@checked
def compare_replicas(state: TrainState) -> int:
    """Compare the bits of parameters, optimizer states and other arrays that are replicated on several devices.

    Equal programs give equal bits. A difference means faulty memory or arithmetic, or processes that ran different
    programs. Blocks that only one device has (all but the smallest leaves under `full_shard`) cannot be compared.

    Cost:    each device reads its blocks once; about 100 bytes per block and device are exchanged. Every process
             of the run must call it.
    Memory:  offloaded arrays are copied to the device, one block at a time.

    Returns:
      The number of blocks compared.

    Raises:
      ValueError: in every process, naming the arrays and the devices whose blocks differ from the majority.
    """
    local: list[tuple[str, str, int, int]] = []
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        if not isinstance(array, jax.Array) or not array.size:
            continue
        places = array.sharding.devices_indices_map(array.shape)
        copies = collections.Counter(map(str, places.values()))
        data = jax.random.key_data(array) if is_key(array) else array
        for shard, whole in zip(data.addressable_shards, array.addressable_shards, strict=True):
            index = str(places[whole.device])
            if copies[index] > 1:
                digest = int(_digest(to_device(shard.data)))
                local.append((jax.tree_util.keystr(path), index, whole.device.id, digest))
    blocks: dict[tuple[str, str], dict[str, int]] = collections.defaultdict(dict)
    for process, reported in enumerate(gather_json(local)):
        for name, index, device, digest in reported:
            blocks[name, index][f"device {device} (process {process})"] = digest
    lines = []
    for (name, index), digests in blocks.items():
        usual, count = collections.Counter(digests.values()).most_common(1)[0]
        odd = [device for device, digest in digests.items() if digest != usual or 2 * count <= len(digests)]
        if count < len(digests):
            lines.append(f"{name}{index}: {', '.join(odd[:8])} of {len(digests)}")
    if lines:
        shown = "; ".join(lines[:4]) + (f"; and {len(lines) - 4} more" if len(lines) > 4 else "")
        raise ValueError(
            f"replicas differ: {shown} have other bits than the majority (without a majority all are named). Run the "
            "same program in all processes; resume from an earlier checkpoint, and without these devices if they "
            "differ again (ECC errors: nvidia-smi -q)"
        )
    return len(blocks)


_digest = jax.jit(digest)
