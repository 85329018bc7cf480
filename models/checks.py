"""Checks shared by the configurations of the models."""

import math
from numbers import Integral, Real
from typing import Any, get_args

from .attention import AttentionChoice

MAX_LAYERS, MAX_HEADS, MAX_SIZE = 4096, 65_536, 2**31 - 1


def is_count(value: Any, maximum: int) -> bool:
    """Return whether a value is a whole number from 1 to `maximum`; True and 1.0 are not."""
    return isinstance(value, Integral) and not isinstance(value, bool) and 1 <= int(value) <= maximum


def require_counts(config: Any, *fields: str, maximum: int = MAX_SIZE) -> None:
    """Check that fields are whole numbers from 1 to `maximum`, before that many parts are created.

    Raises:
      ValueError: naming class, field, value and range.
    """
    for field in fields:
        value = getattr(config, field)
        if not is_count(value, maximum):
            raise ValueError(f"{type(config).__name__}.{field}={value!r} must be a whole number from 1 to {maximum:,}")


def require_documents(config: Any) -> None:
    """Check that `documents_per_row` is at least 2, for a document and padding, or None.

    Raises:
      ValueError: naming class, field, value and range.
    """
    number = config.documents_per_row
    if number is not None and (not is_count(number, MAX_SIZE) or number < 2):
        raise ValueError(
            f"{type(config).__name__}.documents_per_row={number!r} must be a whole number from 2 to {MAX_SIZE:,} "
            "(padding counts as one), or None for any number"
        )


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def require_positive(config: Any, *fields: str) -> None:
    """Check that fields are positive and finite.

    Raises:
      ValueError: naming class, field and value.
    """
    for field in fields:
        value = getattr(config, field)
        if not _is_number(value) or not 0 < value < math.inf:
            raise ValueError(
                f"{type(config).__name__}.{field}={value!r} must be positive and finite; pass another {field}="
            )


def require_fraction(config: Any, *fields: str) -> None:
    """Check that fields, such as dropout rates, are at least 0 and below 1.

    Raises:
      ValueError: naming class, field and value.
    """
    for field in fields:
        value = getattr(config, field)
        if not _is_number(value) or not 0 <= value < 1:
            raise ValueError(f"{type(config).__name__}.{field}={value!r} must be at least 0 and below 1; 0 disables it")


def require_bool(config: Any, *fields: str) -> None:
    """Check that fields are True or False, not strings of a command line.

    Raises:
      ValueError: naming class, field and value.
    """
    for field in fields:
        if not isinstance(getattr(config, field), bool):
            raise ValueError(f"{type(config).__name__}.{field}={getattr(config, field)!r} must be True or False")


def require_choice(config: Any, field: str, choices: tuple[str, ...]) -> None:
    """Check that a field is one of the choices.

    Raises:
      ValueError: naming class, field, value and choices.
    """
    if getattr(config, field) not in choices:
        raise ValueError(
            f"{type(config).__name__}.{field}={getattr(config, field)!r} is unknown; choose one of {choices}"
        )


def require_attention(config: Any) -> None:
    """Check that the field `attention` names a kernel. Raises: ValueError, as `require_choice`."""
    require_choice(config, "attention", get_args(AttentionChoice))


def require_heads(config: Any) -> None:
    """Check that the number of heads divides `dim`.

    Raises:
      ValueError: naming class, fields, values and remedy.
    """
    if config.dim % config.num_heads:
        raise ValueError(
            f"{type(config).__name__}.dim={config.dim} is not a multiple of num_heads={config.num_heads}; choose "
            "another dim= or num_heads="
        )
