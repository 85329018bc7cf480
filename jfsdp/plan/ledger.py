"""The ledger: every collective of a compiled step beside what the strategy must send, unit by unit.

[Note: whose collective]
XLA combines collectives, renames them and takes layer dims off, so every array of a collective is attributed by
itself: by the unit in the engine's scopes (`jfsdp.gather.layers`) where the name still has them, and by its shape
against the leaves' stored, logical and sliced shapes. Where several leaves have that shape, the one with the most
still to come by theory gets it; so in a list of equal layers the sums are certain and the single rows are not. What
fits nothing is unknown, and is listed with its place in the source. A collective over the axes that the model itself
is split over (`tensor`) belongs to no leaf, whatever it carries: it is the model's own, and theory is silent of it.
"""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jfsdp.layout.table import Layout, Leaf
from jfsdp.layout.units import ROOT
from jfsdp.plan.axes import group_axes, is_own
from jfsdp.plan.collectives import SCALARS_BYTES, Collective, wire_bytes
from jfsdp.plan.scopes import find_scopes
from jfsdp.plan.theory import (
    GATHER,
    PERMUTE,
    REDUCE,
    SCATTER,
    Move,
    find_moves,
    is_replicated,
    piece_shape,
)

SCALAR_ELEMENTS = 64  # arrays up to this size that no leaf explains are counts, norms and the like
OWN = "the model's own"
WHATS = ("parameters", "gradients", "replicated", "padding", "scalars", OWN)
_WHOLE, _PIECES = ("whole", 0), ("pieces", 0)  # what a leaf may be in a collective that is not expected
_MOVES = (GATHER, SCATTER, REDUCE)


@dataclasses.dataclass(frozen=True)
class Part:
    """One array of a collective.

    Attributes:
      collective: the whole instruction.
      path: the leaf it belongs to; "" for scalars.
      unit: that leaf's unit.
      dtype: as HLO writes it.
      elements: of the gathered (or not yet reduced) array, times the executions per step.
      wire_bytes: sent per device and step.
      op_name: its own name, where XLA kept one for each array that it combined; else that of the collective.
    """

    collective: Collective
    path: str
    unit: str
    dtype: str
    elements: float
    wire_bytes: float
    op_name: str


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the ledger.

    Attributes:
      unit: the unit's name; "" is the root.
      what: one of WHATS: "replicated" are gradients of leaves that nothing splits although the strategy would; OWN is
        what the model's own shardings cost, of no unit.
      kind, dtype, axes, group_size: of the collective; `axes` is empty where the groups follow no mesh axis.
      measured_bytes, expected_bytes: sent per device and step.
      count: collectives per step that carry some of it.
      crosses_nodes: whether a group spans nodes; None where it is not known how many devices a node has.
      paths: the leaves.
    """

    unit: str
    what: str
    kind: str
    dtype: str
    axes: tuple[str, ...]
    group_size: int
    measured_bytes: float
    expected_bytes: float
    count: int
    crosses_nodes: bool | None
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Ledger:
    """What a step sends beside what it must send.

    Attributes:
      rows: attributed bytes, in the order of the layout's units.
      unknown: collectives of which some array fits no leaf.
      unknown_bytes: what these arrays send per device and step.
      parts: the attributed arrays, one by one.
    """

    rows: tuple[Row, ...]
    unknown: tuple[Collective, ...]
    unknown_bytes: float
    parts: tuple[Part, ...]

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step, the unknown ones included."""
        return sum(row.measured_bytes for row in self.rows) + self.unknown_bytes

    @property
    def own_bytes(self) -> float:
        """Those of them that the model's own shardings cost."""
        return sum(row.measured_bytes for row in self.rows if row.what == OWN)

    @property
    def wire_bytes_theory(self) -> float:
        """Bytes that each device must send per step, but for the model's own."""
        return sum(row.expected_bytes for row in self.rows)

    @property
    def wire_ratio(self) -> float:
        """Measured over expected, but for the model's own: 1 where nothing is sent and nothing need be, infinite where
        only theory is silent.
        """
        sent = self.wire_bytes - self.own_bytes
        if self.wire_bytes_theory:
            return sent / self.wire_bytes_theory
        return math.inf if sent else 1.0

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain data."""
        ratio = self.wire_ratio
        return {
            "wire_bytes": self.wire_bytes,
            "wire_bytes_theory": self.wire_bytes_theory,
            "wire_ratio": ratio if math.isfinite(ratio) else None,
            "own_bytes": self.own_bytes,
            "unknown_bytes": self.unknown_bytes,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "unknown": [_describe(item) for item in self.unknown],
        }


def _describe(item: Collective) -> dict[str, Any]:
    names = ("kind", "name", "dtype", "group_size", "count", "total_bytes", "op_name", "source")
    return {name: getattr(item, name) for name in names}


def make_ledger(
    layout: Layout, collectives: Iterable[Collective], *, gpus_per_node: int | None = None, **step: Any
) -> Ledger:
    """Attribute the collectives of a compiled step; see [Note: whose collective]. Moves no data.

    Args:
      collectives: as `find_collectives` reads them from the program.
      gpus_per_node: to tell what crosses nodes.
      step: `accumulate`, `reduce`, `reshard_after_backward`, `engine` and `calls`, as `expected_wire` takes them.

    Raises:
      ValueError: as `expected_wire`.
    """
    moves = find_moves(layout, **step)
    attribution = _Attribution(layout, moves)
    parts, unknown, unknown_bytes, own = [], [], 0.0, []
    for item in collectives:
        if is_own(layout, item):
            own.append(item)
            continue
        found, lost = attribution.parts(item)
        parts += found
        if lost:
            unknown.append(item)
            unknown_bytes += lost
    allowed = float(SCALARS_BYTES * step.get("accumulate", 1))
    rows = _Rows(layout, gpus_per_node)
    rows.expect(moves)
    rows.measure(parts)
    rows.measure_own(own)
    return Ledger(rows.finish(allowed), tuple(unknown), unknown_bytes, tuple(parts))


class _Attribution:
    """Finds the leaf of every array; keeps count of what theory still expects of each leaf."""

    def __init__(self, layout: Layout, moves: Sequence[Move]):
        self.layout = layout
        self.left: Counter[tuple[str, str, int]] = Counter()
        self.by_shape: dict[tuple[Any, ...], list[Leaf]] = {}
        for leaf in layout.by_path.values():
            self._index(_WHOLE, leaf, 1)
        for move in moves:
            key = move.kind, _group_key(move.kind, move.group_size)
            self.left[move.leaf.path, *key] += _elements(move)
            self._index(key, move.leaf, move.pieces)
            self._index(_PIECES, move.leaf, move.pieces)

    def _index(self, key: tuple[Any, ...], leaf: Leaf, pieces: int) -> None:
        """Enter the shapes of a leaf, exact and by size, under the collective that they are expected in, or for any."""
        shapes = set(_shapes(leaf, pieces))
        for shape in {_dims(shape) for shape in shapes} | {math.prod(shape) for shape in shapes}:
            leaves = self.by_shape.setdefault((*key, shape), [])
            if leaf not in leaves:
                leaves.append(leaf)

    def _candidates(self, item: Collective, dims: tuple[int, ...]) -> list[Leaf]:
        """Return the leaves that an array may be: with its dims before its size, expected before not expected."""
        expected = item.kind, _group_key(item.kind, item.group_size)
        keys = [(*key, shape) for shape in (_dims(dims), math.prod(dims)) for key in (expected, _WHOLE, _PIECES)]
        return next((self.by_shape[key] for key in keys if key in self.by_shape), [])

    def parts(self, item: Collective) -> tuple[list[Part], float]:
        """Return the attributed arrays of a collective, and the bytes of those that fit nothing."""
        taken: Counter[str] = Counter()
        found: list[Part] = []
        lost = 0.0
        names = split_names(item.op_name, len(item.parts))
        for shape, bare, name in zip(item.parts, item.unpadded or item.parts, names, strict=True):
            units = [self._unit(unit) for _, unit in find_scopes(name) if unit]
            sent = item.count * wire_bytes(item.kind, shape.num_bytes, item.group_size)
            path = self._find(item, bare.dims, units, taken)
            if path is None:
                lost += sent
                continue
            taken[path] += 1
            elements = float(item.count * bare.num_elements)
            self.left[path, item.kind, _group_key(item.kind, item.group_size)] -= elements  # type: ignore[assignment]
            unit = self.layout.by_path[path].unit if path else ROOT
            found.append(Part(item, path, unit, shape.dtype, elements, sent, name))
        return found, lost

    def _unit(self, name: str) -> str:
        return ROOT if name == "root" and all(unit.name != name for unit in self.layout.units) else name

    def _find(self, item: Collective, dims: tuple[int, ...], units: Sequence[str], taken: Counter[str]) -> str | None:
        """Return the leaf of one array, "" for a scalar; None: unknown."""
        size = math.prod(dims)
        if item.kind not in _MOVES and not (item.kind == PERMUTE and "jfsdp." in item.op_name):
            return None
        candidates = self._candidates(item, dims)
        if size <= SCALAR_ELEMENTS:
            candidates = [leaf for leaf in candidates if self._left(leaf, item) > 0]
            if not candidates:
                return ""
        return max(candidates, key=lambda leaf: self._fit(leaf, item, size, units, taken)).path if candidates else None

    def _fit(
        self, leaf: Leaf, item: Collective, size: int, units: Sequence[str], taken: Counter[str]
    ) -> tuple[Any, ...]:
        """Rank a candidate: named by the scope and not yet in this collective, then by what theory still expects."""
        is_named = leaf.unit in units and not taken[leaf.path]
        left = self._left(leaf, item)
        # What is left of several leaves may be enough: the one of which this is all that is left.
        return is_named, left > 0, -abs(left - item.count * size), bool(leaf.stacked) == item.in_loop

    def _left(self, leaf: Leaf, item: Collective) -> float:
        return self.left[leaf.path, item.kind, _group_key(item.kind, item.group_size)]


def split_names(op_name: str, num: int) -> list[str]:
    """Return the name of each of the arrays that XLA combined; JAX 0.12 writes `jit(f)/(a:b)`. Moves no data."""
    start = op_name.find("/(")
    if start >= 0 and op_name.endswith(")"):
        names, depth = [""], 0
        for letter in op_name[start + 2 : -1]:
            depth += (letter == "(") - (letter == ")")
            if letter == ":" and not depth:
                names.append("")
            else:
                names[-1] += letter
        if len(names) == num:
            return names
    return [op_name] * num


def _group_key(kind: str, group_size: int) -> int:
    return 0 if kind == PERMUTE else group_size  # a permutation has pairs and no groups


def _elements(move: Move) -> int:
    return move.times * math.prod(move.shape)


def _shapes(leaf: Leaf, pieces: int) -> Iterator[tuple[int, ...]]:
    """Yield the shapes that a piece of a leaf may have: stored, and if whole logical; layer dims taken off or not."""
    for shape in {piece_shape(leaf, pieces), *([leaf.shape] if pieces == 1 else [])}:
        for sliced in range(leaf.stacked + 1):
            yield shape[sliced:]


def _dims(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(sorted(dim for dim in shape if dim != 1))  # XLA transposes, and adds and drops dims of size 1


class _Rows:
    """Sums parts and moves into rows."""

    def __init__(self, layout: Layout, gpus_per_node: int | None):
        self.layout, self.gpus_per_node = layout, gpus_per_node
        self.measured: Counter[tuple[Any, ...]] = Counter()
        self.expected: Counter[tuple[Any, ...]] = Counter()
        self.counts: Counter[tuple[Any, ...]] = Counter()
        self.crosses: dict[tuple[Any, ...], bool | None] = {}
        self.paths: dict[tuple[Any, ...], dict[str, None]] = {}

    def expect(self, moves: Sequence[Move]) -> None:
        """Add what theory says."""
        for move in moves:
            padding = move.wire_bytes * move.padding_share
            key = move.kind, move.dtype, move.axes, move.group_size
            is_sum = move.kind in (SCATTER, REDUCE)
            self._add(self.expected, move.leaf, key, move.wire_bytes - padding, padding, is_sum=is_sum)

    def measure(self, parts: Sequence[Part]) -> None:
        """Add what was compiled."""
        seen: set[tuple[Any, ...]] = set()
        for part in parts:
            item = part.collective
            # Pairs of a permutation follow no axis: any device may be another's partner.
            group = range(self.layout.num_shards(self.layout.data_axes)) if item.kind == PERMUTE else item.group
            axes = group_axes(self.layout, group)
            key = item.kind, part.dtype, axes, len(group)
            crosses = self._crosses(group)
            leaf = self.layout.by_path[part.path] if part.path else None
            padding = self._padding_bytes(leaf, part)
            is_sum = item.kind in (SCATTER, REDUCE) and not item.is_gather
            for row in self._add(self.measured, leaf, key, part.wire_bytes - padding, padding, is_sum=is_sum):
                self.crosses[row] = crosses
                if (row, item.computation, item.name) not in seen:
                    seen.add((row, item.computation, item.name))
                    self.counts[row] += item.count

    def measure_own(self, collectives: Sequence[Collective]) -> None:
        """Add what the model's own shardings cost: of no unit, and not expected by anyone."""
        for item in collectives:
            for dtype, size in item.wire_by_dtype.items():
                row = ROOT, OWN, item.kind, dtype, group_axes(self.layout, item.group), item.group_size
                self.measured[row] += item.count * size  # type: ignore[assignment]
                self.counts[row] += item.count
                self.crosses[row] = self._crosses(item.group)
                self.paths.setdefault(row, {})

    def _crosses(self, group: Sequence[int]) -> bool | None:
        return None if self.gpus_per_node is None else len({i // self.gpus_per_node for i in group}) > 1

    def _padding_bytes(self, leaf: Leaf | None, part: Part) -> float:
        if leaf is None or not leaf.padding or leaf.dim is None:
            return 0.0
        # XLA also reduces arrays of the logical shape, and pads the sum.
        if not part.elements % math.prod(leaf.stored_shape[leaf.stacked :]):
            return part.wire_bytes * leaf.padding / leaf.stored_shape[leaf.dim]
        return 0.0

    def _add(
        self,
        sums: Counter[tuple[Any, ...]],
        leaf: Leaf | None,
        key: tuple[Any, ...],
        size: float,
        padding: float,
        *,
        is_sum: bool,
    ) -> list[tuple[Any, ...]]:
        if leaf is None:
            unit, what = ROOT, "scalars"
        else:
            unit, what = leaf.unit, "gradients" if is_sum else "parameters"
            what = "replicated" if is_replicated(self.layout, leaf) else what
        rows = [(unit, what, *key)]
        sums[rows[0]] += size  # type: ignore[assignment]
        if padding:
            rows.append((unit, "padding", *key))
            sums[rows[1]] += padding  # type: ignore[assignment]
        for row in rows:
            names = self.paths.setdefault(row, {})
            if leaf is not None:
                names[leaf.path] = None
        return rows

    def finish(self, allowed: float) -> tuple[Row, ...]:
        """Return the rows, units in the layout's order; scalars are expected as they are, up to an allowance."""
        order = [unit.name for unit in self.layout.units]
        keys = sorted(
            self.paths, key=lambda key: (key[1] in ("scalars", OWN), order.index(key[0]), WHATS.index(key[1]), key)
        )
        scalars = [key for key in keys if key[1] == "scalars"]
        for key in scalars:
            self.expected[key] = min(self.measured[key], allowed)  # type: ignore[assignment]
            allowed -= self.expected[key]
        return tuple(
            Row(
                *key,
                measured_bytes=float(self.measured[key]),
                expected_bytes=float(self.expected[key]),
                count=self.counts[key],
                crosses_nodes=self.crosses.get(key),
                paths=tuple(self.paths[key]),
            )
            for key in keys
        )
