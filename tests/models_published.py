"""Models for parity tests: the models of this repository at toy size, and smaller ones with the same structure.

Each case has a factory, a loss, units and batches. The smaller models compile twice as fast, so the pairwise arrays use
them: Tower (stacked, or a list) in NNX for Llama, a Linen stack with a tied head for GPT-2, and a model with batch
statistics for the Vision Transformer.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen, nnx

import tests.models_small as small
from jfsdp_models import gpt2 as gpt2_jobs  # pyright: ignore[reportMissingImports]
from jfsdp_models import llama as llama_jobs  # pyright: ignore[reportMissingImports]
from jfsdp_models import vit as vit_jobs  # pyright: ignore[reportMissingImports]
from jfsdp_models.gpt2 import GPT2, Block  # pyright: ignore[reportMissingImports]
from jfsdp_models.gpt2_config import GPT2Config  # pyright: ignore[reportMissingImports]
from jfsdp_models.llama import DecoderLayer, Llama  # pyright: ignore[reportMissingImports]
from jfsdp_models.llama_config import LlamaConfig  # pyright: ignore[reportMissingImports]
from jfsdp_models.losses import classification_loss, loss_of_model  # pyright: ignore[reportMissingImports]
from jfsdp_models.vit import EncoderBlock, ViT  # pyright: ignore[reportMissingImports]
from jfsdp_models.vit_config import ViTConfig  # pyright: ignore[reportMissingImports]

VOCAB, LENGTH, CLASSES, IMAGE = 61, 6, 10, 8  # a prime vocabulary, which no mesh divides


@dataclasses.dataclass(frozen=True)
class Case:
    """A model for `fully_shard`, with loss, units, batches and placements."""

    source: Any
    loss: Callable
    units: list
    batch: Callable
    placements: Mapping | None = None


def tokens(rng, rows):
    ids = rng.integers(0, VOCAB, (2, rows, LENGTH)).astype(np.int32)
    keep = rng.random((rows, 1)) * rng.random((rows, LENGTH)) < 0.4
    documents = 1 + np.cumsum(rng.random((rows, LENGTH)) < 0.3, axis=1)
    is_padding = np.arange(LENGTH) >= rng.integers(1, LENGTH + 1, (rows, 1))
    packing = {"segment_ids": np.where(is_padding, 0, documents).astype(np.int32)}
    return {"tokens": ids[0], "targets": ids[1], "weights": keep.astype(np.float32)} | packing


def images(rng, rows):
    pixels = rng.standard_normal((rows, IMAGE, IMAGE, 1)).astype(np.float32)
    return {"images": pixels, "labels": rng.integers(0, CLASSES, rows).astype(np.int32)}


def llama(stacked, num_layers=2, vocab=VOCAB, token_chunk=None):
    config = LlamaConfig(
        vocab_size=vocab,
        dim=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=40,
        tied=False,
        stacked=stacked,
        attention="xla",
        loss_chunk=4,
        token_chunk=token_chunk,
    )
    placements = llama_jobs.placements(config) | ({"embed": None, "lm_head": None} if vocab == VOCAB else {})
    return Case(lambda rngs: Llama(config, rngs), loss_of_model, [DecoderLayer], tokens, placements)


def gpt2(stacked=True, dropout=0.0, vocab=VOCAB):
    config = GPT2Config(
        vocab_size=vocab,
        num_positions=8,
        dim=24,
        num_layers=2,
        num_heads=4,
        dropout=dropout,
        attention_dropout=dropout,
        stacked=stacked,
        attention="xla",
        loss_chunk=4,
    )

    def loss(model, batch):
        return loss_of_model(model, batch, deterministic=dropout == 0)

    return Case(
        (GPT2(config), (jax.ShapeDtypeStruct((1, 1), jnp.int32),)), loss, [Block], tokens, gpt2_jobs.placements(config)
    )


def vit(norm="batch", pool="token", dropout=0.0):
    config = ViTConfig(
        image_size=IMAGE,
        channels=1,
        patch_size=4,
        num_classes=CLASSES,
        dim=24,
        num_layers=2,
        num_heads=4,
        ffn_dim=40,
        norm=norm,
        pool=pool,
        dropout=dropout,
        attention="xla",
    )
    return Case(lambda rngs: ViT(config, rngs), classification_loss, [EncoderBlock], images, vit_jobs.placements())


class TiedTower(linen.Module):
    """A stack with the embedding as head, like GPT-2."""

    @linen.compact
    def __call__(self, tokens):
        embed = linen.Embed(VOCAB, 24, name="embed")
        kinds: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": 2}
        x, _ = linen.scan(small.LinenBlock, **kinds)(24, name="blocks")(embed(tokens), None)
        return embed.attend(x)


class NormBlock(nnx.Module):
    """A block with batch statistics, like the Vision Transformer's with BatchNorm."""

    def __init__(self, rngs):
        self.norm = nnx.BatchNorm(24, rngs=rngs)
        self.up = nnx.Linear(24, 40, rngs=rngs)
        self.down = nnx.Linear(40, 24, rngs=rngs)

    def __call__(self, x):
        return x + self.down(jax.nn.gelu(self.up(self.norm(x))))


class NormTower(nnx.Module):
    def __init__(self, rngs):
        self.patch = nnx.Linear(IMAGE, 24, rngs=rngs)
        self.blocks = nnx.List([NormBlock(rngs) for _ in range(2)])
        self.head = nnx.Linear(24, CLASSES, rngs=rngs)

    def __call__(self, pixels):
        x = self.patch(pixels[..., 0])
        for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
            x = block(x)
        return self.head(x.mean(1))


def tower(stacked, num_layers=2):
    def source(rngs):
        return small.Tower(rngs, stacked, dim=24, num_layers=num_layers, vocab=VOCAB)

    return Case(source, small.token_loss, [small.Block], tokens)


# The deep models have enough layers that prefetching leaves loops with equal iterations.
MODELS = {"llama": llama(True), "llama-list": llama(False), "gpt2": gpt2(), "vit": vit()}
PUBLISHED = tuple(MODELS)
MODELS |= {
    "tower": tower(True),
    "tower-list": tower(False),
    "tied": Case(
        (TiedTower(), (jax.ShapeDtypeStruct((1, 1), jnp.int32),)), small.token_loss, [small.LinenBlock], tokens
    ),
    "norm": Case(NormTower, classification_loss, [NormBlock], images),
}
SMALL = tuple(MODELS)[len(PUBLISHED) :]
MODELS |= {"llama-deep": llama(True, num_layers=6), "tower-deep": tower(True, num_layers=6)}
MODELS |= {"llama-chunks": llama(True, num_layers=6, token_chunk=3), "llama-chunks-list": llama(False, token_chunk=2)}
# Vocabularies that a mesh axis divides, and images whose number of tokens it divides.
CUT = {"llama-cut": llama(True, num_layers=1, vocab=64), "gpt2-cut": gpt2(vocab=64), "vit-cut": vit("layer", "mean")}
CUT |= {"vit-odd": vit("layer"), "llama-chunks-cut": llama(True, vocab=64, token_chunk=2)}
MODELS |= CUT


def batches(model, num, rows, seed=0):
    """Return `num` batches for the model with this name."""
    rng = np.random.default_rng(seed)
    return [MODELS[model].batch(rng, rows) for _ in range(num)]
