"""How far to trust what a plan estimates: by the published runs that plans were compared with.

Nobody has measured a run of jfsdp on these GPUs. What there is are runs of other programs, each predicted with the
clock's constants fitted to the runs of all other sources; scripts/fit_clock.py wrote how far that was from what was
measured. Runs that the clock is not fitted to at all are not counted.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import statistics
from collections.abc import Iterable
from typing import Any

from jfsdp.plan.cluster.gpus import Gpu, find_gpu
from jfsdp.plan.published.runs import XLA, PublishedRun, published_runs, read_data

SHARE = 0.8  # of the runs: how many must lie within what is said


@dataclasses.dataclass(frozen=True)
class Near:
    """Of runs of one kind of program: how many lie within what is said of all, and the median of predicted / measured.

    PyTorch's are predicted at the rates of its own kernels; see `PublishedRun.rates`.
    """

    runs: int
    within: int
    median: float


@dataclasses.dataclass(frozen=True)
class Trust:
    """How near plans were to published runs on GPUs with the chip of one.

    Attributes:
      chip: of the GPUs, as "H100"; "" where there is no run on any.
      percent: so far from what was measured are at most four of five of the runs.
      xla, torch: of programs of XLA, and of PyTorch.
      reserved: least and greatest of what PyTorch's allocator had reserved for its own program, over what jfsdp needs
        by plan, and in how many runs; None: none.
    """

    chip: str
    percent: int = 0
    xla: Near | None = None
    torch: Near | None = None
    reserved: tuple[float, float, int] | None = None

    @property
    def seconds(self) -> str:
        """What to say of estimated seconds."""
        kinds = {"XLA": self.xla, "PyTorch": self.torch}
        found = {name: near for name, near in kinds.items() if near}
        if not found:
            return "seconds: no published run on this GPU was compared; rates are a datasheet's, less what H100s lose"
        parts = [
            f"{near.within} of {near.runs} of {name}, in the median {abs(near.median - 1):.0%} too "
            f"{'short' if near.median < 1 else 'long'}"
            for name, near in found.items()
        ]
        num, within = (sum(getattr(near, field) for near in found.values()) for field in ("runs", "within"))
        return (
            f"seconds: within {self.percent}% of {within} of {num} published runs of other programs on {self.chip}s "
            f"({'; '.join(parts)}): language models in bfloat16, FSDP alone. None is a run of jfsdp"
        )

    @property
    def memory(self) -> str:
        """What to say of memory."""
        if not self.reserved:
            return "memory: the compiler's count for this program; no published run on this GPU was compared"
        low, high, num = self.reserved
        times = f"{low:.2f}" if f"{low:.2f}" == f"{high:.2f}" else f"{low:.2f} to {high:.2f}"
        return (
            f"memory: the compiler's count for this program; PyTorch, with whole logits, reserved {times} times as "
            f"much in {num} published runs"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)


def trust_in(gpu: Gpu) -> Trust:
    """Return what is known of plans for a GPU; runs on others with its chip count as its own."""
    runs = [run for run in published_runs() if run.basis and chip_of(find_gpu(run.gpu)) == chip_of(gpu)]
    ratios = {run.id: left_out(run) for run in runs if run.step_s}
    if not ratios:
        return Trust("")
    errors = sorted(abs(ratio - 1) for ratio in ratios.values())
    percent = math.ceil(100 * errors[math.ceil(SHARE * len(errors)) - 1])

    def near(is_xla: bool) -> Near | None:
        own = [ratios[run.id] for run in runs if run.step_s and (run.software == XLA) == is_xla]
        within = sum(abs(ratio - 1) <= percent / 100 for ratio in own)
        return Near(len(own), within, statistics.median(own)) if own else None

    return Trust(chip_of(gpu), percent, near(True), near(False), _reserved(runs))


def left_out(run: PublishedRun) -> float:
    """Return predicted over measured seconds of a timed run, by a clock fitted without its source."""
    return _errors()[run.id]["seconds_left_out"]


def chip_of(gpu: Gpu) -> str:
    """The name of the chip where it is on NVLink: "H100" of the H200 too. Cards on PCIe have other limits and links."""
    chips = {(8, 0): "A100", (9, 0): "H100"}
    return chips.get(gpu.capability, gpu.name) if gpu.link.startswith("NVLink") else gpu.name


def _reserved(runs: Iterable[PublishedRun]) -> tuple[float, float, int] | None:
    kept = [run for run in runs if run.memory and run.memory["kind"] == "reserved"]
    ratios = sorted(1 / _errors()[run.id]["memory"] for run in kept)
    return (ratios[0], ratios[-1], len(ratios)) if ratios else None


def _errors() -> dict[str, dict[str, float]]:
    """Return by run what scripts/fit_clock.py wrote: predicted over measured."""
    return _written()["ratios"]


@functools.cache
def _written() -> dict[str, Any]:
    return read_data("errors.json")
