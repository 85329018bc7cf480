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
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jfsdp.arguments import Count, checked
from jfsdp.context.rows import SCOPE, whole_rows
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
      attend: `f(query, key, value, *rows, **options)`. Heads must be independent, and the device's place in the mesh
        must not matter. Arrays in `rows` have one entry per row, `[B ...]`, of *whole* rows (see `whole_rows`).
        Options are passed unchanged, except a mask, a bias and dropout, which would be those of local tokens: with one
        of them the call raises a ValueError.

    Raises (when called):
      ValueError: for heads that axes `context` and `tensor` do not divide, with the sizes that fit; for keys of other
        rows than the queries'.
    """

    @functools.wraps(attend)
    def run(query: jax.Array, key: jax.Array, value: jax.Array, *rows: Any, **options: Any) -> jax.Array:
        mesh = jax.sharding.get_abstract_mesh()
        axes = axes_of(mesh, (CONTEXT,))
        size = math.prod(mesh.shape[axis] for axis in axes)
        if size == 1:
            return attend(query, key, value, *rows, **options)
        auto = [name for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True) if kind == AxisType.Auto]
        parts = [tuple(axis for axis in names if axis in auto) for names in (axes_of(mesh, ROW_AXES), axes)]
        heads = tuple(axis for axis in (_TENSOR,) if axis in auto)
        sizes = [math.prod(mesh.shape[axis] for axis in names) for names in (*parts, heads)]
        if any(dim % num for dim, num in zip(query.shape, sizes[:2])):  # not the rows of a step: XLA splits nothing
            return attend(query, key, value, *rows, **options)
        _check(query, key, value, options, size, sizes[2])
        local = functools.partial(_by_heads, functools.partial(attend, **options), axes)
        if not auto:
            return local(query, key, value, *rows)
        spec = PartitionSpec(*parts, heads)
        specs = spec, spec, spec, *[PartitionSpec(parts[0])] * len(rows)
        mapped = jax.shard_map(local, in_specs=specs, out_specs=spec, axis_names=set(auto), check_vma=False)
        with jax.named_scope(SCOPE):  # the step knows that this `shard_map` is not the model's
            return mapped(query, key, value, *rows)

    return run


def _by_heads(
    attend: Callable[..., jax.Array], axes: tuple[str, ...], query: Any, key: Any, value: Any, *rows: Any
) -> jax.Array:
    """Compute attention of this device's heads over whole rows, inside a `shard_map`."""
    size = jax.lax.axis_size(axes)
    copies = size // math.gcd(size, key.shape[2])

    def swap(x: jax.Array, split: int, joined: int) -> jax.Array:
        with jax.named_scope(SCOPE):
            return jax.lax.all_to_all(x, axes, split, joined, tiled=True)

    key, value = (jnp.repeat(x, copies, axis=2) if copies > 1 else x for x in (key, value))
    return swap(attend(*(swap(x, 2, 1) for x in (query, key, value)), *rows), 1, 2)


def _check(query: Any, key: Any, value: Any, options: dict[str, Any], size: int, tensor: int) -> None:
    num, total = query.shape[2], size * tensor
    if num % total:
        local, fits = num // tensor, [n for n in range(1, num + 1) if num % (n * tensor) == 0]
        which = f" of axis {_TENSOR!r}'s {tensor}" if tensor > 1 else ""
        raise ValueError(
            f"attention has {num} heads of queries, {local} for each{which}, which mesh axis {CONTEXT!r} (size {size}) "
            f"does not divide; use a size of {', '.join(map(str, fits))}"
        )
    for name, x in (("key", key), ("value", value)):
        if x.shape[:2] != query.shape[:2]:
            raise ValueError(
                f"attention: {name} has shape {x.shape} and query {query.shape}, but mesh axis {CONTEXT!r} (size "
                f"{size}) splits the tokens of one row; call attention between different rows without over_context, "
                "on keys and values from jfsdp.whole_rows"
            )
    for name in ("mask", "bias"):
        if options.get(name) is not None:
            raise ValueError(
                f"attention: {name} is of the tokens of one device, but mesh axis {CONTEXT!r} (size {size}) splits "
                "rows; pass causal=, window= and segment_ids= of jfsdp.attention, or make it inside the function "
                "given to jfsdp.over_context"
            )
    if options.get("dropout_rate") and not options.get("deterministic"):
        raise ValueError(
            f"attention: dropout_rate={options['dropout_rate']} of attention weights is not available with mesh axis "
            f"{CONTEXT!r} (size {size}); set it to 0, and drop activations outside of attention"
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
    implementation: Literal["xla", "cudnn"] | None = None,
) -> jax.Array:
    """Compute attention inside documents, also if axis `context` splits the rows.

    Layout:  query [B T/context H A], key and value [B T/context K A] -> [B T/context H A]; H is a multiple of K
    Memory:  with segment ids a mask [B 1 T T], and with implementation "xla" scores [B H/context T T] in float32.
    Cost:    as `over_context`; with segment ids also an all-gather of 4 bytes per token.

    Args:
      causal: whether a token sees only itself and earlier tokens.
      window: number of keys that a query sees, including its own; None: all earlier keys. Requires `causal`.
      segment_ids: [B T/context], the document of each token; a token sees only tokens with its id.
      implementation: "xla", "cudnn", or None for the default of `jax.nn.dot_product_attention`.

    Raises:
      ValueError: as `over_context`; for a window without `causal`.
    """
    if window is not None and not causal:
        raise ValueError(f"attention: window={window} counts earlier keys, but causal=False; leave out one of the two")
    rows = () if segment_ids is None else (whole_rows(segment_ids),)

    def attend(query: jax.Array, key: jax.Array, value: jax.Array, *rows: jax.Array) -> jax.Array:
        return jax.nn.dot_product_attention(
            query,
            key,
            value,
            mask=(rows[0][:, None, :, None] == rows[0][:, None, None, :]) if rows else None,
            is_causal=causal,
            local_window_size=None if window is None or window >= query.shape[1] else (window - 1, 0),
            implementation=implementation,
        )

    return over_context(attend)(query, key, value, *rows)
