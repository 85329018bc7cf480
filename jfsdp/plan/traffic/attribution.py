"""Attribute each array of a collective to a leaf of the layout.

[Note: attribution of collectives]
XLA combines and renames collectives and drops layer dims, so each array of a collective is attributed separately. The
evidence is the unit in the engine's scopes (`jfsdp.gather.layers`), if the name still has one, and the array's shape,
compared with the leaves' stored, logical and sliced shapes. Among several leaves of that shape, the array goes to the
one whose remaining expected elements fit best. So for a list of equal layers only the sums are certain, not the single
rows. An array that fits no leaf is unknown, and is listed with its source line. A collective over model axes only
(`tensor`), of attention over `context`, or of experts over `expert`, belongs to no leaf: it moves activations
(activations.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from jfsdp import moe
from jfsdp.context import rows as context
from jfsdp.engine.engine import SCALES
from jfsdp.engine.movements import ALL_TO_ALL, GATHER, MATRICES, REDUCE, SCATTER, Move, wire_bytes
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf, cut_sizes
from jfsdp.layout.mesh import CONTEXT, EXPERT, MODEL_AXES, OUTER_FIRST, SENT_AXES
from jfsdp.layout.units import ROOT
from jfsdp.plan.hlo.collectives import PERMUTE, Collective
from jfsdp.plan.hlo.op_names import find_scopes, split_names

SCALAR_ELEMENTS = 64  # arrays up to this size that fit no leaf are counts, norms and similar
_WHOLE, _PIECES = ("whole", 0), ("pieces", 0)  # forms of a leaf in a collective that theory does not expect
_MOVES = (GATHER, SCATTER, REDUCE)


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective.

    Attributes:
      collective: the whole instruction.
      path: its leaf; "" for scalars.
      unit: the leaf's unit.
      dtype: HLO's name.
      elements: of the gathered (or unreduced) array, times the executions per step.
      wire_bytes: sent per device and step.
      op_name: the array's name if XLA kept one for each combined array, else the collective's.
      is_of_matrices: whether it moves whole matrices in the update; `path` is the first of a batch of equal leaves.
    """

    collective: Collective
    path: str
    unit: str
    dtype: str
    elements: float
    wire_bytes: float
    op_name: str
    is_of_matrices: bool


class Attribution:
    """Finds the leaf of every array; counts the elements that theory still expects of each leaf."""

    def __init__(self, layout: Layout, moves: Sequence[Move]):
        self.layout = layout
        self.remaining: Counter[tuple[str, str, int]] = Counter()
        self.by_shape: dict[tuple[Any, ...], list[Leaf]] = {}
        self.unit_of = {"root": ROOT} | {unit.name: unit.name for unit in layout.units}  # by its name in a scope
        self.kinds = {*_MOVES, *(move.kind for move in moves if move.wire)}
        for leaf in layout.by_path.values():
            self._index(_WHOLE, leaf, 1)
        for move in moves:
            key = move.kind, _group_key(move.kind, move.group_size)
            self.remaining[move.leaf.path, *key] += int(move.times * math.prod(move.shape))
            self._index(key, move.leaf, move.pieces, move)
            self._index(_PIECES, move.leaf, move.pieces, move)

    def _index(self, key: tuple[Any, ...], leaf: Leaf, pieces: int, move: Move | None = None) -> None:
        """Index a leaf by its shapes and sizes in a collective (`key`)."""
        shapes = set(_shapes(leaf, pieces))
        if move is not None and move.wire:
            shapes = {move.shape[sliced:] for sliced in range(leaf.stacked + 1)}
        for shape in {_dims(shape) for shape in shapes} | {math.prod(shape) for shape in shapes}:
            leaves = self.by_shape.setdefault((*key, shape), [])
            if leaf not in leaves:
                leaves.append(leaf)

    def _candidates(self, item: Collective, dims: tuple[int, ...]) -> list[Leaf]:
        """Return the leaves of an array's dims, or else of its size. Expected collectives come before others."""
        expected = item.kind, _group_key(item.kind, item.group_size)
        keys = [(*key, shape) for shape in (_dims(dims), math.prod(dims)) for key in (expected, _WHOLE, _PIECES)]
        return next((self.by_shape[key] for key in keys if key in self.by_shape), [])

    def parts(self, item: Collective) -> tuple[list[Part], float]:
        """Return the attributed arrays of a collective, and the bytes of the unknown ones."""
        taken: Counter[str] = Counter()
        found: list[Part] = []
        unknown_bytes = 0.0
        names = split_names(item.op_name, len(item.parts))
        for shape, name in zip(item.parts, names, strict=True):
            units = [self.unit_of.get(unit, unit) for _, unit in find_scopes(name) if unit]
            sent = item.count * wire_bytes(item.kind, shape.num_bytes, item.group_size)
            matrices = [leaf for verb, leaf in find_scopes(name) if verb == MATRICES]
            path = matrices[0] if matrices else self._find(item, shape.dims, units, taken)
            if path is None:
                unknown_bytes += sent
                continue
            taken[path] += 1
            elements = float(item.count * shape.num_elements)
            self.remaining[path, item.kind, _group_key(item.kind, item.group_size)] -= elements  # type: ignore[assignment]
            unit = self.layout.by_path[path].unit if path else ROOT
            found.append(Part(item, path, unit, shape.dtype, elements, sent, name, bool(matrices)))
        return found, unknown_bytes

    def _find(self, item: Collective, dims: tuple[int, ...], units: Sequence[str], taken: Counter[str]) -> str | None:
        """Return the path of an array's leaf; "" for a scalar; None: unknown."""
        size = math.prod(dims)
        if SCALES in item.op_name:
            return ""
        if item.kind not in self.kinds and not (item.kind == PERMUTE and "jfsdp." in item.op_name):
            return None
        candidates = self._candidates(item, dims)
        if size <= SCALAR_ELEMENTS:
            candidates = [leaf for leaf in candidates if self._remaining(leaf, item) > 0]
            if not candidates:
                return ""
        return max(candidates, key=lambda leaf: self._fit(leaf, item, size, units, taken)).path if candidates else None

    def _fit(
        self, leaf: Leaf, item: Collective, size: int, units: Sequence[str], taken: Counter[str]
    ) -> tuple[Any, ...]:
        """Rank a candidate: by its unit's name in the scope if new in this collective, then by remaining elements."""
        is_named = leaf.unit in units and not taken[leaf.path]
        remaining = self._remaining(leaf, item)
        # Among leaves with elements remaining, prefer the one whose remainder is closest to this array's elements.
        return is_named, remaining > 0, -abs(remaining - item.count * size), bool(leaf.stacked) == item.in_loop

    def _remaining(self, leaf: Leaf, item: Collective) -> float:
        return self.remaining[leaf.path, item.kind, _group_key(item.kind, item.group_size)]


def _group_key(kind: str, group_size: int) -> int:
    return 0 if kind == PERMUTE else group_size  # a permutation has pairs and no groups


def _shapes(leaf: Leaf, pieces: int) -> Iterator[tuple[int, ...]]:
    """Yield the possible shapes of a leaf's piece: stored, and logical if whole; with and without layer dims."""
    for shape in {leaf.piece_shape(pieces), *([cut_sizes(leaf.shape, leaf.cuts)] if pieces == 1 else [])}:
        for sliced in range(leaf.stacked + 1):
            yield shape[sliced:]


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in shape if dim != 1))  # XLA transposes, and adds and drops dims of size 1


def group_axes(layout: Layout, group: Sequence[int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ; () if the group is not a block of the mesh.

    Device numbers increase fastest along the innermost axis. An axis that the group spans partly is included.
    """
    places: list[list[int]] = []
    rest, sizes = list(group), [(axis, dict(layout.mesh_sizes).get(axis, 1)) for axis in OUTER_FIRST]
    for _, size in reversed(sizes):
        places.append([device % size for device in rest])
        rest = [device // size for device in rest]
    names = [name for name, _ in sizes]
    spans = {name: len(set(place)) for name, place in zip(names, reversed(places), strict=True)}
    axes = tuple(name for name in names if spans[name] > 1)
    return axes if math.prod(spans.values()) == len(set(group)) else ()


def split_activations(layout: Layout, item: Collective) -> tuple[Collective, Collective]:
    """Return a collective with those of its arrays that are activations, and with the others; XLA combines them.

    Over model axes strategies move nothing. Over `context` and `expert`, the arrays of attention and of experts have
    their scope, or lost their name.
    """
    axes, names = set(group_axes(layout, item.group)), split_names(item.op_name, len(item.parts))
    are_own = [bool(axes) and axes <= set(MODEL_AXES)] * len(names)
    if axes & {CONTEXT, EXPERT} and axes <= set(SENT_AXES):
        shared = item.op_name.partition("/(")[0]  # the part that combined names share
        scoped = [any(scope in shared + name for scope in (context.SCOPE, moe.SCOPE)) for name in names]
        are_own = [
            is_scoped or (item.kind == ALL_TO_ALL and not find_scopes(name)) for is_scoped, name in zip(scoped, names)
        ]

    def only(is_own: bool) -> Collective:
        kept = [place for place, found in enumerate(are_own) if found is is_own]
        if len(kept) == len(names):
            return item
        joined = f"/({':'.join(names[place] for place in kept)})" if kept else item.op_name
        return dataclasses.replace(item, parts=tuple(item.parts[place] for place in kept), op_name=joined)

    return only(True), only(False)
