"""Containers that JAX does not know, as inputs and outputs of a model and of its units."""

import collections
import dataclasses
import functools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen, nnx

import jfsdp
from tests.modules.parity import DIM, TX, check_linen, check_nnx, data, mean_square, square
from tests.refusals import refuses
from tests.steps import fully_shard


@dataclasses.dataclass
class Record:
    x: Any


@dataclasses.dataclass(frozen=True)
class Frozen:
    x: Any


class Dict(dict):
    pass


class List(list):
    pass


class Plain:
    def __init__(self, x):
        self.x, self.name = x, "plain"
        self.scale: Any = 1.0


class Slots:
    __slots__ = ("name", "x")

    def __init__(self, x):
        self.x, self.name = x, "slots"


class Pair(tuple):
    pass


class Callable(Plain):
    def __call__(self):
        return self.x


class Output(collections.OrderedDict):
    """As the outputs of Hugging Face: items that are attributes too, and no `update`."""

    def __setitem__(self, key, value):
        super().__setitem__(key, value)
        super().__setattr__(key, value)

    def update(self, *args, **kwargs):
        raise TypeError("not here")


def as_output(x):
    out = Output()
    out["x"] = x
    return out


# How an array gets into each, and out of it.
KINDS = {
    "dataclass": (Record, lambda box: box.x),
    "frozen dataclass": (Frozen, lambda box: box.x),
    "dict": (lambda x: Dict(x=x), lambda box: box["x"]),
    "list": (lambda x: List([x, "text"]), lambda box: box[0]),
    "object": (Plain, lambda box: box.x),
    "namespace": (lambda x: types.SimpleNamespace(x=x), lambda box: box.x),
    "nested": (lambda x: Record({"a": Dict(b=Plain(x))}), lambda box: box.x["a"]["b"].x),
    "slots": (Slots, lambda box: box.x),
    "tuple": (lambda x: Pair([x, "text"]), lambda box: box[0]),
    "callable": (Callable, lambda box: box()),
    "output": (as_output, lambda box: box.x + 0 * box["x"]),
}


class Layer(nnx.Module):
    def __init__(self, rngs, kind="dataclass"):
        self.kind, self.linear = kind, nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, box):
        put, take = KINDS[self.kind]
        return put(jnp.tanh(self.linear(take(box))))


class Net(nnx.Module):
    """A layer for each kind of container, all between arrays."""

    def __init__(self, rngs, kinds=tuple(KINDS)):
        self.layers = nnx.List([Layer(rngs, kind) for kind in kinds])

    def __call__(self, x):
        for layer in self.layers:
            put, take = KINDS[layer.kind]
            x = take(layer(put(x)))
        return x


class LinenLayer(linen.Module):
    @linen.compact
    def __call__(self, box):
        return Record(jnp.tanh(linen.Dense(DIM)(box.x)))


class LinenNet(linen.Module):
    @linen.compact
    def __call__(self, box):
        return LinenLayer(name="layer")(box)


def scalar(apply, x):
    return (apply(Record(x)).x ** 2).mean()


def test_units_take_and_return_containers_that_jax_does_not_know():
    check_nnx(Net, mean_square, data(), [Layer], steps=1)


def test_linen_units_take_and_return_containers_that_jax_does_not_know():
    check_linen(LinenNet(), (Record(jnp.zeros((1, DIM))),), scalar, data(), [LinenLayer], steps=1)


def test_program_manual_takes_containers_too():
    model = fully_shard(Net, units=[Layer], min_size=1, program="manual")
    _, metrics = model.train_step(square, TX, check_loss=False)(model.init(TX), data())
    np.testing.assert_allclose(metrics["loss"], mean_square(nnx.jit(lambda: Net(nnx.Rngs(0)))(), data()), rtol=1e-5)


@pytest.mark.parametrize("kind", [*KINDS, "linen"])
@pytest.mark.parametrize("has_units", [False, True])
def test_precision_is_that_of_arrays_in_containers_that_jax_does_not_know(kind, has_units):
    """As the arguments and the result of the model itself."""
    source = (LinenNet(), (Record(jnp.zeros((1, DIM))),)) if kind == "linen" else lambda rngs: Layer(rngs, kind)
    units = ([LinenLayer] if kind == "linen" else ["linear"]) if has_units else []
    put, take = KINDS.get(kind, KINDS["dataclass"])
    policy = jfsdp.MixedPrecisionPolicy("bfloat16", output_dtype="float32")
    root = {"": {"mp_policy": jfsdp.MixedPrecisionPolicy("bfloat16")}}
    for per_unit, dtype in ((None, "float32"), (root, "bfloat16")):
        model = fully_shard(source, units=units, mp_policy=policy, per_unit=per_unit)
        forward = model.forward(lambda model, x: take(model(put(x))))
        x = jax.ShapeDtypeStruct((16, DIM), jnp.float32)
        assert jax.eval_shape(forward, model.abstract_state(TX), x).dtype == dtype


class Cached(Plain):
    @functools.cached_property
    def twice(self):
        return 2 * self.x


def test_settings_in_a_container_stay_python_and_cached_properties_are_read():
    class Shaped(nnx.Module):
        def __init__(self, rngs):
            self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

        def __call__(self, box):
            scale = np.outer(box.inner.scale, box.inner.scale).sum()
            return self.linear(box.x + box.inner.twice).reshape(-1, *map(int, box.sizes)) * scale

    around = types.SimpleNamespace(options={1: "one"})
    around.itself = around

    def mean(model, x):
        inner = Cached(x)
        inner.scale = np.ones(2, np.float32)
        sizes = np.array([2, 8])
        box = types.SimpleNamespace(x=x, same=x, sizes=sizes, log=print, around=around, again=around, inner=inner)
        return (model(box) ** 2).mean()

    check_nnx(lambda rngs: nnx.Sequential(Shaped(rngs)), mean, data(), [Shaped], steps=1)


def resolve(model, loss):
    return model.train_step(loss, TX).resolve(jax.ShapeDtypeStruct((16, DIM), jnp.float32))


class Writer(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, box):
        box.x = self.linear(box.x)
        return box.x


def test_a_write_of_a_unit_to_a_container_that_is_copied_is_refused():
    model = fully_shard(lambda rngs: nnx.Sequential(Writer(rngs)), units=[Writer])
    refuses(lambda: resolve(model, lambda model, x: (model(Record(x)) ** 2).mean()), "'layers.0'")


@pytest.mark.parametrize("dtype", [None, "bfloat16"])
@pytest.mark.parametrize("api", ["nnx", "linen"])
def test_what_the_model_writes_to_an_argument_is_there_after_its_call(api, dtype):
    def call(linear, box):
        box.x["out"] = linear(box.x["in"])
        box.seen.append(box.x["out"])
        box.new = box.x.twice
        return box.new

    class Logger(Writer):
        def __call__(self, box):
            return call(self.linear, box)

    class LinenLogger(linen.Module):
        @linen.compact
        def __call__(self, box):
            return call(linen.Dense(DIM), box)

    class Twice(Dict):
        @functools.cached_property
        def twice(self):
            return 2 * self["in"]

    make = lambda x: types.SimpleNamespace(x=Twice({"in": x, "old": 1}), seen=[], rest=(x,))  # noqa: E731

    def mean(model, x):
        box = make(x)
        box.key = jax.random.key(0)
        model(box)
        found = box.x["in"], box.rest[0], box.x["out"], box.seen[0], box.new, box.x["old"]
        assert found[0] is x and found[1] is x and found[2] is found[3] and found[5] == 1
        assert {y.dtype.name for y in found[2:5]} == {dtype or "float32"}
        return (found[2].astype(jnp.float32) ** 2).mean()

    source = Logger if api == "nnx" else (LinenLogger(), (make(jnp.zeros((1, DIM))),))
    resolve(fully_shard(source, mp_policy=jfsdp.MixedPrecisionPolicy(dtype)), mean)


class Later(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)

    def halves(self, x):
        yield self.linear(x) / 2
        yield self.linear(x) / 2

    def mapped(self, x):
        return {"outs": map(self.linear, [x])}

    def listed(self, x):
        return list(self.halves(x))


@pytest.mark.parametrize(
    ("method", "kind"), [("halves", "generator"), ("mapped", "map")], ids=["generator", "map in a dict"]
)
@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_unit_that_computes_after_its_call_is_refused_by_name(method, kind, program):
    model = fully_shard(lambda rngs: nnx.Sequential(Later(rngs)), units=[Later], program=program)

    def mean(model, x):
        outs = getattr(model.layers[0], method)(x)
        out = jnp.stack(list(outs["outs"] if isinstance(outs, dict) else outs)).sum(0)
        return jfsdp.Loss((out**2).sum(), out.size)

    refuses(lambda: resolve(model, mean), "unit 'layers.0'", f"a {kind}", "return a list")
    if method == "halves":
        method = "listed"
        resolve(model, mean)


@pytest.mark.parametrize("program", ["xla", "manual"])
def test_a_value_that_leaves_a_unit_but_is_not_returned_is_refused(program):
    kept = []

    class Leaky(Later):
        def __call__(self, x):
            kept.append(self.linear(x))
            return kept[-1]

    def squares(model, x):
        out = model(x) + kept[-1]
        return jfsdp.Loss((out**2).sum(), out.size)

    model = fully_shard(lambda rngs: nnx.Sequential(Leaky(rngs)), units=[Leaky], program=program)
    refuses(lambda: resolve(model, squares), "a unit's call", "return it")
