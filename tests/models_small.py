"""A small model in NNX and Linen with awkward shapes for sharding, its loss, and its batches."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen, nnx
from jax.ad_checkpoint import checkpoint_name

import jfsdp

VOCAB = 37  # a prime, which no mesh divides


@functools.partial(jax.jit, static_argnums=(1, 2))
def spread(key, shape, dtype):
    """Return initial values with unit gain from a key; XLA compiles this in a fifth of the time of `normal`."""
    places = jnp.arange(math.prod(shape), dtype=jnp.uint32).reshape(shape)
    bits = (places ^ jax.random.key_data(key)[-1]) * jnp.uint32(2654435761)
    return ((bits >> 8) / 2**24 - 0.5).astype(dtype) * (12 / shape[0]) ** 0.5


def linear(dim_in, dim_out, rngs, **options):
    return nnx.Linear(dim_in, dim_out, rngs=rngs, kernel_init=spread, **options)


def embed(vocab, dim, rngs):
    def init(key, shape, dtype):
        return spread(key, shape[::-1], dtype).T

    return nnx.Embed(vocab, dim, rngs=rngs, embedding_init=init)


class Lookup(nnx.Module):
    """An embedding and a head: the smallest model of tokens."""

    def __init__(self, rngs):
        self.embed, self.head = embed(VOCAB, 16, rngs), linear(16, VOCAB, rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


class Scale(nnx.Module):
    """The scale of a norm without the normalization, which takes a tenth of the time to compile a step."""

    def __init__(self, dim):
        self.scale = nnx.Param(jnp.ones(dim))

    def __call__(self, x):
        return x * self.scale[...]


class Block(nnx.Module):
    def __init__(self, dim, rngs):
        self.norm = Scale(dim)
        self.up, self.down = linear(dim, 4 * dim, rngs), linear(4 * dim, dim, rngs, use_bias=False)

    def __call__(self, x):
        return x + self.down(nnx.relu(self.up(self.norm(x))))


class Tower(nnx.Module):
    """Embedding, residual blocks (stacked under a scan, or a list), head."""

    def __init__(self, rngs, stacked=True, dim=16, num_layers=3, vocab=VOCAB):
        self.stacked = stacked
        self.embed = embed(vocab, dim, rngs)
        if stacked:
            make = nnx.vmap(lambda rngs: Block(dim, rngs), in_axes=0, out_axes=0)
            self.blocks = nnx.split_rngs(splits=num_layers)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(dim, rngs) for _ in range(num_layers)])
        self.head = linear(dim, vocab, rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.stacked:
            x = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)
        else:
            for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                x = block(x)
        return self.head(x)


def token_loss(model, batch):
    """Return the weighted cross entropy; the weights are uneven between rows."""
    logits = model(batch["tokens"]).astype(jnp.float32)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]) * batch["weights"]
    right = (logits.argmax(-1) == batch["targets"]) * batch["weights"]
    return jfsdp.Loss(losses.sum(), batch["weights"].sum(), {"accuracy": right.sum()})


def make_batches(num, *, rows=16, length=6, seed=0):
    """Return batches of random tokens; the number of tokens with weight differs widely between rows."""
    rng = np.random.default_rng(seed)

    def one():
        keep = rng.random((rows, 1)) * rng.random((rows, length)) < 0.4
        tokens = rng.integers(0, VOCAB, (2, rows, length)).astype(np.int32)
        return {"tokens": tokens[0], "targets": tokens[1], "weights": keep.astype(np.float32)}

    return [one() for _ in range(num)]


class LinenScale(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x * self.param("scale", linen.initializers.ones, x.shape[-1:])


class LinenBlock(linen.Module):
    """The block in the form that `linen.scan` requires."""

    dim: int

    @linen.compact
    def __call__(self, x, _=None):
        h = checkpoint_name(LinenScale(name="norm")(x), "normed")
        h = checkpoint_name(linen.Dense(4 * self.dim, name="up")(h), "hidden")
        return x + linen.Dense(self.dim, use_bias=False, name="down")(linen.relu(h)), None


class LinenTower(linen.Module):
    """The tower in Linen: stacked under a scan, or a list."""

    stacked: bool = True
    dim: int = 16
    num_layers: int = 3

    @linen.compact
    def __call__(self, tokens):
        x = linen.Embed(VOCAB, self.dim, name="embed")(tokens)
        if self.stacked:
            kinds = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}, "length": self.num_layers}
            x, _ = linen.scan(LinenBlock, **kinds)(self.dim, name="blocks")(x, None)
        else:
            for index in range(self.num_layers):
                x, _ = LinenBlock(self.dim, name=f"blocks_{index}")(x)
        return linen.Dense(VOCAB, name="head")(x)


def linen_tower(stacked=True, num_layers=3):
    """Return the Linen tower in the form for `fully_shard` and the reference."""
    return LinenTower(stacked, num_layers=num_layers), (jax.ShapeDtypeStruct((1, 6), jnp.int32),)
