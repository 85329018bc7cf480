"""The losses of the models here, as sums: of next tokens and of classes; and the shapes of the batches they take."""

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
    """Sums over tokens or images, to be added over devices and microbatches and divided once: `total / weight`.

    Scalars, or [B] of each row by itself.
    """

    total: jax.Array
    weight: jax.Array
    aux: dict[str, jax.Array]


def next_token_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array], **options: Any) -> LossSums:
    """Sum the weighted cross entropy of `targets`. Moves no data between devices.

    Layout:  tokens, targets [B T] int32 -> scalars
    Dtype:   float32, whatever the logits' dtype.

    Args:
      model: called as `model(tokens, segment_ids=..., positions=..., **options)`.
      batch: `tokens` and `targets`; optional `weights` `[B T]` float32 (default: 1, but 0 where `segment_ids` is 0),
        `segment_ids`, `positions`. The targets are the caller's: nothing is shifted here, and a target that lies in
        the next document counts unless its weight is 0. A target outside the vocabulary, such as -100, makes the loss
        NaN unless its weight is 0.
      options: handed on to the model, such as `deterministic=False`.

    Returns:
      `total` and `weight`, and in `aux` `correct`: the weight of the tokens whose highest logit is the target.
    """
    logits = model(batch["tokens"], segment_ids=batch.get("segment_ids"), positions=batch.get("positions"), **options)
    return cross_entropy(logits, batch["targets"], token_weights(batch))


def loss_of_model(model: Callable[..., LossSums], batch: Mapping[str, jax.Array], **options: Any) -> LossSums:
    """Let the model sum the losses of `targets` itself, so that no logits of whole rows exist; see `head_loss`.

    Args: as `next_token_loss`; the model is also given `targets` and `weights`. With `by_row=True` the sums are [B].
    """
    names = ("segment_ids", "positions", "targets")
    given = {name: batch.get(name) for name in names}
    return model(batch["tokens"], weights=token_weights(batch), **given, **options)


def token_weights(batch: Mapping[str, jax.Array]) -> jax.Array:
    """Return how much each target counts: `weights` of the batch; without them 1, and 0 in padding. Layout: [B T]."""
    if (weights := batch.get("weights")) is not None:
        return weights
    segment_ids = batch.get("segment_ids")
    return jnp.ones(batch["targets"].shape) if segment_ids is None else segment_ids != 0


def classification_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> LossSums:
    """Sum the weighted cross entropy of `labels`. Moves no data between devices.

    Layout:  images [B H W C], labels [B] int32 -> scalars
    Dtype:   float32, whatever the logits' dtype.

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
    """Sum the weighted negative log likelihood of labels, and the weight of those that have the highest logit.

    Layout:  [... K], [...] int, [...] -> scalars
    Dtype:   float32 inside and out.

    Raises:
      ValueError: for labels or weights of another shape: what is repeated for rows would be counted once.
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
            raise ValueError(f"{name} of shape {shape} are not one for each of {rows}; give an array of that shape")


def _each(logits: jax.Array, labels: jax.Array, weights: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return of each label its loss, whether it has the highest logit, and the norm of its probabilities.

    A label outside the classes, a negative one too, has NaN for a loss: an index from the end would be another class.
    What has no weight has no loss, whatever its label.
    """
    inside = jnp.where(labels < 0, logits.shape[-1], labels)
    norm = jax.nn.logsumexp(logits, axis=-1)
    losses = norm - jnp.take_along_axis(logits, inside[..., None], axis=-1, mode="fill")[..., 0]
    return jnp.where(weights == 0, 0.0, losses), jnp.argmax(logits, axis=-1) == labels, norm


# [Note: a loss without logits]
# Logits are the largest array of a language model: [T V] in float32 are 4 GiB for a row of 8192 tokens and 128k words,
# and their gradient as much again. So the head is multiplied, and its loss summed, chunk by chunk; and while a chunk's
# logits exist, the gradients of the hidden states and of the head are formed too, for a loss that counts 1. The
# backward only scales them: the head is multiplied once forward and twice for gradients, as without chunks. The price:
# a gradient of the head in float32 while the chunks are summed, and that of the hidden states until the backward.
# Method: the fused linear cross entropy of Liger-Kernel (arXiv 2410.10989). Chunks are of a row's tokens and never of
# rows, which a program may split over devices.


def head_loss(
    hidden: jax.Array,
    kernel: jax.Array,
    targets: jax.Array,
    weights: jax.Array,
    *,
    chunk: int,
    tied: bool = False,
    by_row: bool = False,
) -> LossSums:
    """Multiply hidden states by a head and sum the weighted cross entropy, `chunk` tokens of every row at a time.

    Layout:  hidden [B T D], kernel [D V] ([V D] where tied), targets, weights [B T] -> scalars, or [B] by row
    Dtype:   logits in the dtype of the weights; sums, and those of the head's gradient, in float32.
    Memory:  logits [B chunk V] and their gradient; forward to backward d(hidden) [B T D] and d(kernel) [D V], or by
             row nothing.
    Cost:    by row the head is multiplied once more, in the backward.

    Args:
      chunk: tokens of a row; a row that is no multiple is padded with tokens of weight 0.
      tied: the kernel is an embedding, one row per token id.
      by_row: return the sums of each row: for losses of whole rows, whose gradient weighs the rows only once all their
        tokens are summed.

    Raises:
      ValueError: for a head that is no matrix of the hidden states' width, a chunk that is no whole number from 1 on,
        rows without tokens, and targets or weights of another shape.
    """
    width = kernel.shape[-1 if tied else 0] if kernel.ndim == 2 else None
    if width != hidden.shape[-1]:
        raise ValueError(
            f"a head of shape {kernel.shape} cannot be multiplied by hidden states of width {hidden.shape[-1]}; give a "
            f"matrix {'[V, D]' if tied else '[D, V]'} with D={hidden.shape[-1]}"
        )
    if not isinstance(chunk, int) or chunk < 1:
        raise ValueError(f"chunk={chunk!r} tokens must be a whole number, at least 1")
    if not hidden.shape[1]:
        raise ValueError(f"hidden states of shape {hidden.shape}: dim 1 has no tokens; give rows of at least 1")
    _check_shapes(hidden.shape[:2], targets, weights)
    weights, dtype = weights.astype(jnp.float32), jnp.result_type(hidden, kernel)
    hidden, kernel = hidden.astype(dtype), kernel.astype(dtype)  # outside of the derivative, so that each has its own
    if by_row:
        return _head_sums_by_row(hidden, kernel, targets, weights, chunk, tied)
    sums: Any = _head_sums(hidden, kernel, targets, weights, chunk, tied)
    return LossSums(sums[0], jnp.sum(weights), {"correct": sums[1]})


def _head_sums_by_row(hidden: Any, kernel: Any, targets: Any, weights: Any, chunk: int, tied: bool) -> LossSums:
    dtype, kernel = kernel.dtype, kernel.astype(jnp.float32)  # so that gradients of chunks are summed in float32

    @jax.checkpoint
    def body(sums: Any, rows: Any) -> tuple[Any, None]:
        hidden, targets, weights = rows
        logits = _scores(hidden, kernel.astype(dtype), tied).astype(jnp.float32)
        losses, correct, _ = _each(logits, targets, weights)
        return (sums[0] + jnp.sum(weights * losses, axis=1), sums[1] + jnp.sum(weights * correct, axis=1)), None

    weight = jnp.sum(weights, axis=1)
    (total, correct), _ = jax.lax.scan(
        body, (jnp.zeros_like(weight), jnp.zeros_like(weight)), _chunks(chunk, hidden, targets, weights)
    )
    return LossSums(total, weight, {"correct": correct})


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _head_sums(hidden: Any, kernel: Any, targets: Any, weights: Any, chunk: int, tied: bool) -> tuple[Any, Any]:
    def body(sums: Any, rows: Any) -> tuple[Any, None]:
        hidden, targets, weights = rows
        found = cross_entropy(_scores(hidden, kernel, tied), targets, weights)
        return (sums[0] + found.total, sums[1] + found.aux["correct"]), None

    zero = jnp.zeros((), jnp.float32)
    return jax.lax.scan(body, (zero, zero), _chunks(chunk, hidden, targets, weights))[0]


def _head_forward(hidden: Any, kernel: Any, targets: Any, weights: Any, chunk: int, tied: bool) -> tuple[Any, Any]:
    def body(carry: Any, rows: Any) -> tuple[Any, Any]:
        (total, correct, d_kernel), (hidden, targets, weights) = carry, rows
        scores = _scores(hidden, kernel, tied)
        logits = scores.astype(jnp.float32)
        losses, is_correct, norm = _each(logits, targets, weights)
        is_target = jax.lax.broadcasted_iota(targets.dtype, logits.shape, 2) == targets[..., None]
        d_scores = (jnp.exp(logits - norm[..., None]) - is_target) * weights[..., None]
        d_scores = jnp.where(weights[..., None] == 0, 0.0, d_scores).astype(scores.dtype)
        d_hidden = jnp.einsum("btv,vd->btd" if tied else "btv,dv->btd", d_scores, kernel)
        order = (d_scores, hidden) if tied else (hidden, d_scores)
        d_kernel += jnp.einsum("btx,bty->xy", *order, preferred_element_type=jnp.float32)
        sums = (total + jnp.sum(weights * losses), correct + jnp.sum(weights * is_correct), d_kernel)
        return sums, (d_hidden, losses)

    zero = jnp.zeros((), jnp.float32)
    carry = (zero, zero, jnp.zeros(kernel.shape, jnp.float32))
    (total, correct, d_kernel), chunks = jax.lax.scan(body, carry, _chunks(chunk, hidden, targets, weights))
    # A sum over tokens may be beyond float16; elsewhere the cast is before the barrier, so that no float32 array waits.
    d_kernel = d_kernel if kernel.dtype == jnp.float16 else d_kernel.astype(kernel.dtype)
    d_hidden, losses = jax.tree.map(partial(_joined, seq_len=hidden.shape[1]), chunks)
    return (total, correct), jax.lax.optimization_barrier((d_hidden, d_kernel, losses))


def _head_backward(chunk: int, tied: bool, saved: Any, cotangents: Any) -> tuple[Any, Any, None, Any]:
    d_hidden, d_kernel, losses = saved
    scale = cotangents[0]  # of the total; `correct` has no derivative
    dtype = d_hidden.dtype
    return (d_hidden * scale).astype(dtype), (d_kernel * scale).astype(dtype), None, losses * scale


_head_sums.defvjp(_head_forward, _head_backward)


def _scores(hidden: jax.Array, kernel: jax.Array, tied: bool) -> jax.Array:
    return jnp.einsum("btd,vd->btv" if tied else "btd,dv->btv", hidden, kernel)


def _chunks(chunk: int, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """Cut rows into chunks of at most so many tokens, with zeros at the end. Layout: [B T ..] -> [C B T/C ..]."""
    seq_len = arrays[0].shape[1]
    num = math.ceil(seq_len / min(chunk, seq_len))
    size = math.ceil(seq_len / num)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, [(0, num * size - seq_len if dim == 1 else 0) for dim in range(x.ndim)])
        return jnp.moveaxis(x.reshape(x.shape[0], num, size, *x.shape[2:]), 1, 0)

    return tuple(map(cut, arrays))


def _joined(chunks: jax.Array, seq_len: int) -> jax.Array:
    """Undo `_chunks`."""
    rows = jnp.moveaxis(chunks, 0, 1)
    return rows.reshape(rows.shape[0], -1, *rows.shape[3:])[:, :seq_len]


def token_batch(batch_size: int, seq_len: int, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch for `next_token_loss`; `packed`: with `weights`, `segment_ids` and `positions`."""
    ids = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32)
    batch = {"tokens": ids, "targets": ids}
    if packed:
        weights = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.float32)
        batch |= {"weights": weights, "segment_ids": ids, "positions": ids}
    return batch
