"""Audit checks: each kind of mismatch between a compiled program and its layout.

[Note: audit checks]
    wire-dtype       arrays are sent in a wider or narrower dtype than the precision policy's
    replicated       the step's parameters have larger shards than the layout's
    optimizer-state  the step's optimizer states have larger shards than the layout's
    extra-bytes      more bytes are sent than in theory
    repeated-gather  a unit is gathered more often than in theory, for example by XLA's rematerialization
    all-reduce       gradients are all-reduced instead of reduce-scattered, at twice the bytes
    held             gathered weights of a resharded unit are kept from its forward to its backward
    overlap          too few of the bytes in loops have a matmul between start and done, or no loop sends any
    activations      more bytes are sent over the model axes (`tensor`) than the step's trace requires
    unknown          collectives belong to no leaf: activations that move, an optimizer that mixes elements
The findings of [Note: known miscompiles] come first.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from jfsdp.compat import manual_axes
from jfsdp.engine.movements import ALL_TO_ALL, BACKWARD, GATHER, REDUCE, SCATTER, Move
from jfsdp.jaxprs import inner_jaxprs
from jfsdp.layout.codec import SCALE_DTYPE
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import SENT_AXES
from jfsdp.layout.units import ROOT
from jfsdp.plan.hlo.collectives import SCALARS_BYTES, Collective
from jfsdp.plan.hlo.kept_weights import find_kept_weights
from jfsdp.plan.hlo.parse import Instruction, Module, Shape, hlo_dtype
from jfsdp.plan.hlo.trip_counts import walk
from jfsdp.plan.traffic.attribution import Part
from jfsdp.plan.traffic.ledger import OWN, Ledger, Row

_NARROW = {
    True: "gradients are rounded before they are summed; cast after that, or pass this reduce_dtype to the layout",
    False: "weights are rounded before they are gathered; if the model casts gathered weights, XLA may cast earlier: "
    "pass this param_dtype to the layout",
}
_REMATERIALIZED = (
    "XLA's rematerialization repeated them: disable it (xla_disable_hlo_passes=rematerialization) and give the "
    "units a remat policy"
)
_CALLED = "a unit called several times per step must be declared: calls={unit: times}"
_KEPT = (
    "the layout keeps gathered weights until the backward, but this program gathers them again there, as with a "
    "strategy that reshards after the forward"
)


@dataclasses.dataclass(frozen=True)
class Finding:
    """One mismatch between a program and its layout.

    Attributes:
      trap: the name of the check in [Note: audit checks].
      message: facts and remedy.
      bytes: excess bytes sent per device and step, or in memory per device; 0 if unknown.
      path: the leaf, or the largest of several; "" if it is about no leaf.
      source: the source line, or else the operation's name; "" if XLA kept neither.
    """

    trap: str
    message: str
    bytes: float
    path: str
    source: str


class Check:
    """The audit checks, a method for each; `allowed` is the number of excess bytes sent that is not a finding."""

    def __init__(self, layout: Layout, module: Module, ledger: Ledger, moves: Sequence[Move], allowed: float):
        self.layout, self.module, self.ledger, self.moves, self.allowed = layout, module, ledger, moves, allowed

    def wire_dtypes(self) -> Iterator[Finding]:
        """Find arrays in a wider or narrower dtype than all of the leaf's movements of that kind."""
        expected: dict[tuple[str, bool], set[int]] = {}  # bytes of an element, by the leaf and whether it is summed
        for move in self.moves:
            if not move.is_scales:
                is_sum = _is_sum(move.kind, move.is_of_matrices)
                expected.setdefault((move.leaf.path, is_sum), set()).add(_item_bytes(hlo_dtype(move.dtype)))
        wide, narrow = {}, {}
        for part in self.ledger.parts:
            leaf = self.layout.by_path[part.path] if part.path else None
            if leaf and not _is_of_scales(leaf, part):
                in_use = hlo_dtype(leaf.stage("use").dtype)
                is_sum = _is_sum(part.collective.kind, part.is_of_matrices)
                sizes = expected.get((part.path, is_sum), {_item_bytes(in_use)})
                wide[part] = part.wire_bytes * max(0.0, 1 - max(sizes) / _item_bytes(part.dtype))
                narrow[part] = part.wire_bytes * max(0.0, min(sizes) / _item_bytes(part.dtype) - 1)

        def key(part: Part) -> tuple[str, str, str]:
            return part.unit, part.collective.kind, part.dtype

        for (unit, kind, dtype), parts, size in _group(wide, key, self.allowed):
            yield self._finding(
                "wire-dtype",
                parts,
                size,
                f"{_name(unit)}: {kind} in {dtype}, wider than the precision policy says: {gb(size)} too many per "
                "device and step; cast the shard before its gather and constrain it to its layout at rest after the "
                "cast",
            )
        for (unit, kind, dtype), parts, _ in _group(narrow, key, self.allowed):
            what = f"{_name(unit)}: {kind} in {dtype}, narrower than the precision policy says"
            yield self._finding("wire-dtype", parts, 0.0, f"{what}: {_NARROW[_is_sum(kind)]}")

    def arguments(self, arguments: Iterable[tuple[Leaf, str, Instruction]]) -> Iterator[Finding]:
        """Find parameters and optimizer states with larger shards than the layout's."""
        found: dict[tuple[str, str], list[tuple[int, Leaf, Instruction]]] = {}
        for leaf, stage, argument in arguments:
            size = excess_elements(self.layout, leaf, stage, argument.shapes[0].dims)
            if size:
                num_bytes = size * _item_bytes(argument.shapes[0].dtype)
                trap = "optimizer-state" if stage == "opt" else "replicated"
                found.setdefault((trap, leaf.unit), []).append((num_bytes, leaf, argument))
        for (trap, unit), items in found.items():
            size = sum(item[0] for item in items)
            _, leaf, argument = max(items, key=lambda item: item[0])
            kind = "optimizer states" if trap == "optimizer-state" else "parameters"
            message = (
                f"{_name(unit)}: {len(items)} {kind} are larger than their shards, first {leaf.path} as "
                f"{argument.shapes[0].dtype}{list(argument.shapes[0].dims)} ({leaf.reason}): {gb(size)} of memory too "
                "much per device; give the state the shardings of model.abstract_state(tx)"
            )
            yield Finding(trap, message, float(size), leaf.path, argument.op_name.replace("\\'", "'"))

    def all_reduces(self) -> Iterator[Finding]:
        """Find all-reduced gradients that theory reduce-scatters."""
        scattered = {move.leaf.path for move in self.moves if move.kind == SCATTER}
        excess = {part: size for part, size in self._excess(REDUCE).items() if part.path in scattered}
        for unit, chosen, size in _group(excess, lambda part: part.unit, self.allowed):
            yield self._finding(
                "all-reduce",
                chosen,
                size / 2,
                f"{_name(unit)}: gradients of {len({part.path for part in chosen})} leaves are all-reduced instead of "
                f"reduce-scattered: {gb(size / 2)} too many per device and step; use program 'manual', with a loss "
                "that returns jfsdp.Loss",
            )

    def _excess(self, kind: str) -> dict[Part, float]:
        """Return the excess bytes of each array in collectives of one kind.

        Leaves of one shape are compared together, since the attribution among them is not always certain.
        """
        wanted: Counter[tuple[int, ...]] = Counter()
        total: Counter[tuple[int, ...]] = Counter()
        for move in self.moves:
            if move.kind == kind:
                wanted[_form(move.leaf)] += int(move.times * math.prod(move.shape))
        parts = [part for part in self.ledger.parts if part.collective.kind == kind and part.path]
        forms = {part: _form(self.layout.by_path[part.path]) for part in parts}
        for part in parts:
            total[forms[part]] += part.elements  # type: ignore[assignment]
        return {part: part.wire_bytes * max(0.0, 1 - wanted[forms[part]] / total[forms[part]]) for part in parts}

    def gathers(self) -> Iterator[Finding]:
        """Find units that are gathered more often than in theory."""
        excess = self._excess(GATHER)
        is_remat = any(".remat" in instruction.name for _, instruction, _ in walk(self.module))
        again = {move.leaf.unit for move in self.moves if move.when == BACKWARD}
        for unit, chosen, size in _group(excess, lambda part: part.unit, self.allowed):
            why = _REMATERIALIZED if is_remat else _CALLED if unit in again else _KEPT
            yield self._finding(
                "repeated-gather",
                chosen,
                size,
                f"{_name(unit)}: gathered more often than strategy {self.layout.strategy.name!r} says, {gb(size)} too "
                f"many per device and step; {why}",
            )

    def extra_bytes(self, tolerance: float) -> Iterator[Finding]:
        """Compare the total bytes sent with theory."""
        ledger = self.ledger
        sent = ledger.wire_bytes - ledger.own_bytes
        size = sent - ledger.wire_bytes_theory
        if size <= self.allowed:
            return
        worst = _worst(row for row in ledger.rows if row.what != OWN)
        shown = ", ".join(f"{_name(row.unit)} {row.kind} {row.dtype} {gb(excess)}" for row, excess in worst)
        path = next((row.paths[0] for row, _ in worst[:1] if row.paths), "")
        message = (
            f"{gb(sent)} per device and step, {gb(ledger.wire_bytes_theory)} by theory of strategy "
            f"{self.layout.strategy.name!r}, more than {tolerance:.1%} above it; most of it: "
            f"{shown or 'unknown collectives'}"
        )
        yield Finding("extra-bytes", message, size, path, "")

    def activations(self, tolerance: float) -> Iterator[Finding]:
        """Compare the bytes sent over model axes with the step's trace."""
        ledger = self.ledger
        if ledger.own_theory is None or ledger.own_theory.unknown:
            return
        size, allowed = ledger.own_bytes - ledger.own_bytes_theory, tolerance * ledger.own_bytes_theory + SCALARS_BYTES
        if size <= allowed:
            return
        worst = _worst(row for row in ledger.rows if row.what == OWN)
        shown = ", ".join(f"{row.kind} {row.dtype} {gb(excess)}" for row, excess in worst)
        message = (
            f"{gb(ledger.own_bytes)} per device and step over {', '.join(SENT_AXES)}, but the model's computations "
            f"and constraints require {gb(ledger.own_bytes_theory)}; most of it: {shown}; constrain the sharding of "
            "the values that XLA moves with jax.lax.with_sharding_constraint (docs/tensor.md)"
        )
        yield Finding("activations", message, size, "", "")

    def kept_weights(self) -> Iterator[Finding]:
        """Find gathered weights of resharded units that live from forward to backward and are not gathered again.

        XLA's combiner drops the names that distinguish gathers of the backward. So a program with all gathers of the
        layout has no findings.
        """
        kept = find_kept_weights(self.layout, self.module, self.ledger.parts)
        rows = [row for row in self.ledger.rows if row.kind == GATHER]
        missing = sum(row.expected_bytes - row.measured_bytes for row in rows)
        if missing < sum(item.num_bytes for item in kept) / 4:
            return
        for unit in dict.fromkeys(item.leaf.unit for item in kept):
            items = [item for item in kept if item.leaf.unit == unit]
            size = sum(item.num_bytes for item in items)
            leaves = [self.layout.by_path[path] for path in self.layout.unit(unit).leaves]
            whole = sum(Shape(hlo_dtype(leaf.stage("use").dtype), leaf.cut_shape).num_bytes for leaf in leaves)
            if size < 0.01 * whole:  # vectors of one size may be another unit's
                continue
            largest = max(items, key=lambda item: item.num_bytes)
            message = (
                f"{_name(unit)}: {len(items)} gathered weights are kept from forward to backward, "
                f"{size / 2**30:.3f} GiB per device, first {largest.leaf.path}, but the layout reshards them after the "
                "forward; do not save values that depend only on weights (remat)"
            )
            yield Finding("held", message, float(size), largest.leaf.path, largest.source)

    def overlap(self, share: float | None, least: float | None) -> Iterator[Finding]:
        """Compare the overlapped share of collective bytes in loops with `least`."""
        if least is None or (share is not None and share >= least):
            return
        if share is None:
            message = (
                f"no loop of this program has a collective, so an overlap of {least:.1%} cannot be checked; audit a "
                "program with loops (several stacked layers, over several devices), or leave min_overlap out"
            )
            yield Finding("overlap", message, 0.0, "", "")
            return
        in_loop = [part for part in self.ledger.parts if part.collective.in_loop]
        if not in_loop:
            message = f"{share:.1%} of all bytes in loops overlap, less than {least:.1%}; they fit no leaf"
            yield Finding("overlap", message, 0.0, "", "")
            return
        size = (1 - share) * sum(part.wire_bytes for part in in_loop)
        bare = {part: part.wire_bytes for part in in_loop if part.collective.done <= part.collective.start + 1}
        largest = max(bare or {part: part.wire_bytes for part in in_loop}, key=lambda part: part.wire_bytes)
        message = (
            f"{share:.1%} of the collective bytes in loops have a matmul between start and done, less than "
            f"{least:.1%}: {gb(size)} per device and step are exposed; set XLA options (optimization_level='O1', "
            "combine thresholds of a unit's bytes, a higher overlap limit), and measure at real size"
        )
        yield Finding("overlap", message, size, largest.path, _source(largest.collective))

    def unknown(self) -> Iterator[Finding]:
        """Find collectives that belong to no leaf."""
        if self.ledger.unknown_bytes <= self.allowed / 10:
            return
        for kind in dict.fromkeys(item.kind for item in self.ledger.unknown):
            items = [item for item in self.ledger.unknown if item.kind == kind]
            size = sum(item.total_bytes for item in items)
            largest = max(items, key=lambda item: item.total_bytes)
            shapes = ", ".join(f"{shape.dtype}{list(shape.dims)}" for shape in largest.parts[:3])
            message = (
                f"{len(items)} collectives of kind {kind} belong to no parameter or gradient, {gb(size)} per device "
                "and step, the "
                f"largest {largest.name} of {shapes}: activations that move between devices, or an optimizer that "
                "mixes the elements of a leaf"
            )
            yield Finding("unknown", message, size, "", _source(largest))

    def _finding(self, trap: str, parts: Sequence[Part], size: float, message: str) -> Finding:
        largest = max(parts, key=lambda part: part.wire_bytes)
        return Finding(trap, message, size, largest.path, _source(largest.collective))


def _group(excess: Mapping[Part, float], key: Any, allowed: float) -> Iterator[tuple[Any, list[Part], float]]:
    """Yield parts and summed excess by key, if the total exceeds `allowed`. Omits keys below 1 % of the total."""
    total = sum(excess.values())
    groups: dict[Any, list[Part]] = {}
    for part, size in excess.items():
        if size and total > allowed:
            groups.setdefault(key(part), []).append(part)
    for name, parts in groups.items():
        size = sum(excess[part] for part in parts)
        if size > 0.01 * total:
            yield name, parts, size


def _worst(rows: Iterable[Row]) -> list[tuple[Row, float]]:
    """Return the three rows with the largest excess over theory, and the excess."""
    excess = [(row, row.measured_bytes - row.expected_bytes) for row in rows if row.measured_bytes > row.expected_bytes]
    return sorted(excess, key=lambda pair: -pair[1])[:3]


def stated_flops(jaxpr: Any, num_devices: float) -> dict[str, float]:
    """Return the FLOPs per device of the matrix products in the trace of a step, by the dtype of their operands.

    Args:
      num_devices: over which XLA splits the operations; a `shard_map` has split them over its axes.
    """
    total: dict[str, float] = {}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            lhs, rhs = (atom.aval for atom in eqn.invars)
            ((contracted, _), _) = eqn.params["dimension_numbers"]
            depth = math.prod(lhs.shape[dim] for dim in contracted)
            is_float8 = all(jnp.dtype(x.dtype).itemsize == 1 for x in (lhs, rhs))
            name = "float8" if is_float8 else lhs.dtype.name
            total[name] = total.get(name, 0.0) + 2.0 * depth * math.prod(eqn.outvars[0].aval.shape) / num_devices
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        mesh = eqn.params["mesh"] if eqn.primitive.name == "shard_map" else None
        split = math.prod(mesh.shape[axis] for axis in manual_axes(eqn)) if mesh is not None else 1
        for body in inner_jaxprs(eqn):
            for name, flops in stated_flops(body, num_devices / split).items():
                total[name] = total.get(name, 0.0) + times * flops
    return total


def _is_sum(kind: str, is_of_matrices: bool = False) -> bool:
    return kind in (SCATTER, REDUCE) or (kind == ALL_TO_ALL and not is_of_matrices)


def _is_of_scales(leaf: Leaf, part: Part) -> bool:
    """Return whether an array has the scales of a leaf's blocks, by its dtype and its number of elements."""
    blocks = [wire.codec.block for wire in (leaf.gather_wire, leaf.reduce_wire) if wire and wire.block]
    most = part.collective.count * math.prod(leaf.cut_shape)
    return part.dtype == hlo_dtype(SCALE_DTYPE) and any(part.elements * block <= most for block in blocks)


def _form(leaf: Leaf) -> tuple[int, ...]:
    """Return the sorted dims of one layer of a leaf."""
    return tuple(sorted(leaf.cut_shape[leaf.stacked :]))


def excess_elements(layout: Layout, leaf: Leaf, stage: str, dims: tuple[int, ...]) -> int:
    """Return the excess elements of an argument over its shard; 0 if its shape does not match the leaf's."""
    divided = {leaf.dim, *(cut.dim for cut in leaf.cuts)}
    if stage not in dict(leaf.stages) or divided == {None} or len(dims) != len(leaf.shape):
        return 0
    shard = layout.shard_shape(leaf, stage)
    is_like = all(a == b for dim, (a, b) in enumerate(zip(dims, shard, strict=True)) if dim not in divided)
    return max(0, math.prod(dims) - math.prod(shard)) if is_like else 0


def _item_bytes(dtype: str) -> int:
    return Shape(dtype, ()).num_bytes


def _name(unit: str) -> str:
    return f"unit {unit!r}" if unit != ROOT else "root unit"


def gb(size: float) -> str:
    """Format bytes as GB or kB."""
    return f"{size / 1e9:.3f} GB" if size >= 1e6 else f"{size / 1e3:.3f} kB"


def _source(item: Collective) -> str:
    return item.source or item.op_name
