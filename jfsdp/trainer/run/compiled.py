"""The compiled step of a run, kept in its directory for the next start.

[Note: kept programs] JAX's persistent cache is used for the step's program only. JAX's key is a hash of the program,
versions, flags, options and devices, so a start with another program or another JAX compiles. JAX does not check the
contents of an entry, writes it in place, and never replaces it. So JAX gets a temporary directory, with copies of
those entries in `compiled/`, and of those that other runs left in `~/.cache/jfsdp`, whose contents have the digest in
their name. Processes of a run compile together (XLA tunes the kernels of GPUs that way), so all compile if their
entries differ, as without a shared file system.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import jax

from jfsdp.compat import using_cache
from jfsdp.launch.hosts import gather_json
from jfsdp.launch.runtime import processor

KEEP, KEEP_OF_USER = 3, 20  # entries
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

    def listen(self, event: str, duration_secs: float, **_: object) -> None:
        """Record an event of JAX."""
        self.compile_s += duration_secs if event.endswith(_COMPILED) else 0.0
        self.compiled = "loaded" if event.endswith(_LOADED) else self.compiled


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
        shared = jax.config.jax_compilation_cache_dir  # of all runs of this user
        places = [directory, *([Path(shared) / "steps"] if shared else [])]
        with tempfile.TemporaryDirectory(prefix="jfsdp-compiled-") as cache:
            names = [_copy_intact(places[: num + 1], Path(cache)) for num in range(len(places))]
            found = gather_json(names)
            if any(others[-1] != names[-1] for others in found):  # homes that are not shared
                for name in {*names[-1]} - {*names[0]}:
                    (Path(cache) / name).unlink()
            used = cache if all(others[0] == names[0] for others in found) else None
            # XLA's tables of tuned kernels have no digest, and the program contains its kernels.
            with using_cache(jax_compilation_cache_dir=used, jax_persistent_cache_enable_xla_caches=""):
                yield program
            if jax.process_index() == 0:
                for place in places:
                    with contextlib.suppress(OSError):  # the next start compiles
                        _keep_newest(Path(cache), place, is_of_run=place == directory)
    finally:
        jax.monitoring.unregister_event_duration_listener(program.listen)


def _entries(directory: Path) -> list[Path]:
    """Return the entries, oldest first: TIME-DIGEST-NAME, where NAME is that of JAX's file."""
    return sorted(directory.glob("*-*-*-cache"))


def _intact(directory: Path) -> Iterator[tuple[str, bytes]]:
    """Yield the name of JAX's file and the contents of the entries that have their digest."""
    for file in _entries(directory):
        _, digest, name = file.name.split("-", 2)
        with contextlib.suppress(OSError):  # it is compiled again
            if digest == _digest(data := file.read_bytes()):
                yield name, data


def _copy_intact(places: Sequence[Path], cache: Path) -> list[str]:
    """Copy the intact entries; return the names of JAX's files."""
    for name, data in (entry for place in places for entry in _intact(place)):
        (cache / name).write_bytes(data)
        os.utime(cache / name, (0, 0))
    return sorted(file.name for file in cache.iterdir())


def _keep_newest(cache: Path, directory: Path, *, is_of_run: bool) -> None:
    """Add the files that JAX has used to the entries, and remove all but the newest entries."""
    directory.mkdir(parents=True, exist_ok=True)
    used = [file for file in cache.iterdir() if file.stat().st_atime > 0]  # written or read since the copy
    known = {name for name, _ in _intact(directory)}
    for file in (file for file in used if file.name not in known):
        data, partial = file.read_bytes(), directory / ".partial"
        partial.write_bytes(data)
        os.replace(partial, directory / f"{time.time_ns()}-{_digest(data)}-{file.name}")
    for file in _entries(directory)[: -KEEP if is_of_run else -KEEP_OF_USER]:
        file.unlink()


def _digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()
