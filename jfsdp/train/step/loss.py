"""Losses as totals and weights, which make means over devices and microbatches exact."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

RESERVED = ("loss", "grad_norm", "weight", "num_skipped", "loss_scale", "learning_rate")
_LOSS = "a scalar, or jfsdp.Loss(total, weight, aux)"
METRIC = "a scalar sum over rows, or jfsdp.Max(x) or jfsdp.Mean(total, weight), of scalars or arrays"


class Max(NamedTuple):
    """A metric that is the maximum over the rows of all devices and microbatches.

    Attributes:
      maximum: the maximum over the rows that the loss receives: a scalar, or an array (one maximum per class, say).
    """

    maximum: Any


class Mean(NamedTuple):
    """A metric that is a mean with a weight other than the loss's.

    Attributes:
      total: the sum over the rows that the loss receives: a scalar, or an array (one sum per class, say).
      weight: the number of summed terms, in the same shape. If 0 over all devices and microbatches, the mean is 0.
    """

    total: Any
    weight: Any


class Loss(NamedTuple):
    """A loss as a sum and the weight to divide it by, exact for uneven masks (the mean of means is not the mean).

    Attributes:
      total: scalar; the sum of the losses of the tokens or examples.
      weight: scalar; the number of tokens or examples in the rows that the loss receives. A step does not differentiate
        it, and raises if it depends on trained parameters. If it is 0 over all devices and microbatches, the loss and
        its gradient are 0 if the total is 0, otherwise not finite.
      aux: metrics by name, which the step returns with its own. A scalar is summed and divided like `total`; see also
        `Max` and `Mean`. Not differentiated.
    """

    total: Any
    weight: Any
    aux: dict[str, Any] | None = None


def as_loss(value: Any) -> Loss:
    """Convert the result of a loss function to a `Loss`.

    A scalar, or `scalar, aux`, is the mean over a microbatch, with weight 1. Any object with `total` and `weight` (and
    `aux`) is a `Loss`, so that models need not import jfsdp. In `aux`, an object with `maximum` is a `Max`, and an
    object with `total` and `weight` a `Mean`.

    All values are cast to the dtype of the total, or to float32 if that is wider.

    Raises:
      TypeError: for None, values that are not arrays, complex numbers, a total that is not floating, and an aux that is
        not a dict with string keys.
      ValueError: if total, weight or an aux value is not a scalar, or an aux name is reserved.
    """
    if value is None:
        raise TypeError(f"loss_fn: returned None (is its return missing?); return {_LOSS}")
    pair = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    given: Any = value if hasattr(value, "total") else Loss(pair[0], 1.0, pair[1])
    extra = getattr(given, "aux", None)
    if not isinstance(extra, Mapping | None):
        kind = "an array" if hasattr(extra, "shape") else f"a {type(extra).__name__}"
        raise TypeError(
            f"loss_fn: aux is {kind}; make it a dict of scalars by name, or, for a sum with its weight, return "
            "jfsdp.Loss(total, weight)"
        )
    if unnamed := [name for name in extra or {} if not isinstance(name, str)]:
        raise TypeError(f"loss_fn: aux has the key {unnamed[0]!r}; use strings as names of metrics")
    taken = [name for name in extra or {} if name in RESERVED]
    if taken:
        raise ValueError(f"loss_fn: aux names {', '.join(taken)} are names of the step's metrics; rename them")
    total, weight = (_scalar(name, getattr(given, name), _LOSS) for name in ("total", "weight"))
    dtype = jnp.promote_types(total.dtype, jnp.float32)
    if isinstance(given.weight, (int, float)) and not 0 < given.weight < math.inf:
        raise ValueError(
            f"loss_fn: the weight is {given.weight}, a constant; compute it from the rows that the loss receives "
            "(such as mask.sum()), or return the scalar mean"
        )
    if not jnp.issubdtype(total.dtype, jnp.floating):
        raise TypeError(f"loss_fn: total has dtype {total.dtype}; a gradient needs a floating loss")
    loss = Loss(total, weight, {name: _metric(name, x) for name, x in (extra or {}).items()})
    return jax.tree.map(lambda x: x.astype(dtype), loss)


def _metric(name: str, value: Any) -> Any:
    label, kind = f"aux[{name!r}]", Max if hasattr(value, "maximum") else Mean
    if getattr(value, "aux", None):
        raise ValueError(f"loss_fn: {label} contains metrics ({', '.join(value.aux)}); return {METRIC}")
    if not all(hasattr(value, field) for field in kind._fields):
        return _scalar(label, value, METRIC)
    return kind(*(_array(f"{label}.{field}", getattr(value, field), METRIC) for field in kind._fields))


def _scalar(name: str, value: Any, remedy: str) -> jax.Array:
    array = _array(name, value, remedy)
    if array.shape:
        raise ValueError(f"loss_fn: {name} has shape {array.shape}; return {remedy}")
    return array


def _array(name: str, value: Any, remedy: str) -> jax.Array:
    try:
        array = jnp.asarray(value)
    except (TypeError, ValueError) as error:
        raise TypeError(f"loss_fn: {name} is a {type(value).__name__}; return {remedy}") from error
    if jnp.iscomplexobj(array):
        raise TypeError(f"loss_fn: {name} has dtype {array.dtype}; return {remedy}")
    return array


def merge(add: Callable[..., Any], maximum: Callable[..., Any], *losses: Loss) -> Loss:
    """Combine losses elementwise, sums by `add` and maxima by `maximum`; or reduce one loss, such as over devices."""

    def combine(*values: Any) -> Any:
        return jax.tree.map(maximum if isinstance(values[0], Max) else add, *values)

    return jax.tree.map(combine, *losses, is_leaf=lambda x: isinstance(x, Max))


def metrics_of(aux: Mapping[str, Any], weight: Any, divide: Callable[[Any, Any], Any]) -> dict[str, Any]:
    """Return the values of metrics from their sums and maxima over all rows; `weight` is the weight of the loss."""

    def report(value: Any) -> Any:
        if isinstance(value, Max):
            return value.maximum
        return divide(*(value if isinstance(value, Mean) else (value, weight)))

    return {name: report(value) for name, value in aux.items()}


def numbers(metrics: Mapping[str, Any]) -> dict[str, float]:
    """Return metrics as Python numbers; the elements of an array are named by index: `load.3`."""
    arrays = {name: np.asarray(value) for name, value in metrics.items()}
    elements = ((name, x, index) for name, x in arrays.items() for index in np.ndindex(x.shape))
    return {".".join((name, *map(str, index))): float(x[index]) for name, x, index in elements}


def divide(total: jax.Array, weight: jax.Array) -> jax.Array:
    """Return a mean, which is 0 if the weight is 0."""
    return jnp.where(weight == 0, 0.0, total / jnp.where(weight == 0, 1.0, weight))
