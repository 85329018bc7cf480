"""Plans of training steps on a cluster: memory, bytes sent, overlap and time.

A plan lowers the training step for the cluster's devices, compiles it with the same XLA, and reads the result. Bytes,
counts and memory are the compiler's. Seconds are estimates from datasheets and a few measurements (`time/rates.py`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import numpy as np

from jfsdp.arguments import Count, Size, checked
from jfsdp.compat import check_thunks
from jfsdp.engine.options import is_gpu
from jfsdp.engine.spec import StepSpec
from jfsdp.extras import installed_version
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import SENT_AXES, SHARED_AXES, num_data_shards
from jfsdp.plan.cluster.compile import CompiledStep, compile_step, without_cache
from jfsdp.plan.cluster.hardware import Cluster, host_bandwidth
from jfsdp.plan.failures import Failures
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import Module, parse_module
from jfsdp.plan.launches import Launches, read_launches
from jfsdp.plan.memory.peak import RESERVE_BYTES, Memory, breakdown, largest_buffers
from jfsdp.plan.miscompiles import find_miscompiles
from jfsdp.plan.time.pipeline import Pipeline, tick_seconds
from jfsdp.plan.time.rates import CLOCK_RANGE, COMPARED_GPUS
from jfsdp.plan.time.timeline import Rates, Timeline, hidden_share, simulate
from jfsdp.plan.time.work import flops_by_dtype
from jfsdp.plan.traffic.attribution import split_activations
from jfsdp.plan.traffic.checks import Finding
from jfsdp.plan.traffic.ledger import Ledger, make_ledger
from jfsdp.train.checks import check_lowers
from jfsdp.train.state_bytes import StateBytes, account
from jfsdp.train.step.step import TrainStep

# Errors of JAX (0.10.2, 0.12) for a computation on devices of a topology.
_NO_DEVICES_ERRORS = ("Executable' object has no attribute 'local_devices'", "not available with compile-only client")


class EagerComputation(RuntimeError):
    """A model ran a computation while it was traced; the cause is JAX's error, with the line."""


@checked
@dataclasses.dataclass(frozen=True)
class Work:
    """The units of throughput, and the FLOPs of one.

    Attributes:
      items: tokens or rows per device and step.
      rows: of the batch, per device and step.
      item: "token" or "row".
      item_flops: FLOPs of the model for one item, forward and backward, without recomputation and without gradients of
        frozen weights; None if unknown. Attention counts all keys of a row.
      causal_flops: the same, but attention counts only the keys that a token attends to: half of its document's.
      dtype: of matmuls, to look up the hardware's peak.
      documents_per_row: assumed documents per row of tokens, of equal length; 1 is the most work.
      attention: the model's description of its attention kernel.
      vocab_size: of a language model; None: no buffer is labeled as logits, and no embedding counts as the head.
    """

    items: Count
    rows: Count
    item: str
    item_flops: float | None
    dtype: str
    documents_per_row: Count = 1
    attention: str = ""
    causal_flops: float | None = None
    vocab_size: Count | None = None


def rows_of(step: TrainStep, batch: Any) -> Work:
    """Return a work that counts the rows of the step's batch, of unknown FLOPs."""
    rows = max(np.shape(x)[0] for x in jax.tree.leaves(batch) if np.ndim(x))
    rows //= num_data_shards(dict(step.layout.mesh_sizes))
    return Work(rows, rows, "row", None, matmul_dtype(step.layout))


def check_cluster(step: TrainStep, cluster: Cluster) -> None:
    """Check that the cluster has as many devices as the step's mesh.

    Raises:
      ValueError: if it does not; names both numbers.
    """
    if step.mesh.size != cluster.num_devices:
        raise ValueError(
            f"the mesh has {step.mesh.size} devices and the cluster {cluster.num_devices}; make the mesh over "
            "jfsdp.plan.topology_devices(cluster), or change nodes and gpus_per_node"
        )


def matmul_dtype(layout: Layout) -> str:
    """Return the compute dtype of matmuls; on these GPUs JAX multiplies float32 as tf32 by default."""
    dtype = layout.mp_policy.param_dtype or "float32"
    return "tf32" if dtype == "float32" else dtype


@dataclasses.dataclass(frozen=True)
class Training:
    """Time and checkpoints of training on a number of tokens (or rows); see `Plan.train`.

    Attributes:
      steps, days, gpu_hours: of training steps only, at their estimated seconds.
      num_checkpoints: including the final one.
      checkpoint_bytes: size of one on disk: trained parameters, optimizer states and model state.
      copy_s: time in which training waits for one: its copy to host memory, shared evenly by all GPUs.
      checkpoint_s: time to write one, with all nodes at `storage_bandwidth`.
      storage_bandwidth: bytes/s that one node writes.
    """

    steps: int
    days: float
    gpu_hours: float
    num_checkpoints: int
    checkpoint_bytes: int
    copy_s: float
    checkpoint_s: float
    storage_bandwidth: float


@dataclasses.dataclass(frozen=True)
class Plan:
    """A compiled step on a cluster: its memory, collectives and time; see `make_plan`.

    Attributes:
      spec: the step's program, the reason for it, and the prefetch depth.
      products: number and FLOPs of matrix products per step and device, by the dtype of their operands.
      pipeline: None without mesh axis `pipe`.
      miscompiles: known faults of XLA and JAX in this program; see `jfsdp.plan.miscompiles`.
      launches: None unless `make_plan` was asked for them.
    """

    cluster: Cluster
    layout: Layout
    work: Work
    state: StateBytes
    compiled: CompiledStep
    memory: Memory
    ledger: Ledger
    timeline: Timeline
    reserve_bytes: int
    spec: StepSpec
    products: Mapping[str, tuple[int, float]]
    pipeline: Pipeline | None = None
    miscompiles: tuple[Finding, ...] = ()
    launches: Launches | None = None

    @property
    def limit_bytes(self) -> int:
        """GPU memory that a step may use."""
        return self.cluster.gpu.memory_bytes - self.reserve_bytes

    @property
    def needed_bytes(self) -> int:
        """GPU memory of the step: its peak, plus fragmentation of the heap."""
        return self.memory.allocated_bytes

    @property
    def fits(self) -> bool:
        """Whether the step fits into a GPU and leaves the reserve free."""
        return self.needed_bytes <= self.limit_bytes

    @property
    def step_s(self) -> float:
        """Estimated seconds of a step."""
        return self.timeline.step_s

    @property
    def step_range_s(self) -> tuple[float, float] | None:
        """Estimated range of seconds, which contains the measured time of nine of ten published runs.

        None if no published run was compared: for other GPUs, for meshes with axis `tensor`, `pipe`, `context` or
        `expert`, and for products in float8.
        """
        is_other = "float8" in self.products or self.layout.num_shards(SENT_AXES) > 1
        if self.cluster.gpu.name not in COMPARED_GPUS or is_other:
            return None
        low, high = CLOCK_RANGE
        return self.step_s * low, self.step_s * high

    def train(self, items: float, checkpoint_every: int, storage_bandwidth: float) -> Training:
        """Estimate training on a number of tokens, or of rows if the work counts rows.

        Args:
          checkpoint_every: steps.
          storage_bandwidth: bytes/s that one node writes.
        """
        cluster, sizes, saved = self.cluster, dict(self.layout.mesh_sizes), self.state.checkpoint
        steps = math.ceil(items / (self.work.items * num_data_shards(sizes)))
        hours = steps * self.step_s / 3600
        copy_s = saved / (cluster.num_devices * host_bandwidth(cluster.gpu))
        writes_s = saved / (cluster.nodes * storage_bandwidth)
        count = math.ceil(steps / checkpoint_every) if checkpoint_every else 0
        days, gpu_hours = hours / 24, hours * cluster.num_devices
        return Training(steps, days, gpu_hours, count, saved, copy_s, writes_s, storage_bandwidth)

    def failures(self, training: Training, mtbf_s: float, restart_s: float) -> Failures:
        """Return the failures of this training.

        Args:
          mtbf_s: mean seconds between failures of one node.
          restart_s: seconds from a failure to the start of the processes. They load the compiled step, and read the
            checkpoint at the rate of writing.
        """
        restart_s += training.checkpoint_s
        mtbf_s /= self.cluster.nodes
        return Failures(mtbf_s, self.step_s, training.copy_s, training.checkpoint_s, restart_s)

    @property
    def items_per_s(self) -> float:
        """Tokens (or rows) per second and GPU. Devices along axes `tensor`, `pipe` and `context` share them."""
        return self.work.items / self.layout.num_shards(SHARED_AXES) / self.step_s

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization: the model's FLOPs over the GPU's peak. Recomputation does not count."""
        return self._mfu(self.work.item_flops)

    @property
    def mfu_causal(self) -> float | None:
        """As `mfu`, with `Work.causal_flops`."""
        return self._mfu(self.work.causal_flops)

    def _mfu(self, item_flops: float | None) -> float | None:
        peak = self.cluster.gpu.peak_flops(self.work.dtype)
        return None if item_flops is None else item_flops * self.items_per_s / peak

    @property
    def state_overlapped_share(self) -> float | None:
        """`Timeline.overlapped_share` of parameters and gradients only, without activations."""
        inside = [timed for timed in self.timeline.collectives if timed.collective.in_loop]
        states = (split_activations(self.layout, timed.collective)[1] for timed in inside)
        pairs = zip(states, inside, strict=True)
        return hidden_share((state.total_bytes, timed.num_matmuls_between) for state, timed in pairs)

    @property
    def link_s(self) -> dict[str, float]:
        """Seconds of communication by link, overlapped or not: the link inside a node, and the network."""
        link = self.cluster.gpu.link
        seconds = {link: 0.0, "network": 0.0}
        for timed in self.timeline.collectives:
            spans = self.cluster.spans_nodes(timed.collective.group)
            seconds["network" if spans else link] += timed.wire_s * timed.collective.count
        return seconds

    @property
    def bound_by(self) -> str:
        """The slowest resource: compute (matmuls), memory bandwidth, a link, or the host link."""
        clock = self.timeline
        computing = "compute" if clock.matmul_s + clock.attention_s >= clock.memory_s else "memory bandwidth"
        seconds = {computing: clock.compute_s, "host link": clock.host_s, **self.link_s}
        return max(seconds, key=lambda name: seconds[name])

    @property
    def compute_bound_rows(self) -> int:
        """The fewest rows per device with which compute takes as long as communication.

        Assumes that compute grows in proportion to the batch, and the bytes sent not at all.
        """
        if not self.timeline.wire_s:
            return 1
        return max(1, math.ceil(self.work.rows * self.timeline.wire_s / self.timeline.compute_s))

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: bytes per device, seconds per step."""
        ledger, spec = self.ledger.to_dict(), self.spec
        of_memory = ("fits", "needed_bytes", "limit_bytes", "reserve_bytes")
        of_time = ("step_s", "step_range_s", "mfu", "mfu_causal", "bound_by", "state_overlapped_share")
        of_clock = ("overlapped_share", "exposed_s", "wire_s", "compute_s", "critical")
        return {
            **{name: getattr(self, name) for name in (*of_memory, *of_time)},
            **{name: getattr(self.timeline, name) for name in of_clock},
            "cluster": self.cluster.to_dict(),
            "strategy": self.layout.strategy.name,
            "program": spec.program,
            "reason": spec.reason,
            "prefetch": spec.prefetch and dataclasses.asdict(spec.prefetch),
            "pipeline": self.pipeline and self.pipeline.to_dict(),
            "storage": self.layout.storage,
            "mesh": dict(self.layout.mesh_sizes),
            "peak_bytes": self.memory.peak_bytes,
            "memory": {
                **self.memory.parts,
                "fragmentation": self.memory.fragmentation_bytes,
                "host": self.memory.host_bytes,
            },
            "largest_buffers": [
                {"part": part, "name": name, "count": count, "bytes": size}
                for part, name, count, size in largest_buffers(self.memory)
            ],
            "state_bytes": self.state.total,
            "host_state_bytes": self.state.host_total,
            "collectives": ledger.pop("rows"),
            "unknown_collectives": ledger.pop("unknown"),
            **ledger,
            "timeline": [_timed(timed) for timed in self.timeline.collectives],
            "rows_per_device": self.work.rows,
            "documents_per_row": self.work.documents_per_row,
            "attention": self.work.attention,
            "products": {dtype: {"count": num, "flops": flops} for dtype, (num, flops) in self.products.items()},
            f"{self.work.item}s_per_s_per_gpu": self.items_per_s,
            "compute_bound_batch_per_device": self.compute_bound_rows,
            "miscompiles": [dataclasses.asdict(one) for one in self.miscompiles],
            "launches": self.launches and self.launches.to_dict(),
            "versions": {name: installed_version(name) for name in ("jax", "jaxlib")},
            "options": dict(self.compiled.options),
            "compile_s": self.compiled.compile_s,
        }


@contextlib.contextmanager
def _explaining_eager_computation() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        if not any(text in str(error) for text in _NO_DEVICES_ERRORS):
            raise
        raise EagerComputation(
            "the model or its loss computes with arrays while it is traced (jax.ensure_compile_time_eval, say), but "
            "a plan has no devices to compute on; compute such constants with numpy, or before the trace"
        ) from error


def _timed(timed: Any) -> dict[str, Any]:
    names = ("name", "kind", "dtype", "group_size", "count", "wire_bytes", "in_loop", "op_name", "source")
    fields = ("wire_s", "num_matmuls_between", "hidden_s", "exposed_s")
    return {name: getattr(timed.collective, name) for name in names} | {name: getattr(timed, name) for name in fields}


@checked
def make_plan(
    step: TrainStep,
    batch: Any,
    cluster: Cluster,
    work: Work | None = None,
    *,
    reserve_bytes: Size = RESERVE_BYTES,
    calls: Mapping[str, Size] | None = None,
    launches: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Compile a step for a cluster and read its memory, collectives and time. Allocates nothing on any device.

    Args:
      step: of a model sharded over `topology_devices(cluster)`.
      batch: shapes of one global batch.
      work: units of throughput; None: the rows of the batch.
      reserve_bytes: memory that the step must leave free (for CUDA, NCCL, the allocator).
      calls: calls per microbatch of units that are not called exactly once.
      launches: also read what the GPU executes, in order. Needs JAX 0.12.
      on_progress: called with a description of each phase before it begins.

    Raises:
      ValueError: for options that XLA does not know, batches that cannot be split, and `launches` with an older JAX.
      EagerComputation: if the model or its loss runs a computation while it is traced.
    """
    check_cluster(step, cluster)
    check_lowers(step.mesh)
    if launches:
        check_thunks()
    if not is_gpu(step.mesh):
        raise ValueError(
            f"make_plan: the mesh has devices of platform {step.mesh.devices.flat[0].platform!r}, but a plan compiles "
            "for GPUs; make it with jfsdp.make_mesh(devices=jfsdp.plan.topology_devices(cluster), ...)"
        )
    state = step.abstract_state()
    on_progress("lowering")
    with without_cache():
        with _explaining_eager_computation():
            traced = step.trace(state, batch)
            lowered = traced.lower()
        on_progress("compiling")
        compiled = compile_step(lowered, step.compiler_options, with_thunks=launches)
    on_progress("reading the program")
    work = work or rows_of(step, batch)
    module, trace = parse_module(compiled.text), step.read_trace(state, batch, traced)
    collectives = find_collectives(module, cluster.num_devices, dict(step.layout.mesh_sizes))
    timeline = simulate(module, collectives, Rates(cluster, documents_per_row=work.documents_per_row))
    return Plan(
        cluster=cluster,
        layout=step.layout,
        work=work,
        state=account(state),
        compiled=compiled,
        memory=breakdown(compiled, module, step.layout, vocab_size=work.vocab_size),
        ledger=make_ledger(
            step.layout, collectives, step.spec, calls=calls, gpus_per_node=cluster.devices_per_domain, trace=trace
        ),
        timeline=timeline,
        reserve_bytes=reserve_bytes,
        spec=step.spec,
        products=flops_by_dtype(module),
        pipeline=_pipeline(step, module, timeline),
        miscompiles=tuple(find_miscompiles(module, trace.jaxpr, step.layout.num_shards(step.layout.data_axes))),
        launches=read_launches(compiled.thunks, module, collectives, timeline.overlapped_share) if launches else None,
    )


def _pipeline(step: TrainStep, module: Module, timeline: Timeline) -> Pipeline | None:
    schedule, config = step.spec.schedule, step.config
    if schedule is None:
        return None
    name, seconds = config.pipe_schedule, tick_seconds(module, timeline)
    name = name if isinstance(name, str) else "own"
    return Pipeline(name, schedule, config.pipe_repeats, config.accumulate, seconds, timeline.step_s)
