"""Calls that all of several processes refuse."""

from tests.processes import Processes, Raised


def all_raise(processes: Processes, words: list[str], function: str, *args: object) -> None:
    """Assert that a call raises in every process, with these words, and that none waits for ever."""
    processes.start(function, *args)
    for found in processes.results(timeout_s=60):
        assert isinstance(found, Raised) and all(word in str(found) for word in words), found
