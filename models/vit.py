"""The Vision Transformer in plain Flax NNX; examples/vit.py trains it.

An encoder over the patches of an image: learned positions, a norm before each half of a block, biases everywhere, GELU.
The norm can be BatchNorm, whose statistics are part of the model's state. The model is written without sharding, except
over mesh axis `tensor`, if the mesh has one. That axis splits heads and the wide dim of an MLP, with their weights
(`placements`), and elsewhere the tokens, if it divides their number (197 is prime).

Parameter names (joined by "."; with `stacked=True` each array below `blocks` has a leading dim L, with `stacked=False`
the names are `blocks.0.attn...`). Kernels are `[in, out]`; P = side of a patch, T = tokens:

    embed.patch.kernel       [P*P*C, D]  .bias [D]        blocks.norm1.{scale,bias}   [D]
    embed.class_token        [1, 1, D]   (pool="token")   blocks.attn.qkv.kernel      [D, 3D]  .bias [3D]
    embed.positions          [1, T, D]                    blocks.attn.out.kernel      [D, D]   .bias [D]
    norm.{scale,bias}        [D]                          blocks.norm2.{scale,bias}   [D]
    head.kernel              [D, K]      .bias [K]        blocks.mlp.up.kernel        [D, F]   .bias [F]
                                                          blocks.mlp.down.kernel      [F, D]   .bias [D]
    With norm="batch" each norm also has the statistics `mean` and `var` [D], float32, which are not parameters.

Dtypes: parameters are created in float32, and compute is in the dtype of the weights. With bfloat16 weights everything
is bfloat16, except the inside of norms and the softmax; statistics stay float32.

Named values for remat policies: qkv, attended (before its projection), mlp_hidden (before the GELU).

Source: Dosovitskiy et al., "An Image is Worth 16x16 Words" (arXiv 2010.11929), and google-research/vision_transformer.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from .attention import attend
from .elementwise import gelu, layer_norm
from .losses import LossSums, classification_loss
from .optimizers import NORMS_AND_BIASES, decay_mask
from .over_tensor import (
    HEADS,
    DotGeneral,
    Placements,
    by_heads,
    fused_heads,
    make_placements,
    over_tensor,
    split_tokens,
    whole_rows,
)
from .vit_config import ViTConfig

_kernel_init = nnx.initializers.truncated_normal(0.02)
_token_init = nnx.initializers.normal(0.02)


class BatchNorm(nnx.BatchNorm):
    """BatchNorm in float32, with stored statistics in evaluation; returns the input's dtype.

    Statistics are over all leading dims: in a jfsdp step (program="xla") over the global batch.
    """

    def __call__(self, x: jax.Array, *args: Any, **kwargs: Any) -> jax.Array:
        return super().__call__(x, *args, **kwargs).astype(x.dtype)


class LayerNorm(nnx.Module):
    """LayerNorm with scale and bias; see `layer_norm`."""

    def __init__(self, dim: int, *, eps: float):
        self.eps = eps
        self.scale, self.bias = nnx.Param(jnp.ones((dim,), jnp.float32)), nnx.Param(jnp.zeros((dim,), jnp.float32))

    def __call__(self, x: jax.Array) -> jax.Array:
        return layer_norm(x, self.scale[...], self.bias[...], self.eps)


def _make_norm(config: ViTConfig, rngs: nnx.Rngs) -> nnx.Module:
    if config.norm == "batch":
        return BatchNorm(
            config.dim, epsilon=config.norm_eps, momentum=config.norm_momentum, use_fast_variance=False, rngs=rngs
        )
    return LayerNorm(config.dim, eps=config.norm_eps)


def _linear(num_in: int, num_out: int, rngs: nnx.Rngs, dot_general: DotGeneral = None) -> nnx.Linear:
    return nnx.Linear(num_in, num_out, kernel_init=_kernel_init, rngs=rngs, dot_general=dot_general or lax.dot_general)


def _dropout(config: ViTConfig, rngs: nnx.Rngs) -> nnx.Dropout:
    """Return dropout; with rate 0 it has no rngs, which would be unused state of the model."""
    return nnx.Dropout(config.dropout, rngs=rngs if config.dropout else None)


class PatchEmbed(nnx.Module):
    """Projection of the patches of an image, with class token and positions.

    The projection is the published convolution with stride P, written as a reshape and a matmul.
    """

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs):
        self.config = config
        self.patch = _linear(config.patch_dim, config.dim, rngs)
        has_token = config.pool == "token"
        self.class_token = nnx.Param(jnp.zeros((1, 1, config.dim), jnp.float32)) if has_token else None
        self.positions = nnx.Param(_token_init(rngs.params(), (1, config.seq_len, config.dim), jnp.float32))
        self.dropout = _dropout(config, rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Layout: [B H W C] -> [B T D]."""
        config, batch = self.config, images.shape[0]
        side, patch = config.image_size // config.patch_size, config.patch_size
        grid = images.reshape(batch, side, patch, side, patch, config.channels).swapaxes(2, 3)
        x = self.patch(grid.reshape(batch, config.num_patches, config.patch_dim).astype(self.patch.kernel.dtype))
        if self.class_token is not None:
            token = jnp.broadcast_to(self.class_token[...], (batch, 1, config.dim))
            x = jnp.concatenate([token, x], axis=1)
        return self.dropout(x + self.positions[...])


class Attention(nnx.Module):
    """Attention of every token to every token."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs, dot_general: DotGeneral = None):
        self.config, self.dot_general = config, dot_general
        self.qkv = _linear(config.dim, 3 * config.dim, rngs, dot_general)
        self.out = _linear(config.dim, config.dim, rngs, dot_general)

    def __call__(self, x: jax.Array) -> jax.Array:
        assert self.qkv.bias is not None
        parts = fused_heads(x, self.qkv.kernel[...], self.qkv.bias[...], self.config.num_heads, self.dot_general)
        query, key, value = (checkpoint_name(over_tensor(part, 2, HEADS), "qkv") for part in parts)
        kernel = partial(attend, choice=self.config.attention, is_causal=False)
        attended = by_heads(kernel, query, key, value, documents=None)
        return self.out(checkpoint_name(over_tensor(attended, 2, HEADS), "attended").reshape(x.shape))


class MLP(nnx.Module):
    """`down(gelu(up(x)))`, with the exact GELU."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs, dot_general: DotGeneral = None):
        self.up = _linear(config.dim, config.ffn_dim, rngs, dot_general)
        self.down = _linear(config.ffn_dim, config.dim, rngs, dot_general)

    def __call__(self, x: jax.Array) -> jax.Array:
        return self.down(gelu(checkpoint_name(over_tensor(self.up(x), -1), "mlp_hidden")))


class EncoderBlock(nnx.Module):
    """A block: adds attention, then the MLP, to the residual stream. The unit for sharding."""

    def __init__(self, config: ViTConfig, *, rngs: nnx.Rngs, dot_general: DotGeneral = None):
        self.norm1 = _make_norm(config, rngs)
        self.attn = Attention(config, rngs=rngs, dot_general=dot_general)
        self.norm2 = _make_norm(config, rngs)
        self.mlp = MLP(config, rngs=rngs, dot_general=dot_general)
        self.dropout1, self.dropout2 = _dropout(config, rngs), _dropout(config, rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        x = x + self.dropout1(split_tokens(self.attn(whole_rows(self.norm1(x)))))
        return x + self.dropout2(split_tokens(self.mlp(whole_rows(self.norm2(x)))))


class ViT(nnx.Module):
    """The Vision Transformer, a classifier of images.

    Like other NNX models it is created in training mode: dropout is active, and BatchNorm uses the batch. `nnx.view`
    with `deterministic=True, use_running_average=True` (or `eval()`) selects evaluation, as in `evaluation_loss`. With
    the same seed, stacked and unstacked models have the same weights.
    """

    def __init__(self, config: ViTConfig, rngs: nnx.Rngs, dot_general: DotGeneral = None):
        self.config = config
        self.embed = PatchEmbed(config, rngs=rngs)
        keys = jax.random.split(rngs.params(), config.num_layers)

        def make_block(key: jax.Array) -> EncoderBlock:
            params, dropout = jax.random.split(key)
            return EncoderBlock(config, rngs=nnx.Rngs(params=params, dropout=dropout), dot_general=dot_general)

        self.blocks = nnx.vmap(make_block)(keys) if config.stacked else nnx.List([make_block(key) for key in keys])
        self.norm = _make_norm(config, rngs)
        self.head = nnx.Linear(config.dim, config.num_classes, kernel_init=nnx.initializers.zeros, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Compute logits.

        Layout:  [B H W C] -> [B K]
        Dtype:   images of any dtype are cast to the dtype of the weights, which logits have too.

        Raises:
          ValueError: if the images do not have the configured shape.
        """
        config = self.config
        expected = (config.image_size, config.image_size, config.channels)
        if images.shape[1:] != expected:
            raise ValueError(
                f"images {tuple(images.shape)} are not [B {' '.join(map(str, expected))}]; set image_size= and "
                "channels= of ViTConfig"
            )
        x = self.norm(self._run_blocks(self.embed(images)))
        return self.head(x[:, 0] if config.pool == "token" else jnp.mean(x, axis=1))

    def _run_blocks(self, x: jax.Array) -> jax.Array:
        if isinstance(self.blocks, nnx.List):
            for block in self.blocks:
                x = block(x)
            return x

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def scan_blocks(x, block):
            return block(x)

        return scan_blocks(x, self.blocks)


def evaluation_loss(model: ViT, batch: Mapping[str, jax.Array]) -> LossSums:
    """Compute `classification_loss` without dropout and with stored batch statistics. Does not change the model."""
    modes = {"deterministic": True, "use_running_average": True}
    return classification_loss(nnx.view(model, raise_if_not_found=False, **modes), batch)


decay_of_kernels = partial(decay_mask, spared=NORMS_AND_BIASES | {"class_token", "positions"})


def adamw(learning_rate: optax.ScalarOrSchedule) -> optax.GradientTransformation:
    """Return the published AdamW (b1 0.9, b2 0.999, decay 0.1), which decays only kernels: no token or positions."""
    return optax.adamw(learning_rate, b1=0.9, b2=0.999, weight_decay=0.1, mask=decay_of_kernels)


def placements() -> Placements:
    """Return the placements of the kernels of attention and MLP, which mesh axis `tensor` cuts."""
    return make_placements(("**.attn.qkv.kernel", "**.mlp.up"), ("**.attn.out.kernel", "**.mlp.down.kernel"))
