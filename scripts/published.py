"""Runs that others measured and published, as data, and what a plan predicts for them; fit_clock.py fits to them.

[Note: which runs]
A run is here if model, mesh, rows and what it recomputes are published or follow from its software's defaults of the
time, and it trains in bfloat16 without axes that jfsdp lacks. `differs` says what our plan of it does otherwise, and
what we read into the source; `doubts` what the source leaves open. Where that decides the time, as with a network known
within eight times only, the run is planned, but the clock is not fitted to it. Nothing is adjusted for one run. Its
program is the one of `command`; its seconds are those of its software (`rates`).
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.hlo.collectives import Collective, find_collectives
from jfsdp.plan.hlo.parse import Module, parse_module
from jfsdp.plan.time.rates import CUDNN_ATTENTION, Rates
from jfsdp.plan.time.timeline import simulate
from jfsdp.plan.time.work import Work
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.parse import read_fields

GB = 1e9

# What FlashAttention-2 gets of an H100's peak, forward and backward together: 335 TFLOP/s (Dao-AILab/flash-attention,
# README). On an A100 it gets what cuDNN gets.
FLASH2_ON_HOPPER = (0.34, 0.34)
# How often kernels that are bound by memory move their bytes in eager PyTorch, where XLA fuses them: the one constant
# that eager runs have for themselves. Fitted (scripts/fit_clock.py).
EAGER_PASSES = 1.4
XLA, COMPILED, EAGER = "xla", "torch-compiled", "torch-eager"


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """One run that somebody measured.

    Attributes:
      id: its name here.
      source: repository, path in it and date of what was read.
      framework: by which it was run.
      software: XLA, COMPILED (torch.compile, or kernels fused by hand) or EAGER (PyTorch).
      gpu, nodes, gpus_per_node: the cluster.
      network: GB/s of a GPU's share of its node's adapters; None: what is usual for the GPU.
      model, model_config: the job of ours that has its shapes.
      options: the other options of the step.
      basis: whether the clock is fitted to it; not where what decides its time is not known, as a network's speed.
      step_s: measured seconds; None: only memory was.
      memory: measured peak: {"gib", "kind"}, where kind is "reserved" or "allocated" by PyTorch's allocator.
      differs, doubts: see [Note: which runs].
    """

    id: str
    source: dict[str, str]
    framework: str
    software: str
    gpu: str
    nodes: int
    gpus_per_node: int
    network: float | None
    model: str
    model_config: dict[str, Any]
    options: dict[str, Any]
    basis: bool
    step_s: float | None
    memory: dict[str, Any] | None
    differs: tuple[str, ...]
    doubts: tuple[str, ...]

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The cluster that it ran on."""
        gpu = find_gpu(self.gpu)
        if self.network:
            gpu = dataclasses.replace(gpu, network_bandwidth=self.network * GB)
        return Cluster(gpu, self.nodes, self.gpus_per_node)

    @property
    def step_options(self) -> StepOptions:
        """The options of `jfsdp plan` that come closest. Its rows are one document each."""
        fields = {"model": self.model, "model_config": self.model_config, "cross_documents": True, **self.options}
        return StepOptions(**read_fields(StepOptions, fields))

    @property
    def command(self) -> str:
        """The same as a command line."""
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in self.model_config.items())
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())
        network = f" --network {self.network:g}" if self.network else ""
        where = f"--gpu {self.gpu} --nodes {self.nodes} --gpus-per-node {self.gpus_per_node}{network}"
        return f"jfsdp plan {where} --cross-documents --model {self.model} {options} --model-config {config}"

    def rates(self, *, passes: float = EAGER_PASSES, **constants: float) -> Rates:
        """Return the rates at which its software works; `constants` as fields of `Rates`."""
        hopper = self.cluster.gpu.capability[0] == 9
        attention = FLASH2_ON_HOPPER if hopper and self.software != XLA else CUDNN_ATTENTION
        own: dict[str, Any] = {"attention": attention, "passes": passes if self.software == EAGER else 1.0, **constants}
        return Rates(self.cluster, **own)


@functools.cache
def published_runs() -> tuple[PublishedRun, ...]:
    """Return all runs, in the order of their sources."""
    rows = json.loads(Path(__file__).with_suffix(".json").read_text())
    return tuple(PublishedRun(**row | {name: tuple(row[name]) for name in ("differs", "doubts")}) for row in rows)


def program_of(run: PublishedRun, text: str) -> tuple[Module, tuple[Collective, ...]]:
    """Read the compiled program of a run's plan."""
    module = parse_module(text)
    return module, tuple(find_collectives(module, run.cluster.num_devices, dict(run.step_options.mesh)))


def predict(
    run: PublishedRun,
    module: Module,
    collectives: Iterable[Collective],
    *,
    works: dict[str, Work] | None = None,
    **constants: float,
) -> float:
    """Return the seconds of a step of that program at the rates of the run's software, `works` as in `simulate`."""
    return simulate(module, collectives, run.rates(**constants), works=works).step_s
