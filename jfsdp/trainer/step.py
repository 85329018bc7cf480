"""A run's model, optimizer, schedule, step and batch shapes, from options.

The training script runs this step, and plans lower the same step for other devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jfsdp.arguments import did_you_mean
from jfsdp.layout.mesh import CONTEXT, num_contexts
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.step.step import TrainStep
from jfsdp.trainer.job import Job
from jfsdp.trainer.options import StepOptions, make_optimizer, shard_job, train_arguments

PACKING = ("segment_ids", "positions")


def make_step(
    options: StepOptions, job: Job, mesh: Any, schedule: Callable[[int], Any], *, check_loss: bool = True
) -> tuple[ShardedModel, optax.GradientTransformation, TrainStep]:
    """Shard a job's model on a mesh and build its optimizer and step. Allocates nothing.

    Raises:
      ValueError: for invalid values and combinations.
    """
    if job.data == "pairs" and num_contexts(mesh) > 1:
        raise ValueError(
            f"mesh axis {CONTEXT!r} (size {num_contexts(mesh)}): a preference loss needs the sums of whole rows, which "
            "are not available if the axis splits rows; give its devices to 'fsdp' or 'tensor'"
        )
    arguments = train_arguments(options)
    model = shard_job(options, job, mesh)
    tx = make_optimizer(options, job, model, schedule)
    return model, tx, model.train_step(job.loss, tx, **arguments, check_loss=check_loss)


SCHEDULES = ("cosine", "linear", "wsd", "constant")


def make_schedule(peak: float, warmup: int, decay_steps: int, floor: float, kind: str = "cosine") -> Callable[..., Any]:
    """Return the learning rate by number of updates: linear warmup to the peak, then decay to `floor * peak`.

    Args:
      kind: one of `SCHEDULES`. wsd stays at the peak and decays linearly in the last tenth of `decay_steps`; constant
        never decays.

    Raises:
      ValueError: for numbers out of range.
    """
    if not 0 < peak < math.inf or not 0 <= floor <= 1:
        raise ValueError(
            f"learning_rate={peak} must be positive and finite, and min_learning_rate={floor} a fraction 0..1 of it"
        )
    if not 0 <= warmup < decay_steps:
        raise ValueError(f"warmup={warmup} must be at least 0 and below decay_steps={decay_steps} (default: steps)")
    if kind not in SCHEDULES:
        raise ValueError(
            f"lr_schedule={kind!r} is unknown{did_you_mean(kind, SCHEDULES)}; the schedules are {', '.join(SCHEDULES)}"
        )
    if kind == "cosine":
        return optax.warmup_cosine_decay_schedule(peak / (warmup + 1), peak, warmup, decay_steps, floor * peak)
    stable = optax.warmup_constant_schedule(peak / (warmup + 1), peak, warmup)
    if kind == "constant":
        return stable
    start = warmup if kind == "linear" else max(warmup, decay_steps - max(decay_steps // 10, 1))
    return optax.join_schedules([stable, optax.linear_schedule(peak, floor * peak, decay_steps - start)], [start])


def make_batch(job: Job, rows: int, row_items: int, *, cross_documents: bool = False) -> Any:
    """Return the shapes of a run's global batch. For a job that the script cannot train, return those of `job.batch`.

    Rows of tokens contain several documents, so batches have weights, segment ids and positions. With
    `cross_documents` a row is one document, and only weights are added.
    """
    batch = job.batch(rows, row_items)
    if job.data != "tokens" or not isinstance(batch, Mapping) or not {"tokens", "targets"} <= batch.keys():
        return batch
    shape = (rows, row_items)
    made = {name: jax.ShapeDtypeStruct(shape, np.int32) for name in ("tokens", "targets", *PACKING)}
    made["weights"] = jax.ShapeDtypeStruct(shape, np.float32)
    return without_packing(made) if cross_documents else made


def describe_attention(job: Job, model: ShardedModel, row_items: int, *, cross_documents: bool) -> str:
    """Return the job's description of its attention kernel on the device of the trace; "" if it has none."""
    if job.attention is None:
        return ""
    is_packed = job.data == "tokens" and not cross_documents
    return job.attention(model.layout.mp_policy.param_dtype or "float32", row_items, is_packed=is_packed)


_SAMPLE = 64  # number of tokens of a batch whose keys are counted


def seen_keys(batch: Any) -> list[float] | None:
    """Return the number of keys that a sample of tokens attends to, causally and within documents.

    Args:
      batch: arrays of this process; `positions` count from the start of each document. Without them, return None.
    """
    positions = batch.get("positions") if isinstance(batch, Mapping) else None
    if positions is None:
        return None
    tokens = np.linspace(0, positions.size - 1, _SAMPLE).astype(int)
    return (np.ravel(positions)[tokens] + 1.0).tolist()


def causal_flops(flops: Callable[[float], float], keys: Sequence[float]) -> float:
    """Return the mean FLOPs of tokens that attend to these numbers of keys (not linear, because of windows)."""
    return sum(map(flops, keys)) / len(keys)


def causal_keys(seq_len: float) -> list[float]:
    """Return the numbers of keys of a sample of tokens, evenly spaced over one document."""
    return [seq_len * (place + 0.5) / _SAMPLE for place in range(_SAMPLE)]


def without_packing(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Drop segment ids and positions of rows that are one document: attention without a mask is cheaper."""
    return {name: array for name, array in batch.items() if name not in PACKING}
