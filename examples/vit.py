"""Train a small Vision Transformer in a custom loop: `python examples/vit.py`, on two simulated devices of a CPU.

The pictures are made here. The training script trains the same job, with checkpoints, evaluation and `--resume`, since
the job brings its data:

    python scripts/train.py --factory examples.vit:job --steps 100 --learning-rate 2e-3 --batch-per-device 32
"""

from __future__ import annotations

import functools
from typing import Any

import grain
import jax
import numpy as np

import jfsdp
from jfsdp_models.losses import classification_loss  # pyright: ignore[reportMissingImports]
from jfsdp_models.vit import EncoderBlock, ViT, adamw, decay_of_kernels, evaluation_loss, placements  # pyright: ignore[reportMissingImports]
from jfsdp_models.vit_config import PRESETS, flops_per_image  # pyright: ignore[reportMissingImports]

CONFIG = PRESETS["vit-tiny"]
UNITS = [{"match": EncoderBlock, "stacked": 1}]
SHAPE = (CONFIG.image_size, CONFIG.image_size, CONFIG.channels)


class Pictures:
    """Patterns under noise, ten kinds of them. Each is computed from its number, as others are read from a file."""

    def __init__(self, first: int, count: int):
        self.first, self.count = first, count

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: Any) -> dict[str, Any]:
        label = int(index) % CONFIG.num_classes
        pattern = np.random.default_rng(label).standard_normal(SHAPE, np.float32)
        noise = np.random.default_rng([1, self.first + int(index)]).standard_normal(SHAPE, np.float32)
        return {"images": pattern + 0.3 * noise, "labels": np.int32(label), "weights": np.float32(1)}


def train_rows(share: Any) -> grain.MapDataset:
    """Return the rows of one pass, in an order that depends on the seed."""
    return grain.MapDataset.source(Pictures(0, 2000)).shuffle(seed=share.seed)


def held_out_rows(share: Any) -> grain.MapDataset:
    """Return the rows of the evaluation."""
    return grain.MapDataset.source(Pictures(2000, 200))


def batch_shapes(rows: int, seq_len: int) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch. A row has no length, so `seq_len` is not read."""
    shapes = {"images": (SHAPE, np.float32), "labels": ((), np.int32), "weights": ((), np.float32)}
    return {name: jax.ShapeDtypeStruct((rows, *shape), dtype) for name, (shape, dtype) in shapes.items()}


def job() -> jfsdp.trainer.Job:
    """Describe the same for scripts/train.py, jfsdp plan and jfsdp explain."""
    return jfsdp.trainer.Job(
        model=functools.partial(ViT, CONFIG),
        loss=classification_loss,
        eval_loss=evaluation_loss,
        batch=batch_shapes,
        units=UNITS,
        optimizer=adamw,
        decay_mask=decay_of_kernels,
        data=train_rows,
        eval_data=held_out_rows,
        flops_per_token=functools.partial(flops_per_image, CONFIG),
        placements=placements(),
        config=CONFIG,
        name="vit",
    )


def main(steps: int = 100, rows: int = 32) -> float:
    """Train and print; return the last step's accuracy."""
    model = jfsdp.fully_shard(functools.partial(ViT, CONFIG), units=UNITS)
    tx = adamw(2e-3)
    state, step = model.init(tx, seed=0), model.train_step(classification_loss, tx)
    pictures = grain.MapDataset.source(Pictures(0, 2000)).shuffle(seed=0).repeat()
    accuracy = 0.0
    for number, batch in zip(range(1, steps + 1), pictures.batch(rows)):
        state, metrics = step(state, batch)
        if number % 20 == 0 or number == steps:
            accuracy = float(metrics["correct"])
            print(f"step {number}: loss {float(metrics['loss']):.3f}, accuracy {accuracy:.1%}", flush=True)
    return accuracy


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # of a machine without an accelerator
    main()
