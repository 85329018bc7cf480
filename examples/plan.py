"""Plan your own model on GPUs that you do not have: `python examples/plan.py`.

Needs the extra `plan`, and no GPU. The command line plans the same job, in this directory:

    JAX_PLATFORMS=cpu jfsdp plan --factory plan:job --gpu h100 --nodes 8 --batch-per-device 1024
"""

from __future__ import annotations

import os
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # before JAX is imported: it need not look for a GPU

import jax
import jax.numpy as jnp
import optax
from flax import nnx

import jfsdp
from jfsdp.launch.runtime import without_plugin_chatter
from jfsdp.plan import Cluster, find_gpu, make_plan, topology_devices

WIDTH, LAYERS = 8192, 16


class Block(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.up, self.down = nnx.Linear(WIDTH, 4 * WIDTH, rngs=rngs), nnx.Linear(4 * WIDTH, WIDTH, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        return x + self.down(nnx.gelu(self.up(self.norm(x))))


class Model(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.blocks = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x: jax.Array) -> jax.Array:
        for block in self.blocks:
            x = block(x)
        return x


def loss_fn(model: Model, batch: Any) -> jfsdp.Loss:
    errors = ((model(batch["x"]) - batch["y"]) ** 2).mean(-1)
    return jfsdp.Loss(errors.sum(), errors.size)


def batch_shapes(rows: int, seq_len: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
    """Return the shapes of a batch; a row has no length."""
    return dict.fromkeys(("x", "y"), jax.ShapeDtypeStruct((rows, WIDTH), jnp.bfloat16))


def job() -> jfsdp.trainer.Job:
    """Describe the model for the commands and the training script."""
    return jfsdp.trainer.Job(
        model=Model, loss=loss_fn, batch=batch_shapes, units=[Block], optimizer=optax.adamw, name="perceptron"
    )


def main(rows: int = 1024, strategies: tuple[str, ...] = ("ddp", "zero1", "full_shard")) -> dict[str, Any]:
    """Print a line for each strategy; return the plans by strategy. `rows` are those of one GPU."""
    cluster = Cluster(find_gpu("h100"), nodes=8)
    mesh = jfsdp.make_mesh(devices=topology_devices(cluster), fsdp=-1)
    plans = {}
    for strategy in strategies:
        policy = jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16")
        model = jfsdp.fully_shard(Model, mesh=mesh, strategy=strategy, units=[Block], mp_policy=policy, remat="full")
        step = model.train_step(loss_fn, optax.adamw(3e-4))
        with without_plugin_chatter():  # XLA logs an error for a step that does not fit
            plan = plans[strategy] = make_plan(step, batch_shapes(rows * mesh.size), cluster)
        verdict = "fits" if plan.fits else "does not fit"
        sent = plan.ledger.wire_bytes / 1e9
        print(f"{strategy}: {verdict}, {plan.needed_bytes / 2**30:.1f} GiB, sends {sent:.1f} GB, {plan.step_s:.3f} s")
    return plans


if __name__ == "__main__":
    main()
