"""What both ways of moving weights share: one unit's call, casts, padding, and copies between memories."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jfsdp.engine.unit import Arrays, Movement, call_unit
from jfsdp.layout.flat import Buffer
from jfsdp.layout.precision import is_float
from jfsdp.layout.table import HOST, Layout, Leaf
from jfsdp.layout.units import ROOT

SCOPE = "jfsdp"
Pull = Callable[[jax.Array], Arrays]
Pairs = Sequence[tuple[Leaf, int]]  # each leaf with the number of layer dims that a scan has taken off


@dataclasses.dataclass(frozen=True)
class Engine(abc.ABC):
    """Calls units on gathered weights; how they are gathered and reduced is the subclass's.

    Attributes:
      layout: where every stage of every leaf stands.
      mesh: the mesh of the state, with the axes split that some stage splits only in part.
    """

    layout: Layout
    mesh: Mesh

    @abc.abstractmethod
    def gather(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """Gather leaves at rest, on the device and cast, to their stored shape."""

    @abc.abstractmethod
    def keep(self, pairs: Pairs, whole: Arrays) -> Arrays:
        """Cut whole leaves of stored shape to their `kept` stage."""

    @abc.abstractmethod
    def regather(self, pairs: Pairs, kept: Arrays) -> Arrays:
        """Gather leaves from their `kept` stage to their stored shape."""

    @abc.abstractmethod
    def reduce(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients of stored shape over the data axes into the layout of their accumulator."""

    def accumulate(self, leaf: Leaf, grad: jax.Array) -> jax.Array:
        """Bring the gradient of a microbatch from what the unit's derivative gave to what its accumulator adds."""
        del leaf
        return grad

    @abc.abstractmethod
    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """State the layout of leaves as they are stored: `stage` of each."""

    def call_unit(self, name: str, run: Any, shards: Arrays, rest: Any, seen: set[str] | None = None) -> Any:
        """Run one unit on its gathered weights.

        Layout:  weights [D/axes F] -> [D F] -> freed; gradients [D F]{unreduced} -> [D/axes F].
        Dtype:   weights are gathered in the unit's `param_dtype` and their gradients reduced in it.
        Cost, Memory: as `jfsdp.engine.unit.call_unit`.

        Args:
          run, shards, seen: as in `jfsdp.engine.unit.call_unit`.
          rest: as there; its `"inputs"` are those that precision may cast.

        Raises:
          ValueError: if a leaf arrives without a dim that the layout splits (an undeclared stack of layers).
        """
        rest = self.cast_inputs(name, rest)
        return call_unit(run, shards, rest, self.full_shapes(shards), self.movement(name, shards), seen)

    def vjp(
        self, run: Any, root: Arrays, rest: Any, seen: set[str] | None = None, source: Mapping[str, Any] | None = None
    ) -> tuple[Any, Pull]:
        """Run the root unit; return what it returns, and the function from a cotangent to gradients.

        Cost, Memory: as `jfsdp.engine.unit.call_unit`, for each unit.

        Args:
          run: the root's call; the first array of what it returns is the scalar to be differentiated.
          root: its weights at rest.
          rest: everything else, the weights of all other units at rest as `rest["params"]`.
          seen: as in `jfsdp.engine.unit.call_unit`.
          source: all weights as they are stored, for engines that know other forms than leaf by leaf.

        Returns:
          The output; and `pull(cotangent)`, the gradients of what is trainable by name, which `accumulate` brings into
          the layout of their accumulator.
        """
        del source
        params = {**root, **rest["params"]}
        weights = {path: value for path, value in params.items() if self.layout.by_path[path].trainable}

        def scalar(weights: Arrays) -> tuple[Any, Any]:
            own, inner = ({path: weights.get(path, x) for path, x in old.items()} for old in (root, rest["params"]))
            out = self.call_unit(ROOT, run, own, {**rest, "params": inner}, seen)
            return jax.tree.leaves(out)[0], out

        total, pull, out = jax.vjp(scalar, weights, has_aux=True)
        return out, lambda cotangent: pull(cotangent.astype(total.dtype))[0]

    def cast_inputs(self, name: str, rest: Any) -> Any:
        """Cast the inputs of a unit's call as its policy says. Moves no data."""
        policy = self.layout.policy(name).mp_policy
        if not policy.cast_forward_inputs:
            return rest
        return {**rest, "inputs": cast_floating(rest["inputs"], policy.param_dtype)}

    def movement(self, name: str, shards: Mapping[str, Any]) -> Movement:
        """Say how weights of a unit move that are called as `shards`: whole leaves, or layers of them."""
        policy = self.layout.policy(name)
        pairs = self.pairs(shards)
        trained = [(leaf, gone) for leaf, gone in pairs if leaf.trainable]

        def keep(full: Arrays) -> Arrays:
            return self.keep(pairs, pad_all(pairs, full))

        def reduce(grads: Arrays) -> Arrays:
            return _to_source(trained, self.reduce(trained, pad_all(trained, grads)))

        return Movement(
            gather=scoped("gather", name, lambda shards: unpad_all(pairs, self.to_use(pairs, shards))),
            reduce=scoped("reduce", name, reduce),
            keep=None if policy.reshard_after_forward is True else scoped("keep", name, keep),
            regather=scoped("regather", name, lambda kept: unpad_all(pairs, self.regather(pairs, kept))),
            trainable=frozenset(leaf.path for leaf, _ in trained),
            remat=policy.remat,
        )

    def pairs(self, shards: Mapping[str, Any]) -> list[tuple[Leaf, int]]:
        """Pair leaves with the number of layer dims that are gone from them."""
        leaves = [self.layout.by_path[path] for path in shards]
        return [(leaf, num_sliced(leaf, shards[leaf.path].ndim)) for leaf in leaves]

    def full_shapes(self, shards: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of weights once they are gathered. Moves no data."""
        return {
            leaf.path: jax.ShapeDtypeStruct(leaf.shape[gone:], leaf.stage("use").dtype)
            for leaf, gone in self.pairs(shards)
        }

    def to_use(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """Copy shards to the device where they are offloaded, cast them, and gather them to their stored shape."""
        cast = {leaf.path: to_device(shards[leaf.path]).astype(leaf.stage("use").dtype) for leaf, _ in pairs}
        split = [(leaf, gone) for leaf, gone in pairs if leaf.stage(leaf.source).axes]
        return cast | self.gather(split, {leaf.path: cast[leaf.path] for leaf, _ in split})

    def gather_all(self, source: Arrays) -> Arrays:
        """Gather parameters at once, in their stored shape: for steps that keep them over all microbatches.

        Layout:  [D/axes F] -> [D F] in the dtype in use.
        Cost:    one all-gather of every leaf that is split.
        Memory:  these parameters whole, in the dtype in use.
        """
        return self.to_use([(self.layout.by_path[path], 0) for path in source], source)

    def put(self, values: Arrays, stage: str) -> Arrays:
        """Bring leaves on the device into the layout of `stage`, and into its memory."""
        constrained = self.constrain(values, stage)
        return {path: to_memory(value, self.layout.by_path[path], stage) for path, value in constrained.items()}


def label_params(rest: Mapping[str, Any]) -> dict[str, Any]:
    """Return `rest` of a unit's call with the names of parameters in place of its arrays, and "" for others."""
    unnamed = {key: jax.tree.map(lambda _: "", value) for key, value in rest.items()}
    return unnamed | {"params": {name: name for name in rest["params"]}}


def scoped(verb: str, unit: str, move: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
    """Name what a movement does in the program that XLA compiles: `jfsdp.gather.layers`. Profiles and plans read it."""
    return jax.named_scope(f"{SCOPE}.{verb}.{unit or 'root'}")(move)


def _to_source(pairs: Pairs, grads: Arrays) -> Arrays:
    """Bring gradients into the dtype and memory of what they belong to: a cotangent's type is that of its value."""
    source = [(leaf, leaf.source) for leaf, _ in pairs]
    return {
        leaf.path: to_memory(grads[leaf.path].astype(leaf.stage(stage).dtype), leaf, stage) for leaf, stage in source
    }


def unpad_all(pairs: Pairs, values: Mapping[str, Any]) -> Arrays:
    """Bring leaves of stored shape into their logical shape. Moves no data between devices."""
    return {leaf.path: _unpad(values[leaf.path], leaf, gone) for leaf, gone in pairs}


def pad_all(pairs: Pairs, values: Mapping[str, Any]) -> Arrays:
    """Bring leaves of logical shape into their stored shape. Moves no data between devices."""
    return {leaf.path: _pad(values[leaf.path], leaf, gone) for leaf, gone in pairs}


def is_on_host(value: jax.Array) -> bool:
    """Tell whether an array, traced or not, stands in host memory by its type. Moves no data."""
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def to_device(value: jax.Array) -> jax.Array:
    """Copy an array to the device if it stands in host memory. Moves no data between devices."""
    return jax.device_put(value, jax.memory.Space.Device) if is_on_host(value) else value


def to_memory(value: jax.Array, leaf: Leaf, stage: str) -> jax.Array:
    """Copy a leaf on the device to the memory of a stage. Moves no data between devices."""
    return jax.device_put(value, jax.memory.Space.Host) if leaf.stage(stage).memory == HOST else value


def cast_floating(values: Any, dtype: str | None) -> Any:
    """Cast the floating arrays of a pytree; None casts nothing. Moves no data between devices."""
    if dtype is None:
        return values
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(jnp.result_type(x)) else x, values)


def num_sliced(leaf: Leaf, ndim: int) -> int:
    """Return how many leading dims a scan has taken off; they must be layer dims of the layout."""
    gone = len(leaf.shape) - ndim
    if isinstance(leaf, Buffer) and gone > leaf.stacked:
        raise ValueError(
            f"{leaf.views[0].path}: is stored in one array with others, without its layer dim, but unit "
            f"{leaf.unit!r} is called inside a scan over it; declare the layer dim: "
            f"units=[jfsdp.Unit(..., stacked={gone})]"
        )
    if leaf.dim is not None and gone > leaf.dim:
        raise ValueError(
            f"{leaf.path}: dim {leaf.dim} (size {leaf.shape[leaf.dim]}) is split over the mesh, but unit "
            f"{leaf.unit!r} is called inside a scan over it; declare the layer dim: "
            f"units=[jfsdp.Unit(..., stacked={gone})]"
        )
    return gone


def _unpad(value: jax.Array, leaf: Leaf, sliced: int) -> jax.Array:
    if not leaf.padding or leaf.dim is None:
        return value
    return jax.lax.slice_in_dim(value, 0, leaf.shape[leaf.dim], axis=leaf.dim - sliced)


def _pad(value: jax.Array, leaf: Leaf, sliced: int) -> jax.Array:
    if not leaf.padding or leaf.dim is None:
        return value
    widths = [(0, leaf.padding if dim == leaf.dim - sliced else 0) for dim in range(value.ndim)]
    return jnp.pad(value, widths)


def pad_leaf(value: jax.Array, leaf: Leaf) -> jax.Array:
    """Bring a leaf of logical shape into its stored shape; the padding is zeros. Moves no data between devices."""
    return _pad(value, leaf, 0)
