"""cuDNN's attention over packed rows, through JAX's own binding: private, so here alone, with a test.

[Note: attention over packed rows]
A mask of documents is [T T] for every row, and cuDNN's backward then also returns the gradient of that mask: memory
and work grow with the square of the row, however short its documents are. cuDNN can instead be told where documents
begin and how long they are ("sequence packing"), on GPUs from Hopper on. `jax.nn.dot_product_attention` does not offer
it; the function below it does (JAX 0.10 to 0.12).

Two things of the binding are set right here. It asks the GPU of this process for its compute capability, where a plan
is for GPUs that are not there: so the device is asked that the trace is for. And before JAX 0.12 it counts the places
of documents in keys by the number of query heads, which with fewer key heads is wrong without a word: keys and values
are repeated for that.
"""

from typing import Any

import jax
import jax.numpy as jnp

try:
    from jax._src.cudnn import fused_attention_stablehlo as binding
except ImportError:  # private: another JAX may have moved it, and attention then reads a mask
    binding: Any = None


# The primitive whose results are those of attention's forward, masked or packed, for a policy of recomputation.
FORWARD = "dot_product_attention_fwd_wrapper"


def is_at_least(capability: str) -> bool:
    """Tell whether the device that a trace is for is an NVIDIA GPU of at least this compute capability.

    That is the one set as the default, as a plan does, else one of this process.
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
    """Attend causally within each document; see [Note: attention over packed rows].

    Layout:  query [B T H A], key and value [B T K A], lengths and starts [B M] -> [B T H A]
    Dtype:   bfloat16 or float16.
    Memory:  [B M H T] float32 of statistics between forward and backward, but under remat.

    Args:
      lengths, starts: int32, of each document of a row in order; -1 where a row has fewer. Every token is in one.
      window: how many keys a query sees, itself included; None: all of its document before it.
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
