"""The Layout: the stages of every leaf under every preset, its identity, its text, bytes by formula at real size."""

import json
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P

import jfsdp
from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.policy import OffloadPolicy
from jfsdp.layout.report import describe_stage, layout_to_dict, padding_elements, show_bytes
from tests.layout.tables import make_table
from tests.models_small import Block, Tower
from tests.refusals import refusing
from tests.sharding import fully_shard
from tests.ways import WAYS

W, G, A = (), ("fsdp",), ("replica", "fsdp")
S = ("fsdp", "replica")  # what a group splits first, the groups split further
LEAVES = {"block.w": (64, 64), "block.scale": (64,), "block.table": ((64, 64), "int32"), "head": (64, 100)}


def make_layout(strategy: Any = "full_shard", mesh: Any = None, **more: Any) -> Layout:
    return make_table(LEAVES, strategy, mesh, **more)


def stages(leaf: Leaf) -> dict[str, Any]:
    return {name: (stage.axes, stage.dtype) if stage else None for name, stage in leaf.stages}


# Axes of param, work, kept, grad and opt on replica=2,fsdp=4 of a float32 leaf used in bfloat16 (None: no such copy).
MIXED = {
    "ddp": (W, None, W, W, W),
    "zero1": (G, W, W, G, G),
    "zero2": (G, W, W, G, G),
    "full_shard": (G, None, G, G, G),
    "kept": (G, None, W, G, G),
    "node": (G, None, G, G, G),
    "hfsdp": (S, G, G, S, S),
    "all": (A, None, A, A, A),
}
# The same in float32 throughout: the strategies that keep a copy beside the master have one set of parameters instead.
FULL = MIXED | {"zero1": (W, None, W, G, G), "zero2": (W, None, W, G, G), "hfsdp": (G, None, G, S, S)}


@pytest.mark.parametrize("strategy", WAYS)
def test_stages_with_a_low_precision_in_use(strategy):
    param, work, kept, grad, opt = MIXED[strategy]
    leaves = make_layout(strategy, param_dtype="bfloat16").by_path
    assert stages(leaves["block.w"]) == {
        "param": (param, "float32"),
        "work": None if work is None else (work, "bfloat16"),
        "use": (W, "bfloat16"),
        "kept": (kept, "bfloat16"),
        "grad": (grad, "float32"),
        "opt": (opt, "float32"),
    }
    small, table = leaves["block.scale"], leaves["block.table"]
    assert {stage and stage[0] for stage in stages(small).values()} == {W, None}, "whole at every stage"
    assert stages(leaves["head"])["kept"] == (W, "bfloat16"), "the root is kept whole"
    assert {stage[1] for stage in stages(table).values() if stage} == {"int32"}, "never cast, and not trained"
    assert (table.trainable, stages(table)["grad"], stages(table)["opt"]) == (False, None, None)
    assert not small.has_work and not table.has_work


@pytest.mark.parametrize("strategy", WAYS)
def test_stages_in_one_precision_have_no_second_copy(strategy):
    param, _, kept, grad, opt = FULL[strategy]
    assert stages(make_layout(strategy).by_path["block.w"]) == {
        "param": (param, "float32"),
        "work": None,
        "use": (W, "float32"),
        "kept": (kept, "float32"),
        "grad": (grad, "float32"),
        "opt": (opt, "float32"),
    }


def test_each_stage_has_the_dtype_of_its_leaf():
    """Param, use, gradient and optimizer; only what is real and in float32 is used in the lower precision."""
    wanted = {
        "float32": ("float32", "bfloat16", "float32", "float32"),
        "int32": ("int32", "int32", None, None),
        "complex64": ("complex64", "complex64", "complex64", "complex64"),
        "bfloat16": ("bfloat16", "bfloat16", "float32", "bfloat16"),
    }
    for leaf in make_table({dtype: ((64, 64), dtype) for dtype in wanted}, "zero1", param_dtype="bfloat16").leaves:
        stages = dict(leaf.stages)
        assert tuple(one and one.dtype for one in map(stages.get, ("param", "use", "grad", "opt"))) == wanted[leaf.path]


@pytest.mark.parametrize("strategy", ["all", "hfsdp"])
def test_with_one_replica_states_over_both_axes_are_full_sharding(strategy):
    for dtype in (None, "bfloat16"):
        hybrid = make_layout(strategy, {"fsdp": 8}, param_dtype=dtype)
        full = make_layout("full_shard", {"fsdp": 8}, param_dtype=dtype)
        assert hybrid.leaves == full.leaves


def test_sharding_in_groups_of_one_is_ddp():
    """The sharding factor of the FSDP paper: 1 is replication."""
    hybrid = make_layout("full_shard", {"replica": 8, "fsdp": 1})
    ddp = make_layout("ddp", {"replica": 8, "fsdp": 1}, reshard=False)
    assert [stages(leaf) for leaf in hybrid.leaves] == [stages(leaf) for leaf in ddp.leaves]


def test_parameters_are_not_split_over_the_model_axes():
    layout = make_layout("full_shard", {"fsdp": 4, "tensor": 8})
    assert {axis for leaf in layout.leaves for stage in stages(leaf).values() if stage for axis in stage[0]} == {"fsdp"}


def test_spec_of_a_slice_has_lost_its_layer_dims():
    layout = fully_shard(Tower, mesh=jfsdp.make_abstract_mesh({"fsdp": 8}), units=[Block], min_size=1).layout
    leaf = layout.by_path["blocks.up.kernel"]
    assert (leaf.shape, leaf.stacked) == ((3, 16, 64), 1)
    assert leaf.spec("param") == P(None, "fsdp", None)
    assert leaf.spec("param", sliced=1) == P("fsdp", None)


def test_a_stage_that_a_leaf_has_not_is_an_error_with_its_path():
    with refusing("block.w", "'work'", "dim 0", "4"):
        make_layout().by_path["block.w"].spec("work")
    with refusing("block.table", "'opt'", "int32"):
        make_layout().by_path["block.table"].spec("opt")


CHANGES: dict[str, dict[str, Any]] = {
    "strategy": {"strategy": "zero1"},
    "mesh": {"mesh": {"replica": 4, "fsdp": 2}},
    "precision": {"param_dtype": "bfloat16"},
    "min_size": {"min_size": 1},
    "resharding": {"reshard": False},
    "remat": {"remat": "none"},
    "remat of one unit": {"per_unit": {"block": {"remat": "dots"}}},
    "number of devices": {"reshard": 2},
    "frozen": {"frozen": "head"},
    "ignored": {"ignored": "head"},
    "placement": {"placements": {"head": P(None, "fsdp")}},
    "offload": {"offload": OffloadPolicy(opt_state=True)},
}


def test_layouts_are_equal_exactly_when_nothing_differs():
    one, same = make_layout(), make_layout()
    assert one is not same and one == same and hash(one) == hash(same)
    for change, options in CHANGES.items():
        assert one != make_layout(**options), change


def test_text_has_a_line_for_every_leaf_and_says_how_it_differs_from_most():
    layout = make_layout("zero1", {"fsdp": 6}, param_dtype="bfloat16", frozen="head")
    top, _, table = str(layout).partition("\nmost leaves: ")
    most, header, *rows = table.splitlines()
    assert top.startswith("zero1 on fsdp=6: ") and most == "float32 at rest, bfloat16 in use, trained"
    assert header.split() == ["shape", "split", "params/device"]
    assert [row.split("  ")[0] for row in rows if row[0] != " "] == [
        "(root): Net, kept whole after forward, remat none",
        "block: Net, kept whole after forward, remat full",
    ]
    assert {row.split()[0]: " ".join(row.split()[1:]) for row in rows if row[0] == " "} == {
        "head": "64 x 100 1/6 on dim 1 17.0 KiB frozen, 2 padded",
        "block.scale": "64 whole 256 bytes",
        "block.table": "64 x 64 whole 16.0 KiB",
        "int32": "at rest, int32 in use, not trained",
        "block.w": "64 x 64 1/6 on dim 0 11.0 KiB 2 padded",
    }


@pytest.mark.parametrize("strategy", WAYS)
def test_text_fits_its_width_and_cuts_no_path(strategy):
    job = jfsdp.trainer.find_job("llama-70b").with_config(num_layers=2, stacked=False)
    mesh = jfsdp.make_abstract_mesh({"replica": 2, "fsdp": 6, "tensor": 8})
    options: dict[str, Any] = {"reshard_after_forward": 2} if strategy == "node" else {"strategy": WAYS[strategy]}
    layout = fully_shard(job.model, mesh=mesh, units=job.units, placements=job.placements, **options).layout
    lines = str(layout).splitlines()
    assert max(map(len, lines)) <= 80
    assert {line.split()[0] for line in lines} >= {leaf.path for leaf in layout.leaves}


def test_sizes_are_in_the_largest_unit():
    shown = [show_bytes(size) for size in (0, 1023, 1024, 10 * 2**20 - 1, 788_004_864, 2_818_572_288, 2**50)]
    assert shown == ["0 bytes", "1023 bytes", "1.00 KiB", "10.00 MiB", "752 MiB", "2.62 GiB", "1024 TiB"]


def test_stages_are_described_with_axes_ways_and_memory():
    layout = make_layout(reshard=2, offload=OffloadPolicy(params=True))
    leaf = layout.by_path["head"]
    assert describe_stage(leaf, leaf.stage("param")) == "[64/fsdp 100] float32 on pinned_host"
    assert describe_stage(leaf, leaf.stage("kept")) == "[64/fsdp:2 100] float32"
    table = layout_to_dict(layout)["leaves"][-1]["stages"]
    assert table["param"]["memory"] == "pinned_host"
    assert table["kept"] == {"spec": ["fsdp", None], "dtype": "float32", "memory": "device", "ways": 2}


REMATS = ["full", ("a", "b"), jax.checkpoint_policies.dots_saveable]


@pytest.mark.parametrize("remat", REMATS, ids=["word", "names", "function"])
def test_the_table_as_plain_data_survives_json(remat):
    table = layout_to_dict(make_layout("zero1", param_dtype="bfloat16", remat=remat))
    again = json.loads(json.dumps(table))
    assert again["mesh"] == {"pipe": 1, "replica": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
    (row,) = [row for row in again["leaves"] if row["path"] == "block.w"]
    assert row["stages"]["param"] == {"spec": ["fsdp", None], "dtype": "float32", "memory": "device"}
    assert row["bytes_per_device"] == 64 * 64 * 4 // 4 + 64 * 64 * 2
    again["units"][1]["remat"] = table["units"][1]["remat"]  # json has no tuples
    assert again == table


def test_stage_bytes_count_padding_and_shards():
    layout = make_layout("hfsdp", {"replica": 2, "fsdp": 12}, param_dtype="bfloat16")
    leaf = layout.by_path["block.w"]
    assert leaf.stored_shape == (72, 64)
    assert layout.stage_bytes(leaf, "param") == 72 * 64 * 4 // 24
    assert layout.stage_bytes(leaf, "work") == 72 * 64 * 2 // 12
    assert layout.stage_bytes(leaf, "use") == 72 * 64 * 2
    assert padding_elements(leaf) == 8 * 64


# Bytes at real size: masters and two moments in float32 make 12 bytes per parameter.


def adam_bytes(layout: Layout) -> int:
    return sum(layout.stage_bytes(leaf, "param") + 2 * layout.stage_bytes(leaf, "opt") for leaf in layout.leaves)


def llama_8b(num_devices: int) -> Layout:
    job = jfsdp.trainer.find_job("llama-8b")
    mesh = jfsdp.make_abstract_mesh({"fsdp": num_devices})
    return fully_shard(job.model, mesh=mesh, units=job.units).layout


def test_llama_8b_fully_sharded_takes_twelve_bytes_per_parameter_and_padding_where_it_says_so():
    layout = llama_8b(512)
    assert num_parameters(layout.leaves) == 8_030_261_248
    assert not [leaf.path for leaf in layout.leaves if leaf.dim is None or leaf.padding]
    assert adam_bytes(layout) * 512 == 12 * 8_030_261_248
    layout = llama_8b(24)
    padding = sum(map(padding_elements, layout.leaves))
    assert 0 < padding < 0.01 * num_parameters(layout.leaves)
    assert all("padded" in leaf.reason for leaf in layout.leaves if leaf.padding)
    assert adam_bytes(layout) * 24 == 12 * (8_030_261_248 + padding)


def test_an_unknown_name_is_told_close_ones():
    layout = fully_shard(Tower, mesh=jfsdp.make_abstract_mesh({"fsdp": 8}), units=[Block], min_size=1).layout
    with refusing("blocks.up.kernal", ".up.kernel", error=KeyError):
        _ = layout.by_path["blocks.up.kernal"]
    with refusing("blocks.up.kernel", error=KeyError):
        _ = layout.by_path["blocks"]
    assert layout.by_path.get("blocks") is None
    assert "blocks" not in layout.by_path
    for ask in (layout.unit, layout.policy):
        with refusing("block:"):
            ask("block")
