"""Gathered weights that a program holds from a unit's forward to its backward, read from where arrays go."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from jfsdp.engine.engine import SCOPE
from jfsdp.engine.movements import GATHER
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf, cut_sizes
from jfsdp.plan.hlo.parse import Computation, Instruction, Module
from jfsdp.plan.hlo.trip_counts import walk
from jfsdp.plan.time.work import is_matmul
from jfsdp.plan.traffic.attribution import Part

# In the names that JAX gives to what a derivative runs backward, and program "manual" to its own.
_BACKWARD = ("transpose(", f"{SCOPE}.backward")
_WAITS = ("bitcast", "copy", "copy-start", "copy-done", "fusion-done", "async-done")
_PASSES = (*_WAITS, "get-tuple-element", "reshape", "transpose", "convert")
_FUSIONS = ("fusion", "fusion-start", "async-start")


@dataclasses.dataclass(frozen=True)
class Held:
    """A gathered weight that is held: its leaf, bytes per device, and the line that made it."""

    leaf: Leaf
    num_bytes: int
    source: str


def find_held(layout: Layout, module: Module, parts: Sequence[Part]) -> list[Held]:
    """Find gathered weights of resharded units that live from forward to backward.

    Two ways are known: a loop over layers writes what it gathers into a stack of all layers, and a gather before the
    backward has a reader in it. A unit that is gathered ahead of its use is neither.
    """
    resharded = {
        leaf.path: leaf
        for leaf in layout.by_path.values()
        if leaf.dim is not None and layout.num_shards(leaf.stage(leaf.source).axes) > 1
        if layout.policy(leaf.unit).reshard_after_forward is not False
    }
    stacked = [leaf for leaf in resharded.values() if leaf.stacked]
    loops = [instruction for _, instruction, _ in walk(module) if instruction.opcode == "while"]
    found = [held for loop in loops for held in _stacks(module, loop, stacked)]
    found += _read_backward(module, resharded, parts)
    return list({held.leaf.path: held for held in found}.values())


def _stacks(module: Module, loop: Instruction, leaves: Sequence[Leaf]) -> Iterator[Held]:
    """Yield the stacks of whole weights that a loop writes, one layer per turn."""
    body = module.computations[loop.attribute("body")]
    remaining = list(leaves)
    for name, shape in zip(body.root.operands, loop.shapes):
        leaf = next((leaf for leaf in remaining if sorted(shape.dims) in map(sorted, _shapes(leaf))), None)
        sizes = {math.prod(shape[leaf.stacked :]) for shape in _shapes(leaf)} if leaf else set()
        if leaf is not None and _comes_from_gather(module, body, name, sizes):
            remaining.remove(leaf)
            yield Held(leaf, shape.num_bytes, body.by_name[name].source or loop.op_name)


def _shapes(leaf: Leaf) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a gathered leaf, without its padding and with it."""
    return cut_sizes(leaf.shape, leaf.cuts), leaf.cut_shape


def _comes_from_gather(module: Module, body: Computation, name: str, sizes: set[int]) -> bool:
    """Follow what is written into a stack back to a gather, through arrays of one layer's size.

    A value computed from weights alone, a cast or a transpose, is followed too; what a matmul made is not. What was
    gathered one turn earlier (pipelining) comes through the loop's state.
    """
    written = body.by_name[name]
    while written.opcode in _WAITS:
        written = body.by_name[written.operands[0]]
    seen, todo = set(), list(written.operands)
    while todo:
        instruction = body.by_name[todo.pop()]
        if instruction.name in seen or not any(shape.num_elements in sizes for shape in instruction.shapes):
            continue
        seen.add(instruction.name)
        if instruction.opcode.startswith(GATHER):
            return True
        carried = _carried(body, instruction)
        if carried:
            todo.append(carried)
        elif instruction.opcode in _PASSES or (instruction.opcode in _FUSIONS and not is_matmul(module, instruction)):
            todo += instruction.operands
    return False


def _carried(body: Computation, instruction: Instruction) -> str | None:
    """Return what a loop's body hands on as the element of its state that an instruction reads."""
    if instruction.opcode != "get-tuple-element" or body.by_name[instruction.operands[0]].opcode != "parameter":
        return None
    place = int(instruction.attribute("index"))
    return body.root.operands[place] if place < len(body.root.operands) else None


def _read_backward(module: Module, resharded: Mapping[str, Leaf], parts: Sequence[Part]) -> Iterator[Held]:
    """Yield what is gathered outside of a backward, and read in one."""
    seen: dict[tuple[str, str], int] = {}
    for part in parts:
        item = part.collective
        place = seen.get((item.computation, item.name), 0)
        seen[item.computation, item.name] = place + 1
        leaf = resharded.get(part.path)
        if leaf is None or item.kind != GATHER or _is_backward(part.op_name):
            continue
        computation = module.computations[item.computation]
        done = computation.instructions[item.done]
        if any(_is_backward(reader.op_name) for reader in _readers(computation, done, place, len(item.parts))):
            yield Held(leaf, item.parts[place].num_bytes, item.source or item.op_name)


def _readers(computation: Computation, done: Instruction, place: int, num_parts: int) -> Iterator[Instruction]:
    """Yield the instructions that take one array of a gather, looking through copies and casts."""
    todo = list(computation.users.get(done.name, ()))
    while len(todo) == 1 and todo[0].opcode.endswith(("-done", "-update")):  # of a start that waits for itself
        todo = list(computation.users.get(todo[0].name, ()))
    if num_parts > 1:
        todo = [reader for reader in todo if reader.attribute("index") == str(place)]
    seen = set()
    while todo:
        reader = todo.pop()
        if reader.name in seen:
            continue
        seen.add(reader.name)
        if reader.opcode in _PASSES:
            todo += computation.users.get(reader.name, ())
        else:
            yield reader


def _is_backward(op_name: str) -> bool:
    return any(name in op_name for name in _BACKWARD)
