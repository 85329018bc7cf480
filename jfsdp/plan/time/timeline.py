"""Simulate the schedule of a program: compute, overlapped communication, and waits.

Nothing runs on a device. The instructions of each computation are issued in schedule order on three streams: compute,
collectives, and copies between device and host. Collectives run one after the other: several may be in flight
(`engine/options.py` allows eight), but they share links. A loop's body is simulated once and multiplied by its trip
count. All branches of a conditional count. Iterations do not overlap, since XLA waits for every collective within the
body that starts it.
"""

import collections
import dataclasses
from collections.abc import Iterable

from jfsdp.plan.hlo.collectives import SCALARS_BYTES, Collective, find_done
from jfsdp.plan.hlo.parse import Computation, Instruction, Module
from jfsdp.plan.hlo.trip_counts import executions, runs
from jfsdp.plan.time.rates import Rates
from jfsdp.plan.time.work import Kind, Work, num_matmuls, work_of

__all__ = ["Event", "Rates", "Timed", "Timeline", "hidden_share", "overlapped_share", "simulate"]


@dataclasses.dataclass(frozen=True)
class Timed:
    """The simulated time of one execution of a collective.

    Attributes:
      hidden_s: the part of `wire_s` that overlaps with compute that hides no other collective.
      exposed_s: the remainder, during which the GPU waits.
    """

    collective: Collective
    wire_s: float
    num_matmuls_between: int
    hidden_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Event:
    """One bar of a chart, in seconds from the start of one run of its computation, which runs `times` per step.

    `lane` is "compute", "wire" or "host". `kind` is a kind of work or collective, "loop" for all iterations of another
    computation, or "wait" on the compute lane. `name` is the instruction, the loop's computation, or the instruction
    that is waited for.
    """

    computation: str
    times: int
    lane: str
    kind: str
    name: str
    begin_s: float
    end_s: float


@dataclasses.dataclass(frozen=True)
class Timeline:
    """Estimated seconds of one step on one device; step_s = compute_s + slowdown_s + exposed_s + host_exposed_s.

    Attributes:
      compute_s: at full speed; the sum of the next three.
      wire_s: of all collectives, overlapped or not.
      overlapped_share: the share of collective bytes in loops with a matmul between start and done; None if loops send
        nothing.
      host_s: of copies between device and host.
    """

    step_s: float
    compute_s: float
    matmul_s: float
    attention_s: float
    memory_s: float
    slowdown_s: float
    wire_s: float
    exposed_s: float
    host_s: float
    host_exposed_s: float
    overlapped_share: float | None
    collectives: tuple[Timed, ...]
    events: tuple[Event, ...]

    @property
    def critical(self) -> dict[str, float]:
        """The parts of the step's seconds."""
        names = ("matmul_s", "attention_s", "memory_s", "slowdown_s", "exposed_s", "host_exposed_s")
        return {name: getattr(self, name) for name in names}


def simulate(
    module: Module, collectives: Iterable[Collective], rates: Rates, *, works: dict[str, Work] | None = None
) -> Timeline:
    """Simulate the schedule of a module.

    The time of a collective is hidden while compute runs between its start and its done, unless that compute hides
    another collective. The rest is exposed. A synchronous collective is exposed entirely.

    Args:
      works: a cache of each instruction's work, by name, to simulate the same module with other rates.

    Raises:
      ValueError: for a loop of unknown length, and for a group with devices that the cluster does not have.
    """
    simulation = _Simulation(module, collectives, rates, {} if works is None else works)
    return simulation.timeline(simulation.run(module.entry.name))


def overlapped_share(module: Module, collectives: Iterable[Collective]) -> float | None:
    """Return the share of collective bytes in loops with a matmul between start and done.

    Scalars do not count. None if no loop sends anything. See [Note: what is a matmul].
    """
    inside = (one for one in collectives if one.in_loop)
    return hidden_share((one.total_bytes, num_matmuls(module, _between(module, one))) for one in inside)


def hidden_share(sent: Iterable[tuple[float, int]]) -> float | None:
    """Return the share of the bytes of collectives with a matmul between start and done; None if nothing is sent.

    Args:
      sent: bytes of each collective, and its number of matmuls between start and done. Scalars do not count.
    """
    arrays = [(size, num) for size, num in sent if size > SCALARS_BYTES]
    total = sum(size for size, _ in arrays)
    return sum(size for size, num in arrays if num) / total if total else None


def _between(module: Module, collective: Collective) -> tuple[Instruction, ...]:
    return module.computations[collective.computation].instructions[collective.start + 1 : collective.done]


@dataclasses.dataclass(eq=False)
class _Pending:
    """A collective or a copy on its stream, with its remaining seconds."""

    name: str
    kind: str
    remaining_s: float
    begin_s: float | None = None
    hidden_s: float = 0.0
    exposed_s: float = 0.0


class _Clock:
    """Three streams. Time advances by compute (`compute`), waits (`wait`) and other computations (`loop`)."""

    def __init__(self, slowdown: float):
        self.now_s = 0.0
        self.slowdown = slowdown
        self.slowdown_s = 0.0
        self.free_wire_s = 0.0
        self.streams = {lane: collections.deque[_Pending]() for lane in ("wire", "host")}
        self.bars: list[tuple[str, str, str, float, float]] = []  # lane, kind, name, begin, end

    def compute(self, name: str, kind: Kind, seconds: float) -> None:
        """Advance by a kernel; matmuls and attention are slower while a collective runs."""
        begin_s = self.now_s
        factor = self.slowdown if kind in (Kind.MATMUL, Kind.ATTENTION) else 1.0
        overlapped_s = min(seconds, sum(pending.remaining_s for pending in self.streams["wire"]) / factor)
        self._pass(overlapped_s * factor)
        self._pass(seconds - overlapped_s)
        self.slowdown_s += overlapped_s * (factor - 1)
        self.bars.append(("compute", kind.value, name, begin_s, self.now_s))

    def wait(self, lane: str, pending: _Pending) -> None:
        """Advance until an item on a stream, and all items before it, are done."""
        begin_s, queue = self.now_s, self.streams[lane]
        while pending in queue:
            self._pass(queue[0].remaining_s, waiting=lane)
        if self.now_s > begin_s:
            self.bars.append(("compute", "wait", pending.name, begin_s, self.now_s))

    def loop(self, name: str, run: "_Run", times: int) -> None:
        """Advance by the runs of another computation. Collectives in flight progress while it sends nothing."""
        begin_s = self.now_s
        self._pass(run.free_wire_s * times)
        self._pass((run.seconds - run.free_wire_s) * times, lanes=("host",))
        self.slowdown_s += run.slowdown_s * times
        if self.now_s > begin_s:
            self.bars.append(("compute", "loop", name, begin_s, self.now_s))

    def _pass(self, seconds: float, *, waiting: str = "", lanes: tuple[str, ...] = ("wire", "host")) -> None:
        for lane in lanes:
            idle_s = self._drain(lane, seconds, is_exposed=lane == waiting)
            self.free_wire_s += idle_s if lane == "wire" else 0.0
        self.now_s += seconds

    def _drain(self, lane: str, seconds: float, *, is_exposed: bool) -> float:
        """Advance a stream, and return for how many of these seconds it is idle."""
        queue, now_s = self.streams[lane], self.now_s
        while queue and (seconds > 0 or queue[0].remaining_s <= 0):
            head = queue[0]
            head.begin_s = now_s if head.begin_s is None else head.begin_s
            part_s = min(seconds, head.remaining_s)
            head.remaining_s, seconds, now_s = head.remaining_s - part_s, seconds - part_s, now_s + part_s
            if is_exposed:
                head.exposed_s += part_s
            else:
                head.hidden_s += part_s
            if head.remaining_s <= 0:
                queue.popleft()
                self.bars.append((lane, head.kind, head.name, head.begin_s, now_s))
        return seconds


@dataclasses.dataclass
class _Run:
    """One run of a computation, including the computations that it calls."""

    seconds: float = 0.0
    free_wire_s: float = 0.0
    slowdown_s: float = 0.0
    host_s: float = 0.0
    host_exposed_s: float = 0.0
    kind_s: dict[Kind, float] = dataclasses.field(default_factory=lambda: dict.fromkeys(Kind, 0.0))

    @property
    def compute_s(self) -> float:
        return sum(self.kind_s.values())

    def add(self, other: "_Run", times: int) -> None:
        """Add the compute of another run. The clock adds its duration."""
        self.host_s += other.host_s * times
        self.host_exposed_s += other.host_exposed_s * times
        for kind in other.kind_s:
            self.kind_s[kind] += other.kind_s[kind] * times


class _Simulation:
    """Simulates each computation of a module once."""

    def __init__(self, module: Module, collectives: Iterable[Collective], rates: Rates, works: dict[str, Work]):
        self.module, self.rates, self.works = module, rates, works
        self.starts: dict[tuple[str, int], list[Collective]] = {}
        for collective in collectives:
            self.starts.setdefault((collective.computation, collective.start), []).append(collective)
        self.runs: dict[str, _Run] = {}
        self.timed: list[Timed] = []
        self.events: list[Event] = []
        self.times = {found.computation.name: found.times for found in executions(module)}

    def run(self, name: str) -> _Run:
        if name not in self.runs:
            self.runs[name] = self._run(self.module.computations[name])
        return self.runs[name]

    def timeline(self, run: _Run) -> Timeline:
        def total(attribute: str) -> float:
            return sum(getattr(timed, attribute) * timed.collective.count for timed in self.timed)

        return Timeline(
            step_s=run.seconds,
            compute_s=run.compute_s,
            matmul_s=run.kind_s[Kind.MATMUL],
            attention_s=run.kind_s[Kind.ATTENTION],
            memory_s=run.kind_s[Kind.MEMORY],
            slowdown_s=run.slowdown_s,
            wire_s=total("wire_s"),
            exposed_s=total("exposed_s"),
            host_s=run.host_s,
            host_exposed_s=run.host_exposed_s,
            overlapped_share=overlapped_share(self.module, [timed.collective for timed in self.timed]),
            collectives=tuple(self.timed),
            events=tuple(self.events),
        )

    def _run(self, computation: Computation) -> _Run:
        run, clock = _Run(), _Clock(self.rates.overlap_slowdown)
        waits: collections.defaultdict[int, list[tuple[str, _Pending]]] = collections.defaultdict(list)
        issued: list[tuple[Collective, _Pending]] = []
        copies: list[_Pending] = []

        def issue(lane: str, pending: _Pending, done: int) -> None:
            clock.streams[lane].append(pending)
            waits[done].append((lane, pending))

        for instruction in computation.instructions:
            work = self._work(computation, instruction)
            for lane, pending in waits.pop(instruction.index, ()):
                clock.wait(lane, pending)
            for collective in self.starts.get((computation.name, instruction.index), ()):
                pending = _Pending(collective.name, collective.kind, self.rates.collective_s(collective))
                issued.append((collective, pending))
                issue("wire", pending, collective.done)
            if work.kind is Kind.HOST:
                copies.append(_Pending(instruction.name, work.kind.value, self.rates.work_s(work)))
                issue("host", copies[-1], find_done(computation, instruction))
            for lane, pending in waits.pop(instruction.index, ()):  # the synchronous ones
                clock.wait(lane, pending)
            self._compute(instruction, work, run, clock)
        run.seconds, run.free_wire_s, run.slowdown_s = clock.now_s, clock.free_wire_s, clock.slowdown_s
        run.host_s += sum(copy.hidden_s + copy.exposed_s for copy in copies)
        run.host_exposed_s += sum(copy.exposed_s for copy in copies)
        self.timed += [
            Timed(
                collective=collective,
                wire_s=pending.hidden_s + pending.exposed_s,
                num_matmuls_between=num_matmuls(self.module, _between(self.module, collective)),
                hidden_s=pending.hidden_s,
                exposed_s=pending.exposed_s,
            )
            for collective, pending in issued
        ]
        times = self.times[computation.name]
        self.events += [Event(computation.name, times, *bar) for bar in sorted(clock.bars, key=lambda bar: bar[3])]
        return run

    def _compute(self, instruction: Instruction, work: Work, run: _Run, clock: _Clock) -> None:
        if instruction.opcode != "async-start":  # its body counts as this instruction's work
            for name, times in runs(instruction):
                run.add(self.run(name), times)
                clock.loop(name, self.run(name), times)
        work = work.with_documents(self.rates.documents_per_row)
        if work.kind not in (Kind.NONE, Kind.HOST):
            seconds = self.rates.work_s(work)
            run.kind_s[work.kind] += seconds
            clock.compute(instruction.name, work.kind, seconds)

    def _work(self, computation: Computation, instruction: Instruction) -> Work:
        name = f"{computation.name}/{instruction.name}"
        if name not in self.works:
            self.works[name] = work_of(self.module, computation, instruction)
        return self.works[name]
