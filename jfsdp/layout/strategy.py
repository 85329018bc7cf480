"""Strategies as data: for each stage of a leaf's life, the mesh axes that split it.

The stages are `param` (at rest), `kept` (between a unit's forward and backward), `grad` (the accumulator) and `opt`
(optimizer states and, where it is finer than `param` and the precision is mixed, the master). `use` is always whole.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from jfsdp.layout.mesh import DATA_AXES, GROUP_AXES


class Split(Enum):
    """Over which data axes a stage is split: none, the group's, or all of them."""

    WHOLE = "whole"
    GROUP = "group"
    ALL = "all"

    @property
    def axes(self) -> tuple[str, ...]:
        return {Split.WHOLE: (), Split.GROUP: GROUP_AXES, Split.ALL: DATA_AXES}[self]


@dataclasses.dataclass(frozen=True)
class Strategy:
    """In which layout each stage of a leaf stands; see the table in docs/design.md. Moves no data.

    Attributes:
      name: what it is called in layouts, checkpoints and messages.
      param: the parameters at rest between steps.
      kept: a unit's parameters between its forward and its backward: WHOLE means that they stay gathered.
      grad: the gradient accumulator.
      opt: the optimizer states.
    Source: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277).
    """

    name: str
    param: Split
    kept: Split
    grad: Split
    opt: Split

    def __post_init__(self) -> None:
        order = [Split.WHOLE, Split.GROUP, Split.ALL]
        if order.index(self.opt) < order.index(self.param):
            raise ValueError(
                f"strategy {self.name!r}: opt ({self.opt.value}) is less split than param ({self.param.value}), so the "
                "update would need states that no device holds; split opt at least as far as param"
            )


_W, _G, _A = Split.WHOLE, Split.GROUP, Split.ALL
_TABLE = [
    #        name                  param kept grad opt
    Strategy("ddp", _W, _W, _W, _W),
    Strategy("zero1", _W, _W, _A, _A),
    Strategy("zero2", _W, _W, _A, _A),
    Strategy("full_shard", _A, _A, _A, _A),
    Strategy("shard_grad_op", _A, _W, _A, _A),
    Strategy("hybrid_shard", _G, _G, _G, _G),
    Strategy("hybrid_shard_zero2", _G, _W, _G, _G),
    Strategy("hfsdp", _G, _G, _A, _A),
]
STRATEGIES = {strategy.name: strategy for strategy in _TABLE}
ALIASES = {"zero3": "full_shard", "hsdp": "hybrid_shard"}


def get_strategy(strategy: str | Strategy) -> Strategy:
    """Return the strategy of that name; a `Strategy` passes through. Moves no data.

    Raises:
      ValueError: for an unknown name; lists the valid ones.
    """
    if isinstance(strategy, Strategy):
        return strategy
    name = ALIASES.get(strategy, strategy)
    if name not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; the strategies are {', '.join([*STRATEGIES, *ALIASES])}")
    return STRATEGIES[name]
