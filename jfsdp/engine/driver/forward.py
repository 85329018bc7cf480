"""The forward of a step; see [Note: how a step runs] in run.py."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfsdp.engine.driver.derivatives import run_item
from jfsdp.engine.driver.program import Block, Call, Code, Item, Loop, eval_eqn, read
from jfsdp.engine.driver.step import Step
from jfsdp.engine.driver.weights import Gathers, at, join
from jfsdp.engine.unit import part
from jfsdp.jaxprs import is_literal
from jfsdp.layout.policy import offloads

Env = dict[Any, Any]


class LoopRecord(NamedTuple):
    """Records of a loop for its backward: of single iterations, and of the iterations in its scan, stacked."""

    single: dict[int, Any]
    stacked: Any


class Forward:
    """Runs a program, with gathers ahead of the compute.

    Attributes:
      records: of each item of the program, the saved values for its backward.
      last: the gathered weights of the last call, as stored; only valid if that call is outside a scan.
    """

    def __init__(self, step: Step):
        self.step, self.weights = step, step.weights
        self.gathers = Gathers(step.order, step.reached, step.weights.fetch)
        self.records: list[Any] = []
        self.last: dict[str, jax.Array] = {}

    def run(self, flat: Sequence[Any]) -> list[Any]:
        """Run the program on its inputs other than the root's weights; return its outputs."""
        block, first_use = self.step.block, self.step.first_use
        env: Env = dict(zip(block.inputs, flat, strict=False)) | block.consts
        is_ahead = self.step.prefetch.forward != 0
        for place, item in enumerate(block.items):
            self._gather_root(first_use.get(place, []), env, None)
            due = first_use.get(place + 1, []) if is_ahead and not isinstance(item, Code) else []
            self.records.append(self._item(item, env, due))
        self._gather_root(first_use.get(len(block.items), []), env, None)
        return [read(env, atom) for atom in block.outputs]

    def _gather_root(self, names: Sequence[str], env: Env, tie: Any) -> None:
        """Gather stored weights of the root, unless they are gathered."""
        variables = self.step.root_vars
        missing = [name for name in names if variables[name] not in env]
        if missing:
            full = self.step.gather_root(missing, tie)
            env.update({variables[path]: value for path, value in full.items()})

    def _item(self, item: Item, env: Env, due: Sequence[str], iteration: Any = 0) -> Any:
        """Run an item; return its record for the backward. `due` are the root's weights that the next item reads."""
        values = [read(env, atom) for atom in item.inputs]
        record: Any = []
        if isinstance(item, Loop):
            outs, record = self._loop(item, values, env, due)
        else:
            full = {path: env[var] for path, var in self.step.own(item).items()}
            if isinstance(item, Call):
                found = self.gathers.take(values)
                self._gather_root(due, env, values)
                self.last = full = self.weights.take(found, item, iteration, values)
            if item.needs_backward:
                outs, record = self.step.derivatives.of(item).forward(full, *part(item.is_active, values))
            else:
                outs = run_item(item, full, values)
            if isinstance(item, Call):
                self.weights.keep(item, full, iteration)
                is_single = item.needs_backward and isinstance(iteration, int)  # not in a scan
                if is_single and offloads(self.step.engine.layout.policy(item.unit).remat):
                    # Otherwise XLA:GPU may end a copy to the host after the backward, and keeps its source until then.
                    outs, record = jax.lax.optimization_barrier((outs, record))
        env.update(zip(item.outputs, outs, strict=True))
        return record

    def _loop(self, loop: Loop, values: list[Any], env: Env, due: Sequence[str]) -> tuple[list[Any], LoopRecord]:
        consts, carry, xs = loop.split(values)
        self.prepare(loop, dict(zip(loop.body.inputs, consts, strict=False)))
        low, high = self.step.scans[loop]

        def run(carry: list[Any], index: Any) -> tuple[list[Any], list[Any], Any]:
            inside = dict(zip(loop.body.inputs, [*consts, *carry, *(at(x, index) for x in xs)], strict=True))
            records, outs = self._body(loop.body, inside, index)
            return outs[: loop.num_carry], outs[loop.num_carry :], records

        ys, records, stacked = {}, {}, (None, None)
        for index in range(loop.length):
            if index == low < high:
                carry, stacked = self._scan(loop, carry, run)
            if low <= index < high:
                continue
            if index == loop.length - 1:
                self._gather_root(due, env, carry)
            carry, ys[index], records[index] = run(carry, index)
        return [*carry, *join(ys, stacked[0], low)], LoopRecord(records, stacked[1])

    def prepare(self, loop: Loop, consts: Mapping[Any, Any]) -> None:
        """Compute the residuals that are equal in every iteration, and allocate arrays for kept weights."""
        known = dict(consts)
        for item in loop.body.items:
            if isinstance(item, Code):
                known |= _equal_outputs(item, known)
            if item.needs_backward:
                self.step.derivatives.prepare(item, known)
        self.weights.allocate(loop)

    def _body(self, block: Block, env: Env, iteration: Any) -> tuple[list[Any], list[Any]]:
        env |= block.consts
        records = [self._item(item, env, (), iteration) for item in block.items]
        return records, typed([read(env, atom) for atom in block.outputs], block.outputs)

    def _scan(self, loop: Loop, carry: list[Any], run: Any) -> tuple[list[Any], Any]:
        """Run the iterations of the scan; its carry includes gathers in flight and kept weights."""
        low, high = self.step.scans[loop]
        start, gathers, weights = self.gathers.place, self.gathers, self.weights
        calls = [call for call in loop.calls if call in weights.kept]  # see [Note: the same program on every process]
        kept = [weights.kept[call] for call in calls]

        def body(state: Any, index: Any) -> tuple[Any, Any]:
            carry, queue, kept = state
            gathers.enter(start, queue, index - low)
            weights.kept.update(zip(calls, kept, strict=True))
            carry, *rest = run(carry, index)
            return (carry, gathers.queue, [weights.kept[call] for call in calls]), rest

        carry = typed(carry, loop.split(loop.body.inputs)[1])
        (carry, queue, kept), stacked = jax.lax.scan(body, (carry, gathers.queue, kept), jnp.arange(low, high))
        gathers.enter(start + len(loop.calls) * (high - low), queue, 0)
        weights.kept.update(zip(calls, kept, strict=True))
        return carry, stacked


def _equal_outputs(code: Code, known: Env) -> Env:
    """Compute the outputs of a loop's code that are equal in every iteration: a cast of a constant, for a unit."""
    values = dict(known)
    for eqn in code.jaxpr.eqns:
        if not eqn.effects and all(is_literal(atom) or atom in values for atom in eqn.invars):
            results = eval_eqn(code.jaxpr, eqn, [read(values, atom) for atom in eqn.invars])
            values.update(zip(eqn.outvars, results, strict=True))
    return {var: values[var] for var in code.outputs if var in values}


def typed(values: Sequence[Any], atoms: Sequence[Any]) -> list[jax.Array]:
    """Give Python numbers and weakly typed arrays the types that they have in a scan."""
    return [jnp.asarray(value, atom.aval.dtype) for value, atom in zip(values, atoms, strict=True)]
