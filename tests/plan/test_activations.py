"""What must cross `tensor` and `pipe`, read from traces: small functions, each beside what one would count by hand."""

import types
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.plan.traffic.activations import find_activations
from jfsdp.train.step.step import Trace

FREE = P.UNCONSTRAINED
AUTO = (jax.sharding.AxisType.Auto,) * 2  # from JAX 0.12 on a mesh is Explicit unless told
MESH = jax.sharding.AbstractMesh((2, 4), ("fsdp", "tensor"), axis_types=AUTO)
LAYOUT: Any = types.SimpleNamespace(
    data_axes=("fsdp",),
    mesh_sizes=(("fsdp", 2), ("tensor", 4)),
    num_shards=lambda axes: {("tensor",): 4}.get(tuple(axes), 2),
)
ROWS, WIDTH, WIDE = 8, 16, 32
X = ((ROWS, 4, WIDTH), P("fsdp"))
UP, DOWN = ((WIDTH, WIDE), P(None, "tensor")), ((WIDE, WIDTH), P("tensor"))
SIZE = ROWS // 2 * 4 * WIDTH * 4  # float32 on a device, the rows split over fsdp
PART = SIZE * 3 / 4  # sent by one of four


def state(x, *spec):
    return jax.lax.with_sharding_constraint(x, NamedSharding(MESH, P(*spec)))


def split(x):
    return state(x, FREE, "tensor")


def found(fn, *args):
    traced = jax.jit(fn).trace(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in args])
    return find_activations(Trace(traced.jaxpr.jaxpr, tuple(spec for _, spec in args)), LAYOUT)


def sent(fn, *args):
    result = found(fn, *args)
    assert result.unknown == ()
    return [(item.kind, item.wire_bytes) for item in result.sent]


def mlp(x, up, down):
    return x + jnp.tanh(x @ up) @ down


SENT = {
    "columns": (lambda x, up: jnp.tanh(x @ up), (X, UP), []),
    "a sum": (lambda *args: jnp.sum(mlp(*args), 2), (X, UP, DOWN), [("all-reduce", 2 * PART)]),
    "a sum that is split": (lambda *args: split(mlp(*args)), (X, UP, DOWN), [("reduce-scatter", PART)]),
    "split and brought together": (
        lambda *args: jnp.tanh(state(split(mlp(*args)), FREE, None)),
        (X, UP, DOWN),
        [("reduce-scatter", PART), ("all-gather", PART)],
    ),
    "a part of a split dim needs the whole": (
        lambda x, up, down: jnp.tanh(state(x @ up[:, :WIDTH] @ down[:WIDTH] * 2, FREE, None, FREE)),
        (X, UP, DOWN),
        [("all-gather", WIDTH * WIDE * 4 * 3 / 4), ("all-gather", WIDE * WIDTH * 4 * 3 / 4)],
    ),
    "heads": (
        lambda x, up: jnp.tanh((x @ up).reshape(ROWS, 4, 4, 8).transpose(0, 2, 1, 3)[:, :, 1:]).sum((2, 3)),
        (X, UP),
        [],
    ),
    "two heads for four": (
        lambda x, up: jnp.tanh((x @ up).reshape(ROWS, 4, 2, 16)),
        (X, UP),
        [("all-gather", 2 * PART)],
    ),
    "split along another dim": (
        lambda x, up: state(state(x @ up, FREE, FREE, "tensor"), FREE, "tensor", None),
        (X, UP),
        [("all-to-all", 2 * PART)],
    ),
    "a table looked up": (
        lambda table: jnp.tanh(jnp.take(table, jnp.zeros((ROWS, 4), int), axis=0, mode="fill")),
        (DOWN,),
        [("all-reduce", 2 * 2 * PART)],  # these rows are on every device
    ),
    "loop": (
        lambda *args: jax.lax.scan(lambda x, _: (mlp(x, *args[1:]), None), args[0], length=3)[0],
        (X, UP, DOWN),
        [("all-reduce", 3 * 2 * PART)],
    ),
    "what a loop carries stays split": (
        lambda x: state(jax.lax.scan(lambda x, _: (split(x) * 2, None), x, length=3)[0], FREE, None),
        (X,),
        [("all-gather", PART)],
    ),
    "its gradient": (
        lambda x, up: jax.grad(lambda x: jnp.sum(jnp.tanh(x @ up)))(x) ** 2,
        (X, UP),
        [("all-reduce", 2 * PART)],
    ),
}


@pytest.mark.parametrize(("fn", "args", "wanted"), SENT.values(), ids=SENT)
def test_what_has_to_be_sent(fn, args, wanted):
    assert sent(fn, *args) == wanted


def test_sums_that_are_added_are_sent_as_one():
    def three(x, up, down):
        one, *others = [jnp.tanh(x @ up) @ (down * n) for n in range(3)]
        return split(one + others[0] + others[1])

    assert sent(three, X, UP, DOWN) == [("reduce-scatter", PART)]


def test_additions_are_not_put_in_another_order():
    """As those of the paths of adapters between those of their matrices."""

    def two(x, up, down):
        wide = jnp.tanh(x @ up)
        return split((wide @ down + x) * 2 + jnp.cos(wide) @ down)

    assert sent(two, X, UP, DOWN) == [("reduce-scatter", PART)] * 2


def test_what_is_computed_from_sums_is_no_sum():
    def two(x, up, down):
        return split(jnp.tanh(x @ up @ down) + jnp.tanh(jnp.cos(x @ up) @ down))

    assert sent(two, X, UP, DOWN) == [("reduce-scatter", PART)] * 2


def test_two_readers_of_a_split_value_bring_it_together_once():
    def both(x, up):
        x = split(x)
        return jnp.tanh(x @ up), jnp.cos(x @ up)

    assert sent(both, X, UP) == [("all-gather", PART)]


def test_a_sum_over_the_rows_too_is_the_strategys():
    """The gradient of a scale that each token of each row has a part of: one sum over both, in program xla."""

    def scale_gradient(x, scale):
        return jax.grad(lambda scale: jnp.sum(split(x) * scale))(scale) ** 2

    assert sent(scale_gradient, X, ((WIDTH,), P())) == []


def test_what_an_operation_without_a_rule_loses_is_said():
    result = found(lambda x, up: jax.lax.top_k(x @ up, 2)[0], X, UP)
    assert result.unknown == ("top_k",)


@pytest.mark.parametrize(
    ("send", "unread", "wanted"),
    [
        (jax.lax.psum, (), [("all-reduce", 2 * PART)]),
        (lambda x, axis: jax.lax.ppermute(x, axis, [(0, 1)]), (), [("collective-permute", SIZE)]),
        (jax.lax.pmax, ("pmax",), []),
    ],
    ids=["sum", "permute", "maximum"],
)
def test_what_is_written_out_is_taken_over_or_said(send, unread, wanted):
    def local(x):
        return send(x * jax.lax.axis_index("tensor"), "tensor")

    result = found(jax.shard_map(local, mesh=MESH, in_specs=P("fsdp"), out_specs=P("fsdp"), check_vma=False), X)
    assert (result.unknown, [(item.kind, item.wire_bytes) for item in result.sent]) == (unread, wanted)


def test_without_a_trace_nothing_is_known():
    assert find_activations(None, LAYOUT).sent == ()


STAGES = jax.sharding.AbstractMesh((2, 4), ("pipe", "tensor"), axis_types=AUTO)
STAGED: Any = types.SimpleNamespace(
    data_axes=(),
    mesh_sizes=(("pipe", 2), ("tensor", 4)),
    num_shards=lambda axes: {("tensor",): 4, ("pipe",): 2, ("pipe", "tensor"): 8}.get(tuple(axes), 1),
)
ALL = ROWS * 4 * WIDTH * 4
BOTH = ("pipe", "tensor")
BY_BOTH = (X, ((WIDTH, WIDE), P(None, BOTH)), ((WIDE, WIDTH), P(BOTH)))


def in_stages(fn):
    return jax.shard_map(fn, mesh=STAGES, in_specs=P(), out_specs=P(), axis_names={"pipe"}, check_vma=False)


def stated(*spec):
    return lambda x, up, down: jax.lax.with_sharding_constraint(x @ up @ down, NamedSharding(STAGES, P(*spec)))


def hand_on(x):
    return jax.lax.ppermute(x, "pipe", [(0, 1)])


def hand_on_what_is_split(x):
    return in_stages(hand_on)(jax.lax.with_sharding_constraint(x, NamedSharding(STAGES, P(None, "tensor"))))


def hand_on_in_loop(length, is_read):
    def run(x):
        last, seen = jax.lax.scan(lambda x, _: (hand_on(x), x.sum()), x, None, length=length)
        return (last if is_read else 0) + seen.sum()

    return in_stages(run)


STAGED_SENT = {
    "a part is handed on": (hand_on_what_is_split, (X,), [("pipe", "collective-permute", ALL / 4)]),
    "one sum over both axes": (
        in_stages(lambda x, up, down: jnp.tanh(jax.lax.psum(x @ up @ down, "pipe"))),
        (X, UP, DOWN),
        [("pipe/tensor", "all-reduce", 2 * ALL * 7 / 8)],
    ),
    "a sum of what is computed from a sum": (
        in_stages(lambda x, up, down: jax.lax.psum(jnp.tanh(x @ up @ down), "pipe")),
        (X, UP, DOWN),
        [("tensor", "all-reduce", 2 * ALL * 3 / 4), ("pipe", "all-reduce", 2 * ALL / 2)],
    ),
    "a sum over both": (stated(), BY_BOTH, [("pipe/tensor", "all-reduce", 2 * ALL * 7 / 8)]),
    "a sum that one splits": (stated(None, "tensor"), BY_BOTH, [("pipe/tensor", "all-reduce", 2 * ALL * 7 / 8)]),
    "a sum that both split": (stated(BOTH), BY_BOTH, [("pipe/tensor", "reduce-scatter", ALL * 7 / 8)]),
    "by both": (lambda x: jnp.cumsum(x, 0), ((X[0], P(BOTH)),), [("pipe/tensor", "all-gather", ALL * 7 / 8)]),
    "in every tick": (hand_on_in_loop(3, False), (X,), [("pipe", "collective-permute", 3 * ALL)]),
    "in one tick": (hand_on_in_loop(1, True), (X,), [("pipe", "collective-permute", ALL)]),
    "in one tick, and nobody reads it": (hand_on_in_loop(1, False), (X,), []),
}


@pytest.mark.parametrize(("fn", "args", "wanted"), STAGED_SENT.values(), ids=STAGED_SENT)
def test_what_stages_send_is_split_over_tensor_too(fn, args, wanted):
    traced = jax.jit(fn).trace(*[jax.ShapeDtypeStruct(shape, jnp.float32) for shape, _ in args])
    specs = tuple(P() if spec == P("fsdp") else spec for _, spec in args)
    result = find_activations(Trace(traced.jaxpr.jaxpr, specs), STAGED)
    assert result.unknown == ()
    assert [("/".join(item.axes), item.kind, item.wire_bytes) for item in result.sent] == wanted
