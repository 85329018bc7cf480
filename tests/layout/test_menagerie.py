"""A menagerie of awkward leaves: every stage of each, in full, under five strategies on three meshes."""

import itertools
from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf, Stage
from jfsdp.layout.mesh import make_abstract_mesh, split_mesh
from jfsdp.layout.units import ModuleInfo, Unit, resolve_units
from tests.layout.tables import make_table

# Path -> shape, dtype. Those under `layers.` stand in a stack of 6; `pair.table` is reached as embedding and as head.
MENAGERIE: dict[str, Any] = {
    "head": ((64, 100), "float32"),
    "body.scalar": ((), "float32"),
    "body.vector": ((4096,), "float32"),
    "body.short": ((1023,), "float32"),
    "body.prime": ((1031,), "float32"),
    "body.prime_matrix": ((1031, 37), "float32"),
    "body.vocabulary": ((50257, 768), "float32"),
    "body.bias": ((50257,), "float32"),
    "body.empty": ((0, 64), "float32"),
    "body.integer": ((64, 64), "int32"),
    "body.complex": ((64, 33), "complex64"),
    "body.half": ((64, 64), "bfloat16"),
    "body.frozen": ((64, 64), "float32"),
    "body.ignored": ((64, 64), "float32"),
    "pair.table": ((640, 64), "float32"),
    "layers.kernel": ((6, 64, 48), "float32"),
    "layers.scale": ((6, 64), "float32"),
    "layers.prime": ((6, 31, 37), "float32"),
    "layers.empty": ((6, 0, 64), "float32"),
}
OWNER = {"head": "", "pair.table": "pair"}
NOT_CAST = ("body.integer", "body.complex", "body.half", "body.ignored")  # used in the dtype that they have
NOT_TRAINED = {"body.integer": "not trained: int32", "body.frozen": "frozen by 'body.frozen'"}
SUM_DTYPE = {"body.complex": "complex64"}

# Leaves that are whole everywhere, and why.
WHOLE = {
    "body.scalar": "replicated: 1 elements, below min_size 1024",
    "body.short": "replicated: 1023 elements, below min_size 1024",
    "body.empty": "replicated: 0 elements, below min_size 1024",
    "body.ignored": "replicated: ignored by 'body.ignored'",
    "layers.scale": "replicated: 64 elements, below min_size 1024",
    "layers.empty": "replicated: 0 elements, below min_size 1024",
}

# The split dim and its padded size (None: it divides) over 8, 4 and 3 shards.
DIMS: dict[str, dict[int, tuple[int, int | None]]] = {
    "head": {8: (0, None), 4: (0, None), 3: (1, 102)},
    "body.vector": {8: (0, None), 4: (0, None), 3: (0, 4098)},
    "body.prime": {8: (0, 1032), 4: (0, 1032), 3: (0, 1032)},
    "body.prime_matrix": {8: (0, 1032), 4: (0, 1032), 3: (0, 1032)},
    "body.vocabulary": {8: (1, None), 4: (1, None), 3: (1, None)},
    "body.bias": {8: (0, 50264), 4: (0, 50260), 3: (0, 50259)},
    "body.integer": {8: (0, None), 4: (0, None), 3: (0, 66)},
    "body.complex": {8: (0, None), 4: (0, None), 3: (1, None)},
    "body.half": {8: (0, None), 4: (0, None), 3: (0, 66)},
    "body.frozen": {8: (0, None), 4: (0, None), 3: (0, 66)},
    "pair.table": {8: (0, None), 4: (0, None), 3: (0, 642)},
    "layers.kernel": {8: (1, None), 4: (1, None), 3: (2, None)},
    "layers.prime": {8: (1, 32), 4: (1, 32), 3: (2, 39)},
}

W, F, A = (), ("fsdp",), ("replica", "fsdp")
S = ("fsdp", "replica")  # what a group splits first, the groups split further
MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "3": {"fsdp": 3}}
NODES = {"8": 2, "2x4": 4, "3": 3}  # devices of one host
STRATEGIES = {"full_shard": None, "zero1": "bfloat16", "hfsdp": None, "node": None, "all": None}
CASES = list(itertools.product(STRATEGIES, MESHES))

# Axes of param, work, kept, grad and opt of a leaf that is split and trained, and into how many parts the finest is.
STAGES = {
    ("full_shard", "8"): (F, None, F, F, F, 8),
    ("full_shard", "2x4"): (F, None, F, F, F, 4),
    ("full_shard", "3"): (F, None, F, F, F, 3),
    ("zero1", "8"): (F, W, W, F, F, 8),
    ("zero1", "2x4"): (F, W, W, F, F, 4),
    ("zero1", "3"): (F, W, W, F, F, 3),
    ("hfsdp", "8"): (F, None, F, F, F, 8),
    ("hfsdp", "2x4"): (F, None, F, S, S, 8),
    ("hfsdp", "3"): (F, None, F, F, F, 3),
    ("node", "8"): (F, None, F, F, F, 8),
    ("node", "2x4"): (F, None, F, F, F, 4),
    ("node", "3"): (F, None, F, F, F, 3),
    ("all", "8"): (F, None, F, F, F, 8),
    ("all", "2x4"): (A, None, A, A, A, 8),
    ("all", "3"): (F, None, F, F, F, 3),
}
KEPT_WAYS = {("node", "8"): 2}


def menagerie(strategy: str, mesh: str) -> Layout:
    leaves = tuple(MENAGERIE)
    under = {name: tuple(path for path in leaves if path.startswith(name + ".")) for name in ("body", "pair", "layers")}
    modules = [ModuleInfo("", Zoo, leaves), *(ModuleInfo(name, Zoo, paths) for name, paths in under.items())]
    modules += [ModuleInfo(name, Zoo, (), under["pair"]) for name in ("pair.embed", "pair.head")]
    units = resolve_units(
        ["body", "pair", Unit("layers", stacked=1)], modules, {path: shape for path, (shape, _) in MENAGERIE.items()}
    )
    return make_table(
        MENAGERIE,
        strategy,
        MESHES[mesh],
        units=units,
        param_dtype=STRATEGIES[strategy],
        node_size=NODES[mesh],
        frozen="body.frozen",
        ignored="body.ignored",
    )


class Zoo:
    pass


def expected(path: str, strategy: str, mesh: str) -> Leaf:
    """Read the row of one leaf out of the tables above."""
    shape, dtype = MENAGERIE[path]
    param, work, kept, grad, opt, num_shards = STAGES[strategy, mesh]
    ways = KEPT_WAYS.get((strategy, mesh))
    if path in NOT_CAST and work is not None:
        param, work = work, None  # one copy serves
    if path in NOT_TRAINED:
        num_shards = {(): 1, F: MESHES[mesh]["fsdp"], A: 8}[param]
    if path == "head":
        kept, ways = W, None  # the root stays gathered
    if path in WHOLE or num_shards == 1:
        param, work, kept, grad, opt, ways, num_shards = W, None, W, W, W, None, 1
    use = "bfloat16" if strategy == "zero1" and path not in NOT_CAST else dtype
    is_trained = path not in NOT_TRAINED
    dim, padding, reason = place(path, shape, num_shards)
    stages = {
        "param": Stage(param, dtype),
        "work": None if work is None else Stage(work, use),
        "use": Stage(W, use),
        "kept": Stage(kept, use, ways=ways),
        "grad": Stage(grad, SUM_DTYPE.get(path, "float32")) if is_trained else None,
        "opt": Stage(opt, dtype) if is_trained else None,
    }
    unit, stacked = OWNER.get(path, path.partition(".")[0]), int(path.startswith("layers."))
    reason = reason if is_trained else f"{reason}; {NOT_TRAINED[path]}"
    return Leaf(path, shape, dtype, unit, stacked, is_trained, dim, padding, reason, tuple(stages.items()))


def place(path: str, shape: tuple[int, ...], num_shards: int) -> tuple[int | None, int, str]:
    if path in WHOLE:
        return None, 0, WHOLE[path]
    if num_shards == 1:
        return None, 0, "whole: this strategy splits nothing over this mesh"
    dim, padded = DIMS[path][num_shards]
    if padded is None:
        return dim, 0, f"dim {dim}, the first divisible by {num_shards}"
    reason = f"dim {dim}, padded {shape[dim]} -> {padded}: no dim divisible by {num_shards}"
    return dim, padded - shape[dim], reason


def test_every_leaf_is_in_one_table():
    assert WHOLE.keys() | DIMS.keys() == MENAGERIE.keys()
    assert not WHOLE.keys() & DIMS.keys()
    assert set(STAGES) == set(CASES)


@pytest.mark.parametrize(("strategy", "mesh"), CASES)
@pytest.mark.parametrize("path", MENAGERIE)
def test_every_stage_of_every_leaf(path, strategy, mesh):
    assert menagerie(strategy, mesh).by_path[path] == expected(path, strategy, mesh)


@pytest.mark.parametrize(("strategy", "mesh"), CASES)
def test_specs_put_the_axes_of_every_stage_on_the_split_dim(strategy, mesh):
    layout = menagerie(strategy, mesh)
    whole_mesh = make_abstract_mesh(MESHES[mesh])
    parts = split_mesh(whole_mesh, layout.sub_axes)  # pyright: ignore[reportArgumentType]
    names = {"fsdp": ("fsdp_0", "fsdp_1")} if (strategy, mesh) in KEPT_WAYS else {}
    for leaf in layout.leaves:
        for name, stage in leaf.stages:
            if stage is None:
                continue
            axes = [part for axis in stage.axes for part in names.get(axis, (axis,))]
            axes = ["fsdp_1"] if stage.ways else axes
            entries: list[Any] = [None] * len(leaf.shape)
            if axes and leaf.dim is not None:
                entries[leaf.dim] = tuple(axes) if len(axes) > 1 else axes[0]
            assert layout.sharding(parts, leaf, name).spec == P(*entries), (leaf.path, name)


# The same in words, for reading: what a device holds of some leaves.
SPECS = {
    ("full_shard", "8", "body.prime_matrix", "param"): (P("fsdp", None), (129, 37)),
    ("full_shard", "3", "layers.kernel", "opt"): (P(None, None, "fsdp"), (6, 64, 16)),
    ("zero1", "2x4", "body.vocabulary", "param"): (P(None, "fsdp"), (50257, 192)),
    ("zero1", "2x4", "body.vocabulary", "work"): (P(None, None), (50257, 768)),
    ("full_shard", "2x4", "body.bias", "grad"): (P("fsdp"), (12565,)),
    ("hfsdp", "2x4", "pair.table", "param"): (P("fsdp", None), (160, 64)),
    ("hfsdp", "2x4", "pair.table", "opt"): (P(("fsdp", "replica"), None), (80, 64)),
    ("node", "2x4", "layers.prime", "kept"): (P(None, "fsdp", None), (6, 8, 37)),
    ("full_shard", "8", "layers.empty", "param"): (P(None, None, None), (6, 0, 64)),
    ("full_shard", "8", "body.scalar", "param"): (P(), ()),
}


@pytest.mark.parametrize(("strategy", "mesh", "path", "stage"), SPECS)
def test_a_device_holds_its_part(strategy, mesh, path, stage):
    layout = menagerie(strategy, mesh)
    leaf = layout.by_path[path]
    sharding = layout.sharding(make_abstract_mesh(MESHES[mesh]), leaf, stage)
    assert (sharding.spec, sharding.shard_shape(leaf.stored_shape)) == SPECS[strategy, mesh, path, stage]


@pytest.mark.parametrize("path", MENAGERIE)
def test_one_device_holds_every_leaf_whole_and_unpadded(path):
    layout = make_table(MENAGERIE, "full_shard", {"fsdp": 1}, min_size=0)
    leaf = layout.by_path[path]
    assert (leaf.dim, leaf.padding, leaf.stored_shape) == (None, 0, leaf.shape)
    assert {stage.axes for _, stage in leaf.stages if stage} == {W}
    assert leaf.reason.startswith("whole: this strategy splits nothing over this mesh")


def test_a_tied_leaf_is_owned_once_by_the_module_that_holds_both_its_readers():
    layout = menagerie("full_shard", "8")
    assert [unit.name for unit in layout.units if "pair.table" in unit.leaves] == ["pair"]
