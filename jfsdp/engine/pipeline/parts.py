"""The parts of a traced step in a pipeline: before the stack of layers, the layers, and after them.

[Note: three parts]
A trace contains one scan over the layers that are cut into stages. The part before it computes the initial carry
(`enter`: an embedding), and the part after it computes the loss from the final carry (`leave`: a head). Each part is
reduced to the equations that it needs. `leave` recomputes values of the first part that it reads (targets, a tied
table, a path around the layers). All stages together compute both parts for the one microbatch of a tick. In these
parts, mesh axis `pipe` is a model axis like `tensor`, so weights and vocabulary may be cut over it.
Each stage computes other inputs of its layers (a rotary table, a mask, dropout keys) for its current microbatch
(`layer_inputs`). They are not sent, and must not depend on weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jfsdp import jaxprs
from jfsdp.compat import ClosedJaxpr, core, dce_jaxpr  # pyright: ignore[reportPrivateImportUsage]
from jfsdp.engine.driver.program import Block, Call, Loop, NamedCall, inlined, named, read_loop, read_program
from jfsdp.engine.unit import Traced
from jfsdp.layout.mesh import PIPE
from jfsdp.layout.precision import is_key

_REMEDY = f"give the devices of axis {PIPE!r} to another axis"
_LEAVE_OUT = "leave all stacks but one out of units= (they are then gathered once per step, and stay whole), or "


@dataclasses.dataclass(frozen=True)
class Parts:
    """A traced loss, split at its stack of layers; see [Note: three parts].

    Attributes:
      loop: the scan over layers.
      shards: by index of an input of the trace, the name of the parameter at rest that it is.
      num_flat: the number of inputs of the trace before the root's weights.
    """

    closed: Any
    loop: Loop
    at: int
    calls: Mapping[str, NamedCall]
    shards: Mapping[int, str]
    num_flat: int

    @property
    def carried(self) -> list[Any]:
        """The initial carry of the layers."""
        return self.loop.split(self.loop.inputs)[1]

    @property
    def begins(self) -> list[Any]:
        """The inputs of a stage: separate variables, one for each value of the carry.

        In the trace, `carried` may contain literals, a variable twice, or a variable that the layers also read.
        """
        return self.loop.split(self.loop.body.inputs)[1]

    @property
    def layer_inputs(self) -> list[Any]:
        """Other inputs of the layers: the loop's constants, and its xs that are not weights."""
        consts, _, xs = self.loop.split(self.loop.inputs)
        own = {self.closed.jaxpr.invars[place] for place in self.shards}
        return list(dict.fromkeys(atom for atom in (*consts, *xs) if not jaxprs.is_literal(atom) and atom not in own))

    def enter(self) -> Block:
        """Return the program from the inputs of the trace to the initial carry."""
        return self._read(self.closed.jaxpr.replace(outvars=self.carried))

    def leave(self, num_out: int) -> Block:
        """Return the program from the inputs of the trace and the final carry to the first outputs.

        Its inputs are the trace's inputs without the root's weights, then the loop's outputs, then these weights.

        Raises:
          ValueError: if it reads outputs of single layers.
        """
        jaxpr, given = self.closed.jaxpr, self.loop.outputs
        invars = [*jaxpr.invars[: self.num_flat], *given, *jaxpr.invars[self.num_flat :]]
        eqns = [eqn for place, eqn in enumerate(jaxpr.eqns) if place != self.at]
        jaxpr = _only_needed(jaxpr.replace(invars=invars, eqns=eqns, outvars=jaxpr.outvars[:num_out]))
        ys = set(given[self.loop.num_carry :])
        if any(atom in ys for eqn in jaxpr.eqns for atom in eqn.invars if not jaxprs.is_literal(atom)):
            raise ValueError(
                "the loss reads outputs of single layers (hidden states of inner layers, a loss per layer), which "
                f"stages of a pipeline (mesh axis {PIPE!r}) do not send on; sum them in the carry of the layers, or "
                f"{_REMEDY}"
            )
        return self._read(jaxpr)

    def compute_layer_inputs(self, flat: Sequence[Any]) -> dict[Any, Any]:
        """Compute `layer_inputs` from the inputs of the trace. Moves no data."""
        jaxpr = _only_needed(self.closed.jaxpr.replace(outvars=self.layer_inputs))
        values = core.eval_jaxpr(jaxpr, self.closed.consts, *flat, *[None] * (len(jaxpr.invars) - len(flat)))
        return dict(zip(self.layer_inputs, values, strict=True))

    def stage(self, length: int) -> Block:
        """Return the program of `length` layers, from their weights, `layer_inputs` and `begins` to the carry."""
        consts, _, xs = self.loop.split(self.loop.inputs)
        given, counts = [*consts, *self.begins, *xs], (self.loop.num_consts, self.loop.num_carry)
        loop = Loop(given, self.loop.outputs, length, *counts, self.loop.body)
        inputs = list(dict.fromkeys(atom for atom in loop.inputs if not jaxprs.is_literal(atom)))
        return Block(inputs, [loop], loop.outputs[: loop.num_carry], {})

    def _read(self, jaxpr: Any) -> Block:
        return read_program(ClosedJaxpr(_only_needed(jaxpr), self.closed.consts), self.shards, self.calls)[0]


def part(traced: Traced, calls: Mapping[str, NamedCall], staged: Collection[str]) -> Parts:
    """Split a trace at its stack of layers.

    Args:
      traced: the root's call.
      calls: the calls of units in it.
      staged: the units whose layers are cut into stages.

    Raises:
      ValueError: if no scan, or several, run over the layers; if layers are also called elsewhere; if another input of
        a layer depends on weights; if the model calls back to Python.
    """
    shards = {place: path for place, path in enumerate(traced.names[: traced.num_flat]) if path}
    _check_callbacks(traced.jaxpr)
    closed = inlined(ClosedJaxpr(traced.jaxpr, ()), calls)
    known = {closed.jaxpr.invars[place]: (path, 0) for place, path in shards.items()}
    loops = {place: read_loop(eqn, known, calls, 0) for place, eqn in enumerate(closed.jaxpr.eqns)}
    found = {place: loop for place, loop in loops.items() if loop and any(x.unit in staged for x in loop.calls)}
    if len(found) != 1:
        saw, instead = _explain(closed.jaxpr, [*found.values()], calls, staged)
        raise ValueError(
            f"{saw}, and a pipeline (mesh axis {PIPE!r}) needs one forward scan over its layers, at the top of the "
            f"model; {instead}{_REMEDY}"
        )
    ((at, loop),) = found.items()
    # Flax traces the body of a Linen scan once more, only to check it: a call without outputs.
    rest = [eqn for place, eqn in enumerate(closed.jaxpr.eqns) if place != at and eqn.outvars]
    outside, units = closed.jaxpr.replace(eqns=rest), {call.unit for call in loop.calls}
    for eqn in jaxprs.all_eqns(outside):
        call = calls.get(str(eqn.params.get("name", "")))
        if call is not None and call.unit in staged:
            scan, instead = (
                ("its layers too", "") if call.unit in units else (f"the layers of {min(units)!r}", _LEAVE_OUT)
            )
            raise ValueError(
                f"unit {call.unit!r} is called outside of the scan over {scan}, and stages of a pipeline (mesh axis "
                f"{PIPE!r}) call only their own layers; {instead}{_REMEDY}"
            )
    parts = Parts(closed, loop, at, calls, shards, traced.num_flat)
    if keys := [atom for atom in parts.carried if is_key(atom.aval)]:
        raise ValueError(
            f"the carry of the layers contains a random key (shape {keys[0].aval.shape}), which stages of a pipeline "
            f"(mesh axis {PIPE!r}) do not send; give each layer a separate key (split_rngs), or {_REMEDY}"
        )
    _check_body(loop, staged)
    _check_layer_inputs(parts, traced.names)
    return parts


def _explain(
    jaxpr: Any, loops: Sequence[Loop], calls: Mapping[str, NamedCall], staged: Collection[str]
) -> tuple[str, str]:
    """Describe how a model's layers differ from one scan, and the remedy."""
    stacks = list(dict.fromkeys(call.unit for loop in loops for call in loop.calls if call.unit in staged))
    if len(loops) > 1:
        named_by = [{call.unit for call in loop.calls if call.unit in staged} for loop in loops]
        if set.intersection(*named_by):
            return f"{len(loops)} scans run over the layers of {stacks[0]!r}", ""
        return f"{len(loops)} scans run over the stacks {', '.join(map(repr, stacks))}", _LEAVE_OUT
    found = _around(jaxpr, calls, staged)
    if found is None:
        stacks = ", ".join(map(repr, sorted(staged)))
        return f"unit {stacks} is never called", "leave it out of units=, or "
    unit, around = found
    names = [eqn.primitive.name for eqn in around]
    if not names:
        return f"the layers of {unit!r} are called one by one", "scan over them (nnx.scan, nn.scan), or "
    if remat := [place for place, name in enumerate(names) if name in ("checkpoint", "remat", "remat2")]:
        where = "inside" if "scan" in names[: remat[0]] else "around"
        return f"the model has a remat {where} the scan over {unit!r}", "use remat= instead, or "
    if names == ["scan"] and around[0].params["reverse"]:
        return f"the scan over {unit!r} runs in reverse", "stack the layers in the order of their calls, or "
    if names == ["scan"]:
        return (
            f"the scan over {unit!r} takes modified layers (a part of them, another order, a cast)",
            "pass it the stack unchanged, or ",
        )
    return f"the layers of {unit!r} are called inside of {', in '.join(names[::-1])}", ""


def _around(jaxpr: Any, calls: Mapping[str, NamedCall], staged: Collection[str]) -> tuple[str, list[Any]] | None:
    """Return the unit of the first call of layers, and the equations around it from outside to inside, except `jit`."""
    for eqn in jaxpr.eqns:
        call = calls.get(str(eqn.params.get("name", "")))
        if call is not None and call.unit in staged:
            return call.unit, []
        for found in (_around(inner, calls, staged) for inner in jaxprs.inner_jaxprs(eqn)):
            if found is not None:
                return found[0], [eqn][: eqn.primitive.name not in ("jit", "pjit")] + found[1]
    return None


def _check_callbacks(jaxpr: Any) -> None:
    if found := next(filter(jaxprs.calls_back, jaxprs.all_eqns(jaxpr)), None):
        raise ValueError(
            f"the model calls Python (jax.debug.print, {found.primitive.name}), which stages of a pipeline (mesh axis "
            f"{PIPE!r}) would also do in ticks without work, with meaningless values; return these values as metrics "
            f"in the loss's aux, or {_REMEDY}"
        )


def _check_body(loop: Loop, staged: Collection[str]) -> None:
    for item in loop.body.items:
        if isinstance(item, Call) and (item.unit not in staged or not all(item.shards.values())):
            raise ValueError(
                f"unit {item.unit!r} is called in every layer with the same weights, and stages of a pipeline (mesh "
                f"axis {PIPE!r}) share none; {_REMEDY}"
            )


def _check_layer_inputs(parts: Parts, names: Sequence[str]) -> None:
    jaxpr = parts.closed.jaxpr.replace(outvars=parts.layer_inputs)
    weights = [place in parts.shards or place >= parts.num_flat for place in range(len(jaxpr.invars))]
    by_layer, origins = parts.loop.split(parts.loop.inputs)[2], jaxprs.passes_through(jaxpr)
    for atom, depends, at in zip(parts.layer_inputs, jaxprs.depends_on(jaxpr, weights), origins, strict=True):
        if depends and at is not None and any(atom is x for x in by_layer):
            raise ValueError(
                f"{names[at]}: this weight of the layers is not in a unit that they call, and stages of a pipeline "
                f"(mesh axis {PIPE!r}) only have weights of such units; name the class of the whole layer in units=, "
                f"or {_REMEDY}"
            )
        if depends:
            raise ValueError(
                f"the layers read a value of shape {atom.aval.shape} that depends on weights and is not in their carry "
                "(an encoder's output, learned positions), and stages of a pipeline (mesh axis "
                f"{PIPE!r}) compute such inputs without weights, trained or frozen; put it into the carry, where each "
                "layer changes it (x * 1.0 is enough: a value that all layers return unchanged counts as read from "
                f"outside), or {_REMEDY}"
            )


def without_weights(traced: Traced, calls: Mapping[str, NamedCall], wanted: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Return the program of some outputs of a trace, and which inputs it reads; `calls` as in `part`.

    Raises:
      ValueError: if it reads weights.
    """
    jaxpr, is_read = dce_jaxpr(_inline(traced.jaxpr, calls), list(wanted))
    for place, name in enumerate(traced.names):
        if is_read[place] and name:
            raise ValueError(
                f"{name}: the model's other state, or the weight of a loss that is scaled, depends on this parameter, "
                f"and stages of a pipeline (mesh axis {PIPE!r}) compute it without parameters; {_REMEDY}"
            )
    return jaxpr, is_read


def _inline(jaxpr: Any, calls: Mapping[str, NamedCall]) -> Any:
    """Replace units' calls by their code: the calls' derivatives hide which outputs need weights.

    Gathers are dropped too, so equations that read weights must not be run.
    """

    def inline_one(eqn: Any) -> Any:
        call, inner = named(eqn, calls), eqn.params.get("jaxpr")
        if call is None and not isinstance(inner, ClosedJaxpr):
            return eqn
        body = ClosedJaxpr(call.traced.jaxpr, ()) if call else ClosedJaxpr(_inline(inner.jaxpr, calls), inner.consts)
        return eqn.replace(params={**eqn.params, "jaxpr": body})

    return jaxpr.replace(eqns=[inline_one(eqn) for eqn in jaxpr.eqns])


def _only_needed(jaxpr: Any) -> Any:
    return jaxprs.keep_outputs(jaxpr, [True] * len(jaxpr.outvars))
