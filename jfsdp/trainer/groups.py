"""The groups in which `--help` and docs/options.md show options. In Python they stay one flat dataclass per command."""

from __future__ import annotations

import dataclasses
import re
from typing import Annotated, Any, TypedDict

import tyro
from tyro.constructors import ConstructorRegistry, StructConstructorSpec, StructFieldSpec, StructTypeInfo

FIRST = "most used"
GROUPS = {
    FIRST: "recipe model data tokenizer seq_len batch_per_device steps learning_rate mesh strategy run_dir resume",
    "model": "factory model_config init_from init_key allow_nonfinite",
    "sharding and memory": "opt_over reshard_after_forward remat offload engine prefetch storage min_size",
    "precision": "param_dtype reduce_dtype output_dtype opt_state_dtype",
    "gradient accumulation": "accumulate reduce reshard_after_backward schedule pipe_repeats global_batch",
    "optimizer": "warmup decay_steps min_learning_rate max_grad_norm skip_nonfinite ema rate_scale",
    "preferences": "preference beta reference",
    "frozen weights and adapters": "lora init_adapter frozen frozen_dtype quantized",
    "data": "text_field chat_template answers eod_token extensions token_dtype eod_id eval_fraction cross_documents"
    " shuffle_rows seed",
    "checkpoint": "checkpoint_every checkpoint_minutes snapshot_every keep keep_every keep_best fall_back restart_data",
    "evaluation and logging": "log_every eval_every eval_batches sample_tokens prompt temperature tracker profile",
    "process and device": "coordinator num_processes process_id timeout simulate_devices",
    "XLA and debugging": "xla deterministic cache_dir check_loss compare_replicas debug",
}
SHOWN = {"True": "on", "False": "off", "": "-", "''": "-"}


def groups_of(kind: Any) -> dict[str, list[str]]:
    """Return a command's fields by group, in order: its `OWN_GROUPS` after the first of ours. Without these, none."""
    if not hasattr(kind, "OWN_GROUPS"):
        return {}
    known = {field.name for field in dataclasses.fields(kind)}
    tables = {FIRST: GROUPS[FIRST], **kind.OWN_GROUPS, **GROUPS}
    groups = {title: [name for name in names.split() if name in known] for title, names in tables.items()}
    return {title: names for title, names in groups.items() if names}


def show_groups(kind: Any) -> ConstructorRegistry:
    """Return the rule by which `tyro.cli` shows a command's options in groups, and makes one flat object of them."""
    spec = ConstructorRegistry.get_struct_spec(StructTypeInfo.make(kind, tyro.MISSING_NONPROP, False))
    assert isinstance(spec, StructConstructorSpec), kind
    registry = ConstructorRegistry()

    @registry.struct_rule
    def rule(info: StructTypeInfo) -> StructConstructorSpec | None:
        if info.type is not kind:
            return None
        left = {field.name: _described(field, info.default) for field in spec.fields}
        groups = {title: [left.pop(name) for name in names] for title, names in groups_of(kind).items()}

        def make(**given: Any) -> Any:
            flat = {name: value for title in groups for name, value in given.pop(title).items()}
            return kind(**flat, **given)

        return StructConstructorSpec(make, (*left.values(), *(_group(*group) for group in groups.items())))

    return registry


def _group(title: str, fields: list[StructFieldSpec]) -> StructFieldSpec:
    kind = TypedDict(title, {field.name: field.type for field in fields})  # type: ignore[misc]
    return StructFieldSpec(title, kind, {field.name: field.default for field in fields}, helptext="")


def _described(field: StructFieldSpec, owner: Any) -> StructFieldSpec:
    """Return a field with its owner's default, shown as docs/options.md does. Its text breaks lines at full stops."""
    text = field.helptext() if callable(field.helptext) else field.helptext
    text = text and re.sub(r"(?<!\.)\n\s*", " ", text)
    shown = tyro.conf.arg(help=text, help_behavior_hint=lambda shown: f"(default: {SHOWN.get(shown, shown)})")
    is_shared = any(field.name in names.split() for names in GROUPS.values())  # whose default a recipe may turn
    kind = Annotated[field.type, shown] if is_shared else Annotated[field.type, shown, tyro.conf.FlagCreatePairsOff]
    return dataclasses.replace(field, type=kind, default=getattr(owner, field.name, field.default))
