"""The training state: what stands between steps, and how it is born sharded."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.engine.auto import AutoEngine
from jfsdp.engine.unit import Arrays
from jfsdp.layout.rules import choose_dim
from jfsdp.layout.table import Layout


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """Everything that a step reads and writes. A pytree; its arrays are by logical name wherever they have one.

    Attributes:
      step: int32 scalar; how many steps were taken, skipped ones included.
      params: the master parameters by name, in their stored shape (logical, or padded along the split dim).
      work: the low-precision copy at rest by name, for strategies that keep one; else empty.
      opt_state: the optimizer's state over the trainable part of `params`.
      model_state: the model's other state by name (batch statistics, rng keys and counts).
      num_skipped: int32 scalar; how many steps were skipped for non-finite gradients.
      layout: where all of it stands; static.
    """

    step: jax.Array
    params: Arrays
    work: Arrays
    opt_state: Any
    model_state: Arrays
    num_skipped: jax.Array
    layout: Layout = dataclasses.field(metadata={"static": True})

    @property
    def source(self) -> Arrays:
        """The parameters from which compute gathers: the work copy where there is one, else the master."""
        return {**self.params, **self.work}


def make_state(engine: AutoEngine, tx: optax.GradientTransformation, params: Arrays, model_state: Arrays) -> TrainState:
    """Build the first state from parameters of stored shape; call it inside `jit` with `state_shardings`.

    Layout:  parameters as they come -> [D/axes F] each.
    Memory:  XLA computes each leaf where it will stand: no device need hold a whole leaf.
    """
    stored = engine.constrain(params, "param")
    return TrainState(
        step=jnp.zeros((), jnp.int32),
        params=stored,
        work=make_work(engine, stored),
        opt_state=tx.init(trainable(engine.layout, stored)),
        model_state=model_state,
        num_skipped=jnp.zeros((), jnp.int32),
        layout=engine.layout,
    )


def make_work(engine: AutoEngine, params: Arrays) -> Arrays:
    """Cast the masters and gather them into the copy that strategies with a finer optimizer keep at rest.

    Layout:  [D/all F] master dtype -> [D F] (or [D/group F]) in `param_dtype`; nothing where no copy is kept.
    Cost:    one all-gather of the cast shards.
    """
    leaves = [leaf for leaf in engine.layout.leaves if leaf.has_work]
    cast = {leaf.path: params[leaf.path].astype(leaf.stage("work").dtype) for leaf in leaves}
    return engine.constrain(jax.lax.optimization_barrier(engine.constrain(cast, "param")), "work")


def with_work(state: TrainState, like: TrainState) -> TrainState:
    """Give a state the low-precision copy that `like` has: it is a function of the masters.

    Layout, Cost: as `make_work`.
    """
    if not like.work:
        return dataclasses.replace(state, work={})
    shardings: dict[str, Any] = {path: value.sharding for path, value in like.work.items()}
    engine = AutoEngine(like.layout, next(iter(shardings.values())).mesh)
    work = jax.jit(functools.partial(make_work, engine), out_shardings=shardings)(state.params)
    return dataclasses.replace(state, work={path: work[path] for path in like.work})


def trainable(layout: Layout, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the part that the optimizer sees: floating leaves. Moves no data."""
    return {path: value for path, value in values.items() if layout.by_path[path].trainable}


def state_shardings(layout: Layout, mesh: Any, abstract_state: TrainState) -> TrainState:
    """Return the sharding of every array of a state, as a state. Moves no data."""
    whole = NamedSharding(mesh, PartitionSpec())

    def stage(values: Mapping[str, Any], name: str) -> dict[str, Any]:
        return {path: layout.sharding(mesh, layout.by_path[path], name) for path in values}

    return TrainState(
        step=whole,  # type: ignore[arg-type]
        params=stage(abstract_state.params, "param"),
        work=stage(abstract_state.work, "work"),
        opt_state=jax.tree_util.tree_map_with_path(
            lambda path, x: NamedSharding(mesh, opt_spec(layout, path, tuple(x.shape))), abstract_state.opt_state
        ),
        model_state=dict.fromkeys(abstract_state.model_state, whole),  # type: ignore[misc]
        num_skipped=whole,  # type: ignore[arg-type]
        layout=layout,
    )


def opt_spec(layout: Layout, path: tuple[Any, ...], shape: tuple[int, ...]) -> PartitionSpec:
    """Return where an array of the optimizer's state stands. Moves no data.

    One that has the name and shape of a parameter stands like that parameter's `opt` stage. Others (factored moments,
    counters) are split by the rule that parameters follow, but never padded: replicated if no dim divides.
    """
    name = param_name(layout, path)
    leaf = layout.by_path.get(name or "")
    if leaf is not None and shape == leaf.stored_shape:
        return leaf.spec("opt")
    axes = tuple(axis for axis, size in layout.mesh_sizes if size > 1 and axis in layout.strategy.opt.axes)
    choice = choose_dim(name or "", shape, layout.num_shards(axes), min_size=layout.min_size)
    if choice.dim is None or choice.padding:
        return PartitionSpec()
    return PartitionSpec(*[axes if dim == choice.dim else None for dim in range(len(shape))])


def param_name(layout: Layout, path: tuple[Any, ...]) -> str | None:
    """Return the parameter that a path inside the optimizer's state speaks of, or None. Moves no data."""
    keys = [key.key for key in path if isinstance(key, jax.tree_util.DictKey)]
    return next((key for key in reversed(keys) if key in layout.by_path), None)


def abstract_state(engine: AutoEngine, tx: optax.GradientTransformation, model_state: Mapping[str, Any]) -> TrainState:
    """Return shapes, dtypes and shardings of a state. Moves no data."""
    layout = engine.layout
    stored = {leaf.path: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.dtype) for leaf in layout.leaves}
    shapes = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
        params=stored,  # type: ignore[arg-type]
        work={  # type: ignore[arg-type]
            leaf.path: jax.ShapeDtypeStruct(leaf.stored_shape, leaf.stage("work").dtype)
            for leaf in layout.leaves
            if leaf.has_work
        },
        opt_state=jax.eval_shape(tx.init, trainable(layout, stored)),
        model_state=dict(model_state),
        num_skipped=jax.ShapeDtypeStruct((), jnp.int32),  # type: ignore[arg-type]
        layout=layout,
    )
    return with_shardings(shapes, state_shardings(layout, engine.mesh, shapes))


def with_shardings(shapes: Any, shardings: Any) -> Any:
    """Attach shardings to shapes. Moves no data."""
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, shardings)


def bytes_per_device(abstract: Any) -> int:
    """Sum the bytes that one device holds of a pytree of sharded arrays or shapes. Moves no data.

    Every device holds the same: layouts split evenly.
    """
    return sum(array_bytes(x) for x in jax.tree.leaves(abstract))


def array_bytes(x: Any) -> int:
    """Return the bytes that one device holds of a sharded array or shape; rng keys count as their data.

    Moves no data.
    """
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.eval_shape(jax.random.key_data, x)
        return math.prod(x.shape) * x.dtype.itemsize
    shape = x.sharding.shard_shape(tuple(x.shape)) if x.sharding is not None else x.shape
    return math.prod(shape) * jnp.dtype(x.dtype).itemsize
