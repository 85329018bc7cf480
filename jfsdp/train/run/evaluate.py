"""Held-out loss: an exact token-weighted mean over a fixed set of batches."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import jax

from jfsdp.train.loss import as_loss
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.step import LossFn, batch_sharding


class Evaluator:
    """Computes the loss of held-out batches: `loss, weight = evaluator(state)`. Compiles once.

    Args:
      batches: `f()` starts an iterator over this process's share of the same batches every time; in every process
        equally many, their rows together a multiple of the data shards.
      num_batches: how many of them; 0 takes all.
    """

    def __init__(
        self, model: ShardedModel, loss_fn: LossFn, batches: Callable[[], Iterable[Any]], num_batches: int = 0
    ):
        def sums(module: Any, batch: Any) -> tuple[jax.Array, jax.Array]:
            loss = as_loss(loss_fn(module, batch))
            return loss.total, loss.weight

        self._sums, self._batches, self._num_batches = model.forward(sums), batches, num_batches
        self._sharding = batch_sharding(model.mesh)

    def _shard_batch(self, batch: Any) -> Any:
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(self._sharding, x), batch)

    def __call__(self, state: TrainState) -> tuple[float, float]:
        """Return the mean loss and what it is the mean of (tokens).

        Layout:  batches [B/data ...], as in training -> two scalars each, summed on the host in float64.
        Cost:    every unit is gathered once per batch, and not at all in a backward.
        Memory:  one batch at a time; a batch is read while the one before it is computed.

        Raises:
          ValueError: if there is nothing to evaluate.
        """
        total = weight = 0.0
        batches = itertools.islice(self._batches(), self._num_batches or None)
        batch = next(batches, None)
        while batch is not None:
            sums = self._sums(state, self._shard_batch(batch))
            batch = next(batches, None)
            total, weight = total + float(sums[0]), weight + float(sums[1])
        if not weight:
            raise ValueError("the held-out batches hold no tokens; raise eval_fraction or eval_batches")
        return total / weight, weight
