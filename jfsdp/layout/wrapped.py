"""What is added to a model before it is sharded, as a description: low-rank adapters and codecs."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from jfsdp.arguments import checked
from jfsdp.layout.codec import Coded
from jfsdp.layout.lora import LoRA


@dataclasses.dataclass(frozen=True)
class WrappedModel:
    """A model as the user has it, with the adapters and codecs that `fully_shard` is to give it.

    Attributes:
      model: what `fully_shard` takes.
      loras: of `lora`.
      codecs: of `quantize`.
    """

    model: Any
    loras: tuple[LoRA, ...] = ()
    codecs: Coded = dataclasses.field(default_factory=dict)


@checked
def lora(model: Any, loras: LoRA | Sequence[LoRA]) -> WrappedModel:
    """Wrap a model for `fully_shard`, which then trains low-rank adapters of some matrices and freezes the rest.

    Args:
      model: what `fully_shard` takes, or what `quantize` returned.
      loras: a `LoRA`, or a list of them for different matrices.

    Raises:
      ValueError: for an empty list, and a model that is wrapped by `lora` already.
    """
    return _wrapped(model, "lora", "loras", (loras,) if isinstance(loras, LoRA) else tuple(loras))


@checked
def quantize(model: Any, codecs: Coded) -> WrappedModel:
    """Wrap a model for `fully_shard`, which then stores and gathers some frozen matrices in 8 or 4 bits.

    They are decoded inside their unit.

    Args:
      model: what `fully_shard` takes, or what `lora` returned.
      codecs: by selector, "nf4", "int4" or "int8": blocks of 64 with a bfloat16 scale each.

    Raises:
      ValueError: for an empty dict, and a model that is wrapped by `quantize` already.
    """
    return _wrapped(model, "quantize", "codecs", codecs)


def as_wrapped(model: Any) -> WrappedModel:
    return model if isinstance(model, WrappedModel) else WrappedModel(model)


def _wrapped(model: Any, function: str, field: str, value: Any) -> WrappedModel:
    wrapped = as_wrapped(model)
    if not value:
        raise ValueError(f"{function}: {field} is empty; pass the model alone, or give one")
    if getattr(wrapped, field):
        raise ValueError(f"{function}: the model is wrapped by jfsdp.{function} already; pass all {field} in one call")
    return dataclasses.replace(wrapped, **{field: value})
