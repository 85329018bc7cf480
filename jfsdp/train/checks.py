"""Checks of the states, batches, dtypes and meshes that are passed to a step."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh

from jfsdp.arguments import is_traced
from jfsdp.compat import misorders_offloads
from jfsdp.engine.options import is_gpu
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.loss_scale import LossScale
from jfsdp.layout.mesh import CONTEXT, ROW_AXES
from jfsdp.layout.policy import UnitPolicy, offloads
from jfsdp.layout.precision import is_key
from jfsdp.layout.report import differing_frozen, summary
from jfsdp.train.state import TrainState, check_live

_REMEDY = (
    "make it with this model's init, restore it with like=model.abstract_state(tx), or move it: "
    "jfsdp.checkpoint.reshard"
)


def check_offloads(policies: Mapping[str, UnitPolicy], mesh: Any) -> None:
    """Check that the compiler reads offloaded activations in the right order of layers.

    Raises:
      ValueError: on a mesh of GPUs with a jaxlib below 0.11.1, naming the unit and the offloaded values.
    """
    offloading = {name: offloaded for name, policy in policies.items() if (offloaded := offloads(policy.remat))}
    if offloading and is_gpu(mesh) and misorders_offloads():
        name, offloaded = next(iter(offloading.items()))
        raise ValueError(
            f"unit {name!r}: remat offloads {offloaded}, but on GPUs jaxlib below 0.11.1 compiles a loop over n layers "
            "so that the backward of layer i reads the values of layer n-1-i, which gives wrong gradients without an "
            "error (openxla/xla#46231); install jax 0.11.1 or newer (Python 3.12 or newer), recompute these values "
            "(remat='full'), or keep them on the device"
        )


def check_state(state: TrainState, layout: Layout, loss_scale: LossScale | None) -> None:
    """Check that a state has arrays, is not traced or donated, and is sharded as a step expects.

    Other differences between the layouts do not affect a step.

    Raises:
      TypeError: if it is not a `TrainState`.
      ValueError: naming the first leaf that differs, or the loss scale.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the state given is a {type(state).__name__}; call step(state, batch) with the TrainState that "
            "model.init, jfsdp.checkpoint.restore or the previous step returned"
        )
    check_live("the step", state)
    if is_traced(state.step):
        raise ValueError(
            "the state given is traced; a step compiles itself: call it from Python, outside of jax.jit and "
            "jax.lax.scan"
        )
    if state.step.is_deleted():
        raise ValueError(
            "the state given was donated to an earlier step and is deleted; keep the state that the step returns: "
            "state, metrics = step(state, batch)"
        )
    check_sharding(state, layout)
    if bool(state.loss_scale) != (loss_scale is not None):
        raise ValueError(
            f"the state has {'a' if state.loss_scale else 'no'} loss scale, but this step's precision needs "
            f"{'one' if loss_scale else 'none'}; {_REMEDY}(state, model)"
        )


def check_sharding(state: TrainState, layout: Layout) -> None:
    """Check that the sharding of a state matches a layout.

    Raises:
      ValueError: naming the first leaf that differs, or the leaves that are frozen on one side only.
    """
    if frozen := differing_frozen(*({x.path: x.trainable for x in of.leaves} for of in (state.layout, layout))):
        raise ValueError(f"the state has other frozen leaves than this model: {frozen}")
    there, wanted = _placed(state.layout), _placed(layout)
    differing = [path for path in there.keys() | wanted.keys() if there.get(path) != wanted.get(path)]
    if differing or state.layout.mesh_sizes != layout.mesh_sizes:
        what = f"; first {min(differing)}, of {len(differing)} leaves" if differing else ""
        raise ValueError(
            f"the state has another layout ({summary(state.layout)}) than this model ({summary(layout)}){what}; "
            f"{_REMEDY}"
        )


def _placed(layout: Layout) -> dict[str, Any]:
    def placed(leaf: Leaf) -> Leaf:
        stages = tuple((name, stage) for name, stage in leaf.stages if name in ("param", "work", "opt"))
        return dataclasses.replace(leaf, stages=stages, unit="", stacked=0, reason="")

    return {leaf.path: placed(leaf) for leaf in layout.leaves}


def as_arrays(batch: Any) -> Any:
    """Convert the arrays of other libraries (`torch.Tensor`) in a batch to NumPy.

    Raises:
      ValueError: naming a leaf that NumPy cannot read.
    """

    def convert(path: Any, x: Any) -> Any:
        if isinstance(x, (jax.Array, np.ndarray)) or not hasattr(x, "__array__"):
            return x
        try:
            return np.asarray(x)
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)}: NumPy cannot read this {type(x).__name__} ({error}); pass a NumPy "
                "array: x.detach().cpu().numpy() for a torch.Tensor, with x.float() first if it is bfloat16"
            ) from error

    return jax.tree.map_with_path(convert, batch)


def check_batch(batch: Any, *, shards: int, accumulate: int, num_processes: int) -> None:
    """Check that the rows of a batch can be split over devices and microbatches.

    Args:
      num_processes: the number of processes that pass different rows, all as many as this one.

    Raises:
      TypeError: naming a leaf that is neither an array of rows nor a number.
      ValueError: naming the array and its size.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("the batch has no arrays; pass arrays of rows [B, ...]")
    first = None
    for path, x in leaves:
        name = f"batch{jax.tree_util.keystr(path)}"
        is_other = hasattr(x, "dtype") and is_key(x) and not x.shape
        is_other = is_other or (isinstance(x, np.ndarray) and x.dtype.kind in "OSU")
        if is_other or not (hasattr(x, "shape") or isinstance(x, (int, float))):
            raise TypeError(
                f"{name}: is {type(x).__name__}; a leaf of a batch must be an array of rows [B, ...], or a number that "
                "applies to all rows: leave out anything else (rng keys belong to the model, as nnx.Rngs or Linen "
                "rngs; or pass one per row: jax.random.split(key, B))"
            )
        shape: tuple[int, ...] = np.shape(x)  # type: ignore[assignment]
        if not shape:
            continue
        size = shape[0] * num_processes
        if size == 0 or size % (shards * accumulate):
            raise ValueError(
                f"{name}: dim 0 (size {size}) cannot be split over axes {ROW_AXES} (size {shards}) in "
                f"{accumulate} microbatches; make the global batch a{' positive' * (size == 0)} multiple of "
                f"{shards * accumulate}"
            )
        first = first or (name, size)
        if size != first[1]:
            raise ValueError(f"{name} has {size} rows and {first[0]} has {first[1]}; pass equally many in every leaf")
    if first is None:
        raise ValueError("the batch has only numbers; pass at least one array of rows [B, ...]")


def check_tokens(batch: Any, contexts: int) -> None:
    """Check that the tokens of rows can be split over axis `context`.

    Raises:
      ValueError: naming the leaf and its size.
    """
    first = None
    for path, x in jax.tree_util.tree_leaves_with_path(batch) if contexts > 1 else ():
        if np.ndim(x) < 2:
            continue
        name, size = f"batch{jax.tree_util.keystr(path)}", np.shape(x)[1]
        if not size or size % contexts:
            raise ValueError(
                f"{name}: dim 1 (size {size}), the tokens of a row, cannot be split over mesh axis {CONTEXT!r} (size "
                f"{contexts}); use rows of a multiple of {contexts} tokens (padding has weight 0), or another size"
            )
        first = first or (name, size)
        if size != first[1]:
            raise ValueError(
                f"{name} has {size} elements in dim 1 and {first[0]} has {first[1]}, but mesh axis {CONTEXT!r} (size "
                f"{contexts}) splits dim 1 of every leaf as the tokens of a row; pass the same number in every leaf, "
                f"or give the devices of the axis to 'fsdp'"
            )


def check_same_batch(batch: Any, built_for: Any) -> None:
    """Check that a batch has the structure that a step was built for (None: not built yet).

    Raises:
      ValueError: with both structures.
    """
    shape = batch_shape(batch)
    if built_for is not None and shape != built_for:
        raise ValueError(
            f"the batch changed: this step was built for {built_for}, and got {shape}; make another "
            "train_step for these batches"
        )


def check_own_rows(given: int, before: int | None) -> int:
    """Check that a process passes as many rows as before: other processes would not notice a change.

    Raises:
      ValueError: with both numbers.
    """
    if before not in (None, given):
        raise ValueError(
            f"the batch has {given} rows in this process, and had {before} before; with several processes each must "
            "pass the same number at every step: drop or pad the last rows"
        )
    return given


def batch_shape(batch: Any) -> Any:
    """Return the dtypes and shapes of a batch's arrays without the rows, which a step is built for."""
    # The dtype in JAX: 64 bits only if they are enabled.
    return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(np.shape(x)[1:])}", batch)


def check_kept_types(old: TrainState, new: TrainState) -> None:
    """Check that a step keeps the shape and dtype of each array of a state, as its layout requires."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            name = jax.tree_util.keystr(path)
            owner, remedy = "optimizer", "set a state dtype that the update keeps (such as mu_dtype=)"
            if name.startswith(".model_state"):
                owner, remedy = "model", "create it in the dtype and shape that its update returns"
            raise ValueError(
                f"state{name}: the {owner} changes {a.dtype}{list(a.shape)} to {b.dtype}{list(b.shape)}; {remedy}"
            )


def check_donated(donate: Sequence[int], num_inputs: int) -> None:
    """Check that each index in `donate` is an input of the call, and occurs once.

    Raises:
      ValueError: naming the indices.
    """
    wrong = [index for i, index in enumerate(donate) if index >= num_inputs or index in donate[:i]]
    if wrong:
        raise ValueError(
            f"forward: donate={list(donate)}: {wrong} is not an input, or is repeated; f(state, *inputs) got "
            f"{num_inputs} inputs: count them from 0, without the state"
        )


def check_lowers(mesh: Any) -> None:
    """Check that a mesh has devices, which determine the platform to lower for."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            "the mesh has no devices, so there is no platform to lower for; use jfsdp.make_mesh(devices=...), with "
            "devices of jax.experimental.topologies if this machine has none"
        )
