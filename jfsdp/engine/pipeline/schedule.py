"""Pipeline schedules as tables of ints: the forward and the backward task of each stage in each tick.

[Note: ticks]
All stages run through the same ticks. In a tick, a stage computes at most one forward and one backward of some of its
layers, and its outputs reach its neighbours in the next tick. The last stage may compute forward and backward of a
microbatch in the same tick, with the loss between them. Ticks have no branches: a stage without work computes the same
on rows of another microbatch, and its outputs are not used. Ticks without any backward (or forward) are separate
programs without it.

A stage has v parts of the layers (`repeats`): part k of stage d is number k P + d of all parts, so that a microbatch
passes all stages v times. Task k M + m is part k of microbatch m. If v > 1, P divides the number of microbatches M.

`1f1b`: microbatch m enters part k of stage d in tick (m // P) P v + k P + m % P + d, and returns through the parts in
reverse, as early as possible: on the last stage in the tick of its last forward. With v = 1 at most 2P-1 microbatches
are between forward and backward on a stage, for any M. `gpipe`: all microbatches run forward first, and all M wait.
Both take vM+P-1 times a forward and a backward of a part; the share (P-1)/(vM+P-1) of that is the bubble.
Sources: GPipe (arXiv 1811.06965), PipeDream-Flush (arXiv 2006.09503), interleaved stages (arXiv 2104.04473).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from jfsdp.arguments import Size, checked
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import PIPE
from jfsdp.layout.policy import SaveNames

IDLE = -1
NAMES = ("1f1b", "gpipe")
Table = Sequence[Sequence[int]]


@dataclasses.dataclass(frozen=True)
class StageCalls:
    """Facts about the calls of units in a stage; see [Note: the ends of a stage] in pipeline/stage.py.

    Attributes:
      stay: whether the ends of the stage stay gathered.
      first, last: the units called first and last, whose weights stay gathered; the last from forward to backward.
      left: the unit with a gradient that waits for the next tick.
      silent: the units without a backward.
    """

    stay: bool
    first: str
    last: str
    left: str
    silent: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Passes:
    """How often a pipeline's stages run through their layers in a step.

    Attributes:
      forward, backward: the number of ticks with work; each runs through one part of a stage's layers.
      repeats: the number of parts per stage.
      turns: whether gathers run ahead, so that the ends of a stage may stay gathered.
      calls: of a stage, from its trace; None: each unit is called once, in the order of the layout.
    """

    forward: int
    backward: int
    repeats: int = 1
    turns: bool = True
    calls: StageCalls | None = None


@checked
@dataclasses.dataclass(frozen=True)
class Schedule:
    """A custom schedule.

    Attributes:
      forward, backward: [ticks, P] ints: the task, from 0, that a stage computes in a tick, or -1 for none. With one
        part per stage a task is a microbatch; otherwise task k M + m is part k of microbatch m. Each stage runs each
        task once forward and once backward.
    """

    forward: Sequence[Sequence[int]]
    backward: Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        for name in ("forward", "backward"):
            object.__setattr__(self, name, tuple(tuple(map(int, row)) for row in getattr(self, name)))

    def passes(self, repeats: int, turns: bool, calls: StageCalls | None = None) -> Passes:
        """Return how often the stages run through their layers; `turns` and `calls` as in `Passes`."""
        busy = [sum(any(task != IDLE for task in row) for row in table) for table in (self.forward, self.backward)]
        return Passes(busy[0], busy[1], repeats, turns, calls)


def turns_stay(prefetch: Prefetch, repeats: int) -> bool:
    """Tell whether the ends of a stage stay gathered: if gathers run ahead and a stage has one part."""
    return repeats == 1 and all(isinstance(ahead, int) and ahead > 0 for ahead in (prefetch.forward, prefetch.backward))


@checked
def get_schedule(requested: str | Schedule, stages: Size, microbatches: Size, repeats: Size = 1) -> Schedule:
    """Return a schedule by its name, or a custom one after checks.

    Raises:
      ValueError: for an unknown name; for a number of microbatches that does not fit `repeats` > 1; for a table of
        another number of stages, one in which a stage does not run each task once, and one in which a stage needs a
        value before it exists, naming stage, task and tick.
    """
    if isinstance(requested, Schedule):
        _check(requested, stages, microbatches, repeats)
        return requested
    if requested not in NAMES:
        raise ValueError(
            f"pipe_schedule={requested!r} is unknown; the schedules are {', '.join(NAMES)}, or a custom Schedule"
        )
    if repeats > 1 and microbatches % stages:
        more = -microbatches % stages
        raise ValueError(
            f"accumulate={microbatches} microbatches cannot pass {stages} stages (mesh axis {PIPE!r}) pipe_repeats="
            f"{repeats} times: {stages} does not divide them; take {microbatches + more}, or pipe_repeats=1"
        )
    late = repeats * stages - 1 if requested == "1f1b" else repeats * microbatches + stages - 1
    ticks = late + repeats * microbatches + stages - 1
    tables = {name: [[IDLE] * stages for _ in range(ticks)] for name in ("forward", "backward")}
    for stage in range(stages):
        for task in range(repeats * microbatches):
            part, m = divmod(task, microbatches)
            turn = m // stages * stages * repeats + m % stages
            tables["forward"][turn + part * stages + stage][stage] = task
            tables["backward"][late + turn + (repeats - part) * stages - 1 - stage][stage] = task
    return Schedule(tables["forward"], tables["backward"])


def schedule_of(layout: Layout, requested: str | Schedule, microbatches: int, repeats: int) -> Schedule | None:
    """Return the schedule of a step on a layout; None without a pipeline.

    Raises:
      ValueError: for a schedule or repeats without a pipeline, layers that cannot be divided into such parts, and
        activations of layers in host memory; as `get_schedule`.
    """
    stages = layout.num_stages
    if stages == 1:
        if repeats != 1 or requested != NAMES[0]:
            given = f"pipe_repeats={repeats}" if repeats != 1 else f"pipe_schedule={requested!r}"
            raise ValueError(f"{given}: the mesh has no pipeline; make one with make_mesh({PIPE}=P), --mesh {PIPE}=P")
        return None
    for leaf in (leaf for leaf in layout.leaves if leaf.is_staged):
        remat = layout.policy(leaf.unit).remat
        if isinstance(remat, SaveNames) and remat.offload:
            raise ValueError(
                f"unit {leaf.unit!r}: remat keeps {', '.join(remat.offload)} in host memory, but values that wait "
                f"for the backward of a stage (mesh axis {PIPE!r}) stay on the device; name them in SaveNames(save=)"
            )
        if leaf.shape[0] % (stages * repeats):
            raise ValueError(
                f"{leaf.path}: {leaf.shape[0]} layers cannot be divided into pipe_repeats={repeats} parts for each of "
                f"{stages} stages (mesh axis {PIPE!r}); use a number of layers that {stages * repeats} divides"
            )
    return get_schedule(requested, stages, microbatches, repeats)


def _check(schedule: Schedule, stages: int, microbatches: int, repeats: int) -> None:
    if len(schedule.forward) != len(schedule.backward):
        raise ValueError(
            f"schedule: forward has {len(schedule.forward)} ticks and backward {len(schedule.backward)}; give both the "
            f"same number, with {IDLE} for a stage without work"
        )
    for name, table in (("forward", schedule.forward), ("backward", schedule.backward)):
        for tick, row in enumerate(table):
            if len(row) != stages:
                raise ValueError(f"schedule: {name} of tick {tick} has {len(row)} stages, but the mesh has {stages}")
        for stage in range(stages):
            found = sorted(row[stage] for row in table if row[stage] != IDLE)
            if found != list(range(repeats * microbatches)):
                raise ValueError(
                    f"schedule: stage {stage} computes tasks {found} {name}; it must compute each of "
                    f"0..{repeats * microbatches - 1} once"
                )
    times = _Times(schedule, microbatches, repeats)
    for place in range(repeats * stages):
        for m in range(microbatches):
            fwd, bwd = times.forward(place, m), times.backward(place, m)
            if place and fwd <= times.forward(place - 1, m):
                _refuse("forward", place, stages, m, fwd, "the forward of the stage before it, one tick earlier")
            if place < repeats * stages - 1 and bwd <= times.backward(place + 1, m):
                _refuse("backward", place, stages, m, bwd, "the backward of the stage after it, one tick earlier")
            if bwd < fwd:
                _refuse("backward", place, stages, m, bwd, "its own forward")


def _refuse(name: str, place: int, stages: int, microbatch: int, tick: int, needs: str) -> None:
    raise ValueError(
        f"schedule: stage {place % stages} computes part {place // stages} of microbatch {microbatch} {name} in tick "
        f"{tick}, which needs {needs}; move it to a later tick"
    )


class _Times:
    """The tick in which a microbatch passes each part; part k of stage d is number k P + d of all parts."""

    def __init__(self, schedule: Schedule, microbatches: int, repeats: int):
        self.stages, self.microbatches, self.repeats = len(schedule.forward[0]), microbatches, repeats
        self.num_places = repeats * self.stages
        self._forward, self._backward = (
            [{row[d]: tick for tick, row in enumerate(table) if row[d] != IDLE} for d in range(self.stages)]
            for table in (schedule.forward, schedule.backward)
        )

    def _task(self, place: int, microbatch: int) -> int:
        return place // self.stages * self.microbatches + microbatch

    def forward(self, place: int, microbatch: int) -> int:
        return self._forward[place % self.stages][self._task(place, microbatch)]

    def backward(self, place: int, microbatch: int) -> int:
        return self._backward[place % self.stages][self._task(place, microbatch)]


@dataclasses.dataclass(frozen=True)
class Places:
    """Slots of a buffer that the stages write and read in each tick.

    Attributes:
      write, read: [ticks, P] ints.
      num: the number of slots.
    """

    write: np.ndarray
    read: np.ndarray
    num: int


@dataclasses.dataclass(frozen=True)
class Ticks:
    """A schedule with a buffer slot for every value that waits. Tables are [ticks, P] ints.

    Attributes:
      forward, backward: tasks.
      entering, leaving, left: [ticks] ints, microbatches: the one that enters the first part; the one whose loss is
        computed; the one that leaves the first part backward.
      saved: values that a stage saves between forward and backward.
      inputs: values from the previous stage that wait for the forward.
      cotangents: values from the next stage that wait for the backward.
      hidden: outputs of the last stage that wait for their loss.
    """

    forward: np.ndarray
    backward: np.ndarray
    entering: np.ndarray
    leaving: np.ndarray
    left: np.ndarray
    saved: Places
    inputs: Places
    cotangents: Places
    hidden: Places

    def tables(self) -> dict[str, np.ndarray]:
        """Return all tables by name; `next` is the microbatch that enters in the next tick with any forward."""
        found = {name: getattr(self, name) for name in ("forward", "backward", "entering", "leaving", "left")}
        going = self._going_forward()
        found["next"] = np.full(len(self.entering), IDLE)
        found["next"][going[:-1]] = self.entering[going[1:]]
        for name in ("saved", "inputs", "cotangents", "hidden"):
            places = getattr(self, name)
            found |= {f"{name}_write": places.write, f"{name}_read": places.read}
        return {name: table.astype(np.int32) for name, table in found.items()}

    def first_to_enter(self) -> int:
        """Return the microbatch that enters in the first tick with any forward."""
        return int(self.entering[self._going_forward()[0]])

    def _going_forward(self) -> np.ndarray:
        return np.flatnonzero((self.forward != IDLE).any(1))

    def segments(self) -> Iterator[Segment]:
        """Yield runs of ticks with the same computation, in order."""
        tables = zip(self.forward, self.leaving, self.backward, strict=True)
        kinds = [(f.max() != IDLE, h != IDLE, b.max() != IDLE) for f, h, b in tables]
        first = 0
        for tick in range(1, len(kinds) + 1):
            if tick == len(kinds) or kinds[tick] != kinds[first]:
                yield Segment(first, tick - first, *map(bool, kinds[first]))
                first = tick

    def rounds(self) -> Iterator[tuple[int, list[Segment]]]:
        """Yield repeated groups of segments: the number of repetitions, and the segments of the first one."""
        left = list(self.segments())
        while left:
            times = {size: _num_alike(left, size) for size in (1, 2) if size <= len(left)}
            size = max(times, key=lambda size: (times[size] * size if times[size] > 1 else 0, -size))
            yield times[size], left[:size]
            left = left[times[size] * size :]


class Segment(NamedTuple):
    """Ticks with the same computation: the first tick, their number, and whether any stage has a forward, a loss, a
    backward."""

    first: int
    length: int
    has_forward: bool
    has_loss: bool
    has_backward: bool


def _num_alike(segments: Sequence[Segment], size: int) -> int:
    """Return how often the first `size` segments repeat."""
    kinds = [segment[1:] for segment in segments]
    times = 1
    while kinds[times * size : (times + 1) * size] == kinds[:size]:
        times += 1
    return times


def lay_out(schedule: Schedule, microbatches: int, repeats: int = 1) -> Ticks:
    """Assign a slot to every value that waits in a schedule, with the minimum number of slots."""
    forward, backward = np.asarray(schedule.forward), np.asarray(schedule.backward)
    times = _Times(schedule, microbatches, repeats)
    spans: dict[str, list[list[tuple[int, int]]]] = {}
    for name in ("saved", "inputs", "cotangents", "hidden"):
        spans[name] = [[] for _ in range(times.stages)]
    for place in range(times.num_places):
        for m in range(microbatches):
            stage, own, back = place % times.stages, times.forward(place, m), times.backward(place, m)
            spans["saved"][stage].append((own, back))
            if place:
                spans["inputs"][stage].append((times.forward(place - 1, m), own))
            if place < times.num_places - 1:
                spans["cotangents"][stage].append((times.backward(place + 1, m), back))
            else:
                spans["hidden"][stage].append((own, back))
    places = {name: _place(own, len(forward), int(name in ("inputs", "cotangents"))) for name, own in spans.items()}
    first, last = range(microbatches), range((repeats - 1) * microbatches, repeats * microbatches)
    entering = np.where(np.isin(forward[:, 0], first), forward[:, 0], IDLE)
    leaving = np.where(np.isin(backward[:, -1], last), backward[:, -1] - last.start, IDLE)
    left = np.where(np.isin(backward[:, 0], first), backward[:, 0], IDLE)
    return Ticks(forward, backward, entering, leaving, left, **places)


def _place(spans: Sequence[Sequence[tuple[int, int]]], ticks: int, later: int) -> Places:
    """Assign slots to values that are written in one tick and read in another, by stage.

    A stage writes a value in every tick. A value that is not used goes to a free slot, or to an additional one.

    Args:
      later: 1 if a value that is written in a tick arrives in the next one.
    """
    stages = len(spans)
    write, read = np.full((ticks, stages), IDLE), np.zeros((ticks, stages), int)
    busy: list[list[set[int]]] = [[set() for _ in range(ticks + 1)] for _ in range(stages)]
    for stage, stage_spans in enumerate(spans):
        for start, end in sorted(stage_spans):
            waits = range(start + later, end + 1)
            place = next(p for p in range(ticks + 1) if not any(p in busy[stage][tick] for tick in waits))
            for tick in waits:
                busy[stage][tick].add(place)
            write[start, stage], read[end, stage] = place, place
    num = int(max(write.max(), 0)) + 1
    for tick in range(ticks):
        for stage in range(stages):
            if write[tick, stage] == IDLE:
                taken = busy[stage][tick + later]
                write[tick, stage] = next(p for p in range(num + 1) if p not in taken)
    return Places(write, read, int(write.max()) + 1)
