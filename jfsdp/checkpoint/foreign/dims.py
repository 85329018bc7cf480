"""Correspondence of the dims of two arrays: a transposition, a permutation, or dims merged and split.

It is written as named dims, the model's array before the arrow and the checkpoint's after it: `"in out -> out in"`,
`"d heads size -> (heads size) d"`. Dims in parentheses form one dim of the array, major first. On our side all of them
but one have a size: `"in (heads pair=2 half=64) -> (heads half pair) in"`. A slice of one array is translated to the
other, and only that slice is read.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from jfsdp.checkpoint.source import Index

Shape = tuple[int, ...]
Groups = tuple[tuple[str, ...], ...]

_SHORTHANDS = {"transpose": "a b -> b a"}
_DIMS = re.compile(r"\(([^()]*)\)|([\w=]+)")


@dataclasses.dataclass(frozen=True)
class Dims:
    """Dims of the model's array (`ours`), and of the checkpoint's (`theirs`), each formed by one or several names.

    Attributes:
      sizes: sizes of names that are given in the text.
    """

    ours: Groups
    theirs: Groups
    sizes: Mapping[str, int] = dataclasses.field(default_factory=dict)

    def their_shape(self, shape: Shape) -> Shape:
        """Return the shape of the checkpoint's array.

        Raises:
          ValueError: if a dim of ours is not a multiple of the sizes given for its parts.
        """
        sizes = self.sizes_of(shape)
        return tuple(math.prod(sizes[name] for name in group) for group in self.theirs)

    def their_index(self, shape: Shape, index: Index) -> Index:
        """Return the smallest slice of the checkpoint's array that contains a slice of ours.

        Minor merged dims are read whole.
        """
        return _index(self.sizes_of(shape), self.ours, self.theirs, index)

    def to_ours(self, block: np.ndarray, shape: Shape, index: Index) -> np.ndarray:
        """Convert the block at `their_index` to the slice of our array; a view if possible."""
        return _convert(block, self.sizes_of(shape), self.theirs, self.ours, index)

    def our_index(self, shape: Shape, index: Index) -> Index:
        """Return the smallest slice of our array that contains a slice of the checkpoint's."""
        return _index(self.sizes_of(shape), self.theirs, self.ours, index)

    def to_theirs(self, block: np.ndarray, shape: Shape, index: Index) -> np.ndarray:
        """Convert the block at `our_index` to the slice of the checkpoint's array; a view if possible."""
        return _convert(block, self.sizes_of(shape), self.ours, self.theirs, index)

    def sizes_of(self, shape: Shape) -> dict[str, int]:
        """Return the size of every name."""
        found = dict(self.sizes)
        for group, size in zip(self.ours, shape, strict=True):
            known = math.prod(self.sizes.get(name, 1) for name in group)
            if size % known or (size != known and all(name in self.sizes for name in group)):
                parts = " ".join(f"{name}={self.sizes[name]}" for name in group if name in self.sizes)
                raise ValueError(f"a dim of size {size} of {list(shape)} does not consist of {parts}; correct the rule")
            found |= {name: size // known for name in group if name not in self.sizes}
        return found


def _slices(sizes: Mapping[str, int], groups: Groups, index: Index) -> dict[str, slice]:
    """Return the smallest slice of each name that a slice of merged dims needs. Only majors are cut."""
    found = {name: slice(0, sizes[name]) for group in groups for name in group}
    for group, part in zip(groups, index, strict=True):
        step = _minor_size(sizes, group)
        found[group[0]] = slice(part.start // step, -(-part.stop // step))
    return found


def _index(sizes: Mapping[str, int], wanted: Groups, source: Groups, index: Index) -> Index:
    """Return the smallest slice of an array of dims `source` that contains a slice of one of dims `wanted`."""
    slices, steps = _slices(sizes, wanted, index), (_minor_size(sizes, group) for group in source)
    parts = [(slices[group[0]], step) for group, step in zip(source, steps)]
    return tuple(slice(part.start * step, part.stop * step) for part, step in parts)


def _convert(block: np.ndarray, sizes: Mapping[str, int], source: Groups, wanted: Groups, index: Index) -> np.ndarray:
    """Convert the block at `_index` to the slice `index` of the array of dims `wanted`."""
    slices, majors = _slices(sizes, wanted, index), {group[0] for group in source}
    read = {name: part if name in majors else slice(0, sizes[name]) for name, part in slices.items()}
    lengths = {name: part.stop - part.start for name, part in read.items()}
    before, after = (tuple(name for group in groups for name in group) for groups in (source, wanted))
    split = block.reshape([lengths[name] for name in before]).transpose([before.index(name) for name in after])
    merged = split.reshape([math.prod(lengths[name] for name in group) for group in wanted])
    starts = [
        part.start - read[group[0]].start * _minor_size(sizes, group) for group, part in zip(wanted, index, strict=True)
    ]
    return merged[tuple(slice(at, at + part.stop - part.start) for at, part in zip(starts, index, strict=True))]


def _minor_size(sizes: Mapping[str, int], group: Sequence[str]) -> int:
    return max(math.prod(sizes[name] for name in group[1:]), 1)


def same_dims(rank: int) -> Dims:
    """Return dims that are equal in both arrays."""
    names = tuple((f"dim{place}",) for place in range(rank))
    return Dims(names, names)


def parse_dims(text: str) -> Dims:
    """Parse a text such as `"a b c -> (b c) a"`; `"transpose"` is short for `"a b -> b a"`.

    Raises:
      ValueError: if the two sides do not have the same dims, each once, or dims of ours are merged without sizes.
    """
    ours, arrow, theirs = _SHORTHANDS.get(text, text).partition("->")
    sizes: dict[str, int] = {}
    sides = []
    for side in (ours, theirs):
        groups = tuple(tuple((merged or single).split()) for merged, single in _DIMS.findall(side))
        given = [name.partition("=") for group in groups for name in group]
        sizes |= {name: int(size) for name, equals, size in given if equals and size.isdecimal()}
        sides.append(tuple(tuple(name.partition("=")[0] for name in group) for group in groups))
    flat = [[name for group in groups for name in group] for groups in sides]
    is_open = any(sum(name not in sizes for name in group) > 1 for group in sides[0])
    if (
        not arrow
        or sorted(flat[0]) != sorted({*flat[1]})
        or len(flat[0]) != len(flat[1])
        or () in (*sides[0], *sides[1])
    ):
        raise ValueError(f"dims {text!r}: write our dims, an arrow, and the other array's, such as 'in out -> out in'")
    if is_open:
        raise ValueError(f"dims {text!r}: dims that form one of ours need sizes, all but one, such as (heads half=64)")
    return Dims(sides[0], sides[1], sizes)
