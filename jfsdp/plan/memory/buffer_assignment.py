"""Parse XLA's memory dumps: live ranges of values, and their offsets in allocations.

With `xla_dump_to=<directory>` and `xla_dump_hlo_as_text=True`, XLA writes two texts next to the module. The text
`*-live-range.txt` has the flattened schedule, with loops inlined once, and the first and last step of every value. The
text `*-buffer-assignment.txt` has allocations, with the offsets and sizes of their values.

[Note: the moment of the peak]
The peak is the step at which the values in the temporaries' allocation sum to the most bytes. A value is live from the
step that writes it to the step that reads it last, both included. That sum equals `peak_memory_in_bytes` of
`memory_analysis()` (within 20 kB of 13.6 GB for Llama-3-8B). The section `Live ranges at N (peak)` of the live-range
text is not used: it omits values at the step that reads them last, although that step's inputs and outputs are in
memory together (0.5 GB less of 4.4 on a sample).
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

NEVER = 1 << 62  # after the last step of a schedule
HOST_COLOR = 5  # how XLA's buffer assignment marks host memory; the layout says S(5)


@dataclasses.dataclass(frozen=True)
class Value:
    """One value in an allocation: the name of its instruction, its index in the instruction's tuple, and its bytes.

    `shape` is XLA's text, such as `bf16[4,1,2048,4096]{3,2,1,0}`. A tuple's text starts with a parenthesis, and its
    bytes are a table of addresses.
    """

    name: str
    index: tuple[int, ...]
    offset: int
    num_bytes: int
    shape: str

    @property
    def is_table(self) -> bool:
        """Whether this is a tuple's table of addresses."""
        return self.shape.startswith("(")

    @property
    def dtype(self) -> str:
        return self.shape.partition("[")[0]

    @property
    def dims(self) -> tuple[int, ...]:
        inside = re.match(r"\w+\[([\d,]*)\]", self.shape)
        return tuple(int(dim) for dim in inside[1].split(",") if dim) if inside else ()


@dataclasses.dataclass(frozen=True)
class Allocation:
    """One block of memory.

    Attributes:
      parameter: number of the entry's parameter that it contains, or None.
      is_temp: whether it is a heap of temporaries, which share it over time.
      is_thread_local: whether it belongs to a scalar computation inside a kernel. Such blocks use no GPU memory.
      is_host: whether it is in host memory.
    """

    num_bytes: int
    parameter: int | None
    is_temp: bool
    is_constant: bool
    is_thread_local: bool
    is_host: bool
    values: tuple[Value, ...]

    @property
    def is_table(self) -> bool:
        return any(value.is_table for value in self.values)


LiveRanges = Mapping[tuple[str, tuple[int, ...]], tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class Moment:
    """One step of the schedule and the live values in the temporaries' allocations.

    `covered` lists each live value with its bytes that no earlier value covers. Values may share bytes (a loop's carry
    and its in-place update), and each byte counts once.
    """

    step: int
    covered: tuple[tuple[Value, int], ...]

    @property
    def num_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.covered)


def read_dump(directory: str | os.PathLike[str], module: str) -> tuple[str, str]:
    """Return the live-range text and the buffer-assignment text of a module that XLA dumped into a directory.

    Args:
      module: its name, as in the first line of its text (`jit__step`).

    Raises:
      ValueError: if the directory has none or several of either kind.
    """
    texts = []
    for kind in ("live-range", "buffer-assignment"):
        found = list(Path(directory).glob(f"*.{module}.*after_optimizations-{kind}.txt"))
        if len(found) != 1:
            raise ValueError(
                f"{directory}: {len(found)} texts of kind {kind!r} for module {module!r}, expected one; compile with "
                "compiler_options xla_dump_to (an empty directory) and xla_dump_hlo_as_text"
            )
        texts.append(found[0].read_text(encoding="utf-8"))
    return texts[0], texts[1]


_RANGE = re.compile(r"^\s+([^\s{}]+)\{([\d,]*)\}:(\d+)-(\d+)$", re.MULTILINE)


def read_live_ranges(text: str) -> LiveRanges:
    """Read the live range of each value: its first and last step of the flattened schedule, both included.

    Raises:
      ValueError: for a text without live ranges.
    """
    ranges = {(name, _index(index)): (int(start), int(end)) for name, index, start, end in _RANGE.findall(text)}
    if not ranges:
        raise ValueError(f"no live range in a text of {len(text)} characters; expected XLA's *-live-range.txt")
    return ranges


def read_schedule(text: str) -> dict[int, str]:
    """Read the instruction of each step from a live-range text."""
    return {int(step): name for step, name in re.findall(r"^\s+(\d+):([^\s{}]+)$", text, re.MULTILINE)}


_ALLOCATION = re.compile(r"^allocation \d+: size (\d+)(.*):$")
_VALUE = re.compile(r"^ value: <\d+ ([^\s{}]+)(?:\{([\d,]*)\})?(?: \(phi\))? @\d+> \(size=(\d+),offset=(\d+)\): (.*)$")


def read_allocations(text: str) -> tuple[Allocation, ...]:
    """Read allocations and their values.

    Raises:
      ValueError: for a text without allocations, and for a line of unknown form.
    """
    found: list[tuple[int, str, list[Value]]] = []
    for line in text.partition("\n\n")[0].splitlines():
        if head := _ALLOCATION.match(line):
            found.append((int(head[1]), head[2], []))
        elif value := _VALUE.match(line):
            name, index, num_bytes, offset, shape = value.groups()
            found[-1][2].append(Value(name, _index(index or ""), int(offset), int(num_bytes), shape))
        elif line.startswith((" value:", "allocation")):
            raise ValueError(f"cannot read {line[:120]!r} of XLA's *-buffer-assignment.txt: its format has changed")
    if not found:
        raise ValueError(f"no allocation in a text of {len(text)} characters; expected XLA's *-buffer-assignment.txt")
    return tuple(_allocation(*parts) for parts in found)


def _allocation(num_bytes: int, facts: str, values: Sequence[Value]) -> Allocation:
    parameter, color = re.search(r"parameter (\d+)", facts), re.search(r"color (\d+)", facts)
    return Allocation(
        num_bytes=num_bytes,
        parameter=int(parameter[1]) if parameter else None,
        is_temp="preallocated-temp" in facts,
        is_constant="constant" in facts,
        is_thread_local="thread-local" in facts,
        is_host=color is not None and int(color[1]) == HOST_COLOR,
        values=tuple(values),
    )


def _index(text: str) -> tuple[int, ...]:
    return tuple(int(place) for place in text.split(",") if place)


def find_peak(allocations: Iterable[Allocation], ranges: LiveRanges, first: int = 0, last: int = NEVER) -> Moment:
    """Find the step with the most live bytes of temporaries; see [Note: the moment of the peak].

    Args:
      first, last: the steps to consider.
    """
    timed = [
        (place, (max(start, first), min(end, last)), value)
        for place, allocation in enumerate(allocations)
        if allocation.is_temp
        for value in allocation.values
        for start, end in [ranges[value.name, value.index]]
        if start <= last and first <= end
    ]
    best = Moment(0, ())
    for bound, step in _bounds(timed):
        if bound <= best.num_bytes:
            break
        live = [(place, value) for place, (start, end), value in timed if start <= step <= end]
        moment = Moment(step, tuple(_cover(live)))
        best = max(best, moment, key=lambda found: found.num_bytes)
    return best


Timed = Sequence[tuple[int, tuple[int, int], Value]]


def _bounds(timed: Timed) -> list[tuple[int, int]]:
    """Return an upper bound of the covered bytes at each step, largest first. Values in the same bytes count once."""
    slots: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for place, lifetime, value in timed:
        slots.setdefault((place, value.offset, value.num_bytes), []).append(lifetime)
    changes: dict[int, int] = {}
    for (_, _, num_bytes), lifetimes in slots.items():
        for start, end in _merge(lifetimes):
            changes[start] = changes.get(start, 0) + num_bytes
            changes[end + 1] = changes.get(end + 1, 0) - num_bytes
    steps = sorted(changes)
    totals = itertools.accumulate(changes[step] for step in steps)
    return sorted(zip(totals, steps, strict=True), reverse=True)


def _merge(spans: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merge overlapping closed spans."""
    merged: list[tuple[int, int]] = []
    for start, end in sorted(spans):
        if merged and start <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((start, end))
    return merged


def _cover(live: Iterable[tuple[int, Value]]) -> Iterator[tuple[Value, int]]:
    """Assign each byte to the largest value that covers it; among equals, to the first."""
    taken: dict[int, list[tuple[int, int]]] = {}
    for place, value in sorted(live, key=lambda item: -item[1].num_bytes):
        spans, limit = taken.setdefault(place, []), value.offset + value.num_bytes
        num_bytes = value.num_bytes - sum(max(0, min(end, limit) - max(start, value.offset)) for start, end in spans)
        if num_bytes:
            yield value, num_bytes
            taken[place] = _merge([*spans, (value.offset, limit)])
