"""Find gathered weights that a program keeps in memory from a unit's forward to its backward."""

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

# In the names of operations of the backward, from JAX and from program "manual".
_BACKWARD = ("transpose(", f"{SCOPE}.backward")
_WAITS = ("bitcast", "copy", "copy-start", "copy-done", "fusion-done", "async-done")
_PASSES = (*_WAITS, "get-tuple-element", "reshape", "transpose", "convert")
_FUSIONS = ("fusion", "fusion-start", "async-start")


@dataclasses.dataclass(frozen=True)
class KeptWeight:
    """A gathered weight that is kept in memory: its leaf, bytes per device, and source line."""

    leaf: Leaf
    num_bytes: int
    source: str


def find_kept_weights(layout: Layout, module: Module, parts: Sequence[Part]) -> list[KeptWeight]:
    """Find gathered weights of resharded units that live from forward to backward.

    Finds two cases: a loop over layers writes gathered weights into a stack of all layers, or the backward reads the
    result of a gather before it. A prefetched gather is neither.
    """
    resharded = {
        leaf.path: leaf
        for leaf in layout.by_path.values()
        if leaf.dim is not None and layout.num_shards(leaf.stage(leaf.source).axes) > 1
        if layout.policy(leaf.unit).reshard_after_forward is not False
    }
    stacked = [leaf for leaf in resharded.values() if leaf.stacked]
    loops = [instruction for _, instruction, _ in walk(module) if instruction.opcode == "while"]
    found = [kept for loop in loops for kept in _stacks(module, loop, stacked)]
    found += _read_backward(module, resharded, parts)
    return list({kept.leaf.path: kept for kept in found}.values())


def _stacks(module: Module, loop: Instruction, leaves: Sequence[Leaf]) -> Iterator[KeptWeight]:
    """Yield the stacks of gathered weights that a loop writes, one layer per iteration."""
    body = module.computations[loop.attribute("body")]
    remaining = list(leaves)
    for name, shape in zip(body.root.operands, loop.shapes):
        leaf = next((leaf for leaf in remaining if sorted(shape.dims) in map(sorted, _shapes(leaf))), None)
        sizes = {math.prod(shape[leaf.stacked :]) for shape in _shapes(leaf)} if leaf else set()
        if leaf is not None and _comes_from_gather(module, body, name, sizes):
            remaining.remove(leaf)
            yield KeptWeight(leaf, shape.num_bytes, body.by_name[name].source or loop.op_name)


def _shapes(leaf: Leaf) -> tuple[tuple[int, ...], ...]:
    """Return the shapes of a gathered leaf, without and with its padding."""
    return cut_sizes(leaf.shape, leaf.cuts), leaf.cut_shape


def _comes_from_gather(module: Module, body: Computation, name: str, sizes: set[int]) -> bool:
    """Return whether a row of a stack comes from a gather, through arrays of one layer's size.

    Follows casts, transposes and other operations, but not matmuls. Follows the loop's carry too, for weights that were
    gathered one iteration earlier (prefetch).
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
    """Return the body's result for the element of the loop's carry that an instruction reads."""
    if instruction.opcode != "get-tuple-element" or body.by_name[instruction.operands[0]].opcode != "parameter":
        return None
    place = int(instruction.attribute("index"))
    return body.root.operands[place] if place < len(body.root.operands) else None


def _read_backward(module: Module, resharded: Mapping[str, Leaf], parts: Sequence[Part]) -> Iterator[KeptWeight]:
    """Yield the weights that are gathered outside of a backward and read in one."""
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
            yield KeptWeight(leaf, item.parts[place].num_bytes, item.source or item.op_name)


def _readers(computation: Computation, done: Instruction, place: int, num_parts: int) -> Iterator[Instruction]:
    """Yield the instructions that read one array of a gather, through copies and casts."""
    todo = list(computation.users.get(done.name, ()))
    while len(todo) == 1 and todo[0].opcode.endswith(("-done", "-update")):  # a synchronous start is its own done
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
