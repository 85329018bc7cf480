"""Facts about a loss and its model from one trace, which decide whether they can run on the local rows of a device."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Collection, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from jfsdp import float8, jaxprs, moe
from jfsdp.compat import core, dce_jaxpr
from jfsdp.context.rows import BY_KEYS
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.engine import SCOPE, UNIT_CALL
from jfsdp.engine.unit import Arrays, Traced
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import CONTEXT, MODEL_AXES, ROW_AXES, is_axis, model_axes
from jfsdp.layout.precision import is_key
from jfsdp.layout.units import ROOT
from jfsdp.train.step.loss import Loss, as_loss
from jfsdp.train.step.token_rules import context_bytes

LossFn = Callable[[Any, Any], Any]
_WEIGHT = 2  # its index in the outputs of a step's loss: the scalar, total, weight


@dataclasses.dataclass(frozen=True)
class Survey:
    """Facts about a loss and its model.

    Attributes:
      is_sum: whether the loss is a sum with its weight, not a scalar.
      no_sum: why the loss cannot be summed over devices; None if it can.
      has_statistics: whether the model's state, or a sum over devices, depends on the rows.
      draws: whether the loss depends on the rng keys in the model's state.
      draws_alike: whether the loss draws from keys that are equal on several devices: neither in the state nor in rows;
        with axis `context` also those in rows, whose tokens are on several devices.
      problem: why the model cannot run on the local rows of a device; None if it can.
      num_sums: for trained weights of the root unit with several uses, the number of uses; 1 for weights whose gradient
        the model forms itself (`jax.custom_vjp`).
      model_axes: the mesh axes of the model over which the model states shardings.
      repeats: whether a trainable unit is called several times per microbatch, and so sums its gradient as often.
      gathers_rows: whether the model states that dim 0 of a value that depends on the rows is not split.
      has_keys: whether attention gathers keys over axis `context`.
      context_bytes: as `context_bytes`, in a forward.
      has_experts: whether it calls `jfsdp.experts`.
      ragged: the number of groups of `jax.lax.ragged_dot` in the model; 0 if it has none.
      products: by matrix of a product, why it is not in float8; "" if it is.
    """

    is_sum: bool
    no_sum: str | None
    has_statistics: bool
    draws: bool
    draws_alike: bool
    problem: str | None
    num_sums: dict[str, int]
    model_axes: tuple[str, ...]
    repeats: bool
    gathers_rows: bool
    has_keys: bool
    context_bytes: int
    has_experts: bool
    ragged: int
    products: dict[str, str]


def survey(
    apply: ShardedApply, loss_fn: LossFn, source: Arrays, model_state: Arrays, rows: Any, gathered: Collection[str]
) -> Survey:
    """Trace a loss on the rows of a microbatch, and return facts about it.

    Cost: one trace of the loss; two if its weight depends on no row.

    Args:
      gathered: names of the units that stay gathered.

    Raises:
      ValueError: for a weight that does not change with the number of rows.
    """
    layout = apply.layout
    trace = _Trace(apply, loss_fn, source, model_state, rows)
    jaxpr, states = trace.jaxpr, sorted(model_state)
    keys = {name for name, value in model_state.items() if is_key(value)}
    of_rows: list[Any] = []
    by_rows = jaxprs.depends_on(jaxpr, trace.is_row, of_rows.append)
    of_keys: list[Any] = []
    by_keys = jaxprs.depends_on(jaxpr, [name in keys for name in trace.states], of_keys.append)
    num_contexts = layout.num_shards([CONTEXT])
    own = of_keys if num_contexts > 1 else [*of_keys, *of_rows]  # keys may also come from rows
    known_draws = {id(eqn) for eqn in own if jaxprs.draws(eqn)}
    stated = jaxprs.stated_axes(jaxpr, but=f"{SCOPE}.")
    after = slice(len(by_rows) - len(states), None)
    is_sum = [eqn.params.get("name") == moe.SUMMED for eqn in jaxprs.all_eqns(jaxpr)]
    by_local = jaxprs.depends_on(jaxpr, trace.is_row, carries=_is_local) if any(is_sum) else by_rows
    num_shards = layout.num_shards(layout.data_axes)
    is_local = [mark and num_shards > 1 for mark in by_local[after]]  # one data shard has all rows
    problem = (
        _stated_problem(stated, has_model_axes=bool(model_axes(apply.engine.mesh)))
        or _call_problem(jaxpr)
        or _weight_problem(layout, trace.traced, gathered)
        or _state_problem(states, trace.states, keys, is_local, by_keys[after], jaxprs.passes_through(jaxpr)[after])
    )
    no_sum = None if trace.is_sum else "the loss is a scalar, which may not be a sum over rows divided by a count"
    if trace.is_sum and not by_rows[1]:
        weight = trace.weight()
        if weight is None:
            no_sum = "the weight of the loss depends on no row, and may count once for each device"
        else:
            few = {"rows": first_rows(rows, max(layout.num_shards(ROW_AXES), 2))}
            few |= {"tokens": first_tokens(rows, num_contexts)} if num_contexts > 1 else {}
            for name, part in few.items():
                has_rows = all(x.size for x in jax.tree.leaves(part))
                if has_rows and weight == _Trace(apply, loss_fn, source, model_state, part).weight():
                    raise ValueError(
                        f"loss_fn: the weight of the loss is {weight:g} for any number of {name}; count the {name} "
                        "that the loss receives, or return their mean: return mean, aux"
                    )
    root = {path for path in layout.unit(ROOT).leaves if layout.by_path[path].trainable}
    derived = jaxprs.num_readers(jaxpr, jaxprs.has_own_derivative, but=UNIT_CALL)
    own_derivatives = dict(zip(trace.traced.names, derived, strict=True))
    readers = dict(zip(trace.traced.names, jaxprs.num_readers(jaxpr), strict=True))
    num_sums = {path: 1 for path, num in own_derivatives.items() if num and path in root}
    num_sums |= {path: num for path, num in readers.items() if num > 1 and path in root}
    stated_model_axes = tuple(axis for axis in MODEL_AXES if any(axis in axes for axes in stated))
    return Survey(
        trace.is_sum,
        no_sum,
        any(is_sum) or any(by_rows[after]),
        by_keys[0],
        any(jaxprs.draws(eqn) and id(eqn) not in known_draws for eqn in jaxprs.all_eqns(jaxpr)),
        problem,
        num_sums,
        stated_model_axes,
        _repeats(layout, trace.traced),
        any(map(_gathers_dim_0, of_rows)),
        any(BY_KEYS in str(eqn.source_info.name_stack) for eqn in jaxprs.all_eqns(jaxpr)),
        context_bytes(jaxpr),
        any(moe.SCOPE in str(eqn.source_info.name_stack) for eqn in jaxprs.all_eqns(jaxpr)),
        max((e.invars[2].aval.shape[-1] for e in jaxprs.all_eqns(jaxpr) if e.primitive.name in _RAGGED), default=0),
        _products(layout, trace.traced),
    )


_RAGGED = ("ragged_dot", "ragged_dot_general")
# Operations between a weight and the product that reads it.
_OF_WEIGHTS = {"convert_element_type", "reshape", "transpose", "squeeze", "slice", "dynamic_slice", "copy"}
_OF_WEIGHTS |= {"abs", "reduce_max", "select_n", "div", "mul", "clamp", "max", "min"}
_OF_WEIGHTS |= {"optimization_barrier", "sharding_constraint"}


def _products(layout: Layout, traced: Traced) -> dict[str, str]:
    """Return by matrix why its first product is not in float8; see `Survey.products`."""

    def carries(eqn: Any, var: Any) -> bool:
        return eqn.primitive.name in _OF_WEIGHTS or bool(jaxprs.inner_jaxprs(eqn))

    found = {}
    for place, path in enumerate(traced.names):
        leaf = layout.by_path.get(path)
        eqns: list[Any] = []
        if leaf and len(leaf.shape) - leaf.stacked > 1:
            jaxprs.depends_on(traced.jaxpr, [i == place for i in range(len(traced.names))], eqns.append, carries)
        if dots := [eqn for eqn in eqns if eqn.primitive.name == "dot_general"]:
            reason = str(dots[0].source_info.name_stack).partition(float8.NOT)[2].partition("/")[0]
            is_float8 = all(jnp.dtype(atom.aval.dtype).itemsize == 1 for atom in dots[0].invars)
            found[path] = reason if is_float8 or reason else float8.NOT_CHOSEN
    return found


def _is_local(eqn: Any, var: Any) -> bool:
    """Return whether a value that depends on rows may differ between devices."""
    return eqn.params.get("name") != moe.SUMMED


def _repeats(layout: Layout, traced: Any) -> bool:
    """Return whether several calls of a unit read its weights, or every iteration of a loop reads all of them."""

    def is_loop(eqn: Any) -> bool:
        return eqn.primitive.name in ("scan", "while")

    def is_call(eqn: Any) -> bool:
        return is_loop(eqn) or str(eqn.params.get("name", "")).startswith(UNIT_CALL)

    calls, loops = (jaxprs.num_readers(traced.jaxpr, reads) for reads in (is_call, is_loop))
    for path, num, inside in zip(traced.names, calls, loops, strict=True):
        leaf = layout.by_path.get(path)
        if leaf and leaf.trainable and leaf.unit != ROOT and (num > 1 or (inside and not leaf.stacked)):
            return True
    return False


class _Trace:
    """A loss as a program of rows, model state and weights.

    Attributes:
      is_sum: whether its type is a sum over rows.
      traced: the result of `ShardedApply.trace`; its outputs are total, weight, metrics, and the state afterwards.
      is_row: for each input, whether it is an array of rows.
      states: for each input, its name in the model's state; "" for other inputs.
    """

    def __init__(self, apply: ShardedApply, loss_fn: LossFn, source: Arrays, model_state: Arrays, rows: Any):
        self.is_sum = False

        def as_sum(model: Any, rows: Any) -> Loss:
            value = loss_fn(model, rows)
            self.is_sum = hasattr(value, "total")
            return as_loss(value)

        self.traced, self._flat = apply.trace(as_sum, source, model_state, rows, trains=True)
        self.jaxpr = self.traced.jaxpr
        given = [x.ndim > 0 for x in jax.tree.leaves(rows)]
        num_root = len(self.jaxpr.invars) - self.traced.num_flat
        num_inner = sum(map(bool, self.traced.names)) - num_root
        self._num_consts = self.traced.num_flat - len(given) - num_inner - len(model_state)
        self.is_row = [False] * self._num_consts + given
        self.is_row += [False] * (len(self.jaxpr.invars) - len(self.is_row))
        self.states = [""] * (self.traced.num_flat - len(model_state)) + sorted(model_state) + [""] * num_root

    def weight(self) -> float | None:
        """Return the weight of the loss if it depends on no array, else None."""
        wanted = [i == 1 for i in range(len(self.jaxpr.outvars))]
        # Also inside calls and loops, which may compute other values besides the weight.
        jaxpr, is_read = dce_jaxpr(jaxprs.keep_outputs(self.jaxpr, wanted), [True])
        consts = self._flat[: self._num_consts]
        if any(is_read[self._num_consts :]) or any(isinstance(x, core.Tracer) for x in consts):
            return None
        # On a local device: the step may be lowered for devices that this machine lacks.
        with jax.default_device(jax.local_devices()[0]), jax.ensure_compile_time_eval():
            used = [x for x, mark in zip(consts, is_read, strict=False) if mark]
            return float(core.eval_jaxpr(jaxpr, (), *used)[0])


def check_weight(layout: Layout, traced: Traced) -> None:
    """Check that the weight of a loss has no gradient: a step differentiates only the total.

    Raises:
      ValueError: naming a parameter on which the weight depends.
    """

    def reaches(trained: Sequence[bool]) -> bool:
        return jaxprs.depends_on(traced.jaxpr, trained, carries=jaxprs.carries_tangents)[_WEIGHT]

    leaves = [layout.by_path.get(name) for name in traced.names]
    trained = [leaf is not None and leaf.trainable for leaf in leaves]
    if reaches(trained):
        indices = range(len(trained))
        name = next(traced.names[i] for i in indices if trained[i] and reaches([j == i for j in indices]))
        raise ValueError(
            f"loss_fn: the weight of the loss depends on the trained parameter {name}, but a step does not "
            "differentiate the weight, so its gradient would not be the gradient of total / weight; return "
            "jax.lax.stop_gradient(weight), or total / weight as a scalar"
        )


def _stated_problem(stated: list[frozenset[str]], *, has_model_axes: bool) -> str | None:
    """Describe a stated sharding over other axes than the model's, which a `shard_map` over the data axes rules out."""
    # This trace has whole rows. In a `shard_map` the model must not state axis `context`, as JAX reports itself.
    stated = [frozenset(axis for axis in axes if not is_axis(axis, (CONTEXT,))) for axes in stated]
    data = [axis for axes in stated for axis in sorted(axes) if is_axis(axis, ROW_AXES)]
    if data:
        return (
            f"the model states a sharding over mesh axis {data[0]!r}, which splits the batch (use only "
            f"{', '.join(MODEL_AXES)}, with PartitionSpec.UNCONSTRAINED for the dims of the batch)"
        )
    is_allowed = all(axes <= set(MODEL_AXES) for axes in stated) and (has_model_axes or any(stated))
    return "the model states shardings" if stated and not is_allowed else None


def _call_problem(jaxpr: Any) -> str | None:
    if names := jaxprs.unread(jaxpr):
        return f"the model calls {names[0]}, a JAX operation whose body jfsdp cannot analyze"
    if jaxprs.is_in_condition(jaxpr, f"{SCOPE}.gather"):
        return "a unit is called under a condition (cond, while), which may differ between devices"
    return None


def _weight_problem(layout: Layout, traced: Traced, gathered: Collection[str]) -> str | None:
    """Describe a read of a unit's weight outside the unit's calls, where a device has only a shard."""
    names = [*traced.names[: traced.num_flat], *[""] * (len(traced.names) - traced.num_flat)]
    leaves = [layout.by_path[name] if name else None for name in names]
    marked = [leaf is not None and leaf.unit not in gathered and bool(leaf.stage(leaf.source).axes) for leaf in leaves]
    for index, eqn in jaxprs.reads(traced.jaxpr, marked):
        if f"{SCOPE}." not in str(eqn.source_info.name_stack):
            return (
                f"{names[index]} is read outside the calls of its unit {leaves[index].unit!r}, where a device has only "  # type: ignore[union-attr]
                "a shard (replace a penalty on weights by weight decay in the optimizer, or remove that module from "
                "units=)"
            )
    return None


def _state_problem(
    names: Sequence[str],
    inputs: Sequence[str],
    keys: Collection[str],
    by_rows: Sequence[bool],
    by_keys: Sequence[bool],
    origins: Sequence[int | None],
) -> str | None:
    for name, rows_reach, keys_reach, at in zip(names, by_rows, by_keys, origins, strict=True):
        if rows_reach:
            return (
                f"the model's state {name} depends on the rows of the batch; if it depends on sums over rows, sum them "
                "over devices with jfsdp.sum_over_devices"
            )
        if name in keys and (at is None or inputs[at] != name):
            return f"the model changes its rng key {name}"
        if keys_reach and name not in keys:
            return f"the model's state {name} depends on its rng keys"
    return None


def _gathers_dim_0(eqn: Any) -> bool:
    """Return whether an operation states a sharding without data axes in which dim 0 is not split."""
    if eqn.primitive.name != "sharding_constraint" or f"{SCOPE}." in str(eqn.source_info.name_stack):
        return False
    spec, free = getattr(eqn.params["sharding"], "spec", None), eqn.params["unconstrained_dims"]
    if spec is None:
        return False
    entries = [*spec, *[None] * (eqn.invars[0].aval.ndim - len(spec))]
    names = {axis for entry in entries for axis in (entry if isinstance(entry, tuple) else (entry,))}
    if any(isinstance(axis, str) and is_axis(axis, ROW_AXES) for axis in names):
        return False
    return bool(entries) and entries[0] in (None, ()) and 0 not in free


def first_tokens(batch: Any, parts: int) -> Any:
    """Return the first of `parts` equal parts of the tokens of a batch's rows."""
    return jax.tree.map(lambda x: x[:, : x.shape[1] // parts] if x.ndim > 1 else x, batch)


def first_rows(batch: Any, parts: int) -> Any:
    """Return the first of `parts` equal parts of a batch's rows; scalars belong to every part."""
    return jax.tree.map(lambda x: x[: x.shape[0] // parts] if x.ndim else x, batch)
