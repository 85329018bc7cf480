"""A state from one storage form into the other: what leaves a run, or comes from outside, stands leaf by leaf."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jfsdp.engine.engine import to_device
from jfsdp.engine.flat import pack_tree, unpack_tree
from jfsdp.layout.table import Layout
from jfsdp.train.roles import pack_opt_state, pack_roles, unpack_roles
from jfsdp.train.state import TrainState, state_shardings, with_shardings


def by_leaf(state: TrainState) -> TrainState:
    """Return a state (or its shapes) with every leaf stored by itself; one that is already, as it is.

    Layout:  [layers, chunks * chunk / axes] -> [D/axes F] each.
    Cost:    none between devices.
    Memory:  a second copy of the state, under flat storage, until one of the two is dropped.
    """
    return _place(opened, state) if state.layout.buffers else state


def in_storage(state: TrainState, layout: Layout) -> TrainState:
    """Return a state that stands leaf by leaf in the storage form of a layout of the same leaves; undoes `by_leaf`.

    Layout, Cost, Memory: as `by_leaf`.
    """
    return _place(_packer(layout), state) if layout.buffers else state


@functools.lru_cache(maxsize=8)
def _packer(layout: Layout) -> Callable[[TrainState], TrainState]:
    """Return one function for one layout, so that it is compiled once."""
    return functools.partial(_packed, layout=layout)


def shapes_by_leaf(state: TrainState) -> TrainState:
    """Return the shapes and shardings of a state with every leaf stored by itself. Moves no data."""
    return by_leaf(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))


def opened(state: TrainState) -> TrainState:
    """Do what `by_leaf` does inside a `jit`, without placing anything."""
    layout = state.layout
    roles = unpack_roles(layout, state.opt_state, state.roles)[1]
    trees = {name: unpack_tree(layout, tree) for name, tree in _on_device(state).items()}
    return dataclasses.replace(state, **trees, layout=layout.per_parameter(), roles=roles)


def _packed(state: TrainState, layout: Layout) -> TrainState:
    roles = pack_roles(layout, state.opt_state, state.roles)[1]
    trees = _on_device(state)
    packed = {name: pack_tree(layout, trees[name]) for name in ("params", "work")}
    packed["opt_state"] = pack_opt_state(layout, state.roles, trees["opt_state"])
    return dataclasses.replace(state, **packed, layout=layout, roles=roles)


def _on_device(state: TrainState) -> dict[str, Any]:
    return {name: jax.tree.map(to_device, getattr(state, name)) for name in ("params", "work", "opt_state")}


def _place(convert: Callable[[TrainState], TrainState], state: TrainState) -> TrainState:
    shapes = jax.eval_shape(convert, state)
    mesh: Any = state.step.sharding.mesh  # type: ignore[attr-defined]
    shardings = state_shardings(shapes.layout, mesh, shapes)
    if not isinstance(state.step, jax.Array):
        return with_shardings(shapes, shardings)
    return jax.jit(convert, out_shardings=shardings)(state)
