"""One unit's life in a step: gather, compute, free; gather again, differentiate, reduce.

[Note: what a unit saves]
A unit is differentiated here and not by JAX's own rules, so that what stands between forward and backward is decided in
one place. The forward is linearized under the unit's remat policy, and each residual is sorted by what it depends on:
values that depend on an activation are kept; the gathered weights, and every value computed from weights alone (a cast,
a reshape, a transpose), are dropped and computed anew in the backward from the shards. `jax.checkpoint` alone cannot do
this: a policy sees primitives and not what they depend on, so a reshaped gathered weight is saved at full size.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import core

from jfsdp.engine.dataflow import depends_on, keep_outputs, value_names
from jfsdp.layout.policy import Remat, SaveNames
from jfsdp.layout.table import DEVICE, HOST

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Movement:
    """How the weights of a unit move.

    Attributes:
      gather: shards into full weights.
      reduce: full gradients of the trainable weights into shards.
      keep: full weights into what is kept of them between forward and backward; None keeps nothing.
      regather: what was kept into full weights.
      trainable: the names of the weights that get a gradient.
      remat: what else the unit saves.
    """

    gather: Callable[[Arrays], Arrays]
    reduce: Callable[[Arrays], Arrays]
    keep: Callable[[Arrays], Arrays] | None
    regather: Callable[[Arrays], Arrays]
    trainable: frozenset[str]
    remat: Remat


def call_unit(
    run: Callable[[Arrays, Any], Any],
    shards: Arrays,
    rest: Any,
    full: Any,
    movement: Movement,
    seen: set[str] | None = None,
) -> Any:
    """Compute `run(gather(shards), rest)` so that its derivative gathers again and reduces into shards.

    Layout:  whatever `movement.gather` and `movement.reduce` say.
    Cost:    one gather forward; backward one reduction of what is trainable and, if the unit is resharded, one more
             gather (from what was kept, where some of it was).
    Memory:  the gathered weights while the unit computes; between forward and backward the unit's inputs and what its
             remat policy saves, and what `movement.keep` leaves of the gathered weights.

    Args:
      run: the unit's computation; a pure function of its two arguments and of what it closes over.
      shards: the unit's weights at rest.
      rest: everything else it reads: inputs, other state, weights of inner units; a pytree of arrays.
      full: shapes and dtypes of the gathered weights.
      seen: takes up the names that values of the unit, and of units in it, have; None where nobody asks.
    """
    closed, out_shape = jax.make_jaxpr(run, return_shape=True)(full, rest)
    if seen is not None:
        seen.update(value_names(closed.jaxpr))
    flat_rest = [*closed.consts, *jax.tree.leaves(rest)]
    is_diff = [_is_inexact(value) for value in flat_rest]
    num_consts = len(closed.consts)

    def compute(weights: Arrays, diff: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        values = _weave(is_diff, diff, other)
        flat = [*values[:num_consts], *jax.tree.leaves(weights), *values[num_consts:]]
        return core.eval_jaxpr(closed.jaxpr, flat[:num_consts], *flat[num_consts:])

    unit = _differentiable(_apply_remat(compute, movement.remat), movement)
    diff = [value for value, yes in zip(flat_rest, is_diff, strict=True) if yes]
    other = [value for value, yes in zip(flat_rest, is_diff, strict=True) if not yes]
    return jax.tree.unflatten(jax.tree.structure(out_shape), unit(shards, diff, other))


def _is_inexact(value: Any) -> bool:
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.inexact))


def _weave(mask: Sequence[bool], yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    yes_values, no_values = iter(yes), iter(no)
    return [next(yes_values) if flag else next(no_values) for flag in mask]


def _apply_remat(compute: Callable[..., Any], remat: Remat) -> Callable[..., Any]:
    """Wrap a function in `jax.checkpoint`; the backward's barrier already prevents common-subexpression elimination."""
    policies = jax.checkpoint_policies
    if remat == "none":
        return compute
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = policies.dots_with_no_batch_dims_saveable
    elif isinstance(remat, tuple):
        policy = policies.save_only_these_names(*remat)
    elif isinstance(remat, SaveNames):
        policy = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=list(remat.save),
            names_which_can_be_offloaded=list(remat.offload),
            offload_src=DEVICE,
            offload_dst=HOST,
        )
    else:
        policy = remat
    return jax.checkpoint(compute, prevent_cse=False, policy=policy)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True, eq=False)
class _Plan:
    """How to rebuild a unit's linearization in its backward: static, it travels as the treedef of the residuals.

    `saved[i]` is whether residual i was kept; the others come out of `weight_only`, a function of the full weights.
    """

    tree: Any
    saved: tuple[bool, ...]
    weight_only: Callable[[Arrays], list[Any]]


@jax.tree_util.register_pytree_node_class
@dataclasses.dataclass(frozen=True)
class _Residuals:
    shards: Arrays
    weights: Arrays | None
    kept: list[Any]
    plan: _Plan

    def tree_flatten(self) -> tuple[Any, Any]:
        return (self.shards, self.weights, self.kept), self.plan

    @classmethod
    def tree_unflatten(cls, plan: _Plan, children: Any) -> _Residuals:
        shards, weights, kept = children
        return cls(shards, weights, kept, plan)


def _differentiable(compute: Callable[..., list[Any]], movement: Movement) -> Callable[..., Any]:
    @jax.custom_vjp
    def unit(shards: Arrays, diff: list[Any], other: list[Any]) -> list[Any]:
        return compute(movement.gather(shards), diff, other)

    def forward(shards: Arrays, diff: list[Any], other: list[Any]) -> tuple[list[Any], _Residuals]:
        full = movement.gather(shards)
        out, kept, plan = _linearize(compute, full, movement.trainable, diff, other)
        return out, _Residuals(shards, movement.keep and movement.keep(full), kept, plan)

    def backward(residuals: _Residuals, cotangents: list[Any]) -> tuple[Any, list[Any], None]:
        shards, weights, kept = jax.lax.optimization_barrier((residuals.shards, residuals.weights, residuals.kept))
        full = movement.gather(shards) if weights is None else movement.regather(weights)
        plan = residuals.plan
        leaves = _weave(plan.saved, kept, plan.weight_only(full))
        grads, grad_diff = jax.tree.unflatten(plan.tree, leaves)(cotangents)
        return dict.fromkeys(shards) | movement.reduce(grads), grad_diff, None

    unit.defvjp(forward, backward)
    return unit


def _linearize(
    compute: Callable[..., list[Any]], full: Arrays, trainable: frozenset[str], diff: list[Any], other: list[Any]
) -> tuple[list[Any], list[Any], _Plan]:
    """Run the forward and sort the residuals of its derivative; see [Note: what a unit saves]."""
    num_out, tree = 0, None

    def forward(full: Arrays, diff: list[Any], other: list[Any]) -> list[Any]:
        nonlocal num_out, tree
        weights = {path: value for path, value in full.items() if path in trainable}
        out, vjp = jax.vjp(lambda w, d: compute(full | w, d, other), weights, diff)
        leaves, tree = jax.tree.flatten(vjp)
        num_out = len(out)
        return [*out, *leaves]

    closed = jax.make_jaxpr(forward)(full, diff, other)
    weights = jax.tree.leaves(full)
    inputs = [*weights, *diff, *other]
    results = core.eval_jaxpr(closed.jaxpr, closed.consts, *inputs)
    is_activation = [position >= len(weights) for position in range(len(inputs))]
    saved = tuple(depends_on(closed.jaxpr, is_activation)[num_out:])

    dropped = keep_outputs(closed.jaxpr, [False] * num_out + [not keep for keep in saved])

    def weight_only(full: Arrays) -> list[Any]:
        # Nothing that is left reads an activation: zeros stand in for them.
        zeros = [_zeros_like(var.aval) for var in dropped.invars[len(weights) :]]
        return core.eval_jaxpr(dropped, closed.consts, *jax.tree.leaves(full), *zeros)

    kept = [value for value, keep in zip(results[num_out:], saved, strict=True) if keep]
    return results[:num_out], kept, _Plan(tree, saved, weight_only)


def _zeros_like(aval: Any) -> Any:
    if jnp.issubdtype(aval.dtype, jax.dtypes.prng_key):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
