"""Resolves a step: decides its program and its other properties from a model, a loss and the shapes of a batch.

[Note: two programs]
`xla`: the batch is one global array with stated shardings, and XLA inserts the collectives. The loss may be any
function. Every microbatch is reduced over all axes.
`manual`: the step runs in one `shard_map` over the data axes, where each device sees its own rows, and jfsdp writes
every gather and reduction. So the loss must be a sum over rows (`jfsdp.Loss`). The model's state must not depend on
the rows (batch statistics), and the model must not state shardings over the data axes. Rng keys are folded with the
device's index. The `shard_map` leaves out the model's axes (`tensor`), over which a model may state any sharding.

The result of the loss decides: a scalar is `xla`, a sum with its weight `manual`. XLA turns an all-reduce into a
reduce-scatter only if one slice reads it. It cannot with a pad between them (padded leaves), an accumulator that is
split finer than its parameter, several gradients that are added afterwards (a weight with several uses, such as tied
embeddings), or a gradient that the model sums itself (a loss in chunks, with `jax.custom_vjp`). These cost up to twice
the bytes. XLA also cannot defer the reduction over an axis until after the last microbatch. A `shard_map` over axis
`replica` only would leave the group to XLA, but there JAX (0.10.2, 0.12) cannot partition cuDNN's attention.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.compat import warn
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.driver.schedule import as_prefetch
from jfsdp.engine.movements import CALL, REDUCE, Move, deferred_axes, group_axes, movements
from jfsdp.engine.options import is_gpu
from jfsdp.engine.pipeline.schedule import StageCalls, schedule_of, turns_stay
from jfsdp.engine.spec import MANUAL, XLA, StepSpec
from jfsdp.engine.unit import Arrays
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import CONTEXT, DATA_AXES, EXPERT, PIPE, axes_of, crosses_hosts, model_axes
from jfsdp.train.step.config import StepConfig
from jfsdp.train.step.gradients import Gradients, explain_axis_errors
from jfsdp.train.step.inspect_loss import LossFn, Survey, first_rows, survey

EXCESS_BYTES = 2**20  # a step warns if XLA sends so many bytes more per device, and more by this ratio
_EXCESS = 1.05
_ALIKE = "the loss draws from random keys that are not in the model's state; several devices would draw the same"
_SCALAR = "the loss is a scalar, so the step is program 'xla'"
_GATHERS = (
    "the model states a sharding with None for dim 0 of a value that depends on the rows: in program 'xla' every "
    "device then stores and computes the rows of all devices; use PartitionSpec.UNCONSTRAINED for this dim"
)
_RETURN_LOSS = "return jfsdp.Loss(total, weight), a sum over the rows that the loss receives and its weight"


def resolve_step(apply: ShardedApply, loss_fn: LossFn, config: StepConfig, batch: Any) -> StepSpec:
    """Make all decisions about a step that precede its compilation, from shapes; see [Note: two programs].

    Cost: one trace of the loss (see `survey`); with a pipeline also one of the step.

    Args:
      batch: arrays or shapes of the global batch.

    Raises:
      ValueError: for a loss, a model or options that the step's program does not support, with the remedy.

    Warns:
      UserWarning: if program `xla` sends more bytes than necessary, or the model does not use a mesh axis.
    """
    layout, mesh = apply.layout, apply.engine.mesh
    source = {one.path: jax.ShapeDtypeStruct(one.stored_shape, one.stage(one.source).dtype) for one in layout.leaves}
    shapes = source, dict(apply.model.state), jax.tree.map(_shape, batch)
    gathered, surveys = config.gathered_units(layout), list[Survey]()

    def trace(source: Arrays, model_state: Arrays, batch: Any) -> None:
        with explain_axis_errors(mesh):
            rows = first_rows(batch, config.accumulate)
            surveys.append(survey(apply, loss_fn, source, model_state, rows, gathered))

    jax.eval_shape(trace, *shapes)
    (found,) = surveys
    schedule = schedule_of(layout, config.pipe_schedule, config.accumulate, config.pipe_repeats)
    if not found.has_experts and (cut := next((leaf for leaf in layout.leaves if leaf.row_cuts), None)):
        raise ValueError(
            f"{cut.path}: is cut over mesh axis {EXPERT!r} (placements=), but the model never calls jfsdp.experts, so "
            "each device would use its own experts for its own rows only; call it (the models here take "
            "experts=jfsdp.experts), or remove the placement"
        )
    program, reason = _program(layout, config, found)
    _warn_of_axes(layout, mesh, found, program)
    once = config.syncs_last(layout)
    later = deferred_axes(layout, accumulate=config.accumulate, once=once, repeats=found.repeats)
    masks = "; dropout masks differ from one device's" if found.draws and layout.data_axes else ""
    spec = StepSpec(
        program=program,
        reason=reason + masks * (program == MANUAL),
        prefetch=as_prefetch(config.prefetch) if program == MANUAL else None,
        accumulate=config.accumulate,
        deferred=later if program == MANUAL else (),
        gathered=gathered,
        schedule=schedule,
        auto_axes=tuple(dict.fromkeys((*model_axes(mesh), *found.model_axes))),
        adds_up=found.is_sum and not found.has_statistics,
        is_zigzag=program == MANUAL and found.has_keys,
        products=tuple(found.products.items()),
    )
    return spec if schedule is None else _with_passes(apply, loss_fn, config, spec, shapes)


def _with_passes(apply: ShardedApply, loss_fn: LossFn, config: StepConfig, spec: StepSpec, shapes: Any) -> StepSpec:
    """Add the number of passes over each pipeline stage's layers, which depends on the order of calls in a trace."""
    calls: list[StageCalls | None] = []
    gradients = Gradients(apply, loss_fn, config, False, spec, calls.append)
    jax.eval_shape(lambda source, model_state, batch: gradients(source, model_state, batch, 1.0), *shapes)
    assert spec.schedule and spec.prefetch
    turns = turns_stay(spec.prefetch, config.pipe_repeats)
    return dataclasses.replace(spec, passes=spec.schedule.passes(config.pipe_repeats, turns, calls[-1]))


def _shape(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x), weak_type=getattr(x, "weak_type", not np.ndim(x)))


def _warn_of_axes(layout: Layout, mesh: Any, found: Survey, program: str) -> None:
    cut = {cut.axis for leaf in layout.leaves for cut in leaf.cuts}
    unused = [axis for axis in model_axes(mesh) if axis not in found.model_axes and axis not in cut]
    if unused:
        warn(
            f"mesh axis {unused[0]!r} (size {mesh.shape[unused[0]]}): the model states no sharding over it, so its "
            "devices repeat each other's work; cut weights over it (placements=, axis_rules=), state one in the model "
            f"(jax.lax.with_sharding_constraint), or give its devices to {' or '.join(map(repr, DATA_AXES))}"
        )

    if found.ragged and is_gpu(mesh):
        warn(
            f"the model calls jax.lax.ragged_dot with {found.ragged} groups, which XLA computes on a GPU as a dense "
            f"product for each group: {found.ragged} times the arithmetic that is needed; compute experts by batched "
            "products (jfsdp.experts with jnp.einsum)"
        )
    size = layout.num_shards([CONTEXT])
    shown, sent = f"mesh axis {CONTEXT!r} (size {size})", found.context_bytes * (size - 1) // size
    if sent and any(crosses_hosts(mesh, axis) for axis in axes_of(mesh, (CONTEXT,))):
        warn(
            f"{shown} joins devices of different hosts, and attention sends {sent:,} bytes per device over it in the "
            "forward of a microbatch, and at least as many in the backward; if a row fits on fewer devices, use a size "
            "that divides the devices of a host"
        )
    if size > 1 and not sent and program == XLA:
        warn(
            f"{shown}: no attention is split over it by jfsdp.attention or jfsdp.over_context with a number of tokens "
            "that the size divides, so XLA may compute attention of whole rows on every device"
        )


def check_needs(layout: Layout, config: StepConfig) -> list[str]:
    """Return the options that only program `manual` supports, as text.

    Raises:
      ValueError: if there are any and program `xla` is requested.
    """
    found = [] if config.prefetch is None else [f"prefetch={config.prefetch!r}"]
    found += [f"storage={layout.storage!r}"] if layout.buffers else []
    for axis in (PIPE, EXPERT):
        size = layout.num_shards([axis])
        found += [f"mesh axis {axis!r} (size {size})"] if size > 1 else []
    for leaf in layout.leaves:
        gather, reduce = leaf.gather_wire, leaf.reduce_wire
        if reduce or (gather and gather.between):
            field = "reduce_wire" if reduce else "gather_wire"
            found.append(f"{field}={str(reduce or gather)!r} (weights of unit {leaf.unit or '(root)'})")
            break
    for leaf in layout.leaves:
        wanted, use = layout.reduce_dtype(leaf), leaf.stage("use").dtype
        if leaf.trainable and wanted != use:
            found.append(f"reduce_dtype={wanted!r} (weights of unit {leaf.unit or '(root)'} are gathered in {use})")
            break
    found += ["sync='last'"] if config.sync == "last" and config.accumulate > 1 else []
    if found and config.program == XLA:
        raise ValueError(
            f"{found[0]}: program='xla' leaves the collectives to XLA; remove one of the two, or use "
            "program='manual' with a jfsdp.Loss"
        )
    return found


def xla_remedy(layout: Layout, config: StepConfig) -> str:
    """Describe how to select program `xla`, in which a loss sees all rows."""
    needs = " and ".join(check_needs(layout, config))
    return "use program='xla'" + (f" and remove {needs}" if needs else "")


def _program(layout: Layout, config: StepConfig, found: Survey) -> tuple[str, str]:
    needs, has_stages = check_needs(layout, config), layout.num_stages > 1
    if not layout.data_axes and not has_stages:
        return XLA, "one data shard has all rows: no weight is communicated"
    if has_stages and PIPE in found.model_axes:
        raise ValueError(
            f"the model states a sharding over mesh axis {PIPE!r} (size {layout.num_stages}), which is not available "
            "inside pipelined layers; remove the axis from the model, and shard the weights before and after the "
            f"layers with placements={{name: PartitionSpec({PIPE!r})}}, which also splits their activations"
        )
    if config.program == MANUAL or (config.program is None and (found.is_sum or has_stages)):
        axis = f"mesh axis {PIPE!r} (size {layout.num_stages})"
        reason = axis if has_stages else "the loss is a sum with its weight"
        reason = "program='manual'" if config.program == MANUAL else reason
        _check_rows(layout, config, reason, found)
        return MANUAL, reason
    if found.gathers_rows and layout.data_axes:
        warn(_GATHERS)
    if config.program == XLA:
        return XLA, "program='xla'"
    if needs:
        remedy = "" if found.problem else f"{_RETURN_LOSS}, or "
        raise ValueError(
            f"{needs[0]}: {_SCALAR}, which leaves the collectives to XLA; {remedy}remove {needs[0].partition(' (')[0]}"
        )
    if found.problem is None and (excess := _excess(layout, config, found)):
        warn(f"{_SCALAR}: {excess}; {_RETURN_LOSS}")
    return XLA, "the loss is a scalar"


def _check_rows(layout: Layout, config: StepConfig, reason: str, found: Survey) -> None:
    """Check that a loss and a model can run on the rows of one device."""
    problem, remedy = found.problem, xla_remedy(layout, config)
    if problem is None and layout.data_axes:
        problem = found.no_sum or (_ALIKE if found.draws_alike else None)
        if found.no_sum:
            remedy = f"{_RETURN_LOSS}; if rows depend on each other, {remedy}"
        elif found.draws_alike:
            remedy = f"draw from keys in the model's state, or {remedy}"
    if problem:
        apart = ", and each device sees its own rows only" if layout.data_axes else ""
        raise ValueError(f"{reason}: {problem}{apart}; {remedy}")


def _excess(layout: Layout, config: StepConfig, found: Survey) -> str:
    """Describe how many more bytes XLA sends than `manual` would, and why; "" if it is not much."""
    later = deferred_axes(layout, accumulate=config.accumulate, once=config.syncs_last(layout))
    manual = StepSpec(MANUAL, accumulate=config.accumulate, deferred=later, gathered=config.gathered_units(layout))
    by_manual = movements(layout, manual)
    by_xla = movements(layout, dataclasses.replace(manual, program=XLA, deferred=()))
    leaves = [leaf for leaf in layout.leaves if leaf.trainable]
    whole = {leaf.path: why for leaf in leaves if (why := _why_whole(layout, leaf, found))}
    num_bytes = sum(move.wire_bytes for move in by_xla if move.when != CALL or move.leaf.path not in whole)
    for leaf in leaves:
        if leaf.path in whole:
            times = config.accumulate * found.num_sums.get(leaf.path, 1)
            dtype, size = layout.reduce_dtype(leaf), layout.num_shards(layout.data_axes)
            num_bytes += Move(leaf, CALL, REDUCE, layout.data_axes, dtype, size, times=times).wire_bytes
    least = max(1.0, sum(move.wire_bytes for move in by_manual))
    if num_bytes <= max(_EXCESS * least, least + EXCESS_BYTES):
        return ""
    why = whole.get(max(whole, key=lambda path: math.prod(layout.by_path[path].shape), default=""))
    if later and config.accumulate > 1:
        why = f"it sums over {', '.join(later)} in every microbatch"
    return f"XLA sends up to {num_bytes / least:.2f} times the bytes of program 'manual', because {why}"


def _why_whole(layout: Layout, leaf: Leaf, found: Survey) -> str:
    """Describe why XLA all-reduces the gradient of a leaf that `manual` reduce-scatters; "" if it does not."""
    split = leaf.stage(leaf.source).axes
    if not leaf.stage("grad").axes:
        return ""
    if split and group_axes(layout):
        return f"it sums whole gradients over {', '.join(group_axes(layout))}"
    if leaf.padding:
        return f"{leaf.path} is padded"
    if split and leaf.stage("grad").axes != split:
        return f"the gradient of {leaf.path} is split finer than the parameter"
    if leaf.path in found.num_sums:
        is_derived = found.num_sums[leaf.path] == 1
        return f"the model forms the gradient of {leaf.path} itself" if is_derived else f"{leaf.path} has several uses"
    return ""
