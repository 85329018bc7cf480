"""Check the slices of stacks in loops: XLA's compiled offsets against the program's indices.

XLA:GPU compiles a slice that moves with its loop into a copy, annotated with the byte offset of the first iteration and
the stride between iterations (`dynamic_slice_config`). The GPU uses the annotation, not the index. They differ if XLA
is wrong: in jaxlib 0.10.2 the backward reads offloaded activations in the order of the forward, not in reverse
(openxla/xla#46231).
"""

from __future__ import annotations

import dataclasses
import json
import operator
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from jfsdp.plan.hlo.flow import number, tuple_index
from jfsdp.plan.hlo.parse import Instruction, Module, Shape
from jfsdp.plan.hlo.trip_counts import trip_count

_COMPUTE: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "clamp": lambda low, value, high: min(max(value, low), high),
    "select": lambda chosen, one, other: one if chosen else other,
    **dict.fromkeys(("convert", "copy", "bitcast", "reshape"), lambda value: value),
}


@dataclasses.dataclass(frozen=True)
class WrongSlice:
    """A slice with another offset on the GPU than in the program.

    Attributes:
      instruction: the slice, or the update of one.
      stack: the shape of the array that is sliced.
      requested: the index along the sliced dim in the first two iterations.
      bytes_taken: the annotated byte offsets in the same iterations.
    """

    instruction: Instruction
    stack: Shape
    requested: tuple[int, int]
    bytes_taken: tuple[int, int]


def find_wrong_slices(module: Module) -> Iterator[WrongSlice]:
    """Yield the annotated slices of loops whose offset or direction differs from their index.

    Compares two iterations, along one dim, of indices that follow from the loop's counter and constants. Loops with one
    iteration are skipped, such as a loop over two layers that XLA unrolled.
    """
    loops = [inst for computation in module.computations.values() for inst in computation.instructions]
    for loop in loops:
        counter = re.search(r'known_induction_variable":\{"tuple_index":"(\d+)"', loop.attributes)
        steps = re.search(r'known_init_step":\{"init":"(-?\d+)","step":"(-?\d+)"', loop.attributes)
        if loop.opcode == "while" and counter and steps and trip_count(loop) > 1:
            place, first, step = int(counter[1]), int(steps[1]), int(steps[2])
            yield from _compare(*(_Scope(module, loop.attribute("body"), [{place: first + i * step}]) for i in (0, 1)))


class _Scope:
    """Evaluates the scalars of a computation in one iteration of a loop, from the loop's counter."""

    def __init__(self, module: Module, name: str, arguments: Sequence[Any]):
        self._module, self.computation, self._arguments = module, module.computations[name], arguments
        self._known: dict[str, Any] = {}

    def value(self, name: str) -> Any:
        """Return an integer or a boolean; None if it does not follow from the counter and constants."""
        if name not in self._known:
            self._known[name] = self._evaluate(self.computation.by_name[name])
        return self._known[name]

    def inside(self, call: Instruction) -> _Scope:
        """Return the scope of the computation that an instruction calls."""
        return _Scope(self._module, call.called[0], [self.value(name) for name in call.operands])

    def _evaluate(self, inst: Instruction) -> Any:
        if inst.opcode == "parameter":
            return self._arguments[number(inst)]
        if len(inst.shapes) != 1 or inst.shapes[0].dims:
            return None
        if inst.opcode == "constant":
            return int(inst.arguments) if re.fullmatch(r"-?\d+", inst.arguments) else inst.arguments == "true"
        if inst.opcode in ("fusion", "call"):
            inner = self.inside(inst)
            return inner.value(inner.computation.root.name)
        values = [self.value(name) for name in inst.operands]
        if inst.opcode == "get-tuple-element":
            return values[0].get(tuple_index(inst)) if values[0] else None
        direction = inst.attribute("direction").lower()  # of a compare: LT, GE, ...
        compute = getattr(operator, direction) if direction else _COMPUTE.get(inst.opcode)
        return compute(*values) if compute and None not in values else None


def _compare(first: _Scope, second: _Scope) -> Iterator[WrongSlice]:
    for inst in first.computation.instructions:
        if inst.opcode in ("fusion", "fusion-start", "call", "async-start"):
            yield from _compare(first.inside(inst), second.inside(inst))
        elif inst.opcode in ("dynamic-slice", "dynamic-update-slice") and (stated := _annotation(inst)):
            indices = inst.operands[1:] if inst.opcode == "dynamic-slice" else inst.operands[2:]
            moving = [pair for name in indices if (pair := (first.value(name), second.value(name))) != (0, 0)]
            if len(moving) == 1 and None not in moving[0] and not _agree(moving[0], stated):
                stack = first.computation.by_name[inst.operands[0]].shapes[0]
                yield WrongSlice(inst, stack, moving[0], (stated[0], sum(stated)))


def _agree(requested: tuple[int, int], stated: tuple[int, int]) -> bool:
    """Return whether the byte offsets are the requested indices times one positive number of bytes."""
    (index, after), (offset, stride) = requested, stated
    step = after - index
    return offset * step == stride * index and (stride > 0) == (step > 0) and (stride < 0) == (step < 0)


def _annotation(inst: Instruction) -> tuple[int, int] | None:
    """Return the byte offset and the stride per iteration of the innermost loop; None if XLA does not state them."""
    found = re.search(r'"dynamic_slice_config":(\{(?:[^{}]|\{[^{}]*\})*\})', inst.attributes)
    config = json.loads(found[1]) if found else {}
    # JAX 0.12 has the pair below "linear", and zeros where 0.10 has it.
    if config.get("loop_index") != "0" or config.keys() - {"loop_index", "byte_offset", "byte_stride", "linear"}:
        return None
    linear = config.get("linear", config)
    return int(linear["byte_offset"]), int(linear["byte_stride"])
