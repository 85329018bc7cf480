"""Cuts: the dims of leaves that model axes split, by the model's names of dims or by placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jfsdp.layout.layout import close_names
from jfsdp.layout.leaf import Cut, cut_sizes
from jfsdp.layout.lora import LAYER, A, Adapter, B
from jfsdp.layout.mesh import AXES, CUT_AXES, MODEL_AXES, PIPE
from jfsdp.layout.select import chooses

DimNames = tuple[str | tuple[str, ...] | None, ...]
AxisRules = Mapping[str, str | tuple[str, ...] | None] | Sequence[tuple[Any, ...]]
Requested = Sequence[tuple[int, str, str]]  # requested cuts: dim, axis, reason


def find_cuts(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    stacked: Mapping[str, int],
    names: Mapping[str, DimNames],
    sizes: Mapping[str, int],
    axis_rules: AxisRules | None,
    placed: Mapping[str, Requested],
) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of every leaf, in the order of its dims; axes of size 1 cut nothing.

    Args:
      leaves: logical shape and dtype by path.
      stacked: by path, how many leading dims are layer dims.
      names: by path, the model's names of a leaf's dims (Flax's sharding metadata), if it has them.
      sizes: of the mesh's axes.
      axis_rules: by name of a dim, the axis that cuts it (or several, major to minor), or None, as a dict or as Flax's
        pairs; a name that is such an axis needs no rule. Without rules the names cut nothing.
      placed: by path, the cuts that placements request; they replace cuts by names. Leaves without elements have none.

    Raises:
      ValueError: for axes that cut nothing, names without a rule, rules and selectors that match no leaf, missing dims,
        sizes that the axis does not divide, and two cuts of a leaf over one axis.
    """
    requested: dict[str, list[tuple[int, str, str]]] = {}
    if axis_rules is not None:
        requested = _by_names(leaves, stacked, names, _by_name(axis_rules))
    return {
        path: _checked(path, tuple(leaf.shape), stacked[path], placed.get(path, requested.get(path, ())), sizes)
        for path, leaf in leaves.items()
    }


def check_aliases(
    placements: Mapping[Any, Any] | None,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    types: Mapping[str, type],
    aliases: Mapping[str, str],
) -> None:
    """Check that selectors use a leaf's own name.

    Args:
      aliases: other names of leaves with several paths in the model.

    Raises:
      ValueError: if selectors match such a leaf only by another name.
    """
    globs = [selector for selector in placements or {} if isinstance(selector, str)]
    for alias, path in aliases.items():
        chosen = [glob for glob in globs if chooses("placements", glob, alias, leaves[path], types)]
        if chosen and not any(chooses("placements", glob, path, leaves[path], types) for glob in globs):
            raise ValueError(
                f"{path}: placements {chosen[0]!r} names it {alias}, but both names are one parameter; use "
                f"placements={{{path!r}: ...}}"
            )


def _by_name(rules: AxisRules) -> Mapping[str, Any]:
    if isinstance(rules, Mapping):
        return rules
    found: dict[str, Any] = {}
    for rule in rules:
        if len(rule) != 2 or rule[0] is None or rule[0] in found:
            raise ValueError(
                f"axis_rules: {rule!r} is not a pair of a name and an axis, or repeats a name; give each name of dims "
                "one rule, such as ('mlp', 'tensor') or ('embed', None)"
            )
        found[rule[0]] = rule[1]
    return found


def _by_names(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    stacked: Mapping[str, int],
    names: Mapping[str, DimNames],
    rules: Mapping[str, Any],
) -> dict[str, list[tuple[int, str, str]]]:
    layers = {name for path, dims in names.items() if len(dims) == leaves[path].ndim for name in dims[: stacked[path]]}
    named = {path: _named_dims(path, leaves[path].shape, stacked[path], dims, layers) for path, dims in names.items()}
    known = sorted({name for dims in named.values() for _, name in dims})
    for name in rules:
        if name not in known:
            raise ValueError(
                f"axis_rules: {name!r} is not the name of any parameter's dim; remove its rule; {_names_are(known)}"
            )
    # A layer dim needs no rule: it cannot be cut.
    users = {name: path for path, dims in named.items() for dim, name in dims if dim >= stacked[path]}
    missing = [name for name in known if name in users and name not in rules and name not in CUT_AXES]
    if missing:
        raise ValueError(
            f"{users[missing[0]]}: axis_rules has no rule for {missing[0]!r}, the name of one of its dims in sharding "
            f"metadata; set {', '.join(f'{name!r}: None' for name in missing)} for dims that are not to be cut, or "
            f"{missing[0]!r}: {MODEL_AXES[0]!r}"
        )
    axes = {name: rules.get(name, name if name in CUT_AXES else None) for name in known}
    return {
        path: [(dim, axis, f"sharding metadata {name!r}") for dim, name in dims for axis in _axes(axes[name])]
        for path, dims in named.items()
    }


def _axes(wanted: Any) -> tuple[Any, ...]:
    """Return the requested axes, major to minor."""
    return wanted if isinstance(wanted, tuple) else () if wanted is None else (wanted,)


def _named_dims(
    path: str, shape: tuple[int, ...], stacked: int, names: DimNames, layers: Collection[Any]
) -> list[tuple[int, str]]:
    """Return the dims with names: the first ones, after layer dims that a vmap or a scan has left unnamed.

    Args:
      layers: names of layer dims in other leaves; names that begin with them include the layer dims.
    """
    if len(names) > len(shape):
        raise ValueError(
            f"{path}: sharding metadata {names} names {len(names)} dims, but shape {shape} has {len(shape)}; correct "
            "it in the model"
        )
    first = stacked if len(shape) - len(names) == stacked and not {*names[:stacked]} & {*layers} - {None} else 0
    pairs = [(dim + first, (entry,) if isinstance(entry, str) else entry or ()) for dim, entry in enumerate(names)]
    return [(dim, name) for dim, entry in pairs for name in entry]


def _names_are(known: list[str]) -> str:
    if known:
        return f"the names are {', '.join(known)}"
    return (
        "the model's parameters have no sharding metadata (nn.with_partitioning, nnx.with_partitioning); cut dims with "
        "placements={'**.kernel': PartitionSpec(None, axis)}"
    )


def find_dim(path: str, shape: tuple[int, ...], stacked: int, dim: int, origin: str) -> int:
    """Return a dim of a leaf, given without layer dims and counted from the end if negative.

    Raises:
      ValueError: if the leaf has no such dim.
    """
    num = len(shape) - stacked
    if not -num <= dim < num:
        layers = f" without its {stacked} layer dims" if stacked else ""
        remedy = f"use {-num}..{num - 1}" if num else "leave it out"
        raise ValueError(f"{path}: {origin}: dim {dim} is not a dim of shape {shape[stacked:]}{layers}; {remedy}")
    return stacked + int(dim) % num


def _checked(
    path: str, shape: tuple[int, ...], stacked: int, requested: Requested, sizes: Mapping[str, int]
) -> tuple[Cut, ...]:
    cuts: list[Cut] = []
    for dim, axis, reason in sorted(requested, key=lambda one: one[0]):
        if axis not in CUT_AXES:
            why = "the strategy determines what it splits" if axis in AXES else close_names(str(axis), CUT_AXES)
            raise ValueError(
                f"{path}: {reason}: axis {axis!r} cuts no leaf ({why}); axes that cut are "
                f"{', '.join(map(repr, CUT_AXES))}"
            )
        if dim < stacked:
            raise ValueError(
                f"{path}: {reason}: dim {dim} (size {shape[dim]}) is a layer dim and cannot be cut; use None for it"
            )
        if axis == PIPE and stacked:
            raise ValueError(
                f"{path}: {reason}: axis {axis!r} cuts only the layers of a stack, not its other dims; use another axis"
            )
        twice = [cut for cut in cuts if axis == cut.axis or (dim == cut.dim and reason != cut.reason)]
        if twice:
            raise ValueError(
                f"{path}: {twice[0].reason} cuts dim {twice[0].dim} over axis {twice[0].axis!r}, and {reason} dim "
                f"{dim} over {axis!r}; an axis cuts one dim of a leaf: use None for one name, or set placements="
            )
        parts = sizes.get(axis, 1)
        if cut_sizes(shape, cuts)[dim] % parts:
            raise ValueError(
                f"{path}: {reason}: dim {dim} (size {shape[dim]}) cannot be cut over axis {axis!r} (size {parts}), "
                "which does not divide it; use a size that does, or placements={...: None} for this leaf"
            )
        cuts.append(Cut(dim, axis, parts, reason))
    return tuple(cut for cut in cuts if cut.parts > 1) if 0 not in shape else ()


def part_cuts(adapter: Adapter, part: str, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Return the cuts of an adapter's part: its leaf's cuts of the dims that both have."""
    middle = adapter.stacked + adapter.num_in
    stacks = tuple(cut for cut in cuts if cut.dim < adapter.stacked)
    if part == LAYER:
        return stacks
    if part == A:
        return tuple(cut for cut in cuts if cut.dim < middle)
    removed = adapter.num_in - (1 if part == B else 0)
    return stacks + tuple(dataclasses.replace(cut, dim=cut.dim - removed) for cut in cuts if cut.dim >= middle)
