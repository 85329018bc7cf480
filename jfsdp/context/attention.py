"""Attention over rows that axis `context` splits: `over_context` for any attention function, and `attention`.

[Note: heads for tokens]
Before attention, an all-to-all gives each device all tokens of a part of the heads, and another one after it gives each
device all heads of its tokens again (DeepSpeed-Ulysses, arXiv 2309.14509). So any attention function computes what it
would on one device: windows, documents and causality need no change. A step sends 4 arrays per call forward and 4
backward, and 4 more if the forward is recomputed: query and output [T/C H A], key and value [T/C K A]. If C does not
divide the K heads of keys and values, each is copied C / gcd(K, C) times.
Program `xla` runs the same collectives in a `shard_map` around attention, so XLA cannot replace them by others: with
sharding constraints instead, it may gather activations to compute projections by heads.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jfsdp.arguments import Count, checked
from jfsdp.context.heads import check_heads
from jfsdp.context.keys import attend_keys
from jfsdp.context.rows import BY_KEYS, SCOPE, in_row_order, is_zigzag, to_zigzag, whole_rows
from jfsdp.layout.mesh import CONTEXT, ROW_AXES, axes_of

_TENSOR = "tensor"


@checked
def over_context(attend: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """Make an attention function see whole rows, where axis `context` splits them; see [Note: heads for tokens].

    Flax's attention modules accept the result as `attention_fn=`. Where rows are not split it is `attend`.

    Layout:  query [B T/context H A], key and value [B T/context K A] -> [B T/context H A]; `attend` receives
             [B T H/context A] and [B T K'/context A]. Axis `tensor` splits heads further, in `attend` too.
    Cost:    four all-to-alls forward, four backward.

    Args:
      attend: `f(query, key, value, *rows, **options)`. Heads must be independent and computed alike, and the device's
        place in the mesh must not matter; a trace with another number of heads is checked for it. Arrays in `rows` have
        one entry per row, `[B ...]`, of *whole* rows (see `whole_rows`). Options are passed unchanged, except a mask, a
        bias and dropout, which would be those of local tokens: with one of them the call raises a ValueError.

    Raises (when called):
      ValueError: for heads that axes `context` and `tensor` do not divide, with the sizes that fit; for keys of other
        rows than the queries'; for an operation of `attend` that numbers, combines or selects heads.
    """
    return _over_context(attend, checks_heads=True)


def _over_context(attend: Callable[..., jax.Array], *, checks_heads: bool) -> Callable[..., jax.Array]:
    checked_shapes = set[Any]()

    @functools.wraps(attend)
    def run(query: jax.Array, key: jax.Array, value: jax.Array, *rows: Any, **options: Any) -> jax.Array:
        split = _find_split(query)
        if split is None:
            return attend(query, key, value, *rows, **options)
        _check_heads(query, split)
        _check_options(options, split)
        whole = functools.partial(attend, **options)
        shapes = tuple((x.shape, x.dtype) for x in jax.tree.leaves((query, key, value, rows)))
        if checks_heads and shapes not in checked_shapes:
            check_heads(whole, (query, key, value), rows)
            checked_shapes.add(shapes)
        local = functools.partial(_by_heads, whole, split.axes)
        return split.run(local, (query, key, value), rows, PartitionSpec(split.rows))

    return run


class _Split(NamedTuple):
    """How the mesh of a trace splits rows; see [Note: where rows are split] in rows.py.

    Attributes:
      axes: the parts of axis `context`.
      size: the number of devices of a row.
      tensor: the number of parts of the heads by axis `tensor`.
      auto: the mesh axes that a `shard_map` must make manual first; the rest are these, by the dim that they split.
    """

    axes: tuple[str, ...]
    size: int
    tensor: int
    auto: tuple[str, ...]
    rows: tuple[str, ...]
    tokens: tuple[str, ...]
    heads: tuple[str, ...]

    def run(self, local: Callable[..., jax.Array], heads: Any, arrays: Any, spec: PartitionSpec) -> jax.Array:
        """Compute `local(*heads, *arrays)`, where axis `context` is manual."""
        for name, x in zip(("key", "value"), heads[1:], strict=True):
            if x.shape[:2] != heads[0].shape[:2]:
                raise ValueError(
                    f"attention: {name} has shape {x.shape} and query {heads[0].shape}, but mesh axis {CONTEXT!r} "
                    f"(size {self.size}) splits the tokens of one row; for attention to other rows, call your "
                    "attention function on keys and values from jfsdp.whole_rows"
                )
            if x.shape[2] % self.tensor:
                raise ValueError(
                    f"attention: {name} has {x.shape[2]} heads, which mesh axis {_TENSOR!r} (size {self.tensor}) does "
                    "not divide; repeat them to the heads of query, or use a size that divides them"
                )
        if not self.auto:
            return local(*heads, *arrays)
        split = PartitionSpec(self.rows, self.tokens, self.heads)
        specs = split, split, split, *[spec] * len(arrays)
        mapped = jax.shard_map(local, in_specs=specs, out_specs=split, axis_names=set(self.auto), check_vma=False)
        with jax.named_scope(SCOPE):  # the step knows that this `shard_map` is not the model's
            return mapped(*heads, *arrays)


def _find_split(query: Any) -> _Split | None:
    """Return how rows are split; None if they are not, or are not the rows of a step, whose sizes the axes divide."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = axes_of(mesh, (CONTEXT,))
    size = math.prod(mesh.shape[axis] for axis in axes)
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    auto = tuple(name for name, kind in kinds if kind == AxisType.Auto)
    names = axes_of(mesh, ROW_AXES), axes, (_TENSOR,)
    parts = [tuple(axis for axis in axes if axis in auto) for axes in names]
    sizes = [math.prod(mesh.shape[axis] for axis in axes) for axes in parts]
    if size == 1 or any(dim % num for dim, num in zip(query.shape, sizes[:2])):
        return None
    return _Split(axes, size, sizes[2], auto, *parts)


def _by_heads(
    attend: Callable[..., jax.Array], axes: tuple[str, ...], query: Any, key: Any, value: Any, *rows: Any
) -> jax.Array:
    """Compute attention of this device's heads over whole rows, inside a `shard_map`."""
    size = jax.lax.axis_size(axes)
    copies = size // math.gcd(size, key.shape[2])
    key, value = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (key, value))
    with jax.named_scope(SCOPE):
        heads = [jax.lax.all_to_all(x, axes, 2, 1, tiled=True) for x in (query, key, value)]
    attended = attend(*(in_row_order(x, size) for x in heads), *rows)
    with jax.named_scope(SCOPE):
        return jax.lax.all_to_all(in_row_order(attended, size, back=True), axes, 1, 2, tiled=True)


def _by_keys(axes: tuple[str, ...], options: dict[str, Any], *arrays: jax.Array) -> jax.Array:
    """Compute attention of this device's tokens over gathered keys, inside a `shard_map`."""
    if is_zigzag():
        return attend_keys(*arrays, **options)
    return to_zigzag(attend_keys(*(to_zigzag(x, axes) for x in arrays), **options), axes, back=True)


def _check_heads(query: Any, split: _Split) -> None:
    num = query.shape[2]
    if num % (split.size * split.tensor):
        fits = [n for n in range(1, num + 1) if num % (n * split.tensor) == 0]
        which = f" (axis {_TENSOR!r} splits them by {split.tensor})" if split.tensor > 1 else ""
        raise ValueError(
            f"attention has {num} heads of queries{which}, which mesh axis {CONTEXT!r} (size {split.size}) does not "
            f"divide; use a size of {', '.join(map(str, fits))}, or jfsdp.attention(..., context_by='keys') "
            "(--model-config context_by=keys)"
        )


def _check_options(options: dict[str, Any], split: _Split) -> None:
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"attention: {name} is of the tokens of one device, but mesh axis {CONTEXT!r} (size {split.size}) "
                "splits rows; pass causal=, window= and segment_ids= of jfsdp.attention, or make it inside the "
                "function given to jfsdp.over_context"
            )
    if options.get("dropout_rate") and not options.get("deterministic"):
        raise ValueError(
            f"attention: dropout_rate={options['dropout_rate']} of attention weights is not available with mesh axis "
            f"{CONTEXT!r} (size {split.size}); set it to 0, and drop activations outside of attention"
        )


@checked
def attention(
    query: Any,
    key: Any,
    value: Any,
    *,
    causal: bool = True,
    window: Count | None = None,
    segment_ids: Any = None,
    implementation: str | None = None,
    context_by: str = "heads",
    max_documents: Count | None = None,
) -> jax.Array:
    """Compute attention inside documents, also if axis `context` splits the rows.

    Layout:  query [B T/context H A], key and value [B T/context K A] -> [B T/context H A]; H is a multiple of K
    Memory:  by heads with segment ids a mask [B 1 T T], and with implementation "xla" scores [B H/context T T] in
             float32. By keys as in `jfsdp.context.keys.attend_keys`.
    Cost:    by heads as `over_context`; by keys an all-gather of the keys and values of whole rows, forward and
             backward, and a reduce-scatter of their gradients. With segment ids an all-gather of 4 bytes per token.

    Args:
      causal: whether a token sees only itself and earlier tokens.
      window: number of keys that a query sees, including its own; None: all earlier keys. Requires `causal`.
      segment_ids: [B T/context], the document of each token; a token sees only tokens with its id (by keys: only its
        run of equal ids, also where rows are not split).
      implementation: "xla", "cudnn", or None for the default of `jax.nn.dot_product_attention`, "xla".
      context_by: how axis `context` splits attention: "heads", by all-to-alls; or "keys", where every device gathers
        the keys of whole rows, for any number of heads. Program `manual` then has rows in zigzag order
        ([Note: zigzag order] in `jfsdp.context.rows`); program `xla` permutes queries, keys and values.
      max_documents: maximum number of documents in one half of a device's tokens, by keys with "cudnn" and segment
        ids; the result of halves with more is NaN.

    Raises:
      ValueError: as `over_context`; for a window without `causal`; by keys as `jfsdp.context.keys.attend_keys`.
    """
    known = {"implementation": (implementation, ("xla", "cudnn", None)), "context_by": (context_by, ("heads", "keys"))}
    for name, (given, usable) in known.items():
        if given not in usable:
            raise ValueError(f"attention: {name}={given!r} is unknown; use {' or '.join(map(repr, usable))}")
    if window is not None and not causal:
        raise ValueError(f"attention: window={window} counts earlier keys, but causal=False; leave out one of the two")
    split = _find_split(query) if context_by == "keys" else None
    if split is not None:
        own = () if segment_ids is None else (segment_ids,)
        options = {
            "causal": causal,
            "window": window,
            "implementation": implementation or "xla",
            "max_documents": max_documents,
        }
        with jax.named_scope(BY_KEYS):
            spec = PartitionSpec(split.rows, split.tokens)
            return split.run(functools.partial(_by_keys, split.axes, options), (query, key, value), own, spec)
    rows = () if segment_ids is None else (whole_rows(segment_ids),)
    if rows and context_by == "keys":
        rows = (jnp.cumsum(jnp.diff(rows[0], axis=1, prepend=rows[0][:, :1]) != 0, axis=1),)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *rows: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=(rows[0][:, None, :, None] == rows[0][:, None, None, :]) if rows else None,
            is_causal=causal,
            local_window_size=None if window is None or window >= query.shape[1] else (window - 1, 0),
            implementation=implementation,  # type: ignore[arg-type]
        )

    return _over_context(attend, checks_heads=False)(query, key, value, *rows)
