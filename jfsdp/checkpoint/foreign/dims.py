"""Correspondence of the dims of two arrays: a transposition, a permutation, or several dims merged into one.

It is written as named dims, the model's array before the arrow and the checkpoint's after it: `"in out -> out in"`,
`"d heads size -> (heads size) d"`. A slice of one array is translated to the other, and only that slice is read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Sequence

import numpy as np

from jfsdp.checkpoint.source import Index

Shape = tuple[int, ...]

_SHORTHANDS = {"transpose": "a b -> b a"}


@dataclasses.dataclass(frozen=True)
class Dims:
    """Dims of the model's array (`ours`), and of the checkpoint's (`theirs`), each one or several of ours in order."""

    ours: tuple[str, ...]
    theirs: tuple[tuple[str, ...], ...]

    def their_shape(self, shape: Shape) -> Shape:
        """Return the shape of the checkpoint's array."""
        sizes = dict(zip(self.ours, shape, strict=True))
        return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

    def their_index(self, shape: Shape, index: Index) -> Index:
        """Return the smallest slice of the checkpoint's array that contains a slice of ours.

        Minor merged dims are read whole.
        """
        wanted = dict(zip(self.ours, index, strict=True))
        slices = []
        for group in self.theirs:
            step, part = self._minor_size(shape, group), wanted[group[0]]
            slices.append(slice(part.start * step, part.stop * step))
        return tuple(slices)

    def to_ours(self, block: np.ndarray, shape: Shape, index: Index) -> np.ndarray:
        """Convert the block at `their_index` to the slice of our array; a view if possible."""
        wanted, read = dict(zip(self.ours, index, strict=True)), dict(zip(self.ours, shape, strict=True))
        majors = {group[0] for group in self.theirs}
        read |= {name: wanted[name].stop - wanted[name].start for name in majors}
        flat = [name for group in self.theirs for name in group]
        split = block.reshape([read[name] for name in flat]).transpose([flat.index(name) for name in self.ours])
        return split[tuple(slice(None) if name in majors else wanted[name] for name in self.ours)]

    def our_index(self, shape: Shape, index: Index) -> Index:
        """Return the smallest slice of our array that contains a slice of the checkpoint's."""
        wanted = dict(zip(self.ours, (slice(0, size) for size in shape), strict=True))
        for group, part in zip(self.theirs, index, strict=True):
            step = self._minor_size(shape, group)
            wanted[group[0]] = slice(part.start // step, -(-part.stop // step))
        return tuple(wanted[name] for name in self.ours)

    def to_theirs(self, block: np.ndarray, shape: Shape, index: Index) -> np.ndarray:
        """Convert the block at `our_index` to the slice of the checkpoint's array; a view if possible."""
        flat = [name for group in self.theirs for name in group]
        read = dict(zip(self.ours, block.shape, strict=True))
        merged = block.transpose([self.ours.index(name) for name in flat]).reshape(
            [math.prod(read[name] for name in group) for group in self.theirs]
        )
        cuts = []
        for group, part in zip(self.theirs, index, strict=True):
            step = self._minor_size(shape, group)
            start = part.start - part.start // step * step
            cuts.append(slice(start, start + part.stop - part.start))
        return merged[tuple(cuts)]

    def _minor_size(self, shape: Shape, group: Sequence[str]) -> int:
        sizes = dict(zip(self.ours, shape, strict=True))
        return max(math.prod(sizes[name] for name in group[1:]), 1)


def same_dims(rank: int) -> Dims:
    """Return dims that are equal in both arrays."""
    names = tuple(f"dim{place}" for place in range(rank))
    return Dims(names, tuple((name,) for name in names))


def parse_dims(text: str) -> Dims:
    """Parse a text such as `"a b c -> (b c) a"`; `"transpose"` is short for `"a b -> b a"`.

    Raises:
      ValueError: if the two sides do not have the same dims, each once.
    """
    ours, arrow, theirs = _SHORTHANDS.get(text, text).partition("->")
    groups = tuple(tuple((merged or single).split()) for merged, single in re.findall(r"\(([^()]*)\)|(\w+)", theirs))
    dims = Dims(tuple(ours.split()), groups)
    flat = [name for group in groups for name in group]
    if not arrow or sorted(flat) != sorted(set(dims.ours)) or len(flat) != len(dims.ours) or () in groups:
        raise ValueError(f"dims {text!r}: write our dims, an arrow, and the other array's, such as 'in out -> out in'")
    return dims
