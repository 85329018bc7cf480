"""What a run has to do with files: its checkpoints, and the weights that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.foreign.pretrained import (
    config_json,
    has_config,
    load_pretrained,
    pretrained_fields,
    stated_config,
)
from jfsdp.checkpoint.manager import Checkpointer
from jfsdp.checkpoint.policy import Keep, Period, parse_best
from jfsdp.train.state import TrainState
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig


def check_policies(config: TrainConfig) -> dict[str, Any]:
    """Return when a run saves and what it keeps, as arguments of `Checkpointer`.

    Raises:
      ValueError: for policies that make no sense.
    """
    best = parse_best(config.keep_best) if config.keep_best else None
    keep = Keep(config.keep or None, config.keep_every, best)
    Period(config.checkpoint_every, config.checkpoint_minutes)
    return {
        "keep": keep.last,
        "keep_every": keep.every,
        "keep_best": best,
        "every_steps": config.checkpoint_every,
        "every_minutes": config.checkpoint_minutes,
    }


def open_checkpoints(config: TrainConfig, run_dir: Path) -> Checkpointer:
    """Open the checkpoints of a run with its policies."""
    return Checkpointer(run_dir / "checkpoints", **check_policies(config))


def fields_of_weights(config: TrainConfig, job: Job) -> dict[str, Any]:
    """Return the fields of a job's configuration that the `config.json` beside its weights asks for."""
    path = weights_path(config)
    return pretrained_fields(path, job.pretrained) if path and job.pretrained and has_config(path) else {}


def load_weights(config: TrainConfig, job: Job, model: Any, tx: Any) -> TrainState:
    """Make the first state from the weights that were given."""
    how: dict[str, Any] = {"config": job.config, "key": config.init_key, "seed": config.seed}
    path = weights_path(config)
    assert path is not None
    return load_pretrained(path, model, tx, job.pretrained, allow_nonfinite=config.allow_nonfinite, **how)


def stated_by_weights(config: TrainConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return how others call the model that the run began with; empty where nobody said.

    Args:
      stored: the `config.json` of the run to resume, or empty.
    """
    path = weights_path(config)
    return stored.get("pretrained") or (stated_config(path) if path else {})


def describe_model(job: Job, seq_len: int, theirs: Mapping[str, Any]) -> dict[str, Any] | None:
    """Say of a run's model how others call it, for exports; None: they could not.

    Args:
      theirs: as `stated_by_weights` returns it.
    """
    if not (job.pretrained or {}).get("to_config"):
        return None
    try:
        return config_json(job.pretrained, job.config, seq_len, theirs)
    except ValueError:  # no architecture of theirs computes that
        return None


def weights_path(config: TrainConfig) -> Path | None:
    """Return where the weights are that a run begins with."""
    return None if config.init_from is None else Path(config.init_from).expanduser()
