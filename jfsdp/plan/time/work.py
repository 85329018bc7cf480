"""Work of a scheduled instruction: matmul sizes, attention FLOPs, and bytes read and written.

Depends on shapes only, not on the GPU.
"""

from __future__ import annotations

import dataclasses
import enum
import math
import re
from collections.abc import Iterable, Iterator, Mapping

from jfsdp.plan.hlo.collectives import collective_kind
from jfsdp.plan.hlo.parse import Computation, Instruction, Module, Shape
from jfsdp.plan.hlo.trip_counts import runs, walk


class Kind(enum.Enum):
    MATMUL = "matmul"
    ATTENTION = "attention"
    MEMORY = "memory"  # bound by memory bandwidth
    HOST = "host"  # copies between device and host memory
    NONE = "none"  # takes no time


@dataclasses.dataclass(frozen=True, slots=True)
class Matmul:
    """[batch m k] x [batch k n]. `dtype` is HLO's name, or "tf32" for float32 at JAX's default precision."""

    batch: int
    m: int
    n: int
    k: int
    dtype: str

    @property
    def num_flops(self) -> int:
        return 2 * self.batch * self.m * self.n * self.k


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """The work of one execution of an instruction.

    `num_flops` counts computed FLOPs: half for causal attention. `attended_share` is that share of the scores if the
    kernel handles several documents per row. `num_flops` then assumes one document per row, see `with_documents`.
    `num_bytes` is read plus written. It excludes intermediate values of a fusion, and the rest of an array of which the
    fusion reads or replaces a slice.
    """

    kind: Kind
    num_flops: float = 0.0
    num_bytes: float = 0.0
    matmuls: tuple[Matmul, ...] = ()
    is_backward: bool = False
    dtype: str = ""
    attended_share: float | None = None

    def with_documents(self, num: int) -> Work:
        """Return the work if every row has `num` documents of equal length."""
        if self.attended_share is None:
            return self
        return dataclasses.replace(self, num_flops=self.num_flops * min(1.0, 0.5 / num / self.attended_share))


NOTHING = Work(Kind.NONE)
_LIBRARY = re.compile(r"__cublas|__cudnn\$(?:fmha|conv)|__cutlass")
_FREE = re.compile(
    "parameter|constant|tuple|get-tuple-element|bitcast|after-all|opt-barrier|add-dependency|partition-id|replica-id|"
    "while|conditional|call|domain|iota|send|recv|get-dimension-size|.*-done|.*-update"
)
_VIEWS = ("bitcast", "reshape", "get-tuple-element", "convert", "copy")


# [Note: what is a matmul] `is_matmul` covers matrix products, convolutions and attention. `work_of` also needs their
# sizes. There attention is a separate kind with another rate, and convolutions count as bytes only, since their calls
# do not print the contracted dims. `classify.py` also stops at other library calls when it looks for the instruction
# that makes a gradient.


def is_matmul(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction is or contains a matmul; see [Note: what is a matmul]."""
    if instruction.opcode == "custom-call":
        return _LIBRARY.search(instruction.attributes) is not None
    if instruction.opcode in ("fusion", "fusion-start", "async-start"):
        return any(is_matmul(module, inner) for name in instruction.called for inner in _lines(module, name))
    return instruction.opcode in ("dot", "convolution")


def num_matmuls(module: Module, instructions: Iterable[Instruction]) -> int:
    """Count the matmuls that instructions run, including loops and calls."""
    total = 0
    for instruction in instructions:
        total += is_matmul(module, instruction)
        if instruction.opcode != "async-start":  # counted above: is_matmul looks into it
            total += sum(times * num_matmuls(module, _lines(module, name)) for name, times in runs(instruction))
    return total


def flops_by_dtype(module: Module) -> dict[str, tuple[int, float]]:
    """Return the number of matrix products of a step and their FLOPs, by the dtype of their operands.

    The kernel does not matter: a library call, or a dot in a fusion. The dtypes of float8 count as one.
    """
    found: dict[str, tuple[int, float]] = {}
    for computation, instruction, times in walk(module):
        for matmul in work_of(module, computation, instruction).matmuls:
            name = "float8" if matmul.dtype.startswith("f8") else matmul.dtype
            num, flops = found.get(name, (0, 0.0))
            found[name] = num + times, flops + times * matmul.num_flops
    return found


def describe_products(products: Mapping[str, tuple[int, float]]) -> str:
    """Write how many products are in float8: `float8 672 of 684, 94.3% of their FLOPs; bf16 12`."""
    total, flops = (sum(column) for column in zip(*products.values(), strict=True))
    num, share = products.get("float8", (0, 0.0))
    others = [f"{dtype} {count}" for dtype, (count, _) in products.items() if dtype != "float8"]
    return "; ".join([f"float8 {num} of {total}, {share / flops:.1%} of their FLOPs", *others])


def _lines(module: Module, name: str) -> tuple[Instruction, ...]:
    return module.computations[name].instructions


def work_of(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """Return the work of an instruction. Collectives, loops and calls have none.

    Args:
      computation: contains the instruction and its operands.
    """
    opcode = instruction.opcode
    if _FREE.fullmatch(opcode) or _is_collective(module, instruction):
        return NOTHING
    if opcode == "async-start":
        return _of_async(module, instruction)
    if matmuls := tuple(_matmuls(module, computation, instruction)):
        size = sum(matmul.num_flops for matmul in matmuls)
        return Work(Kind.MATMUL, size, _touched(module, computation, instruction), matmuls, dtype=matmuls[0].dtype)
    if "__cudnn$fmha" in instruction.attributes:
        return _attention(module, computation, instruction)
    touched = _touched(module, computation, instruction)
    shapes = instruction.shapes + computation.operand_shapes(instruction)
    if opcode == "copy-start":  # its type is a tuple of target, source and context
        shapes, touched = instruction.shapes[:2], 2 * instruction.shapes[0].num_bytes
    if "host" in (shape.memory for shape in shapes):
        return Work(Kind.HOST, num_bytes=touched / 2)
    return Work(Kind.MEMORY, num_bytes=touched)


def _is_collective(module: Module, instruction: Instruction) -> bool:
    """Return whether an instruction is a collective or a fusion with one."""
    fused = instruction.called if instruction.opcode in ("fusion", "fusion-start") else ()
    lines = [line for name in fused for line in _lines(module, name)]
    return any(collective_kind(line) for line in (instruction, *lines))


def _of_async(module: Module, instruction: Instruction) -> Work:
    """Return the summed work of an async wrapper, of the kind of its largest instruction."""
    bodies = [module.computations[name] for name in instruction.called]
    works = [work_of(module, body, wrapped) for body in bodies for wrapped in body.instructions] or [NOTHING]
    main = max(works, key=lambda work: (work.num_flops, work.num_bytes))
    return dataclasses.replace(
        main,
        num_flops=sum(work.num_flops for work in works),
        num_bytes=sum(work.num_bytes for work in works),
        matmuls=tuple(matmul for work in works for matmul in work.matmuls),
    )


# Matmuls.


def _matmuls(module: Module, computation: Computation, instruction: Instruction) -> Iterator[Matmul]:
    """Yield the matmuls of an instruction: a dot, a cuBLAS call, or the dots in a fusion."""
    is_dot = instruction.opcode == "dot"
    if is_dot or (instruction.opcode == "custom-call" and "__cublas$" in instruction.attributes):
        word = "dims" if is_dot else "dimensions"
        dims = [_dims(instruction.attributes, f"{side}_{what}_{word}") for what, side in _SIDES]
        is_precise = re.search(r'operand_precision["=:{\[ ]+(?:highest|HIGHEST)', instruction.attributes) is not None
        yield _matmul(computation.operand_shapes(instruction)[:2], dims, is_precise)
    elif instruction.opcode in ("fusion", "fusion-start"):
        for name in instruction.called:
            inner = module.computations[name]
            for fused in inner.instructions:
                yield from _matmuls(module, inner, fused)


_SIDES = (("contracting", "lhs"), ("batch", "lhs"), ("contracting", "rhs"), ("batch", "rhs"))


def _dims(attributes: str, name: str) -> tuple[int, ...]:
    """Read `name={0,1}` or, in a backend_config, `"name":["0","1"]`; empty if missing."""
    found = re.search(rf'{name}(?:=\{{([\d,]*)\}}|":\s*\[([^\]]*)\])', attributes)
    return tuple(int(dim) for dim in re.findall(r"\d+", found[1] or found[2] or "")) if found else ()


def _matmul(shapes: tuple[Shape, ...], dims: list[tuple[int, ...]], is_precise: bool) -> Matmul:
    (lhs, rhs), (contracted, batch, rhs_contracted, rhs_batch) = shapes, dims
    sizes = math.prod(lhs.dims[dim] for dim in batch), math.prod(lhs.dims[dim] for dim in contracted)
    rows = lhs.num_elements // max(1, math.prod(sizes))
    columns = math.prod(size for dim, size in enumerate(rhs.dims) if dim not in rhs_contracted + rhs_batch)
    dtype = "tf32" if lhs.dtype == "f32" and not is_precise else lhs.dtype
    return Matmul(sizes[0], rows, columns, sizes[1], dtype)


# Attention.


def _attention(module: Module, computation: Computation, instruction: Instruction) -> Work:
    """Return the work of cuDNN's fused attention: two matmuls forward, five backward (which recomputes the scores).

    Each has 2 * (batch heads queries keys) * head_dim FLOPs. The first four sizes are the call's
    `intermediate_tensor_shape`.
    """
    scores = _dims(instruction.attributes, "dimensions")
    query = computation.operand_shapes(instruction)[0]
    is_backward = "Backward" in instruction.attributes.partition("custom_call_target=")[2][:60]
    num = 5 if is_backward else 2
    share = _unmasked(instruction.attributes, scores)
    has_documents = re.search(r'"mask_type":\s*"PADDING_CAUSAL', instruction.attributes)
    return Work(
        Kind.ATTENTION,
        attended_share=share if has_documents else None,
        num_flops=num * 2 * math.prod(scores) * query.dims[-1] * share,
        num_bytes=_touched(module, computation, instruction),
        is_backward=is_backward,
        dtype=query.dtype,
    )


def _unmasked(attributes: str, scores: tuple[int, ...]) -> float:
    """Return the unmasked share of the scores: half if causal, less with a sliding window."""
    window = re.search(r'"sliding_window_length":\s*"?(\d+)', attributes)
    share = 0.5 if re.search(r'"mask_type":\s*"\w*CAUSAL', attributes) else 1.0
    if window and int(window[1]) and scores:
        share = min(share, int(window[1]) / scores[-1])
    return share


# Bytes.


def _touched(module: Module, computation: Computation, instruction: Instruction) -> float:
    """Return the bytes read and written."""
    if instruction.opcode in ("fusion", "fusion-start"):
        inner = module.computations[instruction.called[0]]
        read = sum(_read(inner, each) for each in inner.instructions if each.opcode == "parameter")
        return read + _written(inner, inner.root)
    operands = computation.operand_shapes(instruction)
    match instruction.opcode:
        case "dynamic-slice" | "slice" | "gather":
            return 2 * instruction.num_bytes
        case "dynamic-update-slice":
            return 2 * operands[1].num_bytes
        case "scatter":
            return 3 * operands[-1].num_bytes
    return instruction.num_bytes + sum(shape.num_bytes for shape in operands)


def _read(inner: Computation, value: Instruction) -> float:
    """Return the bytes that a fusion reads of a parameter: only the slices, if it uses nothing else."""
    sizes = []
    for user in inner.users.get(value.name, ()):
        if user.opcode in ("dynamic-slice", "slice", "gather") and user.operands[0] == value.name:
            sizes.append(user.num_bytes)
        elif user.opcode == "dynamic-update-slice" and user.operands[0] == value.name:
            sizes.append(0)  # replaced in place
        elif user.opcode == "scatter" and user.operands[0] == value.name:
            sizes.append(inner.by_name[user.operands[-1]].num_bytes)
        elif user.opcode in _VIEWS:
            sizes.append(_read(inner, user) if not user.is_root else value.num_bytes)
        else:
            return value.num_bytes
    return min(sum(sizes), value.num_bytes)


def _written(inner: Computation, value: Instruction) -> float:
    """Return the bytes that a fusion writes: only the slices, if it updates slices."""
    match value.opcode:
        case "tuple":
            return sum(_written(inner, inner.by_name[name]) for name in value.operands)
        case "dynamic-update-slice":
            return inner.by_name[value.operands[1]].num_bytes
        case "scatter":
            return inner.by_name[value.operands[-1]].num_bytes
        case "bitcast" | "reshape" | "convert" | "copy":
            source = inner.by_name[value.operands[0]]
            if source.opcode in ("dynamic-update-slice", "scatter"):
                return _written(inner, source)
    return value.num_bytes
