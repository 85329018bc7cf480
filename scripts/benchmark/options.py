"""The options of `scripts/bench.py`, the contenders that they may name, and what is refused before anything starts."""

from __future__ import annotations

import dataclasses
import itertools
import os
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.trainer.options import Count, File, Number, Real, StepOptions
from jfsdp.trainer.parse import word_or_none
from jfsdp.trainer.spelling import check_numbers

PLAIN = "plain"
JFSDP: dict[str, dict[str, Any]] = {
    "xla": {"engine": "xla", "prefetch": None},
    "manual": {"engine": "manual"},
    "flat": {"engine": "manual", "storage": "flat"},
    "auto": {},
    "watched": {},
}
"""Contenders of jfsdp, and the options that each changes."""
TORCH = ("torch", "torch-fsdp2", "torch-ddp", "torch-fsdp2-compile")
KNOWN = (PLAIN, *JFSDP, *TORCH)
TOLERANCE = {"none": 1e-4, "float32": 1e-4, "bfloat16": 2e-2, "float16": 2e-2}


@dataclasses.dataclass(frozen=True)
class BenchOptions(StepOptions):
    """What to time, and how."""

    settings: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAMES")] = ("plain", "xla", "manual", "flat")
    """plain, xla, manual, flat, auto, watched, torch, torch-fsdp2, torch-ddp, torch-fsdp2-compile: ratios are to the
    first."""
    devices: Number = None
    """How many devices. none: all GPUs; on CPUs 2."""
    threads: Number = None
    """On CPUs: how many cores each contender may use, all its processes together. none: all there are."""
    together: bool = False
    """Keep all contenders alive and let them take single steps in turn. Otherwise each turn is a fresh process."""
    rounds: Number = None
    """Turns of each contender. none: 7, and 30 with --together."""
    steps: Count = 10
    """Timed steps of a turn; with --together a turn is one step."""
    warmup: Count = 2
    """Steps after the first that are not timed."""
    seed: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """Of the first weights, the batches and the order of turns."""
    loss_tolerance: Annotated[float | None, tyro.conf.arg(metavar="X|none")] = None
    """Largest relative difference of two losses of the same step. none: 1e-4, and 2e-2 in 16 bits."""
    timeout: Real = 900.0
    """Seconds that one answer of a contender may take: its start with the first step, or a turn."""
    plan: Annotated[str | None, tyro.conf.arg(metavar="GPU")] = None
    """Also print what `jfsdp plan` expects of the case on this GPU, such as h100."""
    profile: bool = False
    """After the last turn of each contender, some steps under a profiler: ms of a step by kind of operation."""
    plot: File = None
    """Draw all step times there, as PNG or SVG."""
    json: bool = False
    """Print JSON."""

    @property
    def num_rounds(self) -> int:
        return self.rounds if self.rounds is not None else 30 if self.together else 7

    @property
    def torch_settings(self) -> list[str]:
        return [name for name in self.settings if name in TORCH]

    @property
    def tolerance(self) -> float:
        return self.loss_tolerance if self.loss_tolerance is not None else TOLERANCE[self.param_dtype or "none"]


def is_single(name: str) -> bool:
    """Whether a contender runs on one device, with all rows of the batch."""
    return name in (PLAIN, "torch")


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
    check_numbers(options, devices=1, threads=1, rounds=1, steps=1, warmup=1, timeout=1, loss_tolerance=0, seed=0)
    for option in ("param_dtype", "reduce_dtype"):
        value = getattr(options, option)
        if (value or "none") not in TOLERANCE:
            raise ValueError(f"--{option.replace('_', '-')} {value}: use {', '.join(TOLERANCE)}")
    if options.plot is not None:
        from jfsdp.plan.picture import check_picture

        check_picture(Path(options.plot))
        if not Path(options.plot).expanduser().absolute().parent.is_dir():
            raise ValueError(f"--plot {options.plot}: there is no directory {Path(options.plot).parent}")
    if options.plan is not None:
        from jfsdp.plan.cluster.hardware import find_gpu

        find_gpu(options.plan)
    if options.torch_settings:
        _check_torch(options)


def _check_torch(options: BenchOptions) -> None:
    """Refuse what the contenders of PyTorch do not do the same way."""
    from jfsdp.extras import need

    name = options.torch_settings[0]
    need("bench")
    refused = {
        "accumulate": 1,
        "opt_state_dtype": None,
        "ema": None,
        "skip_nonfinite": False,
        "preference": None,
        "output_dtype": None,
        "frozen": (),
        "lora": (),
        "quantized": (),
        "rate_scale": (),
        "offload": (),
        "strategy": "full_shard",
        "opt_over": None,
    }
    for option, value in refused.items():
        if getattr(options, option) != value:
            spelled = option.replace("_", "-")
            raise ValueError(f"--{spelled} is not built for {name}; leave out --{spelled}, or {name}")
    if options.remat not in ("none", "full"):
        raise ValueError(f"--remat {options.remat} is not built for {name}; use none or full, or leave out {name}")
    for option in ("param_dtype", "reduce_dtype"):
        if getattr(options, option) == "float16":
            spelled = option.replace("_", "-")
            raise ValueError(f"--{spelled} float16 is not built for {name}; use bfloat16, float32 or none")
    if options.reshard_after_forward not in ("none", "true", "false"):
        raise ValueError(
            f"--reshard-after-forward {options.reshard_after_forward} is not built for {name}; use true, false or none"
        )


def find_platform() -> str:
    """Return "cuda" where this machine has NVIDIA GPUs and JAX_PLATFORMS does not say cpu, else "cpu"."""
    return "cpu" if os.environ.get("JAX_PLATFORMS", "").strip() == "cpu" or not visible_gpus() else "cuda"


def visible_gpus() -> int:
    """Count the GPUs that a process started here would see. Starts no driver."""
    there = len(list(Path("/dev").glob("nvidia[0-9]*")))
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    return there if chosen is None else min(there, len(_listed(chosen)))


def _listed(chosen: str) -> list[str]:
    """Return the devices of CUDA_VISIBLE_DEVICES; CUDA reads no further than a negative one."""
    parts = [part.strip() for part in chosen.split(",") if part.strip()]
    return list(itertools.takewhile(lambda part: not part.startswith("-"), parts))


def find_devices(options: BenchOptions, platform: str) -> int:
    """Return how many devices the contenders use.

    Raises:
      ValueError: for more GPUs than there are, or more simulated devices than make sense.
    """
    there = visible_gpus() if platform == "cuda" else (os.cpu_count() or 1)
    if options.devices is None:
        return there if platform == "cuda" else 2
    most = there if platform == "cuda" else max(2, 4 * there)
    if options.devices > most:
        what = "GPUs here" if platform == "cuda" else f"simulated devices ({there} cores)"
        raise ValueError(f"--devices {options.devices}: at most {most} {what}; lower it")
    return options.devices


def find_threads(options: BenchOptions) -> int:
    """Return how many cores each contender may use.

    Raises:
      ValueError: for more than there are.
    """
    there = len(os.sched_getaffinity(0))
    if options.threads is not None and options.threads > there:
        raise ValueError(f"--threads {options.threads}: this process may use {there} cores; lower it")
    return options.threads or there


def as_jfsdp(options: BenchOptions, name: str) -> BenchOptions:
    """Return the options of a contender of jfsdp."""
    return dataclasses.replace(options, **JFSDP[name])


def spoken(dtype: str | None) -> str | None:
    """Return a dtype, or None for the word none."""
    return None if dtype is None else word_or_none(dtype)
