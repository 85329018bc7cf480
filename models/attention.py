"""Attention shared by the models: choice of the kernel, masks and positions of packed rows."""

from functools import partial
from typing import Any, Literal, NamedTuple

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np

from .cudnn import FORWARD, binding, is_at_least, packed_attention
from .elementwise import soft_cap

AttentionChoice = Literal["auto", "xla", "cudnn"]

# Longer rows are computed in parts, without whole masks or scores; see [Note: long rows by parts].
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
    """Return a mask in which a token sees only its document; padding (0) sees padding, so no softmax row is empty.

    Layout:  [B T] -> [B 1 T T] bool; None stays None.
    """
    return None if segment_ids is None else (segment_ids[:, None, :, None] == segment_ids[:, None, None, :])


class Documents(NamedTuple):
    """Positions of the documents in packed rows, for a kernel that needs no mask; see models/cudnn.py.

    Attributes:
      lengths, starts: [B M] int32, length and start of each document in order; -1 for absent documents.
    """

    lengths: jax.Array
    starts: jax.Array


def find_documents(segment_ids: jax.Array, max_documents: int) -> Documents:
    """Return lengths and starts of the runs of equal segment ids, including padding at the end of rows.

    Layout:  [B T] -> two of [B M]
    """
    in_run = _runs(segment_ids)[:, :, None] == jnp.arange(max_documents, dtype=jnp.int32)
    lengths = jnp.sum(in_run, axis=1, dtype=jnp.int32)
    starts = jnp.cumsum(lengths, axis=1) - lengths
    return Documents(*(jnp.where(lengths > 0, x, -1) for x in (lengths, starts)))


def check_documents(segment_ids: Any, max_documents: int | None) -> None:
    """Check the number of documents per row. For custom batches, on the host, before a step.

    A step cannot raise: if documents are passed by position, the loss of rows with too many documents is NaN.

    Args:
      segment_ids: [B T], a NumPy array; padding counts as a document.
      max_documents: the config's `documents_per_row`; None: any number.

    Raises:
      ValueError: naming the row, its number of documents, and the remedies.
    """
    ids = np.asarray(segment_ids)
    counts = 1 + np.count_nonzero(ids[:, 1:] != ids[:, :-1], axis=1)
    if max_documents is not None and counts.size and counts.max() > max_documents:
        raise ValueError(
            f"row {counts.argmax()} of the batch has {counts.max()} documents (padding counts as one), but the model "
            f"supports documents_per_row={max_documents}; end rows earlier, or raise it in the model's config"
        )


def _runs(segment_ids: jax.Array) -> jax.Array:
    """Return for each token the index of its run of equal segment ids. Layout: [B T] -> [B T] int32."""
    is_start = segment_ids[:, 1:] != segment_ids[:, :-1]
    return jnp.pad(jnp.cumsum(is_start, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))


# [Note: choosing the attention kernel]
# `implementation=None` of jax.nn.dot_product_attention is XLA's (JAX 0.10 to 0.12), which materializes [B H T T]
# scores. So "auto" is decided here, when the model is traced: cuDNN for NVIDIA GPUs from Ampere on if `_cudnn_serves`
# is true, else XLA. A model does not know the devices that it is traced for. They are taken from `jax.default_device`
# if set (a plan sets it to a GPU that this machine may lack), else from the default backend of this process.
# With segment ids, cuDNN receives the positions of documents on GPUs from Hopper on. On other GPUs, and for queries
# that it does not support, both kernels read a [B 1 T T] mask. For cuDNN the mask is an additive bias in the
# activations' dtype, for which its backward also computes a gradient. Without segment ids cuDNN reads no mask.
#
# [Note: long rows by parts]
# A mask, like XLA's scores, grows with the square of the row length. So rows of more than LONGEST_WHOLE tokens are
# computed for QUERIES queries at a time, with the keys up to the last of them (from the first key in their window), and
# a mask that includes causality. The backward recomputes the mask of each part, and with XLA's kernel also its scores,
# for any remat policy. So memory is QUERIES*T instead of T*T. Each part also computes its half-masked block: n parts
# compute (n + 1) / n of the visible scores.


def document_view(
    segment_ids: jax.Array | None, x: jax.Array, choice: AttentionChoice, *, head_size: int, max_documents: int | None
) -> tuple[Documents | jax.Array | None, jax.Array]:
    """Return the `documents` argument of `attend`, and activations.

    Documents are passed by their positions, or by segment ids, from which `attend` makes a mask. None: rows are not
    packed.

    Args:
      x: activations [B T D]; returned unchanged, except that rows with more than `max_documents` become NaN if
        documents are passed by position (a compiled program cannot raise).
      choice: as in `choose_attention`.
      head_size: A.
      max_documents: maximum number of documents per row; None: any number, which requires a mask.
    """
    if segment_ids is None:
        return None, x
    query = jax.ShapeDtypeStruct((*segment_ids.shape, 1, head_size), x.dtype)
    if max_documents is None or _needs_mask(choice, query, max_documents):
        return segment_ids, x
    has_too_many = _runs(segment_ids)[:, -1, None, None] >= max_documents
    documents = find_documents(segment_ids, min(max_documents, segment_ids.shape[1]))
    return documents, jnp.where(has_too_many, jnp.nan, x).astype(x.dtype)


def _needs_mask(choice: AttentionChoice, query: Any, max_documents: int | None) -> str:
    """Return why packed rows need a mask; "" if they do not."""
    if max_documents is None:
        return "documents_per_row is none"
    if choose_attention(choice, query) == "xla":
        return "only cuDNN supports positions of documents"
    if binding is None:
        return "this JAX has no binding for positions of documents in cuDNN"
    return "" if is_at_least("9.0") else "cuDNN supports positions of documents on GPUs from Hopper on"


def describe_attention(
    choice: AttentionChoice, head_size: int, max_documents: int | None, dtype: str, seq_len: int, *, is_packed: bool
) -> str:
    """Describe the kernel that computes attention on the device that a trace is for, with the reason."""
    query = jax.ShapeDtypeStruct((1, seq_len, 1, head_size), jnp.dtype(dtype))
    kernel = choose_attention(choice, query)
    if choice != "auto":
        why = f"attention={choice!r}"
    elif kernel == "cudnn":
        why = "an NVIDIA GPU, and a supported query"
    elif not _has_cudnn_attention():
        why = "no NVIDIA GPU from Ampere on"
    else:
        why = f"cuDNN does not support {dtype}, heads of {head_size}, rows of {seq_len}"
    rows = f"{QUERIES}" if seq_len > LONGEST_WHOLE else "T"
    text = f"{'cuDNN' if kernel == 'cudnn' else f'XLA, with scores [B H {rows} T] in memory'} ({why})"
    if not is_packed:
        return text
    reason = _needs_mask(choice, query, max_documents)
    return f"{text}; documents by a mask [B 1 {rows} T] ({reason})" if reason else f"{text}; documents by position"


def attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    documents: Documents | jax.Array | None,
    *,
    choice: AttentionChoice,
    window: int | None = None,
    is_causal: bool = True,
    has_sinks: bool = False,
    softcap: float | None = None,
) -> jax.Array:
    """Compute attention inside documents, causally by default; see [Note: choosing the attention kernel].

    Layout:  query [B T H A], or [B T H A+1] with sinks, key and value [B T K A] -> [B T H A]

    Args:
      documents: as returned by `document_view`.
      window: number of keys that a query sees, including its own; None: all earlier keys.
      has_sinks: whether the last element of each query is its sink; see `with_sinks`.
      softcap: limit of the scores, as in `soft_cap`; with XLA's kernel, and causal.
    """
    # A window over the whole row has no effect, but XLA would build its mask.
    window = None if window is None or window >= query.shape[1] else window
    if has_sinks or softcap is not None:
        run: Any = _by_parts if query.shape[1] > LONGEST_WHOLE else partial(attend_queries, first=0)
        kernel = "sinks" if has_sinks else "xla"
        return run(query, key, value, documents, kernel=kernel, window=window, softcap=softcap)
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


def with_sinks(query: jax.Array, sinks: jax.Array) -> jax.Array:
    """Add the sink of its head to each query, so that both are split alike. Layout: [B T H A], [H] -> [B T H A+1]."""
    return jnp.concatenate([query, jnp.broadcast_to(sinks[:, None].astype(query.dtype), (*query.shape[:3], 1))], -1)


def _by_parts(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    kernel: Literal["xla", "cudnn", "sinks"],
    window: int | None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute causal attention for QUERIES queries at a time; see [Note: long rows by parts]."""
    parts = []
    for first in range(0, query.shape[1], QUERIES):
        attend_part = jax.checkpoint(
            partial(attend_queries, first=first, kernel=kernel, window=window, softcap=softcap),
            policy=lambda primitive, *_, **__: primitive.name == FORWARD,
        )
        queries = query[:, first : first + QUERIES]
        if parts:  # One part after another, also in the backward: else XLA makes all masks first, and sums last.
            queries, key, value, segment_ids, parts[-1] = jax.lax.optimization_barrier(
                (queries, key, value, segment_ids, parts[-1])
            )
        parts.append(attend_part(queries, key, value, segment_ids))
    return jnp.concatenate(parts, axis=1)


def attend_queries(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    segment_ids: jax.Array | None,
    *,
    first: int,
    kernel: Literal["xla", "cudnn", "sinks"],
    window: int | None,
    softcap: float | None = None,
) -> jax.Array:
    """Compute attention of the queries from position `first` on, over the keys that any of them sees.

    With kernel "sinks", the last element of each query is its sink.
    """
    end = first + query.shape[1]
    start = 0 if window is None else max(0, first - window + 1) // 64 * 64
    rows, columns = jnp.arange(first, end)[:, None], jnp.arange(start, end)[None, :]
    mask = (columns <= rows)[None]
    if window is not None:
        mask &= columns > rows - window
    if segment_ids is not None:
        mask &= segment_ids[:, first:end, None] == segment_ids[:, None, start:end]
    if softcap is not None or kernel == "sinks":
        how = {"has_sinks": kernel == "sinks", "softcap": softcap}
        return _written_out(query, key[:, start:end], value[:, start:end], mask, **how)
    return jax.nn.dot_product_attention(
        query, key[:, start:end], value[:, start:end], mask=mask[:, None], implementation=kernel
    )


def _written_out(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array, *, has_sinks: bool, softcap: float | None
) -> jax.Array:
    """Compute attention with limited scores, or with sinks: one more score per head, of no key (gpt-oss).

    It is written out, since `jax.nn.dot_product_attention` limits no scores, and drops the derivative of its statistics
    (JAX 0.10 to 0.12). Scores are in float32 or wider.

    Layout:  [B T H A], or [B T H A+1] with sinks, two of [B S K A], mask [B T S] or [1 T S] -> [B T H A]
    Memory:  scores [B H T S].
    """
    rows, tokens, heads, _ = query.shape
    query = query.reshape(rows, tokens, key.shape[2], -1, query.shape[-1])
    query, sinks = (query[..., :-1], query[..., -1:]) if has_sinks else (query, query[..., :0])
    dtype = jnp.promote_types(query.dtype, jnp.float32)
    scores = jnp.einsum("btkga,bska->bkgts", query, key, preferred_element_type=dtype) * query.shape[-1] ** -0.5
    scores = jnp.where(mask[:, None, None], scores if softcap is None else soft_cap(scores, softcap), -jnp.inf)
    scores = jnp.concatenate([scores, sinks.transpose(0, 2, 3, 1, 4).astype(dtype)], -1)
    shares = jax.nn.softmax(scores, axis=-1)[..., : key.shape[1]].astype(value.dtype)
    return jnp.einsum("bkgts,bska->btkga", shares, value).reshape(rows, tokens, heads, -1)


def _cudnn_serves(query: Any) -> bool:
    """Return whether cuDNN's flash attention supports a query on all GPUs from Ampere on (Hopper also has A = 256).

    It has no backward for odd lengths (JAX 0.10 to 0.12), and no forward for odd lengths with a mask.
    """
    _, seq_len, _, head_size = query.shape
    is_half = query.dtype in (jnp.bfloat16, jnp.float16)
    return is_half and head_size % 8 == 0 and head_size <= 128 and seq_len % 2 == 0


def _has_cudnn_attention() -> bool:
    """Return whether the device that a trace is for is an NVIDIA GPU from Ampere on."""
    return is_cuda() and is_at_least("8.0")


def is_cuda() -> bool:
    """Return whether the device that a trace is for is an NVIDIA GPU."""
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
            "use bfloat16 weights, or attention='xla'"
        )
    return choice
