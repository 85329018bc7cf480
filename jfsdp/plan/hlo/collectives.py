"""List the collectives of a scheduled program: shapes, device groups, counts, and positions in the schedule."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping

import numpy as np

from jfsdp.engine.movements import GATHER, REDUCE, SCATTER, wire_bytes
from jfsdp.layout.mesh import outer_first
from jfsdp.plan.hlo.device_groups import read_group
from jfsdp.plan.hlo.parse import Computation, Instruction, Module, Shape
from jfsdp.plan.hlo.trip_counts import Execution, executions

PERMUTE = "collective-permute"
KINDS = (GATHER, SCATTER, REDUCE, "all-to-all", "ragged-all-to-all", PERMUTE, "collective-broadcast")

SCALARS_BYTES = 1024  # per microbatch: the loss, its weight, norms and counters, a few bytes each


@dataclasses.dataclass(frozen=True, eq=False)
class Collective:
    """One collective of a step.

    Attributes:
      kind: one of KINDS.
      name: of the instruction; for one of several inside an async wrapper, wrapper/instruction.
      parts: the full (gathered or unreduced) shape of every combined element.
      dtype: element type of the largest part.
      group: device ids of the first group.
      count: executions per step.
      computation: the computation whose schedule contains it.
      start, done: its positions in that schedule; equal if it is synchronous, so that nothing overlaps with it.
      in_loop: whether it is in the body of a loop.
      op_name, source: as in `Instruction`.
    """

    kind: str
    name: str
    parts: tuple[Shape, ...]
    dtype: str
    group: tuple[int, ...]
    count: int
    computation: str
    start: int
    done: int
    in_loop: bool
    op_name: str = ""
    source: str = ""

    @property
    def group_size(self) -> int:
        return len(self.group)

    @functools.cached_property
    def wire_by_dtype(self) -> Mapping[str, float]:
        """Bytes sent per device and execution, by element type."""
        sent: dict[str, float] = {}
        for part in self.parts:
            sent[part.dtype] = sent.get(part.dtype, 0.0) + wire_bytes(self.kind, part.num_bytes, self.group_size)
        return sent

    @functools.cached_property
    def wire_bytes(self) -> float:
        """Bytes sent per device and execution."""
        return sum(self.wire_by_dtype.values())

    @property
    def total_bytes(self) -> float:
        """Sent per device and step."""
        return self.count * self.wire_bytes

    @property
    def num_bytes(self) -> int:
        """Bytes of the full value: after the gather, or before the reduction."""
        return sum(part.num_bytes for part in self.parts)


def find_collectives(module: Module, num_devices: int, mesh_sizes: Mapping[str, int] | None = None) -> list[Collective]:
    """List the collectives that a step executes, in execution order. Counts include the iterations of loops.

    Finds synchronous collectives, `-start` and `-done` pairs, and collectives inside an `async-start` or a fusion
    (small all-reduces). A `-start` with `is_sync` counts as synchronous. Point-to-point send and recv are not listed.

    Args:
      num_devices: size of the group of a collective without groups.
      mesh_sizes: of the program's mesh. Groups then number devices from the outermost axis to the innermost, as on
        hosts. None: the program's numbers, which differ only with axis `pipe`.

    Raises:
      ValueError: for groups in an unknown form, and for a loop of unknown length.
    """
    found: list[Collective] = []
    wrapped: set[str] = set()
    places = np.argsort(outer_first(np.arange(num_devices), mesh_sizes)) if mesh_sizes else np.arange(num_devices)
    for execution in executions(module):
        if execution.computation.name in wrapped:
            continue
        for instruction in execution.computation.instructions:
            if _is_wrapper(instruction):
                wrapped.update(instruction.called)
            for place, inner in _inside(module, execution.computation, instruction):
                item = _collective(module, execution, instruction, place, inner, num_devices)
                found.append(dataclasses.replace(item, group=tuple(places[list(item.group)].tolist())))
    return found


def collective_kind(instruction: Instruction) -> str | None:
    """Return the kind of a synchronous collective or a start; None for other instructions."""
    kind = instruction.opcode.removesuffix("-start")
    return kind if kind in KINDS else None


def _is_wrapper(instruction: Instruction) -> bool:
    return instruction.opcode in ("async-start", "call-start", "fusion", "fusion-start")


def _inside(
    module: Module, computation: Computation, instruction: Instruction
) -> Iterator[tuple[Computation, Instruction]]:
    """Yield the instruction if it is a collective, or those that it wraps, with the computation of their operands."""
    if collective_kind(instruction):
        yield computation, instruction
    elif _is_wrapper(instruction):
        for name in instruction.called:
            inner = module.computations[name]
            for wrapped in inner.instructions:
                yield from _inside(module, inner, wrapped)


def _collective(
    module: Module,
    execution: Execution,
    outer: Instruction,
    place: Computation,
    instruction: Instruction,
    num_devices: int,
) -> Collective:
    kind = collective_kind(instruction)
    assert kind is not None
    group = read_group(instruction.attributes.partition("metadata={")[0], num_devices)
    is_single = outer is instruction or sum(1 for found in place.instructions if collective_kind(found)) == 1
    parts = _parts(module, kind, place, instruction)
    return Collective(
        kind=kind,
        name=outer.name if is_single else f"{outer.name}/{instruction.name}",
        parts=parts,
        dtype=max(parts, key=lambda part: part.num_bytes).dtype,
        group=group,
        count=execution.times,
        computation=execution.computation.name,
        start=outer.index,
        done=find_done(execution.computation, outer),
        in_loop=execution.in_loop,
        op_name=instruction.op_name or outer.op_name,
        source=instruction.source or outer.source,
    )


def _parts(module: Module, kind: str, computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """Return the full shapes: the results of a gather, the operands of other collectives.

    The type of a start lists its operands, then its results (and sometimes scratch). The type of a synchronous
    collective lists only the results. The start of an all-reduce lists only the results in JAX 0.10, both in 0.12.
    """
    operands = computation.operand_shapes(instruction)
    if kind != "all-gather":
        return _concatenated(module, computation, instruction) or operands
    num = len(operands)
    return instruction.shapes[num : 2 * num] if instruction.opcode.endswith("-start") else instruction.shapes[:num]


def _concatenated(module: Module, computation: Computation, instruction: Instruction) -> tuple[Shape, ...]:
    """Return the arrays that XLA concatenated to reduce them as one; empty if it did not."""
    source = computation.by_name[instruction.operands[0]] if len(instruction.operands) == 1 else None
    if source is not None and source.opcode == "fusion":
        computation = module.computations[source.called[0]]
        source = computation.root
    is_flat = source is not None and source.opcode == "concatenate" and len(source.shapes[0].dims) == 1
    return computation.operand_shapes(source) if is_flat and source is not None else ()


def find_done(computation: Computation, start: Instruction) -> int:
    """Return the index of the done of a start; the start's index if it is synchronous or has no done."""
    if not start.opcode.endswith("-start") or re.search(r'"is_sync":\s*true', start.attributes):
        return start.index
    seen = start
    while True:
        users = computation.users.get(seen.name, ())
        done = next((user for user in users if user.opcode.endswith("-done")), None)
        update = next((user for user in users if user.opcode.endswith("-update")), None)
        if done or not update:
            return done.index if done else start.index
        seen = update
