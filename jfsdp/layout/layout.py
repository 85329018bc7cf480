"""The Layout: the sharding of every leaf at every stage, with the reason. Other packages only read it."""

from __future__ import annotations

import dataclasses
import difflib
import functools
import itertools
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfsdp.layout.leaf import FLAT, HOST, PER_PARAMETER, Buffer, Leaf, Stage, SubAxes, cut_sizes
from jfsdp.layout.lora import Adapter
from jfsdp.layout.mesh import DATA_AXES, PIPE, SUB_AXES
from jfsdp.layout.policy import UnitPolicy
from jfsdp.layout.precision import MixedPrecisionPolicy, is_float, item_bytes
from jfsdp.layout.strategy import Strategy
from jfsdp.layout.units import UnitInfo
from jfsdp.layout.wire import num_inside


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The table of all leaves on a mesh of given axis sizes. Immutable, comparable and hashable, without arrays.

    Attributes:
      buffers: under flat storage, the arrays in which the leaves of a unit move together; otherwise empty.
      adapters: the low-rank adapters of leaves; their parts are leaves too.
    """

    leaves: tuple[Leaf, ...]
    units: tuple[UnitInfo, ...]
    policies: tuple[UnitPolicy, ...]
    mesh_sizes: tuple[tuple[str, int], ...]
    strategy: Strategy
    mp_policy: MixedPrecisionPolicy
    min_size: int
    buffers: tuple[Buffer, ...] = ()
    adapters: tuple[Adapter, ...] = ()

    def _key(self) -> tuple[Any, ...]:
        return tuple(getattr(self, field.name) for field in dataclasses.fields(self))

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Layout) and self._key() == other._key())

    @functools.cached_property
    def _hash(self) -> int:
        return hash((self.leaves, self.units, self.mesh_sizes))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def by_path(self) -> Mapping[str, Leaf]:
        """The leaves and buffers by name; an unknown name is a `KeyError` with close names."""
        return _ByPath({leaf.path: leaf for leaf in (*self.buffers, *self.leaves)})

    @property
    def storage(self) -> str:
        """The storage form: whether leaves move separately, or in buffers."""
        return FLAT if self.buffers else PER_PARAMETER

    @property
    def moved(self) -> tuple[Leaf, ...]:
        """The leaves, or the buffers that contain them, each of which is gathered and reduced as one array."""
        return self.buffers or self.leaves

    @functools.cached_property
    def buffer_of(self) -> Mapping[str, Buffer]:
        """By leaf, the buffer in which it moves; empty if leaves move separately."""
        return {view.path: buffer for buffer in self.buffers for view in buffer.views}

    def moved_with(self, paths: Iterable[str]) -> dict[str, None]:
        """Return these leaves and all leaves in the same buffers, in order and without repetition."""
        groups = ([view.path for view in self.buffer_of[path].views] if self.buffers else [path] for path in paths)
        return dict.fromkeys(itertools.chain.from_iterable(groups))

    def unit(self, name: str) -> UnitInfo:
        """Return a unit by name; the root's name is empty.

        Raises:
          ValueError: for an unknown name, with close names.
        """
        return self.units[self._place(name)]

    def policy(self, name: str) -> UnitPolicy:
        """Return a unit's settings.

        Raises:
          ValueError: for an unknown name, with close names.
        """
        return self.policies[self._place(name)]

    def _place(self, unit: str) -> int:
        names = [other.name for other in self.units]
        if unit not in names:
            raise ValueError(f"{unit}: the layout has no unit of this name; {close_names(unit, names)}")
        return names.index(unit)

    @functools.cached_property
    def sub_axes(self) -> SubAxes:
        """The axes over which some stage is only partly split, each as (name, size) of its parts, major to minor."""
        ways: dict[str, dict[int, str]] = {}
        for leaf in self.leaves:
            for _, stage in leaf.stages:
                if stage is not None and stage.ways is not None:
                    ways.setdefault(stage.axes[0], {}).setdefault(stage.ways, leaf.unit)
            for wire in filter(None, (leaf.gather_wire, leaf.reduce_wire)):
                for axis in self.data_axes:
                    inside = self.num_inside((axis,), wire.between)
                    if 1 < inside < self.num_shards((axis,)):
                        ways.setdefault(axis, {}).setdefault(inside, leaf.unit)
        return {axis: split_axis(axis, dict(self.mesh_sizes)[axis], units) for axis, units in ways.items()}

    def gathered(self, units: Collection[str] | None = None, to: str = "use") -> Layout:
        """Return the layout of a step that gathers units (all, or some by name) before its first microbatch.

        Args:
          to: the stage to which they are gathered, "use" or "kept".
        """
        names = {unit.name for unit in self.units} if units is None else set(units)

        def change(leaf: Leaf) -> Leaf:
            if leaf.unit not in names:
                return leaf
            there = leaf.stage(to)
            stages = dict(leaf.stages) | {"param": there, "work": None, "kept": there}
            return dataclasses.replace(leaf, stages=tuple(stages.items()))

        policies = tuple(
            policy
            if unit.name not in names or isinstance(policy.reshard_after_forward, bool)
            else dataclasses.replace(policy, reshard_after_forward=True)
            for unit, policy in zip(self.units, self.policies, strict=True)
        )
        leaves, buffers = (tuple(map(change, table)) for table in (self.leaves, self.buffers))
        return dataclasses.replace(self, leaves=leaves, policies=policies, buffers=buffers)

    @property
    def num_stages(self) -> int:
        """The number of pipeline stages; 1 without a pipeline."""
        return self.num_shards([PIPE])

    @functools.cached_property
    def _staged(self) -> Mapping[str, bool | int]:
        """The policy of resharding after forward, by unit of the pipeline stages."""
        staged = {leaf.unit for leaf in self.leaves if leaf.is_staged}
        pairs = zip(self.units, self.policies, strict=True)
        return {unit.name: policy.reshard_after_forward for unit, policy in pairs if unit.name in staged}

    @property
    def kept_in_pipeline(self) -> tuple[str, ...]:
        """The units in stages that are partly kept: `kept` is made once per step, and each tick gathers from it."""
        return tuple(name for name, reshard in self._staged.items() if not isinstance(reshard, bool))

    @property
    def gathered_in_pipeline(self) -> tuple[str, ...]:
        """The units that a pipeline gathers once per step: units outside its stages, and units in stages that are not
        freed after their forward."""
        names = [unit.name for unit in self.units if self.num_stages > 1]
        return tuple(name for name in names if self._staged.get(name, False) is False)

    def in_stage(self) -> Layout:
        """Return the layout of one pipeline stage, with only its layers of the units that are cut."""
        leaves = tuple(leaf.in_stage() for leaf in self.leaves if leaf.is_staged)
        paths = {leaf.path for leaf in leaves}
        own = [tuple(path for path in unit.leaves if path in paths) for unit in self.units]
        units = tuple(dataclasses.replace(unit, leaves=owned) for unit, owned in zip(self.units, own, strict=True))
        return dataclasses.replace(self, leaves=leaves, units=units)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The data axes of size above 1, over which the batch is split."""
        return tuple(axis for axis in DATA_AXES if self.num_shards([axis]) > 1)

    def sum_axes(self, leaf: Leaf) -> tuple[str, ...]:
        """The data axes of size above 1 over which the gradient of a leaf is summed: those that do not cut it."""
        return tuple(axis for axis in self.data_axes if axis not in [cut.axis for cut in leaf.cuts])

    def num_shards(self, axes: Iterable[str]) -> int:
        """Return the number of parts into which these axes split a dim."""
        sizes = dict(self.mesh_sizes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def num_inside(self, axes: Sequence[str], between: int | str | None, ways: int | None = None) -> int:
        """Return how many devices of a collective's group are in one group of `between` devices; see `num_inside`."""
        sizes = {axis: self.num_shards((axis,)) for axis in DATA_AXES}
        return num_inside(sizes, axes, between, ways=ways)  # type: ignore[arg-type]

    def num_parts(self, stage: Stage) -> int:
        """Return the number of parts into which a stage splits a leaf's dim."""
        if stage.ways is None:
            return self.num_shards(stage.axes)
        return stage.ways * self.num_shards(stage.axes[1:])

    def reduce_dtype(self, leaf: Leaf) -> str:
        """Return the dtype in which gradients of a leaf are reduced over devices.

        It is the dtype in use, unless its unit's `reduce_dtype` differs from `param_dtype`. So an ignored leaf, which
        keeps its own dtype, is reduced in that dtype.
        """
        use, policy = leaf.stage("use").dtype, self.policy(leaf.unit).mp_policy
        is_apart = policy.reduce_dtype not in (None, policy.param_dtype)
        return policy.reduce_dtype if is_apart and policy.reduce_dtype and is_float(use) else use

    def stage_bytes(self, leaf: Leaf, stage: str) -> int:
        """Return the bytes per device of one stage of a leaf, padding included."""
        return math.prod(self.shard_shape(leaf, stage)) * item_bytes(leaf.stage(stage).dtype)

    def shard_shape(self, leaf: Leaf, stage: str) -> tuple[int, ...]:
        """Return the shape of one device's shard of a leaf's stage, padding included."""
        return leaf.piece_shape(self.num_parts(leaf.stage(stage)))

    def sharding(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str) -> NamedSharding:
        """Return the sharding and memory of a leaf's stage on a mesh of this layout's sizes; its axes may be split."""
        on_device = self.on_device(mesh, leaf, stage)
        return on_device.with_memory_kind(HOST) if leaf.stage(stage).memory == HOST else on_device

    def on_device(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str, *, sliced: int = 0) -> NamedSharding:
        """Return the sharding of a leaf's stage while it is on the device.

        Raises:
          ValueError: if the stage splits an axis partly and that axis is not split on the mesh.
        """
        kind = leaf.stage(stage)
        if kind.ways is not None and kind.axes[0] in mesh.axis_names:
            raise ValueError(
                f"{leaf.path}: stage {stage!r} splits axis {kind.axes[0]!r} (size {mesh.shape[kind.axes[0]]}) only "
                f"{kind.ways} ways; use split_mesh(mesh, layout.sub_axes)"
            )
        return NamedSharding(mesh, leaf.spec(stage, sliced=sliced, sub_axes=self.sub_axes_on(mesh)))  # type: ignore[arg-type]

    def named_sharding(self, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of a spec over the layout's axes, on a mesh that may have split axes."""
        entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
        expanded = [self.axes_on(mesh, axes) or None for axes in entries]
        return NamedSharding(mesh, PartitionSpec(*expanded))  # type: ignore[arg-type]

    def axes_on(self, mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of axes on a mesh of this layout's sizes; its axes may be split."""
        return self.stage_axes_on(mesh, Stage(tuple(axes), ""))

    def stage_axes_on(self, mesh: Mesh | AbstractMesh, stage: Stage) -> tuple[str, ...]:
        """Return the mesh axes over which a stage splits a leaf's dim."""
        return stage.expanded(self.sub_axes_on(mesh))

    def sub_axes_on(self, mesh: Mesh | AbstractMesh) -> SubAxes:
        """Return how `split_mesh` has split the layout's axes on a mesh."""
        split = [axis for axis, _ in self.mesh_sizes if axis not in mesh.axis_names]
        return {
            axis: tuple((name, mesh.shape[name]) for name in SUB_AXES.get(axis, ()) if name in mesh.axis_names)
            for axis in split
        }

    def full_shapes(self, sliced: Mapping[str, int], *, is_local: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of gathered leaves.

        Args:
          sliced: by leaf, how many layer dims are taken off.
          is_local: as one device has them in program `manual`, with dims divided that data axes cut.
        """
        leaves = [(self.by_path[path], num) for path, num in sliced.items()]
        shapes = {x.path: cut_sizes(x.shape, x.row_cuts if is_local else ()) for x, _ in leaves}
        return {x.path: jax.ShapeDtypeStruct(shapes[x.path][num:], x.stage("use").dtype) for x, num in leaves}

    def abstract(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of a leaf's stage as stored."""
        sharding = self.sharding(mesh, leaf, stage)
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stage(stage).dtype, sharding=sharding)

    def __str__(self) -> str:
        from jfsdp.layout.report import format_layout

        return format_layout(self)


class _ByPath(dict[str, Leaf]):
    def __missing__(self, path: str) -> Leaf:
        raise KeyError(f"{path}: the layout has no leaf of this name; {close_names(path, self)}")


def close_names(name: str, names: Iterable[str]) -> str:
    """Return known names that an unknown one may mean: those below it, otherwise close ones."""
    known = [other for other in names if other]
    below = [other for other in known if other.startswith(f"{name}.")]
    if below:
        return f"below it are {', '.join(below[:8])}"
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.4)
    return f"close names are {', '.join(close)}" if close else f"names are such as {', '.join(known[:1]) or 'none'}"


def split_axis(axis: str, size: int, ways: Mapping[int, str]) -> tuple[tuple[str, int], ...]:
    """Split an axis so that each of `ways` is the size of some of its minor parts.

    Args:
      ways: numbers of devices, each with the unit that requests it.

    Raises:
      ValueError: if one of `ways` does not divide the next, or the axis.
    """
    bounds = [1, *sorted(ways), size]
    for small, large in itertools.pairwise(bounds):
        if large % small:
            other = f"{large} ways (unit {ways[large]!r})" if large in ways else "as a whole"
            raise ValueError(
                f"reshard_after_forward (or a Wire's between) splits axis {axis!r} (size {size}) {small} ways (unit "
                f"{ways[small]!r}) and {other}; choose numbers that divide each other"
            )
    sizes = [large // small for small, large in itertools.pairwise(bounds)][::-1]
    return tuple(zip(SUB_AXES[axis], sizes, strict=False))


def num_parameters(leaves: Sequence[Leaf]) -> int:
    """Count the values of leaves: without padding and scales; each of several codes in an item counts."""
    return sum(math.prod(leaf.shape) * leaf.per_item for leaf in leaves)
