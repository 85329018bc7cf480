"""Clusters, and the rates of their matmuls and collectives, computed from the table in gpus.py.

Every number there and here has a source: *measured*, *datasheet*, or *assumed*.
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

_ITEMSIZE = {"float8": 1, "bfloat16": 2, "float16": 2, "tf32": 4, "float32": 4}

# Assumed: the share of the adapters' datasheet bandwidth that a large collective reaches, and the latency of a
# collective (44 us for 8 H100, from the two smallest measured points).
NETWORK_EFFICIENCY = 0.85
INSIDE_LATENCY_S = 40e-6
NETWORK_LATENCY_S = 60e-6
# The share of PCIe's bandwidth that a copy to or from pinned host memory reaches. Measured: 55 of 64 GB/s on PCIe 5.
HOST_EFFICIENCY = 0.86
# Slowdown of a matmul that overlaps with NCCL. Measured: 30 to 40 % on some GPUs. Assumed for all.
OVERLAP_SLOWDOWN = 1.35
# A matmul reaches k / (k + 256) of its calibrated rate, due to the start and end of each tile's loop. Assumed.
_RAMP_K = 256
# Output tiles (rows, columns) of a core, and their rate relative to the best. Assumed.
_TILES = ((128, 256, 1.0), (128, 128, 0.9), (64, 128, 0.75))


def link_bandwidth(
    gpu: Gpu, message_bytes: float, is_inside_node: bool, *, members_per_node: int | None = None
) -> float:
    """Return the bus bandwidth of a collective in bytes/s: what a device sends, (N-1)/N of the message, over the time.

    Inside a node, measured all-gathers are interpolated, linear in log(size). Larger messages have the bandwidth of the
    largest. The time of smaller ones is extrapolated linearly from the two smallest. Without measurements, the
    bandwidth is an assumed share of the datasheet's after an assumed latency. Across nodes a group uses one adapter for
    each of its GPUs in a node.

    Args:
      message_bytes: size of the full value, after the gather or before the reduce-scatter.
      is_inside_node: whether the group is inside one domain (for an NVL72, the rack).
      members_per_node: GPUs of the group in each node (for an NVL72, in the rack); by default all. Used only across
        nodes.
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
    """Return the bytes/s between a GPU and pinned host memory, in one direction."""
    return gpu.host_bandwidth * HOST_EFFICIENCY


def matmul_rate(gpu: Gpu, dtype: str, m: int, n: int, k: int, *, sustained: float = 1.0) -> float:
    """Return the FLOP/s of an [m k] x [k n] matmul.

    The rate is a share of the datasheet's peak, reduced by the shape. Outputs are computed in tiles, in waves of one
    tile per core; a partial wave takes as long as a full one. A short k does not fill the pipeline. Memory bandwidth
    limits the rate. The share is calibrated by `Gpu.measured_matmul`: a bfloat16 matmul of 4096^3 on an H100 runs at
    the measured 780 TFLOP/s. *Assumed*: the H100's share for GPUs without measurement, the same share for other dtypes,
    the tile sizes, and the ramp over k. Split-k, which helps small outputs with a long k, is not modeled.

    Args:
      sustained: the share of the rate that remains under load.

    Raises:
      ValueError: for a dtype without a known peak.
    """
    peak = gpu.peak_flops(dtype)
    itemsize = _ITEMSIZE[dtype_name(dtype)]
    seconds = 2 * m * n * k / (peak * _calibration(gpu) * _used(gpu, m, n, k) * sustained)
    memory_s = itemsize * (m * k + k * n + m * n) / gpu.memory_bandwidth
    return 2 * m * n * k / max(seconds, memory_s)


def _calibration(gpu: Gpu) -> float:
    measured = gpu if gpu.measured_matmul else find_gpu("h100")
    assert measured.measured_matmul is not None
    dtype, shape, rate = measured.measured_matmul
    return rate / (measured.peak_flops(dtype) * _used(measured, *shape))


def _used(gpu: Gpu, m: int, n: int, k: int) -> float:
    """Return the useful share of the cores' work."""

    def full(rows: int, columns: int) -> float:
        tiles = math.ceil(m / rows) * math.ceil(n / columns)
        waves = math.ceil(tiles / gpu.num_cores)
        return m * n / (waves * gpu.num_cores * rows * columns)

    return max(full(rows, columns) * rate for rows, columns, rate in _TILES) * k / (k + _RAMP_K)


@checked
@dataclasses.dataclass(frozen=True)
class Cluster:
    """`nodes` machines with `gpus_per_node` GPUs each. Device ids count the GPUs of a node, then the nodes.

    A *domain* is the set of GPUs on one NVLink (or PCIe) network. It is a node, except on an NVL72: there it is as many
    nodes of four GPUs as fit into its 72 GPUs and divide `nodes`.

    Args:
      gpus_per_node: 0: the usual number for this GPU.

    Raises:
      ValueError: for counts below 1, and for more GPUs per node than a domain has.
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
                f"{name}: gpus_per_node={self.gpus_per_node} exceeds the {most} GPUs that {self.gpu.link} connects; "
                f"pass nodes={math.ceil(self.num_devices / most)}, gpus_per_node={most}"
            )
        check_number(f"{name}: nodes={self.nodes} of gpus_per_node={self.gpus_per_node}", self.num_devices)

    @property
    def nodes_per_domain(self) -> int:
        """Nodes connected without a network adapter."""
        fitting = self.gpu.domain_size // self.gpus_per_node if self.gpu.is_domain_of_nodes else 1
        return max(size for size in range(1, fitting + 1) if self.nodes % size == 0)

    def describe(self) -> str:
        """Return a description of the cluster."""
        nodes = f"{self.nodes} node{'s' if self.nodes > 1 else ''} of {self.gpus_per_node}"
        network, name = self.gpu.network_bandwidth, self.gpu.name
        source = "assumed" if (name, network) in {(gpu.name, gpu.network_bandwidth) for gpu in GPUS} else "given"
        across = f"; network {network / 1e9:g} GB/s per GPU, {source}" if self.num_domains > 1 else ""
        return f"{self.num_devices} x {self.gpu.full_name} ({nodes}){across}"

    def to_dict(self) -> dict[str, Any]:
        """Return the cluster as plain data."""
        counts = {name: getattr(self, name) for name in ("nodes", "gpus_per_node", "num_devices")}
        return {"gpu": self.gpu.name, **counts}

    @property
    def num_devices(self) -> int:
        """Total GPUs."""
        return self.nodes * self.gpus_per_node

    @property
    def num_domains(self) -> int:
        """NVLink (or PCIe) networks, which network adapters connect."""
        return self.nodes // self.nodes_per_domain

    @property
    def devices_per_domain(self) -> int:
        """GPUs connected without a network adapter."""
        return self.nodes_per_domain * self.gpus_per_node

    def spans_nodes(self, group: Iterable[int]) -> bool:
        """Return whether a group of device ids spans several domains. The rack of an NVL72 is one domain.

        Raises:
          ValueError: for an id that is not in the cluster.
        """
        return len(self._members_by_domain(group)) > 1

    def group_bandwidth(self, group: Iterable[int], message_bytes: float, *, is_ring: bool = True) -> float:
        """Return `link_bandwidth` for a collective among these device ids, with all such groups running concurrently.

        Args:
          is_ring: whether nodes pass everything on, over all adapters. Otherwise (all-to-all) each device sends the
            parts of other nodes' devices through its own adapter.

        Raises:
          ValueError: for an id that is not in the cluster.
        """
        members = self._members_by_domain(group)
        fewest, num = min(members.values(), default=1), sum(members.values())
        if is_ring or len(members) <= 1:
            return link_bandwidth(self.gpu, message_bytes, len(members) <= 1, members_per_node=fewest)
        own = link_bandwidth(self.gpu, message_bytes, False, members_per_node=1)
        return min(own * (num - 1) / (num - fewest), link_bandwidth(self.gpu, message_bytes, True))

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
