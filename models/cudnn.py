"""cuDNN's attention over packed rows, through a private binding of JAX; only this module uses it, with a test.

[Note: attention over packed rows]
A mask of documents is [T T] for every row, and cuDNN's backward also returns the gradient of the mask: memory and work
grow with the square of the row, even if its documents are short. On GPUs from Hopper on, cuDNN accepts the starts and
lengths of documents instead ("sequence packing"). `jax.nn.dot_product_attention` does not expose this; the private
function that it calls does (JAX 0.10 to 0.12).

Two defects of the binding are corrected here. It reads the compute capability of the GPU of this process, but plans are
traced for other GPUs; it is made to read the device that the trace is for. Before JAX 0.12 it computes the offsets of
documents in keys with the number of query heads, which silently gives wrong results with fewer key heads; keys and
values are repeated to avoid it.
"""

from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax._src.cudnn import fused_attention_stablehlo as binding
except ImportError:  # private, may move in another JAX; attention then reads a mask
    binding: Any = None


# The primitive of attention's forward, masked or packed, for remat policies.
FORWARD = "dot_product_attention_fwd_wrapper"


def is_at_least(capability: str) -> bool:
    """Return whether the device that a trace is for is an NVIDIA GPU with at least this compute capability.

    The device is the default device if one is set (a plan sets it), else a device of this process.
    """
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if not hasattr(device, "device_kind"):
        device = jax.local_devices()[0]
    found = getattr(device, "compute_capability", None)
    return found is not None and _numbers(found) >= _numbers(capability)


def _numbers(capability: str) -> tuple[int, ...]:
    return tuple(map(int, str(capability).split(".")))


if binding is not None:
    binding.check_compute_capability = is_at_least


def packed_attention(
    query: jax.Array, key: jax.Array, value: jax.Array, lengths: jax.Array, starts: jax.Array, *, window: int | None
) -> jax.Array:
    """Compute causal attention within each document; see [Note: attention over packed rows].

    Layout:  query [B T H A], key and value [B T K A], lengths and starts [B M] -> [B T H A]
    Dtype:   bfloat16 or float16.
    Memory:  [B M H T] float32 statistics between forward and backward, unless rematerialized.

    Args:
      lengths, starts: int32, length and start of each document of a row in order; -1 for absent documents. Every token
        belongs to a document.
      window: number of keys that a query sees, including its own; None: all earlier keys of its document.
    """
    if jax.__version_info__ < (0, 12) and key.shape[2] != query.shape[2]:
        key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    offsets = jnp.pad(starts, ((0, 0), (0, 1)), constant_values=-1)
    return binding.dot_product_attention(  # pyright: ignore[reportReturnType]
        query,
        key,
        value,
        q_seqlen=lengths,
        kv_seqlen=lengths,
        q_offsets=offsets,
        kv_offsets=offsets,
        scale=query.shape[-1] ** -0.5,
        mask_type=binding.MaskType.PADDING_CAUSAL,
        sliding_window_length=window,
    )
