"""The arrays of a training state, read without `jfsdp.checkpoint.gather_leaf`."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.train.state import TrainState


def logical(state: TrainState, to_host: Callable[[Any], np.ndarray] = np.asarray) -> dict[str, np.ndarray]:
    """Return the arrays of a state in logical shapes by checkpoint name, without the low-precision copy, keys as data.

    Asserts that padding is zero.
    """
    shapes = {f"params.{leaf.path}": leaf.shape for leaf in state.layout.leaves}
    shapes |= {role.name: role.shape for role in state.roles.arrays}
    arrays: dict[str, Any] = {f"params.{name}": x for name, x in state.params.items()}
    arrays |= zip((role.name for role in state.roles.arrays), jax.tree.leaves(state.opt_state), strict=True)
    arrays |= {f"model_state.{name}": x for name, x in state.model_state.items()}
    arrays |= {f"loss_scale.{name}": x for name, x in state.loss_scale.items()}
    arrays |= {"step": state.step, "num_skipped": state.num_skipped}
    found = {}
    for name, value in arrays.items():
        whole = to_host(jax.random.key_data(value) if jnp.issubdtype(value.dtype, jax.dtypes.prng_key) else value)
        inside = tuple(map(slice, shapes.get(name, whole.shape)))
        padding = whole.copy()
        padding[inside] = 0
        assert not padding.any(), f"{name}: padding is not zero"
        found[name] = whole[inside]
    return found
