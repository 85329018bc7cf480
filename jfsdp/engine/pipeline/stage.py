"""The forward and the backward of one pipeline stage in a tick.

All code here runs inside a `shard_map` over axis `pipe`; see [Note: how a pipeline runs] in run.py.

[Note: the ends of a stage]
A forward ends with the layer whose backward comes first, and a backward ends with the first layer of the next forward.
So if gathers run ahead, the weights of the first layer stay gathered through all ticks, the weights of the last layer
stay gathered from a tick's forward to its backward, and the gradients of the first layer are reduced during the next
backward. Otherwise three collectives of every tick would be exposed.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfsdp.engine.driver.backward import Backward
from jfsdp.engine.driver.forward import Forward, typed
from jfsdp.engine.driver.program import Loop, read
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.driver.step import Step
from jfsdp.engine.driver.weights import at, put_at
from jfsdp.engine.engine import Engine
from jfsdp.engine.pipeline.schedule import StageCalls, turns_stay
from jfsdp.engine.pipeline.trace import Trace, inexact, rows_of
from jfsdp.engine.unit import Arrays
from jfsdp.jaxprs import is_literal
from jfsdp.layout.mesh import PIPE
from jfsdp.layout.precision import is_key

Row = dict[str, Any]  # one tick: by table of `Ticks`, the entry for this stage


class Waiting(NamedTuple):
    """Values that wait between ticks, in the slots of `Ticks`; the sums of gradients; and the gradients that the last
    backward left unreduced. Outside the stages, the arrays of all stages are concatenated along the first dim."""

    inputs: list[Any]
    cotangents: list[Any]
    saved: Any
    hidden: list[Any]
    sums: Arrays
    left: Any


class StageWeights(NamedTuple):
    """A stage's weights at rest, and the gathered weights of its first layer, or None. Outside as in `Waiting`."""

    source: Arrays
    first: Any


class Stage:
    """A stage; its methods take `rows` as `rows_of` does.

    Attributes:
      turns: whether gathers run ahead, so that the ends of the stage may stay; see [Note: the ends of a stage].
      calls: facts about the calls of its units, filled by `ends`.
    """

    def __init__(self, trace: Trace, engine: Engine, prefetch: Prefetch, num_stages: int, repeats: int):
        self.trace, self.engine, self.prefetch = trace, engine, prefetch
        self.num_stages, self.repeats = num_stages, repeats
        self._impls: Any = ()  # of the random keys in saved values, which are stored as numbers
        self.turns = turns_stay(prefetch, repeats)
        self.calls: StageCalls | None = None

    def _task(self, task: jax.Array, rows: Any) -> tuple[Any, Any]:
        """Return part and microbatch of a task; (0, 0) for none."""
        num = jax.tree.leaves(rows)[0].shape[0]
        return jnp.maximum(task, 0) // num, jnp.maximum(task, 0) % num

    @property
    def _length(self) -> int:
        return self.trace.parts.loop.length // (self.num_stages * self.repeats)

    def _of_part(self, arrays: Arrays, part: Any) -> Arrays:
        """Return a part's layers."""
        if self.repeats == 1:
            return arrays
        cut = lambda x: jax.lax.dynamic_slice_in_dim(x, part * self._length, self._length)  # noqa: E731
        return jax.tree.map(cut, arrays)

    def _with_part(self, arrays: Arrays, own: Arrays, part: Any) -> Arrays:
        """Replace a part's layers."""
        if self.repeats == 1:
            return own
        put = lambda x, new: jax.lax.dynamic_update_slice_in_dim(x, new, part * self._length, 0)  # noqa: E731
        return jax.tree.map(put, arrays, own)

    def redistribute(self, arrays: Arrays, given: Any, *, back: bool = False) -> Arrays:
        """Send this stage's layers at rest, which are consecutive, to the stages that compute them.

        Layout:  [parts of consecutive layers ..] -> [every P-th part ..]; `back` is the inverse.
        Cost:    each part is sent once, by collective permutes over axis `pipe`.
        """
        num, length, index, repeats = self.num_stages, self._length, jax.lax.axis_index(PIPE), self.repeats
        result = jax.tree.map(jnp.zeros_like, arrays)
        for here in range(repeats):
            for there in range(repeats):
                pairs = [(a, (a * repeats + here) % num) for a in range(num) if (a * repeats + here) // num == there]
                if not pairs:
                    continue
                start, end, moves = (there, here, [(b, a) for a, b in pairs]) if back else (here, there, pairs)
                is_given = jnp.isin(index, jnp.asarray([b for _, b in moves]))
                places = [slice(part * length, (part + 1) * length) for part in (start, end)]
                result = jax.tree.map(functools.partial(_move, places, moves, is_given), arrays, result)
        return result

    def _program(self, weights: StageWeights, rows: Any, task: Any, carry: Sequence[Any]) -> tuple[Step, list[Any]]:
        """Return the program of a task's layers (part, microbatch), and its inputs."""
        (part, microbatch), length = task, self._length
        parts, loop, source = self.trace.parts, self.trace.parts.loop, self._of_part(weights.source, part)
        values = parts.compute_layer_inputs(self.trace.flat(*rows_of(rows, microbatch), {}))
        for atom in loop.split(loop.inputs)[2]:
            if not is_literal(atom) and atom in values:
                first = (part * self.num_stages + jax.lax.axis_index(PIPE)) * length
                values[atom] = jax.lax.dynamic_slice_in_dim(values[atom], first, length)
        names = {parts.closed.jaxpr.invars[place]: path for place, path in parts.shards.items() if path in source}
        values |= {var: source[path] for var, path in names.items()}
        values |= dict(zip(parts.begins, carry, strict=True))
        block = parts.stage(length)
        shards = {place: names[var] for place, var in enumerate(block.inputs) if var in names}
        given, live = inexact(parts.begins), inexact(block.outputs)
        step = Step(self.engine, self.prefetch, block, shards, source, given, live, _squeeze(weights.first))
        return step, [values[var] for var in block.inputs]

    def ends(self, source: Arrays, given: Any) -> tuple[Any, Any]:
        """Gather the weights of the first call of the forward and of the backward; None if nothing is gathered."""
        entered, *rows = given
        step, _ = self._program(StageWeights(source, None), rows, (0, 0), entered)
        order, back = step.order, step.order_back
        ends = [(call, iteration) for call, _, iteration in (order[0], order[-1])]
        # The last call of the forward may have no backward; then its weights are not those that the backward needs.
        stay = self.turns and bool(back) and order[-1][0] is back[0][0]
        found = {end: step.weights.fetch(*end, None) if stay else None for end in ends}
        first, last = (found[end] for end in ends)
        silent = tuple(sorted({call.unit for call, _, _ in order} - {call.unit for call, _, _ in back}))
        left = (back or order)[-1][0].unit
        self.calls = StageCalls(stay and first is not None, order[0][0].unit, order[-1][0].unit, left, silent)
        return _expand(first), _expand(last)

    def saved(self, weights: StageWeights, given: Any) -> Any:
        """Return the values that wait for a microbatch's backward, and the gradients it may leave, for their shapes."""
        entered, *rows = given
        step, flat = self._program(weights, rows, (0, 0), entered)
        forward = Forward(step)
        forward.run(flat)
        self._impls = jax.tree.map(lambda x: str(jax.random.key_impl(x)) if is_key(x) else "", forward.records)
        left = {path: jnp.zeros(x.shape, x.dtype) for path, x in Backward(step, (), None).leftover_shapes().items()}
        return _expand(_numbers(forward.records)), _expand(left)

    def forward(self, staged: tuple[StageWeights, Waiting, Row], given: Any) -> tuple[Waiting, Any]:
        """Compute the layers of a microbatch; return also the weights of the last call."""
        (weights, waiting, row), (entered, *rows) = staged, given
        task, received = self._task(row["forward"][0], rows), _take(waiting.inputs, row["inputs_read"])
        is_first = (jax.lax.axis_index(PIPE) == 0) & (task[0] == 0)
        begins = [_choose(is_first, new, x) for new, x in zip(entered, received, strict=True)]
        step, flat = self._program(weights, rows, task, begins)
        forward = Forward(step)
        outs = typed(forward.run(flat), step.block.outputs)
        waiting = waiting._replace(
            inputs=_put(waiting.inputs, row["inputs_write"], [self._send(x, 1) for x in outs]),
            hidden=_put(waiting.hidden, row["hidden_write"], outs),
            saved=_put(waiting.saved, row["saved_write"], _numbers(forward.records)),
        )
        return waiting, None if weights.first is None else _expand(forward.last)

    def ended(self, staged: tuple[list[Any], Row], given: Any) -> list[Any]:
        """Send the last stage's outputs to all stages."""
        hidden, row = staged
        return [_from_stage(self.num_stages - 1, x) for x in _take(hidden, row["hidden_read"])]

    def backward(self, staged: tuple[StageWeights, Any, Waiting, Row], given: Any) -> tuple[Waiting, list[Any]]:
        """Compute the backward of a microbatch's layers; return also the cotangents of their inputs."""
        (weights, last, waiting, row), (found, *rows) = staged, given
        is_any, task = row["backward"][0] >= 0, self._task(row["backward"][0], rows)
        is_last = (jax.lax.axis_index(PIPE) == self.num_stages - 1) & (task[0] == self.repeats - 1)
        received = _take(waiting.cotangents, row["cotangents_read"])
        cotangents = [_choose(is_last, new, x) for new, x in zip(found, received, strict=True)]
        cotangents = [jnp.where(is_any, x, 0) for x in cotangents]
        step, flat = self._program(weights, rows, task, self.unread())
        _prepare(step, flat)
        as_key = lambda x, impl: jax.random.wrap_key_data(x, impl=impl) if impl else x  # noqa: E731
        records = jax.tree.map(as_key, _take(waiting.saved, row["saved_read"]), self._impls)
        part_sums = self._of_part(waiting.sums, task[0])
        backward = Backward(step, records, part_sums, _squeeze(last))
        if weights.first is not None:
            # Otherwise XLA reduces them before the layers' forward, with no computation to overlap.
            begun, cotangents = jax.lax.optimization_barrier((_squeeze(waiting.left), cotangents))
            backward.begin(begun)
        part_sums, left = backward.run(cotangents)
        sums = self._with_part(waiting.sums, part_sums, task[0])
        sent = _put(waiting.cotangents, row["cotangents_write"], [self._send(x, -1) for x in left])
        waiting = waiting._replace(
            cotangents=sent, sums=sums, left=waiting.left if weights.first is None else _expand(backward.left)
        )
        return waiting, [_from_stage(0, x) for x in left]

    def finish(self, staged: tuple[StageWeights, Waiting], given: Any) -> Arrays:
        """Return the sums, including the gradients that the last backward left."""
        (weights, waiting), (entered, *rows) = staged, given
        if weights.first is None:
            return waiting.sums
        backward = Backward(self._program(weights, rows, (0, 0), entered)[0], (), waiting.sums)
        backward.begin(_squeeze(waiting.left))
        backward.left = None
        backward.end()
        return backward.sums.totals

    def unread(self) -> list[Any]:
        """Return placeholders for the inputs of the layers, for a program that does not read them."""
        return [jnp.zeros(atom.aval.shape, atom.aval.dtype) for atom in self.trace.parts.begins]

    def _send(self, x: jax.Array, offset: int) -> jax.Array:
        """Send to the next stage, or the previous one; a stage without a sender gets zeros. Repeats wrap around."""
        num = self.num_stages
        targets = [(stage, stage + offset) for stage in range(num)]
        pairs = [(a, b % num) for a, b in targets if 0 <= b < num or self.repeats > 1]
        return jax.lax.ppermute(x, PIPE, pairs)


def _prepare(step: Step, flat: Sequence[Any]) -> None:
    """Compute the residuals that are equal in all layers, for a stage's backward."""
    (loop,) = step.block.items
    assert isinstance(loop, Loop)
    env = dict(zip(step.block.inputs, flat, strict=True))
    consts = [read(env, atom) for atom in loop.split(loop.inputs)[0]]
    Forward(step).prepare(loop, dict(zip(loop.body.inputs, consts, strict=False)))


def _move(places: Sequence[slice], moves: Any, is_given: jax.Array, x: jax.Array, new: jax.Array) -> jax.Array:
    """Send the first place of `x` to the second one of `new`, where a stage is given one."""
    sent, old = jax.lax.ppermute(x[places[0]], PIPE, moves), new[places[1]]
    return jax.lax.dynamic_update_slice_in_dim(new, jnp.where(is_given, sent, old), places[1].start, 0)


def _choose(mark: jax.Array, yes: jax.Array, no: jax.Array) -> jax.Array:
    return jax.lax.select(jnp.broadcast_to(mark, yes.shape), yes, no)


def _from_stage(stage: int, x: jax.Array) -> jax.Array:
    """Send one stage's value to all stages. Cost: an all-reduce over axis `pipe`."""
    masked = jnp.where(jax.lax.axis_index(PIPE) == stage, x, jnp.zeros_like(x))
    return jax.lax.psum(masked.astype(jnp.int8), PIPE).astype(bool) if x.dtype == bool else jax.lax.psum(masked, PIPE)


def _numbers(values: Any) -> Any:
    """Convert random keys to numbers, which can be zeros."""
    return jax.tree.map(lambda x: jax.random.key_data(x) if is_key(x) else x, values)


def _expand(own: Any) -> Any:
    """Add the dim along which the arrays of all stages are concatenated."""
    return jax.tree.map(lambda x: x[None], own)


def _squeeze(staged: Any) -> Any:
    """Remove the dim that `_all` adds."""
    return jax.tree.map(lambda x: x[0], staged)


def _take(values: Any, place: jax.Array) -> Any:
    return jax.tree.map(lambda x: at(x, place[0]), values)


def _put(values: Any, place: jax.Array, new: Any) -> Any:
    return jax.tree.map(lambda x, one: put_at(x, place[0], one), values, new)
