"""Options of `scripts/bench.py`, the names of contenders, and checks before any contender starts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.extras import need
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Number, Real, StepOptions

PLAIN = "plain"
JFSDP: dict[str, dict[str, Any]] = {
    "xla": {"program": "xla", "prefetch": None},
    "manual": {"program": "manual"},
    "flat": {"program": "manual", "storage": "flat"},
}
"""Contenders of jfsdp, with the options that each changes."""
TORCH = ("torch-fsdp2", "torch-fsdp2-compile")
KNOWN = (PLAIN, *JFSDP, *TORCH)
_DTYPES = (None, "float32", "bfloat16")
TORCH_TAKES: dict[str, tuple[Any, ...]] = {
    "remat": ("none", "full"),
    "param_dtype": _DTYPES,
    "reduce_dtype": _DTYPES,
    "reshard_after_forward": (None, True, False),
    **dict.fromkeys(("model", "factory", "model_config", "seq_len", "batch_per_device", "mesh", "max_grad_norm"), ()),
    **dict.fromkeys(("program", "prefetch", "storage", "min_size", "cross_documents", "xla"), ()),
}
"""Values of options that PyTorch's contenders support; empty: any. Other options must have their default."""
TOLERANCE = {"none": 1e-4, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass(frozen=True)
class BenchOptions(StepOptions):
    """Options of the benchmark."""

    settings: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAMES")] = ("plain", "xla", "manual", "flat")
    """plain, xla, manual, flat, torch-fsdp2, torch-fsdp2-compile: ratios are to the first."""
    devices: Number = option(None, least=1)
    """Number of devices. none: all GPUs; on CPUs 2."""
    rounds: Count = option(5, least=1)
    """Turns of each contender, each in new processes."""
    steps: Count = option(10, least=1)
    """Timed steps of a turn."""
    warmup: Count = option(2, least=1)
    """Steps after the first that are not timed."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = option(0, least=0)
    """Seed of the initial weights, the batches and the order of turns."""
    loss_tolerance: Annotated[float | None, tyro.conf.arg(metavar="X|none")] = option(None, least=0)
    """Largest relative difference of the losses of a step. none: 1e-4, and 2e-2 in 16 bits."""
    timeout: Real = option(900.0, least=1)
    """Limit in seconds for a turn of a contender."""
    json: bool = False
    """Print JSON."""

    @property
    def torch_settings(self) -> list[str]:
        return [name for name in self.settings if name in TORCH]

    @property
    def tolerance(self) -> float:
        return self.loss_tolerance if self.loss_tolerance is not None else TOLERANCE[self.param_dtype or "none"]


def check(options: BenchOptions) -> None:
    """Check the options, without devices and models.

    Raises:
      ValueError: naming the option and the remedy.
      MissingExtra: if a contender needs PyTorch or transformers, and they are not installed.
    """
    for name in options.settings:
        if name not in KNOWN:
            raise ValueError(f"--settings {name}: use {', '.join(KNOWN)}")
    if len(set(options.settings)) < len(options.settings) or not options.settings:
        raise ValueError("--settings: name each contender once, and at least one")
    for name in options.torch_settings[:1]:
        need("bench")
        for field in dataclasses.fields(StepOptions):
            value, known = getattr(options, field.name), TORCH_TAKES.get(field.name, (field.default,))
            if known and value not in known:
                spelled = field.name.replace("_", "-")
                raise ValueError(f"--{spelled} {value}: {name} does not support it; leave out --{spelled}, or {name}")


def find_platform() -> str:
    """Return "cuda" if this machine has NVIDIA GPUs and JAX_PLATFORMS is not cpu, else "cpu"."""
    return "cpu" if os.environ.get("JAX_PLATFORMS", "").strip() == "cpu" or not visible_gpus() else "cuda"


def visible_gpus() -> int:
    """Count the GPUs visible to a new process, without starting a driver."""
    present = len(list(Path("/dev").glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return present
    parts = [part.strip() for part in chosen.split(",") if part.strip()]  # CUDA stops at a negative number
    return min(present, len(list(itertools.takewhile(lambda part: not part.startswith("-"), parts))))


def find_devices(options: BenchOptions, platform: str) -> int:
    """Return the number of devices of the contenders.

    Raises:
      ValueError: for more GPUs than exist, or more than four simulated devices per core.
    """
    cores = os.cpu_count() or 1
    most, what = (visible_gpus(), "GPUs here") if platform == "cuda" else (max(2, 4 * cores), f"on {cores} cores")
    if (options.devices or 1) > most:
        raise ValueError(f"--devices {options.devices}: at most {most} {what}; lower it")
    return options.devices or (most if platform == "cuda" else 2)


def as_jfsdp(options: BenchOptions, name: str) -> BenchOptions:
    """Return the options of a contender of jfsdp."""
    return dataclasses.replace(options, **JFSDP[name])
