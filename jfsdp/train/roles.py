"""Roles: what every array of an optimizer's state is, which leaf it belongs to, and where it stands.

Decided once, from shapes alone, and carried by `TrainState.roles`: shardings, the account, checkpoints and `reshard`
read it. The first half of a role (name, leaf, kind, shape) is that of the optimizer on the *logical* leaves and is the
same for every mesh and strategy; the second (dim, axes, padding) is what a layout makes of it.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.engine.flat import pack_tree, unpack_tree
from jfsdp.layout.rules import choose_dim
from jfsdp.layout.table import DEVICE, Layout, Leaf


class Kind(Enum):
    """What an array of an optimizer's state is.

    PARAMETER has the shape of its leaf (moments, averages). FACTORED is a leaf's with some dims gone, or of size 1.
    SCALAR has one element (counters, hyperparameters, the place left empty by a factored moment). OTHER is the rest.
    """

    PARAMETER = "parameter"
    FACTORED = "factored"
    SCALAR = "scalar"
    OTHER = "other"


@dataclasses.dataclass(frozen=True)
class Role:
    """One array of the optimizer's state.

    Attributes:
      name: its name in checkpoints.
      leaf: the parameter whose name is in its path; None for counters and for arrays that belong to no one leaf.
      shape: its logical shape, which is that of the same optimizer on one device.
      dim, axes: the dim that is split (or padded), and over which mesh axes; (): whole.
      padding: by how much the stored array is larger in `dim`.
      reason: why.
      memory: "device", or "pinned_host" where the leaf's optimizer states are offloaded.
    """

    name: str
    leaf: str | None
    kind: Kind
    shape: tuple[int, ...]
    dim: int | None
    axes: tuple[str, ...]
    padding: int
    reason: str
    memory: str = DEVICE

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The logical shape with the split dim padded."""
        return tuple(size + self.padding * (dim == self.dim) for dim, size in enumerate(self.shape))

    @property
    def spec(self) -> PartitionSpec:
        entry = (self.axes if len(self.axes) > 1 else "".join(self.axes)) or None
        return PartitionSpec(*[entry if dim == self.dim else None for dim in range(len(self.shape))])


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
    """The roles of all arrays of an optimizer's state, in the order of its flattened tree. Immutable, hashable."""

    arrays: tuple[Role, ...]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Roles) and self.arrays == other.arrays)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(role.name for role in self.arrays))

    def __hash__(self) -> int:
        return self._hash

    @functools.cached_property
    def by_name(self) -> Mapping[str, Role]:
        return {role.name: role for role in self.arrays}

    def map(self, fn: Callable[[Role, Any], Any], opt_state: Any) -> Any:
        """Return `fn(role, array)` for every array of a state, as a state. Moves no data."""
        arrays, tree = jax.tree.flatten(opt_state)
        return jax.tree.unflatten(tree, [fn(*pair) for pair in zip(self.arrays, arrays, strict=True)])

    def shardings(self, layout: Layout, mesh: Any, opt_state: Any) -> Any:
        """Return the sharding of every array of a state, as a state. Moves no data."""

        def sharding(role: Role, _: Any) -> NamedSharding:
            if role.kind is Kind.PARAMETER:
                return layout.sharding(mesh, layout.by_path[role.leaf or ""], "opt")
            return layout.named_sharding(mesh, role.spec)

        return self.map(sharding, opt_state)


def abstract_opt_state(layout: Layout, tx: optax.GradientTransformation) -> tuple[Any, Roles]:
    """Return the shapes of an optimizer's state as it is stored, and the role of each of its arrays. Moves no data."""
    return pack_roles(layout, *opt_state_by_leaf(layout, tx))


def opt_state_by_leaf(layout: Layout, tx: optax.GradientTransformation) -> tuple[Any, Roles]:
    """Return what `abstract_opt_state` does under per-parameter storage. Moves no data."""
    logical = {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layout.leaves if x.trainable}
    shapes = jax.eval_shape(tx.init, logical)
    named = jax.tree_util.tree_leaves_with_path(shapes)
    _check_names(layout, [path for path, _ in named])
    roles = Roles(
        tuple(_place(layout, "opt_state." + dotted(path), leaf_of(layout, path), tuple(x.shape)) for path, x in named)
    )
    return roles.map(lambda role, x: jax.ShapeDtypeStruct(role.stored_shape, x.dtype), shapes), roles


def _check_names(layout: Layout, paths: Sequence[tuple[Any, ...]]) -> None:
    taken = {buffer.path for buffer in layout.buffers}
    for path in paths:
        if any(getattr(key, "key", None) in taken for key in path):
            raise ValueError(
                f"opt_state.{dotted(path)}: flat storage gives this name to an array of its own; use "
                "storage='per_parameter', or another name in the optimizer's state"
            )


def pack_roles(layout: Layout, opt_state: Any, roles: Roles) -> tuple[Any, Roles]:
    """Return the shapes and roles of a state, given leaf by leaf, once its arrays stand in the buffers they fill.

    Moves no data.
    """
    if not layout.buffers:
        return opt_state, roles
    packed = jax.eval_shape(functools.partial(pack_opt_state, layout, roles), opt_state)
    return packed, _named_roles(layout, packed, roles)


@dataclasses.dataclass(frozen=True)
class _Apart:
    """An array of the optimizer's own, which no buffer takes up, whatever its shape."""

    value: Any


def pack_opt_state(layout: Layout, roles: Roles, opt_state: Any) -> Any:
    """Put the parameter-shaped arrays of a state that stands leaf by leaf into the buffers that they fill.

    Moves no data between devices.
    """
    marked = roles.map(lambda role, x: x if role.kind is Kind.PARAMETER else _Apart(x), opt_state)
    return jax.tree.map(lambda x: x.value if isinstance(x, _Apart) else x, pack_tree(layout, marked))


def unpack_roles(layout: Layout, opt_state: Any, roles: Roles) -> tuple[Any, Roles]:
    """Return the shapes and roles of a state in buffers once it stands leaf by leaf; undoes `pack_roles`.

    Moves no data.
    """
    opened = jax.eval_shape(functools.partial(unpack_tree, layout), opt_state)
    return opened, _named_roles(layout, opened, roles)


def _named_roles(layout: Layout, opt_state: Any, roles: Roles) -> Roles:
    """Return the roles of arrays that keep their name, and of parameter-shaped ones in or out of a buffer."""

    def role(path: tuple[Any, ...]) -> Role:
        name = "opt_state." + dotted(path)
        if name in roles.by_name:
            return roles.by_name[name]
        leaf = layout.by_path[leaf_of(layout, path) or ""]
        return _place(layout, name, leaf.path, leaf.shape)

    return Roles(tuple(role(path) for path, _ in jax.tree_util.tree_leaves_with_path(opt_state)))


def place(layout: Layout, roles: Roles) -> Roles:
    """Return the roles that the same optimizer has in another layout of the same model. Moves no data."""
    return Roles(tuple(_place(layout, role.name, role.leaf, role.shape) for role in roles.arrays))


def dotted(path: tuple[Any, ...]) -> str:
    """Write a path inside a pytree as checkpoints do. Moves no data."""
    return ".".join(map(_key_name, path))


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def leaf_of(layout: Layout, path: tuple[Any, ...]) -> str | None:
    """Return the parameter that a path inside the optimizer's state speaks of: the innermost name. Moves no data."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return next((key for key in reversed(keys) if key in layout.by_path), None)


def _place(layout: Layout, name: str, owner: str | None, shape: tuple[int, ...]) -> Role:
    """Decide one array's role.

    A parameter-shaped array stands like the `opt` stage of its leaf, padding included: the update reads both. A
    factored one keeps the leaf's split dim where that survives unpadded, so that its update moves nothing along it.
    Any other is split by the rule that parameters follow, but never padded: replicated if no dim divides.
    """
    leaf = layout.by_path.get(owner or "")
    if leaf is not None and shape == leaf.shape:
        stage, reason = leaf.stage("opt"), f"as {leaf.path}: {leaf.reason}"
        return Role(name, owner, Kind.PARAMETER, shape, leaf.dim, stage.axes, leaf.padding, reason, stage.memory)
    if math.prod(shape) == 1:
        return Role(name, owner, Kind.SCALAR, shape, None, (), 0, "replicated: one element")
    kept = None if leaf is None else _kept_dims(shape, leaf)
    kind = Kind.OTHER if kept is None or None in kept else Kind.FACTORED
    if leaf is not None and kept and leaf.stage("opt").axes and leaf.dim in kept and not leaf.padding:
        dim = kept.index(leaf.dim)
        if shape[dim] == leaf.shape[leaf.dim or 0]:
            reason = f"dim {dim}, which is dim {leaf.dim} of {leaf.path}"
            return Role(name, owner, kind, shape, dim, leaf.stage("opt").axes, 0, reason)
    return Role(name, owner, kind, shape, *_by_rule(layout, name, leaf, shape, kept))


def _by_rule(
    layout: Layout, name: str, leaf: Leaf | None, shape: tuple[int, ...], kept: tuple[int | None, ...] | None
) -> tuple[int | None, tuple[str, ...], int, str]:
    """Split an array by the general rule; return its dim, axes, padding (none) and the reason."""
    axes = _axes(layout, leaf)
    stacked = 0
    if leaf is not None and kept is not None:
        stacked = len(list(itertools.takewhile(lambda dim: dim is None or dim < leaf.stacked, kept)))
    choice = choose_dim(name, shape, layout.num_shards(axes), stacked=stacked, min_size=layout.min_size)
    if choice.padding:
        shards = layout.num_shards(axes)
        reason = f"replicated: no dim divisible by {shards}, and only arrays of a parameter's shape are padded"
        return None, (), 0, reason
    return choice.dim, axes if choice.dim is not None else (), 0, choice.reason


def _axes(layout: Layout, leaf: Leaf | None) -> tuple[str, ...]:
    """Return the axes over which optimizer states are split: the leaf's, else the strategy's."""
    if leaf is not None and leaf.stage("opt").axes:
        return leaf.stage("opt").axes
    return tuple(axis for axis, size in layout.mesh_sizes if size > 1 and axis in layout.strategy.axes("opt"))


def _kept_dims(shape: tuple[int, ...], leaf: Leaf) -> tuple[int | None, ...] | None:
    """Return for each dim of an array which dim of its leaf it is (None: an added one); None if it is no such array.

    Where sizes are equal the shape does not tell which dim is gone. The reading in which the split dim survives is
    taken: if wrong it costs the movement of an array smaller than the leaf, and never a value.
    """
    extra = len(shape) - len(leaf.shape)
    if extra > 0 and shape[extra:] == leaf.shape:
        return (*[None] * extra, *range(len(leaf.shape)))
    if extra == 0 and all(a in (b, 1) for a, b in zip(shape, leaf.shape, strict=True)):
        return tuple(range(len(shape)))
    if extra >= 0:
        return None
    dims = itertools.combinations(range(len(leaf.shape)), len(shape))
    readings = [kept for kept in dims if tuple(leaf.shape[dim] for dim in kept) == shape]
    return max(readings, key=lambda kept: leaf.dim in kept, default=None)
