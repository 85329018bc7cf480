"""Parse the text of a scheduled HLO module (`compiled.as_text()`).

Does not import JAX. Tested with the text of XLA:GPU in JAX 0.10 and 0.12.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator, Mapping


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Element type, dims and memory ("device" or "host") of one array."""

    dtype: str
    dims: tuple[int, ...]
    memory: str = "device"

    @property
    def num_elements(self) -> int:
        return math.prod(self.dims)

    @property
    def num_bytes(self) -> int:
        return math.ceil(self.num_elements * _bits(self.dtype) / 8)


@dataclasses.dataclass(frozen=True, slots=True)
class Instruction:
    """One line of a computation.

    Attributes:
      shapes: of the result, with tuples flattened.
      operands: names of instructions of the same computation.
      called: names of the computations it runs or applies (calls=, body=, condition=, to_apply=, branches).
      op_name: JAX's name stack of the operation; empty if XLA kept none.
      source: "file.py:12" of the innermost frame; empty if XLA kept none.
      index: position in its computation's schedule.
      attributes: the raw text after the operands.
      arguments: the raw text of the operands: a constant's value, a parameter's number.
      stack: "file.py:12" of every frame, innermost first.
      trip_count: how often a loop runs; None: it depends on a value, or this is no loop.
    """

    name: str
    opcode: str
    shapes: tuple[Shape, ...]
    operands: tuple[str, ...]
    called: tuple[str, ...]
    op_name: str
    source: str
    index: int
    attributes: str
    arguments: str = ""
    stack: tuple[str, ...] = ()
    is_root: bool = False
    trip_count: int | None = None

    @property
    def num_bytes(self) -> int:
        return sum(shape.num_bytes for shape in self.shapes)

    def attribute(self, name: str) -> str:
        """Return the word after `name=`, without a leading %, or an empty string."""
        found = re.search(rf"\b{name}=%?([\w.\-]+)", self.attributes)
        return found[1] if found else ""


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions in schedule order."""

    name: str
    instructions: tuple[Instruction, ...]

    @functools.cached_property
    def by_name(self) -> Mapping[str, Instruction]:
        return {instruction.name: instruction for instruction in self.instructions}

    @functools.cached_property
    def users(self) -> Mapping[str, tuple[Instruction, ...]]:
        """The users of each instruction, by its name."""
        found: dict[str, list[Instruction]] = {}
        for instruction in self.instructions:
            for operand in dict.fromkeys(instruction.operands):
                found.setdefault(operand, []).append(instruction)
        return {name: tuple(users) for name, users in found.items()}

    @property
    def root(self) -> Instruction:
        marked = (instruction for instruction in self.instructions if instruction.is_root)
        return next(marked, self.instructions[-1])

    def operand_shapes(self, instruction: Instruction) -> tuple[Shape, ...]:
        """Return the shapes of an instruction's operands, with tuples flattened."""
        return tuple(shape for name in instruction.operands for shape in self.by_name[name].shapes)


@dataclasses.dataclass(frozen=True)
class Module:
    """A compiled program."""

    name: str
    computations: Mapping[str, Computation]
    entry: Computation
    num_partitions: int | None


def parse_module(text: str) -> Module:
    """Parse a scheduled HLO module.

    Raises:
      ValueError: if the text is not a scheduled HLO module; names the missing part or the line.
    """
    lines = text.splitlines()
    start = next((i for i, line in enumerate(lines) if line.startswith("HloModule ")), None)
    if start is None:
        kind = "StableHLO" if "stablehlo." in text[:20000] or "module @" in text[:2000] else "not HLO"
        raise ValueError(f"this text is {kind}: no line begins with 'HloModule'; pass `lowered.compile().as_text()`")
    header = lines[start]
    if "is_scheduled=true" not in header:
        raise ValueError(f"{header[:80]!r} is not scheduled ('is_scheduled=true' is missing); compile it for a device")
    stacks = _stacks(lines)
    bodies, entry = _split(lines)
    if entry is None:
        raise ValueError(f"{header[:80]!r}: no computation is marked ENTRY; is the text cut off or of another version?")
    computations = {
        name: Computation(name, tuple(_instruction(i, line, stacks) for i, line in enumerate(body)))
        for name, body in bodies.items()
    }
    computations = {name: _with_trip_counts(found, computations) for name, found in computations.items()}
    partitions = re.search(r"num_partitions=(\d+)", header)
    name = header.split()[1].rstrip(",")
    return Module(name, computations, computations[entry], int(partitions[1]) if partitions else None)


def _with_trip_counts(computation: Computation, others: Mapping[str, Computation]) -> Computation:
    """Add the trip counts of loops that XLA has pipelined: it states their counter, but not its end."""
    unknown = [one for one in computation.instructions if one.opcode == "while" and one.trip_count is None]
    counts = {loop.name: _trip_count(loop, computation, others) for loop in unknown}
    if not counts:
        return computation
    instructions = (
        dataclasses.replace(one, trip_count=counts[one.name]) if one.name in counts else one
        for one in computation.instructions
    )
    return dataclasses.replace(computation, instructions=tuple(instructions))


def _trip_count(loop: Instruction, computation: Computation, others: Mapping[str, Computation]) -> int | None:
    """Return how often a loop of JAX runs whose counter, which grows by one, begins and ends at a constant."""
    place = re.search(r'known_induction_variable":\{"tuple_index":"(\d+)"', loop.attributes)
    if place is None:
        return None
    start = computation.by_name[computation.by_name[loop.operands[0]].operands[int(place[1])]]
    while start.opcode == "copy":
        start = computation.by_name[start.operands[0]]
    condition = others[loop.attribute("condition")]
    if condition.root.opcode == "fusion":
        condition = others[condition.root.called[0]]
    end = condition.by_name.get(condition.root.operands[-1])
    is_below = condition.root.opcode == "compare" and condition.root.attribute("direction") == "LT"
    if end is None or not is_below or (start.opcode, end.opcode) != ("constant", "constant"):
        return None
    return int(end.arguments) - int(start.arguments)


_HEADER = re.compile(r"(ENTRY )?%?([\w.\-]+) .*\{$")
# A tuple type ends at the first ") opcode(": within a type, no ") " is followed by a word and a parenthesis.
_LINE = re.compile(r"\s+(ROOT )?%?([\w.\-]+) = (\(.*?\)|\S+) ([a-z][\w\-]*)\(")
_ARRAY = re.compile(r"(\w+)\[([^\]]*)\](\{[^}]*\})?")
_OPERAND = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"\b(?:calls|body|condition|to_apply|true_computation|false_computation)=%?([\w.\-]+)"
    r"|\b(?:branch_computations|called_computations|calls)=\{([^}]*)\}"
)


def _split(lines: list[str]) -> tuple[dict[str, list[str]], str | None]:
    bodies: dict[str, list[str]] = {}
    entry, body = None, None
    for line in lines:
        if line.startswith((" ", "\t")):
            if body is not None:
                body.append(line)
        elif found := _HEADER.match(line):
            body = bodies.setdefault(found[2], [])
            entry = found[2] if found[1] else entry
        else:
            body = None
    return bodies, entry


def _instruction(index: int, line: str, stacks: Mapping[str, tuple[str, ...]]) -> Instruction:
    found = _LINE.match(line)
    if not found:
        raise ValueError(f"not an HLO instruction, or HLO of another version: {line.strip()[:160]!r}")
    is_root, name, kind, opcode = found.groups()
    end = _closing(line, found.end())
    arguments, attributes = line[found.end() : end], line[end + 1 :].removeprefix(", ")
    before, _, metadata = attributes.partition("metadata={")
    known = re.search(r'known_trip_count":\{"n":"(\d+)"', attributes) if opcode == "while" else None
    stack, op_name = _stack(metadata, stacks), re.search(r'op_name="((?:[^"\\]|\\.)*)"', metadata)
    return Instruction(
        name=name,
        opcode=opcode,
        shapes=_shapes(kind),
        operands=() if opcode in ("constant", "parameter") else tuple(_OPERAND.findall(arguments)),
        called=_called(before),
        op_name=op_name[1] if op_name else "",
        source=stack[0] if stack else "",
        index=index,
        attributes=attributes,
        arguments=arguments,
        stack=stack,
        is_root=is_root is not None,
        trip_count=int(known[1]) if known else None,
    )


def _closing(line: str, start: int) -> int:
    """Find the parenthesis that closes the operands, which may contain types with parentheses."""
    depth = 1
    for found in re.finditer(r'"(?:[^"\\]|\\.)*"|[()]', line[start:]):
        depth += {"(": 1, ")": -1}.get(found[0], 0)
        if depth == 0:
            return start + found.start()
    raise ValueError(f"an HLO instruction does not end (is the text cut off?): {line.strip()[:160]!r}")


@functools.lru_cache(maxsize=4096)
def _shapes(text: str) -> tuple[Shape, ...]:
    return tuple(
        Shape(dtype, tuple(int(dim) for dim in dims.replace("<=", "").split(",") if dim), _MEMORY["S(5)" in layout])
        for dtype, dims, layout in _ARRAY.findall(text)
    )


_MEMORY = {False: "device", True: "host"}


@functools.cache
def _bits(dtype: str) -> int:
    """Return the bits of an element type: bf16, f8e4m3fn, u4, c64. A pred has 8, a token 0."""
    found = re.match(r"(?:bf|f|s|u|c)(\d+)", dtype)
    return int(found[1]) if found else 8 if dtype == "pred" else 0


def hlo_dtype(name: str) -> str:
    """Return HLO's name of a dtype: bf16 for bfloat16."""
    if name in _HLO_DTYPES:
        return _HLO_DTYPES[name]
    if name.startswith("float8_"):
        return f"f8{name.removeprefix('float8_')}"
    letters = name.rstrip("0123456789")
    return _HLO_PREFIXES.get(letters, letters) + name[len(letters) :]


_HLO_DTYPES = {"bool": "pred", "bfloat16": "bf16", "complex64": "c64", "complex128": "c128"}
_HLO_PREFIXES = {"float": "f", "int": "s", "uint": "u"}


def _called(attributes: str) -> tuple[str, ...]:
    names = []
    for one, several in _CALLED.findall(attributes):
        names += [one] if one else [name.strip().lstrip("%") for name in several.split(",") if name.strip()]
    return tuple(names)


# Stack frames are in tables of the module's header. Older versions write the innermost frame on each line.


def _stack(metadata: str, stacks: Mapping[str, tuple[str, ...]]) -> tuple[str, ...]:
    frame = re.search(r"stack_frame_id=(\d+)", metadata)
    if frame:
        return stacks.get(frame[1], ())
    written = re.search(r'source_file="([^"]*)"(?: source_line=(\d+))?', metadata)
    return (f"{written[1]}:{written[2] or 0}",) if written else ()


def _stacks(lines: list[str]) -> dict[str, tuple[str, ...]]:
    """Return the stack of each frame, innermost first, from the tables FileNames, FileLocations and StackFrames."""
    files = {number: entry.strip('"') for number, entry in _table(lines, "FileNames")}
    places = {}
    for number, entry in _table(lines, "FileLocations"):
        fields = _fields(entry)
        places[number] = f"{files.get(fields.get('file_name_id', ''), '?')}:{fields.get('line', '0')}"
    frames = {number: _fields(entry) for number, entry in _table(lines, "StackFrames")}
    # Some versions print the parent plus one (1 = none). There the first frame seems to be its own parent.
    offset = 1 if any(fields.get("parent_frame_id") == number for number, fields in frames.items()) else 0
    stacks: dict[str, tuple[str, ...]] = {}
    for number, fields in frames.items():
        parent = str(int(fields.get("parent_frame_id", offset)) - offset)
        stacks[number] = (places.get(fields.get("file_location_id", ""), "?:0"), *stacks.get(parent, ()))
    return stacks


def _table(lines: list[str], title: str) -> Iterator[tuple[str, str]]:
    for line in lines[lines.index(title) + 1 :] if title in lines else ():
        number, _, entry = line.partition(" ")
        if not number.isdigit():
            return
        yield number, entry


def _fields(entry: str) -> dict[str, str]:
    return dict(re.findall(r"(\w+)=(\d+)", entry))
