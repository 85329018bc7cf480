"""Fully Sharded Data Parallel for JAX. The public names; each is loaded when it is first used."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jfsdp.checkpoint.manager import Checkpointer
    from jfsdp.checkpoint.store import restore, save
    from jfsdp.layout.mesh import make_abstract_mesh, make_mesh, parse_mesh
    from jfsdp.layout.policy import UnitPolicy
    from jfsdp.layout.precision import MixedPrecisionPolicy
    from jfsdp.layout.strategy import STRATEGIES, Split, Strategy
    from jfsdp.layout.table import Layout, build_layout
    from jfsdp.layout.units import Unit, by_size, resolve_units
    from jfsdp.train.job import Job, find_job
    from jfsdp.train.loss import Loss
    from jfsdp.train.sharded import ShardedModel, fully_shard
    from jfsdp.train.state import TrainState
    from jfsdp.train.step import TrainStep

_HOMES = {
    "checkpoint.manager": ("Checkpointer",),
    "checkpoint.store": ("restore", "save"),
    "layout.mesh": ("make_abstract_mesh", "make_mesh", "parse_mesh"),
    "layout.policy": ("UnitPolicy",),
    "layout.precision": ("MixedPrecisionPolicy",),
    "layout.strategy": ("STRATEGIES", "Split", "Strategy"),
    "layout.table": ("Layout", "build_layout"),
    "layout.units": ("Unit", "by_size", "resolve_units"),
    "train.job": ("Job", "find_job"),
    "train.loss": ("Loss",),
    "train.sharded": ("ShardedModel", "fully_shard"),
    "train.state": ("TrainState",),
    "train.step": ("TrainStep",),
}
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__version__ = "0.1.0"
__all__ = [
    "STRATEGIES",
    "Checkpointer",
    "Job",
    "Layout",
    "Loss",
    "MixedPrecisionPolicy",
    "ShardedModel",
    "Split",
    "Strategy",
    "TrainState",
    "TrainStep",
    "Unit",
    "UnitPolicy",
    "build_layout",
    "by_size",
    "find_job",
    "fully_shard",
    "make_abstract_mesh",
    "make_mesh",
    "parse_mesh",
    "resolve_units",
    "restore",
    "save",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'jfsdp' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jfsdp.{_HOME_OF[name]}"), name)


def __dir__() -> list[str]:
    return [*globals(), *__all__]
