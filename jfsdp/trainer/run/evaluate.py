"""Evaluation: the exact mean loss over a fixed set of held-out batches."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import numpy as np

from jfsdp.layout.mesh import row_shares
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState
from jfsdp.train.step.loss import Loss, as_loss, merge, metrics_of, numbers
from jfsdp.train.step.step import LossFn, batch_sharding, place_rows


class Evaluation(NamedTuple):
    """The result of an evaluation.

    Attributes:
      loss: mean per token (or row).
      weight: number of tokens (or rows).
      aux: the loss's aux values by name: means, and maxima over all batches.
    """

    loss: float
    weight: float
    aux: dict[str, float]


def shard_batch(mesh: Any, batch: Any) -> Any:
    """Return a batch as global arrays, from this process's rows."""
    num = len(set(row_shares(mesh).values()))
    return jax.tree.map(lambda x: place_rows(batch_sharding(mesh, x), np.asarray(x), num), batch)


def make_evaluator(
    model: ShardedModel, loss_fn: LossFn, batches: Callable[[], Iterable[Any]], num_batches: int = 0
) -> Callable[[TrainState], Evaluation]:
    """Return `f(state)`, which computes the loss of held-out batches. It compiles once.

    Layout:  batches [B/data ...], as in training -> scalars each, summed on the host in float64.
    Cost:    every unit is gathered once per batch.
    Memory:  one batch on the devices; the next batch is read during its computation.

    Args:
      loss_fn: the job's `eval_loss`, or its `loss`.
      batches: `f()` returns an iterator over this process's share of the batches, the same in every call. Every process
        must have the same number of batches, and the rows of all processes must be a multiple of the data shards.
      num_batches: number of batches; 0: all.

    Raises:
      ValueError: in `f`, if the batches are empty or all their weights are 0.
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
            raise ValueError("the held-out batches have no weight; raise eval_fraction or eval_batches")
        mean = lambda total, weight: np.where(weight, total / np.where(weight, weight, 1.0), 0.0)  # noqa: E731
        found = metrics_of(sums.aux or {}, sums.weight, mean)
        return Evaluation(float(sums.total / sums.weight), float(sums.weight), numbers(found))

    return evaluate
