"""Several optimizers for one model, each with its own parameters, state and updates, as in a GAN."""

from __future__ import annotations

from typing import Any

import jax
import optax
from jax.tree_util import tree_leaves_with_path, tree_map_with_path

from jfsdp.layout.select import Selector, select_leaves
from jfsdp.train.update.roles import param_name


def alternate(
    **parts: tuple[Selector | list[Selector], optax.GradientTransformation],
) -> optax.GradientTransformationExtraArgs:
    """Combine several optimizers; each update runs one of them, selected by name with `only=`.

    For custom training loops: `state = model.apply_gradients(state, grads, tx, only="generator")`.

    Args:
      parts: for each name, the parameters that the optimizer trains (path globs, predicates, or a list of them, as in
        `frozen=`), and the optimizer. Parameters may belong to several optimizers; "**" selects all.

    Returns:
      A transformation whose state is a dict by name. `train_step` does not support it.

    Raises:
      ValueError: without parts, or for a part that is not such a pair; in `init`, for a selector that matches no
        trained parameter.
    """
    if not parts:
        raise ValueError("alternate: no optimizer is given; use alternate(name=(selectors, optax.adam(1e-4)), ...)")
    for name, part in parts.items():
        if not isinstance(part, tuple) or len(part) != 2 or not hasattr(part[1], "update") or not part[0]:
            raise ValueError(
                f"alternate: {name}= must be a pair of selectors and optimizer: ({name + '.**'!r}, optax.adam(1e-4))"
            )
    optimizers = {name: _select(name, *part) for name, part in parts.items()}

    def init(params: Any) -> dict[str, Any]:
        return {name: tx.init(params) for name, tx in optimizers.items()}

    def update(
        updates: Any, state: Any, params: Any = None, *, only: str = "", **extra: Any
    ) -> tuple[Any, dict[str, Any]]:
        if only not in optimizers:
            names = " or ".join(f"only={name!r}" for name in optimizers)
            raise ValueError(f"alternate: only={only!r} names no optimizer; use apply_gradients(..., {names})")
        updates, after = optimizers[only].update(updates, state[only], params, **extra)
        return updates, {**state, only: after}

    return optax.GradientTransformationExtraArgs(init, update)  # type: ignore[arg-type]


def _select(name: str, selectors: Any, tx: optax.GradientTransformation) -> optax.GradientTransformationExtraArgs:
    """Return an optimizer that trains only the selected parameters."""

    def labels(tree: Any) -> Any:
        leaves = {param_name(path): jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in tree_leaves_with_path(tree)}
        selected = select_leaves(f"alternate: {name}=", selectors, leaves, {})
        return tree_map_with_path(lambda path, _: "trained" if param_name(path) in selected else "left", tree)

    return optax.partition({"trained": tx, "left": optax.set_to_zero()}, labels)
