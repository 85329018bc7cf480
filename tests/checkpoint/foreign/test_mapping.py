"""Rules of names, both ways: any slice of a mapped array is the slice of the mapped whole."""

import functools
from typing import Any

import jax
import numpy as np
import pytest

from jfsdp.checkpoint.foreign.dims import parse_dims
from jfsdp.checkpoint.foreign.mapping import Exported, Imported, NameMap, as_name_map, bind
from jfsdp.checkpoint.source import read_whole
from tests.checkpoint.arrays import Arrays
from tests.refusals import refuses

RULES = [
    ("embed", "tok.weight"),
    ("blocks.{i}.w", "h.{i}.w.weight", "transpose"),
    ("blocks.{i}.heads", "h.{i}.heads", "d heads size -> (heads size) d"),
    ("blocks.{i}.experts.{j}.up", "h.{i}.moe.{j}.up", "a b -> b a"),
    ("scan_{i}.b", "scan.{i}.b"),
    ("always", "always.{k}"),
]
TIED = {"tied": {"head.weight": "tok.weight"}}


def make_theirs(num_layers=3, num_experts=2) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    arrays = {"tok.weight": (7, 4)}
    for i in range(num_layers):
        arrays |= {f"h.{i}.w.weight": (6, 4), f"h.{i}.heads": (3 * 5, 4), f"scan.{i}.b": (4,), f"always.{i}": (2,)}
        arrays |= {f"h.{i}.moe.{j}.up": (8, 4) for j in range(num_experts)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in arrays.items()}


def expected(theirs, stacked):
    """Our arrays, written out by hand."""
    layers = {
        "w": [theirs[f"h.{i}.w.weight"].T for i in range(3)],
        "heads": [theirs[f"h.{i}.heads"].reshape(3, 5, 4).transpose(2, 0, 1) for i in range(3)],
    }
    ups = [[theirs[f"h.{i}.moe.{j}.up"].T for j in range(2)] for i in range(3)]
    biases = [theirs[f"scan.{i}.b"] for i in range(3)]
    ours = {"embed": theirs["tok.weight"], "always": np.stack([theirs[f"always.{i}"] for i in range(3)])}
    if stacked:
        ours |= {f"blocks.{name}": np.stack(values) for name, values in layers.items()}
        return ours | {"blocks.experts.up": np.array(ups), "scan.b": np.stack(biases)}
    ours |= {f"blocks.{i}.{name}": layers[name][i] for name in layers for i in range(3)}
    ours |= {f"blocks.{i}.experts.{j}.up": ups[i][j] for i in range(3) for j in range(2)}
    return ours | {f"scan_{i}.b": biases[i] for i in range(3)}


def shapes(arrays):
    return {name: jax.ShapeDtypeStruct(x.shape, x.dtype) for name, x in arrays.items()}


def some_slice(shape, rng):
    return tuple(slice(int(a), int(b)) for a, b in (sorted(rng.integers(0, size + 1, 2)) for size in shape))


@pytest.mark.parametrize("stacked", [True, False])
def test_arrays_and_their_slices_come_under_our_names_and_go_back(stacked):
    theirs, rng = make_theirs(), np.random.default_rng(1)
    ours = expected(theirs, stacked)
    imported = Imported(Arrays(theirs), {"rules": RULES}, shapes(ours))
    exported = Exported(Arrays(ours), {"rules": RULES})
    assert shapes(ours) == dict(imported.arrays)
    assert shapes(theirs) == dict(exported.arrays)
    for source, values in ((imported, ours), (exported, theirs)):
        for name, value in values.items():
            assert np.array_equal(read_whole(source, name), value), name
            for _ in range(30):
                index = some_slice(value.shape, rng)
                assert np.array_equal(source.read(name, index), value[index]), (name, index)


def test_a_slice_of_the_layers_reads_those_layers_alone():
    theirs = make_theirs()
    source = Arrays(theirs)
    imported = Imported(source, {"rules": RULES}, shapes(expected(theirs, stacked=True)))
    assert source.reads == []
    imported.read("blocks.w", (slice(1, 2), slice(0, 4), slice(2, 3)))
    imported.read("blocks.heads", (slice(2, 3), slice(1, 2), slice(1, 3), slice(0, 2)))
    assert source.reads == [("h.1.w.weight", (slice(2, 3), slice(0, 4))), ("h.2.heads", (slice(5, 15), slice(1, 2)))]


def refuse(theirs, ours, *facts, **fields):
    make = functools.partial(Imported, Arrays(theirs), {"rules": RULES, **fields}, shapes(ours), where="somewhere")
    refuses(make, *facts)


def test_what_does_not_fit_is_listed_on_either_side():
    theirs = make_theirs()
    ours = expected(theirs, stacked=True)
    masks = {**theirs, "h.0.mask": np.zeros((2, 2))}
    refuse(masks, ours, "somewhere", "not in the model", "h.0.mask", ignored=["*.masks"])
    Imported(Arrays(masks), {"rules": RULES, "ignored": ["h.*.mask"]}, shapes(ours))
    refuse({k: v for k, v in theirs.items() if k != "h.1.w.weight"}, ours, "missing", "h.1.w.weight", "blocks.w")
    refuse(theirs, {**ours, "extra.scale": np.zeros(2)}, "no rule", "extra.scale")
    fewer = {name: x if x.shape[0] != 3 else x[:2] for name, x in ours.items()}
    refuse(theirs, fewer, "not in the model", "always.2, h.2.heads")
    other = {**ours, "embed": np.zeros((8, 4), np.float32)}
    refuse(theirs, other, "tok.weight", "embed", "[7, 4]", "[8, 4]", "vocab_size")
    refuse({**theirs, "h.1.w.weight": np.zeros((6, 4), np.int8)}, ours, "h.1.w.weight", "int8", "float32")
    refuse({**theirs, "head.weight": theirs["tok.weight"] + 1}, ours, "head.weight", "tok.weight", "tied=False", **TIED)


def test_a_rule_for_other_dims_two_leaves_of_one_name_and_too_many_layers_are_refused():
    names = NameMap([("w", "w", "a b -> b a"), ("blocks.{i}.w", "h.{i}.w")])
    refuses(lambda: Exported(Arrays({"w": np.zeros(3)}), names), "w: its rule for 'w'", "1 dims [3]")
    refuses(lambda: Exported(Arrays({"blocks.w": np.zeros(())}), names), "blocks.w: its rule for 'h.{i}.w'", "0 dims")
    twice = {"rules": [("a", "x"), ("b", "x")]}
    refuses(lambda: Exported(Arrays({"a": np.zeros(3), "b": np.zeros(3)}), twice), "b and a", "'x'")
    many = {"blocks.w": jax.ShapeDtypeStruct((10**9, 4), "float32")}
    refuses(lambda: bind(names, many), "blocks.w", "1,000,000,000", "1,048,576")


def test_a_tied_copy_may_be_there_if_it_is_equal():
    theirs = make_theirs()
    ours, names = expected(theirs, stacked=True), {"rules": RULES, **TIED}
    Imported(Arrays(theirs), names, shapes(ours))
    Imported(Arrays({**theirs, "head.weight": theirs["tok.weight"]}), names, shapes(ours))
    assert "head.weight" not in Exported(Arrays(ours), names).arrays


def test_a_prefix_may_be_missing_from_all_names():
    rules = [("embed", "model.tok"), ("norm", "model.norm"), ("head", "head")]
    ours = {name: np.full(2, place) for place, name in enumerate(["embed", "norm", "head"])}
    for prefix in ("model.", ""):
        theirs = {f"{prefix}tok": ours["embed"], f"{prefix}norm": ours["norm"], "head": ours["head"]}
        imported = Imported(Arrays(theirs), {"rules": rules, "prefix": "model."}, shapes(ours))
        assert all(np.array_equal(read_whole(imported, name), ours[name]) for name in ours)
    both = {"tok": ours["embed"], "model.tok": ours["embed"], "norm": ours["norm"], "head": ours["head"]}
    refuses(lambda: Imported(Arrays(both), {"rules": rules, "prefix": "model."}, shapes(ours)), "tok and model.tok")


def test_layers_in_several_dtypes_come_in_the_one_that_holds_them_all():
    theirs = make_theirs()
    theirs["h.1.w.weight"] = theirs["h.1.w.weight"].astype(np.float16)
    ours = expected(theirs, stacked=True)
    imported = Imported(Arrays(theirs), {"rules": RULES}, shapes(ours))
    assert imported.arrays["blocks.w"].dtype == np.float32
    assert np.array_equal(read_whole(imported, "blocks.w"), ours["blocks.w"])


def test_a_malformed_mapping_is_refused():
    for value, fact in (
        ({"rules": [("a",)]}, "('a',)"),
        ({"rules": ["ab"]}, "'ab'"),
        ({"rules": [("a.{i}", "b")]}, "{i}"),
        ({"rules": [("a", "b", "x y -> y")]}, "'x y -> y'"),
        ({"rules": [("a", "b", "turn")]}, "'turn'"),
        ({"rule": []}, "rules"),
        ({"rules": [], "extra": 1}, "extra"),
        (None, "None"),
    ):
        refuses(functools.partial(as_name_map, value), fact)


@pytest.mark.parametrize(
    ("dims", "shape"),
    [
        ("a b -> b a", (6, 4)),
        ("d heads size -> (heads size) d", (3, 4, 5)),
        ("in (heads pair=2 half=3) -> (heads half pair) in", (5, 24)),
        ("(a b=2) c -> c b a", (6, 4)),
        ("(a b=4) (c d=2) -> (c a) (b d)", (8, 6)),
        ("a b (c d=3) -> (d a) b c", (2, 3, 6)),
    ],
)
def test_slices_are_the_same_parts_in_both_orders_of_dims(dims, shape):
    """Against einops' meaning of the text: the whole array, split, transposed and merged."""
    dims = parse_dims(dims)
    ours = np.arange(np.prod(shape)).reshape(shape)
    sizes = dims.sizes_of(shape)
    flat = [name for group in dims.ours for name in group]
    split = ours.reshape([sizes[name] for name in flat])
    order = [flat.index(name) for group in dims.theirs for name in group]
    theirs = split.transpose(order).reshape(dims.their_shape(shape))
    rng = np.random.default_rng(0)
    for _ in range(50):
        at = random_slices(rng, shape)
        assert np.array_equal(dims.to_ours(theirs[dims.their_index(shape, at)], shape, at), ours[at])
        at = random_slices(rng, theirs.shape)
        assert np.array_equal(dims.to_theirs(ours[dims.our_index(shape, at)], shape, at), theirs[at])


def random_slices(rng, shape):
    ends = [sorted(rng.integers(0, size + 1, size=2)) for size in shape]
    return tuple(slice(int(start), int(stop)) for start, stop in ends)


def test_parts_of_a_dim_need_sizes_that_divide_it():
    refuses(lambda: parse_dims("in (heads half) -> (half heads) in"), "(heads half) -> (half heads) in", "half=64")
    refuses(lambda: parse_dims("a (b c=2) -> (c b) a").their_shape((3, 5)), "size 5", "[3, 5]", "c=2")
    refuses(lambda: parse_dims("a (b=2 c=2) -> (c b) a").their_shape((3, 8)), "size 8", "b=2 c=2")
