"""Construction of the Layout: every stage of every leaf, from units, policies and a strategy."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

import jax
from jax.sharding import AbstractMesh, Mesh

from jfsdp.arguments import checked
from jfsdp.layout.codec import scales_of
from jfsdp.layout.cuts import DimNames, find_cuts
from jfsdp.layout.flat import storage_form
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import DEVICE, HOST, PER_PARAMETER, Cut, Leaf, Stage
from jfsdp.layout.mesh import DATA_AXES, EXPERT, PIPE, axis_sizes
from jfsdp.layout.placements import ADAPTER_PART, Choice, LeafRules, choose_added, choose_own, find_placements
from jfsdp.layout.policy import OffloadPolicy, UnitPolicy
from jfsdp.layout.precision import MixedPrecisionPolicy, is_float, is_inexact, item_bytes, sum_dtype
from jfsdp.layout.split_dim import DimChoice, choose_dim
from jfsdp.layout.strategy import Split, Strategy
from jfsdp.layout.units import UnitInfo
from jfsdp.layout.wire import Wire, check_blocks


@checked
def build_layout(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    units: Mapping[str, UnitInfo],
    policies: Mapping[str, UnitPolicy],
    *,
    mesh: Mesh | AbstractMesh,
    strategy: Strategy,
    mp_policy: MixedPrecisionPolicy,
    rules: LeafRules | None = None,
    types: Mapping[str, type] | None = None,
    names: Mapping[str, DimNames] | None = None,
    offload: OffloadPolicy | None = None,
    storage: str = PER_PARAMETER,
) -> Layout:
    """Make the layout: every stage of every leaf.

    Args:
      leaves: logical shape and dtype by path.
      units: from `resolve_units`.
      policies: precision, resharding and remat of each unit, by unit name.
      mesh: only its axis names and sizes matter.
      rules: settings of single leaves.
      types: class of each leaf's variable, if the model's API has them.
      names: the model's names of its leaves' dims, if it has them.
      offload: what is offloaded to host memory.
      storage: one of `STORAGE_FORMS` in flat.py.

    Raises:
      ValueError: for an axis that jfsdp does not know or the mesh lacks, selectors that match nothing or collide, and
        placements that are impossible.
    """
    form = storage_form(storage)
    sizes, rules = axis_sizes(mesh), rules or LeafRules()
    min_size = form.min_size if rules.min_size is None else rules.min_size
    owners = {path: unit for unit in units.values() for path in unit.leaves}
    adapters, codecs = tuple((rules.adapters or {}).values()), rules.codecs or {}
    added = {one.name(part) for one in adapters for part in one.leaves} | {*map(scales_of, codecs)}
    model_leaves = {path: leaf for path, leaf in leaves.items() if path not in added}
    stacked = {path: owners[path].stacked for path in model_leaves}
    placed = find_placements(rules.placements, model_leaves, stacked, types or {})
    requested = {path: one.cuts for path, one in placed.items() if one.cuts is not None}
    cuts = find_cuts(model_leaves, stacked, names or {}, sizes, rules.axis_rules, requested)
    choices = choose_own(model_leaves, strategy, rules, placed, types or {}, sizes, cuts)
    choices |= choose_added(choices, adapters, codecs, sizes)
    build = functools.partial(_build_leaf, sizes=sizes, min_size=min_size, offload=offload or OffloadPolicy())
    table = tuple(
        build(path, leaf, owners[path], policies[owners[path].name], choices[path]) for path, leaf in leaves.items()
    )
    _check_stages(units, sizes.get(PIPE, 1))
    layout = Layout(
        leaves=table,
        units=tuple(units.values()),
        policies=tuple(policies.values()),
        mesh_sizes=tuple(sizes.items()),
        strategy=strategy,
        mp_policy=mp_policy,
        min_size=min_size,
        adapters=adapters,
    )
    _check_experts(table, sizes.get(EXPERT, 1))
    _ = layout.sub_axes  # raises if numbers of devices do not divide each other
    for field in ("gather_wire", "reduce_wire"):
        if getattr(mp_policy, field) and not any(getattr(leaf, field) for leaf in table):
            what = "matrix" if field == "gather_wire" else "trained matrix"
            raise ValueError(
                f"{field}={getattr(mp_policy, field).dtype!r}: no unit below the root has a {what}; name the model's "
                'layers (units=), or give the root the format (per_unit={"": {"mp_policy": ...}})'
            )
    return form.store(layout)


def _build_leaf(
    path: str,
    abstract: jax.ShapeDtypeStruct,
    unit: UnitInfo,
    policy: UnitPolicy,
    choice: Choice,
    *,
    sizes: Mapping[str, int],
    min_size: int,
    offload: OffloadPolicy,
) -> Leaf:
    shape, dtype = tuple(abstract.shape), abstract.dtype.name
    choice = dataclasses.replace(choice, cuts=(*_stage_cut(path, shape, unit, sizes.get(PIPE, 1)), *choice.cuts))
    trainable = is_inexact(dtype) and choice.frozen is None
    if choice.frozen and not choice.is_scales and is_float(dtype) and not choice.is_ignored:
        dtype = policy.mp_policy.frozen_dtype or dtype
    _check_kept(path, unit, policy, choice)
    use = dtype if choice.is_ignored else policy.mp_policy.use_dtype(dtype)
    own = {axis: size for axis, size in sizes.items() if axis not in [cut.axis for cut in choice.cuts]}
    reshard = _reshard(path, policy.reshard_after_forward, sizes, own)
    stages = _stages(path, dtype, use, trainable, choice.strategy, reshard, own)
    split = _choose_dim(path, shape, unit, stages, choice, sizes, min_size)
    if split.dim is None:
        stages = {name: stage and Stage((), stage.dtype) for name, stage in stages.items()} | {"work": None}
    if not choice.is_ignored and math.prod(shape[unit.stacked :]) >= min_size:
        stages = _offload(stages, offload)
    gather_wire, reduce_wire = _wires(path, shape, use, unit, policy.mp_policy, choice)
    last = len(shape) - 1
    parts = math.prod(cut.parts for cut in choice.cuts if cut.dim == last)
    parts *= _num_shards(stages, sizes) if split.dim == last else 1
    for field, wire in {"gather_wire": gather_wire, "reduce_wire": reduce_wire}.items():
        if wire:
            check_blocks(path, field, wire, shape, parts)
    return Leaf(
        path=path,
        shape=shape,
        dtype=dtype,
        unit=unit.name,
        stacked=unit.stacked,
        trainable=trainable,
        dim=split.dim,
        padding=split.padding,
        reason=_reason(split, choice, dtype, dict(unit.shared).get(path)),
        stages=tuple(stages.items()),
        cuts=choice.cuts,
        per_item=choice.per_item,
        gather_wire=gather_wire,
        reduce_wire=reduce_wire if trainable else None,
    )


def _reshard(path: str, reshard: bool | int, sizes: Mapping[str, int], own: Mapping[str, int]) -> bool | int:
    """Return over how many neighbours along its own axes a leaf is split between forward and backward."""
    cut = math.prod(sizes.get(axis, 1) for axis in DATA_AXES if axis not in own)
    if isinstance(reshard, bool) or cut == 1:
        return reshard
    if cut % reshard == 0:
        return 1
    if reshard % cut:
        raise ValueError(
            f"{path}: reshard_after_forward={reshard} neighbouring devices do not consist of whole groups of mesh axis "
            f"{EXPERT!r} (size {cut}), which cuts it; use a divisor or a multiple of {cut}"
        )
    return reshard // cut


def _wires(
    path: str, shape: tuple[int, ...], use: str, unit: UnitInfo, policy: MixedPrecisionPolicy, choice: Choice
) -> tuple[Wire | None, Wire | None]:
    """Return the wire formats of a leaf's gathers and of its gradient: those of its unit, for matrices."""
    if choice.is_ignored or choice.is_scales or choice.placed == ADAPTER_PART or len(shape) - unit.stacked < 2:
        return None, None
    if policy.gather_wire and choice.coded:
        raise ValueError(
            f"{path}: is quantized ({choice.coded}), and its codes are also what is gathered, so gather_wire="
            f"{policy.gather_wire.dtype!r} does not apply; remove gather_wire from its unit {unit.name!r} (per_unit), "
            "or leave it out of jfsdp.quantize"
        )
    gather, reduce = (wire and wire.of_rows(shape[-1]) for wire in (policy.gather_wire, policy.reduce_wire))
    return (gather, reduce) if is_float(use) else (None, None)


def _num_shards(stages: Mapping[str, Stage | None], sizes: Mapping[str, int]) -> int:
    """Return the number of parts into which a leaf's finest stage splits it."""
    return max(math.prod(sizes.get(axis, 1) for axis in stage.axes) for stage in stages.values() if stage)


def _check_experts(table: Sequence[Leaf], size: int) -> None:
    """Check that axis `expert` cuts leaves, and in a unit as many experts of each."""
    cut: dict[str, tuple[str, int]] = {}
    for leaf in table:
        for one in leaf.row_cuts:
            other, num = cut.setdefault(leaf.unit, (leaf.path, leaf.shape[one.dim]))
            if leaf.stacked and num != leaf.shape[one.dim]:
                raise ValueError(
                    f"{leaf.path}: mesh axis {EXPERT!r} cuts its dim {one.dim} (size {leaf.shape[one.dim]}), and a dim "
                    f"of size {num} of {other}, which cannot both be the experts of unit {leaf.unit!r}; if its first "
                    "dim is the experts and no layer dim, declare it: units=[jfsdp.Unit(..., stacked=0)]; other "
                    "weights need no placement over this axis, since the strategy shards them over it"
                )
    if size > 1 and not cut:
        raise ValueError(
            f"mesh axis {EXPERT!r} (size {size}) cuts no parameter; name the weights of experts, stacked along their "
            "first dim (placements={'**.experts.*': PartitionSpec('expert')}), or give the devices to 'fsdp'"
        )


def _check_stages(units: Mapping[str, UnitInfo], stages: int) -> None:
    """Check that a pipeline has a stack of layers."""
    if stages > 1 and not any(unit.stacked for unit in units.values()):
        named = ", ".join(repr(name) for name in [*units][:4] if name) or "none"
        raise ValueError(
            f"mesh axis {PIPE!r} (size {stages}) cuts the layers of a stack, but no unit is one (units: {named}): "
            "layers in a list cannot be cut; stack them (nnx.vmap of their class, nn.scan; stacked=True in models "
            "here), scan over the stack, and make it a unit, or give the devices of the axis to another"
        )


def _stage_cut(path: str, shape: tuple[int, ...], unit: UnitInfo, stages: int) -> tuple[Cut, ...]:
    """Cut the layers of a stack over the stages of a pipeline."""
    if stages == 1 or not unit.stacked:
        return ()
    if shape[0] % stages:
        raise ValueError(
            f"{path}: {shape[0]} layers of unit {unit.name!r} cannot be cut over mesh axis {PIPE!r} (size {stages}), "
            "which does not divide them; use a size that does"
        )
    return (Cut(0, PIPE, stages, f"stages of unit {unit.name!r}"),)


def _check_kept(path: str, unit: UnitInfo, policy: UnitPolicy, choice: Choice) -> None:
    """Check that a leaf's own strategy does not require more kept arrays than its unit keeps."""
    own, keeps = choice.strategy, choice.strategy.reshard_after_forward
    if choice.placed and policy.reshard_after_forward is True and own.axes("param") and keeps is not True:
        raise ValueError(
            f"{path}: {choice.placed}, and strategy {own.name!r} has reshard_after_forward={keeps!r}, but its unit "
            f"{unit.name!r} is resharded; set that unit's reshard_after_forward with per_unit"
        )


def _choose_dim(
    path: str,
    shape: tuple[int, ...],
    unit: UnitInfo,
    stages: Mapping[str, Stage | None],
    choice: Choice,
    sizes: Mapping[str, int],
    min_size: int,
) -> DimChoice:
    if choice.is_ignored:
        return DimChoice(None, 0, f"replicated: {choice.placed}")
    options = {"stacked": unit.stacked, "min_size": min_size, "dim": choice.dim, "cuts": choice.cuts}
    return choose_dim(path, shape, _num_shards(stages, sizes), **options)


def _reason(split: DimChoice, choice: Choice, dtype: str, users: tuple[str, ...] | None) -> str:
    placed = None if choice.is_ignored else choice.placed
    frozen = f"frozen by {choice.frozen}" if choice.frozen else None
    integer = None if is_inexact(dtype) else f"not trained: {dtype}"
    shared = f"not in a unit of those that share it: {', '.join(users)}" if users else None
    cuts = [f"dim {cut.dim} cut over {cut.axis} by {cut.reason}" for cut in choice.cuts]
    return "; ".join(part for part in (*cuts, split.reason, placed, frozen or integer, shared, choice.coded) if part)


_SPLIT_STAGES = ("param", "grad", "opt")


def _stages(
    path: str, dtype: str, use: str, trainable: bool, strategy: Strategy, reshard: bool | int, sizes: Mapping[str, int]
) -> dict[str, Stage | None]:
    """Return a leaf's stages under a strategy.

    If the optimizer is split finer than the parameters and compute is in lower precision, the master is split like the
    optimizer, and a low-precision copy is kept at rest (ZeRO, arXiv 1910.02054, section 3: 2P + 12P/N bytes).
    A finer stage splits the pieces of a coarser one further, so that no piece moves to another device between the two:
    the axes of `param` are its major axes.
    """
    present = {stage: [axis for axis in strategy.axes(stage) if sizes.get(axis, 1) > 1] for stage in _SPLIT_STAGES}
    param = tuple(present["param"])

    def axes(stage: str) -> tuple[str, ...]:
        return (*param, *(axis for axis in present[stage] if axis not in param))

    opt = axes("opt")
    has_work = param != opt and item_bytes(use) < item_bytes(dtype)
    grad = opt if strategy.grad is Split.PARTIAL else axes("grad")
    return {
        "param": Stage(opt if has_work else param, dtype),
        "work": Stage(param, use) if has_work else None,
        "use": Stage((), use),
        "kept": _kept(path, use, param, reshard, sizes),
        "grad": Stage(grad, sum_dtype(dtype)) if trainable else None,
        "opt": Stage(opt, dtype) if trainable else None,
    }


def _kept(path: str, dtype: str, param: tuple[str, ...], reshard: bool | int, sizes: Mapping[str, int]) -> Stage:
    """Return the stage between forward and backward: sharded as at rest, whole, or split over `reshard` neighbours."""
    num_shards = math.prod(sizes[axis] for axis in param)
    if reshard is True or not param:
        return Stage(param, dtype)
    if reshard is False or reshard == 1:
        return Stage((), dtype)
    rest = int(reshard)
    for place in reversed(range(len(param))):
        size = sizes[param[place]]
        if size % rest == 0:
            return Stage(param[place:], dtype, ways=None if rest == size else rest)
        if rest % size:
            break
        rest //= size
    raise ValueError(
        f"{path}: reshard_after_forward={reshard} does not divide the {num_shards} devices of axes {', '.join(param)} "
        f"(sizes {', '.join(str(sizes[axis]) for axis in param)}) into neighbours; use one of "
        f"{', '.join(map(str, _ways([sizes[axis] for axis in param])))}"
    )


def _ways(sizes: Sequence[int]) -> list[int]:
    """Return the numbers of neighbouring devices over which axes of these sizes can be split."""
    minor = [math.prod(sizes[place + 1 :]) for place in range(len(sizes))]
    return sorted({n * rest for size, rest in zip(sizes, minor) for n in range(1, size + 1) if size % n == 0})


def _offload(stages: Mapping[str, Stage | None], offload: OffloadPolicy) -> dict[str, Stage | None]:
    where = {"param": offload.params, "work": offload.params, "grad": offload.grads, "opt": offload.opt_state}
    return {
        name: stage and dataclasses.replace(stage, memory=HOST if where.get(name) else DEVICE)
        for name, stage in stages.items()
    }
