"""Train a Linen model with dropout and evaluate it: `python examples/linen.py`, on two simulated devices of a CPU."""

from __future__ import annotations

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax

import jfsdp

ROWS, LENGTH, VOCABULARY, WIDTH = 32, 16, 64, 64


class Block(nn.Module):
    @nn.compact
    def __call__(self, x: jax.Array, *, train: bool) -> jax.Array:
        mask = nn.make_causal_mask(jnp.ones(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(num_heads=4)(nn.LayerNorm()(x), mask=mask)
        hidden = nn.gelu(nn.Dense(4 * WIDTH, name="up")(nn.LayerNorm()(x)))
        return x + nn.Dropout(0.1, deterministic=not train)(nn.Dense(WIDTH, name="down")(hidden))


class LanguageModel(nn.Module):
    @nn.compact
    def __call__(self, tokens: jax.Array, *, train: bool = False) -> jax.Array:
        x = nn.Embed(VOCABULARY, WIDTH, name="embed")(tokens)
        x = x + self.param("positions", nn.initializers.normal(0.02), (LENGTH, WIDTH))
        for number in range(2):
            x = Block(name=f"block_{number}")(x, train=train)
        return nn.Dense(VOCABULARY, name="head")(x)


def make_loss(*, train: bool) -> Any:
    """Return a loss whose model is the module, bound to its variables: call it without `rngs` and `mutable`."""

    def loss_fn(model: Any, batch: Any) -> jfsdp.Loss:
        logits = model(batch["tokens"], train=train)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        right = (logits.argmax(-1) == batch["targets"]).sum()
        return jfsdp.Loss(losses.sum(), losses.size, {"accuracy": jfsdp.Mean(right, losses.size)})

    return loss_fn


def make_batch(number: int) -> dict[str, np.ndarray]:
    """Return rows that count up by a step of 1 to 3, so that the next token follows from two."""
    rng = np.random.default_rng(number)
    start, by = rng.integers(VOCABULARY, size=(ROWS, 1)), rng.integers(1, 4, size=(ROWS, 1))
    ids = ((start + by * np.arange(LENGTH + 1)) % VOCABULARY).astype(np.int32)
    return {"tokens": ids[:, :-1], "targets": ids[:, 1:]}


def main(steps: int = 150) -> float:
    """Train and print; return the accuracy on rows that were not trained on."""
    example = jax.ShapeDtypeStruct((1, LENGTH), jnp.int32)  # the argument of `init`
    model = jfsdp.fully_shard((LanguageModel(), example), mesh=jfsdp.make_mesh(fsdp=-1), units=[Block])
    tx = optax.adamw(3e-3)
    step, evaluate = model.train_step(make_loss(train=True), tx), model.forward(make_loss(train=False))
    state = model.init(tx, seed=0)
    for number in range(1, steps + 1):
        state, metrics = step(state, make_batch(number))
        if number % 50 == 0:
            print(f"step {number}: loss {float(metrics['loss']):.4f}", flush=True)
    right = evaluate(state, make_batch(0)).aux["accuracy"]
    accuracy = float(right.total / right.weight)
    print(f"held out: accuracy {accuracy:.1%}")
    return accuracy


if __name__ == "__main__":
    jax.config.update("jax_num_cpu_devices", 2)  # for a machine without an accelerator
    main()
