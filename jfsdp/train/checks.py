"""What a step refuses: states, batches, dtypes and meshes that it cannot take, by name and with the remedy."""

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
from jfsdp.layout.mesh import DATA_AXES
from jfsdp.layout.policy import UnitPolicy, offloads
from jfsdp.layout.precision import is_key
from jfsdp.layout.report import differing_frozen, summary
from jfsdp.train.state import TrainState, check_live

_REMEDY = (
    "make it with this model's init, restore it with like=model.abstract_state(tx), or move it: "
    "jfsdp.checkpoint.reshard"
)


def check_offloads(policies: Mapping[str, UnitPolicy], mesh: Any) -> None:
    """Refuse offloaded activations where the compiler mixes up the layers that they belong to.

    Raises:
      ValueError: on a mesh of GPUs, with a jaxlib below 0.11.1; names the unit and what it offloads.
    """
    offloading = {name: offloaded for name, policy in policies.items() if (offloaded := offloads(policy.remat))}
    if offloading and is_gpu(mesh) and misorders_offloads():
        name, offloaded = next(iter(offloading.items()))
        raise ValueError(
            f"unit {name!r}: remat offloads {offloaded}, and jaxlib below 0.11.1 compiles a loop of n layers for "
            "GPUs so that the backward of layer i reads the values of layer n-1-i: wrong gradients, without an error "
            "(openxla/xla#46231); install jax 0.11.1 or newer (Python 3.12 or newer), or recompute these values "
            "(remat='full') or keep them on the device"
        )


def check_state(state: TrainState, layout: Layout, loss_scale: LossScale | None) -> None:
    """Refuse what is no state, is traced, is gone, or stands elsewhere than a step expects it.

    What else a layout says is the step's own affair.

    Raises:
      ValueError: naming what was given, the first leaf that differs, or the loss scale.
    """
    if not isinstance(state, TrainState):
        raise TypeError(
            f"the state given is a {type(state).__name__}; a step takes (state, batch), with the TrainState that "
            "model.init, jfsdp.checkpoint.restore or the step before returned"
        )
    check_live("the step", state)
    if is_traced(state.step):
        raise ValueError(
            "the state given is traced; a step is compiled by itself: call it from Python, outside of jax.jit, "
            "jax.lax.scan and the like"
        )
    if state.step.is_deleted():
        raise ValueError(
            "the state given was donated to an earlier step and is gone; keep what the step returns: "
            "state, metrics = step(state, batch)"
        )
    check_stands(state, layout)
    if bool(state.loss_scale) != (loss_scale is not None):
        raise ValueError(
            f"the state has {'a' if state.loss_scale else 'no'} loss scale, and this step's precision takes "
            f"{'one' if loss_scale else 'none'}; {_REMEDY}(state, model)"
        )


def check_stands(state: TrainState, layout: Layout) -> None:
    """Refuse a state that stands elsewhere than a layout says.

    Raises:
      ValueError: naming the first leaf that differs, or those that are frozen on one side.
    """
    if frozen := differing_frozen(*({x.path: x.trainable for x in of.leaves} for of in (state.layout, layout))):
        raise ValueError(f"the state is of other frozen leaves than this model: {frozen}")
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
    """Return a batch with the arrays of other libraries (`torch.Tensor`) as NumPy's.

    Raises:
      ValueError: naming the leaf, for one that NumPy cannot read.
    """

    def convert(path: Any, x: Any) -> Any:
        if isinstance(x, (jax.Array, np.ndarray)) or not hasattr(x, "__array__"):
            return x
        try:
            return np.asarray(x)
        except (TypeError, RuntimeError, ValueError) as error:
            raise ValueError(
                f"batch{jax.tree_util.keystr(path)}: NumPy cannot read this {type(x).__name__} ({error}); pass a NumPy "
                "array, of a torch.Tensor x.detach().cpu().numpy(), and x.float() first if it is bfloat16"
            ) from error

    return jax.tree.map_with_path(convert, batch)


def check_batch(batch: Any, *, shards: int, accumulate: int, num_processes: int) -> None:
    """Refuse a batch whose rows cannot be shared by devices and microbatches.

    Args:
      num_processes: how many of them give as many rows as this one.

    Raises:
      TypeError: naming a leaf that is neither an array of rows nor a number.
      ValueError: naming the array and its size.
    """
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    if not leaves:
        raise ValueError("the batch holds no arrays; give a step arrays of rows [B, ...]")
    first = None
    for path, x in leaves:
        name = f"batch{jax.tree_util.keystr(path)}"
        is_other = hasattr(x, "dtype") and is_key(x) and not x.shape
        is_other = is_other or (isinstance(x, np.ndarray) and x.dtype.kind in "OSU")
        if is_other or not (hasattr(x, "shape") or isinstance(x, (int, float))):
            raise TypeError(
                f"{name}: is {type(x).__name__}; a leaf of a batch is an array of rows [B, ...], or a number that "
                "holds for all rows: leave anything else out (rng keys are the model's: nnx.Rngs, or Linen's own; or "
                "one for each row: jax.random.split(key, B))"
            )
        shape: tuple[int, ...] = np.shape(x)  # type: ignore[assignment]
        if not shape:
            continue
        size = shape[0] * num_processes
        if size == 0 or size % (shards * accumulate):
            raise ValueError(
                f"{name}: dim 0 (size {size}) cannot be split over axes {DATA_AXES} (size {shards}) in "
                f"{accumulate} microbatches; make the global batch a multiple of {shards * accumulate}"
            )
        first = first or (name, size)
        if size != first[1]:
            raise ValueError(f"{name} has {size} rows and {first[0]} has {first[1]}; give every leaf as many rows")
    if first is None:
        raise ValueError("the batch holds numbers only, and no array of rows [B, ...]")


def check_same_batch(batch: Any, built_for: Any) -> None:
    """Refuse a batch of another structure than a step was built for; None: it is not yet.

    Raises:
      ValueError: with both structures.
    """
    shape = batch_shape(batch)
    if built_for is not None and shape != built_for:
        raise ValueError(
            f"the batch changed: this step was built for {built_for}, and got {shape}; make another "
            "train_step for batches of another form"
        )


def check_own_rows(given: int, before: int | None) -> int:
    """Refuse another number of a process's own rows than before, which the other processes would not know of.

    Raises:
      ValueError: with both numbers.
    """
    if before not in (None, given):
        raise ValueError(
            f"the batch has {given} rows of this process's own, and had {before}; with several processes all give as "
            "many at every step: drop or pad the last rows"
        )
    return given


def batch_shape(batch: Any) -> Any:
    """Return dtypes and shapes of a batch's arrays but for their rows, as a step is built for."""
    # The dtype as JAX takes it: without 64 bits unless they are asked for.
    return jax.tree.map(lambda x: f"{jnp.result_type(x)}{list(np.shape(x)[1:])}", batch)


def check_kept_types(old: TrainState, new: TrainState) -> None:
    """Refuse a state whose types a step changes: it would no longer be what its layout says."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            name = jax.tree_util.keystr(path)
            whose, remedy = "optimizer", "give it a state dtype that stays (mu_dtype=, say)"
            if name.startswith(".model_state"):
                whose, remedy = "model", "make it in the dtype and shape that its update gives"
            raise ValueError(
                f"state{name}: the {whose} turns {a.dtype}{list(a.shape)} into {b.dtype}{list(b.shape)}; {remedy}"
            )


def check_donated(donate: Sequence[int], num_inputs: int) -> None:
    """Refuse places that no input of a call has, or that are named twice.

    Raises:
      ValueError: naming them.
    """
    wrong = [place for at, place in enumerate(donate) if place >= num_inputs or place in donate[:at]]
    if wrong:
        raise ValueError(
            f"forward: donate={list(donate)}: {wrong} is no input or is named twice; f(state, *inputs) got "
            f"{num_inputs} inputs, which are counted from 0 without the state"
        )


def check_lowers(mesh: Any) -> None:
    """Refuse to lower for a mesh of sizes alone: it does not say for which platform."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            "the mesh has no devices, so there is no platform to lower for; use jfsdp.make_mesh(devices=...), with "
            "those of jax.experimental.topologies where the hardware is elsewhere"
        )
