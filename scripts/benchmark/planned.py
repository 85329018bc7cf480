"""What `jfsdp plan` expects of the case on a GPU that need not be there."""

from __future__ import annotations

import dataclasses
from typing import Any

from jfsdp.cli.plan import load_compiler
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.search.jobs import plan_job
from jfsdp.trainer.options import StepOptions

from .kinds import TOP
from .options import JFSDP, BenchOptions, as_jfsdp


def plan(options: BenchOptions, num_devices: int) -> dict[str, Any]:
    """Plan the first of jfsdp's contenders on so many GPUs of one machine, one document a row.

    Returns:
      `setting`, `gpu`, `needed_bytes`, `step_s`, and `kernels`: kind, name, count and seconds per step of those that
      take longest.

    Raises:
      PlanUnavailable: without a compiler for this GPU.
    """
    name = next((name for name in options.settings if name in JFSDP), "auto")
    own = as_jfsdp(dataclasses.replace(options, cross_documents=True), name)
    fields = {field.name: getattr(own, field.name) for field in dataclasses.fields(StepOptions)}
    cluster = Cluster(find_gpu(options.plan or ""), 1, num_devices)
    load_compiler(cluster)
    found = plan_job(StepOptions(**fields), cluster)
    kernels: dict[tuple[str, str], list[float]] = {}
    for event in found.timeline.events:
        if event.lane == "compute" and event.kind not in ("loop", "wait"):
            kernels.setdefault((event.kind, event.name), []).extend([event.end_s - event.begin_s] * event.times)
    longest = sorted(kernels.items(), key=lambda item: -sum(item[1]))[:TOP]
    return {
        "setting": name,
        "gpu": options.plan,
        "devices": num_devices,
        "needed_bytes": found.needed_bytes,
        "step_s": found.step_s,
        "kernels": [
            {"kind": kind, "name": name, "count": len(seconds), "s": sum(seconds)} for (kind, name), seconds in longest
        ],
    }
