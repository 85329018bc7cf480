"""Training on rows that several processes share; called through `tests.processes`."""

from typing import Any

import jax
import numpy as np
import optax

import jfsdp
from tests.context.test_over_context import ROWS, Layer, Net, make_batch, token_loss
from tests.sharding import fully_shard


def train(mesh: dict[str, int], program: str, wrong: bool = False) -> list[float]:
    """Return the losses of three steps. Each process passes its rows, with all tokens."""
    with jax.enable_x64(True):
        made = jfsdp.make_mesh(**{"fsdp": 1, **mesh}, devices=jax.devices()[: int(np.prod(list(mesh.values())))])
        model = fully_shard(Net, mesh=made, units=[Layer], min_size=0)
        tx = optax.adam(1e-2)
        step, state = model.train_step(token_loss, tx, program=program, check_loss=False), model.init(tx, 0)
        rows = step.own_rows(ROWS)
        batch: Any = {name: x[rows.start : rows.stop] for name, x in make_batch(packed=True).items()}
        if wrong:  # this process's tokens only
            batch = {name: np.roll(x, jax.process_index(), axis=1) for name, x in batch.items()}
        losses = []
        for _ in range(3):
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
        return losses
