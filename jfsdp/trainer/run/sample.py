"""Text from a model while it is sharded: short, slow, and without a cache; to see what was learned."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout.mesh import num_data_shards
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.step.step import batch_sharding
from jfsdp.trainer.data.tokenizer import Tokenizer


def sample_texts(
    model: ShardedModel,
    state: TrainState,
    tokenizer: Tokenizer,
    *,
    num_tokens: int,
    max_len: int,
    prompt: str = "",
    temperature: float = 0.8,
    seed: int = 0,
) -> list[str]:
    """Generate one text per data shard, prompt included, each up to the end of its document.

    Layout:  [B/data W] with B = data shards and W the window, at most `max_len`: no device computes what another does.
    Cost:    one compile; then per token a forward of the whole window, which gathers every unit once.

    Raises:
      ValueError: if the model is not called as `model(tokens) -> logits [B W V]`, or the prompt fills the window.
    """
    ids = np.concatenate([[tokenizer.eod_id], tokenizer.encode(prompt)])
    window = min(max_len, len(ids) + num_tokens)
    if window <= len(ids):
        raise ValueError(f"the prompt has {len(ids)} tokens and the window {max_len}: nothing is left to generate")
    rows = num_data_shards(dict(model.layout.mesh_sizes))
    tokens = np.zeros((rows, window), np.int32)
    tokens[:, : len(ids)] = ids
    generated = _generate(model, state, tokens, len(ids), tokenizer.vocab_size, temperature, seed)
    return [_decode(tokenizer, row) for row in generated]


def _generate(
    model: ShardedModel,
    state: TrainState,
    tokens: np.ndarray,
    start: int,
    vocab_size: int,
    temperature: float,
    seed: int,
) -> np.ndarray:
    mesh: Any = model.mesh
    split, whole = batch_sharding(mesh), NamedSharding(mesh, PartitionSpec())

    def extend(module: Any, tokens: jax.Array, end: jax.Array, key: jax.Array) -> jax.Array:
        logits = _logits(module, tokens)
        last = jax.lax.dynamic_index_in_dim(logits, end - 1, axis=1, keepdims=False)[:, :vocab_size]
        # The whole logits of one position go to every device: they are few, and the draw is then the same everywhere.
        last = jax.lax.with_sharding_constraint(last.astype(jnp.float32), whole)
        drawn = jax.random.categorical(jax.random.fold_in(key, end), last / max(temperature, 1e-6))
        longer = jax.lax.dynamic_update_slice(tokens, drawn[:, None].astype(tokens.dtype), (0, end))
        return jax.lax.with_sharding_constraint(longer, split)

    step, key = model.forward(extend), jax.random.key(seed)
    current = jax.make_array_from_callback(tokens.shape, split, lambda index: tokens[index])
    for end in range(start, tokens.shape[1]):
        current = step(state, current, jnp.int32(end), key)
        current.block_until_ready()
    return np.array(jax.jit(lambda x: x, out_shardings=whole)(current))


def _logits(module: Any, tokens: jax.Array) -> jax.Array:
    try:
        logits = module(tokens)
    except TypeError as error:
        raise ValueError(f"the model is not called as model(tokens): {error}") from error
    if getattr(logits, "ndim", 0) != 3 or logits.shape[:2] != tokens.shape:
        raise ValueError(f"model(tokens) with tokens {tokens.shape} is not logits [B T V]: {jax.typeof(logits)}")
    return logits


def _decode(tokenizer: Tokenizer, ids: np.ndarray) -> str:
    ends = np.flatnonzero(ids[1:] == tokenizer.eod_id)
    return tokenizer.decode(ids[1 : 1 + ends[0]] if len(ends) else ids[1:])
