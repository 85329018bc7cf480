"""What the attention of all models here shares: the choice of the kernel, the mask and the positions of packed rows."""

from typing import Any, Literal

import jax
import jax.extend
import jax.numpy as jnp

AttentionChoice = Literal["auto", "xla", "cudnn"]


def document_positions(segment_ids: jax.Array) -> jax.Array:
    """Count positions from the start of each run of equal segment ids.

    Layout:  [B T] -> [B T] int32
    """
    index = jnp.arange(segment_ids.shape[1], dtype=jnp.int32)[None, :]
    starts = segment_ids[:, 1:] != segment_ids[:, :-1]
    starts = jnp.pad(starts, ((0, 0), (1, 0)), constant_values=True)
    return index - jax.lax.cummax(jnp.where(starts, index, 0), axis=1)


def document_mask(segment_ids: jax.Array | None) -> jax.Array | None:
    """Let a token see its own document only; padding (0) sees padding, so that no row of the softmax is empty.

    Layout:  [B T] -> [B 1 T T] bool; None stays None.
    """
    return None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])


# [Note: choosing the attention kernel]
# `implementation=None` of jax.nn.dot_product_attention means XLA's (JAX 0.10 to 0.12), which materialises [B H T T]
# scores. "auto" therefore decides here, when the model is traced: cuDNN where that is for NVIDIA GPUs and
# `_cudnn_serves` holds, else XLA. A model cannot see for which devices it is traced; `jax.default_device` says it where
# it is set (a plan sets it to a GPU that is not there), else the default backend of this process. With segment ids both
# kernels read a [B 1 T T] mask (cuDNN as an additive bias in the activations' dtype); without them no mask exists in
# memory.


def _cudnn_serves(query: Any) -> bool:
    """Say whether cuDNN's flash attention takes this query on every GPU from Ampere on (Hopper would allow A = 256).

    It has no backward for an odd length (JAX 0.10 to 0.12), nor a forward for one with a mask.
    """
    _, seq_len, _, head_size = query.shape
    is_half = query.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and head_size % 8 == 0 and head_size <= 128 and seq_len % 2 == 0


def _is_cuda() -> bool:
    device = jax.config.jax_default_device  # type: ignore[attr-defined]
    if hasattr(device, "device_kind"):
        return device.device_kind.startswith("NVIDIA")
    if jax.default_backend() != "gpu":
        return False
    return "cuda" in jax.extend.backend.get_backend().platform_version.lower()


def choose_attention(choice: AttentionChoice, query: Any) -> Literal["xla", "cudnn"]:
    """Choose the implementation of `jax.nn.dot_product_attention`; see [Note: choosing the attention kernel].

    Args:
      query: `[B T H A]`, an array or its shape.

    Raises:
      ValueError: for "cudnn" without half precision.
    """
    if choice == "auto":
        return "cudnn" if _is_cuda() and _cudnn_serves(query) else "xla"
    if choice == "cudnn" and query.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention='cudnn' needs bfloat16 or float16 activations, got {query.dtype}; "
            "give the model bfloat16 weights, or choose attention='xla'"
        )
    return choice
