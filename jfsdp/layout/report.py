"""A Layout as text for people, and as plain data for programs."""

from __future__ import annotations

import collections
import dataclasses
import math
import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.leaf import DEVICE, HOST, Leaf, Stage
from jfsdp.layout.policy import UnitPolicy
from jfsdp.layout.precision import is_inexact, item_bytes
from jfsdp.layout.strategy import Strategy, show
from jfsdp.layout.units import UnitInfo, describe


def describe_stage(leaf: Leaf, stage: Stage | None) -> str:
    """Write a stage as `[4096/fsdp 14336] bfloat16`, `whole bfloat16`, or `-` if the leaf lacks it."""
    if stage is None:
        return "-"
    what = stage.dtype if stage.memory == DEVICE else f"{stage.dtype} on {stage.memory}"
    over = {cut.dim: f"/{cut.axis}" for cut in leaf.cuts}
    if leaf.dim is not None and stage.axes:
        first = stage.axes[0] if stage.ways is None else f"{stage.axes[0]}:{stage.ways}"
        over[leaf.dim] = "/".join((over.get(leaf.dim, ""), first, *stage.axes[1:]))
    if not over:
        return f"whole {what}"
    dims = [f"{size}{over.get(dim, '')}" for dim, size in enumerate(leaf.stored_shape)]
    return f"[{' '.join(dims)}] {what}"


def leaf_to_dict(layout: Layout, leaf: Leaf) -> dict[str, Any]:
    """Return one row of the table as plain data; bytes count parameters at rest, per device."""
    return {
        "path": leaf.path,
        "shape": list(leaf.shape),
        **{name: getattr(leaf, name) for name in ("dtype", "unit", "stacked", "trainable", "dim", "padding")},
        "cuts": [dataclasses.asdict(cut) for cut in leaf.cuts],
        "gather_wire": leaf.gather_wire and dataclasses.asdict(leaf.gather_wire),
        "reduce_wire": leaf.reduce_wire and dataclasses.asdict(leaf.reduce_wire),
        "reason": reason(layout, leaf),
        "stages": {name: _stage_to_dict(leaf, name, stage) for name, stage in leaf.stages},
        "bytes_per_device": leaf_bytes(layout, leaf),
        "host_bytes_per_device": leaf_bytes(layout, leaf, HOST),
    }


def reason(layout: Layout, leaf: Leaf) -> str:
    """Return the reason for a leaf's sharding and, under flat storage, the name of its buffer."""
    return f"{leaf.reason}; {layout.storage}, in {layout.buffer_of[leaf.path].path}" if layout.buffers else leaf.reason


def _stage_to_dict(leaf: Leaf, name: str, stage: Stage | None) -> dict[str, Any] | None:
    if stage is None:
        return None
    spec = [list(entry) if isinstance(entry, tuple) else entry for entry in leaf.spec(name)]
    ways = {} if stage.ways is None else {"ways": stage.ways}
    return {"spec": spec, "dtype": stage.dtype, "memory": stage.memory} | ways


def layout_to_dict(layout: Layout) -> dict[str, Any]:
    """Return the whole table as plain data for `json`."""
    return {
        "mesh": dict(layout.mesh_sizes),
        "strategy": layout.strategy.name,
        "strategy_stages": strategy_stages(layout.strategy),
        "storage": layout.storage,
        "mp_policy": {"param_dtype": layout.mp_policy.param_dtype, "reduce_dtype": layout.mp_policy.reduce_dtype},
        "units": [
            {
                "name": unit.name,
                "class": unit.cls,
                "stacked": unit.stacked,
                "stacked_is_guessed": unit.is_guessed,
                "num_leaves": len(unit.leaves),
                "reshard_after_forward": policy.reshard_after_forward,
                "remat": policy.remat if isinstance(policy.remat, (str, tuple)) else describe(policy.remat),
            }
            for unit, policy in zip(layout.units, layout.policies, strict=True)
        ],
        "num_parameters": num_parameters(layout.leaves),
        "num_frozen_parameters": num_parameters(frozen_leaves(layout)),
        "leaves": [leaf_to_dict(layout, leaf) for leaf in layout.leaves],
        "adapters": [one.to_dict() for one in layout.adapters],
    }


def leaf_bytes(layout: Layout, leaf: Leaf, memory: str = DEVICE) -> int:
    """Return the bytes per device of a leaf's parameters at rest in one memory: the master and, if it exists, the
    low-precision copy.
    """
    stages = ("param", "work") if leaf.has_work else ("param",)
    return sum(layout.stage_bytes(leaf, name) for name in stages if leaf.stage(name).memory == memory)


def strategy_stages(strategy: Strategy) -> dict[str, str]:
    """Return as text over which axes a strategy splits each stage, and its default of resharding."""
    stages = {name: show(getattr(strategy, name)) for name in ("param", "grad", "opt")}
    reshard = {"reshard_after_forward": str(strategy.reshard_after_forward).lower()}
    return stages | (reshard if strategy.axes("param") else {})


def frozen_leaves(layout: Layout) -> list[Leaf]:
    """Return the leaves of inexact dtype that are frozen."""
    return [leaf for leaf in layout.leaves if not leaf.trainable and is_inexact(leaf.dtype)]


def padding_elements(leaf: Leaf) -> int:
    """Return the number of padding elements of a stored leaf, over all devices."""
    return math.prod(leaf.stored_shape) - math.prod(leaf.shape)


def format_layout(layout: Layout, sizes: Mapping[str, int] | None = None, width: int = 80) -> str:
    """Format the table for a terminal: under each unit a line per leaf, with its shape, its split and its size.

    The column `optimizer` is shown if a leaf's moments are split differently from its parameters. Properties of most
    leaves are listed once, at the top; the line of a leaf that differs ends with the differences.

    Args:
      sizes: bytes of state per device by path; None: bytes of the parameters at rest, in both memories.
      width: a path that does not leave enough of it for the rest of its line is on a separate line.
    """
    leaves, title = layout.by_path, "params/device" if sizes is None else "state/device"
    if sizes is None:
        sizes = {path: sum(leaf_bytes(layout, x, memory) for memory in (DEVICE, HOST)) for path, x in leaves.items()}
    facts = {path: _facts(leaf) for path, leaf in leaves.items()}
    usual = [collections.Counter(column).most_common(1)[0][0] for column in zip(*facts.values(), strict=True)]
    splits = {path: [describe_split(layout, x, stage) for stage in ("param", "opt")] for path, x in leaves.items()}
    num_splits = 2 if any(leaves[path].trainable and len({*found}) > 1 for path, found in splits.items()) else 1
    rows, notes = {"": ["shape", *("split", "optimizer")[:num_splits], title]}, {}
    for path, leaf in leaves.items():
        shape = " x ".join(map(str, leaf.shape)) or "scalar"
        rows[path] = [shape, *splits[path][:num_splits], show_bytes(sizes[path])]
        different = [fact for fact, common in zip(facts[path], usual, strict=True) if fact and fact != common]
        notes[path] = ", ".join([*different, *([f"{leaf.padding} padded"] if leaf.padding else [])])
    widths = [max(len(row[column]) for row in rows.values()) for column in range(len(rows[""]))]
    path_width = max(0, min(max(map(len, rows)), width - 4 - sum(widths) - 2 * len(widths[1:])))

    def line_of(path: str) -> list[str]:
        *cells, size = (cell.ljust(space) for cell, space in zip(rows[path], widths, strict=True))
        text = "  ".join([*cells, size.strip().rjust(widths[-1])])
        first = [f"  {path:{path_width}}  {text}"]
        if len(path) > path_width or len(first[0]) > width:
            first = [*_wrap(path, width, 2), *_wrap(text, width, 4)]
        if len(first[-1]) + 2 + len(note := notes.get(path, "")) <= width:
            return [*first[:-1], f"{first[-1]}  {note}".rstrip()]
        return [*first, *_wrap(note, width, 6)]

    common = ", ".join(fact for fact in usual if fact and not fact.endswith(f"on {DEVICE}"))
    lines = [*_wrap(summary(layout), width, 0), *_wrap(f"most leaves: {common}", width, 0), *line_of("")]
    for unit, policy in zip(layout.units, layout.policies, strict=True):
        lines += textwrap.wrap(_describe_unit(layout, unit, policy), width, subsequent_indent="  ")
        lines += [line for leaf in layout.leaves if leaf.unit == unit.name for line in line_of(leaf.path)]
    return "\n".join(lines)


def _wrap(text: str, width: int, indent: int) -> list[str]:
    """Wrap at spaces only, so that paths are never broken."""
    space = " " * indent
    return textwrap.wrap(
        text, width, initial_indent=space, subsequent_indent=space, break_long_words=False, break_on_hyphens=False
    )


def _facts(leaf: Leaf) -> list[str]:
    """Return the properties that most leaves share: dtypes, whether it is trained, its memories."""
    param, opt = leaf.stage("param"), dict(leaf.stages)["opt"]
    frozen = "frozen" if is_inexact(leaf.dtype) else "not trained"
    return [
        f"{param.dtype} at rest",
        f"{leaf.stage('use').dtype} in use",
        "trained" if leaf.trainable else frozen,
        f"parameters on {param.memory}",
        f"optimizer on {opt.memory}" if opt else "",
        f"gathered in {leaf.gather_wire}" if leaf.gather_wire else "",
        f"reduced in {leaf.reduce_wire}" if leaf.reduce_wire else "",
    ]


def describe_split(layout: Layout, leaf: Leaf, name: str) -> str:
    """Write how devices divide a stage of a leaf: `1/8 on dim 0`, `whole`, or `-` if the leaf lacks the stage."""
    stage, parts = dict(leaf.stages)[name], collections.Counter[int]()
    if stage is None:
        return "-"
    for cut in leaf.cuts:
        parts[cut.dim] = (parts[cut.dim] or 1) * layout.num_shards((cut.axis,))
    if leaf.dim is not None:
        parts[leaf.dim] = (parts[leaf.dim] or 1) * layout.num_parts(stage)
    return ", ".join(f"1/{number} on dim {dim}" for dim, number in sorted(parts.items()) if number > 1) or "whole"


def _describe_unit(layout: Layout, unit: UnitInfo, policy: UnitPolicy) -> str:
    stacked = [layout.by_path[path].shape[0] for path in unit.leaves[:1]] if unit.stacked else []
    layers = f" x {stacked[0]}{' (guessed)' if unit.is_guessed else ''}" if stacked else ""
    reshard = policy.reshard_after_forward
    after = ("resharded" if reshard else "kept whole") if isinstance(reshard, bool) else f"kept split {reshard} ways"
    shown = policy.remat if isinstance(policy.remat, str) else describe(policy.remat)
    return f"{unit.name or '(root)'}: {unit.cls}{layers}, {after} after forward, remat {shown}"


def show_bytes(size: int) -> str:
    """Write bytes in the largest unit that gives at least 1: `752 MiB`, `1.96 GiB`."""
    power = min((max(size, 1).bit_length() - 1) // 10, 4)
    value = size / 1024**power
    decimals = 0 if power == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{decimals}f} {('bytes', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"


def describe_mesh(layout: Layout) -> str:
    """Write the strategy and the axes of the mesh: `full_shard on replica=2,fsdp=4`."""
    axes = ",".join(f"{axis}={size}" for axis, size in layout.mesh_sizes if size > 1)
    return f"{layout.strategy.name} on {axes or 'one device'}"


def summary(layout: Layout) -> str:
    """Return mesh, strategy, parameters and units in one line."""
    total, host = (sum(leaf_bytes(layout, leaf, memory) for leaf in layout.leaves) for memory in (DEVICE, HOST))
    whole = sum(math.prod(leaf.shape) * item_bytes(leaf.dtype) for leaf in layout.leaves)
    stored = f", {len(layout.buffers)} {layout.storage} buffers" if layout.buffers else ""
    return (
        f"{describe_mesh(layout)}: {num_parameters(layout.leaves):,} parameters ({show_bytes(whole)}) in "
        f"{len(layout.leaves)} leaves and {len(layout.units)} units{stored}; {show_bytes(total)} per device at rest"
        f"{f', {show_bytes(host)} in host memory' if host else ''}"
    )


_OWNERS = "the checkpoint has", "the model takes"
_KINDS = "in the checkpoint but not in the model", "missing from the checkpoint", "of another shape or dtype"
_Words = Mapping[str, str]


def list_differences(
    there: _Words, wanted: _Words, *, owners: Sequence[str] = _OWNERS, kinds: Sequence[str] = _KINDS
) -> str:
    """List how two tables of named things differ, a line per kind of difference; empty if they are equal.

    Args:
      there, wanted: by name, its properties as text.
      owners: words before the properties in each table, for a name in both (`the state has`, `the model has`).
      kinds: headings: for names only in `there`, names only in `wanted`, and names in both.
    """
    first, second = owners
    differing = [
        f"{name}: {first} {there[name]}, {second} {wanted[name]}"
        for name in wanted
        if name in there and there[name] != wanted[name]
    ]
    names = (sorted(there.keys() - wanted.keys()), sorted(wanted.keys() - there.keys()), differing)
    return "\n".join(f"  {kind}: {_some(found)}" for kind, found in zip(kinds, names, strict=True) if found)


def differing_frozen(there: Mapping[str, bool], here: Mapping[str, bool]) -> str:
    """List the leaves that are frozen only in a state or only here, and the remedy; empty if there are none.

    Args:
      there, here: by path, whether a leaf is trained; leaves that only one side has are ignored.
    """
    both = [path for path in here if path in there and there[path] != here[path]]
    kinds = "frozen there and trained here", "trained there and frozen here"
    lists = [path for path in both if here[path]], [path for path in both if there[path]]
    words = "; ".join(f"{kind}: {_some(paths)}" for kind, paths in zip(kinds, lists, strict=True) if paths)
    remedy = "model.adopt(state, tx), or only from the parameters: model.init_from, load_pretrained (--init-from)"
    return words and f"{words}; go on with {remedy}"


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:8]) + (f", and {len(names) - 8} more" if len(names) > 8 else "")
