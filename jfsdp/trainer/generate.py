"""Text from a sharded model with a cache of keys and values: a program for the prompts, one for each further token.

[Note: rows of generation] Prompts of different lengths stand in one batch, padded at their ends. Every row goes on at
its own position: what padding computes is written to no place of the cache and seen by no token. So the tokens of a row
depend neither on the other rows nor on the devices that it is on, but for rounding.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.arguments import Amount, Count, Seed, Share, checked
from jfsdp.layout.mesh import data_axes, num_data_shards
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.step.step import batch_sharding
from jfsdp.trainer.job import Job


@checked
@dataclasses.dataclass(frozen=True)
class Sampling:
    """How the next token is chosen.

    Attributes:
      temperature: 0 takes the likeliest token; else logits are divided by it, and a token is drawn.
      top_k: draw among so many of the likeliest; None: among all.
      top_p: draw among the likeliest whose probabilities make up so much together, one at least; None: among all.
      seed: of the draws; a row's depend on its number and its position alone.

    Raises:
      ValueError: for numbers that make no sense.
    """

    temperature: Amount = 0.0
    top_k: Count | None = None
    top_p: Share | None = None
    seed: Seed = 0

    def __post_init__(self) -> None:
        if self.temperature == float("inf") or self.top_p == 0:
            raise ValueError(f"temperature={self.temperature} must be finite, and top_p={self.top_p} above 0")
        if self.temperature == 0 and (self.top_k, self.top_p) != (None, None):
            raise ValueError(
                f"top_k={self.top_k}, top_p={self.top_p}: choose among tokens that are drawn, and temperature=0 draws "
                "none; give a temperature above 0"
            )

    def draw(self, logits: jax.Array, rows: jax.Array, positions: jax.Array) -> jax.Array:
        """Return a token for each row. Layout: [B V] float32, [B], [B] -> [B] int32."""
        if self.temperature == 0:
            return jnp.argmax(logits, axis=-1).astype(jnp.int32)
        logits = logits / self.temperature
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, self.top_k)[0][:, -1:]
            logits = jnp.where(logits < least, -jnp.inf, logits)
        if self.top_p is not None and self.top_p < 1:
            ordered = jnp.sort(logits, axis=-1, descending=True)
            before = jnp.cumsum(jax.nn.softmax(ordered), axis=-1) - jax.nn.softmax(ordered)
            least = jnp.min(jnp.where(before < self.top_p, ordered, jnp.inf), axis=-1, keepdims=True)
            logits = jnp.where(logits < least, -jnp.inf, logits)
        keys = jax.vmap(lambda row, position: jax.random.fold_in(jax.random.fold_in(key, row), position))
        key = jax.random.key(self.seed)
        return jax.vmap(jax.random.categorical)(keys(rows, positions), logits).astype(jnp.int32)


class Generator:
    """Generates from prompts: `generator(state, prompts, 64)`. Two programs are compiled for each pair of sizes.

    Layout:  rows over the data axes, heads of the cache over `tensor`: like the batches and weights of training.
    Memory:  the cache, `2 * layers * rows * length * heads * size` elements over all devices; the weights as the model
             is sharded; one unit gathered.
    Cost:    every unit is gathered once for the prompts and once per token: so `tensor` alone, or one device, is
             fastest where the weights fit.

    Args:
      stop: ids that end a row.

    Raises:
      ValueError: if the job has no cache.
    """

    def __init__(self, model: ShardedModel, job: Job, sampling: Sampling | None = None, *, stop: Sequence[int] = ()):
        if job.cache is None:
            raise ValueError(
                f"job {job.name!r} has no cache of keys and values; give its field `cache`, and its model the "
                "arguments that jfsdp.trainer.Job says"
            )
        self.model, self.job, self.stop = model, job, tuple(stop)
        self._sampling = sampling or Sampling()
        self._step = model.forward(self._extend, donate=(0,))

    def __call__(
        self,
        state: TrainState,
        prompts: Sequence[np.ndarray],
        num_tokens: int,
        *,
        first_row: int = 0,
        longest: int = 1,
        rows: int = 1,
    ) -> list[np.ndarray]:
        """Return the ids [n] that follow each prompt, with the one that stops it; at most `num_tokens`.

        Several processes call it with the same prompts, and all get all rows.

        Args:
          prompts: ids of each row, one at least in each.
          first_row: the number of the first prompt, for what is drawn: of prompts in several calls each has its own.
          longest, rows: tokens of the longest prompt of several calls, and most prompts of one: each is padded to
            these, and all run the same two programs.

        Raises:
          ValueError: for no prompts, empty ones, ids beyond the vocabulary, or nothing to generate; if logits are NaN.
        """
        self._check(prompts, num_tokens)
        tokens, lengths = self._padded(prompts, longest, rows)
        count, longest = tokens.shape
        length = longest + num_tokens
        cache = self.empty_cache(count, length)
        column = np.arange(longest)
        positions = np.where(column < lengths[:, None], column, length).astype(np.int32)
        found, is_done = [], np.zeros(count, bool)
        numbers = first_row + np.arange(count, dtype=np.int32)
        last, current = lengths.astype(np.int32), lengths.astype(np.int32)
        for _ in range(num_tokens):
            cache, chosen = self._step(state, cache, *self._put(tokens, positions, last, current, numbers))
            chosen = np.asarray(chosen)
            if (bad := np.flatnonzero(chosen[: len(prompts)] < 0)).size:
                raise ValueError(
                    f"logits of prompt {first_row + bad[0] + 1} are NaN after {len(found)} tokens; compute in another "
                    "--param-dtype, or look at the weights (jfsdp checkpoint verify)"
                )
            found.append(chosen)
            is_done |= np.isin(chosen, self.stop)
            if is_done[: len(prompts)].all():
                break
            tokens, positions, last = chosen[:, None], current[:, None], np.ones(count, np.int32)
            current = current + 1
        answers = np.stack(found, axis=1)[: len(prompts)]
        ends = [np.flatnonzero(np.isin(answer, self.stop)) for answer in answers]
        return [answer[: end[0] + 1] if len(end) else answer for answer, end in zip(answers, ends, strict=True)]

    def cache_shapes(self, rows: int, length: int) -> Any:
        """Return the shapes of the cache, with their shardings.

        Raises:
          ValueError: if the model does not reach so far.
        """
        assert self.job.cache is not None
        dtype = self.model.layout.mp_policy.param_dtype or "float32"
        shapes = self.job.cache(rows, length, jnp.dtype(dtype))
        mesh: Any = self.model.mesh
        size = dict(mesh.shape).get("tensor", 1)
        for shape in jax.tree.leaves(shapes):
            if shape.shape[-3] % size:
                raise ValueError(
                    f"mesh axis 'tensor' (size {size}) does not divide the {shape.shape[-3]} heads of keys and values; "
                    "give that axis a size that does"
                )
        heads = "tensor" if "tensor" in mesh.axis_names else None

        def place(shape: Any) -> Any:
            spec = PartitionSpec(data_axes(mesh), *(None,) * (len(shape.shape) - 4), heads)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, shapes)

    def empty_cache(self, rows: int, length: int) -> Any:
        """Return a cache of zeros, made on the devices."""
        shapes = self.cache_shapes(rows, length)
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        zeros = lambda: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)  # noqa: E731
        return jax.jit(zeros, out_shardings=shardings)()

    def lower(self, state: Any, rows: int, length: int, tokens: int = 1) -> Any:
        """Return the program of one more token, or of prompts of so many, lowered for shapes."""
        put = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        inputs = (put(rows, tokens), put(rows, tokens), put(rows), put(rows), put(rows))
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=batch_sharding(self.model.mesh, x)) for x in inputs]
        return self._step.lower(state, self.cache_shapes(rows, length), *placed)

    def _extend(
        self, module: Any, cache: Any, tokens: Any, positions: Any, last: Any, current: Any, numbers: Any
    ) -> tuple[Any, jax.Array]:
        logits, cache = module(tokens, positions=positions, cache=cache, lengths=last)
        # The whole logits of a token per row go to every device: they are few, and draws are then the same everywhere.
        whole = NamedSharding(self.model.mesh, PartitionSpec())
        logits = jax.lax.with_sharding_constraint(logits[:, : self.job.vocab_size].astype(jnp.float32), whole)
        chosen = jnp.where(jnp.isnan(logits).any(axis=-1), -1, self._sampling.draw(logits, numbers, current))
        rows, *_, length, _ = jax.tree.leaves(cache)[0].shape
        shardings = jax.tree.map(lambda shape: shape.sharding, self.cache_shapes(rows, length))
        return jax.lax.with_sharding_constraint(cache, shardings), jax.lax.with_sharding_constraint(chosen, whole)

    def _put(self, *arrays: np.ndarray) -> list[jax.Array]:
        shardings = [batch_sharding(self.model.mesh, array) for array in arrays]
        make = jax.make_array_from_callback
        return [make(x.shape, sharding, x.__getitem__) for x, sharding in zip(arrays, shardings, strict=True)]

    def _padded(self, prompts: Sequence[np.ndarray], longest: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [B T] and lengths [B], with rows of one token added where the data shards do not divide B."""
        shards = num_data_shards(dict(self.model.layout.mesh_sizes))
        count = -(-max(len(prompts), rows) // shards) * shards
        longest = max(longest, *map(len, prompts))
        tokens, lengths = np.zeros((count, longest), np.int32), np.ones(count, np.int64)
        for number, prompt in enumerate(prompts):
            tokens[number, : len(prompt)], lengths[number] = prompt, len(prompt)
        return tokens, lengths

    def _check(self, prompts: Sequence[np.ndarray], num_tokens: int) -> None:
        if not prompts or num_tokens < 1:
            raise ValueError(f"{len(prompts)} prompts, {num_tokens} tokens to generate: at least one of each is needed")
        for number, prompt in enumerate(prompts, 1):
            limit = self.job.vocab_size or 2**31
            if not len(prompt) or prompt.min() < 0 or prompt.max() >= limit:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens, the largest id {max(prompt, default=None)}, and the "
                    f"model knows ids below {limit}; use the model's own tokenizer, and prompts that are not empty"
                )
