"""The movements of each leaf in a step: which collective, over which axes, in which dtype, how often.

[Note: one list]
The manual program executes this list for every scheduled call. Theory, ledger and audit count its bytes. A gradient is
summed over every data axis once. (The derivative of a call outside the schedule sums over the same axes in two steps;
see `finish_in_place`.) Only program `manual` can defer axes until after the last microbatch (`deferred_axes`). The
expected movements of `xla` are the same list with each sum over all axes at once. The movements of whole matrices
(`jfsdp.optim.by_matrix`) come from the optimizer. Two movements are not in the list, since XLA derives them from what
the user states: those of other optimizers whose update mixes the elements of a leaf, and activations.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from fractions import Fraction

from jfsdp.engine.pipeline.schedule import Passes, StageCalls
from jfsdp.engine.spec import XLA, StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.wire import Wire

GATHER, SCATTER, REDUCE, ALL_TO_ALL = "all-gather", "reduce-scatter", "all-reduce", "all-to-all"

MATRICES = "matrices"  # the scope of operations on whole matrices, followed by their first leaf

# When a leaf moves: before the first microbatch; around each call of its unit; after the last; in the update.
STEP, FORWARD, BACKWARD, CALL, LAST, UPDATE = "step", "forward", "backward", "call", "last", "update"
OUTER, INNER = "outer", "inner"


@dataclasses.dataclass(frozen=True)
class Move:
    """One movement of one leaf.

    Attributes:
      leaf: the leaf, or buffer.
      when: STEP, FORWARD and BACKWARD (gathers), CALL and LAST (sums of gradients), UPDATE (of new shards).
      kind: the collective.
      axes: the axes of the layout that it runs over, major to minor.
      dtype: the dtype in which it is sent.
      group_size: devices of a group; less than the size of the axes if only neighbours take part (hpZ).
      pieces: the gathered (or not yet summed) array is one of this many pieces of the leaf.
      times: how often it runs per step; a fraction if the layers of a stack do not all move as often.
      stage: the stage that a gather reads.
      wire: its wire format; None: values in `dtype`.
      is_scales: whether it moves the scales that belong to codes.
      level: OUTER or INNER, if it runs between or inside groups of neighbouring devices only.
      strands: the moved array has this many groups of rows, which the devices of INNER split separately.
      of_sum: whether it is part of an all-reduce by exchange: see [Note: what a wire format means] in layout/wire.py.
      is_of_matrices: whether it moves whole matrices in the update; `leaf` is the first of a batch of equal leaves.
    """

    leaf: Leaf
    when: str
    kind: str
    axes: tuple[str, ...]
    dtype: str
    group_size: int
    pieces: int = 1
    times: int | Fraction = 1
    stage: str = ""
    is_of_matrices: bool = False
    wire: Wire | None = None
    is_scales: bool = False
    level: str = ""
    strands: int = 1
    of_sum: bool = False

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gathered or not yet reduced array, all layers of a stack together."""
        shape = list(self.leaf.piece_shape(self.pieces))
        if self.of_sum:
            dim = exchanged_dim(shape, self.leaf.stacked)
            shape[dim] += -shape[dim] % self.group_size
        return self.wire.codec.scale_shape(tuple(shape)) if self.wire and self.is_scales else tuple(shape)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step, padding included."""
        num_bytes = math.prod(self.shape) * item_bytes(self.dtype)
        return float(self.times) * wire_bytes(self.kind, num_bytes, self.group_size)


def wire_bytes(kind: str, full_bytes: float, group_size: int) -> float:
    """Return the bytes that a device sends for a value of `full_bytes` (gathered or unreduced).

    All-gather, reduce-scatter and all-to-all send (N-1)/N of it, an all-reduce twice that (a reduce-scatter and an
    all-gather), other collectives all of it.
    """
    share = (group_size - 1) / group_size if group_size else 0.0
    if kind in (GATHER, SCATTER, ALL_TO_ALL, "ragged-all-to-all"):
        return full_bytes * share
    return 2 * full_bytes * share if kind == REDUCE else float(full_bytes) * (group_size > 1)


def movements(layout: Layout, spec: StepSpec, calls: Mapping[str, int] | None = None) -> tuple[Move, ...]:
    """Return every movement of every leaf (or buffer) in a step, in the order of the leaves; the update's come last.

    In a pipeline, leaves outside the stages are gathered once per step, and their gradients summed once.

    Args:
      calls: by unit, the number of calls per microbatch; 1 for other units.

    Raises:
      ValueError: for a unit in `calls` that is not in the layout.
    """
    names = [unit.name for unit in layout.units]
    if unknown := [name for name in calls or {} if name not in names]:
        raise ValueError(f"calls: unit {unknown[0]!r} is unknown; the units are {', '.join(map(repr, names))}")
    in_one = spec.program == XLA  # it sees the rows of all devices: no axis can be deferred, no group summed first
    running, found = layout.gathered(spec.gathered).gathered(layout.kept_in_pipeline, "kept"), []
    staged = _times_of_stages(running, spec.passes or default_passes(layout, spec.accumulate))
    for leaf, running_leaf in zip(layout.moved, running.moved, strict=True):
        times = spec.accumulate * (calls or {}).get(leaf.unit, 1)
        if layout.num_stages > 1:
            times = 1
        if leaf.unit in spec.gathered:
            found += _gather(layout, leaf, leaf.source, STEP, by_xla=True)
        elif leaf.unit in layout.kept_in_pipeline:
            found += _keep(layout, leaf)
        for move in of_leaf(running, running_leaf, spec.deferred, in_one=in_one):
            count = staged[leaf.unit].get(move.when, 1) if leaf.is_staged else times
            found.append(move if move.when == LAST else dataclasses.replace(move, times=count))
    found += [move for leaf in layout.leaves if leaf.trainable for move in _updates(layout, leaf)]
    found += spec.update_moves
    return tuple(move for move in found if move.wire_bytes)


def default_passes(layout: Layout, accumulate: int) -> Passes:
    """Return the passes of a schedule without repeats and with the minimum number of ticks."""
    ticks = accumulate + layout.num_stages - 1
    return Passes(ticks, ticks)


def _times_of_stages(layout: Layout, passes: Passes) -> dict[str, dict[str, Fraction]]:
    """Return how often the leaves of each unit in the pipeline's stages move, by unit."""
    leaves = [leaf for leaf in layout.leaves if leaf.is_staged]
    units = list(dict.fromkeys(leaf.unit for leaf in leaves))
    layers = {leaf.unit: leaf.shape[0] // layout.num_stages for leaf in leaves}
    moving = {leaf.unit for leaf in leaves if _axes(leaf, leaf.source)}
    calls = passes.calls
    if calls is None and units:
        calls = StageCalls(passes.turns and units[0] in moving, units[0], units[-1], units[0])
    return {unit: _times(passes, unit, layers[unit], calls) for unit in units if calls}


def _times(passes: Passes, unit: str, layers: int, calls: StageCalls) -> dict[str, Fraction]:
    """Return how often a leaf of a stage's unit moves in a step: gathered forward and backward, and summed.

    Args:
      layers: the number of layers in a stage.
    """
    is_first, is_last, is_left = (calls.stay and unit == end for end in (calls.first, calls.last, calls.left))
    per_pass, is_silent = Fraction(layers, passes.repeats), unit in calls.silent
    again = is_last and not (is_first and layers == 1)
    gathered = {
        FORWARD: passes.forward * (per_pass - is_first) + is_first,
        BACKWARD: passes.backward * max(per_pass - is_first - is_last, 0) + again,
        CALL: passes.backward * per_pass + is_left,  # the first backward reduces zeros
    }
    return {when: Fraction(num * (when == FORWARD or not is_silent), layers) for when, num in gathered.items()}


def of_leaf(layout: Layout, leaf: Leaf, deferred: tuple[str, ...], *, in_one: bool = False) -> Iterator[Move]:
    """Yield the movements of a leaf in one microbatch with one call of its unit, and after the last microbatch.

    Args:
      deferred: the axes over which gradients are summed after the last microbatch.
      in_one: sum over all axes at once. Otherwise gradients are summed within the group that shares a copy first, so
        that only shards are sent between groups.
    """
    reshard = layout.policy(leaf.unit).reshard_after_forward
    yield from _gather(layout, leaf, leaf.source, FORWARD, by_xla=in_one)
    yield from _gather(layout, leaf, leaf.source if reshard is True else "kept", BACKWARD, by_xla=in_one)
    if not leaf.trainable:
        return
    accumulator = accumulator_axes(leaf, deferred)
    immediate = [axis for axis in layout.sum_axes(leaf) if axis not in deferred]
    deferred = tuple(axis for axis in layout.sum_axes(leaf) if axis in deferred)
    inner = [axis for axis in _axes(leaf, leaf.source) if axis in accumulator and not in_one]
    outer, split = ([axis for axis in axes if axis not in inner] for axes in (immediate, accumulator))
    yield from sums(layout, leaf, CALL, inner, inner, 1)
    yield from sums(layout, leaf, CALL, outer, split, layout.num_shards(inner))
    yield from sums(layout, leaf, LAST, deferred, last_axes(leaf, deferred), layout.num_shards(accumulator))


def deferred_axes(layout: Layout, *, accumulate: int, once: bool, repeats: bool = False) -> tuple[str, ...]:
    """Return the data axes over which the manual program sums after the last microbatch only.

    If the microbatches share one reduction (`once`), these are all data axes. Otherwise they are the axes between
    replicas, if gradients are summed more than once per step: with several microbatches, pipeline stages, or units
    that are called again (`repeats`). A sum that runs only once is not deferred, so that it overlaps with the backward
    of the next unit. An axis by which `opt` is split further is always deferred.
    """
    if once and accumulate > 1:
        return layout.data_axes
    scattered = {axis for leaf in layout.leaves if leaf.trainable for axis in _axes(leaf, "opt")}
    repeated = accumulate > 1 or layout.num_stages > 1 or repeats
    return tuple(axis for axis in group_axes(layout) if repeated or axis in scattered)


def group_axes(layout: Layout) -> tuple[str, ...]:
    """Return the data axes over which gathered weights and accumulators are replicated; none if no axis splits them."""
    used = {axis for leaf in layout.leaves for name in (leaf.source, "grad") for axis in _axes(leaf, name)}
    return tuple(axis for axis in layout.data_axes if axis not in used) if used else ()


def accumulator_axes(leaf: Leaf, deferred: tuple[str, ...]) -> tuple[str, ...]:
    """Return the axes that split a leaf's accumulator until the deferred axes are summed over."""
    return tuple(axis for axis in _axes(leaf, "grad") if axis not in deferred)


def last_axes(leaf: Leaf, deferred: tuple[str, ...]) -> tuple[str, ...]:
    """Return the deferred axes over which the last sum is a reduce-scatter: the axes that further split `opt`."""
    opt, done = _axes(leaf, "opt"), accumulator_axes(leaf, deferred)
    further = tuple(axis for axis in opt if axis not in done)
    return further if opt == (*done, *further) and set(further) <= set(deferred) else ()


def _axes(leaf: Leaf, name: str) -> tuple[str, ...]:
    stage = dict(leaf.stages)[name]
    return () if stage is None or leaf.dim is None else stage.axes


def _gather(layout: Layout, leaf: Leaf, stage: str, when: str, *, by_xla: bool = False) -> Iterator[Move]:
    """Yield the gather from a stage; XLA gathers at once, without levels."""
    size = layout.num_parts(leaf.stage(stage)) if _axes(leaf, stage) else 1
    if size > 1:
        move = Move(leaf, when, GATHER, _axes(leaf, stage), leaf.stage("use").dtype, size, stage=stage)
        levels = _levels(layout, move, leaf.gather_wire, leaf.stage(stage).ways)
        outer, inner = (move, None) if by_xla and leaf.gather_wire else levels
        if outer:
            yield from _coded(dataclasses.replace(outer, pieces=size // outer.group_size), leaf.gather_wire)
        if inner:
            yield inner


def _levels(layout: Layout, move: Move, wire: Wire | None, ways: int | None = None) -> tuple[Move | None, Move | None]:
    """Return a movement between groups of neighbouring devices, and one inside; None for a level of one device."""
    if wire is None:
        return None, move
    inside = layout.num_inside(move.axes, wire.between, ways)
    outside = move.group_size // inside
    if inside == 1 or outside == 1:
        return (move, None) if inside == 1 else (None, move)
    outer = dataclasses.replace(move, group_size=outside, level=OUTER)
    return outer, dataclasses.replace(move, group_size=inside, level=INNER, strands=outside)


def _coded(move: Move, wire: Wire | None) -> Iterator[Move]:
    """Yield the movement of an array, or of its codes and of the scales of its blocks."""
    if wire is None:
        yield move
        return
    codes = dataclasses.replace(move, wire=wire, dtype=wire.dtype)
    yield codes
    if wire.block:
        yield dataclasses.replace(codes, dtype=wire.codec.scale_dtype, is_scales=True)


def exchanged_dim(shape: Sequence[int], stacked: int) -> int:
    """Return the dim of an array that an all-reduce by exchange splits: the largest but the last, with the blocks."""
    return max(range(stacked, len(shape) - 1), key=lambda dim: shape[dim])


def _keep(layout: Layout, leaf: Leaf) -> Iterator[Move]:
    """Yield the gather from rest to stage `kept`, over the devices that do not split the leaf at `kept`."""
    parts = layout.num_parts(leaf.stage("kept")) if _axes(leaf, "kept") else 1
    axes = _axes(leaf, leaf.source)
    size = (layout.num_parts(leaf.stage(leaf.source)) if axes else 1) // parts
    if size > 1:
        yield Move(leaf, STEP, GATHER, axes, leaf.stage("use").dtype, size, parts, stage=leaf.source)


def sums(
    layout: Layout, leaf: Leaf, when: str, axes: Collection[str], split: Collection[str], pieces: int
) -> Iterator[Move]:
    """Yield a sum over `axes`: a reduce-scatter over the axes in `split`, an all-reduce over the others.

    Args:
      pieces: the array is one of this many pieces of the leaf.
    """
    assert set(split) <= set(axes), f"{split} of {axes}"
    dtype, parts, wire = layout.reduce_dtype(leaf), layout.num_shards(split), leaf.reduce_wire
    rest = tuple(axis for axis in axes if axis not in split)
    if parts > 1:
        outer, inner = _levels(layout, Move(leaf, when, SCATTER, tuple(split), dtype, parts, pieces), wire)
        if inner:
            yield inner
        if outer:
            exchange = dataclasses.replace(outer, kind=ALL_TO_ALL, pieces=pieces * parts // outer.group_size)
            yield from _coded(exchange, wire)
    if layout.num_shards(rest) > 1:
        all_reduce = Move(leaf, when, REDUCE, rest, dtype, layout.num_shards(rest), pieces * parts)
        outer, inner = _levels(layout, all_reduce, wire)
        if inner:
            yield dataclasses.replace(inner, strands=1)
        if outer:
            yield from _coded(dataclasses.replace(outer, kind=ALL_TO_ALL, of_sum=True), wire)
            yield dataclasses.replace(outer, kind=GATHER, of_sum=True)


def _updates(layout: Layout, leaf: Leaf) -> Iterator[Move]:
    """Yield the gather of updated shards, if the leaf is split less finely at rest than in the optimizer."""
    source = _axes(leaf, leaf.source)
    rest = tuple(axis for axis in _axes(leaf, "opt") if axis not in source)
    if layout.num_shards(rest) > 1:
        dtype = leaf.stage(leaf.source).dtype
        yield Move(leaf, UPDATE, GATHER, rest, dtype, layout.num_shards(rest), layout.num_shards(source))
