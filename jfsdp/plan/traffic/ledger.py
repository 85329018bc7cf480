"""The ledger: every collective of a compiled step next to what the strategy must send, unit by unit.

[Note: what theory counts]
The list of movements (engine/movements.py), in bytes that each device sends per step, in the dtype of the wire, padding
included and shown apart. Assumed: the backward of a resharded unit gathers all of its leaves again (XLA drops a gather
that no derivative reads, such as the table of an embedding). Not derivable from a layout, and so not counted: what
an optimizer moves when its update mixes the elements of a leaf (Muon, factored moments), and activations, of which the
step's trace says more (activations.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jfsdp.engine.movements import REDUCE, SCATTER, Move, deferred_axes, movements
from jfsdp.engine.spec import StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.units import ROOT
from jfsdp.plan.hlo.collectives import PERMUTE, SCALARS_BYTES, Collective
from jfsdp.plan.hlo.parse import hlo_dtype
from jfsdp.plan.traffic.activations import Activations, find_activations
from jfsdp.plan.traffic.attribution import Attribution, Part, group_axes, is_own
from jfsdp.train.step.step import Trace

OWN = "the model's own"
_SHOWN = ("kind", "name", "dtype", "group_size", "count", "total_bytes", "op_name", "source")
WHATS = ("parameters", "gradients", "replicated", "padding", "scalars", OWN)


@dataclasses.dataclass(eq=False)
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
    measured_bytes: float = 0.0
    expected_bytes: float = 0.0
    count: int = 0
    crosses_nodes: bool | None = None
    paths: list[str] = dataclasses.field(default_factory=list)


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
            "unknown": [{name: getattr(item, name) for name in _SHOWN} for item in self.unknown],
        }


def _ratio(sent: float, theory: float) -> float:
    return sent / theory if theory else math.inf if sent else 1.0


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
    attribution, rows = Attribution(layout, moves), _Rows(layout, gpus_per_node)
    for move in moves:
        rows.expect(move)
    parts, unknown, unknown_bytes = [], [], 0.0
    for item in collectives:
        if is_own(layout, item):
            rows.measure_own(item)
            continue
        found, lost = attribution.parts(item)
        rows.measure(item, found)
        parts += found
        if lost:
            unknown.append(item)
            unknown_bytes += lost
    own_theory = trace and find_activations(trace, layout)
    for sent in own_theory.sent if own_theory else ():
        row = rows.find(ROOT, OWN, sent.kind, sent.dtype, sent.axes, layout.num_shards(sent.axes))
        row.expected_bytes += sent.wire_bytes
    allowed = float(SCALARS_BYTES * spec.accumulate)
    return Ledger(rows.finish(allowed), tuple(unknown), unknown_bytes, tuple(parts), own_theory)


def one_microbatch(layout: Layout, calls: Mapping[str, int] | None = None) -> StepSpec:
    """Return the spec of a step of program "manual" with one microbatch, whose units are called so often."""
    repeats = any(num > 1 for num in (calls or {}).values())
    return StepSpec(deferred=deferred_axes(layout, accumulate=1, once=False, repeats=repeats))


class _Rows:
    """The rows of a ledger, by what they sum up."""

    def __init__(self, layout: Layout, gpus_per_node: int | None):
        self.layout, self.gpus_per_node = layout, gpus_per_node
        self.rows: dict[tuple[Any, ...], Row] = {}

    def find(self, *key: Any) -> Row:
        """Return the row of a unit, what it sends, a collective, a dtype, axes, and a size of groups."""
        return self.rows.setdefault(key, Row(*key))

    def expect(self, move: Move) -> None:
        """Add a movement of theory."""
        key = move.kind, hlo_dtype(move.dtype), move.axes, move.group_size
        for row, size in self._split(move.leaf, key, move.wire_bytes, move.leaf.padding_share):
            row.expected_bytes += size

    def measure(self, item: Collective, parts: Sequence[Part]) -> None:
        """Add the arrays of a collective that was compiled."""
        # Pairs of a permutation follow no axis: any device may be another's partner.
        group = range(self.layout.num_shards(self.layout.data_axes)) if item.kind == PERMUTE else item.group
        axes, touched = group_axes(self.layout, group), set()
        for part in parts:
            leaf = self.layout.by_path[part.path] if part.path else None
            # XLA also reduces arrays of the logical shape, and pads the sum.
            is_padded = leaf is not None and not part.elements % math.prod(leaf.cut_shape[leaf.stacked :])
            padding_share = leaf.padding_share if leaf is not None and is_padded else 0.0
            key = item.kind, part.dtype, axes, len(group)
            for row, size in self._split(leaf, key, part.wire_bytes, padding_share):
                row.measured_bytes += size
                row.crosses_nodes = self._crosses(group)
                touched.add(row)
        for row in touched:
            row.count += item.count

    def measure_own(self, item: Collective) -> None:
        """Add what crosses the axes that the model itself is split over: of no unit."""
        axes = group_axes(self.layout, item.group)  # of a permutation the pairs may join fewer
        for dtype, size in item.wire_by_dtype.items():
            row = self.find(ROOT, OWN, item.kind, dtype, axes, self.layout.num_shards(axes))
            row.measured_bytes += item.count * size
            row.count += item.count
            row.crosses_nodes = self._crosses(item.group)

    def _crosses(self, group: Sequence[int]) -> bool | None:
        return None if self.gpus_per_node is None else len({i // self.gpus_per_node for i in group}) > 1

    def _split(
        self, leaf: Leaf | None, key: tuple[Any, ...], size: float, padding_share: float
    ) -> Iterator[tuple[Row, float]]:
        """Yield the rows of what a leaf sends, and of its padding there, with their bytes; None: of scalars."""
        if leaf is None:
            yield self.find(ROOT, "scalars", *key), size
            return
        what = "gradients" if key[0] in (SCATTER, REDUCE) else "parameters"
        if leaf.dim is None and self.layout.num_shards(self.layout.strategy.axes("opt")) > 1:
            what = "replicated"
        rows = [(self.find(leaf.unit, what, *key), size * (1 - padding_share))]
        if padding_share:
            rows.append((self.find(leaf.unit, "padding", *key), size * padding_share))
        for row, num_bytes in rows:
            row.paths += [leaf.path] if leaf.path not in row.paths else []
            yield row, num_bytes

    def finish(self, allowed: float) -> tuple[Row, ...]:
        """Return the rows, units in the layout's order; scalars are expected as they are, up to an allowance."""
        order = [unit.name for unit in self.layout.units]
        keys = sorted(
            self.rows, key=lambda key: (key[1] in ("scalars", OWN), order.index(key[0]), WHATS.index(key[1]), key)
        )
        rows = tuple(self.rows[key] for key in keys)
        for row in rows:
            if row.what == "scalars":
                row.expected_bytes = min(row.measured_bytes, allowed)
                allowed -= row.expected_bytes
        return rows
