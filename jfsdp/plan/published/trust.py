"""How far to trust what a plan estimates: by the published runs that plans were compared with.

Nobody has measured a run of jfsdp on these GPUs. What there is are runs of other programs, each predicted from the runs
of all other sources; scripts/fit_clock.py wrote how far that was from what was measured.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable
from typing import Any

from jfsdp.plan.cluster.gpus import Gpu, find_gpu
from jfsdp.plan.published.runs import XLA, PublishedRun, published_runs, read_data

SHARE = 0.8  # of the runs: how many must lie within what is said


@dataclasses.dataclass(frozen=True)
class Trust:
    """How near plans were to published runs on GPUs with the chip of one.

    Attributes:
      chip: of the GPUs, as "H100"; "" where there is no run on any.
      within: so far from 1 is predicted over measured seconds at most, for `near` of the runs.
      xla, torch: how many of the runs were programs of XLA, and of PyTorch.
      reserved, allocated: least and greatest of what PyTorch's allocator had of that, over what jfsdp needs by plan,
        and in how many runs; None: none.
    """

    chip: str
    within: float = 0.0
    near: int = 0
    xla: int = 0
    torch: int = 0
    reserved: tuple[float, float, int] | None = None
    allocated: tuple[float, float, int] | None = None

    @property
    def seconds(self) -> str:
        """What to say of estimated seconds."""
        if not self.chip:
            return "seconds: no published run on this GPU was compared; its rates are read off the datasheet and H100s"
        num = self.xla + self.torch
        return (
            f"seconds: within {self.within:.0%} of {self.near} of {num} published runs of other programs on "
            f"{self.chip}s ({self.xla} of XLA, {self.torch} of PyTorch); no run of jfsdp was measured"
        )

    @property
    def memory(self) -> str:
        """What to say of memory."""
        found = {"reserved": self.reserved, "allocated": self.allocated}
        parts = [
            f"{name} {low:.2f} to {high:.2f} times as much in {num} runs"
            for name, (low, high, num) in ((name, own) for name, own in found.items() if own)
        ]
        if not parts:
            return "memory: the compiler's own count for jfsdp's program; no published run on this GPU was compared"
        return f"memory: the compiler's own count for jfsdp's program; PyTorch's programs {', '.join(parts)}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain data."""
        return dataclasses.asdict(self)


def trust_in(gpu: Gpu) -> Trust:
    """Return what is known of plans for a GPU; runs on others with its chip count as its own."""
    runs = [run for run in published_runs() if _chip(find_gpu(run.gpu)) == _chip(gpu)]
    if not runs:
        return Trust("")
    timed = [run for run in runs if "seconds_left_out" in _errors()[run.id]]
    errors = sorted(abs(_errors()[run.id]["seconds_left_out"] - 1) for run in timed)
    near = round(SHARE * len(errors))
    xla = sum(run.software == XLA for run in timed)
    kinds = {kind: _memory(run for run in runs if run.memory and run.memory["kind"] == kind) for kind in _KINDS}
    return Trust(_chip(gpu), errors[near - 1], near, xla, len(timed) - xla, **kinds)


_KINDS = ("reserved", "allocated")


def _chip(gpu: Gpu) -> str:
    """The name of the chip where it is on NVLink: "H100" of the H200 too. Cards on PCIe have other limits and links."""
    chips = {(8, 0): "A100", (9, 0): "H100"}
    return chips.get(gpu.capability, gpu.name) if gpu.link.startswith("NVLink") else gpu.name


def _memory(runs: Iterable[PublishedRun]) -> tuple[float, float, int] | None:
    ratios = sorted(1 / _errors()[run.id]["memory"] for run in runs)
    return (ratios[0], ratios[-1], len(ratios)) if ratios else None


def _errors() -> dict[str, dict[str, float]]:
    """Return by run what scripts/fit_clock.py wrote: predicted over measured."""
    return _written()["ratios"]


@functools.cache
def _written() -> dict[str, Any]:
    return read_data("errors.json")
