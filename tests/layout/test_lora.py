"""Low-rank adapters in the layout: their parts, where these are, what else is trained, and what is refused."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.layout.lora import MAGNITUDE, A, B, also, find_adapters
from jfsdp.layout.units import UnitInfo
from tests.layout.tables import abstract, make_table
from tests.models_small import Block, LinenBlock, Tower, linen_tower
from tests.refusals import refuses
from tests.sharding import fully_shard

LEAVES: dict[str, Any] = {
    "layers.up": (3, 8, 16),
    "layers.bias": (3, 16),
    "query": (12, 4, 6),
    "out": (4, 6, 12),
    "embed": (10, 12),
    "ids": ((4, 4), "int32"),
}
UNITS = {
    "": UnitInfo("", "Net", 0, ("query", "out", "embed", "ids")),
    "layers": UnitInfo("layers", "Layer", 1, ("layers.up", "layers.bias")),
}
STACKED = {path: int(path.startswith("layers.")) for path in LEAVES}


def found(*loras: jfsdp.LoRA):
    return find_adapters(loras, {path: abstract(leaf) for path, leaf in LEAVES.items()}, STACKED, {})


def lora(targets, **options):
    return jfsdp.LoRA(**({"targets": targets, "rank": 2} | options))


def shapes(one):
    return {one.name(part): one.part_shape(part) for part in one.parts}


def test_parts_of_a_stacked_matrix_have_its_layer_dim():
    (one,) = found(lora("layers.up", dora=True)).values()
    assert shapes(one) == {
        "layers.up.lora_a": (3, 8, 2),
        "layers.up.lora_b": (3, 2, 16),
        "layers.up.lora_magnitude": (3, 16),
    }


def test_a_number_says_which_dims_of_a_larger_array_take_the_input():
    adapters = found(lora({"query": 1, "out": 2}, dora=True), lora("embed", rank=3))
    assert {path: list(shapes(one).values()) for path, one in adapters.items()} == {
        "query": [(12, 2), (2, 4, 6), (4, 6)],
        "out": [(4, 6, 2), (2, 12), (12,)],
        "embed": [(10, 3), (3, 12)],
    }


def test_the_scale_is_alpha_over_the_rank_or_over_its_root():
    assert found(lora("embed", rank=4, alpha=6.0))["embed"].scale == 1.5
    assert found(lora("embed", rank=4, alpha=6.0, rslora=True))["embed"].scale == 3


CUTS = {
    "layers.up by out": ("layers.up", 1, (-1, "tensor"), {A: P(None, None, None), B: P(None, None, "tensor")}),
    "layers.up by in": ("layers.up", 1, (0, "tensor"), {A: P(None, "tensor", None), B: P(None, None, None)}),
    "heads of query": ("query", 1, (1, "tensor"), {A: P(None, None), B: P(None, "tensor", None)}),
    "size of query": ("query", 1, (2, "tensor"), {B: P(None, None, "tensor"), MAGNITUDE: P(None, "tensor")}),
    "heads of out": ("out", 2, (0, "tensor"), {A: P("tensor", None, None), B: P(None, None), MAGNITUDE: P(None)}),
    "size of out": ("out", 2, (1, "tensor"), {A: P(None, "tensor", None), B: P(None, None)}),
    "out of out": ("out", 2, (-1, "tensor"), {A: P(None, None, None), B: P(None, "tensor"), MAGNITUDE: P("tensor")}),
}


def table(*loras: jfsdp.LoRA, mesh=None, **options):
    adapters = found(*loras)
    parts = {name: shape for one in adapters.values() for name, shape in shapes(one).items()}
    units = {
        name: dataclasses.replace(
            unit, leaves=(*unit.leaves, *(part for part in parts if part.rpartition(".")[0] in unit.leaves))
        )
        for name, unit in UNITS.items()
    }
    given: dict[str, Any] = {"units": units, "min_size": 0, "adapters": adapters, "also": also(loras)} | options
    return make_table({**LEAVES, **parts}, "full_shard", mesh or {"fsdp": 2, "tensor": 2}, **given)


@pytest.mark.parametrize("case", CUTS)
def test_parts_are_cut_where_they_share_a_cut_dim_of_the_leaf(case):
    path, num_in, cut, specs = CUTS[case]
    layout = table(lora({path: num_in}, dora=True), cuts={path: cut})
    assert {part: layout.by_path[f"{path}.{part}"].spec("param") for part in specs} == specs


def test_parts_are_whole_on_every_device_unless_placed_otherwise():
    names = ["layers.up.lora_a", "layers.up.lora_b"]
    layout = table(lora("layers.up"), mesh={"fsdp": 2})
    stages = [layout.by_path[name].spec(stage) for name in names for stage in ("param", "grad", "opt")]
    assert set(stages) == {P(None, None, None)}
    assert "fsdp" in layout.by_path["layers.up"].spec("param")
    layout = table(lora("layers.up", placement="full_shard"), mesh={"fsdp": 2})
    assert all("fsdp" in layout.by_path[name].spec("param") for name in names)


def trained(layout):
    return {leaf.path for leaf in layout.leaves if leaf.trainable}


def test_all_is_frozen_but_adapters_and_what_is_trained_also():
    parts = {"query.lora_a", "query.lora_b"}
    assert trained(table(lora({"query": 1}))) == parts
    assert trained(table(lora({"query": 1}, also=["layers.bias", "embed"]))) == {*parts, "layers.bias", "embed"}
    assert trained(table(lora({"query": 1}), also="layers")) == {*parts, "layers.up", "layers.bias"}
    assert trained(table(lora({"query": 1}), also="layers", frozen="layers.up")) == {*parts, "layers.bias"}


def test_only_frozen_floating_leaves_change_their_dtype_at_rest():
    layout = table(lora({"query": 1}), also="embed", frozen_dtype="bfloat16", ignored="layers.bias")
    dtypes = {leaf.path: leaf.dtype for leaf in layout.leaves}
    assert {path for path, dtype in dtypes.items() if dtype == "bfloat16"} == {"layers.up", "query", "out"}
    assert dtypes["ids"] == "int32"
    assert layout.by_path["query"].stage("param").dtype == "bfloat16"
    own = {"layers": {"mp_policy": jfsdp.MixedPrecisionPolicy()}}
    assert table(lora({"query": 1}), frozen_dtype="bfloat16", per_unit=own).by_path["layers.up"].dtype == "float32"
    alone = table(lora({"query": 1}), adapters=None, also=None, frozen="out", frozen_dtype="float16")
    assert {leaf.path for leaf in alone.leaves if leaf.dtype == "float16"} == {"out"}


REFUSED: list[tuple[list[jfsdp.LoRA], tuple[str, ...]]] = [
    ([lora("nope")], ("'nope'", "no parameter")),
    ([lora("layers.bias")], ("layers.bias:", "(16,)", "matrix")),
    ([lora("ids")], ("ids:", "int32", "matrix")),
    ([lora("query")], ("query:", "targets={'query': 1}")),
    ([lora({"query": 0})], ("query:", "0 of its 3 dims", "1..2")),
    ([lora({"query": 3})], ("query:", "3 of its 3 dims")),
    ([lora({"layers.up": 2})], ("layers.up:", "2 of its 2 dims", "1..1")),
    ([lora("embed", rank=11)], ("embed:", "rank 11", "10 x 12", "up to 10")),
    ([lora({"query": 1}, rank=13)], ("query:", "rank 13", "12 x 24")),
    ([lora("embed"), lora("em*", rank=3)], ("embed:", "two LoRAs")),
    ([lora({"query": 1, "quer*": 2})], ("query:", "differ")),
    ([lora([])], ("targets are empty",)),
    ([lora(None)], ("targets are empty",)),
]


def test_what_cannot_have_an_adapter_is_refused_by_name():
    for loras, facts in REFUSED:
        refuses(functools.partial(found, *loras), *facts)
    for options, error in (
        ({"rank": 0}, ValueError),
        ({"rank": True}, TypeError),
        ({"alpha": "1"}, TypeError),
        ({"alpha": float("nan")}, ValueError),
    ):
        refuses(functools.partial(lora, "embed", **options), *options, error=error)
    refuses(lambda: table(lora("layers.up", also="layers")), "layers.up", "'layers'")


@pytest.mark.parametrize("options", [{"also": "nope"}, {"placement": "zero9"}, {"placement": 7}])
def test_other_options_that_cannot_be_are_refused(options):
    with pytest.raises(ValueError, match=str(next(iter(options.values())))):
        fully_shard(Tower, mesh=jfsdp.make_mesh(), units=[Block], lora=lora("**.up.kernel", **options))


def test_a_model_is_wrapped_once_by_each_function_in_either_order():
    one, codes = lora("**.up.kernel"), {"**.up.kernel": "nf4"}
    both = jfsdp.lora(jfsdp.quantize(Tower, codes), one)
    assert both == jfsdp.quantize(jfsdp.lora(Tower, [one]), codes)
    refuses(lambda: jfsdp.lora(both, one), "by jfsdp.lora", "all loras in one call")
    refuses(lambda: jfsdp.quantize(both, codes), "by jfsdp.quantize", "all codecs in one call")
    refuses(lambda: jfsdp.lora(Tower, []), "loras is empty")
    refuses(lambda: jfsdp.quantize(Tower, {}), "codecs is empty")
    refuses(lambda: jfsdp.fully_shard(jfsdp.lora(jfsdp.fully_shard(Tower), one)), "is already sharded", error=TypeError)


FROZEN_BFLOAT16 = jfsdp.MixedPrecisionPolicy(frozen_dtype="bfloat16")
SOURCES = {"nnx": (Tower, [Block]), "linen": (linen_tower(), [LinenBlock])}


@pytest.mark.parametrize("kind", SOURCES)
def test_an_optimizer_sees_the_users_tree_with_adapters_in_the_place_of_arrays(kind):
    source, units = SOURCES[kind]
    model = fully_shard(
        source, mesh=jfsdp.make_mesh(), units=units, lora=lora("**.up.kernel", also="head.bias", dora=True)
    )
    seen: list[Any] = []

    def remember(params):
        seen.append(params)
        return optax.EmptyState()

    model.abstract_state(optax.GradientTransformation(remember, optax.identity().update))
    tree = nnx.to_pure_dict(seen[-1]) if kind == "nnx" else seen[-1]
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda x: isinstance(x, optax.MaskedNode))
    found = {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}
    arrays = {path: leaf.shape for path, leaf in found.items() if not isinstance(leaf, optax.MaskedNode)}
    assert arrays == {
        "blocks.up.kernel.lora_a": (3, 16, 2),
        "blocks.up.kernel.lora_b": (3, 2, 64),
        "blocks.up.kernel.lora_magnitude": (3, 64),
        "head.bias": (37,),
    }
    masked = {path for path, leaf in found.items() if isinstance(leaf, optax.MaskedNode)}
    rest = {"blocks.up.bias", "blocks.down.kernel", "blocks.norm.scale", "embed.embedding", "head.kernel"}
    assert masked == rest


@pytest.mark.parametrize("kind", SOURCES)
def test_first_adapters_change_nothing_and_frozen_weights_are_those_without_adapters_cast(kind):
    source, units = SOURCES[kind]
    mesh = jfsdp.make_mesh(devices=jax.devices()[:2])
    options: dict[str, Any] = {"mesh": mesh, "units": units, "min_size": 8}
    base = fully_shard(source, **options).init(optax.sgd(1.0)).params
    model = fully_shard(source, lora=lora("**.up.kernel", dora=True), mp_policy=FROZEN_BFLOAT16, **options)
    params = model.init(optax.sgd(1.0)).params
    assert params.keys() == {*base, *(f"blocks.up.kernel.{part}" for part in (A, B, MAGNITUDE))}
    for name, value in base.items():
        assert params[name].dtype == jnp.bfloat16
        np.testing.assert_array_equal(params[name], value.astype(jnp.bfloat16), err_msg=name)
    first, second, norms = (np.asarray(params[f"blocks.up.kernel.{part}"]) for part in (A, B, MAGNITUDE))
    assert not second.any()
    assert 0.2 < np.abs(first).max() <= 0.25  # +-1/sqrt(in)
    kernel = np.asarray(base["blocks.up.kernel"])[:, :16, :64]
    np.testing.assert_allclose(norms, np.linalg.norm(kernel, axis=1), rtol=1e-5)


def test_a_list_of_parameters_has_no_adapters():
    class Net(nnx.Module):
        def __init__(self, rngs):
            self.kernels = nnx.List([nnx.Param(jnp.ones((4, 4))) for _ in range(2)])

    with pytest.raises(ValueError, match=r"kernels\.0: is in a list"):
        fully_shard(Net, mesh=jfsdp.make_mesh(), lora=lora("kernels.0"))


class Boxed(linen.Module):
    @linen.compact
    def __call__(self, x):
        init = linen.with_partitioning(linen.initializers.ones, (None, "tensor"))
        return linen.Dense(8, kernel_init=init, name="up")(x)


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")
def test_metadata_of_a_model_cuts_the_parts_too():
    model = fully_shard(
        (Boxed(), (jnp.ones((2, 4)),)),
        mesh=jfsdp.make_mesh(fsdp=4, tensor=2),
        units=["up"],
        axis_rules={"tensor": "tensor"},
        lora=lora("up.kernel", rank=2),
        min_size=0,
    )
    specs = {name: model.layout.by_path[f"up.kernel.{name}"].spec("param") for name in (A, B)}
    assert specs == {A: P(None, None), B: P(None, "tensor")}


def test_the_users_choice_of_dims_is_of_their_own_leaves():
    seen = []
    options = {"lora": jfsdp.LoRA("**.up.kernel", rank=2), "units": [Block]}
    fully_shard(Tower, shard_dim=lambda path, shape: seen.append(path), **options)
    assert "blocks.up.kernel" in seen
    assert not [path for path in seen if "lora" in path]
