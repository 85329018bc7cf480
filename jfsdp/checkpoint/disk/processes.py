"""What the processes of a run tell each other about a checkpoint: so that all go on, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.launch.hosts import gather_json

T = TypeVar("T")


def together(check: Callable[[], Any]) -> list[Any]:
    """Call a function in every process; return what each returned, or raise in all what one of them raised.

    A process that raised alone would leave the others waiting for it for ever.

    Args:
      check: calls nothing that waits for other processes.

    Raises:
      Exception: the process's own error; elsewhere the first process's, by its message: an OSError, a ValueError (a
        DamagedError, where it was one), or for any other kind a RuntimeError.
    """
    try:
        value = check()
    except Exception as error:
        kind = next((name for name, kind in _KINDS.items() if isinstance(error, kind)), "other")
        gather_json({"error": str(error), "errno": getattr(error, "errno", None), "kind": kind})
        raise
    gathered = gather_json({"value": value})
    for index, other in enumerate(gathered):
        if "error" in other:
            message = f"process {index}: {other['error']}"
            raise OSError(other["errno"], message) if other["errno"] is not None else _KINDS[other["kind"]](message)
    return [other["value"] for other in gathered]


_KINDS = {"damaged": DamagedError, "value": ValueError, "type": TypeError, "other": RuntimeError}


def in_all(action: Callable[[], T]) -> T:
    """Call a function in every process; return what this one returned, or raise in all what one of them raised."""
    values: list[T] = []
    together(lambda: values.append(action()))
    return values[0]


def only_first(action: Callable[[], Any]) -> Any:
    """Call a function in process 0 alone; return what it returned in all, or raise in all what it raised."""
    return together(lambda: action() if jax.process_index() == 0 else None)[0]
