"""The operations that a GPU executes in a step, in order: kernels, copies, collectives, waits and loops.

Read from the thunks of the compiled step, XLA:GPU's list of launches. The HLO text describes the same step, so
`read_launches` compares the two.

[Note: thunks] JAX 0.12 shows thunks as operations of MLIR. It has operations for collectives, copies, loops and
asynchronous work. Every other thunk is a serialized `ThunkProto` (xla/backends/gpu/runtime/thunk.proto), of which
`_of_proto` reads a few fields. A loop has no name and no trip count there. Both come from the loop of the HLO whose
condition has an instruction with the name of a kernel of this loop's condition.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import operator
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from jfsdp.engine.movements import GATHER, REDUCE, wire_bytes
from jfsdp.plan.hlo.collectives import KINDS, Collective
from jfsdp.plan.hlo.device_groups import read_group
from jfsdp.plan.hlo.parse import Instruction, Module
from jfsdp.plan.time.timeline import hidden_share

PRODUCTS = "gemm", "cuDNN call"
COPIES = "copy", "device-to-host copy", "host-to-device copy"


@dataclasses.dataclass(frozen=True, slots=True)
class Launch:
    """A kernel, a copy, a collective, or a wait.

    Attributes:
      kind: one of PRODUCTS, "kernel", one of COPIES, a kind of collective, "wait", or "other".
      name: of its instruction in HLO; of the operation in MLIR if that has none.
      num_bytes: copied, or of the full values of a collective.
      dtype, group: of a collective: its element type, and the device ids of its first group.
      stream: "" is the main stream. Others are "communication 0" or "compute 1".
      token: number of the asynchronous work that it belongs to, or waits for; None: the main stream runs it.
    """

    kind: str
    name: str
    num_bytes: int = 0
    dtype: str = ""
    group: tuple[int, ...] = ()
    stream: str = ""
    token: int | None = None

    @property
    def wire_bytes(self) -> float:
        """Bytes that a device sends; 0 for anything but a collective."""
        return wire_bytes(self.kind, self.num_bytes, len(self.group)) if self.kind in KINDS else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Loop:
    """A loop. `times` is None if its length is unknown. Its condition runs once more than its body."""

    name: str
    times: int | None
    condition: tuple[Launch | Loop, ...]
    body: tuple[Launch | Loop, ...]


Items = Iterable[Launch | Loop]


@dataclasses.dataclass(frozen=True)
class Launches:
    """The launches of a step.

    Attributes:
      buffer_bytes: of each buffer that the program is called with: arguments, results and temporaries.
      disagreements: a line for each quantity in which the thunks and the HLO differ.
    """

    items: tuple[Launch | Loop, ...]
    buffer_bytes: tuple[int, ...]
    disagreements: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return the launches as plain data."""
        return {
            "per_step": count_launches(self.items),
            "total": total_launches(self.items),
            "buffers": {"count": len(self.buffer_bytes), "bytes": sum(self.buffer_bytes)},
            "overlapped_share": overlapped_share(self.items),
            "disagreements": self.disagreements,
            "items": [dataclasses.asdict(item) for item in self.items],
        }


def read_launches(thunks: Any, hlo: Module, collectives: Iterable[Collective], share: float | None) -> Launches:
    """Read the launches of a compiled step, and compare them with its HLO; see [Note: thunks].

    Args:
      thunks: of the step, from `compat.read_thunks`.
      collectives, share: of the HLO: from `find_collectives`, and `timeline.overlapped_share`.
    """
    lines = (line for computation in hlo.computations.values() for line in computation.instructions)
    loops = {loop: hlo.computations[loop.attribute("condition")].by_name for loop in lines if loop.opcode == "while"}
    (block,) = next(one for one in thunks.body.operations if one.name.value == "main").regions[0].blocks
    items = tuple(_Reader(hlo.num_partitions or 1, loops).read(block))
    counts = count_launches(items)
    in_hlo: dict[str, float] = dict.fromkeys(KINDS, 0.0)  # bytes that a device sends per step
    for one in collectives:
        in_hlo[one.kind] += one.total_bytes
    pairs = [(kind, counts.get(kind, {}).get("wire_bytes", 0.0), size) for kind, size in in_hlo.items()]
    pairs.append(("overlapped share", overlapped_share(items) or 0.0, share or 0.0))
    wrong = [row for row in pairs if not math.isclose(*row[1:], rel_tol=1e-9)]
    disagreements = (f"{what}: {ours:,} in the thunks, {theirs:,} in HLO" for what, ours, theirs in wrong)
    return Launches(items, tuple(map(_size, block.arguments)), tuple(disagreements))


@dataclasses.dataclass
class _Reader:
    """Reads blocks of thunks. `loops` has the loops of the HLO, each with the instructions of its condition."""

    num_devices: int
    loops: Mapping[Instruction, Mapping[str, Instruction]]
    tokens: dict[Any, int] = dataclasses.field(default_factory=dict)

    def read(self, block: Any) -> Iterator[Launch | Loop]:
        return _together(item for operation in block.operations for item in self._read(operation.operation))

    def _read(self, thunk: Any) -> Iterator[Launch | Loop]:
        name, given = thunk.name.removeprefix("thunky."), thunk.attributes
        blocks = [tuple(self.read(block)) for region in thunk.regions for block in region.blocks]
        if name == "while":
            kernels = {item.name for item, *_ in walk(blocks[0]) if item.kind == "kernel"}
            found = [loop for loop, condition in self.loops.items() if kernels & condition.keys()]
            yield Loop(*((found[0].name, found[0].trip_count) if len(found) == 1 else ("", None)), *blocks)
        elif name == "async_start":
            token = self.tokens[thunk.results[0]] = len(self.tokens)
            stream = "communication" if given["is_communication"].value else "compute"
            for item in blocks[0]:
                yield dataclasses.replace(item, stream=f"{stream} {given['stream_id'].value}", token=token)
        elif name == "async_done":
            yield Launch("wait", name, token=self.tokens[thunk.operands[0]])
        elif name == "copy":
            yield Launch("copy", name, _size(thunk.operands[0]))
        elif name == "call_thunk_proto":
            yield from _of_proto(given["thunk_proto"].value_bytes)
        elif name.replace("_", "-") in KINDS:
            yield self._collective(name, thunk.operands, given)
        elif blocks:
            yield from itertools.chain(*blocks)
        elif name not in ("slice_buffer", "constant", "yield", "func.return"):
            yield Launch("other", name)

    def _collective(self, name: str, operands: Any, given: Any) -> Launch:
        kind, half = name.replace("_", "-"), len(operands) // 2
        groups = "source_target_pairs" if "source_target_pairs" in given else "replica_groups"
        lists = ",".join(f"{{{','.join(map(str, group))}}}" for group in given[groups])
        sizes = [_size(operand) for operand in operands]
        size, dtype = sum(sizes[half:] if kind == GATHER else sizes[:half]), str(given["element_type"])
        dtype = "pred" if dtype == "i1" else re.sub("^i", "s", dtype.replace("ui", "u")).lower()
        return Launch(kind, name, size, dtype, read_group(f"{groups}={{{lists}}}", self.num_devices))


def _size(buffer: Any) -> int:
    return int(re.findall(r"\d+", str(buffer.type))[0])


def _together(items: Iterable[Any]) -> Iterator[Any]:
    """Combine the arrays of a collective, each of which has its own operation."""
    key_of = operator.attrgetter("dtype", "kind", "group", "token")
    for key, found in itertools.groupby(items, lambda item: getattr(item, "dtype", "") and key_of(item)):
        several = list(found)
        yield from [dataclasses.replace(several[0], num_bytes=sum(x.num_bytes for x in several))] if key else several


# Fields of ThunkProto, and XLA's enum of element types.
_THUNKS = {3: COPIES[0], 13: COPIES[0], 4: COPIES[1], 5: COPIES[2], 8: "kernel", 36: "kernel", 9: "gemm", 22: "gemm"}
_THUNKS |= {15: "cuDNN call", 25: "cuDNN call", 59: REDUCE, 60: "sliced"}
_DTYPES = {1: "pred", 4: "s32", 5: "s64", 8: "u32", 10: "f16", 11: "f32", 12: "f64", 16: "bf16"}


def _of_proto(proto: bytes) -> Iterator[Launch]:
    (_, info), (field, given) = ((number, values[0]) for number, values in _fields(proto).items())
    name, kind = _fields(info)[1][0].decode(), _THUNKS.get(field, "other")
    if kind == "sliced":  # thunks on slices whose offsets depend on a loop
        for inner in _fields(_fields(given)[6][0])[1]:
            yield from _of_proto(inner)
    elif kind == REDUCE:  # a kernel of XLA in place of NCCL's
        config, buffers = _fields(_fields(given)[1][0]), [_fields(one) for one in _fields(given)[4]]
        size = sum(_fields(_fields(one[2][0])[1][0])[2][0] for one in buffers)
        dtype = _DTYPES.get(_varints(config[1][0])[0], "")
        yield Launch(kind, name, size, dtype, tuple(_varints(_fields(config[2][0])[1][0])))
    elif kind in COPIES:
        yield Launch(kind, name, _fields(_fields(given)[1][0])[3][0])
    else:  # a kernel of a matrix product has "gemm" in its name
        yield Launch("gemm" if kind == "kernel" and "gemm" in name else kind, name)


def _fields(data: bytes) -> dict[int, list[Any]]:
    """Return the fields of a protocol buffer by number, as integers and bytes."""
    found: dict[int, list[Any]] = {}
    rest = iter(data)
    for byte in rest:
        tag = _varint(itertools.chain((byte,), rest))
        value = _varint(rest) if tag & 7 in (0, 2) else 8 if tag & 7 == 1 else 4
        found.setdefault(tag >> 3, []).append(bytes(itertools.islice(rest, value)) if tag & 7 else value)
    return found


def _varint(data: Iterator[int]) -> int:
    byte = next(data)
    return byte if byte < 128 else byte - 128 + (_varint(data) << 7)


def _varints(data: bytes) -> list[int]:
    rest = iter(data)
    return [_varint(rest) for _ in range(sum(byte < 128 for byte in data))]


# Totals are of a step, and NaN if the length of a loop is unknown.


def walk(items: Items, times: float = 1, *, in_loop: bool = False) -> Iterator[tuple[Launch, float, bool]]:
    """Yield every launch with its number of executions, and whether it is in a loop."""
    for item in items:
        if isinstance(item, Launch):
            yield item, times, in_loop
        else:
            rounds = math.nan if item.times is None else item.times
            yield from walk(item.condition, times * (rounds + 1), in_loop=True)
            yield from walk(item.body, times * rounds, in_loop=True)


def count_launches(items: Items) -> dict[str, dict[str, float]]:
    """Return the number of launches, their bytes, and the bytes that a device sends, by kind."""
    found: dict[str, dict[str, float]] = {}
    for launch, times, _ in walk(items):
        row = found.setdefault(launch.kind, {"count": 0, "bytes": 0, "wire_bytes": 0})
        for name, value in zip(row, (1, launch.num_bytes, launch.wire_bytes)):
            row[name] += times * value
    return found


def total_launches(items: Items) -> float:
    """Return the number of launches without waits."""
    return sum(times for launch, times, _ in walk(items) if launch.kind != "wait")


def overlapped_share(items: Items) -> float | None:
    """Return the share of collective bytes in loops with a matrix product between start and wait.

    None if no loop sends anything. Equals `timeline.overlapped_share`.
    """
    found = list(walk(items))
    waits = {launch.token: place for place, (launch, *_) in enumerate(found) if launch.kind == "wait"}
    return hidden_share(
        (times * launch.wire_bytes, sum(x.kind in PRODUCTS for x, *_ in found[place : waits.get(launch.token, place)]))
        for place, (launch, times, in_loop) in enumerate(found)
        if in_loop and launch.kind in KINDS
    )
