"""Additions to a model before it is sharded: low-rank adapters and codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jfsdp.arguments import checked
from jfsdp.layout.codec import Coded
from jfsdp.layout.lora import LoRA


@dataclasses.dataclass(frozen=True)
class WrappedModel:
    """A user's model with the adapters and codecs that `fully_shard` adds.

    Attributes:
      model: a model for `fully_shard`.
      loras: from `lora`.
      codecs: from `quantize`.
    """

    model: Any
    loras: tuple[LoRA, ...] = ()
    codecs: Coded = dataclasses.field(default_factory=dict)


@checked
def lora(model: Any, loras: LoRA | Sequence[LoRA]) -> WrappedModel:
    """Wrap a model for `fully_shard`, which then trains low-rank adapters of some matrices and freezes the rest.

    Args:
      model: a model for `fully_shard`, or the result of `quantize`.
      loras: a `LoRA`, or a list of them for different matrices.

    Raises:
      ValueError: for an empty list, and a model that `lora` has already wrapped.
    """
    return _wrapped(model, "lora", "loras", (loras,) if isinstance(loras, LoRA) else tuple(loras))


@checked
def quantize(model: Any, codecs: Coded) -> WrappedModel:
    """Wrap a model for `fully_shard`, which then stores and gathers some frozen matrices in 8 or 4 bits.

    They are decoded inside their unit.

    Args:
      model: a model for `fully_shard`, or the result of `lora`.
      codecs: by selector, "nf4", "int4" or "int8": blocks of 64 with a bfloat16 scale each.

    Raises:
      ValueError: for an empty dict, and a model that `quantize` has already wrapped.
    """
    return _wrapped(model, "quantize", "codecs", codecs)


def as_wrapped(model: Any) -> WrappedModel:
    return model if isinstance(model, WrappedModel) else WrappedModel(model)


def _wrapped(model: Any, function: str, field: str, value: Any) -> WrappedModel:
    wrapped = as_wrapped(model)
    if not value:
        raise ValueError(f"{function}: {field} is empty; pass the model itself, or give one")
    if getattr(wrapped, field):
        raise ValueError(f"{function}: the model is already wrapped by jfsdp.{function}; pass all {field} in one call")
    return dataclasses.replace(wrapped, **{field: value})
