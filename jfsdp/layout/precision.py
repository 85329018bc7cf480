"""Mixed precision as data: the dtype of each stage of a leaf."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.arguments import checked, did_you_mean
from jfsdp.layout.loss_scale import LossScale
from jfsdp.layout.wire import as_wire

FLOAT_DTYPES = ("float32", "bfloat16", "float16")


@checked
@dataclasses.dataclass(frozen=True)
class MixedPrecisionPolicy:
    """FSDP2's policy of the same name. `None` keeps the existing dtype.

    Attributes:
      param_dtype: parameters in use; shards are cast before the gather, so they are sent in this dtype.
      reduce_dtype: gradients while they are reduced over devices; default `param_dtype`.
      output_dtype: floating outputs of the model's call; in `per_unit`, of the unit's calls.
      cast_forward_inputs: cast floating inputs of the model's call, and of each unit's calls, to `param_dtype`.
      frozen_dtype: frozen floating parameters at rest.
      loss_scale: how the loss is scaled, by default dynamically if a unit computes in float16; not in `per_unit`.
      gather_wire: a `Wire`, or its dtype: the format in which matrices of the units below the root are gathered; the
        root's only with `per_unit={"": ...}`. Each such matrix is rounded when it is used, gathered or not.
      reduce_wire: a `Wire`, or its dtype: the format in which gradients of these matrices are exchanged between
        devices, and summed in float32. For program "manual".

    Dtypes may be given as names or as numpy/JAX dtypes; they are stored as names. Non-floating leaves are never cast.
    """

    param_dtype: Any = None
    reduce_dtype: Any = None
    output_dtype: Any = None
    cast_forward_inputs: bool = True
    frozen_dtype: Any = None
    loss_scale: LossScale | None = None
    gather_wire: Any = None
    reduce_wire: Any = None

    def __post_init__(self) -> None:
        for field in ("param_dtype", "reduce_dtype", "output_dtype", "frozen_dtype"):
            object.__setattr__(self, field, float_dtype_name(field, getattr(self, field)))
        for field in ("gather_wire", "reduce_wire"):
            object.__setattr__(self, field, as_wire(field, getattr(self, field)))
        wire = self.reduce_wire
        if wire and not wire.block:
            raise ValueError(
                f"reduce_wire {wire.dtype!r} has one scale per matrix, but each device has other gradients; pass "
                f"Wire({wire.dtype!r}, block=256)"
            )
        if wire and wire.between is None and self.reduce_dtype not in (None, self.param_dtype):
            raise ValueError(
                f"reduce_wire={wire.dtype!r} and reduce_dtype={self.reduce_dtype!r} contradict each other: both are "
                "the format of gradients between all devices; remove one, or pass Wire(..., between='node')"
            )

    def use_dtype(self, dtype: str) -> str:
        """Return the dtype in use of a leaf whose master copy has `dtype`."""
        return self.param_dtype if self.param_dtype and is_float(dtype) else dtype


def float_dtype_name(field: str, dtype: object) -> str | None:
    """Return the name of a dtype that mixed precision supports.

    Raises:
      ValueError: naming the field, for any other dtype.
    """
    if dtype is None:
        return None
    try:
        name = jnp.dtype(dtype).name  # type: ignore[arg-type]
    except TypeError:
        name = str(dtype)
    if name not in FLOAT_DTYPES:
        raise ValueError(
            f"{field} {dtype!r} is not one of {', '.join(FLOAT_DTYPES)}{did_you_mean(dtype, FLOAT_DTYPES)}"
        )
    return name


def is_key(value: Any) -> bool:
    """Tell whether an array, or a shape with a dtype, has typed rng keys (`jax.random.key`)."""
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))


def is_float(dtype: object) -> bool:
    """Tell whether mixed precision may cast this dtype."""
    return bool(jnp.issubdtype(dtype, jnp.floating))  # type: ignore[arg-type]


def is_inexact(dtype: object) -> bool:
    """Tell whether a dtype can have a gradient: floating or complex."""
    return bool(jnp.issubdtype(jnp.dtype(dtype), jnp.inexact))  # type: ignore[arg-type]


def sum_dtype(dtype: str) -> str:
    """Return the dtype in which gradients are accumulated for a master of `dtype`: at least float32."""
    return "float32" if dtype in ("bfloat16", "float16") else dtype


def item_bytes(dtype: object) -> int:
    """Return the bytes of one element."""
    return int(np.dtype(jnp.dtype(dtype)).itemsize)  # type: ignore[arg-type]
