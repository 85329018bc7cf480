"""Rules: the dim along which a leaf is split, the padding that takes, and the reason in words."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jfsdp.layout.leaf import Cut, cut_sizes

DEFAULT_MIN_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class DimChoice:
    """Which dim of a leaf is split over n shards (None: the leaf is replicated), how much it grows, and why."""

    dim: int | None
    padding: int
    reason: str


def choose_dim(
    path: str,
    shape: tuple[int, ...],
    num_shards: int,
    *,
    stacked: int = 0,
    min_size: int = DEFAULT_MIN_SIZE,
    dim: int | None = None,
    cuts: Sequence[Cut] = (),
) -> DimChoice:
    """Choose the dim to split over `num_shards`: the first that divides, else the one that pads least.

    The first, since what is split along it lies in one piece: a gather along a later dim leaves XLA to transpose the
    array, and it holds the transposed copy of a whole stack (docs/log.md, 2026-11-23).

    Args:
      path: the leaf's name, for messages.
      shape: its logical shape; the first `stacked` dims are layer dims and are never split.
      min_size: leaves with fewer elements per layer are replicated.
      dim: the placement's choice instead, a dim of the leaf that is not a layer dim.
      cuts: of the leaf. What one leaves of its dim is split only where that divides: padding would stand at the end of
        every part.

    Raises:
      ValueError: if `dim` is cut and would be padded.
    """
    size = math.prod(shape[stacked:])
    whole, shape = shape, cut_sizes(shape, cuts)
    cut = {cut.dim: whole[cut.dim] // shape[cut.dim] for cut in cuts}
    if num_shards == 1:
        return DimChoice(None, 0, "whole: this strategy splits nothing over this mesh")
    if dim is not None and dim in cut and shape[dim] % num_shards:
        raise ValueError(
            f"{path}: dim {dim} is to be split over {num_shards} devices (placements), and is cut into "
            f"{cut[dim]} parts of size {shape[dim]}, which {num_shards} does not divide; choose another dim, or none"
        )
    if dim is not None:
        return DimChoice(dim, -shape[dim] % num_shards, f"dim {dim}, as asked")
    if size < min_size:
        return DimChoice(None, 0, f"replicated: {size} elements, below min_size {min_size}")
    if size == 0 or len(shape) == stacked:
        return DimChoice(None, 0, "replicated: no dim to split")
    dims = range(stacked, len(shape))
    divisible = [dim for dim in dims if shape[dim] % num_shards == 0]
    if divisible:
        return DimChoice(divisible[0], 0, f"dim {divisible[0]}, the first divisible by {num_shards}")
    dims = [dim for dim in dims if dim not in cut]
    if not dims:
        reason = f"not split over {num_shards} devices: that divides no part of a cut dim, and no other can be padded"
        return DimChoice(None, 0, reason)
    dim = min(dims, key=lambda d: ((-shape[d] % num_shards) / shape[d], -shape[d]))
    padding = -shape[dim] % num_shards
    padded = shape[dim] + padding
    return DimChoice(dim, padding, f"dim {dim}, padded {shape[dim]} -> {padded}: no dim divisible by {num_shards}")
