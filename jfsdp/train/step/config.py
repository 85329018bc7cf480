"""Configuration of a step: the options of `train_step` and `grads`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.pipeline.schedule import Schedule
from jfsdp.engine.spec import MANUAL, XLA
from jfsdp.layout.layout import Layout
from jfsdp.layout.strategy import Split
from jfsdp.layout.units import matches_glob


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """Configuration of a step.

    Attributes:
      accumulate: number of microbatches that the batch is split into; they run one after the other.
      program: "xla": XLA inserts and orders the collectives. "manual": jfsdp writes them inside a `shard_map`, where
        each device sees its own rows. None: "manual" for a loss that returns a `jfsdp.Loss` and for a pipeline, "xla"
        for a loss that returns a scalar and with one data shard.
      prefetch: for program "manual", how far gathers run ahead of compute: a number of units, or a `Prefetch`; None
        is 1.
      sync: "every" reduces the gradient of every microbatch into a sharded accumulator (`accumulate` times the
        traffic, but only once between replicas in program "manual"). "last", for program "manual", accumulates a whole
        gradient on every device and reduces it after the last microbatch (`no_sync`). None: "last" in program "manual"
        if the strategy leaves gradients partial (zero1), otherwise "every".
      reshard_after_backward: False gathers all parameters once, before the first microbatch, and keeps them until the
        last: one gather per step, but memory for all gathered parameters. A dict from globs over unit names ("" is the
        root) to False selects units; globs that match one unit must not contradict each other.
      max_grad_norm: clip the gradient to this global norm; None does not clip.
      skip_nonfinite: keep the state unchanged (except `step` and `num_skipped`) if the loss or a gradient is not
        finite.
      check_loss: before the first step, compare the loss of some rows with the sum over devices or microbatches that
        the step would compute; see [Note: what a loss must be] in loss_check.py.
      compiler_options: options of XLA by name, which override the options that jfsdp computes from the layout; None as
        a value removes one. `step.compiler_options` has the result.
      pipe_schedule: schedule of a pipeline (mesh axis `pipe`): "1f1b", "gpipe", or a custom `Schedule`. It has
        `accumulate` microbatches. Parameters outside the stages are gathered once per step.
      pipe_repeats: number of parts into which the layers of a stage are split; a stage has every P-th part of the
        model. Divides the bubble by this number. Weights of layers are sent once per step to the stages that compute
        them, and their gradients back.
    """

    accumulate: int = 1
    program: str | None = None
    prefetch: int | Prefetch | None = None
    sync: str | None = None
    reshard_after_backward: bool | Mapping[str, bool] = True
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False
    compiler_options: Mapping[str, Any] | None = None
    check_loss: bool = True
    pipe_schedule: str | Schedule = "1f1b"
    pipe_repeats: int = 1

    def __post_init__(self) -> None:
        if self.program not in (None, XLA, MANUAL):
            raise ValueError(f"program={self.program!r} is unknown; use {XLA!r}, {MANUAL!r} or None: the loss decides")
        if self.sync not in (None, "every", "last"):
            raise ValueError(f'sync={self.sync!r} is unknown; use "every", "last", or None for the strategy\'s default')
        norm = self.max_grad_norm
        if norm is not None and not (hasattr(norm, "__float__") and 0 < norm < math.inf):
            raise ValueError(f"max_grad_norm={norm!r} must be a positive number, or None for no clipping")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> StepConfig:
        """Make a config from a function's arguments by name; ignores names that are not attributes."""
        names = [field.name for field in dataclasses.fields(cls) if field.name in arguments]
        return cls(**{name: arguments[name] for name in names})

    def gathered_units(self, layout: Layout) -> tuple[str, ...]:
        """Return the units that stay gathered over all microbatches.

        Raises:
          ValueError: for a glob that matches no unit, or globs that contradict each other.
        """
        wanted, names = self.reshard_after_backward, [unit.name for unit in layout.units]
        choices = wanted if isinstance(wanted, Mapping) else dict.fromkeys(names, wanted)
        reshards: dict[str, bool] = {}
        for pattern, choice in choices.items():
            matched = [name for name in names if matches_glob(pattern, name)]
            if not matched:
                known = ", ".join(map(repr, names))
                raise ValueError(f"reshard_after_backward[{pattern!r}] matches no unit; the units are {known}")
            for name in matched:
                if reshards.setdefault(name, choice) != choice:
                    raise ValueError(
                        f"unit {name!r}: reshard_after_backward is {not choice} by one glob and {choice} by "
                        f"{pattern!r}; make one of the globs narrower"
                    )
        in_pipeline = layout.gathered_in_pipeline
        return tuple(name for name, reshard in reshards.items() if not reshard or name in in_pipeline)

    def syncs_last(self, layout: Layout) -> bool:
        """Return whether the microbatches of a step share one reduction, if the program supports it; see `sync`."""
        return self.sync == "last" or (self.sync is None and layout.strategy.grad is Split.PARTIAL)
