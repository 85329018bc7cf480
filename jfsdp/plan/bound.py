"""Lower bounds of a step without a compiler: state, bytes sent by formula, and a roofline."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jfsdp.arguments import checked
from jfsdp.engine.movements import movements
from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.mesh import OUTER_FIRST, SHARED_AXES
from jfsdp.layout.precision import item_bytes
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.plan import Work, check_cluster, rows_of
from jfsdp.train.state_bytes import StateBytes, account
from jfsdp.train.step.step import TrainStep

_LARGE_BYTES = 2**30  # a message of this size reaches a link's full bandwidth


@dataclasses.dataclass(frozen=True)
class Bound:
    """Lower bounds of a step's memory and time.

    Attributes:
      state: bytes of the state per device.
      unit_bytes: bytes of one gathered layer of the largest unit.
      compute_s: time of the model's FLOPs at the datasheet's peak, including idle work of pipeline stages. With frozen
        leaves, the fewest possible FLOPs. 0: unknown.
      wire_bytes: bytes that the strategy must send per device.
      wire_s: time of these collectives in sequence, each at the best bandwidth of its group.
      items: per device and step.
    """

    layout: Layout
    state: StateBytes
    unit_bytes: int
    compute_s: float
    wire_bytes: float
    wire_s: float
    items: float
    item: str

    @property
    def state_bytes(self) -> int:
        """Bytes of the state per device, without offloaded arrays."""
        return self.state.total

    @property
    def step_s(self) -> float:
        """The fewest seconds of a step: compute and communication overlap completely."""
        return max(self.compute_s, self.wire_s)

    @property
    def item_s(self) -> float:
        """The fewest seconds per item."""
        return self.step_s / self.items

    def to_dict(self, limit_bytes: int) -> dict[str, Any]:
        """Return the bound as plain data: bytes per device, seconds per step. A step may use `limit_bytes`."""
        return {
            "analytic": True,
            "state_bytes": self.state_bytes,
            "host_state_bytes": self.state.host_total,
            "limit_bytes": limit_bytes,
            "state_fits": self.state_bytes <= limit_bytes,
            "unit_bytes": self.unit_bytes,
            "wire_bytes_theory": self.wire_bytes,
            "wire_s": self.wire_s,
            "compute_s": self.compute_s or None,
            "step_s_at_least": self.step_s,
            "strategy": self.layout.strategy.name,
            "mesh": dict(self.layout.mesh_sizes),
        }


@checked
def make_bound(step: TrainStep, batch: Any, cluster: Cluster, work: Work | None = None) -> Bound:
    """Return lower bounds of a step's memory and time. Compiles nothing.

    Activations, gathered units and logits are not included, since they depend on the compiler.

    Args:
      step: of a model whose mesh has as many devices as the cluster. The mesh may come from `make_abstract_mesh`.
      batch, work: as for `make_plan`.

    Raises:
      ValueError: for options and batches that training would refuse.
    """
    check_cluster(step, cluster)
    spec = step.resolve(batch)
    layout, work = step.layout, work or rows_of(step, batch)
    moves = movements(layout, spec)
    sizes_in_use = [  # bytes of the leaves of one layer, by unit
        [item_bytes(leaf.stage("use").dtype) * math.prod(leaf.cut_shape[leaf.stacked :]) for leaf in leaves]
        for leaves in ([layout.by_path[path] for path in unit.leaves] for unit in layout.units)
    ]
    sizes = dict(layout.mesh_sizes)
    devices = np.arange(cluster.num_devices).reshape([sizes.get(axis, 1) for axis in OUTER_FIRST])
    wire_s = 0.0
    for move in moves:  # at the best bandwidth of device 0's group
        group = devices[tuple(slice(None) if axis in move.axes else 0 for axis in OUTER_FIRST)].flatten().tolist()
        wire_s += move.wire_bytes / cluster.group_bandwidth(group[: move.group_size], _LARGE_BYTES)
    items = work.items / layout.num_shards(SHARED_AXES)  # the minimum, if the model splits all of its computation
    flops = _least_flops(layout, work) * _passes_per_microbatch(step, work)
    return Bound(
        layout=layout,
        state=account(step.abstract_state()),
        unit_bytes=max(map(sum, sizes_in_use), default=0),
        compute_s=flops * items / cluster.gpu.peak_flops(work.dtype),
        wire_bytes=sum(move.wire_bytes for move in moves),
        wire_s=wire_s,
        items=items,
        item=work.item,
    )


def matmul_elements(layout: Layout, vocab_size: int | None, *, trainable: bool) -> int:
    """Count the elements of trainable or frozen matmul weights.

    These are the leaves with at least two dims. A leaf named `embedding` (Flax's convention) is a lookup table, and
    counts only if it is also the head: if it is the only leaf with the vocabulary as a dim.
    """
    heads = [leaf.path for leaf in layout.leaves if vocab_size in leaf.shape]
    return sum(
        num_parameters([leaf])
        for leaf in layout.leaves
        if leaf.trainable is trainable and len(leaf.shape) - leaf.stacked > 1
        if leaf.path.rpartition(".")[2] != "embedding" or heads == [leaf.path]
    )


def _least_flops(layout: Layout, work: Work) -> float:
    """Return the fewest FLOPs of an item: nothing before the first trainable leaf is differentiated."""
    flops, frozen = work.item_flops or 0.0, matmul_elements(layout, work.vocab_size, trainable=False)
    if not frozen or not flops:
        return flops
    forward = (flops + 2 * frozen) / 3
    return min(flops, forward + 2 * matmul_elements(layout, work.vocab_size, trainable=True))


def _passes_per_microbatch(step: TrainStep, work: Work) -> float:
    """Return the FLOPs of a step, including idle passes of pipeline stages, relative to the model's FLOPs."""
    passes, layout = step.spec.passes, step.layout
    frozen = matmul_elements(layout, work.vocab_size, trainable=False)
    if passes is None or frozen:  # it is not known which frozen weights are differentiated through
        return 1.0
    leaves = [leaf for leaf in layout.leaves if len(leaf.shape) - leaf.stacked > 1]
    share = num_parameters([leaf for leaf in leaves if leaf.is_staged]) / num_parameters(leaves)
    return 1 + share * (min(passes.forward, passes.backward) / (passes.repeats * step.spec.accumulate) - 1)
