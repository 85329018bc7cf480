"""The loss without logits equals the one with them: value, metrics and gradients, whatever the chunks."""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jfsdp_models.losses import cross_entropy, head_loss  # pyright: ignore[reportMissingImports]
from tests.pairwise import cover
from tests.refusals import refuses

WIDTH, VOCAB = 8, 53


def make(rows=2, length=12, dtype: Any = jnp.float32, tied=False) -> Any:
    rng = np.random.default_rng(0)
    hidden = jnp.asarray(rng.normal(size=(rows, length, WIDTH)), dtype)
    kernel = jnp.asarray(rng.normal(size=(VOCAB, WIDTH) if tied else (WIDTH, VOCAB)), dtype)
    targets = jnp.asarray(rng.integers(0, VOCAB, (rows, length)), jnp.int32)
    weights = jnp.asarray(rng.uniform(size=(rows, length)) * (rng.uniform(size=(rows, length)) < 0.7), jnp.float32)
    return hidden, kernel, targets, weights


def with_logits(hidden, kernel, targets, weights, tied):
    return cross_entropy(hidden @ (kernel.T if tied else kernel), targets, weights)


def grads_of(loss: Any, hidden: Any, kernel: Any, targets: Any, weights: Any) -> Any:
    def scalar(hidden, kernel, weights):
        sums = loss(hidden, kernel, targets, weights)
        return 0.5 * sums.total, sums

    return jax.jit(jax.grad(scalar, (0, 1, 2), has_aux=True))(hidden, kernel, weights)


CHUNKS = {"length": (1, 12, 13), "chunk": (1, 5, 12, 100), "tied": (0, 1)}
PAIRS = cover(CHUNKS)


@pytest.mark.parametrize(
    ("length", "chunk", "tied"),
    [
        case if case in PAIRS else pytest.param(*case, marks=pytest.mark.proof)
        for case in itertools.product(*CHUNKS.values())
    ],
)
def test_sums_and_gradients_are_those_of_whole_logits(length, chunk, tied):
    given = make(length=length, tied=tied)
    wanted, sums = grads_of(lambda h, k, t, w: with_logits(h, k, t, w, tied), *given)
    found, parts = grads_of(lambda *args: head_loss(*args, chunk=chunk, tied=bool(tied)), *given)
    for a, b in zip(jax.tree.leaves((found, parts)), jax.tree.leaves((wanted, sums)), strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype)
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)
    plain = head_loss(*given, chunk=chunk, tied=bool(tied))  # without a derivative
    np.testing.assert_allclose(jax.tree.leaves(plain), jax.tree.leaves(sums), rtol=1e-6)


def test_bfloat16_is_summed_in_float32():
    """Over many chunks the gradient of the head is as near the exact one as over a single chunk."""
    hidden, kernel, targets, weights = make(rows=4, length=512, dtype=jnp.bfloat16)
    exact = jax.tree.map(lambda x: x.astype(jnp.float32), (hidden, kernel))
    whole = lambda h, k, t, w: with_logits(h, k, t, w, False)  # noqa: E731
    wanted = grads_of(whole, exact[0], exact[1], targets, weights)[0][1]
    errors = []
    for chunk in (4, 512):
        found = grads_of(lambda *args, chunk=chunk: head_loss(*args, chunk=chunk), hidden, kernel, targets, weights)
        assert found[0][1].dtype == jnp.bfloat16 and found[1].total.dtype == jnp.float32
        errors.append(float(jnp.abs(found[0][1].astype(jnp.float32) - wanted).max() / jnp.abs(wanted).max()))
    assert errors[0] < 1.2 * errors[1] < 1.2 * 0.01


def test_float16_gradients_of_many_tokens_stay_finite():
    """The sum of 4096 equal gradients is beyond float16; what is asked for, their mean, is not."""
    hidden = jnp.full((1, 4096, WIDTH), 20.0, jnp.float16)
    kernel, targets = jnp.zeros((WIDTH, VOCAB), jnp.float16), jnp.zeros((1, 4096), jnp.int32)

    def mean(kernel):
        sums = head_loss(hidden, kernel, targets, jnp.ones((1, 4096)), chunk=512)
        return sums.total / sums.weight

    grad = jax.grad(mean)(kernel)
    assert grad.dtype == jnp.float16
    np.testing.assert_allclose(grad[:, 0], 20 * (1 / VOCAB - 1), rtol=1e-2)


def test_no_array_holds_the_logits_of_whole_rows():
    hidden, kernel, targets, weights = make(length=64)

    def total(hidden, kernel):
        return head_loss(hidden, kernel, targets, weights, chunk=8).total

    text = jax.jit(jax.grad(total, (0, 1))).lower(hidden, kernel).compile().as_text() or ""
    assert f"[2,8,{VOCAB}]" in text
    assert f"[2,64,{VOCAB}]" not in text and f"[64,{VOCAB}]" not in text and f"[128,{VOCAB}]" not in text


def test_nothing_counted_is_a_sum_of_nothing():
    hidden, kernel, targets, weights = make()
    grads, sums = grads_of(lambda *args: head_loss(*args, chunk=4), hidden, kernel, targets, 0 * weights)
    assert (sums.total, sums.weight, sums.aux["correct"]) == (0, 0, 0)
    assert not any(np.any(grad) for grad in grads[:2])


@pytest.mark.parametrize("outside", [VOCAB, -100])
def test_a_target_outside_the_vocabulary_is_nan_unless_it_counts_nothing(outside):
    hidden, kernel, targets, weights = make()
    targets = targets.at[0, 3].set(outside)
    given = hidden, kernel, targets, jnp.ones_like(weights)
    assert np.isnan(head_loss(*given, chunk=4).total) and np.isnan(with_logits(*given, False).total)
    given = hidden, kernel, targets, weights.at[0, 3].set(0)
    wanted = grads_of(lambda h, k, t, w: with_logits(h, k, t, w, False), *given)
    found = grads_of(lambda *args: head_loss(*args, chunk=4), *given)
    both = (jax.tree.leaves((grads[:2], sums)) for grads, sums in (found, wanted))
    for a, b in zip(*both, strict=True):
        assert np.isfinite(b).all()
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize(("first", "second"), [(jnp.bfloat16, jnp.float32), (jnp.float32, jnp.bfloat16)])
def test_gradients_have_the_dtypes_of_what_they_belong_to(first, second):
    hidden, kernel, targets, weights = make()
    given = hidden.astype(first), kernel.astype(second), targets, weights
    found, _ = grads_of(lambda *args: head_loss(*args, chunk=4), *given)
    assert [x.dtype for x in found[:2]] == [first, second]


@pytest.mark.parametrize(
    ("change", "facts"),
    [
        ({"kernel": jnp.zeros((9, VOCAB))}, ("(9, 53)", "width 8", "[D, V]")),
        ({"kernel": jnp.zeros((WIDTH, VOCAB)), "tied": True}, ("(8, 53)", "width 8", "[V, D]")),
        ({"kernel": jnp.zeros(WIDTH)}, ("(8,)",)),
        ({"chunk": 0}, ("chunk=0", "at least 1")),
        ({"chunk": 2.5}, ("chunk=2.5", "a whole number")),
        ({"weights": jnp.ones((1, 12))}, ("weights of shape (1, 12)", "(2, 12)")),
        ({"weights": None}, ("weights of shape ()", "(2, 12)")),
        ({"targets": jnp.zeros((2, 11), int)}, ("labels of shape (2, 11)", "(2, 12)")),
    ],
)
def test_a_head_that_is_none_and_weights_that_would_be_repeated_are_refused(change, facts):
    hidden, kernel, targets, weights = make()
    given = {"kernel": kernel, "targets": targets, "weights": weights, "chunk": 4, "tied": False} | change
    refuses(lambda: head_loss(hidden, *(given.pop(name) for name in ("kernel", "targets", "weights")), **given), *facts)
    if "weights" in change or "targets" in change:
        refuses(
            lambda: cross_entropy(hidden @ kernel, *({"targets": targets, "weights": weights} | change).values()),
            *facts,
        )


def test_rows_without_tokens_are_refused():
    hidden, kernel, *rest = make()
    refuses(lambda: head_loss(hidden[:, :0], kernel, *(x[:, :0] for x in rest), chunk=4), "2", "0", "8", "dim 1")
