"""Strategies as data: for each stage of a leaf's life, the mesh axes that split it.

The stages are `param` (at rest), `grad` (the accumulator) and `opt` (optimizer states and, where it is finer than
`param` and the precision is mixed, the master). `use` is always whole; what is kept of a unit between its forward and
its backward is said by `reshard_after_forward` alone, for which a strategy has a default.
"""

from __future__ import annotations

import dataclasses
import difflib
from enum import Enum

from jfsdp.layout.mesh import DATA_AXES, GROUP_AXES


class Split(Enum):
    """Over which data axes a stage is split.

    WHOLE: none. GROUP: the group's axis. ALL: all data axes. PARTIAL, for `grad`: whole and not yet reduced, so that
    the microbatches of a step share one reduction.
    """

    WHOLE = "whole"
    PARTIAL = "partial"
    GROUP = "group"
    ALL = "all"


NODE = "node"
Placement = Split | tuple[str, ...]
_AXES = {Split.WHOLE: (), Split.PARTIAL: (), Split.GROUP: GROUP_AXES, Split.ALL: DATA_AXES}
_SPLITS = {
    "param": (Split.WHOLE, Split.GROUP, Split.ALL),
    "grad": (Split.WHOLE, Split.PARTIAL, Split.GROUP, Split.ALL),
    "opt": (Split.WHOLE, Split.GROUP, Split.ALL),
}


@dataclasses.dataclass(frozen=True)
class Strategy:
    """The sharding of each stage of a leaf; see the table in docs/design.md.

    Each stage is a `Split`, or by hand the tuple of the data axes that split it, major to minor; () is whole.

    Attributes:
      name: what it is called in layouts, checkpoints and messages.
      param: the parameters at rest between steps.
      grad: the gradient accumulator.
      opt: the optimizer states.
      reshard_after_forward: what holds for units below the root unless the user says otherwise; True, False, a number
        of neighbouring devices as in `UnitPolicy`, or "node", the devices of one host (hpZ). Of no effect where `param`
        is whole.

    Raises:
      ValueError: for an unknown, repeated or misplaced axis, where a stage is less split than the one before it needs
        (`param` within `grad` within `opt`), and for any other `reshard_after_forward`.
    Source: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277), ZeRO++ (arXiv 2306.10209) for "node".
    """

    name: str
    param: Placement
    grad: Placement
    opt: Placement
    reshard_after_forward: bool | int | str = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise ValueError(f"Strategy: name={self.name!r} must be text, what to call it by")
        for stage in _SPLITS:
            self._check_stage(stage)
        self._check_finer("opt", "param", "the update would need states that no device holds")
        reshard = self.reshard_after_forward
        if not (reshard == NODE or isinstance(reshard, bool) or (isinstance(reshard, int) and reshard > 0)):
            raise ValueError(
                f"strategy {self.name!r}: reshard_after_forward={reshard!r} is neither True, False, a number of "
                f"devices nor {NODE!r}, those of a host; the stages are param, grad and opt, and this argument alone "
                "says what is kept between forward and backward"
            )
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

    def _check_finer(self, fine: str, coarse: str, reason: str) -> None:
        if not set(self.axes(coarse)) <= set(self.axes(fine)):
            raise ValueError(
                f"strategy {self.name!r}: {fine} ({show(getattr(self, fine))}) is less split than {coarse} "
                f"({show(getattr(self, coarse))}): {reason}"
            )


def show(placement: Placement) -> str:
    """Write a placement in words."""
    return placement.value if isinstance(placement, Split) else "/".join(placement) or "whole"


_W, _P, _G, _A = Split.WHOLE, Split.PARTIAL, Split.GROUP, Split.ALL
_TABLE = [
    #        name         param grad opt
    Strategy("ddp", _W, _W, _W),
    Strategy("zero1", _W, _P, _A),
    Strategy("zero2", _W, _A, _A),
    Strategy("full_shard", _A, _A, _A),
    Strategy("shard_grad_op", _A, _A, _A, reshard_after_forward=False),
    Strategy("hybrid_shard", _G, _G, _G),
    Strategy("hybrid_shard_zero2", _G, _G, _G, reshard_after_forward=False),
    Strategy("hfsdp", _G, _A, _A),
    Strategy("hpz", _A, _A, _A, reshard_after_forward=NODE),
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
