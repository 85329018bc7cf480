"""A unit's call with adapters: it computes what the merged weight does, or names the use that it cannot compute.

The reference makes the sum of the weight and its adapter and lets JAX differentiate it.
"""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.engine.low_rank import with_adapters
from jfsdp.jaxprs import all_eqns
from jfsdp.layout.lora import MAGNITUDE, A, Adapter, B
from tests.refusals import refuses

RANK = 2


def adapter(shape, num_in=1, stacked=0, path="w", dora=False):
    return Adapter(path, stacked, num_in, shape, RANK, 3.0, False, dora)


def draw(seed, *shape):
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def make(one):
    """Return a weight and the parts of its adapter, by name."""
    parts = {one.name(part): draw(seed, *one.part_shape(part)) for seed, part in enumerate(one.parts)}
    return {one.path: draw(9, *one.shape), **parts}


def call(fn, ones, full, *inputs):
    """Compute `fn(*weights, *inputs)` as a unit does."""

    def run(full, rest):
        return fn(*(full[one.path] for one in ones), *rest["inputs"]), {}, {}

    return with_adapters(run, {one.path: one for one in ones})(full, {"params": {}, "inputs": inputs})[0]


def merged(one, full):
    """Return the sum of a weight and its adapter; a norm of DoRA gets no derivative."""
    layers, ins = one.stacked, tuple(range(one.num_in))
    product = functools.partial(jnp.tensordot, axes=1)
    whole = full[one.path] + one.scale * (jax.vmap(product) if layers else product)(
        full[one.name(A)], full[one.name(B)]
    )
    if one.has_magnitude:
        norms = jax.lax.stop_gradient(jnp.sqrt(jnp.sum(whole**2, ins)))
        whole = whole * full[one.name(MAGNITUDE)] / norms
    return whole


def check(fn, one, *inputs, tolerance=2e-5):
    """Compare the result, and the derivatives by all parts and inputs, with those of the merged weight."""

    def ours(full, *inputs):
        return call(fn, [one], full, *inputs)

    def wanted(full, *inputs):
        return fn(merged(one, full), *inputs)

    full = make(one)
    shape = jax.eval_shape(wanted, full, *inputs)
    weights, parts = draw(7, *shape.shape), {name: value for name, value in full.items() if name != one.path}

    def both(f):
        def total(parts, *inputs):
            out = f({**full, **parts}, *inputs)
            return jnp.sum(out * weights), out

        return jax.jit(jax.grad(total, range(1 + len(inputs)), has_aux=True))(parts, *inputs)

    (found, out), (expected, right) = both(ours), both(wanted)
    assert out.dtype == right.dtype
    for got, reference in zip(jax.tree.leaves((out, found)), jax.tree.leaves((right, expected)), strict=True):
        got, reference = np.asarray(got, np.float32), np.asarray(reference, np.float32)
        assert np.abs(got - reference).max() <= tolerance * np.abs(reference).max()


D, H, K, F = 8, 2, 3, 5
X = draw(20, 4, 7, D)
HEADS = draw(21, 4, 7, H, K)


def scanned(w, x):
    return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]


def scanned_twice(w, x):
    """A first scan hands the weights on, as NNX's does."""
    x, w = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), w), x, w)
    return scanned(w, x)


def unrolled_carry(w, x):
    return jax.lax.scan(lambda carry, _: ((jnp.tanh(carry[0] @ w), carry[1]), None), (x, w), length=2)[0][0]


def either(w, x):
    return jax.lax.cond(x[0, 0, 0] > 0, lambda w: x @ w, lambda w: -2 * (x @ w), w)


def stated(w, x):
    return x @ jax.lax.with_sharding_constraint(w, NamedSharding(jfsdp.make_mesh(), P("fsdp", None)))


@jax.custom_vjp
def own_rule(w, x):
    return jnp.tanh(x @ w)


own_rule.defvjp(lambda w, x: jax.vjp(lambda w, x: jnp.tanh(x @ w), w, x), lambda saved, d_out: saved(d_out))


MATRIX, SPLIT, MERGED, STACK = (D, F), (D, H, K), (H, K, D), (3, D, D)
USES = {
    "x @ w": (MATRIX, 1, lambda w, x: x @ w),
    "a derivative of its own": (MATRIX, 1, lambda w, x: own_rule(w, x)),
    "turned, a derivative of its own": ((F, D), 1, lambda w, x: own_rule(w.T, x)),
    "x @ w.T": ((F, D), 1, lambda w, x: x @ w.T),
    "w.T @ x": (MATRIX, 1, lambda w, x: w.T @ x.swapaxes(1, 2)),
    "w @ x": ((F, D), 1, lambda w, x: w @ x.swapaxes(1, 2)),
    "a vector": (MATRIX, 1, lambda w, x: x[0, 0] @ w),
    "twice": ((D, D), 1, lambda w, x: jnp.tanh(x @ w) @ w.T),
    "heads out": (SPLIT, 1, lambda w, x: jnp.einsum("btd,dhk->bthk", x, w)),
    "heads out, turned": (SPLIT, 1, lambda w, x: jnp.einsum("dhk,btd->kbht", w, x)),
    "heads in": (MERGED, 2, lambda w, x: jnp.einsum("bthk,hkd->btd", HEADS, w) + x),
    "heads in, turned": (MERGED, 2, lambda w, x: jnp.einsum("bkth,hkd->dbt", HEADS.transpose(0, 3, 1, 2), w)),
    "heads in, minor first": (
        MERGED,
        2,
        lambda w, x: jax.lax.dot_general(HEADS, w, (((3, 2), (1, 0)), ((), ()))),
    ),
    "heads in, all but named": (MERGED, 2, lambda w, x: jnp.tensordot(HEADS, w, 2)),
    "heads in, over the output": (MERGED, 2, lambda w, x: jnp.einsum("btd,hkd->bthk", x, w)),
    "into heads": ((D, H * K), 1, lambda w, x: jnp.einsum("btd,dhk->bthk", x, w.reshape(D, H, K))),
    "into one head": ((D, K), 1, lambda w, x: jnp.einsum("btd,dhk->bthk", x, w.reshape(D, 1, K))),
    "from heads": (SPLIT, 1, lambda w, x: x @ w.reshape(D, H * K)),
    "from heads in": (MERGED, 2, lambda w, x: HEADS.reshape(4, 7, -1) @ w.reshape(-1, D)),
    "turned into heads": ((D, H * K), 1, lambda w, x: jnp.einsum("btd,hkd->bthk", x, w.T.reshape(H, K, D))),
    "input in the middle": (SPLIT, 1, lambda w, x: jnp.einsum("btd,hdk->bthk", x, w.transpose(1, 0, 2))),
    "heads exchanged": (SPLIT, 1, lambda w, x: jnp.einsum("btd,kdh->bthk", x, w.transpose(2, 0, 1))),
    "flax.linen": (SPLIT, 1, lambda w, x: jax.lax.dot_general(x, w, (((2,), (0,)), ((), ())), precision="highest")),
    "a result type": (MATRIX, 1, lambda w, x: jnp.dot(x, w, preferred_element_type=jnp.float32)),
    "vmap": (MATRIX, 1, lambda w, x: jax.vmap(jax.vmap(lambda row: row @ w))(x)),
    "jit": (MATRIX, 1, lambda w, x: jax.jit(lambda w: x @ w)(w)),
    "checkpoint": (MATRIX, 1, lambda w, x: jax.checkpoint(lambda w, x: jnp.tanh(x @ w))(w, x)),
    "named": (MATRIX, 1, lambda w, x: x @ checkpoint_name(w, "weight")),
    "barrier": (MATRIX, 1, lambda w, x: math.prod(jax.lax.optimization_barrier((x, w))[:0]) * (x @ w)),
    "cond": (MATRIX, 1, either),
    "stated": (MATRIX, 1, stated),
    "carried": ((D, D), 1, unrolled_carry),
    "scan": (STACK, 1, scanned),
    "scan, turned": (STACK, 1, lambda w, x: scanned(w.transpose(0, 2, 1), x)),
    "two scans": (STACK, 1, scanned_twice),
    "backwards": (STACK, 1, lambda w, x: jax.lax.scan(lambda x, w: (x @ w, x @ w), x, w, reverse=True)[1]),
    "scan of checkpoints in a jit": (STACK, 1, lambda w, x: jax.jit(jax.checkpoint(scanned))(w, x)),
}


@pytest.mark.parametrize("case", USES)
def test_a_use_computes_what_the_merged_weight_does(case):
    shape, num_in, fn = USES[case]
    check(fn, adapter(shape, num_in, stacked=int(shape == STACK)), X)


@pytest.mark.parametrize(
    "case",
    [
        "x @ w",
        "w.T @ x",
        "heads out",
        "heads in",
        "turned into heads",
        "from heads in",
        "turned, a derivative of its own",
    ],
)
def test_a_norm_apart_computes_what_the_merged_weight_does(case):
    shape, num_in, fn = USES[case]
    check(fn, adapter(shape, num_in, dora=True), X)


@pytest.mark.parametrize("dora", [False, True])
def test_casts_are_of_the_parts_too(dora):
    one = adapter(MATRIX, dora=dora)
    check(lambda w, x: x.astype("bfloat16") @ w.astype("bfloat16"), one, X, tolerance=0.03)
    text = str(
        jax.make_jaxpr(lambda full: call(lambda w: X.astype("bfloat16") @ w.astype("bfloat16"), [one], full))(make(one))
    )
    assert "bf16[4,7,2] = dot_general" in text


def test_weights_without_adapters_and_calls_without_weights_are_left_alone():
    one = adapter(MATRIX)
    full = {**make(one), "table": draw(3, 6, D)}

    def run(full, rest):
        return (full["table"][rest["inputs"]] @ full["w"] if "w" in full else rest["inputs"]), {}, {}

    both = with_adapters(run, {"w": one})
    tokens = jnp.arange(4)
    out = both(full, {"params": {}, "inputs": tokens})[0]
    np.testing.assert_allclose(out, full["table"][:4] @ merged(one, full), rtol=1e-4)
    assert both({"table": full["table"]}, {"params": {}, "inputs": tokens})[0] is tokens


REFUSED = {
    "gather": (MATRIX, 1, lambda w: w[jnp.arange(3)], "gather"),
    "slice": (MATRIX, 1, lambda w: X @ w[:, :2], "slice"),
    "elementwise": (MATRIX, 1, lambda w: X @ (w / jnp.linalg.norm(w, axis=0)), "reads it with"),
    "sum": (MATRIX, 1, jnp.sum, "reduce_sum"),
    "bias": (MATRIX, 1, lambda w: X[0, 0][:, None] + w, "with add"),
    "one more dim": (MATRIX, 1, lambda w: X @ w[None], "broadcast_in_dim"),
    "part of the input": (MERGED, 2, lambda w: jnp.einsum("bthk,hed->btked", HEADS, w), "dims (0,)"),
    "input and output": (MERGED, 1, lambda w: jnp.einsum("bthk,hkd->btd", HEADS, w), "(now 1)"),
    "too many inputs": (SPLIT, 2, lambda w: jnp.einsum("btd,dhk->bthk", X, w), "(now 2)"),
    "one product for each head": ((H, D, K), 1, lambda w: jnp.einsum("bthd,hdk->bthk", X[..., None, :], w), "w: "),
    "reshape": (MATRIX, 1, lambda w: w.reshape(-1) @ w.reshape(-1), "[8, 5] to [40]"),
    "reshape of turned": (MATRIX, 1, lambda w: w.T.reshape(D, F), "[5, 8] to [8, 5]"),
    "itself": ((D, D), 1, lambda w: w @ w, "another adapted weight"),
    "layers at once": (STACK, 1, lambda w: jnp.einsum("btd,lde->lbte", X, w), "[3 (layer)"),
    "layers among inputs": (STACK, 1, lambda w: w.transpose(1, 0, 2), "layer dims"),
    "a layer by number": (STACK, 1, lambda w: X @ w[0], "reads it with"),
    "scan over no layers": ((3, D, D), 2, lambda w: scanned(w, X), "stacked=1"),
    "a rule of its own": (MATRIX, 1, lambda w: jax.nn.relu(w), "custom_jvp_call"),
    "whole numbers": (MATRIX, 1, lambda w: X @ w.astype("int32"), "has an adapter"),
    "layers, a derivative of its own": (STACK, 1, lambda w: own_rule(w, X[:3]), "layer dims"),
    "returned": (MATRIX, 1, lambda w: (X @ w, w), "has an adapter"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_use_that_is_no_matrix_product_is_refused_by_name(case):
    shape, num_in, fn, fact = REFUSED[case]
    one = adapter(shape, num_in, stacked=int(shape == STACK and num_in == 1))
    refuses(lambda: jax.eval_shape(lambda full: call(fn, [one], full), make(one)), "w: ", fact)


def test_two_adapted_weights_are_not_multiplied():
    ones = [adapter((D, F)), adapter((F, D), path="v")]
    full = {**make(ones[0]), **make(ones[1])}
    assert call(lambda w, v: X @ w @ v, ones, full).shape == X.shape
    refuses(lambda: call(lambda w, v: X @ (w @ v), ones, full), "w: ", "another adapted weight")


def test_a_norm_of_columns_has_no_product_over_the_output():
    one = adapter((F, D), dora=True)
    refuses(lambda: call(lambda w: X @ w.T, [one], make(one)), "w: ", "DoRA")


@pytest.mark.parametrize("case", ["x @ w", "into heads", "twice", "checkpoint", "scan", "two scans"])
def test_no_product_of_the_weights_size_is_in_the_gradient(case):
    shape, num_in, fn = USES[case]
    one = adapter(shape, num_in, stacked=int(shape == STACK))
    full = make(one)
    size = math.prod(shape[one.stacked :])

    def products(compute):
        jaxpr = jax.make_jaxpr(jax.grad(lambda parts: jnp.sum(compute({**full, **parts}) ** 2)))
        parts = {name: value for name, value in full.items() if name != "w"}
        found = [eqn for eqn in all_eqns(jaxpr(parts).jaxpr) if eqn.primitive.name == "dot_general"]
        return [eqn for eqn in found if eqn.outvars[0].aval.size == size]

    assert products(lambda full: fn(merged(one, full), X)), "the reference has some"
    assert not products(lambda full: call(lambda w: fn(w, X), [one], full))
