"""The models' optimizer, and its mask of weight decay."""

from typing import Any

import jax
import optax

NORMS_AND_BIASES = frozenset({"scale", "bias", "gate_up_bias", "down_bias", "sinks"})


def decay_mask(params: Any, *, spared: frozenset[str] = NORMS_AND_BIASES) -> Any:
    """Return which parameters decay: all except norms and biases.

    Embeddings decay, as in Llama's training: a tied table is also the head, and decay limits its logits.

    Args:
      params: a model's parameters as a tree nested by name, or as a dict from dotted name to array.
      spared: names; a parameter with one of them in its path does not decay.

    Returns:
      The same tree with bools.
    """

    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return spared.isdisjoint(name.split("."))

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return the AdamW of Llama and GPT-3: b1 0.9, b2 0.95, decay 0.1 with `decay_mask`."""
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decay_mask)
