"""Programs that XLA or JAX compiles to something else than was meant, found in the compiled step.

[Note: known miscompiles]
Each entry of `MISCOMPILES` states the versions that have the fault, what to look for in the program, and a remedy. The
program is searched with every version, since the compiled text proves the fault and a version does not. `jfsdp plan`,
`jfsdp audit` and the first compilation of a run on GPUs search for all of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any

from jfsdp.compat import FUSED_ATTENTION
from jfsdp.context.rows import SCOPE
from jfsdp.jaxprs import all_eqns, describe, is_literal
from jfsdp.plan.hlo.collectives import collective_kind
from jfsdp.plan.hlo.parse import Instruction, Module, parse_module
from jfsdp.plan.hlo.slices import find_wrong_slices
from jfsdp.plan.hlo.trip_counts import runs, walk
from jfsdp.plan.time.work import flops_by_dtype
from jfsdp.plan.traffic.checks import Finding, stated_flops
from jfsdp.train.step.step import TrainStep

_SUMS = ("all-reduce", "reduce-scatter")
_COUNTS = 1024  # smaller sums of whole numbers are flags and counters
# Operations on cuDNN's statistics that keep them for the backward.
_KEEPS = ("reshape", "squeeze", "broadcast_in_dim", "convert_element_type", "copy", "copy_p", "optimization_barrier")
_KEEPS += ("name", "sharding_constraint", "transpose")
_HAS_NONE = ("dot_product_attention", "stop_gradient")  # in names of operations without this derivative
Found = Iterator[tuple[str, str]]  # facts, and the source line or operation


@dataclasses.dataclass(frozen=True)
class Program:
    """A compiled program; `jaxpr` is its trace, which some faults need, and `num_devices` share its operations."""

    module: Module
    jaxpr: Any = None
    num_devices: int = 1


@dataclasses.dataclass(frozen=True)
class Miscompile:
    """A known fault.

    Attributes:
      name: of the finding.
      versions: those in which it was seen, and the first that is right.
      result: what goes wrong on the GPU.
      remedy: what to change.
      issue: upstream; "" if there is none.
      find: yields the facts and the place of each occurrence.
      is_note: whether it may be intended, so that an audit does not fail.
    """

    name: str
    versions: str
    result: str
    remedy: str
    issue: str
    find: Callable[[Program], Found]
    is_note: bool = False


def _slices(program: Program) -> Found:
    for wrong in find_wrong_slices(program.module):
        stack, inst = wrong.stack, wrong.instruction
        facts = (
            f"the first iterations of a loop request slices {wrong.requested[0]} and {wrong.requested[1]} of "
            f"{stack.dtype}{list(stack.dims)} in {stack.memory} memory, and XLA compiled them to byte offsets "
            f"{wrong.bytes_taken[0]} and {wrong.bytes_taken[1]}"
        )
        yield f"{inst.name}: {facts}", _place(inst)


def _narrow_sums(program: Program) -> Found:
    for _, inst, times in walk(program.module):
        sums = [inner for inner in _with_wrapped(program.module, inst) if collective_kind(inner) in _SUMS]
        for inner in sums:
            wide = [shape for shape in inner.shapes if shape.num_elements > _COUNTS]
            narrow = [shape for shape in wide if shape.dtype.startswith(("f8", "s8", "u8", "s4", "u4"))]
            adds = program.module.computations.get(inner.attribute("to_apply"))
            if narrow and (adds is None or adds.root.opcode == "add"):
                kind, shape = collective_kind(inner), narrow[0]
                yield f"{inner.name}: {kind} of {shape.dtype}{list(shape.dims)}, {times} times", _place(inner)


def _dropped_statistics(program: Program) -> Found:
    bodies = (
        [program.jaxpr, *(body for eqn in all_eqns(program.jaxpr) for body in _bodies(eqn))] if program.jaxpr else []
    )
    for body in bodies:
        calls = [eqn for eqn in body.eqns if eqn.primitive.name in FUSED_ATTENTION and len(eqn.outvars) > 1]
        own = [eqn for eqn in calls if SCOPE not in str(eqn.source_info.name_stack)]
        kept = {eqn.outvars[1]: eqn for eqn in own}
        for eqn in body.eqns:
            used = [atom for atom in eqn.invars if not is_literal(atom) and atom in kept]
            if used and eqn.primitive.name in _KEEPS:
                kept |= dict.fromkeys(eqn.outvars, kept[used[0]])
            elif used and not any(name in eqn.primitive.name for name in _HAS_NONE) and not list(_bodies(eqn)):
                yield f"{describe(eqn)} computes with the statistics of cuDNN's attention", describe(kept[used[0]])


def _bodies(eqn: Any) -> Iterator[Any]:
    for value in eqn.params.values():
        for item in value if isinstance(value, tuple | list) else (value,):
            inner = getattr(item, "jaxpr", item)
            if hasattr(inner, "eqns"):
                yield inner


def _ragged(program: Program) -> Found:
    for computation, inst, _ in walk(program.module):
        inside = [inner.opcode for inner in _with_wrapped(program.module, inst)]
        if any("ragged-all-to-all" in opcode for opcode in inside) and inst.opcode.endswith("-start"):
            users = [user.index for user in computation.users.get(inst.name, ())]
            if users and min(users) > inst.index + 1:
                between = min(users) - inst.index - 1
                yield f"{inst.name}: {between} operations run during a ragged all-to-all", _place(inst)


def _products(program: Program) -> Found:
    stated = stated_flops(program.jaxpr, program.num_devices) if program.jaxpr else {}
    if not stated.get("float8"):
        return
    found = {dtype: flops for dtype, (_, flops) in flops_by_dtype(program.module).items()}
    others, known = (sum(flops for dtype, flops in x.items() if dtype != "float8") for x in (found, stated))
    if others > 1.01 * known:
        wide = ", ".join(dtype for dtype in found if dtype != "float8")
        yield f"{others - known:.3g} FLOPs per device and step are stated in float8 and computed in {wide}", ""


def _rematerialized(program: Program) -> Found:
    again = [inst for _, inst, _ in walk(program.module) if ".remat" in inst.name]
    if again:
        yield f"{len(again)} operations are computed again, first {again[0].name}", _place(again[0])


def _branches(program: Program) -> Found:
    for _, inst, _ in walk(program.module):
        if inst.opcode == "conditional":
            inside = [inner for name in inst.called for inner in _below(program.module, name)]
            if found := [inner for inner in inside if collective_kind(inner)]:
                first = f"{collective_kind(found[0])} {found[0].name}"
                yield f"{inst.name}: a branch has {len(found)} collectives, first {first}", _place(inst)


def _below(module: Module, name: str) -> Iterator[Instruction]:
    for inst in module.computations[name].instructions:
        yield from _with_wrapped(module, inst)
        for inner, _ in runs(inst):
            yield from _below(module, inner)


def _with_wrapped(module: Module, inst: Instruction) -> Iterator[Instruction]:
    """Yield an instruction, and those that an asynchronous wrapper or a fusion runs."""
    yield inst
    for name in inst.called if inst.opcode in ("async-start", "call-start", "fusion", "fusion-start") else ():
        yield from module.computations[name].instructions


def _place(inst: Instruction) -> str:
    return inst.source or inst.op_name


MISCOMPILES = (
    Miscompile(
        "wrong-slice",
        "jaxlib before 0.11.1",
        "wrong values on a GPU, without an error",
        "use jaxlib 0.11.1 or newer, which fixes this for offloaded activations, or keep them on the device",
        "openxla/xla#46231",
        _slices,
    ),
    Miscompile(
        "narrow-sum",
        "seen in JAX 0.10.2 to 0.12",
        "the sum is rounded, or overflows, in 8 bits at every step of the collective",
        "exchange codes and sum them in float32, as reduce_wire of MixedPrecisionPolicy does",
        "",
        _narrow_sums,
    ),
    Miscompile(
        "dropped-gradient",
        "seen in JAX 0.10.2 to 0.12",
        "JAX drops the derivative of these statistics without an error",
        "compute the softmax without return_residual, or use jfsdp.attention, which merges parts with a derivative; "
        "apply jax.lax.stop_gradient to statistics that are only logged",
        "",
        _dropped_statistics,
    ),
    Miscompile(
        "ragged-overlap",
        "seen in JAX 0.10 and 0.11",
        "wrong values in the first backward on a GPU",
        "disable the latency-hiding scheduler (xla_gpu_enable_latency_hiding_scheduler=False), or use jfsdp.experts",
        "marin-community/marin#8077",
        _ragged,
    ),
    Miscompile(
        "product-dtype",
        "every version",
        "the products are computed in a wider dtype at half the speed",
        "pass float8 operands to jax.lax.dot_general, as jfsdp.float8_dot_general does, and scale the result",
        "",
        _products,
    ),
    Miscompile(
        "rematerialized",
        "every version",
        "XLA repeats operations near the memory limit, with their collectives",
        "disable the pass (xla_disable_hlo_passes=rematerialization), and give the units a remat policy",
        "",
        _rematerialized,
        is_note=True,
    ),
    Miscompile(
        "branch",
        "every version",
        "devices that take different branches wait for each other and hang",
        "compute both branches and select with jnp.where, or make sure that all devices take the same branch",
        "",
        _branches,
        is_note=True,
    ),
)


def check_step(step: TrainStep, batch: Any) -> list[Finding]:
    """Return the known miscompiles of a step on the devices of its mesh.

    Cost: a lowering, and a compilation if JAX's cache does not have the program.

    Args:
      batch: a global batch, or its shapes.
    """
    traced = step.trace(step.abstract_state(), batch)
    module = parse_module(traced.lower().compile().as_text() or "")
    return find_miscompiles(module, traced.jaxpr.jaxpr, step.layout.num_shards(step.layout.data_axes))


def find_miscompiles(module: Module, jaxpr: Any = None, num_devices: int = 1) -> list[Finding]:
    """Return the known miscompiles of a program; see [Note: known miscompiles].

    Args:
      jaxpr: the trace of the step; None: faults that need it are not searched for.
      num_devices: over which XLA splits the operations of the trace.
    """
    program = Program(module, jaxpr, num_devices)
    return [
        Finding(
            one.name,
            f"{facts}: {one.result} ({', '.join(filter(None, (one.versions, one.issue)))}); {one.remedy}",
            0.0,
            "",
            where,
        )
        for one in MISCOMPILES
        for facts, where in one.find(program)
    ]


NOTES = tuple(one.name for one in MISCOMPILES if one.is_note)
