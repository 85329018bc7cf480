"""The losses of the models here, as sums: of next tokens and of classes; and the shapes of the batches they take."""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp


class LossSums(NamedTuple):
    """Sums over tokens or images, to be added over devices and microbatches and divided once: `total / weight`."""

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
        the next document counts unless its weight is 0. A target outside the vocabulary makes the loss NaN.
      options: handed on to the model, such as `deterministic=False`.

    Returns:
      `total` and `weight`, and in `aux` `correct`: the weight of the tokens whose highest logit is the target.
    """
    segment_ids = batch.get("segment_ids")
    weights = batch.get("weights")
    if weights is None:
        weights = jnp.ones(batch["targets"].shape) if segment_ids is None else segment_ids != 0
    logits = model(batch["tokens"], segment_ids=segment_ids, positions=batch.get("positions"), **options)
    return cross_entropy(logits, batch["targets"], weights)


def classification_loss(model: Callable[..., jax.Array], batch: Mapping[str, jax.Array]) -> LossSums:
    """Sum the weighted cross entropy of `labels`. Moves no data between devices.

    Layout:  images [B H W C], labels [B] int32 -> scalars
    Dtype:   float32, whatever the logits' dtype.

    Args:
      model: called as `model(images)`; returns logits `[B K]`.
      batch: `images` and `labels`; optional `weights` `[B]` float32 (default: 1). A label outside the classes makes the
        loss NaN.

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
    """
    logits, weights = logits.astype(jnp.float32), weights.astype(jnp.float32)
    label_logits = jnp.take_along_axis(logits, labels[..., None], axis=-1, mode="fill")[..., 0]
    losses = jax.nn.logsumexp(logits, axis=-1) - label_logits
    correct = jnp.argmax(logits, axis=-1) == labels
    return LossSums(
        total=jnp.sum(weights * losses),
        weight=jnp.sum(weights),
        aux={"correct": jnp.sum(weights * correct)},
    )


def token_batch(batch_size: int, seq_len: int, *, packed: bool = False) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch for `next_token_loss`; `packed`: with `weights`, `segment_ids` and `positions`."""
    ids = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.int32)
    batch = {"tokens": ids, "targets": ids}
    if packed:
        weights = jax.ShapeDtypeStruct((batch_size, seq_len), jnp.float32)
        batch |= {"weights": weights, "segment_ids": ids, "positions": ids}
    return batch


def image_batch(shape: tuple[int, int, int], batch_size: int, seq_len: int = 1) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch for `classification_loss`: images of `shape` H W C. A row has no length."""
    del seq_len
    return {
        "images": jax.ShapeDtypeStruct((batch_size, *shape), jnp.float32),
        "labels": jax.ShapeDtypeStruct((batch_size,), jnp.int32),
        "weights": jax.ShapeDtypeStruct((batch_size,), jnp.float32),
    }
