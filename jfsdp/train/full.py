"""One whole array of a sharded state, by name."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.layout.table import close_names
from jfsdp.train.state import TrainState


def full(state: TrainState, path: str) -> jax.Array:
    """Return one array of a state, whole and of logical shape; gathers nothing else.

    Layout:  [D+pad/axes F] -> [D F] on every device, in the dtype at rest.
    Cost:    one all-gather of that array.
    Memory:  the whole array on every device, until it is dropped.

    Args:
      path: a parameter's name (`embed.embedding`), or a name in checkpoints (`opt_state.0.mu.embed.embedding`,
        `params.embed.embedding`), or one of the model's other state (`batch_stats.norm.mean`).

    Raises:
      ValueError: for an unknown name, listing close ones; or for a state of shapes only.
    """
    if not isinstance(state, TrainState):
        raise ValueError(f"full takes (state, path), and the state given is a {type(state).__name__}")
    values, shapes = _named(state)
    if path not in values:
        raise ValueError(f"{path}: the state has no array of this name; {close_names(path, values)}")
    value, inside = values[path], tuple(map(slice, shapes[path]))
    if not isinstance(value, jax.Array):
        raise ValueError(f"{path}: the state holds shapes only; pass one that init or restore returned")
    whole = NamedSharding(value.sharding.mesh, PartitionSpec())  # type: ignore[attr-defined]
    return jax.jit(lambda x: x[inside], out_shardings=whole)(value)


def _named(state: TrainState) -> tuple[dict[str, Any], dict[str, tuple[int, ...]]]:
    """Return the arrays of a state, and their logical shapes, by every name that `full` takes."""
    arrays = jax.tree.leaves(state.opt_state)
    values = {**state.model_state, **state.params, **{f"params.{path}": x for path, x in state.params.items()}}
    values |= {role.name: x for role, x in zip(state.roles.arrays, arrays, strict=True)}
    other = {name: tuple(x.shape) for name, x in state.model_state.items()}
    shapes = {leaf.path: leaf.shape for leaf in state.layout.leaves}
    shapes |= {f"params.{path}": shape for path, shape in shapes.items()}
    return values, other | shapes | {role.name: role.shape for role in state.roles.arrays}
