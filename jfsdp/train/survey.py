"""What a loss and its model do, read from one trace: what decides whether they may run on a device's own rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.dataflow import depends_on, is_in_condition, passes_through, reads, stated_axes
from jfsdp.engine.engine import SCOPE
from jfsdp.engine.flat import unpack_all
from jfsdp.engine.unit import Arrays
from jfsdp.layout.mesh import DATA_AXES, MODEL_AXES, model_axes
from jfsdp.layout.table import Layout
from jfsdp.layout.units import ROOT
from jfsdp.train.loss import Loss, as_loss


@dataclasses.dataclass(frozen=True)
class Survey:
    """What a trace shows.

    Attributes:
      is_sum: whether the loss is a sum by its type, and its weight follows the rows: one that is a constant, as in
        `Loss(total, 512.0)`, would count once per device, so that such a loss is taken for a scalar.
      is_constant: whether it is such a `Loss`.
      draws: whether it depends on rng keys.
      problem: why the model cannot run on a device's own rows; None if it can.
      model_axes: the mesh axes over which the model states shardings of its own, of those that are the model's.
      gathers_rows: whether it states that a value which depends on the rows is whole on all devices in its first dim.
    """

    is_sum: bool
    is_constant: bool
    draws: bool
    problem: str | None
    model_axes: tuple[str, ...]
    gathers_rows: bool


def survey(
    apply: ShardedApply,
    loss_fn: Callable[..., Any],
    source: Arrays,
    model_state: Arrays,
    rows: Any,
    held: Collection[str] = (),
) -> Survey:
    """Trace a loss on the rows of a microbatch and read what it does; `held` units are whole. Moves no data."""
    is_sum, is_constant, names, params = False, False, [], unpack_all(apply.layout, dict(source))

    def as_sum(model: Any, rows: Any) -> Loss:
        nonlocal is_sum
        value = loss_fn(model, rows)
        is_sum = hasattr(value, "total")
        return as_loss(value)

    def after(rows: Any, state: Arrays, params: Arrays) -> list[Any]:
        nonlocal names
        loss, named = apply(as_sum, params, state, rows)
        names = list(named)
        return [*named.values(), loss.weight, loss.total]

    jaxpr = jax.make_jaxpr(after)(rows, model_state, params).jaxpr
    has_rows, weights = [x.ndim > 0 for x in jax.tree.leaves(rows)], sorted(params)
    inputs = [*[""] * len(has_rows), *sorted(model_state), *[""] * len(weights)]
    keys = {name for name, value in model_state.items() if is_key(value)}
    whole: list[Any] = []
    by_rows = depends_on(jaxpr, has_rows + [False] * (len(inputs) - len(has_rows)), whole.append)
    by_keys = depends_on(jaxpr, [name in keys for name in inputs])
    stated = stated_axes(jaxpr, but=f"{SCOPE}.")
    problem = (
        _stated_problem(stated, has_model_axes=bool(model_axes(apply.engine.mesh)))
        or _condition_problem(jaxpr)
        or _weight_problem(apply.layout, jaxpr, weights, held)
        or _state_problem(names, inputs, keys, by_rows, by_keys, passes_through(jaxpr))
    )
    num_shards = apply.layout.num_shards(apply.layout.data_axes)
    if is_sum and not by_rows[-2] and num_shards > 1:
        weight, fewer = weights_of(apply, loss_fn, params, model_state, rows, num_shards)
        is_constant = weight is not None and weight == fewer
        is_sum = weight is not None and not is_constant
    own = tuple(axis for axis in MODEL_AXES if any(axis in axes for axes in stated))
    return Survey(is_sum, is_constant, by_keys[-1], problem, own, any(map(_is_whole, whole)))


def weights_of(
    apply: ShardedApply, loss_fn: Callable[..., Any], params: Arrays, model_state: Arrays, rows: Any, parts: int
) -> list[float | None]:
    """Return the weight of a loss on rows, and on the first of so many parts of them; None: it depends on an array."""
    weigh = lambda model, rows: as_loss(loss_fn(model, rows)).weight  # noqa: E731
    return [apply.constant(weigh, params, model_state, some) for some in (rows, first_rows(rows, parts))]


def _stated_problem(stated: list[frozenset[str]], *, has_model_axes: bool) -> str | None:
    """Inside a `shard_map` over the data axes a model may state shardings over its own axes alone."""
    data = [axis for axes in stated for axis in sorted(axes) if axis.partition("_")[0] in DATA_AXES]
    if data:
        return (
            f"the model states a sharding over mesh axis {data[0]!r}, which splits the batch (name its own axes alone: "
            f"{', '.join(MODEL_AXES)}, with PartitionSpec.UNCONSTRAINED for the dims of the batch)"
        )
    is_own = all(axes <= set(MODEL_AXES) for axes in stated) and (has_model_axes or any(stated))
    return "the model states shardings of its own" if stated and not is_own else None


def _condition_problem(jaxpr: Any) -> str | None:
    if is_in_condition(jaxpr, f"{SCOPE}.gather"):
        return "a unit is called under a condition (cond, while), on which devices may disagree"
    return None


def _weight_problem(layout: Layout, jaxpr: Any, weights: list[str], held: Collection[str]) -> str | None:
    """A unit's weights are whole inside its calls; elsewhere a device that computes for itself has its shard."""
    leaves = [layout.by_path[path] for path in weights]
    marked = [leaf.unit not in (ROOT, *held) and bool(leaf.stage(leaf.source).axes) for leaf in leaves]
    first = len(jaxpr.invars) - len(weights)
    for place, eqn in reads(jaxpr, [False] * first + marked):
        if f"{SCOPE}." not in str(eqn.source_info.name_stack):
            leaf = leaves[place - first]
            return (
                f"{leaf.path} is read outside the calls of its unit {leaf.unit!r}, where a device has its shard alone "
                "(of a penalty on weights make weight decay, in the optimizer; or leave that module out of units=)"
            )
    return None


def _state_problem(
    names: list[str],
    inputs: list[str],
    keys: set[str],
    by_rows: list[bool],
    by_keys: list[bool],
    origins: list[int | None],
) -> str | None:
    for name, rows_reach, keys_reach, at in zip(names, by_rows, by_keys, origins, strict=False):
        if rows_reach:
            return f"the model's state {name} depends on the rows of the batch"
        if name in keys and (at is None or inputs[at] != name):
            return f"the model changes its rng key {name}"
        if keys_reach and name not in keys:
            return f"the model's state {name} depends on its rng keys"
    return None


def _is_whole(eqn: Any) -> bool:
    """Tell whether an operation states of some dim that it is split over nothing, and names no axis of the batch."""
    if eqn.primitive.name != "sharding_constraint" or f"{SCOPE}." in str(eqn.source_info.name_stack):
        return False
    spec, free = getattr(eqn.params["sharding"], "spec", None), eqn.params["unconstrained_dims"]
    if spec is None:
        return False
    entries = [*spec, *[None] * (eqn.invars[0].aval.ndim - len(spec))]
    names = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))}
    if any(isinstance(axis, str) and axis.partition("_")[0] in DATA_AXES for axis in names):
        return False
    return any(entry in (None, ()) and dim not in free for dim, entry in enumerate(entries[:1]))


def first_rows(batch: Any, parts: int) -> Any:
    """Return the first of so many parts of a batch's rows; scalars are part of each."""
    return jax.tree.map(lambda x: x[: x.shape[0] // parts] if x.ndim else x, batch)


def is_key(value: Any) -> bool:
    """Tell whether an array holds rng keys. Moves no data."""
    return bool(jnp.issubdtype(value.dtype, jax.dtypes.prng_key))
