"""Predict the activations that a step must send over axes `tensor`, `pipe`, `context` and `expert`, from its trace.

[Note: theory of activations]
The trace states the sharding of the weights (from the layout) and of values that the model constrains. Propagation by
[Note: propagation of dims] gives every other value a form: replicated, sharded along a dim, or a pending sum (of a
matmul over a sharded dim, say). Reading a value in another form costs a collective:

  pending sum -> sharded      reduce-scatter
  pending sum -> replicated   all-reduce
  sharded -> replicated       all-gather
  sharded -> another dim      all-to-all
  replicated -> sharded       free

- A sum stays pending through elementwise operations, until a constraint, another operation or the end of a loop's
  iteration decides its form. Pending sums that are added are one sum. Additions are not reordered, so a replicated
  value added in between separates sums.
- If another axis shards a value, only a device's part is sent.
- A sum over two axes is reduced at once. It becomes replicated if one of the axes needs it replicated.
- Explicit collectives count as written: a pipeline's over `pipe`, attention's over `context` (scope `jfsdp.context`),
  and those of experts over `expert` (scope `jfsdp.experts`). A `pipe` sum of a pending `tensor` sum is one sum
  over both axes.
- Unused values are not sent, but a loop sends in every iteration.
- The optimizer's update is excluded, since it may mix the elements of a leaf.

The compiled program is not read. XLA may send less, if only a part of a replicated sum is read. It may also choose to
send more.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Collection, Sequence
from typing import Any

from jfsdp import moe
from jfsdp.compat import dce_jaxpr, manual_axes
from jfsdp.context import rows as context
from jfsdp.engine.engine import SCOPE
from jfsdp.jaxprs import describe, inner_jaxprs, is_literal, scan_counts
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import CONTEXT, EXPERT, MODEL_AXES, OUTER_FIRST, SUB_AXES
from jfsdp.plan.hlo.collectives import PERMUTE, wire_bytes
from jfsdp.plan.hlo.parse import hlo_dtype
from jfsdp.plan.traffic.forms import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL, REDUCE_SCATTER, Axis, Loop, Sum, num_bytes
from jfsdp.train.step.step import Trace


@dataclasses.dataclass(frozen=True)
class Sent:
    """One activation that is sent.

    Attributes:
      axes: the mesh axis, or the axes of one sum.
      kind: of the collective.
      dtype: HLO's name.
      wire_bytes: sent per device and step.
      times: collectives per step.
      source: the name of the operation that requires it.
    """

    axes: tuple[str, ...]
    kind: str
    dtype: str
    wire_bytes: float
    times: int
    source: str


@dataclasses.dataclass(frozen=True)
class Activations:
    """The activations that a step must send; see [Note: theory of activations].

    Attributes:
      sent: in the order of the trace.
      unknown: operations without a rule for a sharded dim, so that theory may be wrong.
    """

    sent: tuple[Sent, ...]
    unknown: tuple[str, ...]


_EXPLICIT = {"psum": ALL_REDUCE, "psum_invariant": ALL_REDUCE, "ppermute": PERMUTE}
_EXPLICIT |= {"all_to_all": ALL_TO_ALL, "all_gather": ALL_GATHER, "reduce_scatter": REDUCE_SCATTER}


class _Walk:
    """Propagates shardings through a trace, for all model axes, and for rows and tokens of the batch."""

    def __init__(self, layout: Layout):
        self.sent: list[Sent] = []
        self.used: set[Any] = set()  # inputs of visited operations
        self.values: list[dict[str, Any]] = []  # see `list_values`
        self.times = 1
        self.current: dict[Any, tuple[Sent, float]] = {}  # sent values of the current operation, with their bytes
        self.sizes = dict(layout.mesh_sizes)
        rows = [axis for axis in layout.data_axes if axis != CONTEXT]
        self.rows = Axis(rows, layout.num_shards(rows))
        self.tokens = Axis((CONTEXT, *SUB_AXES[CONTEXT]), self.sizes.get(CONTEXT, 1))
        self.experts = Axis((EXPERT, *SUB_AXES[EXPERT]), self.sizes.get(EXPERT, 1))  # rows have its forms
        self.model_axes = [Axis((axis,), self.sizes[axis]) for axis in _model_axes(layout)]
        for axis in (*self.model_axes, self.tokens, self.experts):
            axis.send = functools.partial(self._send, axis)
        self.axes = (*self.model_axes, self.rows, self.tokens)

    def _send(self, axis: Axis, kind: str, var: Any, eqn: Any) -> None:
        sums = [other for other in (self.rows, self.tokens) if isinstance(other.read(var), Sum)]
        if sums or not self._is_own(axis, eqn):  # the strategy's reduction includes a sum over data axes
            return
        is_split = [other for other in self.axes if other is not axis and isinstance(other.read(var), int)]
        size = num_bytes(var.aval) / math.prod(other.parts for other in is_split)
        self._add(kind, var, size, axis.names, eqn)

    def _is_own(self, axis: Axis, eqn: Any) -> bool:
        """Return whether a collective over an axis is of activations."""
        scopes = {self.tokens: context.SCOPE, self.experts: moe.SCOPE}
        return scopes.get(axis, "") in str(eqn.source_info.name_stack)

    def _add(self, kind: str, var: Any, size: float, axes: Collection[str], eqn: Any) -> None:
        """Record a sent value; one operation's collectives of a value over several axes are one collective."""
        found, before = self.current.get(var, (None, 0.0))
        if found and (kind == found.kind or {kind, found.kind} == {ALL_REDUCE, REDUCE_SCATTER}):
            self.sent.remove(found)
            kind, axes, size = kind if kind == found.kind else ALL_REDUCE, {*axes, *found.axes}, max(size, before)
        ordered = tuple(axis for axis in OUTER_FIRST if axis in axes)
        moved = wire_bytes(kind, size, math.prod(self.sizes[axis] for axis in ordered)) * self.times
        name = f"{eqn.source_info.name_stack}/{eqn.primitive.name}"
        self.sent.append(Sent(ordered, kind, hlo_dtype(str(var.aval.dtype)), moved, self.times, name))
        self.current[var] = self.sent[-1], size

    def run(self, jaxpr: Any) -> None:
        """Propagate through a jaxpr whose inputs have forms."""
        self.used |= {atom for eqn in jaxpr.eqns for atom in eqn.invars if not is_literal(atom)}
        self.used |= {atom for atom in jaxpr.outvars if not is_literal(atom)}
        for eqn in jaxpr.eqns:
            if f"{SCOPE}.update" not in str(eqn.source_info.name_stack):
                self._step(eqn)

    def _step(self, eqn: Any) -> None:
        name = eqn.primitive.name
        self.current = {}
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
            for axis in (*self.model_axes, self.tokens, self.experts):
                if _is_collective(eqn, axis.names) and self._is_own(axis, eqn):
                    self._run_explicit(axis, eqn)
            for axis in self.axes:
                axis.compute(eqn)
            if name in ("dot_general", "name"):
                self._list(eqn)

    def _list(self, eqn: Any) -> None:
        """Record how the value of an operation is split, once."""
        (var,), source = eqn.outvars, eqn.params["name"] if eqn.primitive.name == "name" else describe(eqn)
        names = [(axis.read(var), sorted(axis.names & self.sizes.keys())) for axis in self.axes]
        split = [[name for form, axes in names if form == dim for name in axes] for dim in range(var.aval.ndim)]
        unreduced = [name for form, axes in names if isinstance(form, Sum) for name in axes]
        value = {"source": source, "dtype": str(var.aval.dtype), "shape": var.aval.shape, "split": split}
        value["unreduced"] = unreduced
        self.values += [value] if value not in self.values else []

    def _run_explicit(self, axis: Axis, eqn: Any) -> None:
        """Record an explicit collective over an axis, of the kinds that pipelines, attention and experts use."""
        kind = _EXPLICIT.get(eqn.primitive.name)
        if kind is None:
            axis.unknown[eqn.primitive.name] = None
            return
        if all(one == other for one, other in eqn.params.get("perm", [(0, 1)])):  # each device keeps its value
            return
        for var, given in zip(eqn.outvars, eqn.invars, strict=True):
            size, axes = float(max(num_bytes(var.aval), num_bytes(given.aval))), set(axis.names)
            for other in self.model_axes:
                if other is axis:
                    continue
                if isinstance(other.read(given), int):
                    size /= other.parts
                elif kind == ALL_REDUCE and other.merge_sum(given, eqn):
                    axes |= other.names
            self._add(kind, var, size, axes, eqn)

    def _pass(self, given: Sequence[Any], taken: Sequence[Any]) -> None:
        for axis in self.axes:
            axis.forms.update(zip(taken, [axis.read(atom) for atom in given], strict=True))

    def _shard_map(self, eqn: Any) -> None:
        """Propagate through a `shard_map`, whose body sees a device's shard along the mapped axes."""
        (inner,), names = inner_jaxprs(eqn), manual_axes(eqn)
        mapped = [axis for axis in self.axes if axis.names & names]
        for axis in mapped:
            for atom, spec in zip(eqn.invars, eqn.params["in_specs"], strict=True):
                axis.reshard(atom, axis.dim(spec), eqn)
        self._pass(eqn.invars, inner.invars)
        for axis in mapped:
            axis.forms.update(dict.fromkeys(inner.invars))
        self.run(inner)
        self._pass(inner.outvars, eqn.outvars)
        for axis in mapped:
            specs = eqn.params["out_specs"]
            axis.forms.update((out, axis.dim(spec)) for out, spec in zip(eqn.outvars, specs, strict=True))

    def _scan(self, eqn: Any) -> None:
        """Propagate through the body until the forms of its carry are stable. Each iteration reduces its sums."""
        (body,), (num_consts, num_carry) = inner_jaxprs(eqn), scan_counts(eqn)
        if eqn.params["length"] == 1:  # longer loops compute the whole carry, even if its last value is unused
            needed, _ = dce_jaxpr(body, [out in self.used for out in eqn.outvars], instantiate=True)
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
            self.current = {}
            has_changed = any(axis.changes(loop, start) for axis, start in starts.items())
        for axis, start in starts.items():
            axis.leave(loop, start)
        self.times = outer


def list_values(trace: Trace, layout: Layout) -> list[dict[str, Any]]:
    """Return how the matrix products and named values of a step are split over the mesh, forward and backward.

    Returns:
      For each value its "source" (the user's line and operation, or the name of `checkpoint_name`), "dtype" and "shape"
      (in the trace; inside a `shard_map`, of one device's rows and tokens), "split" (for each dim, the mesh axes that
      split it further), and "unreduced" (the axes over which it is a pending sum).
    """
    return _walk(trace, layout)[0].values


def find_activations(trace: Trace | None, layout: Layout) -> Activations:
    """Return the activations that a step must send; see [Note: theory of activations].

    Args:
      trace: of the step, from `TrainStep.trace`; None: unknown, and the result is empty.
    """
    if trace is None or not (_model_axes(layout) or {CONTEXT, EXPERT} & {*layout.data_axes}):
        return Activations((), ())
    walk, jaxpr = _walk(trace, layout)
    walk.current = {}
    for axis in walk.model_axes:
        for atom in jaxpr.outvars:
            if isinstance(axis.read(atom), Sum):
                axis.reshard(atom, None, jaxpr.eqns[-1])
    return Activations(tuple(walk.sent), tuple(dict.fromkeys(op for axis in walk.model_axes for op in axis.unknown)))


def _walk(trace: Trace, layout: Layout) -> tuple[_Walk, Any]:
    jaxpr, _ = dce_jaxpr(trace.jaxpr, [True] * len(trace.jaxpr.outvars), instantiate=True)  # used values only
    walk = _Walk(layout)
    for axis in walk.axes:
        axis.forms.update(zip(jaxpr.invars, map(axis.dim, trace.specs), strict=True))
    walk.run(jaxpr)
    return walk, jaxpr


def _model_axes(layout: Layout) -> list[str]:
    """Return the model axes of size 2 or more."""
    sizes = dict(layout.mesh_sizes)
    return [axis for axis in MODEL_AXES if sizes.get(axis, 1) > 1]


def _is_collective(eqn: Any, axes: Collection[str]) -> bool:
    """Return whether an operation is an explicit collective over one of the axes."""
    named = eqn.params.get("axes", eqn.params.get("axis_name", ()))
    moves = eqn.primitive.name not in ("axis_index", "pvary", "pcast")
    return moves and any(axis in axes for axis in (named if isinstance(named, tuple | list) else (named,)))


def _called(eqn: Any) -> Any:
    """Return the body of a call; None for other operations."""
    found = [inner for inner in inner_jaxprs(eqn) if len(inner.invars) == len(eqn.invars)]
    return found[0] if found and len(found[0].outvars) == len(eqn.outvars) else None
