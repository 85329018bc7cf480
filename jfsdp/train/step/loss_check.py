"""Comparison of the loss over all rows with its sum over devices or microbatches, before the first step.

[Note: what a loss must be]
In program `manual` each device computes the loss of its own rows, and totals, weights and metrics are summed over
devices. The sum is the loss of all rows only if the loss is a sum over rows. A contrastive loss, a batch norm or a
balance over all tokens is not. So before its first step, a `TrainStep` computes both values on the first microbatch,
forward only, one program after the other.

If a device has all rows of a microbatch, two microbatches are compared instead: their rows together, and one after the
other, because accumulation changes the objective of a loss that is not a sum. Means are not compared (with several
microbatches the loss is the mean of their means), nor are models whose state depends on the rows (batch statistics).

At the initial parameters, the values may agree by chance while the gradients do not: a PPO ratio is 1, and a head of
zeros gives every row the same loss. So each program runs a second time with all weights changed a little, each
differently. Neither run detects couplings smaller than the rounding error, couplings under `stop_gradient` that change
no value, and couplings that begin at a later batch (a balance loss whose factor is warmed up from 0).

[Note: the same bits]
A device draws other dropout masks than the global batch does. For the comparison, the keys in the model's state are
replaced by keys of an implementation that draws the same bits for every element and every key, so that the result of a
row does not depend on other rows. The bits correspond to a uniform draw of 0.25: usual dropout keeps every element,
normal draws are finite, and JAX's rejection samplers end. A permutation of rows becomes the identity, so its couplings
are not detected. If the loss creates keys itself, a difference proves nothing and is only a warning.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.compat import define_prng_impl, warn
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.engine import to_device
from jfsdp.engine.spec import MANUAL, XLA
from jfsdp.engine.unit import Arrays
from jfsdp.jaxprs import all_eqns, draws
from jfsdp.layout.mesh import CONTEXT
from jfsdp.layout.precision import is_key
from jfsdp.train.step.gradients import Gradients
from jfsdp.train.step.loss import METRIC, Loss, as_loss, merge, numbers
from jfsdp.train.step.resolve import check_needs
from jfsdp.train.step.token_rules import CHECK, broken_rule, context_bytes

_SUMS = 2.0**-17  # relative error of a float32 sum of very many terms, from the order of summation
_MATMULS = {"cpu": 0.0, "tpu": 2.0**-7}  # rounding of float32 matmuls; on other platforms TF32, 2**-10

_SAME = define_prng_impl(
    key_shape=(1,),
    seed=lambda seed: jnp.zeros((1,), jnp.uint32),
    split=lambda key, shape: jnp.broadcast_to(key, (*shape, 1)),
    random_bits=lambda key, width, shape: jnp.full(shape, int("40" * (width // 8), 16), f"uint{width}"),
    fold_in=lambda key, data: key,
    name="jfsdp_same_bits",
)


def same_bits(keys: jax.Array) -> jax.Array:
    """Return keys of the same shape that all draw the same bits; see [Note: the same bits]."""
    return jax.random.wrap_key_data(jnp.zeros((*keys.shape, 1), jnp.uint32), impl=_SAME)


def compare_loss(gradients: Gradients, arrays: tuple[Arrays, Arrays, Any], options: Mapping[str, Any]) -> None:
    """Check that a loss equals its sum over devices or microbatches; see [Note: what a loss must be].

    Cost:    none in program `xla` with one microbatch; otherwise two programs, each a forward, compiled once and run
             twice.
    Memory:  the forward of a microbatch (in program `xla` of two), its weights gathered as in the step, and a second
             copy of the stored parameters. Nothing is donated, and all is freed afterwards.

    Args:
      arrays: the stored parameters, the model's other state, the batch.
      options: options of XLA's compiler, by name.

    Raises:
      ValueError: naming the total, the weight or the metric, both values, and what to return instead.

    Warns:
      UserWarning: if they differ and the loss draws from random keys that it creates, which may be the cause.
    """
    is_split = gradients.config.accumulate > 1 and gradients.spec.adds_up
    if not (_is_by_devices(gradients) or is_split):
        return
    wholes, jaxpr = _run(gradients, _whole, arrays, options)
    parts, apart = _run(gradients, _on_devices if _is_by_devices(gradients) else _in_microbatches, arrays, options)
    if not _is_by_devices(gradients) and all(one.weight == 1 and two[0].weight == 2 for one, two in zip(wholes, parts)):
        return  # a mean with a guard: Loss(mean, (count > 0) * 1.0)
    size = gradients.apply.layout.num_shards([CONTEXT]) if _is_by_devices(gradients) else 1
    if size > 1 and not context_bytes(apart):
        raise ValueError(f"{_token_rule(size, apart, arrays[2])}; check_loss=False skips this check")
    first, moved = (_difference(gradients, jaxpr, one, *other) for one, other in zip(wholes, parts))
    problem = first or (moved and f"{moved} with all weights changed a little (with the current weights they agree)")
    if problem and _draws_elsewhere(jaxpr):
        reason = "from random keys that are not in the model's state, and differently on each device"
        warn(f"{problem}. But the loss draws {reason}, which may explain the difference")
    elif problem:
        remedy = _remedy(gradients, problem)
        if size > 1 and math.isclose(parts[0][0].weight, size * wholes[0].weight):
            remedy += (
                f"; values per row [B] count on each of the {size} devices of axis {CONTEXT!r}: mask one token per row"
            )
        elif size > 1:
            remedy = f"{_token_rule(size, apart, arrays[2])}; or {remedy}"
        raise ValueError(f"{problem}; {remedy}; check_loss=False skips this comparison")


def _token_rule(size: int, jaxpr: Any, batch: Any) -> str:
    """Describe what may be wrong with a loss over rows that axis `context` splits over `size` devices."""
    num_tokens = next((x.shape[1] for x in jax.tree.leaves(batch) if x.ndim > 1), 0) // size
    start = f"mesh axis {CONTEXT!r} (size {size}) gives a device {num_tokens} tokens of each row"
    return f"{start}: {broken_rule(jaxpr, num_tokens)}"


def _is_by_devices(gradients: Gradients) -> bool:
    """Return whether each device of a step computes the loss of its own rows."""
    layout = gradients.apply.layout
    return gradients.spec.program == MANUAL and layout.num_shards(layout.data_axes) > 1


def _run(gradients: Gradients, compute: Callable[..., Any], arrays: Any, options: Mapping[str, Any]) -> Any:
    """Compile and run `compute`; return NumPy arrays, the same in every process, and the traced jaxpr."""
    whole = NamedSharding(gradients.apply.engine.mesh, PartitionSpec())

    def run(distance: Any, source: Arrays, *rest: Any) -> Any:
        return compute(gradients, {name: _moved(x, distance) for name, x in source.items()}, *rest)

    traced = jax.jit(run, out_shardings=whole, compiler_options=dict(options)).trace(0.0, *arrays)
    compiled = traced.lower().compile()
    return [jax.device_get(compiled(distance, *arrays)) for distance in (0.0, 1.0)], traced.jaxpr.jaxpr


def _moved(weight: jax.Array, distance: jax.Array) -> jax.Array:
    """Change every element by 10 % plus 0.03, times a wave over the array; unchanged, to the bit, at distance 0."""
    here = to_device(weight)
    if not jnp.issubdtype(here.dtype, jnp.floating):
        return here
    with jax.named_scope(CHECK):
        indices = (jax.lax.broadcasted_iota(jnp.float32, here.shape, dim) for dim in range(here.ndim))
        wave = distance * jnp.cos(sum(((1.3 + dim) * index for dim, index in enumerate(indices)), start=jnp.zeros(())))
        return (here * (1 + 0.1 * wave) + 0.03 * wave).astype(here.dtype)


def _whole(gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any) -> Loss:
    """Compute the loss of the compared rows in the global view."""
    apply, source = gradients.program_on(source, XLA)
    return _loss(gradients, apply, source, model_state, _rows(gradients, apply, batch))


def _on_devices(gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any) -> Any:
    """Compute the loss of each device's rows of a microbatch; return the sum of the losses and of their magnitudes."""
    apply, source = gradients.program_on(source, MANUAL)
    engine = apply.engine

    def local(source: Arrays, model_state: Arrays, batch: Any) -> list[Loss]:
        loss = _loss(gradients, apply, source, model_state, _rows(gradients, apply, batch))
        return [merge(engine.sum_rows, engine.max_rows, x) for x in (loss, jax.tree.map(jnp.abs, loss))]

    return engine.on_rows(local, (source, model_state, batch), PartitionSpec())  # type: ignore[type-var]


def _in_microbatches(gradients: Gradients, source: Arrays, model_state: Arrays, batch: Any) -> Any:
    """Compute the losses of two microbatches; return the sum of the losses and of their magnitudes."""
    apply, source = gradients.program_on(source, XLA)
    rows = apply.engine.split_rows(batch, gradients.config.accumulate)
    ones = [jax.tree.map(lambda x, i=i: x[i], rows) for i in range(2)]
    losses = [_loss(gradients, apply, source, model_state, one) for one in ones]
    return [merge(jnp.add, jnp.maximum, *parts) for parts in (losses, jax.tree.map(jnp.abs, losses))]


def _rows(gradients: Gradients, apply: ShardedApply, batch: Any) -> Any:
    """Return the compared rows: the first microbatch, or the first two interleaved."""
    parts = apply.engine.split_rows(batch, gradients.config.accumulate)
    if _is_by_devices(gradients):
        return jax.tree.map(lambda x: x[0], parts)
    return jax.tree.map(lambda x: x[:2].swapaxes(0, 1).reshape(-1, *x.shape[2:]) if x.ndim > 1 else x[0], parts)


def _loss(gradients: Gradients, apply: ShardedApply, source: Any, model_state: Any, rows: Any) -> Loss:
    state = {name: same_bits(value) if is_key(value) else value for name, value in model_state.items()}
    return apply(lambda model, rows: as_loss(gradients.loss_fn(model, rows)), source, state, rows)[0]


def _difference(gradients: Gradients, jaxpr: Any, whole: Loss, parts: Loss, sizes: Loss) -> str:
    """Describe the first value that differs by more than the rounding error; "" if none does."""
    layout, mesh = gradients.apply.layout, gradients.apply.engine.mesh
    dtypes = {var.aval.dtype for eqn in all_eqns(jaxpr) for var in eqn.outvars if hasattr(var.aval, "dtype")}
    error = allowed_error(dtypes, mesh.devices.flat[0].platform)
    ones, others, largest = map(_numbers, (whole, parts, sizes))
    if wrong := ones.keys() ^ others.keys():
        return f"loss_fn: {min(wrong)} is in an array of another shape for fewer rows"
    for name, one in ones.items():
        # A sum of terms of both signs may be much smaller than its terms, so the weight is a lower bound of its scale.
        other, size = others[name], max(abs(one), largest[name], abs(sizes.weight))
        limit = _SUMS * size if name == "weight" else error * size
        if re.search(r"\](\.total)?(\.\d+)*$", name) and one.is_integer() and other.is_integer():
            # Counts such as `correct` of a classifier: rounding decides which of two equal logits is larger.
            limit += 2 + 2 * math.sqrt(error * sizes.weight)
        if not (one == other or (math.isnan(one) and math.isnan(other)) or abs(one - other) <= limit):
            together, apart = "two microbatches", "one after the other"
            if _is_by_devices(gradients):
                num = layout.num_shards(layout.data_axes)
                together, apart = "a microbatch", f"over {num} devices, each with its own rows"
            return (
                f"loss_fn: {name} is {one:.6g} for all rows of {together} together, and {other:.6g} {apart} (the "
                f"difference is {abs(one - other):.3g}, and rounding explains {limit:.3g})"
            )
    return ""


def _numbers(loss: Loss) -> dict[str, float]:
    """Return the values of a loss by name."""
    found = jax.tree_util.tree_leaves_with_path(loss)
    return numbers({jax.tree_util.keystr(path).strip("."): x for path, x in found})


def allowed_error(dtypes: Iterable[Any], platform: str) -> float:
    """Return the relative rounding error of a sum over rows.

    A device has the same rows in both programs, so on CPUs the results are bitwise equal (measured). If XLA chooses
    other kernels, a row may differ by some units in the last place of the lowest dtype that it passes through (assumed:
    less than two on average), and float32 sums by their order.
    """
    floats = [float(jnp.finfo(dtype).eps) for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating)]
    return 2 * max(_MATMULS.get(platform, 2.0**-10), *floats, 0.0) + _SUMS


def _draws_elsewhere(jaxpr: Any) -> bool:
    """Return whether a loss draws from keys other than those of `same_bits`."""
    same = jax.eval_shape(lambda: jax.random.key(0, impl=_SAME)).dtype
    found = filter(draws, all_eqns(jaxpr))
    return any(all(getattr(atom.aval, "dtype", None) != same for atom in eqn.invars) for eqn in found)


def _remedy(gradients: Gradients, problem: str) -> str:
    if "loss_fn: aux" in problem:
        return f"as an aux value return {METRIC}, of the rows that the loss receives"
    keep = "the scalar mean (return mean, aux), which is computed from the rows of all devices"
    keep += "" if gradients.config.accumulate == 1 else " (of a microbatch; the loss is the mean over them)"
    needs = check_needs(gradients.apply.layout, gradients.config)
    needs += ["program='manual'"] if gradients.config.program == MANUAL else []
    other = f", and remove {' and '.join(needs)}" if needs else ""
    sums = "return total and weight as sums over the rows that the loss receives; if rows depend on each other, return"
    return f"{sums} {keep}{other}"
