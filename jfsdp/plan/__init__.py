"""Predict memory, communication and time of a step on a cluster, from its compiled program, without the cluster.

`make_plan(step, batch, cluster)` plans a step of any model. `make_bound` returns lower bounds without a compiler. See
docs/plan.md.
"""

from typing import TYPE_CHECKING

from jfsdp.lazy import attach

if TYPE_CHECKING:
    from jfsdp.plan.bound import Bound as Bound
    from jfsdp.plan.bound import make_bound as make_bound
    from jfsdp.plan.cluster.gpus import find_gpu as find_gpu
    from jfsdp.plan.cluster.hardware import Cluster as Cluster
    from jfsdp.plan.cluster.target import topology_devices as topology_devices
    from jfsdp.plan.plan import Plan as Plan
    from jfsdp.plan.plan import Work as Work
    from jfsdp.plan.plan import make_plan as make_plan
    from jfsdp.plan.traffic.audit import audit as audit

__getattr__, __dir__, __all__ = attach(__name__, __file__)
