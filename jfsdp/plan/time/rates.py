"""Seconds of one instruction or one collective on a cluster, by arithmetic on its datasheet and on measurements."""

import dataclasses
import functools
import statistics

from jfsdp.plan.cluster import hardware
from jfsdp.plan.cluster.gpus import dtype_name
from jfsdp.plan.hlo.collectives import Collective
from jfsdp.plan.time.work import Kind, Matmul, Work

# Assumed: the part of the memory's datasheet bandwidth that an elementwise kernel gets (of a copy on an H100 NVL 0.91
# was measured), and what each kernel costs besides (launch, first and last wave).
MEMORY_EFFICIENCY = 0.85
KERNEL_S = 3e-6
# Assumed: the part of the peak that a fused attention kernel gets forward and backward, on a quiet GPU. XLA's is
# cuDNN's: about what FlashAttention-3 (arXiv 2407.08608) reports for causal attention with heads of 128 on an H100.
CUDNN_ATTENTION = (0.6, 0.45)
# How unlike GPUs of one kind are: the standard deviation of their rates under load. A step takes as long as its slowest
# GPU. Fitted to published runs (scripts/fit_clock.py), and so it holds whatever else grows with the number of GPUs. For
# comparison: Sinha et al. (arXiv 2208.11035) saw 8 % on average between V100s and others of five clusters.
SPREAD = 0.055
# Measured over predicted: nine of ten published runs on A100s and H100s lie between these, each predicted by constants
# that were fitted without its source (scripts/fit_clock.py); and the GPUs that such runs, or runs of jfsdp, were on.
CLOCK_RANGE = (0.86, 1.24)
COMPARED_GPUS = ("a100-40", "a100-80", "h100", "h100-96-500w", "h200")


@dataclasses.dataclass(frozen=True)
class Rates:
    """How fast a cluster's GPUs work and send.

    A matmul runs at `hardware.matmul_rate` or as fast as its operands pass through memory, attention at an assumed part
    of the peak; of both, `sustained` is left under load, and less on the slowest of many GPUs. Everything else runs at
    an assumed part of the memory's bandwidth. Under a collective, matmuls and attention take `overlap_slowdown` times
    as long (30 to 40 % were measured for matmuls; for attention assumed). A row of tokens is taken to hold
    `documents_per_row` documents of equal length.

    Attributes:
      sustained: None: the GPU's.
      spread: see SPREAD.
      attention: the parts of the peak, forward and backward.
      passes: how often kernels that are bound by memory move their bytes; more than once where they are not fused.
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
            part = self.attention[work.is_backward] * self._kept
            compute = work.num_flops / (gpu.peak_flops(work.dtype) * part)
        return max(compute, work.num_bytes * passes / (gpu.memory_bandwidth * MEMORY_EFFICIENCY)) + KERNEL_S

    @functools.cached_property
    def _kept(self) -> float:
        """What the slowest GPU keeps of the rates of a quiet one: that of n draws, by Blom's formula."""
        num = self.cluster.num_devices
        slowest = statistics.NormalDist().inv_cdf((num - 0.375) / (num + 0.25)) if num > 1 else 0.0
        kept = self.cluster.gpu.sustained if self.sustained is None else self.sustained
        return kept / (1 + self.spread * slowest)

    def collective_s(self, collective: Collective) -> float:
        """Return the seconds of one collective, alone on the wire.

        What a device sends, by the bus bandwidth of its group: (N-1)/N * bytes / bandwidth for a gather, twice that for
        an all-reduce. Inside a node the bandwidth is NVLink's, as measured by size. Across nodes a ring passes each
        node once, and its members share its adapters: with g members per node, min(NVLink's, g * one adapter's).
        A group of one costs nothing. Source: NCCL's definition of bus bandwidth (nccl-tests, PERFORMANCE.md), and
        `hardware.link_bandwidth` for the numbers. All groups run at once; the first stands for them all.
        """
        if not collective.wire_bytes:
            return 0.0
        return collective.wire_bytes / self.cluster.group_bandwidth(collective.group, collective.num_bytes)

    def _matmul_s(self, matmul: Matmul) -> float:
        """Batches are counted as rows: they fill the cores as rows do."""
        dtype = dtype_name(matmul.dtype)
        if dtype not in dict(self.cluster.gpu.peak):
            dtype = "bfloat16" if dtype.startswith(("f8", "s8")) else "float32"
        rows, columns, depth = (max(1, size) for size in (matmul.batch * matmul.m, matmul.n, matmul.k))
        return matmul.num_flops / hardware.matmul_rate(self.cluster.gpu, dtype, rows, columns, depth, kept=self._kept)
