"""Gradients of a step: of its microbatches, summed and reduced.

[Note: when gradients are reduced]
*Every microbatch*: the derivative of each unit reduces into the accumulator's layout. *Once*: the microbatches run
inside a `shard_map`, where a gradient is this device's own; it is accumulated whole and reduced by one explicit
collective per leaf at the end. In between stand the hybrid strategies: inside a `shard_map` every microbatch is
gathered and reduced over the group's axis, and the accumulators are summed over the groups once. A `shard_map` over
axis `replica` alone would leave the group to XLA, but there JAX (0.10.2, 0.12) cannot partition cuDNN's attention.
Inside a `shard_map` a model sees its device's rows only: so its rng keys are folded with the device's index, and a
model whose state depends on the rows (batch statistics) cannot run there, nor one that states shardings over the data
axes. Over axes of its own (`tensor`) it may: the `shard_map` is over all others. Keys are not folded with those.
Without accumulation hybrid strategies go there too, hfsdp, layouts with padded leaves, and models with tied embeddings:
XLA would all-reduce what can be reduce-scattered (`is_beyond_xla`, `_shares_weights`), and put up to twice the bytes on
the wire. But only if the loss says by its type (`Loss`) that it is a sum over rows: a scalar may be anything, a masked
mean or a contrast between rows, and is then left to the global batch. A model that draws dropout masks does not go
there for the bytes alone: its masks would be others than those of one device.

[Note: sums in float16]
A loss is a sum, and its gradient over many rows may be beyond float16. So where the loss is scaled, what is
differentiated and what is on the wire is the mean: divided by the weight of the rows before, multiplied by it in
float32 after.
"""

from __future__ import annotations

import dataclasses
import functools
import re
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.auto import AutoEngine
from jfsdp.engine.engine import Engine, to_device
from jfsdp.engine.flat import pack_all
from jfsdp.engine.local import LocalEngine
from jfsdp.engine.manual import ManualEngine
from jfsdp.engine.schedule import Prefetch
from jfsdp.engine.unit import Arrays
from jfsdp.layout.mesh import DATA_AXES, data_axes, model_axes
from jfsdp.layout.table import Layout, Leaf
from jfsdp.train.checks import check_reduce_dtype
from jfsdp.train.loss import Loss, as_loss, merge, over_devices
from jfsdp.train.state import trainable
from jfsdp.train.survey import Survey, first_rows, is_key, survey

LossFn = Callable[[Any, Any], Any]


class Summed(NamedTuple):
    """Sums over all rows of a step: gradients by name, loss; and the model's other state after the last microbatch."""

    grads: Arrays
    loss: Loss
    model_state: Arrays


class WrittenOut(NamedTuple):
    """How collectives are written out.

    Attributes:
      deferred: the data axes that the last microbatch sums over.
      own: the axes that are left to XLA and to what the model states.
      is_sum: whether the loss says that it is a sum over rows; see `Survey`.
    """

    deferred: tuple[str, ...]
    own: tuple[str, ...]
    is_sum: bool


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sum the gradients of a step's microbatches; see [Note: when gradients are reduced].

    Attributes:
      apply: the sharded model.
      loss_fn: `f(model, microbatch)`.
      accumulate: into how many microbatches a batch is cut.
      once: whether they share one reduction.
      is_asked: whether that was asked for, and is not only what the strategy's table says.
      held: the units that are gathered before the first microbatch and kept to the last.
      is_scaled: whether the loss is scaled; see [Note: sums in float16].
      prefetch: that of engine "manual"; None leaves the order of gathers to XLA.
      found: what `written_out` found, by shapes of the batch.
    """

    apply: ShardedApply
    loss_fn: LossFn
    accumulate: int
    once: bool
    is_asked: bool
    held: tuple[str, ...]
    is_scaled: bool = False
    prefetch: Prefetch | None = None
    found: dict[str, WrittenOut | None] = dataclasses.field(default_factory=dict, compare=False)

    def __call__(self, source: Arrays, model_state: Arrays, batch: Any, scale: jax.Array | float) -> Summed:
        """Return the sums; gradients at least in float32, times `scale`, in the layout of the accumulator or of `opt`.

        Cost:    reduce every: as many reductions as microbatches. Once: one reduction per leaf.
        Memory:  reduce every: an accumulator in the layout of stage `grad`. Once: a whole gradient per device.
        """
        written_out = self.written_out(source, model_state, batch)
        apply, source = self.gathered(source)
        if written_out is not None:
            return self._local(written_out, apply.layout, source, model_state, batch, scale)
        return self._sum(apply, source, model_state, batch, scale, apply.engine.mesh)

    def written_out(self, source: Arrays, model_state: Arrays, batch: Any) -> WrittenOut | None:
        """Tell how collectives are written out; None: XLA makes them. Traces the loss once for batches of one shape.

        Raises:
          ValueError: for a loss or a model that cannot run on the rows of one device, where that is asked for.
        """
        key = str(jax.tree.map(lambda x: (x.shape, x.dtype), batch))
        if key not in self.found:
            # On one device nothing moves, and the order of movements is no matter.
            is_manual = self.prefetch is not None and bool(self.apply.layout.data_axes)
            self.found[key] = (self._manual if is_manual else self._written_out)(source, model_state, batch)
        return self.found[key]

    def gathered(self, source: Arrays) -> tuple[ShardedApply, Arrays]:
        """Gather the units that are kept over all microbatches; return the model on the layout that is left."""
        if not self.held:
            return self.apply, source
        layout, engine = self.apply.layout, self.apply.engine
        held = {path: x for path, x in source.items() if layout.by_path[path].unit in self.held}
        apply = self.apply_on(AutoEngine(layout.gathered(self.held), engine.mesh))
        return apply, source | engine.gather_all(held)

    def apply_on(self, engine: Engine) -> ShardedApply:
        """Return the model on another engine."""
        return ShardedApply(self.apply.model, engine)

    def _sum(
        self,
        apply: ShardedApply,
        source: Arrays,
        model_state: Arrays,
        batch: Any,
        scale: Any,
        mesh: Mesh | None,
    ) -> Summed:
        """Sum over microbatches, as the layout of `apply` reduces each."""
        layout, engine = apply.layout, apply.engine

        def loss_fn(model: Any, rows: Any) -> tuple[jax.Array, Loss]:
            loss = as_loss(self.loss_fn(model, rows))
            return loss.total, loss

        def gradients(state: Arrays, rows: Any) -> tuple[Arrays, Loss, Arrays]:
            loss, after, pull = apply.vjp(loss_fn, source, state, rows)
            weight = positive(sum_over_rows(engine, loss.weight)) if self.is_scaled else 1.0
            found = jax.tree.map(to_device, pull(jnp.asarray(scale / weight, jnp.float32)))
            grads = pack_all(layout, found)
            return {path: add(layout.by_path[path], value) * weight for path, value in grads.items()}, loss, after

        def add(leaf: Leaf, grad: jax.Array) -> jax.Array:
            return engine.accumulate(leaf, grad).astype(leaf.stage("grad").dtype)

        if self.accumulate == 1:
            grads, loss, after = gradients(model_state, batch)
            return Summed(engine.put(grads, "grad"), loss, after)
        micro = split_microbatches(batch, self.accumulate, mesh)
        shapes = jax.eval_shape(gradients, model_state, jax.tree.map(lambda x: x[0], micro))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[0])
        nothing = merge(lambda x: jnp.zeros((), x.dtype), lambda x: jnp.full((), -jnp.inf, x.dtype), shapes[1])
        start = (engine.put(zeros, "grad"), nothing, model_state)

        def body(carry: Any, rows: Any) -> tuple[Any, None]:
            grads, loss, before = carry
            new_grads, new_loss, after = gradients(before, rows)
            added = jax.tree.map(jnp.add, jax.tree.map(to_device, grads), new_grads)
            return (engine.put(added, "grad"), merge(jnp.add, jnp.maximum, loss, new_loss), after), None

        return Summed(*jax.lax.scan(body, start, micro)[0])

    def _manual(self, source: Arrays, model_state: Arrays, batch: Any) -> WrittenOut:
        """Tell how collectives are written out under engine "manual".

        Raises:
          ValueError: for a model whose state depends on what a single device does not have.
        """
        try:
            found = self._survey(source, model_state, batch)
        except NameError as error:
            unbound = re.search(r"axis name: (\w+)", str(error))
            if unbound is None or unbound[1] not in self.apply.engine.mesh.axis_names:
                raise
            raise ValueError(
                f"the loss or the model names mesh axis {unbound[1]!r} in a collective of its own; under jfsdp a loss "
                "sees its rows only, and returns sums over them: a jfsdp.Loss, which is summed over devices"
            ) from error
        if found.problem:
            raise ValueError(
                f'engine="manual": {found.problem}, and each device computes for itself; use engine="auto"'
            )
        layout = self.apply.layout
        deferred = layout.data_axes if self.once and self.accumulate > 1 else group_only(layout)
        return WrittenOut(deferred, self._own_axes(found), found.is_sum)

    def _own_axes(self, found: Survey) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*model_axes(self.apply.engine.mesh), *found.model_axes)))

    def _written_out(self, source: Arrays, model_state: Arrays, batch: Any) -> WrittenOut | None:
        """Tell how collectives are written out under engine "auto"; None: they are not."""
        layout = self.apply.layout
        axes = layout.data_axes if self.once else group_only(layout)
        is_needed = axes or is_beyond_xla(layout) or self._shares_weights(source, model_state, batch)
        if not is_needed and not model_axes(self.apply.engine.mesh):
            return None
        found = self._survey(source, model_state, batch)
        deferred = self._deferred(found, axes) if is_needed else None
        if deferred is None and found.gathers_rows and layout.data_axes:
            warnings.warn(
                "the model states of a value that depends on the rows that its first dim is split over nothing (None): "
                'under engine "auto" every device then holds and computes the rows of all; say '
                "PartitionSpec.UNCONSTRAINED where the model has nothing to say",
                stacklevel=2,
            )
        return None if deferred is None else WrittenOut(deferred, self._own_axes(found), found.is_sum)

    def _deferred(self, found: Survey, axes: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return `axes`, which the last microbatch sums over, where collectives may be written out, else None."""
        layout, problem = self.apply.layout, found.problem
        if not axes and found.draws:
            return None  # fewer bytes are not worth other dropout masks than those of one device
        if self.once and self.is_asked:
            if found.is_constant:
                problem = problem or "the weight of the loss is the same for any number of rows (count those at hand)"
            if problem:
                raise ValueError(
                    f'reduce="once": {problem}, and each device would see its own rows only; use reduce="every"'
                )
            return axes
        if not found.is_sum and not problem:
            problem = "the loss is a scalar, and may not be a sum over rows by a count (if it is, return a jfsdp.Loss)"
        if problem and axes and self.accumulate > 1:
            check_reduce_dtype(self.apply.layout, once=False)
            warnings.warn(
                f"{layout.strategy.name}: {problem}, so every microbatch is reduced over {', '.join(axes)}, and not "
                "the last one only",
                stacklevel=2,
            )
        return None if problem else axes

    def _shares_weights(self, source: Arrays, model_state: Arrays, batch: Any) -> bool:
        """Tell whether a weight has several gradients: XLA all-reduces each by itself, and adds them afterwards."""
        if not self.apply.layout.data_axes:
            return False
        rows = first_rows(batch, self.accumulate)
        shared = self.apply.shared_weights(self.loss_fn, source, model_state, rows)
        return any(self.apply.layout.by_path[path].trainable for path in shared)

    def _survey(self, source: Arrays, model_state: Arrays, batch: Any) -> Survey:
        """Read what the loss and the model do; warn of what they do with the axes that are the model's."""
        found = survey(self.apply, self.loss_fn, source, model_state, first_rows(batch, self.accumulate), self.held)
        unused = [axis for axis in model_axes(self.apply.engine.mesh) if axis not in found.model_axes]
        if unused:
            warnings.warn(
                f"mesh axis {unused[0]!r} (size {self.apply.engine.mesh.shape[unused[0]]}): the model states no "
                "sharding over it, so its devices repeat each other's work; state one in the model "
                f"(jax.lax.with_sharding_constraint), or give its devices to {' or '.join(map(repr, DATA_AXES))}",
                stacklevel=2,
            )
        return found

    def _local(
        self, written_out: WrittenOut, layout: Layout, source: Arrays, model_state: Arrays, batch: Any, scale: Any
    ) -> Summed:
        mesh = self.apply.engine.mesh
        kind = LocalEngine if self.prefetch is None else functools.partial(ManualEngine, prefetch=self.prefetch)
        engine = kind(layout, mesh, written_out.deferred)
        apply = self.apply_on(engine)
        data = layout.axes_on(mesh, layout.data_axes)
        finish = functools.partial(self._finish, engine)

        def local(source: Arrays, model_state: Arrays, batch: Any, scale: Any) -> Summed:
            own = fold_keys(model_state, jax.lax.axis_index(data))
            grads, loss, after = self._sum(apply, source, own, batch, scale, None)
            loss = over_devices(loss, data)
            factor = positive(loss.weight) if self.is_scaled else 1.0
            reduced = {path: finish(path, to_device(grad) / factor) * factor for path, grad in grads.items()}
            keys = {name: value for name, value in model_state.items() if is_key(value)}
            return Summed(reduced, loss, after | keys)

        grad_specs: Any = {path: self._out_spec(engine, path) for path in trainable(layout, source)}
        out_specs: Any = Summed(grad_specs, PartitionSpec(), PartitionSpec())  # type: ignore[arg-type]
        scale = jnp.asarray(scale, jnp.float32)
        summed = engine.on_each_device(local, written_out.own, out_specs, (source, model_state, batch, scale))
        return summed._replace(model_state={name: summed.model_state[name] for name in model_state})

    def _finish(self, engine: LocalEngine, path: str, grad: jax.Array) -> jax.Array:
        """Sum one accumulator over the deferred axes, in the unit's `reduce_dtype`."""
        leaf = engine.layout.by_path[path]
        grad = grad.astype(engine.layout.reduce_dtype(leaf))
        return engine.sum_over(grad, engine.deferred, self._scattered(engine, leaf), leaf.dim).astype(
            leaf.stage("grad").dtype
        )

    def _scattered(self, engine: LocalEngine, leaf: Leaf) -> tuple[str, ...]:
        """Return the deferred axes over which the last sum is scattered: those by which `opt` is split further."""
        opt, done = leaf.stage("opt").axes, engine.accumulator_axes(leaf)
        further = tuple(axis for axis in opt if axis not in done)
        return further if opt == (*done, *further) and set(further) <= set(engine.deferred) else ()

    def _out_spec(self, engine: LocalEngine, path: str) -> PartitionSpec:
        leaf = engine.layout.by_path[path]
        split = (*engine.accumulator_axes(leaf), *self._scattered(engine, leaf))
        axes = engine.layout.axes_on(engine.mesh, split)
        return PartitionSpec(*[axes if dim == leaf.dim and axes else None for dim in range(len(leaf.shape))])


def sum_over_rows(engine: Engine, weight: jax.Array) -> jax.Array:
    """Return the weight of all rows of a microbatch: inside a `shard_map` a loss has seen its device's only.

    Every device must divide by the same number: what is reduced could not be multiplied back otherwise.
    Cost:    an all-reduce of a scalar, where collectives are written out.
    """
    if not isinstance(engine, LocalEngine):
        return weight
    return jax.lax.psum(weight, engine.layout.axes_on(engine.mesh, engine.layout.data_axes))


def positive(weight: jax.Array) -> jax.Array:
    """Return a weight to divide by: 1 where nothing was counted. Moves no data."""
    return jnp.where(weight > 0, weight, 1.0)


def group_only(layout: Layout) -> tuple[str, ...]:
    """Return the data axes over which all parameters and accumulators are repeated while another splits them."""
    used = {axis for leaf in layout.leaves for name in ("param", "grad") for axis in _axes(leaf, name)}
    free = tuple(axis for axis in layout.data_axes if axis not in used)
    return free if used else ()


def is_beyond_xla(layout: Layout) -> bool:
    """Tell whether XLA, left to itself, all-reduces a gradient that could be reduce-scattered.

    It makes a reduce-scatter of an all-reduce that one slice reads; a pad between them (padded leaves), or an
    accumulator that is split further than its parameter, keeps it from that and costs twice the bytes.
    """

    def is_beyond(leaf: Leaf) -> bool:
        split = leaf.stage(leaf.source).axes
        return leaf.trainable and bool(leaf.padding or (split and leaf.stage("grad").axes != split))

    return any(is_beyond(leaf) for leaf in layout.leaves)


def _axes(leaf: Leaf, name: str) -> tuple[str, ...]:
    stage = dict(leaf.stages)[name]
    return () if stage is None else stage.axes


def fold_keys(state: Arrays, index: jax.Array) -> Arrays:
    """Give this device its own rng keys. Moves no data."""

    def fold(keys: jax.Array) -> jax.Array:
        return jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), index).reshape(keys.shape)

    return {name: fold(value) if is_key(value) else value for name, value in state.items()}


def split_microbatches(batch: Any, num: int, mesh: Mesh | None) -> Any:
    """Cut a batch [B, ...] into [A, B/A, ...] so that every device keeps the rows it has; scalars are repeated.

    Layout:  [B/data ...] -> [A B/A/data ...]; microbatch a holds the rows b with b % A == a.
    Cost:    none: a plain reshape to [A, B/A] would move rows between devices.

    Args:
      mesh: dim 1 of the result is split over its data axes; None inside a `shard_map`.
    """

    def split(x: jax.Array) -> jax.Array:
        if not x.ndim:
            return jnp.broadcast_to(x, (num,))
        rows = x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)
        if mesh is None:
            return rows
        return jax.lax.with_sharding_constraint(rows, NamedSharding(mesh, PartitionSpec(None, data_axes(mesh))))

    return jax.tree.map(split, batch)
