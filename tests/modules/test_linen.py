"""Unmodified Linen models: whatever a module does in a call, sharding by unit changes no number and no dropout mask."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

import jfsdp
from tests.modules.linen_models import VOCAB, Block, Decode, Net, Seq2Seq, X, shard
from tests.modules.parity import (
    DIM,
    ROWS,
    TX,
    assert_close,
    check_linen,
    count_calls,
    data,
    flat,
    mean_square,
    plain_variables,
    refused,
    tokens,
    trace,
)
from tests.thin import thin


@pytest.mark.parametrize("kind", thin(["scan", "jit", "remat", "vmap", "list", "remat_scan", "shared"], 7))
def test_dropout_masks_and_statistics_are_those_of_the_plain_model(kind):
    model = check_linen(Net(kind), (X,), mean_square, data(), [Block], mutable=["batch_stats"])
    names = {"scan": ["layers.block"], "remat_scan": ["layers.block"], "vmap": ["experts"], "shared": ["h"]}
    assert [unit.name for unit in model.layout.units[1:]] == names.get(kind, ["h_0", "h_1"])
    assert {unit.cls for unit in model.layout.units[1:]} == {"Block"}
    assert not [name for name in model.model.state if name.startswith("losses")]


@pytest.mark.parametrize("kind", thin(["list", "jit", "scan", "vmap"]))
def test_first_parameters_are_those_of_init(kind):
    model = shard(Net(kind))
    found, wanted = model.init(TX).params, flat(plain_variables(model)["params"])
    if kind in ("list", "jit"):
        assert_close(found, wanted, rtol=0, atol=0)
    else:  # The compiler's choices inside loops may cost the last bit against a program that shards nothing.
        assert_close(found, wanted, rtol=1e-3, atol=1e-6)
        other = shard(Net(kind), strategy="ddp", mesh=jfsdp.make_mesh(devices=jax.devices()[:2])).init(TX).params
        assert_close(
            found, {name: np.asarray(other[name])[tuple(map(slice, x.shape))] for name, x in wanted.items()}, 0, 0
        )


@pytest.mark.parametrize(("kind", "calls"), [("list", {"h_0": 1, "h_1": 1}), ("shared", {"h": 2})])
def test_each_call_of_a_unit_gathers_it(kind, calls, monkeypatch):
    assert count_calls(monkeypatch, shard(Net(kind)), mean_square, data()) == {"": 1, **calls}


SENTENCE = jax.ShapeDtypeStruct((ROWS, 5), jnp.int32)
PAIR = {"source": tokens(), "target": tokens(seed=1)}


def cross_entropy(model, batch):
    return -jax.nn.log_softmax(model(batch["source"], target=batch["target"]))[..., 0].mean()


def by_methods(model, batch):
    memory = model(batch["source"], method="encode")
    _, logits = model(batch["target"], memory, method=Seq2Seq.decode)
    return -jax.nn.log_softmax(logits)[..., 0].mean()


@pytest.mark.proof  # with the tests its other methods are called
@pytest.mark.parametrize("units", [[Block, Decode, nn.Embed], [Block, Decode]], ids=["unit", "root"])
def test_encoder_decoder_with_a_tied_table_in_the_root_or_as_a_unit_of_two_methods(units):
    example = {"source": SENTENCE, "target": tokens()}
    check_linen(Seq2Seq(), example, cross_entropy, PAIR, units, mutable=["batch_stats"], steps=1)


def test_other_methods_than_call_by_name_by_function_and_as_attributes():
    def called(model, batch):
        memory = model.encode(batch["source"])
        return -jax.nn.log_softmax(model(batch["target"], memory, method=Seq2Seq.decode)[1])[..., 0].mean()

    example, units = {"source": SENTENCE, "target": tokens()}, [Block, Decode, nn.Embed]
    check_linen(Seq2Seq(), example, by_methods, PAIR, units, loss=called, mutable=["batch_stats"], steps=1)


def test_what_is_neither_a_method_nor_a_field_is_said_to_be_none():
    model = shard(Seq2Seq(), (SENTENCE, SENTENCE))
    loss = lambda model, batch: model.encoder(batch["source"]).mean()  # noqa: E731
    refused(model, loss, PAIR, "Seq2Seq", "'encoder'", error=AttributeError)


def test_a_sown_loss_of_units_has_its_gradient_and_leaves_nothing_behind():
    def with_losses(model, batch):
        out, variables = model(batch, mutable=["losses", "batch_stats"])
        return (out**2).mean() + sum(x.sum() for x in jax.tree.leaves(variables["losses"]))

    model = check_linen(Net("scan"), (X,), with_losses, data(), [Block], mutable=["batch_stats"])
    assert not [name for name in model.model.state if name.startswith("losses")]


def forward(model, fn, *inputs):
    return model.forward(fn)(model.init(TX), *inputs)


def test_captured_intermediates_and_given_rngs_are_those_of_the_plain_model():
    model = shard(Net("list"), units=[Block, nn.Dense])
    key = jax.random.key(5)

    def capture(model, x):
        return model(x, rngs={"dropout": key}, capture_intermediates=True, mutable=["batch_stats"])[1]["intermediates"]

    variables = plain_variables(model)
    options = {"rngs": {"dropout": key}, "capture_intermediates": True, "mutable": ["batch_stats"]}
    _, wanted = jax.jit(lambda variables: Net("list").apply(variables, data(), **options))(variables)
    assert_close(flat(forward(model, capture, data())), flat(wanted["intermediates"]), rtol=1e-4, atol=1e-5)


class Cached(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x + nn.MultiHeadDotProductAttention(2, decode=True)(x)


def test_decoding_token_by_token_fills_the_caches_of_units_in_python_and_in_a_scan():
    batch = data(ROWS, 2, DIM)
    model = shard(Cached(), (jax.ShapeDtypeStruct(batch.shape, jnp.float32),), [nn.MultiHeadDotProductAttention])

    def in_python(model, batch):
        return jnp.concatenate([model(batch[:, index : index + 1]) for index in range(2)], axis=1)

    def in_a_scan(model, batch):
        def step(cache, x):
            out, new = model.apply({"cache": cache}, x[:, None], mutable=["cache"])
            return new["cache"], out[:, 0]

        return jax.lax.scan(step, model.variables["cache"], batch.swapaxes(0, 1))[1].swapaxes(0, 1)

    variables, wanted = plain_variables(model), []
    apply = jax.jit(lambda variables, x: Cached().apply(variables, x, mutable=["cache"]))
    for index in range(2):
        out, new = apply(variables, batch[:, index : index + 1])
        variables = {**variables, **new}
        wanted.append(out)
    for decode in (in_python, in_a_scan):
        found = forward(model, decode, batch)
        np.testing.assert_allclose(found, np.concatenate(wanted, axis=1), rtol=1e-4, atol=1e-5)


class Setup(nn.Module):
    """Reads its weight in setup and computes with it there; its width is padded on eight devices."""

    def setup(self):
        self.table = self.param("table", nn.initializers.normal(0.1), (VOCAB, 12)) * 2.0
        self.inner = nn.Dense(DIM)

    def __call__(self, x):
        return self.inner(x @ self.table[:DIM])

    def logits(self, x):
        return x[:, :12] @ self.table.T


class SetupNet(nn.Module):
    def setup(self):
        self.first = Setup()
        self.table = nn.Embed(VOCAB, 12)

    def __call__(self, x, train=True):
        del train
        return self.first.logits(self.first(x)) + self.table.attend(x[:, :12])


def test_weights_read_in_setup_are_gathered_and_padding_is_not_seen():
    model = check_linen(SetupNet(), (X,), mean_square, data(), [Setup, nn.Embed])
    assert {leaf.path for leaf in model.layout.leaves if leaf.padding} == {"first.table", "table.embedding"}


def dtypes_seen(policy):
    seen = {}

    class Spy(nn.Module):
        @nn.compact
        def __call__(self, x):
            kernel = self.param("kernel", nn.initializers.ones, (DIM, DIM))
            count = self.variable("stats", "mean", jnp.zeros, (DIM,))
            out = x @ kernel
            seen.update(x=x.dtype, kernel=kernel.dtype, stat=count.value.dtype, out=out.dtype)
            return out

    # A cached trace must not be taken for that of another model: nn.jit keeps them by class.
    jitted = nn.jit(Spy)

    class Outer(nn.Module):
        @nn.compact
        def __call__(self, x):
            return jitted(name="spy")(x)

    def loss(model, x):
        out = model(x)
        seen["model"] = out.dtype
        return (out.astype(jnp.float32) ** 2).mean()

    def run(**options):
        seen.clear()
        model = shard(Outer(), (X,), ["spy"], mp_policy=jfsdp.MixedPrecisionPolicy(**options))
        trace(model, loss, data())
        return {name: dtype.name for name, dtype in seen.items()}

    return [run(**options) for options in policy]


def test_precision_is_cast_at_the_unit_and_no_cached_trace_serves_another_policy():
    low, mixed, high = dtypes_seen(
        [{"param_dtype": "bfloat16"}, {"param_dtype": "bfloat16", "output_dtype": "float32"}, {}]
    )
    assert low == {"x": "bfloat16", "kernel": "bfloat16", "stat": "float32", "out": "bfloat16", "model": "bfloat16"}
    assert mixed == {**low, "model": "float32"}
    assert set(high.values()) == {"float32"}
