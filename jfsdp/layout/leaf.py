"""One leaf of a Layout: its shape, its stages, and its cuts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

from jax.sharding import PartitionSpec

from jfsdp.layout.mesh import DATA_AXES, PIPE
from jfsdp.layout.wire import Wire

DEVICE, HOST = "device", "pinned_host"
PER_PARAMETER, FLAT = "per_parameter", "flat"  # storage forms
SubAxes = Mapping[str, tuple[tuple[str, int], ...]]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a leaf.

    Attributes:
      axes: the mesh axes that split its split dim, major to minor; () is whole.
      dtype: its dtype.
      memory: "device", or "pinned_host" if it is offloaded.
      ways: the first of `axes` is split over this many neighbouring devices, and replicated beyond them (hpZ); None:
        over all of them.
    """

    axes: tuple[str, ...]
    dtype: str
    memory: str = DEVICE
    ways: int | None = None

    def expanded(self, sub_axes: SubAxes) -> tuple[str, ...]:
        """Return its axes on a mesh with split axes: all parts of an axis, or its minor parts if `ways` is set."""
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
    """A dim of a leaf of which every device has only one part, at all stages, also in compute.

    Attributes:
      dim: of the leaf's shape, including layer dims.
      axis: the mesh axis that cuts it. No gather or reduction of the leaf runs over this axis. A data axis (`expert`)
        may cut leaves too: a device then computes with its part on rows of all devices of the axis.
      parts: the size of that axis.
      reason: the origin of the request.
    """

    dim: int
    axis: str
    parts: int
    reason: str = dataclasses.field(compare=False)


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its logical shape, its unit, its split dim and padding with the reason, its stages and its cuts.

    An element contains `per_item` of the model's values: more than 1 for codes, and 0 for scales. Its gathers and the
    reductions of its gradient may have wire formats.

    Stages: `param` (the master at rest), `work` (the low-precision copy at rest, or None), `use`, `kept`, `grad`,
      `opt` (both None for a leaf that is not trained). Stages split one part of a leaf that is cut.
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
    gather_wire: Wire | None = None
    reduce_wire: Wire | None = None

    def stage(self, name: str) -> Stage:
        stage = dict(self.stages)[name]
        if stage is None:
            raise ValueError(f"{self.path}: has no stage {name!r} ({self.reason})")
        return stage

    @property
    def has_work(self) -> bool:
        """Whether a low-precision copy is kept at rest in addition to the master."""
        return dict(self.stages)["work"] is not None

    @property
    def source(self) -> str:
        """The stage at rest that compute reads: `work` if the leaf has it, otherwise `param`."""
        return "work" if self.has_work else "param"

    @property
    def is_staged(self) -> bool:
        """Whether its layers are cut over the stages of a pipeline."""
        return any(cut.axis == PIPE and cut.dim < self.stacked for cut in self.cuts)

    def in_stage(self) -> Leaf:
        """Return the leaf in one stage of a pipeline, with only the layers of that stage."""
        cuts = tuple(cut for cut in self.cuts if cut.dim >= self.stacked)
        sizes = cut_sizes(self.shape[: self.stacked], self.cuts)
        return dataclasses.replace(self, shape=(*sizes, *self.shape[self.stacked :]), cuts=cuts)

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The logical shape with the split dim padded."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] + self.padding, *self.shape[self.dim + 1 :])

    @property
    def cut_shape(self) -> tuple[int, ...]:
        """The stored shape of one part of a leaf, with every cut dim divided."""
        return cut_sizes(self.stored_shape, self.cuts)

    def piece_shape(self, pieces: int) -> tuple[int, ...]:
        """Return the shape of one of `pieces` equal pieces of such a part."""
        shape = list(self.cut_shape)
        if self.dim is not None:
            shape[self.dim] //= pieces
        return tuple(shape)

    @property
    def row_cuts(self) -> tuple[Cut, ...]:
        """The cuts over data axes."""
        return tuple(cut for cut in self.cuts if cut.axis in DATA_AXES)

    @property
    def model_cuts(self) -> tuple[Cut, ...]:
        """The cuts over model axes."""
        return tuple(cut for cut in self.cuts if cut.axis not in DATA_AXES)

    def cut_spec(self, sliced: int = 0) -> PartitionSpec:
        """Return the spec of the cuts over model axes."""
        return make_spec(len(self.shape), self.model_cuts, sliced=sliced)

    @property
    def padding_share(self) -> float:
        """The share of the stored elements that is padding."""
        stored = math.prod(self.stored_shape)
        return 1 - math.prod(self.shape) / stored if self.padding else 0.0

    def spec(self, stage: str, *, sliced: int = 0, sub_axes: SubAxes | None = None) -> PartitionSpec:
        """Return the spec of a stage. Cuts are major to splits of a dim, so that each part is contiguous.

        Args:
          sliced: the number of leading dims that are removed (inside a scan over a stack).
          sub_axes: for a mesh with split axes, the parts of each axis; needed if a stage has `ways`.
        """
        axes = self.stage(stage).expanded(sub_axes or {})
        return make_spec(len(self.shape), self.cuts, self.dim, axes, sliced=sliced, sub_axes=sub_axes)


@dataclasses.dataclass(frozen=True)
class View:
    """The position of one leaf in a chunk of its buffer.

    Attributes:
      path: the leaf's name.
      start, size: elements of a chunk.
      shape: the leaf's shape in a chunk, without its layer dims.
      dim: which dim of `shape` the chunks split; None for a single chunk.
      cut: which dim of `shape` the buffer's parts split, major to the chunks; None without cuts.
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
    """Leaves of one unit with equal dtype, stages and cuts as one array [layers, chunks * chunk]; with cuts [layers,
    parts, chunks * chunk]. See [Note: what a buffer looks like] in flat.py.

    Code that moves leaves treats it as a `Leaf`.
    """

    views: tuple[View, ...] = ()

    @property
    def num_parts(self) -> int:
        """The number of parts into which the leaves are cut."""
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
    """Return the shape of one part under cuts."""
    left = list(shape)
    for cut in cuts:
        if cut.dim < len(left):
            left[cut.dim] //= cut.parts
    return tuple(left)


def make_spec(
    ndim: int,
    cuts: Iterable[Cut],
    dim: int | None = None,
    axes: Sequence[str] = (),
    *,
    sliced: int = 0,
    sub_axes: SubAxes | None = None,
) -> PartitionSpec:
    """Return the spec of an array that is cut, and split along `dim` over `axes`, which are minor to its cuts.

    Args:
      sliced: the number of leading dims that are removed.
      sub_axes: as in `Leaf.spec`.
    """
    over: dict[int, tuple[str, ...]] = {}
    for cut in cuts:
        names = (sub_axes or {}).get(cut.axis, ((cut.axis, cut.parts),))
        over[cut.dim] = (*over.get(cut.dim, ()), *(name for name, _ in names))
    if dim is not None:
        over[dim] = (*over.get(dim, ()), *axes)
    names = [over.get(at, ()) for at in range(sliced, ndim)]
    return PartitionSpec(*[entry if len(entry) > 1 else "".join(entry) or None for entry in names])
