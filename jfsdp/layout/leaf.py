"""One leaf of a Layout: its shape, the stages of its life, and the dims of it that an axis cuts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jfsdp.layout.mesh import PIPE

DEVICE, HOST = "device", "pinned_host"
PER_PARAMETER, FLAT = "per_parameter", "flat"  # storage forms
SubAxes = Mapping[str, tuple[tuple[str, int], ...]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a leaf.

    Attributes:
      axes: the mesh axes over which its split dim is spread, major to minor; () is whole.
      dtype: its dtype.
      memory: "device", or "pinned_host" where it is offloaded.
      ways: the first of `axes` is split this many ways over its neighbouring devices, and repeated beyond them (hpZ);
        None: all of it.
    """

    axes: tuple[str, ...]
    dtype: str
    memory: str = DEVICE
    ways: int | None = None

    def expanded(self, sub_axes: SubAxes) -> tuple[str, ...]:
        """Return its axes on a mesh of which some are split: each by its parts, of those split in part the minor."""
        expanded: list[str] = []
        for place, axis in enumerate(self.axes):
            parts = sub_axes.get(axis, ((axis, 0),))
            if place == 0 and self.ways is not None:
                sizes = [size for _, size in parts]
                minor = (parts[i:] for i in range(len(parts)) if math.prod(sizes[i:]) == self.ways)
                parts = next(minor, parts)
            expanded += [name for name, _ in parts]
        return tuple(expanded)


@dataclasses.dataclass(frozen=True)
class Cut:
    """A dim of a leaf of which a device has one part only, through the whole life of the leaf: also in compute.

    Attributes:
      dim: of the leaf's shape, layer dims counted.
      axis: the mesh axis that cuts it. No gather, no reduction of the leaf runs over it.
      parts: the size of that axis.
      reason: who asked for it.
    """

    dim: int
    axis: str
    parts: int
    reason: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its logical shape, its owner, its split dim and padding with the reason, its stages and its cuts.

    An element holds `per_item` of the model's values: several codes share one, and scales are none of them.

    Stages: `param` (the master at rest), `work` (the low-precision copy at rest, or None), `use`, `kept`, `grad`,
      `opt` (both None for a leaf that is not trained). What a stage splits is what the cuts leave of the leaf.
    """

    path: str
    shape: tuple[int, ...]
    dtype: str
    unit: str
    stacked: int
    trainable: bool
    dim: int | None
    padding: int
    reason: str
    stages: tuple[tuple[str, Stage | None], ...]
    cuts: tuple[Cut, ...] = ()
    per_item: int = 1

    def stage(self, name: str) -> Stage:
        stage = dict(self.stages)[name]
        if stage is None:
            raise ValueError(f"{self.path}: has no stage {name!r} ({self.reason})")
        return stage

    @property
    def has_work(self) -> bool:
        """Whether a low-precision copy is kept at rest beside the master."""
        return dict(self.stages)["work"] is not None

    @property
    def source(self) -> str:
        """The stage at rest from which compute takes the leaf: `work` where there is one, else `param`."""
        return "work" if self.has_work else "param"

    @property
    def is_staged(self) -> bool:
        """Whether its layers are cut over the stages of a pipeline."""
        return any(cut.axis == PIPE and cut.dim < self.stacked for cut in self.cuts)

    def in_stage(self) -> Leaf:
        """Return the leaf as one stage of a pipeline has it: with its own layers."""
        cuts = tuple(cut for cut in self.cuts if cut.dim >= self.stacked)
        own = cut_sizes(self.shape[: self.stacked], self.cuts)
        return dataclasses.replace(self, shape=(*own, *self.shape[self.stacked :]), cuts=cuts)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The logical shape with the split dim padded."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] + self.padding, *self.shape[self.dim + 1 :])

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The stored shape of what a device has of the leaf at all: with every cut dim divided."""
        return cut_sizes(self.stored_shape, self.cuts)

    def piece_shape(self, pieces: int) -> tuple[int, ...]:
        """Return the shape of one of so many equal pieces of what a device has of the leaf."""
        shape = list(self.cut_shape)
        if self.dim is not None:
            shape[self.dim] //= pieces
        return tuple(shape)

    def cut_spec(self, sliced: int = 0) -> PartitionSpec:
        """Return the spec of the cuts alone: of the leaf where no data axis splits it."""
        return make_spec(len(self.shape), self.cuts, sliced=sliced)

    @property
    def padding_share(self) -> float:
        """The share of the stored elements that is padding."""
        stored = math.prod(self.stored_shape)
        return 1 - math.prod(self.shape) / stored if self.padding else 0.0

    def spec(self, stage: str, *, sliced: int = 0, sub_axes: SubAxes | None = None) -> PartitionSpec:
        """Return the spec of a stage: what cuts a dim is major to what splits it, so that each part lies in one piece.

        Args:
          sliced: this many leading dims are gone (inside a scan over a stack).
          sub_axes: for a mesh whose axes are split, the parts of each axis; needed where a stage has `ways`.
        """
        axes = self.stage(stage).expanded(sub_axes or {})
        return make_spec(len(self.shape), self.cuts, self.dim, axes, sliced=sliced)


@dataclasses.dataclass(frozen=True)
class View:
    """The place of one leaf in a chunk of its buffer.

    Attributes:
      path: the leaf's name.
      start, size: elements of a chunk.
      shape: what a chunk holds of the leaf, its layer dims left out.
      dim: which dim of `shape` the chunks part; None where there is one chunk.
      cut: which dim of `shape` the buffer's parts part, major to the chunks; None where it has no cuts.
      logical_size: elements of the whole leaf, per layer and without padding.
    """

    path: str
    start: int
    size: int
    shape: tuple[int, ...]
    dim: int | None
    logical_size: int
    cut: int | None = None


@dataclasses.dataclass(frozen=True)
class Buffer(Leaf):
    """Leaves of one unit, dtype, life and cuts as one array [layers, chunks * chunk] ([layers, parts, chunks * chunk]
    where they are cut); see [Note: what a buffer looks like] in flat.py.

    A `Leaf` to whatever moves it.
    """

    views: tuple[View, ...] = ()

    @property
    def num_parts(self) -> int:
        """Into how many parts the leaves are cut."""
        return math.prod(cut.parts for cut in self.cuts)

    @property
    def chunk(self) -> int:
        """Elements of one chunk, per layer."""
        return sum(view.size for view in self.views)

    @property
    def padding_share(self) -> float:
        """The share of the stored elements that is padding of its leaves."""
        logical = sum(view.logical_size for view in self.views)
        stored = self.num_parts * self.shape[-1]
        return 1 - logical / stored if stored else 0.0


def cut_sizes(shape: Sequence[int], cuts: Iterable[Cut]) -> tuple[int, ...]:
    """Return what cuts leave of a shape."""
    left = list(shape)
    for cut in cuts:
        if cut.dim < len(left):
            left[cut.dim] //= cut.parts
    return tuple(left)


def make_spec(
    ndim: int, cuts: Iterable[Cut], dim: int | None = None, axes: Sequence[str] = (), *, sliced: int = 0
) -> PartitionSpec:
    """Return the spec of an array that is cut, and split along `dim` over `axes`, which are minor to its cuts.

    Args:
      sliced: this many leading dims are gone.
    """
    over: dict[int, tuple[str, ...]] = {}
    for cut in cuts:
        over[cut.dim] = (*over.get(cut.dim, ()), cut.axis)
    if dim is not None:
        over[dim] = (*over.get(dim, ()), *axes)
    names = [over.get(at, ()) for at in range(sliced, ndim)]
    return PartitionSpec(*[entry if len(entry) > 1 else "".join(entry) or None for entry in names])
