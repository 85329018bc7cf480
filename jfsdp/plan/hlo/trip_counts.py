"""Execution counts of the computations of a compiled module, from calls, branches and loop trip counts."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

from jfsdp.plan.hlo.parse import Computation, Instruction, Module


@dataclasses.dataclass(frozen=True, slots=True)
class Execution:
    """The runs of a computation per step, and whether it is inside a loop."""

    computation: Computation
    times: int
    in_loop: bool


def trip_count(loop: Instruction) -> int:
    """Return the trip count of a loop.

    Raises:
      ValueError: if XLA does not state it, because it depends on a value.
    """
    if loop.trip_count is None:
        raise ValueError(f"{loop.name}: XLA does not state how often it runs; use a loop of fixed length")
    return loop.trip_count


def executions(module: Module) -> tuple[Execution, ...]:
    """List the computations that a step runs, callers first, with the number of runs including loop iterations.

    Bodies of fusions and scalar functions of reductions are not listed. Every branch of a conditional counts as run.
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

    Includes loops, calls, all branches of conditionals, and async wrappers, but not the bodies of fusions.
    """
    for execution in executions(module):
        for instruction in execution.computation.instructions:
            yield execution.computation, instruction, execution.times


def runs(instruction: Instruction) -> Iterator[tuple[str, int]]:
    """Yield the computations that an instruction runs, each with its number of runs."""
    match instruction.opcode:
        case "while":
            rounds = trip_count(instruction)
            yield instruction.attribute("body"), rounds
            yield instruction.attribute("condition"), rounds + 1
        case "call" | "async-start" | "conditional" | "call-start":
            for name in instruction.called:
                yield name, 1
