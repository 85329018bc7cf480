"""Checks that the configurations of the models share."""

import math
from numbers import Integral, Real
from typing import Any, get_args

from .attention import AttentionChoice

MOST_LAYERS, MOST_HEADS, MOST_SIZE = 4096, 65_536, 2**31 - 1


def is_count(value: Any, most: int) -> bool:
    """Tell whether a value is a whole number from 1 to `most`; True and 1.0 are none."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= most


def require_counts(config: Any, *fields: str, most: int = MOST_SIZE) -> None:
    """Refuse fields that are no whole numbers from 1 to `most`, before anything is made of that many parts.

    Raises:
      ValueError: names class, field, value and remedy.
    """
    for field in fields:
        value = getattr(config, field)
        if not is_count(value, most):
            raise ValueError(f"{type(config).__name__}.{field}={value!r} must be a whole number from 1 to {most:,}")


def require_documents(config: Any) -> None:
    """Refuse a bound on the documents of a row that leaves no room for one beside padding; None is no bound.

    Raises:
      ValueError: names class, field, value and remedy.
    """
    most = config.documents_per_row
    if most is not None and (not is_count(most, MOST_SIZE) or most < 2):
        raise ValueError(
            f"{type(config).__name__}.documents_per_row={most!r} must be a whole number from 2 to {MOST_SIZE:,} "
            "(padding counts as one), or None for any number"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def require_positive(config: Any, *fields: str) -> None:
    """Refuse fields that are not above 0 and finite.

    Raises:
      ValueError: names class, field, value and remedy.
    """
    for field in fields:
        value = getattr(config, field)
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(
                f"{type(config).__name__}.{field}={value!r} must be positive and finite; pass another {field}="
            )


def require_fraction(config: Any, *fields: str) -> None:
    """Refuse fields outside 0..1, 1 itself excluded: rates of dropout.

    Raises:
      ValueError: names class, field, value and remedy.
    """
    for field in fields:
        value = getattr(config, field)
        if not _is_number(value) or not 0 <= value < 1:
            raise ValueError(
                f"{type(config).__name__}.{field}={value!r} must be at least 0 and below 1; 0 switches it off"
            )


def require_bool(config: Any, *fields: str) -> None:
    """Refuse fields that are not True or False (a text from a command line, say).

    Raises:
      ValueError: names class, field and value.
    """
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            raise ValueError(f"{type(config).__name__}.{field}={getattr(config, field)!r} must be True or False")


def require_choice(config: Any, field: str, choices: tuple[str, ...]) -> None:
    """Refuse a field that is none of the choices.

    Raises:
      ValueError: names class, field, value and choices.
    """
    if getattr(config, field) not in choices:
        raise ValueError(
            f"{type(config).__name__}.{field}={getattr(config, field)!r} is unknown; choose one of {choices}"
        )


def require_attention(config: Any) -> None:
    """Refuse a field `attention` that names no kernel. Raises: ValueError, as `require_choice`."""
    require_choice(config, "attention", get_args(AttentionChoice))


def require_heads(config: Any) -> None:
    """Refuse a width that the heads do not divide.

    Raises:
      ValueError: names class, fields, values and remedy.
    """
    if config.dim % config.num_heads:
        raise ValueError(
            f"{type(config).__name__}.dim={config.dim} is not a multiple of num_heads={config.num_heads}; choose such "
            "a dim, or another num_heads="
        )
