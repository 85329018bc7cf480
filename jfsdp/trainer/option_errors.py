"""Options as a command line spells them, and what is refused of their names."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Collection, Iterable, Sequence
from typing import Any

MOST = 2**31 - 1  # of what is counted: JAX's indices
REMOVED: dict[str, tuple[Any, str]] = {
    "allow_nonfinite": (False, "jfsdp checkpoint import --allow-nonfinite, and --init-from its directory"),
    "checkpoint_minutes": (0.0, "--checkpoint-every STEPS"),
    "compare_replicas": (0, "jfsdp.checkpoint.compare_replicas(state) in your own program"),
    "coordinator": (None, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
    "deterministic": (False, "XLA_FLAGS=--xla_gpu_deterministic_ops=true in the environment"),
    "engine": ("auto", "--program xla or --program manual"),
    "eod_id": (None, '{"dtype": ..., "eod_id": ...} in FILE.bin.json'),
    "extensions": ([], "a glob, such as --data 'DIR/**/*.py'"),
    "num_processes": (None, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
    "output_dtype": (None, "a loss that casts what the model returns"),
    "process_id": (None, "JAX_COORDINATOR_ADDRESS, JAX_NUM_PROCESSES and JAX_PROCESS_ID"),
    "reduce": (None, "--sync every or --sync last (once)"),
    "schedule": ("1f1b", "--pipe-schedule"),
    "sharding_factor": (None, "--mesh replica=-1,fsdp=N"),
    "shuffle_rows": (1024, "a job's own data"),
    "temperature": (0.8, "jfsdp generate --temperature"),
    "token_dtype": (None, '{"dtype": ..., "eod_id": ...} in FILE.bin.json'),
}
"""Removed options of 0.2: the default, and what to write instead."""
ELSEWHERE = {
    "batch_size": "--batch-per-device",
    "bf16": "--param-dtype bfloat16",
    "config": "--recipe FILE.toml",
    "deepspeed": "--strategy 0..3",
    "epochs": "--steps (an epoch is the rows of the data over the rows of a step)",
    "eval_steps": "--eval-every",
    "fp16": "--param-dtype float16",
    "fsdp": "--strategy full_shard",
    "gpus": "--mesh fsdp=-1 in runs, --nodes and --gpus-per-node in plans",
    "gradient_accumulation_steps": "--accumulate",
    "gradient_checkpointing": "--remat full",
    "logging_steps": "--log-every",
    "lr": "--learning-rate",
    "max_length": "--seq-len",
    "max_seq_length": "--seq-len",
    "max_steps": "--steps",
    "model_name_or_path": "--init-from",
    "num_train_epochs": "--steps (an epoch is the rows of the data over the rows of a step)",
    "output_dir": "--run-dir",
    "per_device_train_batch_size": "--batch-per-device",
    "resume_from_checkpoint": "--resume",
    "save_steps": "--checkpoint-every",
    "tensor_parallel_size": "--mesh fsdp=-1,tensor=N",
    "warmup_steps": "--warmup",
}
"""Options of the scripts of Transformers, Accelerate, MaxText and torchtitan, and what is theirs here."""


def check_known(args: Sequence[str], kind: type) -> None:
    """Refuse options that a command does not have.

    Args:
      kind: the dataclass of its options.

    Raises:
      ValueError: naming the first, and those that may have been meant.
    """
    names = [spell(field.name) for field in dataclasses.fields(kind)]
    known = {*names, *(name.replace("--", "--no-", 1) for name in names), "--help"}
    for arg in args:
        name = arg.partition("=")[0].replace("_", "-")
        if arg.startswith("--") and name not in known and not arg.startswith("--tyro-"):
            close = ", ".join(_close_options(name, names))
            instead = instead_of(name[2:].removeprefix("no-").replace("-", "_"), names)
            remedy = f"use {instead}" if instead else f"there is {close}" if close else "--help lists them"
            raise ValueError(f"{arg.partition('=')[0]}: there is no such option; {remedy}")


def instead_of(field: str, names: Collection[str]) -> str:
    """Return what to write instead of an option that was removed, or that another program has; empty: nothing.

    Args:
      names: the options of the command.
    """
    instead = ELSEWHERE.get(field, "")
    return instead if instead.partition(" ")[0] in names else REMOVED.get(field, ("", ""))[1]


def _close_options(name: str, names: Iterable[str]) -> list[str]:
    """Return the options that are spelled alike, begin with the same letters, or share a word with a name."""
    names, words = list(names), tuple(name.strip("-").split("-"))
    initials = [other for other in names if "".join(word[0] for word in other[2:].split("-")) == name[2:]]
    alike = difflib.get_close_matches(name, names, n=3, cutoff=0.7)
    sharing = [
        other for other in names if any(word in words or words[0].startswith(word) for word in other[2:].split("-"))
    ]
    return list(dict.fromkeys([*initials, *alike, *sharing]))[:4]


def spell(name: str) -> str:
    """Return the option of a field."""
    return f"--{name.replace('_', '-')}"
