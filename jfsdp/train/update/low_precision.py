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
    """The state of the optimizer inside, moments in low precision, and the number of its updates."""

    count: jax.Array
    inner: Any


@checked
def low_precision_state(
    tx: optax.GradientTransformation, dtype: Any = "bfloat16", seed: Seed = 0
) -> optax.GradientTransformation:
    """Keep an optimizer's parameter-shaped float32 states in bfloat16: 4 bytes per parameter of Adam instead of 8.

    The update is computed in float32, and each new state is rounded up or down at random, in proportion to its
    distance: right on average. To the nearest, a second moment with b2=0.999 would never decay, since a thousandth is
    less than half a step of bfloat16. Counters, factored moments and states that are of lower precision already stay as
    they are. Put what must stay exact, such as `track_ema`, outside.

    The random bits are a function of `seed`, the number of the update, the state's path and the element's position in
    the logical leaf: the same on every mesh, under partitionable threefry (the default of JAX).

    Layout:  that of the states of `tx`.
    Cost:    16 random bits per element of state and step, made where they are used; no communication.
    Memory:  half of those states at rest. XLA fuses the float32 values into the update; where it does not, they are
             temporaries of the size of the optimizer's largest fusion.

    Args:
      tx: any optax transformation that is given the parameters.
      dtype: only "bfloat16", whose rounding is a cut through the bits of a float32.
      seed: of the rounding.

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
            raise ValueError(
                "low_precision_state: its update needs the parameters; call tx.update(grads, state, params)"
            )
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
    """Round float32 to bfloat16, up or down at random in proportion to the distance.

    A bfloat16 is the upper half of a float32, so adding 16 random bits to the lower half and cutting it off rounds up
    with the right probability. What is not finite is cast: a NaN may have its payload in the lower half alone.
    """
    bits = jax.lax.bitcast_convert_type(x, jnp.uint32)
    noise = jax.random.bits(key, x.shape, jnp.uint16).astype(jnp.uint32)
    cut = (bits + noise) & jnp.uint32(0xFFFF0000)
    rounded = jax.lax.bitcast_convert_type(cut, jnp.float32).astype(jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _is_low(tx: optax.GradientTransformation, params: Any) -> Any:
    """Tell for every array of the state of `tx` whether it is float32, of a parameter's shape and under its path."""
    shapes = {path: tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(params)}

    def is_low(path: tuple[Any, ...], x: Any) -> bool:
        tails = (path[start:] for start in range(len(path) + 1))
        owner = next((tail for tail in tails if tail in shapes), None)
        return owner is not None and shapes[owner] == tuple(x.shape) and x.dtype == jnp.float32

    return jax.tree_util.tree_map_with_path(is_low, jax.eval_shape(tx.init, params))
