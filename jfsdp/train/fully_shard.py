"""The entry point: makes a sharded model from a Flax model, a mesh and a strategy."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jax.sharding import AbstractMesh, Mesh

from jfsdp.arguments import checked
from jfsdp.compat import warn
from jfsdp.layout import mesh as meshes
from jfsdp.layout.build import build_layout
from jfsdp.layout.cuts import AxisRules, check_aliases
from jfsdp.layout.layout import Layout
from jfsdp.layout.lint import LayoutWarning, advise_memory
from jfsdp.layout.lora import also
from jfsdp.layout.loss_scale import LossScale
from jfsdp.layout.placements import LeafRules, Placements
from jfsdp.layout.policy import OffloadPolicy, Remat, resolve_policies
from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.select import Selectors
from jfsdp.layout.strategy import NODE, Strategy, get_strategy
from jfsdp.layout.units import resolve_units
from jfsdp.layout.wrapped import as_wrapped
from jfsdp.modules.adapt import as_model
from jfsdp.modules.adapted import adapt
from jfsdp.train.checks import check_offloads
from jfsdp.train.sharded import ShardedModel


@checked
def fully_shard(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    strategy: str | int | Strategy = "full_shard",
    opt_over: Sequence[str] | None = None,
    units: Any = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: OffloadPolicy | None = None,
    reshard_after_forward: bool | int | str | None = None,
    remat: Remat = "none",
    storage: str = "per_parameter",
    placements: Placements | None = None,
    axis_rules: AxisRules | None = None,
    frozen: Selectors = None,
    per_unit: Mapping[str, Mapping[str, Any]] | None = None,
) -> ShardedModel:
    """Decide how each parameter of a Flax model is sharded over a mesh. Moves no data and allocates no arrays.

    Args:
      model: a factory `f(rngs) -> nnx.Module`; an `nnx.Module`, whose weights are kept; or, for Linen, `(module,
        example_inputs)`, or `(module, example_inputs, variables)` to keep weights; or one of these wrapped by
        `jfsdp.lora`, `jfsdp.quantize` or both. Sharding metadata on its parameters has no effect without
        `axis_rules`.
      mesh: from `make_mesh`, default all devices on axis `fsdp`; or from `make_abstract_mesh`, for layouts only.
      strategy: what is sharded over axes `fsdp` and `context`; axis `replica` replicates. A name of `STRATEGIES` or of
        another library, a DeepSpeed stage, or a custom `Strategy`.
      opt_over: the data axes that split the optimizer states, and the gradients if the strategy splits them; None:
        `fsdp`. `("replica", "fsdp")` splits them over all devices, while parameters are split over `fsdp` only. Axis
        `context` counts as a part of `fsdp`.
      units: the modules whose parameters are gathered together: classes, path globs, predicates, `by_size(n)`,
        `Unit`s; all other leaves are the root unit, which is gathered once per step.
      mp_policy: precision, and the scale of the loss; by default everything is in the dtype of the parameters.
      offload_policy: what is kept in host memory.
      reshard_after_forward: None: every unit except the root is freed after its forward, if the strategy reshards;
        True, False; n: split n ways over neighbouring devices until the backward; "node": over the devices of a host.
      remat: what the backward of a unit recomputes; "none": just values that depend only on weights, so that
        gathered weights are not saved. See `UnitPolicy`.
      storage: how parameters are gathered and gradients reduced: "per_parameter", each in its own shape; or "flat", the
        leaves of a unit in one array with one collective, for steps of program "manual" (see `train_step`).
        A state has each leaf by name with both.
      placements: by selector (as in `frozen`): `Shard(dim)`, `Replicate()`, `Ignore()` (whole, in its own dtype), a
        strategy, or a PartitionSpec. A spec over axes `tensor`, `pipe` and `expert` only cuts the leaf: each device has
        one part, in storage and in compute, and the strategy splits the rest. A spec with another data axis fixes the
        sharding of the leaf's parameters. None undoes an axis rule. A function `f(path, shape)` returns one of these,
        or None for no placement. Layer dims of a stack are not counted. Leaves with fewer than 1024 elements per layer
        (0 for "flat" storage) are replicated and never offloaded, unless `jfsdp.placements(min_size=n)` is merged in.
      axis_rules: tensor parallelism by the model's sharding metadata: for each dim name, the mesh axis that cuts the
        dim (`{"mlp": "tensor", "embed": None}`, or as pairs). Every name needs a rule.
      frozen: leaves that are not trained: no gradient, no optimizer state, no reduction. Path globs (of leaves or
        modules), classes of variables, predicates `f(path, shape) -> bool`, or a list of these.
      per_unit: overrides of `mp_policy`, `reshard_after_forward` and `remat` for globs over unit names ("" is the
        root); globs that match one unit must not contradict each other. An `mp_policy` replaces the model's policy
        for these units, including `frozen_dtype`, except for `loss_scale`: units share one loss.

    Raises:
      TypeError: for arguments of a wrong type.
      ValueError: for unknown names, units that match no module or claim one twice, and contradictions.

    Warns:
      LayoutWarning: if memory is wasted: no units, large leaves that units share, padding above 1 % of a model that is
        not small, or weights that axis `tensor` does not cut; if that axis joins devices of different hosts; for a
        `gather_wire` without gathers, and a `reduce_wire` that exchanges between all devices of several hosts.
    """
    wrapped = as_wrapped(model)
    if isinstance(wrapped.model, ShardedModel):
        raise TypeError("model: a ShardedModel is already sharded; pass the module or factory that it was made from")
    mesh, mp_policy = meshes.make_mesh() if mesh is None else mesh, mp_policy or MixedPrecisionPolicy()
    _check_mesh(mesh)
    with meshes.model_mesh(mesh):
        base = as_model(wrapped.model)
    sizes = dict(mesh.shape)
    strategy = get_strategy(strategy, sizes, opt_over)
    shapes = {path: tuple(leaf.shape) for path, leaf in base.params.items()}
    flax_model, resolved = adapt(wrapped, base, resolve_units(units, base.modules, shapes))
    policies = resolve_policies(
        resolved,
        strategy=strategy,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        remat=remat,
        per_unit=per_unit,
        node_size=functools.cache(functools.partial(_node_size, mesh, strategy)),
        host_size=functools.cache(functools.partial(meshes.node_size, mesh)),
    )
    check_offloads(policies, mesh)
    check_aliases(placements, flax_model.params, flax_model.types, flax_model.aliases)
    layout = build_layout(
        flax_model.params,
        resolved,
        policies,
        mesh=mesh,
        strategy=strategy,
        mp_policy=mp_policy,
        rules=LeafRules(
            frozen=frozen,
            placements=placements,
            axis_rules=axis_rules,
            adapters=flax_model.adapters,
            codecs=flax_model.codecs,
            also=also(wrapped.loras),
        ),
        types=flax_model.types,
        names=flax_model.dim_names,
        offload=offload_policy,
        storage=storage,
    )
    for warning in advise_memory(layout):
        warn(warning, LayoutWarning)
    _warn_of_exchange(layout, mesh)
    is_float16 = any(policy.mp_policy.param_dtype == "float16" for policy in policies.values())
    return ShardedModel(flax_model, layout, mesh, mp_policy.loss_scale or (LossScale() if is_float16 else None))


def _node_size(mesh: Mesh | AbstractMesh, strategy: Strategy) -> int:
    """Return the number of neighbouring devices of a host that share a parameter between forward and backward."""
    size = math.gcd(meshes.node_size(mesh), math.prod(mesh.shape.get(axis, 1) for axis in strategy.axes("param")))
    if size == 1 < math.prod(mesh.shape.get(axis, 1) for axis in meshes.DATA_AXES):
        warn(
            f"reshard_after_forward={NODE!r}: hosts have one device each, so units stay whole from forward to "
            "backward, as with False; pass reshard_after_forward=n to split them over n neighbouring devices",
            LayoutWarning,
        )
    return size


def _warn_of_exchange(layout: Layout, mesh: Mesh | AbstractMesh) -> None:
    """Warn about codes that are exchanged between all devices of several hosts at once."""
    coded = [leaf for leaf in layout.leaves if leaf.reduce_wire and leaf.reduce_wire.between is None]
    for axis in layout.data_axes if coded else ():
        size = layout.num_inside((axis,), meshes.node_size(mesh)) if meshes.crosses_hosts(mesh, axis) else 1
        if size > 1:
            warn(
                f"reduce_wire={coded[0].reduce_wire.dtype!r} exchanges gradients between all devices of axis {axis!r} "  # type: ignore[union-attr]
                f"(size {mesh.shape[axis]}), {size} of them on each host: every device sends most of its gradient "
                f"to other hosts, {size} times what a sum inside each host first would send; pass "
                f"jfsdp.Wire(..., between={NODE!r})",
                LayoutWarning,
            )


def _check_mesh(mesh: Any) -> None:
    meshes.axis_sizes(mesh)
    for axis, size in mesh.shape.items():
        if axis not in (*meshes.DATA_AXES, *meshes.MODEL_AXES) and size > 1:
            raise ValueError(
                f"mesh axis {axis!r} (size {size}): no array is split over it, so its devices would only repeat "
                f"each other's work; give them to {' or '.join(map(repr, meshes.DATA_AXES))}"
            )
    if mesh.shape.get(meshes.PIPE, 1) > 1 and mesh.shape.get(meshes.CONTEXT, 1) > 1:
        raise ValueError(
            f"mesh axes {meshes.CONTEXT!r} (size {mesh.shape[meshes.CONTEXT]}) and {meshes.PIPE!r} (size "
            f"{mesh.shape[meshes.PIPE]}): rows that are split over devices are not available in pipelines; give the "
            f"devices of one axis to 'fsdp' or 'tensor'"
        )
    meshes.row_shares(mesh)
    for axis in meshes.model_axes(mesh):
        if axis != meshes.PIPE and meshes.crosses_hosts(mesh, axis):
            warn(
                f"mesh axis {axis!r} (size {mesh.shape[axis]}) joins devices of different hosts, and every layer sends "
                "activations over it; unless these hosts have a fast link, use a size that divides the number of "
                "devices per host",
                LayoutWarning,
            )
