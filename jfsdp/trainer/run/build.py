"""Construction of a run's parts from its configuration: job, sharded model, optimizer, step. Allocates nothing."""

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
from jfsdp.trainer.run.resume_rules import loss_settings
from jfsdp.trainer.run.weights import check_paths, check_policies, find_job, with_tokenizer
from jfsdp.trainer.sources.source import source_of
from jfsdp.trainer.step import make_schedule, make_step

need("train")


@dataclasses.dataclass
class Parts:
    """The parts of a run that need neither data nor device memory.

    Attributes:
      config: the configuration, completed with the tokenizer, and with the rows per device and the microbatches that
        follow from the global batch.
      job, model, tx, step: the job, its sharded model, its optimizer and its training step.
      schedule: learning rate by number of previous updates.
      row_items, global_batch: items per row (tokens; 1 if rows are not tokens), and rows per step of all devices.
      decides: all settings on which the losses depend, except the data. A resumed run needs the same.
      tracker: factory of the user's tracker, or None.
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
    """Build the parts of a run that need neither data nor device memory.

    Args:
      stored: the `config.json` of the run to resume, or empty. Its schedule is kept if `config` has no `decay_steps`,
        so that a run can be extended.
      devices: devices of the mesh; None: all devices of all processes.

    Raises:
      ValueError: for invalid names, values and combinations.
    """
    check_policies(config)
    if config.init_key is not None and config.init_from is None:
        raise ValueError(f"init_key={config.init_key!r}: needs --init-from, the file with this dict; give both")
    if config.init_optimizer and config.init_from is None:
        raise ValueError("--init-optimizer: needs --init-from, the checkpoint of the run to continue")
    if config.init_adapter is not None and config.init_from is None:
        raise ValueError(f"--init-adapter {config.init_adapter}: needs --init-from, the weights that it adapts")
    if config.preference is not None and config.init_from is None:
        raise ValueError(f"--preference {config.preference}: needs a trained model; name its weights by --init-from")
    if config.reference is not None and config.preference is None:
        raise ValueError(f"--reference {config.reference}: needs --preference, the loss that uses a reference")
    if config.restart_data and config.resume in (None, "auto"):
        raise ValueError(
            "--restart-data needs --resume STEP: with auto, every start of the same command would restart the data"
        )
    if config.profile is not None and not 1 <= config.profile[0] <= min(config.profile[1], config.steps):
        raise ValueError(
            f"--profile {config.profile[0]}:{config.profile[1]}: use START:STOP with 1 <= START <= STOP, and START at "
            f"most --steps {config.steps}"
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
    schedule = make_schedule(config.learning_rate, warmup, decay_steps, config.min_learning_rate, config.lr_schedule)
    model, tx, step = make_step(config, job, mesh, schedule, check_loss=config.check_loss)
    global_batch = config.batch_per_device * num_data_shards(dict(model.layout.mesh_sizes))
    decides = loss_settings(config) | {
        **{f"model_config.{name}": value for name, value in _fields(job, config, stored.get("decides")).items()},
        "adapters": _paths_by_kind(model.model.adapters),
        "seq_len": row_items,
        "global_batch": global_batch,
        "decay_steps": decay_steps,
        "warmup": warmup,
    }
    return Parts(config, job, model, tx, step, schedule, row_items, global_batch, decides, tracker)


_ROUNDS = {"loss_chunk", "token_chunk", "context_by", "expert_send"}  # fields that change only the order of sums


def _fields(job: Job, config: TrainConfig, known: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the model's fields on which losses depend. Without a dataclass, return the given --model-config.

    Fields that the resumed run did not have yet (`known` are its settings) are left out if they have their default.
    """
    if not dataclasses.is_dataclass(job.config) or isinstance(job.config, type):
        return {"fields": [write((field,)) for field in config.model_config]}
    fields = {name: value for name, value in dataclasses.asdict(job.config).items() if name not in _ROUNDS}
    defaults = {field.name: field.default for field in dataclasses.fields(job.config)}
    is_new = {name for name in fields if known and f"model_config.{name}" not in known}
    return {name: value for name, value in fields.items() if name not in is_new or value != defaults[name]}


def _paths_by_kind(adapters: Mapping[str, Adapter]) -> dict[str, list[str]] | None:
    paths: dict[str, list[str]] = {}
    for adapter in adapters.values():
        paths.setdefault(adapter.kind, []).append(adapter.path)
    return paths or None


_MOST_AT_ONCE = 10_000  # most rows that an error suggests to compute at once


def with_global_batch(config: TrainConfig, mesh: Any) -> TrainConfig:
    """Return a configuration whose rows per device and microbatches give its global batch on a mesh.

    Raises:
      ValueError: if no number of microbatches gives it; lists possible rows per device.
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
            f"--global-batch {rows}: not divisible by {shards} data shards with "
            f"{config.batch_per_device}/{config.accumulate} rows at once (--batch-per-device / --accumulate); {remedy}"
        )
    per_device = rows // shards
    return dataclasses.replace(config, batch_per_device=per_device, accumulate=per_device // at_once)


def make_run_mesh(config: TrainConfig, devices: Any = None) -> Any:
    """Return the mesh of the given devices; None: all devices of all processes."""
    try:
        return make_mesh(devices=devices, **{"fsdp": 1, **dict(config.mesh)})  # type: ignore[arg-type]
    except ValueError as error:
        simulated = f" (--simulate-devices {config.simulate_devices})" if config.simulate_devices else ""
        raise ValueError(f"--mesh {write(config.mesh)}: {error}{simulated}") from error
