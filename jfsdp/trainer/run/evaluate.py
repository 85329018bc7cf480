"""Held-out loss: an exact mean over what a fixed set of batches counts (tokens, rows)."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.step.loss import Loss, as_loss, merge, metrics_of, numbers
from jfsdp.train.step.step import LossFn, batch_sharding


class Evaluation(NamedTuple):
    """What an evaluation found.

    Attributes:
      loss: the mean over what was counted.
      weight: how much that was (tokens, rows).
      aux: what the loss returns beside, by name: means, and maxima over all batches.
    """

    loss: float
    weight: float
    aux: dict[str, float]


def shard_batch(mesh: Any, batch: Any) -> Any:
    """Put this process's rows of a batch on its devices, as its part of the global arrays."""
    put = lambda x: jax.make_array_from_process_local_data(batch_sharding(mesh, x), np.asarray(x))  # noqa: E731
    return jax.tree.map(put, batch)


def make_evaluator(
    model: ShardedModel, loss_fn: LossFn, batches: Callable[[], Iterable[Any]], num_batches: int = 0
) -> Callable[[TrainState], Evaluation]:
    """Return `f(state)`, the loss of held-out batches. It compiles once.

    Layout:  batches [B/data ...], as in training -> scalars each, summed on the host in float64.
    Cost:    every unit is gathered once per batch, and not at all in a backward.
    Memory:  one batch at a time; a batch is read while the one before it is computed.

    Args:
      loss_fn: the job's `eval_loss`, or its `loss`.
      batches: `f()` starts an iterator over this process's share of the same batches every time; in every process
        equally many, their rows together a multiple of the data shards.
      num_batches: how many of them; 0 takes all.

    Raises:
      ValueError: in `f`, if there is nothing to evaluate.
    """
    compute_sums = model.forward(lambda module, batch: as_loss(loss_fn(module, batch)))

    def evaluate(state: TrainState) -> Evaluation:
        sums: Loss | None = None
        taken = itertools.islice(batches(), num_batches or None)
        batch = next(taken, None)
        while batch is not None:
            more = compute_sums(state, shard_batch(model.mesh, batch))
            batch = next(taken, None)
            more = jax.tree.map(lambda x: np.asarray(x, np.float64), more)
            sums = more if sums is None else merge(operator.add, np.maximum, sums, more)
        if sums is None or not sums.weight:
            raise ValueError("nothing counts in the held-out batches; raise eval_fraction or eval_batches")
        mean = lambda total, weight: np.where(weight, total / np.where(weight, weight, 1.0), 0.0)  # noqa: E731
        found = metrics_of(sums.aux or {}, sums.weight, mean)
        return Evaluation(float(sums.total / sums.weight), float(sums.weight), numbers(found))

    return evaluate
