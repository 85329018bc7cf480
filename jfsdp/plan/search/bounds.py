"""What can be said of a step without a compiler: its state, its bytes on the wire by formula, and a roofline."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any

from jfsdp.layout.mesh import MODEL_AXES, OUTER_FIRST
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.table import Layout, num_parameters
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.memory.peak import RESERVE_BYTES, limit_bytes
from jfsdp.plan.search.jobs import Planned, find_planned_job, matmul_elements, shard_planned
from jfsdp.plan.wire.theory import expected_wire
from jfsdp.train.account import StateBytes, account
from jfsdp.trainer.options import StepOptions

_LARGE_BYTES = 2**30  # a message of this size gets the most that a link gives


@dataclasses.dataclass(frozen=True)
class Bound:
    """A step needs more than this, and takes longer.

    Attributes:
      state: bytes of the state per device.
      compute_s: the model's FLOPs, with frozen leaves the fewest that may be left, at the datasheet's peak; with those
        that the stages of a pipeline compute for nothing; 0: unknown.
      wire_bytes: what the strategy must send per device.
      wire_s: these, each at the best bandwidth of its group, one after the other.
      items: per device and step.
    """

    state: StateBytes
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


def bound_job(options: StepOptions, cluster: Cluster) -> Bound:
    """Say of a job what needs no compiler.

    Raises:
      ValueError: for options that training would refuse.
    """
    return _bound(shard_planned(options, find_planned_job(options), num_devices=cluster.num_devices), cluster)


def estimate_job(options: StepOptions, cluster: Cluster, *, reserve_bytes: int = RESERVE_BYTES) -> dict[str, Any]:
    """Return the bound of a job as plain data.

    The step's temporaries are not in it: activations, gathered units and logits are what the compiler decides.

    Raises:
      ValueError: for options that training would refuse.
    """
    planned = shard_planned(options, find_planned_job(options), num_devices=cluster.num_devices)
    bound, layout = _bound(planned, cluster), planned.model.layout
    limit = limit_bytes(cluster.gpu.memory_bytes, reserve_bytes)
    return {
        "analytic": True,
        "state_bytes": bound.state_bytes,
        "host_state_bytes": bound.state.host_total,
        "limit_bytes": limit,
        "state_fits": bound.state_bytes <= limit,
        "unit_bytes": max((_unit_bytes(layout, unit.leaves) for unit in layout.units), default=0),
        "wire_bytes_theory": bound.wire_bytes,
        "wire_s": bound.wire_s,
        "compute_s": bound.compute_s or None,
        "step_s_at_least": bound.step_s,
        "strategy": layout.strategy.name,
        "mesh": dict(layout.mesh_sizes),
    }


def _bound(planned: Planned, cluster: Cluster) -> Bound:
    layout, work = planned.model.layout, planned.work
    step = planned.step
    rows = [row for row in expected_wire(layout, step.resolve(planned.batch)) if row.wire_bytes]
    sizes = {axis: dict(layout.mesh_sizes).get(axis, 1) for axis in OUTER_FIRST}
    wire_s = sum(
        row.wire_bytes / cluster.group_bandwidth(_group(sizes, row.axes)[: row.group_size], _LARGE_BYTES)
        for row in rows
    )
    items = work.items / layout.num_shards(MODEL_AXES)  # the least, if the model splits all that it computes
    flops = _least_flops(planned) * _passes_per_microbatch(planned)
    compute_s = flops * items / cluster.gpu.peak_flops(work.dtype)
    state = account(planned.model.abstract_state(planned.tx))
    return Bound(state, compute_s, sum(row.wire_bytes for row in rows), wire_s, items, work.item)


def _least_flops(planned: Planned) -> float:
    """Return the fewest FLOPs of an item: before the first trainable leaf, nothing is differentiated at all."""
    job, layout, flops = planned.job, planned.model.layout, planned.work.item_flops or 0.0
    frozen = matmul_elements(job, layout, trainable=False)
    if not frozen or not flops:
        return flops
    forward = (flops + 2 * frozen) / 3
    return min(flops, forward + 2 * matmul_elements(job, layout, trainable=True))


def _passes_per_microbatch(planned: Planned) -> float:
    """Return how often a stage of a pipeline computes for each microbatch, and counts it once; 1 without."""
    passes, num = planned.step.spec.passes, planned.step.config.accumulate
    frozen = matmul_elements(planned.job, planned.model.layout, trainable=False)
    if passes is None or frozen:  # of frozen weights it is not known what they compute
        return 1.0
    leaves = [leaf for leaf in planned.model.layout.leaves if len(leaf.shape) - leaf.stacked > 1]
    share = num_parameters([leaf for leaf in leaves if leaf.is_staged]) / num_parameters(leaves)
    return 1 + share * (min(passes.forward, passes.backward) / (passes.repeats * num) - 1)


def _group(sizes: dict[str, int], axes: Sequence[str]) -> list[int]:
    """Return the devices that share every index but those of `axes` with device 0, minor axes first."""
    group, stride = [0], 1
    for axis in reversed(OUTER_FIRST):
        if axis in axes:
            group = [device + index * stride for index in range(sizes[axis]) for device in group]
        stride *= sizes[axis]
    return group


def _unit_bytes(layout: Layout, paths: Iterable[str]) -> int:
    """Return the bytes of one layer of a unit, whole and in use."""
    leaves = [layout.by_path[path] for path in paths]
    return sum(item_bytes(leaf.stage("use").dtype) * math.prod(leaf.cut_shape[leaf.stacked :]) for leaf in leaves)
