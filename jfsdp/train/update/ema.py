"""Exponential moving averages of the parameters, stored in the optimizer's state."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jfsdp.arguments import checked
from jfsdp.engine.engine import to_device
from jfsdp.engine.xla import XlaEngine
from jfsdp.layout.layout import Layout
from jfsdp.layout.precision import sum_dtype
from jfsdp.train.state import TrainState, check_live, make_work
from jfsdp.train.update.optimizer import record_averaged


class TrackEmaState(NamedTuple):
    """The averages, as a tree like the parameters."""

    ema: Any


@checked
def track_ema(decay: float) -> optax.GradientTransformation:
    """Keep an exponential moving average of the parameters. It must be last in an `optax.chain`; changes no update.

    A step raises an error if a later transformation changes the updates: the averages would be of other parameters.

    After each step `ema = decay * ema + (1 - decay) * params`, starting from the initial parameters, so no bias
    correction is needed (`optax.ema` averages updates, not parameters). Averages of bfloat16 or float16 parameters are
    kept in float32, because `1 - decay` is below their precision.

    Layout:  as the optimizer's states: [D/axes F] each.
    Memory:  one more moment: 4 bytes per parameter, split over the axes of the `opt` stage.

    Args:
      decay: at least 0 and below 1; 0.999 averages over about the last 1000 steps.

    Raises:
      ValueError: if `decay` is out of range, or the update is called without parameters.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} must be at least 0 and below 1; 0.999 averages over about 1000 steps")

    def init(params: Any) -> TrackEmaState:
        return TrackEmaState(jax.tree.map(lambda p: jnp.array(p, dtype=_dtype(p)), params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TrackEmaState]:
        if params is None:
            raise ValueError("track_ema: its update needs the parameters; call tx.update(grads, state, params)")
        record_averaged(updates)
        after = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), state.ema, after)
        return updates, TrackEmaState(ema)

    return optax.GradientTransformation(init, update)


def _dtype(param: Any) -> Any:
    return jnp.dtype(sum_dtype(jnp.dtype(param.dtype).name))


@checked
def with_ema(state: TrainState) -> TrainState:
    """Return a state with the averages of `track_ema` instead of the parameters, for evaluation.

    With `optax.contrib.schedule_free`, these are the parameters of `optax.contrib.schedule_free_eval_params`.

    The input state is unchanged: continue training with it. If `track_ema` is inside a mask or a partition, leaves
    without an average keep their parameters.

    Layout:  [D/opt F] -> as the `param` stage; the low-precision copy is recomputed if the strategy has one.
    Cost:    one all-gather of the averages if the optimizer is split finer than the parameters (zero1, hfsdp), or of
             the low-precision cast if there is a copy; otherwise none.
    Memory:  one more copy of parameters (and of the low-precision copy), for as long as the result is kept.

    Raises:
      ValueError: if the optimizer keeps no averages, or more than one set of them.
    """
    check_live("with_ema", state)
    is_ema = lambda x: isinstance(x, TrackEmaState | optax.contrib.ScheduleFreeState)  # noqa: E731
    arrays = lambda x: jax.tree.leaves(x.ema if isinstance(x, TrackEmaState) else x.z)  # noqa: E731
    trees = (state.roles.map(lambda role, _: role.leaf or "", state.opt_state), state.opt_state)
    names, found = ([x for x in jax.tree.leaves(tree, is_leaf=is_ema) if is_ema(x)] for tree in trees)
    if len(found) != 1:
        raise ValueError(
            f"with_ema: the optimizer has {len(found)} sets of averages; put exactly one jfsdp.optim.track_ema(decay) "
            "at the end of its optax.chain, or use optax.contrib.schedule_free without it"
        )
    averages = dict(zip(arrays(names[0]), arrays(found[0]), strict=True))
    params, work = _placer(state.layout, state.mesh)(state.params, averages, getattr(found[0], "b1", None))
    return dataclasses.replace(state, params=params, work=work)


@functools.lru_cache(maxsize=8)
def _placer(layout: Layout, mesh: Any) -> Any:
    """Return the compiled function for one layout, cached for repeated evaluations."""
    params = {leaf.path: layout.sharding(mesh, leaf, "param") for leaf in layout.leaves}
    work = {leaf.path: layout.sharding(mesh, leaf, "work") for leaf in layout.leaves if leaf.has_work}
    return jax.jit(functools.partial(_place, XlaEngine(layout, mesh)), out_shardings=(params, work))


def _place(
    engine: XlaEngine, params: dict[str, Any], averages: dict[str, Any], b1: Any
) -> tuple[dict[str, Any], dict[str, Any]]:
    params, averages = jax.tree.map(to_device, (params, averages))
    if b1 is not None:  # see `optax.contrib.schedule_free_eval_params`
        averages = {path: (params[path] - (1 - b1) * z) / b1 for path, z in averages.items()}
    # Without the copy, a jitted identity returns the buffers of the optimizer's state. Averages may have another dtype.
    stored = {path: jnp.copy(x).astype(engine.layout.by_path[path].dtype) for path, x in (params | averages).items()}
    return stored, make_work(engine, stored)
