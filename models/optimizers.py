"""The optimizer of the models here, and which of their parameters it decays."""

from typing import Any

import jax
import optax

NORMS_AND_BIASES = frozenset({"scale", "bias"})


def decay_mask(params: Any, *, spared: frozenset[str] = NORMS_AND_BIASES) -> Any:
    """Say by name which parameters decay: all but norms and biases.

    Embeddings decay, as in Llama's own training: a tied table is also the head, whose logits decay keeps in bounds.

    Args:
      params: the tree of a model's parameters, nested by name; a dict from dotted name to array works too.
      spared: a parameter is spared where any part of its path is one of these.

    Returns:
      The same tree with bools.
    """

    def decays(path: Any, _: Any) -> bool:
        name = jax.tree_util.keystr(path, simple=True, separator=".")
        return spared.isdisjoint(name.split("."))

    return jax.tree_util.tree_map_with_path(decays, params)


def adamw(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return Llama's AdamW (GPT-3's too): b1 0.9, b2 0.95, decay 0.1 on what `decay_mask` names."""
    return optax.adamw(learning_rate, b1=0.9, b2=0.95, weight_decay=0.1, mask=decay_mask)
