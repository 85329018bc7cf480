"""Exponential moving averages of the parameters, kept among the optimizer's states."""

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
from jfsdp.train.update.optimizer import averaged


class TrackEmaState(NamedTuple):
    """The averages of the parameters, as a tree like theirs."""

    ema: Any


@checked
def track_ema(decay: float) -> optax.GradientTransformation:
    """Keep an exponential moving average of the parameters; put it last in an `optax.chain`. Changes no update.

    A step refuses it where something still changes the updates after it: its averages would be of other parameters.

    After each step `ema = decay * ema + (1 - decay) * params`, starting from the first parameters, so that no bias is
    to be corrected (`optax.ema` averages updates, not parameters). Averages of bfloat16 or float16 parameters are kept
    in float32: one minus the decay is below what they resolve.

    Layout:  as the optimizer's states: [D/axes F] each.
    Memory:  one more moment: 4 bytes per parameter, split over the axes of the `opt` stage.

    Args:
      decay: in 0..1, exclusive of 1; 0.999 averages over about the last 1000 steps.

    Raises:
      ValueError: if `decay` is out of range, or the update is called without parameters.
    """
    if not 0 <= decay < 1:
        raise ValueError(f"decay={decay} must be in 0..1 and below 1; 0.999 averages over about 1000 steps")

    def init(params: Any) -> TrackEmaState:
        return TrackEmaState(jax.tree.map(lambda p: jnp.array(p, dtype=_dtype(p)), params))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, TrackEmaState]:
        if params is None:
            raise ValueError("track_ema: its update needs the parameters; call tx.update(grads, state, params)")
        averaged(updates)
        after = optax.apply_updates(params, updates)
        ema = jax.tree.map(lambda e, p: decay * e + (1 - decay) * p.astype(e.dtype), state.ema, after)
        return updates, TrackEmaState(ema)

    return optax.GradientTransformation(init, update)


def _dtype(param: Any) -> Any:
    return jnp.dtype(sum_dtype(jnp.dtype(param.dtype).name))


@checked
def with_ema(state: TrainState) -> TrainState:
    """Return the state with the averages of `track_ema` in place of the parameters, for evaluation.

    The state given stays as it is and is what training goes on with. Where `track_ema` stands behind a mask or in a
    partition, leaves without an average keep their parameters.

    Layout:  [D/opt F] -> as the `param` stage, and the low-precision copy rebuilt where the strategy keeps one.
    Cost:    one all-gather of the averages where parameters are split less far than the optimizer (zero1, hfsdp), or of
             their low-precision cast where there is a copy; else none.
    Memory:  one more copy of parameters (and of the low-precision copy), until the result is dropped.

    Raises:
      ValueError: if the optimizer keeps no averages, or more than one set of them.
    """
    check_live("with_ema", state)
    is_ema = lambda x: isinstance(x, TrackEmaState)  # noqa: E731
    trees = (state.roles.map(lambda role, _: role.leaf or "", state.opt_state), state.opt_state)
    names, found = ([x for x in jax.tree.leaves(tree, is_leaf=is_ema) if is_ema(x)] for tree in trees)
    if len(found) != 1:
        raise ValueError(
            f"with_ema: the optimizer keeps {len(found)} sets of averages; put one jfsdp.optim.track_ema(decay) at the "
            "end of its optax.chain"
        )
    averages = dict(zip(jax.tree.leaves(names[0]), jax.tree.leaves(found[0]), strict=True))
    params, work = _placer(state.layout, state.mesh)(state.params, averages)
    return dataclasses.replace(state, params=params, work=work)


@functools.lru_cache(maxsize=8)
def _placer(layout: Layout, mesh: Any) -> Any:
    """Return the compiled placing for one layout: evaluations come again and again."""
    params = {leaf.path: layout.sharding(mesh, leaf, "param") for leaf in layout.leaves}
    work = {leaf.path: layout.sharding(mesh, leaf, "work") for leaf in layout.leaves if leaf.has_work}
    return jax.jit(functools.partial(_place, XlaEngine(layout, mesh)), out_shardings=(params, work))


def _place(
    engine: XlaEngine, params: dict[str, Any], averages: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    here = jax.tree.map(to_device, params | averages)
    # The copy keeps a jitted identity from handing back the very buffers of the optimizer's state. Averages may be of
    # another dtype.
    stored = {path: jnp.copy(x).astype(engine.layout.by_path[path].dtype) for path, x in here.items()}
    return stored, make_work(engine, stored)
