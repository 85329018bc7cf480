"""Mixture of experts: tokens sorted by expert into places, batched products, and all-to-alls over mesh axis `expert`.

[Note: where experts are]
Axis `expert` is a data axis, which splits the rows of a batch as `fsdp` does. It also cuts the weights of experts along
their first dim E: a device has the experts E/X of its place, for rows of all X devices of the axis. In a step of
program `manual` the axis is manual, and weights of experts are `[E/X ...]`: `experts` sends the tokens to the devices
of their experts and brings the results back. In all other traces (program `xla`, `forward`, `init`) rows and experts
are whole, and XLA partitions the batched products. Without the axis, or with size 1, nothing is sent.

[Note: places]
Each expert has C places for each row, and a row's tokens take the places of an expert in the order of the tokens. So
the dropped copies depend on no other row, on no later token, and not on the number of devices. A row is GShard's group
(arXiv 2006.16668). Each token is copied to k places by a gather, and k results are summed by a gather: each is the
transpose of the other, so neither direction has a scatter of values. The weight of a copy is applied before the result
is sent back, so that a backward needs no result of an expert again: with "expert_tokens" and "expert_places" saved
(`jfsdp.SaveNames`), remat repeats no all-to-all.

[Note: copies or tokens]
An all-to-all of copies sends `capacity * k` times a token, of which (X - 1)/X leave the device. Sending all tokens to
all devices of the axis, and summing what their experts return, sends each token X - 1 times: less if
`capacity * k` exceeds X, as with many experts per token on few devices.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from jfsdp.arguments import checked, did_you_mean
from jfsdp.context.rows import axes_here
from jfsdp.layout.mesh import CONTEXT, DATA_AXES, EXPERT, axes_of, num_contexts

SCOPE = "jfsdp.experts"  # in the names of operations around the products
SUMMED = "jfsdp_sum_over_devices"  # name of the calls of `sum_over_devices` in a trace
TOKENS, PLACES = "expert_tokens", "expert_places"  # names for remat policies


class Routing(NamedTuple):
    """What `experts` returns besides its result.

    `counts` and `load` are of a microbatch on all devices: report them as `jfsdp.Max`. `balance`, `z` and `dropped` are
    of the rows that the model receives.

    Attributes:
      balance: [B T] float32, the balance loss of each token, whose mean over tokens is 1 with equal loads (Switch
        Transformer, arXiv 2101.03961, equation 4, with the share of all k choices): add it, times a coefficient, to the
        loss of the token. The shares of the experts are those of a microbatch's tokens on all devices, and have no
        derivative.
      z: [B T] float32, the z-loss of each token: the square of the router's logsumexp (ST-MoE, arXiv 2202.08906).
      counts: [E] int32, the number of copies that chose each expert, in a microbatch on all devices. The model's
        state may depend on it, such as a bias that balances loads (`bias += rate * jnp.sign(counts.mean() - counts)`).
      dropped: scalar float32, the number of copies without a place, of the rows that the model receives.
      load: scalar float32, the copies of the fullest expert divided by the mean, in a microbatch on all devices.
    """

    balance: jax.Array
    z: jax.Array
    counts: jax.Array
    dropped: jax.Array
    load: jax.Array


@checked
def experts(
    x: Any,
    router_logits: Any,
    ffn: Callable[[jax.Array], jax.Array],
    *,
    k: int,
    capacity: float | None = None,
    score: str = "softmax",
    normalize: bool = True,
    bias: Any = None,
    mask: Any = None,
    parts: int = 1,
    send: str = "copies",
) -> tuple[jax.Array, Routing]:
    """Compute each token by its k experts, and sum the results by the router's weights.

    The weights of the experts must be stacked along their first dim, and be cut over mesh axis `expert` if it is larger
    than 1: `placements={"**.experts.*": PartitionSpec("expert")}`.

    Layout:  x [B T D], router_logits [B T E] -> [B T D]
    Dtype:   of `x`; scores and losses float32 or wider, sums over the k copies float32 inside.
    Cost:    with axis `expert` of size X, two all-to-alls of `E C B D` elements, and one of `E C B` weights; in a
             backward as many, and with remat those that it repeats. One all-reduce of E numbers over all devices. With
             `send="tokens"` an all-gather and a reduce-scatter of `X B T D` elements instead.
    Memory:  copies `[E/X, X B C, D]` and what `ffn` makes of them, where C is `capacity * T k / E`, rounded up.

    Args:
      router_logits: float32 or wider: compute the router's product in float32.
      ffn: `f(y [E/X N D]) -> [E/X N D]`, the experts' computation by batched products with weights of a first dim E/X,
        such as `jnp.einsum("end,edf->enf", y, w)`. It must compute rows of y independently of each other. Empty places
        are zeros, and their results are not used.
      k: number of experts of a token.
      capacity: places per expert and row, divided by `T k / E`, the number of copies with equal loads; at least 1.
        Copies beyond it are dropped: they add nothing to the result. None: T places, so that none is dropped, at E/k
        times the products of capacity 1.
      score: "softmax" or "sigmoid", the router's scores, of which the k highest are chosen.
      normalize: whether to divide the chosen scores by their sum.
      bias: [E], added to scores where experts are chosen, and not to weights (DeepSeek-V3, arXiv 2412.19437).
      mask: [B T] bool, tokens that take no place and count nowhere if False; their results are 0.
      parts: number of equal parts of the places, whose all-to-alls can run during the products of others. C is rounded
        up to a multiple.
      send: "copies" or "tokens", the values sent over axis `expert`; see [Note: copies or tokens]. With "tokens", sums
        over the axis are in the dtype of `x`.

    Raises:
      TypeError: for router logits below float32.
      ValueError: for shapes that do not belong together, k above E, a capacity below 1, E that axis `expert` does not
        divide, and a capacity where axis `context` splits rows.
    """
    _check_rows(x, router_logits, bias, mask)
    _check_numbers(router_logits.shape[-1], k, capacity, parts)
    for name, value, known in (("score", score, ("softmax", "sigmoid")), ("send", send, ("copies", "tokens"))):
        if value not in known:
            raise ValueError(f"experts: {name}={value!r}{did_you_mean(value, known)} must be {' or '.join(known)}")
    logits, num, axes = jnp.asarray(router_logits), router_logits.shape[-1], axes_here((EXPERT,), is_manual=True)
    scores = jax.nn.softmax(logits, -1) if score == "softmax" else jax.nn.sigmoid(logits)
    _, chosen = jax.lax.top_k(jax.lax.stop_gradient(scores if bias is None else scores + bias), k)
    weights = jnp.take_along_axis(scores, chosen, -1)
    tiny = jnp.finfo(scores.dtype).tiny  # all sigmoids may underflow
    if normalize:
        weights = weights / (jnp.sum(weights, -1, keepdims=True) + tiny)
    num_tokens = x.shape[1]
    places = num_tokens if capacity is None else min(math.ceil(capacity * num_tokens * k / num), num_tokens)
    places += -places % parts
    chosen = chosen if mask is None else jnp.where(mask[..., None], chosen, num)
    with jax.named_scope(SCOPE):
        slot, copy, counts = _places(chosen.reshape(x.shape[0], -1), num, places)
        slot, copy = (checkpoint_name(found, PLACES) for found in (slot, copy))
        shares = _dispatch(weights.reshape(x.shape[0], -1, 1).astype(x.dtype), slot, copy, 1)
        shares = shares.reshape(x.shape[0], num, places, 1)
    if send == "tokens" and axes:
        if parts > 1:
            raise ValueError(f"experts: parts={parts} splits places that are sent; with send='tokens' none are: use 1")
        y = _by_tokens(ffn, axes, jnp.asarray(x), shares, slot, copy, k)
    else:
        with jax.named_scope(SCOPE):
            copies = _dispatch(jnp.asarray(x), slot, copy, k).reshape(x.shape[0], num, places, -1)
        moved = zip(jnp.split(copies, parts, 2), jnp.split(shares, parts, 2), strict=True)
        y = jnp.concatenate([_at_experts(ffn, axes, *part) for part in moved], 2)
        with jax.named_scope(SCOPE):
            y = _collect(y.reshape(x.shape[0], num * places, -1), slot, copy, k)
    total = checkpoint_name(sum_over_devices(jnp.sum(counts, 0)), PLACES)
    share = total.astype(scores.dtype) / jnp.maximum(jnp.sum(total), 1)
    likely = scores / (jnp.sum(scores, -1, keepdims=True) + tiny)
    balance, z = num * (likely @ share), jax.nn.logsumexp(logits, -1) ** 2
    if mask is not None:
        balance, z = (jnp.where(mask, loss, 0.0) for loss in (balance, z))
    dropped = jnp.sum(jnp.maximum(counts - places, 0)).astype(jnp.float32)
    return y, Routing(balance, z, total, dropped, (jnp.max(share) * num).astype(jnp.float32))


def _check_rows(x: Any, logits: Any, bias: Any, mask: Any) -> None:
    """Check shapes and dtypes; see `experts`."""
    if x.ndim != 3 or logits.ndim != 3 or x.shape[:2] != logits.shape[:2]:
        raise ValueError(
            f"experts: x has shape {x.shape} and router_logits {logits.shape}; pass x [B T D] and router_logits [B T E]"
        )
    if not jnp.issubdtype(logits.dtype, jnp.floating) or jnp.finfo(logits.dtype).bits < 32:
        raise TypeError(
            f"experts: router_logits has dtype {logits.dtype}, in which experts with close scores change places; "
            "compute the router's product in float32: x.astype(jnp.float32) @ kernel.astype(jnp.float32), or a layer's "
            "dtype=jnp.float32"
        )
    for name, value, shape in (("bias", bias, logits.shape[-1:]), ("mask", mask, x.shape[:2])):
        if value is not None and jnp.shape(value) != shape:
            raise ValueError(f"experts: {name} has shape {jnp.shape(value)} instead of {shape}")
    if mask is not None and not jnp.issubdtype(jnp.result_type(mask), bool):
        raise TypeError(f"experts: mask has dtype {jnp.result_type(mask)} instead of bool; pass weights > 0")


def _check_numbers(num: int, k: int, capacity: float | None, parts: int) -> None:
    """Check numbers for this many experts, on the mesh of the trace; see `experts`."""
    mesh = jax.sharding.get_abstract_mesh()
    if not 1 <= k <= num:
        raise ValueError(f"experts: k={k} experts of a token must be 1 to {num}, the number of experts")
    if capacity is not None and not 1 <= capacity < math.inf:
        raise ValueError(
            f"experts: capacity={capacity} must be at least 1: below, copies are dropped even with equal loads; 1.25 "
            "is usual, and None drops nothing"
        )
    if parts < 1:
        raise ValueError(f"experts: parts={parts} must be at least 1")
    if capacity is not None and num_contexts(mesh) > 1:
        raise ValueError(
            f"experts: capacity={capacity} counts places in whole rows, which mesh axis {CONTEXT!r} splits; pass "
            "capacity=None, or give the axis' devices to 'fsdp' or 'expert'"
        )
    size = math.prod(mesh.shape[axis] for axis in axes_of(mesh, (EXPERT,)))
    if num % size:
        fits = [n for n in range(1, num + 1) if num % n == 0]
        raise ValueError(
            f"experts: mesh axis {EXPERT!r} (size {size}) does not divide {num} experts; use one of {fits}"
        )


_Ffn = Callable[[jax.Array], jax.Array]


def _at_experts(ffn: _Ffn, axes: tuple[str, ...], copies: jax.Array, shares: jax.Array) -> jax.Array:
    """Compute copies at their experts. Layout: [B E C D], [B E C 1] -> [B E C D]."""
    rows, num, places, _ = copies.shape
    with jax.named_scope(SCOPE):
        flat = (jnp.moveaxis(x, 0, 1).reshape(num, rows * places, -1) for x in (copies, shares))
        copies, shares = (checkpoint_name(_send(axes, x), TOKENS) for x in flat)
    y = _weighted(ffn, copies, shares)
    with jax.named_scope(SCOPE):
        y = jax.lax.all_to_all(y, axes, 1, 0, tiled=True) if axes else y
        return jnp.moveaxis(y.reshape(num, rows, places, -1), 1, 0)


def _send(axes: tuple[str, ...], x: jax.Array) -> jax.Array:
    """Bring values to the devices of their experts. Layout: [E N ..] -> [E/X X*N ..]; [E N ..] where XLA splits E."""
    if axes:
        return jax.lax.all_to_all(x, axes, 0, 1, tiled=True)
    auto = axes_here((EXPERT,), is_manual=False)
    free = [PartitionSpec.UNCONSTRAINED] * (x.ndim - 1)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(auto, *free)) if auto else x


def _weighted(ffn: _Ffn, copies: jax.Array, shares: jax.Array) -> jax.Array:
    here = (
        f". Mesh axis {EXPERT!r} gives a device {len(copies)} experts here: cut all their weights over it, biases too "
        "(placements={'**.experts.**': PartitionSpec('expert')}), and take their number from y.shape[0]"
    ) * bool(axes_here((EXPERT,), is_manual=True))
    try:
        y = ffn(copies)
    except (TypeError, ValueError) as error:
        raise ValueError(f"experts: ffn failed for y of shape {copies.shape}: {error}{here}") from error
    if y.ndim != 3 or y.shape[:2] != copies.shape[:2]:
        raise ValueError(
            f"experts: ffn returned shape {y.shape} for y of shape {copies.shape}; return [E N D], a row for each "
            f"row{here}"
        )
    return y * shares


def _by_tokens(
    ffn: _Ffn, axes: tuple[str, ...], x: jax.Array, shares: jax.Array, slot: jax.Array, copy: jax.Array, k: int
) -> jax.Array:
    """Compute all tokens of axis `expert` by the experts of each device, and sum; see [Note: copies or tokens].

    Layout:  x [B T D], shares [B E C 1], slot [B T*k], copy [B E*C] -> [B T D]
    """
    rows, num, places, _ = shares.shape
    with jax.named_scope(SCOPE):
        x = checkpoint_name(jax.lax.all_gather(x, axes, axis=0, tiled=True), TOKENS)
        shares = checkpoint_name(_send(axes, jnp.moveaxis(shares, 0, 1).reshape(num, rows * places, 1)), TOKENS)
        copy = jax.lax.all_to_all(copy.reshape(rows, num, places), axes, 1, 0, tiled=True)  # [X*B E/X C]
        own = copy.shape[1] * places
        slot = jax.lax.all_gather(slot, axes, axis=0, tiled=True) - jax.lax.axis_index(axes) * own
        slot, copy = jnp.where((slot >= 0) & (slot < own), slot, own), copy.reshape(len(copy), -1)
        slot, copy = (checkpoint_name(found, PLACES) for found in (slot, copy))
        copies = _dispatch(x, slot, copy, k).reshape(len(x), -1, places, x.shape[-1])
        copies = jnp.moveaxis(copies, 0, 1).reshape(copies.shape[1], -1, x.shape[-1])
    y = _weighted(ffn, copies, shares)
    with jax.named_scope(SCOPE):
        y = jnp.moveaxis(y.reshape(len(y), len(x), places, -1), 1, 0).reshape(len(x), own, -1)
        return jax.lax.psum_scatter(_collect(y, slot, copy, k), axes, scatter_dimension=0, tiled=True)


def _places(chosen: jax.Array, num: int, places: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Give copies their places, in order; see [Note: places]. Layout: [B N] -> [B N], [B E*C], [B E] int32.

    Args:
      chosen: the expert of each copy; `num` for none.

    Returns:
      The place of each copy (E*C: none), the copy at each place (N: none), and the number of copies of each expert.
    """
    rows, size = chosen.shape
    order = jnp.argsort(chosen, axis=1, stable=True)
    counts = jnp.sum(chosen[..., None] == jnp.arange(num, dtype=chosen.dtype), 1, dtype=jnp.int32)
    starts = jnp.cumsum(counts, 1) - counts
    place = jnp.arange(places)
    taken = jnp.take_along_axis(order, (starts[..., None] + place).reshape(rows, -1), 1, mode="clip")
    copy = jnp.where((place < counts[..., None]).reshape(rows, -1), taken, size)
    expert = jnp.take_along_axis(chosen, order, 1)
    rank = jnp.arange(size) - jnp.take_along_axis(starts, expert, 1, mode="clip")
    sorted_slot = jnp.where((rank < places) & (expert < num), expert * places + rank, num * places)
    scatter = jax.vmap(lambda at, slot: jnp.zeros(size, slot.dtype).at[at].set(slot, unique_indices=True))
    return scatter(order, sorted_slot), copy, counts


def _rows(x: jax.Array, index: jax.Array) -> jax.Array:
    """Return rows by index, and zeros for an index that is out of bounds. Layout: [B M D], [B N] -> [B N D]."""
    return jnp.take_along_axis(x, index[..., None], axis=1, mode="fill", fill_value=0)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _dispatch(x: jax.Array, slot: jax.Array, copy: jax.Array, k: int) -> jax.Array:
    """Copy tokens to places. Layout: [B M D] -> [B E*C D], for copies n of tokens n // k."""
    return _rows(x, copy // k)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def _collect(y: jax.Array, slot: jax.Array, copy: jax.Array, k: int) -> jax.Array:
    """Sum the copies of tokens at their places; the transpose of `_dispatch`. Layout: [B E*C D] -> [B M D]."""
    copies = _rows(y, slot).reshape(y.shape[0], -1, k, y.shape[-1])
    return jnp.sum(copies, 2, dtype=jnp.promote_types(y.dtype, jnp.float32)).astype(y.dtype)


def _forward(move: Callable[..., jax.Array], x: jax.Array, slot: jax.Array, copy: jax.Array, k: int) -> Any:
    return move(x, slot, copy, k), (slot, copy)


def _backward(move: Callable[..., jax.Array], k: int, places: Any, grad: jax.Array) -> Any:
    return move(grad, *places, k), None, None


_dispatch.defvjp(functools.partial(_forward, _dispatch), functools.partial(_backward, _collect))
_collect.defvjp(functools.partial(_forward, _collect), functools.partial(_backward, _dispatch))


@checked
def sum_over_devices(x: Any) -> jax.Array:
    """Sum a value of a microbatch's rows over all devices that have some of them, in both programs.

    In program `manual` a model sees the rows of one device. Its state, such as a bias that counts tokens, must be equal
    on all devices: it may depend on rows through such sums only. A loss with such sums is no longer a sum over
    microbatches.

    Layout:  any -> the same shape
    Cost:    an all-reduce over the data axes in a step of program `manual`, and of the gradient, if it has one.

    Args:
      x: a sum over the rows that the model receives. Not a mean: divide two sums afterwards.
    """
    axes = axes_here(DATA_AXES, is_manual=True)

    def total(x: jax.Array) -> jax.Array:
        return jax.lax.psum(x, axes) if axes else x

    total.__name__ = SUMMED
    return jax.jit(total)(x)
