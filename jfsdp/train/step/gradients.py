"""Gradients of a step, summed over microbatches and reduced over devices.

[Note: when gradients are reduced]
*Every microbatch*: the derivative of each unit reduces into the layout of the accumulator. *Once* (program `manual`
only): each device accumulates whole gradients of its own rows, and one collective per leaf reduces them at the end.
With replicas, every microbatch is gathered and reduced over the group's axis, and the accumulators are summed over the
replicas once. See [Note: two programs] in resolve.py.

[Note: sums in float16]
A loss is a sum, and its gradient over many rows may exceed the range of float16. So with a loss scale, the mean is
differentiated and reduced: the loss is divided by the weight of the rows before the backward, and gradients are
multiplied by it in float32 afterwards.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jfsdp.compat import core
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.engine import METER, Engine, to_device
from jfsdp.engine.manual import ManualEngine
from jfsdp.engine.pipeline.run import run_pipeline
from jfsdp.engine.pipeline.schedule import StageCalls
from jfsdp.engine.spec import MANUAL, XLA, StepSpec
from jfsdp.engine.unit import Arrays
from jfsdp.engine.xla import XlaEngine
from jfsdp.train.state import trainable
from jfsdp.train.step.config import StepConfig
from jfsdp.train.step.inspect_loss import LossFn, check_weight
from jfsdp.train.step.loss import Loss, as_loss, merge


class Summed(NamedTuple):
    """Sums over all rows of a step (gradients by name, loss), and the model's other state after the last microbatch;
    `Codec.rounding` of weights ("gather") and of partial sums of gradients ("reduce").
    """

    grads: Arrays
    loss: Loss
    model_state: Arrays
    rounding: Arrays = {}  # noqa: RUF012


@dataclasses.dataclass(frozen=True)
class Gradients:
    """Sum the gradients of a step's microbatches; see [Note: when gradients are reduced].

    Attributes:
      apply: the sharded model.
      loss_fn: `f(model, microbatch)`.
      config: the options of the step.
      is_scaled: whether the loss is scaled; see [Note: sums in float16].
      spec: all decisions about the step.
      on_calls: called with the calls of a pipeline's stages when it is traced.
    """

    apply: ShardedApply
    loss_fn: LossFn
    config: StepConfig
    is_scaled: bool
    spec: StepSpec
    on_calls: Callable[[StageCalls | None], None] = lambda calls: None

    def __call__(self, source: Arrays, model_state: Arrays, batch: Any, scale: jax.Array | float) -> Summed:
        """Return the sums, with gradients times `scale`, at least in float32, in the layout of stage `grad` or `opt`.

        Cost:    reduced every microbatch: one reduction per leaf and microbatch. Once: one reduction per leaf.
        Memory:  reduced every microbatch: an accumulator in the layout of stage `grad`. Once: a whole gradient per
                 device.
        """
        early = {*self.spec.gathered, *self.apply.layout.kept_in_pipeline}  # rounded before the loss
        rounded = {path: x for path, x in source.items() if self.apply.layout.by_path[path].unit in early}
        before = self.apply.engine.measure_weights(rounded)
        apply, source = self.program_on(source)
        engine = apply.engine

        def on_rows(source: Arrays, model_state: Arrays, batch: Any, scale: jax.Array) -> Summed:
            coding = engine.with_scales(source)
            own = ShardedApply(apply.model, coding, functools.partial(check_weight, apply.layout))
            measured = coding.measure_weights({path: x for path, x in source.items() if path not in rounded})
            grads, loss, after, _ = self._sum(own, source, engine.own_state(model_state), batch, scale)
            loss = merge(engine.sum_rows, engine.max_rows, loss)
            grads = engine.finish(grads, _as_divisor(loss.weight) if self.is_scaled else None)
            rounding = {"reduce": grads.pop(METER, None), "gather": measured}
            rounding = {key: x for key, x in rounding.items() if x is not None}
            return Summed(grads, loss, engine.common_state(model_state, after), rounding)

        grad_specs: Any = {path: engine.finished_spec(path) for path in trainable(engine.layout, source)}
        whole: Any = PartitionSpec()
        specs = Summed(grad_specs, whole, whole, whole)
        with explain_axis_errors(engine.mesh):
            sums = engine.on_rows(on_rows, (source, model_state, batch, jnp.asarray(scale, jnp.float32)), specs)
        if before is not None:
            sums.rounding["gather"] = sums.rounding.get("gather", 0.0) + before
        # A dim that is cut and split is returned as two dims; see [Note: cuts in a shard_map] in engine/manual.py.
        stored = {path: x.reshape(engine.layout.by_path[path].stored_shape) for path, x in sums.grads.items()}
        return sums._replace(grads=stored)

    def program_on(self, source: Arrays, program: str | None = None) -> tuple[ShardedApply, Arrays]:
        """Return the model on the engine of a program (default: the step's), and its weights.

        Gathers the units that stay gathered over all microbatches.
        """
        layout, engine, spec = self.apply.layout, self.apply.engine, self.spec
        shards = {path: x for path, x in source.items() if layout.by_path[path].unit in spec.gathered}
        if shards:
            source, layout = source | engine.gather_all(shards), layout.gathered(spec.gathered)
        kept = {path: x for path, x in source.items() if layout.by_path[path].unit in layout.kept_in_pipeline}
        if kept:
            source, layout = source | engine.keep_all(kept), layout.gathered(layout.kept_in_pipeline, "kept")
        if (program or spec.program) == XLA:
            made: Engine = XlaEngine(layout, engine.mesh)
        else:
            is_requested = self.config.program == MANUAL or self.config.prefetch is not None
            prefetch = spec.prefetch or Prefetch()
            made = ManualEngine(
                layout, engine.mesh, spec.deferred, spec.auto_axes, prefetch, is_requested, spec.is_zigzag
            )
        return ShardedApply(self.apply.model, made, functools.partial(check_weight, layout)), source

    def _sum_shapes(self, apply: ShardedApply, source: Arrays) -> dict[str, jax.ShapeDtypeStruct]:
        return {path: apply.engine.sum_shape(path) for path in trainable(apply.layout, source)}

    def _sum(self, apply: ShardedApply, source: Arrays, model_state: Arrays, batch: Any, scale: Any) -> Summed:
        """Sum over the microbatches of the local rows, reducing each as the program does."""
        engine = apply.engine

        def loss_fn(model: Any, rows: Any) -> tuple[jax.Array, Loss]:
            loss = as_loss(self.loss_fn(model, rows))
            return loss.total, loss

        def gradients(state: Arrays, rows: Any, sums: Arrays | None) -> Summed:
            loss, after, pull = apply.vjp(loss_fn, source, state, rows)
            if not self.is_scaled:
                return Summed(_put(engine, pull(jnp.asarray(scale, loss.total.dtype), sums)), loss, after)
            # Every device must divide by the same number, or reduced gradients could not be multiplied back.
            weight = _as_divisor(engine.sum_rows(loss.weight))
            grads = pull(jnp.asarray(scale / weight, loss.total.dtype), None)
            grads = {path: x if path == METER else x * weight for path, x in grads.items()}
            grads = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
            return Summed(_put(engine, grads), loss, after)

        if self.spec.schedule is not None:
            return self._sum_stages(apply, loss_fn, source, model_state, batch, scale)
        if self.config.accumulate == 1:
            return gradients(model_state, batch, None)
        micro = engine.split_rows(batch, self.config.accumulate)
        first = jax.eval_shape(lambda micro: jax.tree.map(lambda x: x[0], micro), micro)  # keeps weak types
        grads = self._sum_shapes(apply, source)
        grads |= {METER: jax.ShapeDtypeStruct((3,), jnp.float32)} if engine.measures_gradients else {}
        closed, shapes = jax.make_jaxpr(gradients, return_shape=True)(model_state, first, grads)
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), grads)

        def body(carry: Summed, rows: Any) -> tuple[Summed, None]:
            given = carry.model_state, rows, jax.tree.map(to_device, carry.grads)
            out = core.eval_jaxpr(closed.jaxpr, closed.consts, *jax.tree.leaves(given))
            new = jax.tree.unflatten(jax.tree.structure(shapes), out)
            return new._replace(loss=merge(jnp.add, jnp.maximum, carry.loss, new.loss)), None

        start = Summed(_put(engine, zeros), _nothing(shapes.loss), model_state)
        return jax.lax.scan(body, start, micro)[0]

    def _sum_stages(
        self, apply: ShardedApply, loss_fn: Any, source: Arrays, model_state: Arrays, batch: Any, scale: Any
    ) -> Summed:
        """Sum over the microbatches of the local rows in a pipeline."""
        assert self.spec.schedule is not None
        engine = apply.engine
        zeros = {path: jnp.zeros(shape.shape, shape.dtype) for path, shape in self._sum_shapes(apply, source).items()}
        found = run_pipeline(
            apply,
            loss_fn,
            source,
            model_state,
            engine.split_rows(batch, self.config.accumulate),
            zeros,
            schedule=self.spec.schedule,
            repeats=self.config.pipe_repeats,
            weight=(lambda loss: loss.weight) if self.is_scaled else None,
            prefetch=self.spec.prefetch or Prefetch(),
            cotangent=jnp.asarray(scale, jnp.float32),
            combine=functools.partial(merge, jnp.add, jnp.maximum),
            start=_nothing,
        )
        self.on_calls(found.calls)
        return Summed(engine.put(found.grads, "grad"), found.out, found.state)


def _put(engine: Engine, grads: Arrays) -> Arrays:
    meter = {METER: grads[METER]} if METER in grads else {}
    return engine.put({path: x for path, x in grads.items() if path != METER}, "grad") | meter


@contextlib.contextmanager
def explain_axis_errors(mesh: Any) -> Iterator[None]:
    """Explain the error of a loss that calls a collective over an axis of the mesh."""
    try:
        yield
    except NameError as error:
        unbound = re.search(r"axis name: (\w+)", str(error))
        if unbound is None or unbound[1] not in mesh.axis_names:
            raise
        raise ValueError(
            f"the loss or the model calls a collective over mesh axis {unbound[1]!r}, which is not available there; "
            "return a jfsdp.Loss with sums over the rows that the loss receives: jfsdp sums it over devices"
        ) from error


def _nothing(shapes: Loss) -> Loss:
    """Return the initial values of sums and maxima of losses."""
    return merge(lambda x: jnp.zeros(x.shape, x.dtype), lambda x: jnp.full(x.shape, -jnp.inf, x.dtype), shapes)


def _as_divisor(weight: jax.Array) -> jax.Array:
    """Return the number that gradients are divided by and later multiplied by, in a dtype that does not widen them."""
    return nonzero(weight).astype(jnp.float32)


def nonzero(weight: jax.Array) -> jax.Array:
    """Return a weight to divide by: 1 if it is 0."""
    return jnp.where(weight == 0, 1.0, weight)
