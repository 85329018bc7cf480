"""Learning rates per parameter, as factors of an optimizer's updates."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jfsdp.layout.select import select_leaves
from jfsdp.train.update.roles import param_name


def scale_rates(factors: Mapping[str, float]) -> optax.GradientTransformation:
    """Multiply the updates of selected parameters, at the end of an `optax.chain`. Needs no communication.

    After AdamW this scales the learning rate and the weight decay. A factor of 0 keeps a parameter unchanged, but its
    optimizer states need memory; with `frozen=` they do not.

    Args:
      factors: factor by glob over dotted names of parameters, as in `frozen=`; the last matching glob applies.

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
