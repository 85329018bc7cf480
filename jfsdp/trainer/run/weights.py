"""A run's checkpoints and initial weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.disk.paths import find_checkpoint
from jfsdp.checkpoint.foreign import pretrained
from jfsdp.checkpoint.foreign.peft_files import open_peft
from jfsdp.checkpoint.manager import Checkpointer
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.policy import Keep, parse_best
from jfsdp.objects.path import as_path
from jfsdp.train.state import TrainState
from jfsdp.trainer.data.chat import find_template
from jfsdp.trainer.data.tokenizer import read_tokenizer
from jfsdp.trainer.data.tokens import split_sources
from jfsdp.trainer.job import Job, job_names, load_job
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.preferences import with_preference
from jfsdp.trainer.run.config import TrainConfig


def check_policies(config: TrainConfig) -> dict[str, Any]:
    """Return a run's policies for saving and keeping checkpoints, as arguments of `Checkpointer`.

    Raises:
      ValueError: for invalid policies.
    """
    best = None if config.keep_best is None else parse_best(config.keep_best)
    keep = Keep(config.keep or None, config.keep_every, best)
    return {
        "keep": keep.last,
        "keep_every": keep.every,
        "keep_best": config.keep_best,
        "every_steps": config.checkpoint_every,
    }


def open_checkpoints(config: TrainConfig, run_dir: Any) -> Checkpointer:
    """Open the checkpoints of a run with its policies."""
    return Checkpointer(run_dir / "checkpoints", **check_policies(config), frozen=not omits_base(config))


def omits_base(config: TrainConfig) -> bool:
    """Return whether a run's checkpoints omit the base weights, because it trains adapters."""
    return bool(config.lora) or config.init_adapter is not None


def find_job(config: TrainConfig) -> Job:
    """Load the job of a run, configured by its weights and its options."""
    path = weights_path(config)
    if not (config.model or config.factory) and path and pretrained.has_config(path):
        name = job_of_weights(path).name
        raise ValueError(f"--init-from {config.init_from}: needs --model; its config.json matches --model {name}")
    job = load_job(config.model, config.factory)
    return with_preference(pretrained.fit_job(job, path, dict(config.model_config)), config.preference, config.beta)


def job_of_weights(path: Path, model: str | None = None) -> Job:
    """Return a job for the model of a `config.json`: the requested one, or the first that matches.

    Names that begin with its `model_type` come first.

    Raises:
      ValueError: if none matches.
    """
    reasons, kind = [], str(pretrained.read_config(path).get("model_type"))
    names = sorted(job_names(), key=lambda name: not name.startswith(kind)) if model is None else [model]
    for name in names:
        job = load_job(name, None)
        try:
            if job.pretrained:
                return pretrained.fit_job(job, path, {})
            reasons += [f"--model {model} cannot read weights of Hugging Face"] * (model is not None)
        except ValueError as error:
            reasons.append(str(error))
    why = "; ".join(dict.fromkeys(reasons)) or "no installed model reads weights of Hugging Face"
    raise ValueError(f"{str(path)!r}: no model matches its config.json: {why}")


def with_tokenizer(config: TrainConfig, job: Job, stored: Mapping[str, Any]) -> TrainConfig:
    """Return a configuration with a tokenizer: the given one, the resumed run's, or the one of the weights.

    Raises:
      ValueError: if the weights have no tokenizer.
    """
    found, path = config.tokenizer or stored.get("config", {}).get("tokenizer"), weights_path(config)
    if found is not None or job.vocab_size is None:
        return dataclasses.replace(config, tokenizer=found)
    if path and pretrained.is_checkpoint(path):
        found = open_checkpoint(find_checkpoint(path)).stated("config", "tokenizer")
    elif path and (file := (path if path.is_dir() else path.parent) / "tokenizer.json").is_file():
        found = str(file.parent)
    is_used = not all(source.endswith(".bin") for source, _ in split_sources(config.data))  # not by token files
    if found is None and is_used and path and path.exists():  # `check_paths` refuses a path without a file
        raise ValueError(
            f"--init-from {config.init_from}: has no tokenizer.json (write one with AutoTokenizer.from_pretrained and "
            "save_pretrained of transformers); pass --tokenizer PATH, or --tokenizer byte for a model of bytes"
        )
    return dataclasses.replace(config, tokenizer=found or "byte")


def check_paths(config: TrainConfig, stored: Mapping[str, Any]) -> None:
    """Check the files that options name, before data are read, the model is traced and files are written.

    Reads headers only. A resumed run needs its initial weights only if its checkpoints omit them.

    Raises:
      ValueError: naming the option, if its path does not exist or has the wrong content.
    """

    def open_weights(path: str) -> Any:
        if pretrained.is_checkpoint(path):
            return open_checkpoint(find_checkpoint(path))
        training = config.init_optimizer and path == config.init_from
        return pretrained.foreign_source(path, key_of(config, path), training=training)

    openers = {"init_from": open_weights, "reference": open_weights, "init_adapter": open_peft}
    openers |= {"tokenizer": read_tokenizer, "chat_template": partial(find_template, config.tokenizer or "byte")}
    read_before = ["reference"] if omits_base(config) else ["reference", "init_from"]
    for name in [name for name in openers if not stored or name not in read_before]:
        try:
            if (value := getattr(config, name)) not in (None, "byte"):
                openers[name](value)
        except ValueError as error:
            raise ValueError(f"{spell(name)}: {error}") from error


def key_of(config: TrainConfig, path: Any) -> str | None:
    """Return the key of the dict with the model in the weights at a path; only those of --init-from have one."""
    return config.init_key if str(path) == config.init_from else None


def load_weights(config: TrainConfig, job: Job, model: Any, tx: Any) -> TrainState:
    """Return the initial state from the weights of `init_from`."""
    how: dict[str, Any] = {"config": job.config, "key": config.init_key, "seed": config.seed}
    how |= {"adapter": config.init_adapter, "optimizer": config.init_optimizer}
    path = weights_path(config)
    assert path is not None
    return pretrained.load_pretrained(path, model, tx, job.pretrained, **how)


def initial_hf_config(config: TrainConfig, stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the Hugging Face `config.json` of the run's initial weights; {} if there is none.

    Args:
      stored: the `config.json` of the run to resume, or empty.
    """
    path = weights_path(config)
    return stored.get("pretrained") or (pretrained.stated_config(path) if path else {})


def describe_model(job: Job, seq_len: int, hf_config: Mapping[str, Any]) -> dict[str, Any] | None:
    """Return the Hugging Face `config.json` of a run's model, for exports; None if no architecture matches.

    Args:
      hf_config: the result of `initial_hf_config`.
    """
    if not (job.pretrained or {}).get("to_config"):
        return None
    try:
        return pretrained.config_json(job.pretrained, job.config, seq_len, hf_config)
    except ValueError:  # no architecture of Hugging Face computes this model
        return None


def weights_path(config: TrainConfig) -> Path | None:
    """Return the path of a run's initial weights."""
    return None if config.init_from is None else as_path(config.init_from)
