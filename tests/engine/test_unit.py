"""A unit's derivatives under every remat policy. What whole models save is in tests/modules/test_residuals.py."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.ad_checkpoint import checkpoint_name

import jfsdp
from jfsdp.engine.unit import Movement, call_traced, trace_unit
from jfsdp.jaxprs import depends_on

DIM, ROWS = 32, 4
POLICIES = {
    "saved and offloaded": jfsdp.SaveNames(save=("other",), offload=("hidden",)),
    "none": "none",
    "full": "full",
    "dots": "dots",
    "names": ("hidden",),
    "offloaded input": jfsdp.SaveNames(offload=(jfsdp.UNIT_INPUT,)),
    "everything": jax.checkpoint_policies.everything_saveable,
    "all but a name": jax.checkpoint_policies.save_anything_except_these_names("other"),
}


def body(full, rest):
    """Read the weight through every back door: reshaped, transposed, cast, sliced inside a jitted call."""
    weight, x = full["w"], rest["x"]
    reshaped = weight.reshape(DIM, 2, DIM // 2)
    hidden = jnp.einsum("rd,dkj->rkj", x, reshaped).reshape(ROWS, DIM)
    hidden = checkpoint_name(jnp.tanh(hidden), "hidden")
    hidden = hidden @ weight.T.astype(jnp.bfloat16).astype(jnp.float32)
    return jax.jit(lambda h, w: jnp.sin(w)[None] * h[:, None])(hidden, weight), rest["count"] + 1


def make_call(policy, reshard, trainable=("w",)):
    def gather(shards):
        return {name: 2.0 * shard for name, shard in shards.items()}

    movement = Movement(
        gather=gather,
        reduce=lambda grads: jax.tree.map(lambda g: 2.0 * g, grads),
        keep={True: None, False: lambda full: full, "half": lambda full: {"w": full["w"][: DIM // 2]}}[reshard],
        regather=lambda kept: kept if reshard is False else {"w": jnp.concatenate([kept["w"], kept["w"]])},
        trainable=frozenset(trainable),
        remat=POLICIES[policy],
    )
    full = {"w": jax.ShapeDtypeStruct((DIM, DIM), jnp.float32)}

    def call(shards, x):
        rest = {"x": x, "count": jnp.zeros((), jnp.int32), "params": {}}
        traced, flat = trace_unit(lambda full, rest: (*body(full, rest), {}), full, rest)
        return call_traced(traced, shards, flat, movement)[0]

    return call


def plain(shards, x):
    return body({"w": 2.0 * shards["w"]}, {"x": x, "count": 0})[0]


def inputs():
    keys = jax.random.split(jax.random.key(0), 2)
    return {"w": jax.random.normal(keys[0], (DIM, DIM))}, jax.random.normal(keys[1], (ROWS, DIM))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("reshard", [True, False])
def test_gradients_equal_those_of_the_plain_function(policy, reshard):
    shards, x = inputs()
    call = make_call(policy, reshard)
    out, vjp = jax.vjp(call, shards, x)
    wanted_out, wanted_vjp = jax.vjp(plain, shards, x)
    np.testing.assert_allclose(out, wanted_out, rtol=1e-6, atol=1e-6)
    cotangent = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
    for found, wanted in zip(jax.tree.leaves(vjp(cotangent)), jax.tree.leaves(wanted_vjp(cotangent)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("policy", "times", "offloads"), [("full", 2, 0), ("attention", 1, 0), ("offloaded", 1, 1)])
def test_a_fused_attention_is_saved_by_name(monkeypatch, policy, times, offloads):
    """A tanh takes its place: cuDNN's attention has no program for CPUs."""
    monkeypatch.setattr("jfsdp.engine.unit.FUSED_ATTENTION", ("tanh",))
    offloaded = jfsdp.SaveNames(offload=("attention",))
    monkeypatch.setitem(POLICIES, policy, {"attention": ("attention",), "offloaded": offloaded}.get(policy, policy))
    shards, x = inputs()
    call = make_call(policy, True)
    text = str(jax.make_jaxpr(jax.grad(lambda w, x: call({"w": w}, x).sum(), argnums=(0, 1)))(shards["w"], x))
    assert (text.count("= tanh"), text.count("device_put[")) == (times, 2 * offloads)


def test_what_is_kept_in_part_is_all_that_is_saved_of_the_weights():
    shards, x = inputs()
    call = make_call("full", "half")
    jaxpr = jax.make_jaxpr(lambda w, x: jax.tree.leaves(jax.vjp(call, {"w": w}, x)[1]))(shards["w"], x).jaxpr
    saved = [var.aval for var in jaxpr.outvars if var not in jaxpr.invars]
    assert not [value for value in saved if value.size == DIM * DIM]  # pyright: ignore[reportAttributeAccessIssue]
    assert sum(value.shape == (DIM // 2, DIM) for value in saved) == 1  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_frozen_weight_gets_no_gradient_and_no_matmul_for_one(policy):
    shards, x = inputs()
    jaxprs = {}
    for trainable in ((), ("w",)):
        call = make_call(policy, True, trainable)
        grads = jax.grad(lambda s, x, call=call: call(s, x).sum(), argnums=(0, 1))(shards, x)
        assert bool(jnp.any(grads[0]["w"] != 0)) == bool(trainable)
        assert jnp.any(grads[1] != 0), "what flows on to the inputs stays"
        jaxprs[trainable] = str(jax.make_jaxpr(jax.grad(lambda x, call=call: call(shards, x).sum()))(x))
    assert jaxprs[()].count("dot_general") < jaxprs[("w",)].count("dot_general")


def marks(fn, *args, marked):
    return depends_on(jax.make_jaxpr(fn)(*args).jaxpr, marked)


def test_dataflow_follows_calls_output_by_output():
    jitted = jax.jit(lambda w, x: (w * 2, x * 2, w + x))
    assert marks(jitted, 1.0, 1.0, marked=[False, True]) == [False, True, True]
    assert marks(jax.checkpoint(jitted), 1.0, 1.0, marked=[False, True]) == [False, True, True]


def test_dataflow_follows_loop_carries_to_a_fixed_point():
    def loop(a, b, c):
        def turn(carry, x):
            first, second, third = carry
            return (second, third, third), (first, x)

        return jax.lax.scan(turn, (a, b, c), jnp.zeros(3))

    marked = marks(loop, 1.0, 1.0, 1.0, marked=[False, False, True])
    assert marked == [True, True, True, True, False]


def test_dataflow_of_cond_sees_predicate_and_branches():
    def choose(flag, w, x):
        return jax.lax.cond(flag, lambda w, x: (w, x), lambda w, x: (2 * w, w), w, x)

    assert marks(choose, True, 1.0, 1.0, marked=[False, False, True]) == [False, True]
    assert marks(choose, True, 1.0, 1.0, marked=[True, False, False]) == [True, True]
