"""Search spaces: the values to try for each option, and changes of a step's options."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax

from jfsdp import jaxprs
from jfsdp.compat import pipelining
from jfsdp.engine.options import unit_bytes
from jfsdp.layout.mesh import CONTEXT, EXPERT, PIPE
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.jobs import INPUTS, can_offload, chunked, find_planned_job, mesh_sizes, shard_planned
from jfsdp.trainer.options import StepOptions, step_options
from jfsdp.trainer.parse import Pairs

# By name: the strategy, --reshard-after-forward, --opt-over, and whether the mesh has replicas.
_KEPT_IN_DOMAIN, _ZERO1, _DOMAIN = "full_shard kept in a host", "zero1", "domain"
WAYS = {
    "full_shard": ("full_shard", None, None, False),
    "full_shard kept": ("full_shard", False, None, False),
    "zero2": ("zero2", None, None, False),
    _ZERO1: ("zero1", None, None, False),
    "ddp": ("ddp", None, None, False),
    _KEPT_IN_DOMAIN: ("full_shard", _DOMAIN, None, False),
    "replicas": ("full_shard", None, None, True),
    "replicas kept": ("full_shard", False, None, True),
    "replicas opt_over": ("full_shard", None, ("replica", "fsdp"), True),
}
PROGRAMS = (
    ("xla", None, "per_parameter"),
    ("manual", 1, "per_parameter"),
    ("manual", 2, "per_parameter"),
    ("manual", 1, "flat"),
)
_MAX_SUBSETS = 3  # of so many names or fewer, every subset is tried: 7 of 3
_MAX_DOUBLINGS = 16


@dataclasses.dataclass(frozen=True)
class SearchSpace:
    """The values to try for each option. None: chosen from the model and the cluster. (): the option is unchanged.

    Attributes:
      strategies: names of `WAYS`; by default all.
      remats: as `StepOptions.remat`; by default full, dots, none, the model's checkpoint names, and offload:input.
      batches: rows per device and step; by default powers of two times the user's, while they fit and are faster. With
        accumulation only the number of microbatches changes, to keep the global batch.
      xla: groups of choices for XLA, tried in order; each choice is a tuple of names and values. By default
        `xla_choices`.
      beam: number of best candidates that are tried with more rows per device.
      programs: each as (program, prefetch, storage); by default `PROGRAMS`.
      tensor_sizes: of axis `tensor`; by default the divisors of a node's GPUs, if the job has placements or axis rules,
        and the user's mesh has an axis of -1 but no `tensor`.
      context_sizes: of axis `context`; by default the same, if the job has `in_context`.
      expert_sizes: of axis `expert`; by default the same, if the job has `with_experts`.
    """

    strategies: tuple[str, ...] | None = None
    remats: tuple[str | Pairs, ...] | None = None
    batches: tuple[int, ...] | None = None
    xla: tuple[tuple[Pairs, ...], ...] | None = None
    beam: int = 3
    programs: tuple[tuple[str, int | None, str], ...] | None = None
    tensor_sizes: tuple[int, ...] | None = None
    context_sizes: tuple[int, ...] | None = None
    expert_sizes: tuple[int, ...] | None = None


def changes(options: StepOptions, default: StepOptions) -> dict[str, Any]:
    """Return the fields of `options` that differ from `default`, in the order of the fields."""
    return {name: value for name, value in step_options(options).items() if value != getattr(default, name)}


def recipe_of(options: StepOptions, base: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recipe as fields of `TrainConfig`: `base`, updated by the options, and the non-default options."""
    given, usual = step_options(options), step_options(StepOptions())
    return {**base, **{name: value for name, value in given.items() if name in base or value != usual[name]}}


def placements(options: StepOptions, cluster: Cluster, space: SearchSpace) -> Iterator[StepOptions]:
    """Yield the options with every strategy and mesh. Model axes keep their sizes."""
    sizes = mesh_sizes(options.mesh, cluster.num_devices)
    others = {axis: size for axis, size in sizes.items() if axis not in ("replica", "fsdp") and size > 1}
    inner = math.prod(others.values())
    num = cluster.num_devices // inner
    domain = min(num, max(1, cluster.devices_per_domain * others.get(PIPE, 1) // inner))  # of one stage
    for name in WAYS if space.strategies is None else space.strategies:
        strategy, kept, opt_over, has_replicas = WAYS[name]
        if name == _ZERO1 and options.accumulate == 1 and space.strategies is None:
            continue  # the same program as zero2
        if name == _KEPT_IN_DOMAIN and not 1 < domain < num:
            continue
        meshes = [{"fsdp": -1}]
        if has_replicas:  # groups of one and two domains; in a single domain, of half
            usual = (domain // 2,) if num <= domain else (domain, 2 * domain)
            meshes = [{"replica": -1, "fsdp": size} for size in usual if 1 < size < num and num % size == 0]
        for mesh in meshes:
            yield dataclasses.replace(
                options,
                mesh=tuple((mesh | others).items()),
                strategy=strategy,
                opt_over=opt_over,
                reshard_after_forward=domain if kept == _DOMAIN else kept,
            )


def _way_of(options: StepOptions) -> str:
    """Return the options' name in `WAYS`, or the nearest."""
    has_replicas = dict(options.mesh).get("replica", 1) != 1
    kept = options.reshard_after_forward
    kept = _DOMAIN if isinstance(kept, int) and not isinstance(kept, bool) else kept
    way = (options.strategy, kept, options.opt_over, has_replicas)
    return next((name for name, other in WAYS.items() if other == way), "replicas" if has_replicas else "full_shard")


def splits(options: StepOptions, given: StepOptions, cluster: Cluster, space: SearchSpace) -> Iterator[StepOptions]:
    """Yield the options with every size of axes `tensor`, `context` and `expert`, with their strategy and the user's.

    The global batch is unchanged, so fewer data shards have more rows each; with `context` one after the other, in more
    microbatches. Sizes that would need a fraction of a row are skipped.

    Args:
      options: the options to change.
      given: the user's options.
    """
    both = dataclasses.replace(space, strategies=tuple(dict.fromkeys((_way_of(options), _way_of(given)))))
    sizes, job = mesh_sizes(options.mesh, cluster.num_devices), find_planned_job(given)
    tensor = job.placements or job.axis_rules
    axes = {"tensor": (tensor, space.tensor_sizes), CONTEXT: (job.in_context, space.context_sizes)}
    axes[EXPERT] = job.with_experts, space.expert_sizes
    for axis, (can_split, chosen) in axes.items():
        is_open = axis not in dict(given.mesh) and -1 in dict(given.mesh).values()
        usual = _divisors(cluster.gpus_per_node) if can_split and is_open else []
        for size in usual if chosen is None else chosen:
            shared = 1 if axis == EXPERT else size  # devices that share rows
            rows, rest = divmod(options.batch_per_device * shared, 1 if axis == EXPERT else sizes.get(axis, 1))
            parts = options.accumulate * size // sizes.get(axis, 1) if axis == CONTEXT else options.accumulate
            others = {name: sizes[name] for name in (PIPE, *axes) if name != axis and sizes.get(name, 1) > 1}
            has_devices = cluster.num_devices % (size * math.prod(others.values())) == 0
            if has_devices and not rest and parts and rows % parts == 0:
                mesh = tuple(({"fsdp": -1} | others | {axis: size}).items())
                changed = dataclasses.replace(options, mesh=mesh, batch_per_device=rows, accumulate=parts)
                yield from placements(changed, cluster, both)


def programs(options: StepOptions, space: SearchSpace) -> Iterator[StepOptions]:
    """Yield the options with every program, prefetch depth and storage."""
    for program, prefetch, storage in PROGRAMS if space.programs is None else space.programs:
        yield dataclasses.replace(options, program=program, prefetch=prefetch, storage=storage)


def remats(options: StepOptions, space: SearchSpace, names: Sequence[str]) -> Iterator[StepOptions]:
    """Yield the options with every remat; `names` are the model's checkpoint names."""
    sizes = range(1, len(names) + 1) if len(names) <= _MAX_SUBSETS else {1, len(names)}
    subsets = [part for size in sizes for part in itertools.combinations(names, size)]
    usual = ("full", "none", "dots", *((("save", part),) for part in subsets), *[INPUTS] * can_offload(options))
    for policy in usual if space.remats is None else space.remats:
        yield dataclasses.replace(options, remat=policy)


def batches(options: StepOptions, given: StepOptions, space: SearchSpace) -> Iterator[list[StepOptions]]:
    """Yield lists of options with other batches per device, each to be tried while they fit and are faster.

    Args:
      options: the options to change.
      given: the user's options.
    """
    if space.batches is not None:
        wanted = [rows for rows in sorted(space.batches) if rows % options.accumulate == 0]
        yield [dataclasses.replace(options, batch_per_device=rows) for rows in wanted]
    elif given.accumulate > 1:
        for count in _divisors(options.batch_per_device):
            split = dataclasses.replace(options, accumulate=count)
            yield [split]
            if count > 1:
                yield [dataclasses.replace(split, reshard_after_backward=False)]
    else:
        rows = [options.batch_per_device * 2**power for power in range(_MAX_DOUBLINGS)]
        yield [dataclasses.replace(options, batch_per_device=count) for count in rows]
        if options.accumulate == 1:
            # Two microbatches with one gather and reduction help if communication limits the step.
            twice = dataclasses.replace(options, batch_per_device=rows[1], accumulate=2)
            yield [dataclasses.replace(twice, reshard_after_backward=False)]


def _divisors(number: int) -> list[int]:
    return [size for size in range(1, number + 1) if number % size == 0]


def leaner(options: StepOptions, cluster: Cluster) -> Iterator[StepOptions]:
    """Yield options that use less device memory, the cheapest in time first."""
    lean = dataclasses.replace(options, remat="full")
    yield lean
    rows = options.batch_per_device
    cuts = [count for count in _divisors(rows) if count > options.accumulate]
    for count in dict.fromkeys(cuts[:1] + cuts[-1:]):
        yield dataclasses.replace(lean, accumulate=count)
    most = dataclasses.replace(lean, accumulate=max([options.accumulate, *cuts[-1:]]))
    inputs: dict[str, Any] = {"remat": INPUTS} if can_offload(options) else {}
    for more in filter(None, (chunked(options, cluster.num_devices), inputs)):
        most = dataclasses.replace(most, **more)
        yield most
    yield dataclasses.replace(most, offload=("opt_state",))
    yield dataclasses.replace(most, offload=("params", "opt_state"))


def xla_choices(options: StepOptions, cluster: Cluster) -> tuple[tuple[Pairs, ...], ...]:
    """Return groups of choices for XLA: collectives in flight, pipelining of loops, and combine thresholds.

    They replace defaults of `engine/options.py`, and have the names of the installed JAX.
    """
    layout = shard_planned(options, num_devices=cluster.num_devices).model.layout
    unit, shard = unit_bytes(layout)
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    twice = {"all_gather": 2 * unit, "reduce_scatter": 2 * shard, "all_reduce": 2 * unit}
    thresholds = [
        tuple((f"xla_gpu_{kind}_combine_threshold_bytes", size) for kind, size in sizes.items())
        for sizes in (dict.fromkeys(twice), twice)
    ]
    off, scatter = (tuple(x.items()) for x in (pipelining("all_gather", is_on=False), pipelining("reduce_scatter")))
    return (((limit, 1),), ((limit, 4),)), (scatter, off), tuple(thresholds)


def value_names(options: StepOptions, cluster: Cluster) -> tuple[str, ...]:
    """Return the checkpoint names (`checkpoint_name`) of a model's values. Traces the forward once."""
    plain = dataclasses.replace(options, remat="none")
    planned = shard_planned(plain, num_devices=cluster.num_devices)
    trace = jax.make_jaxpr(planned.model.forward(planned.job.loss))
    closed = trace(planned.step.abstract_state(), planned.batch)
    return tuple(sorted(jaxprs.value_names(closed.jaxpr)))
