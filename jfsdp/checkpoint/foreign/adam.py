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

from jfsdp.checkpoint.disk.logical_arrays import Stored, single_array
from jfsdp.checkpoint.foreign.mapping import Imported, Names, Shapes, as_name_map, bind
from jfsdp.checkpoint.foreign.torch_names import plain_name
from jfsdp.checkpoint.source import Joined, Renamed, Source, read_whole
from jfsdp.train.state import TrainState
from jfsdp.train.update.roles import Kind, Role

_STATE = re.compile(r"(?:(?P<optimizer>.*?)\.)?state\.(?P<name>.+)\.(?P<kind>\w+)")
_MOMENTS = {"mu": "exp_avg", "nu": "exp_avg_sq"}


def open_adam(
    source: Source, names: Names, leaves: Shapes, trained: Collection[str], *, where: Any
) -> tuple[Source, int]:
    """Find the states of Adam in a checkpoint. Reads only the steps.

    Args:
      source: all arrays of the checkpoint, under their own names.
      names: the mapping of parameter names.
      leaves: the parameters of the model by name, with logical shapes.
      trained: those that must have states; others may, and their states are ignored.
      where: the checkpoint's path.

    Returns:
      The moments, named `mu.<name of the parameter>` and `nu.<name>`, and the number of updates.

    Raises:
      ValueError: if there are no such states, or of another optimizer, if parameters lack a state or have more states
        than Adam, or were updated a different number of times.
    """
    found: dict[str, dict[str, dict[str, str]]] = {}
    for name in source.arrays:
        if match := _STATE.fullmatch(name):
            kinds = found.setdefault(match["optimizer"] or "", {})
            kinds.setdefault(match["kind"], {})[match["name"]] = name
    optimizers = {x: kinds for x, kinds in found.items() if not all(map(str.isdigit, kinds.get("exp_avg", ())))}
    if len(optimizers) != 1:
        others = sorted({kind for kinds in found.values() for kind in kinds})
        has = f"{len(optimizers)} ({', '.join(optimizers)})" if optimizers else f"none (states: {others[:8]})"
        raise ValueError(
            f"{where}: has not one Adam with states by parameter name, but {has}; in PyTorch, save the result of "
            "get_optimizer_state_dict(model, optimizer), or train with a new optimizer"
        )
    kinds = next(iter(optimizers.values()))
    for kind in ("exp_avg_sq", "step", *kinds):
        if kind not in ("exp_avg", "exp_avg_sq", "step"):
            some = next(iter(kinds[kind].values()))
            raise ValueError(
                f"{where}: {some} is not a state of Adam (amsgrad, or another optimizer); leave out the states"
            )
        if lacking := sorted({*kinds["exp_avg"]} - {*kinds.get(kind, ())}):
            raise ValueError(f"{where}: has no {kind} of {lacking[0]} (and {len(lacking) - 1} more); save it again")
    steps = {int(read_whole(source, stored)): name for name, stored in kinds["step"].items()}
    if len(steps) != 1:
        examples = ", ".join(f"{name}: {step}" for step, name in list(steps.items())[:4])
        raise ValueError(
            f"{where}: parameters were updated a different number of times ({examples}); optax counts once"
        )
    names, moments = as_name_map(names), []
    for ours, theirs in _MOMENTS.items():
        chosen, view = names.apply(Renamed(source, kinds[theirs]))
        plain, bound = {plain_name([name]) for name in view.arrays}, bind(chosen, leaves).items()
        present = {x.leaf for name, x in bound if not plain.isdisjoint((name, name.removeprefix(chosen.prefix)))}
        if lacking := [leaf for leaf in trained if leaf not in present]:
            problem = f"has no {theirs} of {lacking[0]} (and {len(lacking) - 1} more), which are trained here"
            raise ValueError(f"{where}: {problem}; freeze them as in that run (frozen=), or train without its states")
        wanted = {leaf: shape for leaf, shape in leaves.items() if leaf in present}
        of_leaves = Imported(view, chosen, wanted, where=f"{where}: {theirs}")
        moments.append(Renamed(of_leaves, {f"{ours}.{leaf}": leaf for leaf in trained}))
    return Joined(*moments), next(iter(steps))


class Slots:
    """The arrays of an optimizer's state that belong to Adam.

    Attributes:
      moments: by the name of the array, the name in `open_adam`.
      counts: names of the counts of updates, also those of schedules.
      others: names of other arrays.

    Raises:
      ValueError: if not every trained parameter has the two moments of one Adam.
    """

    def __init__(self, state: TrainState):
        self.moments: dict[str, str] = {}
        self.counts, self.others = list[str](), list[str]()
        for role in state.roles.arrays:
            moment = role.name.removesuffix(f".{role.leaf}").rpartition(".")[2]
            if role.kind is Kind.PARAMETER and moment in _MOMENTS:
                self.moments[role.name] = f"{moment}.{role.leaf}"
            elif role.kind is Kind.SCALAR and role.name.endswith(".count"):
                self.counts.append(role.name)
            else:
                self.others.append(role.name)
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
