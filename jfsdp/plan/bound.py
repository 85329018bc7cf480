"""Lower bounds of a step, without a compiler: its state, the bytes that it sends by formula, and a roofline."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from jfsdp.arguments import checked
from jfsdp.engine.movements import movements
from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.mesh import MODEL_AXES, OUTER_FIRST
from jfsdp.layout.precision import item_bytes
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.plan import Work, check_cluster, rows_of
from jfsdp.train.state_bytes import StateBytes, account
from jfsdp.train.step.step import TrainStep

_LARGE_BYTES = 2**30  # a message of this size gets the most that a link gives


@dataclasses.dataclass(frozen=True)
class Bound:
    """A step needs more than this, and takes longer.

    Attributes:
      state: bytes of the state per device.
      unit_bytes: of one layer of the largest unit, whole and in use.
      compute_s: the model's FLOPs, with frozen leaves the fewest that may be left, at the datasheet's peak; with those
        that the stages of a pipeline compute for nothing; 0: unknown.
      wire_bytes: what the strategy must send per device.
      wire_s: these, each at the best bandwidth of its group, one after the other.
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
        """Per device, what is offloaded left out."""
        return self.state.total

    @property
    def step_s(self) -> float:
        """The fewest seconds of a step: all communication hidden, or all computing."""
        return max(self.compute_s, self.wire_s)

    @property
    def item_s(self) -> float:
        """The fewest seconds per item."""
        return self.step_s / self.items

    def to_dict(self, limit_bytes: int) -> dict[str, Any]:
        """Return the bound as plain data: bytes per device, seconds per step; `limit_bytes` is what a step may take."""
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
    """Return lower bounds of what a step needs and takes. Compiles nothing.

    Activations, gathered units and logits are not in it: the compiler decides them.

    Args:
      step: of a model sharded over as many devices as the cluster has; a mesh of `make_abstract_mesh` will do.
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
    for move in moves:  # at the best that the group of device 0 gets
        group = devices[tuple(slice(None) if axis in move.axes else 0 for axis in OUTER_FIRST)].flatten().tolist()
        wire_s += move.wire_bytes / cluster.group_bandwidth(group[: move.group_size], _LARGE_BYTES)
    items = work.items / layout.num_shards(MODEL_AXES)  # the least, if the model splits all that it computes
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
    """Count the elements of the trainable, or of the frozen, weights that are multiplied.

    Those are the leaves of two dims or more. By Flax's convention an `embedding` is looked up; it multiplies where it
    is the head too, which is so if it is the only leaf with the vocabulary as a dim.
    """
    heads = [leaf.path for leaf in layout.leaves if vocab_size in leaf.shape]
    return sum(
        num_parameters([leaf])
        for leaf in layout.leaves
        if leaf.trainable is trainable and len(leaf.shape) - leaf.stacked > 1
        if leaf.path.rpartition(".")[2] != "embedding" or heads == [leaf.path]
    )


def _least_flops(layout: Layout, work: Work) -> float:
    """Return the fewest FLOPs of an item: before the first trainable leaf, nothing is differentiated at all."""
    flops, frozen = work.item_flops or 0.0, matmul_elements(layout, work.vocab_size, trainable=False)
    if not frozen or not flops:
        return flops
    forward = (flops + 2 * frozen) / 3
    return min(flops, forward + 2 * matmul_elements(layout, work.vocab_size, trainable=True))


def _passes_per_microbatch(step: TrainStep, work: Work) -> float:
    """Return how often a stage of a pipeline computes for each microbatch, and counts it once; 1 without."""
    passes, layout = step.spec.passes, step.layout
    frozen = matmul_elements(layout, work.vocab_size, trainable=False)
    if passes is None or frozen:  # of frozen weights it is not known what they compute
        return 1.0
    leaves = [leaf for leaf in layout.leaves if len(leaf.shape) - leaf.stacked > 1]
    share = num_parameters([leaf for leaf in leaves if leaf.is_staged]) / num_parameters(leaves)
    return 1 + share * (min(passes.forward, passes.backward) / (passes.repeats * step.spec.accumulate) - 1)
