"""Unmodified NNX models: whatever a module may do in a call, sharding by unit changes no number."""

import functools
from typing import Any

import flax
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from jfsdp.modules.nnx import NNXModel
from jfsdp.modules.nnx_unit import hooked_methods
from tests.modules import parity
from tests.modules.parity import (
    DIM,
    ROWS,
    TX,
    check_nnx,
    count_calls,
    data,
    mean_square,
    refused,
    tokens,
    train_sharded,
)
from tests.refusals import refuses, refusing
from tests.sharding import fully_shard
from tests.thin import thin

VOCAB = 37  # prime: padded on every mesh


class Block(nnx.Module):
    """Two methods, keyword inputs, dropout, batch statistics, and a sown value."""

    def __init__(self, rngs):
        self.up = nnx.Linear(DIM, 2 * DIM, rngs=rngs)
        self.down = nnx.Linear(2 * DIM, DIM, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=0.9, rngs=rngs)
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def mix(self, x, *, other=None, scale=1.0):
        h = jnp.tanh(self.up(x if other is None else x + other))
        return x + scale * self.dropout(self.down(h))

    def __call__(self, x):
        return self.norm(self.mix(x))


class Net(nnx.Module):
    def __init__(self, rngs, cls: Any = Block, kind="list"):
        self.kind = kind
        if kind == "scan":
            self.layers = nnx.split_rngs(splits=3)(nnx.vmap(cls, in_axes=0, out_axes=0))(rngs)
        else:
            self.layers = nnx.List([cls(rngs) for _ in range(2)])
        self.head = nnx.Linear(DIM, 3, rngs=rngs)

    def __call__(self, x):
        if self.kind == "scan":
            x = nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        elif self.kind == "shared":
            first, second = self.layers
            x = first(second(first(x)))
        elif self.kind == "methods":
            first, second = self.layers
            x = first.mix(x, other=second.mix(x, scale=0.5))
        else:
            for layer in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
                x = layer(x)
        return self.head(x)


@pytest.mark.parametrize("kind", thin(["scan", "list", "methods", "shared"]))
def test_dropout_statistics_methods_and_keywords_are_those_of_the_plain_model(kind):
    check_nnx(lambda rngs: Net(rngs, kind=kind), mean_square, data(), [Block])


class Seq2Seq(nnx.Module):
    """An encoder and a decoder around one table of embeddings, which also gives the logits."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.encoder = nnx.List([Block(rngs)])
        self.decoder = nnx.List([Cross(rngs)])

    def encode(self, source):
        x = self.embed(source)
        for layer in self.encoder:  # pyright: ignore[reportGeneralTypeIssues]
            x = layer(x)
        return x

    def __call__(self, source, target):
        memory, x = self.encode(source), self.embed(target)
        for layer in self.decoder:  # pyright: ignore[reportGeneralTypeIssues]
            x = layer(x, memory=memory)
        return self.embed.attend(x)


class Cross(nnx.Module):
    """A block with a unit inside, and two inputs."""

    def __init__(self, rngs):
        self.attention = nnx.MultiHeadAttention(2, DIM, decode=False, rngs=rngs)
        self.inner = Block(rngs)

    def __call__(self, x, memory):
        return self.inner(x + self.attention(x, memory))


def cross_entropy(model, batch):
    logits = model(batch["source"], target=batch["target"])
    return -jax.nn.log_softmax(logits)[..., 0].mean()


@pytest.mark.parametrize("units", thin([[Block, Cross, nnx.Embed], [Block, Cross]]), ids=["unit", "root"])
def test_encoder_decoder_with_a_tied_table_in_the_root_or_as_a_unit_of_two_methods(units):
    check_nnx(Seq2Seq, cross_entropy, {"source": tokens(), "target": tokens(seed=1)}, units)


def test_each_call_of_a_unit_gathers_it_once_and_nothing_twice(monkeypatch):
    model = fully_shard(Seq2Seq, units=[Block, Cross, nnx.Embed], min_size=1)
    counts = count_calls(monkeypatch, model, cross_entropy, {"source": tokens(), "target": tokens(seed=1)})
    once = ["encoder.0", "decoder.0", "decoder.0.inner"]
    assert counts == {"": 1, "embed": 3, **dict.fromkeys(once, 1)}


class Sower(nnx.Module):
    """What a mixture of experts does: a loss of its own per layer, left in the module."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        x = jnp.tanh(self.linear(x))
        self.sow(nnx.Intermediate, "balance", (x**2).mean())
        return x


def popped(model, batch):
    out = model(batch)
    return (out**2).mean() + sum(x.sum() for x in jax.tree.leaves(nnx.pop(model, nnx.Intermediate)))


def captured(model, batch):
    out, sown = nnx.capture(model, nnx.Intermediate)(batch)
    return (out**2).mean() + sum(x.sum() for x in jax.tree.leaves(sown))


@pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
@pytest.mark.parametrize(
    ("kind", "loss"),
    thin(
        [
            ("shared", popped),
            ("scan", popped),
            ("scan", captured),
            ("shared", captured),
            ("shared", mean_square),
            ("scan", mean_square),
        ],
        4,
    ),
)
def test_values_sown_in_units_reach_the_loss_and_are_dropped_at_the_end(kind, loss):
    check_nnx(lambda rngs: Net(rngs, Sower, kind), loss, data(), [Sower], steps=1)


class Lazy(nnx.Module):
    """Makes its cache when first called."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        if not hasattr(self, "cache"):
            self.cache = nnx.Cache(jnp.zeros_like(x))
        self.cache[...] += self.linear(x)
        return self.cache[...]


def test_a_cache_made_by_a_call_is_there_for_the_next_and_must_be_popped():
    def twice(model, batch):
        out = (model(batch) * model(batch)).mean()
        nnx.pop(model, nnx.Cache)
        return out

    check_nnx(lambda rngs: Net(rngs, Lazy), twice, data(), [Lazy], steps=1)
    model = fully_shard(lambda rngs: Net(rngs, Lazy), units=[Lazy], min_size=1)
    refused(model, mean_square, data(), "layers.0.cache", "layers.1.cache")


class Decoder(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.MultiHeadAttention(2, DIM, decode=True, rngs=rngs) for _ in range(2)])
        for layer in self.layers:
            layer.init_cache((ROWS, 2, DIM))

    def __call__(self, x):
        for layer in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = x + layer(x)
        return x


def test_decoding_token_by_token_fills_the_caches_of_units():
    def decode(model, batch):
        return jnp.concatenate([model(batch[:, index : index + 1]) for index in range(2)], axis=1)

    batch = data(ROWS, 2, DIM)
    model = fully_shard(Decoder, units=[nnx.MultiHeadAttention], min_size=1)
    wanted = nnx.jit(lambda: decode(Decoder(nnx.Rngs(0)), batch))()
    np.testing.assert_allclose(model.forward(decode)(model.init(TX), batch), wanted, rtol=1e-5, atol=1e-6)


def test_a_parameter_made_by_a_call_is_refused_by_name():
    class Maker(Lazy):
        def __call__(self, x):
            self.made = nnx.Param(jnp.ones(DIM))
            return super().__call__(x)

    model = fully_shard(lambda rngs: Net(rngs, Maker), units=[Maker], min_size=1)
    refused(model, mean_square, data(), "'layers.0'", "'made'", "__init__")


def weight(layer):
    return layer.up.kernel[...]


@pytest.mark.parametrize(
    ("loss", "facts"),
    [
        (
            lambda model, x: mean_square(model, x) + weight(model.layers[0]).sum(),
            ["layers.0.up.kernel", "weight decay"],
        ),
        (lambda model, x: model.layers[0].up(x).mean(), ["layers.0.up.", "unit"]),
        (lambda model, x: Block.mix(model.layers[0], x).mean(), ["layers.0.up", "module.method(x)", "Class.method"]),
    ],
    ids=["a weight", "a layer", "a method of the class"],
)
def test_what_is_taken_out_of_a_unit_is_refused_by_name(loss, facts):
    model = fully_shard(Net, units=[Block], min_size=1)
    refused(model, loss, data(), *facts)
    parity.trace(model, lambda model, x: model.layers[0].mix(x).mean(), data())


def test_switches_and_static_methods_of_a_unit_are_left_alone():
    class Helped(Block):
        @staticmethod
        def halve(x):
            return x / 2

        @property
        def width(self):
            return DIM

    def loss(model, batch):
        model.eval()
        layer = model.layers[0]
        return (model(layer.halve(batch)) ** 2).mean() * layer.width

    check_nnx(lambda rngs: Net(rngs, Helped), loss, data(), [Helped], steps=1)


def test_parameters_know_their_variable_types():
    model = NNXModel(lambda rngs: nnx.LoRALinear(DIM, DIM, lora_rank=2, rngs=rngs))
    assert {name: cls.__name__ for name, cls in model.types.items()} == {
        "bias": "Param",
        "kernel": "Param",
        "lora.lora_a": "LoRAParam",
        "lora.lora_b": "LoRAParam",
    }


def test_two_parameters_of_one_name_are_refused():
    class Twice(nnx.Module):
        def __init__(self, rngs):
            self.inner = nnx.Dict({"a.b": nnx.Param(jnp.ones(3)), "a": nnx.Dict(b=nnx.Param(jnp.zeros(3)))})

    with refusing("inner.a.b", "'.'"):
        fully_shard(Twice)


def test_a_factory_that_makes_no_module_is_refused():
    refuses(lambda: NNXModel(lambda rngs: {}), "nnx", error=TypeError)


class Plain(nnx.Module, pytree=False):
    """A module that is no pytree, so that it may hold its layers in a plain list."""

    def __init__(self, rngs):
        self.layers = [Block(rngs)]

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


class Nested(nnx.Module, pytree=False):
    def __init__(self, rngs):
        self.stages = [Plain(rngs), Plain(rngs)]

    def __call__(self, x):
        for stage in self.stages:
            x = stage(x)
        return x


@pytest.mark.parametrize(("factory", "unit"), thin([(Nested, Plain), (Plain, Block)]))
def test_modules_that_are_no_pytrees_keep_their_lists(factory, unit):
    """As the root, and as units."""
    check_nnx(factory, mean_square, data(), [unit], steps=1)


class Masked(nnx.Module):
    """Holds bare arrays, one of them in a dict and one in a list, which a call reads."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.mask = jnp.arange(DIM) % 2.0
        self.tables = nnx.data({"shift": jnp.arange(DIM) / DIM, "scales": [jnp.full((), 2.0)]})

    def __call__(self, x):
        return self.linear(x) * self.mask * self.tables["scales"][0] + self.tables["shift"]


class MaskedNet(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Masked(rngs), Masked(rngs)])

    def __call__(self, x):
        for layer in self.layers:
            x = layer(x)
        return x


def test_bare_arrays_of_a_factory_are_state_as_they_are_of_an_instance():
    instance = MaskedNet(nnx.Rngs(jax.random.key(0)))
    names = {"mask", "tables.shift", "tables.scales.0"}
    assert {f"layers.{i}.{name}" for i in range(2) for name in names} <= set(NNXModel(instance).state)
    states, losses = [], []
    for source in (MaskedNet, instance):
        model = fully_shard(source, units=[Masked], min_size=1)
        found, state = train_sharded(model, mean_square, [data()] * 2)
        states.append(state.model_state)
        losses.append(found)
    np.testing.assert_allclose(losses[0], losses[1], rtol=1e-5)
    assert states[0].keys() == states[1].keys()
    np.testing.assert_array_equal(states[0]["layers.1.mask"], np.arange(DIM) % 2.0)


def compute(module, x, scale=1.0):
    return jnp.tanh(module.norm(module.linear(x))) * scale


class Methods(nnx.Module):
    """One computation, as every kind of method."""

    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)
        self.norm = nnx.BatchNorm(DIM, momentum=0.9, rngs=rngs)

    def plain(self, x, scale=1.0):
        return compute(self, x, scale)

    @nnx.jit
    def jitted(self, x):
        return compute(self, x)

    @nnx.remat
    def checkpointed(self, x):
        return compute(self, x)

    partial = functools.partialmethod(plain, scale=1.0)

    @functools.singledispatchmethod
    def dispatched(self, x):
        return compute(self, x)

    __call__ = jitted


METHODS = ("__call__", "plain", "jitted", "checkpointed", "partial", "dispatched")


def test_a_function_that_a_class_keeps_as_a_partial_is_not_a_method():
    class Kept(Methods):
        act = functools.partial(jax.nn.gelu, approximate=True)

    assert set(hooked_methods(Kept)) == set(METHODS)


def test_methods_that_are_not_plain_functions_are_gathered(monkeypatch):
    def loss(model, batch):
        for name in METHODS:
            batch = getattr(model.layers[0], name)(batch)
        return (batch**2).mean()

    source = lambda rngs: nnx.Sequential(Methods(rngs))  # noqa: E731
    model = check_nnx(source, loss, data(), [Methods], steps=1)
    assert count_calls(monkeypatch, model, loss, data())["layers.0"] == len(METHODS)


class Normalized(nnx.Module):
    """Calls a copy of a module that writes its own weights; as in docs/models.md."""

    def __init__(self, norm):
        self.norm = norm

    def __call__(self, x):
        copied = nnx.clone(self.norm)
        out = copied(x)
        nnx.update(self.norm, nnx.state(copied, nnx.BatchStat))
        return out


# Flax 0.12.8 keeps the scales of a WeightNorm as bare arrays, and `nnx.clone` takes them for static.
WITH_SCALES = [nnx.WeightNorm] if flax.__version__ != "0.12.8" else []


@pytest.mark.parametrize("norm", thin([nnx.SpectralNorm, *WITH_SCALES]))
def test_a_module_that_normalizes_its_own_weights_is_refused_and_its_copy_trains(norm):
    make = lambda rngs: norm(nnx.Linear(DIM, DIM, rngs=rngs), rngs=rngs)  # noqa: E731
    model = fully_shard(lambda rngs: nnx.Sequential(make(rngs)), units=[norm], min_size=1)
    refused(model, mean_square, data(), "1", "nnx.clone")
    check_nnx(lambda rngs: nnx.Sequential(Normalized(make(rngs))), mean_square, data(), [Normalized])
