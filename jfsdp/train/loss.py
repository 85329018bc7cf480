"""Losses as totals and weights, so that a mean over devices and microbatches is the mean over what was counted."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

RESERVED = ("loss", "grad_norm", "weight", "num_skipped", "loss_scale")


class Loss(NamedTuple):
    """A loss as a sum and the weight to divide it by: exact under uneven masks (the mean of means is not the mean).

    Attributes:
      total: scalar; the sum of the losses of what is counted (tokens, examples).
      weight: scalar; how much was counted, in the rows at hand. Its gradient is not taken.
      aux: scalars by name, summed and divided like `total`, and returned among the metrics.
    """

    total: Any
    weight: Any
    aux: dict[str, Any] | None = None


def as_loss(value: Any) -> Loss:
    """Bring what a loss function returned into one form. Moves no data.

    A scalar counts as a mean over equal-weight examples: weight 1. Any object with `total` and `weight` (and `aux`)
    counts as a `Loss`, so that models need not import jfsdp.

    Raises:
      ValueError: for None; if total, weight or an aux value is not a scalar, the total is not floating, or an aux name
        is taken.
    """
    if value is None:
        raise ValueError(
            "loss_fn: returned None (is its return missing?); return a scalar, or jfsdp.Loss(total, weight, aux)"
        )
    given = value if hasattr(value, "total") else Loss(value, 1.0)
    if isinstance(given.total, (tuple, list, dict)):
        raise ValueError("loss_fn: returned a collection; return a scalar, or jfsdp.Loss(total, weight, aux)")
    extra = getattr(given, "aux", None)
    if not isinstance(extra, Mapping | None):
        raise ValueError(f"loss_fn: aux is a {type(extra).__name__}; make it a dict of scalars by name")
    total, weight = _number("total", given.total), _number("weight", given.weight).astype(jnp.float32)
    aux = {key: _number(f"aux[{key!r}]", x).astype(jnp.float32) for key, x in (extra or {}).items()}
    taken = [name for name in aux if name in RESERVED]
    if taken:
        raise ValueError(f"loss_fn: aux names {', '.join(taken)} are those of the step's own metrics; rename them")
    for name, scalar in {"total": total, "weight": weight, **aux}.items():
        if scalar.shape:
            raise ValueError(f"loss_fn: {name} has shape {scalar.shape}; return a scalar, or jfsdp.Loss(total, weight)")
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise ValueError(f"loss_fn: total has dtype {total.dtype.name}; a gradient needs a floating loss")
    return Loss(total.astype(jnp.float32), jax.lax.stop_gradient(weight), aux)


def _number(name: str, value: Any) -> jax.Array:
    try:
        return jnp.asarray(value)
    except (TypeError, ValueError) as error:
        kind = type(value).__name__
        raise ValueError(f"loss_fn: {name} is a {kind}; return a scalar, or jfsdp.Loss(total, weight, aux)") from error
