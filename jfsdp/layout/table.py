"""The Layout: for every leaf, where each stage of its life stands, and why. Nothing downstream derives it again."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfsdp.layout.mesh import axis_sizes
from jfsdp.layout.policy import UnitPolicy
from jfsdp.layout.precision import MixedPrecisionPolicy, is_inexact, item_bytes, sum_dtype
from jfsdp.layout.rules import DEFAULT_MIN_SIZE, choose_dim
from jfsdp.layout.strategy import Split, Strategy
from jfsdp.layout.units import UnitInfo

ShardDim = Callable[[str, tuple[int, ...]], int | None]


@dataclasses.dataclass(frozen=True)
class Stage:
    """One stage of a leaf: over which mesh axes its split dim is spread (none: whole), and its dtype."""

    axes: tuple[str, ...]
    dtype: str


@dataclasses.dataclass(frozen=True)
class Leaf:
    """One parameter: its logical shape, its owner, its split dim and padding with the reason, and its stages.

    Stages: `param` (the master at rest), `work` (the low-precision copy at rest, or None), `use`, `kept`, `grad`,
      `opt`.
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

    def stage(self, name: str) -> Stage:
        stage = dict(self.stages)[name]
        if stage is None:
            raise ValueError(f"{self.path}: has no stage {name!r}")
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
    def stored_shape(self) -> tuple[int, ...]:
        """The logical shape with the split dim padded."""
        if self.dim is None:
            return self.shape
        return (*self.shape[: self.dim], self.shape[self.dim] + self.padding, *self.shape[self.dim + 1 :])

    def spec(self, stage: str, *, sliced: int = 0) -> PartitionSpec:
        """Return the spec of a stage; `sliced` leading dims are gone (inside a scan over a stack)."""
        axes = self.stage(stage).axes
        entries: list[Any] = [None] * len(self.shape)
        if self.dim is not None and axes:
            entries[self.dim] = axes if len(axes) > 1 else "".join(axes)
        return PartitionSpec(*entries[sliced:])


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """The table of all leaves on a mesh of given axis sizes. Immutable, comparable, hashable; holds no arrays."""

    leaves: tuple[Leaf, ...]
    units: tuple[UnitInfo, ...]
    policies: tuple[UnitPolicy, ...]
    mesh_sizes: tuple[tuple[str, int], ...]
    strategy: Strategy
    mp_policy: MixedPrecisionPolicy
    min_size: int

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
        return {leaf.path: leaf for leaf in self.leaves}

    def unit(self, name: str) -> UnitInfo:
        return next(unit for unit in self.units if unit.name == name)

    def policy(self, name: str) -> UnitPolicy:
        return self.policies[[unit.name for unit in self.units].index(name)]

    def num_shards(self, axes: Iterable[str]) -> int:
        """Return into how many parts these axes split a dim."""
        sizes = dict(self.mesh_sizes)
        return math.prod(sizes.get(axis, 1) for axis in axes)

    def stage_bytes(self, leaf: Leaf, stage: str) -> int:
        """Return the bytes per device of one stage of a leaf, padding included."""
        elements = math.prod(leaf.stored_shape)
        shards = 1 if leaf.dim is None else self.num_shards(leaf.stage(stage).axes)
        return elements * item_bytes(leaf.stage(stage).dtype) // shards

    def sharding(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str, *, sliced: int = 0) -> NamedSharding:
        """Return the sharding of a leaf's stage on a mesh of this layout's sizes."""
        return NamedSharding(mesh, leaf.spec(stage, sliced=sliced))  # type: ignore[arg-type]

    def abstract(self, mesh: Mesh | AbstractMesh, leaf: Leaf, stage: str) -> jax.ShapeDtypeStruct:
        """Return shape, dtype and sharding of a leaf's stage as it is stored."""
        sharding = self.sharding(mesh, leaf, stage)
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stage(stage).dtype, sharding=sharding)

    def __str__(self) -> str:
        from jfsdp.layout.report import format_layout

        return format_layout(self)


def build_layout(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    units: Mapping[str, UnitInfo],
    policies: Mapping[str, UnitPolicy],
    *,
    mesh: Mesh | AbstractMesh,
    strategy: Strategy,
    mp_policy: MixedPrecisionPolicy,
    min_size: int = DEFAULT_MIN_SIZE,
    shard_dim: ShardDim | None = None,
) -> Layout:
    """Decide every stage of every leaf. Moves no data.

    Args:
      leaves: logical shape and dtype by path.
      units: as `resolve_units` returns them.
      policies: precision, resharding and remat of each unit, by unit name.
      mesh: only its axis names and sizes matter.
      shard_dim: `f(path, shape) -> dim or None`; None leaves the choice to the rule.

    Raises:
      ValueError: for an axis that jfsdp does not know, or a `shard_dim` that is not a dim.
    """
    if min_size < 0:
        raise ValueError(f"min_size={min_size} must be 0 or more")
    sizes = axis_sizes(mesh)
    owners = {path: unit for unit in units.values() for path in unit.leaves}
    build = functools.partial(_build_leaf, sizes=sizes, strategy=strategy, min_size=min_size, shard_dim=shard_dim)
    table = tuple(build(path, leaf, owners[path], policies[owners[path].name]) for path, leaf in leaves.items())
    return Layout(
        leaves=table,
        units=tuple(units.values()),
        policies=tuple(policies[name] for name in units),
        mesh_sizes=tuple(sizes.items()),
        strategy=strategy,
        mp_policy=mp_policy,
        min_size=min_size,
    )


def _build_leaf(
    path: str,
    abstract: jax.ShapeDtypeStruct,
    unit: UnitInfo,
    policy: UnitPolicy,
    *,
    sizes: Mapping[str, int],
    strategy: Strategy,
    min_size: int,
    shard_dim: ShardDim | None,
) -> Leaf:
    shape, dtype = tuple(abstract.shape), abstract.dtype.name
    num_shards = max(_size(split, sizes) for split in (strategy.param, strategy.grad, strategy.opt))
    asked = shard_dim(path, shape) if shard_dim else None
    choice = choose_dim(path, shape, num_shards, stacked=unit.stacked, min_size=min_size, shard_dim=asked)
    stages = _stages(dtype, strategy, policy, sizes if choice.dim is not None else {})
    return Leaf(
        path=path,
        shape=shape,
        dtype=dtype,
        unit=unit.name,
        stacked=unit.stacked,
        trainable=is_inexact(dtype),
        dim=choice.dim,
        padding=choice.padding,
        reason=choice.reason,
        stages=tuple(stages.items()),
    )


def _stages(dtype: str, strategy: Strategy, policy: UnitPolicy, sizes: Mapping[str, int]) -> dict[str, Stage | None]:
    """Spell a strategy out for one leaf; empty `sizes` leave every stage whole.

    Where the optimizer is split finer than the parameters and compute is in lower precision, the master is split like
    the optimizer and a low-precision copy stands at rest (ZeRO, arXiv 1910.02054, section 3: 2P + 12P/N bytes).
    """
    use = policy.mp_policy.use_dtype(dtype)
    param, opt = _axes(strategy.param, sizes), _axes(strategy.opt, sizes)
    has_work = param != opt and use != dtype
    return {
        "param": Stage(opt if has_work else param, dtype),
        "work": Stage(param, use) if has_work else None,
        "use": Stage((), use),
        "kept": Stage(param if policy.reshard_after_forward else (), use),
        "grad": Stage(_axes(strategy.grad, sizes), sum_dtype(dtype)),
        "opt": Stage(opt, dtype),
    }


def _axes(split: Split, sizes: Mapping[str, int]) -> tuple[str, ...]:
    return tuple(axis for axis in split.axes if sizes.get(axis, 1) > 1)


def _size(split: Split, sizes: Mapping[str, int]) -> int:
    return math.prod(sizes.get(axis, 1) for axis in split.axes)


def num_parameters(leaves: Sequence[Leaf]) -> int:
    """Count the logical elements of leaves: no padding. Moves no data."""
    return sum(math.prod(leaf.shape) for leaf in leaves)
