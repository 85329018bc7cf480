"""Loading of a trained model for generation, from a run or a directory of Hugging Face."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import jax
import optax

from jfsdp.checkpoint.disk.paths import existing_path
from jfsdp.checkpoint.foreign.pretrained import has_config, read_config
from jfsdp.objects.path import as_path, read_json
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.update.ema import with_ema
from jfsdp.trainer.data.chat import find_template, load_template
from jfsdp.trainer.data.examples import Examples
from jfsdp.trainer.data.tokenizer import Tokenizer, load_tokenizer
from jfsdp.trainer.job import Job
from jfsdp.trainer.options import make_optimizer, shard_job
from jfsdp.trainer.recipes import with_fields
from jfsdp.trainer.run import directory as runs
from jfsdp.trainer.run.build import make_run_mesh
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.weights import find_job as job_of_run
from jfsdp.trainer.run.weights import job_of_weights, key_of, load_weights, omits_base, open_checkpoints


@dataclasses.dataclass
class LoadedModel:
    """A model loaded for generation.

    Attributes:
      config: the run's configuration, or one for the directory.
      job, model, state: the model and its weights, sharded and stored in the dtype of compute.
      tokenizer: the model's tokenizer.
      prompts: encoder of texts and messages.
      stop: ids that end an answer.
      description: description of the model in one line.
    """

    config: TrainConfig
    job: Job
    model: ShardedModel
    state: TrainState
    tokenizer: Tokenizer
    prompts: Examples
    stop: tuple[int, ...]
    description: str


def open_model(
    path: str,
    given: TrainConfig,
    *,
    step: str = "auto",
    tokenizer: str | None = None,
    chat_template: str | None = None,
    eod_token: str | None = None,
) -> LoadedModel:
    """Load the model of a run or of a directory of Hugging Face.

    A run with adapters or averages is restored like a resumed run, with its base from its initial weights. From any
    other model only the parameters are read, and stored in the dtype of compute. Averages generate, as in evaluation.

    Args:
      path: the directory of a run of scripts/train.py, or one with `config.json` and weights.
      given: mesh, dtype, strategy, adapter and model; a run's configuration supplies the values that are None.
      step: step of the run's checkpoint; "auto": the newest.
      tokenizer: None: the tokenizer of the run or of the directory.
      chat_template: file that replaces the tokenizer's template, or the name of one of several.
      eod_token: the tokenizer's token that ends a document; None: the run's if the tokenizer is the run's, or detected.

    Raises:
      ValueError: if there is no such model, the weights do not fit, or the tokenizer has ids beyond the vocabulary.
    """
    directory = existing_path(path)
    stored = {} if has_config(directory) else runs.read_config(directory)
    if (directory / "adapter_config.json").is_file():
        raise ValueError(f"{path!r} is an adapter; name its base model, and pass the adapter as --adapter")
    if not directory.is_dir() or not (stored.get("config") or has_config(directory)):
        raise ValueError(
            f"{path!r} is neither the directory of a run (with config.json and checkpoints) nor a directory of Hugging "
            "Face (with config.json and weights); name one of these"
        )
    if not stored:
        read_config(directory)
    if stored and given.model is not None:
        raise ValueError(f"--model {given.model}: {path!r} is a run, whose config.json names its model; leave it out")
    if step != "auto" and not step.isdecimal():
        raise ValueError(f"--step {step!r} is neither auto nor a step; use one of these")
    config = _of_run(stored["config"], given) if stored else dataclasses.replace(given, init_from=path, tokenizer=path)
    tokenizer = tokenizer or config.tokenizer or "byte"  # a run on custom data has none
    chat_template = chat_template or config.chat_template
    eod_token = eod_token or (config.eod_token if tokenizer == config.tokenizer else None)  # another has other tokens
    config = dataclasses.replace(config, tokenizer=tokenizer, chat_template=chat_template, eod_token=eod_token)
    loaded = load_tokenizer(tokenizer, eod_token=config.eod_token)
    begun = dataclasses.replace(config, init_adapter=stored.get("config", {}).get("init_adapter"))
    is_restored = bool(stored) and (omits_base(begun) or begun.ema is not None)
    if is_restored:
        if given.init_adapter is not None:
            raise ValueError(f"{path!r} already has adapters or averages; leave out --adapter, or name another model")
        job = job_of_run(config)
        model, state, description = _restored(config, job, directory, step)
    else:
        job = job_of_run(config) if stored else job_of_weights(directory, given.model)
        weights = directory / "checkpoints" / str(runs.resume_step(directory, step)) if stored else directory
        model, state, description = load_frozen(config, job, weights)
    if job.vocab_size is not None and loaded.vocab_size > job.vocab_size:
        raise ValueError(
            f"--tokenizer {tokenizer}: its ids go up to {loaded.vocab_size - 1}, but the model's ids are below "
            f"{job.vocab_size}; use the model's tokenizer"
        )
    load = functools.partial(load_template, tokenizer, config.chat_template)
    prompts = Examples(loaded, load, "prompt", answers="all", seq_len=job.seq_len)
    places = [config.init_from, None if tokenizer == "byte" else tokenizer]
    directories = [directory, *(as_path(place) for place in places if place)]
    stop = _stop_ids(loaded, prompts, find_template(tokenizer, config.chat_template) is not None, directories)
    return LoadedModel(config, job, model, state, loaded, prompts, stop, f"{description}, tokenizer {tokenizer}")


def _of_run(stored: dict[str, Any], given: TrainConfig) -> TrainConfig:
    """Return the configuration of a run, with the options of generation from `given`."""
    known = {field.name for field in dataclasses.fields(TrainConfig)}
    kept = {name: value for name, value in stored.items() if name in known}
    config = with_fields(TrainConfig(), kept, "config.json of the run")
    names = ("mesh", "param_dtype", "init_adapter")
    changed = {name: getattr(given, name) for name in names if getattr(given, name) is not None}
    plain = ("strategy", "opt_over", "reshard_after_forward", "offload", "program", "prefetch", "storage")
    plain += ("min_size", "preference", "beta", "simulate_devices", "init_optimizer")
    # Other rows need not be a multiple of the chunk, and without a backward a layer keeps no temporaries.
    changed["model_config"] = tuple(pair for pair in config.model_config if pair[0] != "token_chunk")
    return dataclasses.replace(config, **changed, **{name: getattr(given, name) for name in plain})


def load_frozen(config: TrainConfig, job: Job, weights: Any) -> tuple[ShardedModel, TrainState, str]:
    """Load only the parameters, all frozen, without gradients and optimizer states.

    Raises:
      ValueError: if the weights do not fit the job.
    """
    plain = ("offload", "storage", "ema", "prefetch", "program", "init_optimizer")
    config = dataclasses.replace(config, **{name: getattr(TrainConfig, name) for name in plain})
    dtype = config.param_dtype or "float32"
    frozen: dict[str, Any] = {"frozen": ("**",), "frozen_dtype": dtype, "init_key": key_of(config, weights)}
    config = dataclasses.replace(config, init_from=str(weights), **frozen)
    model = shard_job(config, job, make_run_mesh(config))
    state = load_weights(config, job, model, optax.identity())
    adapter = f" with adapter {config.init_adapter}" if config.init_adapter else ""
    return model, state, f"{job.name} from {weights}{adapter}"


def without_adapters(config: TrainConfig) -> TrainConfig:
    """Return the configuration of a run without adapters and quantization."""
    names = ("lora", "init_adapter", "init_key", "quantized")
    return dataclasses.replace(config, **{name: getattr(TrainConfig, name) for name in names})


def _restored(config: TrainConfig, job: Job, directory: Path, step: str) -> tuple[ShardedModel, TrainState, str]:
    model = shard_job(config, job, make_run_mesh(config))
    tx = make_optimizer(config, job, model, lambda count: 0.0)  # with a schedule, as in the run
    found = runs.resume_step(directory, step)
    if config.init_from:
        like = load_weights(config, job, model, tx)
    else:  # the base comes from the seed
        like = model.init(tx, config.seed) if omits_base(config) else model.abstract_state(tx)
    with open_checkpoints(config, directory) as checkpoints:
        state, _ = checkpoints.restore(like=like, step=found)
    state = state if config.ema is None else with_ema(state)
    jax.block_until_ready(state.source)
    return model, state, f"{job.name} from {directory}, step {found}"


def _stop_ids(tokenizer: Tokenizer, prompts: Examples, has_template: bool, directories: list[Path]) -> tuple[int, ...]:
    """Return the ids that end an answer: the tokenizer's end-of-document id, the end of an answer in its chat template,
    and the ids in Hugging Face's configuration files in these directories.
    """
    found = [tokenizer.eod_id, *([prompts.find_stop()] if has_template else [])]
    for directory in directories:
        for name in ("generation_config.json", "config.json"):
            file = (directory if directory.is_dir() else directory.parent) / name
            stated = read_json(file, "repair it, or copy it again") if file.is_file() else {}
            ids = stated.get("eos_token_id") if isinstance(stated, dict) else None
            found += ids if isinstance(ids, list) else [] if ids is None else [ids]
    return tuple(dict.fromkeys(int(one) for one in found))
