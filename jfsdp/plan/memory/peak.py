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

from jfsdp.layout.layout import Layout
from jfsdp.plan.cluster.compile import CompiledStep
from jfsdp.plan.hlo.flow import Flow
from jfsdp.plan.hlo.parse import Module
from jfsdp.plan.memory.buffer_assignment import Allocation, find_peak, read_allocations, read_live_ranges, read_schedule
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


def breakdown(compiled: CompiledStep, module: Module, layout: Layout, *, vocab_size: int | None = None) -> Memory:
    """Say what the peak of a compiled step consists of.

    Args:
      module: the step's text, read.
      layout: of the state that the step takes.
      vocab_size: by which logits are known; None: the longest dim of a matrix of the root unit, if that is more than
        twice the other.

    Raises:
      ValueError: if XLA's texts are of another form than expected.
    """
    ranges, allocations = read_live_ranges(compiled.live_ranges), read_allocations(compiled.buffers)
    used = [allocation for allocation in allocations if not allocation.is_thread_local]
    schedule = read_schedule(compiled.live_ranges)
    judge = Judge(Flow(module), layout, ranges, schedule, vocab_size or guess_vocab(layout))
    host = [allocation for allocation in used if _is_on_host(allocation, judge)]
    device = [allocation for allocation in used if allocation not in host]
    moment = find_peak(device, ranges)
    live = [
        *_standing(device, judge),
        *(judge.judge(value, size) for value, size in moment.covered if not value.is_table),
    ]
    parts = collections.Counter(dict.fromkeys(PARTS, 0))
    for buffer in live:
        parts[buffer.part] += buffer.num_bytes
    tables = sum(size for value, size in moment.covered if value.is_table)
    peak = parts.total() + tables if host else compiled.memory_stats.peak_memory_in_bytes
    parts["unattributed"] += peak - parts.total()
    temporaries = sum(allocation.num_bytes for allocation in device if allocation.is_temp)
    return Memory(
        peak_bytes=peak,
        fragmentation_bytes=temporaries - moment.num_bytes,
        host_bytes=sum(allocation.num_bytes for allocation in host),
        parts=dict(parts),
        moment=judge.moment(schedule.get(moment.step, "")),
        buffers=tuple(sorted(live, key=lambda buffer: -buffer.num_bytes)),
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
        if allocation.parameter is not None:
            yield judge.argument(allocation.parameter, allocation.num_bytes)
        elif allocation.is_constant:
            yield Buffer("constant", allocation.num_bytes, "state")
        else:
            yield judge.judge(allocation.values[0], allocation.num_bytes)
