"""A menagerie of awkward leaves: the dtype of each stage, and what a device holds of some, on three meshes."""

from typing import Any

import pytest
from jax.sharding import PartitionSpec as P

from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.layout.units import UnitInfo
from tests.layout.tables import make_table

# Path -> shape, dtype. Those under `layers.` stand in a stack of 6.
MENAGERIE: dict[str, Any] = {
    "body.scalar": ((), "float32"),
    "body.prime_matrix": ((1031, 37), "float32"),
    "body.vocabulary": ((50257, 768), "float32"),
    "body.bias": ((50257,), "float32"),
    "body.integer": ((64, 64), "int32"),
    "body.complex": ((64, 33), "complex64"),
    "body.half": ((64, 64), "bfloat16"),
    "body.frozen": ((64, 64), "float32"),
    "pair.table": ((640, 64), "float32"),
    "layers.kernel": ((6, 64, 48), "float32"),
    "layers.prime": ((6, 31, 37), "float32"),
    "layers.empty": ((6, 0, 64), "float32"),
}
UNITS = {
    name: UnitInfo(name, "Zoo", int(name == "layers"), tuple(path for path in MENAGERIE if path.startswith(f"{name}.")))
    for name in ("", "body", "pair", "layers")
}
MESHES = {"1": {"fsdp": 1}, "8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "3": {"fsdp": 3}}


def menagerie(strategy: str, mesh: str, param_dtype: str | None = None) -> Any:
    sizes = MESHES[mesh]
    return make_table(MENAGERIE, strategy, sizes, units=UNITS, param_dtype=param_dtype, frozen="body.frozen")


def test_each_stage_has_the_dtype_of_its_leaf():
    """Param, use, gradient and optimizer; only what is real and in float32 is used in the lower precision."""
    leaves = menagerie("zero1", "2x4", "bfloat16").by_path
    for path, dtypes in {
        "body.bias": ("float32", "bfloat16", "float32", "float32"),
        "body.integer": ("int32", "int32", None, None),
        "body.complex": ("complex64", "complex64", "complex64", "complex64"),
        "body.half": ("bfloat16", "bfloat16", "float32", "bfloat16"),
        "body.frozen": ("float32", "bfloat16", None, None),
    }.items():
        stages = dict(leaves[path].stages)
        assert tuple(one and one.dtype for one in map(stages.get, ("param", "use", "grad", "opt"))) == dtypes, path


# Strategy, mesh, leaf and stage -> its spec, and what a device holds.
SPECS = {
    ("full_shard", "8", "body.prime_matrix", "param"): (P("fsdp", None), (129, 37)),
    ("full_shard", "3", "layers.kernel", "opt"): (P(None, None, "fsdp"), (6, 64, 16)),
    ("zero1", "2x4", "body.vocabulary", "opt"): (P(None, "fsdp"), (50257, 192)),
    ("zero1", "2x4", "body.vocabulary", "param"): (P(None, None), (50257, 768)),
    ("full_shard", "2x4", "body.bias", "grad"): (P("fsdp"), (12565,)),
    ("hfsdp", "2x4", "pair.table", "param"): (P("fsdp", None), (160, 64)),
    ("hfsdp", "2x4", "pair.table", "opt"): (P(("fsdp", "replica"), None), (80, 64)),
    ("node", "2x4", "layers.prime", "kept"): (P(None, "fsdp", None), (6, 8, 37)),
    ("full_shard", "8", "layers.empty", "param"): (P(None, None, None), (6, 0, 64)),
    ("full_shard", "8", "body.scalar", "param"): (P(), ()),
    ("full_shard", "1", "layers.prime", "opt"): (P(None, None, None), (6, 31, 37)),
}


@pytest.mark.parametrize(("strategy", "mesh", "path", "stage"), SPECS)
def test_a_device_holds_its_part(strategy, mesh, path, stage):
    layout = menagerie(strategy, mesh)
    leaf = layout.by_path[path]
    sharding = layout.sharding(make_abstract_mesh(MESHES[mesh]), leaf, stage)
    assert (sharding.spec, sharding.shard_shape(leaf.stored_shape)) == SPECS[strategy, mesh, path, stage]
