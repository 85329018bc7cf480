"""Moves a live state to another layout, with another mesh, strategy or padding, without a checkpoint."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfsdp.arguments import checked
from jfsdp.engine.engine import to_device
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import AXES, SUB_AXES, make_abstract_mesh, outer_first, place_devices, split_mesh
from jfsdp.layout.precision import is_key
from jfsdp.layout.report import list_differences, summary
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.state import TrainState, check_live, state_shardings, with_work
from jfsdp.train.update.roles import place


@checked
def reshard(
    state: TrainState, layout: Layout | ShardedModel, *, mesh: Mesh | None = None, donate: bool = False
) -> TrainState:
    """Move a state to another layout of the same model, bitwise and without a checkpoint.

    Layout:  each array from its sharding in the old layout to its sharding in the new one; padding is removed and
             added again along the leaf's dim. The low-precision copy is cast again from the masters.
    Cost:    on the same devices, nothing for an array whose sharding does not change, else up to an all-gather of it
             (most if another dim is split). To other devices every array goes through the host, one at a time.
    Memory:  the old state and the new one; of the array being moved, up to all of it on every device. With `donate`
             each old array is freed as soon as it has moved: one state, and that array.

    Args:
      layout: the new layout, or a `ShardedModel`, whose mesh is then the default.
      mesh: a mesh with devices; by default the state's devices in the same order, in the new layout's shape.
      donate: delete the old state.

    Raises:
      ValueError: if the layouts are of different models, listing names, shapes and dtypes that differ; if the mesh
        does not have the layout's sizes; or if a state of several processes is to be moved to other devices.
    """
    check_live("reshard", state)
    if isinstance(layout, ShardedModel):
        state = dataclasses.replace(state, loss_scale=_loss_scale(state, layout))
        mesh = layout.mesh if mesh is None and isinstance(layout.mesh, Mesh) else mesh
        layout = layout.layout
    _check_same_model(state.layout, layout)
    old = state.mesh
    mesh = _reshape(old, layout) if mesh is None else _check_mesh(mesh, layout)
    roles = place(layout, state.roles)
    like = dataclasses.replace(state, layout=layout, roles=roles, work={})
    shardings = state_shardings(layout, mesh, like)
    shapes = _shapes(like, "stored_shape"), _shapes(like, "shape")
    move = functools.partial(_move, same_devices=list(old.devices.flat) == list(mesh.devices.flat), donate=donate)
    if donate:
        jax.tree.map(lambda x: x.delete(), state.work)
    moved = jax.tree.map(move, like, *shapes, shardings)
    work = {leaf.path: layout.abstract(mesh, leaf, "work") for leaf in layout.leaves if leaf.has_work}
    return with_work(moved, dataclasses.replace(moved, work=work))


def _loss_scale(state: TrainState, model: ShardedModel) -> Any:
    """Keep, initialize or drop the loss scale, as the model's precision requires."""
    if model.loss_scale is None or state.loss_scale:
        return state.loss_scale if model.loss_scale else {}
    return jax.device_put(model.loss_scale.init(), state.step.sharding)


def _shapes(state: TrainState, attribute: str) -> TrainState:
    """Return the `shape` or the `stored_shape` of every array in the layout, as a state of shapes."""
    by_path = state.layout.by_path
    return dataclasses.replace(
        jax.tree.map(lambda x: _shape(x, x.shape), state),
        params={path: _shape(x, getattr(by_path[path], attribute)) for path, x in state.params.items()},
        opt_state=state.roles.map(lambda role, x: _shape(x, getattr(role, attribute)), state.opt_state),
    )


def _shape(x: Any, shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, x.dtype)


def _move(x: jax.Array, stored: Any, logical: Any, sharding: NamedSharding, *, same_devices: bool, donate: bool) -> Any:
    """Move one array, and delete its old buffers if `donate`."""
    if not same_devices:
        moved = _through_host(x, stored.shape, logical.shape, sharding)
    elif x.shape == stored.shape:
        return jax.device_put(x, sharding, donate=donate, may_alias=None if donate else False)
    else:
        moved = jax.jit(lambda x: _fit(to_device(x), stored.shape, logical.shape, jnp), out_shardings=sharding)(x)
    if donate:
        jax.block_until_ready(moved)
        x.delete()
    return moved


def _fit(x: Any, stored: tuple[int, ...], logical: tuple[int, ...], lib: Any) -> Any:
    """Replace the padding of an array of `lib` (NumPy or JAX) by the padding of the new layout."""
    return lib.pad(x[tuple(map(slice, logical))], [(0, n - size) for n, size in zip(stored, logical, strict=True)])


def _through_host(x: jax.Array, stored: tuple[int, ...], logical: tuple[int, ...], sharding: NamedSharding) -> Any:
    if is_key(x):
        data = jax.random.key_data(x)
        whole = NamedSharding(sharding.mesh, PartitionSpec())
        return jax.random.wrap_key_data(jax.device_put(np.asarray(data), whole), impl=jax.random.key_impl(x))
    if not x.is_fully_addressable:
        raise ValueError(
            f"reshard: the state is sharded over {jax.process_count()} processes, but arrays move to other devices "
            "through the host of one process; save the state and restore it with like=model.abstract_state(tx)"
        )
    host = np.asarray(x)
    return jax.device_put(host if host.shape == stored else _fit(host, stored, logical, np), sharding)


def _reshape(old: Mesh, layout: Layout) -> Mesh:
    sizes = dict(layout.mesh_sizes)
    shape = tuple(sizes.get(name, 1) for name in AXES)
    if math.prod(shape) != old.devices.size:
        raise ValueError(
            f"reshard: the new layout ({summary(layout)}) needs {math.prod(shape)} devices, and the state is on "
            f"{old.devices.size}; pass the new devices as mesh="
        )
    whole = {axis: math.prod(old.shape.get(name, 1) for name in (axis, *SUB_AXES.get(axis, ()))) for axis in AXES}
    mesh = place_devices(outer_first(old.devices, whole), sizes)
    return split_mesh(mesh, layout.sub_axes)


def _check_mesh(mesh: Any, layout: Layout) -> Mesh:
    if mesh.axis_names == AXES:
        mesh = split_mesh(mesh, layout.sub_axes)
    sizes = {name: size for name, size in mesh.shape.items() if size > 1}
    split = split_mesh(make_abstract_mesh(dict(layout.mesh_sizes)), layout.sub_axes)  # type: ignore[arg-type]
    wanted = {name: size for name, size in split.shape.items() if size > 1}
    if isinstance(mesh, AbstractMesh) or sizes != wanted:
        raise ValueError(
            f"reshard: the mesh has axes {sizes or 'of size 1'}, the new layout {wanted or 'of size 1'}; pass the "
            "mesh, with devices, that the layout was made for"
        )
    return mesh


def _check_same_model(old: Layout, new: Layout) -> None:
    there, wanted = ({leaf.path: _show(leaf) for leaf in layout.leaves} for layout in (old, new))
    kinds = ("only in the state", "only in the new layout", "different")
    lines = list_differences(there, wanted, owners=("the state has", "the new layout"), kinds=kinds)
    if lines:
        raise ValueError(f"reshard: the new layout is of another model:\n{lines}")


def _show(leaf: Leaf) -> str:
    return f"{leaf.dtype}{list(leaf.shape)}{'' if leaf.trainable else ' without gradient'}"
