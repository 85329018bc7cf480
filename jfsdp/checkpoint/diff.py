"""Comparison of two sources in names, shapes, dtypes and values, reading one piece at a time."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

from jfsdp.checkpoint.layers import ConvertedLayers
from jfsdp.checkpoint.source import Source, pieces_of


@dataclasses.dataclass(frozen=True)
class Difference:
    """Difference of an array between two sources, where it has the same shape.

    Attributes:
      max_abs: the largest absolute difference; infinite where only one value is NaN or infinite.
      max_rel: `max_abs` over the largest absolute value of the first; 0 if that is 0.
      num_elements: number of elements that differ.
      at: index of the largest difference.
    """

    name: str
    max_abs: float
    max_rel: float
    num_elements: int
    at: tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Differences:
    """Differences between two sources. `values` is sorted by relative difference, the largest first."""

    only_first: tuple[str, ...]
    only_second: tuple[str, ...]
    kinds: tuple[tuple[str, str, str], ...]
    values: tuple[Difference, ...]
    num_equal: int

    @property
    def is_empty(self) -> bool:
        return not (self.only_first or self.only_second or self.kinds or self.values)


def diff(first: Source, second: Source) -> Differences:
    """Compare two sources. Stacked layers are compared with lists of layers.

    Arrays that differ in dtype are compared in value too, in float64.

    Memory:  pieces of 16 MiB, in addition to the memory of the sources.
    """
    other = ConvertedLayers(second, first.arrays)
    shared = [name for name in first.arrays if name in other.arrays]
    kinds, values, num_equal = [], [], 0
    for name in shared:
        one, two = first.arrays[name], other.arrays[name]
        if (one.shape, one.dtype) != (two.shape, two.dtype):
            kinds.append((name, _show(one), _show(two)))
        if one.shape != two.shape:
            continue
        found = _compare(first, other, name)
        num_equal += found is None and one.dtype == two.dtype
        values += [] if found is None else [found]
    values.sort(key=lambda found: (-found.max_rel, found.name))
    return Differences(
        tuple(name for name in first.arrays if name not in other.arrays),
        tuple(name for name in other.arrays if name not in first.arrays),
        tuple(kinds),
        tuple(values),
        num_equal,
    )


def _show(array: Any) -> str:
    return f"{jnp.dtype(array.dtype).name}{list(array.shape)}"


def _compare(first: Source, second: Source, name: str) -> Difference | None:
    """Compare two arrays of equal shape in pieces; None if no value differs (0 equals -0)."""
    largest, scale, count, at = -1.0, 0.0, 0, ()
    for index in pieces_of(first.arrays[name]):
        one, two = first.read(name, index), second.read(name, index)
        wide_one, wide_two = _wide(one), _wide(two)
        differs = one != two if one.dtype == two.dtype else wide_one != wide_two
        differs &= ~(np.isnan(wide_one) & np.isnan(wide_two))
        scale = max(scale, float(np.abs(wide_one)[np.isfinite(wide_one)].max(initial=0.0)))
        if not differs.any():
            continue
        count += int(np.count_nonzero(differs))
        with np.errstate(invalid="ignore", over="ignore"):
            gap = np.abs(wide_one - wide_two)
        gap = np.where(differs, np.where(np.isnan(gap), np.inf, gap), -1.0)
        place = np.unravel_index(int(np.argmax(gap)), gap.shape)
        if gap[place] > largest:
            largest = float(gap[place])
            at = tuple(int(p) + part.start for p, part in zip(place, index, strict=True))
    if not count:
        return None
    return Difference(name, largest, largest / scale if scale else 0.0, count, at)


def _wide(block: np.ndarray) -> np.ndarray:
    return block.astype(np.complex128 if np.iscomplexobj(block) else np.float64)
