"""A training state as arrays under logical names, and the manifest that says what they are.

[Note: what a checkpoint holds]
Arrays are stored by logical name: `params.<name>`, `opt_state.<path>`, `model_state.<name>`, `step`, `num_skipped`.
No strategy and no mesh is part of a name. A leaf that its layout pads is written with its padding, zeros at the end
of one dim; the manifest has its logical shape, and a restore cuts or pads to what the new layout stores. The
low-precision copy of
strategies that keep one is not written: it is the cast of the master.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.layout.report import layout_to_dict, list_differences
from jfsdp.train.roles import dotted
from jfsdp.train.state import TrainState

FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Entry:
    """One array of a state: its value (or shape), its logical shape, and its rng implementation if it is a key."""

    value: Any
    shape: tuple[int, ...]
    key_impl: str | None

    def to_dict(self) -> dict[str, Any]:
        return {"shape": list(self.shape), "dtype": str(jnp.dtype(self.value.dtype)), "key_impl": self.key_impl}


def entries(state: TrainState) -> dict[str, Entry]:
    """Name every array of a state (or of its shapes). Keys become their uint32 data. Moves no data between devices."""
    shapes = {role.name: role.shape for role in state.roles.arrays}
    shapes |= {f"params.{leaf.path}": leaf.shape for leaf in state.layout.leaves}
    named: dict[str, Entry] = {}
    for path, value in jax.tree_util.tree_leaves_with_path(_parts(state)):
        data, impl = _key_data(value)
        stored = tuple(data.shape)
        named[dotted(path)] = Entry(data, stored if impl else shapes.get(dotted(path), stored), impl)
    return named


def rebuild(like: TrainState, arrays: Mapping[str, jax.Array], key_impls: Mapping[str, str | None]) -> TrainState:
    """Build a state with the structure of `like` out of named arrays. The low-precision copy is left empty."""
    parts = _parts(like)
    paths, tree = jax.tree_util.tree_flatten_with_path(parts)
    names = [dotted(path) for path, _ in paths]
    values = [
        jax.random.wrap_key_data(arrays[name], impl=key_impls[name]) if key_impls[name] else arrays[name]
        for name in names
    ]
    return TrainState(**jax.tree.unflatten(tree, values), work={}, layout=like.layout, roles=like.roles)


def _parts(state: TrainState) -> dict[str, Any]:
    fields = [field.name for field in dataclasses.fields(state) if field.name not in ("work", "layout", "roles")]
    return {name: getattr(state, name) for name in fields}


def _key_data(value: Any) -> tuple[Any, str | None]:
    if not jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return value, None
    impl = str(jax.random.key_impl(value)) if isinstance(value, jax.Array) else str(value.dtype)[4:-1]
    if isinstance(value, jax.Array):
        return jax.random.key_data(value), impl
    data = jax.eval_shape(jax.random.key_data, value)
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=value.sharding), impl


def make_manifest(state: TrainState, extra: Any) -> dict[str, Any]:
    """Describe a state as plain data: every array's logical shape and dtype, the layout, and the caller's extra."""
    return {
        "format": FORMAT,
        "arrays": {name: entry.to_dict() for name, entry in entries(state).items()},
        "layout": layout_to_dict(state.layout),
        "extra": extra,
    }


def check_matches(path: Any, manifest: Mapping[str, Any], like: TrainState) -> None:
    """Compare what a checkpoint holds with what is asked for, by name, logical shape and dtype.

    Raises:
      ValueError: listing missing, extra and differing names, or for a checkpoint of another format.
    """
    if manifest.get("format") != FORMAT:
        raise ValueError(
            f"checkpoint {path}: has format {manifest.get('format')}; this version of jfsdp reads {FORMAT}"
        )
    there = {name: _show(entry) for name, entry in manifest["arrays"].items()}
    wanted = {name: _show(entry.to_dict()) for name, entry in entries(like).items()}
    kinds = ("in the checkpoint but not in the model", "missing from the checkpoint", "of another shape or dtype")
    lines = list_differences(there, wanted, owners=("checkpoint has", "the model has"), kinds=kinds)
    if lines:
        raise ValueError(f"checkpoint {path} is of another model or optimizer:\n{lines}")


def _show(entry: Mapping[str, Any]) -> str:
    return f"{entry['dtype']}{entry['shape']}"
