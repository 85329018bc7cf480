"""Models that do not follow the rules for rows over several devices are refused, with the rule."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

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


class PackedLocalAttention(LocalAttention):
    """It gathers segment ids, but no activations."""

    def positions(self, tokens):
        return jfsdp.positions(tokens, tokens // 16) % TOKENS


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


def run(source: Any = Net, batch=None, mesh=None, loss=loss_fn, placements=None, **options):
    made = jfsdp.make_mesh(**(mesh or {"fsdp": 2, "context": 4}), devices=jax.devices()[:8])
    model = fully_shard(source, mesh=made, min_size=0, units=["qkv"], placements=placements)
    return model.train_step(loss, TX, **options)(model.init(TX), batch or make_batch())


BROKEN = {
    LocalPositions: ["jfsdp.positions", "'context' (size 4)", "2 tokens", "test_rules.py"],
    LocalAttention: ["no attention is jfsdp.attention", "jfsdp.over_context", "check_loss=False"],
    PackedLocalAttention: ["no attention is jfsdp.attention", "jfsdp.over_context"],
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


def with_noise(model, batch):
    draw = jax.vmap(lambda key: jax.random.uniform(key, (batch["tokens"].shape[1], 32)))
    losses = optax.softmax_cross_entropy_with_integer_labels(
        model(batch["tokens"]) + draw(batch["keys"]), batch["targets"]
    )
    return jfsdp.Loss(losses.sum(), jnp.sum(jnp.ones(losses.shape)))


def test_random_keys_of_rows_would_repeat_their_draws_along_a_row():
    batch = make_batch(keys=jax.random.split(jax.random.key(0), 4))
    refuses(lambda: run(batch=batch, loss=with_noise, program="manual"), "random keys", "state")
    run(batch=batch, loss=with_noise, program="xla")


def by_rows(model, batch):
    """The loss of each row: the mean over its tokens on this device."""
    total = jnp.sum(loss_fn(model, batch).total / batch["tokens"].shape[1] + 0 * batch["weights"])
    return jfsdp.Loss(total, batch["weights"].sum())


def test_weights_that_count_rows_are_refused():
    def count_rows(model, batch):
        return jfsdp.Loss(loss_fn(model, batch).total, batch["tokens"].shape[0])

    refuses(lambda: run(loss=count_rows, program="manual"), "weight", "is 4 for any number of tokens")
    batch = make_batch(weights=np.ones(4, np.float32))
    refuses(lambda: run(loss=by_rows, batch=batch, program="manual"), "[B]", "4 devices", "'context'")


def test_heads_of_keys_must_fit_axis_tensor():
    class FewKeys(Net):
        by = ""

        def attend(self, query, key, value):
            return jfsdp.attention(query, key[:, :, :1], value[:, :, :1], context_by=self.by)

    cuts = {"qkv.kernel": P(None, "tensor"), "conv.kernel": P(None, None, "tensor"), "**.embedding": P(None, "tensor")}
    for by in ("heads", "keys"):
        source = functools.partial(run, type(by, (FewKeys,), {"by": by}), placements=cuts)
        with pytest.warns(UserWarning, match="tensor"):
            refuses(lambda: source(mesh={"fsdp": 2, "context": 2, "tensor": 2}), "1 heads", "'tensor' (size 2)")  # noqa: B023


def scores(query, key):
    return jnp.einsum("bqha,bkha->bhqk", query, key) / query.shape[-1] ** 0.5


def by_slopes(query, key, value):
    bias = 2.0 ** -jnp.arange(query.shape[2])[:, None, None] * jnp.arange(query.shape[1])
    return jnp.einsum("bhqk,bkha->bqha", jax.nn.softmax(scores(query, key) - bias), value)


def by_pairs(query, key, value):
    one, other = jnp.split(jax.nn.dot_product_attention(query, key, value), 2, axis=2)
    return jnp.concatenate([one - 0.5 * other, other], axis=2)


def over_all(query, key, value):
    found = jax.nn.dot_product_attention(query, key, value)
    return found / jnp.sqrt(jnp.mean(found**2, axis=(2, 3), keepdims=True) + 1e-6)


def mixed(query, key, value):
    return jax.nn.dot_product_attention(jnp.einsum("bthA,hg->btgA", query, jnp.ones([query.shape[2]] * 2)), key, value)


def by_constants(query, key, value):
    return jax.nn.dot_product_attention(query * np.arange(query.shape[2])[:, None], key, value)


def by_gather(query, key, value):
    return jax.nn.dot_product_attention(query[:, :, jnp.zeros(query.shape[2], int)], key, value)


def by_noise(query, key, value):
    noise = jax.random.normal(jax.random.key(0), query.shape[2:])
    return jax.nn.dot_product_attention(query + noise, key, value)


def apart(query, key, value):
    """Heads by vmap, and keys repeated for them."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    one = lambda q, k, v: jax.nn.softmax(q @ k.T, axis=-1) @ v  # noqa: E731
    return jax.vmap(jax.vmap(one, in_axes=1, out_axes=1))(query, key, value)


@pytest.mark.parametrize("program", ["manual", "xla"])
@pytest.mark.parametrize(
    ("attend", "operation"),
    [
        (by_slopes, "iota"),
        (by_pairs, "split"),
        (over_all, "reduce_sum"),
        (mixed, "dot_general"),
        (apart, None),
        (by_constants, "array"),
        (by_gather, "gather"),
        (by_noise, "random_bits"),
    ],
    ids=lambda value: getattr(value, "__name__", None),
)
def test_attention_that_does_not_compute_heads_alike_and_apart_is_refused(attend, operation, program):
    attend = staticmethod(jfsdp.over_context(attend))
    source: Any = type("OfHeads", (Net,), {"attend": attend})
    if operation is None:
        assert np.isfinite(float(run(source, program=program)[1]["loss"]))
    else:
        refuses(lambda: run(source, program=program), operation, "heads of one device")


def test_rows_may_be_trees():
    def attend(query, key, value, rows):
        return jax.nn.dot_product_attention(query * rows["scale"][:, None, None, None], key, value)

    class WithRows(Net):
        def attend(self, query, key, value):
            return jfsdp.over_context(attend)(query, key, value, {"scale": jnp.ones(query.shape[0])})

    assert np.isfinite(float(run(WithRows, program="manual")[1]["loss"]))


def test_attention_that_xla_does_not_split_is_told():
    with warning("'context' (size 4)", "jfsdp.attention", "every device"):
        run(LocalAttention, program="xla")


@jax.jit
def shared(query, key, value, by):
    """A helper that the steps of several models share: JAX traces it once per context."""
    return jfsdp.whole_rows(query) + by


class ByHeads(Net):
    by = "heads"

    def attend(self, query, key, value):
        mixed = jfsdp.attention(query, key, value, context_by=self.by)
        return mixed + jnp.cumsum(shared(query, key, value, 0.0), axis=1).mean(axis=1, keepdims=True)


class ByKeys(ByHeads):
    by = "keys"


@pytest.mark.parametrize("order", [(ByHeads, ByKeys), (ByKeys, ByHeads)], ids=["heads", "keys"])
def test_a_jitted_helper_follows_the_order_of_its_rows(order):
    jax.clear_caches()
    losses = [float(run(source, program="manual", check_loss=False)[1]["loss"]) for source in order]
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)


def test_by_keys_documents_are_runs_of_ids_everywhere():
    ids = jnp.array([[1, 1, 2, 2, 1, 1, 0, 0]])
    arrays = [jax.random.normal(key, (1, 8, 2, 4)) for key in jax.random.split(jax.random.key(0), 3)]
    by_ids, by_runs = (jfsdp.attention(*arrays, segment_ids=x) for x in (ids, jnp.array([[0, 0, 1, 1, 2, 2, 3, 3]])))
    np.testing.assert_array_equal(jfsdp.attention(*arrays, segment_ids=ids, context_by="keys"), by_runs)
    assert np.abs(by_ids - by_runs).max() > 0.01


def test_by_keys_a_device_needs_an_even_number_of_tokens():
    class Keys(Net):
        def attend(self, query, key, value):
            return jfsdp.attention(query, key, value, context_by="keys")

    for program in ("manual", "xla"):
        refuses(lambda program=program: run(Keys, make_batch(4), program=program), "1 tokens", "divisible by 8")


def test_values_of_rows_have_no_tokens_to_gather():
    refuses(lambda: jfsdp.whole_rows(jnp.zeros(4)), "whole_rows", "(4,)")


def test_attention_over_hosts_is_told(monkeypatch):
    monkeypatch.setattr("jfsdp.layout.mesh.hosts", lambda devices: tuple(range(len(devices))))
    with warning("'context' (size 4)", "hosts", "bytes"):
        run()
