"""What a refusal must say, as facts: its type, and the names, numbers and remedies in its message."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest


def refuses(call: Callable[[], Any], *facts: object, error: type[Exception] = ValueError) -> Exception:
    """Assert that a call raises exactly this type of error, and that its message contains each fact; return the error.

    Args:
      call: takes no arguments.
      facts: paths, dims, sizes, options, remedies; compared as `str(fact)`.
    """
    with pytest.raises(error) as raised:
        call()
    assert type(raised.value) is error
    message = str(raised.value)
    missing = [fact for fact in map(str, facts) if fact not in message]
    assert not missing, f"not in the message: {missing}\n{message}"
    return raised.value
