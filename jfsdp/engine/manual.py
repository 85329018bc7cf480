"""Program `manual`: a `shard_map` over the data axes that executes every collective of the list of movements.

[Note: cuts in a shard_map]
The model axes (`tensor`) are left to XLA in this `shard_map`: a value is whole along them, and XLA knows how it is
split. XLA does not split our collectives, though: it would gather over `tensor`, run the collective, and split again.
So each collective runs in another `shard_map` over the model axes, in which a device sees only its part, and nothing
is sent over these axes (seen in the HLO of JAX 0.10.2 and 0.12).
A dim may be cut by `tensor` and split by data axes. `tensor` is major, so that a gather returns one contiguous piece.
The specs of the outer `shard_map` have only data axes and cannot express this order. So such a dim enters and leaves
it as two dims: [D/(tensor fsdp)] = [tensor D/tensor/fsdp].
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfsdp.compat import warn
from jfsdp.context.rows import to_zigzag_rows, zigzag_rows
from jfsdp.engine import movements
from jfsdp.engine.driver.run import run
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.engine import METER, Engine, Pairs, Pull, T, pad_all, to_device
from jfsdp.engine.movements import ALL_TO_ALL, CALL, GATHER, REDUCE, Move
from jfsdp.engine.unit import Arrays, Traced
from jfsdp.layout.flat import move_together
from jfsdp.layout.leaf import Leaf, cut_sizes, make_spec
from jfsdp.layout.mesh import batch_spec
from jfsdp.layout.precision import is_key


@dataclasses.dataclass(frozen=True)
class ManualEngine(Engine):
    """The engine that sees the rows of one device; leaves are shards of their stored shape.

    It runs by a schedule; see [Note: how a step runs] in engine/driver/run.py.

    Attributes:
      deferred: the data axes over which gradients are summed after the last microbatch.
      auto_axes: the mesh axes that are left to XLA and to shardings in the model.
      prefetch: how far gathers run ahead.
      is_requested: whether the user requested a schedule, and is warned where it does not apply.
      is_zigzag: whether to bring rows that axis `context` splits into zigzag order.
    """

    writes_order = True

    deferred: tuple[str, ...] = ()
    auto_axes: tuple[str, ...] = ()
    prefetch: Prefetch = dataclasses.field(default_factory=Prefetch)
    is_requested: bool = True
    is_zigzag: bool = False

    def vjp(self, traced: Traced, flat: Sequence[Any], source: Arrays) -> tuple[list[Any], Pull]:
        """Run the root by the schedule; see `Engine.vjp`.

        Warns:
          UserWarning: for units outside the schedule, which are gathered where they are called.
        """
        outs, pull, in_place = run(self, self.prefetch, traced, flat, source)
        if in_place and self.is_requested and self.prefetch != Prefetch(0, 0):
            warn(
                f"units {', '.join(in_place[:4])} are called inside another unit, a nested or reversed loop, a vmap, a "
                "derivative or a remat of the model's code, and are not scheduled there: they are gathered when they "
                "are called, without prefetch; for a remat use jfsdp's own (remat=)"
            )
        return outs, pull

    @functools.cached_property
    def _moves(self) -> Mapping[tuple[str, str], Sequence[movements.Move]]:
        found: dict[tuple[str, str], list[movements.Move]] = {}
        for leaf in self.layout.moved:
            for move in movements.of_leaf(self.layout, leaf, self.deferred):
                found.setdefault((leaf.path, move.when), []).append(move)
        return found

    def _move(
        self,
        when: str,
        known: Mapping[str, jax.Array],
        meters: list[jax.Array],
        leaf: Leaf,
        sliced: int,
        value: jax.Array,
    ) -> jax.Array:
        """Execute the movements of a leaf or a buffer."""
        moves = self._moves.get((leaf.path, when), ())
        if leaf.gather_wire and when in (movements.FORWARD, movements.BACKWARD) and not any(x.wire for x in moves):
            value = self.rounded(leaf, sliced, value, known)  # its format is for another level
        return self._execute(moves, leaf, sliced, value, known, meters)

    def _execute(
        self,
        moves: Iterable[Move],
        leaf: Leaf,
        sliced: int,
        value: jax.Array,
        known: Mapping[str, jax.Array] | None = None,
        meters: list[jax.Array] | None = None,
    ) -> jax.Array:
        for move in moves:
            if move.is_scales or (move.of_sum and move.kind == GATHER):
                continue  # with the movement before
            if move.wire is None:
                value = self._collect(move, value.astype(move.dtype), leaf, sliced)
            elif move.kind == GATHER:
                codes, own = self.encode(leaf, sliced, value, known or {})
                codes = self._collect(move, codes, leaf, sliced)
                own = self._collect(move, own, leaf, sliced) if move.wire.block else own
                value = move.wire.codec.decode(codes, own, value.dtype)
            else:
                if meters is not None:
                    meters.append(move.wire.codec.rounding(value, *move.wire.codec.encode(value)))
                value = self._collect(move, value, leaf, sliced)
        return value

    def _move_all(self, when: str, pairs: Pairs, values: Arrays) -> Arrays:
        """Execute the movements of leaves; those that exchange codes add METER."""
        meters: list[jax.Array] = []
        moved = move_together(self.layout, pairs, values, functools.partial(self._move, when, values, meters))
        return moved | ({METER: sum(meters, jnp.zeros(3))} if meters else {})

    def _collect(self, move: Move, value: jax.Array, leaf: Leaf, sliced: int) -> jax.Array:
        """Execute one collective."""
        axes, dim = self._axes_of(move), 0 if leaf.dim is None else leaf.dim - sliced

        def collect(value: jax.Array) -> jax.Array:
            if move.kind == REDUCE:
                return jax.lax.psum(value, axes)
            if move.wire and move.kind == ALL_TO_ALL:
                layers = leaf.stacked - sliced
                return sum_of_codes(value, move, axes, dim, layers, self.layout.reduce_dtype(leaf))
            shape, place = value.shape, dim + (move.strands > 1)
            if move.strands > 1:
                value = value.reshape(*shape[:dim], move.strands, shape[dim] // move.strands, *shape[dim + 1 :])
            if move.kind == GATHER:
                value = jax.lax.all_gather(value, axes, axis=place, tiled=True)
            else:
                value = jax.lax.psum_scatter(value, axes, scatter_dimension=place, tiled=True)
            return value.reshape(*shape[:dim], -1, *shape[dim + 1 :]) if move.strands > 1 else value

        return self._by_part(leaf, sliced, collect, value)

    def _axes_of(self, move: Move) -> tuple[str, ...]:
        """Return the mesh axes of a movement; with a level, those between or inside groups of neighbouring devices."""
        axes = self._names(move.leaf, move.stage) if move.stage else self.layout.axes_on(self.mesh, move.axes)
        if not move.level:
            return axes
        names = self.layout.axes_on(self.mesh, self.layout.data_axes)
        strides = {name: math.prod(self.mesh.shape[x] for x in names[place + 1 :]) for place, name in enumerate(names)}
        wire = move.leaf.gather_wire if move.stage else move.leaf.reduce_wire
        assert wire is not None and isinstance(wire.between, int), move
        inner = [name for name in axes if strides[name] < wire.between]
        outer = axes[: len(axes) - len(inner)]
        assert axes == (*outer, *inner), axes  # groups of neighbours are minor
        return outer if move.level == movements.OUTER else tuple(inner)

    def _by_part(self, leaf: Leaf, sliced: int, fn: Callable[[jax.Array], jax.Array], value: jax.Array) -> jax.Array:
        """Compute `fn` on a device's part of a leaf; see [Note: cuts in a shard_map].

        Layout:  [.. D/tensor ..] -> [.. D'/tensor ..] where the leaf is cut; otherwise whole along the model axes.
        """
        if not self.auto_axes:
            return fn(value)
        return self._over_auto_axes(fn, leaf.cut_spec(sliced), leaf.cut_spec(sliced), value)

    def _over_auto_axes(
        self, fn: Callable[[jax.Array], jax.Array], old: PartitionSpec, new: PartitionSpec, value: jax.Array
    ) -> jax.Array:
        return jax.shard_map(fn, in_specs=old, out_specs=new, axis_names=set(self.auto_axes), check_vma=False)(value)

    def on_rows(self, compute: Callable[..., T], arrays: Any, specs: T) -> T:
        """Run on each device separately, with its shards of the weights and its rows of the batch."""
        source, *others = arrays
        leaves = {path: self.layout.by_path[path] for path in source}
        source_specs = {path: self._data_spec(leaf, self._names(leaf, leaf.source)) for path, leaf in leaves.items()}
        outer = {path: source[path].reshape(_outer_shape(leaf)) for path, leaf in leaves.items()}
        whole = PartitionSpec()
        rows = jax.tree.map(lambda x: batch_spec(self.mesh, x.ndim), others[1])
        given: Any = {"in_specs": (source_specs, whole, rows, *[whole] * len(others[2:])), "out_specs": specs}
        axes = {axis for axis in self.mesh.axis_names if axis not in self.auto_axes}

        def local(outer: Arrays, state: Any, batch: Any, *others: Any) -> T:
            source = {path: self._from_outer(leaf, outer[path]) for path, leaf in leaves.items()}
            with zigzag_rows(self.is_zigzag):
                batch = jax.tree.map(to_zigzag_rows, batch) if self.is_zigzag else batch
                return compute(source, state, batch, *others)

        return jax.shard_map(local, mesh=self.mesh, axis_names=axes, check_vma=False, **given)(outer, *others)

    def _from_outer(self, leaf: Leaf, value: jax.Array) -> jax.Array:
        """Bring an input of the outer `shard_map` to the shape of its leaf. Moves no data between devices."""
        if not _is_doubled(leaf):
            return value
        outer = _outer_spec(leaf, leaf.cut_spec(), ())
        return self._over_auto_axes(lambda x: jnp.squeeze(x, leaf.dim), outer, leaf.cut_spec(), value)

    def _to_outer(self, leaf: Leaf, value: jax.Array) -> jax.Array:
        """Bring a leaf to the shape in which it leaves the outer `shard_map`. Moves no data between devices."""
        if not _is_doubled(leaf):
            return value
        outer = _outer_spec(leaf, leaf.cut_spec(), ())
        return self._over_auto_axes(lambda x: jnp.expand_dims(x, leaf.dim or 0), leaf.cut_spec(), outer, value)

    @property
    def _data(self) -> tuple[str, ...]:
        return self.layout.axes_on(self.mesh, self.layout.data_axes)

    def sum_rows(self, value: jax.Array) -> jax.Array:
        """Sum a scalar over devices."""
        return jax.lax.psum(value, self._data)

    def max_rows(self, value: jax.Array) -> jax.Array:
        """Return the maximum of a scalar over devices."""
        return jax.lax.pmax(value, self._data)

    def own_state(self, state: Arrays) -> Arrays:
        """Return a state whose keys are folded with this device's index along the data axes."""
        index = jax.lax.axis_index(self._data)

        def fold(keys: jax.Array) -> jax.Array:
            return jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), index).reshape(keys.shape)

        return {name: fold(value) if is_key(value) else value for name, value in state.items()}

    def common_state(self, before: Arrays, after: Arrays) -> Arrays:
        """Return the state afterwards, which is equal on all devices, with the keys from before."""
        return {name: before[name] if is_key(value) else value for name, value in after.items()}

    def sum_shape(self, path: str) -> jax.ShapeDtypeStruct:
        """Return shape and dtype of this device's part of an accumulator."""
        leaf, whole = self.layout.by_path[path], super().sum_shape(path)
        parts = self.layout.num_shards(movements.accumulator_axes(leaf, self.deferred))
        local = cut_sizes(whole.shape, leaf.row_cuts)
        shape = [size // parts if dim == leaf.dim else size for dim, size in enumerate(local)]
        return jax.ShapeDtypeStruct(shape, whole.dtype)

    def finished_spec(self, path: str) -> PartitionSpec:
        """Return the spec of a gradient after `finish`: split further where the last sum is a reduce-scatter."""
        leaf = self.layout.by_path[path]
        split = (*movements.accumulator_axes(leaf, self.deferred), *movements.last_axes(leaf, self.deferred))
        return self._data_spec(leaf, self.layout.axes_on(self.mesh, split))

    def _data_spec(self, leaf: Leaf, axes: tuple[str, ...]) -> PartitionSpec:
        """Return the spec of a leaf in its shape outside, cut and split by data axes."""
        cuts = make_spec(len(leaf.shape), leaf.row_cuts, sub_axes=self.layout.sub_axes_on(self.mesh))
        return _outer_spec(leaf, cuts, axes)

    def finish(self, grads: Arrays, weight: jax.Array | None) -> Arrays:
        """Sum accumulators over the deferred axes, in the unit's `reduce_dtype`, and METER over all data axes."""
        pairs = [(self.layout.by_path[path], 0) for path in grads if path != METER]
        here = {x.path: to_device(grads[x.path]) for x, _ in pairs}
        here = here if weight is None else {path: x / weight for path, x in here.items()}
        summed = self._move_all(movements.LAST, pairs, here)
        outer = {x.path: self._to_outer(x, summed[x.path].astype(x.stage("grad").dtype)) for x, _ in pairs}
        outer = outer if weight is None else {path: x * weight for path, x in outer.items()}
        if METER in grads:
            outer[METER] = self.sum_rows(grads[METER] + summed.get(METER, 0))
        return outer

    def gather(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """All-gather leaves along their split dim.

        Layout:  [D/axes F] -> [D F]
        Cost:    one all-gather each; (N-1)/N of its bytes received per device.
        """
        # The barrier keeps computations on these weights from moving before another unit's gather.
        here = jax.lax.optimization_barrier(shards)
        return self._move_all(movements.FORWARD, pairs, here)

    def keep(self, pairs: Pairs, whole: Arrays) -> Arrays:
        """Slice whole leaves to their `kept` stage. Moves no data between devices."""

        def cut(leaf: Leaf, sliced: int, value: jax.Array) -> jax.Array:
            axes, dim = self._names(leaf, "kept"), (leaf.dim or 0) - sliced
            if not axes:
                return value
            size = value.shape[dim] // jax.lax.axis_size(axes)
            return jax.lax.dynamic_slice_in_dim(value, jax.lax.axis_index(axes) * size, size, axis=dim)

        cuts = {leaf.path: functools.partial(cut, leaf, sliced) for leaf, sliced in pairs}
        return {leaf.path: self._by_part(leaf, sliced, cuts[leaf.path], whole[leaf.path]) for leaf, sliced in pairs}

    def regather(self, pairs: Pairs, kept: Arrays) -> Arrays:
        """All-gather leaves from their `kept` stage."""
        return self._move_all(movements.BACKWARD, pairs, kept)

    def reduce_whole(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum whole gradients, of logical shape, over the axes that are not deferred.

        Layout:  [D F]{unreduced data} -> [D/axes F]{unreduced deferred}, the accumulator's layout
        Dtype:   summed in `reduce_dtype`, returned in the accumulator's.
        Cost:    one reduce-scatter each; an all-reduce over axes that do not split the accumulator.
        """
        return self._sum_all(pairs, pad_all(pairs, grads))

    def reduce_later(self, grads: Arrays) -> Arrays:
        """Sum gradients of stored shape, accumulated over several microbatches, as `reduce_whole`."""
        return self._sum_all([(self.layout.by_path[path], 0) for path in grads], grads)

    def _sum_all(self, pairs: Pairs, grads: Arrays) -> Arrays:
        summed = self._move_all(movements.CALL, pairs, grads)
        cast = {leaf.path: summed[leaf.path].astype(leaf.stage("grad").dtype) for leaf, _ in pairs}
        return cast | {path: x for path, x in summed.items() if path == METER}

    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """Return the values: inside a `shard_map` they are already in their layout."""
        del stage
        return values

    def reduce(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients over the axes of their source stage, for a call outside the schedule.

        A cotangent has the shape of its value, so `finish_in_place` sums over all other axes.

        Layout:  [D F]{unreduced data} -> [D/axes F]{unreduced other axes}
        Cost:    one reduce-scatter each.
        """

        def scatter(leaf: Leaf, sliced: int, grad: jax.Array) -> jax.Array:
            axes = leaf.stage(leaf.source).axes
            return self._execute(movements.sums(self.layout, leaf, CALL, axes, axes, 1), leaf, sliced, grad)

        return move_together(self.layout, pairs, grads, scatter)

    def finish_in_place(self, path: str, grad: jax.Array) -> jax.Array:
        """Bring a gradient from the derivative of a unit's call to the layout and dtype of its accumulator."""
        leaf = self.layout.by_path[path]
        done, accumulator = leaf.stage(leaf.source).axes, movements.accumulator_axes(leaf, self.deferred)
        further = [axis for axis in accumulator if axis not in done]
        rest = [axis for axis in self.layout.sum_axes(leaf) if axis not in (*self.deferred, *done, *accumulator)]
        sums = movements.sums(self.layout, leaf, CALL, (*further, *rest), further, self.layout.num_shards(done))
        grad = self._execute(sums, leaf, 0, to_device(grad)).astype(leaf.stage("grad").dtype)
        if set(done) <= set(accumulator):
            return grad
        # The accumulator is whole until the last microbatch; a gradient that is already scattered fills one part of it.

        def fill(grad: jax.Array) -> jax.Array:
            assert leaf.dim is not None, path
            start = jax.lax.axis_index(self._names(leaf, leaf.source)) * grad.shape[leaf.dim]
            return jax.lax.dynamic_update_slice_in_dim(jnp.zeros(leaf.cut_shape, grad.dtype), grad, start, leaf.dim)

        return self._by_part(leaf, 0, fill, grad)

    def _names(self, leaf: Leaf, stage: str) -> tuple[str, ...]:
        """Return the mesh axes that split a stage."""
        return () if leaf.dim is None else self.layout.stage_axes_on(self.mesh, leaf.stage(stage))


def sum_of_codes(value: jax.Array, move: Move, axes: tuple[str, ...], dim: int, layers: int, dtype: str) -> jax.Array:
    """Exchange codes of partial sums, and sum them in float32; see [Note: what a wire format means].

    Layout:  [D F]{unreduced axes} -> [D/axes F]; [D F] if the movement is part of an all-reduce
    Dtype:   any -> float32; `dtype` after an all-reduce.
    Cost:    one all-to-all of codes and one of scales; for an all-reduce also an all-gather in `dtype`.
    """
    assert move.wire is not None
    codec, num = move.wire.codec, jax.lax.axis_size(axes)
    dim = movements.exchanged_dim(value.shape, layers) if move.of_sum else dim
    size, padding = value.shape[dim], -value.shape[dim] % num
    if padding:
        value = jnp.pad(value, [(0, padding if place == dim else 0) for place in range(value.ndim)])
    parts = value.reshape(*value.shape[:dim], num, -1, *value.shape[dim + 1 :])
    sent = codec.encode(jnp.moveaxis(parts, dim, 0))
    codes, scales = (jax.lax.all_to_all(x, axes, 0, 0, tiled=True) for x in sent)
    summed = jnp.sum(codec.decode(codes, scales, jnp.float32), 0)
    if not move.of_sum:
        return summed
    whole = jax.lax.all_gather(summed.astype(dtype), axes, axis=dim, tiled=True)
    return jax.lax.slice_in_dim(whole, 0, size, axis=dim)


def _is_doubled(leaf: Leaf) -> bool:
    """Tell whether a leaf's split dim is cut too; see [Note: cuts in a shard_map]."""
    return any(cut.dim == leaf.dim for cut in leaf.model_cuts)


def _outer_shape(leaf: Leaf) -> tuple[int, ...]:
    """Return the shape in which a stored leaf enters and leaves the outer `shard_map`."""
    if not _is_doubled(leaf):
        return leaf.stored_shape
    shape, dim = leaf.stored_shape, leaf.dim or 0
    parts = math.prod(cut.parts for cut in leaf.cuts if cut.dim == dim)
    return (*shape[:dim], parts, leaf.cut_shape[dim], *shape[dim + 1 :])


def _outer_spec(leaf: Leaf, entries: Any, axes: tuple[str, ...]) -> PartitionSpec:
    """Return the spec of a leaf in that shape: `entries` for its dims, and `axes` for the rest of its split dim."""
    if leaf.dim is None:
        return PartitionSpec(*entries)
    dim = leaf.dim
    if not _is_doubled(leaf):
        cut = entries[dim] or ()
        axes = (*((cut,) if isinstance(cut, str) else cut), *axes)
    before = entries[: dim + 1] if _is_doubled(leaf) else entries[:dim]
    return PartitionSpec(*before, axes or None, *entries[dim + 1 :])
