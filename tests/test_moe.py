"""Mixtures of experts: steps on every mesh against a loop over tokens that counts places by hand, in float64."""

import functools
from typing import Any

import flax.linen as linen
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

import jfsdp
from jfsdp.layout.lint import LayoutWarning
from tests.refusals import refuses

pytestmark = pytest.mark.filterwarnings(f"ignore::{LayoutWarning.__module__}.LayoutWarning")
EXPERTS, DIM, WIDE, K, ROWS, TOKENS = 8, 16, 12, 2, 16, 6
CUT = {"**.experts.*": PartitionSpec("expert")}
CUT_TWICE = {"**.up": PartitionSpec("expert", None, "tensor"), "**.down": PartitionSpec("expert", "tensor")}


class Experts(nnx.Module):
    def __init__(self, rngs):
        weight = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) * 0.5)  # noqa: E731
        self.up, self.down = weight(EXPERTS, DIM, WIDE), weight(EXPERTS, WIDE, DIM)

    def __call__(self, y):
        return jnp.einsum("enf,efd->end", jnp.tanh(jnp.einsum("end,edf->enf", y, self.up[...])), self.down[...])


class Layer(nnx.Module):
    """A mixture of experts; with `rate` a bias that balances loads is part of its state."""

    def __init__(self, rngs, rate, options):
        weight = lambda *shape: nnx.Param(jax.random.normal(rngs.params(), shape) * 0.5)  # noqa: E731
        self.mix, self.router, self.experts = weight(DIM, DIM), weight(DIM, EXPERTS), Experts(rngs)
        self.rate, self.options = rate, options
        self.bias = nnx.BatchStat(jnp.zeros(EXPERTS)) if rate else None

    def __call__(self, x):
        x = x + jnp.tanh(x @ self.mix[...])
        bias = None if self.bias is None else self.bias[...]
        y, found = jfsdp.experts(x, x @ self.router[...], self.experts, k=K, bias=bias, **self.options)
        if self.bias is not None:
            self.bias[...] = self.bias[...] + self.rate * jnp.sign(found.counts.mean() - found.counts)
        return x + y, found


class Mixture(nnx.Module):
    def __init__(self, rngs, rate=0.0, **options):
        self.layers = nnx.List([Layer(rngs, rate, options) for _ in range(2)])


def loss_of(model, batch):
    x, extra, dropped, load = batch["x"], 0.0, 0.0, 0.0
    for layer in model.layers:
        x, found = layer(x)
        extra += 0.1 * found.balance + 0.01 * found.z
        dropped, load = dropped + found.dropped, jnp.maximum(load, found.load)
    weights = batch["weights"]
    share = jfsdp.Mean(dropped, jnp.sum(jnp.ones_like(weights)))
    each = jnp.sum(x * x, -1) + extra
    return jfsdp.Loss(jnp.sum(weights * each), jnp.sum(weights), {"dropped": share, "load": jfsdp.Max(load)})


def by_hand(params, batch, capacity, accumulate=1, k=K):
    """The mean loss, with every token through its experts one by one."""
    places = TOKENS if capacity is None else min(int(np.ceil(capacity * TOKENS * k / EXPERTS)), TOKENS)
    total, weight, lost = 0.0, 0.0, 0
    for micro in range(accumulate):
        x, weights = batch["x"][micro::accumulate], batch["weights"][micro::accumulate]
        for layer in params["layers"].values():
            x = x + jnp.tanh(x @ layer["mix"])
            logits = x @ layer["router"]
            scores = jax.nn.softmax(logits, -1)
            chosen = np.argsort(-np.asarray(jax.lax.stop_gradient(scores)), -1, kind="stable")[..., :k]
            is_chosen, is_kept = np.zeros(scores.shape), np.zeros(scores.shape)
            for row, column, place in np.ndindex(*chosen.shape):
                expert = chosen[row, column, place]
                is_chosen[row, column, expert] = 1
                is_kept[row, column, expert] = np.sum(chosen[row, :column] == expert) < places
            lost += np.sum(is_chosen - is_kept)
            share = scores * is_chosen / jnp.sum(scores * is_chosen, -1, keepdims=True) * is_kept
            each = jnp.tanh(jnp.einsum("btd,edf->btef", x, layer["experts"]["up"]))
            x = x + jnp.einsum("bte,btef,efd->btd", share, each, layer["experts"]["down"])
            balance = EXPERTS * (scores @ jnp.asarray(is_chosen.sum((0, 1)) / is_chosen.sum()))
            z = jax.nn.logsumexp(logits, -1) ** 2
            total += jnp.sum(weights * (0.1 * balance + 0.01 * z))
        total, weight = total + jnp.sum(weights * jnp.sum(x * x, -1)), weight + jnp.sum(weights)
    return total / weight, lost


@pytest.fixture(scope="module")
def batch():
    rng = np.random.default_rng(0)
    weights = (rng.random((ROWS, TOKENS)) < 0.8).astype(np.float64)
    return {"x": rng.normal(size=(ROWS, TOKENS, DIM)), "weights": weights}


@functools.cache
def reference(capacity, accumulate):
    """The loss, its gradients, and the number of dropped copies, with plain Flax."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        weights = (rng.random((ROWS, TOKENS)) < 0.8).astype(np.float64)
        rows = {"weights": weights, "x": rng.normal(size=(ROWS, TOKENS, DIM))}
        params = nnx.to_pure_dict(nnx.state(Mixture(nnx.Rngs(0)), nnx.Param))
        (loss, lost), grads = jax.value_and_grad(by_hand, has_aux=True)(params, rows, capacity, accumulate)
        return rows, float(loss), jax.tree.map(np.asarray, grads), lost


def sharded(sizes, *, rate=0.0, model=None, units=(Layer,), options=None, **arguments):
    mesh = jfsdp.make_mesh(devices=jax.devices()[: int(np.prod(list(sizes.values())))], **sizes)
    made = functools.partial(Mixture, rate=rate, **(options or {})) if model is None else model
    cut = (CUT_TWICE if "tensor" in sizes else CUT) if sizes.get("expert", 1) > 1 else {}
    placements = {**cut, **jfsdp.placements(min_size=1)}
    return jfsdp.fully_shard(made, mesh=mesh, units=list(units), placements=placements, **arguments)


MESHES = {
    "fsdp": ({"fsdp": 8}, 1, {}),
    "fsdp expert": ({"fsdp": 2, "expert": 4}, 1, {}),
    "expert": ({"expert": 8, "fsdp": 1}, 1, {}),
    "replicas accumulated": ({"replica": 2, "fsdp": 2, "expert": 2}, 2, {}),
    "tensor remat": ({"fsdp": 2, "expert": 2, "tensor": 2}, 1, {"remat": "full"}),
    "zero1 accumulated": ({"fsdp": 2, "expert": 4}, 2, {"strategy": "zero1"}),
    "ddp": ({"fsdp": 2, "expert": 4}, 1, {"strategy": "ddp"}),
    "zero2": ({"fsdp": 4, "expert": 2}, 1, {"strategy": "zero2"}),
    "kept by two": ({"fsdp": 4, "expert": 2}, 1, {"reshard_after_forward": 4}),
    "kept by half": ({"fsdp": 2, "expert": 4}, 1, {"reshard_after_forward": 2}),
    "states over replicas": ({"replica": 2, "fsdp": 2, "expert": 2}, 1, {"opt_over": ("replica", "fsdp")}),
    "tokens": ({"fsdp": 2, "expert": 4}, 1, {"options": {"send": "tokens"}}),
    "parts": ({"fsdp": 2, "expert": 4}, 1, {"options": {"parts": 2}}),
}


QUICK = ("fsdp expert", "replicas accumulated", "tensor remat", "kept by half", "tokens")
CASES = [
    pytest.param(name, capacity, id=name + end, marks=[pytest.mark.proof] * (name not in quick))
    for capacity, end, quick in ((1.0, "", QUICK), (None, "-whole", ("tokens",)))
    for name in MESHES
]


@pytest.mark.parametrize(("name", "capacity"), CASES)
def test_loss_and_gradients_equal_a_loop_over_tokens(name, capacity):
    sizes, accumulate, arguments = MESHES[name]
    rows, loss, grads, lost = reference(capacity, accumulate)
    options = {"capacity": capacity, **arguments.get("options", {})}
    with jax.enable_x64(True):
        model = sharded(sizes, **{**arguments, "options": options})
        tx = optax.sgd(1.0)
        state = model.init(tx)
        before = nnx.to_pure_dict(nnx.state(model.to_flax(state), nnx.Param))
        state, metrics = model.train_step(loss_of, tx, accumulate=accumulate)(state, rows)
        after = nnx.to_pure_dict(nnx.state(model.to_flax(state), nnx.Param))
        assert metrics["loss"] == pytest.approx(loss, rel=1e-12)
        assert metrics["dropped"] == pytest.approx(lost / (ROWS * TOKENS), rel=1e-6)
        for one, two, grad in zip(*map(jax.tree.leaves, (before, after, grads)), strict=True):
            np.testing.assert_allclose(one - two, grad, atol=1e-12 * np.abs(grad).max())
    assert capacity is None or lost > 20


@pytest.mark.parametrize(
    "sizes",
    [
        pytest.param({"fsdp": 8}, marks=pytest.mark.proof),
        {"fsdp": 2, "expert": 4},
        pytest.param({"replica": 2, "fsdp": 2, "expert": 2}, marks=pytest.mark.proof),
    ],
    ids=str,
)
def test_a_bias_from_counts_is_state_that_is_equal_on_every_mesh(sizes, batch):
    def run(sizes):
        model = sharded(sizes, rate=0.05, options={"capacity": 1.25})
        tx = optax.adam(1e-2)
        step, state = model.train_step(loss_of, tx, accumulate=2), model.init(tx)
        for _ in range(5):
            state, metrics = step(state, batch)
        return float(metrics["loss"]), {name: np.asarray(x) for name, x in state.model_state.items()}

    (loss, one), (found, state) = run({"fsdp": 1}), run(sizes)
    assert found == pytest.approx(loss, rel=1e-5)
    assert any(np.any(value) for value in one.values())
    for name, value in one.items():
        np.testing.assert_allclose(state[name], value, atol=1e-6)


def test_state_that_depends_on_rows_otherwise_is_refused(batch):
    class Own(Mixture):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.seen = nnx.BatchStat(jnp.zeros(()))

    def loss(model, batch):
        model.seen[...] = model.seen[...] + jnp.sum(batch["x"])
        return loss_of(model, batch)

    model = sharded({"fsdp": 8}, model=Own)
    state = model.init(optax.sgd(0.1))
    refuses(lambda: model.train_step(loss, optax.sgd(0.1))(state, batch), "seen", "jfsdp.sum_over_devices")


def test_forward_and_evaluation_equal_one_device(batch):
    """They run as program xla, which partitions experts itself."""

    def run(sizes):
        model = sharded(sizes, options={"capacity": 1.0})
        return np.asarray(model.forward(lambda m, b: loss_of(m, b).total)(model.init(optax.sgd(0.1)), batch))

    np.testing.assert_allclose(run({"fsdp": 2, "expert": 4}), run({"fsdp": 1}), rtol=1e-6)


class LinenExperts(linen.Module):
    size: int | None = None

    @linen.compact
    def __call__(self, y):
        num = self.size or y.shape[0]
        up = self.param("up", linen.initializers.normal(0.5), (num, DIM, WIDE))
        down = self.param("down", linen.initializers.normal(0.5), (num, WIDE, DIM))
        return jnp.einsum("enf,efd->end", jnp.tanh(jnp.einsum("end,edf->enf", y, up)), down)


class LinenMixture(linen.Module):
    size: int | None = None

    @linen.compact
    def __call__(self, x):
        logits = linen.Dense(EXPERTS, use_bias=False)(x)
        y, found = jfsdp.experts(x, logits, LinenExperts(self.size, name="experts"), k=K, capacity=1.0)
        return x + y, found.balance


def linen_loss(model, batch):
    x, balance = model(batch["x"])
    each = jnp.sum(x * x, -1) + balance
    return jfsdp.Loss(jnp.sum(each), jnp.sum(jnp.ones_like(each)))


@pytest.mark.proof
def test_weights_and_gradients_in_eight_bits_equal_one_device_that_rounds_alike(batch):
    rows = {name: x.astype(np.float32) for name, x in batch.items()}

    def run(sizes, **wires):
        model = sharded(sizes, options={"capacity": 1.0}, mp_policy=jfsdp.MixedPrecisionPolicy(**wires))
        _, metrics = model.train_step(loss_of, optax.sgd(0.1))(model.init(optax.sgd(0.1)), rows)
        return float(metrics["loss"]), float(metrics["grad_norm"])

    coded = {"gather_wire": jfsdp.Wire("float8", between=2)}
    assert run({"fsdp": 2, "expert": 4}, **coded) == pytest.approx(run({"fsdp": 2}, gather_wire="float8"), rel=1e-5)
    summed = {"reduce_wire": jfsdp.Wire("int8", block=4, between=2)}
    assert run({"fsdp": 2, "expert": 4}, **summed) == pytest.approx(run({"fsdp": 1}), rel=5e-3)


@pytest.mark.proof
def test_states_of_reduced_rank_are_split_like_experts(batch):
    def run(sizes):
        model, tx = sharded(sizes), optax.adafactor(1e-2, min_dim_size_to_factor=1)
        step, state = model.train_step(loss_of, tx), model.init(tx)
        for _ in range(3):
            state, metrics = step(state, batch)
        return float(metrics["loss"])

    assert run({"fsdp": 1, "expert": 8}) == pytest.approx(run({"fsdp": 1}), rel=1e-5)


def test_adapters_of_stacks_are_cut_with_their_experts(batch):
    lora = jfsdp.LoRA(["**.experts.*", "**.mix"], rank=2, alpha=4.0, stacks=["**.experts.*"])

    def run(sizes):
        model = sharded(sizes, model=jfsdp.lora(functools.partial(Mixture, capacity=1.0), lora))
        tx = optax.adam(1e-2)
        step, state = model.train_step(loss_of, tx), model.init(tx)
        for _ in range(3):
            state, metrics = step(state, batch)
        return float(metrics["loss"]), state

    (loss, one), (found, state) = run({"fsdp": 1}), run({"fsdp": 2, "expert": 4})
    assert found == pytest.approx(loss, rel=1e-5)
    shapes = {name: x.shape for name, x in state.params.items() if "lora" in name and "layers.0" in name}
    assert shapes == {
        "layers.0.experts.up.lora_a": (EXPERTS, DIM, 2),
        "layers.0.experts.up.lora_b": (EXPERTS, 2, WIDE),
        "layers.0.experts.down.lora_a": (EXPERTS, WIDE, 2),
        "layers.0.experts.down.lora_b": (EXPERTS, 2, DIM),
        "layers.0.mix.lora_a": (DIM, 2),
        "layers.0.mix.lora_b": (2, DIM),
    }
    for name in shapes:
        np.testing.assert_allclose(state.params[name], one.params[name], atol=1e-5)


def test_linen_experts_take_their_number_from_the_tokens(batch):
    rows = {"x": batch["x"].astype(np.float32)}

    def run(sizes, size=None):
        example = jax.ShapeDtypeStruct((2, TOKENS, DIM), jnp.float32)
        model = sharded(sizes, model=(LinenMixture(size), example), units=[jfsdp.Unit(LinenExperts, stacked=0)])
        tx = optax.sgd(0.1)
        _, metrics = model.train_step(linen_loss, tx)(model.init(tx), rows)
        return [float(metrics[name]) for name in ("loss", "grad_norm")]

    assert run({"fsdp": 2, "expert": 4}) == pytest.approx(run({"fsdp": 1}), rel=1e-5)
    refuses(lambda: run({"fsdp": 2, "expert": 4}, EXPERTS), "(8, 16, 12)", "expert", "y.shape[0]")


def test_a_state_moves_between_degrees_of_experts(tmp_path, batch):
    tx = optax.adam(1e-2)
    one, other = sharded({"fsdp": 2, "expert": 4}), sharded({"fsdp": 4, "expert": 2})
    state, _ = one.train_step(loss_of, tx)(one.init(tx), batch)
    jfsdp.checkpoint.save(tmp_path / "state", state)
    moved = jfsdp.checkpoint.restore(tmp_path / "state", other.abstract_state(tx))
    for name, value in state.params.items():
        np.testing.assert_array_equal(np.asarray(value), np.asarray(moved.params[name]))
    sharding: Any = moved.params["layers.0.experts.up"].sharding
    assert "expert" in sharding.spec[0]
    again = [float(m.train_step(loss_of, tx)(s, batch)[1]["loss"]) for m, s in ((one, state), (other, moved))]
    assert again[1] == pytest.approx(again[0], rel=1e-6)


def values(tokens=TOKENS, num=EXPERTS, dtype=jnp.float32):
    return jnp.ones((2, tokens, DIM)), jnp.zeros((2, tokens, num), dtype)


BAD = {
    "k above E": (lambda: jfsdp.experts(*values(), lambda y: y, k=9), ["k=9", "1 to 8"]),
    "k of 0": (lambda: jfsdp.experts(*values(), lambda y: y, k=0), ["k=0", "1 to 8"]),
    "capacity": (lambda: jfsdp.experts(*values(), lambda y: y, k=2, capacity=0.5), ["capacity=0.5", "at least 1"]),
    "shapes": (lambda: jfsdp.experts(values(5)[0], values(6)[1], lambda y: y, k=2), ["(2, 5, 16)", "(2, 6, 8)"]),
    "result": (lambda: jfsdp.experts(*values(), lambda y: y[0], k=2), ["ffn", "(12, 16)"]),
    "parts": (lambda: jfsdp.experts(*values(), lambda y: y, k=2, parts=0), ["parts=0"]),
    "score": (lambda: jfsdp.experts(*values(), lambda y: y, k=2, score="max"), ["score='max'", "softmax"]),
    "send": (lambda: jfsdp.experts(*values(), lambda y: y, k=2, send="token"), ["send='token'", "tokens"]),
    "axis that cuts nothing": (
        lambda: jfsdp.fully_shard(Mixture, mesh=jfsdp.make_mesh(expert=2), units=[Layer]),
        ["'expert'", "size 2", "placements"],
    ),
    "E that the axis does not divide": (
        lambda: jfsdp.fully_shard(Mixture, mesh=jfsdp.make_abstract_mesh({"expert": 3}), units=[Layer], placements=CUT),
        ["layers.0.experts.", "size 8", "size 3"],
    ),
    "flat storage": (lambda: sharded({"fsdp": 2, "expert": 4}, storage="flat"), ["flat", "'expert'", "per_parameter"]),
    "a bias of another shape": (
        lambda: jfsdp.experts(*values(), lambda y: y, k=2, bias=jnp.zeros(1)),
        ["bias", "(8,)"],
    ),
    "stacks that are no targets": (
        lambda: jfsdp.fully_shard(
            jfsdp.lora(Mixture, jfsdp.LoRA("**.mix", 2, stacks="**.up")), mesh=jfsdp.make_mesh(fsdp=8), units=[Layer]
        ),
        ["experts.up", "stacks", "targets"],
    ),
    "experts taken for layers": (
        lambda: sharded({"expert": 4, "fsdp": 1}, units=[Experts]),
        ["layers.0.experts.up", "size 16", "size 12", "stacked=0"],
    ),
    "neighbours": (lambda: sharded({"fsdp": 2, "expert": 4}, reshard_after_forward=6), ["=6", "size 4"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_named(name):
    call, words = BAD[name]
    refuses(call, *words)


def test_logits_in_low_precision_are_refused():
    with pytest.raises(TypeError, match=r"bfloat16.*float32"):
        jfsdp.experts(*values(dtype=jnp.bfloat16), lambda y: y, k=2)


def test_program_xla_is_refused_for_training(batch):
    model = sharded({"fsdp": 2, "expert": 4})
    refuses(lambda: model.train_step(loss_of, optax.sgd(0.1), program="xla"), "'expert'", "size 4", "manual")
    step = model.train_step(lambda m, b: loss_of(m, b).total, optax.sgd(0.1))
    refuses(lambda: step(model.init(optax.sgd(0.1)), batch), "'expert'", "size 4", "Loss")


def test_experts_that_are_not_all_cut_are_refused(batch):
    mesh, cut = jfsdp.make_mesh(fsdp=2, expert=4), {"**.up": PartitionSpec("expert")}
    model = jfsdp.fully_shard(Mixture, mesh=mesh, units=[Layer], placements=cut)
    step = model.train_step(loss_of, optax.sgd(0.1), check_loss=False)
    refuses(lambda: step(model.init(optax.sgd(0.1)), batch), "ffn", "2 experts", "placements", "y.shape[0]")


def test_experts_that_are_cut_and_not_sent_to_are_refused(batch):
    class Dense(Mixture):
        def __call__(self, x):
            experts = self.layers[0].experts
            return x + jnp.einsum("btd,edf,efg->btg", x, experts.up[...], experts.down[...])

    def loss(model, batch):
        return jfsdp.Loss(jnp.sum(model(batch["x"]) ** 2), jnp.sum(batch["weights"]))

    model = sharded({"fsdp": 2, "expert": 4}, model=Dense, units=[Dense])
    step = model.train_step(loss, optax.sgd(0.1), check_loss=False)
    refuses(lambda: step(model.init(optax.sgd(0.1)), batch), "layers.0.experts.", "'expert'", "jfsdp.experts")


def test_a_router_that_returns_nan_is_not_hidden():
    x, logits = values()
    y, found = jfsdp.experts(x, logits.at[0, 0].set(jnp.nan), lambda y: y, k=2)
    assert np.isnan(y[0, 0]).all() and np.isfinite(y[1]).all() and np.isnan(found.z[0, 0])


def test_masked_tokens_take_no_place():
    rng = np.random.default_rng(0)
    x, logits = (jnp.asarray(rng.normal(size=(2, TOKENS, n)), jnp.float32) for n in (DIM, EXPERTS))
    mask = jnp.arange(TOKENS) != 1
    y, found = jfsdp.experts(x, logits, lambda y: 2 * y, k=1, capacity=1.0, mask=jnp.broadcast_to(mask, (2, TOKENS)))
    short, other = jfsdp.experts(x[:, mask], logits[:, mask], lambda y: 2 * y, k=1, capacity=1.2)
    np.testing.assert_array_equal(y[:, mask], short)
    np.testing.assert_array_equal(found.counts, other.counts)
    assert not np.any(y[:, 1]) and not np.any(found.z[:, 1])


def test_sigmoid_scores_and_a_bias_choose_but_do_not_weigh():
    x, logits = jnp.ones((1, 1, DIM)), jnp.asarray([[[2.0, 1.0, 0.0, -1.0]]])
    factors = jnp.asarray([1.0, 10.0, 100.0, 1000.0])[:, None, None]
    bias = jnp.asarray([-10.0, 0.0, 0.0, 0.0])
    options = {"k": 2, "score": "sigmoid", "normalize": False, "bias": bias}
    y, found = jfsdp.experts(x, logits, lambda y: y * factors, **options)
    weights = jax.nn.sigmoid(logits[0, 0])
    np.testing.assert_allclose(y[0, 0], np.full(DIM, weights[1] * 10 + weights[2] * 100), rtol=1e-6)
    np.testing.assert_array_equal(found.counts, [0, 1, 1, 0])
