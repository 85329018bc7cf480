"""What must be said to JAX and XLA before and just after they start. Importing this imports neither."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import re
import signal
import subprocess
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

from jfsdp.arguments import checked
from jfsdp.launch.environment import DEVICES

MOST_SIMULATED = 1024  # each takes threads and memory of the host


@checked
def configure_xla(*, simulate_devices: Annotated[int, 0, MOST_SIMULATED] = 0) -> None:
    """Write platform and XLA flags into the environment. XLA reads them once, and ignores later changes silently.

    Args:
      simulate_devices: make the CPU look like this many devices; 0 uses the devices that are there.

    Under `jfsdp launch --devices-per-proc` the launcher gives that number.

    Raises:
      ValueError: for a count below 0 or above `MOST_SIMULATED`, and for another one than the launcher gives.
      RuntimeError: if JAX was imported already.
    """
    if "jax" in sys.modules:
        raise RuntimeError("configure_xla comes too late: jax is imported already, and its flags are read once")
    flags: dict[str, str] = {}
    launched = int(os.environ.get(DEVICES) or 0)
    if launched and simulate_devices not in (0, launched):
        raise ValueError(f"simulate_devices={simulate_devices} and --devices-per-proc {launched}: leave one out")
    if simulate_devices := simulate_devices or launched:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags["xla_force_host_platform_device_count"] = str(simulate_devices)
        # Simulated devices share few cores, so that one may reach a collective long after another: by default XLA ends
        # the process after 40 s of waiting.
        flags["xla_cpu_collective_call_warn_stuck_timeout_seconds"] = "300"
        flags["xla_cpu_collective_call_terminate_timeout_seconds"] = "600"
    os.environ["XLA_FLAGS"] = merge_flags(os.environ.get("XLA_FLAGS", ""), flags)


_CHATTER = (b"All log messages before absl::InitializeLog()", b"cudart_stub.cc", b"Failed to find host bounds for")
_FILTER = (
    f"import sys\nfor line in sys.stdin.buffer: any(x in line for x in {_CHATTER}) or sys.stderr.buffer.write(line)"
)


@contextlib.contextmanager
def ending_with_its_reader() -> Iterator[None]:
    """Let the process end without a word when what reads its output, such as `head`, has: by SIGPIPE, as others do."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


@contextlib.contextmanager
def without_plugin_chatter() -> Iterator[None]:
    """Filter out what JAX's plugins for GPUs and TPUs print on a machine without; anything else is printed at once.

    A plugin writes to the file descriptor itself, before its own log level counts (0.10.2 and 0.12.0). XLA may end this
    process after an error (a flag that it does not know), so another process filters: it reads on to the end, and takes
    no signal from the terminal.
    """
    sys.stderr.flush()
    command = [sys.executable, "-uISc", _FILTER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    with os.fdopen(os.dup(2), "wb") as stderr, process:
        os.dup2(process.stdin.fileno(), 2)  # type: ignore[union-attr]
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr.fileno(), 2)


def start_jax() -> None:
    """Start JAX; on the CPU without remarks on the GPU that is not there.

    Raises:
      RuntimeError: if it does not start.
    """
    is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    with without_plugin_chatter() if is_cpu else contextlib.nullcontext():
        import jax

        jax.devices()


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print warnings of ours as a line of a command line: who gave options has no line of Python to look at."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, UserWarning):
                return shown(message, category, *where, **more)
            return print(f"warning: {message}", file=sys.stderr, flush=True)

        warnings.showwarning = show
        yield


def merge_flags(text: str, flags: dict[str, str]) -> str:
    """Set flags in an XLA_FLAGS text, replacing those of the same name."""
    kept = [part for part in text.split() if part.lstrip("-").partition("=")[0] not in flags]
    return " ".join([*kept, *(f"--{name}={value}" for name, value in flags.items())])


@checked
def enable_compilation_cache(directory: str | Path | None) -> Path | None:
    """Keep compiled programs on disk, so that the next start of the same program skips compiling.

    Not where the devices are several of a CPU: there JAX's cache is turned off, and None returned. XLA:CPU (jaxlib
    0.10.2) orders all collectives of a program that it compiles. In one that it loads, those inside a loop and those
    outside are ordered by data alone, and JAX gives most of them the same channel: devices then wait for each other for
    ever, or mix arrays up. This can go when a loaded program keeps the order (docs/log.md, 2026-11-22, says how to see
    it).

    Args:
      directory: None: `$XDG_CACHE_HOME/jfsdp` or `~/.cache/jfsdp`. A subdirectory per kind of processor is used below
        it: XLA:CPU programs hold instructions of the machine that compiled them, and JAX's key does not know that.
    """
    import jax

    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)  # whatever JAX_COMPILATION_CACHE_DIR says
        return None
    path = Path(directory or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/jfsdp").expanduser() / _machine()
    if directory:  # into one that cannot be written JAX writes nothing, and goes on
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--cache-dir {directory}: cannot be made ({error.strerror}); name another") from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def _machine() -> str:
    try:
        flags = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        features = flags.group(0) if flags else ""
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.blake2b(features.encode(), digest_size=4).hexdigest()}"
