"""Where the time of a PyTorch step goes, by PyTorch's own profiler.

On CPUs the time of an operator without what it calls, in rank 0; waiting for collectives is theirs. On GPUs the time of
the kernels that an operator started; those of collectives overlap others, so that the kinds may sum to more than the
step.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable
from typing import Any

from jfsdp.extras import load

from .kinds import ATTENTION, COLLECTIVE, COPY, ELEMENTWISE, MATMUL, OPTIMIZER, as_profile

_RULES = (
    (OPTIMIZER, re.compile(r"Optimizer\.step|adamw|clip_grad|_foreach_norm|Optimizer\.zero_grad")),
    (ATTENTION, re.compile(r"scaled_dot_product|flash_attention|efficient_attention|fmha")),
    (
        COLLECTIVE,
        re.compile(r"c10d|gloo|nccl|FSDP::|fsdp::|all_gather|reduce_scatter|allreduce|DistributedData"),
    ),
    (MATMUL, re.compile(r"::(mm|addmm|bmm|matmul|linear|baddbmm|mkldnn_\w*linear\w*)$|gemm")),
    (COPY, re.compile(r"^aten::(copy_|cat|clone|contiguous|_to_copy|zero_|fill_|index_copy)$")),
)


def profile(run: Callable[[], Any], steps: int, *, is_cuda: bool) -> dict[str, Any]:
    """Run some steps under the profiler; return what `profile_jax.profile` returns, by operators."""
    profiler: Any = load("torch.profiler", "bench")
    activities = [profiler.ProfilerActivity.CPU, *([profiler.ProfilerActivity.CUDA] if is_cuda else [])]
    with profiler.profile(activities=activities) as trace:
        wall_ms = 1e3 * sum(run()["seconds"])
    ms: dict[str, float] = defaultdict(float)
    kind_of: dict[str, str] = {}
    for event in trace.events():
        name, kind = event.name, _kind(event)
        if str(event.device_type).endswith("CUDA") or (not is_cuda and _is_of_other_thread(event)):
            continue
        key = name if kind_of.setdefault(name, kind) == kind else f"{name} ({kind})"
        kind_of[key] = kind
        ms[key] += (sum(kernel.duration for kernel in event.kernels) if is_cuda else event.self_cpu_time_total) / 1e3
    return as_profile(ms, kind_of, wall_ms, steps)


def _is_of_other_thread(event: Any) -> bool:
    """Whether an event is of a thread of gloo, for which the thread that computes does not wait by itself."""
    return event.name.startswith("gloo:") or event.is_async


def _kind(event: Any) -> str:
    """Say what an operator is: by its name, or by that of what called it."""
    place = event
    while place is not None:
        for kind, pattern in _RULES:
            if pattern.search(place.name):
                return kind
        place = place.cpu_parent
    return ELEMENTWISE
