"""Strategies as data: for each stage of a leaf, the mesh axes that split it.

The stages are `param` (at rest), `grad` (the accumulator) and `opt` (optimizer states and, if `opt` is finer than
`param` and the precision is mixed, the master). `use` is always whole. Only `reshard_after_forward`, for which a
strategy has a default, determines stage `kept`, between a unit's forward and backward.
"""

from __future__ import annotations

import dataclasses
import math
import tomllib
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import Path

from jfsdp.arguments import did_you_mean
from jfsdp.layout.mesh import CONTEXT, DATA_AXES, EXPERT, GROUP_AXES


class Split(Enum):
    """Over which data axes a stage is split.

    WHOLE: none. GROUP: axes `fsdp`, `expert` and `context`. ALL: all data axes. PARTIAL, for `grad`: whole and not yet
    reduced, so that the microbatches of a step share one reduction.
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

    Each stage is a `Split`, or a tuple of the data axes that split it, major to minor; () is whole.

    Attributes:
      name: its name in layouts, checkpoints and messages.
      param: the parameters at rest between steps.
      grad: the gradient accumulator.
      opt: the optimizer states.
      reshard_after_forward: the default for units below the root: True, False, a number of neighbouring devices as in
        `UnitPolicy`, or "node", the devices of one host (hpZ). Has no effect if `param` is whole.

    Raises:
      TypeError: for a name that is not text, a stage that is neither a `Split` nor a tuple, and another type of
        `reshard_after_forward`.
      ValueError: for an unknown, repeated or misplaced axis, for a stage that is split less than the one before it
        requires (`param` within `grad` within `opt`), and for any other `reshard_after_forward`.
    Source: ZeRO (arXiv 1910.02054), PyTorch FSDP (arXiv 2304.11277), ZeRO++ (arXiv 2306.10209) for "node".
    """

    name: str
    param: Placement
    grad: Placement
    opt: Placement
    reshard_after_forward: bool | int | str = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name:
            raise TypeError(f"Strategy: name={self.name!r} must be text, the strategy's name in messages")
        for stage in _SPLITS:
            self._check_stage(stage)
        self._check_finer("opt", "param", "no device would have the states for the update")
        reshard = self.reshard_after_forward
        if not (reshard == NODE or isinstance(reshard, bool) or (isinstance(reshard, int) and reshard > 0)):
            raise (ValueError if isinstance(reshard, (int, str)) else TypeError)(
                f"strategy {self.name!r}: reshard_after_forward={reshard!r} is neither True, False, a number of "
                f"devices nor {NODE!r}, the devices of a host; the stages are param, grad and opt; this argument "
                "sets the parameters' sharding between forward and backward"
            )
        if self.grad is Split.PARTIAL:
            if self.axes("param"):
                raise ValueError(
                    f"strategy {self.name!r}: grad (partial) needs param (whole), but param is {show(self.param)}"
                )
            return
        self._check_finer("opt", "grad", "reduced gradients would have to be gathered again; split grad no further")
        self._check_finer("grad", "param", "the gradient of a shard would be whole; use at least the axes of param")

    def axes(self, stage: str) -> tuple[str, ...]:
        """Return the axes that split a stage, of any size."""
        placement = getattr(self, stage)
        return _AXES[placement] if isinstance(placement, Split) else placement

    def given_axes(self) -> dict[str, tuple[str, ...]]:
        """Return the axes of stages that are given as tuples: a mesh must have these, but not the axes of a `Split`."""
        return {stage: self.axes(stage) for stage in _SPLITS if not isinstance(getattr(self, stage), Split)}

    def _check_stage(self, stage: str) -> None:
        value = getattr(self, stage)
        if isinstance(value, Split):
            if value not in _SPLITS[stage]:
                known = ", ".join(split.value for split in _SPLITS[stage])
                raise ValueError(f"strategy {self.name!r}: {stage} cannot be {value.value}; it is one of {known}")
            return
        if not isinstance(value, tuple) or [axis for axis in DATA_AXES if axis in value] != list(value):
            raise (ValueError if isinstance(value, tuple) else TypeError)(
                f"strategy {self.name!r}: {stage}={value!r} is neither a jfsdp.Split nor a tuple of data axes, each "
                f"once, in the order {DATA_AXES}"
            )

    def _check_finer(self, fine: str, coarse: str, reason: str) -> None:
        # A stage is split over all axes of the stage before it (`_stages` in build.py), so `expert` may be left out.
        if not set(self.axes(coarse)) - {EXPERT} <= set(self.axes(fine)):
            raise ValueError(
                f"strategy {self.name!r}: {fine} ({show(getattr(self, fine))}) is less split than {coarse} "
                f"({show(getattr(self, coarse))}): {reason}"
            )


def show(placement: Placement) -> str:
    """Return a placement as text."""
    return placement.value if isinstance(placement, Split) else "/".join(placement) or "whole"


_W, _P, _G = Split.WHOLE, Split.PARTIAL, Split.GROUP
_TABLE = [
    #        name         param grad opt
    Strategy("ddp", _W, _W, _W),
    Strategy("zero1", _W, _P, _G),
    Strategy("zero2", _W, _G, _G),
    Strategy("full_shard", _G, _G, _G),
]
STRATEGIES = {strategy.name: strategy for strategy in _TABLE}


@dataclasses.dataclass(frozen=True)
class OtherName:
    """The meaning of another library's strategy name.

    Attributes:
      strategy: a name of `STRATEGIES`.
      replicated: whether the name requires a mesh with `replica` > 1; None: any mesh.
      reshard_after_forward: its default.
      opt_over: as in `fully_shard`.
    """

    strategy: str
    replicated: bool | None = None
    reshard_after_forward: bool | str = True
    opt_over: tuple[str, ...] | None = None


def _other_name(strategy: str, opt_over: Sequence[str] | None = None, **row: bool | str) -> OtherName:
    return OtherName(strategy, opt_over=opt_over and tuple(opt_over), **row)  # type: ignore[arg-type]


_ROWS = tomllib.loads(Path(__file__).with_name("other_names.toml").read_text(encoding="utf-8"))
OTHER_NAMES = {int(name) if name.isdigit() else name: _other_name(**row) for name, row in _ROWS.items()}


def get_strategy(
    strategy: str | int | Strategy, sizes: Mapping[str, int], opt_over: Sequence[str] | None = None
) -> Strategy:
    """Return the strategy of a name on a mesh; a `Strategy` is returned unchanged.

    Args:
      strategy: a name of `STRATEGIES` or of `OTHER_NAMES`.
      sizes: of the mesh's axes.
      opt_over: the data axes that split optimizer states, and gradients if the strategy splits them; None: `fsdp`.

    Raises:
      TypeError: for a value that is not text, a whole number or a `Strategy`.
      ValueError: for an unknown name, with the valid ones and the closest; for a name that contradicts the mesh, with
        the mesh that it requires; for `opt_over` if the strategy already sets it or splits nothing.
    """
    if isinstance(strategy, Strategy):
        return _with_opt_over(strategy, strategy.name, opt_over)
    is_number = isinstance(strategy, int) and not isinstance(strategy, bool)
    other = OTHER_NAMES.get(strategy) if is_number or isinstance(strategy, str) else None
    if other is None:
        if not isinstance(strategy, str) or strategy not in STRATEGIES:
            names = [name for name in OTHER_NAMES if isinstance(name, str)]
            raise (ValueError if is_number or isinstance(strategy, str) else TypeError)(
                f"strategy {strategy!r} is unknown{did_you_mean(strategy, [*STRATEGIES, *names])}; the strategies are "
                f"{', '.join(STRATEGIES)}; names of other libraries are {', '.join(names)}, and the number of a "
                "DeepSpeed stage, 0 to 3"
            )
        return _with_opt_over(STRATEGIES[strategy], strategy, opt_over)
    _check_mesh(strategy, other, sizes)
    if other.opt_over and opt_over:
        raise ValueError(f"strategy {strategy!r} means opt_over={other.opt_over}; leave out opt_over={opt_over}")
    found = dataclasses.replace(STRATEGIES[other.strategy], reshard_after_forward=other.reshard_after_forward)
    return _with_opt_over(found, strategy, opt_over or other.opt_over)


def _check_mesh(name: str | int, other: OtherName, sizes: Mapping[str, int]) -> None:
    replica, num = sizes.get("replica", 1), sizes.get("replica", 1) * sizes.get("fsdp", 1)
    others = {axis: sizes[axis] for axis in (EXPERT, CONTEXT) if sizes.get(axis, 1) > 1}
    rest = "".join(f",{axis}={size}" for axis, size in others.items())
    if other.replicated in (None, replica > 1):
        return
    shown = f"replica={replica},fsdp={num // replica}{rest}"
    if replica > 1:
        raise ValueError(
            f"strategy {name!r} shards over all {math.prod((num, *others.values()))} devices, but mesh {shown} "
            f"replicates over axis 'replica'; use mesh fsdp={num}{rest}, or strategy {other.strategy!r} to keep "
            f"{replica} replicas"
        )
    groups = next((n for n in range(2, num + 1) if num % n == 0), 2)
    meant = f"mesh replica={groups},fsdp={num // groups}{rest}" if num > 1 else "a mesh with replica > 1"
    raise ValueError(
        f"strategy {name!r} replicates over axis 'replica', but mesh {shown} has one replica; use {meant}, or strategy "
        f"{other.strategy!r}"
    )


def _with_opt_over(strategy: Strategy, given: str | int, opt_over: Sequence[str] | None) -> Strategy:
    """Split the optimizer states, and gradients that are split, over these axes."""
    if opt_over is None:
        return strategy
    known = STRATEGIES.get(strategy.name)
    if strategy.name == "ddp" or known != dataclasses.replace(strategy, reshard_after_forward=True):
        raise ValueError(
            f"opt_over={','.join(opt_over)!r} splits optimizer states, and so does strategy {given!r}; leave "
            f"it out, or use {', '.join(one.name for one in _TABLE[1:])}"
        )
    # Axes `expert` and `context` belong to the group of `fsdp`.
    own = tuple(axis for axis in opt_over if axis not in GROUP_AXES[1:])
    axes = {("fsdp",): Split.GROUP, ("replica", "fsdp"): Split.ALL}.get(own, tuple(opt_over))
    grad = strategy.grad if strategy.grad is Split.PARTIAL else axes
    name = f"{strategy.name}, opt_over={'/'.join(opt_over)}"
    return dataclasses.replace(strategy, name=name, grad=grad, opt=axes)
