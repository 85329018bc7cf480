"""Clusters, and how fast their GPUs multiply and send. Pure arithmetic on the table in gpus.py.

Every number has a source, here as there: *measured*, *datasheet*, or *assumed*.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterable
from typing import Any

from jfsdp.arguments import Count, Size, checked
from jfsdp.layout.limits import check_number
from jfsdp.plan.cluster.gpus import GPUS, Gpu, dtype_name, find_gpu

__all__ = ["GPUS", "Cluster", "Gpu", "find_gpu", "host_bandwidth", "link_bandwidth", "matmul_rate"]

_ITEMSIZE = {"bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}

# Assumed: the part of the adapters' datasheet bandwidth that a large collective gets, and how long a collective takes
# before its first byte (8 H100 take 44 us, from the two smallest measured points).
NETWORK_EFFICIENCY = 0.85
INSIDE_LATENCY_S = 40e-6
NETWORK_LATENCY_S = 60e-6
# Of PCIe's bandwidth a copy to or from pinned host memory gets this part: 55 of 64 GB/s on PCIe 5, measured.
HOST_EFFICIENCY = 0.86
# How much longer a matmul takes while NCCL runs beside it: 30 to 40 % where it was measured; for every GPU assumed.
OVERLAP_SLOWDOWN = 1.35
# Of its calibrated rate, a matmul reaches k / (k + 256): the start and the end of each tile's loop. Assumed.
_RAMP_K = 256
# Tiles of an output that one core computes at a time, and their rate relative to the best. Assumed.
_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75))


def link_bandwidth(
    gpu: Gpu, message_bytes: float, is_inside_node: bool, *, members_per_node: int | None = None
) -> float:
    """Return the bus bandwidth of a collective in bytes/s: what a device sends, (N-1)/N of the message, by its time.

    Inside a node: where all-gathers were measured, between those points linear in log(size), beyond the largest
    constant, and below the smallest along the straight line of time through the two smallest. Elsewhere: an assumed
    part of the datasheet's bandwidth after an assumed latency. Across nodes the adapters of a node work together: a
    group with 8 of a node's GPUs sends through 8 adapters, a group with one GPU per node through one.

    Args:
      message_bytes: the whole value, as it stands after the gather or before the reduce-scatter.
      is_inside_node: whether the group stays in one domain (for an NVL72, the rack).
      members_per_node: how many GPUs of a node (for an NVL72, of the rack) belong to the group; by default all. Only
        matters across nodes.
    """
    inside = _inside_bandwidth(gpu, message_bytes)
    if is_inside_node:
        return inside
    usual = gpu.domain_size if gpu.is_domain_of_nodes else gpu.gpus_per_node
    network = (members_per_node or usual) * gpu.network_bandwidth * NETWORK_EFFICIENCY
    wire = min(network, gpu.link_bandwidth * gpu.link_efficiency)
    return min(inside, _after_latency(message_bytes, NETWORK_LATENCY_S, wire))


def _after_latency(message_bytes: float, latency_s: float, bandwidth: float) -> float:
    return message_bytes / (latency_s + message_bytes / bandwidth)


def _inside_bandwidth(gpu: Gpu, message_bytes: float) -> float:
    points = gpu.measured_links
    if not points:
        return _after_latency(message_bytes, INSIDE_LATENCY_S, gpu.link_bandwidth * gpu.link_efficiency)
    (small, small_rate), (next_size, next_rate) = points[:2]
    if message_bytes <= small:
        slope = (next_size / next_rate - small / small_rate) / (next_size - small)
        return _after_latency(message_bytes, small / small_rate - slope * small, 1 / slope)
    for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
        if message_bytes <= high:
            part = math.log(message_bytes / low) / math.log(high / low)
            return low_rate + part * (high_rate - low_rate)
    return points[-1][1]


def host_bandwidth(gpu: Gpu) -> float:
    """Return bytes/s between a GPU and pinned host memory, one way: 0.86 of the datasheet (measured on PCIe 5)."""
    return gpu.host_bandwidth * HOST_EFFICIENCY


def matmul_rate(gpu: Gpu, dtype: str, m: int, n: int, k: int, *, kept: float = 1.0) -> float:
    """Return the FLOP/s of an [m k] x [k n] matmul.

    A part of the datasheet's peak, less whatever the shape wastes: outputs are computed in tiles, the tiles in waves of
    one per core, and a wave that is not full takes as long as a full one; short k does not fill the pipeline; and no
    matmul is faster than its operands and result pass through memory. The part is calibrated by `Gpu.measured_matmul`:
    a bfloat16 matmul of 4096^3 on an H100 runs at the 780 TFLOP/s that were measured there. This is a quiet GPU; under
    load its cores keep a part, `kept`. *Assumed*: the H100's part where nothing was measured, the
    same part for other dtypes, the sizes of the tiles and the ramp over k. Split-k, which helps small outputs with a
    long k, is left out.

    Raises:
      ValueError: for a dtype without a known peak.
    """
    peak = gpu.peak_flops(dtype)
    itemsize = _ITEMSIZE[dtype_name(dtype)]
    seconds = 2 * m * n * k / (peak * _calibration(gpu) * _used(gpu, m, n, k) * kept)
    memory_s = itemsize * (m * k + k * n + m * n) / gpu.memory_bandwidth
    return 2 * m * n * k / max(seconds, memory_s)


def _calibration(gpu: Gpu) -> float:
    measured = gpu if gpu.measured_matmul else find_gpu("h100")
    assert measured.measured_matmul is not None
    dtype, shape, rate = measured.measured_matmul
    return rate / (measured.peak_flops(dtype) * _used(measured, *shape))


def _used(gpu: Gpu, m: int, n: int, k: int) -> float:
    """The part of the cores' work that ends up in the output."""

    def full(rows: int, columns: int) -> float:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / gpu.num_cores)
        return m * n / (waves * gpu.num_cores * rows * columns)

    return max(full(rows, columns) * rate for rows, columns, rate in _TILES) * k / (k + _RAMP_K)


@checked
@dataclasses.dataclass(frozen=True)
class Cluster:
    """`nodes` machines of `gpus_per_node` GPUs each; device ids count the GPUs of a node, then the nodes.

    A *domain* is what one NVLink (or PCIe) network joins: a node, except on an NVL72, where several nodes of four GPUs
    form one: as many as fit into its 72 GPUs and divide the nodes.

    Args:
      gpus_per_node: 0: what is usual for this GPU.

    Raises:
      ValueError: for counts below 1, and more GPUs than a domain joins.
    """

    gpu: Gpu
    nodes: Count = 1
    gpus_per_node: Size = 0

    def __post_init__(self) -> None:
        if not self.gpus_per_node:
            object.__setattr__(self, "gpus_per_node", self.gpu.gpus_per_node)
        name, most = self.gpu.name, self.gpu.domain_size
        if self.gpus_per_node > most:
            raise ValueError(
                f"{name}: gpus_per_node={self.gpus_per_node} exceeds the {most} GPUs that {self.gpu.link} joins; "
                f"give nodes={math.ceil(self.num_devices / most)}, gpus_per_node={most}"
            )
        check_number(f"{name}: nodes={self.nodes} of gpus_per_node={self.gpus_per_node}", self.num_devices)

    @property
    def nodes_per_domain(self) -> int:
        """Machines that reach each other without a network adapter."""
        fitting = self.gpu.domain_size // self.gpus_per_node if self.gpu.is_domain_of_nodes else 1
        return max(size for size in range(1, fitting + 1) if self.nodes % size == 0)

    def describe(self) -> str:
        """Return the cluster in words."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.gpus_per_node}"
        return f"{self.num_devices} x {self.gpu.full_name} ({nodes})"

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as plain data."""
        counts = {name: getattr(self, name) for name in ("nodes", "gpus_per_node", "num_devices")}
        return {"gpu": self.gpu.name, **counts}

    @property
    def num_devices(self) -> int:
        """GPUs in all."""
        return self.nodes * self.gpus_per_node

    @property
    def num_domains(self) -> int:
        """NVLink (or PCIe) networks that only the network adapters join."""
        return self.nodes // self.nodes_per_domain

    @property
    def devices_per_domain(self) -> int:
        """GPUs that reach each other without a network adapter."""
        return self.nodes_per_domain * self.gpus_per_node

    def spans_nodes(self, group: Iterable[int]) -> bool:
        """Return whether a group of device ids leaves its domain; the rack of an NVL72 counts as one.

        Raises:
          ValueError: for an id that the cluster does not have.
        """
        return len(self._members_by_domain(group)) > 1

    def group_bandwidth(self, group: Iterable[int], message_bytes: float) -> float:
        """Return `link_bandwidth` for a collective among these device ids, all such groups at once.

        Raises:
          ValueError: for an id that the cluster does not have.
        """
        members = self._members_by_domain(group)
        fewest = min(members.values(), default=1)
        return link_bandwidth(self.gpu, message_bytes, len(members) <= 1, members_per_node=fewest)

    def _members_by_domain(self, group: Iterable[int]) -> dict[int, int]:
        members: dict[int, int] = {}
        for device in group:
            if not 0 <= device < self.num_devices:
                raise ValueError(
                    f"{self.gpu.name}: device {device} is not in a cluster of {self.num_devices} GPUs "
                    f"({self.nodes} x {self.gpus_per_node}); ids start at 0"
                )
            domain = device // self.devices_per_domain
            members[domain] = members.get(domain, 0) + 1
        return members
