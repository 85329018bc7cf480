"""Where the time of a JAX step goes: the profiler's runs of HLO instructions, and what the program says that these are.

On CPUs an instruction's event ends when its work is handed to other threads, and a second event, "end: NAME", tells
when that work was done; both carry one number. Instructions may overlap, and then share the time (`share_time`). A
loop's own event spans what it runs, and does not count.
"""

from __future__ import annotations

import re
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax

from jfsdp.plan.program.collectives import collective_kind
from jfsdp.plan.program.hlo import Instruction, Module, parse_module

from .kinds import ATTENTION, COLLECTIVE, COPY, ELEMENTWISE, MATMUL, OPTIMIZER, as_profile, share_time

_OUTER = {"while", "conditional", "call"}
_MOVING = {"parameter", "constant", "bitcast", "copy", "transpose", "reshape", "slice", "dynamic-slice", "concatenate"}
_MOVING |= {"dynamic-update-slice", "broadcast", "pad", "tuple", "get-tuple-element"}
_GEMM = re.compile(r"gemm|matmul|cublas|dot|onednn")
_NS_PER_MS = 1e6


def profile(run: Callable[[], Any], steps: int, hlo: str, num_devices: int | None) -> dict[str, Any]:
    """Run some steps under the profiler; return milliseconds of a step and device.

    Args:
      run: takes the steps and returns their seconds under "seconds".
      hlo: the text of the step's compiled program.
      num_devices: on how many it runs; None: as many as the profile shows.

    Returns:
      `step_ms`, `kinds` (ms by kind) and `longest`: kind, name and ms of the instructions that took longest.
    """
    with tempfile.TemporaryDirectory() as directory:
        how = jax.profiler.ProfileOptions()
        how.python_tracer_level = 0
        jax.profiler.start_trace(directory, profiler_options=how)
        wall_ms = 1e3 * sum(run()["seconds"])
        jax.profiler.stop_trace()
        (file,) = Path(directory).rglob("*.xplane.pb")
        data = jax.profiler.ProfileData.from_file(str(file))
    module = parse_module(hlo)
    kind_of = _kinds(module)
    spans: dict[Any, list[tuple[float, float, str]]] = defaultdict(list)
    for device, begin, end, name in _runs(data, module.name):
        if name in kind_of:
            spans[device].append((begin, end, name))
    ms: dict[str, float] = defaultdict(float)
    for each in spans.values():
        for name, ns in share_time(each).items():
            ms[name] += ns / _NS_PER_MS / (num_devices or len(spans))
    found = as_profile(ms, kind_of, wall_ms, steps)
    stated = {i.name: i.op_name for c in module.computations.values() for i in c.instructions}
    for one in found["longest"]:
        one["name"] = f"{one['name']}: {_short(stated[one['name']])}"
    return found


def _runs(data: Any, module: str) -> Iterator[tuple[Any, float, float, str]]:
    """Yield device, begin, end and instruction of each run, in nanoseconds."""
    begun: dict[int, tuple[Any, float, float, str]] = {}
    ended: dict[int, float] = {}
    planes = [plane for plane in data.planes if plane.name.startswith("/device:GPU")] or list(data.planes)
    for plane in planes:
        for line in plane.lines:
            if plane.name.startswith("/device:") and not line.name.startswith("Stream"):
                continue  # what the profiler derives of the streams
            for event in line.events:
                stats = dict(event.stats)
                end = event.start_ns + event.duration_ns
                if event.name.startswith("end: ") and "_c" in stats:
                    ended[stats["_c"]] = end
                elif stats.get("hlo_module") == module and "hlo_op" in stats:
                    device = stats.get("device_ordinal", plane.name)
                    run = (device, event.start_ns, end, str(stats["hlo_op"]))
                    if "_p" in stats:
                        begun[stats["_p"]] = run
                    else:
                        yield run
    for number, (device, begin, end, name) in begun.items():
        yield device, begin, max(end, ended.get(number, end)), name


def _kinds(module: Module) -> dict[str, str]:
    return {
        instruction.name: _kind(module, instruction)
        for computation in module.computations.values()
        for instruction in computation.instructions
        if instruction.opcode not in _OUTER
    }


def _kind(module: Module, instruction: Instruction) -> str:
    """Say what an instruction is: by its opcode, the scopes of its name, and what its fusion holds.

    Attention is what was traced in the models' attention.py, or batched by `jax.nn.dot_product_attention` (`vmap`).
    """
    inside = [one for name in instruction.called for one in module.computations[name].instructions]
    parts = [instruction, *inside]
    scopes = instruction.op_name
    if collective_kind(instruction) is not None or any(collective_kind(one) is not None for one in inside):
        return COLLECTIVE
    if re.search(r"\bupdate\b|jfsdp\.update", scopes):
        return OPTIMIZER
    is_of_attention = any(frame.startswith("attention.py") for frame in instruction.stack)
    if is_of_attention or "vmap(" in scopes or "fmha" in instruction.attributes:
        return ATTENTION
    if any(one.opcode in ("dot", "convolution") or _is_gemm(one) for one in parts):
        return MATMUL
    return COPY if all(one.opcode in _MOVING for one in inside or parts) else ELEMENTWISE


def _is_gemm(instruction: Instruction) -> bool:
    target = instruction.attribute("custom_call_target").lower()
    return instruction.opcode == "custom-call" and bool(_GEMM.search(target))


def _short(op_name: str) -> str:
    """Return the end of a name stack, which says more than its beginning."""
    outer = ("while", "body", "closed_call", "shard_map")
    return "/".join(part for part in op_name.split("/") if part not in outer)[-70:]
