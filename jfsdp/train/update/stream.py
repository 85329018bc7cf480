"""Updates of states that are partly in host memory, a few parameters at a time.

[Note: streaming]
XLA's scheduler begins a copy from the host as early as its operands allow. The copies of an optimizer's state depend on
no other operation, so all of it was on the device at once: on an H200, offloading did not reduce peak memory
(docs/log.md, 2026-11-26). So the update is evaluated parameter by parameter, and the copies of a parameter wait for the
update of the parameter WINDOW positions earlier. Then copies in, compute and copies out overlap, and the device has the
states of about WINDOW parameters at a time.

The user's optimizer is one function of all parameters. Its trace shows which operations each output needs. Operations
that several parameters share (a norm, a counter) are evaluated for the first of them, with all their inputs.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jfsdp.engine.driver.program import eval_eqn, inline_jits, is_jit, read
from jfsdp.engine.engine import is_on_host, to_device
from jfsdp.jaxprs import is_literal
from jfsdp.train.state import TrainState, by_array

WINDOW = 2


def stream(update: Callable[[TrainState], TrainState], state: TrainState, begin: jax.Array | None) -> TrainState:
    """Return `update(state)`, inside a `jit`, with each array in the memory of its predecessor.

    If no array is in host memory, this calls `update`.

    Cost:    a copy from the host and one back for each offloaded array that the update reads.
    Memory:  on the device, the offloaded arrays of about WINDOW parameters at a time.

    Args:
      update: receives all arrays on the device, and returns a state of the same structure.
      begin: a device array that must be computed before the first copy begins; None: do not wait. For GPUs that are
        only described, XLA cannot compile the dependency (JAX 0.11, 0.12): it would copy from host to host.
    """
    old, tree = jax.tree.flatten(state)
    if not any(map(is_on_host, old)):
        return update(state)
    shapes = tree.unflatten([jax.ShapeDtypeStruct(x.shape, x.dtype) for x in old])
    closed = inline_jits(jax.make_jaxpr(update)(shapes), is_jit)  # optax compiles sums over all parameters
    reader, owners = _Reader(closed, old, begin), jax.tree.leaves(_owners(state))
    new: list[Any] = [None] * len(old)
    for owner in sorted(set(owners), key=lambda owner: (not owner, owners.index(owner))):  # without owner: last
        indices = [i for i, other in enumerate(owners) if other == owner]
        values = reader.read([closed.jaxpr.outvars[i] for i in indices])
        for i, value in zip(indices, values, strict=True):
            new[i] = value if value is old[i] else _like_memory(old[i], value)
    return tree.unflatten(new)


def _like_memory(old: jax.Array, new: jax.Array) -> jax.Array:
    return jax.device_put(new, jax.memory.Space.Host) if is_on_host(old) else new


def _owners(state: TrainState) -> TrainState:
    """Return the parameter that each array of a state belongs to ("" for none), as a state."""
    return by_array(state, "", lambda leaf, _: leaf.path, lambda role: role.leaf or "")


class _Reader:
    """Evaluates outputs of a trace on demand: only the operations that they need, and each once."""

    def __init__(self, closed: Any, inputs: list[jax.Array], begin: jax.Array | None):
        self._jaxpr = closed.jaxpr
        self._inputs = dict(zip(closed.jaxpr.invars, inputs, strict=True))
        self._values = dict(zip(closed.jaxpr.constvars, closed.consts, strict=True))
        self._made_by = {var: i for i, eqn in enumerate(closed.jaxpr.eqns) for var in eqn.outvars}
        self._waits, self._finished = begin is not None, collections.deque([begin] * WINDOW, maxlen=WINDOW)

    def read(self, outvars: list[Any]) -> list[Any]:
        """Return the values of outputs; an input that is returned unchanged stays in its memory."""
        for i in self._needed(outvars):
            eqn = self._jaxpr.eqns[i]
            given = [None if is_literal(atom) else self._read(atom) for atom in eqn.invars]
            values = eval_eqn(self._jaxpr, eqn, given)
            self._values.update(zip(eqn.outvars, values, strict=True))
        found = [self._inputs[var] if var in self._inputs else read(self._values, var) for var in outvars]
        if made := [x for x, var in zip(found, outvars, strict=True) if var in self._made_by]:
            self._finished.append(max(made, key=lambda x: x.size))
        return found

    def _needed(self, outvars: Iterable[Any]) -> list[int]:
        """Return the indices, in order, of the operations that outputs need and that were not evaluated yet."""
        found: set[int] = set()
        waiting = list(outvars)
        while waiting:
            var = waiting.pop()
            if is_literal(var) or var in self._values or var not in self._made_by or self._made_by[var] in found:
                continue
            found.add(self._made_by[var])
            waiting += self._jaxpr.eqns[self._made_by[var]].invars
        return sorted(found)

    def _read(self, var: Any) -> Any:
        if var not in self._values:
            value = self._inputs[var]
            if is_on_host(value) and self._waits:
                value, _ = jax.lax.optimization_barrier((value, self._finished[0]))
            self._values[var] = to_device(value)
        return self._values[var]
