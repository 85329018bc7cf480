"""How many bytes of state a device holds, and of what: counted on shapes and shardings, so it needs no devices."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from jfsdp.layout.report import layout_to_dict
from jfsdp.layout.table import Leaf
from jfsdp.train.state import TrainState, array_bytes, param_name


@dataclasses.dataclass(frozen=True)
class StateBytes:
    """Bytes per device of a training state.

    Attributes:
      params, work, opt: the masters, the low-precision copies, the optimizer's arrays that belong to a parameter.
      counters: step counts, the optimizer's scalars and anything else that belongs to no parameter.
      model_state: the model's other state.
      padding: the part of params, work and opt that is padding, averaged over devices.
      replicated: the part of params, work and opt that every device holds whole.
      by_leaf: params + work + opt of each leaf.
    """

    params: int
    work: int
    opt: int
    counters: int
    model_state: int
    padding: int
    replicated: int
    by_leaf: dict[str, int]

    @property
    def total(self) -> int:
        return self.params + self.work + self.opt + self.counters + self.model_state


def account(state: TrainState) -> StateBytes:
    """Count a state, or `model.abstract_state(tx)`. Moves no data."""
    layout = state.layout
    count = {"params": 0, "work": 0, "opt": 0, "counters": 0, "model_state": 0, "padding": 0, "replicated": 0}
    by_leaf = {leaf.path: 0 for leaf in layout.leaves}
    for path, array in jax.tree_util.tree_leaves_with_path(state):
        part, size = path[0].name, array_bytes(array)
        leaf = layout.by_path.get(param_name(layout, path) or "") if part in ("params", "work", "opt_state") else None
        kind = {"opt_state": "opt", "step": "counters", "num_skipped": "counters"}.get(part, part)
        if kind == "opt" and leaf is None:
            kind = "counters"
        count[kind] += size
        if leaf is not None:
            by_leaf[leaf.path] += size
            count["padding"] += _padding(leaf, array, size)
            count["replicated"] += size if array.sharding.is_fully_replicated and _num_devices(array) > 1 else 0
    return StateBytes(**count, by_leaf=by_leaf)


def _padding(leaf: Leaf, array: Any, size: int) -> int:
    stored = math.prod(leaf.stored_shape)
    if not leaf.padding or tuple(array.shape) != leaf.stored_shape:
        return 0
    return size * (stored - math.prod(leaf.shape)) // stored


def _num_devices(array: Any) -> int:
    return math.prod(array.sharding.mesh.shape.values())


def explain_to_dict(state: TrainState) -> dict[str, Any]:
    """Return the layout and the bytes of a state as plain data that `json` writes."""
    table, count = layout_to_dict(state.layout), account(state)
    for row in table["leaves"]:
        row["param_bytes_per_device"] = row["bytes_per_device"]
        row["bytes_per_device"] = count.by_leaf[row["path"]]
    return {
        **{key: value for key, value in table.items() if key != "leaves"},
        "state_bytes_per_device": count.total,
        "param_bytes_per_device": count.params,
        "work_bytes_per_device": count.work,
        "opt_bytes_per_device": count.opt,
        "counter_bytes_per_device": count.counters,
        "model_state_bytes_per_device": count.model_state,
        "padding_bytes_per_device": count.padding,
        "replicated_bytes_per_device": count.replicated,
        "leaves": table["leaves"],
    }
