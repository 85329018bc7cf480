"""Optimizer moments at rest in bfloat16, written back with stochastic rounding."""

from __future__ import annotations

import zlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfsdp.arguments import Seed, checked
from jfsdp.layout.precision import float_dtype_name


class LowPrecisionState(NamedTuple):
    """The number of updates, and the state of the wrapped optimizer with moments in low precision."""

    count: jax.Array
    inner: Any


@checked
def low_precision_state(
    tx: optax.GradientTransformation, dtype: Any = "bfloat16", seed: Seed = 0
) -> optax.GradientTransformation:
    """Keep an optimizer's parameter-shaped float32 states in bfloat16: 4 instead of 8 bytes per parameter for Adam.

    The update is computed in float32. Each new state is rounded stochastically, which is unbiased. With rounding to
    nearest, a second moment with b2=0.999 would never decay, because 0.001 is less than half a step of bfloat16.
    Counters, factored moments and states in lower precision are unchanged. Keep transformations with states that must
    be exact, such as `track_ema`, outside.

    The random bits are a function of `seed`, the number of the update, the state's path and the element's position in
    the logical leaf. They are equal on every mesh with partitionable threefry (JAX's default).

    Layout:  as the states of `tx`.
    Cost:    16 random bits per element of state and step, generated locally; no communication.
    Memory:  half of these states at rest. XLA fuses the float32 values into the update; otherwise they are temporaries
             of the size of the optimizer's largest fusion.

    Args:
      tx: any optax transformation; its update needs the parameters.
      dtype: only "bfloat16", which is the upper half of the bits of float32.
      seed: seed of the rounding.

    Raises:
      ValueError: for another dtype, or if the update is called without parameters.
    """
    if float_dtype_name("low_precision_state: dtype", dtype) != "bfloat16":
        raise ValueError(f"low_precision_state: dtype {dtype!r} is not supported; use 'bfloat16'")

    def init(params: Any) -> LowPrecisionState:
        state = tx.init(params)
        low = _is_low(tx, params)
        rounded = jax.tree.map(lambda x, is_low: x.astype(jnp.bfloat16) if is_low else x, state, low)
        return LowPrecisionState(jnp.zeros((), jnp.int32), rounded)

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, LowPrecisionState]:
        if params is None:
            raise ValueError("low_precision_state: its update needs parameters; call tx.update(grads, state, params)")
        low = _is_low(tx, params)
        wide = jax.tree.map(lambda x, is_low: x.astype(jnp.float32) if is_low else x, state.inner, low)
        updates, wide = optax.with_extra_args_support(tx).update(updates, wide, params, **extra)
        key = jax.random.fold_in(jax.random.key(seed, impl="threefry2x32"), state.count)

        def narrow(path: Any, x: Any, is_low: bool) -> Any:
            if not is_low:
                return x
            return round_stochastically(x, jax.random.fold_in(key, zlib.crc32(jax.tree_util.keystr(path).encode())))

        inner = jax.tree_util.tree_map_with_path(narrow, wide, low)
        return updates, LowPrecisionState(jnp.asarray(optax.safe_increment(state.count)), inner)

    return optax.GradientTransformationExtraArgs(init, update)


def round_stochastically(x: jax.Array, key: jax.Array) -> jax.Array:
    """Round float32 to bfloat16 stochastically.

    A bfloat16 is the upper half of a float32. Adding 16 random bits to the lower half and truncating it rounds up with
    the right probability. Values that are not finite are cast: the payload of a NaN may be in the lower half.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    truncated = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(truncated, jnp.float32).astype(jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _is_low(tx: optax.GradientTransformation, params: Any) -> Any:
    """Return for each array of the state of `tx` whether it is float32 with the shape and path of a parameter."""
    shapes = {path: tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)}

    def is_low(path: tuple[Any, ...], x: Any) -> bool:
        tails = (path[start:] for start in range(len(path) + 1))
        owner = next((tail for tail in tails if tail in shapes), None)
        return owner is not None and shapes[owner] == tuple(x.shape) and x.dtype == jnp.float32

    return jax.tree_util.tree_map_with_path(is_low, jax.eval_shape(tx.init, params))
