"""A traced function as a program: calls of units in order, loops over them, and the root's code between them.

[Note: how both programs see a model]
While the root is traced, every call of a unit is a `jax.jit` with a name that the engine knows. JAX keeps that call
through every transformation of the model (scans, remats, conditions). A call that stays in place gathers where it runs,
which is correct but not prefetched. A call at the top of the trace, or in the body of a scan at the top that takes its
layers one by one, becomes a `Call`, whose gather a schedule can start ahead of time.

[Note: the same program on every process]
On several hosts each process lowers the step separately, and collectives in different orders hang or mix up arrays. So
no order may come from an address or a hash. Items of a program are keys of plain dicts only: JAX sorts the keys of a
dict in a pytree, and items cannot be sorted, so such a dict is an error. Values that go through a scan are lists in the
order of the program; keys in pytrees are names.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax

from jfsdp.compat import core
from jfsdp.engine.unit import Traced, is_inexact
from jfsdp.jaxprs import all_eqns, depends_on, inner_jaxprs, is_literal, scan_counts

Shard = tuple[str, int]  # a parameter's name, and how many layer dims loops have removed


@dataclasses.dataclass(frozen=True, eq=False)
class NamedCall:
    """A unit's call that the engine has traced under a name: its inputs are `flat`, then the shards by name."""

    unit: str
    traced: Traced
    paths: tuple[str, ...]


@dataclasses.dataclass(eq=False)
class Item:
    """A part of a program.

    Attributes:
      inputs, outputs: variables of the block around it.
      is_active, makes_active: which inputs, and outputs, depend on trainable parameters; filled by `mark_active`.
      is_live: which outputs have cotangents; filled by `mark_live`.
    """

    inputs: list[Any]
    outputs: list[Any]
    is_active: list[bool] = dataclasses.field(default_factory=list, init=False)
    makes_active: list[bool] = dataclasses.field(default_factory=list, init=False)
    is_live: list[bool] = dataclasses.field(default_factory=list, init=False)

    @property
    def needs_backward(self) -> bool:
        return any(self.is_live)


@dataclasses.dataclass(eq=False)
class Code(Item):
    """Code of the root: a jaxpr of `inputs`, then `weights`, to `outputs`.

    Attributes:
      weights: by name, the root's weights that its backward gathers again; filled by `part_weights`.
    """

    jaxpr: Any
    weights: dict[str, Any] = dataclasses.field(default_factory=dict, init=False)


@dataclasses.dataclass(eq=False)
class Call(Item):
    """A unit's call on `inputs`, without its weights; `shards` maps each parameter to its number of removed dims."""

    call: NamedCall
    shards: dict[str, int]

    @property
    def unit(self) -> str:
        return self.call.unit


@dataclasses.dataclass(eq=False)
class Loop(Item):
    """A scan over layers: `inputs` are constants, then the carry, then xs; `outputs` the carry, then ys.

    Attributes:
      receives: which inputs have cotangents; filled by `mark_live`.
    """

    length: int
    num_consts: int
    num_carry: int
    body: Block

    receives: list[bool] = dataclasses.field(default_factory=list, init=False)

    @property
    def calls(self) -> list[Call]:
        return [item for item in self.body.items if isinstance(item, Call)]

    @property
    def live_calls(self) -> list[Call]:
        return [call for call in self.calls if call.needs_backward]

    def split(self, values: Sequence[Any]) -> tuple[list[Any], list[Any], list[Any]]:
        """Split values of the inputs into constants, carry and xs."""
        ends = self.num_consts, self.num_consts + self.num_carry
        return list(values[: ends[0]]), list(values[ends[0] : ends[1]]), list(values[ends[1] :])


@dataclasses.dataclass(eq=False)
class Block:
    """A sequence of items with its own variables; `consts` are values of some of them."""

    inputs: list[Any]
    items: list[Item]
    outputs: list[Any]
    consts: dict[Any, Any]

    def calls(self) -> Iterator[tuple[Call, Loop | None, int]]:
        """Yield every call that a run of the block makes, in order, with its loop and iteration."""
        for item in self.items:
            if isinstance(item, Call):
                yield item, None, 0
            elif isinstance(item, Loop):
                for iteration in range(item.length):
                    for call in item.calls:
                        yield call, item, iteration


def read_program(closed: Any, shards: Mapping[int, str], calls: Mapping[str, NamedCall]) -> tuple[Block, list[str]]:
    """Read a trace as a program.

    Args:
      closed: the traced root, without constants.
      shards: by index of an input, the name of the parameter at rest that it is.
      calls: the calls in it, by the name of their `jit`.

    Returns:
      The program, and the units that are called outside the schedule, which gather where they are called.
    """
    closed = inlined(closed, calls)
    jaxpr = closed.jaxpr
    known = {jaxpr.invars[place]: (path, 0) for place, path in shards.items()}
    block = _read_block(closed, known, calls, depth=0)
    return block, sorted(set(_called_in_place(block, calls)))


def named(eqn: Any, calls: Mapping[str, NamedCall]) -> NamedCall | None:
    """Return the call of a unit that an equation is, if no transformation of JAX has changed it."""
    call = calls.get(eqn.params.get("name", "")) if eqn.primitive.name in ("jit", "pjit") else None
    if call is None:
        return None
    wanted = [var.aval for var in call.traced.jaxpr.outvars]
    is_same = [a.shape == b.aval.shape for a, b in zip(wanted, eqn.outvars, strict=False)]
    num_in = call.traced.num_flat + len(call.paths)
    return call if len(wanted) == len(eqn.outvars) and len(eqn.invars) == num_in and all(is_same) else None


def inlined(closed: Any, calls: Mapping[str, NamedCall]) -> Any:
    """Inline every `jit` that contains calls of units."""

    def is_around(eqn: Any) -> bool:
        inside = (inner for jaxpr in inner_jaxprs(eqn) for inner in all_eqns(jaxpr))
        return is_jit(eqn) and named(eqn, calls) is None and any(named(inner, calls) for inner in inside)

    return inline_jits(closed, is_around) if any(map(is_around, closed.jaxpr.eqns)) else closed


def is_jit(eqn: Any) -> bool:
    """Tell whether an equation is a call of a compiled function."""
    return eqn.primitive.name in ("jit", "pjit")


def inline_jits(closed: Any, selects: Callable[[Any], bool]) -> Any:
    """Return a trace with the `jit`s inlined for which `selects` is true, also nested ones."""

    def run(closed: Any, inputs: Sequence[Any]) -> list[Any]:
        def run_eqn(eqn: Any, values: list[Any]) -> list[Any]:
            return run(eqn.params["jaxpr"], values) if selects(eqn) else eval_eqn(closed.jaxpr, eqn, values)

        return run_eqns(closed.jaxpr, closed.consts, inputs, run_eqn)

    shapes = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in closed.jaxpr.invars]
    return jax.make_jaxpr(lambda *inputs: run(closed, inputs))(*shapes)


def run_eqns(
    jaxpr: Any, consts: Sequence[Any], inputs: Sequence[Any], run: Callable[[Any, list[Any]], list[Any]]
) -> list[Any]:
    """Run a jaxpr equation by equation: `run(equation, values)` returns the outputs of each."""
    env: dict[Any, Any] = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*consts, *inputs], strict=True))
    for eqn in jaxpr.eqns:
        env.update(zip(eqn.outvars, run(eqn, [read(env, atom) for atom in eqn.invars]), strict=True))
    return [read(env, atom) for atom in jaxpr.outvars]


def eval_eqn(jaxpr: Any, eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Run one equation of a jaxpr as a separate program, which keeps its source information."""
    given = {atom: value for atom, value in zip(eqn.invars, values, strict=True) if not is_literal(atom)}
    return core.eval_jaxpr(only(jaxpr, [eqn], given, eqn.outvars), (), *given.values())


def read(env: Mapping[Any, Any], atom: Any) -> Any:
    """Return the value of a variable, or of a literal."""
    return atom.val if is_literal(atom) else env[atom]


def only(jaxpr: Any, eqns: Sequence[Any], atoms: Iterable[Any], outvars: Sequence[Any]) -> Any:
    """Return a jaxpr of the given equations, from the variables among `atoms` to `outvars`."""
    invars = list(dict.fromkeys(atom for atom in atoms if not is_literal(atom)))
    return jaxpr.replace(constvars=[], invars=invars, eqns=list(eqns), outvars=list(outvars))


def _read_block(closed: Any, known: Mapping[Any, Shard], calls: Mapping[str, NamedCall], depth: int) -> Block:
    jaxpr = closed.jaxpr
    # Other equations stay in this list until they are grouped into Code.
    items = [_read_call(eqn, known, calls) or read_loop(eqn, known, calls, depth) or eqn for eqn in jaxpr.eqns]
    used = {atom for atom in jaxpr.outvars if not is_literal(atom)}
    grouped: list[Item] = []
    pending: list[Any] = []

    def close() -> None:
        if pending:
            code = _make_code(jaxpr, pending[::-1], used)
            pending.clear()
            if code.jaxpr.eqns:
                grouped.append(code)
                used.update(code.inputs)

    for item in reversed(items):
        if not isinstance(item, Item):
            pending.append(item)
            continue
        close()
        grouped.append(item)
        used.update(atom for atom in item.inputs if not is_literal(atom))
    close()
    consts = dict(zip(jaxpr.constvars, closed.consts, strict=True))
    return Block(list(jaxpr.invars), grouped[::-1], list(jaxpr.outvars), consts)


def _make_code(jaxpr: Any, eqns: Sequence[Any], used: set[Any]) -> Code:
    """Make one item of equations, reduced to the outputs that later items use."""
    made = {var for eqn in eqns for var in eqn.outvars}
    outputs = [var for eqn in eqns for var in eqn.outvars if var in used]
    needed, kept = set(outputs), []
    for eqn in reversed(eqns):
        if needed.intersection(eqn.outvars) or eqn.effects:
            kept.append(eqn)
            needed.update(atom for atom in eqn.invars if not is_literal(atom))
    inputs = list(dict.fromkeys(atom for eqn in kept[::-1] for atom in eqn.invars if not is_literal(atom)))
    inputs = [var for var in inputs if var not in made]
    return Code(inputs, outputs, only(jaxpr, kept[::-1], inputs, outputs))


def _read_call(eqn: Any, known: Mapping[Any, Shard], calls: Mapping[str, NamedCall]) -> Call | None:
    call = named(eqn, calls)
    if call is None:
        return None
    flat, weights = eqn.invars[: call.traced.num_flat], eqn.invars[call.traced.num_flat :]
    shards = {}
    for path, atom in zip(call.paths, weights, strict=True):
        name, sliced = (None, 0) if is_literal(atom) else known.get(atom, (None, 0))
        if name != path:
            return None
        shards[path] = sliced
    return Call(list(flat), list(eqn.outvars), call, shards)


def read_loop(eqn: Any, known: Mapping[Any, Shard], calls: Mapping[str, NamedCall], depth: int) -> Loop | None:
    if eqn.primitive.name != "scan" or depth or eqn.params["reverse"] or not eqn.params["length"]:
        return None
    closed = inlined(eqn.params["jaxpr"], calls)
    if not any(named(inner, calls) for inner in closed.jaxpr.eqns):
        return None
    num_consts, num_carry = scan_counts(eqn)
    inside = {}
    for place, (outer, inner) in enumerate(zip(eqn.invars, closed.jaxpr.invars, strict=True)):
        if not is_literal(outer) and outer in known and not num_consts <= place < num_consts + num_carry:
            path, sliced = known[outer]
            inside[inner] = (path, sliced + (place >= num_consts))
    body = _read_block(closed, inside, calls, depth + 1)
    if not any(isinstance(item, Call) for item in body.items):
        return None
    return Loop(list(eqn.invars), list(eqn.outvars), eqn.params["length"], num_consts, num_carry, body)


def _called_in_place(block: Block, calls: Mapping[str, NamedCall]) -> Iterator[str]:
    def within(jaxpr: Any) -> Iterator[str]:
        names = (str(eqn.params.get("name", "")) for eqn in all_eqns(jaxpr))  # of calls, also transformed ones
        return (calls[name].unit for name in names if name in calls)

    for item in block.items:
        if isinstance(item, Code):
            yield from within(item.jaxpr)
        elif isinstance(item, Call):
            yield from within(item.call.traced.jaxpr)
        elif isinstance(item, Loop):
            yield from _called_in_place(item.body, calls)


def part_weights(block: Block, weights: Mapping[str, Any]) -> None:
    """Separate the root's weights, by name, from the other inputs of the code that reads them."""
    for item in block.items:
        if isinstance(item, Code):
            item.weights = {path: var for path, var in sorted(weights.items()) if var in item.inputs}
            variables = set(item.weights.values())
            item.inputs = [var for var in item.inputs if var not in variables]
            item.jaxpr = item.jaxpr.replace(invars=[*item.inputs, *item.weights.values()])


def mark_active(block: Block, active: set[Any], is_trained: Callable[[str], bool]) -> set[Any]:
    """Fill `is_active` and `makes_active`: values that depend on trainable parameters and may have a derivative.

    Args:
      active: the block's active inputs.
      is_trained: tells whether a parameter is trainable, by name.

    Returns:
      All active variables of the block.
    """
    active = set(active)
    for item in block.items:
        item.is_active = [_is_in(atom, active) and is_inexact(atom.aval) for atom in item.inputs]
        if isinstance(item, Loop):
            outs = _mark_loop_active(item, is_trained)
        elif isinstance(item, Call):
            weights = [is_trained(path) for path in item.call.paths]
            outs = depends_on(item.call.traced.jaxpr, [*item.is_active, *weights])
        else:
            assert isinstance(item, Code)
            weights = [is_trained(path) for path in item.weights]
            outs = depends_on(item.jaxpr, [*item.is_active, *weights])
        item.makes_active = [out and is_inexact(var.aval) for var, out in zip(item.outputs, outs, strict=True)]
        active.update(var for var, mark in zip(item.outputs, item.makes_active, strict=True) if mark)
    return active


def _mark_loop_active(loop: Loop, is_trained: Callable[[str], bool]) -> list[bool]:
    """Follow active values through the carry to a fixed point."""
    consts, carry, xs = loop.split(loop.is_active)
    while True:
        loop.is_active = [*consts, *carry, *xs]
        inside = {var for var, mark in zip(loop.body.inputs, loop.is_active, strict=True) if mark}
        inside = mark_active(loop.body, inside, is_trained)
        outs = [_is_in(atom, inside) for atom in loop.body.outputs]
        new = [old or out for old, out in zip(carry, outs, strict=False)]
        if new == carry:
            return outs
        carry = new


def mark_live(block: Block, live: set[Any]) -> set[Any]:
    """Fill `is_live`: which outputs of each item have cotangents, given those of the block's outputs.

    Returns:
      All variables of the block that have cotangents.
    """
    live = set(live)
    for item in reversed(block.items):
        item.is_live = [var in live and mark for var, mark in zip(item.outputs, item.makes_active, strict=True)]
        if not item.needs_backward:
            continue
        reaches = _mark_loop_live(item) if isinstance(item, Loop) else item.is_active
        live.update(atom for atom, mark in zip(item.inputs, reaches, strict=True) if mark and not is_literal(atom))
    return live


def _mark_loop_live(loop: Loop) -> list[bool]:
    """Follow cotangents through the carry to a fixed point; return which inputs have them."""
    carry, ys = loop.is_live[: loop.num_carry], loop.is_live[loop.num_carry :]
    while True:
        loop.is_live = [*carry, *ys]
        pairs = zip(loop.body.outputs, loop.is_live, strict=True)
        live = mark_live(loop.body, {atom for atom, mark in pairs if mark and not is_literal(atom)})
        inputs = [var in live and mark for var, mark in zip(loop.body.inputs, loop.is_active, strict=True)]
        new = [old or now for old, now in zip(carry, loop.split(inputs)[1], strict=True)]
        if new == carry:
            loop.receives = inputs
            return inputs
        carry = new


def _is_in(atom: Any, found: set[Any]) -> bool:
    return not is_literal(atom) and atom in found
