"""Norms and activations that save for their backward what they read, and compute the rest again.

JAX saves what each operation of a norm in float32 or of a SwiGLU needs: five arrays of the width of an MLP where two
would do. To read an array costs a GPU as much as to compute these from it, so nothing is lost where all is saved
(remat "none"); where a whole layer is recomputed anyway, nothing changes.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp


def _lean(function: Callable[..., jax.Array], static: tuple[int, ...] = ()) -> Callable[..., jax.Array]:
    # Without barriers, which would keep XLA from reading what a scan saved where it lies.
    return jax.checkpoint(function, prevent_cse=False, static_argnums=static)  # type: ignore[no-any-return]


@partial(_lean, static=(2,))
def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Divide by the root mean square of the last dim and multiply by `scale`: float32 inside, the dtype of `x` out."""
    wide = x.astype(jnp.float32)
    inverse_rms = jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return (wide * inverse_rms * scale.astype(jnp.float32)).astype(x.dtype)


@partial(_lean, static=(3,))
def layer_norm(x: jax.Array, scale: jax.Array, bias: jax.Array, eps: float) -> jax.Array:
    """Subtract the mean of the last dim, divide by its deviation, multiply by `scale` and add `bias`: float32 inside,
    the widest of the three dtypes out, as Flax's LayerNorm computes it with `use_fast_variance=False`."""
    wide = x.astype(jnp.float32)
    centred = wide - jnp.mean(wide, axis=-1, keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=-1, keepdims=True)
    normed = centred * (jax.lax.rsqrt(variance + eps) * scale) + bias
    return normed.astype(jnp.result_type(x, scale, bias))


@_lean
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Compute `silu(gate) * up`."""
    return jax.nn.silu(gate) * up


gelu = _lean(partial(jax.nn.gelu, approximate=False))
gelu_tanh = _lean(partial(jax.nn.gelu, approximate=True))
