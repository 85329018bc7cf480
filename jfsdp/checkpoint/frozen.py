"""Checkpoints without what is not trained: which arrays they have, and of which base they are.

[Note: the base of a checkpoint]
A run that trains adapters need not write gigabytes of weights that never change. Its checkpoints hold what is trained,
and a digest of every frozen leaf: whoever restores one gives a state that has the base, and another base is refused.
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
    """Return a number for each leaf that is not trained: of its logical bits, the same on every mesh.

    Cost:    each device reads its part of these leaves once, and a number of each is summed over all devices.
    Memory:  what is offloaded is copied to its device, a leaf at a time.
    """
    frozen = [leaf for leaf in state.layout.leaves if not leaf.trainable and leaf.path in state.params]
    found = {leaf.path: _digest(state.params[leaf.path], leaf.shape) for leaf in frozen}
    return {name: int(number) for name, number in found.items()}


@functools.partial(jax.jit, static_argnums=1)
def _digest(x: Any, shape: tuple[int, ...]) -> jax.Array:
    return digest(jax.device_put(x, jax.memory.Space.Device)[tuple(map(slice, shape))])


def check_base(path: Any, base: Mapping[str, int], like: TrainState) -> None:
    """Refuse to restore onto another base than a checkpoint was trained on, or onto none.

    Raises:
      ValueError: naming the first leaf that differs, and how many.
    """
    if not isinstance(like.step, jax.Array):
        raise ValueError(f"checkpoint {path}: has no frozen leaves ({len(base)}); pass like=a live state that has them")
    there = frozen_digests(like)
    differing = sorted(name for name in base.keys() | there.keys() if base.get(name) != there.get(name))
    if differing:
        what = f"{differing[0]} and {len(differing) - 1} more differ; begin from the weights that it began from"
        raise ValueError(f"checkpoint {path}: was trained on another base: {what}")
