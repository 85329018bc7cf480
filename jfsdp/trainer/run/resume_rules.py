"""Effect of changed options on a resumed run, and the comparison of a run with its earlier configuration."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

from jfsdp.trainer.option_errors import REMOVED
from jfsdp.trainer.parse import Pairs, read_fields, write
from jfsdp.trainer.run.config import TrainConfig

RULES = {
    "noted, kept": "continues with a note",
    "kept": "continues",
    "noted": "continues with a note: losses differ by rounding, and by other dropout masks and batch statistics",
    "rounding": "continues with a note: losses differ by rounding, and by other dropout masks under another mesh",
    "refused": "refused",
    "free": "continues",
}
"""Effect of a changed option, by rule. An option that the command omits has its default; if its rule ends in "kept", it
has the run's value."""


def options_of(*rules: str) -> tuple[str, ...]:
    """Return the options that have one of these rules."""
    return tuple(field.name for field in dataclasses.fields(TrainConfig) if field.metadata["resume"] in rules)


def loss_settings(config: TrainConfig) -> dict[str, Any]:
    """Return the options on which losses depend by more than rounding, each in one spelling.

    `build` adds values that follow from several options (rows per step, the schedule, the fields of the model). The
    source of the data adds its digest.
    """
    from jfsdp.trainer.optimizers import optimizer_settings  # imports JAX, and a script sets XLA's flags before that

    plain = ("param_dtype", "reduce_dtype", "opt_state_dtype", "frozen_dtype", "accumulate", "ema", "seed")
    plain += ("gather_wire", "reduce_wire", "matmul")
    plain += ("learning_rate", "min_learning_rate", "lr_schedule", "max_grad_norm", "skip_nonfinite")
    return {
        "model": config.model or config.factory,
        **{name: getattr(config, name) for name in plain},
        **optimizer_settings(config),
        "frozen": sorted(set(config.frozen)) or None,
        "lora": sorted(map(_lora, config.lora)) or None,
        "quantized": sorted(write((pair,)) for pair in config.quantized) or None,
        "rate_scale": [write((pair,)) for pair in config.rate_scale] or None,
        "preference": config.preference and [config.preference, config.beta, config.reference],
    }


def _lora(fields: Pairs) -> str:
    from jfsdp.layout.lora import LoRA  # imports JAX too

    complete = dataclasses.asdict(LoRA(**dict(fields)))
    return str(sorted((name, list(x) if isinstance(x, tuple) else x) for name, x in complete.items()))


def differences(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return [old, new] of each setting that differs, by name; {} if `old` is empty."""
    old, new = (json.loads(json.dumps(dict(settings), default=str)) for settings in (old, new))
    names = {**old, **new} if old else ()
    return {name: [old.get(name), new.get(name)] for name in names if old.get(name) != new.get(name)}


def describe(differing: Mapping[str, Sequence[Any]]) -> str:
    """Describe differences, with the option that restores the old value if there is one."""
    remedies = {name: f" (this option was removed; use {REMOVED[name][1]})" for name in differing if name in REMOVED}
    if "global_batch" in differing:
        remedies["global_batch"] = f" (--global-batch {differing['global_batch'][0]} keeps it on other devices)"
    changes = {name: f"{name} was {was!r}, is {now!r}" for name, (was, now) in differing.items()}
    return "; ".join(f"{change}{remedies.get(name, '')}" for name, change in changes.items())


def decided(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the stored `decides` of a run, with pairs spelled like those of `loss_settings` and `build`."""
    settings = dict(stored.get("decides", {}))
    if settings:
        settings.setdefault("lr_schedule", "cosine")  # the only one before 1.0
    for name, option in {"rate_scale": "rate_scale", "model_config.fields": "model_config"}.items():
        if settings.get(name):
            read = read_fields(TrainConfig, {option: settings[name]})[option]
            settings[name] = [write((pair,)) for pair in read]
    return settings


def refused(stored: Mapping[str, Any], decides: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Return the differences that prevent resuming a run, by name.

    Args:
      stored: the `config.json` of the run, or empty.
      decides: the current settings on which the losses depend.
    """
    old = {name: x for name, x in decided(stored).items() if name not in REMOVED or x != REMOVED[name][0]}
    found, allowed = differences(old, decides), options_of("noted, kept", "noted")
    return {name: pair for name, pair in found.items() if name not in allowed}


def changed(stored: Mapping[str, Any], decides: Mapping[str, Any], config: TrainConfig) -> dict[str, list[Any]]:
    """Return the differences with which the run continues, but not bit for bit."""
    before, now = read_fields(TrainConfig, stored.get("config", {})), dataclasses.asdict(config)
    rounding = [name for name in options_of("rounding") if name in before]
    was, found = (
        {name: write(one[name]) if isinstance(one[name], tuple) else one[name] for name in rounding}
        for one in (before, now)
    )
    return differences(decided(stored), decides) | differences(was, found)


def memory_since_0_2(stored: Mapping[str, Any], mesh: Mapping[str, int]) -> str:
    """Return a note if a run of jfsdp 0.2 needs more memory now, because axis `replica` replicates; else ""."""
    before, replica = read_fields(TrainConfig, stored.get("config", {})), mesh.get("replica", 1)
    strategy = before.get("strategy")
    if "opt_over" in before or strategy not in ("zero1", "zero2", "full_shard") or before["sharding_factor"]:
        return ""
    if replica == 1 or dict(before["mesh"]).get("replica", 1) == 1:
        return ""
    num = replica * mesh.get("fsdp", 1)
    return (
        f"note: this run began with jfsdp 0.2, where strategy {strategy!r} also sharded over axis 'replica'. This axis "
        f"now replicates, and the sharded state needs {replica} times the memory; --mesh fsdp={num} shards over all "
        "devices as before"
    )


def removed(stored: Mapping[str, Any]) -> dict[str, str]:
    """Return the replacements of removed options for which a run of 0.2 had other values than the default."""
    before = stored.get("config", {})
    return {name: now for name, (default, now) in REMOVED.items() if before.get(name, default) != default}


def kept(stored: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options, with values, that a resumed run keeps if the command omits them."""
    before = stored.get("config", {})
    return {name: before[name] for name in options_of("noted, kept", "kept") if name in before}
