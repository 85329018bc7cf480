"""Gathering of one array of a sharded state, by name."""

from __future__ import annotations

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.arguments import checked
from jfsdp.layout.layout import close_names
from jfsdp.train.state import TrainState, check_live


@checked
def gather_leaf(state: TrainState, path: str) -> jax.Array:
    """Return one array of a state, gathered and in its logical shape. Gathers nothing else.

    Layout:  [D+pad/axes F] -> [D F] on every device, in the dtype at rest.
    Cost:    one all-gather of that array.
    Memory:  the whole array on every device, for as long as the result is kept.

    Args:
      path: the name of a parameter (`embed.embedding`), of an array in checkpoints (`opt_state.0.mu.embed.embedding`,
        `params.embed.embedding`), or of the model's other state (`batch_stats.norm.mean`).

    Raises:
      ValueError: for an unknown name, listing close ones; for a state of shapes without arrays.
    """
    shapes = jax.eval_shape(_logical, state)
    if path not in shapes:
        raise ValueError(f"{path}: the state has no array of this name; {close_names(path, shapes)}")
    check_live(path, state)
    whole = NamedSharding(state.mesh, PartitionSpec())
    return jax.jit(lambda state: _logical(state)[path], out_shardings=whole)(state)


def _logical(state: TrainState) -> dict[str, jax.Array]:
    """Return the arrays of a state in their logical shapes, by all names that `gather_leaf` accepts."""
    arrays, by_path = jax.tree.leaves(state.opt_state), state.layout.by_path
    params = {path: _unpad(x, by_path[path].shape) for path, x in state.params.items()}
    named = {role.name: _unpad(x, role.shape) for role, x in zip(state.roles.arrays, arrays, strict=True)}
    return {**state.model_state, **params, **{f"params.{path}": x for path, x in params.items()}, **named}


def _unpad(value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    return value[tuple(map(slice, shape))]
