"""How often a step runs each computation of a compiled module: calls, branches, and loops with their trip counts."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Mapping

from jfsdp.plan.hlo.parse import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """How often a step runs a computation, and whether a loop is around it."""

    computation: Computation
    times: int
    in_loop: bool


def trip_count(module: Module, while_instruction: Instruction) -> int:
    """Return how often a loop's body runs: as XLA states it, else derived from the loop's condition.

    Derived means: the condition compares a counter in the loop's state with a constant; the counter starts at a
    constant, and each round adds a constant.

    Raises:
      ValueError: if neither says it.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', while_instruction.attributes)
    if known:
        return int(known[1])
    limit, inclusive, place = _limit(module, while_instruction)
    stated = re.search(r'known_init_step":\{"init":"(-?\d+)","step":"(\d+)"', while_instruction.attributes)
    if stated:
        first, step = int(stated[1]), int(stated[2])
    else:
        first, step = _first(module, while_instruction, place), _step(module, while_instruction, place)
    if first is None or not step or step < 0:
        raise ValueError(
            f"{while_instruction.name}: how often it runs is not known: its counter ends at {limit}, starts at {first} "
            f"and steps by {step} (None: not a constant); use a loop of fixed length"
        )
    return max(0, math.ceil((limit + inclusive - first) / step))


def executions(module: Module) -> tuple[Execution, ...]:
    """List every computation that a step runs, with its number of runs; loops multiplied out, callers before callees.

    Bodies of fusions and the scalar functions of reductions are parts of one instruction and not listed. Of a
    conditional every branch counts as run: which one it will be is not in the text.
    """
    found: dict[str, Execution] = {}

    def visit(computation: Computation, times: int, in_loop: bool) -> None:
        before = found.get(computation.name)
        found[computation.name] = Execution(
            computation, times + (before.times if before else 0), in_loop or bool(before and before.in_loop)
        )
        for instruction in computation.instructions:
            for name, rounds in runs(module, instruction):
                visit(module.computations[name], times * rounds, in_loop or instruction.opcode == "while")

    visit(module.entry, 1, False)
    return tuple(found.values())


def walk(module: Module) -> Iterator[tuple[Computation, Instruction, int]]:
    """Yield every executed instruction with its computation and its number of executions per step.

    Inside loops, calls, conditionals (each branch) and async wrappers, but not inside fusions.
    """
    for execution in executions(module):
        for instruction in execution.computation.instructions:
            yield execution.computation, instruction, execution.times


def runs(module: Module, instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the computations that one instruction runs, each with the number of rounds."""
    match instruction.opcode:
        case "while":
            rounds = trip_count(module, instruction)
            yield instruction.attribute("body"), rounds
            yield instruction.attribute("condition"), rounds + 1
        case "call" | "async-start" | "conditional" | "call-start":
            for name in instruction.called:
                yield name, 1


def _limit(module: Module, loop: Instruction) -> tuple[int, bool, int]:
    """Read the loop's bound, whether it is inclusive, and the place of the counter in the loop's state."""
    condition = module.computations[loop.attribute("condition")]
    computation, compare, outer = condition, condition.root, {}
    if compare.opcode == "fusion":
        computation, outer = module.computations[compare.called[0]], _arguments(module, compare, condition)
        compare = computation.root
    direction = compare.attribute("direction")
    if compare.opcode == "compare" and direction in ("LT", "LE"):
        counter, bound = (_follow(name, computation, outer) for name in compare.operands)
        if counter.opcode == "get-tuple-element" and bound.opcode == "constant":
            return int(bound.arguments), direction == "LE", int(counter.attribute("index"))
    raise ValueError(
        f"{loop.name}: how often it runs is not known: no known_trip_count, and its condition ({condition.name}) is "
        f"not 'counter < constant' but {compare.opcode} {direction}; use a loop of fixed length"
    )


def _arguments(module: Module, fusion: Instruction, computation: Computation) -> dict[str, Instruction]:
    """Map the parameters of a fusion's computation to the instructions given for them."""
    inner = module.computations[fusion.called[0]]
    return {
        instruction.name: computation.by_name[fusion.operands[int(instruction.arguments)]]
        for instruction in inner.instructions
        if instruction.opcode == "parameter"
    }


def _follow(name: str, computation: Computation, outer: Mapping[str, Instruction]) -> Instruction:
    """Look through what keeps a scalar as it is."""
    instruction = computation.by_name[name]
    while instruction.opcode in ("copy", "bitcast", "convert", "reshape", "broadcast"):
        instruction = computation.by_name[instruction.operands[0]]
    return outer.get(instruction.name, instruction)


def _first(module: Module, loop: Instruction, place: int) -> int | None:
    """Read the counter's first value from the state that the loop is given; None if it is not a constant there."""
    caller = next(found for found in module.computations.values() if loop.name in found.by_name)
    state = caller.by_name[loop.operands[0]]
    if state.opcode != "tuple":
        return None
    start = _follow(state.operands[place], caller, {})
    return int(start.arguments) if start.opcode == "constant" else None


def _step(module: Module, loop: Instruction, place: int) -> int | None:
    """Read what each round adds to the counter; None if that is not a constant."""
    body = module.computations[loop.attribute("body")]
    if body.root.opcode != "tuple":
        return None
    computation, add = body, _follow(body.root.operands[place], body, {})
    if add.opcode == "fusion":
        computation = module.computations[add.called[0]]
        add = computation.root
    if add.opcode != "add":
        return None
    values = (_follow(name, computation, {}) for name in add.operands)
    return next((int(value.arguments) for value in values if value.opcode == "constant"), None)
