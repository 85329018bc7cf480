"""Break down the peak memory of a compiled step by category and buffer.

Three sums are exact:

    sum of `parts`                  = `peak_bytes`: XLA's `peak_memory_in_bytes`, the live bytes at the peak
    peak_bytes + fragmentation      = `allocated_bytes`: memory that a device needs (arguments, results, a heap)
    sum of the `buffers` of a part  = that part, except for `unattributed`

`unattributed` and `fragmentation` are remainders. `unattributed` covers unclassified buffers, tables of addresses, and
a few bytes that XLA counts differently. `fragmentation` is the heap of temporaries less its live bytes at the peak. XLA
assigns each buffer one place, so at the peak some bytes are free that only other buffers use. XLA's peak excludes it,
but a device must have it.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterator, Mapping, Sequence

from jfsdp.layout.layout import Layout
from jfsdp.plan.cluster.compile import CompiledStep
from jfsdp.plan.hlo.flow import Flow
from jfsdp.plan.hlo.parse import Module
from jfsdp.plan.memory import buffer_assignment
from jfsdp.plan.memory.classify import PARTS, Buffer, Classifier, guess_vocab

# GPU memory that the step does not use but a run needs. Assumed, not measured: 0.5 GiB for the CUDA context and loaded
# kernels; 1.5 GiB for NCCL (buffers of several MiB per channel and peer, for a few communicators); 1 GiB for cuBLAS and
# cuDNN, the allocator's rounding and fragmentation, and arrays that the caller keeps in addition to state and batch.
# JAX allocates only three quarters of a GPU by default; a run must raise XLA_PYTHON_CLIENT_MEM_FRACTION to use more.
_SPANS = 64  # of the forward and backward: with more rows another one may be the fullest
RESERVE_BYTES = 3 * 2**30


@dataclasses.dataclass(frozen=True)
class Memory:
    """The peak of one device, in parts.

    Attributes:
      peak_bytes: the sum of `parts`. It is XLA's `peak_memory_in_bytes`, except with arrays in host memory, which XLA
        would count: then it is the sum of the device's buffers.
      fragmentation_bytes: the heap of temporaries less its live bytes at the peak; not one of the parts.
      host_bytes: arguments and temporaries of one device in host memory.
      parts: bytes by part, the keys of `PARTS`.
      passes: the same at the fullest moment of each of a few spans of the forward and backward.
      update: the same at the fullest moment after the backward.
      moment: the phase of the step at the peak, and the line of the user's program.
      buffers: all live buffers at the peak, largest first.
    """

    peak_bytes: int
    fragmentation_bytes: int
    host_bytes: int
    parts: Mapping[str, int]
    passes: tuple[Mapping[str, int], ...]
    update: Mapping[str, int]
    moment: str
    buffers: tuple[Buffer, ...]

    @property
    def allocated_bytes(self) -> int:
        """Memory that a device needs for this step."""
        return self.peak_bytes + self.fragmentation_bytes


def breakdown(compiled: CompiledStep, module: Module, layout: Layout, *, vocab_size: int | None = None) -> Memory:
    """Break down the peak memory of a compiled step.

    Args:
      module: the step's parsed text.
      layout: of the step's state.
      vocab_size: identifies logits; None: the longest dim of a matrix of the root unit, if it is more than twice the
        other.

    Raises:
      ValueError: if XLA's texts have an unknown format.
    """
    ranges = buffer_assignment.read_live_ranges(compiled.live_ranges)
    allocations = buffer_assignment.read_allocations(compiled.buffers)
    used = [allocation for allocation in allocations if not allocation.is_thread_local]
    schedule = buffer_assignment.read_schedule(compiled.live_ranges)
    classifier = Classifier(Flow(module), layout, ranges, schedule, vocab_size or guess_vocab(layout))
    host = [allocation for allocation in used if _is_on_host(allocation, classifier)]
    device = [allocation for allocation in used if allocation not in host]
    last = classifier.backward[1]
    after_last = last + 1, buffer_assignment.NEVER
    spans = [*itertools.pairwise(last * part // _SPANS for part in range(_SPANS + 1)), after_last]
    moments = [buffer_assignment.find_peak(device, ranges, *span) for span in spans]
    permanent = list(_permanent(device, classifier))
    live = [
        [*permanent, *(classifier.classify(value, size) for value, size in moment.covered if not value.is_table)]
        for moment in moments
    ]
    totals = [collections.Counter(dict.fromkeys(PARTS, 0)) for _ in moments]
    for parts, buffer in ((parts, buffer) for parts, buffers in zip(totals, live, strict=True) for buffer in buffers):
        parts[buffer.part] += buffer.num_bytes
    most = max(range(len(moments)), key=lambda place: moments[place].num_bytes)
    tables = sum(size for value, size in moments[most].covered if value.is_table)
    peak = totals[most].total() + tables if host else compiled.memory_stats.peak_memory_in_bytes
    for moment, parts in zip(moments, totals, strict=True):
        parts["unattributed"] += peak - moments[most].num_bytes + moment.num_bytes - parts.total()
    temporaries = sum(allocation.num_bytes for allocation in device if allocation.is_temp)
    return Memory(
        peak_bytes=peak,
        fragmentation_bytes=temporaries - moments[most].num_bytes,
        host_bytes=sum(allocation.num_bytes for allocation in host),
        parts=dict(totals[most]),
        passes=tuple(map(dict, totals[:-1])),
        update=dict(totals[-1]),
        moment=classifier.moment(schedule.get(moments[most].step, "")),
        buffers=tuple(sorted(live[most], key=lambda buffer: -buffer.num_bytes)),
    )


def largest_buffers(memory: Memory, num: int = 20) -> list[tuple[str, str, int, int]]:
    """List the largest buffers at the peak, grouped by name, as (part, name, count, total bytes)."""
    groups: dict[tuple[str, str], list[int]] = {}
    for buffer in memory.buffers:
        groups.setdefault((buffer.part, buffer.name), []).append(buffer.num_bytes)
    rows = [(part, name, len(sizes), sum(sizes)) for (part, name), sizes in groups.items()]
    return sorted(rows, key=lambda row: -row[3])[:num]


def _is_on_host(allocation: buffer_assignment.Allocation, classifier: Classifier) -> bool:
    """Whether an allocation is in host memory; XLA does not mark offloaded parameters, the arguments named `lent`."""
    if allocation.is_host or allocation.parameter is None:
        return allocation.is_host
    return classifier.flow.parameters[allocation.parameter].op_name.startswith("lent")


def _permanent(allocations: Sequence[buffer_assignment.Allocation], classifier: Classifier) -> Iterator[Buffer]:
    """Yield buffers that are live during the whole step: arguments, results without a donated argument, constants."""
    for allocation in allocations:
        if allocation.is_temp or allocation.is_table or not allocation.values:
            continue
        if allocation.parameter is not None:
            yield classifier.argument(allocation.parameter, allocation.num_bytes)
        elif allocation.is_constant:
            yield Buffer("constant", allocation.num_bytes, "state")
        else:
            yield classifier.classify(allocation.values[0], allocation.num_bytes)
