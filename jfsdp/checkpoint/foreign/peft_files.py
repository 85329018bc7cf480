"""Hugging Face PEFT adapters as written: configuration and arrays under PEFT's names.

[Note: PEFT's format]
`adapter_config.json` has rank, alpha and targets. `adapter_model.safetensors` has, for a weight `X.weight` of the base,
`base_model.model.X.lora_A.weight` [rank, in], `...lora_B.weight` [out, rank] and, with DoRA,
`...lora_magnitude_vector` [out]; and `base_model.model.Y` for arrays of modules that were trained whole
(`modules_to_save`). Source: peft 0.21, `tuners/lora`.

[Note: tied embeddings in PEFT]
PEFT replaces modules, and a replaced module is no longer tied. If a model's head is tied to its embedding, and an
adapter contains only one of them whole, or adapts only one, the result has two tables. The model stays tied if the
adapter contains both whole and equal, as PEFT writes them with `ensure_weight_tying`.
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
# Names in transformers of a language model's head, and of the embeddings to which it may be tied.
HEAD = "lm_head.weight"
EMBEDDINGS = (
    "model.embed_tokens.weight",
    "model.language_model.embed_tokens.weight",
    "model.decoder.embed_tokens.weight",
    "transformer.wte.weight",
    "transformer.word_embeddings.weight",
)
# Options of PEFT that are read here, or do not affect what an adapter computes. All others must be off.
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
      source: its arrays under PEFT's names.
    """

    path: Path
    options: Mapping[str, Any]
    source: Source

    def weights(self) -> list[str]:
        """Return the adapted weights, under the base's names, in order."""
        ours = [name.removeprefix(PREFIX) for name in self.source.arrays if name.endswith(PARTS[A])]
        return [name.removesuffix(PARTS[A]) + WEIGHT for name in ours]

    def saved(self) -> list[str]:
        """Return the arrays that the adapter contains whole, under the base's names."""
        ends = tuple(PARTS.values())
        return [name.removeprefix(PREFIX) for name in self.source.arrays if not name.endswith(ends)]

    def unties(self, original: str, copy: str) -> bool:
        """Return whether it changes two tied arrays differently; see [Note: tied embeddings in PEFT]."""
        saved, both = self.saved(), {original, copy}
        is_tied = both <= {*saved} and are_equal(self.source, PREFIX + original, PREFIX + copy)
        return not is_tied and not both.isdisjoint([*saved, *self.weights()])

    def part(self, weight: str, part: str) -> str:
        """Return PEFT's name of one part of a weight's adapter."""
        return PREFIX + weight.removesuffix(WEIGHT) + PARTS[part]

    def rank(self, weight: str) -> int:
        return int(self.source.arrays[self.part(weight, A)].shape[0])

    def alpha(self, weight: str) -> float:
        """Return the alpha of a weight, from the first pattern that matches its module's name, as in PEFT."""
        module = weight.removesuffix(WEIGHT)
        for pattern, alpha in (self.options.get("alpha_pattern") or {}).items():
            if re.fullmatch(rf"(.*\.)?({pattern})", module):
                return float(alpha)
        return float(self.options["lora_alpha"])

    def check_fits(self, weight: str, shape: tuple[int, ...] | None) -> None:
        """Check that the base has an adapted weight in the adapter's shape. `shape` is None if it lacks the weight."""
        a, b = (self.source.arrays[self.part(weight, part)].shape for part in (A, B))
        self._check_shape("adapts", weight, (a[1], b[0]) if self.is_transposed(weight) else (b[0], a[1]), shape)

    def check_saved(self, name: str, shape: tuple[int, ...] | None) -> None:
        """Check that the base has an array in the adapter's shape. `shape` is None if it lacks the array."""
        self._check_shape("has", name, tuple(self.source.arrays[PREFIX + name].shape), shape)

    def _check_shape(self, verb: str, name: str, own: tuple[int, ...], shape: tuple[int, ...] | None) -> None:
        if verb == "adapts" and shape is not None and shape == own[::-1] != own:
            wanted = str(not self.is_transposed(name)).lower()
            raise ValueError(f"{self.path}: adapts {name} as {list(own)}; set fan_in_fan_out in {CONFIG} to {wanted}")
        if shape != own:
            found = "no array of that name" if shape is None else list(shape)
            base = self.options.get("base_model_name_or_path") or "unnamed"
            raise ValueError(f"{self.path}: {verb} {name} {list(own)}, but the base has {found}; use its base ({base})")

    def is_transposed(self, weight: str) -> bool:
        """Return whether the base's weight is [in, out]; a head never is."""
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
    """Open a PEFT adapter. Reads headers and no weights.

    Raises:
      ValueError: if files are missing or damaged, or the kind or an option of the adapter is not supported; names it.
    """
    directory = existing_path(path)
    file = directory / CONFIG
    if not file.is_file():
        raise ValueError(f"{directory}: has no {CONFIG}, so it is not an adapter of PEFT; pass the directory with it")
    try:
        options = json.loads(file.read_text())
        float(options["lora_alpha"])
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{file}: is not a configuration of a LoRA ({error}); download it again") from error
    if options.get("peft_type") != "LORA":
        raise ValueError(f"{file}: peft_type {options.get('peft_type')!r} is not supported; use LORA")
    for name, value in options.items():
        is_plain = name == "init_lora_weights" and value in _PLAIN_INIT
        if not is_plain and name not in _KNOWN and value not in _OFF:
            raise ValueError(f"{file}: option {name}={value!r} is not supported; train the adapter without it")
    is_torch = not (directory / WEIGHTS).exists() and (directory / TORCH_WEIGHTS).exists()
    source = open_torch(directory / TORCH_WEIGHTS) if is_torch else SafetensorsSource(directory / WEIGHTS)
    plain = {plain_name([name]): name for name in source.arrays}
    if twice := set(source.arrays) - {*plain.values()}:
        raise ValueError(f"{directory}: has {min(twice)} with and without the names of wrappers; remove one")
    adapter = PeftAdapter(directory, options, Renamed(source, plain))
    _check_arrays(adapter)
    return adapter


def _check_arrays(adapter: PeftAdapter) -> None:
    """Check that each adapter has all its parts, and that all other arrays are trained whole."""
    parts = [A, B, MAGNITUDE] if adapter.is_dora else [A, B]
    wanted = {adapter.part(weight, part) for weight in adapter.weights() for part in parts}
    modules = tuple(adapter.options.get("modules_to_save") or ())
    for name in sorted(wanted - set(adapter.source.arrays)):
        reason = "; the configuration has use_dora=True" if name.endswith(PARTS[MAGNITUDE]) else ""
        raise ValueError(f"{adapter.path}: {name} is missing{reason}; save the adapter again")
    for name in sorted(set(adapter.source.arrays) - wanted):
        module = name.removeprefix(PREFIX).rpartition(".")[0]
        if ".lora_" not in name and (module.endswith(modules) or adapter.options.get("ensure_weight_tying")):
            continue
        raise ValueError(f"{adapter.path}: {name} is not supported: {_unknown(name)}")
    if not adapter.source.arrays:
        raise ValueError(f"{adapter.path}: {WEIGHTS} has no {PARTS[A]} of any weight; pass a LoRA adapter")


def _unknown(name: str) -> str:
    """Return the reason and the remedy for an unsupported array."""
    if ".lora_embedding_" in name:
        return "it adapts an embedding; train the embedding whole in PEFT (modules_to_save), or omit it"
    if name.endswith(PARTS[MAGNITUDE]):
        return "it is a magnitude of DoRA, but the configuration has use_dora=False; correct adapter_config.json"
    return (
        "it is not a part of a LoRA, nor of a module in modules_to_save; if it is a copy of the base's weight, save "
        "the adapter with save_embedding_layers=False"
    )
