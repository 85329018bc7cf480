"""From a configuration to the parts of a run: job, sharded model, optimizer, step. Allocates nothing."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import optax

from jfsdp.arguments import check_call
from jfsdp.engine.options import check_options
from jfsdp.extras import MissingExtra, need
from jfsdp.layout.lora import Adapter
from jfsdp.layout.mesh import make_mesh, num_data_shards
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.step.step import TrainStep
from jfsdp.trainer.job import Job, load_named
from jfsdp.trainer.parse import write
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.resume_rules import what_decides
from jfsdp.trainer.run.weights import check_paths, check_policies, find_job, with_tokenizer
from jfsdp.trainer.sources.source import source_of
from jfsdp.trainer.step import make_schedule, make_step

need("train")


@dataclasses.dataclass
class Parts:
    """What the configuration decides without data and devices' memory.

    Attributes:
      config: that was given, with its tokenizer, and the rows per device and the microbatches that make its global
        batch.
      job, model, tx, step: the job, its model sharded, its optimizer and its training step.
      schedule: the learning rate by number of updates made before.
      row_items, global_batch: items per row (tokens; 1 where rows are not tokens), and rows per step of all devices
        together.
      decides: all that the losses depend on, but for the data: a run is not resumed under another.
      tracker: begins the user's own tracker, or None.
    """

    config: TrainConfig
    job: Job
    model: ShardedModel
    tx: optax.GradientTransformation
    step: TrainStep
    schedule: Callable[[int], Any]
    row_items: int
    global_batch: int
    decides: dict[str, Any]
    tracker: Callable[[dict[str, Any]], Any] | None


def build(config: TrainConfig, stored: Mapping[str, Any], devices: Any = None) -> Parts:
    """Build everything that needs neither data nor memory of the devices.

    Args:
      devices: those of the mesh; None: all of all processes.
      stored: the `config.json` of the run to resume, or empty. Without `decay_steps` the schedule stays what it was, so
        that a run can be prolonged.

    Raises:
      ValueError: for names, values and combinations that cannot be.
    """
    check_policies(config)
    if config.init_key is not None and config.init_from is None:
        raise ValueError(f"init_key={config.init_key!r} chooses a dict of the file that --init-from names; give both")
    if config.init_adapter is not None and config.init_from is None:
        raise ValueError(f"--init-adapter {config.init_adapter}: goes with --init-from, the weights that it adapts")
    if config.preference is not None and config.init_from is None:
        raise ValueError(f"--preference {config.preference}: trains a model further; name its weights by --init-from")
    if config.reference is not None and config.preference is None:
        raise ValueError(f"--reference {config.reference}: goes with --preference, a loss beside a reference")
    if config.restart_data and config.resume in (None, "auto"):
        raise ValueError(
            "--restart-data goes with --resume STEP: with auto each start of the same command would begin them anew"
        )
    if config.profile is not None and not 1 <= config.profile[0] <= min(config.profile[1], config.steps):
        raise ValueError(
            f"--profile {config.profile[0]}:{config.profile[1]} is not START:STOP with START from 1 to STOP, and not "
            f"after --steps {config.steps}"
        )
    job = find_job(config)
    row_items = source_of(job).check(config, job)
    config = with_tokenizer(config, job, stored)
    check_paths(config, stored)
    if config.xla:
        check_options({name: value for name, value in config.xla if value is not None})
    for extra in ("wandb", "mlflow"):
        if getattr(config, extra) is not None:
            try:
                need(extra)
            except MissingExtra as error:
                raise ValueError(f"--{extra}: {error}") from error
    tracker = None
    if config.tracker is not None:
        tracker = load_named(config.tracker, "tracker")
        check_call(f"--tracker {config.tracker}", tracker, "config")
    mesh = make_run_mesh(config, devices)
    config = with_global_batch(config, mesh)
    decay_steps = config.decay_steps or stored.get("decides", {}).get("decay_steps") or config.steps
    warmup = decay_steps // 20 if config.warmup is None else config.warmup
    schedule = make_schedule(config.learning_rate, warmup, decay_steps, config.min_learning_rate)
    model, tx, step = make_step(config, job, mesh, schedule, check_loss=config.check_loss)
    global_batch = config.batch_per_device * num_data_shards(dict(model.layout.mesh_sizes))
    decides = what_decides(config) | {
        **{f"model_config.{name}": value for name, value in _fields(job, config).items()},
        "adapters": _paths_by_kind(model.model.adapters),
        "seq_len": row_items,
        "global_batch": global_batch,
        "decay_steps": decay_steps,
        "warmup": warmup,
    }
    return Parts(config, job, model, tx, step, schedule, row_items, global_batch, decides, tracker)


_ROUNDS = ("loss_chunk",)  # fields of models that change the order of sums alone


def _fields(job: Job, config: TrainConfig) -> dict[str, Any]:
    """Return the fields of the model that losses depend on; of one without a dataclass those that were given."""
    if not dataclasses.is_dataclass(job.config) or isinstance(job.config, type):
        return {"fields": [write((field,)) for field in config.model_config]}
    return {name: value for name, value in dataclasses.asdict(job.config).items() if name not in _ROUNDS}


def _paths_by_kind(adapters: Mapping[str, Adapter]) -> dict[str, list[str]] | None:
    paths: dict[str, list[str]] = {}
    for adapter in adapters.values():
        paths.setdefault(adapter.kind, []).append(adapter.path)
    return paths or None


_MOST_AT_ONCE = 10_000  # rows that a message proposes to compute at once


def with_global_batch(config: TrainConfig, mesh: Any) -> TrainConfig:
    """Return a configuration with the rows per device and the microbatches that make its global batch on a mesh.

    Raises:
      ValueError: with the arithmetic, if no number of microbatches makes it.
    """
    if config.global_batch is None:
        return config
    shards, rows = num_data_shards(dict(mesh.shape)), config.global_batch
    at_once = config.batch_per_device // config.accumulate
    if not at_once or rows % (shards * at_once) or config.batch_per_device % config.accumulate:
        possible = [count for count in range(1, min(rows // shards, _MOST_AT_ONCE) + 1) if rows % (shards * count) == 0]
        remedy = f"use other devices, or a multiple of {shards}"
        if possible:
            remedy = f"--batch-per-device can be {', '.join(map(str, possible[:12]))}, without --accumulate"
        raise ValueError(
            f"--global-batch {rows}: {shards} devices with {config.batch_per_device}/{config.accumulate} rows each at "
            f"once (--batch-per-device over --accumulate) do not divide it; {remedy}"
        )
    per_device = rows // shards
    return dataclasses.replace(config, batch_per_device=per_device, accumulate=per_device // at_once)


def make_run_mesh(config: TrainConfig, devices: Any = None) -> Any:
    """Arrange all devices of all processes, or those given, into the mesh."""
    try:
        return make_mesh(devices=devices, **{"fsdp": 1, **dict(config.mesh)})  # type: ignore[arg-type]
    except ValueError as error:
        simulated = f" (--simulate-devices {config.simulate_devices})" if config.simulate_devices else ""
        raise ValueError(f"--mesh {write(config.mesh)}: {error}{simulated}") from error
