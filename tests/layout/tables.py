"""Layouts of named shapes, without a model, for the tests of this room."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax

from jfsdp.layout.build import build_layout
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.layout.placements import LeafRules
from jfsdp.layout.policy import OffloadPolicy, resolve_policies
from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.units import UnitInfo
from tests.sharding import place
from tests.ways import WAYS

TWO_BY_FOUR = {"replica": 2, "fsdp": 4}


@dataclasses.dataclass(frozen=True)
class FakeDevice:
    """What `make_mesh` reads of a device."""

    id: int
    process_index: int
    slice_index: int | None = None
    platform: str = "gpu"


def make_table(
    leaves: Mapping[str, Any],
    strategy: Any = "full_shard",
    mesh: Any = None,
    *,
    units: Mapping[str, UnitInfo] | None = None,
    param_dtype: str | None = None,
    reshard: bool | int | str | None = None,
    remat: Any = "full",
    per_unit: Mapping[str, Mapping[str, Any]] | None = None,
    node_size: int = 4,
    min_size: int | None = 1024,
    types: Mapping[str, type] | None = None,
    offload: OffloadPolicy | None = None,
    frozen_dtype: str | None = None,
    **rules: Any,
) -> Layout:
    """Build a layout.

    Args:
      leaves: by path, a shape of float32 or (shape, dtype).
      mesh: a mesh, or sizes of an abstract one; default replica=2,fsdp=4.
      units: default one for every first name of a dotted path, the rest in the root.
      rules: fields of `LeafRules`, and words of `place`.
    """
    shapes = {path: abstract(leaf) for path, leaf in leaves.items()}
    units = first_names(shapes) if units is None else units
    words = {name: rules.pop(name) for name in ("cuts", "ignored", "shard_dim", "placements") if name in rules}
    strategy, mp_policy = WAYS.get(strategy, strategy), MixedPrecisionPolicy(param_dtype, frozen_dtype=frozen_dtype)
    policies = resolve_policies(
        units,
        strategy=strategy,
        mp_policy=mp_policy,
        reshard_after_forward=reshard,
        remat=remat,
        per_unit=per_unit,
        node_size=lambda: node_size,
        host_size=lambda: node_size,
    )
    return build_layout(
        shapes,
        units,
        policies,
        mesh=make_abstract_mesh(mesh or TWO_BY_FOUR) if isinstance(mesh, dict | None) else mesh,
        strategy=strategy,
        mp_policy=mp_policy,
        rules=LeafRules(placements=place(min_size=min_size, **words), **rules),
        types=types,
        offload=offload,
    )


def abstract(leaf: Any) -> jax.ShapeDtypeStruct:
    shape, dtype = leaf if leaf and isinstance(leaf[-1], str) else (leaf, "float32")
    return jax.ShapeDtypeStruct(shape, dtype)


def first_names(paths: Mapping[str, Any]) -> dict[str, UnitInfo]:
    owned: dict[str, tuple[str, ...]] = {"": ()}
    for path in paths:
        name = path.partition(".")[0] if "." in path else ""
        owned[name] = (*owned.get(name, ()), path)
    return {name: UnitInfo(name, "Net", 0, leaves) for name, leaves in owned.items()}
