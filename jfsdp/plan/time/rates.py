"""Estimate the seconds of an instruction or a collective on a cluster, from datasheets and measurements."""

import dataclasses
import functools
import statistics

from jfsdp.engine.movements import ALL_TO_ALL
from jfsdp.plan.cluster import hardware
from jfsdp.plan.cluster.gpus import dtype_name
from jfsdp.plan.hlo.collectives import Collective
from jfsdp.plan.time.work import Kind, Matmul, Work

# Assumed: the share of the datasheet's memory bandwidth that an elementwise kernel reaches (measured for a copy on an
# H100 NVL: 0.91), and the fixed time of each kernel (launch, first and last wave).
MEMORY_EFFICIENCY = 0.85
KERNEL_S = 3e-6
# Assumed: the share of the peak that a fused attention kernel reaches forward and backward, without a power limit. XLA
# uses cuDNN's. FlashAttention-3 (arXiv 2407.08608) reports about the same for causal attention with heads of 128 on an
# H100.
CUDNN_ATTENTION = (0.6, 0.45)
# Standard deviation of the rates of GPUs of one kind under load. A step takes as long as its slowest GPU. Fitted to
# published runs (scripts/fit_clock.py), so it includes any other effect that grows with the number of GPUs. For
# comparison: Sinha et al. (arXiv 2208.11035) measured 8 % on average on five clusters of V100s and other GPUs.
SPREAD = 0.055
# Range of measured over predicted time, for nine of ten published runs on A100s and H100s. The constants of each
# prediction were fitted without the run's source (scripts/fit_clock.py).
CLOCK_RANGE = (0.86, 1.24)
# GPUs of published runs or of runs of jfsdp.
COMPARED_GPUS = ("a100-40", "a100-80", "h100", "h100-96-500w", "h200")


@dataclasses.dataclass(frozen=True)
class Rates:
    """Compute and communication rates of a cluster's GPUs.

    - A matmul runs at `hardware.matmul_rate`, limited by memory bandwidth.
    - Attention runs at an assumed share of the peak.
    - Both are reduced to the share `sustained` under load, and further on the slowest of many GPUs.
    - Other kernels run at an assumed share of the memory bandwidth.
    - During a collective, matmuls and attention take `overlap_slowdown` times as long (measured for matmuls, 30 to
      40 %; assumed for attention).

    Attributes:
      documents_per_row: assumed documents in a row of tokens, of equal length.
      sustained: None: the GPU's.
      spread: see SPREAD.
      attention: the shares of the peak, forward and backward.
      passes: how often memory-bound kernels move their bytes; above 1 if they are not fused.
    """

    cluster: hardware.Cluster
    overlap_slowdown: float = hardware.OVERLAP_SLOWDOWN
    documents_per_row: int = 1
    sustained: float | None = None
    spread: float = SPREAD
    attention: tuple[float, float] = CUDNN_ATTENTION
    passes: float = 1.0

    def work_s(self, work: Work) -> float:
        """Return the seconds of one instruction."""
        gpu = self.cluster.gpu
        if work.kind is Kind.NONE:
            return 0.0
        if work.kind is Kind.HOST:
            return work.num_bytes / hardware.host_bandwidth(gpu)
        compute, passes = 0.0, self.passes if work.kind is Kind.MEMORY else 1.0
        if work.kind is Kind.MATMUL:
            compute = sum(self._matmul_s(matmul) for matmul in work.matmuls)
        elif work.kind is Kind.ATTENTION:
            part = self.attention[work.is_backward] * self._sustained_share
            compute = work.num_flops / (gpu.peak_flops(work.dtype) * part)
        return max(compute, work.num_bytes * passes / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)) + KERNEL_S

    @functools.cached_property
    def _sustained_share(self) -> float:
        """The share of the unthrottled rates that the slowest GPU sustains: the minimum of n draws (Blom's formula)."""
        num = self.cluster.num_devices
        slowest = statistics.NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0
        share = self.cluster.gpu.sustained if self.sustained is None else self.sustained
        return share / (1 + self.spread * slowest)

    def collective_s(self, collective: Collective) -> float:
        """Return the seconds of one collective without concurrent ones.

        This is the bytes that a device sends over the bus bandwidth of its group: (N-1)/N * bytes / bandwidth for a
        gather, twice that for an all-reduce, 0 for a group of one. Inside a node the bandwidth is NVLink's, measured by
        size. Across nodes a ring passes each node once, and its members share the adapters: with g members per node,
        min(NVLink's, g * one adapter's). In an all-to-all each device sends what other nodes need through its own
        adapter. All groups run concurrently and take the time of the first.

        Source: NCCL's definition of bus bandwidth (nccl-tests, PERFORMANCE.md), and `hardware.link_bandwidth`.
        """
        if not collective.wire_bytes:
            return 0.0
        is_ring = collective.kind != ALL_TO_ALL
        bandwidth = self.cluster.group_bandwidth(collective.group, collective.num_bytes, is_ring=is_ring)
        return collective.wire_bytes / bandwidth

    def _matmul_s(self, matmul: Matmul) -> float:
        """Return the seconds of a matmul. Batches count as rows, since they fill the cores in the same way."""
        dtype = dtype_name(matmul.dtype)
        if dtype not in dict(self.cluster.gpu.peak):
            dtype = "bfloat16" if dtype.startswith(("f8", "s8")) else "float32"
        rows, columns, depth = (max(1, size) for size in (matmul.batch * matmul.m, matmul.n, matmul.k))
        return matmul.num_flops / hardware.matmul_rate(
            self.cluster.gpu, dtype, rows, columns, depth, sustained=self._sustained_share
        )
