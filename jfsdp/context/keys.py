"""Causal attention over rows that mesh axis `context` splits, with the keys of all devices gathered.

[Note: gathered keys]
Queries stay on their device, and keys and values of the whole row are gathered (as in Llama 3, arXiv 2407.21783). A
later token sees more keys, so a row is split into 2C chunks of n tokens, and device i of C has the chunks i and
2C-1-i ("zigzag"): then the work of all devices is equal. Attention of a chunk has two parts. Inside the chunk it is
causal, and needs no other device, so it hides the gather. Before the chunk, every query sees all keys: a rectangle.
In packed rows, only the document of a chunk's first token reaches back before the chunk. Its queries are the chunk's
first tokens, and the keys that they see before the chunk are again a rectangle. The other documents of the chunk start
in it, and attention inside the chunk is all of theirs.
The softmax over both parts is merged from their statistics, and the backward of each part is given the merged output
and statistics. This is exact, while differentiating the merge would need the derivative of a kernel's statistics,
which cuDNN lacks.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from jfsdp.arguments import Count, checked
from jfsdp.context import cudnn, kernels
from jfsdp.context.kernels import HIDDEN, Reach
from jfsdp.context.rows import check_chunks, own_axes, positions, whole_rows, zigzag_rows
from jfsdp.layout.policy import FUSED

KERNELS: dict[str, ModuleType] = {"xla": kernels, "cudnn": cudnn}


class _How(NamedTuple):
    """Static arguments of a call; see `attend_keys`."""

    window: int | None
    implementation: str
    max_documents: int


class _Spans(NamedTuple):
    """Keys before a chunk that its queries see, for a device's two chunks; see [Note: gathered keys].

    Attributes:
      num_seen: [B 2] int32, number of keys before the chunk that some of its queries see; they end at the chunk.
      num_seeing: [B 2] int32, number of queries that see them; 0 if `num_seen` is.
      num_first: [B 2] int32, length of the chunk's first document inside it; None: rows are not packed.
      begin: [B 2] int32, position in the row of the first seen key; None: 0, rows are not packed.
      documents: [B 2 n] int32, position in the row where each token's document begins; None: rows are not packed.
    """

    num_seen: jax.Array
    num_seeing: jax.Array
    num_first: jax.Array | None = None
    begin: jax.Array | None = None
    documents: jax.Array | None = None


@checked
def attend_keys(
    query: Any,
    key: Any,
    value: Any,
    segment_ids: Any = None,
    *,
    causal: bool = True,
    window: Count | None = None,
    implementation: str = "xla",
    max_documents: Count | None = None,
) -> jax.Array:
    """Compute attention of this device's tokens over their whole rows, inside a manual `shard_map`.

    Layout:  query [B t H A], key and value [B t K A] -> [B t H A], with t = T/C tokens in zigzag order.
    Cost:    an all-gather of T*2K*A values forward and one backward, and a reduce-scatter of as many backward;
             (C-1)/C of them are sent. With segment ids also an all-gather of 4 bytes per token of the row.
    Memory:  keys and values of whole rows twice (as gathered, in order), and their gradients.

    A remat policy that saves the name "attention" saves output and statistics, and a recomputed forward then gathers
    nothing.

    Args:
      segment_ids: [B t] int32. A token sees only its document: its run of equal ids in the row. Padding is one, too.
      window: number of keys that a query sees, including its own; None: all earlier keys.
      implementation: "xla", with scores in memory; "cudnn", in half precision.
      max_documents: maximum number of documents per chunk of t/2 tokens; "cudnn" requires it with segment ids, and the
        output is NaN for chunks with more.

    Raises:
      ValueError: for chunks, heads and options that the kernel does not support.
    """
    size, num_tokens = jax.lax.axis_size(own_axes()), query.shape[1]
    window = None if window is None or window >= num_tokens * size else window
    check_chunks(num_tokens, size)
    problem = ""
    if not causal:
        problem = "causal=False is not available; use context_by='heads'"
    elif query.shape[2] % key.shape[2]:
        problem = f"the number of query heads, {query.shape[2]}, must be a multiple of the {key.shape[2]} key heads"
    elif implementation not in KERNELS:
        problem = f"implementation={implementation!r} must be one of {', '.join(map(repr, KERNELS))}"
    elif implementation == "cudnn":
        problem = cudnn.find_problem(query, window, None if segment_ids is None else max_documents or 0)
    if problem:
        raise ValueError(f"attention with context_by='keys': {problem}")
    with zigzag_rows(True):
        spans = _find_spans(query, segment_ids)
    return _attend(_How(window, implementation, max_documents or 0), query, key, value, spans)


def _find_spans(query: jax.Array, segment_ids: jax.Array | None) -> _Spans:
    """Return what the queries of this device's chunks see before them; gathers the segment ids."""
    places, length = positions(query)[0], query.shape[1] // 2
    if segment_ids is None:
        num_seen = jnp.broadcast_to(places[::length], (query.shape[0], 2))
        return _Spans(num_seen, jnp.where(num_seen > 0, jnp.int32(length), 0))
    documents = (places - positions(query, segment_ids)).reshape(-1, 2, length)
    num_first = jnp.sum(documents == documents[..., :1], axis=-1, dtype=jnp.int32)
    num_seen = places[::length] - documents[..., 0]
    return _Spans(num_seen, jnp.where(num_seen > 0, num_first, 0), num_first, documents[..., 0], documents)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(how: _How, query: jax.Array, key: jax.Array, value: jax.Array, spans: _Spans) -> jax.Array:
    return _forward(how, query, key, value, spans)[0]


def _forward(how: _How, query: jax.Array, key: jax.Array, value: jax.Array, spans: _Spans) -> tuple[Any, Any]:
    """Return the output, and the statistics that the backward needs."""
    run = KERNELS[how.implementation].forward
    gathered = _gather(key, value)
    chunks = [_chunks(x) for x in (query, key, value)]
    length = chunks[0].shape[2]
    inside, packed = _inside(how, spans)
    output, sums = _run_folded(run, *chunks, inside)
    output, sums = _keep(output, spans.num_first), _keep_sums(sums, spans.num_first, HIDDEN)
    halves = []
    for half in (0, 1):
        before = run(chunks[0][:, half], *_seen_keys(gathered, length, half, spans), _before(how, half, spans))
        count = spans.num_seeing[:, half]
        before = _keep(before[0], count), _keep_sums(before[1], count, HIDDEN)
        halves.append(_merge((output[:, half], sums[:, half]), before))
    output, sums = (jnp.stack(x, axis=1) for x in zip(*halves, strict=True))
    packed_sums = None
    if packed is not None:
        others, packed_sums = _run_folded(run, *chunks, packed)
        output = _keep(output, spans.num_first, others)
    return output.reshape(query.shape).astype(query.dtype), (sums, packed_sums)


def _forward_rule(how: _How, query: jax.Array, key: jax.Array, value: jax.Array, spans: _Spans) -> tuple[Any, Any]:
    output, sums = checkpoint_name(_forward(how, query, key, value, spans), FUSED)
    return output, (query, key, value, spans, output, *sums)


def _backward_rule(how: _How, saved: Any, grad: jax.Array) -> tuple[Any, ...]:
    query, key, value, spans, output, sums, packed_sums = saved
    run = KERNELS[how.implementation].backward
    # Otherwise XLA may keep the keys that the forward gathered, for every layer without remat.
    key, value = jax.lax.optimization_barrier((key, value))
    gathered, scatter = jax.vjp(_gather, key, value)
    chunks = [_chunks(x) for x in (query, key, value)]
    output, grad = _chunks(output), _chunks(grad)
    inside, packed = _inside(how, spans)

    def merged(count: jax.Array | None, half: Any = slice(None)) -> tuple[jax.Array, ...]:
        # Statistics of +1e30 make the weights of the other queries 0, even in a kernel that computes them.
        return output[:, half], _keep_sums(sums[:, half], count, -HIDDEN), _keep(grad[:, half], count)

    own = _run_folded(run, *chunks, *merged(spans.num_first), inside)
    own = [_keep(x, spans.num_first) for x in own]
    if packed is not None:
        others = _keep(jnp.zeros_like(grad), spans.num_first, grad)
        others = _run_folded(run, *chunks, output, packed_sums, others, packed)
        own = [x + y for x, y in zip(own, others, strict=True)]
    queries, pairs = [], []
    for half in (0, 1):
        count = spans.num_seeing[:, half]
        pair = _seen_keys(gathered, chunks[0].shape[2], half, spans)
        grads = run(chunks[0][:, half], *pair, *merged(count, half), _before(how, half, spans))
        queries.append(_keep(grads[0], count))
        seen = _keep(jnp.stack(grads[1:]), spans.num_seen[:, half])
        pairs.append(_in_place(seen, gathered.shape[2], half, spans))
    before = jnp.stack(queries, axis=1), *scatter(pairs[0] + pairs[1])
    return *(x.reshape(z.shape) + y.reshape(z.shape) for x, y, z in zip(own, before, saved[:3], strict=True)), None


_attend.defvjp(_forward_rule, _backward_rule)


def _inside(how: _How, spans: _Spans) -> tuple[Reach, Reach | None]:
    """Return what queries see inside their chunk: in the chunk's first document, and in the others if packed."""
    if spans.num_first is None or spans.documents is None:
        return Reach(window=how.window), None
    documents = spans.documents.reshape(-1, spans.documents.shape[-1])
    packed = Reach(documents=documents, max_documents=how.max_documents, window=how.window)
    return Reach(queries=spans.num_first.reshape(-1), window=how.window), packed


def _before(how: _How, half: int, spans: _Spans) -> Reach:
    """Return what queries of a chunk see before it. Kernels need not support lengths of 0."""
    queries = None if spans.num_first is None else spans.num_first[:, half]
    return Reach(queries=queries, keys=jnp.maximum(spans.num_seen[:, half], 1), window=how.window)


def _merge(one: tuple[jax.Array, jax.Array], other: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
    """Merge output and statistics of two parts of a softmax. Layout: [B n H A], [B H n]; wide."""
    total = jnp.logaddexp(one[1], other[1])
    output = sum(x.astype(total.dtype) * jnp.exp(y - total).swapaxes(1, 2)[..., None] for x, y in (one, other))
    return output, total  # pyright: ignore[reportReturnType]


def _keep(x: jax.Array, count: jax.Array | None, other: Any = 0.0) -> jax.Array:
    """Replace what a kernel leaves undefined: the tokens from `count` on. Layout: [... n H A], count [...]."""
    if count is None:
        return x
    return jnp.where(jnp.arange(x.shape[-3])[:, None, None] < count[..., None, None, None], x, other)


def _keep_sums(x: jax.Array, count: jax.Array | None, other: float) -> jax.Array:
    """Replace the statistics of tokens from `count` on. Layout: [... H n], count [...]."""
    return x if count is None else jnp.where(jnp.arange(x.shape[-1]) < count[..., None, None], x, other)


def _chunks(x: jax.Array) -> jax.Array:
    """Layout: [B t ...] -> [B 2 n ...]."""
    return x.reshape(x.shape[0], 2, -1, *x.shape[2:])


def _run_folded(run: Any, *arguments: Any) -> tuple[jax.Array, ...]:
    """Call a kernel on both chunks of each row at once. Layout: [B 2 n ...] as [2B n ...]."""
    *arrays, reach = arguments
    results = run(*(x.reshape(-1, *x.shape[2:]) for x in arrays), reach)
    return tuple(x.reshape(-1, 2, *x.shape[1:]) for x in results)


def _gather(key: jax.Array, value: jax.Array) -> jax.Array:
    """Gather the keys and values of rows by one collective. Layout: two of [B t K A] -> [2 B T K A].

    The transpose sums gradients of all devices by one reduce-scatter.
    """
    with zigzag_rows(True):
        return whole_rows(jnp.concatenate([key, value])).reshape(2, key.shape[0], -1, *key.shape[2:])


def _seen_keys(gathered: jax.Array, length: int, half: int, spans: _Spans) -> jax.Array:
    """Return the keys and values that a chunk may see before it, the first seen one first. Layout: [2 B m K A]."""
    num_chunks = gathered.shape[2] // length
    return _roll(gathered, spans, half, -1)[:, :, : length * (num_chunks - 1 if half else max(num_chunks // 2 - 1, 1))]


def _in_place(grads: jax.Array, seq_len: int, half: int, spans: _Spans) -> jax.Array:
    """Undo `_seen_keys`. Layout: [2 B m K A] -> [2 B T K A]."""
    padding = [(0, 0), (0, 0), (0, seq_len - grads.shape[2]), (0, 0), (0, 0)]
    return _roll(jnp.pad(grads, padding), spans, half, 1)


def _roll(pair: jax.Array, spans: _Spans, half: int, sign: int) -> jax.Array:
    """Shift tokens of each row by the position of the first seen one. Layout: [2 B T K A]."""
    if spans.begin is None:
        return pair
    roll = functools.partial(jnp.roll, axis=1)
    return jax.vmap(roll, in_axes=(1, 0), out_axes=1)(pair, sign * spans.begin[:, half])
