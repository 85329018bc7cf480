"""The options of `scripts/bench.py`, the contenders that they may name, and what is refused before anything starts."""

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
"""Contenders of jfsdp, and the options that each changes."""
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
"""Values of options that PyTorch's contenders take; empty: any. Of other options they take the default."""
TOLERANCE = {"none": 1e-4, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass(frozen=True)
class BenchOptions(StepOptions):
    """What to time, and how."""

    settings: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAMES")] = ("plain", "xla", "manual", "flat")
    """plain, xla, manual, flat, torch-fsdp2, torch-fsdp2-compile: ratios are to the first."""
    devices: Number = option(None, least=1)
    """How many devices. none: all GPUs; on CPUs 2."""
    rounds: Count = option(5, least=1)
    """Turns of each contender, in fresh processes each."""
    steps: Count = option(10, least=1)
    """Timed steps of a turn."""
    warmup: Count = option(2, least=1)
    """Steps after the first that are not timed."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = option(0, least=0)
    """Of the first weights, the batches and the order of turns."""
    loss_tolerance: Annotated[float | None, tyro.conf.arg(metavar="X|none")] = option(None, least=0)
    """Largest relative difference of two losses of the same step. none: 1e-4, and 2e-2 in 16 bits."""
    timeout: Real = option(900.0, least=1)
    """Seconds that a turn of a contender may take."""
    json: bool = False
    """Print JSON."""

    @property
    def torch_settings(self) -> list[str]:
        return [name for name in self.settings if name in TORCH]

    @property
    def tolerance(self) -> float:
        return self.loss_tolerance if self.loss_tolerance is not None else TOLERANCE[self.param_dtype or "none"]


def check(options: BenchOptions) -> None:
    """Refuse what needs no device and no model to be refused.

    Raises:
      ValueError: naming the option and the remedy.
      MissingExtra: without PyTorch or transformers, where a contender needs them.
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
                raise ValueError(f"--{spelled} {value} is not built for {name}; leave out --{spelled}, or {name}")


def find_platform() -> str:
    """Return "cuda" where this machine has NVIDIA GPUs and JAX_PLATFORMS does not say cpu, else "cpu"."""
    return "cpu" if os.environ.get("JAX_PLATFORMS", "").strip() == "cpu" or not visible_gpus() else "cuda"


def visible_gpus() -> int:
    """Count the GPUs that a process started here would see. Starts no driver."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    if chosen is None:
        return there
    parts = [part.strip() for part in chosen.split(",") if part.strip()]  # CUDA reads no further than a negative one
    return min(there, len(list(itertools.takewhile(lambda part: not part.startswith("-"), parts))))


def find_devices(options: BenchOptions, platform: str) -> int:
    """Return how many devices the contenders use.

    Raises:
      ValueError: for more GPUs than there are, or more simulated devices than make sense.
    """
    cores = os.cpu_count() or 1
    most, what = (visible_gpus(), "GPUs here") if platform == "cuda" else (max(2, 4 * cores), f"on {cores} cores")
    if (options.devices or 1) > most:
        raise ValueError(f"--devices {options.devices}: at most {most} {what}; lower it")
    return options.devices or (most if platform == "cuda" else 2)


def as_jfsdp(options: BenchOptions, name: str) -> BenchOptions:
    """Return the options of a contender of jfsdp."""
    return dataclasses.replace(options, **JFSDP[name])
