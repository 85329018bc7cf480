"""Bytes of state per device, by part, computed from shapes and shardings; needs no devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jfsdp.layout.leaf import DEVICE, HOST, Leaf
from jfsdp.layout.lint import advise
from jfsdp.layout.report import layout_to_dict
from jfsdp.train.state import TrainState, array_bytes, state_memories


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes per device of a training state, in the device's memory and in the host's.

    Attributes:
      params, work, opt: the masters, the low-precision copies, the optimizer's arrays that belong to a parameter.
      counters: step counts, the optimizer's scalars and other arrays that belong to no parameter.
      model_state: the model's other state.
      host_params, host_work, host_opt: the offloaded parts, which params, work and opt do not include.
      padding: the part of params, work and opt that is padding, averaged over devices; in both memories.
      replicated: the part of params, work and opt that is whole on every device; in both memories.
      checkpoint: size of a run's checkpoint, for all devices together: with adapters, without frozen leaves.
      by_leaf: params + work + opt of each leaf.
      host_by_leaf: host_params + host_work + host_opt of each leaf.
    """

    params: int
    work: int
    opt: int
    counters: int
    model_state: int
    host_params: int
    host_work: int
    host_opt: int
    padding: int
    replicated: int
    checkpoint: int
    by_leaf: dict[str, int]
    host_by_leaf: dict[str, int]

    @property
    def total(self) -> int:
        """Bytes in device memory."""
        return self.params + self.work + self.opt + self.counters + self.model_state

    @property
    def host_total(self) -> int:
        """Bytes in host memory, per device."""
        return self.host_params + self.host_work + self.host_opt


_PARTS, _HOST_PARTS = ("params", "work", "opt", "counters", "model_state"), ("host_params", "host_work", "host_opt")
_NAMES = {"total": "state", "params": "param", "counters": "counter", "host_total": "host", "host_params": "host_param"}
_KINDS = {"opt_state": "opt", "step": "counters", "num_skipped": "counters", "loss_scale": "counters"}


def account(state: TrainState) -> StateBytes:
    """Count the bytes of a state, or of `model.abstract_state(tx)`."""
    layout, memories = state.layout, jax.tree.leaves(state_memories(state))
    count: dict[str, int] = dict.fromkeys((*_PARTS, *_HOST_PARTS, "padding", "replicated", "checkpoint"), 0)
    by_leaf = {memory: {leaf.path: 0 for leaf in layout.leaves} for memory in (DEVICE, HOST)}
    roles = iter(state.roles.arrays)
    arrays = jax.tree_util.tree_leaves_with_path(state)
    for (path, array), memory in zip(arrays, memories, strict=True):
        part, size = path[0].name, array_bytes(array)
        if part == "opt_state":
            role = next(roles)
            owner, padding = role.leaf, role.padding
        else:
            owner = path[1].key if part in ("params", "work") else None
            padding = layout.by_path[owner].padding if owner else 0
        leaf = layout.by_path.get(owner or "")
        kind = _KINDS.get(part, part)
        if kind == "opt" and leaf is None:
            kind = "counters"
        count[f"host_{kind}" if memory == HOST else kind] += size
        if part != "work" and not (part == "params" and leaf and not leaf.trainable and layout.adapters):
            shape = role.shape if part == "opt_state" else leaf.shape if leaf else array.shape
            count["checkpoint"] += array_bytes(jax.ShapeDtypeStruct(shape, array.dtype))
        if leaf is not None:
            by_leaf[memory][leaf.path] += size
            count["padding"] += _padding(leaf, size) if padding else 0
            count["replicated"] += size if array.sharding.is_fully_replicated and array.sharding.mesh.size > 1 else 0
    return StateBytes(**count, by_leaf=by_leaf[DEVICE], host_by_leaf=by_leaf[HOST])


def _padding(leaf: Leaf, size: int) -> int:
    stored = math.prod(leaf.stored_shape)
    return size * (stored - math.prod(leaf.shape)) // stored


def explain_to_dict(state: TrainState) -> dict[str, Any]:
    """Return the layout and the bytes of a state as plain data for JSON."""
    table, count = layout_to_dict(state.layout), account(state)
    for row in table["leaves"]:
        row["param_bytes_per_device"] = row["bytes_per_device"]
        row["bytes_per_device"] = count.by_leaf[row["path"]]
        row["host_bytes_per_device"] = count.host_by_leaf[row["path"]]
    counts = ("total", *_PARTS, "host_total", *_HOST_PARTS, "padding", "replicated")
    return {
        **{key: value for key, value in table.items() if key != "leaves"},
        **{f"{_NAMES.get(name, name)}_bytes_per_device": getattr(count, name) for name in counts},
        "warnings": advise(state.layout),
        "leaves": table["leaves"],
    }
