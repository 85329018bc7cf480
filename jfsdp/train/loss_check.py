"""Compare a loss over all rows with what the rows of each device add up to, before a step that computes the latter.

[Note: what a loss must be]
Where collectives are written out, a device computes the loss of its own rows, and totals, weights and metrics are added
over devices. That is the loss of all rows only if it is a sum over rows; of a contrast between rows, a batch norm, or a
balance over all tokens it is another number. So before its first step a `TrainStep` computes both, forward only, on its
first microbatch, one program after the other. Microbatches themselves are what the user asked for: between those rows
are never together, on one device neither.

[Note: the same bits]
A device draws other dropout masks than the global batch has. For the comparison the keys in the model's state are
replaced by keys of an implementation that draws the same bits for every element, from every key: so what a row becomes
does not depend on the rows beside it. The bits are those of a uniform draw of 0.25: usual dropout keeps, normal draws
are finite, and JAX's rejection samplers end. A permutation of rows becomes the identity, so what it would couple is not
seen. Where the loss draws from keys of its own making, a difference proves nothing, and is told in a warning.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.random import define_prng_impl
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.engine.dataflow import all_eqns
from jfsdp.engine.local import LocalEngine
from jfsdp.engine.unit import Arrays
from jfsdp.train.gradients import Gradients, WrittenOut
from jfsdp.train.loss import METRIC, Loss, Max, Mean, as_loss, over_devices
from jfsdp.train.rows import on_each_device, split_microbatches
from jfsdp.train.survey import is_key

_SUMS = 2.0**-17  # of a float32 sum of very many terms, by the order in which they are added
_MATMULS = {"cpu": 0.0, "tpu": 2.0**-7}  # what float32 matmuls round to there; elsewhere to TF32:
_TF32 = 2.0**-10
_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def _quarter(key: jax.Array, bit_width: int, shape: tuple[int, ...]) -> jax.Array:
    del key
    return jnp.full(shape, int("40" * (bit_width // 8), 16), f"uint{bit_width}")


_SAME = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros((1,), jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
    random_bits=_quarter,
    fold_in=lambda key, data: key,
    name="jfsdp_same_bits",
    tag="same",
)


def same_bits(keys: jax.Array) -> jax.Array:
    """Return keys in place of others that all draw the same; see [Note: the same bits]. Moves no data."""
    return jax.random.wrap_key_data(jnp.zeros((*keys.shape, 1), jnp.uint32), impl=_SAME)


def compare_loss(
    gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any, compiler_options: Mapping[str, Any]
) -> None:
    """Refuse a loss that is another number where a step computes it device by device; see [Note: what a loss must be].

    Cost:    nothing where XLA sees the global batch; else two programs, compiled and run once: a forward each.
    Memory:  the forward of one microbatch, its weights gathered as in the step. Nothing is donated, nothing is kept.

    Raises:
      ValueError: naming the total, the weight or the metric, both values, and what to return instead.

    Warns:
      UserWarning: if they differ and the loss draws from random keys of its own, which may be why.
    """
    arrays = source, model_state, batch
    way, layout = _written_out(gradients, arrays), gradients.apply.layout
    if way is None or layout.num_shards(layout.data_axes) == 1:
        return
    try:
        whole, jaxpr = _run(gradients, _whole, arrays, compiler_options)
        (parts, sizes), _ = _run(gradients, _parts, arrays, compiler_options)
    except Exception as error:
        error.add_note("raised while the loss was compared before the first step; check_loss=False leaves that out")
        raise
    problem = _difference(gradients, way, whole, parts, sizes, jaxpr)
    if problem and _draws_elsewhere(jaxpr):
        warnings.warn(
            f"{problem}. But the loss draws from random keys that are not in the model's state, and on each device "
            "others than for all rows: that may be the difference, or it may not",
            stacklevel=3,
        )
    elif problem:
        raise ValueError(f"{problem}; {_remedy(gradients, way, problem)}; check_loss=False skips this comparison")


def warn_of_scalar(gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any) -> None:
    """Say what a step that was not compared takes a scalar for, where it computes it device by device."""
    way = gradients.written_out(source, model_state, batch)
    if way is not None and not way.is_sum:
        what, other = _ways(gradients)
        warnings.warn(
            f"{what}: the loss is a scalar, and is taken for the mean over its rows, all of equal weight; if it is "
            "not, but a sum over rows divided by a count, return a jfsdp.Loss whose weight counts the rows at hand; "
            f"if rows depend on each other, use {other}",
            stacklevel=2,
        )


def _written_out(gradients: Gradients, arrays: Any) -> WrittenOut | None:
    """Tell how collectives are written out, from shapes: the step's own trace then finds it known."""

    def find(*arrays: Any) -> None:
        gradients.written_out(*arrays)

    jax.eval_shape(find, *arrays)
    return gradients.written_out(*arrays)


def _ways(gradients: Gradients) -> tuple[str, str]:
    """Return what of a step's arguments asks for each device's own rows, and what does not."""
    asked = {'engine="manual"': 'engine="auto"'} if gradients.prefetch is not None else {}
    asked |= {'reduce="once"': 'reduce="every"'} if gradients.once and gradients.is_asked else {}
    return " and ".join(asked), " and ".join(asked.values())


def _run(gradients: Gradients, f: Callable[..., Any], arrays: Any, compiler_options: Mapping[str, Any]) -> Any:
    """Compile and run; return numbers of Python, the same in every process, and what was traced."""
    replicated = NamedSharding(gradients.apply.engine.mesh, PartitionSpec())
    run = jax.jit(f, static_argnums=0, out_shardings=replicated, compiler_options=dict(compiler_options))
    traced = run.trace(gradients, *arrays)
    return jax.tree.map(float, traced.lower().compile()(*arrays)), traced.jaxpr.jaxpr


def _whole(gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any) -> Loss:
    """Compute the loss of a microbatch in the global view."""
    apply, source = gradients.gathered(source)
    return _loss(gradients, apply, source, model_state, _first(gradients, batch, gradients.rows_sharding))


def _parts(gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any) -> tuple[Loss, Loss]:
    """Compute the loss of each device's rows of a microbatch; return what they add up to, and so of their sizes."""
    way, (apply, source) = gradients.written_out(source, model_state, batch), gradients.gathered(source)
    assert way is not None
    engine = LocalEngine(apply.layout, apply.engine.mesh)
    axes = engine.layout.axes_on(engine.mesh, engine.layout.data_axes)

    def local(source: Arrays, model_state: Arrays, batch: Any) -> tuple[Loss, Loss]:
        rows = _first(gradients, batch, None)
        loss = _loss(gradients, gradients.apply_on(engine), source, model_state, rows)
        return over_devices(loss, axes), over_devices(jax.tree.map(jnp.abs, loss), axes)

    return on_each_device(local, engine, way.own, PartitionSpec(), source, model_state, batch)


def _loss(gradients: Gradients, apply: Any, source: Arrays, model_state: Arrays, rows: Any) -> Loss:
    state = {name: same_bits(value) if is_key(value) else value for name, value in model_state.items()}
    return apply(lambda model, rows: as_loss(gradients.loss_fn(model, rows)), source, state, rows)[0]


def _first(gradients: Gradients, batch: Any, sharding: NamedSharding | None) -> Any:
    if gradients.accumulate == 1:
        return batch
    return jax.tree.map(lambda x: x[0], split_microbatches(batch, gradients.accumulate, sharding))


def _difference(gradients: Gradients, way: WrittenOut, whole: Loss, parts: Loss, sizes: Loss, jaxpr: Any) -> str | None:
    """Describe the first number that differs by more than rounding explains."""
    layout, mesh = gradients.apply.layout, gradients.apply.engine.mesh
    dtypes = {var.aval.dtype for eqn in all_eqns(jaxpr) for var in eqn.outvars if hasattr(var.aval, "dtype")}
    error = allowed_error(dtypes, mesh.devices.flat[0].platform)
    weights = (None,) * 3 if way.is_sum else (whole.weight, parts.weight, parts.weight)
    ones, others, largest = map(_numbers, (whole, parts, sizes), weights)
    for name, one in ones.items():
        other, size = others[name], max(abs(one), largest[name])
        limit = _limit(
            name, is_count=one.is_integer() and other.is_integer(), size=size, error=error, weight=sizes.weight
        )
        if not _is_near(one, other, limit):
            return (
                f"loss_fn: {name} is {one:.6g} computed from all rows of a microbatch together, and another value over "
                f"{layout.num_shards(layout.data_axes)} devices, each with its own rows: {other:.6g} (they differ by "
                f"{abs(one - other):.3g}, and rounding explains {limit:.3g})"
            )
    return None


def _numbers(loss: Loss, weight: float | None) -> dict[str, float]:
    """Name the numbers of a loss that no way may change. `weight` is what one that is no sum is divided by."""
    by = weight or 1.0
    found = {"total": loss.total, "weight": loss.weight} if weight is None else {"the loss": loss.total / by}
    for name, value in (loss.aux or {}).items():
        label = f"aux[{name!r}]"
        if isinstance(value, (Max, Mean)):
            found |= {f"{label}.{field}": number for field, number in value._asdict().items()}
        else:
            found[label] = value / by
    return found


def allowed_error(dtypes: Iterable[Any], platform: str) -> float:
    """Return the relative error of a sum over rows that rounding explains.

    What a row becomes may differ by some units in the last place of the lowest dtype that it passes through, since XLA
    chooses other kernels for other numbers of rows; and float32 sums differ by their order.
    """
    floats = [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return 4 * max(_MATMULS.get(platform, _TF32), *floats, 0.0) + _SUMS


def _limit(name: str, *, is_count: bool, size: float, error: float, weight: float) -> float:
    """Return by how much two numbers may differ: weights by the order of a sum, counts of what is compared by more."""
    if name == "weight":
        return _SUMS * size
    # Where two logits are equal but for rounding, which of them is larger is chance: as in `correct` of a classifier.
    flips = 2 + 2 * math.sqrt(error * weight) if is_count and name.endswith(("]", ".total")) else 0.0
    return error * size + flips


def _is_near(one: float, other: float, limit: float) -> bool:
    return one == other or (math.isnan(one) and math.isnan(other)) or abs(one - other) <= limit


def _draws_elsewhere(jaxpr: Any) -> bool:
    """Tell whether a loss draws from other keys than those of `same_bits`."""
    own = jax.eval_shape(lambda: same_bits(np.zeros(()))).dtype
    draws = (eqn for eqn in all_eqns(jaxpr) if eqn.primitive.name in _DRAWS)
    return any(all(getattr(atom.aval, "dtype", None) != own for atom in eqn.invars) for eqn in draws)


def _remedy(gradients: Gradients, way: WrittenOut, problem: str) -> str:
    other = _ways(gradients)[1]
    if "aux[" in problem:
        return f"of the rows at hand an aux value is {METRIC}"
    if not way.is_sum:
        return (
            "if the loss is a sum over rows divided by a count, return jfsdp.Loss(sum, count) of the rows at hand; if "
            f"rows depend on each other, use {other}"
        )
    return (
        "total and weight have to be sums over the rows at hand; if rows depend on each other, return the scalar mean, "
        "or jfsdp.Loss(mean, 1.0, aux), for which the rows of all devices stay together"
        + (f", and use {other}" if other else "")
    )
