"""Packed rows without a mask: where documents are, what attends by it, and for which devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jfsdp
from jfsdp.engine.unit import apply_remat
from jfsdp_models import attention, cudnn  # pyright: ignore[reportMissingImports]
from tests import hlo
from tests import models_published as published
from tests.refusals import check_facts, refuses
from tests.steps import fully_shard
from tests.thin import thin

T = 12


def rows_of(runs):
    """Segment ids [B T] of rows given as lengths of their documents; what is left is padding."""
    ids = np.zeros((len(runs), T), np.int32)
    for row, lengths in zip(ids, runs, strict=True):
        row[: sum(lengths)] = np.repeat(np.arange(len(lengths)) + 1, lengths)
    return jnp.asarray(ids)


def by_documents(query, key, value, documents):
    """Attend as cuDNN is told to: each document by itself, causally. In NumPy, which compiles nothing."""
    query, key, value = map(np.asarray, (query, key, value))
    key, value = (np.repeat(part, query.shape[2] // part.shape[2], axis=2) for part in (key, value))
    out = np.full(query.shape, np.nan, np.float32)
    for row, (lengths, starts) in enumerate(zip(*map(np.asarray, documents), strict=True)):
        for length, start in zip(lengths, starts, strict=True):
            if length > 0:
                own = np.s_[row, start : start + length]
                scores = np.einsum("tha,sha->hts", query[own], key[own]) * query.shape[-1] ** -0.5
                scores = np.exp(np.where(np.tri(length, dtype=bool), scores, -np.inf))
                out[own] = np.einsum("hts,sha->tha", scores / scores.sum(-1, keepdims=True), value[own])
    return out


@jax.jit
def masks_and_places(query, key, value, ids):
    masked = jax.nn.dot_product_attention(query, key, value, mask=attention.document_mask(ids), is_causal=True)
    return masked, attention.find_documents(ids, 6)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.lists(st.integers(1, T), max_size=5).filter(lambda runs: sum(runs) <= T), min_size=3, max_size=3))
def test_documents_say_what_the_mask_says(runs):
    rng = np.random.default_rng(0)
    query, key, value = (rng.standard_normal((3, T, heads, 8)).astype(np.float32) for heads in (4, 2, 2))
    wanted, places = masks_and_places(query, key, value, rows_of(runs))
    found = by_documents(query, key, value, places)
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5)  # no token is left out: that would be NaN


def test_documents_are_lengths_and_starts_and_minus_one():
    found = attention.find_documents(rows_of([[3, 1], [12], []]), 4)
    np.testing.assert_array_equal(found.lengths, [[3, 1, 8, -1], [12, -1, -1, -1], [12, -1, -1, -1]])
    np.testing.assert_array_equal(found.starts, [[0, 3, 4, -1], [0, -1, -1, -1], [0, -1, -1, -1]])


def view(device, dtype=jnp.bfloat16, most: int | None = 4, choice="auto", runs=((3, 1), (12,)), head_size=64):
    shapes = jax.ShapeDtypeStruct((len(runs), T), jnp.int32), jax.ShapeDtypeStruct((len(runs), T, 16), dtype)
    with jax.default_device(device):
        return jax.eval_shape(
            lambda ids, x: attention.document_view(ids, x, choice, head_size=head_size, max_documents=most), *shapes
        )[0]


def test_who_is_told_where_documents_are(monkeypatch):
    """GPUs from Hopper on, where cuDNN takes the query; all others read a mask."""
    hopper = hlo.h100s(1)[0]
    assert isinstance(view(hopper), attention.Documents)
    ids = (2, T)  # of which a mask is made
    assert view(hlo.gpus("a100-80")[0]).shape == view(jax.devices()[0]).shape == ids
    assert view(hopper, dtype=jnp.float32).shape == ids
    assert view(hopper, choice="xla").shape == ids
    assert view(hopper, head_size=36).shape == ids
    assert view(hopper, most=None).shape == ids
    monkeypatch.setattr(attention, "binding", None)  # as in a JAX without it
    assert view(hopper).shape == ids


def test_a_row_of_too_many_documents_is_nan(monkeypatch):
    monkeypatch.setattr(attention, "is_at_least", lambda capability: True)
    monkeypatch.setattr(attention, "is_cuda", lambda: True)
    ids = rows_of([[3, 1, 2], [3, 9], [1, 1, 1, 1]])  # with the padding 4, 2 and 5 runs
    _, x = attention.document_view(ids, jnp.ones((3, T, 16), jnp.bfloat16), "auto", head_size=64, max_documents=4)
    np.testing.assert_array_equal(np.isnan(x.astype(jnp.float32)).any((1, 2)), [False, False, True])


@pytest.mark.parametrize("window", [None, 5])
def test_keys_have_as_many_heads_as_queries_where_the_binding_counts_them_so(window):
    """JAX before 0.12 multiplies the places of documents in keys by the number of query heads."""
    shapes = [jax.ShapeDtypeStruct((2, T, heads, 64), jnp.bfloat16) for heads in (8, 2, 2)]
    places = [jax.ShapeDtypeStruct((2, 4), jnp.int32)] * 2
    with jax.default_device(hlo.h100s(1)[0]):
        jaxpr = jax.make_jaxpr(lambda *args: cudnn.packed_attention(*args, window=window))(*shapes, *places)
    inner = next(eqn for eqn in jaxpr.jaxpr.eqns if eqn.primitive.name.startswith("custom_vjp_call"))
    heads = [var.aval.shape[2] for var in inner.invars[:3]]  # pyright: ignore[reportAttributeAccessIssue]
    assert heads == ([8, 8, 8] if jax.__version_info__ < (0, 12) else [8, 2, 2])


@pytest.mark.parametrize(("remat", "times"), [("full", 2), ("dots", 1), ("none", 1)])
def test_a_backward_computes_fused_attention_again_only_under_full(remat, times):
    """ "dots" knows it by the name of a primitive of JAX's, which is private."""
    shapes = [jax.ShapeDtypeStruct((2, T, 8, 64), jnp.bfloat16)] * 3
    places = [jax.ShapeDtypeStruct((2, 4), jnp.int32)] * 2

    def total(*args):
        attend = partial(cudnn.packed_attention, window=None)
        return apply_remat(attend, remat)(*args).astype(jnp.float32).sum()

    with jax.default_device(hlo.h100s(1)[0]):
        text = str(jax.make_jaxpr(jax.grad(total, (0, 1, 2)))(*shapes, *places))
    assert len(re.findall("dot_product_attention_fwd_wrapper", text)) == times


def _attend_and_derive(query, key, value, ids, cotangents, window, remat):
    attend = apply_remat(partial(attention.attend, choice="auto", window=window), remat)
    out, transpose = jax.vjp(lambda *heads: attend(*heads, ids), query, key, value)
    return out, transpose(cotangents)


@pytest.mark.parametrize(
    ("length", "window", "is_packed"),
    thin([(45, 7, True), (48, None, True), (45, None, False), (48, None, False), (45, 7, False), (45, 23, True)], 3),
)
def test_long_rows_by_parts_are_what_they_are_whole(monkeypatch, length, window, is_packed):
    keys = jax.random.split(jax.random.key(0), 4)
    query, key, value, cotangents = (
        jax.random.normal(one, (2, length, heads, 8)) for one, heads in zip(keys, (4, 2, 2, 4), strict=True)
    )
    lengths = [[1, length - 4, 3], [17, 15, length - 32]]
    ids = jnp.asarray([np.repeat([1, 2, 0], runs) for runs in lengths]) if is_packed else None
    args = (query, key, value, ids, cotangents, window)
    wanted = jax.jit(_attend_and_derive, static_argnums=(5, 6))(*args, "none")
    monkeypatch.setattr(attention, "LONGEST_WHOLE", length - 1)
    monkeypatch.setattr(attention, "QUERIES", 16)
    for remat in ("none", "full"):
        found = jax.jit(partial(_attend_and_derive), static_argnums=(5, 6))(*args, remat)
        jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=2e-6), found, wanted)


@pytest.mark.proof  # of the function alone above
@pytest.mark.parametrize("program", ["manual", "xla"])
def test_steps_by_parts_are_those_of_whole_rows_on_a_mesh(monkeypatch, program):
    case, mesh = published.llama(True, vocab=64), jfsdp.make_mesh(fsdp=2, tensor=2, devices=jax.devices()[:4])

    def train():
        placed: dict = {"placements": case.placements, "min_size": 20}
        model = fully_shard(case.source, mesh=mesh, units=case.units, program=program, **placed)
        tx = optax.sgd(0.1)
        step, state = model.train_step(case.loss, tx, check_loss=False), model.init(tx)
        for seed in range(2):
            state, metrics = step(state, case.batch(np.random.default_rng(seed), 8))
        return np.array([float(metrics[name]) for name in ("loss", "grad_norm")])

    wanted = train()
    monkeypatch.setattr(attention, "LONGEST_WHOLE", published.LENGTH - 1)
    monkeypatch.setattr(attention, "QUERIES", 4)
    attend, parts = attention.attend_queries, []
    monkeypatch.setattr(
        attention, "attend_queries", lambda *args, **options: parts.append(1) or attend(*args, **options)
    )
    np.testing.assert_allclose(train(), wanted, rtol=1e-5)
    assert parts


@pytest.mark.parametrize(("remat", "times"), thin([("full", 2), ("none", 1), ("dots", 1)], 3))
def test_long_rows_before_hopper_make_no_array_of_the_row_squared(monkeypatch, remat, times):
    """And attend no more often for it: of the parts the backward makes their masks again, and no more."""
    length, parts = 2048, 4
    monkeypatch.setattr(attention, "LONGEST_WHOLE", length - 1)
    monkeypatch.setattr(attention, "QUERIES", length // parts)
    device = hlo.gpus("a100-80")[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    heads = [jax.ShapeDtypeStruct((1, length, num, 64), jnp.bfloat16, sharding=sharding) for num in (8, 2, 2, 8)]
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32, sharding=sharding)

    def run(query, key, value, cotangents, ids):
        return _attend_and_derive(query, key, value, ids, cotangents, None, remat)

    with jax.default_device(device):
        traced = jax.jit(run).trace(*heads, ids)
        program = traced.lower().compile()
    assert len(re.findall("dot_product_attention_fwd_wrapper", str(traced.jaxpr))) == times * parts
    text = program.as_text() or ""
    assert f"{length},{length}" not in text
    assert len(re.findall(r'"__cudnn\$fmha\w*SoftmaxBackward"', text)) == parts
    memory = program.memory_analysis()
    assert memory is not None and memory.temp_size_in_bytes < 4 * length * length


@pytest.mark.parametrize("heads", thin([[8, 2], [8, 8]]), ids=str)
def test_no_array_of_the_compiled_program_is_as_wide_as_the_row_squared(heads):
    """Forward and backward, on a GPU that is not there. What it computes was not run on any."""
    length = 2048
    query = jax.ShapeDtypeStruct((1, length, heads[0], 64), jnp.bfloat16)
    key = jax.ShapeDtypeStruct((1, length, heads[1], 64), jnp.bfloat16)
    ids = jax.ShapeDtypeStruct((1, length), jnp.int32)

    def total(query, key, value, ids):
        documents = attention.find_documents(ids, 16)
        return attention.attend(query, key, value, documents, choice="auto").astype(jnp.float32).sum()

    device = hlo.h100s(1)[0]
    sharding = jax.sharding.SingleDeviceSharding(device)
    placed = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in (query, key, key, ids)]
    with jax.default_device(device):
        text = jax.jit(jax.grad(total, (0, 1, 2))).lower(*placed).compile().as_text() or ""
    assert "__cudnn$fmha" in text
    assert f"{length},{length}" not in text


@pytest.mark.parametrize(
    ("gpu", "dtype", "seq_len", "is_packed", "facts"),
    [
        ("h100", "bfloat16", 65536, True, ("cuDNN", "documents by position")),
        ("a100-80", "bfloat16", 8192, True, ("cuDNN", "[B 1 T T]", "Hopper")),
        ("a100-80", "bfloat16", 8194, True, ("cuDNN", "[B 1 2048 T]", "Hopper")),
        (None, "float32", 512, True, ("XLA", "[B H T T]", "Ampere", "[B 1 T T]")),
    ],
)
def test_the_kernel_is_said_with_its_reason(gpu, dtype, seq_len, is_packed, facts):
    with jax.default_device(hlo.gpus(gpu)[0] if gpu else jax.devices()[0]):
        check_facts(attention.describe_attention("auto", 64, 64, dtype, seq_len, is_packed=is_packed), *facts)


@pytest.mark.parametrize(("capability", "kernel"), [("7.5", "xla"), ("8.0", "cudnn")])
def test_cudnn_attends_from_ampere_on(monkeypatch, capability, kernel):
    monkeypatch.setattr(attention, "is_cuda", lambda: True)
    monkeypatch.setattr(attention, "is_at_least", lambda least: float(capability) >= float(least))
    query = jax.ShapeDtypeStruct((1, 512, 8, 64), jnp.bfloat16)
    assert attention.choose_attention("auto", query) == kernel


def test_a_row_of_too_many_documents_is_refused_on_the_host():
    rows = rows_of([[3, 1], [2, 2, 2], []])
    attention.check_documents(rows, None)
    attention.check_documents(rows_of([[3, 1], [12], []]), 3)
    refuses(lambda: attention.check_documents(rows, 3), "row 1", "4", "documents_per_row=3")
