"""Learning rates by parameter: what an optimizer would do, times a factor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jfsdp.layout.select import select_leaves
from jfsdp.train.update.roles import param_name


def scale_rates(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply the updates of some parameters; for the end of a chain. Moves no data between devices.

    After AdamW that scales the learning rate, and with it the decay. A factor of 0 leaves a parameter as it is, and its
    optimizer states are kept all the same: `frozen=` saves them.

    Args:
      factors: by glob over dotted names of parameters, as `frozen=` takes them; the last that fits holds.

    Raises:
      ValueError: at `init`, for a glob that matches no trained parameter.
    """

    def init(params: Any) -> optax.EmptyState:
        _factors(params, factors)
        return optax.EmptyState()

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        del params
        found = _factors(updates, factors)
        scaled = jax.tree_util.tree_map_with_path(lambda path, x: x * found.get(param_name(path), 1.0), updates)
        return scaled, state

    return optax.GradientTransformation(init, update)


def _factors(tree: Any, factors: Mapping[str, float]) -> dict[str, float]:
    leaves = {param_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(tree)}
    found: dict[str, float] = {}
    for glob, factor in factors.items():
        found |= dict.fromkeys(select_leaves("rate_scale", glob, leaves, {}), factor)
    return found
