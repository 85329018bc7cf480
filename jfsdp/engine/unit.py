"""One unit in a step: gather, compute, free; gather again, differentiate, reduce.

[Note: what a unit saves]
Units are differentiated here and not by JAX's rules, so that one place determines the arrays that are kept between
forward and backward. The forward is linearized under the unit's remat policy, and each residual is sorted by its
dependencies. Values that depend on an activation are kept. The gathered weights, and every value computed only from
weights (a cast, a reshape, a transpose), are dropped and recomputed from the shards in the backward. `jax.checkpoint`
cannot do this: a policy sees primitives and not their dependencies, so a reshaped gathered weight is saved at full
size.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jfsdp.compat import FUSED_ATTENTION, core
from jfsdp.jaxprs import depends_on, keep_outputs, passes_through
from jfsdp.layout.leaf import DEVICE, HOST
from jfsdp.layout.policy import FUSED, UNIT_INPUT, Remat, SaveNames
from jfsdp.layout.precision import is_key

Arrays = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Movement:
    """How the weights of a unit move.

    Attributes:
      gather: from shards to full weights.
      reduce: from full gradients of the trainable weights to shards.
      keep: from full weights to the arrays that are kept between forward and backward; None keeps nothing.
      regather: from the kept arrays to full weights.
      trainable: the names of the weights that get a gradient.
      remat: which other values the unit saves.
    """

    gather: Callable[[Arrays], Arrays]
    reduce: Callable[[Arrays], Arrays]
    keep: Callable[[Arrays], Arrays] | None
    regather: Callable[[Arrays], Arrays]
    trainable: frozenset[str]
    remat: Remat


@dataclasses.dataclass(frozen=True, eq=False)
class Traced:
    """A unit's call as a program, `outs = program(*flat, *weights)`, with inputs and outputs as flat lists.

    Attributes:
      jaxpr: without constants; its inputs are `flat`, then the weights by name.
      tree: the tree structure of the outputs.
      num_flat: the number of inputs before the weights.
      names: the parameter name of each input in the call; "" for an input that is not a parameter.
      written: the parameters that the call writes.
    """

    jaxpr: Any
    tree: Any
    num_flat: int
    names: tuple[str, ...]
    written: tuple[str, ...]

    def __call__(self, weights: Arrays, flat: Sequence[Any]) -> list[Any]:
        """Run on full weights."""
        return core.eval_jaxpr(self.jaxpr, (), *flat, *jax.tree.leaves(weights))


def trace_unit(run: Callable[[Arrays, Any], Any], full: Any, rest: Any) -> tuple[Traced, list[Any]]:
    """Trace a unit's call; return the trace and its inputs other than the weights.

    Args:
      run: a pure function of its two arguments and of values that it closes over. Returns its output, the state
        afterwards, and by name the parameters that may have been written. A transform such as nnx.remat returns its
        inputs as new values, so these parameters are traced to their origin.
      full: shapes and dtypes of the gathered weights.
      rest: all other inputs; a pytree of arrays, with the weights of inner units as `rest["params"]`.
    """
    closed, shape = jax.make_jaxpr(lambda rest, full: run(full, rest), return_shape=True)(rest, full)
    inner, flat = closed.jaxpr, [*closed.consts, *jax.tree.leaves(rest)]
    unnamed = {key: jax.tree.map(lambda _: "", value) for key, value in rest.items()}
    labels = unnamed | {"params": {name: name for name in rest["params"]}}
    names = ("",) * len(closed.consts) + tuple(jax.tree.leaves((labels, {name: name for name in full})))
    *results, after = shape
    num_out = len(inner.outvars) - len(after)
    jaxpr = inner.replace(constvars=[], invars=[*inner.constvars, *inner.invars])
    pairs = zip(sorted(after), passes_through(jaxpr)[num_out:], strict=True)
    written = tuple(name for name, at in pairs if at is None or names[at] != name)
    jaxpr = jaxpr.replace(outvars=jaxpr.outvars[:num_out])
    return Traced(jaxpr, jax.tree.structure(tuple(results)), len(flat), names, written), flat


def call_traced(traced: Traced, shards: Arrays, flat: Sequence[Any], movement: Movement) -> list[Any]:
    """Compute a traced call on `gather(shards)` so that its derivative gathers again and reduces into shards.

    Layout:  as `movement.gather` and `movement.reduce`.
    Cost:    one gather forward; backward one reduction of the trainable weights and, if the unit is resharded, one more
             gather (from the kept arrays, if some are kept).
    Memory:  the gathered weights while the unit computes; between forward and backward the unit's inputs, the values
             that its remat policy saves, and the output of `movement.keep`.

    Args:
      traced, flat: from `trace_unit`.
      shards: the unit's weights at rest.
    """
    is_diff = [is_inexact(value) for value in flat]

    def compute(weights: Arrays, diff: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        return traced(weights, weave(is_diff, diff, other))

    is_input = [not name for name, diff in zip(traced.names, is_diff, strict=False) if diff]  # no inner unit's weight
    unit = _differentiable(apply_remat(compute, movement.remat, is_input), movement)
    return unit(shards, *part(is_diff, flat))


def is_inexact(value: Any) -> bool:
    """Tell whether a value may have a derivative."""
    return bool(jnp.issubdtype(jnp.result_type(value), jnp.inexact))


def weave(mask: Sequence[bool], yes: Sequence[Any], no: Sequence[Any]) -> list[Any]:
    """Merge two lists by a mask; the inverse of `part`."""
    yes_values, no_values = iter(yes), iter(no)
    return [next(yes_values) if flag else next(no_values) for flag in mask]


def part(mask: Sequence[bool], values: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split values into two lists by a mask."""
    pairs = list(zip(mask, values, strict=True))
    return [value for flag, value in pairs if flag], [value for flag, value in pairs if not flag]


_INPUT = "jfsdp.input"  # not the name in a policy, by which a model may name its values


def apply_remat(compute: Callable[..., Any], remat: Remat, is_input: Sequence[bool] = ()) -> Callable[..., Any]:
    """Wrap a function in `jax.checkpoint`; the backward's barrier already prevents common-subexpression elimination.

    Args:
      compute: as in `linearize`.
      is_input: which of `diff` have the name `UNIT_INPUT`.
    """
    policies = jax.checkpoint_policies
    if remat == "none":
        return compute
    run, remat = compute, SaveNames(remat) if isinstance(remat, tuple) else remat
    if remat == "full":
        policy = policies.nothing_saveable
    elif remat == "dots":
        policy = _saves_products
    elif isinstance(remat, SaveNames):
        save, offload = ([_INPUT if name == UNIT_INPUT else name for name in x] for x in (remat.save, remat.offload))
        by_name = policies.save_and_offload_only_these_names(
            names_which_can_be_saved=save, names_which_can_be_offloaded=offload, offload_src=DEVICE, offload_dst=HOST
        )

        def policy_of_names(primitive: Any, *values: Any, **params: Any) -> Any:
            named = (_name_primitive(), {"name": FUSED}) if primitive.name in FUSED_ATTENTION else (primitive, params)
            return by_name(named[0], *values, **named[1])

        policy = policy_of_names

        if _INPUT in save + offload:

            def run(weights: Arrays, diff: Sequence[Any], other: Sequence[Any]) -> list[Any]:
                pairs = zip(diff, is_input, strict=True)
                return compute(weights, [checkpoint_name(x, _INPUT) if named else x for x, named in pairs], other)

    else:
        policy = remat
    return jax.checkpoint(run, prevent_cse=False, policy=policy)  # type: ignore[arg-type]


@functools.cache
def _name_primitive() -> Any:
    """Return the primitive of `checkpoint_name`."""
    return jax.make_jaxpr(lambda x: checkpoint_name(x, FUSED))(0.0).eqns[0].primitive


def _saves_products(primitive: Any, *values: Any, **params: Any) -> bool:
    """Save matrix products without batch dims, and the result and statistics of a fused attention."""
    is_product = jax.checkpoint_policies.dots_with_no_batch_dims_saveable(primitive, *values, **params)
    return is_product or primitive.name in FUSED_ATTENTION


@dataclasses.dataclass(frozen=True, eq=False)
class Linear:
    """A computation and its derivative, with sorted residuals; see [Note: what a unit saves].

    Attributes:
      jaxpr: from full weights, `diff` and `other` to outputs and residuals.
      consts: values of its constants.
      num_weights: how many of its inputs are weights.
      num_out: how many of its outputs are not residuals.
      tree: the tree structure of the function from cotangents to gradients, whose leaves are the residuals.
      kinds: of each residual: "saved"; "weights" if it depends only on weights; "fixed" if only on fixed inputs.
    """

    jaxpr: Any
    consts: Sequence[Any]
    num_weights: int
    num_out: int
    tree: Any
    kinds: tuple[str, ...]

    def forward(self, full: Arrays, diff: Sequence[Any], other: Sequence[Any]) -> tuple[list[Any], list[Any]]:
        """Return the outputs, and the residuals to save for the derivative."""
        inputs = [*jax.tree.leaves(full), *diff, *other]
        results = core.eval_jaxpr(self.jaxpr, self.consts, *inputs)
        residuals = zip(results[self.num_out :], self.kinds, strict=True)
        return results[: self.num_out], [value for value, kind in residuals if kind == "saved"]

    def fixed(self, diff: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        """Compute the residuals that are equal in every call; inputs that are not fixed may be None."""
        return self._part("fixed", [None] * self.num_weights + [*diff, *other])

    def backward(
        self, full: Arrays, saved: Sequence[Any], fixed: Sequence[Any], cotangents: Sequence[Any]
    ) -> tuple[Arrays, list[Any]]:
        """Return the gradients of the trainable weights and of `diff`."""
        num_rest = len(self.jaxpr.invars) - self.num_weights
        weights = self._part("weights", [*jax.tree.leaves(full), *[None] * num_rest])
        found = {"saved": iter(saved), "fixed": iter(fixed), "weights": iter(weights)}
        leaves = [next(found[kind]) for kind in self.kinds]
        return jax.tree.unflatten(self.tree, leaves)(cotangents)

    def _part(self, kind: str, inputs: Sequence[Any]) -> list[Any]:
        """Compute the residuals of one kind; inputs that these do not depend on may be None."""
        wanted = [False] * self.num_out + [other == kind for other in self.kinds]
        pairs = zip(self.jaxpr.invars, inputs, strict=True)
        values = [_zeros_like(var.aval) if value is None else value for var, value in pairs]
        return core.eval_jaxpr(keep_outputs(self.jaxpr, wanted), self.consts, *values)


def linearize(
    compute: Callable[..., list[Any]],
    full: Any,
    diff: Sequence[Any],
    other: Sequence[Any],
    *,
    trainable: frozenset[str],
    is_fixed: Sequence[bool] | None = None,
    is_live: Sequence[bool] | None = None,
) -> Linear:
    """Trace a computation and its derivative.

    Args:
      compute: `f(weights, diff, other) -> outputs`.
      full, diff, other: arrays, or shapes and dtypes; the derivative is with respect to `diff` and the trainable
        weights of `full`.
      is_fixed: which of `diff` and `other` are equal in every call; None: none.
      is_live: which outputs have cotangents; None: all.
    """
    num_out, tree = 0, None

    def forward(full: Arrays, diff: Sequence[Any], other: Sequence[Any]) -> list[Any]:
        nonlocal num_out, tree
        weights = {path: value for path, value in full.items() if path in trainable}

        def parted(weights: Arrays, diff: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            out = compute(full | weights, diff, other)
            return part([True] * len(out) if is_live is None else is_live, out)

        live, vjp, dead = jax.vjp(parted, weights, list(diff), has_aux=True)
        out = live if is_live is None else weave(is_live, live, dead)
        leaves, tree = jax.tree.flatten(vjp)
        num_out = len(out)
        return [*out, *leaves]

    closed = jax.make_jaxpr(forward)(full, list(diff), list(other))
    num_weights, num_rest = len(jax.tree.leaves(full)), len(diff) + len(other)
    varies = [True] * num_rest if is_fixed is None else [not fixed for fixed in is_fixed]
    by_rest = depends_on(closed.jaxpr, [False] * num_weights + [True] * num_rest)[num_out:]
    by_varying = depends_on(closed.jaxpr, [True] * num_weights + varies)[num_out:]
    pairs = zip(by_rest, by_varying, strict=True)
    kinds = ["weights" if not rest else "saved" if varying else "fixed" for rest, varying in pairs]
    return Linear(closed.jaxpr, closed.consts, num_weights, num_out, tree, tuple(kinds))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Residuals:
    shards: Arrays
    weights: Arrays | None
    saved: list[Any]
    linear: Linear = dataclasses.field(metadata={"static": True})


def _differentiable(compute: Callable[..., list[Any]], movement: Movement) -> Callable[..., Any]:
    @jax.custom_vjp
    def unit(shards: Arrays, diff: list[Any], other: list[Any]) -> list[Any]:
        return compute(movement.gather(shards), diff, other)

    def forward(shards: Arrays, diff: list[Any], other: list[Any]) -> tuple[list[Any], _Residuals]:
        full = movement.gather(shards)
        linear = linearize(compute, full, diff, other, trainable=movement.trainable)
        out, saved = linear.forward(full, diff, other)
        return out, _Residuals(shards, movement.keep and movement.keep(full), saved, linear)

    def backward(residuals: _Residuals, cotangents: list[Any]) -> tuple[Any, list[Any], None]:
        shards, weights, saved = jax.lax.optimization_barrier((residuals.shards, residuals.weights, residuals.saved))
        full = movement.gather(shards) if weights is None else movement.regather(weights)
        grads, grad_diff = residuals.linear.backward(full, saved, (), cotangents)
        return dict.fromkeys(shards) | movement.reduce(grads), grad_diff, None

    unit.defvjp(forward, backward)
    return unit


def _zeros_like(aval: Any) -> Any:
    if is_key(aval):
        return jnp.broadcast_to(jax.random.key(0), aval.shape)
    return jnp.zeros(aval.shape, aval.dtype)
