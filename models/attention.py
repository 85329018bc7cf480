"""What the attention of all models here shares: the choice of the kernel, the mask and the positions of packed rows."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from .cudnn import FORWARD, binding, is_at_least, packed_attention

AttentionChoice = Literal["auto", "xla", "cudnn"]

# Of longer rows no whole mask is made, and no whole scores; see [Note: long rows by parts].
LONGEST_WHOLE = 8192
QUERIES = 2048


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


class Documents(NamedTuple):
    """Where the documents of packed rows are, for a kernel that needs no mask; see models/cudnn.py.

    Attributes:
      lengths, starts: [B M] int32, of each document in order; -1 where a row has fewer.
    """

    lengths: jax.Array
    starts: jax.Array


def find_documents(segment_ids: jax.Array, most: int) -> Documents:
    """Measure the runs of equal segment ids, of which a row has at most `most`; padding at a row's end is one too.

    Layout:  [B T] -> two of [B M]
    """
    in_run = _runs(segment_ids)[:, :, None] == jnp.arange(most, dtype=jnp.int32)
    lengths = jnp.sum(in_run, axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    return Documents(*(jnp.where(lengths > 0, x, -1) for x in (lengths, starts)))


def check_documents(segment_ids: Any, most: int | None) -> None:
    """Refuse rows of more documents than the model takes. For batches of your own, on the host, before a step.

    Inside a step nothing can be refused: where documents are counted, the loss of such rows is NaN.

    Args:
      segment_ids: [B T], a NumPy array; padding counts as a document.
      most: the config's `documents_per_row`; None: any number.

    Raises:
      ValueError: names the row, how many it has, and the remedies.
    """
    ids = np.asarray(segment_ids)
    counts = 1 + np.count_nonzero(ids[:, 1:] != ids[:, :-1], axis=1)
    if most is not None and counts.size and counts.max() > most:
        raise ValueError(
            f"row {counts.argmax()} of the batch has {counts.max()} documents (padding counts as one), and the model "
            f"takes documents_per_row={most}; end rows earlier, or raise it in the model's config"
        )


def _runs(segment_ids: jax.Array) -> jax.Array:
    """Count the runs of equal segment ids before the one of each token. Layout: [B T] -> [B T] int32."""
    is_start = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(is_start, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


# [Note: choosing the attention kernel]
# `implementation=None` of jax.nn.dot_product_attention means XLA's (JAX 0.10 to 0.12), which materialises [B H T T]
# scores. "auto" therefore decides here, when the model is traced: cuDNN where that is for NVIDIA GPUs from Ampere on
# and `_cudnn_serves` holds, else XLA. A model cannot see for which devices it is traced; `jax.default_device` says it
# where it is set (a plan sets it to a GPU that is not there), else the default backend of this process.
# With segment ids cuDNN is told where documents are on GPUs from Hopper on. Elsewhere, and for what it does not take,
# both kernels read a [B 1 T T] mask (cuDNN as an additive bias in the activations' dtype, of which its backward also
# makes a gradient). Without segment ids cuDNN reads no mask.
#
# [Note: long rows by parts]
# A mask, like XLA's scores, grows with the square of the row. Rows of more than LONGEST_WHOLE tokens are therefore
# computed for QUERIES queries at a time: those, the keys up to the last of them (from the first that their window
# reaches), and a mask that says all, causality too. The backward makes each part's mask again, and with
# XLA's kernel its scores too, whatever is recomputed besides. So T*T becomes QUERIES*T, and a part computes whole what
# is half masked: (n + 1) / n of the scores that are seen, in n parts.


def document_view(
    segment_ids: jax.Array | None, x: jax.Array, choice: AttentionChoice, *, head_size: int, most: int | None
) -> tuple[Documents | jax.Array | None, jax.Array]:
    """Say how attention is kept inside documents: by where they are, or by a mask that `attend` makes of segment ids.

    None: rows are not packed.

    Args:
      x: activations [B T D]; returned as they are, but NaN in rows of more than `most` documents where these are
        counted: nothing else could say it inside a program.
      choice: that of `choose_attention`.
      head_size: A.
      most: documents of a row; None: any number, which takes a mask.
    """
    if segment_ids is None:
        return None, x
    query = jax.ShapeDtypeStruct((*segment_ids.shape, 1, head_size), x.dtype)
    if most is None or _needs_mask(choice, query, most):
        return segment_ids, x
    has_too_many = _runs(segment_ids)[:, -1, None, None] >= most
    documents = find_documents(segment_ids, min(most, segment_ids.shape[1]))
    return documents, jnp.where(has_too_many, jnp.nan, x).astype(x.dtype)


def _needs_mask(choice: AttentionChoice, query: Any, most: int | None) -> str:
    """Say why packed rows take a mask; "": they do not."""
    if most is None:
        return "documents_per_row is none"
    if choose_attention(choice, query) == "xla":
        return "only cuDNN can be told where documents are"
    if binding is None:
        return "this JAX has no binding by which cuDNN is told where documents are"
    return "" if is_at_least("9.0") else "cuDNN is told where documents are on GPUs from Hopper on"


def describe_attention(
    choice: AttentionChoice, head_size: int, most: int | None, dtype: str, seq_len: int, *, is_packed: bool
) -> str:
    """Say in words which kernel computes attention on the device that a trace is for, and why."""
    query = jax.ShapeDtypeStruct((1, seq_len, 1, head_size), jnp.dtype(dtype))
    kernel = choose_attention(choice, query)
    if choice != "auto":
        why = f"attention={choice!r}"
    elif kernel == "cudnn":
        why = "an NVIDIA GPU, and a query that it takes"
    elif not _has_cudnn_attention():
        why = "no NVIDIA GPU from Ampere on"
    else:
        why = f"cuDNN does not take {dtype}, heads of {head_size}, rows of {seq_len}"
    rows = f"{QUERIES}" if seq_len > LONGEST_WHOLE else "T"
    text = f"{'cuDNN' if kernel == 'cudnn' else f'XLA, with scores [B H {rows} T] in memory'} ({why})"
    if not is_packed:
        return text
    reason = _needs_mask(choice, query, most)
    return f"{text}; documents by a mask [B 1 {rows} T] ({reason})" if reason else f"{text}; documents by their places"


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | jax.Array | None,
    *,
    choice: AttentionChoice,
    window: int | None = None,
    is_causal: bool = True,
) -> jax.Array:
    """Attend inside documents, and causally unless told otherwise; see [Note: choosing the attention kernel].

    Layout:  query [B T H A], key and value [B T K A] -> [B T H A]

    Args:
      documents: as `document_view` returns it.
      window: how many keys a query sees, itself included; None: all before it.
    """
    # A window that spans the sequence is no window, and XLA would still build its mask.
    window = None if window is None or window >= query.shape[1] else window
    if isinstance(documents, Documents):
        return packed_attention(query, key, value, *documents, window=window)
    kernel = choose_attention(choice, query)
    if is_causal and query.shape[1] > LONGEST_WHOLE and (kernel == "xla" or documents is not None):
        return _by_parts(query, key, value, documents, kernel, window)
    return jax.nn.dot_product_attention(
        query,
        key,
        value,
        mask=document_mask(documents),
        is_causal=is_causal,
        local_window_size=None if window is None else (window - 1, 0),
        implementation=kernel,
    )


def _by_parts(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    kernel: Literal["xla", "cudnn"],
    window: int | None,
) -> jax.Array:
    """Attend causally, some queries after the other; see [Note: long rows by parts]."""
    parts = []
    for first in range(0, query.shape[1], QUERIES):
        attend_part = jax.checkpoint(
            partial(attend_queries, first=first, kernel=kernel, window=window),
            policy=lambda primitive, *_, **__: primitive.name == FORWARD,
        )
        own = query[:, first : first + QUERIES]
        if parts:  # In turn, in the backward too: else XLA makes all masks first, and adds gradients last.
            own, key, value, segment_ids, parts[-1] = jax.lax.optimization_barrier(
                (own, key, value, segment_ids, parts[-1])
            )
        parts.append(attend_part(own, key, value, segment_ids))
    return jnp.concatenate(parts, axis=1)


def attend_queries(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    first: int,
    kernel: Literal["xla", "cudnn"],
    window: int | None,
) -> jax.Array:
    """Attend from some queries, which begin at `first` of the row, to the keys that any of them sees."""
    end = first + query.shape[1]
    start = 0 if window is None else max(0, first - window + 1) // 64 * 64
    rows, columns = jnp.arange(first, end)[:, None], jnp.arange(start, end)[None, :]
    mask = (columns <= rows)[None]
    if window is not None:
        mask &= columns > rows - window
    if segment_ids is not None:
        mask &= segment_ids[:, first:end, None] == segment_ids[:, None, start:end]
    return jax.nn.dot_product_attention(
        query, key[:, start:end], value[:, start:end], mask=mask[:, None], implementation=kernel
    )


def _cudnn_serves(query: Any) -> bool:
    """Say whether cuDNN's flash attention takes this query on every GPU from Ampere on (Hopper would allow A = 256).

    It has no backward for an odd length (JAX 0.10 to 0.12), nor a forward for one with a mask.
    """
    _, seq_len, _, head_size = query.shape
    is_half = query.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and head_size % 8 == 0 and head_size <= 128 and seq_len % 2 == 0


def _has_cudnn_attention() -> bool:
    """Say whether the device that a trace is for is an NVIDIA GPU from Ampere on."""
    return is_cuda() and is_at_least("8.0")


def is_cuda() -> bool:
    """Tell whether what is traced runs on an NVIDIA GPU."""
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
        return "cudnn" if _has_cudnn_attention() and _cudnn_serves(query) else "xla"
    if choice == "cudnn" and query.dtype not in (jnp.bfloat16, jnp.float16):
        raise ValueError(
            f"attention='cudnn' needs bfloat16 or float16 activations, got {query.dtype}; "
            "give the model bfloat16 weights, or choose attention='xla'"
        )
    return choice
