"""The rule that chooses a leaf's split dim: properties for any shape; the menagerie has leaves in full."""

import math
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from jfsdp.layout.split_dim import choose_dim

SIZES = st.integers(0, 5000) | st.sampled_from([1, 2, 7, 8, 64, 1024, 4096, 50257, 128256])
SHAPES = st.lists(SIZES, max_size=4).map(tuple)
NUM_SHARDS = st.integers(1, 70) | st.sampled_from([512, 1000, 1024])


@st.composite
def leaves(draw: Any) -> dict[str, Any]:
    """Arguments of `choose_dim` without a dim asked for."""
    shape = draw(SHAPES)
    return {
        "shape": shape,
        "num_shards": draw(NUM_SHARDS),
        "stacked": draw(st.integers(0, len(shape))),
        "min_size": draw(st.sampled_from([0, 1, 10, 1024])),
    }


@st.composite
def splittable_leaves(draw: Any, *, divisible: bool) -> dict[str, Any]:
    """Leaves that must be split, with at least one dim that divides, or with none."""
    num_shards = draw(NUM_SHARDS.filter(lambda n: n > 1))
    layers = draw(st.lists(st.integers(1, 100), max_size=2))
    quotients = st.integers(0, 40).map(lambda q: q * num_shards)
    odd = st.builds(int.__add__, quotients, st.integers(1, num_shards - 1))
    shape = draw(st.lists(odd, min_size=0 if divisible else 1, max_size=2))
    if divisible:
        shape += draw(st.lists(st.integers(1, 40).map(lambda q: q * num_shards), min_size=1, max_size=2))
        shape = draw(st.permutations(shape))
    return {"shape": (*layers, *shape), "num_shards": num_shards, "stacked": len(layers), "min_size": 0}


def choose(leaf: dict[str, Any], **more: Any):
    return choose_dim("blocks.w", **leaf, **more)


def per_layer(leaf: dict[str, Any]) -> tuple[int, ...]:
    return leaf["shape"][leaf["stacked"] :]


def growth(leaf: dict[str, Any], dim: int) -> float:
    size = leaf["shape"][dim]
    return (-size % leaf["num_shards"]) / size


@given(splittable_leaves(divisible=True))
def test_a_dim_that_divides_means_no_padding_and_the_first_is_taken(leaf):
    choice = choose(leaf)
    assert choice.padding == 0
    assert choice.dim is not None
    divides = [size % leaf["num_shards"] == 0 for size in per_layer(leaf)]
    assert choice.dim == leaf["stacked"] + divides.index(True)
    assert choice.reason == f"dim {choice.dim}, the first divisible by {leaf['num_shards']}"


@given(splittable_leaves(divisible=False))
def test_where_no_dim_divides_the_leaf_grows_as_little_as_it_can(leaf):
    choice = choose(leaf)
    assert choice.dim is not None
    assert 0 < choice.padding < leaf["num_shards"]
    size = leaf["shape"][choice.dim]
    assert (size + choice.padding) % leaf["num_shards"] == 0
    dims = range(leaf["stacked"], len(leaf["shape"]))
    assert growth(leaf, choice.dim) == min(growth(leaf, dim) for dim in dims)
    assert f"padded {size} -> {size + choice.padding}" in choice.reason


@given(leaves())
def test_leaves_are_replicated_only_below_min_size_or_without_elements_to_split(leaf):
    choice = choose(leaf)
    assert choice.dim is None or leaf["stacked"] <= choice.dim < len(leaf["shape"]), "no layer dim is split"
    size = math.prod(per_layer(leaf))
    small = size < leaf["min_size"]
    if small and leaf["num_shards"] > 1:
        assert (choice.dim, choice.padding) == (None, 0)
        assert choice.reason == f"replicated: {size} elements, below min_size {leaf['min_size']}"
    else:
        assert (choice.dim is None) == (leaf["num_shards"] == 1 or size == 0 or not per_layer(leaf))


@given(splittable_leaves(divisible=True) | splittable_leaves(divisible=False), st.data())
def test_a_dim_asked_for_is_taken_whatever_its_size(leaf, data):
    leaf["min_size"] = 10**9
    ndim = len(leaf["shape"])
    dim = data.draw(st.integers(leaf["stacked"], ndim - 1))
    choice = choose(leaf, dim=dim)
    assert choice.dim == dim
    assert choice.padding == -leaf["shape"][dim] % leaf["num_shards"]
    assert choice.reason == f"dim {dim}, as requested"
