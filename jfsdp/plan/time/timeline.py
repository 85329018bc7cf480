"""Run a schedule on a clock: what computes, what is on the wire meanwhile, what the GPU waits for.

An estimate by arithmetic: nothing here runs on a device. The instructions of each computation are issued in the order
of the schedule. Compute runs on one stream, all collectives on a second one after the other: the schedule may have
several in flight (`engine/options.py` allows eight), and the links that they share carry one at a time. Copies to and
from the host's memory run on a third. A loop's body is run
once and multiplied by its trip count; of a conditional every branch counts. What runs between two iterations at once
is lost at the seam: XLA waits for every collective within the body that starts it.
"""

import collections
import dataclasses
from collections.abc import Iterable

from jfsdp.plan.hlo.collectives import SCALARS_BYTES, Collective, find_done
from jfsdp.plan.hlo.parse import Computation, Instruction, Module
from jfsdp.plan.hlo.trip_counts import executions, runs
from jfsdp.plan.time.rates import Rates
from jfsdp.plan.time.work import Kind, Work, num_matmuls, work_of

__all__ = ["Event", "Rates", "Timed", "Timeline", "overlapped_share", "simulate"]


@dataclasses.dataclass(frozen=True)
class Timed:
    """One collective on the clock; seconds of one execution.

    Attributes:
      hidden_s: of its time on the wire, what passes while something computes for which nothing else is hidden.
      exposed_s: the rest: the GPU waits.
    """

    collective: Collective
    wire_s: float
    num_matmuls_between: int
    hidden_s: float
    exposed_s: float


@dataclasses.dataclass(frozen=True)
class Event:
    """One bar of a chart, in seconds from the beginning of one run of its computation, which runs `times` per step.

    `lane` is "compute", "wire" or "host"; `kind` a work's kind, a collective's kind, "loop" for a run of another
    computation (all its rounds), or "wait" on the compute lane. `name` is that of the instruction, of the computation
    that a loop runs, or of what is waited for.
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
      wire_s: of all collectives, hidden or not.
      overlapped_share: of the bytes that collectives in loops send, the part with at least one matmul between start and
        done; None where there are none.
      host_s: of copies to and from the host's memory.
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
        """What the step's seconds consist of."""
        names = ("matmul_s", "attention_s", "memory_s", "slowdown_s", "exposed_s", "host_exposed_s")
        return {name: getattr(self, name) for name in names}


def simulate(
    module: Module, collectives: Iterable[Collective], rates: Rates, *, works: dict[str, Work] | None = None
) -> Timeline:
    """Run the schedule of a module on a clock.

    A collective's time on the wire is hidden where compute runs between its start and its done that hides no other
    collective; the rest is exposed. A synchronous one is exposed entirely.

    Args:
      works: what each instruction does, by its name, as far as it was found out; is filled, for other rates.

    Raises:
      ValueError: where a loop's length is not known, or a group has devices that the cluster lacks.
    """
    simulation = _Simulation(module, collectives, rates, {} if works is None else works)
    return simulation.timeline(simulation.run(module.entry.name))


def overlapped_share(module: Module, collectives: Iterable[Collective]) -> float | None:
    """Of the bytes that collectives in loops send, return the part with a matmul between start and done.

    None if no loop sends any; scalars do not count. See [Note: what is a matmul].
    """
    inside = [one for one in collectives if one.in_loop and one.total_bytes > SCALARS_BYTES]
    total = sum(one.total_bytes for one in inside)
    hidden = sum(one.total_bytes for one in inside if num_matmuls(module, _between(module, one)))
    return hidden / total if total else None


def _between(module: Module, collective: Collective) -> tuple[Instruction, ...]:
    return module.computations[collective.computation].instructions[collective.start + 1 : collective.done]


@dataclasses.dataclass(eq=False)
class _Pending:
    """Something on a stream beside compute, and what is left of it."""

    name: str
    kind: str
    left_s: float
    begin_s: float | None = None
    hidden_s: float = 0.0
    exposed_s: float = 0.0


class _Clock:
    """Three streams. Time passes by computing (`compute`), by waiting (`wait`), and by other runs (`loop`)."""

    def __init__(self, slowdown: float):
        self.now_s = 0.0
        self.slowdown = slowdown
        self.slowdown_s = 0.0
        self.free_wire_s = 0.0
        self.streams = {lane: collections.deque[_Pending]() for lane in ("wire", "host")}
        self.bars: list[tuple[str, str, str, float, float]] = []  # lane, kind, name, begin, end

    def compute(self, name: str, kind: Kind, seconds: float) -> None:
        """Let something compute; matmuls and attention take longer for as long as the wire is busy."""
        begin_s = self.now_s
        factor = self.slowdown if kind in (Kind.MATMUL, Kind.ATTENTION) else 1.0
        beside_s = min(seconds, sum(pending.left_s for pending in self.streams["wire"]) / factor)
        self._pass(beside_s * factor)
        self._pass(seconds - beside_s)
        self.slowdown_s += beside_s * (factor - 1)
        self.bars.append(("compute", kind.value, name, begin_s, self.now_s))

    def wait(self, lane: str, pending: _Pending) -> None:
        """Let time pass until something on a stream, and all before it, is over."""
        begin_s, queue = self.now_s, self.streams[lane]
        while pending in queue:
            self._pass(queue[0].left_s, waiting=lane)
        if self.now_s > begin_s:
            self.bars.append(("compute", "wait", pending.name, begin_s, self.now_s))

    def loop(self, name: str, run: "_Run", times: int) -> None:
        """Let runs of another computation pass; what is on the wire here gets the time that they leave it free."""
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
        """Work off the head of a stream, and return for how long it had nothing to do."""
        queue, now_s = self.streams[lane], self.now_s
        while queue and (seconds > 0 or queue[0].left_s <= 0):
            head = queue[0]
            head.begin_s = now_s if head.begin_s is None else head.begin_s
            part_s = min(seconds, head.left_s)
            head.left_s, seconds, now_s = head.left_s - part_s, seconds - part_s, now_s + part_s
            if is_exposed:
                head.exposed_s += part_s
            else:
                head.hidden_s += part_s
            if head.left_s <= 0:
                queue.popleft()
                self.bars.append((lane, head.kind, head.name, head.begin_s, now_s))
        return seconds


@dataclasses.dataclass
class _Run:
    """One run of a computation, everything that it calls included."""

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
        """Add what another run computes; its duration passes on the clock."""
        self.host_s += other.host_s * times
        self.host_exposed_s += other.host_exposed_s * times
        for kind in other.kind_s:
            self.kind_s[kind] += other.kind_s[kind] * times


class _Simulation:
    """The runs of all computations of a module, each simulated once."""

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
        if instruction.opcode != "async-start":  # what that wraps is its own work
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
