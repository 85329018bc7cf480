"""Linen models with what a module may do in a call, and the loss that most tests take."""

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from tests.modules.parity import DIM, ROWS
from tests.sharding import fully_shard

VOCAB = 37  # prime: padded on every mesh
X = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)


class Block(nn.Module):
    """Dropout, batch statistics, a sown loss."""

    @nn.compact
    def __call__(self, x, train=True):
        h = nn.relu(nn.Dense(2 * DIM, name="up")(x))
        h = nn.BatchNorm(use_running_average=not train, momentum=0.9, name="norm")(h)
        self.sow("losses", "balance", (h**2).mean())
        return x + nn.Dropout(0.3, deterministic=not train)(nn.Dense(DIM, use_bias=False, name="down")(h))


class Carry(nn.Module):
    """A block as nn.scan wants it."""

    train: bool

    @nn.compact
    def __call__(self, x, _):
        return Block(name="block")(x, self.train), None


AXES: Any = {"params": 0, "batch_stats": 0, "losses": 0}
SPLIT: Any = {"params": True, "dropout": True}
BOTH: Any = (None, None)


class Net(nn.Module):
    kind: str = "list"

    @nn.compact
    def __call__(self, x, train=True):
        x = nn.Dense(DIM, name="inlet")(x)
        if self.kind in ("scan", "remat_scan"):
            body = nn.remat(Carry, prevent_cse=False) if self.kind == "remat_scan" else Carry
            stack = nn.scan(body, variable_axes=AXES, split_rngs=SPLIT, length=3)
            x, _ = stack(train, name="layers")(x, None)
        elif self.kind == "shared":
            block = Block(name="h")
            x = block(block(x, train), train)
        elif self.kind == "vmap":
            many = nn.vmap(Block, in_axes=BOTH, variable_axes=AXES, split_rngs=SPLIT, axis_size=3)
            x = many(name="experts")(x, train).mean(0)
        else:
            lift = {"list": lambda cls: cls, "remat": nn.remat, "jit": nn.jit}[self.kind]
            cls = Block if self.kind == "list" else lift(Block, static_argnums=(2,))  # type: ignore[operator]
            for index in range(2):
                x = cls(name=f"h_{index}")(x, train)
        return nn.Dense(3)(x)


def shard(module, example=(X,), units=(Block,), **options):
    return fully_shard((module, example), units=units, min_size=1, **options)


class Decode(nn.Module):
    """A unit with a unit inside, keyword inputs, and a submodule that was handed in."""

    embed: nn.Module

    def setup(self):
        self.attention = nn.MultiHeadDotProductAttention(2, dropout_rate=0.2, deterministic=False)
        self.block = Block()

    def __call__(self, x, *, memory):
        x = self.block(x + self.attention(x, memory))
        return x, self.embed.attend(x)


class Seq2Seq(nn.Module):
    """An encoder and a decoder made in setup, around one table that both use, with methods of their own."""

    def setup(self):
        self.embed = nn.Embed(VOCAB, DIM)
        self.encoder = [Block()]
        self.decoder = Decode(self.embed)

    def encode(self, source):
        x = self.embed(source)
        for layer in self.encoder:
            x = layer(x)
        return x

    def decode(self, target, memory):
        return self.decoder(self.embed(target), memory=memory)

    def __call__(self, source, target):
        return self.decode(target, self.encode(source))[1]
