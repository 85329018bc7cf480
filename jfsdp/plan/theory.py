"""What a strategy must put on the wire, from the Layout alone.

[Note: what theory counts]
The engine's movements, leaf by leaf: bytes that each device sends per step, in the dtype of the wire, padding included
and shown apart. Assumed: the backward of a resharded unit gathers all of its leaves again (XLA drops a gather that no
derivative reads, such as that of an embedding's table), and a hybrid strategy sums between its groups once per step
(which takes a loss that is a `Loss`). Not derivable from a layout, and so not counted: what an optimizer moves when
its update mixes the elements of a leaf (Muon, factored moments), and activations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from jfsdp.layout.table import Layout, Leaf, Stage
from jfsdp.plan.collectives import SCALARS_BYTES, wire_bytes
from jfsdp.plan.hlo import Shape
from jfsdp.train.gradients import group_only, is_beyond_xla
from jfsdp.train.step import StepConfig, reduces_once

GATHER, SCATTER, REDUCE, PERMUTE = "all-gather", "reduce-scatter", "all-reduce", "collective-permute"

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
    """One movement of one leaf: which array takes part in which collective, and how often per step.

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
    times: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the gathered or not yet reduced array, all layers of a stack together."""
        return piece_shape(self.leaf, self.pieces)

    @property
    def wire_bytes(self) -> float:
        """Bytes that each device sends per step."""
        num_bytes = Shape(self.dtype, self.shape).num_bytes
        return self.times * wire_bytes(self.kind, num_bytes, self.group_size)

    @property
    def padding_share(self) -> float:
        """The share of those bytes that is padding."""
        return self.leaf.padding_share


def expected_wire(
    layout: Layout,
    *,
    accumulate: int = 1,
    reduce: str | None = None,
    reshard_after_backward: bool | Mapping[str, bool] = True,
    engine: str = "auto",
    calls: Mapping[str, int] | None = None,
) -> tuple[Expected, ...]:
    """Return what a step must put on the wire; see [Note: what theory counts]. Moves no data.

    Args:
      accumulate, reduce, reshard_after_backward: as given to `train_step`.
      engine: as given to `fully_shard`.
      calls: how often a unit is called per microbatch, by its name; 1 where it is not named.

    Raises:
      ValueError: for options that `train_step` refuses, and for a unit in `calls` that the layout does not have.
    """
    step: dict[str, Any] = {"accumulate": accumulate, "reduce": reduce, "engine": engine, "calls": calls}
    sums: dict[tuple[Any, ...], list[float]] = {}
    paths: dict[tuple[Any, ...], dict[str, None]] = {}
    for move in find_moves(layout, reshard_after_backward=reshard_after_backward, **step):
        padding = move.wire_bytes * move.padding_share
        for what, size in ((move.what, move.wire_bytes - padding), ("padding", padding)):
            if what != "padding" or size:
                key = move.leaf.unit, what, move.kind, move.dtype, move.axes, move.group_size
                sums.setdefault(key, []).append(size)
                paths.setdefault(key, {})[move.leaf.path] = None
    rows = [Expected(*key, wire_bytes=sum(sizes), paths=tuple(paths[key])) for key, sizes in sums.items()]
    data = layout.data_axes
    if data:
        allowed = float(SCALARS_BYTES * accumulate)
        rows.append(Expected("", "scalars", REDUCE, "f32", data, layout.num_shards(data), allowed, ()))
    return tuple(rows)


def find_moves(
    layout: Layout,
    *,
    accumulate: int = 1,
    reduce: str | None = None,
    reshard_after_backward: bool | Mapping[str, bool] = True,
    engine: str = "auto",
    calls: Mapping[str, int] | None = None,
) -> tuple[Move, ...]:
    """Return every movement of every leaf (or buffer) in a step, in the order of the layout. Moves no data.

    Args, Raises: as `expected_wire`.
    """
    config = StepConfig(accumulate, reduce, reshard_after_backward)
    calls = _check_calls(layout, calls or {})
    data = layout.data_axes
    once = reduces_once(layout, config, is_manual=engine == "manual")
    deferred = data if once and (engine == "auto" or accumulate > 1) else group_only(layout)
    held = config.held_units(layout)
    running = layout.gathered(held)
    moves = []
    for leaf in layout.stored:
        now, times = running.by_path[leaf.path], accumulate * calls.get(leaf.unit, 1)
        if leaf.unit in held:
            moves += _gather(layout, leaf, leaf.stage(leaf.source), "gather step", 1)
        moves += _gathers(running, now, times)
        if leaf.trainable:
            moves += _reductions(running, now, deferred, times, accumulate)
            moves += _updates(layout, leaf)
    return tuple(move for move in moves if move.group_size > 1 and move.wire_bytes)


def _check_calls(layout: Layout, calls: Mapping[str, int]) -> Mapping[str, int]:
    names = [unit.name for unit in layout.units]
    unknown = [name for name in calls if name not in names]
    if unknown:
        raise ValueError(f"calls: unit {unknown[0]!r} is unknown; the units are {', '.join(map(repr, names))}")
    return calls


def _gathers(layout: Layout, leaf: Leaf, times: int) -> Iterator[Move]:
    """Yield the gathers of a leaf: before its unit's forward and, where it is resharded, before its backward."""
    source, reshard = leaf.stage(leaf.source), layout.policy(leaf.unit).reshard_after_forward
    yield from _gather(layout, leaf, source, "gather forward", times)
    again = source if reshard is True else leaf.stage("kept")
    yield from _gather(layout, leaf, again, "gather backward", times)


def _gather(layout: Layout, leaf: Leaf, split: Stage, what: str, times: int) -> Iterator[Move]:
    if leaf.dim is not None and split.axes:
        dtype = hlo_dtype(leaf.stage("use").dtype)
        yield Move(leaf, what, GATHER, dtype, split.axes, layout.num_parts(split), 1, times)


def _reductions(layout: Layout, leaf: Leaf, deferred: tuple[str, ...], times: int, accumulate: int) -> Iterator[Move]:
    """Yield the reductions of a leaf: of every microbatch over the axes that are not deferred, then over these."""
    dtype = hlo_dtype(layout.reduce_dtype(leaf))
    held = tuple(axis for axis in _split(leaf, "grad") if axis not in deferred)
    now = tuple(axis for axis in layout.data_axes if axis not in deferred)
    at_rest = _split(leaf, leaf.source)
    further = tuple(axis for axis in held if axis not in at_rest)
    if further and (deferred or is_beyond_xla(layout)):
        # Written out: the derivative sums into the source's layout, each microbatch from there into its accumulator.
        yield from _sum(layout, leaf, dtype, at_rest, at_rest, 1, times)
        rest, pieces = tuple(axis for axis in now if axis not in at_rest), layout.num_shards(at_rest)
        yield from _sum(layout, leaf, dtype, rest, further, pieces, accumulate)
    else:
        yield from _sum(layout, leaf, dtype, now, held, 1, times)
    if deferred:
        opt = _split(leaf, "opt")
        last = tuple(axis for axis in opt if axis not in held)
        scattered = last if opt == (*held, *last) and set(last) <= set(deferred) else ()
        yield from _sum(layout, leaf, dtype, deferred, scattered, layout.num_shards(held), 1)


def _sum(
    layout: Layout,
    leaf: Leaf,
    dtype: str,
    axes: tuple[str, ...],
    split: tuple[str, ...],
    pieces: int,
    times: int,
) -> Iterator[Move]:
    """Yield a sum over `axes`: a reduce-scatter over those of `split`, an all-reduce over the others."""
    if split:
        yield Move(
            leaf,
            "reduce" if pieces == 1 else "reduce over groups",
            SCATTER,
            dtype,
            split,
            layout.num_shards(split),
            pieces,
            times,
        )
        pieces *= layout.num_shards(split)
    rest = tuple(axis for axis in axes if axis not in split)
    if rest:
        what = "replicated" if is_replicated(layout, leaf) else "reduce" if pieces == 1 else "reduce over groups"
        yield Move(leaf, what, REDUCE, dtype, rest, layout.num_shards(rest), pieces, times)


def _updates(layout: Layout, leaf: Leaf) -> Iterator[Move]:
    """Yield the gather of updated shards, where what is at rest is split less than the optimizer."""
    opt, source = _split(leaf, "opt"), _split(leaf, leaf.source)
    rest = tuple(axis for axis in opt if axis not in source)
    if rest:
        dtype = hlo_dtype(leaf.stage(leaf.source).dtype)
        yield Move(leaf, "update", GATHER, dtype, rest, layout.num_shards(rest), layout.num_shards(source), 1)


def _split(leaf: Leaf, stage: str) -> tuple[str, ...]:
    return () if leaf.dim is None else leaf.stage(stage).axes


def is_replicated(layout: Layout, leaf: Leaf) -> bool:
    """Tell whether a leaf stays whole although the strategy splits leaves over this mesh. Moves no data."""
    return leaf.dim is None and layout.num_shards(layout.strategy.axes("opt")) > 1


def piece_shape(leaf: Leaf, pieces: int) -> tuple[int, ...]:
    """Return the shape of one of `pieces` equal pieces of a leaf as it is stored. Moves no data."""
    shape = list(leaf.stored_shape)
    if leaf.dim is not None:
        shape[leaf.dim] //= pieces
    return tuple(shape)


def hlo_dtype(name: str) -> str:
    """Return how HLO writes a dtype: bf16 for bfloat16. Moves no data."""
    if name in _HLO_DTYPES:
        return _HLO_DTYPES[name]
    letters = name.rstrip("0123456789")
    return _HLO_PREFIXES.get(letters, letters) + name[len(letters) :]
