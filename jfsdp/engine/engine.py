"""The base class of both programs: the call of a unit, casts, padding, and copies between memories."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jfsdp.engine.driver.program import NamedCall
from jfsdp.engine.unit import Arrays, Movement, Traced, call_traced
from jfsdp.layout.codec import matrix_amax, scales_of
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import HOST, Leaf
from jfsdp.layout.precision import is_float
from jfsdp.layout.units import ROOT

SCOPE = "jfsdp"
SCALES = f"{SCOPE}.scales"  # the scope of the maxima of a step's matrices
METER = "<rounding>"  # among gradients by name, and no name of a parameter: see `measures_gradients`
UNIT_CALL = "jfsdp_unit_"  # prefix of the names of units' calls in a trace
Pull = Callable[[jax.Array, Arrays | None], Arrays]
Pairs = Sequence[tuple[Leaf, int]]  # each leaf with the number of layer dims that scans have removed
T = TypeVar("T")
E = TypeVar("E", bound="Engine")


@dataclasses.dataclass(frozen=True)
class Engine(abc.ABC):
    """One of the two programs of a step: how weights are gathered and gradients reduced.

    The methods about rows are written for a program that sees the rows of all devices together.

    Attributes:
      layout: the layout of every leaf at every stage.
      mesh: the state's mesh; axes over which some stage is only partly split are split into parts.
      calls: the calls of units in the latest trace of a root, by their names in the trace.
      scales: by the names of scales (`scales_of`), [layers], of matrices that have one; see `with_scales`. The schedule
        passes them to calls among the weights; other calls compute their own.
      writes_order: whether the program determines when each collective starts. Otherwise XLA does, and no gradient may
        wait in the carry of a loop, which would keep unreduced gradients in memory.
    """

    layout: Layout
    mesh: Mesh
    calls: dict[str, NamedCall] = dataclasses.field(default_factory=dict, compare=False, kw_only=True)
    scales: Arrays = dataclasses.field(default_factory=dict, compare=False, kw_only=True)

    writes_order: ClassVar[bool] = False

    @abc.abstractmethod
    def gather(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """Gather leaves from shards on the device, already cast, to their stored shape; round those with a wire format.

        `shards` may have known scales of them.
        """

    @abc.abstractmethod
    def keep(self, pairs: Pairs, whole: Arrays) -> Arrays:
        """Slice whole leaves of stored shape to their `kept` stage."""

    @abc.abstractmethod
    def regather(self, pairs: Pairs, kept: Arrays) -> Arrays:
        """Gather leaves from their `kept` stage to their stored shape, as `gather`."""

    @abc.abstractmethod
    def reduce(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients of stored shape over the data axes into the layout of their accumulator."""

    @abc.abstractmethod
    def reduce_whole(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients of logical shape over the axes not deferred, in layout and dtype of the accumulator.

        Gradients with a wire format add METER.
        """

    @abc.abstractmethod
    def finish_in_place(self, path: str, grad: jax.Array) -> jax.Array:
        """Bring a gradient from the derivative of a unit's call to the layout and dtype of its accumulator."""

    @abc.abstractmethod
    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """Constrain stored leaves to their layout at `stage`."""

    def call_unit(self, name: str, traced: Traced, shards: Arrays, flat: Sequence[Any]) -> list[Any]:
        """Run one call of a unit on its gathered weights, under a name in the trace; see `NamedCall`.

        Layout:  weights [D/axes F] -> [D F] -> freed; gradients [D F]{unreduced} -> [D/axes F].
        Dtype:   weights are gathered in the unit's `param_dtype` and their gradients reduced in it.
        Cost, Memory: as `jfsdp.engine.unit.call_traced`.

        Args:
          traced, shards, flat: as in `jfsdp.engine.unit.call_traced`.

        Raises:
          ValueError: if a scan has removed a dim that the layout splits (an undeclared stack of layers).
        """
        movement = self.movement(name, shards)
        if name == ROOT:
            return call_traced(traced, shards, flat, movement)

        def in_place(flat: list[Any], shards: Arrays) -> list[Any]:
            return call_traced(traced, shards, flat, movement)

        label = f"{UNIT_CALL}{len(self.calls)}"
        in_place.__name__ = label
        self.calls[label] = NamedCall(name, traced, tuple(sorted(shards)))
        return jax.jit(in_place)(list(flat), shards)

    @abc.abstractmethod
    def vjp(self, traced: Traced, flat: Sequence[Any], source: Arrays) -> tuple[list[Any], Pull]:
        """Run the root unit; return its outputs, and the function from a cotangent to gradients.

        Both programs use `jfsdp.engine.driver.run`, each with its own `Prefetch`.

        Cost, Memory: as `jfsdp.engine.unit.call_traced`, for each unit.

        Args:
          traced, flat: the root's call; its first output is the scalar to differentiate.
          source: all weights as stored.

        Returns:
          The outputs; and `pull(cotangent, sums)`, which returns the sums (None: zeros) plus the gradients of the
          trainable parameters, as stored, in the dtype and layout of their accumulator, unreduced over the deferred
          axes.
        """

    def sum_shape(self, path: str) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of a gradient's accumulator inside `on_rows`."""
        leaf = self.layout.by_path[path]
        return jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stage("grad").dtype)

    def on_rows(self, compute: Callable[..., T], arrays: Any, specs: T) -> T:
        """Run `compute(*arrays)` on the rows that the program sees at once: of all devices, or of one device.

        Args:
          arrays: weights at rest, the model's state, a batch, and other replicated values.
          specs: specs of the results, for a program that sees the rows of one device.
        """
        del specs
        return compute(*arrays)

    def sum_rows(self, value: jax.Array) -> jax.Array:
        """Sum a scalar over the devices whose rows the program does not see. Cost: at most an all-reduce of it."""
        return value

    def max_rows(self, value: jax.Array) -> jax.Array:
        """Return the maximum of a scalar over these devices. Cost: as `sum_rows`."""
        return value

    def own_state(self, state: Arrays) -> Arrays:
        """Return a model's state with rng keys for the rows that the program sees."""
        return state

    def common_state(self, before: Arrays, after: Arrays) -> Arrays:
        """Return a model's state for all rows, from the state `before` and the state `after` the rows that it sees."""
        del before
        return after

    def finished_spec(self, path: str) -> PartitionSpec:
        """Return the spec of a gradient after `finish`, as `on_rows` requires it."""
        del path
        return PartitionSpec()

    def finish(self, grads: Arrays, weight: jax.Array | None) -> Arrays:
        """Sum accumulators over the deferred axes; without such axes every microbatch is summed over all axes.

        Args:
          weight: divisor before the sum and factor after it, so that the sum stays in range; None: not needed.
        """
        del weight
        return grads

    def split_rows(self, batch: Any, num: int) -> Any:
        """Split the visible rows [B, ...] into [A, B/A, ...]; scalars are repeated.

        Layout:  [B/data ...] -> [A B/A/data ...]; microbatch a holds the rows b with b % A == a.
        Cost:    none. A plain reshape to [A, B/A] would move rows between devices.
        """

        def cut(x: jax.Array) -> jax.Array:
            if not x.ndim:
                return jnp.broadcast_to(x, (num,))
            return x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)

        return jax.tree.map(cut, batch)

    def cast_inputs(self, name: str, rest: Any) -> Any:
        """Cast `rest["inputs"]` of a unit's call as its policy requires."""
        policy = self.layout.policy(name).mp_policy
        if not policy.cast_forward_inputs:
            return rest
        return {**rest, "inputs": cast_floating(rest["inputs"], policy.param_dtype)}

    def movement(self, name: str, shards: Mapping[str, Any]) -> Movement:
        """Return how the weights of a unit move that are called as `shards`: whole leaves, or layers of them."""
        policy = self.layout.policy(name)
        pairs = self.pairs(shards)
        trained = [(leaf, sliced) for leaf, sliced in pairs if leaf.trainable]

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
        """Pair leaves with the number of layer dims that scans have removed."""
        leaves = [self.layout.by_path[path] for path in shards]
        return [(leaf, num_sliced(leaf, shards[leaf.path].ndim)) for leaf in leaves]

    def full_shapes(self, shards: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of gathered weights."""
        return self.shapes({leaf.path: sliced for leaf, sliced in self.pairs(shards)})

    def shapes(self, sliced: Mapping[str, int]) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of gathered weights, by leaf and the number of its layer dims that are taken off."""
        return self.layout.full_shapes(sliced, is_local=self.writes_order)

    def to_use(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """Copy offloaded shards to the device, cast them, and gather them to their stored shape; see `gather`."""
        cast = {leaf.path: to_device(shards[leaf.path]).astype(leaf.stage("use").dtype) for leaf, _ in pairs}
        split = [(leaf, sliced) for leaf, sliced in pairs if leaf.stage(leaf.source).axes]
        moved = self.gather(split, {**shards, **{leaf.path: cast[leaf.path] for leaf, _ in split}})
        whole = [(leaf, sliced) for leaf, sliced in pairs if leaf.path not in moved and leaf.gather_wire]
        return cast | moved | {x.path: self.rounded(x, n, cast[x.path], shards) for x, n in whole}

    def encode(
        self, leaf: Leaf, sliced: int, value: jax.Array, known: Mapping[str, jax.Array]
    ) -> tuple[jax.Array, jax.Array]:
        """Return the codes of a leaf's shard and the scales, which are those of the whole leaf.

        Cost: without known scales of whole matrices, a maximum over devices.
        """
        assert leaf.gather_wire is not None, leaf.path
        codec, scales = leaf.gather_wire.codec, known.get(scales_of(leaf.path))
        if not codec.block and scales is None:
            scales = codec.to_scales(self.max_rows(matrix_amax(value, leaf.stacked - sliced)))
        return codec.encode(value, scales=scales)

    def rounded(self, leaf: Leaf, sliced: int, value: jax.Array, known: Mapping[str, jax.Array]) -> jax.Array:
        """Encode and decode a leaf, with a barrier: XLA may remove two conversions that follow each other."""
        assert leaf.gather_wire is not None, leaf.path
        coded = jax.lax.optimization_barrier(self.encode(leaf, sliced, value, known))
        return leaf.gather_wire.codec.decode(*coded, dtype=value.dtype)

    def measure_weights(self, source: Arrays) -> jax.Array | None:
        """Return `Codec.rounding` of all weights with a wire format, summed over devices; None without such weights.

        Cost: reads them once; one all-reduce of 3 numbers.
        """
        found = jnp.zeros(3)
        wires = [leaf for path in source if (leaf := self.layout.by_path[path]).gather_wire]
        for leaf in wires:
            value = to_device(source[leaf.path]).astype(leaf.stage("use").dtype)
            coded = self.encode(leaf, 0, value, self.scales)
            assert leaf.gather_wire is not None
            share = self.layout.num_parts(leaf.stage(leaf.source)) / self.layout.num_shards(self.layout.sum_axes(leaf))
            found += leaf.gather_wire.codec.rounding(value, *coded) * (share if self.writes_order else 1.0)
        return self.sum_rows(found) if wires else None

    @property
    def measures_gradients(self) -> bool:
        """Whether sums of gradients include, as METER, the `Codec.rounding` of the partial sums."""
        return self.writes_order and any(leaf.reduce_wire for leaf in self.layout.leaves)

    def with_scales(self: E, source: Arrays) -> E:
        """Return the engine with the scales of all matrices of a step that are sent with one scale.

        Cost: one all-reduce of a number per matrix and layer.
        """
        wires = [x for x in map(self.layout.by_path.__getitem__, source) if x.gather_wire and not x.gather_wire.block]
        if not wires:
            return self
        with jax.named_scope(SCALES):
            found = [matrix_amax(to_device(source[x.path]).astype(x.stage("use").dtype), x.stacked) for x in wires]
            parts = jnp.split(self.max_rows(jnp.hstack([x.ravel() for x in found])), np.cumsum([x.size for x in found]))
            of = {x.path: part.reshape(one.shape) for x, one, part in zip(wires, found, parts, strict=False)}
            scales = {scales_of(x.path): x.gather_wire.codec.to_scales(of[x.path]) for x in wires if x.gather_wire}
        return dataclasses.replace(self, scales=scales)

    def gather_all(self, source: Arrays) -> Arrays:
        """Gather parameters at once, in their stored shape, for steps that keep them through all microbatches.

        Layout:  [D/axes F] -> [D F] in the dtype in use.
        Cost:    one all-gather of every leaf that is split.
        Memory:  these parameters gathered, in the dtype in use.
        """
        return self.to_use([(self.layout.by_path[path], 0) for path in source], source)

    def keep_all(self, source: Arrays) -> Arrays:
        """Bring parameters to stage `kept` at once, for a step that gathers from that stage in every microbatch.

        Layout:  [D/axes F] -> [D/kept F] in the dtype in use.
        Cost:    one all-gather of every leaf, over the devices that do not split it at stage `kept`.
        """
        pairs = [(self.layout.by_path[path], 0) for path in source]
        cast = {leaf.path: to_device(source[leaf.path]).astype(leaf.stage("use").dtype) for leaf, _ in pairs}
        cast |= {x.path: self.rounded(x, n, cast[x.path], {}) for x, n in pairs if x.gather_wire}
        return self.constrain(cast, "kept")

    def put(self, values: Arrays, stage: str) -> Arrays:
        """Bring leaves on the device to the layout and memory of `stage`."""
        constrained = self.constrain(values, stage)
        return {path: to_memory(value, self.layout.by_path[path], stage) for path, value in constrained.items()}


def scoped(verb: str, unit: str, move: Callable[[Arrays], Arrays]) -> Callable[[Arrays], Arrays]:
    """Name the operations of a movement in the compiled program, as `jfsdp.gather.layers`, for profiles and plans."""
    return jax.named_scope(f"{SCOPE}.{verb}.{unit or 'root'}")(move)


def _to_source(pairs: Pairs, grads: Arrays) -> Arrays:
    """Bring gradients to the dtype and memory of their source stage: a cotangent has the type of its value."""
    source = [(leaf, leaf.source) for leaf, _ in pairs]
    return {leaf.path: to_memory(grads[leaf.path].astype(leaf.stage(rest).dtype), leaf, rest) for leaf, rest in source}


def unpad_all(pairs: Pairs, values: Mapping[str, Any]) -> Arrays:
    """Bring leaves of stored shape to their logical shape. Moves no data between devices."""
    return {leaf.path: _unpad(values[leaf.path], leaf, sliced) for leaf, sliced in pairs}


def pad_all(pairs: Pairs, values: Mapping[str, Any]) -> Arrays:
    """Bring leaves of logical shape to their stored shape. Moves no data between devices."""
    return {leaf.path: _pad(values[leaf.path], leaf, sliced) for leaf, sliced in pairs}


def is_on_host(value: jax.Array) -> bool:
    """Tell whether the type of an array, traced or not, is in host memory."""
    return jax.typeof(value).memory_space == jax.memory.Space.Host


def to_device(value: jax.Array) -> jax.Array:
    """Copy an array from host memory to the device, if it is there. Moves no data between devices."""
    return jax.device_put(value, jax.memory.Space.Device) if is_on_host(value) else value


def to_memory(value: jax.Array, leaf: Leaf, stage: str) -> jax.Array:
    """Copy a leaf from the device to the memory of a stage. Moves no data between devices."""
    return jax.device_put(value, jax.memory.Space.Host) if leaf.stage(stage).memory == HOST else value


def cast_floating(values: Any, dtype: str | None) -> Any:
    """Cast the floating-point arrays of a pytree; None casts nothing. Moves no data between devices."""
    if dtype is None:
        return values
    return jax.tree.map(lambda x: x.astype(dtype) if is_float(jnp.result_type(x)) else x, values)


def num_sliced(leaf: Leaf, ndim: int) -> int:
    """Return how many leading dims scans have removed; they must be layer dims of the layout."""
    sliced = len(leaf.shape) - ndim
    if leaf.dim is not None and sliced > leaf.dim:
        raise ValueError(
            f"{leaf.path}: dim {leaf.dim} (size {leaf.shape[leaf.dim]}) is split over the mesh, but unit "
            f"{leaf.unit!r} is called inside a scan over it; declare the layer dim: "
            f"units=[jfsdp.Unit(..., stacked={sliced})]"
        )
    return sliced


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
    """Bring a leaf of logical shape to its stored shape; the padding is zeros. Moves no data between devices."""
    return _pad(value, leaf, 0)


def stored_leaf(value: jax.Array, leaf: Leaf) -> jax.Array:
    """Bring a leaf from its shape and dtype in the model to those at rest. Moves no data between devices."""
    return pad_leaf(value, leaf).astype(leaf.dtype)
