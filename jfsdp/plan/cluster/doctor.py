"""Diagnose problems of this machine's installation and settings that would stop or slow a run.

`inspect_machine` collects facts, and `diagnose` evaluates them. A separate process with a time limit lists JAX's
devices, because an unknown flag in XLA_FLAGS ends a process, and a driver may hang.
"""

from __future__ import annotations

import dataclasses
import enum
import importlib.metadata
import json
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jfsdp.extras import install_command, installed_version
from jfsdp.plan.cluster.target import PlanUnavailable, has_nvidia_driver, parse_version, require_gpu_compiler

# Minimum versions, equal to those in pyproject.toml (tested).
MINIMUM = {"jax": "0.10.2", "flax": "0.12.8", "optax": "0.2.8", "orbax-checkpoint": "0.12"}
PLUGINS = ("jax-cuda12-plugin", "jax-cuda12-pjrt", "jax-cuda13-plugin", "jax-cuda13-pjrt")
CUDNN = ("nvidia-cudnn-cu12", "nvidia-cudnn-cu13")
SHOWN = ("jfsdp", "jax", "jaxlib", "flax", "optax", "orbax-checkpoint", *PLUGINS, *CUDNN, "nvidia-nccl-cu12")

_CHATTER = re.compile(r"cudart_stub|InitializeLog|^\s*$")


class Severity(enum.StrEnum):
    """A problem makes `jfsdp doctor` fail; a note does not."""

    PROBLEM = "problem"
    NOTE = "note"


@dataclasses.dataclass(frozen=True)
class Finding:
    """A finding: its topic, the problem or note, and a remedy."""

    severity: Severity
    topic: str
    text: str
    remedy: str


@dataclasses.dataclass(frozen=True)
class Probe:
    """JAX's devices in a separate process, or the error that ended it."""

    backend: str = ""
    kinds: tuple[str, ...] = ()
    memory_bytes: int | None = None
    error: str = ""
    timed_out: bool = False


@dataclasses.dataclass(frozen=True)
class Machine:
    """The facts that `diagnose` evaluates.

    `versions` has all relevant distributions; None: not installed. `cudnn_needed` is the oldest cuDNN that JAX's plugin
    supports. Limits are in bytes; None: no limit.
    """

    python: str
    versions: Mapping[str, str | None]
    env: Mapping[str, str]
    num_gpus: int
    has_infiniband: bool
    locked_bytes: int | None
    shm_bytes: int | None
    probe: Probe
    cudnn_needed: str = "9.8"


def inspect_machine() -> Machine:
    """Collect the facts. JAX lists devices in another process, with a limit of two minutes."""
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    num_gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
    return Machine(
        python=platform.python_version(),
        versions={name: installed_version(name) for name in SHOWN},
        env=os.environ,
        num_gpus=max(num_gpus, 1) if has_nvidia_driver() else 0,
        has_infiniband=has_infiniband(),
        locked_bytes=None if locked_bytes == resource.RLIM_INFINITY else locked_bytes,
        shm_bytes=shutil.disk_usage("/dev/shm").total if Path("/dev/shm").is_dir() else None,
        probe=probe_jax(os.environ, timeout_s=120),
        cudnn_needed=_cudnn_needed(),
    )


_LIST_DEVICES = """
import json, jax
devices = jax.devices()
stats = devices[0].memory_stats() or {}
print("jfsdp:" + json.dumps([jax.default_backend(), [d.device_kind for d in devices], stats.get("bytes_limit")]))
"""


def probe_jax(env: Mapping[str, str], *, timeout_s: float) -> Probe:
    """List JAX's devices in another process, which allocates no device memory.

    If XLA_FLAGS ends that process, a second process without it lists the devices.
    """
    command = [sys.executable, "-c", _LIST_DEVICES]
    own_env = {**env, "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
    try:
        done = subprocess.run(command, env=own_env, capture_output=True, text=True, timeout=timeout_s, errors="replace")
    except subprocess.TimeoutExpired:
        return Probe(timed_out=True, error=f"JAX did not list its devices within {timeout_s:g} s")
    answer = [line for line in done.stdout.splitlines() if line.startswith("jfsdp:")]
    if answer:
        backend, kinds, memory = json.loads(answer[-1].removeprefix("jfsdp:"))
        return Probe(backend, tuple(kinds), memory)
    error = _find_error(done.stderr) or f"exit status {done.returncode}"
    if not re.search(_ABOUT_FLAGS, error) or "XLA_FLAGS" not in env:
        return Probe(error=error)
    without = probe_jax({name: value for name, value in env.items() if name != "XLA_FLAGS"}, timeout_s=timeout_s)
    return dataclasses.replace(without, error=error, timed_out=False)


_ABOUT_FLAGS = r"Unknown flags? in|Couldn't interpret value|Could not open file"


def _find_error(stderr: str) -> str:
    """Return the most informative line: about flags, else the last error. Earlier errors may be of unused plugins."""
    lines = [line for line in stderr.splitlines() if not _CHATTER.search(line)]
    about_flags = [line for line in lines if re.search(_ABOUT_FLAGS, line)]
    errors = [line for line in lines if "Error: " in line]
    line = next(iter([*about_flags[:1], *errors[-1:], *lines[-1:]]), "")
    return re.sub(r"^[EF]\d{4} [\d:.]+\s+\d+ [\w.]+:\d+\] ", "", line).strip()


def diagnose(machine: Machine) -> list[Finding]:
    """Return the findings for a machine, problems first. Reads only the given facts."""
    found = [
        *_check_versions(machine),
        *_check_devices(machine),
        *check_settings(machine.env),
        *_check_host(machine),
        *_check_plan(machine),
    ]
    return sorted(found, key=lambda finding: finding.severity is not Severity.PROBLEM)


def report_to_dict(machine: Machine, findings: list[Finding]) -> dict[str, Any]:
    """Return facts and findings as plain data. Environment variables are limited to those of `relevant_settings`."""
    return {
        "python": machine.python,
        "versions": dict(machine.versions),
        "backend": machine.probe.backend or None,
        "devices": list(machine.probe.kinds),
        "device_memory_bytes": machine.probe.memory_bytes,
        "settings": relevant_settings(machine.env),
        "locked_memory_bytes": machine.locked_bytes,
        "shm_bytes": machine.shm_bytes,
        "findings": [dataclasses.asdict(finding) for finding in findings],
    }


def relevant_settings(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that JAX, XLA, NCCL or CUDA read."""
    return {name: env[name] for name in sorted(env) if re.match(r"(JAX|XLA|NCCL|CUDA)_", name)}


def _check_versions(machine: Machine) -> Iterator[Finding]:
    versions = machine.versions
    for name, minimum in MINIMUM.items():
        have = versions[name]
        if have is None:
            yield _problem(name, "is not installed", f"pip install '{name}>={minimum}'")
        elif parse_version(have) < parse_version(minimum):
            text = f"is older than {minimum}, which jfsdp needs"
            yield _problem(f"{name} {have}", text, f"pip install '{name}>={minimum}'")
    jax, jaxlib = versions["jax"], versions["jaxlib"]
    # JAX supports the jaxlib of its version and a few older ones of the same 0.x. It does not import much older ones.
    newer = parse_version(jaxlib) > parse_version(jax)
    if jax and jaxlib and (newer or parse_version(jax)[:2] != parse_version(jaxlib)[:2]):
        yield _problem(f"jaxlib {jaxlib}", f"does not belong to jax {jax}", f"pip install 'jaxlib=={jax}'")
    for name in PLUGINS:
        have = versions[name]
        if have and jaxlib and parse_version(have) != parse_version(jaxlib):
            text = f"does not have jaxlib's version, {jaxlib}, so JAX does not use it"
            yield _problem(f"{name} {have}", text, f"pip install '{name}=={jaxlib}'")
    if versions["jax-cuda12-plugin"] and versions["jax-cuda13-plugin"]:
        text = "are both installed; JAX uses the one that it finds first"
        yield _problem("jax-cuda12-plugin and jax-cuda13-plugin", text, "uninstall one, with its pjrt wheel")
    for name in CUDNN:
        have = versions[name]
        if have and parse_version(have) < parse_version(machine.cudnn_needed):
            text = f"is older than {machine.cudnn_needed}, which JAX's plugin needs"
            yield _problem(f"{name} {have}", text, f"pip install '{name}>={machine.cudnn_needed}'")


def _check_devices(machine: Machine) -> Iterator[Finding]:
    probe, platforms = machine.probe, machine.env.get("JAX_PLATFORMS", "")
    if probe.timed_out:
        remedy = "run nvidia-smi: the driver may hang; or JAX may wait for other hosts"
        yield _problem("devices", probe.error, remedy)
    elif probe.error:
        about_flags = re.search(r"flag|XLA_FLAGS", probe.error) is not None
        topic, remedy = "devices", "run python -c 'import jax; jax.devices()' to see the full error"
        if about_flags:
            topic, remedy = "XLA_FLAGS", "remove it from XLA_FLAGS"
        yield _problem(topic, f"JAX does not start: {probe.error}", remedy)
    elif machine.num_gpus and probe.backend == "cpu":
        if "cpu" in platforms:
            yield _problem(f"JAX_PLATFORMS={platforms}", "hides this machine's GPU", "unset it")
        elif machine.env.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
            yield _problem("CUDA_VISIBLE_DEVICES", "hides this machine's GPUs", "unset it")
        else:
            yield _problem("devices", "there is an NVIDIA driver, but JAX uses the CPU", install_command("cuda12"))
    elif machine.num_gpus and "cuda" in machine.env.get("LD_LIBRARY_PATH", ""):
        text = "has a CUDA that is found before the one of JAX's wheels"
        yield _note("LD_LIBRARY_PATH", text, "unset it, unless JAX was installed for the system's CUDA")
    elif not machine.num_gpus and not platforms and any(machine.versions[name] for name in PLUGINS):
        text = "is not set: JAX's CUDA plugin looks for a GPU, and JAX warns that there is none"
        yield _note("JAX_PLATFORMS", text, "set JAX_PLATFORMS=cpu")
    if probe.backend == "gpu" and len(probe.kinds) < machine.num_gpus:
        text = f"JAX sees {len(probe.kinds)} of this machine's {machine.num_gpus} GPUs"
        yield _note("devices", text, "check nvidia-smi and CUDA_VISIBLE_DEVICES; a scheduler may have assigned these")


def _check_host(machine: Machine) -> Iterator[Finding]:
    locked, shm = machine.locked_bytes, machine.shm_bytes
    if locked is not None:
        text = f"a process may lock {locked / 2**20:.3g} MiB of memory"
        if machine.has_infiniband:
            text += ", and InfiniBand must lock its buffers"
            yield _problem("locked memory (ulimit -l)", text, "ulimit -l unlimited (docker: --ulimit memlock=-1)")
        elif locked < 2**30:
            text += "; CUDA's pinned memory is not known to count against it"
            remedy = "ulimit -l unlimited, if offloading to pinned_host or InfiniBand fails"
            yield _note("locked memory (ulimit -l)", text, remedy)
    if shm is not None and shm < 2**30:
        text = f"has {shm / 2**20:.0f} MiB; NCCL may use it between processes of a node"
        finding = _problem if machine.num_gpus else _note
        yield finding("/dev/shm", text, "mount it with 1 GiB or more (docker: --shm-size=1g, or --ipc=host)")


def _check_plan(machine: Machine) -> Iterator[Finding]:
    try:
        require_gpu_compiler(machine.versions.get)
    except PlanUnavailable as missing:
        text, _, remedy = str(missing).rpartition("; ")
        yield _note("jfsdp plan", text, remedy)
    else:
        if not any(machine.versions[name] for name in CUDNN) and not machine.num_gpus:
            text = "cuDNN's wheel is missing, so cuDNN attention does not compile"
            yield _note("jfsdp plan", text, "pip install nvidia-cudnn-cu12 (-cu13 with JAX's plugin for CUDA 13)")


def _problem(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Severity.PROBLEM, topic, text, remedy)


def _note(topic: str, text: str, remedy: str) -> Finding:
    return Finding(Severity.NOTE, topic, text, remedy)


def _cudnn_needed() -> str:
    installed = [name for name in PLUGINS[::2] if installed_version(name)]
    for requirement in (needed for name in installed for needed in importlib.metadata.requires(name) or []):
        if requirement.startswith("nvidia-cudnn") and (found := re.search(r">=([\d.]+)", requirement)):
            return found[1]
    return "9.8"


def has_infiniband() -> bool:
    """Return whether Linux lists an InfiniBand adapter."""
    return any(Path("/sys/class/infiniband").glob("*"))


_HARMFUL = tomllib.loads(Path(__file__).with_name("harmful_settings.toml").read_text(encoding="utf-8"))


def check_settings(env: Mapping[str, str]) -> list[Finding]:
    """Return findings for harmful values of XLA_FLAGS and NCCL variables."""
    parts = (part.lstrip("-").partition("=") for part in env.get("XLA_FLAGS", "").split() if part.startswith("--"))
    flags = {name: value for name, _, value in parts}  # XLA reads an empty value as true
    found = []
    for kind, values, prefix in (("XLA_FLAGS", flags, "XLA_FLAGS --"), ("environment", env, "")):
        for name, harmful in _HARMFUL[kind].items():
            value = values.get(name)
            if value is not None and re.fullmatch(harmful["value"], value.strip().lower()):
                topic = f"{prefix}{name}={value}" if value else f"{prefix}{name}"
                found.append(_problem(topic, harmful["effect"], "unset it"))
    return found
