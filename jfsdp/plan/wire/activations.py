"""What a step must send over the axes that the model itself is split over, read from its trace.

[Note: theory of activations]
The trace of a step says which dims are split: those of the weights, as the layout cuts them, and those that the model
states. From there each value follows by [Note: where a dim goes]: it is whole, split along a dim, or a sum that is
still to be formed (of a matrix product over a split dim, say). It is sent where it is read as something else: a sum
that is to be split is a reduce-scatter, one that is read whole an all-reduce, a split value that is read whole an
all-gather, and one that is to be split elsewhere an all-to-all; to split what is whole is free. What a sum becomes
is open through operations on single elements, until a statement, an operation or the end of a loop's iteration says it.
Sums that are added are one; but additions are not put in another order, as of what is whole and added between.
What a pipeline writes out over `pipe` is taken over: of a value that another axis splits a part is sent, and a sum over
`pipe` of a sum over `tensor` that is still to be formed is one sum over both. What nobody reads is not sent; but a loop
sends in every iteration. Nothing is read of what XLA compiled. It may send less, where of a sum that is stated whole
only a part is read; what it sends beyond is its own choice. The optimizer's update is left out: elements of a leaf may
need each other there.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Sequence
from typing import Any

from jfsdp.compat import dce_jaxpr, manual_axes
from jfsdp.engine.dataflow import inner_jaxprs, is_literal, scan_counts
from jfsdp.engine.engine import SCOPE
from jfsdp.layout.mesh import MODEL_AXES, OUTER_FIRST
from jfsdp.layout.table import Layout
from jfsdp.plan.program.collectives import wire_bytes
from jfsdp.plan.wire.forms import ALL_REDUCE, Axis, Loop, Sum, num_bytes
from jfsdp.plan.wire.theory import PERMUTE, hlo_dtype
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


_SUMS = ("psum", "psum_invariant")
_WRITTEN = {**dict.fromkeys(_SUMS, ALL_REDUCE), "ppermute": PERMUTE}


class _Walk:
    """Follows a trace along one axis of the model, with the rows of the batch over the data axes and what the model's
    other axes split beside it."""

    def __init__(self, own: str, layout: Layout):
        self.sent: list[Sent] = []
        self.is_read: set[Any] = set()  # by some operation that was met
        self.times = 1
        self.rows = Axis(layout.data_axes, layout.num_shards(layout.data_axes))
        self.own = Axis((own,), layout.num_shards((own,)), self._send)
        self.others = [Axis((axis,), layout.num_shards((axis,))) for axis in _model_axes(layout) if axis != own]
        self.axes = (self.own, self.rows, *self.others)

    def _send(self, kind: str, var: Any, eqn: Any) -> None:
        rows = self.rows.read(var)
        if isinstance(rows, Sum):  # one sum over both, which is the strategy's
            return
        share = 1 if rows is None else self.rows.parts
        size = wire_bytes(kind, num_bytes(var.aval) / share, self.own.parts) * self.times
        self._add(kind, var, size, self.own.names, eqn)

    def _add(self, kind: str, var: Any, size: float, axes: Collection[str], eqn: Any) -> None:
        name = f"{eqn.source_info.name_stack}/{eqn.primitive.name}"
        ordered = tuple(axis for axis in OUTER_FIRST if axis in axes)
        self.sent.append(Sent(ordered, kind, hlo_dtype(str(var.aval.dtype)), size, self.times, name))

    def run(self, jaxpr: Any) -> None:
        """Follow the operations of a jaxpr, whose inputs have their forms."""
        self.is_read |= {atom for eqn in jaxpr.eqns for atom in eqn.invars if not is_literal(atom)}
        self.is_read |= {atom for atom in jaxpr.outvars if not is_literal(atom)}
        for eqn in jaxpr.eqns:
            if f"{SCOPE}.update" not in str(eqn.source_info.name_stack):
                self._step(eqn)

    def _step(self, eqn: Any) -> None:
        name = eqn.primitive.name
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
            if _is_collective(eqn, self.own.names):
                self._written(eqn)
            elif any(_is_collective(eqn, other.names) for other in self.others) and name in _SUMS:
                for atom in eqn.invars:
                    self.own.joins(atom, eqn)
            for axis in self.axes:
                axis.compute(eqn)

    def _written(self, eqn: Any) -> None:
        """Take over what is written out over the axis, of kinds that a pipeline has."""
        kind = _WRITTEN.get(eqn.primitive.name)
        if kind is None:
            self.own.unread[eqn.primitive.name] = None
            return
        if all(one == other for one, other in eqn.params.get("perm", [(0, 1)])):  # what stays is not sent
            return
        for var, given in zip(eqn.outvars, eqn.invars, strict=True):
            size, parts, axes = float(num_bytes(var.aval)), self.own.parts, set(self.own.names)
            for other in self.others:
                if isinstance(other.read(given), int):
                    size /= other.parts
                elif kind == ALL_REDUCE and other.joins(given, eqn):
                    parts, axes = parts * other.parts, axes | other.names
            self._add(kind, var, wire_bytes(kind, size, parts) * self.times, axes, eqn)

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
            has_changed = any(axis.changes(loop, start) for axis, start in starts.items())
        for axis, start in starts.items():
            axis.leave(loop, start)
        self.times = outer


def find_activations(trace: Trace | None, layout: Layout) -> Activations:
    """Return what a step must send over the model's axes; see [Note: theory of activations].

    Args:
      trace: of the step, as `TrainStep.trace` returns it; None: nothing is known of it.
    """
    axes = _model_axes(layout)
    if trace is None or not axes:
        return Activations((), ())
    # What nobody reads is not sent.
    jaxpr, _ = dce_jaxpr(trace.jaxpr, [True] * len(trace.jaxpr.outvars), instantiate=True)
    found = [_over(axis, jaxpr, trace.specs, layout) for axis in axes]
    return Activations(*(tuple(itertools.chain(*parts)) for parts in zip(*found, strict=True)))


def _model_axes(layout: Layout) -> list[str]:
    """Return the axes of several devices that the model itself is split over."""
    sizes = dict(layout.mesh_sizes)
    return [axis for axis in MODEL_AXES if sizes.get(axis, 1) > 1]


def _over(own: str, jaxpr: Any, specs: Sequence[Any], layout: Layout) -> tuple[list[Sent], list[str]]:
    walk = _Walk(own, layout)
    for axis in walk.axes:
        axis.forms.update(zip(jaxpr.invars, map(axis.dim, specs), strict=True))
    walk.run(jaxpr)
    for atom in jaxpr.outvars:
        if isinstance(walk.own.read(atom), Sum):
            walk.own.turn(atom, None, jaxpr.eqns[-1])
    return walk.sent, list(walk.own.unread)


def _is_collective(eqn: Any, axes: Collection[str]) -> bool:
    """Tell whether an operation of a `shard_map` is the model's own collective over some axes."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    moves = eqn.primitive.name not in ("axis_index", "pvary", "pcast")
    return moves and any(axis in axes for axis in (named if isinstance(named, tuple | list) else (named,)))


def _called(eqn: Any) -> Any:
    """Return the body of a call, and of nothing else."""
    found = [inner for inner in inner_jaxprs(eqn) if len(inner.invars) == len(eqn.invars)]
    return found[0] if found and len(found[0].outvars) == len(eqn.outvars) else None
