"""Where the time of traced steps went on each device, in the parts of a plan's time."""

from __future__ import annotations

import collections
import dataclasses
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from jfsdp.compat import read_trace

Event = tuple[str, int, int, tuple[str, str]]  # part of a step, begin and end in ns, module and operation

# At each time the first of these that runs counts. Names of kernels and of HLO operations.
_PARTS = {
    "attention_s": re.compile(r"fmha|sdpa|flash|attention", re.I),
    "matmul_s": re.compile(r"gemm|nvjet|xmma|cutlass|cublas|matmul|dot|ynn_|conv(?!ert)", re.I),
    "memory_s": re.compile(r"(?!)"),  # all others
    "exposed_s": re.compile(r"nccl|all[-_](gather|reduce|to[-_]all)|reduce[-_]scatter|collective[-_]", re.I),
    "host_exposed_s": re.compile(r"memcpy ?(h2d|d2h)", re.I),
}
_CALLS = re.compile(r"(while|call|conditional)[.\d]*$")  # contain the operations that they run


@dataclasses.dataclass(frozen=True)
class Profile:
    """Mean seconds of the traced steps of one device.

    Attributes:
      device: such as GPU:0, after the name of its host.
      num_steps, counted_by: number of steps; "annotations" of steps, or "repetitions" of operations.
      seconds: the parts of a step as in `Timeline.critical`, where slowed kernels count in full, and `idle_s`.
      hidden_s: collectives that run during compute.
    """

    device: str
    num_steps: int
    counted_by: str
    seconds: dict[str, float]
    hidden_s: float


def read_profile(directory: Path) -> list[Profile]:
    """Read the newest trace below a directory, of all hosts.

    Raises:
      ValueError: if there is none, or if no device computed in it.
    """
    files = sorted(directory.rglob("*.xplane.pb"))
    devices: dict[str, list[Event]] = collections.defaultdict(list)
    steps = set()
    for file in (one for one in files if one.parent == files[-1].parent):
        for plane, line, name, begin, end, stats in read_trace(file):
            operation = str(stats.get("hlo_op", ""))
            is_gpu = plane.startswith("/device:GPU") and line.startswith("Stream")
            if "step_num" in stats:
                steps.add(stats["step_num"])
            elif (is_gpu or (plane == "/host:CPU" and operation)) and not _CALLS.match(operation):
                place = plane.removeprefix("/device:") if is_gpu else f"CPU:{stats.get('device_ordinal', 0)}"
                device = f"{file.name.removesuffix('.xplane.pb')} {place}"
                of = (part for part, pattern in _PARTS.items() if pattern.search(f"{name} {operation}"))
                devices[device].append((next(of, "memory_s"), begin, end, (str(stats.get("hlo_module")), name)))
    if not devices:
        raise ValueError(f"{directory}: has no trace of a device; train with --profile START:STOP")
    return [_profile(device, events, steps) for device, events in sorted(devices.items())]


def _profile(device: str, events: list[Event], steps: set[int]) -> Profile:
    module = collections.Counter(run[0] for *_, run in events).most_common(1)[0][0]
    num = len(steps) or min(collections.Counter(run for *_, run in events if run[0] == module).values())
    seconds: dict[str, float] = dict.fromkeys((*_PARTS, "idle_s", "hidden_s"), 0.0)
    for part, length in _split(events):
        seconds[part] += length / num / 1e9
    counted_by = "annotations" if steps else "repetitions"
    return Profile(device, num, counted_by, hidden_s=seconds.pop("hidden_s"), seconds=seconds)


def _split(events: Iterable[Event]) -> Iterator[tuple[str, int]]:
    """Yield the parts of the time between the first and the last event, and the hidden time of collectives."""
    changes = sorted((time, by, part) for part, begin, end, _ in events for time, by in ((begin, 1), (end, -1)))
    running, before = collections.Counter[str](), changes[0][0]
    for time, by, part in changes:
        counted = next((one for one in _PARTS if running[one]), "idle_s")
        yield counted, time - before
        if running["exposed_s"] and counted != "exposed_s":
            yield "hidden_s", time - before
        running[part] += by
        before = time
