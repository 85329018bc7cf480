"""Assertions about errors and warnings: their type, and facts in their message (names, numbers, remedies)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@contextlib.contextmanager
def refusing(*facts: object, error: type[Exception] = ValueError) -> Iterator[pytest.ExceptionInfo[Exception]]:
    """Assert that the body raises exactly this type of error, and that its message contains each fact.

    Args:
      facts: paths, dims, sizes, options, remedies; compared as `str(fact)`.
    """
    with pytest.raises(error) as raised:
        yield raised
    assert type(raised.value) is error, raised.value
    check_facts(str(raised.value), *facts)


def refuses(call: Callable[[], Any], *facts: object, error: type[Exception] = ValueError) -> Exception:
    """Assert that a call raises, as `refusing`; return the error."""
    with refusing(*facts, error=error) as raised:
        call()
    return raised.value


@contextlib.contextmanager
def warning(*facts: object, error: type[Warning] = UserWarning) -> Iterator[None]:
    """Assert that the body warns at least once, and that one of the warnings contains each fact."""
    with pytest.warns(error) as caught:
        yield
    messages = [str(one.message) for one in caught]
    assert any(all(str(fact) in message for fact in facts) for message in messages), (facts, messages)


def check_facts(text: str, *facts: object) -> None:
    """Assert that a text contains each fact."""
    missing = [fact for fact in map(str, facts) if fact not in text]
    assert not missing, f"not in the message: {missing}\n{text}"
