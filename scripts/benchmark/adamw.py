"""Detection of the AdamW hyperparameters of an optax transformation, for PyTorch's optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfsdp.modules.model import ParamTree

_LARGE, _SMALL = 1.0, 1e-8


def read_adamw(tx: optax.GradientTransformation, tree: ParamTree, leaves: Mapping[str, Any], lr: float) -> dict:
    """Return `lr`, `betas`, `eps`, and `decays` by parameter, from updates of arrays with one element.

    A zero gradient gives the decay, the moments after a gradient of 1 give the betas, and a gradient close to epsilon
    gives epsilon. Other differences from AdamW appear in the losses.

    Args:
      leaves: the parameters by name; only their number of dims is used, because masks may depend on it.

    Raises:
      ValueError: if `tx` is another optimizer.
    """
    ones = {name: np.ones((1,) * len(leaf.shape), np.float32) for name, leaf in leaves.items()}

    def first(gradient: float) -> tuple[dict[str, float], Any]:
        grads = tree.build({name: value * np.float32(gradient) for name, value in ones.items()})
        params = tree.build(ones)
        updates, state = tx.update(grads, tx.init(params), params)
        return {name: np.asarray(value).item() for name, value in tree.by_name(updates).items()}, state

    decayed, _ = first(0.0)
    _, state = first(_LARGE)
    moments = [x for x in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(x)]
    if len(moments) != 1:
        raise ValueError("the job's optimizer is not AdamW, the only one of torch-*; leave those out of --settings")
    one = lambda moment: np.asarray(jnp.ravel(jax.tree.leaves(moment)[0])).item()  # noqa: E731
    tiny, _ = first(_SMALL)
    name = next(iter(tiny))
    moved = -(tiny[name] - decayed[name]) / lr
    return {
        "lr": lr,
        "betas": [_round(1 - one(moments[0].mu)), _round(1 - one(moments[0].nu))],
        "eps": _round(_SMALL * (1 / moved - 1), 3),
        "decays": {name: _round(-update / lr) for name, update in decayed.items()},
    }


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _round(number: float, digits: int = 5) -> float:
    """Round a number to remove the rounding error of float32."""
    return float(f"{number:.{digits}g}")
