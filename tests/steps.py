"""Sharded models whose steps use a given program, for tests of both programs; specs of steps without a model."""

import functools
from typing import Any

from jfsdp.engine.movements import deferred_axes
from jfsdp.engine.spec import MANUAL, StepSpec
from jfsdp.train.step.config import StepConfig
from tests import sharding


def fully_shard(model: Any, *, program: str | None = None, prefetch: Any = None, **options: Any) -> Any:
    """Shard a model as in `tests.sharding`, with a default program and prefetch of its steps."""
    sharded: Any = sharding.fully_shard(model, **options)
    for name in ("train_step", "grads"):
        setattr(sharded, name, functools.partial(getattr(sharded, name), program=program, prefetch=prefetch))
    return sharded


def spec_of(layout: Any, *, calls: Any = None, program: str = MANUAL, **options: Any) -> StepSpec:
    """Return the spec of a step with these options (`accumulate`, `sync`, ...) for a layout, without a model."""
    config, repeats = StepConfig(**options), any(num > 1 for num in (calls or {}).values())
    later = deferred_axes(layout, accumulate=config.accumulate, once=config.syncs_last(layout), repeats=repeats)
    return StepSpec(
        program=program,
        accumulate=config.accumulate,
        deferred=later if program == MANUAL else (),
        gathered=config.gathered_units(layout),
    )
