"""Models that do not follow the rules for rows over several devices are refused, with the rule."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from tests.refusals import refuses, warning
from tests.sharding import fully_shard

DIM, TOKENS = 16, 8
TX = optax.sgd(0.1)


class Net(nnx.Module):
    """One layer of attention with learned positions, all by the rules."""

    def __init__(self, rngs, heads=4):
        self.heads = heads
        self.embed, self.place = nnx.Embed(32, DIM, rngs=rngs), nnx.Embed(TOKENS, DIM, rngs=rngs)
        self.qkv, self.head = nnx.Linear(DIM, 3 * DIM, rngs=rngs), nnx.Linear(DIM, 32, rngs=rngs)
        self.conv = nnx.Conv(DIM, DIM, kernel_size=3, padding="CAUSAL", rngs=rngs)

    def positions(self, tokens):
        return jfsdp.positions(tokens)

    def attend(self, query, key, value):
        return jfsdp.attention(query, key, value)

    def mix(self, x):
        return x

    def __call__(self, tokens):
        x = self.mix(self.embed(tokens) + self.place(self.positions(tokens)))
        parts = jnp.split(self.qkv(x).reshape(*tokens.shape, self.heads, -1), 3, axis=-1)
        return self.head(x + self.attend(*parts).reshape(x.shape))


class LocalPositions(Net):
    def positions(self, tokens):
        return jnp.arange(tokens.shape[1])[None]


class LocalAttention(Net):
    def attend(self, query, key, value):
        return jax.nn.dot_product_attention(query, key, value, is_causal=True)


class Convolution(Net):
    def mix(self, x):
        return self.conv(x)


class TokenShift(Net):
    def mix(self, x):
        return x + jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


class LocalMask(Net):
    def attend(self, query, key, value):
        mask = jnp.tril(jnp.ones((1, 1, query.shape[1], query.shape[1]), bool))
        return jfsdp.over_context(jax.nn.dot_product_attention)(query, key, value, mask=mask)


def with_dropout(query, key, value, dropout_rate=0.0, deterministic=False):
    return jax.nn.dot_product_attention(query, key, value) * (1 - dropout_rate * (not deterministic))


class AttentionDropout(Net):
    def attend(self, query, key, value):
        return jfsdp.over_context(with_dropout)(query, key, value, dropout_rate=0.1, deterministic=False)


class OtherRows(Net):
    def attend(self, query, key, value):
        return jfsdp.over_context(jax.nn.dot_product_attention)(query, key[:, ::2], value[:, ::2])


def loss_fn(model, batch):
    logits = model(batch["tokens"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    return jfsdp.Loss(losses.sum(), jnp.sum(jnp.ones(losses.shape)))


def make_batch(tokens=TOKENS, **more):
    ids = np.random.default_rng(0).integers(0, 32, (4, tokens)).astype(np.int32)
    return {"tokens": ids, "targets": np.roll(ids, -1, axis=1), **more}


def run(source: Any = Net, batch=None, mesh=None, **options):
    made = jfsdp.make_mesh(**(mesh or {"fsdp": 2, "context": 4}), devices=jax.devices()[:8])
    model = fully_shard(source, mesh=made, min_size=0, units=["qkv"])
    return model.train_step(loss_fn, TX, **options)(model.init(TX), batch or make_batch())


BROKEN = {
    LocalPositions: ["jfsdp.positions", "'context' (size 4)", "2 tokens", "test_rules.py"],
    LocalAttention: ["no attention is jfsdp.attention", "jfsdp.over_context", "check_loss=False"],
    Convolution: ["conv_general_dilated", "2 tokens", "jfsdp.whole_rows"],
    TokenShift: ["jfsdp.whole_rows", "test_rules.py"],
    LocalMask: ["mask", "'context' (size 4)", "segment_ids="],
    AttentionDropout: ["dropout_rate=0.1", "'context' (size 4)"],
    OtherRows: ["key", "4, 4, 4)", "8, 4, 4)", "jfsdp.whole_rows"],
}


@pytest.mark.parametrize("source", BROKEN, ids=lambda source: source.__name__)
def test_a_model_that_breaks_a_rule_is_refused_by_that_rule(source):
    refuses(functools.partial(run, source, program="manual"), *BROKEN[source])


@pytest.mark.parametrize("program", ["manual", "xla"])
def test_the_model_by_the_rules_trains(program):
    assert np.isfinite(float(run(program=program)[1]["loss"]))


def test_what_context_cannot_split_is_refused_by_size():
    refuses(
        lambda: run(batch=make_batch(6)), "batch['targets']", "dim 1 (size 6)", "'context' (size 4)", "multiple of 4"
    )
    images = np.zeros((4, 12, 3), np.float32)
    refuses(lambda: run(batch=make_batch(images=images)), "batch['images']", "12", "8", "'context' (size 4)")
    for heads, program in ((2, "manual"), (2, "xla")):
        source = functools.partial(Net, heads=heads)
        refuses(lambda source=source, program=program: run(source, program=program), "2 heads", "(size 4)", "1, 2")
    refuses(lambda: run(mesh={"pipe": 2, "context": 4}), "'context' (size 4)", "'pipe' (size 2)", "'fsdp'")
    refuses(lambda: jfsdp.make_mesh(cp=2), "'cp'", "'context'")
    refuses(lambda: jfsdp.attention(*[jnp.zeros((1, 4, 2, 4))] * 3, causal=False, window=2), "window=2", "causal=False")


def test_attention_over_hosts_is_told(monkeypatch):
    monkeypatch.setattr("jfsdp.layout.mesh.hosts", lambda devices: tuple(range(len(devices))))
    with warning("'context' (size 4)", "hosts", "bytes"):
        run()
