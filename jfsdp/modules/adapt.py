"""From what a user has as a model to the protocol: which adapter takes it."""

from __future__ import annotations

from typing import Any

from jfsdp.modules.linen import LinenModel, is_linen, is_linen_class
from jfsdp.modules.model import FlaxModel
from jfsdp.modules.nnx import NNXModel


def as_model(source: Any) -> FlaxModel:
    """Bring what `fully_shard` takes as a model into one form.

    Args:
      source: a factory `f(rngs) -> nnx.Module`; an `nnx.Module`, whose weights are kept; or, for Linen,
        `(module, example_inputs)` or `(module, example_inputs, variables)`: see `jfsdp.modules.linen.LinenModel`.

    Raises:
      ValueError: for anything else.
    """
    if is_linen(source):
        raise ValueError(
            f"model {type(source).__name__} is a flax.linen module, which does not know its shapes; pass "
            "(module, example_inputs), where the inputs may be arrays or jax.ShapeDtypeStruct"
        )
    if isinstance(source, type) and is_linen_class(source):
        raise ValueError(
            f"model {source.__name__} is a flax.linen class; pass (module, example_inputs): an instance of it, and "
            "arrays or jax.ShapeDtypeStruct"
        )
    if isinstance(source, (tuple, list)):
        if len(source) not in (2, 3) or not is_linen(source[0]):
            raise ValueError(
                f"model: a {type(source).__name__} of {len(source)} is taken for a Linen model, which is "
                "(linen_module, example_inputs) or (linen_module, example_inputs, variables)"
            )
        return LinenModel(*source)
    return NNXModel(source)
