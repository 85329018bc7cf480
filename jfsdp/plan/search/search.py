"""Search for the fastest step that fits a cluster. Candidates are compiled, but not run.

[Note: order of the search]
1. The strategy and mesh, then the sizes of axes `tensor` and `context` for the best of them.
2. The remat of the best.
3. The rows per device of the best few. Steps 1 to 3 repeat while they improve the best.
4. Program, prefetch depth and storage, then XLA options.

Bounds rule out candidates before they are compiled: if their state does not fit, or if compute at the GPU's peak or
communication takes longer than the best step. So the front lacks candidates that need less memory but are that slow.
The order is deterministic, but the budget of seconds ends it at a point that depends on the machine. Seconds are
predictions (plan/plan.py); differences of a few percent are within their error.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import math
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jfsdp.plan.bound import Bound
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.cluster.target import PlanUnavailable, topology_devices
from jfsdp.plan.jobs import bound_job, plan_job
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.plan.search import space as spaces
from jfsdp.plan.search.space import SearchSpace
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.parse import write


class Outcome(enum.Enum):
    """The outcome of a candidate. IMPOSSIBLE: training would refuse its options."""

    PLANNED = "planned"
    SKIPPED = "skipped"
    IMPOSSIBLE = "impossible"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options that a search considered, with their outcome. Numbers are per device.

    Attributes:
      changes: the fields that differ from the user's options.
      reason: why it was not planned.
      mesh: its axis sizes above 1.
      fits, needed_bytes, step_s, items_per_s, mfu, compile_s: as in `Plan`.
    """

    options: StepOptions
    changes: dict[str, Any]
    outcome: Outcome
    reason: str = ""
    fits: bool = False
    needed_bytes: int = 0
    step_s: float = math.inf
    items_per_s: float = 0.0
    mfu: float | None = None
    compile_s: float = 0.0
    mesh: dict[str, int] = dataclasses.field(default_factory=dict)

    @property
    def is_planned(self) -> bool:
        """Whether it was planned."""
        return self.outcome is Outcome.PLANNED

    @property
    def item_s(self) -> float:
        """Predicted seconds per item and GPU, which the search minimizes."""
        return 1 / self.items_per_s if self.items_per_s else math.inf

    @property
    def label(self) -> str:
        """The changes as NAME=VALUE, with the names of fields."""
        return " ".join(f"{name}={write(value)}" for name, value in self.changes.items()) or "as given"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        plain = {"changes": self.changes, "outcome": self.outcome.value, "reason": self.reason}
        if not self.is_planned:
            return plain
        names = ("mesh", "fits", "needed_bytes", "step_s", "items_per_s", "mfu", "compile_s")
        return plain | {name: getattr(self, name) for name in names}


def pareto_front(points: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return the Pareto front of memory and time, the least memory first. Of equal candidates, the first."""
    front: list[Candidate] = []
    for point in sorted(points, key=lambda point: (point.needed_bytes, point.item_s)):
        if not front or point.item_s < front[-1].item_s:
            front.append(point)
    return tuple(front)


@dataclasses.dataclass(frozen=True)
class Search:
    """The result of a search.

    Attributes:
      tried: every candidate, in order; the first has the user's options.
      item: "token" or "row".
      limit_bytes: GPU memory that a step may use.
      elapsed_s: seconds of the search.
      is_complete: whether it ended before its budget was used up.
      title: the model and the cluster.
      base: the recipe of the user's options; the best candidate's recipe keeps its other fields.
    """

    tried: tuple[Candidate, ...]
    item: str
    limit_bytes: int
    elapsed_s: float
    is_complete: bool
    title: str
    base: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def default(self) -> Candidate:
        """The candidate with the user's options."""
        return self.tried[0]

    @property
    def best(self) -> Candidate | None:
        """The fastest candidate that fits, of equals the one with the least memory; None if nothing fits."""
        return min((one for one in self.tried if one.fits), key=rank, default=None)

    @property
    def front(self) -> tuple[Candidate, ...]:
        """The Pareto front of the candidates that fit."""
        return pareto_front(one for one in self.tried if one.fits)

    @property
    def gain(self) -> float | None:
        """Predicted speedup of the best over the user's options, per item; None if the latter do not fit."""
        return self.default.item_s / self.best.item_s if self.best and self.default.fits else None

    @property
    def advice(self) -> str:
        """The candidate with the least memory and a remedy, if nothing fits; otherwise empty."""
        if self.best is not None:
            return ""
        planned = [one for one in self.tried if one.is_planned]
        if not planned:
            return f"{self.title}: no candidate could be planned: {self.default.reason}"
        least = min(planned, key=lambda one: one.needed_bytes)
        return (
            f"{self.title}: no candidate fits: the least is {least.needed_bytes / 2**30:.1f} GiB of "
            f"{self.limit_bytes / 2**30:.1f} GiB ({least.label}); use more nodes or shorter rows"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: bytes per device, seconds per step."""
        names = ("title", "item", "limit_bytes", "elapsed_s", "is_complete", "gain")
        return {
            **{name: getattr(self, name) for name in names},
            "default": self.default.to_dict(),
            "best": self.best and self.best.to_dict(),
            "front": [one.to_dict() for one in self.front],
            "remedy": self.advice,
            "recipe": self.recipe() or None,
            "tried": [one.to_dict() for one in self.tried],
        }

    def recipe(self) -> dict[str, Any]:
        """Return the best candidate's non-default fields of `TrainConfig`, with the model; {} if none fits."""
        if self.best is None:
            return {}
        return spaces.recipe_of(self.best.options, self.base)


def rank(one: Candidate) -> tuple[float, int]:
    """Sort by time, then by memory."""
    return one.item_s, one.needed_bytes


BUDGET_S = 900.0


def search_job(
    options: StepOptions,
    cluster: Cluster,
    space: SearchSpace | None = None,
    *,
    budget_s: float = BUDGET_S,
    reserve_bytes: int = RESERVE_BYTES,
    documents_per_row: int = 1,
    on_progress: Callable[[str], None] = lambda text: None,
    planner: Callable[..., Any] = plan_job,
) -> Search:
    """Find the options that fit a cluster with the least predicted time per item; see [Note: order of the search].

    Allocates nothing on any device.

    Args:
      options: the first candidate, which is always planned.
      space: the values to try.
      budget_s: seconds after which no other candidate is started.
      reserve_bytes: GPU memory that the step must leave free.
      documents_per_row: as in `plan_job`.
      on_progress: called with a description of each phase before it begins, and with each outcome.
      planner: plans a candidate, by default `plan_job`.

    Raises:
      PlanUnavailable: if JAX's CUDA plugin cannot compile for this GPU.
      ValueError: for options that training would refuse.
    """

    def plan(one: StepOptions) -> Any:
        return planner(one, cluster, reserve_bytes=reserve_bytes, documents_per_row=documents_per_row)

    bound = functools.partial(bound_job, cluster=cluster, device=topology_devices(cluster)[0])
    tries = _Tries(options, cluster, cluster.gpu.memory_bytes - reserve_bytes, budget_s, plan, bound, on_progress)
    item = bound(options).item
    tries.plan_one(options)
    _run_stages(tries, space or SearchSpace())
    return Search(
        tried=tuple(tries.found.values()),
        item=item,
        limit_bytes=tries.limit_bytes,
        elapsed_s=tries.elapsed_s,
        is_complete=not tries.is_cut,
        title=f"{options.model or options.factory} on {cluster.num_devices} {cluster.gpu.name}",
    )


def _run_stages(tries: _Tries, space: SearchSpace) -> None:
    given, cluster = tries.default, tries.cluster
    _place(tries, given, space)
    names = spaces.value_names(given, cluster) if space.remats is None else ()
    for one in [] if tries.fitting() else tries.best(1):
        for lean in spaces.leaner(one, cluster):
            if not tries.fitting():
                tries.try_all([lean])
    before, is_first = math.inf, True
    while tries.least_item_s() < before and not tries.is_cut:
        before = tries.least_item_s()
        for one in tries.best(1):
            tries.try_all(spaces.remats(one, space, names))
        # Include the least memory: the remat that is fastest with one row may not fit more rows.
        leanest = tries.leanest() if is_first else []
        for one in dict.fromkeys(tries.best(space.beam) + leanest):
            for ladder in spaces.batches(one, given, space):
                tries.climb(ladder)
        for one in tries.best(1):
            _place(tries, one, space)
        is_first = False
    if not tries.fitting():
        return
    for one in tries.best(1):
        tries.try_all(spaces.programs(one, space))
    for choices in spaces.xla_choices(tries.best(1)[0], cluster) if space.xla is None else space.xla:
        for one in tries.best(1):
            tries.try_all(dataclasses.replace(one, xla=tuple((dict(one.xla) | dict(more)).items())) for more in choices)


def _place(tries: _Tries, one: StepOptions, space: SearchSpace) -> None:
    tries.try_all(spaces.placements(one, tries.cluster, space))
    for best in tries.best(1):
        tries.try_all(spaces.splits(best, tries.default, tries.cluster, space))


@dataclasses.dataclass
class _Tries:
    """The candidates that were tried, and the time spent."""

    default: StepOptions
    cluster: Cluster
    limit_bytes: int
    budget_s: float
    plan: Callable[[StepOptions], Any]
    bound: Callable[[StepOptions], Bound]
    on_progress: Callable[[str], None]
    found: dict[StepOptions, Candidate] = dataclasses.field(default_factory=dict)
    is_cut: bool = False
    longest_s: float = 0.0
    begin_s: float = dataclasses.field(default_factory=time.perf_counter)

    @property
    def elapsed_s(self) -> float:
        return time.perf_counter() - self.begin_s

    def fitting(self) -> list[Candidate]:
        return sorted((one for one in self.found.values() if one.fits), key=rank)

    def least_item_s(self) -> float:
        return min((one.item_s for one in self.fitting()), default=math.inf)

    def best(self, num: int) -> list[StepOptions]:
        """Return the fastest options that fit; if none fits, those with the least memory."""
        planned = [one for one in self.found.values() if one.is_planned]
        ranked = self.fitting() or sorted(planned, key=lambda one: (one.needed_bytes, one.item_s))
        return [one.options for one in ranked[:num]]

    def leanest(self) -> list[StepOptions]:
        """Return the options with the least memory, the fastest of equals."""
        return [one.options for one in pareto_front(self.fitting())[:1]]

    def try_all(self, options: Iterable[StepOptions]) -> None:
        """Try options in the order of their lower bounds of time, then of communication time."""
        fresh = [(one, self._bound(one)) for one in dict.fromkeys(options) if one not in self.found]
        bounded = [(one, bound) for one, bound in fresh if bound is not None]
        for one, bound in sorted(bounded, key=lambda pair: (pair[1].item_s, pair[1].wire_s / pair[1].items)):
            self._try(one, bound)

    def climb(self, ladder: Iterable[StepOptions]) -> None:
        """Try options in order while each fits and is faster than the previous one."""
        before = math.inf
        for one in ladder:
            if one not in self.found and (bound := self._bound(one)) is not None:
                self._try(one, bound)
            found = self.found[one]
            if not found.fits or found.item_s >= before:
                return
            before = found.item_s

    def _bound(self, options: StepOptions) -> Bound | None:
        try:
            return self.bound(options)
        except ValueError as error:
            self._skip(options, Outcome.IMPOSSIBLE, str(error).splitlines()[0])
            return None

    def _try(self, options: StepOptions, bound: Bound) -> None:
        if bound.state_bytes > self.limit_bytes:
            reason = f"{bound.state_bytes / 2**30:.1f} GiB of {self.limit_bytes / 2**30:.1f}"
            return self._skip(options, Outcome.SKIPPED, f"its state does not fit: {reason}")
        if bound.item_s >= self.least_item_s():
            times = f"{bound.item_s / self.least_item_s():.2f}x of the best"
            what = "communication takes" if bound.wire_s > bound.compute_s else "matmuls at their peak take"
            return self._skip(options, Outcome.SKIPPED, f"cannot be faster: its {what} {times}")
        if self.elapsed_s + self.longest_s > self.budget_s:
            self.is_cut = True
            return self._skip(options, Outcome.SKIPPED, "no time left")
        return self.plan_one(options)

    def _skip(self, options: StepOptions, outcome: Outcome, reason: str) -> None:
        self._record(Candidate(options, spaces.changes(options, self.default), outcome, reason))

    def plan_one(self, options: StepOptions) -> None:
        """Compile a candidate and record its outcome."""
        one = Candidate(options, spaces.changes(options, self.default), Outcome.PLANNED)
        begin_s = time.perf_counter()
        self.on_progress(f"compiling {one.label}")
        try:
            plan = self.plan(options)
        except PlanUnavailable:
            raise
        except Exception as error:  # an error of one candidate must not end the search
            self._skip(options, Outcome.FAILED, f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}")
        else:
            names = ("fits", "needed_bytes", "step_s", "items_per_s", "mfu")
            numbers: dict[str, Any] = {name: getattr(plan, name) for name in names}
            mesh = {axis: size for axis, size in plan.layout.mesh_sizes if size > 1}
            self._record(dataclasses.replace(one, compile_s=plan.compiled.compile_s, mesh=mesh, **numbers))
        finally:
            self.longest_s = max(self.longest_s, time.perf_counter() - begin_s)

    def _record(self, one: Candidate) -> None:
        self.found[one.options] = one
        text = f"{one.outcome.value}: {one.reason}"
        if one.is_planned:
            text = f"{one.step_s:.4f} s, {one.needed_bytes / 2**30:.1f} GiB" + " (does not fit)" * (not one.fits)
        self.on_progress(f"{len(self.found)}. {one.label}: {text} [{self.elapsed_s:.0f} of {self.budget_s:.0f} s]")
