"""The Layout: for every leaf, where each stage of its life stands, and why. Nothing downstream derives it again."""

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

from jfsdp.layout.leaf import FLAT, HOST, PER_PARAMETER, Buffer, Leaf, Stage, SubAxes
from jfsdp.layout.lora import Adapter
from jfsdp.layout.mesh import DATA_AXES, PIPE, SUB_AXES
from jfsdp.layout.policy import UnitPolicy
from jfsdp.layout.precision import MixedPrecisionPolicy, is_float, item_bytes
from jfsdp.layout.strategy import Strategy
from jfsdp.layout.units import UnitInfo


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The table of all leaves on a mesh of given axis sizes. Immutable, comparable, hashable; holds no arrays.

    Attributes:
      buffers: under flat storage, the arrays in which the leaves of a unit move together; else empty.
      adapters: what low-rank adapters of leaves compute; their parts are leaves too.
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
        """The leaves and buffers by name; an unknown name is a `KeyError` that tells close ones."""
        return _ByPath({leaf.path: leaf for leaf in (*self.buffers, *self.leaves)})

    @property
    def storage(self) -> str:
        """The storage form: whether leaves move one by one, or in buffers."""
        return FLAT if self.buffers else PER_PARAMETER

    @property
    def moved(self) -> tuple[Leaf, ...]:
        """What is gathered and reduced as one array each: the leaves, or the buffers that hold them."""
        return self.buffers or self.leaves

    @functools.cached_property
    def buffer_of(self) -> Mapping[str, Buffer]:
        """By leaf, the buffer in which it moves; empty where leaves move one by one."""
        return {view.path: buffer for buffer in self.buffers for view in buffer.views}

    def moved_with(self, paths: Iterable[str]) -> dict[str, None]:
        """Return these leaves and all that move in the same buffers, in order and without repetition."""
        groups = ([view.path for view in self.buffer_of[path].views] if self.buffers else [path] for path in paths)
        return dict.fromkeys(itertools.chain.from_iterable(groups))

    def unit(self, name: str) -> UnitInfo:
        """Return a unit; the root is the empty name.

        Raises:
          ValueError: for an unknown name, telling close ones.
        """
        return self.units[self._place(name)]

    def policy(self, name: str) -> UnitPolicy:
        """Return a unit's settings.

        Raises:
          ValueError: for an unknown name, telling close ones.
        """
        return self.policies[self._place(name)]

    def _place(self, unit: str) -> int:
        names = [other.name for other in self.units]
        if unit not in names:
            raise ValueError(f"{unit}: the layout has no unit of this name; {close_names(unit, names)}")
        return names.index(unit)

    @functools.cached_property
    def sub_axes(self) -> SubAxes:
        """The axes that some stage splits only in part, each as (name, size) of its parts, major to minor."""
        ways: dict[str, dict[int, str]] = {}
        for leaf in self.leaves:
            for _, stage in leaf.stages:
                if stage is not None and stage.ways is not None:
                    ways.setdefault(stage.axes[0], {}).setdefault(stage.ways, leaf.unit)
        return {axis: split_axis(axis, dict(self.mesh_sizes)[axis], units) for axis, units in ways.items()}

    def gathered(self, units: Collection[str] | None = None, to: str = "use") -> Layout:
        """Return the layout of a step that gathers units (all, or some by name) before its first microbatch.

        Args:
          to: the stage in which they are from then on, "use" or "kept".
        """
        held = {unit.name for unit in self.units} if units is None else set(units)

        def change(leaf: Leaf) -> Leaf:
            if leaf.unit not in held:
                return leaf
            there = leaf.stage(to)
            stages = dict(leaf.stages) | {"param": there, "work": None, "kept": there}
            return dataclasses.replace(leaf, stages=tuple(stages.items()))

        policies = tuple(
            policy
            if unit.name not in held or isinstance(policy.reshard_after_forward, bool)
            else dataclasses.replace(policy, reshard_after_forward=True)
            for unit, policy in zip(self.units, self.policies, strict=True)
        )
        leaves, buffers = (tuple(map(change, table)) for table in (self.leaves, self.buffers))
        return dataclasses.replace(self, leaves=leaves, policies=policies, buffers=buffers)

    @property
    def num_stages(self) -> int:
        """The number of stages of the pipeline; 1: there is none."""
        return self.num_shards([PIPE])

    @functools.cached_property
    def _staged(self) -> Mapping[str, bool | int]:
        """By unit of the stages of a pipeline, whether it is freed after its forward, as its policy says."""
        staged = {leaf.unit for leaf in self.leaves if leaf.is_staged}
        pairs = zip(self.units, self.policies, strict=True)
        return {unit.name: policy.reshard_after_forward for unit, policy in pairs if unit.name in staged}

    @property
    def kept_in_pipeline(self) -> tuple[str, ...]:
        """The units of stages that are kept in part: `kept` is made once per step, and each tick gathers from it."""
        return tuple(name for name, reshard in self._staged.items() if not isinstance(reshard, bool))

    @property
    def gathered_in_pipeline(self) -> tuple[str, ...]:
        """The units that are gathered once per step of a pipeline: those outside of its stages, and those of stages
        that are not freed after their forward."""
        names = [unit.name for unit in self.units if self.num_stages > 1]
        return tuple(name for name in names if self._staged.get(name, False) is False)

    def in_stage(self) -> Layout:
        """Return the layout of what one stage of a pipeline computes: its layers of the units that are cut, alone."""
        leaves = tuple(leaf.in_stage() for leaf in self.leaves if leaf.is_staged)
        paths = {leaf.path for leaf in leaves}
        own = [tuple(path for path in unit.leaves if path in paths) for unit in self.units]
        units = tuple(dataclasses.replace(unit, leaves=held) for unit, held in zip(self.units, own, strict=True))
        return dataclasses.replace(self, leaves=leaves, units=units)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes over which the batch is split here: those of size 1 split nothing."""
        return tuple(axis for axis in DATA_AXES if self.num_shards([axis]) > 1)

    def num_shards(self, axes: Iterable[str]) -> int:
        """Return into how many parts these axes split a dim."""
        sizes = dict(self.mesh_sizes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def num_parts(self, stage: Stage) -> int:
        """Return into how many parts a stage splits a leaf's dim."""
        if stage.ways is None:
            return self.num_shards(stage.axes)
        return stage.ways * self.num_shards(stage.axes[1:])

    def reduce_dtype(self, leaf: Leaf) -> str:
        """Return the dtype in which gradients of a leaf are summed over devices.

        That in which it is used, unless its unit's `reduce_dtype` is another than its `param_dtype`: an ignored leaf,
        which keeps its own dtype, is summed in that.
        """
        use, policy = leaf.stage("use").dtype, self.policy(leaf.unit).mp_policy
        is_apart = policy.reduce_dtype not in (None, policy.param_dtype)
        return policy.reduce_dtype if is_apart and policy.reduce_dtype and is_float(use) else use

    def stage_bytes(self, leaf: Leaf, stage: str) -> int:
        """Return the bytes per device of one stage of a leaf, padding included."""
        return math.prod(self.shard_shape(leaf, stage)) * item_bytes(leaf.stage(stage).dtype)

    def shard_shape(self, leaf: Leaf, stage: str) -> tuple[int, ...]:
        """Return the shape of what a device holds of one stage of a leaf, padding included."""
        return leaf.piece_shape(self.num_parts(leaf.stage(stage)))

    def sharding(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str) -> NamedSharding:
        """Return the sharding and memory of a leaf's stage on a mesh of this layout's sizes, its axes split or not."""
        on_device = self.on_device(mesh, leaf, stage)
        return on_device.with_memory_kind(HOST) if leaf.stage(stage).memory == HOST else on_device

    def on_device(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str, *, sliced: int = 0) -> NamedSharding:
        """Return the sharding of a leaf's stage while it is on the device.

        Raises:
          ValueError: if the stage splits an axis in part and the mesh has that axis in one.
        """
        kind = leaf.stage(stage)
        if kind.ways is not None and kind.axes[0] in mesh.axis_names:
            raise ValueError(
                f"{leaf.path}: stage {stage!r} splits axis {kind.axes[0]!r} (size {mesh.shape[kind.axes[0]]}) "
                f"{kind.ways} ways only; use split_mesh(mesh, layout.sub_axes)"
            )
        return NamedSharding(mesh, leaf.spec(stage, sliced=sliced, sub_axes=self._sub_axes_on(mesh)))  # type: ignore[arg-type]

    def named_sharding(self, mesh: Mesh | AbstractMesh, spec: PartitionSpec) -> NamedSharding:
        """Return the sharding of a spec over the axes of the layout, on a mesh whose axes may be split."""
        entries = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in spec]
        expanded = [self.axes_on(mesh, axes) or None for axes in entries]
        return NamedSharding(mesh, PartitionSpec(*expanded))  # type: ignore[arg-type]

    def axes_on(self, mesh: Mesh | AbstractMesh, axes: Sequence[str]) -> tuple[str, ...]:
        """Return the names of axes on a mesh of this layout's sizes, its axes split or not."""
        return self.stage_axes_on(mesh, Stage(tuple(axes), ""))

    def stage_axes_on(self, mesh: Mesh | AbstractMesh, stage: Stage) -> tuple[str, ...]:
        """Return the axes of a mesh of this layout's sizes over which a stage splits a leaf's dim."""
        return stage.expanded(self._sub_axes_on(mesh))

    def _sub_axes_on(self, mesh: Mesh | AbstractMesh) -> SubAxes:
        """Read from a mesh how `split_mesh` has split the axes of the layout."""
        split = [axis for axis, _ in self.mesh_sizes if axis not in mesh.axis_names]
        return {
            axis: tuple((name, mesh.shape[name]) for name in SUB_AXES.get(axis, ()) if name in mesh.axis_names)
            for axis in split
        }

    def abstract(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of a leaf's stage as it is stored."""
        sharding = self.sharding(mesh, leaf, stage)
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stage(stage).dtype, sharding=sharding)

    def __str__(self) -> str:
        from jfsdp.layout.report import format_layout

        return format_layout(self)


class _ByPath(dict[str, Leaf]):
    def __missing__(self, path: str) -> Leaf:
        raise KeyError(f"{path}: the layout has no leaf of this name; {close_names(path, self)}")


def close_names(name: str, names: Iterable[str]) -> str:
    """Tell which known names an unknown one may stand for: those below it, else close ones."""
    known = [other for other in names if other]
    below = [other for other in known if other.startswith(f"{name}.")]
    if below:
        return f"below it are {', '.join(below[:8])}"
    close = difflib.get_close_matches(name, known, n=4, cutoff=0.4)
    return f"close names are {', '.join(close)}" if close else f"names are such as {', '.join(known[:1]) or 'none'}"


def split_axis(axis: str, size: int, ways: Mapping[int, str]) -> tuple[tuple[str, int], ...]:
    """Split an axis so that each of `ways` is the size of some of its minor parts.

    Args:
      ways: numbers of devices, each with the unit that asks for it.

    Raises:
      ValueError: if one of `ways` does not divide the next, or the axis.
    """
    bounds = [1, *sorted(ways), size]
    for small, large in itertools.pairwise(bounds):
        if large % small:
            other = f"{large} ways (unit {ways[large]!r})" if large in ways else "as a whole"
            raise ValueError(
                f"reshard_after_forward splits axis {axis!r} (size {size}) {small} ways (unit {ways[small]!r}) and "
                f"{other}; choose numbers that divide each other"
            )
    sizes = [large // small for small, large in itertools.pairwise(bounds)][::-1]
    return tuple(zip(SUB_AXES[axis], sizes, strict=False))


def num_parameters(leaves: Sequence[Leaf]) -> int:
    """Count the values of leaves: no padding, no scales, and of codes that share an item each."""
    return sum(math.prod(leaf.shape) * leaf.per_item for leaf in leaves)
