"""What several devices hold must be the same bits: a comparison of digests finds a device that computes wrongly."""

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
    """Compare, by digests, the blocks of parameters, optimizer states and other arrays that several devices hold.

    Equal programs give equal bits, so a difference is memory or arithmetic gone wrong, or processes that ran other
    programs. What one device alone holds (all but the smallest leaves under `full_shard`) cannot be compared.

    Cost:    each device reads its blocks once; a line per block and device is exchanged, some 100 bytes. Every process
             of the run calls it.
    Memory:  what is offloaded is copied to its device, one block at a time.

    Returns:
      How many blocks were compared.

    Raises:
      ValueError: in every process: naming the arrays, and the devices whose blocks differ from most others'.
    """
    own: list[tuple[str, str, int, int]] = []
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
                own.append((jax.tree_util.keystr(path), index, whole.device.id, digest))
    blocks: dict[tuple[str, str], dict[str, int]] = collections.defaultdict(dict)
    for process, told in enumerate(gather_json(own)):
        for name, index, device, digest in told:
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
            f"replicas differ: {shown} hold other bits than most (all are named where there "
            "is no majority). Go on from a checkpoint before, without those devices if it comes again (ECC errors: "
            "nvidia-smi -q); all programs must be the same"
        )
    return len(blocks)


_digest = jax.jit(digest)
