"""What a strategy must put on the wire, from the Layout alone.

[Note: what theory counts]
The list of movements (engine/movements.py), in bytes that each device sends per step, in the dtype of the wire, padding
included and shown apart. Assumed: the backward of a resharded unit gathers all of its leaves again (XLA drops a gather
that no derivative reads, such as that of an embedding's table). Not derivable from a layout, and so not counted: what
an optimizer moves when its update mixes the elements of a leaf (Muon, factored moments), and activations, of which the
step's trace says more (activations.py).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from fractions import Fraction
from typing import Any

from jfsdp.arguments import Count, Size, checked
from jfsdp.engine import movements
from jfsdp.engine.movements import REDUCE, Passes
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.table import Layout
from jfsdp.plan.program.collectives import SCALARS_BYTES, wire_bytes
from jfsdp.plan.program.hlo import Shape
from jfsdp.train.step.config import StepConfig

PERMUTE = "collective-permute"
_WHATS = {
    movements.STEP: "gather step",
    movements.FORWARD: "gather forward",
    movements.BACKWARD: "gather backward",
    movements.UPDATE: "update",
}

_HLO_DTYPES = {"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}
_HLO_PREFIXES = {"float": "f", "int": "s", "uint": "u"}


@dataclasses.dataclass(frozen=True)
class Expected:
    """One line of what the wire must carry.

    Attributes:
      unit: the unit's name; "" is the root.
      what: "gather forward", "gather backward", "gather step" (once, for all microbatches), "reduce", "reduce over
        groups", "replicated" (gradients of leaves that nothing splits although the strategy would), "update" (updated
        shards into the copy at rest), "padding" (of all of these), or "scalars" (an allowance).
      kind: the collective.
      dtype: as HLO writes it (bf16).
      axes: the mesh axes of its groups, major to minor.
      group_size: devices of a group; fewer than the axes have where only neighbours take part (hpZ).
      wire_bytes: sent per device and step.
      paths: the leaves.
    """

    unit: str
    what: str
    kind: str
    dtype: str
    axes: tuple[str, ...]
    group_size: int
    wire_bytes: float
    paths: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Move:
    """One movement of one leaf, as HLO writes it: which array takes part in which collective, how often per step.

    Attributes:
      leaf: the leaf.
      what, kind, dtype, axes, group_size: as in `Expected`.
      pieces: the gathered (or not yet reduced) array is one of this many pieces of the leaf.
      times: how often it runs per step.
    """

    leaf: Leaf
    what: str
    kind: str
    dtype: str
    axes: tuple[str, ...]
    group_size: int
    pieces: int
    times: int | Fraction

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gathered or not yet reduced array, all layers of a stack together."""
        return self.leaf.piece_shape(self.pieces)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        num_bytes = Shape(self.dtype, self.shape).num_bytes
        return float(self.times) * wire_bytes(self.kind, num_bytes, self.group_size)

    @property
    def padding_share(self) -> float:
        """The share of those bytes that is padding."""
        return self.leaf.padding_share


def expected_wire(layout: Layout, **step: Any) -> tuple[Expected, ...]:
    """Return what a step must put on the wire for its weights; see [Note: what theory counts].

    Args, Raises: as `find_moves`.
    """
    sums: dict[tuple[Any, ...], list[float]] = {}
    paths: dict[tuple[Any, ...], dict[str, None]] = {}
    for move in find_moves(layout, **step):
        padding = move.wire_bytes * move.padding_share
        for what, size in ((move.what, move.wire_bytes - padding), ("padding", padding)):
            if what != "padding" or size:
                key = move.leaf.unit, what, move.kind, move.dtype, move.axes, move.group_size
                sums.setdefault(key, []).append(size)
                paths.setdefault(key, {})[move.leaf.path] = None
    rows = [Expected(*key, wire_bytes=sum(sizes), paths=tuple(paths[key])) for key, sizes in sums.items()]
    data = layout.data_axes
    if data:
        allowed = float(SCALARS_BYTES * step.get("accumulate", 1))
        rows.append(Expected("", "scalars", REDUCE, "f32", data, layout.num_shards(data), allowed, ()))
    return tuple(rows)


@checked
def find_moves(
    layout: Layout,
    *,
    accumulate: Count = 1,
    sync: str | None = None,
    reshard_after_backward: bool | Mapping[str, bool] = True,
    program: str = movements.MANUAL,
    calls: Mapping[str, Size] | None = None,
    passes: Passes | None = None,
) -> tuple[Move, ...]:
    """Return every movement of every leaf (or buffer) in a step, in the order of the layout.

    Args:
      accumulate, sync, reshard_after_backward: as given to `train_step`.
      program: of the step, "xla" or "manual": only the second can sum over some axes after the last microbatch.
      calls: how often a unit is called per microbatch, by its name; 1 where it is not named.
      passes: of a pipeline, as `step.movement` has them.

    Raises:
      ValueError: for options that `train_step` refuses, and for a unit in `calls` that the layout does not have.
    """
    if program not in (movements.XLA, movements.MANUAL):
        raise ValueError(f"program={program!r} must be {movements.XLA!r} or {movements.MANUAL!r}, as step.program")
    config = StepConfig(accumulate, sync=sync, reshard_after_backward=reshard_after_backward)
    found = movements.movements(
        layout,
        program=program,
        accumulate=accumulate,
        once=config.syncs_last(layout),
        held=config.held_units(layout),
        calls=_check_calls(layout, calls or {}),
        passes=passes,
    )
    return tuple(move for move in (_counted(layout, move) for move in found) if move.wire_bytes)


def _counted(layout: Layout, move: movements.Move) -> Move:
    what = _WHATS.get(move.when, "reduce" if move.pieces == 1 else "reduce over groups")
    if move.kind == REDUCE and is_replicated(layout, move.leaf):
        what = "replicated"
    dtype = hlo_dtype(move.dtype)
    return Move(move.leaf, what, move.kind, dtype, move.axes, move.group_size, move.pieces, move.times)


def _check_calls(layout: Layout, calls: Mapping[str, int]) -> Mapping[str, int]:
    names = [unit.name for unit in layout.units]
    unknown = [name for name in calls if name not in names]
    if unknown:
        raise ValueError(f"calls: unit {unknown[0]!r} is unknown; the units are {', '.join(map(repr, names))}")
    return calls


def is_replicated(layout: Layout, leaf: Leaf) -> bool:
    """Tell whether a leaf stays whole although the strategy splits leaves over this mesh."""
    return leaf.dim is None and layout.num_shards(layout.strategy.axes("opt")) > 1


def hlo_dtype(name: str) -> str:
    """Return how HLO writes a dtype: bf16 for bfloat16."""
    if name in _HLO_DTYPES:
        return _HLO_DTYPES[name]
    letters = name.rstrip("0123456789")
    return _HLO_PREFIXES.get(letters, letters) + name[len(letters) :]
