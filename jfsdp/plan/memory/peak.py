"""What the memory of a device is full of when it is fullest: the peak of a compiled step, to the byte and by name.

Three sums, each exact:

    sum of `parts`                  = `peak_bytes`: XLA's `peak_memory_in_bytes`, what is live at the fullest moment
    peak_bytes + fragmentation      = `allocated_bytes`: what a device must have (arguments, results, a heap)
    sum of the `buffers` of a part  = that part, but for `unattributed`

`unattributed` and `fragmentation` are remainders. To the first belong the buffers for which no evidence speaks, tables
of addresses, and the few bytes by which XLA counts differently. The second is the heap of temporaries less what lies in
it at the peak: XLA places buffers once, and at the peak some bytes are free that only others can use, before or after.
XLA's peak does not count it, but a device must have it.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from jfsdp.layout.layout import Layout
from jfsdp.plan.hlo.flow import Flow
from jfsdp.plan.hlo.parse import Module
from jfsdp.plan.memory.buffer_assignment import (
    Allocation,
    find_peak,
    read_allocations,
    read_live_ranges,
    read_schedule,
)
from jfsdp.plan.memory.classify import PARTS, Buffer, Judge, guess_vocab

# What else of a GPU's memory is taken while a step runs. Assumed, not measured: 0.5 GiB for the CUDA context and loaded
# kernels; 1.5 GiB for NCCL (buffers of several MiB per channel and peer, for a few communicators); 1 GiB for cuBLAS and
# cuDNN, the allocator's rounding and holes, and arrays that the caller keeps beside state and batch. JAX itself takes
# only three quarters of a GPU unless XLA_PYTHON_CLIENT_MEM_FRACTION says more: whoever starts the run sets that.
RESERVE_BYTES = 3 * 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak of one device, in parts.

    Attributes:
      peak_bytes: the sum of `parts`; XLA's `peak_memory_in_bytes`, unless something lies in host memory, which XLA
        counts as the device's: then what was found.
      fragmentation_bytes: the heap of temporaries less what lies in it at the peak; not one of the parts.
      host_bytes: what one device holds in the host's memory, arguments and temporaries.
      parts: bytes by part, the keys of `PARTS`.
      moment: which operation runs at the peak, and the line of the user's program.
      buffers: everything that is live at the peak, largest first.
    """

    peak_bytes: int
    fragmentation_bytes: int
    host_bytes: int
    parts: Mapping[str, int]
    moment: str
    buffers: tuple[Buffer, ...]

    @property
    def allocated_bytes(self) -> int:
        """What the device must have for this step."""
        return self.peak_bytes + self.fragmentation_bytes

    def __str__(self) -> str:
        rows = [(part, size) for part, size in self.parts.items() if size]
        rows += [("peak", self.peak_bytes), ("fragmentation", self.fragmentation_bytes)]
        return "\n".join(f"{part:14}{size / 2**30:9.3f} GiB {size / self.peak_bytes:6.1%}" for part, size in rows)


def breakdown(
    live_range_text: str,
    assignment_text: str,
    module: Module,
    layout: Layout,
    memory_stats: Any = None,
    *,
    vocab_size: int | None = None,
) -> Memory:
    """Say what the peak of a compiled step consists of.

    Args:
      live_range_text, assignment_text: what XLA wrote when it compiled the step; `buffers.read_dump` finds them.
      module: the compiled step, `parse_module(compiled.as_text())`.
      layout: of the state that the step takes.
      memory_stats: `compiled.memory_analysis()`; None: the peak is what was found.
      vocab_size: by which logits are known; None: the longest dim of a matrix of the root unit, if that is more than
        twice the other.

    Raises:
      ValueError: if the texts are of another form than expected, or of another module.
    """
    ranges, allocations = read_live_ranges(live_range_text), read_allocations(assignment_text)
    used = [allocation for allocation in allocations if not allocation.is_thread_local]
    schedule = read_schedule(live_range_text)
    judge = Judge(Flow(module), layout, ranges, schedule, vocab_size or guess_vocab(layout))
    device = [allocation for allocation in used if not _is_on_host(allocation, judge)]
    host = [allocation for allocation in used if _is_on_host(allocation, judge)]
    moment = find_peak(device, ranges)
    held = [
        *_standing(device, judge),
        *(judge.judge(value, size) for value, size in moment.covered if not value.is_table),
    ]
    parts = collections.Counter(dict.fromkeys(PARTS, 0))
    for buffer in held:
        parts[buffer.part] += buffer.num_bytes
    tables = sum(size for value, size in moment.covered if value.is_table)
    peak = parts.total() + tables
    if memory_stats is not None and not host:
        peak = memory_stats.peak_memory_in_bytes
    parts["unattributed"] += peak - parts.total()
    temporaries = sum(allocation.num_bytes for allocation in device if allocation.is_temp)
    return Memory(
        peak_bytes=peak,
        fragmentation_bytes=temporaries - moment.num_bytes,
        host_bytes=sum(allocation.num_bytes for allocation in host),
        parts=dict(parts),
        moment=judge.moment(schedule.get(moment.step, "")),
        buffers=tuple(sorted(held, key=lambda buffer: -buffer.num_bytes)),
    )


def largest_buffers(memory: Memory, num: int = 20) -> list[tuple[str, str, int, int]]:
    """List what is largest at the peak as (part, name, how many of that name, bytes of all of them)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for buffer in memory.buffers:
        groups.setdefault((buffer.part, buffer.name), []).append(buffer.num_bytes)
    rows = [(part, name, len(sizes), sum(sizes)) for (part, name), sizes in groups.items()]
    return sorted(rows, key=lambda row: -row[3])[:num]


def _is_on_host(allocation: Allocation, judge: Judge) -> bool:
    """Offloaded parameters are arguments apart from the state; XLA does not say that they lie in the host's memory."""
    if allocation.is_host or allocation.parameter is None:
        return allocation.is_host
    return judge.flow.parameters[allocation.parameter].op_name.startswith("lent")


def _standing(allocations: Sequence[Allocation], judge: Judge) -> Iterator[Buffer]:
    """What lies in memory during the whole step: arguments, results that replace none, constants."""
    for allocation in allocations:
        if allocation.is_temp or allocation.is_table or not allocation.values:
            continue
        first = allocation.values[0]
        if allocation.parameter is not None:
            yield judge.argument(allocation.parameter, allocation.num_bytes, first)
        elif allocation.is_constant:
            yield judge.buffer("state", "constant", first, allocation.num_bytes, judge.flow.by_name[first.name])
        else:
            yield judge.judge(first, allocation.num_bytes)
