"""Merging a PEFT adapter into Hugging Face weights, or subtracting it, in pieces."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from jfsdp.checkpoint.foreign.export import Written, write_safetensors
from jfsdp.checkpoint.foreign.peft_files import EMBEDDINGS, HEAD, PREFIX, PeftAdapter, open_peft
from jfsdp.checkpoint.foreign.pretrained import foreign_source
from jfsdp.checkpoint.foreign.safetensors import CONFIG
from jfsdp.checkpoint.source import Index, Joined, Renamed, Source, read_whole
from jfsdp.layout.lora import MAGNITUDE, A, B
from jfsdp.layout.precision import FLOAT_DTYPES
from jfsdp.objects.path import as_path


class Merged:
    """Weights with an adapter added or subtracted, as a source under the base's names.

    Reading a slice of a weight reads that slice (with DoRA, whole columns) and the weight's adapter. Sums are in
    float32; the result has the base's dtype.

    Args:
      base: weights under their own names.
      sign: 1 adds, -1 subtracts.

    Attributes:
      is_untied: whether head and embedding are separate arrays in the result; see [Note: tied embeddings in PEFT].

    Raises:
      ValueError: if the base lacks an adapted weight, or has it quantized or in another shape; if a DoRA or wholly
        trained arrays are to be subtracted, whose earlier values are unknown.
    """

    def __init__(self, base: Source, adapter: PeftAdapter, *, sign: int = 1):
        if sign < 0 and adapter.is_dora:
            raise ValueError(f"{adapter.path}: is a DoRA, which cannot be subtracted; use the original base")
        if sign < 0 and adapter.saved():
            raise ValueError(
                f"{adapter.path}: has {adapter.saved()[0]} whole, which cannot be subtracted; use the original base"
            )
        has_head = HEAD in base.arrays
        embedding = next((name for name in EMBEDDINGS if _name_in(base, name) in base.arrays), None)
        tables = [name for name in adapter.saved() if len(adapter.source.arrays[PREFIX + name].shape) > 1]
        if embedding is None and not has_head and tables:
            raise ValueError(
                f"{adapter.path}: has {tables[0]} whole, which may also be the head: the base has neither {HEAD} nor "
                "an embedding of a known name; merge in PEFT (merge_and_unload)"
            )
        self.is_untied = embedding is not None and adapter.unties(embedding, HEAD)
        if self.is_untied and not has_head:
            base = Joined(base, Renamed(base, {HEAD: _name_in(base, str(embedding))}))
        self._base, self._adapter, self._sign, self.arrays = base, adapter, sign, base.arrays
        self._weights = {_name_in(base, weight): weight for weight in adapter.weights()}
        kept = [name for name in adapter.saved() if name != HEAD or has_head or self.is_untied]
        self._saved = {_name_in(base, name): name for name in kept}
        for name, weight in self._saved.items():
            adapter.check_saved(weight, tuple(base.arrays[name].shape) if name in base.arrays else None)
        for name, weight in self._weights.items():
            stored = base.arrays.get(name)
            if stored is not None and stored.dtype.name not in FLOAT_DTYPES:
                raise ValueError(f"{name}: is {stored.dtype.name} in the base; use {', '.join(FLOAT_DTYPES)}")
            adapter.check_fits(weight, None if stored is None else tuple(stored.shape))

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one merged weight."""
        if name in self._saved:
            return self._adapter.source.read(PREFIX + self._saved[name], index).astype(self.arrays[name].dtype)
        if name not in self._weights:
            return self._base.read(name, index)
        weight, dtype = self._weights[name], self._base.arrays[name].dtype
        is_transposed = self._adapter.is_transposed(weight)
        rows, columns = index[::-1] if is_transposed else index  # of [out, in]
        a, b = (self._part(weight, part) for part in (A, B))
        every = slice(0, a.shape[1]) if self._adapter.is_dora else columns
        wanted = (every, rows) if is_transposed else (rows, every)
        block = self._base.read(name, wanted).astype(np.float32)
        block = block.T if is_transposed else block
        block = block + self._sign * self._adapter.scale(weight) * (b[rows] @ a[:, every])
        if self._adapter.is_dora:
            gain = self._part(weight, MAGNITUDE)[rows] / np.linalg.norm(block, axis=1)
            block = (block * gain[:, None])[:, columns]
        return (block.T if is_transposed else block).astype(dtype)

    def _part(self, weight: str, part: str) -> np.ndarray:
        return read_whole(self._adapter.source, self._adapter.part(weight, part)).astype(np.float32)


def _name_in(base: Source, name: str) -> str:
    """Return the base's name of an array; some checkpoints omit the first word (`transformer.` of GPT-2)."""
    short = name.partition(".")[2]
    return short if name not in base.arrays and short in base.arrays else name


def merge_peft(base: Any, adapter: Any, target: Any, *, sign: int = 1, **options: Any) -> Written:
    """Write Hugging Face weights with an adapter added or subtracted to another directory.

    Configuration and tokenizer files next to the weights are copied.

    Memory:  as `export_safetensors`: pieces, regardless of the size of the model.

    Args:
      base: a directory of safetensors.
      adapter: a directory of PEFT.
      target: a new directory.
      sign: 1 adds, -1 subtracts; in low precision, subtraction restores the weights up to rounding.
      options: of `write_safetensors`.

    Raises:
      ValueError: as `open_peft`, `Merged` and `write_safetensors`.
    """
    directory = as_path(base)
    merged = Merged(foreign_source(directory), open_peft(adapter), sign=sign)
    folder = directory if directory.is_dir() else directory.parent
    texts: dict[str, Any] = {one.name: one for one in sorted(folder.iterdir()) if one.is_file() and _is_text(one.name)}
    if merged.is_untied and CONFIG in texts:
        texts[CONFIG] = json.loads(texts[CONFIG].read_text()) | {"tie_word_embeddings": False}
    return write_safetensors(merged, target, texts=texts, **options)


def _is_text(name: str) -> bool:
    """Return whether a file is a configuration or tokenizer file, and does not describe weights."""
    is_about_weights = name.endswith(".index.json") or name.startswith("adapter_")
    return name.endswith((".json", ".txt", ".model", ".jinja")) and not is_about_weights
