"""How often a step runs each computation of a compiled module: calls, branches, and loops with their trip counts."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator

from jfsdp.plan.hlo.parse import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """How often a step runs a computation, and whether a loop is around it."""

    computation: Computation
    times: int
    in_loop: bool


def trip_count(loop: Instruction) -> int:
    """Return how often a loop's body runs, as XLA states it.

    Raises:
      ValueError: if XLA does not, since a value decides it.
    """
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', loop.attributes)
    if known is None:
        raise ValueError(f"{loop.name}: XLA does not state how often it runs; use a loop of fixed length")
    return int(known[1])


def executions(module: Module) -> tuple[Execution, ...]:
    """List every computation that a step runs, with its number of runs; loops multiplied out, callers before callees.

    Bodies of fusions and the scalar functions of reductions are parts of one instruction and not listed. Of a
    conditional every branch counts as run: which one it will be is not in the text.
    """
    found: dict[str, Execution] = {}

    def visit(computation: Computation, times: int, in_loop: bool) -> None:
        before = found.get(computation.name, Execution(computation, 0, False))
        found[computation.name] = Execution(computation, before.times + times, before.in_loop or in_loop)
        for instruction in computation.instructions:
            for name, rounds in runs(instruction):
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


def runs(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the computations that one instruction runs, each with the number of rounds."""
    match instruction.opcode:
        case "while":
            rounds = trip_count(instruction)
            yield instruction.attribute("body"), rounds
            yield instruction.attribute("condition"), rounds + 1
        case "call" | "async-start" | "conditional" | "call-start":
            for name in instruction.called:
                yield name, 1
