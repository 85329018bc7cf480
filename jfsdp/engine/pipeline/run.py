"""One step as a pipeline: ticks of a schedule, each with a forward, a loss and a backward of one microbatch per stage.

[Note: how a pipeline runs]
The step runs in a `shard_map` over the data axes. Embedding, head and loss leave mesh axis `pipe` to XLA, like
`tensor`, so all stages share that work. The layers run in a second `shard_map`, over `pipe`, with the same driver as
without a pipeline, on the layers of one stage. Ticks with the same computation are one scan: before the first backward,
with forward and backward, after the last forward.
A stage sends its output at the end of a tick. Values that wait for a neighbour or for the backward are stored in
buffer slots, which the schedule assigns (`lay_out`).
A stage without work still computes on real rows: at first on the inputs of the first microbatch, later on the rows of
microbatch 0. Its outputs are not read, and its backward starts from zero cotangents.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jfsdp.compat import core
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.driver.backward import Backward
from jfsdp.engine.driver.forward import Forward, typed
from jfsdp.engine.driver.program import Block
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.driver.step import Step
from jfsdp.engine.driver.weights import zeros
from jfsdp.engine.engine import SCOPE, to_device
from jfsdp.engine.manual import ManualEngine
from jfsdp.engine.pipeline.parts import without_weights
from jfsdp.engine.pipeline.schedule import Places, Schedule, Segment, StageCalls, Ticks, lay_out
from jfsdp.engine.pipeline.stage import Row, Stage, StageWeights, Waiting
from jfsdp.engine.pipeline.trace import Trace, inexact, rows_of
from jfsdp.engine.unit import Arrays
from jfsdp.layout.mesh import PIPE

_STAGED, _WHOLE = PartitionSpec(PIPE), PartitionSpec()
Combine = Callable[[Any, Any], Any]


class Results(NamedTuple):
    """Results of a step: summed gradients by name, summed outputs of the loss, the state after the last microbatch, and
    the calls of the stages."""

    grads: Arrays
    out: Any
    state: Arrays
    calls: StageCalls | None


class _State(NamedTuple):
    """The state between ticks: of the stages; sums of all other gradients and of the loss's outputs; and the inputs of
    the layers, computed a tick ahead."""

    waiting: Waiting
    sums: Arrays
    out: Any
    entered: list[Any]


def run_pipeline(
    apply: ShardedApply,
    fn: Callable[..., Any],
    source: Arrays,
    state: Arrays,
    micro: Any,
    sums: Arrays,
    *,
    schedule: Schedule,
    repeats: int,
    prefetch: Prefetch,
    cotangent: jax.Array,
    weight: Callable[[Any], Any] | None,
    combine: Combine,
    start: Callable[[Any], Any],
) -> Results:
    """Run all microbatches of a step through the stages; see [Note: how a pipeline runs].

    Layout:  weights of stages [L/pipe D/axes F], all others gathered; gradients in their accumulators' layout.
    Cost:    as `jfsdp.engine.unit.call_traced` for each stage and tick, also for a stage without work; one reduction of
             the gradients outside the stages. Over axis `pipe`, in each tick: the carry of the layers, once forward and
             once backward, and the inputs and outputs of the pipeline, once each.
    Memory:  the saved values of each of a stage's layers, times the microbatches between forward and backward; the
             gradients outside the stages, whole, in float32.

    Args:
      apply: the sharded model on an engine of program `manual`, inside its `on_rows`.
      fn: as `ShardedApply.vjp`.
      source: weights at rest.
      micro: rows of all microbatches, [M, B/M ...].
      sums: sums that gradients are added to, by name, in their accumulators' layout.
      schedule, repeats: the result and an argument of `get_schedule`.
      cotangent: the cotangent of the scalar that `fn` returns.
      weight: selects the row count from the other outputs of `fn`, if the cotangent is to be divided by the count of
        all rows, and the sums multiplied by it. The count must not depend on weights of the model.
      combine: adds the other outputs of `fn` for one microbatch to the sums so far.
      start: makes the initial sums from shapes.
    """
    pipeline = _Pipeline(apply, fn, source, state, micro, prefetch, cotangent, repeats)
    ticks = lay_out(schedule, jax.tree.leaves(micro)[0].shape[0], repeats)
    if weight is None:
        return pipeline.run(ticks, sums, combine, start)
    divided = pipeline.divide_by(weight)
    found = pipeline.run(ticks, sums, combine, start)
    return found._replace(grads=jax.tree.map(lambda x: (x * divided).astype(x.dtype), found.grads))


class _Pipeline:
    """One step of a pipeline.

    Attributes:
      staged, rest: weights at rest of the stages, and all others.
      rows: as `rows_of` takes them.
      state: the model's state after the last microbatch.
    """

    def __init__(
        self,
        apply: ShardedApply,
        fn: Callable[..., Any],
        source: Arrays,
        state: Arrays,
        micro: Any,
        prefetch: Prefetch,
        cotangent: jax.Array,
        repeats: int,
    ):
        engine, layout = apply.engine, apply.layout
        assert isinstance(engine, ManualEngine)
        self.engine, self.cotangent = engine, cotangent
        self.staged = {name: x for name, x in source.items() if layout.by_path[name].is_staged}
        self.rest = {name: x for name, x in source.items() if name not in self.staged}
        own = tuple(axis for axis in engine.auto_axes if axis != PIPE)
        self.outer_engine = dataclasses.replace(engine, deferred=layout.data_axes)
        rows = jax.eval_shape(lambda micro: jax.tree.map(lambda x: x[0], micro), micro)
        self.trace = Trace(apply, fn, source, state, rows)
        # A layer is traced again for the stages, where a model may not name axis `pipe`.
        inside = jax.sharding.get_abstract_mesh().update_axis_types({PIPE: AxisType.Manual})
        with jax.sharding.use_abstract_mesh(inside):
            shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (dict(source), state, rows))
            engine = dataclasses.replace(engine, auto_axes=own, calls={})
            layers = Trace(ShardedApply(apply.model, engine), fn, *shapes)
        engine = dataclasses.replace(engine, layout=layout.in_stage(), calls={}, scales={})
        self.stage = Stage(layers, engine, prefetch, layout.num_stages, repeats)
        if repeats > 1:
            cast = {key: to_device(x).astype(layout.by_path[key].stage("use").dtype) for key, x in self.staged.items()}
            self.staged = self._redistribute(cast)
        before, self.state = self._states(state, micro)
        self.rows = micro, before, {name: x for name, x in state.items() if name not in before}

    def _states(self, state: Arrays, micro: Any) -> tuple[Arrays, Arrays]:
        """Return the values that change, before each microbatch, and the whole state after the last."""
        traced, names = self.trace.traced, self.trace.changing
        if not names:
            return {}, state
        wanted = [False] * self.trace.num_out + [name in names for name in sorted(state)]
        jaxpr, is_read = without_weights(traced, self.trace.calls, wanted)

        def after(before: Arrays, rows: Any) -> tuple[Arrays, Arrays]:
            flat = self.trace.flat(rows, state | before, {})
            values = [x for x, mark in zip(flat, is_read, strict=False) if mark]
            new = typed(core.eval_jaxpr(jaxpr, (), *values), jaxpr.outvars)
            return dict(zip(names, new, strict=True)), before

        last, before = jax.lax.scan(after, {name: state[name] for name in names}, micro)
        return before, state | last

    def divide_by(self, weight: Callable[[Any], Any]) -> jax.Array:
        """Divide the cotangent by the weight of all rows of all devices, and return that weight."""
        traced, num = self.trace.traced, self.trace.num_out
        (_, out), _ = jax.tree.unflatten(traced.tree, range(len(traced.jaxpr.outvars)))
        wanted = [place == weight(out) for place in range(len(traced.jaxpr.outvars))]
        jaxpr, is_read = without_weights(traced, self.trace.calls, wanted)

        def add(total: jax.Array, microbatch: Any) -> tuple[jax.Array, None]:
            flat = self.trace.flat(*rows_of(self.rows, microbatch), {})
            values = [x for x, mark in zip(flat, is_read, strict=False) if mark]
            return total + core.eval_jaxpr(jaxpr, (), *values)[0].astype(total.dtype), None

        num = jax.tree.leaves(self.rows)[0].shape[0]
        local, _ = jax.lax.scan(add, jnp.zeros((), jnp.float32), jnp.arange(num))
        total = self.engine.sum_rows(local)
        total = jnp.where(total == 0, 1.0, total)
        self.cotangent = self.cotangent / total
        return total

    # Outside the stages: all devices of `pipe` together, for one microbatch.

    def _outer(self, block: Block, given: Sequence[Any] = (), live: Sequence[Any] | None = None) -> Step:
        shards = {place: path for place, path in self.trace.parts.shards.items() if path in self.rest}
        return Step(self.outer_engine, Prefetch(0, 0), block, shards, self.rest, given, live)

    def enter(self, microbatch: Any) -> tuple[list[Any], Callable[..., Arrays]]:
        """Compute the inputs of the layers; return also the function that adds its gradients to sums."""
        block = self.trace.parts.enter()
        forward = Forward(self._outer(block, live=inexact(block.outputs)))
        outs = typed(forward.run(self.trace.flat(*rows_of(self.rows, microbatch), self.rest)), block.outputs)
        return outs, lambda found, sums: Backward(forward.step, forward.records, sums).run(found)[0]

    def leave(self, microbatch: Any, hidden: Sequence[Any], sums: Arrays) -> tuple[Any, list[Any], Arrays]:
        """Compute the loss from the final carry; return the other outputs of `fn`, the carry's gradient, the sums."""
        trace, outputs = self.trace, self.trace.parts.loop.outputs
        forward = Forward(self._outer(trace.parts.leave(trace.num_out), inexact(outputs[: len(hidden)])))
        flat = trace.flat(*rows_of(self.rows, microbatch), self.rest)
        outs = forward.run([*flat, *hidden, *[None] * (len(outputs) - len(hidden))])
        sums, found = Backward(forward.step, forward.records, sums).run([self.cotangent.astype(outs[0].dtype)])
        return jax.tree.unflatten(trace.traced.tree, [*outs, *[None] * len(self.state)])[0][1], found, sums

    # The ticks.

    def run(self, ticks: Ticks, sums: Arrays, combine: Combine, start: Callable[[Any], Any]) -> Results:
        """Run all ticks."""
        tables = ticks.tables()
        given = self.enter(ticks.first_to_enter())[0], *self.rows
        first, last = _on_stages(self.stage.ends, self.staged, given)
        weights = StageWeights(self.staged, first)
        state = self._begin(ticks, sums, weights, given, start)

        def run(state: _State, kind: Segment, rows: Row) -> _State:
            tick = jax.named_scope(f"{SCOPE}.tick.shared")(functools.partial(self._tick, weights, last, combine, kind))
            return jax.lax.scan(lambda state, row: (tick(state, row), None), state, rows)[0]

        for times, segments in ticks.rounds():
            first_tick, length = segments[0].first, sum(segment.length for segment in segments)

            def turn(state: _State, rows: Row, segments: Any = segments) -> tuple[_State, None]:
                for segment in segments:
                    begin = segment.first - segments[0].first
                    state = run(state, segment, {name: x[begin : begin + segment.length] for name, x in rows.items()})
                return state, None

            rows = {name: x[first_tick : first_tick + times * length] for name, x in tables.items()}
            rows = {name: x.reshape(times, length, *x.shape[1:]) for name, x in rows.items()}
            if times == 1:
                state, _ = turn(state, {name: x[0] for name, x in rows.items()})
            else:
                state, _ = jax.lax.scan(turn, state, rows)
        waiting, sums, out, _ = state
        staged = self._redistribute(_on_stages(self.stage.finish, (weights, waiting), given), back=True)
        return Results(staged | self.engine.reduce_later(sums), out, self.state, self.stage.calls)

    def _redistribute(self, arrays: Arrays, *, back: bool = False) -> Arrays:
        if self.stage.repeats == 1:
            return arrays
        return _on_stages(functools.partial(self.stage.redistribute, back=back), arrays, ())

    def _tick(
        self, weights: StageWeights, last: Any, combine: Combine, kind: Segment, state: _State, row: Row
    ) -> _State:
        (waiting, sums, out, entered), rows = state, self.rows
        tables = {name: x for name, x in row.items() if x.ndim}  # the others apply to all stages together
        if kind.has_forward:
            with jax.named_scope(f"{SCOPE}.tick.forward"):
                waiting, last = _on_stages(self.stage.forward, (weights, waiting, tables), (entered, *rows))
        found = inexact(self.stage.unread())
        if kind.has_loss:
            hidden = _on_stages(self.stage.ended, (waiting.hidden, tables), (), _WHOLE)
            one, found, sums = self.leave(row["leaving"], hidden, sums)
            out = combine(out, one)
        if kind.has_backward:
            given = (weights, last, waiting, tables), (found, *rows)
            with jax.named_scope(f"{SCOPE}.tick.backward"):
                waiting, left = _on_stages(self.stage.backward, *given, (_STAGED, _WHOLE))
            left = [jnp.where(row["left"] >= 0, x, 0) for x in left]  # drop cotangents of stage 0's later parts
            _, add = self.enter(jnp.maximum(row["left"], 0))
            sums = add(left, sums)
        if kind.has_forward:
            entered, _ = self.enter(jnp.maximum(row["next"], 0))
        return _State(waiting, sums, out, entered)

    def _begin(
        self, ticks: Ticks, sums: Arrays, weights: StageWeights, given: Any, start: Callable[[Any], Any]
    ) -> _State:
        """Return the state before the first tick."""
        entered, stages = given[0], self.stage.num_stages
        saved, left = jax.eval_shape(lambda *arrays: _on_stages(self.stage.saved, *arrays), weights, given)

        def room(places: Places, one: Any) -> Any:
            return jax.tree.map(lambda x: zeros((stages * places.num, *x.shape), x.dtype), one)

        waiting = Waiting(
            inputs=[jnp.broadcast_to(x, (stages * ticks.inputs.num, *x.shape)) for x in entered],
            cotangents=room(ticks.cotangents, inexact(entered)),
            saved=room(ticks.saved, jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape[1:], x.dtype), saved)),
            hidden=room(ticks.hidden, entered),
            sums={name: x for name, x in sums.items() if name in self.staged},
            left=jax.tree.map(lambda x: zeros(x.shape, x.dtype), left),
        )
        shapes = {name: self.outer_engine.sum_shape(name) for name in sums if name in self.rest}
        rest = {name: zeros(x.shape, x.dtype) for name, x in shapes.items()}
        atoms = self.trace.traced.jaxpr.outvars
        outs = [jax.ShapeDtypeStruct(atom.aval.shape, atom.aval.dtype) for atom in atoms]
        return _State(waiting, rest, start(jax.tree.unflatten(self.trace.traced.tree, outs)[0][1]), entered)


def _on_stages(fn: Callable[..., Any], staged: Any, given: Any, out: Any = _STAGED) -> Any:
    """Run on each stage separately; `staged` has a part per stage along the first dim, `given` is shared."""
    run = jax.shard_map(fn, in_specs=(_STAGED, _WHOLE), out_specs=out, axis_names={PIPE}, check_vma=False)
    return run(staged, given)
