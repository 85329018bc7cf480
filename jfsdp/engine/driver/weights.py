"""The weights of a step: gathers from shards, gathers in flight, and weights kept for the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.engine.driver.program import Call, Loop
from jfsdp.engine.engine import Engine
from jfsdp.engine.unit import Arrays, Movement
from jfsdp.layout.codec import scales_of

Entry = tuple[Call, Loop | None, int]  # a call, its loop and its iteration


class Gathers:
    """A queue of gathers in flight, in the order of the calls.

    Attributes:
      place: the index of the next call in the order.
      queue: the weights of the next calls whose gathers have started, in order.
      shift: offset of iterations: inside a scan, one iteration of the order represents all.
    """

    def __init__(self, order: Sequence[Entry], reached: Sequence[int], fetch: Callable[..., Any]):
        self.order, self.reached, self._fetch = order, reached, fetch
        self.place, self.shift = 0, 0
        self.queue: list[Any] = []

    def take(self, tie: Any) -> Any:
        """Start the gathers that are due at the next call, after `tie` is computed; return the call's weights."""
        while len(self.queue) <= self.reached[self.place] - self.place:
            call, _, iteration = self.order[self.place + len(self.queue)]
            self.queue.append(self._fetch(call, iteration + self.shift, tie))
        self.place += 1
        return self.queue.pop(0)

    def enter(self, place: int, queue: list[Any], shift: Any) -> None:
        """Set place and queue, when the body of a scan is traced or has ended."""
        self.place, self.queue, self.shift = place, queue, shift


class Weights:
    """Gathers the weights of calls, from shards and from stage `kept`.

    Attributes:
      looped: the calls inside a loop.
      kept: by call, its weights at stage `kept`; inside a loop stacked over iterations.
      first: the weights of the first call, if they stay gathered.
    """

    def __init__(self, engine: Engine, source: Arrays, looped: frozenset[Call]):
        self.engine, self.source, self.looped = engine, source, looped
        self.kept: dict[Call, Any] = {}
        self.first: tuple[Call, Arrays] | None = None

    def _shapes(self, call: Call) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of a call's weights at rest, as stored."""
        values = [(name, sliced, self.source[name]) for name, sliced in call.shards.items()]
        return {name: jax.ShapeDtypeStruct(x.shape[sliced:], x.dtype) for name, sliced, x in values}

    def _moves(self, call: Call, stage: str | None = None) -> bool:
        """Tell whether a call's weights must be gathered from another device."""
        leaves = [self.engine.layout.by_path[path] for path in call.shards]
        return any(leaf.stage(stage or leaf.source).axes for leaf in leaves)

    def movement(self, call: Call) -> Movement:
        """Return how a call's weights move."""
        return self.engine.movement(call.unit, self._shapes(call))

    def gather(self, call: Call, iteration: Any, tie: Any) -> Arrays:
        """Gather from shards."""
        values = [(name, sliced, self.source[name]) for name, sliced in call.shards.items()]
        shards = {name: at(value, iteration) if sliced else value for name, sliced, value in values}
        return self.movement(call).gather(self.after(shards, tie) | self.scales(call.shards, iteration))

    def scales(self, shards: Mapping[str, int], iteration: Any = 0) -> Arrays:
        """Return the known scales of weights; `shards` as in `Call`."""
        known = [(scales_of(name), sliced) for name, sliced in shards.items() if scales_of(name) in self.engine.scales]
        return {name: at(x, iteration) if sliced else x for name, sliced in known for x in [self.engine.scales[name]]}

    def fetch(self, call: Call, iteration: Any, tie: Any) -> Arrays | None:
        """Start a gather for the forward; return None if nothing is gathered."""
        if self.first and call is self.first[0] and isinstance(iteration, int) and iteration == 0:
            return self.first[1]
        return self.gather(call, iteration, tie) if self._moves(call) else None

    def fetch_back(self, call: Call, iteration: Any, tie: Any) -> Arrays | None:
        """Start a gather for the backward; return None if nothing is gathered."""
        if call not in self.kept:
            return self.fetch(call, iteration, tie)
        return self._regather(call, iteration, tie) if self._moves(call, "kept") else None

    def take(self, found: Arrays | None, call: Call, iteration: Any, tie: Any) -> Arrays:
        """Return a call's full weights as stored: `found` from a gather in flight; if it is None, gather them now."""
        if found is not None:
            return found
        return self._regather(call, iteration, tie) if call in self.kept else self.gather(call, iteration, tie)

    def _regather(self, call: Call, iteration: Any, tie: Any) -> Arrays:
        kept = self.kept[call]
        if call in self.looped:
            kept = jax.tree.map(lambda x: at(x, iteration), kept)
        return self.movement(call).regather(self.after(kept, tie) | self.scales(call.shards, iteration))

    def after(self, values: Any, tie: Any) -> Any:
        """Return values that depend on `tie`, if the program determines when gathers start."""
        is_tied = self.engine.writes_order and jax.tree.leaves(tie)
        return jax.lax.optimization_barrier((values, tie))[0] if is_tied else values

    def _keeps(self, call: Call) -> Callable[[Arrays], Arrays] | None:
        """Return the function that keeps a call's weights; None if nothing is kept, or they are whole at rest."""
        return self.movement(call).keep if call.needs_backward and self._moves(call) else None

    def allocate(self, loop: Loop) -> None:
        """Allocate arrays for the weights that the iterations of a loop keep."""
        for call in loop.calls:
            keep = self._keeps(call)
            if keep is not None:
                shapes = jax.eval_shape(keep, self.engine.full_shapes(self._shapes(call)))
                self.kept[call] = jax.tree.map(lambda x: zeros((loop.length, *x.shape), x.dtype), shapes)

    def keep(self, call: Call, full: Arrays, iteration: Any) -> None:
        """Keep a call's weights at stage `kept` for the backward."""
        keep = self._keeps(call)
        if keep is None:
            return
        new = keep(full)
        if call in self.looped:
            new = jax.tree.map(lambda all, x: put_at(all, iteration, x), self.kept[call], new)
        self.kept[call] = new


def at(value: jax.Array, index: Any) -> jax.Array:
    """Take one entry of a stack. Moves no data between devices."""
    return jax.lax.dynamic_index_in_dim(value, index, 0, keepdims=False)


def put_at(value: jax.Array, index: Any, new: jax.Array) -> jax.Array:
    """Replace one entry of a stack. Moves no data between devices."""
    return jax.lax.dynamic_update_index_in_dim(value, new, index, 0)


def zeros(shape: tuple[int, ...], dtype: Any) -> jax.Array:
    """Make zeros that XLA does not treat as a constant: it would compute updates of them at compile time."""
    return jax.lax.optimization_barrier(jnp.zeros(shape, dtype))


def join(single: Mapping[int, Sequence[jax.Array]], stacked: Sequence[jax.Array] | None, low: int) -> list[jax.Array]:
    """Stack the arrays of single iterations with the stacked arrays of a scan, whose first iteration is `low`."""
    parts: dict[int, Any] = {index: [x[None] for x in values] for index, values in single.items()}
    if stacked is not None:
        parts[low] = stacked
    columns = zip(*(parts[index] for index in sorted(parts)), strict=True)
    return [jnp.concatenate(column) for column in columns]
