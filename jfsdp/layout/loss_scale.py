"""Dynamic loss scaling, which keeps small gradients of float16 from becoming zero."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp

from jfsdp.arguments import checked

ScaleState = dict[str, jax.Array]
_LARGEST = float(jnp.finfo(jnp.float32).max)


@checked
@dataclasses.dataclass(frozen=True)
class LossScale:
    """The factor on the loss and its updates; the defaults are those of PyTorch's GradScaler.

    The loss is multiplied by the factor before its gradient is taken, and the gradient is divided by it, in float32,
    after its reduction. A step whose gradient is not finite changes nothing and shrinks the factor.

    Attributes:
      initial: the factor of the first step.
      growth: multiplier of the factor after `interval` finite steps in a row; 1 keeps it constant.
      backoff: multiplier of the factor after a step that was not finite.
      interval: how many finite steps in a row let it grow.
      minimum: the minimum of the factor.

    Source: Mixed Precision Training (arXiv 1710.03740), section 3.2.
    """

    initial: float = 2.0**16
    growth: float = 2.0
    backoff: float = 0.5
    interval: int = 2000
    minimum: float = 1.0

    def __post_init__(self) -> None:
        right = _LARGEST >= self.initial >= self.minimum > 0 and _LARGEST >= self.growth >= 1
        if not (right and 0 < self.backoff <= 1 and 1 <= self.interval < 2**31):
            needs = "initial >= minimum > 0, growth >= 1, 0 < backoff <= 1 and interval >= 1, as float32 and int32"
            raise ValueError(f"{self}: needs {needs}")

    def init(self) -> ScaleState:
        """Return the state of the first step: `scale` (float32) and `num_finite` (int32), both scalars."""
        return {"scale": jnp.asarray(self.initial, jnp.float32), "num_finite": jnp.zeros((), jnp.int32)}

    def update(self, state: ScaleState, is_finite: jax.Array) -> ScaleState:
        """Return the state after a step."""
        scale, num_finite = state["scale"], state["num_finite"] + 1
        grows = num_finite >= self.interval
        after_finite = jnp.where(grows, scale * self.growth, scale)
        # A factor beyond float32 is infinite, and all following steps would be skipped.
        after_finite = jnp.where(jnp.isfinite(after_finite), after_finite, scale)
        after_overflow = jnp.maximum(scale * self.backoff, self.minimum)
        return {
            "scale": jnp.where(is_finite, after_finite, after_overflow),
            "num_finite": jnp.where(is_finite & ~grows, num_finite, 0),
        }
