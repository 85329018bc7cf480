"""Selection of leaves by path, by the class of their variable, or by a predicate."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jfsdp.arguments import ask, did_you_mean
from jfsdp.layout.units import describe, matches_glob

Selector = str | type | Callable[[str, jax.ShapeDtypeStruct], bool]
Selectors = Selector | Sequence[Selector] | None


def select_leaves(
    what: str, selectors: Selectors, leaves: Mapping[str, jax.ShapeDtypeStruct], types: Mapping[str, type]
) -> dict[str, str]:
    """Return the leaves that any selector matches, each with the selector as text.

    Args:
      what: the argument's name, for messages.
      selectors: path globs (of the leaf or of a module above it), classes of variables (including subclasses),
        predicates `f(path, shape_and_dtype) -> bool`; or a single one of these.
      leaves: shape and dtype by path.
      types: class of the variable by path, if the model's API has classes of variables (NNX).

    Raises:
      TypeError: for a selector of another type.
      ValueError: if a selector matches nothing.
    """
    if selectors is None:
        return {}
    given = selectors if isinstance(selectors, (list, tuple, set, frozenset)) else [selectors]
    given = sorted(given, key=describe) if isinstance(given, (set, frozenset)) else given
    chosen: dict[str, str] = {}
    for selector in given:
        paths = [path for path, leaf in leaves.items() if chooses(what, selector, path, leaf, types)]
        if not paths:
            raise ValueError(_chooses_nothing(what, selector, leaves, types))
        chosen |= dict.fromkeys(paths, describe(selector))
    return chosen


def chooses(what: str, selector: Any, path: str, leaf: jax.ShapeDtypeStruct, types: Mapping[str, type]) -> bool:
    """Tell whether a selector matches a leaf."""
    if isinstance(selector, str):
        names = path.split(".")
        return any(matches_glob(selector, ".".join(names[:end])) for end in range(1, len(names) + 1))
    if isinstance(selector, type):
        return issubclass(types.get(path, object), selector)
    if callable(selector):
        return ask(f"{what} {describe(selector)}", selector, path=path, shape=leaf)
    raise TypeError(f"{what} {selector!r} is neither a path glob, a class of variables, nor a predicate f(path, shape)")


def _chooses_nothing(what: str, selector: Any, leaves: Mapping[str, Any], types: Mapping[str, type]) -> str:
    shown = ", ".join(list(leaves)[:12]) + (f", ... ({len(leaves)} in all)" if len(leaves) > 12 else "")
    classes = ", ".join(sorted({cls.__name__ for cls in types.values()}))
    of_classes = f"; classes of variables: {classes or 'none, in flax.linen'}" if isinstance(selector, type) else ""
    globs = {part: f"**.{part}.**" for path in leaves for part in path.split(".")} | {"all-linear": "**.kernel"}
    tails = (f"**.{'.'.join(path.split('.')[-2:])}" for path in leaves)
    meant = did_you_mean(globs.get(str(selector), selector), [*globs.values(), *tails])
    return f"{what} {describe(selector)} matches no parameter{meant}; parameters: {shown}{of_classes}"
