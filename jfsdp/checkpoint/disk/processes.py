"""Agreement between the processes of a run on a checkpoint: all continue, or all raise."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import jax

from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.launch.hosts import gather_json

T = TypeVar("T")


def together(check: Callable[[], Any]) -> list[Any]:
    """Call a function in every process. Return the values of all, or raise in all the error of one.

    If one process raised without the others, they would wait for it forever.

    Args:
      check: must not wait for other processes.

    Raises:
      Exception: in a process that failed, its own error. In the others, the message of the first process that failed,
        as an OSError, ValueError, TypeError or DamagedError like the original, or else a RuntimeError.
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
    """Call a function in every process. Return this process's value, or raise in all the error of one."""
    values: list[T] = []
    together(lambda: values.append(action()))
    return values[0]


def only_first(action: Callable[[], Any]) -> Any:
    """Call a function in process 0 only. Return its value in all processes, or raise its error in all."""
    return together(lambda: action() if jax.process_index() == 0 else None)[0]
