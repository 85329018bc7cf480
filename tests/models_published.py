"""The models of this repository at toy size, with what a parity case needs: factory, loss, units, batches."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp_models.gpt2 import GPT2, Block  # pyright: ignore[reportMissingImports]
from jfsdp_models.gpt2_config import GPT2Config  # pyright: ignore[reportMissingImports]
from jfsdp_models.llama import DecoderLayer, Llama  # pyright: ignore[reportMissingImports]
from jfsdp_models.llama_config import LlamaConfig  # pyright: ignore[reportMissingImports]
from jfsdp_models.losses import classification_loss, next_token_loss  # pyright: ignore[reportMissingImports]
from jfsdp_models.vit import EncoderBlock, ViT  # pyright: ignore[reportMissingImports]
from jfsdp_models.vit_config import ViTConfig  # pyright: ignore[reportMissingImports]

VOCAB, LENGTH, CLASSES, IMAGE = 61, 6, 10, 8  # a prime vocabulary: divides by no mesh


@dataclasses.dataclass(frozen=True)
class Case:
    """A model as `fully_shard` takes it, its loss and units, and batches for it."""

    source: Any
    loss: Callable
    units: list
    batch: Callable


def tokens(rng, rows):
    ids = rng.integers(0, VOCAB, (2, rows, LENGTH)).astype(np.int32)
    keep = rng.random((rows, 1)) * rng.random((rows, LENGTH)) < 0.4
    return {"tokens": ids[0], "targets": ids[1], "weights": keep.astype(np.float32)}


def images(rng, rows):
    pixels = rng.standard_normal((rows, IMAGE, IMAGE, 1)).astype(np.float32)
    return {"images": pixels, "labels": rng.integers(0, CLASSES, rows).astype(np.int32)}


def llama(stacked, num_layers=2):
    config = LlamaConfig(
        vocab_size=VOCAB,
        dim=24,
        num_layers=num_layers,
        num_heads=4,
        num_kv_heads=2,
        ffn_dim=40,
        tied=False,
        stacked=stacked,
        attention="xla",
    )
    return Case(lambda rngs: Llama(config, rngs), next_token_loss, [DecoderLayer], tokens)


def gpt2(stacked=True, dropout=0.0):
    config = GPT2Config(
        vocab_size=VOCAB,
        num_positions=8,
        dim=24,
        num_layers=2,
        num_heads=4,
        dropout=dropout,
        attention_dropout=dropout,
        stacked=stacked,
        attention="xla",
    )

    def loss(model, batch):
        return next_token_loss(model, batch, deterministic=dropout == 0)

    return Case((GPT2(config), (jax.ShapeDtypeStruct((1, 1), jnp.int32),)), loss, [Block], tokens)


def vit():
    config = ViTConfig(
        image_size=IMAGE,
        channels=1,
        patch_size=4,
        num_classes=CLASSES,
        dim=24,
        num_layers=2,
        num_heads=4,
        ffn_dim=40,
        norm="batch",
        dropout=0.0,
        attention="xla",
    )
    return Case(lambda rngs: ViT(config, rngs), classification_loss, [EncoderBlock], images)


MODELS = {"llama": llama(True), "llama-list": llama(False), "gpt2": gpt2(), "vit": vit()}
PUBLISHED = tuple(MODELS)
MODELS["llama-deep"] = llama(True, num_layers=6)  # deep enough for loops that prefetch leaves some iterations alike


def batches(model, num, rows, seed=0):
    """Return `num` batches for a model by name."""
    rng = np.random.default_rng(seed)
    return [MODELS[model].batch(rng, rows) for _ in range(num)]
