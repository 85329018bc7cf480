"""Slices of stacks in loops: the order that XLA compiled is compared with the order of the program."""

import functools
import re

import jax
import jax.numpy as jnp
import pytest
from jax.ad_checkpoint import checkpoint_name

from jfsdp.compat import misorders_offloads
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.hlo.slices import find_wrong_slices
from tests import hlo

LAYERS, ROWS, DIM = 8, 64, 128
BYTES = 4 * ROWS * DIM  # of a layer's input


@functools.cache
def offloading():
    """The gradient of a loop of layers whose inputs are offloaded, compiled for a GPU."""
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
        names_which_can_be_saved=[], names_which_can_be_offloaded=["x"], offload_src="device", offload_dst="pinned_host"
    )

    def layer(x, w):
        return jnp.tanh(checkpoint_name(x, "x") @ w), None

    def loss(ws, x):
        return (jax.lax.scan(jax.checkpoint(layer, policy=policy), x, ws)[0] ** 2).sum()

    sharding = jax.sharding.SingleDeviceSharding(hlo.gpus("h100", per_node=1)[0])
    shapes = [jax.ShapeDtypeStruct(shape, "float32", sharding=sharding) for shape in ((LAYERS, DIM, DIM), (ROWS, DIM))]
    return jax.jit(jax.grad(loss)).lower(*shapes).compile().as_text() or ""


def test_this_jaxlib_misorders_offloads_exactly_if_compat_says_so():
    wrong = list(find_wrong_slices(parse_module(offloading())))
    assert bool(wrong) == misorders_offloads()
    if wrong:
        assert [(item.stack.memory, item.requested, item.bytes_taken) for item in wrong] == [
            ("host", (LAYERS - 1, LAYERS - 2), (0, BYTES))
        ]


def corrupt(text, old, new):
    """State another offset and stride for the slices that have these."""
    form = '"byte_offset":"{}","byte_stride":"{}"'
    assert form.format(*old) in text
    return text.replace(form.format(*old), form.format(*new))


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ((0, BYTES), ((LAYERS - 1) * BYTES, -BYTES)),  # written backwards
        ((0, BYTES), (BYTES, BYTES)),  # one layer late
        ((0, BYTES), (0, 0)),  # always the first
        ((4 * DIM * DIM * (LAYERS - 1), -4 * DIM * DIM), (0, 4 * DIM * DIM)),  # weights read forwards in the backward
    ],
    ids=["reversed", "late", "still", "forwards"],
)
def test_offsets_that_differ_from_the_index_are_found(old, new):
    before = {item.instruction.name for item in find_wrong_slices(parse_module(offloading()))}
    after = {item.instruction.name for item in find_wrong_slices(parse_module(corrupt(offloading(), old, new)))}
    assert after - before


def test_offsets_are_compared_only_where_the_index_follows_from_the_counter():
    """A counter that is not known says nothing of its slices."""
    text = re.sub(r'"known_induction_variable":\{[^}]*\},?', "", offloading())
    assert not list(find_wrong_slices(parse_module(text)))


def test_a_loop_that_runs_once_has_no_order():
    text = corrupt(offloading(), (0, BYTES), ((LAYERS - 1) * BYTES, -BYTES))
    assert list(find_wrong_slices(parse_module(text)))
    once = re.sub(r'"known_trip_count":\{"n":"\d+"\}', '"known_trip_count":{"n":"1"}', text)
    assert not list(find_wrong_slices(parse_module(once)))
