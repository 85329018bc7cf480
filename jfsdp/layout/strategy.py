"""Strategies as data: for each stage of a leaf's life, the mesh axes that split it.

The stages are `param` (at rest), `kept` (between a unit's forward and backward), `grad` (the accumulator) and `opt`
(optimizer states and, where it is finer than `param` and the precision is mixed, the master). `use` is always whole.
"""

from __future__ import annotations

import dataclasses
import difflib
from enum import Enum

from jfsdp.layout.mesh import DATA_AXES, GROUP_AXES


class Split(Enum):
    """Over which data axes a stage is split.

    WHOLE: none. GROUP: the group's axis. ALL: all data axes. PARTIAL, for `grad`: whole and not yet reduced, so that
    the microbatches of a step share one reduction. NODE, for `kept`: over the devices of one host (hpZ).
    """

    WHOLE = "whole"
    PARTIAL = "partial"
    NODE = "node"
    GROUP = "group"
    ALL = "all"


Placement = Split | tuple[str, ...]
_AXES = {Split.WHOLE: (), Split.PARTIAL: (), Split.NODE: GROUP_AXES, Split.GROUP: GROUP_AXES, Split.ALL: DATA_AXES}
_SPLITS = {
    "param": (Split.WHOLE, Split.GROUP, Split.ALL),
    "kept": (Split.WHOLE, Split.NODE, Split.GROUP, Split.ALL),
    "grad": (Split.WHOLE, Split.PARTIAL, Split.GROUP, Split.ALL),
    "opt": (Split.WHOLE, Split.GROUP, Split.ALL),
}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """In which layout each stage of a leaf stands; see the table in docs/design.md. Moves no data.

    Each stage is a `Split`, or by hand the tuple of the data axes that split it, major to minor; () is whole.

    Attributes:
      name: what it is called in layouts, checkpoints and messages.
      param: the parameters at rest between steps.
      kept: a unit's parameters between its forward and its backward: WHOLE means that they stay gathered.
      grad: the gradient accumulator.
      opt: the optimizer states.

    Raises:
      ValueError: for an unknown, repeated or misplaced axis, and where a stage is less split than the one before it
        needs: `kept` within `param` within `grad` within `opt`.
    Source: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277), ZeRO++ (arXiv 2306.10209) for NODE.
    """

    name: str
    param: Placement
    kept: Placement
    grad: Placement
    opt: Placement

    def __post_init__(self) -> None:
        for stage in _SPLITS:
            self._check_stage(stage)
        self._check_finer("opt", "param", "the update would need states that no device holds")
        self._check_kept()
        if self.grad is Split.PARTIAL:
            if self.axes("param"):
                raise ValueError(
                    f"strategy {self.name!r}: grad (partial) needs param (whole), and param is {show(self.param)}"
                )
            return
        self._check_finer("opt", "grad", "what is reduced would have to be gathered again; split grad no further")
        self._check_finer(
            "grad", "param", "the gradient of a shard would be held whole; use at least the axes of param"
        )

    def axes(self, stage: str) -> tuple[str, ...]:
        """Return the axes that split a stage, whatever their sizes."""
        placement = getattr(self, stage)
        return _AXES[placement] if isinstance(placement, Split) else placement

    def given_axes(self) -> dict[str, tuple[str, ...]]:
        """Return the axes of the stages that are given by hand: a mesh must have them; those of a `Split` need not."""
        return {stage: self.axes(stage) for stage in _SPLITS if not isinstance(getattr(self, stage), Split)}

    def _check_stage(self, stage: str) -> None:
        value = getattr(self, stage)
        if isinstance(value, Split):
            if value not in _SPLITS[stage]:
                known = ", ".join(split.value for split in _SPLITS[stage])
                raise ValueError(f"strategy {self.name!r}: {stage} cannot be {value.value}; it is one of {known}")
            return
        if not isinstance(value, tuple) or [axis for axis in DATA_AXES if axis in value] != list(value):
            raise ValueError(
                f"strategy {self.name!r}: {stage}={value!r} is neither a jfsdp.Split nor a tuple of data axes, each "
                f"once, in the order {DATA_AXES}"
            )

    def _check_kept(self) -> None:
        param, kept = self.axes("param"), self.axes("kept")
        if self.kept is Split.NODE:
            if not param:
                raise ValueError(f"strategy {self.name!r}: kept (node) needs split parameters, and param is whole")
            return
        self._check_finer("param", "kept", "no device would hold what is to be kept")
        if kept and param[-len(kept) :] != kept:
            raise ValueError(
                f"strategy {self.name!r}: kept ({show(self.kept)}) must be whole or the minor axes of param "
                f"({show(self.param)}): what is kept is split over neighbouring devices"
            )

    def _check_finer(self, fine: str, coarse: str, reason: str) -> None:
        if not set(self.axes(coarse)) <= set(self.axes(fine)):
            raise ValueError(
                f"strategy {self.name!r}: {fine} ({show(getattr(self, fine))}) is less split than {coarse} "
                f"({show(getattr(self, coarse))}): {reason}"
            )


def show(placement: Placement) -> str:
    """Write a placement in words. Moves no data."""
    return placement.value if isinstance(placement, Split) else "/".join(placement) or "whole"


_W, _P, _N, _G, _A = Split.WHOLE, Split.PARTIAL, Split.NODE, Split.GROUP, Split.ALL
_TABLE = [
    #        name                  param kept grad opt
    Strategy("ddp", _W, _W, _W, _W),
    Strategy("zero1", _W, _W, _P, _A),
    Strategy("zero2", _W, _W, _A, _A),
    Strategy("full_shard", _A, _A, _A, _A),
    Strategy("shard_grad_op", _A, _W, _A, _A),
    Strategy("hybrid_shard", _G, _G, _G, _G),
    Strategy("hybrid_shard_zero2", _G, _W, _G, _G),
    Strategy("hfsdp", _G, _G, _A, _A),
    Strategy("hpz", _A, _N, _A, _A),
]
STRATEGIES = {strategy.name: strategy for strategy in _TABLE}
ALIASES = {
    # PyTorch FSDP1's ShardingStrategy
    "NO_SHARD": "ddp",
    "FULL_SHARD": "full_shard",
    "SHARD_GRAD_OP": "shard_grad_op",
    "HYBRID_SHARD": "hybrid_shard",
    "_HYBRID_SHARD_ZERO2": "hybrid_shard_zero2",
    # PyTorch FSDP2: fully_shard on a mesh of one axis or of two, replicate
    "fully_shard": "full_shard",
    "hsdp": "hybrid_shard",
    "replicate": "ddp",
    # DeepSpeed: stage by number, ZeRO++ with a secondary partition
    "zero0": "ddp",
    "zero3": "full_shard",
    "zeropp": "hpz",
}
_STAGES = ("ddp", "zero1", "zero2", "full_shard")


def get_strategy(strategy: str | int | Strategy) -> Strategy:
    """Return the strategy of that name, or of that DeepSpeed stage (0 to 3); a `Strategy` passes through.

    Moves no data.

    Raises:
      ValueError: for an unknown name; lists the valid ones, and the closest.
    """
    if isinstance(strategy, Strategy):
        return strategy
    if isinstance(strategy, int) and not isinstance(strategy, bool) and 0 <= strategy < len(_STAGES):
        return STRATEGIES[_STAGES[strategy]]
    name = ALIASES.get(strategy, strategy) if isinstance(strategy, str) else None
    if name not in STRATEGIES:
        close = difflib.get_close_matches(str(strategy), [*STRATEGIES, *ALIASES], n=1)
        raise ValueError(
            f"strategy {strategy!r} is unknown{f' (did you mean {close[0]!r}?)' if close else ''}; the strategies are "
            f"{', '.join([*STRATEGIES, *ALIASES])}, or the number of a DeepSpeed stage, 0 to {len(_STAGES) - 1}"
        )
    return STRATEGIES[name]
