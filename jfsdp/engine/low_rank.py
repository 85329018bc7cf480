"""Calls of units with low-rank adapters: `x @ W` is computed as `x @ W + scale * (x @ A) @ B`.

[Note: adapters in a trace]
The user's code has no adapters. The call is traced unchanged, and then run with three arrays, W, A and B, in place of
each adapted weight. Operations that only move or cast a weight apply to all three (casts, transposes, reshapes, stated
shardings, calls, scans, remats). A matrix product with the weight becomes two. Any other operation that reads it is an
error that names the weight, since the result from W without its adapter would be wrong. W gets no derivative: the
product x^T @ d_y is never computed, which W + A @ B would need. A function with a custom derivative
(`jax.custom_vjp`), such as a loss that multiplies by the head in chunks, cannot be split: it gets the sum W + A @ B,
and A and B get their gradients from the gradient of the sum.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import jax.numpy as jnp

from jfsdp.engine.driver.program import eval_eqn, run_eqns
from jfsdp.jaxprs import has_own_derivative, scan_counts
from jfsdp.layout.codec import Codec
from jfsdp.layout.lora import LAYER as LAYERS
from jfsdp.layout.lora import MAGNITUDE, A, Adapter, B
from jfsdp.modules.adapted import decode_all, dropout_keys
from jfsdp.modules.model import UnitRun

# Kinds of a weight's dims: layers of a stack, input dims, output dims.
LAYER, IN, OUT = "layer", "in", "out"
_Run = Callable[[Sequence[Any]], list[Any]]  # runs an equation on inputs that are all arrays


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Adapted:
    """A weight with its adapter.

    Attributes:
      weight: [*dims], whose kinds are `kinds`.
      a: [*layer dims, *input dims, rank], in the weight's order.
      b: [*layer dims, rank, *output dims], in the weight's order.
      magnitude: [*layer dims, *output dims]; None without DoRA.
      key: [*layer dims], the keys for dropout masks of A's input; None without dropout.
    """

    weight: jax.Array
    a: jax.Array
    b: jax.Array
    magnitude: jax.Array | None
    key: jax.Array | None
    kinds: tuple[str, ...] = dataclasses.field(metadata={"static": True})
    adapter: Adapter = dataclasses.field(metadata={"static": True})

    def dims(self, *kinds: str) -> list[int]:
        return [dim for dim, kind in enumerate(self.kinds) if kind in kinds]

    def map(self, move: Callable[[jax.Array], jax.Array]) -> _Adapted:
        """Apply `move` to all arrays except the key."""
        return dataclasses.replace(jax.tree.map(move, dataclasses.replace(self, key=None)), key=self.key)

    def whole(self) -> jax.Array:
        """Return W + scale * A @ B in float32."""
        a, b = self.a.astype(jnp.float32), self.b.astype(jnp.float32)
        product = jnp.tensordot(a, b, 1)
        order = [*self.dims(IN), *self.dims(OUT)]
        back = sorted(range(len(order)), key=order.__getitem__)
        return self.weight.astype(jnp.float32) + self.adapter.scale * product.transpose(back)


def with_adapters(
    run: UnitRun, adapters: Mapping[str, Adapter], key_of: Callable[[Any], jax.Array | None] = lambda rest: None
) -> UnitRun:
    """Return a unit's call that computes with the adapters of its weights; see [Note: adapters in a trace].

    Cost:    two matrix products of size `rank` for each product with an adapted weight; no communication.

    Args:
      key_of: from `rest` to the key of dropout, if dropout applies; see [Note: masks of dropout] in adapted.py.

    Raises:
      ValueError: when it is traced, for a use of an adapted weight that is not a matrix product over its input dims.
    """

    def call(full: Any, rest: Any) -> Any:
        adapters_here = {path: adapters[path] for path in full if path in adapters}
        if not adapters_here:
            return run(full, rest)
        closed, shape = jax.make_jaxpr(run, return_shape=True)(full, rest)
        key = key_of(rest)
        adapted = {path: _adapted(one, full, key) for path, one in adapters_here.items()}
        values = jax.tree.leaves(({**full, **adapted}, rest), is_leaf=_is_adapted)
        outs = _eval(closed.jaxpr, closed.consts, values)
        for out in filter(_is_adapted, outs[: len(jax.tree.leaves(shape[:2]))]):
            _refuse(out, "returns it from its unit's call")
        outs = [out.weight if _is_adapted(out) else out for out in outs]
        return jax.tree.unflatten(jax.tree.structure(shape), outs)

    return call


def decoded(run: UnitRun, codecs: Mapping[str, Codec]) -> UnitRun:
    """Return a unit's call that decodes the gathered codes of its weights.

    Memory:  the decoded weights of the unit, while they are used.
    """
    return (lambda full, rest: run(decode_all(codecs, full), rest)) if codecs else run


def _adapted(one: Adapter, full: Mapping[str, jax.Array], key: jax.Array | None) -> _Adapted:
    weight = full[one.path]
    layers = one.stacked - (len(one.shape) - weight.ndim)
    kinds = (LAYER,) * layers + (IN,) * one.num_in + (OUT,) * (weight.ndim - layers - one.num_in)
    magnitude = full[one.name(MAGNITUDE)] if one.has_magnitude else None
    keys = dropout_keys(key, one, full[one.name(LAYERS)]) if one.dropout and key is not None else None
    return _Adapted(weight, full[one.name(A)], full[one.name(B)], magnitude, keys, kinds, one)


def _is_adapted(value: Any) -> bool:
    return isinstance(value, _Adapted)


def _eval(jaxpr: Any, consts: Sequence[Any], values: Sequence[Any]) -> list[Any]:
    """Run a jaxpr on arrays and adapted weights."""

    def run(eqn: Any, inputs: list[Any]) -> list[Any]:
        plain = functools.partial(eval_eqn, jaxpr, eqn)
        return _eval_adapted(eqn, inputs, plain) if any(map(_is_adapted, inputs)) else plain(inputs)

    return run_eqns(jaxpr, consts, values, run)


def _eval_adapted(eqn: Any, inputs: Sequence[Any], run: _Run) -> list[Any]:
    """Run an equation with adapted weights among its inputs."""
    name = eqn.primitive.name
    if name == "dot_general":
        return [_dot_general(eqn, inputs, run)]
    if name in _RULES:
        return _RULES[name](eqn, inputs)
    if has_own_derivative(eqn):
        return run([_summed(x) if _is_adapted(x) else x for x in inputs])
    one = next(x.adapter for x in inputs if _is_adapted(x))
    raise ValueError(
        f"{one.path}: has an adapter, and the model reads it with {name}: adapters support only matrix "
        "products; leave this leaf out of the LoRA's targets"
    )


def _summed(x: _Adapted) -> jax.Array:
    """Return the sum of a weight and its adapter, for a function with a custom derivative.

    Memory:  the sum, and its gradient.
    """
    where = "reads it in a function with a custom derivative (jax.custom_vjp)"
    if x.key is not None:
        raise ValueError(
            f"{x.adapter.path}: has an adapter with dropout, and the model {where}, where dropout cannot be applied to "
            "A's input; give this leaf a LoRA with dropout=0, or leave it out of the targets"
        )
    if LAYER in x.kinds:
        _refuse(x, f"{where} including its layer dims")
    whole = x.whole()
    if x.magnitude is not None:
        whole *= jnp.expand_dims(_gain(x), x.dims(IN))
    return whole.astype(x.weight.dtype)


def _same(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Apply an operation that changes no element to all three arrays."""
    return [x.map(lambda part: eqn.primitive.bind(part, **eqn.params)) for x in inputs]


def _barrier(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    plain = [dataclasses.replace(x, key=None) if _is_adapted(x) else x for x in inputs]
    outs = jax.lax.optimization_barrier(plain)
    return [dataclasses.replace(new, key=x.key) if _is_adapted(x) else new for x, new in zip(inputs, outs, strict=True)]


def _cast(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    dtype = eqn.params["new_dtype"]
    if not jnp.issubdtype(dtype, jnp.floating):
        _refuse(inputs[0], f"casts it to {dtype}")
    return [inputs[0].map(lambda part: part.astype(dtype))]


def _stated(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    """Apply a sharding constraint to the weight; the shardings of A and B follow from their uses."""
    (x,) = inputs
    return [dataclasses.replace(x, weight=eqn.primitive.bind(x.weight, **eqn.params))]


def _transpose(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    (x,), order = inputs, eqn.params["permutation"]

    def move(part: jax.Array, *kinds: str) -> jax.Array:
        """Reorder a part's dims, the dims of `kinds` in the weight's order, and keep the position of the rank dim."""
        before = x.dims(*kinds)
        after = [before.index(dim) for dim in order if dim in before]
        if part.ndim == len(before):
            return part.transpose(after)
        rank = part.ndim - 1 if IN in kinds else len(x.dims(LAYER))
        places = [at if at < rank else at + 1 for at in after]
        return part.transpose([*places[:rank], rank, *places[rank:]])

    layers = len(x.dims(LAYER))
    if tuple(order[:layers]) != tuple(range(layers)):
        _refuse(x, "transposes its layer dims")
    kinds = tuple(x.kinds[dim] for dim in order)
    magnitude = None if x.magnitude is None else move(x.magnitude, LAYER, OUT)
    weight, a, b = x.weight.transpose(order), move(x.a, LAYER, IN), move(x.b, LAYER, OUT)
    return [dataclasses.replace(x, weight=weight, a=a, b=b, magnitude=magnitude, kinds=kinds)]


def _reshape(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    (x,), new = inputs, tuple(eqn.params["new_sizes"])
    kinds = _kinds_of(x.weight.shape, x.kinds, new)
    if kinds is None or LAYER in (*x.kinds, *kinds):
        _refuse(x, f"reshapes it from {list(x.weight.shape)} to {list(new)}, across its input and output dims")
    ins, outs = ([size for size, kind in zip(new, kinds, strict=True) if kind == which] for which in (IN, OUT))
    magnitude = None if x.magnitude is None else x.magnitude.reshape(outs)
    a, b = x.a.reshape(*ins, -1), x.b.reshape(-1, *outs)
    return [dataclasses.replace(x, weight=x.weight.reshape(new), a=a, b=b, magnitude=magnitude, kinds=kinds)]


def _kinds_of(old: Sequence[int], kinds: Sequence[str], new: Sequence[int]) -> tuple[str, ...] | None:
    """Return the kinds of the dims of a reshaped weight; None if dims of several kinds are merged."""
    found: list[str] = []
    start, sizes = 0, list(new)
    for kind, run in itertools.groupby(zip(kinds, old, strict=True), key=lambda pair: pair[0]):
        wanted, have, first = math.prod(size for _, size in run), 1, start
        while start < len(sizes) and (have < wanted or start == first):  # a 1 between two kinds belongs to the second
            have *= sizes[start]
            found.append(kind)
            start += 1
        if have != wanted:
            return None
    return (*found, *found[-1:] * (len(sizes) - start))  # the rest are 1s


def _dot_general(eqn: Any, inputs: Sequence[Any], run: _Run) -> jax.Array:
    """Compute `x . W` and `x . A . B` over the input dims, or `x . W^T` and its adapter over the output dims.

    Stacks of matrices are multiplied by stacks of inputs: their dims are batch dims of all products.
    """
    left, right = inputs
    (contracting, batch), is_left = eqn.params["dimension_numbers"], _is_adapted(left)
    if _is_adapted(left) and _is_adapted(right):
        _refuse(left, "multiplies it by another adapted weight")
    weight, x = (left, right) if is_left else (right, left)
    of_weight, of_x = (contracting[0], contracting[1]) if is_left else (contracting[1], contracting[0])
    over = {kind for kind in (IN, OUT) if sorted(of_weight) == weight.dims(kind)}
    stack, of_stack = (batch[0], batch[1]) if is_left else (batch[1], batch[0])
    num, stacks = len(stack), tuple(range(len(stack)))
    if not over or list(stack) != weight.dims(LAYER):
        kinds = ", ".join(f"{size} ({kind})" for size, kind in zip(weight.weight.shape, weight.kinds, strict=True))
        _refuse(
            weight,
            f"multiplies it over dims {tuple(of_weight)} of [{kinds}], which are neither all input dims nor all "
            "output dims",
        )
    is_forward = over == {IN}
    if not is_forward and (weight.magnitude is not None or weight.key is not None):
        what = "dropout" if weight.magnitude is None else "DoRA"
        _refuse(weight, f"multiplies it over its output dims, for which {what} is not defined")
    first, second = (weight.a, weight.b) if is_forward else (weight.b, weight.a)
    # The parts have the contracted dims in the weight's order, x in the order of the product.
    order = [dim for _, dim in sorted(zip(of_weight, of_x, strict=True))]
    places = [num + place + (not is_forward) for place in range(len(order))]
    seen = x if weight.key is None else _dropped(x, weight.key, weight.adapter.dropout)
    with jax.named_scope("adapter"):
        precision = eqn.params["precision"]
        inner = jax.lax.dot_general(seen, first, ((order, places), (of_stack, stacks)), precision=precision)
        rank = num if is_forward else second.ndim - 1
        both = ([inner.ndim - 1], [rank]), (stacks, stacks)
        low = jax.lax.dot_general(inner, second, both, precision=precision)
    free = len(weight.weight.shape) - len(of_weight) - num
    if is_left:
        low = jnp.moveaxis(low, range(low.ndim - free, low.ndim), range(num, num + free))

    def product(x: Any) -> jax.Array:
        return run([weight.weight, x] if is_left else [x, weight.weight])[0]

    plain = product(x)
    low = (weight.adapter.scale * low).astype(plain.dtype)
    if weight.magnitude is None:
        return plain + low
    gain = _gain(weight).astype(plain.dtype)
    gain = gain.reshape(*gain.shape, *[1] * (plain.ndim - free)) if is_left else gain
    # As in the authors' code, DoRA's correction uses the dropped input, the weight's product the input without dropout.
    return gain * (plain + low) if weight.key is None else plain + (gain - 1) * product(seen) + gain * low


def _dropped(x: jax.Array, key: jax.Array, dropout: float) -> jax.Array:
    """Return an input after dropout: some elements are zero, and the others are scaled so that the mean stays."""
    keep = 1 - dropout
    return jnp.where(jax.random.bernoulli(key, keep, x.shape), x / keep, 0).astype(x.dtype)


def _gain(x: _Adapted) -> jax.Array:
    """Return DoRA's factor of each output: its magnitude over the column's norm, which gets no derivative."""
    norms = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(jnp.square(x.whole()), x.dims(IN))))
    assert x.magnitude is not None
    return x.magnitude.astype(jnp.float32) / norms


def _call(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    inner = next(eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
    return _eval(*_opened(inner), inputs)


def _remat(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    body = functools.partial(_eval, *_opened(eqn.params["jaxpr"]))
    run = jax.checkpoint(lambda *args: body(args), prevent_cse=eqn.params["prevent_cse"], policy=eqn.params["policy"])
    return run(*inputs)


def _cond(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    index, *values = inputs
    branches = [functools.partial(_eval, *_opened(branch)) for branch in eqn.params["branches"]]
    return jax.lax.switch(index, [lambda *values, run=run: run(values) for run in branches], *values)


def _scan(eqn: Any, inputs: Sequence[Any]) -> list[Any]:
    num_consts, num_carry = scan_counts(eqn)
    consts, carry = inputs[:num_consts], inputs[num_consts : num_consts + num_carry]
    body = functools.partial(_eval, *_opened(eqn.params["jaxpr"]))
    for x in filter(_is_adapted, inputs[num_consts + num_carry :]):
        if x.kinds[0] != LAYER:
            _refuse(x, "scans over its first dim; if that is a layer dim, make its module a unit with stacked=1")

    def step(carry: Any, xs: Any) -> Any:
        outs = body([*consts, *carry, *map(_without_layer, xs)])
        return tuple(outs[:num_carry]), tuple(map(_with_layer, outs[num_carry:]))

    options = {name: eqn.params[name] for name in ("length", "reverse", "unroll")}
    carry, ys = jax.lax.scan(step, tuple(carry), tuple(inputs[num_consts + num_carry :]), **options)
    return [*carry, *ys]


def _without_layer(x: Any) -> Any:
    """Drop the first kind of a weight, since a scan has removed the first dim of its arrays."""
    return dataclasses.replace(x, kinds=x.kinds[1:]) if _is_adapted(x) else x


def _with_layer(x: Any) -> Any:
    return dataclasses.replace(x, kinds=(LAYER, *x.kinds)) if _is_adapted(x) else x


def _opened(jaxpr: Any) -> tuple[Any, Sequence[Any]]:
    return (jaxpr.jaxpr, jaxpr.consts) if hasattr(jaxpr, "consts") else (jaxpr, ())


def _refuse(x: _Adapted, what: str) -> NoReturn:
    raise ValueError(
        f"{x.adapter.path}: has an adapter, and the model {what}; set how many of its dims take the input with "
        f"targets={{{x.adapter.path!r}: n}} (now {x.adapter.num_in}), or leave this leaf out of the LoRA's targets"
    )


_RULES: dict[str, Callable[[Any, Sequence[Any]], list[Any]]] = {
    **dict.fromkeys(("copy", "copy_p", "name", "pvary", "pcast", "stop_gradient"), _same),
    **dict.fromkeys(("jit", "pjit", "closed_call", "core_call"), _call),
    **dict.fromkeys(("checkpoint", "remat", "remat2"), _remat),
    "optimization_barrier": _barrier,
    "convert_element_type": _cast,
    "sharding_constraint": _stated,
    "transpose": _transpose,
    "reshape": _reshape,
    "cond": _cond,
    "scan": _scan,
}
