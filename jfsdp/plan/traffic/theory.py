"""The bytes that a step must send, from its layout and its spec.

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
from typing import Any

from jfsdp.engine.movements import BACKWARD, FORWARD, REDUCE, STEP, UPDATE, Move, movements
from jfsdp.engine.spec import StepSpec
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.plan.hlo.collectives import SCALARS_BYTES

PERMUTE = "collective-permute"
_WHATS = {
    STEP: "gather step",
    FORWARD: "gather forward",
    BACKWARD: "gather backward",
    UPDATE: "update",
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


def expected_wire(layout: Layout, spec: StepSpec, calls: Mapping[str, int] | None = None) -> tuple[Expected, ...]:
    """Return what a step must send for its weights; see [Note: what theory counts].

    Args, Raises: as `movements`.
    """
    sums: dict[tuple[Any, ...], list[float]] = {}
    paths: dict[tuple[Any, ...], dict[str, None]] = {}
    for move in movements(layout, spec, calls):
        padding = move.wire_bytes * move.leaf.padding_share
        for what, size in ((_what(layout, move), move.wire_bytes - padding), ("padding", padding)):
            if what != "padding" or size:
                key = move.leaf.unit, what, move.kind, hlo_dtype(move.dtype), move.axes, move.group_size
                sums.setdefault(key, []).append(size)
                paths.setdefault(key, {})[move.leaf.path] = None
    rows = [Expected(*key, wire_bytes=sum(sizes), paths=tuple(paths[key])) for key, sizes in sums.items()]
    data = layout.data_axes
    if data:
        allowed = float(SCALARS_BYTES * spec.accumulate)
        rows.append(Expected("", "scalars", REDUCE, "f32", data, layout.num_shards(data), allowed, ()))
    return tuple(rows)


def _what(layout: Layout, move: Move) -> str:
    if move.kind == REDUCE and is_replicated(layout, move.leaf):
        return "replicated"
    return _WHATS.get(move.when, "reduce" if move.pieces == 1 else "reduce over groups")


def is_replicated(layout: Layout, leaf: Leaf) -> bool:
    """Tell whether a leaf stays whole although the strategy splits leaves over this mesh."""
    return leaf.dim is None and layout.num_shards(layout.strategy.axes("opt")) > 1


def hlo_dtype(name: str) -> str:
    """Return how HLO writes a dtype: bf16 for bfloat16."""
    if name in _HLO_DTYPES:
        return _HLO_DTYPES[name]
    letters = name.rstrip("0123456789")
    return _HLO_PREFIXES.get(letters, letters) + name[len(letters) :]
