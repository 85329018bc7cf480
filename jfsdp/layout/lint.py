"""Warnings about a Layout: settings that work but probably do not do what the user expects."""

from __future__ import annotations

import math

from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import DATA_AXES, MODEL_AXES
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.report import describe_mesh, padding_elements
from jfsdp.layout.units import ROOT
from jfsdp.layout.wire import Wire

PADDING_SHARE = 0.01
REPEATED_SHARE = 0.01
LARGE_ELEMENTS = 2**20
ROOT_ELEMENTS = 2**22  # 16 MiB in float32: a whole model below this size may be gathered at once


class LayoutWarning(UserWarning):
    """Advice from `fully_shard`."""


def advise(layout: Layout) -> list[str]:
    """Return warnings, each with a remedy."""
    found = (rule(layout) for rule in (_splits_nothing, _no_units, _shared, _replicated, _padded, _repeated, _unsent))
    return [warning for warning in found if warning]


def advise_memory(layout: Layout) -> list[str]:
    """Return the warnings about memory that is lost unintentionally, and formats without use: those of `fully_shard`.

    Only `advise` includes the others: a large leaf is replicated only on request (`placements`), a mesh that splits
    nothing is a choice too, and the padding of a small model is a few bytes.
    """
    padding = sum(padding_elements(leaf) for leaf in layout.leaves)
    padded = _padded(layout) if padding >= LARGE_ELEMENTS else None
    found = [_no_units(layout), _shared(layout), padded, _repeated(layout), _unsent(layout)]
    return [warning for warning in found if warning]


def _no_units(layout: Layout) -> str | None:
    """Warn about a model that is split at rest and gathered all at once, since the root unit owns all leaves."""
    if any(unit.leaves for unit in layout.units if unit.name != ROOT):
        return None
    split = [leaf for leaf in layout.leaves if leaf.dim is not None and leaf.stage(leaf.source).axes]
    count = sum(math.prod(leaf.shape) for leaf in split)
    if count < ROOT_ELEMENTS:
        return None
    size = sum(math.prod(leaf.shape) * item_bytes(leaf.stage("use").dtype) for leaf in split)
    return (
        f"no units: all {count:,} split parameters are gathered at once, {size:,} bytes on every device; name the "
        "layers that are to be gathered one by one: units=[Block], a path glob, or jfsdp.by_size(n)"
    )


def _shared(layout: Layout) -> str | None:
    """Warn about leaves that units share, which are gathered with the root for the whole step."""
    shared = layout.unit(ROOT).shared
    count = sum(math.prod(layout.by_path[leaf].shape) for leaf, _ in shared)
    if count < LARGE_ELEMENTS:
        return None
    leaf, users = shared[0]
    return (
        f"{count:,} parameters that units share are gathered with the root unit, for the whole step ({leaf}, used by "
        f"{', '.join(users)}, and {len(shared) - 1} more); make a unit of the module that contains them"
    )


def _splits_nothing(layout: Layout) -> str | None:
    """Warn about a strategy whose axes have size 1."""
    sizes, strategy = dict(layout.mesh_sizes), layout.strategy
    if strategy.name == "ddp" or layout.num_shards(strategy.axes("opt")) > 1:
        return None
    if layout.num_shards(DATA_AXES) == 1:
        where = "one device" if math.prod(sizes.values()) == 1 else "one data shard"
        return f"{strategy.name} on {where}: {_split_there(layout)}"
    axes = " and ".join(repr(axis) for axis in strategy.axes("opt") if axis in ("replica", "fsdp"))
    return f"{strategy.name} splits over axis {axes}, whose size is 1: nothing is split, as with ddp; give it a size"


def _split_there(layout: Layout) -> str:
    """Describe what is split although the strategy splits nothing."""
    cut = [leaf for leaf in layout.leaves if leaf.cuts]
    if not cut:
        return "nothing is split, as with ddp"
    axes = " and ".join(dict.fromkeys(repr(one.axis) for leaf in cut for one in leaf.cuts))
    share = num_parameters(cut) / num_parameters(layout.leaves)
    return f"it splits nothing, as ddp; axis {axes} cuts {100 * share:.1f} % of the parameters"


def _replicated(layout: Layout) -> str | None:
    """Warn about leaves that are replicated although the strategy splits."""
    if layout.num_shards(layout.strategy.axes("opt")) == 1:
        return None
    whole = [leaf for leaf in layout.leaves if leaf.dim is None and not leaf.cuts]
    if len(whole) == len(layout.leaves):
        return f"no parameter is split by min_size {layout.min_size}; lower it (jfsdp.placements), or use ddp"
    requested = {one.name(part) for one in layout.adapters for part in one.leaves}
    large = [leaf for leaf in whole if math.prod(leaf.shape) >= LARGE_ELEMENTS and leaf.path not in requested]
    if not large:
        return None
    largest = max(large, key=lambda leaf: math.prod(leaf.shape))
    return (
        f"{len(large)} large leaves are whole on every device, the largest {largest.path} with "
        f"{math.prod(largest.shape):,} elements ({largest.reason}); see placements"
    )


def _repeated(layout: Layout) -> str | None:
    """Warn about model axes that cut few of the parameters."""
    for axis in MODEL_AXES:
        whole = [leaf for leaf in layout.leaves if all(cut.axis != axis for cut in leaf.cuts)]
        share = num_parameters(whole) / max(num_parameters(layout.leaves), 1)
        if layout.num_shards([axis]) > 1 and share > REPEATED_SHARE:
            largest = max(whole, key=lambda leaf: math.prod(leaf.shape))
            return (
                f"mesh axis {axis!r} (size {layout.num_shards([axis])}) repeats {100 * share:.1f} % of the parameters, "
                f"with their gradients and optimizer states, on each of its devices; the largest is {largest.path}. "
                "Cut them with placements= or, if the model names dims in sharding metadata, with axis_rules="
            )
    return None


def _unsent(layout: Layout) -> str | None:
    """Warn about wire formats in which nothing is sent."""
    for field, effect in (("gather_wire", "only rounds weights"), ("reduce_wire", "has no effect")):
        wired = [(leaf, getattr(leaf, field)) for leaf in layout.leaves if getattr(leaf, field)]

        def sends(leaf: Leaf, wire: Wire, of_weights: bool = field == "gather_wire") -> bool:
            axes = leaf.stage(leaf.source).axes if of_weights else layout.sum_axes(leaf)
            return layout.num_shards(axes) > layout.num_inside(axes, wire.between)

        if wired and layout.data_axes and not any(sends(*pair) for pair in wired):
            return (
                f"{field}={str(wired[0][1])!r} {effect} ({wired[0][0].path} and {len(wired) - 1} more): "
                f"{describe_mesh(layout)} sends nothing in this format; remove it, or use full_shard over more devices"
            )
    return None


def _padded(layout: Layout) -> str | None:
    """Warn about padding that costs memory and traffic."""
    stored = sum(math.prod(leaf.stored_shape) for leaf in layout.leaves)
    padding = sum(padding_elements(leaf) for leaf in layout.leaves)
    if padding <= PADDING_SHARE * stored:
        return None
    most = max(layout.leaves, key=padding_elements)
    size = most.shape[most.dim or 0]
    return (
        f"padding is {100 * padding / stored:.1f} % of all that is stored, most of it in {most.path} (dim {most.dim}: "
        f"{size:,} stored as {size + most.padding:,}); use a mesh size that divides the model's dims, or a smaller "
        "fsdp"
    )
