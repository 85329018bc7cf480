"""How a step is taken, as the user says it."""

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
    """How a step is taken.

    Attributes:
      accumulate: into how many microbatches the batch is cut; they run one after the other.
      program: "xla": XLA inserts the collectives and orders them. "manual": jfsdp writes them out, inside a
        `shard_map`, where each device sees its own rows. None: "manual" for a loss that returns a `jfsdp.Loss` and for
        a pipeline, "xla" for a loss that returns a scalar, and wherever one data shard has all rows.
      prefetch: for program "manual", how far gathers run ahead of the compute: a number of units, or a `Prefetch`;
        None is 1.
      sync: "every" reduces the gradient of every microbatch into its accumulator (memory of a shard, `accumulate`
        times the traffic; between replicas only once, in program "manual"). "last", for program
        "manual", accumulates a whole gradient on every device and reduces it after the last microbatch (`no_sync`).
        None: as the strategy's table says, which is "last" for zero1, and "every" for the others; in program "xla" it
        is "every" for all.
      reshard_after_backward: False gathers all parameters once, before the first microbatch, and keeps them to the
        last: one gather per step for the memory of all parameters in use. A dict from globs over unit names ("" is the
        root) to False says so of some units; globs that match one unit must not contradict each other.
      max_grad_norm: clip the gradient to this global norm; None does not clip.
      skip_nonfinite: leave the state as it was (but for `step` and `num_skipped`) when the loss or a gradient is not
        finite.
      check_loss: before the first step, compare the loss of some rows with the sum of its parts, where the step adds up
        such parts: those of each device, or of each microbatch; see [Note: what a loss must be] in loss_check.py.
      compiler_options: options of XLA by name, over those that jfsdp computes from the layout; None as a value takes
        one away. The step's attribute of this name shows what it is compiled with.
      pipe_schedule: of a pipeline (mesh axis `pipe`): "1f1b", "gpipe", or a `Schedule` of your own. The number of its
        microbatches is `accumulate`; what is not in the stages is gathered once per step.
      pipe_repeats: into how many parts the layers of a stage fall, every P-th part of the model: the bubble is that
        many times smaller. Weights of the layers are sent to the stages that compute them once per step, and gradients
        back.
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
            raise ValueError(
                f"program={self.program!r} is unknown; use {XLA!r}, {MANUAL!r}, or None for the loss to say"
            )
        if self.sync not in (None, "every", "last"):
            raise ValueError(f'sync={self.sync!r} is unknown; use "every", "last", or None for the strategy\'s own')
        norm = self.max_grad_norm
        if norm is not None and not (hasattr(norm, "__float__") and 0 < norm < math.inf):
            raise ValueError(f"max_grad_norm={norm!r} must be a positive number, or None to clip nothing")

    @classmethod
    def of(cls, arguments: Mapping[str, Any]) -> StepConfig:
        """Make one of a function's arguments by name: of those that are its attributes."""
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
                raise ValueError(f"reshard_after_backward[{pattern!r}] matches no unit; these are {known}")
            for name in matched:
                if reshards.setdefault(name, choice) != choice:
                    raise ValueError(
                        f"unit {name!r}: reshard_after_backward is {not choice}, and by {pattern!r} {choice}; make one "
                        "of the globs narrower"
                    )
        held = layout.gathered_in_pipeline
        return tuple(name for name, reshard in reshards.items() if not reshard or name in held)

    def syncs_last(self, layout: Layout) -> bool:
        """Tell whether the microbatches of a step share one reduction, where the program can; see `sync`."""
        return self.sync == "last" or (self.sync is None and layout.strategy.grad is Split.PARTIAL)
