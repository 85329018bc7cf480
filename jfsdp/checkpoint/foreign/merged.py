"""Weights of Hugging Face with an adapter of PEFT added to them, or taken out of them: read and written in pieces."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from jfsdp.checkpoint.foreign.export import Written, write_safetensors
from jfsdp.checkpoint.foreign.peft_files import PREFIX, PeftAdapter, open_peft
from jfsdp.checkpoint.foreign.safetensors import SafetensorsSource
from jfsdp.checkpoint.source import Index, Source, read_whole
from jfsdp.layout.lora import MAGNITUDE, A, B
from jfsdp.layout.precision import FLOAT_DTYPES


class Merged:
    """Weights with an adapter added to them, or taken out of them: a source over two, under the base's names.

    A slice of a weight reads that slice (with DoRA, whole columns) and its adapter. Sums are in float32, the result in
    the dtype of the base.

    Args:
      base: weights under their own names.
      sign: 1 adds, -1 takes out.

    Raises:
      ValueError: if the base lacks a weight that is adapted, or has it quantized or in another shape; to take DoRA out,
        which keeps no norm of what was there.
    """

    def __init__(self, base: Source, adapter: PeftAdapter, *, sign: int = 1):
        self._base, self._adapter, self._sign = base, adapter, sign
        self.arrays = base.arrays
        if sign < 0 and adapter.is_dora:
            raise ValueError(f"{adapter.path}: is a DoRA, and merged weights do not say what their norms were before")
        if sign < 0 and adapter.saved():
            raise ValueError(
                f"{adapter.path}: has {adapter.saved()[0]} whole, and merged weights do not say what it was"
            )
        prefix = _missing_prefix(base, adapter)
        self._weights = {prefix(weight): weight for weight in adapter.weights()}
        self._saved = {prefix(name): name for name in adapter.saved()}
        for name, weight in self._saved.items():
            adapter.check_saved(weight, tuple(base.arrays[name].shape) if name in base.arrays else None)
        for name, weight in self._weights.items():
            there = base.arrays.get(name)
            if there is not None and there.dtype.name not in FLOAT_DTYPES:
                raise ValueError(
                    f"{name}: is {there.dtype.name} in the base, whose weights are quantized; take the weights that "
                    f"these were made from, in {', '.join(FLOAT_DTYPES)}"
                )
            adapter.check_fits(weight, None if there is None else tuple(there.shape))

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one weight, merged."""
        if name in self._saved:
            return self._adapter.source.read(PREFIX + self._saved[name], index).astype(self.arrays[name].dtype)
        if name not in self._weights:
            return self._base.read(name, index)
        weight, dtype = self._weights[name], self._base.arrays[name].dtype
        rows, columns = index[::-1] if self._adapter.is_transposed else index  # of [out, in]
        a, b = (self._part(weight, part) for part in (A, B))
        every = slice(0, a.shape[1]) if self._adapter.is_dora else columns
        wanted = (every, rows) if self._adapter.is_transposed else (rows, every)
        block = self._base.read(name, wanted).astype(np.float32)
        block = block.T if self._adapter.is_transposed else block
        block = block + self._sign * self._adapter.scale(weight) * (b[rows] @ a[:, every])
        if self._adapter.is_dora:
            gain = self._part(weight, MAGNITUDE)[rows] / np.linalg.norm(block, axis=1)
            block = (block * gain[:, None])[:, columns]
        return (block.T if self._adapter.is_transposed else block).astype(dtype)

    def _part(self, weight: str, part: str) -> np.ndarray:
        return read_whole(self._adapter.source, self._adapter.part(weight, part)).astype(np.float32)


def _missing_prefix(base: Source, adapter: PeftAdapter) -> Callable[[str], str]:
    """Return how the base calls a weight: some checkpoints leave out the first word (`transformer.` of GPT-2)."""
    first = adapter.weights()[0]
    short = first.partition(".")[2]
    is_short = first not in base.arrays and short in base.arrays
    return lambda name: name.partition(".")[2] if is_short else name


def merge_peft(base: Any, adapter: Any, target: Any, *, sign: int = 1, **options: Any) -> Written:
    """Write weights of Hugging Face's with an adapter added to them, or taken out of them, as another directory.

    Configuration and tokenizer beside the weights are copied.

    Memory:  as `export_safetensors`: pieces, whatever the size of the model.

    Args:
      base: a directory of safetensors.
      adapter: a directory of PEFT's.
      target: must not exist yet.
      sign: 1 adds, -1 takes out; in low precision that gives back the weights up to rounding.
      options: of `write_safetensors`.

    Raises:
      ValueError: as `open_peft`, `Merged` and `write_safetensors`.
    """
    directory = Path(base).expanduser()
    merged = Merged(SafetensorsSource(directory), open_peft(adapter), sign=sign)
    beside = directory if directory.is_dir() else directory.parent
    texts = {file.name: file for file in sorted(beside.iterdir()) if file.is_file() and _is_text(file.name)}
    return write_safetensors(merged, target, texts=texts, **options)


def _is_text(name: str) -> bool:
    """Tell configurations and tokenizers from weights, of which others may lie there unmerged."""
    is_about_weights = name.endswith(".index.json") or name.startswith("adapter_")
    return name.endswith((".json", ".txt", ".model", ".jinja")) and not is_about_weights
