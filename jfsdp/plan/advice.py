"""Suggest options that use a job's free memory, or that reduce its memory. Compiles nothing."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from typing import Any

import jax

from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import HOST
from jfsdp.layout.mesh import CONTEXT, PIPE, model_mesh
from jfsdp.layout.report import leaf_bytes
from jfsdp.plan.bound import Bound
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.jobs import INPUTS, bound_job, can_offload, chunked, find_planned_job, mesh_sizes, shard_planned
from jfsdp.plan.plan import Plan
from jfsdp.train.step.loss import as_loss
from jfsdp.train.update.stream import WINDOW
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.parse import Pairs

_STATE = ("parameters", "work", "optimizer", "state")
_BY_ROWS = ("activations", "logits", "attention", "compute", "workspace", "batch")
_SCHEDULER_SHARE = 0.8  # memory that XLA's scheduler may use, over the GPU's
_MAX_USED_SHARE = 0.9  # largest estimate that is suggested, over the limit
_MIN_EXPOSED_SHARE = 0.02  # exposed time over step time from which keeping parameters gathered is suggested
_MAX_REMAINING_SHARE = 0.97  # a change that reduces memory must leave at most this share
_MAX_DOUBLINGS = 10


@dataclasses.dataclass(frozen=True)
class Advice:
    """A change of a job's options, and the estimated memory of its step after it.

    Attributes:
      changes: new values by field of `StepOptions`, and of `nodes`. If the job does not fit, they include the previous
        advice's changes.
      needed_bytes: estimate per GPU. The state follows from its layout, and saved activations from a trace. Gradients
        are scaled by their shards, and the plan's other parts by the rows if they grow with them.
      parts: the parts of the memory that change, as text.
    """

    changes: dict[str, Any]
    needed_bytes: int
    parts: str


def advise_job(options: StepOptions, cluster: Cluster, limit_bytes: int, known: Plan | Bound) -> list[Advice]:
    """Return changes that use a GPU's memory if half of it is free, or that make a job fit, in the order to try them.

    If nothing fits on the cluster's nodes, the last ones say on how many nodes the job fits.

    Args:
      limit_bytes: GPU memory that the step may use.
      known: the plan of the job, or its bound. With a bound, activations and logits are not counted.
    """
    plan = known if isinstance(known, Plan) else None
    estimate = _Estimate(options, cluster, plan)
    needed_bytes = plan.needed_bytes if plan else estimate.after({}) or 0
    if needed_bytes > limit_bytes:
        return _reduce(estimate, limit_bytes)
    return list(_use(estimate, limit_bytes, plan)) if plan and needed_bytes < limit_bytes / 2 else []


def saved_bytes(options: StepOptions, devices: Any) -> int:
    """Return the bytes per device that a microbatch's forward saves for its backward, without parameters.

    Traces the step and allocates nothing. The saved values are assumed to be split evenly over the devices.

    Args:
      devices: from `topology_devices(cluster)`. A model may choose its attention by their platform.
    """
    planned = shard_planned(options, devices)
    layout, state = planned.model.layout, planned.step.abstract_state()
    shapes = {shape for leaf in layout.leaves for shape in (leaf.shape, leaf.shape[leaf.stacked :])}
    shapes |= {tuple(x.shape) for x in state.source.values()}
    trained = {path for path in state.source if layout.by_path[path].trainable}

    def saved(source: Any, model_state: Any, batch: Any) -> Any:
        def total(chosen: Any) -> Any:
            return as_loss(planned.model.apply(planned.job.loss, source | chosen, model_state, batch)[0]).total

        return jax.vjp(total, {path: source[path] for path in trained})[1]

    with model_mesh(planned.model.mesh), jax.default_device(devices[0]):
        found: list[Any] = jax.make_jaxpr(saved)(state.source, state.model_state, planned.batch).out_avals
    found = [x for x in found if x.memory_space != jax.memory.Space.Host]
    sizes = [math.prod(x.shape) * x.dtype.itemsize for x in found if tuple(x.shape) not in shapes]
    return sum(sizes) // len(devices) // options.accumulate


class _Estimate:
    """Estimates the memory of a job after changes of its options: the larger one of its passes and its update."""

    def __init__(self, options: StepOptions, cluster: Cluster, plan: Plan | None) -> None:
        self.options, self.cluster, self.plan = options, cluster, plan
        self.sizes = mesh_sizes(options.mesh, cluster.num_devices)
        self.devices = topology_devices(cluster) if plan else None
        self._saved: dict[Any, int] = {}

    def after(self, changes: dict[str, Any]) -> int | None:
        """Estimate the bytes per device; None if training would refuse the changes."""
        changes, plan, memory_bytes = dict(changes), self.plan, self.cluster.gpu.memory_bytes
        cluster = dataclasses.replace(self.cluster, nodes=changes.pop("nodes", self.cluster.nodes))
        options = dataclasses.replace(self.options, **changes)
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the user did not ask for this mesh
                bound = bound_job(options, cluster, self.devices and self.devices[0])
        except ValueError:
            return None
        if plan is None:
            return _least_bytes(bound, memory_bytes)
        grads, passes = _grad_bytes(bound.layout), plan.memory.passes
        if options.remat != self.options.remat:
            if options.remat not in self._saved:
                same = dataclasses.replace(self.options, remat=options.remat)
                self._saved[options.remat] = saved_bytes(same, self.devices)
            passes = [{**parts, "activations": self._saved[options.remat]} for parts in passes]
        if options.model_config != self.options.model_config:
            less = self._less_by_chunks(plan.layout, options.model_config)
            passes = [{**parts, "compute": max(parts["compute"] - less, 0)} for parts in passes]
        shards = grads / max(1, _grad_bytes(plan.layout))
        rows = _rows(options, cluster) / _rows(self.options, self.cluster)
        scale = {"gradients": shards, **dict.fromkeys(_BY_ROWS, rows), **dict.fromkeys(_STATE, 0)}
        update = shards * sum(size for name, size in plan.memory.update.items() if name not in _STATE)
        is_serial = plan.needed_bytes + plan.state.host_total > _SCHEDULER_SHARE * memory_bytes  # see _streamed_bytes
        if options.offload != self.options.offload or is_serial:
            update = grads + _streamed_bytes(bound, memory_bytes)
        if rows <= 1:  # the fullest moment stays the fullest
            passes = [max(passes, key=lambda parts: sum(parts.values()))]
        in_passes = max(sum(scale.get(name, 1) * size for name, size in parts.items()) for parts in passes)
        return int(bound.state_bytes + plan.memory.fragmentation_bytes + max(in_passes, update))

    def _less_by_chunks(self, layout: Layout, config: Pairs) -> int:
        """Return by how much chunks reduce the temporaries of a layer: about the values that it saves without remat."""
        if "chunks" not in self._saved:
            plain = dataclasses.replace(self.options, remat="none")
            parted = dataclasses.replace(plain, model_config=config)
            less = saved_bytes(plain, self.devices) - saved_bytes(parted, self.devices)
            layers = max(len(layout.units) - 1, *(math.prod(leaf.shape[: leaf.stacked]) for leaf in layout.leaves))
            seq_len = plain.seq_len or find_planned_job(plain).seq_len
            self._saved["chunks"] = int(less / layers * (1 - dict(config)["token_chunk"] / seq_len))
        return self._saved["chunks"]


def _grad_bytes(layout: Layout) -> int:
    return sum(layout.stage_bytes(leaf, "grad") for leaf in layout.leaves if leaf.trainable)


def _streamed_bytes(bound: Bound, memory_bytes: int) -> int:
    """Return the bytes per device of an offloaded state that an update copies at a time: that of `WINDOW` parameters.

    New parameters count too, because they do not replace the old ones. XLA's scheduler counts host memory as the
    device's (0.10.2, 0.12). If arguments and copies exceed its limit, it copies one parameter's state at a time.
    """
    layout, state = bound.layout, bound.state
    on_host = ((size, layout.by_path[path]) for path, size in state.host_by_leaf.items())
    sizes = sorted((size + leaf_bytes(layout, leaf, HOST), size) for size, leaf in on_host)
    streamed = sum(size for size, _ in sizes[-WINDOW:])
    counted = state.total + state.host_total + _grad_bytes(layout) + streamed
    return streamed if counted <= _SCHEDULER_SHARE * memory_bytes else sizes[-1][1]


def _least_bytes(bound: Bound, memory_bytes: int) -> int:
    streamed = _streamed_bytes(bound, memory_bytes)
    return bound.state_bytes + _grad_bytes(bound.layout) + max(bound.unit_bytes, streamed)


def _rows(options: StepOptions, cluster: Cluster) -> float:
    """Return the rows of a microbatch per device, divided by the devices that share each: its smallest share."""
    sizes = mesh_sizes(options.mesh, cluster.num_devices)
    return options.batch_per_device / options.accumulate / sizes.get("tensor", 1) / sizes.get(CONTEXT, 1)


def _use(estimate: _Estimate, limit_bytes: int, plan: Plan) -> Iterator[Advice]:
    """Yield separate changes that trade memory for time: less recomputation, more rows, fewer gathers."""
    options = estimate.options

    def advice(changes: dict[str, Any], parts: str) -> Iterator[Advice]:
        needed = estimate.after(changes)
        if needed is not None and needed <= _MAX_USED_SHARE * limit_bytes:
            yield Advice(changes, needed, parts)

    if options.remat == "full" and not plan.pipeline:
        yield from advice({"remat": "dots"}, "no matrix product is computed twice")
    free_bytes = _MAX_USED_SHARE * limit_bytes - plan.memory.fragmentation_bytes
    by_rows = [(parts, sum(parts[name] for name in _BY_ROWS)) for parts in plan.memory.passes]
    times = min((free_bytes - sum(parts.values()) + rows) / max(rows, 1) for parts, rows in by_rows)
    if options.accumulate > 1 and not plan.pipeline:
        yield from advice({"accumulate": 1}, "fewer gathers and larger matrix products")
    elif times >= 2:
        rows = options.batch_per_device * 2 ** min(int(math.log2(times)), _MAX_DOUBLINGS)
        yield from advice({"batch_per_device": rows}, "larger matrix products")
    clock, kept = plan.timeline, {"reshard_after_forward": False}
    is_resharded = options.reshard_after_forward is None and plan.layout.strategy.axes("param")
    if is_resharded and clock.exposed_s > _MIN_EXPOSED_SHARE * clock.step_s and not plan.pipeline:
        whole = sum(plan.layout.stage_bytes(leaf, "use") for leaf in plan.layout.leaves)
        in_passes = max(sum(parts.values()) for parts in plan.memory.passes) + plan.memory.fragmentation_bytes
        if (needed := max(plan.needed_bytes, in_passes + whole)) <= _MAX_USED_SHARE * limit_bytes:
            yield Advice(kept, needed, "parameters are gathered once a microbatch")


def _reduce(estimate: _Estimate, limit_bytes: int) -> list[Advice]:
    """Return cumulative changes that reduce memory, up to the first that fits.

    If nothing fits, also return the number of nodes that fit all changes; if it offloads something, the number of
    nodes that fit the job without offloading.
    """
    found: list[Advice] = []
    before, needed = {}, estimate.after({}) or 0
    for changes, parts in _reductions(estimate):
        after = estimate.after(before | changes)
        if after is not None and after < _MAX_REMAINING_SHARE * needed:
            before, needed = before | changes, after
            found.append(Advice(before, needed, parts))
        if needed <= limit_bytes:
            break
    resident = next((one.changes for one in reversed(found) if "offload" not in one.changes), {})
    for kept in [before] * (needed > limit_bytes) + [resident] * ("offload" in before):
        for power in range(1, _MAX_DOUBLINGS):
            changes = kept | {"nodes": estimate.cluster.nodes * 2**power}
            if (after := estimate.after(changes)) is not None and after <= limit_bytes:
                found.append(Advice(changes, after, "or more GPUs"))
                break
    return found


def _reductions(estimate: _Estimate) -> Iterator[tuple[dict[str, Any], str]]:
    """Yield changes of the options that reduce memory: the cheapest in time first, and a smaller global batch last."""
    options, cluster, sizes = estimate.options, estimate.cluster, estimate.sizes
    model_axes = tuple((axis, size) for axis, size in sizes.items() if axis not in ("replica", "fsdp"))
    if sizes.get("replica", 1) > 1:
        yield {"mesh": (("fsdp", -1), *model_axes), "strategy": "full_shard"}, "the state, over all GPUs"
    if options.strategy != "full_shard":
        yield {"strategy": "full_shard"}, "parameters, gradients and optimizer states"
    if estimate.plan is not None and options.remat not in ("full", INPUTS) and PIPE not in sizes:
        yield {"remat": "full"}, "activations"
    if estimate.plan is not None and PIPE not in sizes and options.accumulate < options.batch_per_device:
        yield {"accumulate": options.batch_per_device}, "activations and logits"
    if estimate.plan is not None and (changes := chunked(options, cluster.num_devices)):
        yield changes, "temporaries of a layer"
    if estimate.plan is not None and can_offload(options):
        yield {"remat": INPUTS}, "inputs of layers, to the host"
    for kinds, part in ((("opt_state",), "optimizer states"), (("opt_state", "params"), "parameters")):
        if not {*kinds} <= {*options.offload}:
            yield {"offload": tuple(dict.fromkeys((*options.offload, *kinds)))}, f"{part}, to the host"
    job = find_planned_job(options)
    can_split = {CONTEXT: job.in_context and PIPE not in sizes, "tensor": job.placements or job.axis_rules}
    for axis in can_split:
        if estimate.plan is not None and can_split[axis] and cluster.gpus_per_node > 1 and axis not in sizes:
            mesh = (("fsdp", -1), *model_axes, (axis, cluster.gpus_per_node))
            yield {"mesh": mesh}, "activations; a smaller global batch"
