"""Published measurements of training runs, as data, and the prediction of a plan for each. fit_clock.py uses them.

[Note: which runs]
A run is included if model, mesh, rows and recomputation are published or follow from its software's defaults at that
time, and it trains in bfloat16 on axes that jfsdp has. `differs` lists differences of our plan, and assumptions about
the source. `doubts` lists open questions of the source. If a doubt decides the time (such as a network known only to a
factor of eight), the run is planned, but the clock is not fitted to it. No run has individual adjustments. `command`
gives its program, and `rates` the rates of its software.
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

# FlashAttention-2's fraction of an H100's peak, forward and backward together: 335 TFLOP/s (Dao-AILab/flash-attention,
# README). On an A100 it equals cuDNN's.
FLASH2_ON_HOPPER = (0.34, 0.34)
# Factor of the bytes that memory-bound kernels move in eager PyTorch, compared with XLA's fused kernels. It is the only
# constant for eager runs. Fitted (scripts/fit_clock.py).
EAGER_PASSES = 1.4
XLA, COMPILED, EAGER = "xla", "torch-compiled", "torch-eager"


@dataclasses.dataclass(frozen=True)
class PublishedRun:
    """A published measurement of a run.

    Attributes:
      id: unique name.
      source: repository, path and date of the source.
      framework: the framework of the run.
      software: XLA, COMPILED (torch.compile, or manually fused kernels) or EAGER (PyTorch).
      gpu, nodes, gpus_per_node: the cluster.
      network: GB/s per GPU of the node's network adapters; None: the GPU's default.
      model, model_config: a job of jfsdp with the same shapes.
      options: other options of the step.
      basis: whether the clock is fitted to it; False if a decisive value is unknown, such as the network's speed.
      step_s: measured seconds; None: only memory was measured.
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
        """The cluster of the run."""
        gpu = find_gpu(self.gpu)
        if self.network:
            gpu = dataclasses.replace(gpu, network_bandwidth=self.network * GB)
        return Cluster(gpu, self.nodes, self.gpus_per_node)

    @property
    def step_options(self) -> StepOptions:
        """The closest options of `jfsdp plan`, with one document per row."""
        fields = {"model": self.model, "model_config": self.model_config, "cross_documents": True, **self.options}
        return StepOptions(**read_fields(StepOptions, fields))

    @property
    def command(self) -> str:
        """The command line of its plan."""
        config = " ".join(f"{name}={json.dumps(value)}" for name, value in self.model_config.items())
        options = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in self.options.items())
        network = f" --network {self.network:g}" if self.network else ""
        where = f"--gpu {self.gpu} --nodes {self.nodes} --gpus-per-node {self.gpus_per_node}{network}"
        return f"jfsdp plan {where} --cross-documents --model {self.model} {options} --model-config {config}"

    def rates(self, *, passes: float = EAGER_PASSES, **constants: float) -> Rates:
        """Return the rates of its software; `constants` are fields of `Rates`."""
        hopper = self.cluster.gpu.capability[0] == 9
        attention = FLASH2_ON_HOPPER if hopper and self.software != XLA else CUDNN_ATTENTION
        passes = passes if self.software == EAGER else 1.0
        fields: dict[str, Any] = {"attention": attention, "passes": passes, **constants}
        return Rates(self.cluster, **fields)


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
    """Return the predicted seconds of a step at the rates of the run's software; `works` as in `simulate`."""
    return simulate(module, collectives, run.rates(**constants), works=works).step_s
