"""Norms and activations that save only their inputs for the backward, and recompute the rest.

JAX saves the inputs of every operation of a float32 norm or a SwiGLU: five arrays of the MLP's width instead of two.
Recomputing the others from a saved array costs a GPU no more than reading them, so remat "none" is not slower. If a
whole layer is recomputed, nothing changes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


def _lean(function: Callable[..., jax.Array], static: tuple[int, ...] = ()) -> Callable[..., jax.Array]:
    # Without barriers, which would prevent XLA from reading the values that a scan saved in place.
    return jax.checkpoint(function, prevent_cse=False, static_argnums=static)  # type: ignore[no-any-return]


@partial(_lean, static=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square of the last dim and multiply by `scale`, in float32; return the dtype of `x`."""
    wide = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)


@partial(_lean, static=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Normalize the last dim, multiply by `scale` and add `bias`, as Flax's LayerNorm with `use_fast_variance=False`.

    Dtype:   float32 inside; returns the widest of the three dtypes.
    """
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * (jax.lax.rsqrt(variance + eps) * scale) + bias
    return normed.astype(jnp.result_type(x, scale, bias))


@_lean
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute `silu(gate) * up`."""
    return jax.nn.silu(gate) * up


@_lean
def geglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute `gelu(gate) * up`, with the tanh approximation."""
    return jax.nn.gelu(gate, approximate=True) * up


def soft_cap(x: jax.Array, cap: float | None) -> jax.Array:
    """Return `cap * tanh(x / cap)` in float32; None: `x`."""
    return x if cap is None else cap * jnp.tanh(x.astype(jnp.float32) / cap)


gelu = _lean(partial(jax.nn.gelu, approximate=False))
gelu_tanh = _lean(partial(jax.nn.gelu, approximate=True))
