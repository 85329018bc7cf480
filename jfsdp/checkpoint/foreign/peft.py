"""Conversion of low-rank adapters from and to PEFT; see [Note: PEFT's format] in peft_files.py."""

from __future__ import annotations

import collections
import dataclasses
import math
import sys
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from jfsdp.arguments import PathLike, checked
from jfsdp.checkpoint.disk.processes import only_first
from jfsdp.checkpoint.foreign import mapping
from jfsdp.checkpoint.foreign.dims import parse_dims, same_dims
from jfsdp.checkpoint.foreign.export import Written, write_safetensors
from jfsdp.checkpoint.foreign.mapping import NameMap, Names, Shapes
from jfsdp.checkpoint.foreign.peft_files import CONFIG, PARTS, PREFIX, WEIGHT, WEIGHTS, PeftAdapter, open_peft
from jfsdp.checkpoint.source import Index, Joined, Renamed, Source
from jfsdp.layout.lora import MAGNITUDE, A, Adapter, B, LoRA, part_shapes


@checked
def read_loras(path: PathLike, names: Names, model: Any) -> list[LoRA]:
    """Return the LoRAs of a PEFT adapter, to pass to `jfsdp.lora` before `load_pretrained`.

    Args:
      path: a directory of PEFT.
      names: mapping of the base's names, such as a job's field `pretrained`.
      model: the result of `fully_shard` for the model without adapters, on any mesh; or its parameters by name.

    Raises:
      ValueError: as `open_peft`; if the model lacks an adapted weight, or only some layers of a stack are adapted.
    """
    adapter, names = open_peft(path), mapping.as_name_map(names)
    leaves = model if isinstance(model, Mapping) else {leaf.path: leaf for leaf in model.layout.leaves}
    pieces = mapping.bind(names, leaves)
    also = collections.Counter(_whole_leaves(adapter, names, pieces))
    found: dict[str, list[tuple[int, float]]] = {}
    for weight in adapter.weights():
        adapter.check_fits(weight, pieces[weight].their_shape if weight in pieces else None)
        found.setdefault(pieces[weight].leaf, []).append((adapter.rank(weight), adapter.alpha(weight)))
    num_layers = collections.Counter(piece.leaf for piece in pieces.values())
    for leaf, kinds in [*found.items(), *((leaf, [None] * num) for leaf, num in sorted(also.items()))]:
        problem = "" if len(kinds) == num_layers[leaf] else f"has {len(kinds)} of {num_layers[leaf]} layers"
        if problem and leaf in also:
            problem += " of it (modules_to_save)"
        if len(set(kinds)) > 1:
            problem = "differs from layer to layer"
        if problem:
            raise ValueError(f"{leaf}: {adapter.path} {problem}; use separate layers (--model-config stacked=false)")
    # The number of leading dims of the leaf that form the input dim of PEFT's weight.
    all_dims = {piece.leaf: piece.dims for piece in pieces.values()}
    groups: dict[tuple[int, float], dict[str, int]] = {}
    for leaf, (kind, *_) in found.items():
        dims = all_dims[leaf]
        groups.setdefault(kind, {})[leaf] = next(len(group) for group in dims.theirs if dims.ours[0][0] in group)
    dropout, kind = float(adapter.options.get("lora_dropout") or 0), (adapter.is_rslora, adapter.is_dora)
    stacks = {piece.leaf for piece in pieces.values() if piece.num_stacks}
    loras = [
        LoRA(targets, rank, alpha, dropout, *kind, stacks=[leaf for leaf in targets if leaf in stacks] or None)
        for (rank, alpha), targets in groups.items()
    ]
    return [dataclasses.replace(one, also=sorted(also) or None) for one in loras[:1]] + loras[1:]


def _whole_leaves(adapter: PeftAdapter, names: NameMap, pieces: Mapping[str, mapping.Piece]) -> list[str]:
    """Return the leaves of the arrays that an adapter contains whole; two tied arrays are one leaf."""
    tied = _tied(names, pieces)
    for copy, original in tied.items():
        if adapter.unties(original, copy):
            raise ValueError(
                f"{adapter.path}: changes {original} and {copy} differently, but the model has one array for both; "
                "train both in PEFT (ensure_weight_tying=True), or load the result of `jfsdp checkpoint merge`"
            )
    found = [name for name in adapter.saved() if name not in tied]
    for name in found:
        adapter.check_saved(name, pieces[name].their_shape if name in pieces else None)
    return [pieces[name].leaf for name in found]


def _tied(names: NameMap, pieces: Mapping[str, mapping.Piece]) -> dict[str, str]:
    """Return tied names without an array in the model, and the names that they are tied to."""
    return {copy: name for copy, name in names.tied.items() if copy not in pieces and name in pieces}


def adapter_map(names: Names, adapters: Mapping[str, Adapter]) -> NameMap:
    """Return the mapping of a model's adapters and wholly trained arrays to PEFT's names.

    Raises:
      ValueError: if an adapted leaf has no rule, or PEFT's weight merges dims of its input and output.
    """
    names, rules, remaining = mapping.as_name_map(names), [], dict(adapters)
    for rule in names.rules:
        ours, theirs, text = (*rule, "")[:3]
        fitting = [remaining.pop(path) for path in list(remaining) if _fits(rule, path)]
        if not fitting:
            continue
        one = fitting[0]
        dims = parse_dims(text) if text else same_dims(len(one.shape) - one.stacked)
        ins, outs = (
            [name for group in part for name in group] for part in (dims.ours[: one.num_in], dims.ours[one.num_in :])
        )
        groups = {frozenset(group) for group in dims.theirs}
        if not theirs.endswith(WEIGHT) or groups != {frozenset(ins), frozenset(outs)}:
            raise ValueError(f"{one.path}: PEFT has no adapter for an array like {theirs!r} ({text or 'same dims'})")
        merged_in, merged_out = (next(g for g in dims.theirs if set(g) == set(kind)) for kind in (ins, outs))
        base = PREFIX + theirs.removesuffix(WEIGHT)
        our_in, our_out = " ".join(ins), " ".join(outs)
        rules += [
            (f"{ours}.{A}", base + PARTS[A], f"{our_in} rank -> rank ({' '.join(merged_in)})"),
            (f"{ours}.{B}", base + PARTS[B], f"rank {our_out} -> ({' '.join(merged_out)}) rank"),
            (f"{ours}.{MAGNITUDE}", base + PARTS[MAGNITUDE], f"{our_out} -> ({' '.join(merged_out)})"),
        ]
    if remaining:
        raise ValueError(f"no rule for the adapters of {', '.join(remaining)} in PEFT; add rules to the mapping")
    whole = [(ours, PREFIX + theirs, *text) for ours, theirs, *text in names.rules]
    return NameMap([*rules, *whole], tied={PREFIX + copy: PREFIX + name for copy, name in names.tied.items()})


def adapter_source(
    adapter: PeftAdapter, names: Names, adapters: Mapping[str, Adapter], leaves: Shapes | None = None
) -> mapping.Imported:
    """Return an adapter's arrays as a source under the model's names, after all checks of names and shapes.

    Args:
      adapters: adapters of the model, by leaf.
      leaves: the model's parameters, some of which the adapter may contain whole.

    Raises:
      ValueError: if arrays are missing, extra or of another shape (lists them), or the scale differs.
    """
    leaves = leaves or {}
    names = mapping.as_name_map(names)
    whole = _whole_leaves(adapter, names, mapping.bind(names, leaves))
    shapes, rules = part_shapes(adapters) | {leaf: leaves[leaf] for leaf in whole}, adapter_map(names, adapters)
    found, pieces = mapping.Imported(adapter.source, rules, shapes, where=adapter.path), mapping.bind(rules, shapes)
    for weight in adapter.weights():
        one, scale = adapters[pieces[adapter.part(weight, A)].leaf.removesuffix(f".{A}")], adapter.scale(weight)
        if not math.isclose(scale, one.scale):
            raise ValueError(f"{one.path}: has scale {one.scale:g}, {adapter.path} {scale:g}; use read_loras(PATH)")
    return found


@checked
def export_peft(model: Any, state: Any, directory: PathLike, names: Names, *, base: str | None = None) -> Written:
    """Write the adapters of a state as a directory that PEFT loads. It appears completely or not at all.

    Cost:    one all-gather of each adapter array that is split. Every process must call this; process 0 writes.
    Memory:  whole adapter arrays on every device, one at a time, and all of them on the host.

    Args:
      model: the result of `fully_shard` for a model wrapped by `jfsdp.lora`.
      directory: a new directory.
      names: mapping of the base's names, such as a job's field `pretrained`.
      base: value of `base_model_name_or_path`: a Hugging Face name or a directory.

    Raises:
      ValueError: if the model has no adapters; and as `write_peft`.
    """
    if not getattr(getattr(model, "model", None), "adapters", None):
        raise ValueError("export_peft: the model has no adapters; pass the result of fully_shard(jfsdp.lora(...))")
    source, adapted = _Arrays(model.trained_arrays(state)), model.model
    return only_first(lambda: write_peft(source, directory, names, adapted.adapters, adapted.base.params, base))


class _Arrays:
    """Arrays in memory as a source."""

    def __init__(self, arrays: Mapping[str, np.ndarray]):
        self._values = arrays
        self.arrays = {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}

    def read(self, name: str, index: Index) -> np.ndarray:
        return self._values[name][index].copy()


def write_peft(
    source: Source,
    directory: Any,
    names: Names,
    adapters: Mapping[str, Adapter],
    leaves: Shapes,
    base: str | None = None,
    **options: Any,
) -> Written:
    """Write adapters from any source, otherwise like `export_peft`.

    Args:
      source: parts of adapters and wholly trained leaves, under the model's names without `params.`.
      directory: a new directory.
      names: mapping of the base's names, such as a job's field `pretrained`.
      leaves: all of the model's parameters, from which tied arrays and the arrays of a module follow.
      base: value of `base_model_name_or_path`.
      options: of `write_safetensors`: `dtype`, `allow_nonfinite`.

    Raises:
      ValueError: as `adapter_map` and `export_safetensors`; if only some arrays of a module are trained.
    """
    names = mapping.as_name_map(names)
    exported, pieces = mapping.Exported(source, adapter_map(names, adapters)), mapping.bind(names, leaves)
    # PEFT replaces whole modules, which are then no longer tied. So both arrays are written, and PEFT ties them again.
    copies = {copy: name for copy, name in _tied(names, pieces).items() if PREFIX + name in exported.arrays}
    written = Joined(exported, Renamed(exported, {PREFIX + copy: PREFIX + name for copy, name in copies.items()}))
    saved = {name.removeprefix(PREFIX) for name in written.arrays if not name.endswith(tuple(PARTS.values()))}
    modules = {name.rpartition(".")[0] for name in saved}  # PEFT reads all arrays of a module (`modules_to_save`)
    for name, piece in pieces.items():
        module = name.rpartition(".")[0]
        if name not in saved and module in modules:
            raise ValueError(f"{piece.leaf}: is frozen, but others of {module} are trained; add all to LoRA(also=...)")
    config = _config(exported, saved, names, adapters)
    config |= {"base_model_name_or_path": base, "ensure_weight_tying": bool(copies)}
    return write_safetensors(
        written, directory, texts={CONFIG: config}, weights=WEIGHTS, max_shard_bytes=sys.maxsize, **options
    )


def _config(
    exported: mapping.Exported, saved: Collection[str], names: NameMap, adapters: Mapping[str, Adapter]
) -> dict[str, Any]:
    """Return the contents of `adapter_config.json`."""
    modules: dict[str, Adapter] = {}
    for theirs, piece in exported.pieces.items():
        module, is_part, _ = theirs.removeprefix(PREFIX).rpartition(".lora_")
        if is_part:
            modules[module] = adapters[piece.leaf.rpartition(".")[0]]
    ones = list(modules.values())
    rank = collections.Counter(one.rank for one in ones).most_common(1)[0][0]
    alpha = collections.Counter(one.alpha for one in ones).most_common(1)[0][0]
    if len({(one.rslora, one.has_magnitude, one.dropout) for one in ones}) > 1:
        raise ValueError("PEFT has one use_rslora, use_dora and lora_dropout per adapter; make them equal in all LoRAs")
    rules = {path: rule for rule in names.rules for path in adapters if _fits(rule, path)}
    plain = {not (*rule, "")[2] for rule in rules.values()}  # [in, out] in the checkpoint too, as in GPT-2's Conv1D
    if len(plain) > 1:
        raise ValueError("PEFT has one fan_in_fan_out per adapter, but only some of these weights are transposed")
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": ones[0].dropout,
        "use_rslora": ones[0].rslora,
        "use_dora": ones[0].has_magnitude,
        "fan_in_fan_out": plain == {True},
        "bias": "none",
        "inference_mode": True,
        "modules_to_save": sorted({name.rpartition(".")[0] for name in saved}) or None,
        "target_modules": _targets(modules, names, adapters),
        "rank_pattern": {module: one.rank for module, one in modules.items() if one.rank != rank},
        "alpha_pattern": {module: one.alpha for module, one in modules.items() if one.alpha != alpha},
    }


def _fits(rule: Sequence[str], path: str) -> bool:
    return any(form.ours.fullmatch(path) for form in mapping.forms_of(rule))


def _targets(modules: Mapping[str, Adapter], names: NameMap, adapters: Mapping[str, Adapter]) -> list[str]:
    """Return the last words of the module names if they match no other module of a rule; otherwise the full names."""
    words = sorted({module.rpartition(".")[2] for module in modules})
    others = [rule[1] for rule in names.rules if not any(_fits(rule, path) for path in adapters)]
    is_clear = not any(theirs.removesuffix(WEIGHT).rpartition(".")[2] in words for theirs in others)
    return words if is_clear and all(one.stacked for one in adapters.values()) else sorted(modules)
