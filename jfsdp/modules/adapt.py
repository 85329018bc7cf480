"""Selection of the adapter for a user's model."""

from __future__ import annotations

from typing import Any

from flax import linen

from jfsdp.modules.linen import LinenModel
from jfsdp.modules.model import PlainModel
from jfsdp.modules.nnx import NNXModel


def as_model(source: Any) -> PlainModel:
    """Wrap a model that `fully_shard` accepts.

    Args:
      source: a factory `f(rngs) -> nnx.Module`; an `nnx.Module`, whose weights are kept; or, for Linen,
        `(module, example_inputs)` or `(module, example_inputs, variables)`: see `jfsdp.modules.linen.LinenModel`.

    Raises:
      TypeError: for any other type.
      ValueError: for any other tuple.
    """
    is_class = isinstance(source, type) and issubclass(source, linen.Module)
    if isinstance(source, linen.Module) or is_class:
        name, kind = (source.__name__, "class") if is_class else (type(source).__name__, "module")
        raise TypeError(f"model {name} is a flax.linen {kind}; pass (module, example_inputs), such as arrays")
    if isinstance(source, (tuple, list)):
        if len(source) not in (2, 3) or not isinstance(source[0], linen.Module):
            raise ValueError(f"model: {len(source)} items are not (linen_module, example_inputs) or (..., variables)")
        return LinenModel(*source)
    return NNXModel(source)
