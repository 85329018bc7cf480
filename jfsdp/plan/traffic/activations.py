"""What a step must send over the axes that the model itself is split over, read from its trace.

[Note: theory of activations]
The trace of a step says which dims are split: those of the weights, as the layout cuts them, and those that the model
states. From there each value follows by [Note: where a dim goes]: it is whole, split along a dim, or a sum that is
still to be formed (of a matrix product over a split dim, say). It is sent where it is read as something else: a sum
that is to be split is a reduce-scatter, one that is read whole an all-reduce, a split value that is read whole an
all-gather, and one that is to be split elsewhere an all-to-all; to split what is whole is free. What a sum becomes
is open through operations on single elements, until a statement, an operation or the end of a loop's iteration says it.
Sums that are added are one; but additions are not put in another order, as of what is whole and added between.
Of a value that another axis splits a part is sent. A sum over two axes is formed at once, whole if it is to be whole
over one of them: to split what is whole is free. What a pipeline writes out over `pipe` is taken over, and a sum over
`pipe` of one over `tensor` that is still to be formed is one sum over both. What nobody reads is not sent; but a loop
sends in every iteration. Nothing is read of what XLA compiled. It may send less, where of a sum that is stated whole
only a part is read; what it sends beyond is its own choice. The optimizer's update is left out: elements of a leaf may
need each other there.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

from jfsdp.compat import dce_jaxpr, manual_axes
from jfsdp.engine.dataflow import inner_jaxprs, is_literal, scan_counts
from jfsdp.engine.engine import SCOPE
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import MODEL_AXES, OUTER_FIRST
from jfsdp.plan.hlo.collectives import PERMUTE, wire_bytes
from jfsdp.plan.hlo.parse import hlo_dtype
from jfsdp.plan.traffic.forms import ALL_REDUCE, REDUCE_SCATTER, Axis, Loop, Sum, num_bytes
from jfsdp.train.step.step import Trace


@dataclasses.dataclass(frozen=True)
class Sent:
    """One value that crosses an axis.

    Attributes:
      axes: the mesh axes: one, or those over which one sum is formed.
      kind: of the collective.
      dtype: as HLO writes it.
      wire_bytes: sent per device and step.
      times: how often per step.
      source: the operation by which it has to, by its name in the program.
    """

    axes: tuple[str, ...]
    kind: str
    dtype: str
    wire_bytes: float
    times: int
    source: str


@dataclasses.dataclass(frozen=True)
class Activations:
    """What a step must send over the model's axes; see [Note: theory of activations].

    Attributes:
      sent: in the order of the trace.
      unread: operations of which it is not known what they do with a split dim: theory may be wrong about these.
    """

    sent: tuple[Sent, ...]
    unread: tuple[str, ...]


_WRITTEN = {"psum": ALL_REDUCE, "psum_invariant": ALL_REDUCE, "ppermute": PERMUTE}


class _Walk:
    """Follows a trace along all axes of the model at once, with the rows of the batch over the data axes."""

    def __init__(self, layout: Layout):
        self.sent: list[Sent] = []
        self.is_read: set[Any] = set()  # by some operation that was met
        self.times = 1
        self.now: dict[Any, tuple[Sent, float]] = {}  # what the operation at hand sends of a value, and its bytes
        self.sizes = dict(layout.mesh_sizes)
        self.rows = Axis(layout.data_axes, layout.num_shards(layout.data_axes))
        self.own = [Axis((axis,), self.sizes[axis]) for axis in _model_axes(layout)]
        for axis in self.own:
            axis.send = functools.partial(self._send, axis)
        self.axes = (*self.own, self.rows)

    def _send(self, axis: Axis, kind: str, var: Any, eqn: Any) -> None:
        rows, others = self.rows.read(var), [other for other in self.own if other is not axis]
        if isinstance(rows, Sum):  # one sum over both, which is the strategy's
            return
        is_split = [other for other in (*others, self.rows) if isinstance(other.read(var), int)]
        size = num_bytes(var.aval) / math.prod(other.parts for other in is_split)
        self._add(kind, var, size, axis.names, eqn)

    def _add(self, kind: str, var: Any, size: float, axes: Collection[str], eqn: Any) -> None:
        """Note what is sent. What one operation forms of a value over several axes is one sum, or one gather."""
        found, before = self.now.get(var, (None, 0.0))
        if found and (kind == found.kind or {kind, found.kind} == {ALL_REDUCE, REDUCE_SCATTER}):
            self.sent.remove(found)
            kind, axes, size = kind if kind == found.kind else ALL_REDUCE, {*axes, *found.axes}, max(size, before)
        ordered = tuple(axis for axis in OUTER_FIRST if axis in axes)
        moved = wire_bytes(kind, size, math.prod(self.sizes[axis] for axis in ordered)) * self.times
        name = f"{eqn.source_info.name_stack}/{eqn.primitive.name}"
        self.sent.append(Sent(ordered, kind, hlo_dtype(str(var.aval.dtype)), moved, self.times, name))
        self.now[var] = self.sent[-1], size

    def run(self, jaxpr: Any) -> None:
        """Follow the operations of a jaxpr, whose inputs have their forms."""
        self.is_read |= {atom for eqn in jaxpr.eqns for atom in eqn.invars if not is_literal(atom)}
        self.is_read |= {atom for atom in jaxpr.outvars if not is_literal(atom)}
        for eqn in jaxpr.eqns:
            if f"{SCOPE}.update" not in str(eqn.source_info.name_stack):
                self._step(eqn)

    def _step(self, eqn: Any) -> None:
        name = eqn.primitive.name
        self.now = {}
        if name in ("sharding_constraint", "reshard"):
            for axis in self.axes:
                axis.state(eqn)
        elif name == "optimization_barrier":
            self._pass(eqn.invars, eqn.outvars)
        elif name == "scan":
            self._scan(eqn)
        elif name == "shard_map":
            self._shard_map(eqn)
        elif (inner := _called(eqn)) is not None:
            self._pass(eqn.invars, inner.invars)
            self.run(inner)
            self._pass(inner.outvars, eqn.outvars)
        else:
            for axis in self.own:
                if _is_collective(eqn, axis.names):
                    self._written(axis, eqn)
            for axis in self.axes:
                axis.compute(eqn)

    def _written(self, axis: Axis, eqn: Any) -> None:
        """Take over what is written out over an axis, of kinds that a pipeline has."""
        kind = _WRITTEN.get(eqn.primitive.name)
        if kind is None:
            axis.unread[eqn.primitive.name] = None
            return
        if all(one == other for one, other in eqn.params.get("perm", [(0, 1)])):  # what stays is not sent
            return
        for var, given in zip(eqn.outvars, eqn.invars, strict=True):
            size, axes = float(num_bytes(var.aval)), set(axis.names)
            for other in self.own:
                if other is axis:
                    continue
                if isinstance(other.read(given), int):
                    size /= other.parts
                elif kind == ALL_REDUCE and other.joins(given, eqn):
                    axes |= other.names
            self._add(kind, var, size, axes, eqn)

    def _pass(self, given: Sequence[Any], taken: Sequence[Any]) -> None:
        for axis in self.axes:
            axis.forms.update(zip(taken, [axis.read(atom) for atom in given], strict=True))

    def _shard_map(self, eqn: Any) -> None:
        """Inside, a device has its part of what the specs split."""
        (inner,), names = inner_jaxprs(eqn), manual_axes(eqn)
        mapped = [axis for axis in self.axes if axis.names & names]
        for axis in mapped:
            for atom, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
                axis.turn(atom, axis.dim(spec), eqn)
        self._pass(eqn.invars, inner.invars)
        for axis in mapped:
            axis.forms.update(dict.fromkeys(inner.invars))
        self.run(inner)
        self._pass(inner.outvars, eqn.outvars)
        for axis in mapped:
            specs = eqn.params["out_specs"]
            axis.forms.update((out, axis.dim(spec)) for out, spec in zip(eqn.outvars, specs, strict=True))

    def _scan(self, eqn: Any) -> None:
        """Follow the body until what it carries is split as before; its iterations end with all sums formed."""
        (body,), (num_consts, num_carry) = inner_jaxprs(eqn), scan_counts(eqn)
        if eqn.params["length"] == 1:  # of a loop what is carried on is computed, though nobody reads the last of it
            needed, _ = dce_jaxpr(body, [out in self.is_read for out in eqn.outvars], instantiate=True)
            body = body.replace(eqns=needed.eqns)
        loop = Loop(eqn, body, num_consts, num_carry)
        starts = {axis: axis.enter(loop) for axis in self.axes}
        mark, outer, self.times = len(self.sent), self.times, self.times * eqn.params["length"]
        has_changed = True
        while has_changed:
            del self.sent[mark:]
            for axis, start in starts.items():
                axis.forms.update(zip(body.invars, start, strict=True))
            self.run(body)
            self.now = {}
            has_changed = any(axis.changes(loop, start) for axis, start in starts.items())
        for axis, start in starts.items():
            axis.leave(loop, start)
        self.times = outer


def find_activations(trace: Trace | None, layout: Layout) -> Activations:
    """Return what a step must send over the model's axes; see [Note: theory of activations].

    Args:
      trace: of the step, as `TrainStep.trace` returns it; None: nothing is known of it.
    """
    if trace is None or not _model_axes(layout):
        return Activations((), ())
    jaxpr, _ = dce_jaxpr(trace.jaxpr, [True] * len(trace.jaxpr.outvars), instantiate=True)  # what somebody reads
    walk = _Walk(layout)
    for axis in walk.axes:
        axis.forms.update(zip(jaxpr.invars, map(axis.dim, trace.specs), strict=True))
    walk.run(jaxpr)
    walk.now = {}
    for axis in walk.own:
        for atom in jaxpr.outvars:
            if isinstance(axis.read(atom), Sum):
                axis.turn(atom, None, jaxpr.eqns[-1])
    return Activations(tuple(walk.sent), tuple(dict.fromkeys(name for axis in walk.own for name in axis.unread)))


def _model_axes(layout: Layout) -> list[str]:
    """Return the axes of several devices that the model itself is split over."""
    sizes = dict(layout.mesh_sizes)
    return [axis for axis in MODEL_AXES if sizes.get(axis, 1) > 1]


def _is_collective(eqn: Any, axes: Collection[str]) -> bool:
    """Tell whether an operation of a `shard_map` is the model's own collective over some axes."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    moves = eqn.primitive.name not in ("axis_index", "pvary", "pcast")
    return moves and any(axis in axes for axis in (named if isinstance(named, tuple | list) else (named,)))


def _called(eqn: Any) -> Any:
    """Return the body of a call, and of nothing else."""
    found = [inner for inner in inner_jaxprs(eqn) if len(inner.invars) == len(eqn.invars)]
    return found[0] if found and len(found[0].outvars) == len(eqn.outvars) else None
