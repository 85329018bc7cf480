"""Gradients and updates as separately compiled functions, for custom training loops."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfsdp.engine.engine import SCOPE, pad_leaf
from jfsdp.engine.options import compiler_options
from jfsdp.engine.unit import Arrays
from jfsdp.layout.layout import Layout
from jfsdp.layout.leaf import Leaf
from jfsdp.modules.model import ParamTree
from jfsdp.train.process_checks import is_global
from jfsdp.train.state import TrainState, state_shardings
from jfsdp.train.step.step import BatchStep, Metrics
from jfsdp.train.update.update import Update, lend_host_params, with_lent


class GradStep(BatchStep):
    """Compiled gradients of a loss: `state, grads, metrics = step(state, batch)`. Nothing is donated.

    `grads` is the tree that an optimizer sees (Linen's nested params, or the state of `nnx.Param`; `optax.MaskedNode()`
    for frozen leaves) with the gradients of the mean loss, in float32 or the master's wider dtype. Each is sharded as
    stage `opt` and in its stored shape: padding at the end of the split dim is zero. `state` is the input with the
    model's other state (batch statistics, rng counts) after the loss. With a loss scale or `skip_nonfinite` it is
    unchanged if the loss or a gradient is not finite. Metrics are those of a training step, without `num_skipped`.
    """

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Any, Metrics]:
        """Compute the gradients.

        Raises:
          ValueError: as a training step.
        """
        state, batch = self.prepare(state, batch)
        grads, model_state, metrics = self._compiled()(state, batch)
        self.record_step(batch, metrics)
        return dataclasses.replace(state, model_state=model_state), grads, metrics

    def _compiled(self) -> Any:
        if self._cache.jitted is None:
            leaves = [leaf for leaf in self.layout.leaves if leaf.trainable]
            shardings = {leaf.path: self.layout.on_device(self.mesh, leaf, "opt") for leaf in leaves}
            out = (self.apply.model.tree.build(shardings), None, None)
            self._cache.jitted = jax.jit(self._compute, out_shardings=out, compiler_options=self.compiler_options)
        return self._cache.jitted

    def _compute(self, state: TrainState, batch: Any) -> tuple[Any, Arrays, Metrics]:
        found = self.mean_gradients(with_lent(state, {}), batch)
        after = found.model_state
        if self.loss_scale or self.config.skip_nonfinite:
            choose = functools.partial(jnp.where, found.is_finite)
            after = {name: choose(x, state.model_state[name]) for name, x in after.items()}
        return self.apply.model.tree.build(found.grads), after, found.metrics


def named_gradients(layout: Layout, mesh: Any, tree: ParamTree, grads: Any) -> Arrays:
    """Return the gradients of trained leaves by name, on the mesh, in stored shape, sharded as stage `opt`.

    Args:
      grads: gradients as the user's tree.

    Raises:
      ValueError: for another tree; naming the parameter whose gradient is missing, has another shape, or is not a
        global array in a run of several processes.
    """
    try:
        named = tree.by_name(grads)
    except ValueError as error:
        raise ValueError(
            f"apply_gradients takes (state, grads, tx); pass the tree of gradients that model.grads returns "
            f"({str(error).partition(', value: ')[0]})"
        ) from None
    for leaf in layout.leaves:
        shape = jnp.shape(named[leaf.path]) if leaf.path in named else None
        if leaf.trainable and shape not in (leaf.shape, leaf.stored_shape):
            given = "no gradient" if shape is None else f"a gradient of shape {shape}"
            raise ValueError(
                f"{leaf.path}: is trained and has shape {leaf.shape}, but {given} was given; pass zeros, or freeze the "
                "leaf (frozen=)"
            )
    trained = {path: layout.by_path[path] for path in named if layout.by_path[path].trainable}
    return {path: _placed(named[path], leaf, layout.on_device(mesh, leaf, "opt")) for path, leaf in trained.items()}


def _placed(grad: Any, leaf: Leaf, sharding: Any) -> jax.Array:
    if not sharding.is_fully_addressable and not is_global(grad):
        raise ValueError(
            f"{leaf.path}: this gradient is an array of one process, in a run of several; pass global arrays: take the "
            "gradients of model.grads, and change them with JAX functions"
        )
    stored = grad if jnp.shape(grad) == leaf.stored_shape else pad_leaf(jnp.asarray(grad), leaf)
    return jax.device_put(stored, sharding)


class ApplyStep:
    """The compiled update of a state from gradients by name. The state is donated.

    Args:
      static: extra arguments of the optimizer's update that are not arrays.
    """

    def __init__(self, update: Update, static: Mapping[str, Any]):
        self._update, self._static, self._jitted = update, static, None

    def __call__(self, state: TrainState, grads: Arrays, arrays: Mapping[str, Any]) -> TrainState:
        engine = self._update.optimizer.engine
        if self._jitted is None:
            self._update.optimizer.check({**self._static, **arrays})
            shardings = state_shardings(engine.layout, engine.mesh, state)
            options = compiler_options(engine.mesh)
            self._jitted = jax.jit(self._apply, out_shardings=shardings, donate_argnums=0, compiler_options=options)
        donated, lent = lend_host_params(state)
        new = self._jitted(donated, lent, grads, arrays)
        jax.tree.map(lambda x: x.delete(), lent)
        return new

    def _apply(
        self, state: TrainState, lent: Mapping[str, Arrays], grads: Arrays, arrays: Mapping[str, Any]
    ) -> TrainState:
        state, engine = with_lent(state, lent), self._update.optimizer.engine
        with jax.named_scope(f"{SCOPE}.update"):
            grads = engine.constrain(grads, "opt")
            is_finite = jnp.isfinite(optax.tree.norm(grads))
            return self._update(state, grads, is_finite, state.model_state, {**self._static, **arrays})
