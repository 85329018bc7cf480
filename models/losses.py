"""Losses of the models as sums, for next tokens and classes, and the shapes of their batches."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from .elementwise import soft_cap
from .over_tensor import context_axes, token_parts


class LossSums(NamedTuple):
    """Sums over tokens or images, which are added over devices and microbatches and divided once: `total / weight`.

    Scalars, or [B] with one sum per row.
    """

    total: jax.Array
    weight: jax.Array
    aux: dict[str, Any]


class Share(NamedTuple):
    """A metric: sums over rows, divided once over all devices and microbatches."""

    total: jax.Array
    weight: jax.Array


class Largest(NamedTuple):
    """A metric: the maximum over all devices and microbatches."""

    maximum: jax.Array


def next_token_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array], **options: Any) -> LossSums:
    """Sum the weighted cross entropy of `targets`. Needs no communication.

    Layout:  tokens, targets [B T] int32 -> scalars
    Dtype:   float32, for logits of any dtype.

    Args:
      model: called as `model(tokens, segment_ids=..., positions=..., **options)`.
      batch: `tokens` and `targets`; optional `weights` `[B T]` float32 (default: 1, but 0 where `segment_ids` is 0),
        `segment_ids`, `positions`. Targets are not shifted here, and a target in the next document counts unless its
        weight is 0. A target outside the vocabulary, such as -100, makes the loss NaN unless its weight is 0.
      options: passed to the model, such as `deterministic=False`.

    Returns:
      `total` and `weight`, and in `aux` `correct`: the weight of the tokens whose highest logit is the target.
    """
    logits = model(batch["tokens"], segment_ids=batch.get("segment_ids"), positions=batch.get("positions"), **options)
    return cross_entropy(logits, batch["targets"], token_weights(batch))


def loss_of_model(model: Callable[..., LossSums], batch: Mapping[str, jax.Array], **options: Any) -> LossSums:
    """Sum the losses of `targets` inside the model, so that logits of whole rows never exist; see `head_loss`.

    Args: as `next_token_loss`; the model also receives `targets` and `weights`. With `by_row=True` the sums are [B].
    """
    names = ("segment_ids", "positions", "targets")
    given = {name: batch.get(name) for name in names}
    return model(batch["tokens"], weights=token_weights(batch), **given, **options)


def loss_of_tokens(model: Callable[..., LossSums], batch: Mapping[str, jax.Array], **options: Any) -> LossSums:
    """Return `loss_of_model` without the losses of routers, for evaluation."""
    sums = loss_of_model(model, batch, **options)
    return sums._replace(total=sums.total - sums.aux["router_loss"])


def token_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return the weight of each target: `weights` of the batch, else 1, and 0 for padding. Layout: [B T]."""
    if (weights := batch.get("weights")) is not None:
        return weights
    segment_ids = batch.get("segment_ids")
    return jnp.ones(batch["targets"].shape) if segment_ids is None else segment_ids != 0


def classification_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> LossSums:
    """Sum the weighted cross entropy of `labels`. Needs no communication.

    Layout:  images [B H W C], labels [B] int32 -> scalars
    Dtype:   float32, for logits of any dtype.

    Args:
      model: called as `model(images)`; returns logits `[B K]`.
      batch: `images` and `labels`; optional `weights` `[B]` float32 (default: 1). A label outside the classes makes the
        loss NaN unless its weight is 0.

    Returns:
      `total` and `weight`, and in `aux` `correct`: the weight of the images whose highest logit is the label.
    """
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones(batch["labels"].shape)
    return cross_entropy(model(batch["images"]), batch["labels"], weights)


def cross_entropy(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> LossSums:
    """Sum the weighted negative log likelihood of labels, and the weights of labels with the highest logit.

    Layout:  [... K], [...] int, [...] -> scalars
    Dtype:   float32 inside and out.

    Raises:
      ValueError: for labels or weights of another shape; broadcast weights would be counted once.
    """
    _check_shapes(logits.shape[:-1], labels, weights)
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)
    losses, correct, _ = _each(logits, labels, weights)
    return LossSums(
        total=jnp.sum(weights * losses),
        weight=jnp.sum(weights),
        aux={"correct": jnp.sum(weights * correct)},
    )


def _check_shapes(rows: tuple[int, ...], labels: Any, weights: Any) -> None:
    for name, value in (("labels", labels), ("weights", weights)):
        shape = getattr(value, "shape", ())
        if shape != rows:
            raise ValueError(f"{name} of shape {shape} must have shape {rows}; pass one per token or row")


def _each(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return for each label its loss, whether it has the highest logit, and the log of the softmax's denominator.

    The loss of a label outside the classes, also of a negative one, is NaN: an index from the end would be another
    class. With weight 0 the loss is 0 for any label.
    """
    inside = jnp.where(labels < 0, logits.shape[-1], labels)
    norm = jax.nn.logsumexp(logits, axis=-1)
    losses = norm - jnp.take_along_axis(logits, inside[..., None], axis=-1, mode="fill")[..., 0]
    return jnp.where(weights == 0, 0.0, losses), jnp.argmax(logits, axis=-1) == labels, norm


# [Note: a loss without logits]
# Logits are the largest array of a language model: [T V] in float32 is 4 GiB for a row of 8192 tokens and a vocabulary
# of 128k, and so is their gradient. So the head is applied, and its loss summed, chunk by chunk. While the logits of a
# chunk exist, the gradients of the hidden states and of the head are computed too, for a cotangent of 1. The backward
# only scales them. The head takes part in one matmul forward and two for gradients, as without chunks. The cost is a
# gradient of the head in float32 while chunks are summed, and a gradient of the hidden states until the backward.
# Method: the fused linear cross entropy of Liger-Kernel (arXiv 2410.10989). Chunks split the tokens of a row, not rows,
# which a program may split over devices.


def head_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int,
    tied: bool = False,
    by_row: bool = False,
    softcap: float | None = None,
) -> LossSums:
    """Apply a head to hidden states and sum the weighted cross entropy, `chunk` tokens of every row at a time.

    Layout:  hidden [B T D], kernel [D V] ([V D] if tied), targets, weights [B T] -> scalars, or [B] by row
    Dtype:   logits in the dtype of the weights; sums of losses and of the head's gradient in float32.
    Memory:  logits [B chunk V] and their gradient; from forward to backward d(hidden) [B T D] and d(kernel) [D V], or
             nothing by row.
    Cost:    by row, the backward recomputes the logits.

    Args:
      chunk: number of tokens of a row; rows are padded to a multiple with tokens of weight 0.
      tied: the kernel is an embedding, with one row per token id.
      by_row: return the sums of each row, for losses of whole rows, in which the weight of a row depends on its sum.
      softcap: limit of the logits, as in `soft_cap`; None: no limit.

    Raises:
      ValueError: for a head that is not a matrix of the hidden states' width, a chunk that is not a positive whole
        number, rows without tokens, and targets or weights of another shape.
    """
    width = kernel.shape[-1 if tied else 0] if kernel.ndim == 2 else None
    if width != hidden.shape[-1]:
        raise ValueError(
            f"a head of shape {kernel.shape} does not match hidden states of width {hidden.shape[-1]}; pass a matrix "
            f"{'[V, D]' if tied else '[D, V]'} with D={hidden.shape[-1]}"
        )
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r} tokens must be a whole number, at least 1")
    if not hidden.shape[1]:
        raise ValueError(f"hidden states of shape {hidden.shape}: dim 1 has no tokens; pass rows with at least 1")
    _check_shapes(hidden.shape[:2], targets, weights)
    weights, dtype = weights.astype(jnp.float32), jnp.result_type(hidden, kernel)
    hidden, kernel = hidden.astype(dtype), kernel.astype(dtype)  # outside of custom_vjp, to keep dtypes of gradients
    if by_row:
        return _head_sums_by_row(hidden, kernel, targets, weights, chunk, tied, softcap)
    sums: Any = _head_sums(hidden, kernel, targets, weights, chunk, tied, softcap)
    return LossSums(sums[0], jnp.sum(weights), {"correct": sums[1]})


def _head_sums_by_row(
    hidden: Any, kernel: Any, targets: Any, weights: Any, chunk: int, tied: bool, softcap: float | None
) -> LossSums:
    dtype, kernel = kernel.dtype, kernel.astype(jnp.float32)  # sums gradients of chunks in float32

    @jax.checkpoint
    def body(sums: Any, rows: Any) -> tuple[Any, None]:
        hidden, targets, weights = rows
        logits = soft_cap(_scores(hidden, kernel.astype(dtype), tied).astype(jnp.float32), softcap)
        losses, correct, _ = _each(logits, targets, weights)
        return (sums[0] + jnp.sum(weights * losses, axis=1), sums[1] + jnp.sum(weights * correct, axis=1)), None

    weight = jnp.sum(weights, axis=1)
    (total, correct), _ = jax.lax.scan(
        body, (jnp.zeros_like(weight), jnp.zeros_like(weight)), _chunks(chunk, hidden, targets, weights)
    )
    return LossSums(total, weight, {"correct": correct})


@partial(jax.custom_vjp, nondiff_argnums=(4, 5, 6))
def _head_sums(
    hidden: Any, kernel: Any, targets: Any, weights: Any, chunk: int, tied: bool, softcap: float | None
) -> tuple[Any, Any]:
    def body(sums: Any, rows: Any) -> tuple[Any, None]:
        hidden, targets, weights = rows
        found = cross_entropy(soft_cap(_scores(hidden, kernel, tied), softcap), targets, weights)
        return (sums[0] + found.total, sums[1] + found.aux["correct"]), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(body, (zero, zero), _chunks(chunk, hidden, targets, weights))[0]


def _head_forward(
    hidden: Any, kernel: Any, targets: Any, weights: Any, chunk: int, tied: bool, softcap: float | None
) -> tuple[Any, Any]:
    def body(carry: Any, rows: Any) -> tuple[Any, Any]:
        (total, correct, d_kernel), (hidden, targets, weights) = carry, rows
        scores = _scores(hidden, kernel, tied)
        logits = soft_cap(scores.astype(jnp.float32), softcap)
        losses, is_correct, norm = _each(logits, targets, weights)
        is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        d_scores = (jnp.exp(logits - norm[..., None]) - is_target) * weights[..., None]
        d_scores = d_scores if softcap is None else d_scores * (1 - jnp.square(logits / softcap))
        d_scores = jnp.where(weights[..., None] == 0, 0.0, d_scores).astype(scores.dtype)
        d_hidden = jnp.einsum("btv,vd->btd" if tied else "btv,dv->btd", d_scores, kernel)
        order = (d_scores, hidden) if tied else (hidden, d_scores)
        d_kernel += jnp.einsum("btx,bty->xy", *order, preferred_element_type=jnp.float32)
        sums = (total + jnp.sum(weights * losses), correct + jnp.sum(weights * is_correct), d_kernel)
        return sums, (d_hidden, losses)

    zero = jnp.zeros((), jnp.float32)
    carry = (zero, zero, jnp.zeros(kernel.shape, jnp.float32))
    (total, correct, d_kernel), chunks = jax.lax.scan(body, carry, _chunks(chunk, hidden, targets, weights))
    # A sum over tokens may exceed float16. Other dtypes are cast before the barrier, so that no float32 array is kept.
    d_kernel = d_kernel if kernel.dtype == jnp.float16 else d_kernel.astype(kernel.dtype)
    d_hidden, losses = jax.tree.map(partial(_joined, seq_len=hidden.shape[1]), chunks)
    return (total, correct), jax.lax.optimization_barrier((d_hidden, d_kernel, losses))


def _head_backward(
    chunk: int, tied: bool, softcap: float | None, saved: Any, cotangents: Any
) -> tuple[Any, Any, None, Any]:
    d_hidden, d_kernel, losses = saved
    scale = cotangents[0]  # cotangent of the total; `correct` has no derivative
    dtype = d_hidden.dtype
    return (d_hidden * scale).astype(dtype), (d_kernel * scale).astype(dtype), None, losses * scale


_head_sums.defvjp(_head_forward, _head_backward)


def _scores(hidden: jax.Array, kernel: jax.Array, tied: bool) -> jax.Array:
    return jnp.einsum("btd,vd->btv" if tied else "btd,dv->btv", hidden, kernel)


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Split rows into chunks of at most `chunk` tokens, padded with zeros. Layout: [B T ..] -> [C B T/C ..].

    A chunk has an equal share of each part into which the compiler splits rows.
    """
    seq_len = arrays[0].shape[1]
    parts, num = _parts(seq_len), math.ceil(seq_len / min(chunk, seq_len))
    size = math.ceil(seq_len / parts / num)

    def cut(x: jax.Array) -> jax.Array:
        x = x.reshape(x.shape[0], parts, -1, *x.shape[2:])
        x = jnp.pad(x, [(0, num * size - x.shape[2] if dim == 2 else 0) for dim in range(x.ndim)])
        x = jnp.moveaxis(x.reshape(x.shape[0], parts, num, size, *x.shape[3:]), 2, 0)
        return x.reshape(num, x.shape[1], parts * size, *x.shape[4:])

    return tuple(map(cut, arrays))


def _parts(seq_len: int) -> int:
    parts = token_parts(context_axes())
    return 1 if seq_len % parts else parts


def _joined(chunks: jax.Array, seq_len: int) -> jax.Array:
    """Undo `_chunks`."""
    parts = _parts(seq_len)
    rows = jnp.moveaxis(chunks.reshape(*chunks.shape[:2], parts, -1, *chunks.shape[3:]), 0, 2)
    rows = rows.reshape(rows.shape[0], parts, -1, *rows.shape[4:])[:, :, : seq_len // parts]
    return rows.reshape(rows.shape[0], seq_len, *rows.shape[3:])


def token_batch(batch_size: int, seq_len: int, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch for `next_token_loss`; `packed`: with `weights`, `segment_ids` and `positions`."""
    ids = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32)
    batch = {"tokens": ids, "targets": ids}
    if packed:
        weights = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.float32)
        batch |= {"weights": weights, "segment_ids": ids, "positions": ids}
    return batch
