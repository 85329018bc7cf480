"""A state from one storage form into the other: what leaves a run, or comes from outside, stands leaf by leaf.

Parameters and their low-precision copies alone have two forms; the optimizer's state is leaf by leaf under both.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from jfsdp.engine.at_rest import to_leaves, to_rest
from jfsdp.engine.engine import to_device
from jfsdp.layout.layout import Layout
from jfsdp.train.state import TrainState, with_shardings

Form = Callable[[Layout, Any], Any]


def by_leaf(state: TrainState) -> TrainState:
    """Return a state (or its shapes) with every leaf stored by itself; one that is already, as it is.

    Layout:  [layers, chunks * chunk / axes] -> [D/axes F] each.
    Cost:    none between devices.
    Memory:  a second copy of the parameters, where leaves share arrays, until one of the two is dropped; all other
             arrays are those of the state given.
    """
    layout = state.layout
    return _place(to_leaves, layout, state, layout.per_parameter()) if layout.packed else state


def in_storage(state: TrainState, layout: Layout) -> TrainState:
    """Return a state that stands leaf by leaf in the storage form of a layout of the same leaves; undoes `by_leaf`.

    Layout, Cost, Memory: as `by_leaf`.
    """
    return _place(to_rest, layout, state, layout) if layout.packed else state


def shapes_by_leaf(state: TrainState) -> TrainState:
    """Return the shapes and shardings of a state with every leaf stored by itself."""
    return by_leaf(jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state))


def opened(state: TrainState) -> TrainState:
    """Do what `by_leaf` does inside a `jit`, without placing anything."""
    params, work = _convert(to_leaves, state.layout, (state.params, state.work))
    return dataclasses.replace(state, params=params, work=work, layout=state.layout.per_parameter())


def _convert(form: Form, layout: Layout, trees: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(form(layout, jax.tree.map(to_device, tree)) for tree in trees)


@functools.lru_cache(maxsize=8)
def _converter(form: Form, layout: Layout) -> Callable[[Any], Any]:
    """Return one function for one layout, so that it is compiled once."""
    return functools.partial(_convert, form, layout)


def _place(form: Form, packed: Layout, state: TrainState, layout: Layout) -> TrainState:
    """Bring parameters and copies from the form of the state into that of `layout`; in `packed` leaves share arrays."""
    convert, trees = _converter(form, packed), (state.params, state.work)
    shapes = jax.eval_shape(convert, trees)
    stages = zip(shapes, ("param", "work"), strict=True)
    shardings = tuple(
        {path: layout.sharding(state.mesh, layout.by_path[path], stage) for path in tree} for tree, stage in stages
    )
    is_there = isinstance(state.step, jax.Array)
    moved = jax.jit(convert, out_shardings=shardings)(trees) if is_there else with_shardings(shapes, shardings)
    return dataclasses.replace(state, params=moved[0], work=moved[1], layout=layout)
