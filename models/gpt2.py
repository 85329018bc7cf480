"""GPT-2 in plain Flax Linen, and jobs that train it.

The published decoder: learned positions, LayerNorm before each half of a block, biases everywhere, GELU (tanh form),
and the embedding as head. The model is written without sharding, except over mesh axis `tensor`, if the mesh has one.
That axis splits heads, the wide dim of an MLP and a vocabulary that divides evenly, with their weights (`placements`),
and elsewhere the tokens of a row.

Parameter names (joined by ".", below the collection `params`; with `stacked=True` each array below `h` has a leading
dim L, with `stacked=False` the names are `h_0.ln_1...`). They are OpenAI's, with Flax's names for the arrays; kernels
are `[in, out]`, as OpenAI's:

    wte.embedding          [V, D]         h.ln_2.{scale,bias}     [D]
    wpe.embedding          [P, D]         h.mlp.c_fc.kernel       [D, 4D]    .bias [4D]
    h.ln_1.{scale,bias}    [D]            h.mlp.c_proj.kernel     [4D, D]    .bias [D]
    h.attn.c_attn.kernel   [D, 3D]        ln_f.{scale,bias}       [D]
    h.attn.c_attn.bias     [3D]           (c_attn: query, key and value side by side, each with its heads in order)
    h.attn.c_proj.kernel   [D, D]         .bias [D]

Initialization: normal(0.02); kernels that write to the residual stream normal(0.02 / sqrt(2 L)); biases 0.
Dtypes: parameters are created in float32, and compute is in the dtype of the weights. With bfloat16 weights everything
is bfloat16, except the inside of norms and the softmax.

Named values for remat policies: qkv, attended (before its projection), mlp_hidden (before the GELU).

Source: Radford et al., "Language Models are Unsupervised Multitask Learners" (2019), and openai/gpt-2.
"""

from dataclasses import replace
from functools import partial
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from .attention import attend, describe_attention, document_mask, document_view
from .cache import Cache, attend_cached, cache_shapes, check_cached, last_of
from .context import WHOLE, Context
from .elementwise import gelu_tanh, layer_norm
from .gpt2_config import PRESETS, GPT2Config, flops_per_token
from .gpt2_hf import PRETRAINED
from .losses import head_loss, loss_of_model, token_batch
from .optimizers import adamw, decay_mask
from .over_tensor import (
    HEADS,
    DotGeneral,
    Placements,
    by_heads,
    fused_heads,
    looked_up,
    make_placements,
    over_tensor,
    split_tokens,
    whole_rows,
)

_INIT_STD = 0.02


def _residual_init(config: GPT2Config) -> Any:
    """Scale down the 2L branches so that the variance of the residual stream does not grow (the paper, section 2.3)."""
    return nn.initializers.normal(_INIT_STD * (2 * config.num_layers) ** -0.5)


def _dense(features: int, init: Any, name: str, dot_general: DotGeneral) -> nn.Dense:
    return nn.Dense(features, kernel_init=init, name=name, dot_general=dot_general)


class QKV(nn.Module):
    """Projection to queries, keys and values with one kernel; see `fused_heads`."""

    config: GPT2Config
    dot_general: DotGeneral = None

    @nn.compact
    def __call__(self, x: jax.Array) -> list[jax.Array]:
        wide = 3 * self.config.dim
        kernel = self.param("kernel", nn.initializers.normal(_INIT_STD), (self.config.dim, wide), jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, (wide,), jnp.float32)
        return fused_heads(x, kernel, bias, self.config.num_heads, self.dot_general)


class Attention(nn.Module):
    """Causal attention with H heads."""

    config: GPT2Config
    context: Context = WHOLE
    dot_general: DotGeneral = None

    @nn.compact
    def __call__(self, x: jax.Array, documents: Any, deterministic: bool, cache: Cache | None = None) -> Any:
        config = self.config
        parts = QKV(config, self.dot_general, name="c_attn")(x)
        query, key, value = (checkpoint_name(over_tensor(part, 2, HEADS), "qkv") for part in parts)
        if cache is not None:  # `documents` are positions
            attended, cache = attend_cached(
                query, key, value, cache, documents, kernel=partial(attend, choice=config.attention)
            )
        elif config.attention_dropout and not deterministic:  # with `by_heads` all devices would draw the same mask
            kernel = self.context.over_context(self._attend_with_dropout)  # refuses dropout if `context` splits rows
            attended = kernel(query, key, value, documents, dropout_rate=config.attention_dropout)
        else:
            kernel = self.context.over_context(partial(attend, choice=config.attention))
            attended = by_heads(kernel, query, key, value, documents=documents)
        attended = checkpoint_name(over_tensor(attended, 2, HEADS), "attended").reshape(x.shape)
        attended = _dense(config.dim, _residual_init(config), "c_proj", self.dot_general)(attended)
        return attended if cache is None else (attended, cache)

    def _attend_with_dropout(
        self, query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None, *, dropout_rate: float
    ) -> jax.Array:
        seq_len, head_size = query.shape[1], query.shape[-1]
        causal = jnp.tril(jnp.ones((1, 1, seq_len, seq_len), bool))
        scores = jnp.einsum("bqha,bkha->bhqk", query, key).astype(jnp.float32) * head_size**-0.5
        scores = jnp.where(causal if mask is None else causal & mask, scores, jnp.finfo(jnp.float32).min)
        probabilities = jax.nn.softmax(scores, axis=-1).astype(query.dtype)
        dropped = nn.Dropout(dropout_rate, deterministic=False)(probabilities)
        return jnp.einsum("bhqk,bkha->bqha", dropped, value)


class MLP(nn.Module):
    """`c_proj(gelu(c_fc(x)))`, with width 4D inside."""

    config: GPT2Config
    dot_general: DotGeneral = None

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        dense = partial(_dense, dot_general=self.dot_general)
        wide = over_tensor(dense(4 * self.config.dim, nn.initializers.normal(_INIT_STD), "c_fc")(x), -1)
        wide = checkpoint_name(wide, "mlp_hidden")
        return dense(self.config.dim, _residual_init(self.config), "c_proj")(gelu_tanh(wide))


class LayerNorm(nn.Module):
    """LayerNorm with scale and bias; see `layer_norm`."""

    eps: float

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        scale = self.param("scale", nn.initializers.ones, x.shape[-1:], jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, x.shape[-1:], jnp.float32)
        return layer_norm(x, scale, bias, self.eps)


class Block(nn.Module):
    """A block: adds attention, then the MLP, to the residual stream. The unit for sharding."""

    config: GPT2Config
    context: Context = WHOLE
    dot_general: DotGeneral = None

    @nn.compact
    def __call__(self, x: jax.Array, documents: Any, deterministic: bool, cache: Cache | None = None) -> Any:
        eps, drop = self.config.norm_eps, nn.Dropout(self.config.dropout, deterministic=deterministic)
        normed = whole_rows(LayerNorm(eps, name="ln_1")(x))
        attend = Attention(self.config, self.context, self.dot_general, name="attn")
        attended = attend(normed, documents, deterministic, cache)
        if cache is not None:
            attended, cache = attended
        x = x + drop(split_tokens(attended))
        mlp = MLP(self.config, self.dot_general, name="mlp")
        x = x + drop(split_tokens(mlp(whole_rows(LayerNorm(eps, name="ln_2")(x)))))
        return x if cache is None else (x, cache)


class GPT2(nn.Module):
    """GPT-2, which predicts the next token at each position.

    With the same seed, stacked and unstacked models have different weights.
    """

    config: GPT2Config
    context: Context = WHOLE
    dot_general: DotGeneral = None

    @nn.compact
    def __call__(
        self,
        tokens: jax.Array,
        segment_ids: jax.Array | None = None,
        positions: jax.Array | None = None,
        *,
        deterministic: bool = True,
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
          tokens: token ids; an id outside the vocabulary gives NaN.
          segment_ids: `[B T]`, the document of each token in a packed row; attention stays inside a document.
            0 is padding, which no document sees; logits at padding are finite and meaningless.
          positions: `[B T]`, indices into the position table; None: counted from the start of each document.
          deterministic: False draws dropout masks from the rng "dropout", if the configuration has dropout.
          targets, weights: `[B T]`, target tokens and their weights; see `head_loss`.
          by_row: return the sums of each row, [B].
          cache: cache of the earlier tokens, to which these tokens are added; requires `positions` as in
            `attend_cached`.
          lengths: `[B]`, the number of tokens of each row without padding; with a cache.

        Raises:
          ValueError: if a row is longer than the position table.
        """
        config, seq_len = self.config, self.context.row_length(tokens)
        if seq_len > config.num_positions:
            raise ValueError(
                f"rows of {seq_len} tokens exceed GPT2Config.num_positions={config.num_positions}; shorten the rows, "
                "or raise num_positions"
            )
        if positions is None:
            positions = self.context.positions(tokens, segment_ids)
        init = nn.initializers.normal(_INIT_STD)
        if cache is not None:
            positions, lengths = check_cached(positions, lengths)
        wte = nn.Embed(config.vocab_size, config.dim, embedding_init=init, name="wte")
        wpe = nn.Embed(config.num_positions, config.dim, embedding_init=init, name="wpe")
        index = jnp.minimum(positions, config.num_positions - 1)  # padding may exceed the table
        x = nn.Dropout(config.dropout, deterministic=deterministic)(split_tokens(looked_up(wte(tokens))) + wpe(index))
        if cache is not None and lengths is not None:
            x, cache = self._extend(x, positions, cache)
            return wte.attend(LayerNorm(config.norm_eps, name="ln_f")(last_of(whole_rows(x), lengths)))[:, 0], cache
        segment_ids = None if segment_ids is None else self.context.whole_rows(segment_ids)
        if config.attention_dropout and not deterministic:
            documents = document_mask(segment_ids)
        else:
            head_size = config.dim // config.num_heads
            documents, x = document_view(
                segment_ids, x, config.attention, head_size=head_size, max_documents=config.documents_per_row
            )
        x = self._run_blocks(x, documents, deterministic)
        x = whole_rows(LayerNorm(config.norm_eps, name="ln_f")(x))
        if targets is None or weights is None:
            return wte.attend(x)
        return head_loss(x, wte.embedding, targets, weights, chunk=config.loss_chunk, tied=True, by_row=by_row)

    def _extend(self, x: jax.Array, positions: jax.Array, cache: Cache) -> tuple[jax.Array, Cache]:
        if not self.config.stacked:
            for index in range(self.config.num_layers):
                x, cache = Block(self.config, self.context, self.dot_general, name=f"h_{index}")(
                    x, positions, True, cache.at(index)
                )
            return x, cache

        def run_block(block: Block, carry: Any, number: jax.Array, positions: jax.Array) -> tuple[Any, None]:
            return block(carry[0], positions, True, carry[1].at(number)), None

        scan = nn.scan(
            run_block,
            variable_axes={"params": 0},
            split_rngs={"params": True},
            in_axes=(0, nn.broadcast),  # type: ignore[arg-type]
            length=self.config.num_layers,
        )
        numbers = jnp.arange(self.config.num_layers)
        return scan(Block(self.config, self.context, self.dot_general, name="h"), (x, cache), numbers, positions)[0]

    def _run_blocks(self, x: jax.Array, documents: Any, deterministic: bool) -> jax.Array:
        if not self.config.stacked:
            for index in range(self.config.num_layers):
                x = Block(self.config, self.context, self.dot_general, name=f"h_{index}")(x, documents, deterministic)
            return x

        def run_block(block: Block, x: jax.Array, documents: Any) -> tuple[jax.Array, None]:
            return block(x, documents, deterministic), None

        scan = nn.scan(
            run_block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,  # type: ignore[arg-type]
            length=self.config.num_layers,
        )
        return scan(Block(self.config, self.context, self.dot_general, name="h"), x, documents)[0]


def placements(config: GPT2Config) -> Placements:
    """Return the placements of the weights that mesh axis `tensor` cuts (of the embedding, axis `pipe` too).

    The embedding, which is also the head, is cut only if 8 divides the vocabulary, so that placements are equal on all
    meshes. The published vocabulary (50257) is odd.
    """
    rows = ("**.attn.c_proj.kernel", "**.mlp.c_proj.kernel")
    return make_placements(("**.attn.c_attn.kernel", "**.mlp.c_fc"), rows, {} if config.vocab_size % 8 else {"wte": 0})


def _cache(config: GPT2Config, rows: int, length: int, dtype: Any) -> Cache:
    if length > config.num_positions:
        raise ValueError(
            f"rows of {length} tokens exceed GPT2Config.num_positions={config.num_positions}; shorten prompts or "
            "answers"
        )
    heads = (config.num_heads, config.dim // config.num_heads)
    return cache_shapes(config.num_layers, *heads, config.stacked, rows, length, dtype)


def make_job(config: GPT2Config, seq_len: int) -> dict[str, Any]:
    """Describe a training job as plain data.

    Returns:
      The fields of `llama.make_job`, with `model` as `(module, example inputs)`, and `eval_loss`, the loss without
      dropout.
    """

    def configure(**overrides: Any) -> dict[str, Any]:
        return make_job(replace(config, **overrides), seq_len)

    return {
        "model": (GPT2(config), (jax.ShapeDtypeStruct((1, 1), jnp.int32),)),
        "config": config,
        "loss": partial(loss_of_model, deterministic=False),
        "eval_loss": loss_of_model,
        "units": [{"match": Block, "stacked": int(config.stacked)}],
        "batch": token_batch,
        "optimizer": adamw,
        "decay_mask": decay_mask,
        "vocab_size": config.vocab_size,
        "documents_per_row": config.documents_per_row,
        "attention": partial(
            describe_attention, config.attention, config.dim // config.num_heads, config.documents_per_row
        ),
        "seq_len": seq_len,
        "flops_per_token": partial(flops_per_token, config),
        "configure": configure,
        "pretrained": PRETRAINED,
        "placements": placements(config),
        "row_loss": partial(loss_of_model, by_row=True),
        "in_context": lambda model, **functions: (model[0].clone(context=Context(**functions)), *model[1:]),
        "with_dot_general": lambda model, dot_general: (model[0].clone(dot_general=dot_general), *model[1:]),
        "cache": partial(_cache, config),
    }


JOBS: dict[str, dict[str, Any]] = {
    name: make_job(config, seq_len=config.num_positions) for name, config in PRESETS.items()
}
