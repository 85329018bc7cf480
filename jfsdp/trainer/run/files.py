"""What a run has to do with files: its checkpoints, and the weights that it begins with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.foreign.pretrained import (
    config_json,
    fit_job,
    load_pretrained,
    stated_config,
)
from jfsdp.checkpoint.manager import Checkpointer
from jfsdp.checkpoint.policy import Keep, Period, parse_best
from jfsdp.train.state import TrainState
from jfsdp.trainer.job import Job, load_job, parse_config
from jfsdp.trainer.preferences import with_preference
from jfsdp.trainer.run.config import TrainConfig


def check_policies(config: TrainConfig) -> dict[str, Any]:
    """Return when a run saves and what it keeps, as arguments of `Checkpointer`.

    Raises:
      ValueError: for policies that make no sense.
    """
    best = None if config.keep_best is None else parse_best(config.keep_best)
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
    return Checkpointer(run_dir / "checkpoints", **check_policies(config), frozen=not leaves_out_base(config))


def leaves_out_base(config: TrainConfig) -> bool:
    """Tell whether a run's checkpoints leave out the base: where it trains adapters."""
    return bool(config.lora) or config.init_adapter is not None


def find_job(config: TrainConfig) -> Job:
    """Load the job of a run, with the fields of its configuration that its weights and its options ask for."""
    job, path, changed = load_job(config.model, config.factory), weights_path(config), parse_config(config.model_config)
    return with_preference(fit_job(job, path, changed), config.preference, config.beta)


def load_weights(config: TrainConfig, job: Job, model: Any, tx: Any) -> TrainState:
    """Make the first state from the weights that were given."""
    how: dict[str, Any] = {"config": job.config, "key": config.init_key, "seed": config.seed}
    path = weights_path(config)
    assert path is not None
    how |= {"allow_nonfinite": config.allow_nonfinite, "adapter": config.init_adapter}
    return load_pretrained(path, model, tx, job.pretrained, **how)


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
