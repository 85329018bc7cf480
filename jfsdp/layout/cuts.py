"""The dims of leaves that an axis of the model cuts, by the model's own names of dims or by placements."""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax

from jfsdp.layout.layout import close_names
from jfsdp.layout.leaf import Cut, cut_sizes
from jfsdp.layout.lora import LAYER, A, Adapter, B
from jfsdp.layout.mesh import AXES, MODEL_AXES, PIPE
from jfsdp.layout.select import chooses

DimNames = tuple[str | tuple[str, ...] | None, ...]
AxisRules = Mapping[str, str | tuple[str, ...] | None] | Sequence[tuple[Any, ...]]
Asked = Sequence[tuple[int, str, str]]  # dims with the axis that cuts each and the reason


def find_cuts(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    stacked: Mapping[str, int],
    names: Mapping[str, DimNames],
    sizes: Mapping[str, int],
    axis_rules: AxisRules | None,
    placed: Mapping[str, Asked],
) -> dict[str, tuple[Cut, ...]]:
    """Return the cuts of every leaf, in the order of its dims; axes of size 1 cut nothing.

    Args:
      leaves: logical shape and dtype by path.
      stacked: by path, how many leading dims are layer dims.
      names: by path, what the model calls the dims of a leaf (Flax's sharding metadata), where it names them.
      sizes: of the mesh's axes.
      axis_rules: by a name of dims, the axis that cuts them (or several, major to minor), or None, as a dict or as
        Flax's pairs; a name that is such an axis needs no rule. Without rules the names cut nothing.
      placed: by path, the cuts that placements ask for, in place of those by names. Leaves without elements have none.

    Raises:
      ValueError: for axes that cut nothing, names without a rule, rules and selectors that no leaf has, dims that are
        not there, sizes that the axis does not divide, and two cuts of a leaf over one axis.
    """
    asked: dict[str, list[tuple[int, str, str]]] = {}
    if axis_rules is not None:
        asked = _by_names(leaves, stacked, names, _by_name(axis_rules))
    return {
        path: _checked(path, tuple(leaf.shape), stacked[path], placed.get(path, asked.get(path, ())), sizes)
        for path, leaf in leaves.items()
    }


def check_aliases(
    placements: Mapping[Any, Any] | None,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    types: Mapping[str, type],
    aliases: Mapping[str, str],
) -> None:
    """Refuse selectors that choose a leaf by another name than its own.

    Args:
      aliases: the other names of leaves that the model reaches in several ways.

    Raises:
      ValueError: if no selector chooses such a leaf by its own name.
    """
    globs = [selector for selector in placements or {} if isinstance(selector, str)]
    for alias, path in aliases.items():
        chosen = [glob for glob in globs if chooses("placements", glob, alias, leaves[path], types)]
        if chosen and not any(chooses("placements", glob, path, leaves[path], types) for glob in globs):
            raise ValueError(
                f"{path}: placements {chosen[0]!r} names it {alias}, and it is one parameter under both names; say "
                f"placements={{{path!r}: ...}}"
            )


def _by_name(rules: AxisRules) -> Mapping[str, Any]:
    if isinstance(rules, Mapping):
        return rules
    found: dict[str, Any] = {}
    for rule in rules:
        if len(rule) != 2 or rule[0] is None or rule[0] in found:
            raise ValueError(
                f"axis_rules: {rule!r} is no pair of a name and an axis, or another one has this name; give each "
                "name of dims one rule, such as ('mlp', 'tensor') or ('embed', None)"
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
                f"axis_rules: {name!r} is the name of no parameter's dim, drop its rule; {_names_are(known)}"
            )
    # A layer dim needs no rule: it cannot be cut.
    asking = {name: path for path, dims in named.items() for dim, name in dims if dim >= stacked[path]}
    missing = [name for name in known if name in asking and name not in rules and name not in MODEL_AXES]
    if missing:
        raise ValueError(
            f"{asking[missing[0]]}: axis_rules has no rule for {missing[0]!r}, which sharding metadata calls a dim of "
            f"it; say {', '.join(f'{name!r}: None' for name in missing)} for what is not to be cut, or "
            f"{missing[0]!r}: {MODEL_AXES[0]!r}"
        )
    axes = {name: rules.get(name, name if name in MODEL_AXES else None) for name in known}
    return {
        path: [(dim, axis, f"sharding metadata {name!r}") for dim, name in dims for axis in _axes(axes[name])]
        for path, dims in named.items()
    }


def _axes(wanted: Any) -> tuple[Any, ...]:
    """Return the axes asked for, major to minor."""
    return wanted if isinstance(wanted, tuple) else () if wanted is None else (wanted,)


def _named_dims(
    path: str, shape: tuple[int, ...], stacked: int, names: DimNames, layers: Collection[Any]
) -> list[tuple[int, str]]:
    """Return the dims that have names: the first ones, after layer dims that a vmap or a scan has left without.

    Args:
      layers: what other leaves call layer dims: names that begin so have them.
    """
    if len(names) > len(shape):
        raise ValueError(
            f"{path}: sharding metadata {names} names {len(names)} dims, and shape {shape} has {len(shape)}; mend "
            "it in the model"
        )
    first = stacked if len(shape) - len(names) == stacked and not {*names[:stacked]} & {*layers} - {None} else 0
    pairs = [(dim + first, (entry,) if isinstance(entry, str) else entry or ()) for dim, entry in enumerate(names)]
    return [(dim, name) for dim, entry in pairs for name in entry]


def _names_are(known: list[str]) -> str:
    if known:
        return f"the names are {', '.join(known)}"
    return (
        "the model's parameters have no sharding metadata (nn.with_partitioning, nnx.with_partitioning); say which "
        "dims are cut by placements={'**.kernel': PartitionSpec(None, axis)}"
    )


def find_dim(path: str, shape: tuple[int, ...], stacked: int, dim: int, said: str) -> int:
    """Return a dim of a leaf that is given without layer dims, from the end if negative.

    Raises:
      ValueError: if the leaf has no such dim.
    """
    num = len(shape) - stacked
    if not -num <= dim < num:
        layers = f" without its {stacked} layer dims" if stacked else ""
        remedy = f"say {-num}..{num - 1}" if num else "leave it out"
        raise ValueError(f"{path}: {said}: dim {dim} is not a dim of shape {shape[stacked:]}{layers}; {remedy}")
    return stacked + int(dim) % num


def _checked(
    path: str, shape: tuple[int, ...], stacked: int, asked: Asked, sizes: Mapping[str, int]
) -> tuple[Cut, ...]:
    cuts: list[Cut] = []
    for dim, axis, reason in sorted(asked, key=lambda one: one[0]):
        if axis not in MODEL_AXES:
            why = "the strategy says what is split over it" if axis in AXES else close_names(str(axis), MODEL_AXES)
            raise ValueError(
                f"{path}: {reason}: axis {axis!r} cuts no leaf ({why}); what cuts is {', '.join(map(repr, MODEL_AXES))}"
            )
        if dim < stacked:
            raise ValueError(
                f"{path}: {reason}: dim {dim} (size {shape[dim]}) is a layer dim and cannot be cut; say None for it"
            )
        if axis == PIPE and stacked:
            raise ValueError(
                f"{path}: {reason}: axis {axis!r} cuts the layers of a stack, and no other dim of it; name another axis"
            )
        twice = [cut for cut in cuts if axis == cut.axis or (dim == cut.dim and reason != cut.reason)]
        if twice:
            raise ValueError(
                f"{path}: {twice[0].reason} cuts dim {twice[0].dim} over axis {twice[0].axis!r}, and {reason} dim "
                f"{dim} over {axis!r}; an axis cuts one dim of a leaf: say None for one name, or choose by placements="
            )
        parts = sizes.get(axis, 1)
        if cut_sizes(shape, cuts)[dim] % parts:
            raise ValueError(
                f"{path}: {reason}: dim {dim} (size {shape[dim]}) cannot be cut over axis {axis!r} (size {parts}), "
                "which does not divide it; take a size that does, or placements={...: None} for this leaf"
            )
        cuts.append(Cut(dim, axis, parts, reason))
    return tuple(cut for cut in cuts if cut.parts > 1) if 0 not in shape else ()


def part_cuts(adapter: Adapter, part: str, cuts: Sequence[Cut]) -> tuple[Cut, ...]:
    """Return the cuts of a part of an adapter: those of its leaf in the dims that the part shares with it."""
    middle = adapter.stacked + adapter.num_in
    if part == LAYER:
        return ()
    if part == A:
        return tuple(cut for cut in cuts if cut.dim < middle)
    gone = adapter.num_in - (1 if part == B else 0)
    return tuple(dataclasses.replace(cut, dim=cut.dim - gone) for cut in cuts if cut.dim >= middle)
