"""Train from a Hugging Face dataset through a PyTorch DataLoader: `python examples/dataloaders.py`.

It runs on two simulated devices of a CPU. In several processes (docs/clusters.md) each reads its own rows of every
global batch. Needs `pip install datasets torch`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import datasets
import jax
import numpy as np
import optax
from flax import nnx
from torch.utils.data import DataLoader

import jfsdp

ROWS, FEATURES, CLASSES = 64, 32, 4  # rows per global batch


class Batches:
    """Indices of this process's rows of each global batch, in another order for each pass: a `batch_sampler`.

    Args:
      num_rows: of the data.
      own: `step.own_rows(ROWS)`.
      done: batches that were trained on before a restart.
    """

    def __init__(self, num_rows: int, own: range, done: int = 0, seed: int = 0):
        self.num_rows, self.own, self.done, self.seed = num_rows, own, done, seed

    def __iter__(self) -> Iterator[list[int]]:
        per_pass = self.num_rows // ROWS
        while True:
            number, place = divmod(self.done, per_pass)
            order = np.random.default_rng([self.seed, number]).permutation(self.num_rows)
            batch = order[place * ROWS : (place + 1) * ROWS]
            self.done += 1
            yield batch[self.own.start : self.own.stop].tolist()


def stack(rows: list[dict[str, Any]]) -> dict[str, np.ndarray]:
    """Make a batch of rows; NumPy arrays, since a step takes no tensors of PyTorch."""
    return {name: np.stack([row[name] for row in rows]) for name in rows[0]}


def make_data(num_rows: int) -> datasets.Dataset:
    """Make rows to learn from; `datasets.load_dataset(...)` reads real ones."""
    rng = np.random.default_rng(0)
    centers = rng.standard_normal((CLASSES, FEATURES), np.float32)
    labels = rng.integers(CLASSES, size=num_rows)
    features = centers[labels] + 2.5 * rng.standard_normal((num_rows, FEATURES), np.float32)
    made = datasets.Dataset.from_dict({"features": features, "label": labels.astype(np.int32)})
    return made.with_format("numpy", dtype=None)


class Classifier(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.hidden, self.out = nnx.Linear(FEATURES, 256, rngs=rngs), nnx.Linear(256, CLASSES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.out(nnx.relu(self.hidden(x)))


def loss(model: Classifier, batch: Any) -> jfsdp.Loss:
    logits = model(batch["features"].astype("float32"))
    each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["label"])
    return jfsdp.Loss(
        each.sum(), each.size, {"correct": jfsdp.Mean((logits.argmax(-1) == batch["label"]).sum(), each.size)}
    )


def main(run_dir: Path, steps: int = 60, num_workers: int = 1) -> float:
    """Train up to a step, or go on from the newest checkpoint; return the loss of the last step."""
    model = jfsdp.fully_shard(Classifier, mesh=jfsdp.make_mesh(fsdp=-1))
    tx = optax.adam(1e-2)
    step, data = model.train_step(loss, tx), make_data(2048)
    with jfsdp.checkpoint.Checkpointer(run_dir, keep=1) as checkpoints:
        state, done = model.init(tx), 0
        if checkpoints.steps():
            state, extra = checkpoints.restore(like=state)
            done = extra["batches"]
        sampler = Batches(len(data), step.own_rows(ROWS), done)
        # Workers read ahead; with JAX in this process they must not be forks of it.
        workers = {"num_workers": num_workers, "multiprocessing_context": "spawn" if num_workers else None}
        loader = DataLoader(data, batch_sampler=sampler, collate_fn=stack, **workers)  # type: ignore[arg-type]
        if done >= steps:
            raise SystemExit(f"{run_dir}: step {done} of {steps} is done; raise steps to go on")
        metrics: Any = None
        for number, batch in enumerate(loader, done + 1):
            if number > steps:
                break
            state, metrics = step(state, step.shard_batch(batch))
            if number % 20 == 0:
                print(f"step {number}: loss {float(metrics['loss']):.4f}, accuracy {float(metrics['correct']):.1%}")
                # `sampler.done` is ahead by what workers have read: the loop counts the batches that were trained on.
                checkpoints.save(number, state, {"batches": number})
    return float(metrics["loss"])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # for a machine without an accelerator
    main(Path("runs/dataloaders"))
