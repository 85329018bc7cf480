"""Roles: what each array of an optimizer's state is, where it stands and why; and what a step sees of padding."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.train.update.optimizer import ShardedOptimizer
from jfsdp.train.update.roles import Kind, abstract_opt_state, place
from tests.refusals import refusing
from tests.sharding import fully_shard
from tests.ways import WAYS


class Leaves(nnx.Module):
    """One leaf of each sort: even, square, stacked, padded, vector, scalar, integer."""

    def __init__(self, rngs):
        self.even = nnx.Param(jax.random.normal(rngs.params(), (16, 24)))
        self.square = nnx.Param(jax.random.normal(rngs.params(), (16, 16)))
        self.cube = nnx.Param(jax.random.normal(rngs.params(), (2, 8, 32)))
        self.odd = nnx.Param(jax.random.normal(rngs.params(), (13, 11)))
        self.vector = nnx.Param(jnp.ones(5))
        self.scalar = nnx.Param(jnp.ones(()))
        self.table = nnx.Param(jnp.arange(64).reshape(8, 8))


@functools.cache
def model(sizes: tuple[tuple[str, int], ...] = (("fsdp", 8),), strategy: str = "full_shard", min_size: int = 8) -> Any:
    mesh = jfsdp.make_abstract_mesh(dict(sizes))
    return fully_shard(Leaves, mesh=mesh, strategy=WAYS[strategy], min_size=min_size)


def layout(**options: Any) -> Any:
    return model(**options).layout


def stateful(make_arrays: Any) -> Any:
    """An optimizer whose state is whatever `make_arrays(params)` makes."""
    return optax.GradientTransformation(make_arrays, lambda updates, state, params=None: (updates, state))


def roles_of(tx: Any, **options: Any) -> dict[str, Any]:
    roles = abstract_opt_state(layout(**options), model(**options).model.tree, tx)[1]
    return {role.name: role for role in roles.arrays}


# Array made for a leaf -> what is expected of it: kind, spec, and how the reason begins.
SHAPES = [
    ("even", (16, 24), Kind.PARAMETER, P("fsdp", None), "as even: dim 0, the first divisible"),
    ("even", (24,), Kind.FACTORED, P("fsdp"), "dim 0, the first divisible by 8"),
    ("even", (1, 24), Kind.FACTORED, P(None, "fsdp"), "dim 1, the first divisible by 8"),
    ("even", (16,), Kind.FACTORED, P("fsdp"), "dim 0, which is dim 0 of even"),
    ("even", (16, 1), Kind.FACTORED, P("fsdp", None), "dim 0, which is dim 0 of even"),
    ("even", (3, 16, 24), Kind.OTHER, P(None, "fsdp", None), "dim 1, which is dim 0 of even"),
    ("even", (7, 9), Kind.OTHER, P(None, None), "replicated: no dim divisible by 8"),
    ("even", (40, 3), Kind.OTHER, P("fsdp", None), "dim 0, the first divisible by 8"),
    ("even", (1,), Kind.SCALAR, P(None), "replicated: one element"),
    ("even", (0,), Kind.OTHER, P(None), "replicated"),
    ("square", (16,), Kind.FACTORED, P("fsdp"), "dim 0, which is dim 0 of square"),
    ("cube", (2, 32), Kind.FACTORED, P(None, "fsdp"), "dim 1, the first divisible by 8"),
    ("cube", (2, 8), Kind.FACTORED, P(None, "fsdp"), "dim 1, which is dim 1 of cube"),
    ("odd", (13, 11), Kind.PARAMETER, P("fsdp", None), "as odd: dim 0, padded 13 -> 16"),
    ("odd", (13,), Kind.FACTORED, P(None), "replicated: no dim divisible by 8, and only arrays of a parameter's shape"),
    ("vector", (5,), Kind.PARAMETER, P(None), "as vector: replicated: 5 elements, below min_size 8"),
    ("scalar", (), Kind.PARAMETER, P(), "as scalar: replicated"),
]


@pytest.mark.parametrize(("leaf", "shape", "kind", "spec", "reason"), SHAPES)
def test_an_array_stands_where_its_leaf_and_its_shape_say(leaf, shape, kind, spec, reason):
    role = roles_of(stateful(lambda params: {leaf: jnp.zeros(shape)}))[f"opt_state.{leaf}"]
    padded = leaf == "odd" and kind is Kind.PARAMETER
    assert (role.leaf, role.kind, role.shape, role.spec) == (leaf, kind, shape, spec)
    assert role.reason.startswith(reason)
    assert role.stored_shape == ((16, 11) if padded else shape)


@pytest.mark.parametrize(
    ("shape", "spec"), [((16, 24), P("fsdp", None)), ((13, 11), P(None, None)), ((), P()), ((5,), P(None))]
)
def test_arrays_without_a_name_follow_the_general_rule(shape, spec):
    role = roles_of(stateful(lambda params: [jnp.zeros(shape)]))["opt_state.0"]
    assert (role.leaf, role.spec, role.padding) == (None, spec, 0)


def test_states_are_split_as_the_strategy_splits_the_optimizer():
    sizes = (("replica", 2), ("fsdp", 4))
    for strategy, axes in {"hfsdp": ("fsdp", "replica"), "all": ("replica", "fsdp"), "zero1": "fsdp"}.items():
        roles = roles_of(optax.adafactor(1e-3, min_dim_size_to_factor=8), sizes=sizes, strategy=strategy)
        assert roles["opt_state.0.v_col.even"].spec == P(axes), strategy
        assert roles["opt_state.0.v_row.square"].spec == P(axes), strategy
    assert roles_of(optax.adam(1e-3), sizes=sizes, strategy="ddp")["opt_state.0.mu.even"].spec == P(None, None)


def test_leaves_without_a_gradient_have_no_state():
    assert not [name for name in roles_of(optax.adam(1e-3)) if name.endswith("table")]


def test_placing_roles_anew_is_deciding_them_in_the_other_layout():
    tx = optax.chain(optax.adafactor(1e-3, min_dim_size_to_factor=8), optax.adam(1e-3))
    tree = model().model.tree
    roles = abstract_opt_state(layout(), tree, tx)[1]
    for options in ({"sizes": (("fsdp", 3),)}, {"strategy": "ddp"}, {"min_size": 1000}):
        other = layout(**options)
        assert place(other, roles) == abstract_opt_state(other, tree, tx)[1] != roles
    assert place(layout(), roles) == roles and hash(place(layout(), roles)) == hash(roles)


def test_a_state_of_another_optimizer_is_refused_with_what_differs():
    model = fully_shard(Leaves, min_size=8)
    state = model.init(optax.sgd(1e-3))
    step = model.train_step(lambda model, batch: (model.even[...] ** 2).sum(), optax.adam(1e-3))
    with refusing("13", "opt_state.0.count"):
        step(state, np.ones((8, 1), np.float32))


def collectives(model: jfsdp.ShardedModel, tx: Any) -> dict[str, int]:
    """The collectives of the update alone: how many elements the largest of each name brings."""
    state = model.abstract_state(tx)
    params = {path: x for path, x in state.params.items() if model.layout.by_path[path].trainable}
    shardings = jax.tree.map(lambda x: x.sharding, (params, state.opt_state))
    update = functools.partial(ShardedOptimizer(model.engine, model.model.tree, tx).update, extra={})
    text = jax.jit(update, out_shardings=shardings).lower(params, state.opt_state, params).compile().as_text() or ""
    pattern = r"= (.*) (all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\("
    found = {}
    for shapes, name in re.findall(pattern, text):
        sizes = [math.prod(map(int, filter(None, dims.split(",")))) for dims in re.findall(r"\[([\d,]*)\]", shapes)]
        found[name] = max(found.get(name, 0), *sizes, 0)
    return found


@pytest.mark.parametrize("num_devices", [3, 8])
def test_cutting_the_padding_off_moves_no_data(num_devices):
    mesh = jfsdp.make_mesh(devices=jax.devices()[:num_devices])
    model = fully_shard(Leaves, mesh=mesh, min_size=8)
    assert any(leaf.padding for leaf in model.layout.leaves)
    assert collectives(model, optax.adamw(1e-3)) == {}
    clipped = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    assert collectives(model, clipped) == {"all-reduce": 1}


def test_factored_moments_move_vectors_and_no_matrix():
    model = fully_shard(Leaves, min_size=8)
    found = collectives(model, optax.adafactor(1e-3, min_dim_size_to_factor=8))
    assert 0 < max(found.values()) <= 2 * 32, found  # the columns of the stack of two; its matrices have 256 elements
