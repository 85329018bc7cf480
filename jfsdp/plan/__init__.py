"""What a run will cost on a cluster: compiled without it, read from the scheduled program.

`make_plan(step, batch, cluster)` plans a step of any model, `make_bound` says what needs no compiler; see docs/plan.md.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jfsdp.plan.bound import Bound, make_bound
    from jfsdp.plan.cluster.gpus import find_gpu
    from jfsdp.plan.cluster.hardware import Cluster
    from jfsdp.plan.cluster.target import topology_devices
    from jfsdp.plan.plan import Plan, Work, make_plan
    from jfsdp.plan.wire.audit import audit

_HOMES = {
    "Bound": "bound",
    "Cluster": "cluster.hardware",
    "Plan": "plan",
    "Work": "plan",
    "audit": "wire.audit",
    "find_gpu": "cluster.gpus",
    "make_bound": "bound",
    "make_plan": "plan",
    "topology_devices": "cluster.target",
}
__all__ = ["Bound", "Cluster", "Plan", "Work", "audit", "find_gpu", "make_bound", "make_plan", "topology_devices"]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'jfsdp.plan' has no attribute {name!r}")
    return getattr(importlib.import_module(f"jfsdp.plan.{_HOMES[name]}"), name)
