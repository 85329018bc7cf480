"""Several optimizers over one model, each with its own state and its own turns, as in a GAN."""

from __future__ import annotations

from typing import Any

import optax


def separate(**optimizers: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Keep the states of several optimizers side by side; each update is that of one, `only=` by name.

    For loops of one's own: `state = model.apply_gradients(state, grads, tx, only="generator")`. What an optimizer is to
    leave alone is the optimizer's affair, as on one device: `optax.partition` with `optax.set_to_zero()`.

    Returns:
      A transformation whose state is a dict by name. A training step, which has no turns, refuses it.
    """

    def init(params: Any) -> dict[str, Any]:
        return {name: tx.init(params) for name, tx in optimizers.items()}

    def update(
        updates: Any, state: Any, params: Any = None, *, only: str = "", **extra: Any
    ) -> tuple[Any, dict[str, Any]]:
        if only not in optimizers:
            names = " or ".join(f"only={name!r}" for name in optimizers)
            raise ValueError(f"separate: only={only!r}; each update is one optimizer's: apply_gradients(..., {names})")
        tx = optax.with_extra_args_support(optimizers[only])
        updates, after = tx.update(updates, state[only], params, **extra)
        return updates, {**state, only: after}

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]
