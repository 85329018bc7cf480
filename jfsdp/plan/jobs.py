"""Plan a training script's options: the same job, model, optimizer and step, on other devices."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from jfsdp.compat import misorders_offloads
from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import PIPE, check_sizes, make_abstract_mesh, make_mesh, num_data_shards, resolve_sizes
from jfsdp.layout.policy import UNIT_INPUT
from jfsdp.plan.bound import Bound, make_bound, matmul_elements
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.memory.peak import RESERVE_BYTES
from jfsdp.plan.plan import Plan, Work, make_plan, matmul_dtype
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.step.step import TrainStep
from jfsdp.trainer.job import Job, load_job
from jfsdp.trainer.option_errors import MOST
from jfsdp.trainer.options import ShardingOptions, StepOptions
from jfsdp.trainer.parse import Pairs, write
from jfsdp.trainer.preferences import with_preference
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.step import causal_flops, causal_keys, describe_attention, make_batch, make_schedule, make_step

_CHUNKS = 4096, 16_384  # tokens per device; with fewer, matrix products are slow
INPUTS: Pairs = (("offload", (UNIT_INPUT,)),)  # --remat offload:input


class Planned(NamedTuple):
    """A sharded job, with the arguments of `make_plan` and `make_bound`.

    Attributes:
      batch: shapes of one global batch.
    """

    job: Job
    model: ShardedModel
    step: TrainStep
    batch: Any
    work: Work
    seq_len: int


def find_planned_job(options: ShardingOptions) -> Job:
    """Load the options' job, with their changes of its configuration."""
    job = load_job(options.model, options.factory).with_config(**dict(options.model_config))
    return with_preference(job, options.preference, options.beta) if isinstance(options, StepOptions) else job


def can_offload(options: StepOptions) -> bool:
    """Tell whether GPUs may offload activations: not in pipelines, and not with an XLA that misorders them."""
    return PIPE not in dict(options.mesh) and not misorders_offloads()


def chunked(options: StepOptions, num_devices: int) -> dict[str, Any]:
    """Return the change of a long row to a `token_chunk`.

    {} if the model's config lacks this field or has a value, and for rows without a divisor of a useful size.
    """
    job, tensor = find_planned_job(options), mesh_sizes(options.mesh, num_devices).get("tensor", 1)
    seq_len, longest = options.seq_len or job.seq_len, _CHUNKS[1] * tensor
    if seq_len <= longest or getattr(job.config, "token_chunk", 0) is not None:
        return {}
    sizes = [size for size in range(_CHUNKS[0] * tensor, longest + 1, tensor) if seq_len % size == 0]
    return {"model_config": (*options.model_config, ("token_chunk", sizes[-1]))} if sizes else {}


def shard_planned(
    options: StepOptions, devices: Any = None, *, num_devices: int = 0, mesh: Mesh | None = None
) -> Planned:
    """Shard the options' job over devices of a topology, over `num_devices` abstract devices, or over a mesh.

    Raises:
      ValueError: if the mesh size is not the number of devices, and for options that training would refuse.
    """
    job = find_planned_job(options)
    if mesh is None:
        sizes = mesh_sizes(options.mesh, num_devices if devices is None else len(devices))
        mesh = make_abstract_mesh(sizes) if devices is None else make_mesh(devices=devices, **sizes)  # type: ignore[arg-type]
    run = TrainConfig()  # its learning rates are constants of the program, any will do
    schedule = make_schedule(run.learning_rate, run.steps // 20, run.steps, run.min_learning_rate)
    model, _, step = make_step(options, job, mesh, schedule)
    seq_len = job.seq_len if options.seq_len is None else options.seq_len
    rows = options.batch_per_device * num_data_shards(dict(model.layout.mesh_sizes))
    if rows > MOST:
        raise ValueError(f"--batch-per-device {options.batch_per_device} makes {rows:,} rows, over {MOST:,}; lower it")
    batch = make_batch(job, rows, seq_len, cross_documents=options.cross_documents)
    return Planned(job, model, step, batch, _make_work(options, job, model.layout, seq_len), seq_len)


def mesh_sizes(mesh: tuple[tuple[str, int], ...], num_devices: int) -> dict[str, int]:
    """Return the axis sizes of `--mesh` for a number of devices.

    Raises:
      ValueError: if the mesh size differs from the cluster's; names both.
    """
    check_sizes(dict(mesh))
    sizes, relation = {"fsdp": 1, **dict(mesh)}, "does not divide" if -1 in dict(mesh).values() else "is not"
    try:
        return resolve_sizes(sizes, num_devices)
    except ValueError as error:
        known = math.prod(size for size in sizes.values() if size > 0)
        raise ValueError(
            f"--mesh {write(mesh)}: the product of the sizes, {known}, {relation} the cluster's number of devices, "
            f"{num_devices} (--nodes x --gpus-per-node); change one of them, or let an axis take the rest with -1"
        ) from error


def _make_work(options: StepOptions, job: Job, layout: Layout, seq_len: int) -> Work:
    per_row = 1 if job.item == "row" else 2 * seq_len if job.data == "pairs" else seq_len
    rows, flops = options.batch_per_device, _item_flops(job, layout, seq_len)
    return Work(rows * per_row, rows, job.item, flops, matmul_dtype(layout), vocab_size=job.vocab_size)


def _item_flops(job: Job, layout: Layout, *keys: float) -> float | None:
    """Return the mean FLOPs of items that attend to these numbers of keys; each frozen weight saves two per token."""
    frozen = matmul_elements(layout, job.vocab_size, trainable=False)
    # How often each weight multiplies a row is not known.
    if job.flops_per_token is None or (frozen and job.item == "row"):
        return None
    return causal_flops(job.flops_per_token, keys) - 2 * frozen


def _check_documents(num: int, planned: Planned, options: StepOptions) -> None:
    most = min(planned.seq_len, planned.job.documents_per_row or planned.seq_len)
    if options.cross_documents and num > 1:
        raise ValueError(f"--documents-per-row {num}: with --cross-documents a row is one document; leave one out")
    if num > most:
        raise ValueError(
            f"--documents-per-row {num}: rows of {planned.seq_len} tokens contain at most {most} documents here; lower "
            "it, or raise the model's documents_per_row (--model-config) if that is less than the tokens"
        )


def bound_job(options: StepOptions, cluster: Cluster, device: Any = None) -> Bound:
    """Return lower bounds of a step with a training script's options; see `make_bound`.

    Args:
      device: a device of `topology_devices`, for a model that chooses its attention by the platform. The attention of
        CPUs computes long rows in many parts, whose trace takes seconds.
    """
    _, _, step, batch, work, _ = shard_planned(options, num_devices=cluster.num_devices)
    with contextlib.nullcontext() if device is None else jax.default_device(device):
        return make_bound(step, batch, cluster, work)


def plan_job(
    options: StepOptions,
    cluster: Cluster,
    *,
    reserve_bytes: int = RESERVE_BYTES,
    documents_per_row: int = 1,
    launches: bool = False,
    on_progress: Callable[[str], None] = lambda text: None,
) -> Plan:
    """Plan the step that `scripts/train.py` would run with these options on a cluster. Allocates nothing on any device.

    Args:
      documents_per_row: documents in a row of tokens, for time estimates; see `Work`.
      launches: as in `make_plan`.

    Raises:
      PlanUnavailable: if JAX's CUDA plugin cannot compile for this GPU.
      ValueError: for options that training would refuse, and for more documents than a row may contain.
      EagerComputation: as `make_plan`.
    """
    on_progress("sharding")
    devices = topology_devices(cluster)
    planned = shard_planned(options, devices)
    _check_documents(documents_per_row, planned, options)
    job, model, step, batch, work, seq_len = planned
    with jax.default_device(devices[0]):
        attention = describe_attention(job, model, seq_len, cross_documents=options.cross_documents)
    causal = _item_flops(job, model.layout, *causal_keys(seq_len / documents_per_row))
    work = dataclasses.replace(work, documents_per_row=documents_per_row, attention=attention, causal_flops=causal)
    more = {"launches": launches, "on_progress": on_progress}
    return make_plan(step, batch, cluster, work, reserve_bytes=reserve_bytes, **more)
