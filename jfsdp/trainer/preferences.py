"""Preference losses: DPO and variants, for pairs of a chosen and a rejected answer and a frozen reference model.

A pair is one row [2 T] of a batch, the chosen answer first. Both answers are on one device, and the loss is a sum over
rows: exact for any mesh, program and number of microbatches. The reference contributes two numbers per pair, the
log-likelihoods of both answers. They are computed once, before training, and are part of the batch, so training keeps
only one model in memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jfsdp.arguments import checked
from jfsdp.train.step.loss import Loss
from jfsdp.trainer.job import Job

BETA = 0.1


class Kind(NamedTuple):
    """A preference loss.

    Attributes:
      of_margin: `f(ratio [B], beta)`: the loss of each pair. `ratio` is the log-likelihood of the chosen answer minus
        its log-likelihood under the reference, minus the same difference for the rejected answer.
      is_mean: whether log-likelihoods are divided by the number of tokens of the answer.
    """

    of_margin: Callable[[jax.Array, float], jax.Array]
    is_mean: bool


def _logistic(ratio: jax.Array, beta: float) -> jax.Array:
    return jax.nn.softplus(-beta * ratio)


def _squared(ratio: jax.Array, beta: float) -> jax.Array:
    return (ratio - 1 / (2 * beta)) ** 2


KINDS = {
    "dpo": Kind(_logistic, False),  # arXiv 2305.18290, equation 7
    "dpo_norm": Kind(_logistic, True),  # arXiv 2411.15124, section 5.1: length-normalized DPO
    "ipo": Kind(_squared, False),  # arXiv 2310.12036, equation 17
    "ipo_norm": Kind(_squared, True),  # the same over mean log-likelihoods, as TRL computes loss_type="ipo"
}


@checked
def preference_loss(
    log_likelihoods: Any, num_tokens: Any, reference: Any, *, kind: str = "dpo", beta: float = BETA
) -> Loss:
    """Return the preference loss, summed over pairs of answers.

    Layout:  [B 2] each, the chosen answer first -> scalars
    Dtype:   the dtype of the log-likelihoods.

    Args:
      log_likelihoods: sums over the tokens of each answer.
      num_tokens: number of tokens of each answer. A pair with an empty answer is padding and does not count.
      reference: log-likelihoods under the frozen reference.
      kind: "dpo", "dpo_norm", "ipo" or "ipo_norm"; see `KINDS`.
      beta: a larger value stays closer to the reference (tau in IPO).

    Returns:
      A `Loss` with `total` and `weight` (number of pairs). Its `aux` has `correct`, the number of pairs whose chosen
      answer gained more log-likelihood over the reference than the rejected one, and the sums of `reward_chosen` and
      `reward_rejected`, beta times these gains.

    Raises:
      ValueError: for an unknown kind, a beta that is not positive, and arrays of another shape.
    """
    _check(kind, beta)
    shapes = {jnp.shape(array) for array in (log_likelihoods, reference, num_tokens)}
    if len(shapes) > 1 or (*next(iter(shapes)), 0)[1] != 2:
        raise ValueError(
            f"log_likelihoods, reference and num_tokens have shapes {sorted(shapes)}; pass [B, 2] each, the chosen "
            "answer first"
        )
    is_real = jnp.all(num_tokens > 0, axis=1)
    gained = log_likelihoods - jax.lax.stop_gradient(reference)
    if KINDS[kind].is_mean:
        gained /= jnp.maximum(num_tokens, 1)
    gained = jnp.where(is_real[:, None], gained, 0.0)
    ratio = gained[:, 0] - gained[:, 1]
    rewards = beta * jax.lax.stop_gradient(gained)
    aux = {"correct": jnp.sum(is_real * (ratio > 0)), "reward_chosen": rewards[:, 0], "reward_rejected": rewards[:, 1]}
    return Loss(
        jnp.sum(is_real * KINDS[kind].of_margin(ratio, beta)),
        jnp.sum(is_real),
        {name: jnp.sum(value) for name, value in aux.items()},
    )


def pair_batch(batch_size: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch of pairs: tokens, targets, weights [B 2 T], and reference [B 2]."""
    ids = jax.ShapeDtypeStruct((batch_size, 2, seq_len), jnp.int32)
    weights = jax.ShapeDtypeStruct(ids.shape, jnp.float32)
    reference = jax.ShapeDtypeStruct((batch_size, 2), jnp.float32)
    return {"tokens": ids, "targets": ids, "weights": weights, "reference": reference}


def score_answers(job: Job, model: Any, batch: Mapping[str, Any]) -> tuple[jax.Array, jax.Array]:
    """Return the log-likelihood and the number of tokens of each answer of a batch. Layout: -> [B 2] float32 each.

    Raises:
      ValueError: if the job does not sum losses by row.
    """
    pairs, _, tokens = jnp.shape(batch["tokens"])
    rows = {name: batch[name].reshape(2 * pairs, tokens) for name in ("tokens", "targets", "weights")}
    sums = _need_row_loss(job)(model, rows)
    return -sums.total.reshape(pairs, 2), sums.weight.reshape(pairs, 2)


def with_preference(job: Job, kind: str | None, beta: float) -> Job:
    """Return a job that trains on pairs of answers instead of tokens. If `kind` is None, return the job unchanged.

    Raises:
      ValueError: as `preference_loss`, and for a job without tokens or `row_loss`.
    """
    if kind is None:
        if beta != BETA:
            raise ValueError(f"--beta {beta:g}: needs --preference")
        return job
    if job.data != "tokens":
        raise ValueError(f"--preference {kind}: needs a model of tokens, but job {job.name!r} has data={job.data!r}")
    _check(kind, beta)
    _need_row_loss(job)

    def loss(model: Any, batch: Mapping[str, Any]) -> Loss:
        return preference_loss(*score_answers(job, model, batch), batch["reference"], kind=kind, beta=beta)

    return dataclasses.replace(job, data="pairs", loss=loss, eval_loss=None, batch=pair_batch)


def _check(kind: str, beta: float) -> None:
    if kind not in KINDS:
        raise ValueError(f"preference={kind!r} is unknown; the preference losses are {', '.join(KINDS)}")
    if not 0 < beta < float("inf"):
        raise ValueError(f"beta={beta}: must be positive and finite; 0.1 is usual")


def _need_row_loss(job: Job) -> Callable[[Any, Any], Any]:
    if job.row_loss is None:
        raise ValueError(f"job {job.name!r} has no loss by row, which preferences need; set its field `row_loss`")
    return job.row_loss
