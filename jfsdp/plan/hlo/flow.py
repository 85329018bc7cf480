"""Dataflow of a compiled module: the step's arguments that each value depends on, through loops.

`jfsdp/jaxprs.py` computes the same for a trace.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from jfsdp.plan.hlo.parse import Computation, Instruction, Module

Mask = Any  # an int, one bit per parameter of the entry; or a tuple of Masks, one per element of a tuple
Place = tuple[Instruction, tuple[int, ...]]  # an instruction, and the index of an element of its result

_COPIES = frozenset({"bitcast", "copy", "copy-start", "optimization-barrier", "opt-barrier", "domain", "async-update"})


def is_collective(instruction: Instruction, kind: str, flow: Flow | None = None) -> bool:
    """Return whether an instruction is a collective of this kind, its start, or its wrapper."""
    if instruction.opcode in (kind, f"{kind}-start"):
        return True
    if instruction.opcode not in ("async-start", "fusion") or flow is None:
        return False
    return any(inner.opcode == kind for inner in flow.called(instruction))


@dataclasses.dataclass(frozen=True, eq=False)
class Flow:
    """The sources and destinations of a module's values."""

    module: Module

    @functools.cached_property
    def by_name(self) -> dict[str, Instruction]:
        return {inst.name: inst for comp in self.module.computations.values() for inst in comp.instructions}

    @functools.cached_property
    def _home(self) -> dict[str, str]:
        return {inst.name: comp.name for comp in self.module.computations.values() for inst in comp.instructions}

    @functools.cached_property
    def _caller(self) -> dict[str, Instruction]:
        return {name: inst for inst in self.by_name.values() for name in inst.called}

    @functools.cached_property
    def _users(self) -> dict[str, list[Instruction]]:
        users: dict[str, list[Instruction]] = {}
        for inst in self.by_name.values():
            for operand in dict.fromkeys(inst.operands):
                users.setdefault(operand, []).append(inst)
        return users

    @functools.cached_property
    def parameters(self) -> dict[int, Instruction]:
        """The entry's parameters by number."""
        return {number(inst): inst for inst in self.module.entry.instructions if inst.opcode == "parameter"}

    @functools.cached_property
    def gathered_bit(self) -> int:
        """The bit of values that passed an all-gather."""
        return 1 << (max(self.parameters, default=0) + 1)

    @functools.cached_property
    def _masks(self) -> dict[str, Mask]:
        masks: dict[str, Mask] = {}
        self._run(self.module.entry, [1 << place for place in sorted(self.parameters)], masks)
        return masks

    def depends_on(self, place: Place) -> int:
        """Return a value's dependencies as bits: the entry's parameters, and the gathered bit."""
        instruction, index = place
        return _join(_element(self._masks.get(instruction.name, 0), index))

    def called(self, instruction: Instruction) -> Iterator[Instruction]:
        """Yield the instructions of the computations that an instruction calls."""
        for name in instruction.called:
            yield from self.module.computations[name].instructions

    def op_name(self, place: Place) -> str:
        """Return the operation name of a value's instruction; for a fusion without one, of its last operation."""
        instruction, index = place
        if instruction.op_name or instruction.opcode != "fusion":
            return instruction.op_name
        body = self.module.computations[instruction.called[0]]
        root = body.root
        if root.opcode == "tuple" and index:
            root = body.by_name[root.operands[index[0]]]
        return root.op_name or next((inst.op_name for inst in reversed(body.instructions) if inst.op_name), "")

    def origin(self, name: str, index: tuple[int, ...] = ()) -> Place:
        """Follow a value back to the instruction that computes it, through tuples, copies and loop carries."""
        seen: set[tuple[str, tuple[int, ...]]] = set()
        inst = self.by_name[name]
        while True:
            back = self._step_back(inst, index, again=(inst.name, index) in seen)
            if back is None:
                return inst, index
            seen.add((inst.name, index))
            inst, index = self.by_name[back[0]], back[1]

    def _step_back(self, inst: Instruction, index: tuple[int, ...], again: bool) -> tuple[str, tuple[int, ...]] | None:
        """Return the value of which this one is a view or a copy.

        `again`: the element of a loop's carry was visited before, so the body does not change it.
        """
        if inst.opcode == "get-tuple-element":
            return inst.operands[0], (tuple_index(inst), *index)
        if inst.opcode == "tuple" and index:
            return inst.operands[index[0]], index[1:]
        if inst.opcode in _COPIES:
            return inst.operands[0], () if inst.opcode == "copy-start" else index
        if inst.opcode.endswith("-done"):
            start = self.by_name[inst.operands[0]]
            has_operands = start.opcode in ("all-gather-start", "reduce-scatter-start", "async-start")
            return start.name, (1, *index) if has_operands else index
        if inst.opcode == "while" and index:
            body = self.module.computations[inst.attribute("body")]
            return (inst.operands[0] if again else body.root.name), index
        if inst.opcode == "parameter" and self._home[inst.name] != self.module.entry.name:
            caller = self._caller.get(self._home[inst.name])
            if caller is not None and caller.opcode == "while":
                return (caller.operands[0] if again else caller.name), index
            if caller is not None and caller.opcode in ("call", "async-start"):
                return caller.operands[number(inst)], index
        return None

    def destination(self, instruction: Instruction, index: tuple[int, ...] = ()) -> Place | None:
        """Follow a value to the first instruction that computes with it, or to the loop that carries it."""
        for _ in range(len(self.by_name)):
            users = self._users.get(instruction.name, [])
            if instruction.opcode != "get-tuple-element" and index:
                users = [user for user in users if user.opcode != "get-tuple-element" or tuple_index(user) == index[0]]
            if not users:
                return None
            user = users[0]
            if user.opcode == "get-tuple-element":
                index = index[1:]
            elif user.opcode == "tuple":
                index = (user.operands.index(instruction.name), *index)
            elif user.opcode == "while" or user.opcode not in _COPIES:
                return user, index if user.opcode == "while" else ()
            instruction = user
        return None

    def _run(self, computation: Computation, arguments: Sequence[Mask], masks: dict[str, Mask]) -> Mask:
        """Evaluate a computation on masks, and add each instruction's mask to `masks`."""
        here: dict[str, Mask] = {}
        result: Mask = 0
        for inst in computation.instructions:
            if inst.opcode == "parameter":
                result = arguments[number(inst)] if number(inst) < len(arguments) else 0
            else:
                result = self._apply(inst, [here.get(name, 0) for name in inst.operands], masks)
            here[inst.name] = result
            masks[inst.name] = _either(masks[inst.name], result) if inst.name in masks else result
        return here[computation.root.name]

    def _apply(self, inst: Instruction, operands: list[Mask], masks: dict[str, Mask]) -> Mask:
        opcode, computations = inst.opcode, self.module.computations
        if opcode == "tuple":
            return tuple(operands)
        if opcode == "get-tuple-element":
            return _element(operands[0], (tuple_index(inst),))
        if opcode in ("bitcast", "copy", "async-update", "all-reduce-done", "copy-done", "collective-permute-done"):
            return operands[0]
        if opcode.endswith("-done"):
            return _element(operands[0], (1,))
        if is_collective(inst, "all-gather", self):
            whole = _one_or_all([_join(operand) | self.gathered_bit for operand in operands])
            return whole if opcode == "all-gather" else (_one_or_all(operands), whole)
        if opcode == "reduce-scatter-start":
            return (_one_or_all(operands), _one_or_all(operands))
        if opcode in ("fusion", "call"):
            return self._run(computations[inst.called[0]], operands, masks)
        if opcode == "async-start":
            return (tuple(operands), self._run(computations[inst.called[0]], operands, masks))
        if opcode == "while":
            return self._loop(computations[inst.attribute("body")], operands[0], masks)
        if opcode in ("all-reduce", "all-reduce-start", "reduce-scatter"):
            return _one_or_all(operands)
        return functools.reduce(lambda mask, operand: mask | _join(operand), operands, 0)

    def _loop(self, body: Computation, carry: Mask, masks: dict[str, Mask]) -> Mask:
        carry = _flat(carry)
        while True:
            after = _flat(_either(carry, self._run(body, [carry], masks)))
            if after == carry:
                return carry
            carry = after


def number(parameter: Instruction) -> int:
    """Return the number of a parameter."""
    return int(parameter.arguments)


def tuple_index(instruction: Instruction) -> int:
    """Return the index of a get-tuple-element."""
    return int(instruction.attribute("index"))


def _element(mask: Mask, index: tuple[int, ...]) -> Mask:
    for place in index:
        if not isinstance(mask, tuple):
            return mask
        mask = mask[place] if place < len(mask) else 0
    return mask


def _one_or_all(masks: list[Mask]) -> Mask:
    """Return the result of a collective: an array, or a tuple if it combines several."""
    return tuple(masks) if len(masks) > 1 else masks[0]


def _join(mask: Mask) -> int:
    return functools.reduce(lambda joined, part: joined | _join(part), mask, 0) if isinstance(mask, tuple) else mask


def _flat(mask: Mask) -> Mask:
    """Join the masks inside each element, so that the iteration over a loop terminates."""
    return tuple(_join(part) for part in mask) if isinstance(mask, tuple) else mask


def _either(one: Mask, other: Mask) -> Mask:
    if isinstance(one, int) and isinstance(other, tuple):
        one, other = other, one
    if isinstance(one, tuple) and isinstance(other, int):
        other = (other,) * len(one)
    if isinstance(one, tuple) and isinstance(other, tuple) and len(one) == len(other):
        return tuple(_either(a, b) for a, b in zip(one, other, strict=True))
    return _join(one) | _join(other)
