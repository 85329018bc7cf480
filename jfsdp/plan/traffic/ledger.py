"""Ledger of a compiled step: the collectives of each unit, compared with the strategy's theory.

[Note: what theory counts]
Theory is the list of movements (engine/movements.py), in bytes that each device sends per step, in the dtype that is
sent. Padding is included and shown separately. The backward of a resharded unit is assumed to gather all of its leaves
again, although XLA drops gathers that no derivative reads (such as an embedding table). Theory excludes communication
that does not follow from a layout: of optimizers whose update mixes the elements of a leaf (factored moments, Muon
without `by_matrix`), and of activations, which follow from the step's trace (activations.py).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from jfsdp.engine.movements import ALL_TO_ALL, REDUCE, SCATTER, Move, deferred_axes, movements, wire_bytes
from jfsdp.engine.spec import StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.units import ROOT
from jfsdp.plan.hlo.collectives import PERMUTE, SCALARS_BYTES, Collective
from jfsdp.plan.hlo.parse import hlo_dtype
from jfsdp.plan.traffic.activations import Activations, find_activations
from jfsdp.plan.traffic.attribution import Attribution, Part, group_axes, split_activations
from jfsdp.train.step.step import Trace

OWN = "the model's own"
_SHOWN = ("kind", "name", "dtype", "group_size", "count", "total_bytes", "op_name", "source")
WHATS = ("parameters", "gradients", "replicated", "updates", "padding", "scalars", OWN)


@dataclasses.dataclass(eq=False)
class Row:
    """One line of the ledger.

    Attributes:
      unit: the unit's name; "" is the root.
      what: one of WHATS. "replicated": gradients of leaves that could not be sharded as the strategy says. "updates":
        whole matrices in the update. OWN: collectives over the model axes, which belong to no unit.
      kind, dtype, axes, group_size: of the collective; `axes` is empty if the groups follow no mesh axis.
      measured_bytes, expected_bytes: sent per device and step.
      count: collectives per step with some of these bytes.
      crosses_nodes: whether a group spans nodes; None if the devices per node are unknown.
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
    """The bytes that a step sends, compared with theory.

    Attributes:
      rows: attributed bytes, in the order of the layout's units.
      unknown: collectives with an array that fits no leaf.
      unknown_bytes: bytes of these arrays, sent per device and step.
      parts: the attributed arrays.
      own_theory: values that must be sent over the model axes; None without the step's trace.
    """

    rows: tuple[Row, ...]
    unknown: tuple[Collective, ...]
    unknown_bytes: float
    parts: tuple[Part, ...]
    own_theory: Activations | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step, including unknown ones."""
        return sum(row.measured_bytes for row in self.rows) + self.unknown_bytes

    @property
    def own_bytes(self) -> float:
        """Bytes that each device sends over the model axes per step; a part of `wire_bytes`."""
        return sum(row.measured_bytes for row in self.rows if row.what == OWN)

    @property
    def own_bytes_theory(self) -> float:
        """Bytes that each device must send over the model axes; 0 without the step's trace."""
        return sum(row.expected_bytes for row in self.rows if row.what == OWN)

    @property
    def wire_bytes_theory(self) -> float:
        """Bytes that each device must send per step, without the model axes."""
        return sum(row.expected_bytes for row in self.rows if row.what != OWN)

    @property
    def wire_ratio(self) -> float:
        """Measured over expected bytes, without the model axes; 1 if both are 0, infinite if only the expected are."""
        return _ratio(self.wire_bytes - self.own_bytes, self.wire_bytes_theory)

    @property
    def own_ratio(self) -> float | None:
        """Measured over expected bytes over the model axes; None without the step's trace."""
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
    """Attribute the collectives of a compiled step; see [Note: attribution of collectives].

    Args:
      collectives: from `find_collectives`.
      gpus_per_node: marks rows that cross nodes.
      trace: of the step, for theory over the model axes.
      spec, calls: as for `movements`; None: one microbatch of program "manual".

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
        own, rest = split_activations(layout, item)
        rows.measure_own(own)
        found, lost_bytes = attribution.parts(rest)
        rows.measure(rest, found)
        parts += found
        if lost_bytes:
            unknown.append(rest)
            unknown_bytes += lost_bytes
    own_theory = trace and find_activations(trace, layout)
    for sent in own_theory.sent if own_theory else ():
        row = rows.find(ROOT, OWN, sent.kind, sent.dtype, sent.axes, layout.num_shards(sent.axes))
        row.expected_bytes += sent.wire_bytes
    allowed = float(SCALARS_BYTES * spec.accumulate) + scales_bytes(layout)
    return Ledger(rows.finish(allowed), tuple(unknown), unknown_bytes, tuple(parts), own_theory)


def one_microbatch(layout: Layout, calls: Mapping[str, int] | None = None) -> StepSpec:
    """Return the spec of a step of program "manual" with one microbatch and these calls of units."""
    repeats = any(num > 1 for num in (calls or {}).values())
    return StepSpec(deferred=deferred_axes(layout, accumulate=1, once=False, repeats=repeats))


def scales_bytes(layout: Layout) -> float:
    """Return the bytes that a device sends for the maxima of all matrices that are sent with one scale."""
    leaves = [leaf for leaf in layout.leaves if leaf.gather_wire and not leaf.gather_wire.block]
    numbers = sum(math.prod(leaf.shape[: leaf.stacked]) for leaf in leaves)
    return wire_bytes(REDUCE, 4.0 * numbers, layout.num_shards(layout.data_axes))


class _Rows:
    """Accumulates the rows of a ledger."""

    def __init__(self, layout: Layout, gpus_per_node: int | None):
        self.layout, self.gpus_per_node = layout, gpus_per_node
        self.rows: dict[tuple[Any, ...], Row] = {}

    def find(self, *key: Any) -> Row:
        """Return the row of a key: unit, what, kind, dtype, axes, group size."""
        return self.rows.setdefault(key, Row(*key))

    def expect(self, move: Move) -> None:
        """Add a movement of theory."""
        key = move.kind, hlo_dtype(move.dtype), move.axes, move.group_size
        for row, size in self._split(move.leaf, key, move.wire_bytes, move.leaf.padding_share, move.is_of_matrices):
            row.expected_bytes += size

    def measure(self, item: Collective, parts: Sequence[Part]) -> None:
        """Add the arrays of a compiled collective."""
        # The pairs of a permutation follow no axis: any two devices may be partners.
        group = range(self.layout.num_shards(self.layout.data_axes)) if item.kind == PERMUTE else item.group
        axes, touched = group_axes(self.layout, group), set()
        for part in parts:
            leaf = self.layout.by_path[part.path] if part.path else None
            # XLA also reduces arrays of the logical shape, and pads the sum.
            is_padded = leaf is not None and not part.elements % math.prod(leaf.cut_shape[leaf.stacked :])
            padding_share = leaf.padding_share if leaf is not None and is_padded and not part.is_of_matrices else 0.0
            key = item.kind, part.dtype, axes, len(group)
            for row, size in self._split(leaf, key, part.wire_bytes, padding_share, part.is_of_matrices):
                row.measured_bytes += size
                row.crosses_nodes = self._crosses(group)
                touched.add(row)
        for row in touched:
            row.count += item.count

    def measure_own(self, item: Collective) -> None:
        """Add a collective over the model axes, which belongs to no unit."""
        axes = group_axes(self.layout, item.group)  # the pairs of a permutation may connect fewer devices
        for dtype, size in item.wire_by_dtype.items():
            row = self.find(ROOT, OWN, item.kind, dtype, axes, self.layout.num_shards(axes))
            row.measured_bytes += item.count * size
            row.count += item.count
            row.crosses_nodes = self._crosses(item.group)

    def _crosses(self, group: Sequence[int]) -> bool | None:
        return None if self.gpus_per_node is None else len({i // self.gpus_per_node for i in group}) > 1

    def _split(
        self, leaf: Leaf | None, key: tuple[Any, ...], size: float, padding_share: float, is_of_matrices: bool
    ) -> Iterator[tuple[Row, float]]:
        """Yield the rows of a leaf's bytes and of its padding, with their bytes. `leaf` is None for scalars."""
        if leaf is None:
            yield self.find(ROOT, "scalars", *key), size
            return
        what = "gradients" if key[0] in (SCATTER, REDUCE, ALL_TO_ALL) else "parameters"
        if is_of_matrices:
            what = "updates"
        elif leaf.dim is None and self.layout.num_shards(self.layout.strategy.axes("opt")) > 1:
            what = "replicated"
        rows = [(self.find(leaf.unit, what, *key), size * (1 - padding_share))]
        if padding_share:
            rows.append((self.find(leaf.unit, "padding", *key), size * padding_share))
        for row, num_bytes in rows:
            row.paths += [leaf.path] if leaf.path not in row.paths else []
            yield row, num_bytes

    def finish(self, allowed: float) -> tuple[Row, ...]:
        """Return the rows in the order of the layout's units. Scalars count as expected, up to `allowed` bytes."""
        order = [unit.name for unit in self.layout.units]
        keys = sorted(self.rows, key=lambda x: (x[1] in ("scalars", OWN), order.index(x[0]), WHATS.index(x[1]), x))
        rows = tuple(self.rows[key] for key in keys)
        for row in rows:
            if row.what == "scalars":
                row.expected_bytes = min(row.measured_bytes, allowed)
                allowed -= row.expected_bytes
        return rows
