"""States of Adam and the step count, from training checkpoints of PyTorch and DeepSpeed.

[Note: states of Adam]
PyTorch stores `state.<name>.exp_avg`, `exp_avg_sq` and `step` for each parameter, in the dict of the optimizer (FSDP2
and torchtitan: `optimizer`). These are `mu`, `nu` and `count` of `optax.scale_by_adam`; both correct the bias in the
same way. Moments have the names and shapes of their parameters, so the mapping of names applies to both.
"""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Callable, Collection
from typing import Any

import jax
import numpy as np
import optax

from jfsdp.checkpoint.disk.logical_arrays import Stored, single_array
from jfsdp.checkpoint.foreign.mapping import Imported, NameMap, Shapes
from jfsdp.checkpoint.source import Joined, Renamed, Source, read_whole
from jfsdp.train.state import TrainState
from jfsdp.train.update.roles import Kind, Role

_STATE = re.compile(r"(?:(?P<optimizer>.*?)\.)?state\.(?P<name>.+)\.(?P<kind>\w+)")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}
_COUNTED = (
    optax.ScaleByAdamState,
    optax.ScaleByScheduleState,
    optax.InjectHyperparamsState,
    optax.InjectStatefulHyperparamsState,
)


def open_adam(
    source: Source, names: NameMap, leaves: Shapes, trained: Collection[str], *, where: Any
) -> tuple[Source, int]:
    """Find the states of Adam in a checkpoint. Reads the steps, and of the moments only copies of tied ones.

    Args:
      source: all arrays of the checkpoint, under their own names.
      names: the mapping of the checkpoint's parameter names.
      leaves: the parameters of the model by name, with logical shapes.
      trained: those that must have states; others may, and their states are ignored.
      where: the checkpoint's path.

    Returns:
      The moments, named `mu.<name of the parameter>` and `nu.<name>`, and the number of updates.

    Raises:
      ValueError: if there are no such states, or of another optimizer, if parameters lack a state or have more states
        than Adam, or were updated a different number of times.
    """
    kinds, moments = _find_states(source, where), []
    steps = {read_whole(source, stored).item(): name for name, stored in kinds["step"].items()}
    if len(steps) != 1 or not 0 <= next(iter(steps)) < 2**31:
        examples = ", ".join(f"{name}: {step:g}" for step, name in list(steps.items())[:4])
        raise ValueError(f"{where}: optax has one count of updates, but the steps of parameters are {examples}")
    for ours, theirs in _MOMENTS.items():
        found = Imported(Renamed(source, kinds[theirs]), names, leaves, where=f"{where}: {theirs}", partial=True)
        if lacking := [leaf for leaf in trained if leaf not in found.arrays]:
            problem = f"has no {theirs} of {lacking[0]} (and {len(lacking) - 1} more), which are trained here"
            raise ValueError(f"{where}: {problem}; freeze them as in that run (frozen=), or train without its states")
        moments.append(Renamed(found, {f"{ours}.{leaf}": leaf for leaf in trained}))
    return Joined(*moments), int(next(iter(steps)))


def _find_states(source: Source, where: Any) -> dict[str, dict[str, str]]:
    """Return, for `exp_avg`, `exp_avg_sq` and `step`, the names in the source by the parameter's name."""
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name in source.arrays:
        if match := _STATE.fullmatch(name):
            kinds = found.setdefault(match["optimizer"] or "", {})
            kinds.setdefault(match["kind"], {})[match["name"]] = name
    optimizers = {x: kinds for x, kinds in found.items() if not all(map(str.isdigit, kinds.get("exp_avg", ())))}
    if len(optimizers) != 1:
        others = ", ".join(sorted({kind for kinds in found.values() for kind in kinds})[:8]) or "none"
        problem = (
            f"several optimizers ({', '.join(optimizers)})" if optimizers else f"no states of Adam (found: {others})"
        )
        raise ValueError(
            f"{where}: has {problem} under parameter names; in PyTorch, save the result of "
            "get_optimizer_state_dict(model, optimizer), or train without its states"
        )
    kinds = next(iter(optimizers.values()))
    if unknown := [kind for kind in kinds if kind not in (*_MOMENTS.values(), "step")]:
        example = next(iter(kinds[unknown[0]].values()))
        problem = f"has {example}, which is not a state of Adam (amsgrad or another optimizer)"
        raise ValueError(f"{where}: {problem}; train without its states")
    for kind in ("exp_avg_sq", "step"):
        if lacking := sorted({*kinds["exp_avg"]} - {*kinds.get(kind, ())}):
            problem = f"has no {kind} of {lacking[0]} (and {len(lacking) - 1} more), as Adam of PyTorch 1.12 or later"
            raise ValueError(f"{where}: {problem}; train without its states")
    return kinds


class AdamArrays:
    """The arrays of Adam in an optimizer's state.

    Attributes:
      moments: by the name of the array, the name in `open_adam`.
      counts: names of the counts of updates, also those of schedules.
      others: names of other arrays of a parameter's shape.

    Raises:
      ValueError: if not every trained parameter has the two moments of one `optax.scale_by_adam`.
    """

    def __init__(self, state: TrainState):
        tree = jax.tree.structure(state.opt_state)
        places, kinds = jax.tree.unflatten(tree, range(tree.num_leaves)), dict[int, str]()
        for node_type in _COUNTED:
            for node in jax.tree.leaves(places, is_leaf=lambda x, of=node_type: isinstance(x, of)):
                for kind in ("count", *_MOMENTS) if isinstance(node, node_type) else ():
                    kinds |= dict.fromkeys(jax.tree.leaves(getattr(node, kind, ())), kind)
        roles = [(role, kinds.get(place)) for place, role in enumerate(state.roles.arrays)]
        self.counts = [role.name for role, kind in roles if kind == "count"]
        self.moments = {role.name: f"{kind}.{role.leaf}" for role, kind in roles if kind in _MOMENTS}
        self.others = [role.name for role, kind in roles if kind is None and role.kind is Kind.PARAMETER]
        wanted = [f"{moment}.{leaf.path}" for leaf in state.layout.leaves if leaf.trainable for moment in _MOMENTS]
        have = collections.Counter(self.moments.values())
        if wrong := [f"{name} ({have[name]})" for name in wanted if have[name] != 1]:
            raise ValueError(
                f"the optimizer's state must have one array of each of {', '.join(_MOMENTS)} per parameter, but has "
                f"{', '.join(wrong[:4])} (and {len(wrong[4:])} more differ); states of Adam need an optimizer such as "
                "optax.adamw"
            )

    def fill(self, state: TrainState, step: int, read: Callable[[list[Stored]], list[jax.Array]]) -> TrainState:
        """Return a first state with moments and counts of another run. Other arrays keep their initial values.

        Memory:  the moments of `state` are deleted before others are read.

        Args:
          step: the number of updates.
          read: reads the moments, by their names in `open_adam`, in their logical shapes, to the devices.
        """
        wanted = []
        for role, array in zip(state.roles.arrays, jax.tree.leaves(state.opt_state), strict=True):
            if role.name in self.moments:
                logical = jax.ShapeDtypeStruct(role.shape, array.dtype)
                stored = jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=array.sharding)
                wanted.append(single_array(self.moments[role.name], logical, stored))
                array.delete()
        arrays = dict(zip(self.moments, read(wanted), strict=True))

        def choose(role: Role, array: jax.Array) -> jax.Array:
            return _set(array, step) if role.name in self.counts else arrays.get(role.name, array)

        return dataclasses.replace(
            state, opt_state=state.roles.map(choose, state.opt_state), step=_set(state.step, step)
        )


def _set(array: jax.Array, value: int) -> jax.Array:
    return jax.device_put(np.full(array.shape, value, array.dtype), array.sharding)
