"""What a search considered and what became of it: candidates, the front that none beats, and the best as a recipe."""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Iterable, Mapping
from typing import Any

from jfsdp.plan.search.space import changes
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.parse import write


class Outcome(enum.Enum):
    """What became of a candidate. IMPOSSIBLE: training would refuse these options."""

    PLANNED = "planned"
    SKIPPED = "skipped"
    IMPOSSIBLE = "impossible"
    FAILED = "failed"


@dataclasses.dataclass(frozen=True)
class Candidate:
    """Options that a search considered, and what became of them; numbers are of one device, None where not planned.

    Attributes:
      changes: the fields that differ from the options that the user gave.
      reason: why it was not planned.
      mesh: the sizes of its axes, without those of size 1.
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
        """Whether there is a plan of it."""
        return self.outcome is Outcome.PLANNED

    @property
    def item_s(self) -> float:
        """Predicted seconds per item and GPU: what the search makes small."""
        return 1 / self.items_per_s if self.items_per_s else math.inf

    @property
    def label(self) -> str:
        """What is changed, as NAME=VALUE by the names of the fields."""
        return " ".join(f"{name}={write(value)}" for name, value in self.changes.items()) or "as given"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        plain = {"changes": self.changes, "outcome": self.outcome.value, "reason": self.reason}
        if not self.is_planned:
            return plain
        names = ("mesh", "fits", "needed_bytes", "step_s", "items_per_s", "mfu", "compile_s")
        return plain | {name: getattr(self, name) for name in names}


def pareto_front(points: Iterable[Candidate]) -> tuple[Candidate, ...]:
    """Return those that none beats in memory without being slower; leanest first. Of equal ones, the first."""
    front: list[Candidate] = []
    for point in sorted(points, key=lambda point: (point.needed_bytes, point.item_s)):
        if not front or point.item_s < front[-1].item_s:
            front.append(point)
    return tuple(front)


@dataclasses.dataclass(frozen=True)
class Search:
    """What a search found.

    Attributes:
      tried: every candidate in the order in which it was considered; the first is what the user gave.
      item: "token" or "row".
      limit_bytes: what a step may take of a GPU's memory.
      elapsed_s: seconds that the search took.
      is_complete: whether it ended by itself and not by its budget.
      title: the model and the cluster.
      base: the recipe that the options came from, whose other fields the winner's recipe keeps.
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
        """The options as the user gave them."""
        return self.tried[0]

    @property
    def best(self) -> Candidate | None:
        """The fastest that fits; of equals the leanest. None if nothing fits."""
        return min((one for one in self.tried if one.fits), key=rank, default=None)

    @property
    def front(self) -> tuple[Candidate, ...]:
        """Those that fit, and than which none is both leaner and as fast; the leanest first."""
        return pareto_front(one for one in self.tried if one.fits)

    @property
    def gain(self) -> float | None:
        """How many times faster per item the best is predicted to be than what was given; None if that does not fit."""
        return self.default.item_s / self.best.item_s if self.best and self.default.fits else None

    @property
    def advice(self) -> str:
        """Where nothing fits: what came nearest, and what would help. Otherwise empty."""
        if self.best is not None:
            return ""
        planned = [one for one in self.tried if one.is_planned]
        if not planned:
            return f"{self.title}: no candidate could be planned: {self.default.reason}"
        least = min(planned, key=lambda one: one.needed_bytes)
        return (
            f"{self.title}: nothing that was tried fits: the least is {least.needed_bytes / 2**30:.1f} GiB of "
            f"{self.limit_bytes / 2**30:.1f} GiB ({least.label}); take more nodes, a shorter sequence, a smaller batch "
            "per device, --remat full, --offload opt_state,params, or GPUs with more memory"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data: bytes per device, seconds per step."""
        names = ("title", "item", "limit_bytes", "elapsed_s", "is_complete", "gain", "advice")
        return {
            **{name: getattr(self, name) for name in names},
            "default": self.default.to_dict(),
            "best": self.best and self.best.to_dict(),
            "front": [one.to_dict() for one in self.front],
            "recipe": self.recipe() or None,
            "tried": [one.to_dict() for one in self.tried],
        }

    def recipe(self) -> dict[str, Any]:
        """Return the best as fields of `TrainConfig`: the model, and what differs from the defaults; {}: none fits."""
        if self.best is None:
            return {}
        found = changes(self.best.options, StepOptions()) | changes(self.best.options, self.default.options)
        return {**self.base, "model": self.best.options.model, **found}


def rank(one: Candidate) -> tuple[float, int]:
    """Order the fastest first, of equally fast ones the leanest."""
    return one.item_s, one.needed_bytes
