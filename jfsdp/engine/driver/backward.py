"""The backward of a step; see [Note: how a step runs] in run.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfsdp.engine.driver.forward import LoopRecord
from jfsdp.engine.driver.program import Call, Item, Loop
from jfsdp.engine.driver.step import Step
from jfsdp.engine.driver.weights import Gathers, at, join, put_at, zeros
from jfsdp.engine.engine import METER, SCOPE, Engine, scoped
from jfsdp.engine.unit import Arrays, part
from jfsdp.jaxprs import is_literal
from jfsdp.layout.units import ROOT

Cotangents = dict[Any, Any]


class Waiting(NamedTuple):
    """Gradients of one call that wait for reduction: its unit, the number of removed layer dims, its iteration."""

    unit: str
    sliced: dict[str, int]
    iteration: int
    grads: Arrays


class Reduced(NamedTuple):
    """A reduced gradient that is not yet added to the sums; fields as in `Waiting`."""

    path: str
    sliced: int
    iteration: int
    value: jax.Array


class Sums:
    """Reduced gradients by name, and gradients in flight.

    A call's gradient is reduced while the next call computes, and added to the sums during the one after that. So no
    computation that needs the result keeps XLA (0.12) from overlapping the reduction. In a loop of a program that sees
    all rows, each gradient is reduced and added immediately: the loop's carry cannot contain unreduced gradients.

    Attributes:
      waiting: gradients to reduce next, of at most one call and the root.
      reduced: reduced gradients to add next.
      totals: sums in the layout of the accumulator; gradients of a loop's weights are stacked.
    """

    def __init__(self, engine: Engine, sums: Arrays | None):
        self.engine, self.layout = engine, engine.layout
        self.waiting: list[Waiting] = []
        self.reduced: list[Reduced] = []
        # Sums of previous microbatches. Slices are added in place, so no second accumulator is allocated.
        self.totals: Arrays = dict(sums or {})
        if sums is None and engine.measures_gradients:
            self.totals[METER] = zeros((3,), jnp.float32)

    def add(self, unit: str, shards: Mapping[str, int], iteration: int, grads: Arrays) -> None:
        """Queue gradients for reduction; `shards` as in `Call`."""
        if grads:
            self.waiting.append(Waiting(unit, {path: shards[path] for path in grads}, iteration, grads))

    def advance(self, shift: Any) -> None:
        """Add reduced gradients to the sums, and start to reduce the waiting ones; `shift` as in `Gathers`."""
        self.add_reduced(shift)
        for unit, sliced, iteration, grads in self.waiting:
            values = self._reduce(unit, sliced, grads)
            meter = values.pop(METER, 0)
            if METER in self.totals:
                self.totals[METER] += meter
            self.reduced += [Reduced(path, sliced[path], iteration, value) for path, value in values.items()]
        self.waiting = []

    def tie_to_reduced(self, given: Any) -> Any:
        """Return values that depend on the reduced gradients; otherwise XLA delays reductions in a list of layers.

        Both outputs of the barrier must be used: XLA (0.10.2) removes unused values from it, and with them the order.
        The reduced gradients of a stack are excluded, since they end with their iteration.
        """
        listed = [what for what in self.reduced if not what.sliced]
        given, values = jax.lax.optimization_barrier((given, [what.value for what in listed]))
        tied = [what._replace(value=value) for what, value in zip(listed, values, strict=True)]
        self.reduced = [what for what in self.reduced if what.sliced] + tied
        return given

    def add_reduced(self, shift: Any) -> None:
        """Add reduced gradients to the sums."""
        for path, sliced, iteration, value in self.reduced:
            old = self.totals.get(path)
            if sliced:
                assert old is not None, path
                self.totals[path] = put_at(old, iteration + shift, at(old, iteration + shift) + value)
            else:
                self.totals[path] = value if old is None else old + value
        self.reduced = []

    def _reduce(self, unit: str, sliced: Mapping[str, int], grads: Arrays) -> Arrays:
        pairs = [(self.layout.by_path[path], sliced[path]) for path in grads]
        return scoped("reduce", unit, lambda grads: self.engine.reduce_whole(pairs, grads))(grads)

    def zeros(self, path: str, sliced: int, *length: int) -> jax.Array:
        """Return the initial value of a reduced gradient; with a length, a stack of them."""
        whole = self.engine.sum_shape(path)
        made = zeros((*length, *whole.shape[sliced:]), whole.dtype)
        return made if sliced and not length else self.engine.constrain({path: made}, "grad")[path]

    def allocate(self, loop: Loop) -> list[str]:
        """Allocate the gradients of a loop's weights; return their names."""
        trained = {path: sliced for call in loop.live_calls for path, sliced in self.trained(call).items()}
        for path in sorted(trained.keys() - self.totals.keys()):
            sliced = trained[path]
            self.totals[path] = self.zeros(path, sliced, *[loop.length] * bool(sliced))
        return sorted(trained) + [METER] * (METER in self.totals)

    def enter(self, loop: Loop, iteration: int) -> None:
        """Add reduced gradients; put zeros in their place, for the scan of a loop to find in its first iteration."""
        self.add_reduced(0)
        calls = loop.live_calls
        if not calls or not self.engine.writes_order:
            return
        last, before = calls[1 % len(calls)], iteration + (len(calls) == 1)
        self.reduced = [
            Reduced(path, sliced, before, self.zeros(path, sliced))
            for path, sliced in sorted(self.trained(last).items())
        ]

    def trained(self, call: Call) -> dict[str, int]:
        """Return the trainable weights of a call, with the number of removed layer dims."""
        return {path: sliced for path, sliced in call.shards.items() if self.layout.by_path[path].trainable}


class Backward:
    """Runs a program in reverse: each call starts the next gathers, then reduces the previous call's gradient.

    Attributes:
      left: unreduced gradients of the last call, for the next backward to reduce.
    """

    def __init__(self, step: Step, records: Sequence[Any], sums: Arrays | None, last: Arrays | None = None):
        """Prepare the backward; `last` are the gathered weights of its first call, if they stayed gathered."""
        self.step, self.weights, self.records = step, step.weights, records
        self.gathers = Gathers(step.order_back, step.reached_back, step.weights.fetch_back)
        self.gathers.queue += [] if last is None else [last]
        self.sums = Sums(step.engine, sums)
        self.left: Arrays | None = None

    def begin(self, waiting: Arrays) -> None:
        """Queue the gradients that the previous backward left; this backward leaves its own."""
        call, _, iteration = self.step.order_back[-1]
        self.sums.waiting = [Waiting(call.unit, self.sums.trained(call), iteration, waiting)] if waiting else []
        self.left = {}

    def leftover_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the gradients that `begin` takes."""
        return self.step.engine.shapes(self.sums.trained(self.step.order_back[-1][0]))

    def end(self) -> None:
        """Reduce the waiting gradients, or leave them."""
        if self.left is not None:
            self.sums.add_reduced(0)
            self.left = {name: x for what in self.sums.waiting for name, x in what.grads.items()}
            self.sums.waiting = []
        self.sums.advance(0)
        self.sums.add_reduced(0)

    def run(self, cotangents: Sequence[jax.Array]) -> tuple[Arrays, list[jax.Array]]:
        """Return the sums by name, including the gradients for `cotangents`, and the gradients of `step.given`."""
        with jax.named_scope(f"{SCOPE}.backward"):
            return self._run(cotangents)

    def _run(self, cotangents: Sequence[jax.Array]) -> tuple[Arrays, list[jax.Array]]:
        step, cts = self.step, Cotangents()
        _push(cts, step.live, [x.astype(atom.aval.dtype) for atom, x in zip(step.live, cotangents, strict=True)])
        self._leave_root(len(step.block.items), cts)
        for place in reversed(range(len(step.block.items))):
            self._item(step.block.items[place], self.records[place], cts)
            self._leave_root(place, cts)
        self.end()
        totals = {name: self._total(name, cts) for name in step.source if step.derivatives.is_trained(name)}
        if METER in self.sums.totals:
            totals[METER] = self.sums.totals[METER]
        return totals, [_pop(cts, var) for var in step.given]

    def _leave_root(self, place: int, cts: Cotangents) -> None:
        """Queue the gradients of the root's weights whose first reader is this item."""
        root = self.step.root_vars
        found = [path for path in self.step.first_use.get(place, []) if root[path] in cts]
        trained = self.step.engine.layout.moved_with(filter(self.step.derivatives.is_trained, found))
        self.sums.add(ROOT, dict.fromkeys(trained, 0), 0, {path: _pop(cts, root[path]) for path in trained})

    def _root_weights(self, item: Item, tie: Any) -> Arrays:
        """Gather the root's weights that an item reads again, unless they are kept."""
        own = self.step.own(item)
        names = sorted(self.step.engine.layout.moved_with(own))
        full = self.step.regather_root(names, tie) if own else {}
        return {path: full[path] for path in own}

    def _total(self, name: str, cts: Cotangents) -> jax.Array:
        """Return a stored leaf's gradient, including calls outside the schedule."""
        found, in_place = self.sums.totals.get(name), cts.get(self.step.shard_vars.get(name))
        if in_place is not None:
            added = self.step.engine.finish_in_place(name, in_place)
            found = added if found is None else found + added
        return self.sums.zeros(name, 0) if found is None else found

    def _item(self, item: Item, record: Any, cts: Cotangents, iteration: int = 0) -> None:
        """Run an item's derivative; inside a scan, `iteration` is the one that represents all."""
        if not item.needs_backward:
            return
        given = [_pop(cts, var) for var in part(item.is_live, item.outputs)[0]]
        if isinstance(item, Loop):
            self._loop(item, record, given, cts)
            return
        unit = item.unit if isinstance(item, Call) else ROOT
        if self.step.engine.layout.policy(unit).remat != "none":
            # Otherwise XLA merges recomputed values with the forward's and keeps them. With remat "none" XLA's own
            # choice is better: it keeps one float32 copy of a loss's logits less.
            record, given = jax.lax.optimization_barrier((record, given))
        full = self._root_weights(item, given)
        if isinstance(item, Call):
            found = self.gathers.take(given)
            given = self.sums.tie_to_reduced(given)
            self.sums.advance(self.gathers.shift)
            full = self.weights.take(found, item, iteration + self.gathers.shift, given)
        derivatives = self.step.derivatives
        grads, grad_diff = derivatives.of(item).backward(full, record, derivatives.fixed.get(item, []), given)
        if isinstance(item, Call):
            self.sums.add(item.unit, item.shards, iteration, grads)
            if item in self.weights.looped and not self.step.engine.writes_order:
                self.sums.advance(self.gathers.shift)
                self.sums.add_reduced(self.gathers.shift)
        else:
            if self.step.engine.writes_order:
                # Otherwise XLA delays gradients of the root's weights, and keeps the logits' gradient for them. If XLA
                # sums the gradients, a barrier would separate the sum from the slice that makes it a reduce-scatter.
                grads, grad_diff = jax.lax.optimization_barrier((grads, grad_diff))
            _push(cts, [self.step.own(item)[path] for path in grads], list(grads.values()))
        _push(cts, part(item.is_active, item.inputs)[0], grad_diff)

    def _loop(self, loop: Loop, record: LoopRecord, given: list[Any], cts: Cotangents) -> None:
        run = _Iteration(self, loop)
        carry, ys = given[: run.num_carry], given[run.num_carry :]
        if not loop.live_calls or not self.step.engine.writes_order:
            # No call of this loop would reduce the waiting gradients, and its scan would treat them as its own.
            self.sums.advance(0)
            carry = self.sums.tie_to_reduced(carry)
            self.sums.add_reduced(0)
        names = self.sums.allocate(loop)
        low, high = self.step.scans[loop]
        consts, xs, stacked = run.zeros(), {}, None
        for index in reversed(range(loop.length)):
            if index == high - 1 and high > low:
                carry, consts, stacked = self._scan(loop, run, carry, consts, ys, record.stacked, names)
            if not low <= index < high:
                here = [at(y, index) for y in ys]
                carry, consts, xs[index] = run(carry, consts, here, record.single[index], index)
        run.push(cts, carry, consts, join(xs, stacked, low))

    def _scan(
        self, loop: Loop, run: _Iteration, carry: Any, consts: Any, ys: list[Any], records: Any, names: list[str]
    ) -> tuple[Any, Any, Any]:
        """Run the iterations of the scan; its carry includes gathers in flight, waiting gradients and sums."""
        low, high = self.step.scans[loop]
        start, gathers, sums = self.gathers.place, self.gathers, self.sums
        carry = sums.tie_to_reduced(carry)  # otherwise the loop keeps the root's gradients, or their inputs
        sums.enter(loop, high)
        waiting, reduced = sums.waiting, sums.reduced

        def body(state: Any, slices: Any) -> tuple[Any, Any]:
            (carry, consts, queue, under_way, totals), (index, record, ys) = state, slices
            gathers.enter(start, queue, index - (high - 1))
            put(under_way, totals)
            carry, consts, xs = run(carry, consts, ys, record, high - 1)
            return (carry, consts, gathers.queue, *take()), xs

        def take() -> tuple[Any, Arrays]:
            under_way = [what.grads for what in sums.waiting], {what.path: what.value for what in sums.reduced}
            return under_way, {path: sums.totals[path] for path in names}

        def put(under_way: Any, totals: Arrays, moved: int = 0) -> None:
            pairs, values = zip(waiting, under_way[0], strict=True), under_way[1]
            sums.waiting = [one._replace(grads=grads, iteration=one.iteration - moved) for one, grads in pairs]
            sums.reduced = [one._replace(value=values[one.path], iteration=one.iteration - moved) for one in reduced]
            sums.totals |= totals

        state = (carry, consts, gathers.queue, *take())
        slices = (jnp.arange(low, high), records, [y[low:high] for y in ys])
        (carry, consts, queue, *left), xs = jax.lax.scan(body, state, slices, reverse=True)
        gathers.enter(start + len(loop.live_calls) * (high - low), queue, 0)
        put(*left, moved=high - low)
        return carry, consts, xs


class _Iteration:
    """One iteration of a loop in reverse, on lists of the cotangents that exist.

    Attributes:
      num_carry: how many values of the carry have cotangents.
    """

    def __init__(self, backward: Backward, loop: Loop):
        self.backward, self.loop = backward, loop
        self.is_live = loop.is_live[: loop.num_carry]
        self.num_carry = sum(self.is_live)
        self.outputs = part(loop.is_live, loop.body.outputs)[0]
        self.receives = loop.split(loop.receives)
        consts, carry, xs = loop.split(loop.body.inputs)
        self.consts, self.xs = part(self.receives[0], consts)[0], part(self.receives[2], xs)[0]
        self.carry = part(self.is_live, carry)[0]

    def zeros(self) -> list[Any]:
        """Return the initial cotangents of the loop's constants."""
        return [jnp.zeros(var.aval.shape, var.aval.dtype) for var in self.consts]

    def __call__(
        self, carry: list[Any], consts: list[Any], ys: list[Any], records: Sequence[Any], iteration: int
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Return the cotangents of the carry before this iteration, of the constants so far, and of its xs."""
        cts = Cotangents()
        _push(cts, self.outputs, [*carry, *ys])
        for item, record in zip(reversed(self.loop.body.items), reversed(records), strict=True):
            self.backward._item(item, record, cts, iteration)
        new = [_pop(cts, var) for var in self.carry]
        consts = [old + _pop(cts, var) for old, var in zip(consts, self.consts, strict=True)]
        return new, consts, [_pop(cts, var) for var in self.xs]

    def push(self, cts: Cotangents, carry: list[Any], consts: list[Any], xs: list[Any]) -> None:
        """Add cotangents to the inputs of the loop."""
        at_consts, at_carry, at_xs = self.loop.split(self.loop.inputs)
        reaches = part(self.is_live, self.receives[1])[0]
        _push(cts, part(self.receives[0], at_consts)[0], consts)
        _push(cts, part(reaches, part(self.is_live, at_carry)[0])[0], part(reaches, carry)[0])
        _push(cts, part(self.receives[2], at_xs)[0], xs)


def _pop(cts: Cotangents, var: Any) -> jax.Array:
    value = cts.pop(var, None)
    return jnp.zeros(var.aval.shape, var.aval.dtype) if value is None else value


def _push(cts: Cotangents, atoms: Sequence[Any], values: Sequence[Any]) -> None:
    for atom, value in zip(atoms, values, strict=True):
        if not is_literal(atom):
            cts[atom] = cts[atom] + value if atom in cts else value
