"""Update of a state with mean gradients: optimizer, guard against non-finite values, and memory kinds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfsdp.engine.engine import is_on_host
from jfsdp.engine.options import is_there
from jfsdp.engine.unit import Arrays
from jfsdp.layout.leaf import HOST
from jfsdp.layout.loss_scale import LossScale
from jfsdp.train.checks import check_kept_types
from jfsdp.train.state import TrainState, make_work, state_memories, trainable
from jfsdp.train.update.optimizer import ShardedOptimizer
from jfsdp.train.update.stream import stream


@dataclasses.dataclass(frozen=True)
class Update:
    """Computes the next state from gradients, inside a `jit`.

    Attributes:
      optimizer: the optimizer on stored arrays.
      loss_scale: the scale of the loss; None: not scaled.
      skip_nonfinite: keep the state unchanged if the step is not finite. Implied by a loss scale.
    """

    optimizer: ShardedOptimizer
    loss_scale: LossScale | None
    skip_nonfinite: bool

    def __call__(
        self, state: TrainState, grads: Arrays, is_finite: jax.Array, model_state: Arrays, extra: Mapping[str, Any]
    ) -> TrainState:
        """Return the next state.

        Args:
          grads: gradients of the mean loss by the names of `state.params`, on the device in the layout of stage `opt`.
          is_finite: scalar; with `skip_nonfinite` or a loss scale, False skips the step.
          model_state: the model's other state after the step.
          extra: extra arguments of the optimizer's update, besides gradients, state and parameters.
        """
        grads = {path: grad.astype(state.layout.by_path[path].dtype) for path, grad in grads.items()}

        def update(state: TrainState) -> TrainState:
            new = dataclasses.replace(self._update(state, grads, extra), model_state=model_state)
            check_kept_types(state, new)
            return dataclasses.replace(self._guard(state, new, is_finite), step=state.step + 1)

        return stream(update, state, is_finite if is_there(self.optimizer.engine.mesh) else None)

    def _update(self, state: TrainState, grads: Arrays, extra: Mapping[str, Any]) -> TrainState:
        """Update each parameter in the layout of its optimizer states, then bring it to the layout of `param`."""
        engine = self.optimizer.engine
        params = engine.constrain(trainable(state.layout, state.params), "opt")
        updates, opt_state = self.optimizer.update(grads, state.opt_state, params, extra)
        updated = engine.constrain(optax.apply_updates(params, updates), "opt")  # type: ignore[arg-type]
        masters = engine.constrain(updated, "param")
        work = state.work if not state.work else {**state.work, **make_work(engine, masters)}
        return dataclasses.replace(state, params=state.params | masters, work=work, opt_state=opt_state)

    def _guard(self, old: TrainState, new: TrainState, is_finite: jax.Array) -> TrainState:
        """Keep the old state if the step is skipped, and update the loss scale."""
        if self.loss_scale is None and not self.skip_nonfinite:
            return new

        kept = jax.tree.map(lambda a, b: a if a is b else jnp.where(is_finite, a, b), new, old)
        scale = self.loss_scale.update(old.loss_scale, is_finite) if self.loss_scale else old.loss_scale
        num_skipped = old.num_skipped + (~is_finite).astype(jnp.int32)
        return dataclasses.replace(kept, loss_scale=scale, num_skipped=num_skipped)


def lend_host_params(state: TrainState) -> tuple[TrainState, dict[str, dict[str, Any]]]:
    """Split a state into arrays that a step donates, and parameters in host memory, which it reads several times.

    XLA:GPU (JAX 0.10.2, 0.12) cannot compile a donated host buffer that is read more than once: the copy that protects
    the readers from the write would be from host to host. So these are not donated, but freed after the step.
    """

    def on_host(values: Mapping[str, Any], stage: str) -> dict[str, Any]:
        return {path: x for path, x in values.items() if state.layout.by_path[path].stage(stage).memory == HOST}

    lent = {"params": on_host(state.params, "param"), "work": on_host(state.work, "work")}
    kept = {name: {path: x for path, x in getattr(state, name).items() if path not in lent[name]} for name in lent}
    return dataclasses.replace(state, **kept), lent


def with_lent(state: TrainState, lent: Mapping[str, Arrays]) -> TrainState:
    """Join the parts of `lend_host_params`, inside a `jit`, and add host memory to the types of offloaded arrays."""
    whole = {name: getattr(state, name) | values for name, values in lent.items()}
    state = dataclasses.replace(state, **whole)
    return jax.tree.map(_in_memory, state, state_memories(state))


def _in_memory(value: jax.Array, memory: str) -> jax.Array:
    """Add host memory to the type of an argument: JAX (0.10.2, 0.12) omits it if a step is lowered for shapes.

    Moves no data: the argument is in host memory.
    """
    return jax.device_put(value, jax.memory.Space.Host) if memory == HOST and not is_on_host(value) else value


def clip_by_norm(grads: Mapping[str, Any], norm: jax.Array, max_norm: float | None) -> dict[str, Any]:
    """Scale gradients so that their global norm is at most `max_norm`. No communication: the norm is an argument."""
    if max_norm is None:
        return dict(grads)
    scale = jnp.minimum(1.0, max_norm / norm)
    return {path: grad * scale.astype(grad.dtype) for path, grad in grads.items()}
