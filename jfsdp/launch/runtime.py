"""Settings of JAX and XLA before and just after they start. Importing this imports neither."""

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

MAX_SIMULATED = 1024  # each takes threads and memory of the host


@checked
def configure_xla(*, simulate_devices: Annotated[int, 0, MAX_SIMULATED] = 0) -> None:
    """Write platform and XLA flags into the environment. XLA reads them once, and silently ignores later changes.

    Args:
      simulate_devices: number of devices that the CPU simulates; 0: do not simulate. `jfsdp launch --devices-per-proc`
        sets the default.

    Raises:
      ValueError: if the count is below 0 or above `MAX_SIMULATED`, or differs from the launcher's.
      RuntimeError: if JAX is already imported.
    """
    if "jax" in sys.modules:
        raise RuntimeError("configure_xla is called too late: jax is already imported; call it before importing jax")
    flags: dict[str, str] = {}
    launched = int(os.environ.get(DEVICES) or 0)
    if launched and simulate_devices not in (0, launched):
        raise ValueError(f"simulate_devices={simulate_devices} and --devices-per-proc {launched}: leave one out")
    if simulate_devices := simulate_devices or launched:
        os.environ["JAX_PLATFORMS"] = "cpu"
        flags["xla_force_host_platform_device_count"] = str(simulate_devices)
        # Simulated devices share few cores, so one may reach a collective long after another. By default XLA ends the
        # process after waiting 40 s.
        flags["xla_cpu_collective_call_warn_stuck_timeout_seconds"] = "300"
        flags["xla_cpu_collective_call_terminate_timeout_seconds"] = "600"
    os.environ["XLA_FLAGS"] = merge_flags(os.environ.get("XLA_FLAGS", ""), flags)


_CHATTER = (b"absl::InitializeLog()", b"cudart_stub.cc", b"Failed to find host bounds", b"exceeds the base limit")
_FILTER = (
    f"import sys\nfor line in sys.stdin.buffer: any(x in line for x in {_CHATTER}) or sys.stderr.buffer.write(line)"
)


@contextlib.contextmanager
def ending_with_its_reader() -> Iterator[None]:
    """Let SIGPIPE end the process silently when the reader of its output, such as `head`, has ended."""
    before = signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    try:
        yield
    finally:
        sys.stdout.flush()
        signal.signal(signal.SIGPIPE, before)


@contextlib.contextmanager
def without_plugin_chatter() -> Iterator[None]:
    """Filter out messages of JAX's GPU and TPU plugins on machines without these devices; print all others at once.

    Only the file descriptor is filtered: `sys.stderr` writes to the terminal as before.

    A plugin writes to the file descriptor directly, before its log level applies (0.10.2 and 0.12.0). XLA may end this
    process after an error, such as an unknown flag, so a separate process filters. It reads to the end of the input and
    receives no signal of the terminal.
    """
    sys.stderr.flush()
    command = [sys.executable, "-uISc", _FILTER]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
    with os.fdopen(os.dup(2), "w", 1, errors="backslashreplace") as stderr, process:
        os.dup2(process.stdin.fileno(), 2)  # type: ignore[union-attr]
        try:
            with contextlib.redirect_stderr(stderr if sys.stderr is sys.__stderr__ else sys.stderr):
                yield
        finally:
            sys.stderr.flush()
            os.dup2(stderr.fileno(), 2)


def start_jax() -> None:
    """Start JAX; on the CPU, without messages about missing GPUs.

    Raises:
      RuntimeError: if it does not start.
    """
    is_cpu = os.environ.get("JAX_PLATFORMS") == "cpu"
    with without_plugin_chatter() if is_cpu else contextlib.nullcontext():
        import jax

        jax.devices()


@contextlib.contextmanager
def plain_warnings() -> Iterator[None]:
    """Print jfsdp's warnings as one line without a source location, which means nothing to users of a command line."""
    with warnings.catch_warnings():
        shown = warnings.showwarning

        def show(message: Warning | str, category: type[Warning], *where: Any, **more: Any) -> None:
            if not issubclass(category, UserWarning):
                return shown(message, category, *where, **more)
            return print(f"warning: {message}", file=sys.stderr, flush=True)

        warnings.showwarning = show
        yield


def merge_flags(text: str, flags: dict[str, str]) -> str:
    """Set flags in an XLA_FLAGS text, replacing flags of the same name."""
    kept = [part for part in text.split() if part.lstrip("-").partition("=")[0] not in flags]
    return " ".join([*kept, *(f"--{name}={value}" for name, value in flags.items())])


@checked
def enable_compilation_cache(directory: str | Path | None) -> Path | None:
    """Keep compiled programs on disk, so that later starts of the same program do not compile it again.

    Several CPU devices: disables JAX's cache and returns None. XLA:CPU (jaxlib 0.10.2) orders all collectives of a
    program that it compiles. In a program that it loads, only data orders collectives inside and outside a loop, and
    JAX gives most of them the same channel. Devices then deadlock or mix arrays up. Remove this when loaded programs
    keep the order (docs/log.md, 2026-11-22, has a test).

    Args:
      directory: None: `$XDG_CACHE_HOME/jfsdp` or `~/.cache/jfsdp`. Each kind of processor has a subdirectory, because
        XLA:CPU programs contain instructions of the machine that compiled them, which JAX's key does not include.
    """
    import jax

    if jax.default_backend() == "cpu" and jax.device_count() > 1:
        jax.config.update("jax_enable_compilation_cache", False)  # also if JAX_COMPILATION_CACHE_DIR is set
        return None
    path = Path(directory or f"{os.environ.get('XDG_CACHE_HOME') or '~/.cache'}/jfsdp").expanduser() / processor()
    if directory:  # JAX silently skips a directory that cannot be written
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--cache-dir {directory} cannot be created ({error.strerror}); name another") from error
    jax.config.update("jax_compilation_cache_dir", str(path))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
    return path


def processor() -> str:
    """Return the architecture of this machine's processor, with a digest of its features."""
    try:
        flags = re.search(r"^(flags|Features)\s*:.*$", Path("/proc/cpuinfo").read_text(), re.MULTILINE)
        features = flags.group(0) if flags else ""
    except OSError:
        features = platform.processor()
    return f"{platform.machine()}-{hashlib.blake2b(features.encode(), digest_size=4).hexdigest()}"
