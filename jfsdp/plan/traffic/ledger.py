"""The ledger: every collective of a compiled step beside what the strategy must send, unit by unit."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from jfsdp.engine.movements import REDUCE, SCATTER, Move, deferred_axes, movements
from jfsdp.engine.spec import StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.units import ROOT
from jfsdp.plan.hlo.collectives import SCALARS_BYTES, Collective
from jfsdp.plan.traffic.activations import Activations, Sent, find_activations
from jfsdp.plan.traffic.attribution import Attribution, Part
from jfsdp.plan.traffic.axes import group_axes, is_own
from jfsdp.plan.traffic.theory import PERMUTE, hlo_dtype, is_replicated
from jfsdp.train.step.step import Trace

OWN = "the model's own"
WHATS = ("parameters", "gradients", "replicated", "padding", "scalars", OWN)


@dataclasses.dataclass(frozen=True)
class Row:
    """One line of the ledger.

    Attributes:
      unit: the unit's name; "" is the root.
      what: one of WHATS: "replicated" are gradients of leaves that nothing splits although the strategy would; OWN is
        what crosses the axes that the model itself is split over, of no unit.
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
      own_theory: what must cross the axes that the model itself is split over; None without the step's trace.
    """

    rows: tuple[Row, ...]
    unknown: tuple[Collective, ...]
    unknown_bytes: float
    parts: tuple[Part, ...]
    own_theory: Activations | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step, the unknown ones included."""
        return sum(row.measured_bytes for row in self.rows) + self.unknown_bytes

    @property
    def own_bytes(self) -> float:
        """Those of them that cross the axes that the model itself is split over."""
        return sum(row.measured_bytes for row in self.rows if row.what == OWN)

    @property
    def own_bytes_theory(self) -> float:
        """Bytes that each device must send there; 0 where the step's trace is not known."""
        return sum(row.expected_bytes for row in self.rows if row.what == OWN)

    @property
    def wire_bytes_theory(self) -> float:
        """Bytes that each device must send per step, but for the model's own."""
        return sum(row.expected_bytes for row in self.rows if row.what != OWN)

    @property
    def wire_ratio(self) -> float:
        """Measured over expected, but for the model's own: 1 where nothing is sent and nothing need be, infinite where
        only theory is silent.
        """
        return _ratio(self.wire_bytes - self.own_bytes, self.wire_bytes_theory)

    @property
    def own_ratio(self) -> float | None:
        """The same of the model's own; None where the step's trace is not known."""
        return self.own_theory and _ratio(self.own_bytes, self.own_bytes_theory)

    def to_dict(self) -> dict[str, Any]:
        """Return the ledger as plain data."""
        ratio, own = self.wire_ratio, self.own_ratio
        return {
            "wire_bytes": self.wire_bytes,
            "wire_bytes_theory": self.wire_bytes_theory,
            "wire_ratio": ratio if math.isfinite(ratio) else None,
            "own_bytes": self.own_bytes,
            "own_bytes_theory": self.own_bytes_theory if self.own_theory else None,
            "own_ratio": own if own is not None and math.isfinite(own) else None,
            "unknown_bytes": self.unknown_bytes,
            "rows": [dataclasses.asdict(row) for row in self.rows],
            "unknown": [_describe(item) for item in self.unknown],
        }


def _ratio(sent: float, theory: float) -> float:
    return sent / theory if theory else math.inf if sent else 1.0


def _describe(item: Collective) -> dict[str, Any]:
    names = ("kind", "name", "dtype", "group_size", "count", "total_bytes", "op_name", "source")
    return {name: getattr(item, name) for name in names}


def make_ledger(
    layout: Layout,
    collectives: Iterable[Collective],
    spec: StepSpec | None = None,
    *,
    calls: Mapping[str, int] | None = None,
    gpus_per_node: int | None = None,
    trace: Trace | None = None,
) -> Ledger:
    """Attribute the collectives of a compiled step; see [Note: whose collective].

    Args:
      collectives: as `find_collectives` reads them from the program.
      gpus_per_node: to tell what crosses nodes.
      trace: of the step, for theory of what the model sends itself.
      spec, calls: as `movements` takes them; None: one microbatch of program "manual".

    Raises:
      ValueError: as `movements`.
    """
    spec = spec or one_microbatch(layout, calls)
    moves = movements(layout, spec, calls)
    attribution = Attribution(layout, moves)
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
    allowed = float(SCALARS_BYTES * spec.accumulate)
    rows = _Rows(layout, gpus_per_node)
    rows.expect(moves)
    rows.measure(parts)
    rows.measure_own(own)
    own_theory = trace and find_activations(trace, layout)
    rows.expect_own(own_theory.sent if own_theory else ())
    return Ledger(rows.finish(allowed), tuple(unknown), unknown_bytes, tuple(parts), own_theory)


def one_microbatch(layout: Layout, calls: Mapping[str, int] | None = None) -> StepSpec:
    """Return the spec of a step of program "manual" with one microbatch, whose units are called so often."""
    repeats = any(num > 1 for num in (calls or {}).values())
    return StepSpec(deferred=deferred_axes(layout, accumulate=1, once=False, repeats=repeats))


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
            padding = move.wire_bytes * move.leaf.padding_share
            key = move.kind, hlo_dtype(move.dtype), move.axes, move.group_size
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
            is_sum = item.kind in (SCATTER, REDUCE)
            for row in self._add(self.measured, leaf, key, part.wire_bytes - padding, padding, is_sum=is_sum):
                self.crosses[row] = crosses
                if (row, item.computation, item.name) not in seen:
                    seen.add((row, item.computation, item.name))
                    self.counts[row] += item.count

    def expect_own(self, sent: Sequence[Sent]) -> None:
        """Add what must cross the axes that the model itself is split over."""
        for item in sent:
            row = ROOT, OWN, item.kind, item.dtype, item.axes, self.layout.num_shards(item.axes)
            self.expected[row] += item.wire_bytes  # type: ignore[assignment]
            self.paths.setdefault(row, {})

    def measure_own(self, collectives: Sequence[Collective]) -> None:
        """Add what crosses the axes that the model itself is split over: of no unit."""
        for item in collectives:
            axes = group_axes(self.layout, item.group)  # of a permutation the pairs may join fewer
            for dtype, size in item.wire_by_dtype.items():
                row = ROOT, OWN, item.kind, dtype, axes, self.layout.num_shards(axes)
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
        if not part.elements % math.prod(leaf.cut_shape[leaf.stacked :]):
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
