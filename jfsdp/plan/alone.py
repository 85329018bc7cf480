"""What one unit takes by itself: its computation, compiled for one GPU without anything around it.

The memory formula (plan/formula.py) needs three figures that no table of parameters has: what a unit's recomputation
takes, what a call leaves for the backward, and what the loss takes. Here they are measured apart from the step whose
peak the formula foretells: the units are taken out of the model, and each is compiled alone; what remains of the model,
in which a unit hands on its input, is compiled alone too.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.dataflow import is_literal
from jfsdp.engine.local import LocalEngine
from jfsdp.engine.unit import Arrays, Traced, apply_remat, is_inexact, linearize, part, trace_unit, weave
from jfsdp.layout.table import Layout
from jfsdp.layout.units import ROOT
from jfsdp.plan.compile import without_cache
from jfsdp.train.loss import as_loss

_OPTIONS: dict[str, str | bool] = {
    "xla_disable_hlo_passes": "rematerialization"
}  # as in a step: what is recomputed is the remat policy


@dataclasses.dataclass(frozen=True)
class Alone:
    """What a unit takes by itself, in bytes of one device.

    Attributes:
      saved_bytes: what one call leaves for the backward under the unit's remat, weights apart, and apart from inputs
        that are the same in every call.
      shared_bytes: those inputs.
      work_bytes: what its backward takes beside its inputs, its weights and their gradients: what is recomputed, and
        the cotangents that come in and go out. Measured with them, and less their bytes: where weights are freed before
        the last gradient is there, it is less than what is recomputed. Of the root: all but its weights and gradients,
        logits included; less what XLA puts where a gradient will be.
    """

    saved_bytes: int
    shared_bytes: int
    work_bytes: int


@dataclasses.dataclass(frozen=True)
class _Apart(LocalEngine):
    """Takes units out of a model: a call is noted, and hands on those of its inputs that look like its outputs."""

    calls: dict[str, Traced] = dataclasses.field(default_factory=dict, compare=False)

    def call_unit(self, name: str, run: Any, shards: Arrays, rest: Any, seen: set[str] | None = None) -> Any:
        """Run the root on whole weights; of any other unit note what it would run."""
        del seen
        rest = self.cast_inputs(name, rest)
        if name == ROOT:
            return run(shards, rest)
        traced, flat = trace_unit(run, self.full_shapes(shards), rest)
        self.calls.setdefault(name, traced)
        return jax.tree.unflatten(traced.tree, _handed_on(traced, flat))


def measure_alone(
    sharded: ShardedApply,
    loss_fn: Callable[[Any, Any], Any],
    batch: Any,
    model_state: Mapping[str, Any],
    device: Any,
) -> dict[str, Alone]:
    """Compile each unit of a model alone on one device, forward and backward, and what is left of it without them.

    Moves no data, and needs no device: one of a topology will do. Units that look alike are compiled once.

    Args:
      sharded: the model, and the layout that says which weights are a unit's, their dtype and what its remat saves.
      batch: shapes of the rows of one device.
      model_state: shapes of the model's other state.

    Returns:
      What each unit takes, by name; "" is the root.
    """
    layout = sharded.layout.per_parameter()
    engine = _Apart(layout, jax.sharding.Mesh([device], ("fsdp",)))
    apply = ShardedApply(sharded.model, engine)
    weights = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.stage("use").dtype) for leaf in layout.leaves}
    root = {path: weights.pop(path) for path in layout.unit(ROOT).leaves}

    def total(trained: Arrays, other: Arrays, inner: Arrays, state: Arrays, batch: Any) -> tuple[jax.Array, Any]:
        def fn(model: Any, rows: Any) -> Any:
            return as_loss(loss_fn(model, rows))

        loss, _ = apply(fn, {**trained, **other, **inner}, state, batch)
        return loss.total, loss

    def differentiated(root: Arrays, inner: Arrays, state: Arrays, batch: Any) -> Any:
        trained = {path: value for path, value in root.items() if layout.by_path[path].trainable}
        other = {path: value for path, value in root.items() if path not in trained}
        return jax.value_and_grad(total, has_aux=True)(trained, other, inner, state, batch)

    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), (root, weights, dict(model_state), batch))
    compile_alone = _Compiler(device)
    found = {ROOT: Alone(0, 0, compile_alone(differentiated, shapes))}
    alike: dict[str, Alone] = {}
    for name, traced in engine.calls.items():
        key = f"{layout.policy(name).remat} {traced.jaxpr}"
        if key not in alike:
            alike[key] = _measure_call(layout, name, traced, compile_alone)
        found[name] = alike[key]
    return found


@dataclasses.dataclass(frozen=True)
class _Compiler:
    """Compiles a function for one device, and says what it takes beside its arguments and results."""

    device: Any

    def __call__(self, fn: Callable[..., Any], shapes: tuple[Any, ...]) -> int:
        where = SingleDeviceSharding(self.device)
        placed = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=where), shapes)
        with without_cache(), jax.default_device(self.device):  # by which models choose kernels
            compiled = jax.jit(fn).lower(*placed).compile(compiler_options=_OPTIONS)
        stats: Any = compiled.memory_analysis()
        return stats.temp_size_in_bytes


def _measure_call(layout: Layout, name: str, traced: Traced, compile_alone: _Compiler) -> Alone:
    flat, weights = (
        [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in variables]
        for variables in (traced.jaxpr.invars[: traced.num_flat], traced.jaxpr.invars[traced.num_flat :])
    )
    outs = [jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype) for var in traced.jaxpr.outvars]
    is_diff = [is_inexact(value) for value in flat]

    def compute(weights: Any, diff: Any, other: Any) -> list[Any]:
        return part(is_live, traced(weights, weave(is_diff, diff, other)))[0]

    is_live = [is_inexact(value) for value in outs]
    unit = apply_remat(compute, layout.policy(name).remat)
    diff, other = part(is_diff, flat)
    cotangents = part(is_live, outs)[0]

    def backward(seeds: Any, diff: Any, other: Any, cotangents: Any) -> Any:
        # Weights and gradients are made and dropped inside: XLA counts arguments and results from first to last.
        made = [jax.numpy.broadcast_to(seed, x.shape) for seed, x in zip(seeds, weights, strict=True)]
        made = jax.lax.optimization_barrier(made)
        pull = jax.vjp(lambda weights, diff: unit(weights, diff, other), made, diff)[1]
        grads, grad_diff = jax.lax.optimization_barrier(pull(cotangents))
        return [jax.numpy.sum(grad, dtype="float32") for grad in grads], grad_diff

    named = {str(place): value for place, value in enumerate(weights)}
    linear = linearize(
        lambda weights, diff, other: unit([weights[key] for key in named], diff, other),
        named, diff, other, trainable=frozenset(named),
    )  # fmt: skip
    saved, shared = _split_saved(linear, outs)
    seeds = [jax.ShapeDtypeStruct((), value.dtype) for value in weights]
    work = compile_alone(backward, (seeds, diff, other, cotangents))
    return Alone(saved, shared, work + 2 * size_of(cotangents) - 2 * size_of(weights))


def _split_saved(linear: Any, outs: list[Any]) -> tuple[int, int]:
    """Return the bytes of what each call saves, and of what is saved once for all: inputs that no call hands on."""
    handed_on = {(value.shape, value.dtype) for value in outs}
    inputs = set(linear.jaxpr.invars)
    saved = shared = 0
    residuals = zip(linear.jaxpr.outvars[linear.num_out :], linear.kinds, strict=True)
    for var in {var for var, kind in residuals if kind == "saved" and not is_literal(var)}:
        if var in inputs and (var.aval.shape, var.aval.dtype) not in handed_on:
            shared += size_of([var.aval])
        else:
            saved += size_of([var.aval])
    return saved, shared


def size_of(values: Iterable[Any]) -> int:
    """Return the bytes of arrays, or of shapes."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in values)


def _handed_on(traced: Traced, flat: list[Any]) -> list[Any]:
    """Return for each output of a call the first of its inputs that looks like it, or zeros."""
    left = list(flat)
    outs = []
    for var in traced.jaxpr.outvars:
        place = next((i for i, x in enumerate(left) if x.shape == var.aval.shape and x.dtype == var.aval.dtype), None)
        outs.append(jax.numpy.zeros(var.aval.shape, var.aval.dtype) if place is None else left.pop(place))
    return outs
