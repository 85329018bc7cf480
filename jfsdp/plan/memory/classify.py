"""Classify every buffer that is live at peak memory, and label it with the user's parameter or source line.

[Note: classification of buffers]
The first rule that applies decides the category:

  arguments        the argument's name: `state.params[...]`, `batch[...]`;
  dataflow         a value that depends only on parameters is a weight: gathered if it passed an all-gather, else a copy
                   of shards (a cast, another order of dims);
  engine scopes    `jfsdp.reduce.<unit>` and others in the operation's name;
  consumers        a value that is reduced over devices is a gradient, and so are the zeros it is added to;
  shapes           a dim of the vocabulary size: logits; the shape of a leaf's accumulator: a gradient;
  time             a value that the forward writes and the backward reads is a saved activation;
  model scopes     other values of the forward and backward are needed by the current computation;
  pipeline ticks   other values in the scope of a tick are activations for another stage or for the backward;
  slices           other slices in the backward are a layer's saved activations.

If no rule applies, the buffer is unattributed.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import pathlib
from collections.abc import Mapping, Sequence

from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf, cut_sizes
from jfsdp.layout.units import ROOT
from jfsdp.plan.hlo.flow import Flow, Place, is_collective
from jfsdp.plan.hlo.op_names import find_argument, find_scopes
from jfsdp.plan.hlo.parse import Instruction
from jfsdp.plan.memory.buffer_assignment import NEVER, LiveRanges, Value
from jfsdp.plan.time.work import is_matmul

PARTS = {
    "parameters": "master parameters at rest",
    "work": "low-precision copies of parameters at rest",
    "optimizer": "the optimizer's arrays that belong to a parameter",
    "copies": "copies of shards that XLA makes: cast for communication, or with dims in another order",
    "gathered": "weights as the units use them: results of all-gathers, and values computed only from weights",
    "gradients": "gradients of a unit being reduced, and the accumulators",
    "activations": "saved by the forward for the backward",
    "logits": "scores over the vocabulary, and their gradients",
    "attention": "made inside attention and not saved, with cuDNN's workspace",
    "compute": "other temporaries of the forward and the backward",
    "workspace": "scratch memory of library calls",
    "update": "made while clipping and updating",
    "batch": "the step's inputs",
    "state": "counters, random keys, the model's other state, constants",
    "unattributed": "the remainder: peak_bytes less all others",
}


@dataclasses.dataclass(frozen=True)
class Buffer:
    """One buffer that is live at the peak.

    Attributes:
      name: the argument's or leaf's path (`layers.mlp.up_proj.kernel`) if known, else the operation and source line.
      num_bytes: its bytes. Bytes shared by several values count once.
      part: one of `PARTS`.
    """

    name: str
    num_bytes: int
    part: str


_PACKAGE = f"{pathlib.Path(__file__).parents[2]}/"
_SCOPE_PARTS = {"reduce": "gradients", "update": "update"}


def _scope(op_name: str) -> tuple[str, str]:
    """Return the outermost of the engine's scopes as (verb, unit), or two empty strings."""
    return next(iter(find_scopes(op_name)), ("", ""))


def guess_vocab(layout: Layout) -> int | None:
    """Guess the vocabulary size: the longest dim of the root unit's matrices, if it is more than twice the other."""
    matrices = [leaf.shape for leaf in layout.leaves if leaf.unit == ROOT and len(leaf.shape) == 2]
    longest = max(matrices, key=max, default=(0, 0))
    return max(longest) if max(longest) > 2 * min(longest) else None


def _squeezed(dims: Sequence[int]) -> tuple[int, ...]:
    return tuple(dim for dim in dims if dim != 1)


def _unordered(dims: Sequence[int]) -> tuple[int, ...]:
    """Return the sorted dims; XLA transposes gradients and their accumulators."""
    return tuple(sorted(_squeezed(dims)))


@dataclasses.dataclass(frozen=True, eq=False)
class Classifier:
    """Assigns each value to a category; see [Note: classification of buffers]."""

    flow: Flow
    layout: Layout
    ranges: LiveRanges
    schedule: Mapping[int, str]
    vocab_size: int | None

    def argument(self, number: int, num_bytes: int) -> Buffer:
        """Classify and label a parameter of the entry by its argument of the step."""
        name = self.flow.parameters[number].op_name.replace("\\'", "'")
        field, leaf = find_argument(name, self.layout.by_path)
        part = {"params": "parameters", "work": "work"}.get(field, "batch" if name.startswith("batch") else "state")
        part = "optimizer" if field == "opt_state" and leaf else part
        return Buffer(name, num_bytes, part)

    def classify(self, value: Value, num_bytes: int) -> Buffer:
        """Classify and label a value in a heap of temporaries, or a result."""
        name, index = self._find_in_module(value)
        place = self.flow.origin(name, index)
        part = self._part(value, place)
        if part is None and (after := self.flow.destination(self.flow.by_name[name], index)):
            place = self.flow.origin(after[0].name, after[1])
            part = self._part(value, place)
        part = part or _by_name(self.flow.op_name(place))
        return Buffer(self._name(part, place, value), num_bytes, part)

    def _find_in_module(self, value: Value) -> tuple[str, tuple[int, ...]]:
        """Find a value in the module's text, which omits instructions wrapped by an asynchronous one.

        XLA schedules `all-gather.18` right before the `async-start` that calls it. It prints both as one
        `all-gather-start.12`, of which the value is the second element.
        """
        if value.name in self.flow.by_name:
            return value.name, value.index
        start = self.ranges.get((value.name, value.index), (0, 0))[0]
        later = [name for step in range(start, start + 4) if (name := self.schedule.get(step)) in self.flow.by_name]
        if not later:
            raise ValueError(f"{value.name}: not in the module; pass texts of the same module and compilation")
        return later[0], (1, *value.index)

    def moment(self, name: str) -> str:
        """Return an instruction's phase of the step (forward, reduce), and the line of the user's program."""
        instruction = self.flow.by_name.get(name)
        if instruction is None:
            return ""
        op_name, line = self.flow.op_name((instruction, ())), user_line(instruction)
        what = _scope(op_name)[0] or ("backward" if "transpose(" in op_name else "forward")
        return f"{what} at {line}" if line and not line.startswith(_PACKAGE) else what

    def _part(self, value: Value, place: Place) -> str | None:
        """Return the category by the first rule that applies; None if only the operation's name is left to try."""
        instruction, op_name = place[0], self.flow.op_name(place)
        verb, _ = _scope(op_name)
        uses = self.flow.depends_on(place)
        if uses and not uses & ~(self._weights | self.flow.gathered_bit):
            return "gathered" if uses & self.flow.gathered_bit else "copies"
        if verb in _SCOPE_PARTS:
            return _SCOPE_PARTS[verb]
        if place in self._reduced or is_collective(instruction, "reduce-scatter", self.flow):
            return "gradients"
        if self._is_logits(value):
            return "logits"
        if instruction.opcode == "custom-call" and value.dtype in ("u8", "s8") and len(value.dims) == 1:
            return "attention" if _is_attention(instruction, op_name) else "workspace"
        if uses and len(value.dims) > 1 and _unordered(value.dims) in self._accumulators:
            return "gradients"
        if uses and "transpose(" not in op_name and place in self._saved:
            return "activations"
        if _is_attention(instruction, op_name):
            return "attention"
        return "compute" if uses and _is_models(op_name) else None

    def _name(self, part: str, place: Place, value: Value) -> str:
        """Label a value with the leaves of its dims, or else with its operation and source line."""
        op_name = self.flow.op_name(place)
        leaves = self._leaves(part, place, value, _scope(op_name)[1])
        if leaves:
            return f"{' | '.join(leaves[:3])}{f' and {len(leaves) - 3} more' if len(leaves) > 3 else ''}"
        rows = self._stacked_rows(place, value)
        if rows is not None:
            return f"{value.dims[0]} x {self._name('', rows, value)}"
        where = "/".join(user_line(place[0]).split("/")[-2:])
        return f"{op_name.rpartition('/')[2] or place[0].opcode}{f' at {where}' if where else ''}"

    def _stacked_rows(self, place: Place, value: Value) -> Place | None:
        """Return the source of the rows of a stack that a loop writes row by row."""
        if "dynamic_update_slice" not in self.flow.op_name(place) or len(value.dims) < 2:
            return None
        row = math.prod(value.dims[1:])
        for operand in place[0].operands:
            before = self.flow.origin(operand)
            index = before[1][-1] if before[1] else 0
            if index < len(before[0].shapes) and before[0].shapes[index].num_elements == row and before != place:
                return before
        return None

    def _leaves(self, part: str, place: Place, value: Value, unit: str) -> list[str]:
        if part in ("gathered", "copies"):
            bits = self.flow.depends_on(place)
            used = [self.flow.parameters[i] for i in self.flow.parameters if bits >> i & 1]
            return [find_argument(parameter.op_name, self.layout.by_path)[1] for parameter in used]
        if part != "gradients":
            return []
        alike = [leaf for leaf in self.layout.by_path.values() if _squeezed(value.dims) in self._forms(leaf)]
        if not alike:
            dims = _unordered(value.dims)
            alike = [leaf for leaf in self.layout.by_path.values() if dims in map(_unordered, self._forms(leaf))]
        return [leaf.path for leaf in alike if unit in ("", leaf.unit or "root")] or [leaf.path for leaf in alike]

    def _forms(self, leaf: Leaf) -> set[tuple[int, ...]]:
        """Return the dims of a leaf's gradient: full or a shard, with and without its layer dims, without dims of 1."""
        logical, shard = cut_sizes(leaf.shape, leaf.cuts), self._shard(leaf, "grad")
        return {_squeezed(dims[first:]) for dims in (leaf.cut_shape, logical, shard) for first in (0, leaf.stacked)}

    def _shard(self, leaf: Leaf, name: str) -> tuple[int, ...]:
        return leaf.cut_shape if dict(leaf.stages)[name] is None else self.layout.shard_shape(leaf, name)

    @functools.cached_property
    def _accumulators(self) -> set[tuple[int, ...]]:
        """The dims that only a gradient has: stored accumulators that are a shard or a stack of layers."""
        found = set()
        for leaf in self.layout.by_path.values():
            shard = self._shard(leaf, "grad")
            if leaf.trainable and len(shard) > 1 and (leaf.stacked or shard != leaf.cut_shape):
                found.add(_unordered(shard))
        return found

    @functools.cached_property
    def _weights(self) -> int:
        """The bits of the step's arguments that are parameters."""
        arguments = self.flow.parameters.items()
        return sum(1 << i for i, inst in arguments if find_argument(inst.op_name, ())[0] in ("params", "work"))

    @functools.cached_property
    def _reduced(self) -> set[Place]:
        """Values that flow into a reduction over devices: full gradients, before and after casts and sums."""
        found: set[Place] = set()
        for inst in self.flow.by_name.values():
            if is_collective(inst, "reduce-scatter", self.flow) or _scope(inst.op_name)[0] == "reduce":
                for operand in inst.operands:
                    self._mark(self.flow.origin(operand), found)
        return found

    def _mark(self, place: Place, found: set[Place]) -> None:
        """Mark a gradient and its predecessors of the same size, back to the matmul or call that makes it."""
        instruction, index = place
        if place in found or instruction.opcode == "parameter":
            return
        found.add(place)
        if instruction.opcode == "custom-call" or is_matmul(self.flow.module, instruction):
            return
        if index and len(instruction.shapes) <= index[-1]:
            return
        size = instruction.shapes[index[-1] if index else 0].num_elements
        for operand in instruction.operands:
            before = self.flow.origin(operand)
            shapes = before[0].shapes
            if not before[1] and len(shapes) == 1 and shapes[0].num_elements == size:
                self._mark(before, found)

    def _is_logits(self, value: Value) -> bool:
        """Whether a dim is the vocabulary size or a device's part of it, possibly rounded up for matmuls."""
        return any(0 <= dim - size < 128 for dim in value.dims[-2:] for size in self._vocab_sizes)

    @functools.cached_property
    def _vocab_sizes(self) -> set[int]:
        """The vocabulary size, and a device's part of it if a weight's vocabulary dim is split."""
        if self.vocab_size is None:
            return set()
        size = self.vocab_size
        cuts = [cut for leaf in self.layout.leaves for cut in leaf.cuts if leaf.shape[cut.dim] == size]
        return {size, *(size // cut.parts for cut in cuts)}

    @functools.cached_property
    def _saved(self) -> set[Place]:
        """Values that the forward writes and the backward reads; of a stack, also while the forward writes its rows."""
        begin = self.backward[0]
        spans = (key for key, (start, end) in self.ranges.items() if start < begin <= end)
        return {self.flow.origin(name, index) for name, index in spans if name in self.flow.by_name}

    @functools.cached_property
    def backward(self) -> tuple[int, int]:
        """The first and last step of the backward in the schedule. Values computed only from weights do not count."""
        starts = [
            start
            for (name, index), (start, _) in self.ranges.items()
            if name in self.flow.by_name and "transpose(" in self.flow.by_name[name].op_name
            if self.flow.depends_on((self.flow.by_name[name], index)) & ~(self._weights | self.flow.gathered_bit)
        ]
        return min(starts, default=NEVER), max(starts, default=NEVER)


def _is_attention(instruction: Instruction, op_name: str) -> bool:
    return "__cudnn$fmha" in instruction.attributes or "dot_product_attention" in op_name


def _by_name(op_name: str) -> str:
    """Classify by the operation's name."""
    if _is_models(op_name):
        return "compute"
    is_read = op_name.endswith("/dynamic_slice")  # the saved values of one layer
    is_saved = is_read if "jfsdp.backward" in op_name else "jfsdp.tick" in op_name
    return "activations" if is_saved else "unattributed"


def _is_models(op_name: str) -> bool:
    """Whether an operation belongs to the forward or backward of the loss."""
    return "jvp(" in op_name or "transpose(" in op_name or "checkpoint" in op_name


def user_line(instruction: Instruction) -> str:
    """Return the innermost line of the model: neither in a library or jfsdp, nor in a caller of jfsdp."""
    stack = instruction.stack
    outermost = max((at for at, line in enumerate(stack) if line.startswith(_PACKAGE)), default=len(stack))
    lines = (line for line in stack[:outermost] if "/site-packages/" not in line and not line.startswith(_PACKAGE))
    return next(lines, instruction.source)
