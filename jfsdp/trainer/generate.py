"""Text generation from a sharded model with a KV cache: one program for the prompts, one for each further token.

[Note: rows of generation] Prompts of different lengths are in one batch, padded at their ends. Every row continues at a
separate position. Keys and values of padding are not written to the cache, and no token attends to them. So the tokens
of a row depend neither on other rows nor on the mesh, except for rounding.
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
from jfsdp.layout.mesh import ROW_AXES, axes_of, num_data_shards
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.trainer.job import Job


@checked
@dataclasses.dataclass(frozen=True)
class Sampling:
    """Sampling parameters for the next token.

    Attributes:
      temperature: divisor of the logits before sampling; 0 takes the most likely token.
      top_k: sample among the `top_k` most likely tokens; None: among all.
      top_p: sample among the most likely tokens whose probabilities sum to `top_p`, at least one; None: among all.
      seed: seed of the samples. A row's samples depend only on seed, row number and position.

    Raises:
      ValueError: for values out of range, and `top_k` or `top_p` without a temperature.
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
                f"top_k={self.top_k}, top_p={self.top_p}: have no effect with temperature=0, which takes the most "
                "likely token; set a temperature above 0"
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
    """Generates tokens after prompts: `generator(state, prompts, 64)`. Compiles two programs per shape of a batch.

    Layout:  rows over `replica` and `fsdp`, heads of the cache over `tensor`. Axis `context` splits nothing.
    Memory:  the cache, `2 * layers * rows * length * heads * size` elements over all devices; the sharded weights; one
             gathered unit.
    Cost:    every unit is gathered once for the prompts and once per token. If the weights fit, a mesh with only axis
             `tensor`, or one device, is fastest.

    Args:
      stop: token ids that end a row.

    Raises:
      ValueError: if the job has no cache.
    """

    def __init__(self, model: ShardedModel, job: Job, sampling: Sampling | None = None, *, stop: Sequence[int] = ()):
        if job.cache is None:
            raise ValueError(
                f"job {job.name!r} has no cache of keys and values; set its field `cache`, and give its model the "
                "arguments described in jfsdp.trainer.Job"
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
        """Return the ids [n] that follow each prompt, at most `num_tokens`, including the stop id.

        All processes pass the same prompts, and get all rows.

        Args:
          prompts: token ids of each row, at least one each.
          first_row: row number of the first prompt, for sampling. Prompts of several calls need different numbers.
          longest, rows: minimum length and number of prompts to pad to. Calls with equal values use the same two
            programs.

        Raises:
          ValueError: for no prompts, empty prompts, ids beyond the vocabulary, `num_tokens` below 1, and NaN logits.
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
                    f"logits of prompt {first_row + bad[0] + 1} are NaN after {len(found)} tokens; use another "
                    "--param-dtype, or check the weights (jfsdp checkpoint verify)"
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
          ValueError: if `length` is beyond the model's, or axis `tensor` does not divide the heads.
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
                    "use a size that divides them"
                )
        heads = "tensor" if "tensor" in mesh.axis_names else None

        def place(shape: Any) -> Any:
            spec = PartitionSpec(axes_of(mesh, ROW_AXES), *(None,) * (len(shape.shape) - 4), heads)
            return jax.ShapeDtypeStruct(shape.shape, shape.dtype, sharding=NamedSharding(mesh, spec))

        return jax.tree.map(place, shapes)

    def empty_cache(self, rows: int, length: int) -> Any:
        """Return a cache of zeros, allocated on the devices."""
        shapes = self.cache_shapes(rows, length)
        shardings = jax.tree.map(lambda shape: shape.sharding, shapes)
        zeros = lambda: jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)  # noqa: E731
        return jax.jit(zeros, out_shardings=shardings)()

    def lower(self, state: Any, rows: int, length: int, tokens: int = 1) -> Any:
        """Lower the program of one more token (`tokens` = 1) or of prompts of `tokens` tokens."""
        put = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
        inputs = (put(rows, tokens), put(rows, tokens), put(rows), put(rows), put(rows))
        placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._rows) for x in inputs]
        return self._step.lower(state, self.cache_shapes(rows, length), *placed)

    def _extend(
        self, module: Any, cache: Any, tokens: Any, positions: Any, last: Any, current: Any, numbers: Any
    ) -> tuple[Any, jax.Array]:
        logits, cache = module(tokens, positions=positions, cache=cache, lengths=last)
        # Logits of one token per row are small, and replicating them makes the samples equal on all devices.
        replicated = NamedSharding(self.model.mesh, PartitionSpec())
        logits = jax.lax.with_sharding_constraint(logits[:, : self.job.vocab_size].astype(jnp.float32), replicated)
        chosen = jnp.where(jnp.isnan(logits).any(axis=-1), -1, self._sampling.draw(logits, numbers, current))
        rows, *_, length, _ = jax.tree.leaves(cache)[0].shape
        shardings = jax.tree.map(lambda shape: shape.sharding, self.cache_shapes(rows, length))
        return jax.lax.with_sharding_constraint(cache, shardings), jax.lax.with_sharding_constraint(chosen, replicated)

    def _put(self, *arrays: np.ndarray) -> list[jax.Array]:
        return [jax.make_array_from_callback(x.shape, self._rows, x.__getitem__) for x in arrays]

    @property
    def _rows(self) -> NamedSharding:
        """The sharding of prompts: rows over their axes, with all tokens on each device of axis `context`."""
        return NamedSharding(self.model.mesh, PartitionSpec(axes_of(self.model.mesh, ROW_AXES)))  # type: ignore[arg-type]

    def _padded(self, prompts: Sequence[np.ndarray], longest: int, rows: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ids [B T] and lengths [B]. Rows of one token are added until the data shards divide B."""
        shards = num_data_shards(dict(self.model.layout.mesh_sizes))
        count = -(-max(len(prompts), rows) // shards) * shards
        longest = max(longest, *map(len, prompts))
        tokens, lengths = np.zeros((count, longest), np.int32), np.ones(count, np.int64)
        for number, prompt in enumerate(prompts):
            tokens[number, : len(prompt)], lengths[number] = prompt, len(prompt)
        return tokens, lengths

    def _check(self, prompts: Sequence[np.ndarray], num_tokens: int) -> None:
        if not prompts or num_tokens < 1:
            raise ValueError(f"{len(prompts)} prompts, {num_tokens} tokens to generate: both must be at least 1")
        for number, prompt in enumerate(prompts, 1):
            limit = self.job.vocab_size or 2**31
            if not len(prompt) or prompt.min() < 0 or prompt.max() >= limit:
                raise ValueError(
                    f"prompt {number} has {len(prompt)} tokens and largest id {max(prompt, default=None)}, but the "
                    f"model's ids are below {limit}; use the model's tokenizer, and prompts that are not empty"
                )
