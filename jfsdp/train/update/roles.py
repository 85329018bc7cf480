"""Roles of the arrays of an optimizer's state: their kind, the leaf they belong to, and their sharding.

Roles are computed once, from shapes, and stored in `TrainState.roles` for shardings, byte counts, checkpoints and
`reshard`. The first half of a role (name, leaf, kind, shape) describes the optimizer on the *logical* leaves, and is
the same for every mesh and strategy. The second half (dim, axes, padding) depends on the layout.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import DEVICE, Cut, Leaf, make_spec
from jfsdp.layout.split_dim import choose_dim
from jfsdp.modules.model import KeyPath, ParamTree


class Kind(Enum):
    """Kinds of arrays in an optimizer's state.

    PARAMETER has the shape of its leaf (moments, averages). FACTORED has the leaf's shape with some dims removed, or of
    size 1. SCALAR has one element (counters, hyperparameters, placeholders of factored moments). OTHER is any other.
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
      leaf: the parameter whose name is in its path; None for counters and arrays that belong to no single leaf.
      shape: its logical shape, as on one device.
      dim, axes: the dim that is split (or padded), and the mesh axes that split it; (): replicated.
      cuts: the leaf's cuts of dims that the array keeps, as cuts of the array's dims.
      padding: number of padded elements along `dim`.
      reason: why it is sharded so.
      memory: "device", or "pinned_host" if the leaf's optimizer states are offloaded.
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
    cuts: tuple[Cut, ...] = ()

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """The logical shape with the split dim padded."""
        return tuple(size + self.padding * (dim == self.dim) for dim, size in enumerate(self.shape))

    @property
    def spec(self) -> PartitionSpec:
        return make_spec(len(self.shape), self.cuts, self.dim, self.axes)

    def sharding(self, layout: Layout, mesh: Any) -> NamedSharding:
        """Return the sharding of the array; moments of a parameter have that of its stage `opt`."""
        if self.kind is Kind.PARAMETER:
            return layout.sharding(mesh, layout.by_path[self.leaf or ""], "opt")
        return layout.named_sharding(mesh, self.spec)


@dataclasses.dataclass(frozen=True, eq=False)
class Roles:
    """The roles of all arrays of an optimizer's state, in the order of its flattened tree. Hashable."""

    arrays: tuple[Role, ...]

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Roles) and self.arrays == other.arrays)

    @functools.cached_property
    def _hash(self) -> int:
        return hash(tuple(role.name for role in self.arrays))

    def __hash__(self) -> int:
        return self._hash

    def map(self, fn: Callable[[Role, Any], Any], opt_state: Any) -> Any:
        """Return `fn(role, array)` for every array of a state, as a state."""
        arrays, tree = jax.tree.flatten(opt_state)
        return jax.tree.unflatten(tree, [fn(*pair) for pair in zip(self.arrays, arrays, strict=True)])


def abstract_opt_state(layout: Layout, tree: ParamTree, tx: optax.GradientTransformation) -> tuple[Any, Roles]:
    """Return the stored shapes of an optimizer's state, and the role of each of its arrays.

    The structure is the result of `tx.init` for the trained parameters in the user's tree. An array belongs to the
    parameter with the longest key path that is a suffix of the array's path (`ParamTree.find`).

    Raises:
      ValueError: if two arrays have the same name in checkpoints.
    """
    shapes = jax.eval_shape(tx.init, logical_shapes(layout, tree))
    arrays = jax.tree_util.tree_leaves_with_path(shapes)
    given = ((array_name(tree, path), _owner(layout, tree, path), tuple(x.shape)) for path, x in arrays)
    roles = Roles(tuple(place_array(layout, *one) for one in given))
    names = collections.Counter(role.name for role in roles.arrays)
    if twice := [name for name, count in names.items() if count > 1]:
        raise ValueError(f"{twice[0]}: two arrays of the optimizer's state have this name; remove the '.' from a key")
    return roles.map(lambda role, x: jax.ShapeDtypeStruct(role.stored_shape, x.dtype), shapes), roles


def _owner(layout: Layout, tree: ParamTree, path: KeyPath) -> str | None:
    """Return the trained parameter that an array belongs to; frozen parameters own no arrays."""
    name = tree.find(path)[1]
    return name if name is not None and layout.by_path[name].trainable else None


def logical_shapes(layout: Layout, tree: ParamTree) -> Any:
    """Return the logical shapes of the trained parameters in the user's tree, as passed to an optimizer."""
    return tree.build({x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layout.leaves if x.trainable})


def array_name(tree: ParamTree, path: KeyPath) -> str:
    """Return the checkpoint name of an array of the optimizer's state from its path."""
    before, leaf, after = tree.find(path)
    return ".".join(part for part in ("opt_state", dotted(before), leaf, dotted(after)) if part)


def place(layout: Layout, roles: Roles) -> Roles:
    """Return the roles of the same optimizer in another layout of the same model."""
    return Roles(tuple(place_array(layout, role.name, role.leaf, role.shape) for role in roles.arrays))


def dotted(path: tuple[Any, ...]) -> str:
    """Return a pytree path as a dotted name, as in checkpoints."""
    return ".".join(map(_key_name, path))


def param_name(path: tuple[Any, ...]) -> str:
    """Return the dotted name of a path in a model's tree of parameters; an NNX value has its variable's name."""
    return dotted(tuple(key for key in path if not isinstance(key, jax.tree_util.GetAttrKey)))


def _key_name(key: Any) -> str:
    for attribute in ("key", "name", "idx"):
        if hasattr(key, attribute):
            return str(getattr(key, attribute))
    return str(key)


def place_array(layout: Layout, name: str, owner: str | None, shape: tuple[int, ...]) -> Role:
    """Return the role of one array.

    A parameter-shaped array is sharded as the `opt` stage of its leaf, including padding, because the update reads
    both. A factored array keeps the leaf's split dim if it has this dim without padding, so that its update needs no
    communication along it. Other arrays are split by the rule for parameters, but not padded: they are replicated if
    no dim divides evenly.
    """
    leaf = layout.by_path.get(owner or "")
    if leaf is not None and shape == leaf.shape:
        stage, reason = leaf.stage("opt"), f"as {leaf.path}: {leaf.reason}"
        how = (leaf.dim, stage.axes, leaf.padding, reason, stage.memory, leaf.cuts)
        return Role(name, owner, Kind.PARAMETER, shape, *how)
    if math.prod(shape) == 1:
        return Role(name, owner, Kind.SCALAR, shape, None, (), 0, "replicated: one element")
    kept = None if leaf is None else _kept_dims(shape, leaf)
    cuts = _kept_cuts(leaf, kept or (), shape)
    kind = Kind.OTHER if kept is None or None in kept else Kind.FACTORED
    if leaf is not None and kept and leaf.stage("opt").axes and leaf.dim in kept and not leaf.padding:
        dim = kept.index(leaf.dim)
        if shape[dim] == leaf.shape[leaf.dim or 0]:
            reason = f"dim {dim}, which is dim {leaf.dim} of {leaf.path}"
            return Role(name, owner, kind, shape, dim, leaf.stage("opt").axes, 0, reason, cuts=cuts)
    return Role(name, owner, kind, shape, *_by_rule(layout, name, leaf, shape, kept, cuts), cuts=cuts)


def _kept_cuts(leaf: Leaf | None, kept: tuple[int | None, ...], shape: tuple[int, ...]) -> tuple[Cut, ...]:
    """Return the cuts of a leaf as cuts of an array that keeps these dims of the leaf."""
    cuts = [] if leaf is None else [cut for cut in leaf.cuts if cut.dim in kept]
    moved = [dataclasses.replace(cut, dim=kept.index(cut.dim)) for cut in cuts]
    return tuple(cut for cut in moved if shape[cut.dim] % cut.parts == 0)


def _by_rule(
    layout: Layout,
    name: str,
    leaf: Leaf | None,
    shape: tuple[int, ...],
    kept: tuple[int | None, ...] | None,
    cuts: Sequence[Cut],
) -> tuple[int | None, tuple[str, ...], int, str]:
    """Split an array by the general rule; return its dim, axes, padding (none) and the reason."""
    axes = _axes(layout, leaf)
    stacked = 0
    if leaf is not None and kept is not None:
        stacked = len(list(itertools.takewhile(lambda dim: dim is None or dim < leaf.stacked, kept)))
    choice = choose_dim(name, shape, layout.num_shards(axes), stacked=stacked, min_size=layout.min_size, cuts=cuts)
    if choice.padding:
        shards = layout.num_shards(axes)
        reason = f"replicated: no dim divisible by {shards}, and only arrays of a parameter's shape are padded"
        return None, (), 0, reason
    return choice.dim, axes if choice.dim is not None else (), 0, choice.reason


def _axes(layout: Layout, leaf: Leaf | None) -> tuple[str, ...]:
    """Return the axes over which optimizer states are split: the leaf's, else the strategy's."""
    if leaf is not None and leaf.stage("opt").axes:
        return leaf.stage("opt").axes
    cut = [] if leaf is None else [one.axis for one in leaf.cuts]
    wanted = [axis for axis in layout.strategy.axes("opt") if axis not in cut]
    return tuple(axis for axis, size in layout.mesh_sizes if size > 1 and axis in wanted)


def _kept_dims(shape: tuple[int, ...], leaf: Leaf) -> tuple[int | None, ...] | None:
    """Return for each dim of an array its dim in the leaf (None: added); None if the shapes do not match.

    If sizes are equal, the shape does not show which dim was removed. Then an interpretation that keeps the split dim
    is chosen. A wrong choice costs communication of an array smaller than the leaf, but never changes a value.
    """
    extra = len(shape) - len(leaf.shape)
    if extra > 0 and shape[extra:] == leaf.shape:
        return (*[None] * extra, *range(len(leaf.shape)))
    if extra == 0 and all(a in (b, 1) for a, b in zip(shape, leaf.shape, strict=True)):
        return tuple(range(len(shape)))
    if extra >= 0:
        return None
    dims = itertools.combinations(range(len(leaf.shape)), len(shape))
    candidates = [kept for kept in dims if tuple(leaf.shape[dim] for dim in kept) == shape]
    return max(candidates, key=lambda kept: leaf.dim in kept, default=None)
