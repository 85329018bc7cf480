"""Runs the steps of one case, and compares their values with the reference."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import optax

from jfsdp.layout.layout import Layout
from jfsdp.layout.precision import is_key
from jfsdp.proof.reference import Reference, Values, data_of
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.step.step import TrainStep

_MARGIN = 16  # times the effect of one rounding error per parameter
_MOST = 1e-2  # relative to the norm of an array
_LEAST_MARGIN = 4  # where a rounding error has a larger effect


class Captured(NamedTuple):
    """The state of an optimizer, and the gradients that it was given."""

    inner: Any
    grads: Any


def capture(tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return the transformation with its gradients as a part of its state."""
    inner = optax.with_extra_args_support(tx)

    def init(params: Any) -> Captured:
        return Captured(inner.init(params), jax.tree.map(jax.numpy.zeros_like, params))

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Captured]:
        found, after = inner.update(updates, state.inner, params, **extra)
        return found, Captured(after, updates)

    return optax.GradientTransformationExtraArgs(init, update)


@dataclasses.dataclass(frozen=True)
class Difference:
    """A value that differs from one device's by more than rounding.

    Attributes:
      kind: of the value, as in `Values`; name: of the array.
      error: norm of the difference, divided by the norm of the reference.
      allowed: what rounding explains.
    """

    kind: str
    name: str
    error: float
    allowed: float


@dataclasses.dataclass(frozen=True)
class Run:
    """The values of a case.

    Attributes:
      copies: kind and name of arrays whose replicas on several devices differ.
      adds_up: whether the loss of all rows should be the sum of the microbatches' losses.
      check_loss: returns what the check of a loss before the first step says; "" if it finds nothing.
    """

    values: Values
    copies: tuple[tuple[str, str], ...]
    layout: Layout
    check_loss: Callable[[], str]
    adds_up: bool


def run_case(
    model: ShardedModel, make_step: Callable[..., TrainStep], tx: optax.GradientTransformation, reference: Reference
) -> Run:
    """Take the reference's steps on the model's mesh.

    Args:
      make_step: makes the step of the transformation `tx = capture(...)`, with or without the check of the loss.
    """
    found, copies, weights = dict[tuple[str, str], Any](), list[tuple[str, str]](), []
    step = make_step(check_loss=False)

    def first_state() -> TrainState:
        state = model.init(tx)
        keys = {name: x for name, x in reference.state.items() if is_key(x)}  # perhaps of equal bits
        for name, x in keys.items():  # copies, because the step donates them
            keys[name] = jax.device_put(jax.numpy.copy(x), state.model_state[name].sharding)
        return dataclasses.replace(state, model_state={**state.model_state, **keys})

    def check_loss() -> str:
        try:
            make_step(check_loss=True).prepare(first_state(), reference.batches[0])
        except ValueError as error:
            return str(error)
        return ""

    def keep(kind: str, name: str, value: jax.Array, shape: tuple[int, ...]) -> None:
        found[kind, name] = np.asarray(data_of(value))[tuple(map(slice, shape))]
        copies.extend([(kind, name)] if _differ(data_of(value)) else [])

    state = first_state()
    for index, batch in enumerate(reference.batches):
        state, metrics = step(state, batch)
        found["loss", f"step {index + 1}"] = np.asarray(metrics["loss"])
        weights.append(float(metrics["weight"]))
        for role, value in zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True):
            is_grad = role.name.startswith("opt_state.grads.")
            if is_grad and index == 0:  # undo the clipping, which hides factors
                most, norm = reference.max_grad_norm or math.inf, float(metrics["grad_norm"])
                keep("gradient", role.leaf or "", value, role.shape)
                found["gradient", role.leaf or ""] = found["gradient", role.leaf or ""] * max(1.0, norm / most)
            elif not is_grad and index == len(reference.batches) - 1:
                keep("optimizer state", role.name.replace(".inner", "", 1), value, role.shape)
    for leaf in model.layout.leaves:
        keep("parameter", leaf.path, state.params[leaf.path], leaf.shape)
    for name, value in state.model_state.items():
        keep("model state", name, value, value.shape)
    return Run(Values(found, tuple(weights)), tuple(copies), model.layout, check_loss, step.spec.adds_up)


def _differ(value: jax.Array) -> bool:
    """Return whether replicas of a block on several devices have other values."""
    first: dict[str, Any] = {}
    for shard in value.addressable_shards:
        data = np.asarray(shard.data)
        is_inexact = jax.numpy.issubdtype(data.dtype, jax.numpy.inexact)
        if not np.array_equal(first.setdefault(str(shard.index), data), data, equal_nan=is_inexact):
            return True
    return False


def differences(run: Values, one: Values, moved: Values, eps: float) -> list[Difference]:
    """Return the values that differ from one device's, in the order of a step. Whole numbers must be equal.

    Args:
      one, moved: the reference, and the reference from parameters that are changed by a rounding error.
      eps: the relative rounding error of the narrowest dtype.
    """
    found = []
    for key in ("loss", "gradient", "parameter", "optimizer state", "model state"):
        wanted, given, near = one.of(key), run.of(key), moved.of(key)
        scale = scale_of(wanted) if key in ("gradient", "parameter") else 0.0
        for name in dict.fromkeys([*wanted, *given]):
            if name not in wanted or name not in given or wanted[name].shape != given[name].shape:
                found.append(Difference(key, name, math.inf, 0.0))
                continue
            size, gap = norm(wanted[name]), _gap(given[name], wanted[name])
            effect, small = _gap(near[name], wanted[name]) + eps * size, _MARGIN * eps * 1e-3 * scale
            allowed = min(_MARGIN * effect, max(_MOST * size, _LEAST_MARGIN * effect)) + small
            allowed = allowed if jax.numpy.issubdtype(wanted[name].dtype, jax.numpy.inexact) else 0.0
            if not gap <= allowed:
                found.append(Difference(key, name, gap / size if size else math.inf, allowed / size if size else 0.0))
    return found


def _gap(one: Any, other: Any) -> float:
    """Return the norm of a difference; infinities of one sign are equal."""
    one, other = _wide(one), _wide(other)
    return norm(np.subtract(one, other, where=one != other, out=np.zeros_like(one)))


def scale_of(arrays: Mapping[str, Any]) -> float:
    """Return the norm of all arrays together."""
    return math.sqrt(sum(norm(x) ** 2 for x in arrays.values()))


def norm(x: Any) -> float:
    return float(np.linalg.norm(np.ravel(_wide(x))))


def _wide(x: Any) -> Any:
    return np.asarray(x, np.complex128 if np.iscomplexobj(x) else np.float64)
