"""An adapter as Hugging Face's PEFT writes it: its configuration and its arrays, under PEFT's names.

[Note: PEFT's format]
`adapter_config.json` says rank, alpha and targets; `adapter_model.safetensors` has, for a weight `X.weight` of the
base, `base_model.model.X.lora_A.weight` [rank, in], `...lora_B.weight` [out, rank] and, with DoRA,
`...lora_magnitude_vector` [out]; and `base_model.model.Y` for arrays of modules that were trained as they are
(`modules_to_save`). Source: peft 0.21, `tuners/lora`.

[Note: tied embeddings in PEFT]
PEFT replaces modules, and a replaced module is no longer tied. Of a model whose head is its embedding, an adapter that
has only one of the two whole, or adapts only one, computes with two tables. The model stays tied where the adapter has
both whole and equal, as PEFT writes them with `ensure_weight_tying`.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.disk.paths import existing_path
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.foreign.torch_names import plain_name
from jfsdp.checkpoint.foreign.torch_source import open_torch
from jfsdp.checkpoint.source import Renamed, Source, are_equal
from jfsdp.layout.lora import MAGNITUDE, A, B, scale_of

CONFIG, WEIGHTS, TORCH_WEIGHTS = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
PREFIX, WEIGHT = "base_model.model.", ".weight"
PARTS = {A: ".lora_A.weight", B: ".lora_B.weight", MAGNITUDE: ".lora_magnitude_vector"}
# What transformers calls the head of a language model, and the embeddings that it may be tied to.
HEAD = "lm_head.weight"
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
)
# Options of PEFT that change nothing of what an adapter computes, or that are read here; any other must be off.
_KNOWN = {
    *("alpha_pattern", "base_model_name_or_path", "ensure_weight_tying", "fan_in_fan_out", "lora_alpha"),
    *("lora_dropout", "modules_to_save", "peft_type", "r", "rank_pattern", "use_dora", "use_rslora"),
    *("auto_mapping", "exclude_modules", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config"),
    *("megatron_core", "peft_version", "qalora_group_size", "revision", "runtime_config"),
    *("target_modules", "task_type"),
}
_OFF = (None, False, "none", [], {})
_PLAIN_INIT = (True, False, "gaussian", None)  # others change the base's weights


@dataclasses.dataclass(frozen=True)
class PeftAdapter:
    """An adapter as PEFT writes it.

    Attributes:
      options: its configuration.
      source: its arrays, under PEFT's names.
    """

    path: Path
    options: Mapping[str, Any]
    source: Source

    def weights(self) -> list[str]:
        """Return the weights of the base that it adapts, under their own names, in order."""
        ours = [name.removeprefix(PREFIX) for name in self.source.arrays if name.endswith(PARTS[A])]
        return [name.removesuffix(PARTS[A]) + WEIGHT for name in ours]

    def saved(self) -> list[str]:
        """Return the arrays of the base that it has whole, trained as they are, under their own names."""
        ends = tuple(PARTS.values())
        return [name.removeprefix(PREFIX) for name in self.source.arrays if not name.endswith(ends)]

    def unties(self, original: str, copy: str) -> bool:
        """Tell whether it changes only one of two tied arrays, or both apart; see [Note: tied embeddings in PEFT]."""
        saved, both = self.saved(), {original, copy}
        is_tied = both <= {*saved} and are_equal(self.source, PREFIX + original, PREFIX + copy)
        return not is_tied and not both.isdisjoint([*saved, *self.weights()])

    def part(self, weight: str, part: str) -> str:
        """Return its name of one part of the adapter of a weight."""
        return PREFIX + weight.removesuffix(WEIGHT) + PARTS[part]

    def rank(self, weight: str) -> int:
        return int(self.source.arrays[self.part(weight, A)].shape[0])

    def alpha(self, weight: str) -> float:
        """Return the alpha of a weight: that of the first pattern that fits its module's name, as PEFT reads them."""
        module = weight.removesuffix(WEIGHT)
        for pattern, alpha in (self.options.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return float(alpha)
        return float(self.options["lora_alpha"])

    def check_fits(self, weight: str, shape: tuple[int, ...] | None) -> None:
        """Refuse a base that has a weight in another shape than is adapted, or not at all (None)."""
        a, b = (self.source.arrays[self.part(weight, part)].shape for part in (A, B))
        self._check_shape("adapts", weight, (a[1], b[0]) if self.is_transposed(weight) else (b[0], a[1]), shape)

    def check_saved(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Refuse a base that has an array in another shape than the adapter, or not at all (None)."""
        self._check_shape("has", name, tuple(self.source.arrays[PREFIX + name].shape), shape)

    def _check_shape(self, verb: str, name: str, own: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
        if verb == "adapts" and shape is not None and shape == own[::-1] != own:
            wanted = str(not self.is_transposed(name)).lower()
            raise ValueError(f"{self.path}: adapts {name} as {list(own)}; set fan_in_fan_out in {CONFIG} to {wanted}")
        if shape != own:
            there = "no array of that name" if shape is None else list(shape)
            base = self.options.get("base_model_name_or_path") or "unnamed"
            raise ValueError(
                f"{self.path}: {verb} {name} {list(own)}, and the base has {there}; of another base ({base})"
            )

    def is_transposed(self, weight: str) -> bool:
        """Tell whether a weight of the base is [in, out]: a head never is."""
        return bool(self.options.get("fan_in_fan_out")) and weight != HEAD

    @property
    def is_rslora(self) -> bool:
        return bool(self.options.get("use_rslora"))

    @property
    def is_dora(self) -> bool:
        return bool(self.options.get("use_dora"))

    def scale(self, weight: str) -> float:
        return scale_of(self.rank(weight), self.alpha(weight), self.is_rslora)


def open_peft(path: Any) -> PeftAdapter:
    """Open an adapter of PEFT's. Reads headers, and no weights.

    Raises:
      ValueError: if files are missing or damaged, or it is of a kind, or has an option, that jfsdp lacks; by name.
    """
    directory = existing_path(path)
    file = directory / CONFIG
    if not file.is_file():
        raise ValueError(f"{directory}: has no {CONFIG}, so it is no adapter of PEFT's; give the directory that has it")
    try:
        options = json.loads(file.read_text())
        float(options["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: is no configuration of a LoRA ({error}); fetch it again") from error
    if options.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type {options.get('peft_type')!r} is not available; LORA is")
    for name, value in options.items():
        is_plain = name == "init_lora_weights" and value in _PLAIN_INIT
        if not is_plain and name not in _KNOWN and value not in _OFF:
            raise ValueError(f"{file}: option {name}={value!r} is not available here; others are read")
    is_torch = not (directory / WEIGHTS).exists() and (directory / TORCH_WEIGHTS).exists()
    source = open_torch(directory / TORCH_WEIGHTS) if is_torch else SafetensorsSource(directory / WEIGHTS)
    plain = {plain_name([name]): name for name in source.arrays}
    if twice := set(source.arrays) - {*plain.values()}:
        raise ValueError(f"{directory}: has {min(twice)} with and without the names of wrappers; remove one")
    adapter = PeftAdapter(directory, options, Renamed(source, plain))
    _check_arrays(adapter)
    return adapter


def _check_arrays(adapter: PeftAdapter) -> None:
    """Refuse arrays that no weight's adapter has, and adapters that lack some."""
    parts = [A, B, MAGNITUDE] if adapter.is_dora else [A, B]
    wanted = {adapter.part(weight, part) for weight in adapter.weights() for part in parts}
    modules = tuple(adapter.options.get("modules_to_save") or ())
    for name in sorted(wanted - set(adapter.source.arrays)):
        said = "; the configuration says use_dora=True" if name.endswith(PARTS[MAGNITUDE]) else ""
        raise ValueError(f"{adapter.path}: {name} is missing{said}; save the adapter again")
    for name in sorted(set(adapter.source.arrays) - wanted):
        module = name.removeprefix(PREFIX).rpartition(".")[0]
        if ".lora_" not in name and (module.endswith(modules) or adapter.options.get("ensure_weight_tying")):
            continue
        raise ValueError(f"{adapter.path}: {name} is not available here: {_unknown(name)}")
    if not adapter.source.arrays:
        raise ValueError(f"{adapter.path}: {WEIGHTS} has no {PARTS[A]} of any weight; is it another kind of adapter?")


def _unknown(name: str) -> str:
    """Return the reason and the remedy for an array that is not read."""
    if ".lora_embedding_" in name:
        return "it adapts an embedding; train the embedding whole in PEFT (modules_to_save), or leave it out"
    if name.endswith(PARTS[MAGNITUDE]):
        return "it is a norm of DoRA, and the configuration says use_dora=False; correct adapter_config.json"
    return (
        "it is not a part of a LoRA, nor of a module in modules_to_save; if it is a copy of the base's weight, save "
        "the adapter with save_embedding_layers=False"
    )
