"""Train your own model in your own loop, save it and resume it: `python examples/minimal.py`.

It runs on two simulated devices of a CPU. Run it twice: the second run continues where the first one ended.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
from flax import nnx

import jfsdp

ROWS, FEATURES = 64, 32


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.LayerNorm(FEATURES, rngs=rngs)
        self.up, self.down = nnx.Linear(FEATURES, 128, rngs=rngs), nnx.Linear(128, FEATURES, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(4)])
        self.out = nnx.Linear(FEATURES, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return self.out(x)[..., 0]


def loss_fn(model: Model, batch: Any) -> jfsdp.Loss:
    """Return the sum of the squared errors and the number of rows, so that the mean is exact on any mesh."""
    errors = (model(batch["x"]) - batch["y"]) ** 2
    return jfsdp.Loss(errors.sum(), errors.size)


def make_batch(number: int) -> dict[str, np.ndarray]:
    """Return the batch of a step; read yours from a file or a loader."""
    x = np.random.default_rng(number).standard_normal((ROWS, FEATURES), np.float32)
    return {"x": x, "y": np.sin(x[:, 0]) + x[:, 1] * x[:, 2]}


def main(run_dir: Path, steps: int = 200) -> float:
    """Train for `steps` steps, after those of the newest checkpoint; return the last loss."""
    # Shards every parameter over all devices. A `Block` is gathered when it computes, and freed again.
    model = jfsdp.fully_shard(Model, mesh=jfsdp.make_mesh(fsdp=-1), units=[Block])
    tx = optax.adamw(3e-3)
    step = model.train_step(loss_fn, tx, max_grad_norm=1.0)
    with jfsdp.checkpoint.Checkpointer(run_dir, keep=2) as checkpoints:
        done = checkpoints.latest() or 0
        state = checkpoints.restore(like=model.abstract_state(tx))[0] if done else model.init(tx, seed=0)
        for number in range(done + 1, done + steps + 1):
            state, metrics = step(state, make_batch(number))  # `state` is donated: use the new one
            if number % 50 == 0:
                print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)
                checkpoints.save(number, state)
    return float(metrics["loss"])


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # for a machine without an accelerator
    main(Path("runs/minimal"))
