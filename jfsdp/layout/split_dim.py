"""The split dim of a leaf, its padding, and the reason as text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from jfsdp.layout.leaf import Cut, cut_sizes

DEFAULT_MIN_SIZE = 1024


@dataclasses.dataclass(frozen=True)
class DimChoice:
    """The dim of a leaf that is split over n shards (None: the leaf is replicated), its padding, and the reason."""

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
    """Choose the dim to split over `num_shards`: the first that divides evenly, otherwise the one with least padding.

    The first dim gives contiguous pieces. For a gather along a later dim XLA transposes the array, and keeps the
    transposed copy of a whole stack (docs/log.md, 2026-11-23).

    Args:
      path: the leaf's name, for messages.
      shape: its logical shape; the first `stacked` dims are layer dims and are never split.
      min_size: leaves with fewer elements per layer are replicated.
      dim: the dim that a placement requests, which is not a layer dim.
      cuts: the leaf's cuts. A cut dim is split only if its part divides evenly, since padding would be at the end of
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
        return DimChoice(dim, -shape[dim] % num_shards, f"dim {dim}, as requested")
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
        reason = f"not split: {num_shards} divides no part of a cut dim, and no other dim can be padded"
        return DimChoice(None, 0, reason)
    dim = min(dims, key=lambda d: ((-shape[d] % num_shards) / shape[d], -shape[d]))
    padding = -shape[dim] % num_shards
    padded = shape[dim] + padding
    return DimChoice(dim, padding, f"dim {dim}, padded {shape[dim]} -> {padded}: no dim divisible by {num_shards}")
