"""Which AdamW an optax transformation is, found by asking it: for PyTorch's optimizer to be the same."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfsdp.modules.model import ParamTree

_LARGE, _SMALL, _STEPS = 1.0, 1e-8, 3


@dataclasses.dataclass(frozen=True)
class AdamW:
    """Arguments of `torch.optim.AdamW`; `decays`: the weight decay of each parameter, by our names."""

    lr: float
    betas: tuple[float, float]
    eps: float
    decays: Mapping[str, float]


def read_adamw(tx: optax.GradientTransformation, tree: ParamTree, leaves: Mapping[str, Any], lr: float) -> AdamW:
    """Find betas, epsilon and the decay of each parameter by updating arrays of one element.

    A zero gradient shows the decay, the moments after a gradient of 1 show the betas, and a gradient as small as
    epsilon shows epsilon. What was found must then update as `tx` does with other gradients.

    Args:
      leaves: the parameters by name, of which the number of dims is used: masks may go by it.

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
    decays = {name: _round(-update / lr) for name, update in decayed.items()}
    _, state = first(_LARGE)
    moments = [x for x in jax.tree.leaves(state, is_leaf=_is_adam) if _is_adam(x)]
    if len(moments) != 1:
        raise ValueError("the job's optimizer is not AdamW, and PyTorch's contenders have no other; leave these out")
    b1, b2 = (_round(1 - _one(part)) for part in (moments[0].mu, moments[0].nu))
    tiny, _ = first(_SMALL)
    name = next(iter(tiny))
    moved = -(tiny[name] - decayed[name]) / lr
    found = AdamW(lr, (b1, b2), _round(_SMALL * (1 / moved - 1), 3), decays)
    _check_same(found, tx, tree, ones)
    return found


def _check_same(found: AdamW, tx: optax.GradientTransformation, tree: ParamTree, ones: Mapping[str, Any]) -> None:
    """Compare some updates of the optimizer with those of what was found."""
    (b1, b2), rng = found.betas, np.random.default_rng(0)
    params = tree.build(ones)
    state = tx.init(params)
    mu, nu = dict.fromkeys(ones, 0.0), dict.fromkeys(ones, 0.0)
    for count in range(1, _STEPS + 1):
        grads = {name: rng.normal() for name in ones}
        asked = tree.build({name: value * np.float32(grads[name]) for name, value in ones.items()})
        updates, state = tx.update(asked, state, params)
        for name, update in tree.by_name(updates).items():
            mu[name] = b1 * mu[name] + (1 - b1) * grads[name]
            nu[name] = b2 * nu[name] + (1 - b2) * grads[name] ** 2
            step = (mu[name] / (1 - b1**count)) / (np.sqrt(nu[name] / (1 - b2**count)) + found.eps)
            expected = -found.lr * (step + found.decays[name])
            if not np.isclose(np.asarray(update).item(), expected, rtol=1e-3, atol=1e-3 * found.lr):
                raise ValueError(
                    f"{name}: the job's optimizer updates it otherwise than AdamW would, and PyTorch's contenders have "
                    "no other; leave these out"
                )


def _is_adam(x: Any) -> bool:
    return isinstance(x, optax.ScaleByAdamState)


def _one(moments: Any) -> float:
    return np.asarray(jnp.ravel(jax.tree.leaves(moments)[0])).item()


def _round(number: float, digits: int = 5) -> float:
    """Take float32's rounding off a number that somebody wrote with few digits."""
    return float(f"{number:.{digits}g}")
