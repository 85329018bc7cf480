"""Fully Sharded Data Parallel for JAX. The public names; each is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jfsdp.checkpoint.foreign.peft import export_peft, read_loras
    from jfsdp.checkpoint.foreign.pretrained import load_pretrained
    from jfsdp.checkpoint.manager import Checkpointer
    from jfsdp.checkpoint.snapshot import Snapshots
    from jfsdp.checkpoint.store import restore, save
    from jfsdp.engine.driver.schedule import Prefetch
    from jfsdp.engine.pipeline.schedule import Schedule
    from jfsdp.layout.lora import LoRA
    from jfsdp.layout.loss_scale import LossScale
    from jfsdp.layout.mesh import make_abstract_mesh, make_mesh
    from jfsdp.layout.placements import Ignore, Replicate, Shard, placements
    from jfsdp.layout.policy import OffloadPolicy, SaveNames, UnitPolicy
    from jfsdp.layout.precision import MixedPrecisionPolicy
    from jfsdp.layout.strategy import STRATEGIES, Split, Strategy
    from jfsdp.layout.table import Layout
    from jfsdp.layout.units import Unit, by_size
    from jfsdp.layout.wrapped import lora, quantize
    from jfsdp.plan.wire.audit import audit
    from jfsdp.train.full import full
    from jfsdp.train.fully_shard import fully_shard
    from jfsdp.train.replicas import compare_replicas
    from jfsdp.train.reshard import reshard
    from jfsdp.train.sharded import ShardedModel
    from jfsdp.train.state import TrainState
    from jfsdp.train.step.loss import Loss, Max, Mean
    from jfsdp.train.step.step import TrainStep
    from jfsdp.train.update.ema import track_ema, with_ema
    from jfsdp.train.update.low_precision import low_precision_state
    from jfsdp.train.update.separate import separate
    from jfsdp.trainer.job import Job, find_job
    from jfsdp.trainer.preferences import preference_loss

_HOMES = {
    "checkpoint.manager": ("Checkpointer",),
    "checkpoint.foreign.peft": ("export_peft", "read_loras"),
    "checkpoint.foreign.pretrained": ("load_pretrained",),
    "checkpoint.snapshot": ("Snapshots",),
    "checkpoint.store": ("restore", "save"),
    "engine.driver.schedule": ("Prefetch",),
    "engine.pipeline.schedule": ("Schedule",),
    "layout.lora": ("LoRA",),
    "layout.loss_scale": ("LossScale",),
    "layout.mesh": ("make_abstract_mesh", "make_mesh"),
    "layout.placements": ("Ignore", "Replicate", "Shard", "placements"),
    "layout.policy": ("OffloadPolicy", "SaveNames", "UnitPolicy"),
    "layout.precision": ("MixedPrecisionPolicy",),
    "layout.strategy": ("STRATEGIES", "Split", "Strategy"),
    "layout.table": ("Layout",),
    "layout.units": ("Unit", "by_size"),
    "layout.wrapped": ("lora", "quantize"),
    "plan.wire.audit": ("audit",),
    "train.update.ema": ("track_ema", "with_ema"),
    "train.full": ("full",),
    "train.step.loss": ("Loss", "Max", "Mean"),
    "train.update.low_precision": ("low_precision_state",),
    "train.replicas": ("compare_replicas",),
    "train.reshard": ("reshard",),
    "train.update.separate": ("separate",),
    "train.fully_shard": ("fully_shard",),
    "train.sharded": ("ShardedModel",),
    "train.state": ("TrainState",),
    "train.step.step": ("TrainStep",),
    "trainer.job": ("Job", "find_job"),
    "trainer.preferences": ("preference_loss",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.2.0"
__all__ = [
    "STRATEGIES",
    "Checkpointer",
    "Ignore",
    "Job",
    "Layout",
    "LoRA",
    "Loss",
    "LossScale",
    "Max",
    "Mean",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "Prefetch",
    "Replicate",
    "SaveNames",
    "Schedule",
    "Shard",
    "ShardedModel",
    "Snapshots",
    "Split",
    "Strategy",
    "TrainState",
    "TrainStep",
    "Unit",
    "UnitPolicy",
    "audit",
    "by_size",
    "compare_replicas",
    "export_peft",
    "find_job",
    "full",
    "fully_shard",
    "load_pretrained",
    "lora",
    "low_precision_state",
    "make_abstract_mesh",
    "make_mesh",
    "placements",
    "preference_loss",
    "quantize",
    "read_loras",
    "reshard",
    "restore",
    "save",
    "separate",
    "track_ema",
    "with_ema",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jfsdp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jfsdp.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
