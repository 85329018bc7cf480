"""Checkpoints without frozen parameters, and the check of their base.

[Note: the base of a checkpoint]
A run that trains adapters need not write gigabytes of weights that never change. Its checkpoints contain the trained
arrays and a digest of every frozen leaf. Restoring one requires a state with the same base; another base is an error.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax

from jfsdp.train.digest import digest
from jfsdp.train.state import TrainState


def without_frozen(state: TrainState) -> TrainState:
    """Return a state without the leaves that are not trained. Moves no data."""
    names = {leaf.path for leaf in state.layout.leaves if leaf.trainable}
    params, work = ({name: x for name, x in of.items() if name in names} for of in (state.params, state.work))
    return dataclasses.replace(state, params=params, work=work)


def frozen_digests(state: TrainState) -> dict[str, int]:
    """Return a digest of each leaf that is not trained, from its logical bits; it is the same on every mesh.

    Cost:    each device reads its part of these leaves once; one number per leaf is summed over all devices.
    Memory:  offloaded leaves are copied to their device one at a time.
    """
    frozen = [leaf for leaf in state.layout.leaves if not leaf.trainable and leaf.path in state.params]
    found = {leaf.path: _digest(state.params[leaf.path], leaf.shape) for leaf in frozen}
    return {name: int(number) for name, number in found.items()}


@functools.partial(jax.jit, static_argnums=1)
def _digest(x: Any, shape: tuple[int, ...]) -> jax.Array:
    return digest(jax.device_put(x, jax.memory.Space.Device)[tuple(map(slice, shape))])


def check_base(path: Any, base: Mapping[str, int], like: TrainState) -> None:
    """Check that `like` has the base on which a checkpoint was trained.

    Raises:
      ValueError: if it has another base or none; names the first leaf that differs, and the number of others.
    """
    if not isinstance(like.step, jax.Array):
        raise ValueError(f"checkpoint {path}: omits {len(base)} frozen leaves; pass like=a live state that has them")
    ours = frozen_digests(like)
    differing = sorted(name for name in base.keys() | ours.keys() if base.get(name) != ours.get(name))
    if differing:
        what = f"{differing[0]} and {len(differing) - 1} more differ; use the weights that its training began with"
        raise ValueError(f"checkpoint {path}: was trained on another base: {what}")
