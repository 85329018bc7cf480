"""Llama and its relatives (Mistral, Mixtral, Qwen 2 and 3, gpt-oss, Gemma 2 and 3) in plain Flax NNX, and their jobs.

A decoder-only transformer: RMSNorm before each half of a layer, rotary embedding, grouped-query attention, SwiGLU.
`LlamaConfig` has all differences between the relatives. The model is written without sharding, except over mesh axis
`tensor`, if the mesh has one. That axis splits heads, the wide dim of an MLP and the vocabulary (Megatron-LM, arXiv
1909.08053), with their weights (`placements`), and elsewhere the tokens of a row. If axis `context` splits the tokens,
the job passes the functions of `Context`.
Named values for remat policies: qkv (rotated), attended, mlp_hidden (gate and up). With `num_experts`, experts replace
the MLP (experts.py).

Parameter names (joined by "."; with `stacked=True` each array below `layers` has a leading dim L, with `stacked=False`
the names are `layers.0.attn...`). Kernels are `[in, out]`; H heads, K key/value heads, A = size of one head:

    embed.embedding          [V, D]        layers.mlp_norm.scale          [D]
    layers.attn_norm.scale   [D]           layers.mlp.gate_proj.kernel    [D, F]
    layers.attn.q_proj.kernel [D, H*A]     layers.mlp.up_proj.kernel      [D, F]
    layers.attn.k_proj.kernel [D, K*A]     layers.mlp.down_proj.kernel    [F, D]
    layers.attn.v_proj.kernel [D, K*A]     norm.scale                     [D]
    layers.attn.o_proj.kernel [H*A, D]     lm_head.kernel                 [D, V]   (absent if tied)
    layers.attn.{q,k}_norm.scale [A]       (qk_norm)      layers.attn.{q,k,v}_proj.bias   (qkv_bias)
    layers.attn.o_proj.bias  [D]            (out_bias)
    layers.mlp.router.kernel [D, E]        layers.mlp.experts.{gate,up}_proj [E, D, F]   (num_experts: in place of
    layers.mlp.experts.down_proj [E, F, D]                                                the kernels of the MLP)
    layers.mlp.experts.gate_up_proj [E, D, 2F]   (swiglu_limit: alternating, in place of both; with biases
                                                  layers.mlp.{router.bias,experts.gate_up_bias,experts.down_bias})
    layers.attn.sinks [H]   (sinks)         layers.{attn,mlp}_out_norm.scale [D]   (gemma)

Dtypes: parameters are created in float32, and compute is in the dtype of the weights. With bfloat16 weights everything
is bfloat16, except the inside of norms, the softmax and the rotation, which are float32 and cast back.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from .attention import attend, choose_attention, describe_attention, document_view, with_sinks
from .cache import Cache, attend_cached, cache_shapes, check_cached, last_of
from .checks import MAX_SIZE
from .chunks import by_chunks
from .context import WHOLE, Context
from .elementwise import geglu, rms_norm, soft_cap, swiglu
from .experts import ExpertsFn, MoE, Routed, not_routed
from .llama_config import PRESETS, LlamaConfig, RopeScaling, flops_per_token
from .llama_hf import pretrained_names
from .losses import Largest, LossSums, Share, head_loss, loss_of_model, loss_of_tokens, token_batch
from .optimizers import adamw, decay_mask
from .over_tensor import (
    AXIS,
    HEADS,
    DotGeneral,
    Placements,
    by_heads,
    looked_up,
    make_placements,
    multiply,
    over_tensor,
    split_tokens,
    whole_rows,
)

Rope = tuple[jax.Array, jax.Array]


def rope_frequencies(config: LlamaConfig) -> np.ndarray:
    """Return the rotary angle per position of each pair of a head, in float64 on the host.

    With dynamic scaling, the angles are those of rows up to the original context.

    Layout:  -> [A/2]
    Source: RoFormer (arXiv 2104.09864); scaling as `modeling_rope_utils` of Hugging Face transformers.
    """
    frequencies = config.rope_theta ** -(np.arange(0, config.head_size, 2, dtype=np.float64) / config.head_size)
    scaling = config.rope_scaling
    if scaling is None or scaling.kind == "dynamic":
        return frequencies
    if scaling.kind == "linear":
        return frequencies / scaling.factor
    if scaling.kind == "yarn":
        kept = _yarn_kept(config, scaling)
        return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor
    turns = scaling.original_context * frequencies / (2 * math.pi)
    kept = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
    kept = np.clip(kept, 0.0, 1.0)
    return kept * frequencies + (1.0 - kept) * frequencies / scaling.factor


def _yarn_kept(config: LlamaConfig, scaling: RopeScaling) -> np.ndarray:
    """Return the share of each pair's frequency that yarn keeps: 1 for short wavelengths, 0 for long ones."""
    size = config.head_size

    def pair_of(turns: float) -> float:
        """Return the element index of the pair with this number of turns in the original context."""
        ratio = scaling.original_context / (turns * 2 * math.pi)
        return size * math.log(ratio) / (2 * math.log(config.rope_theta))

    low, high = pair_of(scaling.beta_fast), pair_of(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, size - 1)
    high += 0.001 if low == high else 0  # as transformers does
    return 1.0 - np.clip((np.arange(size // 2) - low) / (high - low), 0.0, 1.0)


def rope_table(
    config: LlamaConfig, positions: jax.Array, real: jax.Array | None = None, context: Context = WHOLE
) -> Rope:
    """Return cosines and sines in float32 for `apply_rope`.

    Layout:  [B T] -> two of [B T 1 A/2], or [1 T] -> two of [1 T 1 A/2]

    Args:
      real: `[B T]`, whether each token is not padding; None: no padding. Dynamic scaling depends on the longest
        position of a row.
    """
    frequencies, scaling = jnp.asarray(rope_frequencies(config), jnp.float32), config.rope_scaling
    if scaling is not None and scaling.kind == "dynamic":
        counted = positions if real is None else jnp.where(real, positions, 0)
        longest = jnp.max(context.whole_rows(counted), axis=1) + 1
        base = jnp.maximum(scaling.factor * longest / scaling.original_context - (scaling.factor - 1), 1.0)
        powers = np.arange(0, config.head_size, 2) / max(config.head_size - 2, 1)
        frequencies = frequencies * base[:, None, None, None] ** jnp.asarray(-powers, jnp.float32)
    angles = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    gain = 1.0
    if scaling is not None and scaling.kind == "yarn":
        gain = scaling.attention_factor or (0.1 * math.log(max(scaling.factor, 1.0)) + 1.0)
    return jnp.cos(angles) * gain, jnp.sin(angles) * gain


def rope_tables(config: LlamaConfig, positions: jax.Array, real: jax.Array | None, context: Context = WHOLE) -> Any:
    """Return the `rope_table` of all layers; with `local_rope_theta` a pair: of layers with all keys, and of others."""
    table, theta = rope_table(config, positions, real, context), config.local_rope_theta
    if theta is None:
        return table
    return table, rope_table(replace(config, rope_theta=theta, rope_scaling=None), positions, real, context)


def apply_rope(x: jax.Array, rope: tuple[jax.Array, jax.Array]) -> jax.Array:
    """Rotate each head, pairing element i with element i + A/2 (Hugging Face's `rotate_half`, not Meta's interleaving).

    Layout:  [B T H A] -> [B T H A]
    Dtype:   float32 inside, returned in the dtype of `x`.
    """
    cos, sin = rope
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


class Linear(nnx.Module):
    """Linear layer with a kernel `[in, out]`, initialized with variance `1 / in`, and an optional bias."""

    def __init__(
        self,
        num_in: int,
        num_out: int,
        *,
        rngs: nnx.Rngs,
        use_bias: bool = False,
        gain: float = 1.0,
        dot_general: DotGeneral = None,
    ):
        self.dot_general = dot_general
        init = nnx.initializers.variance_scaling(gain**2, "fan_in", "truncated_normal")
        self.kernel = nnx.Param(init(rngs.params(), (num_in, num_out), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((num_out,), jnp.float32)) if use_bias else None

    def __call__(self, x: jax.Array) -> jax.Array:
        y = multiply(x, self.kernel[...], self.dot_general)
        return y if self.bias is None else y + self.bias[...]


class RMSNorm(nnx.Module):
    """RMSNorm of the last dim with a scale, in float32; returns the input's dtype.

    With `from_one`, the factor is 1 + scale.
    """

    def __init__(self, dim: int, *, eps: float, from_one: bool = False):
        self.eps, self.from_one = eps, from_one
        self.scale = nnx.Param(jnp.full((dim,), 0.0 if from_one else 1.0, jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.scale[...]
        return rms_norm(x, 1.0 + scale.astype(jnp.float32) if self.from_one else scale, self.eps)


def _norm(config: LlamaConfig, dim: int) -> RMSNorm:
    return RMSNorm(dim, eps=config.norm_eps, from_one=config.gemma)


class Embedding(nnx.Module):
    """Embedding table `[V, D]`, initialized with variance `1 / D`; a token outside the table gives NaN."""

    def __init__(self, vocab_size: int, dim: int, *, rngs: nnx.Rngs):
        init = nnx.initializers.normal(stddev=dim**-0.5)
        self.embedding = nnx.Param(init(rngs.params(), (vocab_size, dim), jnp.float32))

    def __call__(self, tokens: jax.Array) -> jax.Array:
        return jnp.take(self.embedding[...], tokens, axis=0, mode="fill")

    def attend(self, x: jax.Array) -> jax.Array:
        """Return logits with the table as a tied head. Layout: [B T D] -> [B T V]."""
        return x @ self.embedding[...].T


class Attention(nnx.Module):
    """Causal attention with `num_kv_heads` key and value heads, which groups of query heads share."""

    def __init__(
        self, config: LlamaConfig, *, rngs: nnx.Rngs, context: Context = WHOLE, dot_general: DotGeneral = None
    ):
        self.config, self.context = config, context
        query_dim, kv_dim = config.num_heads * config.head_size, config.num_kv_heads * config.head_size
        linear = partial(Linear, rngs=rngs, dot_general=dot_general)
        self.q_proj = linear(config.dim, query_dim, use_bias=config.qkv_bias)
        self.k_proj = linear(config.dim, kv_dim, use_bias=config.qkv_bias)
        self.v_proj = linear(config.dim, kv_dim, use_bias=config.qkv_bias)
        self.o_proj = linear(query_dim, config.dim, use_bias=config.out_bias, gain=_residual_gain(config))
        self.q_norm = _norm(config, config.head_size) if config.qk_norm else None
        self.k_norm = _norm(config, config.head_size) if config.qk_norm else None
        self.sinks = nnx.Param(jnp.zeros((config.num_heads,), jnp.float32)) if config.sinks else None

    def project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return rotated queries and keys, and values. Layout: [B T D] -> [B T H A], [B T K A], [B T K A]."""
        config = self.config
        batch, seq_len, _ = x.shape
        query = self.q_proj(x).reshape(batch, seq_len, config.num_heads, config.head_size)
        key = self.k_proj(x).reshape(batch, seq_len, config.num_kv_heads, config.head_size)
        value = self.v_proj(x).reshape(batch, seq_len, config.num_kv_heads, config.head_size)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        gain = (config.head_size / (config.query_pre_attn_scalar or config.head_size)) ** 0.5  # kernels have A**-0.5
        turn = (cos, sin) if gain == 1 else (cos * gain, sin * gain)
        return apply_rope(query, turn), apply_rope(key, (cos, sin)), value

    def output(self, attended: jax.Array) -> jax.Array:
        """Project the heads back. Layout: [B T H A] -> [B T D]."""
        return self.o_proj(attended.reshape(*attended.shape[:2], -1))

    def _kernel(self, is_full: Any) -> Callable[..., jax.Array]:
        """Return attention of queries, keys, values and documents; see `Llama._documents`.

        Args:
          is_full: whether the layer sees all keys; an array if layers are stacked. None: all layers are alike.
        """
        config, gathered = self.config, self.context.attention
        kernel, window = self._whole_kernel(is_full), None if is_full is True else self.config.local_window_size
        if config.context_by == "heads" or gathered is None:
            return self.context.over_context(kernel)

        def by_keys(query: jax.Array, key: jax.Array, value: jax.Array, segment_ids: jax.Array | None) -> jax.Array:
            return gathered(
                query,
                key,
                value,
                window=window,
                segment_ids=segment_ids,
                implementation=choose_attention(config.attention, query),
                context_by="keys",
                max_documents=config.documents_per_row,
            )

        return by_keys

    def _whole_kernel(self, is_full: Any) -> Callable[..., jax.Array]:
        """Return attention of whole rows; see `_kernel`."""
        config = self.config
        how = {"choice": config.attention, "has_sinks": config.sinks, "softcap": config.attention_softcap}
        kernel, whole = partial(attend, window=config.local_window_size, **how), partial(attend, window=None, **how)
        if not isinstance(is_full, jax.Array):
            return whole if is_full else kernel
        if self.context is not WHOLE:
            raise ValueError(
                "LlamaConfig.full_attention_every with stacked=True is not available for rows that mesh axis 'context' "
                "splits; use stacked=False"
            )
        # The flag is an argument, since a `shard_map` around the function cannot read values outside of it.
        return lambda q, k, v, documents: jax.lax.cond(documents[1], whole, kernel, q, k, v, documents[0])

    def __call__(
        self, qkv: tuple[jax.Array, ...], documents: Any, cache: Cache | None = None, is_full: Any = None
    ) -> Any:
        config = self.config
        query, key, value = (checkpoint_name(over_tensor(part, 2, HEADS), "qkv") for part in qkv)
        query = query if self.sinks is None else with_sinks(query, self.sinks[...])
        if cache is None:
            documents = (documents, is_full) if isinstance(is_full, jax.Array) else documents
            attended = by_heads(self._kernel(is_full), query, key, value, documents=documents)
        else:  # `documents` are positions
            window = config.local_window_size
            window = window if is_full is None else jnp.where(is_full, MAX_SIZE, window or MAX_SIZE)
            how = {"window": window, "kernel": self._whole_kernel(is_full), "has_sinks": config.sinks}
            how["softcap"] = config.attention_softcap
            kind = (None, is_full) if isinstance(is_full, jax.Array) else None
            attended, cache = attend_cached(query, key, value, cache, documents, documents=kind, **how)
        return checkpoint_name(over_tensor(attended, 2, HEADS), "attended"), cache


class MLP(nnx.Module):
    """SwiGLU: `down(silu(gate(x)) * up(x))`; in Gemma GeGLU, with gelu."""

    def __init__(self, config: LlamaConfig, *, rngs: nnx.Rngs, dot_general: DotGeneral = None):
        linear = partial(Linear, rngs=rngs, dot_general=dot_general)
        self.activate = geglu if config.gemma else swiglu
        self.gate_proj = linear(config.dim, config.ffn_dim)
        self.up_proj = linear(config.dim, config.ffn_dim)
        self.down_proj = linear(config.ffn_dim, config.dim, gain=_residual_gain(config))

    def __call__(self, x: jax.Array) -> jax.Array:
        gate, up = (self.gate_proj(x), self.up_proj(x))
        gate, up = (checkpoint_name(over_tensor(wide, -1), "mlp_hidden") for wide in (gate, up))
        return self.down_proj(self.activate(gate, up))


def _residual_gain(config: LlamaConfig) -> float:
    """Scale down the 2L branches so that the variance of the residual stream does not grow (GPT-2, section 2.3)."""
    return (2 * config.num_layers) ** -0.5


class DecoderLayer(nnx.Module):
    """A layer: adds attention, then the MLP, to the residual stream. The unit for sharding."""

    def __init__(
        self,
        config: LlamaConfig,
        *,
        rngs: nnx.Rngs,
        context: Context = WHOLE,
        dot_general: DotGeneral = None,
        experts: ExpertsFn | None = None,
    ):
        self.config = config
        self.attn_norm = _norm(config, config.dim)
        self.attn = Attention(config, rngs=rngs, context=context, dot_general=dot_general)
        self.mlp_norm = _norm(config, config.dim)
        self.attn_out_norm = _norm(config, config.dim) if config.gemma else None
        self.mlp_out_norm = _norm(config, config.dim) if config.gemma else None
        if config.num_experts is None:
            self.mlp: MLP | MoE = MLP(config, rngs=rngs, dot_general=dot_general)
        else:
            self.mlp = MoE(config, rngs=rngs, gain=_residual_gain(config), experts=experts)

    def __call__(
        self,
        x: jax.Array,
        rope: Any,
        documents: Any,
        cache: Cache | None = None,
        real: jax.Array | None = None,
        is_full: Any = None,
        *,
        drops: bool = False,
    ) -> Any:
        """Return `x`, and with a cache the cache, otherwise with experts their `Routed`; `rope` as in `rope_tables`."""
        if self.config.local_rope_theta is not None:
            rope = jax.tree.map(partial(jnp.where, is_full), *rope)
        chunk = self.config.token_chunk if cache is None else None
        attended, cache = self.attn(by_chunks(self._project, chunk, x, *rope), documents, cache, is_full)
        if isinstance(self.mlp, MLP):
            x = by_chunks(self._feed_forward, chunk, x, attended)
            return x if cache is None else (x, cache)
        x = self._attend(x, attended)
        y, routed = self.mlp(whole_rows(self.mlp_norm(x)), real, drops=drops)
        return x + split_tokens(y), routed if cache is None else cache

    def _project(self, x: jax.Array, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, ...]:
        return self.attn.project(whole_rows(self.attn_norm(x)), cos, sin)

    def _attend(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        y = split_tokens(self.attn.output(attended))
        return x + (y if self.attn_out_norm is None else self.attn_out_norm(y))

    def _feed_forward(self, x: jax.Array, attended: jax.Array) -> jax.Array:
        x = self._attend(x, attended)
        assert isinstance(self.mlp, MLP)
        y = split_tokens(self.mlp(whole_rows(self.mlp_norm(x))))
        return x + (y if self.mlp_out_norm is None else self.mlp_out_norm(y))


class LMHead(Linear):
    """The head over the vocabulary; a separate class, so that it can be selected as a unit."""


class Llama(nnx.Module):
    """Llama, which predicts the next token at each position.

    With the same seed, stacked and unstacked models have the same weights. `dot_general` computes the products of the
    layers' projections, in place of `jax.lax.dot_general`, but not those of experts. `experts` (`jfsdp.experts`) moves
    tokens to experts; None: every expert computes every token.
    """

    def __init__(
        self,
        config: LlamaConfig,
        rngs: nnx.Rngs,
        context: Context = WHOLE,
        dot_general: DotGeneral = None,
        experts: ExpertsFn | None = None,
    ):
        self.config, self.context = config, context
        self.embed = Embedding(config.vocab_size, config.dim, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)

        def make_layer(key: jax.Array) -> DecoderLayer:
            how = {"context": context, "dot_general": dot_general, "experts": experts}
            return DecoderLayer(config, rngs=nnx.Rngs(params=key), **how)

        self.layers = nnx.vmap(make_layer)(keys) if config.stacked else nnx.List([make_layer(key) for key in keys])
        self.norm = _norm(config, config.dim)
        self.lm_head = None if config.tied else LMHead(config.dim, config.vocab_size, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        targets: jax.Array | None = None,
        weights: jax.Array | None = None,
        by_row: bool = False,
        cache: Cache | None = None,
        lengths: jax.Array | None = None,
    ) -> Any:
        """Compute logits, or with targets the sums of their losses, or with a cache the logits of the next tokens.

        Layout:  [B T] int32 -> [B T V], or scalars, or [B V] and the cache
        Dtype:   the dtype of the weights; losses float32.

        Args:
          tokens: token ids.
          segment_ids: `[B T]`, the document of each token in a packed row; attention stays inside a document.
            0 is padding, which no document sees; logits at padding are finite and meaningless.
          positions: `[B T]`, for the rotary embedding; None: counted from the start of each document.
          targets, weights: `[B T]`, target tokens and their weights; see `head_loss`.
          by_row: return the sums of each row, [B].
          cache: cache of the earlier tokens, to which these tokens are added; requires `positions` as in
            `attend_cached`.
          lengths: `[B]`, the number of tokens of each row without padding; with a cache.
        """
        if cache is not None:
            positions, lengths = check_cached(positions, lengths)
            x = self._embedded(tokens)
            real = jnp.arange(tokens.shape[1]) < lengths[:, None]
            x, cache = self._extend(x, rope_tables(self.config, positions, real), positions, cache, real)
            return self._logits(self.norm(last_of(whole_rows(x), lengths)))[:, 0], cache
        config, context = self.config, self.context
        positions = context.positions(tokens, segment_ids) if positions is None else positions
        real = None if segment_ids is None else segment_ids != 0
        rope = rope_tables(config, positions, real, context)
        documents, x = self._documents(segment_ids, self._embedded(tokens))
        routed = None if config.num_experts is None else not_routed(tokens)
        x, routed = self._run_layers(x, rope, documents, routed, real, drops=targets is not None)
        x = whole_rows(self.norm(x))
        if targets is None or weights is None:
            return self._logits(x)
        kernel = self.embed.embedding if self.lm_head is None else self.lm_head.kernel
        how = {"chunk": config.loss_chunk, "tied": self.lm_head is None, "by_row": by_row}
        loss = head_loss(x, kernel[...], targets, weights, **how, softcap=config.final_softcap)
        if routed is None or by_row:  # by row: for preferences, which compare likelihoods
            return loss
        router_loss = jnp.sum(weights * routed.loss)
        num_tokens = jnp.full((), tokens.size) if real is None else jnp.sum(real)
        copies = num_tokens.astype(jnp.float32) * self.config.experts_per_token * self.config.num_layers
        metrics = {"router_loss": router_loss, "dropped": Share(routed.dropped, copies)}
        metrics |= {"expert_load": Largest(routed.load)}
        return LossSums(loss.total + router_loss, loss.weight, {**loss.aux, **metrics})

    def _documents(self, segment_ids: jax.Array | None, x: jax.Array) -> tuple[Any, jax.Array]:
        """Return what attention reads of documents, and `x`; see `document_view`. With gathered keys, segment ids."""
        config, context = self.config, self.context
        if segment_ids is None or (config.context_by == "keys" and context.attention is not None):
            return segment_ids, x
        return document_view(
            context.whole_rows(segment_ids),
            x,
            config.attention_kernel,
            head_size=config.head_size,
            max_documents=config.documents_per_row,
        )

    def _embedded(self, tokens: jax.Array) -> jax.Array:
        x = looked_up(self.embed(tokens))
        return split_tokens(x * self.config.dim**0.5 if self.config.gemma else x)

    def _logits(self, x: jax.Array) -> jax.Array:
        logits = self.embed.attend(x) if self.lm_head is None else self.lm_head(x)
        return soft_cap(logits, self.config.final_softcap).astype(logits.dtype)

    def _extend(
        self, x: jax.Array, rope: Any, positions: jax.Array, cache: Cache, real: jax.Array
    ) -> tuple[jax.Array, Cache]:
        if isinstance(self.layers, nnx.List):
            for number, layer in enumerate(self.layers):
                x, cache = layer(x, rope, positions, cache.at(number), real, self._is_full(number))
            return x, cache

        @nnx.scan(in_axes=(nnx.Carry, 0, 0, None, None), out_axes=nnx.Carry)
        def scan_layers(carry, layer, number, rope, positions):
            return layer(carry[0], rope, positions, carry[1].at(number), real, self._is_full(number))

        return scan_layers((x, cache), self.layers, jnp.arange(self.config.num_layers), rope, positions)

    def _is_full(self, number: Any) -> Any:
        """Return whether a layer sees all keys; None if all layers are alike."""
        every = self.config.full_attention_every
        return None if every is None else (number + 1) % every == 0

    def _run_layers(
        self,
        x: jax.Array,
        rope: Any,
        documents: Any,
        routed: Routed | None,
        real: jax.Array | None,
        *,
        drops: bool,
    ) -> tuple[jax.Array, Routed | None]:
        def run(
            carry: Any, layer: DecoderLayer, is_full: Any, rope: Any, documents: Any, real: Any
        ) -> tuple[jax.Array, Routed | None]:
            x, routed = carry
            if routed is None:
                return layer(x, rope, documents, is_full=is_full), None
            x, found = layer(x, rope, documents, None, real, is_full, drops=drops)
            return x, routed.add(found)

        carry = (x, routed)
        if isinstance(self.layers, nnx.List):
            for number, layer in enumerate(self.layers):
                carry = run(carry, layer, self._is_full(number), rope, documents, real)
            return carry
        scan_layers = nnx.scan(run, in_axes=(nnx.Carry, 0, 0, None, None, None), out_axes=nnx.Carry)
        kinds = self._is_full(jnp.arange(self.config.num_layers))
        return scan_layers(carry, self.layers, kinds, rope, documents, None if routed is None else real)


def placements(config: LlamaConfig) -> Placements:
    """Return the placements of the weights that mesh axes `tensor` and `expert` cut (of tables, axis `pipe` too)."""
    columns = ("**.attn.[qkv]_proj", "**.mlp.gate_proj", "**.mlp.up_proj")
    vocabulary = {"embed": 0} if config.tied else {"embed": 0, "lm_head": 1}
    dense = make_placements(columns, ("**.attn.o_proj", "**.mlp.down_proj"), vocabulary)
    if config.num_experts is None:
        return dense
    wide, narrow = PartitionSpec("expert", None, AXIS), PartitionSpec("expert", AXIS)
    own: Placements = {"**.mlp.experts.down_proj": narrow}
    if config.swiglu_limit is None:
        own |= dict.fromkeys(("**.mlp.experts.gate_proj", "**.mlp.experts.up_proj"), wide)
    else:
        own |= {"**.mlp.experts.gate_up_proj": wide, "**.mlp.experts.gate_up_bias": PartitionSpec("expert", AXIS)}
        own |= {"**.mlp.experts.down_bias": PartitionSpec("expert")}
    return {glob: spec for glob, spec in dense.items() if ".mlp." not in glob} | own


def _with_experts(model: Callable[..., Llama], experts: ExpertsFn) -> Callable[..., Llama]:
    return partial(model, experts=experts)


def make_job(config: LlamaConfig, seq_len: int) -> dict[str, Any]:
    """Describe a training job as plain data.

    Returns:
      `model` (rngs -> module), `config`, `loss`, `units`, `batch` ((batch_size, seq_len) -> shapes), `optimizer`
      (learning rate or schedule -> optax), `decay_mask`, `vocab_size`, `seq_len`, `flops_per_token` (seq_len -> float),
      `configure` (fields of the config to change, as keywords -> another job) and `pretrained` (names in checkpoints
      of Hugging Face, torchtitan and Meta).
    """

    def configure(**overrides: Any) -> dict[str, Any]:
        return make_job(replace(config, **overrides), seq_len)

    return {
        "model": partial(Llama, config),
        "config": config,
        "loss": loss_of_model,
        "eval_loss": loss_of_model if config.num_experts is None else loss_of_tokens,
        "units": [{"match": DecoderLayer, "stacked": int(config.stacked)}],
        "batch": token_batch,
        "optimizer": adamw,
        "decay_mask": decay_mask,
        "vocab_size": config.vocab_size,
        "documents_per_row": config.documents_per_row,
        "attention": partial(describe_attention, config.attention_kernel, config.head_size, config.documents_per_row),
        "seq_len": seq_len,
        "flops_per_token": partial(flops_per_token, config),
        "configure": configure,
        "pretrained": pretrained_names(config),
        "placements": placements(config),
        "row_loss": partial(loss_of_model, by_row=True),
        "in_context": lambda model, **functions: partial(model, context=Context(**functions)),
        "with_experts": None if config.num_experts is None else _with_experts,
        "with_dot_general": lambda model, dot_general: partial(model, dot_general=dot_general),
        "cache": partial(cache_shapes, config.num_layers, config.num_kv_heads, config.head_size, config.stacked),
    }


JOBS: dict[str, dict[str, Any]] = {
    name: make_job(config, seq_len=256 if name.endswith("-tiny") else 8192) for name, config in PRESETS.items()
}
