"""Propagate a sharded dim of an operand through an operation: to a dim of each result, or to a sum over devices.

[Note: propagation of dims]
- If an operation treats the positions of a sharded dim independently, the dim stays sharded.
- If it sums along the dim, the result is a sum over devices, of which each device has a part.
- If it mixes positions of the dim (a sort, a slice), it needs the operand replicated.
- An operation without a rule is assumed to treat positions independently along the dims that operand and result share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

SUMMED = "summed"
Goes = int | str | None  # a dim of a result, SUMMED, or None: the result does not have it


def follow(eqn: Any, place: int, dim: int, parts: int) -> list[Goes]:
    """Return for each result the dim that a dim split in `parts` becomes; all None: the operand must be replicated.

    Args:
      place: the operand's index among the inputs.
    """
    rule = _RULES.get(eqn.primitive.name)
    if rule is None:
        return [_same(eqn.invars[place].aval, dim, out.aval) for out in eqn.outvars]
    return [rule(eqn, place, dim, parts)] * len(eqn.outvars)


def is_known(eqn: Any) -> bool:
    """Return whether an operation has a rule or is elementwise."""
    return eqn.primitive.name in _RULES or all(
        not atom.aval.shape or _stretches(atom.aval.shape, eqn.outvars[0].aval.shape)
        for atom in (*eqn.invars, *eqn.outvars)
    )


def _stretches(shape: Sequence[int], to: Sequence[int]) -> bool:
    return len(shape) == len(to) and all(size in (1, other) for size, other in zip(shape, to, strict=True))


def keeps_sums(eqn: Any) -> bool:
    """Return whether a sum over devices may be reduced after an operation, which reshapes or is elementwise."""
    return eqn.primitive.name in _SHAPES or (is_known(eqn) and eqn.primitive.name not in _RULES)


def _same(aval: Any, dim: int, out: Any) -> Goes:
    return dim if out.shape[dim : dim + 1] == aval.shape[dim : dim + 1] and len(out.shape) == len(aval.shape) else None


def _dot(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    contracted, batch = eqn.params["dimension_numbers"]
    if dim in contracted[place]:
        return SUMMED
    if dim in batch[place]:
        return list(batch[place]).index(dim)
    free = [d for d in range(eqn.invars[place].aval.ndim) if d not in contracted[place] and d not in batch[place]]
    other = eqn.invars[0].aval.ndim - len(contracted[0]) if place else len(batch[0])
    return other + free.index(dim)


def _reduce(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    axes = eqn.params["axes"]
    return SUMMED if dim in axes else dim - sum(axis < dim for axis in axes)


def _squeeze(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    squeezed = [d % eqn.invars[0].aval.ndim for d in eqn.params["dimensions"]]
    return dim - sum(d < dim for d in squeezed)


def _reshape(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    """Return the dim of the result that begins at the same offset, if `parts` divides it."""
    old, new = eqn.invars[0].aval.shape, eqn.outvars[0].aval.shape
    before = math.prod(old[:dim])
    return next((d for d in range(len(new)) if math.prod(new[:d]) == before and new[d] % parts == 0), None)


def _slice(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    return None if place else _same(eqn.invars[0].aval, dim, eqn.outvars[0].aval)


def _update(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    operand, update = eqn.invars[:2]
    return _same(operand.aval, dim, update.aval) if place < 2 else None


def _along(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    """Apply to cumulative sums, sorts and reversals, which mix the positions of one dim."""
    params = eqn.params
    mixed = params.get("axis", params.get("dimension", params.get("dimensions")))
    return None if dim in (mixed if isinstance(mixed, tuple) else (mixed,)) else dim


def _gather(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    numbers, sizes = eqn.params["dimension_numbers"], eqn.params["slice_sizes"]
    out = eqn.outvars[0].aval
    looked_up = [d for d in range(out.ndim) if d not in numbers.offset_dims]
    if place == 1:
        return looked_up[dim]
    if dim in numbers.operand_batching_dims:
        return looked_up[numbers.start_indices_batching_dims[numbers.operand_batching_dims.index(dim)]]
    if dim in numbers.start_index_map:
        return SUMMED if sizes[dim] == 1 else None
    kept = [d for d in range(len(sizes)) if d not in (*numbers.collapsed_slice_dims, *numbers.operand_batching_dims)]
    return numbers.offset_dims[kept.index(dim)] if sizes[dim] == eqn.invars[0].aval.shape[dim] else None


def _scatter(eqn: Any, place: int, dim: int, parts: int) -> Goes:
    """Return SUMMED if devices scatter into one array; None (replicate) if the updates are smaller than the array."""
    numbers = eqn.params["dimension_numbers"]
    if place == 0:
        return dim
    updates = eqn.invars[2].aval
    if place == 2 and dim in numbers.update_window_dims:
        inserted = (*numbers.inserted_window_dims, *numbers.operand_batching_dims)
        kept = [d for d in range(eqn.invars[0].aval.ndim) if d not in inserted]
        return kept[numbers.update_window_dims.index(dim)]
    places = [d for d in range(updates.ndim) if d not in numbers.update_window_dims]
    at = places.index(dim) if place == 2 else dim
    batching = numbers.scatter_indices_batching_dims
    if at in batching:
        return numbers.operand_batching_dims[batching.index(at)]
    return None if updates.size < eqn.invars[0].aval.size else SUMMED


_SHAPES: dict[str, Callable[[Any, int, int, int], Goes]] = {
    "reshape": _reshape,
    "transpose": lambda eqn, place, dim, parts: list(eqn.params["permutation"]).index(dim),
    "squeeze": _squeeze,
}
_RULES: dict[str, Callable[[Any, int, int, int], Goes]] = {
    **_SHAPES,
    **dict.fromkeys(("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or"), _reduce),
    **dict.fromkeys(("argmax", "argmin"), _reduce),
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev"), _along),
    **dict.fromkeys(("slice", "dynamic_slice", "split", "pad"), _slice),
    **dict.fromkeys(("scatter-add", "scatter_add"), _scatter),
    "dynamic_update_slice": _update,
    "dot_general": _dot,
    "broadcast_in_dim": lambda eqn, place, dim, parts: None if place else eqn.params["broadcast_dimensions"][dim],
    "concatenate": lambda eqn, place, dim, parts: None if dim == eqn.params["dimension"] else dim,
    "gather": _gather,
}
_LINEAR = ("neg", "mul", "div", "convert_element_type", "copy")


def adds(eqn: Any) -> bool:
    """Return whether an operation adds its operands."""
    return eqn.primitive.name in ("add", "add_any", "sub")


def is_linear(eqn: Any) -> bool:
    """Return whether an operation on a part of a sum, and on operands that are not sums, gives a part of the result."""
    return eqn.primitive.name in _SHAPES or eqn.primitive.name in _LINEAR
