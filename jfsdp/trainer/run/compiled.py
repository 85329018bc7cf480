"""The compiled step of a run, kept in its directory for the next start.

[Note: kept programs] JAX's persistent cache is used in `compiled/` for the step's program only. JAX's key is a hash of
the program, versions, flags, options and devices, so a start with another program or another JAX compiles. JAX does not
check the contents of an entry, and a write that was interrupted leaves a part of one. So `digests.json` has a digest of
each entry, and entries without theirs are removed before JAX reads any. Processes of a run compile together (XLA tunes
the kernels of GPUs that way), so they compile if their entries differ, as without a shared file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path

import jax

from jfsdp.compat import reset_compilation_cache
from jfsdp.launch.hosts import gather_json, wait_for_all
from jfsdp.launch.runtime import processor
from jfsdp.trainer.run.directory import write_json

KEEP = 3  # entries
_ENTRIES = "*-cache"  # files of JAX's cache
_COMPILED, _LOADED = "backend_compile_duration", "cache_retrieval_time_sec"  # ends of the names of JAX's events


@dataclasses.dataclass
class StepProgram:
    """How this start got the program of its step.

    Attributes:
      compiled: "compiled", or "loaded" from the run's directory or from `--cache-dir`.
      compile_s: seconds that this took.
    """

    compiled: str = "compiled"
    compile_s: float = 0.0

    def listen(self, name: str, seconds: float, **_: object) -> None:
        """Record an event of JAX."""
        self.compile_s += seconds if name.endswith(_COMPILED) else 0.0
        self.compiled = "loaded" if name.endswith(_LOADED) else self.compiled


@contextlib.contextmanager
def kept_program(directory: Path | None) -> Iterator[StepProgram]:
    """Load the program that is compiled inside from a directory, or keep it there; see [Note: kept programs].

    Every process of the run must call this. Does nothing where JAX's cache is disabled, as for several CPU devices.

    Args:
      directory: None: JAX uses its own cache.
    """
    program = StepProgram()
    jax.monitoring.register_event_duration_secs_listener(program.listen)
    try:
        if directory is None or not jax.config.jax_enable_compilation_cache:
            yield program
            return
        directory /= processor() if jax.default_backend() == "cpu" else jax.default_backend()
        with _cache_in(directory if _is_usable(directory) else None):
            yield program
        if jax.process_index() == 0:
            with contextlib.suppress(OSError):  # the next start compiles
                _keep_newest(directory)
    finally:
        jax.monitoring.unregister_event_duration_listener(program.listen)


@contextlib.contextmanager
def _cache_in(directory: Path | None) -> Iterator[None]:
    # XLA's tables of tuned kernels have no digest, and the program contains its kernels.
    changed = {"jax_compilation_cache_dir": directory and str(directory), "jax_persistent_cache_enable_xla_caches": ""}
    before = {name: getattr(jax.config, name) for name in changed}

    def use(values: dict[str, str | None]) -> None:
        for name, value in values.items():
            jax.config.update(name, value)
        reset_compilation_cache()

    use(changed)
    try:
        yield
    finally:
        use(before)


def _is_usable(directory: Path) -> bool:
    """Remove entries that cannot be trusted; return whether all processes have the same ones."""
    if jax.process_index() == 0:
        known = _read_digests(directory)
        for file in directory.glob(_ENTRIES):
            if known.get(file.name) != _digest(file):
                file.unlink()
        _write_digests(directory, known)
    wait_for_all("entries of compiled/ checked")
    found = gather_json({file.name: _digest(file) for file in directory.glob(_ENTRIES)})
    return all(entries == found[0] for entries in found)


def _keep_newest(directory: Path) -> None:
    """Remove all but the newest entries, and write the digests of new ones."""
    known = _read_digests(directory)
    known |= {file.name: _digest(file) for file in directory.glob(_ENTRIES) if file.name not in known}
    for name in list(known)[:-KEEP]:
        (directory / name).unlink(missing_ok=True)
    _write_digests(directory, known)


def _write_digests(directory: Path, digests: dict[str, str]) -> None:
    """Write the digests of those entries that exist."""
    if directory.exists():
        write_json(directory / "digests.json", [pair for pair in digests.items() if (directory / pair[0]).exists()])


def _read_digests(directory: Path) -> dict[str, str]:
    """Return the digests of entries by file name, oldest first; {} without a valid file."""
    try:
        return dict(json.loads((directory / "digests.json").read_text()))
    except (OSError, ValueError, TypeError):
        return {}


def _digest(file: Path) -> str:
    return hashlib.blake2b(file.read_bytes(), digest_size=16).hexdigest()
