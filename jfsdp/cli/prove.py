"""`jfsdp prove`: compare the steps of a job on many meshes and strategies with one device."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from typing import Annotated, Any

from jfsdp.cli.console import BROKEN, Reporting, make_console, print_verdict
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.job import load_job
from jfsdp.trainer.options import Count, Dtype, Mesh, Number, ShardingOptions, text
from jfsdp.trainer.parse import read_mesh, read_strategy, write


@dataclasses.dataclass(frozen=True)
class Prove(Reporting, ShardingOptions):
    """Compare training steps of a model with one device: loss, every gradient, and the state after some steps.

    Simulates devices on the CPU. The model is cut to size, and computed in float64 where it allows. A difference is
    reported with its size and the cause whose signature it has. Chooses strategies, programs, meshes, microbatches and
    remat so that each pair of them occurs together; options that are given are fixed.

    Exit status: 0 equal, 4 differences, 2 bad arguments.
    """

    mesh: Mesh = option((), "most used", read=read_mesh)
    """Only this mesh: the sizes of its axes. -: all devices on fsdp, and two on each other axis of the model."""
    strategy: Annotated[str | int | None, text("NAME|0..3|none")] = option(
        None, "most used", read=lambda text: None if text == "none" else read_strategy(text)
    )
    """Only this strategy. none: full_shard, zero1, zero2 and ddp."""
    accumulate: Count = option(0, "gradient accumulation", least=0)
    """Only this number of microbatches. 0: 1 and 2."""
    remat: Annotated[str, text("none|full|dots|both")] = option("both", "sharding and memory")
    """Only this remat policy. both: none and full."""
    param_dtype: Dtype = option(None, "precision")
    """Must be none: a proof computes in the model's dtypes."""
    all: bool = option(False, "proof")
    """Try every combination."""
    whole: bool = option(False, "proof")
    """Do not cut the model to size."""
    steps: Count = option(2, "proof", least=1)
    """Steps of the optimizer."""
    devices: Count = option(8, "proof", least=2)
    """Number of simulated devices."""
    seq_len: Number = option(None, "proof", least=1)
    """Tokens per row. none: 32, or the model's if that is less."""

    def run(self) -> int:
        from jfsdp.proof import jobs
        from jfsdp.proof.cases import STRATEGIES
        from jfsdp.proof.prove import resolve_mesh

        jobs.check_options(self)
        _simulate(self.devices)
        mesh = resolve_mesh(dict(self.mesh)) if self.mesh else None
        job = load_job(self.model, self.factory).with_config(**dict(self.model_config))
        job, changed = (job, {}) if self.whole else jobs.cut_to_size(job)
        accumulate = [self.accumulate] if self.accumulate else [1, 2]
        columns: dict[str, Any] = {
            "strategy": [self.strategy] if self.strategy is not None else STRATEGIES,
            "program": [self.program] if self.program else None,
            "accumulate": accumulate,
            "reshard": [None, False] if self.reshard_after_forward is None else [self.reshard_after_forward],
            "remat": ["none", "full"] if self.remat == "both" else [self.remat],
        }
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(ShardingOptions)}
        options = ShardingOptions(**fields | {"mesh": (), "strategy": "full_shard", "accumulate": 1, "remat": "none"})
        num_devices = math.prod(mesh.values()) if mesh else self.devices
        batch = jobs.random_batch(job, num_devices * max(accumulate), self.seq_len or jobs.tokens_of(job))
        console = make_console()
        if changed and not self.json:
            console.print(f"{job.name} cut to size: {write(tuple(changed.items()))}")
        with self.phases() as report:
            show = lambda one: report(f"{one.case.name}: {one.status}")  # noqa: E731
            given = {"batch": batch, "every": self.all, "steps": self.steps, "on_case": show}
            proof = jobs.prove_job(options, job, columns, [mesh] if mesh else None, **given)

        def print_proof() -> None:
            print_verdict(console, proof.is_ok, *proof.verdict)
            console.print(*proof.lines(), sep="\n", soft_wrap=True)

        self.report({"model": job.name, "config": changed} | proof.to_dict(), print_proof)
        return 0 if proof.is_ok else BROKEN


def _simulate(num_devices: int) -> None:
    """Let the CPU simulate devices.

    Raises:
      ValueError: if JAX has started with fewer.
    """
    import jax

    if "host_platform_device_count" not in os.environ.get("XLA_FLAGS", ""):
        with contextlib.suppress(RuntimeError):  # JAX has started
            jax.config.update("jax_platforms", "cpu")
            jax.config.update("jax_num_cpu_devices", num_devices)
    if jax.device_count() < num_devices:
        raise ValueError(f"--devices {num_devices}: XLA_FLAGS sets {jax.device_count()}; remove the flag, or lower it")
