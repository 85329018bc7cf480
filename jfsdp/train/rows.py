"""The rows of a batch: in microbatches, and on the device that has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.engine.local import LocalEngine
from jfsdp.engine.unit import Arrays
from jfsdp.train.survey import is_key


def on_each_device(
    local: Callable[..., Any],
    engine: LocalEngine,
    own: tuple[str, ...],
    out_specs: Any,
    source: Arrays,
    model_state: Arrays,
    batch: Any,
    *more: Any,
) -> Any:
    """Run `local` on each device, with its part of the weights and its own rows of the batch. Moves no data itself.

    Args:
      engine: its layout says how the weights are split.
      own: the mesh axes that are left to XLA and to what the model states.
      more: what every device gets whole, as it does the model's state.
    """
    layout, mesh, whole = engine.layout, engine.mesh, PartitionSpec()
    leaves = [layout.by_path[path] for path in source]
    at_rest = {leaf.path: layout.on_device(mesh, leaf, leaf.source).spec for leaf in leaves}
    rows = PartitionSpec(layout.axes_on(mesh, layout.data_axes))
    run = jax.shard_map(
        local,
        mesh=mesh,
        axis_names={axis for axis in mesh.axis_names if axis not in own},
        in_specs=(at_rest, whole, rows, *[whole] * len(more)),
        out_specs=out_specs,
        check_vma=False,
    )
    return run(source, model_state, batch, *more)


def fold_keys(state: Arrays, index: jax.Array) -> Arrays:
    """Give this device its own rng keys. Moves no data."""
    fold = functools.partial(_fold_key, index=index)
    return {name: fold(value) if is_key(value) else value for name, value in state.items()}


def _fold_key(keys: jax.Array, index: jax.Array) -> jax.Array:
    folded = jax.vmap(jax.random.fold_in, (0, None))(keys.reshape(-1), index)
    return folded.reshape(keys.shape)


def split_microbatches(batch: Any, num: int, sharding: NamedSharding | None) -> Any:
    """Cut a batch [B, ...] into [A, B/A, ...] so that every device keeps the rows it has.

    Layout:  [B/data ...] -> [A B/A/data ...]; microbatch a holds the rows b with b % A == a.
    Cost:    none: a plain reshape to [A, B/A] would move rows between devices.

    Args:
      sharding: that of the result: dim 1 over the data axes; None inside a `shard_map`.
    """

    def split(x: jax.Array) -> jax.Array:
        rows = x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)
        return rows if sharding is None else jax.lax.with_sharding_constraint(rows, sharding)

    return jax.tree.map(split, batch)
