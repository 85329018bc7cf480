"""Examine the processes of a run before it starts: hosts, devices, clocks, disks, and each mesh axis."""

from __future__ import annotations

import dataclasses
import os
import platform
import shutil
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.launch.hosts import gather_json, hosts
from jfsdp.layout.mesh import make_mesh
from jfsdp.plan.cluster.doctor import Finding, Severity

_ELEMENTS = 4 << 20  # float32 elements of the gathered buffer
_ROUNDS = 5
_MAX_SKEW_S = 1.0


@dataclasses.dataclass(frozen=True)
class Link:
    """The measured all-gather of a known buffer over a mesh axis, with all groups running concurrently.

    Attributes:
      crosses: "hosts" or "processes" if a group spans several of them, else "nothing".
      seconds: median of several rounds.
      gb_per_s: bytes that a device received per second, in 10^9.
    """

    axis: str
    size: int
    crosses: str
    seconds: float
    gb_per_s: float


@dataclasses.dataclass(frozen=True)
class Processes:
    """The result of an examination. `facts` is indexed by process; `skew_s` is the largest difference of clocks."""

    facts: list[dict[str, Any]]
    skew_s: float
    links: list[Link]
    findings: list[Finding]


def examine_processes(
    directory: Path, sizes: Mapping[str, int], checks: Callable[[], list[Finding]], at: Callable[[str], Any]
) -> Processes:
    """Examine the processes of a run. All processes must call this, and get the same result.

    Args:
      directory: a shared directory; process 0 writes a small file into it and removes it.
      sizes: of the mesh's axes.
      checks: returns the findings for this process's settings.
      at: returns a context manager for a named phase.
    """
    with at("gathering facts of all processes"):
        facts = gather_json(_facts(directory))
    with at("comparing clocks"):
        skew_s = min(_spread() for _ in range(_ROUNDS))
    with at(f"a file in {directory}"):
        findings = [*_compare(facts, skew_s), *_check_directory(directory)]
    mesh, links = make_mesh(**sizes), []  # type: ignore[arg-type]
    for axis, size in mesh.shape.items():
        if size > 1:
            with at(f"an all-gather over mesh axis {axis!r}"):
                link, wrong = _try(mesh, axis)
            links.append(link)
            findings += wrong
    seen: set[tuple[str, ...]] = set()
    for process, found in enumerate(gather_json([dataclasses.astuple(one) for one in checks()])):
        for severity, topic, text, remedy in found:
            if (topic, text) not in seen:
                where = f"process {process}: " if process else ""
                findings.append(Finding(Severity(severity), where + topic, text, remedy))
            seen.add((topic, text))
    return Processes(facts, skew_s, links, findings)


def _facts(directory: Path) -> dict[str, Any]:
    devices = jax.local_devices()
    return {
        "name": platform.node(),
        "host": dict(zip(jax.devices(), hosts(jax.devices()), strict=True))[devices[0]],
        "devices": [device.device_kind for device in devices],
        "memory_bytes": (devices[0].memory_stats() or {}).get("bytes_limit"),
        "free_bytes": _free(directory),
        "shm_bytes": _free(Path("/dev/shm")),
    }


def _free(directory: Path) -> int | None:
    try:
        return shutil.disk_usage(directory).free
    except OSError:
        return None


def _spread() -> float:
    """Return the largest difference of the processes' clocks, read right after they exchange a message."""
    gather_json(None)
    times = gather_json(time.time())
    return max(times) - min(times)


def _compare(facts: list[dict[str, Any]], skew_s: float) -> list[Finding]:
    found = []
    kinds = [" ".join(sorted(one["devices"])) for one in facts]
    usual = max(kinds, key=kinds.count)
    odd = [f"process {process} ({facts[process]['name']})" for process, kind in enumerate(kinds) if kind != usual]
    if odd:
        text = f"{', '.join(odd[:8])} have other devices than most processes"
        found.append(Finding(Severity.PROBLEM, "devices", text, "give each process the same number, of one kind"))
    if skew_s > _MAX_SKEW_S:
        text = f"clocks differ by {skew_s:.1f} s"
        found.append(Finding(Severity.NOTE, "clocks", text, "run NTP or chrony: times in logs cannot be compared"))
    return found


def _check_directory(directory: Path) -> list[Finding]:
    """Check that all processes see a file that process 0 writes."""
    file, error = directory / f".jfsdp-doctor-{gather_json(uuid.uuid4().hex)[0]}", ""
    if jax.process_index() == 0:
        try:
            file.write_text("seen")
        except OSError as failure:
            error = failure.strerror or str(failure)
    if error := gather_json(error)[0]:
        text = f"process 0 cannot write to {directory} ({error})"
        return [Finding(Severity.PROBLEM, "run directory", text, "make it, or pass another with --run-dir")]
    seen = gather_json(os.path.exists(file))
    if jax.process_index() == 0:
        file.unlink(missing_ok=True)
    missing = [process for process, one in enumerate(seen) if not one]
    if not missing:
        return []
    text = f"processes {missing[:8]} do not see a file that process 0 wrote to {directory}"
    return [Finding(Severity.PROBLEM, "run directory", text, "pass one on a file system that all hosts share")]


def _try(mesh: Any, axis: str) -> tuple[Link, list[Finding]]:
    """All-gather a known buffer over an axis; return its time, and findings about wrong values."""
    size, others = mesh.shape[axis], [name for name in mesh.axis_names if name != axis]
    split = NamedSharding(mesh, PartitionSpec((*others, axis)))
    gathered = NamedSharding(mesh, PartitionSpec(tuple(others) or None))
    each = _ELEMENTS // size
    total = each * mesh.size

    def known(index: Any) -> np.ndarray:
        start, stop, _ = index[0].indices(total)
        return (np.arange(start, stop) % 8191).astype(np.float32)

    buffer = jax.make_array_from_callback((total,), split, known)
    gather = jax.jit(lambda x: x, out_shardings=gathered)
    out, times = gather(buffer).block_until_ready(), []
    for _ in range(_ROUNDS):
        begin = time.perf_counter()
        gather(buffer).block_until_ready()
        times.append(time.perf_counter() - begin)
    shards = out.addressable_shards
    local = [shard.device.id for shard in shards if not np.array_equal(np.asarray(shard.data), known(shard.index))]
    wrong = [device for devices in gather_json(local) for device in devices]
    findings = []
    if wrong:
        text = f"an all-gather over {axis!r} gave devices {wrong[:8]} wrong values"
        findings.append(Finding(Severity.PROBLEM, "all-gather", text, "test these devices and their links"))
    rows = np.moveaxis(mesh.devices, mesh.axis_names.index(axis), -1).reshape(-1, size)
    host_of = dict(zip(mesh.devices.flat, hosts(list(mesh.devices.flat)), strict=True))
    crosses = "nothing"
    if any(len({device.process_index for device in row}) > 1 for row in rows):
        crosses = "processes"
    if any(len({host_of[device] for device in row}) > 1 for row in rows):
        crosses = "hosts"
    seconds = gather_json(sorted(times)[_ROUNDS // 2])[0]
    received = 4 * each * (size - 1)
    return Link(axis, size, crosses, seconds, received / seconds / 1e9), findings
