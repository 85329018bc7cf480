"""The training state, its shardings, and its initialization."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.compat import core
from jfsdp.engine.engine import Engine, to_device
from jfsdp.engine.unit import Arrays
from jfsdp.engine.xla import XlaEngine
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import DEVICE, Leaf
from jfsdp.layout.loss_scale import LossScale, ScaleState
from jfsdp.layout.precision import is_key
from jfsdp.layout.report import show_bytes
from jfsdp.train.update.optimizer import ShardedOptimizer
from jfsdp.train.update.roles import Role, Roles


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All arrays that a step reads and writes, as a pytree.

    Attributes:
      step: int32 scalar; the number of steps taken, including skipped ones.
      params: the master parameters by name, in their stored shapes (logical, or padded along the split dim).
      work: the low-precision copy at rest by name, for strategies that keep one; otherwise empty.
      opt_state: the result of `tx.init` for the trained parameters in the model's own tree, in stored shapes.
      model_state: the model's other state by name (batch statistics, rng keys and counts).
      num_skipped: int32 scalar; the number of steps skipped for non-finite gradients.
      loss_scale: the loss scale of float16 training; otherwise empty.
      layout: how the parameters are sharded; static.
      roles: role and sharding of each array of `opt_state`; static.
    """

    step: jax.Array
    params: Arrays
    work: Arrays
    opt_state: Any
    model_state: Arrays
    num_skipped: jax.Array
    loss_scale: ScaleState
    layout: Layout = dataclasses.field(metadata={"static": True})
    roles: Roles = dataclasses.field(metadata={"static": True})

    def __repr__(self) -> str:
        arrays = jax.tree.leaves(self)
        is_sharded = [
            isinstance(x, jax.Array | jax.ShapeDtypeStruct) and not isinstance(x, core.Tracer) for x in arrays
        ]
        if not all(is_sharded):  # inside a transform, or mapped to other leaves
            return f"TrainState({len(arrays)} arrays)"
        if isinstance(self.step, jax.Array):
            step = "donated" if self.step.is_deleted() else f"step={int(self.step)}"
        else:
            step = "shapes only"
        number = math.prod(size for _, size in self.layout.mesh_sizes)
        devices = f"each of {number} devices" if number > 1 else "one device"
        return f"TrainState({step}, {len(arrays)} arrays, {show_bytes(sum(map(array_bytes, arrays)))} on {devices})"

    @property
    def mesh(self) -> Any:
        """The mesh over which its arrays are sharded."""
        return self.step.sharding.mesh  # type: ignore[attr-defined]

    @property
    def source(self) -> Arrays:
        """The parameters that units gather: the low-precision copy if there is one, else the master."""
        return {**self.params, **self.work}


def make_state(
    optimizer: ShardedOptimizer, params: Arrays, model_state: Arrays, loss_scale: LossScale | None = None
) -> TrainState:
    """Build the first state from leaves in stored shapes, inside a `jit` with `state_shardings`.

    Layout:  parameters in any layout -> [D/axes F] each.
    Memory:  XLA computes each shard on its device: no device needs memory for a whole leaf.
    """
    engine = optimizer.engine
    stored = engine.constrain(params, "param")
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=stored,
        work=make_work(engine, stored),
        opt_state=optimizer.init(trainable(engine.layout, stored)),
        model_state=model_state,
        num_skipped=jnp.zeros((), jnp.int32),
        loss_scale=loss_scale.init() if loss_scale else {},
        layout=engine.layout,
        roles=optimizer.roles,
    )


def make_work(engine: Engine, params: Arrays) -> Arrays:
    """Make the low-precision copy from the masters, for strategies that split the optimizer finer than parameters.

    Layout:  [D/all F] master dtype -> [D F] (or [D/group F]) in `param_dtype`; no arrays without such a copy.
    Cost:    one all-gather of the cast shards.
    """
    leaves = [leaf for leaf in engine.layout.leaves if leaf.has_work and leaf.path in params]
    cast = {leaf.path: to_device(params[leaf.path]).astype(leaf.stage("work").dtype) for leaf in leaves}
    return engine.constrain(jax.lax.optimization_barrier(engine.constrain(cast, "param")), "work")


def with_work(state: TrainState, like: TrainState) -> TrainState:
    """Return a state with the low-precision copy that `like` has, computed from the masters.

    Layout, Cost: as `make_work`.
    """
    if not like.work:
        return dataclasses.replace(state, work={})
    shardings: dict[str, Any] = {path: value.sharding for path, value in like.work.items()}
    engine = XlaEngine(like.layout, next(iter(shardings.values())).mesh)
    work = jax.jit(functools.partial(make_work, engine), out_shardings=shardings)(state.params)
    return dataclasses.replace(state, work={path: work[path] for path in like.work})


def check_live(caller: str, state: TrainState) -> None:
    """Check that a state has arrays.

    Raises:
      ValueError: naming the caller, for a state of shapes.
    """
    if not isinstance(state.step, jax.Array):
        raise ValueError(f"{caller}: the state has shapes only; pass a state that init or restore returned")


def trainable(layout: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of trained leaves: floating and not frozen."""
    return {path: value for path, value in values.items() if layout.by_path[path].trainable}


def by_array(
    state: TrainState, other: Any, of_leaf: Callable[[Leaf, str], Any], of_role: Callable[[Role], Any]
) -> TrainState:
    """Return a value for every array of a state, as a state.

    Args:
      other: the value for counters, model state and loss scale.
      of_leaf: returns the value for a leaf at a stage.
      of_role: returns the value for an array of the optimizer.
    """

    def stage(values: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {path: of_leaf(state.layout.by_path[path], name) for path in values}

    return dataclasses.replace(
        jax.tree.map(lambda _: other, state),
        params=stage(state.params, "param"),
        work=stage(state.work, "work"),
        opt_state=state.roles.map(lambda role, _: of_role(role), state.opt_state),
    )


def state_shardings(layout: Layout, mesh: Any, abstract_state: TrainState) -> TrainState:
    """Return the sharding of every array of a state, as a state."""
    state, whole = dataclasses.replace(abstract_state, layout=layout), NamedSharding(mesh, PartitionSpec())
    return by_array(state, whole, functools.partial(layout.sharding, mesh), lambda role: role.sharding(layout, mesh))


def state_memories(state: TrainState) -> TrainState:
    """Return the memory kind of every array of a state, as a state.

    Shardings may lack it: JAX (0.10.2, 0.12) drops the memory kind on devices of a topology.
    """
    return by_array(state, DEVICE, lambda leaf, stage: leaf.stage(stage).memory, lambda role: role.memory)


def abstract_state(
    optimizer: ShardedOptimizer, model_state: Mapping[str, Any], loss_scale: LossScale | None = None
) -> TrainState:
    """Return shapes, dtypes and shardings of a state."""
    layout = optimizer.engine.layout
    leaves = {leaf.path: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for leaf in layout.leaves}
    make = functools.partial(make_state, optimizer, loss_scale=loss_scale)
    shapes = jax.eval_shape(make, leaves, dict(model_state))
    shardings = state_shardings(layout, optimizer.engine.mesh, shapes)
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def array_bytes(x: Any) -> int:
    """Return the bytes per device of a sharded array or shape; rng keys count as their data."""
    if is_key(x):
        x = jax.eval_shape(jax.random.key_data, x)
        return math.prod(x.shape) * x.dtype.itemsize
    shape = x.sharding.shard_shape(tuple(x.shape)) if x.sharding is not None else x.shape
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize
