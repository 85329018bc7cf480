"""The parts of a traced step as a pipeline: what comes before the stack of layers, its layers, and what comes after.

[Note: three parts]
A trace shows the one scan over layers that are cut into stages. What its carry starts from is computed by the part
before (`enter`: an embedding), and its loss from what the carry ends as by the part after (`leave`: a head), each cut
down to what is needed for that. What `leave` reads of the part before (targets, a tied table, a path around the layers)
it computes again. Both are computed by all stages together, for the one microbatch of a tick: mesh axis `pipe` is an
axis of the model there, as `tensor` is, so weights and vocabulary may be cut over it.
What else a layer reads (a rotary table, a mask, keys of dropout) each stage computes for the microbatch it is at
(`beside`). So nothing of it is sent, and it must not depend on weights.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from jfsdp.compat import ClosedJaxpr, core, dce_jaxpr  # pyright: ignore[reportPrivateImportUsage]
from jfsdp.engine import dataflow
from jfsdp.engine.driver.program import Block, Call, Loop, NamedCall, inlined, named, read_loop, read_program
from jfsdp.engine.unit import Traced
from jfsdp.layout.mesh import PIPE
from jfsdp.layout.precision import is_key

_REMEDY = f"give the devices of axis {PIPE!r} to another axis"
_LEAVE_OUT = "leave all stacks but one out of units= (they are then gathered once per step, and stay whole), or "


@dataclasses.dataclass(frozen=True)
class Parts:
    """A traced loss, cut at its stack of layers; see [Note: three parts].

    Attributes:
      loop: the scan over layers.
      shards: by variable of the trace, the parameter at rest that it is.
      num_flat: how many inputs of the trace are no weights of the root.
    """

    closed: Any
    loop: Loop
    at: int
    calls: Mapping[str, NamedCall]
    shards: Mapping[int, str]
    num_flat: int

    @property
    def carried(self) -> list[Any]:
        """What the layers hand on, as it comes in."""
        return self.loop.split(self.loop.inputs)[1]

    @property
    def begins(self) -> list[Any]:
        """What a stage begins with: variables of its own, one for each value that the layers hand on.

        In the trace these may be numbers, one variable several times, or one that the layers read besides.
        """
        return self.loop.split(self.loop.body.inputs)[1]

    @property
    def beside(self) -> list[Any]:
        """What layers read besides: the loop's constants and its xs that are no weights."""
        consts, _, xs = self.loop.split(self.loop.inputs)
        own = {self.closed.jaxpr.invars[place] for place in self.shards}
        return list(dict.fromkeys(atom for atom in (*consts, *xs) if not dataflow.is_literal(atom) and atom not in own))

    def enter(self) -> Block:
        """Return the program from the inputs of the trace to what the layers begin with."""
        return self._read(self.closed.jaxpr.replace(outvars=self.carried))

    def leave(self, num_out: int) -> Block:
        """Return the program from the inputs of the trace and what the layers end with to the first outputs.

        Its inputs are those of the trace but for the weights of the root; the loop's outputs; these weights.

        Raises:
          ValueError: if it reads what single layers give out.
        """
        jaxpr, given = self.closed.jaxpr, self.loop.outputs
        invars = [*jaxpr.invars[: self.num_flat], *given, *jaxpr.invars[self.num_flat :]]
        eqns = [eqn for place, eqn in enumerate(jaxpr.eqns) if place != self.at]
        jaxpr = _only_needed(jaxpr.replace(invars=invars, eqns=eqns, outvars=jaxpr.outvars[:num_out]))
        ys = set(given[self.loop.num_carry :])
        if any(atom in ys for eqn in jaxpr.eqns for atom in eqn.invars if not dataflow.is_literal(atom)):
            raise ValueError(
                "the loss reads what single layers give out (hidden states of inner layers, a loss per layer), which "
                f"stages of a pipeline (mesh axis {PIPE!r}) do not hand on; sum it in what the layers carry, or "
                f"{_REMEDY}"
            )
        return self._read(jaxpr)

    def beside_of(self, flat: Sequence[Any]) -> dict[Any, Any]:
        """Compute what layers read besides, from the inputs of the trace. Moves no data."""
        jaxpr = _only_needed(self.closed.jaxpr.replace(outvars=self.beside))
        values = core.eval_jaxpr(jaxpr, self.closed.consts, *flat, *[None] * (len(jaxpr.invars) - len(flat)))
        return dict(zip(self.beside, values, strict=True))

    def stage(self, length: int) -> Block:
        """Return the program of a stage of so many layers: from weights, what it reads besides and `begins`, to the
        carry."""
        consts, _, xs = self.loop.split(self.loop.inputs)
        given, counts = [*consts, *self.begins, *xs], (self.loop.num_consts, self.loop.num_carry)
        loop = Loop(given, self.loop.outputs, length, *counts, self.loop.body)
        inputs = list(dict.fromkeys(atom for atom in loop.inputs if not dataflow.is_literal(atom)))
        return Block(inputs, [loop], loop.outputs[: loop.num_carry], {})

    def _read(self, jaxpr: Any) -> Block:
        return read_program(ClosedJaxpr(_only_needed(jaxpr), self.closed.consts), self.shards, self.calls)[0]


def part(traced: Traced, calls: Mapping[str, NamedCall], staged: Collection[str]) -> Parts:
    """Cut a trace at its stack of layers.

    Args:
      traced: the root's call.
      calls: the calls of units in it.
      staged: the units whose layers are cut into stages.

    Raises:
      ValueError: if no scan, or several, run over the layers; if they are called elsewhere too; if what a layer reads
        besides depends on weights; if the model prints.
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
            f"{saw}, and stages of a pipeline (mesh axis {PIPE!r}) are cut from one scan over layers, forward, at the "
            f"top of the model; {instead}{_REMEDY}"
        )
    ((at, loop),) = found.items()
    # Flax traces the body of a Linen scan once more, for nothing but its check: a call without outputs.
    rest = [eqn for place, eqn in enumerate(closed.jaxpr.eqns) if place != at and eqn.outvars]
    outside, own = closed.jaxpr.replace(eqns=rest), {call.unit for call in loop.calls}
    for eqn in dataflow.all_eqns(outside):
        call = calls.get(str(eqn.params.get("name", "")))
        if call is not None and call.unit in staged:
            scan, instead = ("its layers too", "") if call.unit in own else (f"the layers of {min(own)!r}", _LEAVE_OUT)
            raise ValueError(
                f"unit {call.unit!r} is called outside of the scan over {scan}, and stages of a pipeline (mesh axis "
                f"{PIPE!r}) have theirs alone; {instead}{_REMEDY}"
            )
    parts = Parts(closed, loop, at, calls, shards, traced.num_flat)
    if keys := [atom for atom in parts.carried if is_key(atom.aval)]:
        raise ValueError(
            f"the layers hand on a random key (shape {keys[0].aval.shape}), which stages of a pipeline (mesh axis "
            f"{PIPE!r}) do not send; give each layer a key of its own (split_rngs), or {_REMEDY}"
        )
    _check_body(loop, staged)
    _check_beside(parts, traced.names)
    return parts


def _explain(
    jaxpr: Any, loops: Sequence[Loop], calls: Mapping[str, NamedCall], staged: Collection[str]
) -> tuple[str, str]:
    """Say what a model does that is not one scan over layers, and what to do instead."""
    stacks = list(dict.fromkeys(call.unit for loop in loops for call in loop.calls if call.unit in staged))
    if len(loops) > 1:
        named_by = [{call.unit for call in loop.calls if call.unit in staged} for loop in loops]
        if set.intersection(*named_by):
            return f"{len(loops)} scans run over the layers of {stacks[0]!r}", ""
        return f"{len(loops)} scans run over the stacks {', '.join(map(repr, stacks))}", _LEAVE_OUT
    found = _around(jaxpr, calls, staged)
    if found is None:
        stacks = ", ".join(map(repr, sorted(staged)))
        return f"unit {stacks} is called nowhere", "leave it out of units=, or "
    unit, around = found
    names = [eqn.primitive.name for eqn in around]
    if not names:
        return f"the layers of {unit!r} are called one by one", "scan over them (nnx.scan, nn.scan), or "
    if remat := [place for place, name in enumerate(names) if name in ("checkpoint", "remat", "remat2")]:
        where = "inside" if "scan" in names[: remat[0]] else "around"
        return f"a remat of the model's own is {where} the scan over {unit!r}", "use remat= instead, or "
    if names == ["scan"] and around[0].params["reverse"]:
        return f"the scan over {unit!r} runs in reverse", "stack the layers in the order of their calls, or "
    if names == ["scan"]:
        return (
            f"the scan over {unit!r} takes its layers changed (some of them, another order, a cast)",
            "give it the stack as it is, or ",
        )
    return f"the layers of {unit!r} are called inside of {', in '.join(names[::-1])}", ""


def _around(jaxpr: Any, calls: Mapping[str, NamedCall], staged: Collection[str]) -> tuple[str, list[Any]] | None:
    """Return the unit of the first call of layers, and what stands around it from the outside in, but for `jit`."""
    for eqn in jaxpr.eqns:
        call = calls.get(str(eqn.params.get("name", "")))
        if call is not None and call.unit in staged:
            return call.unit, []
        for found in (_around(inner, calls, staged) for inner in dataflow.inner_jaxprs(eqn)):
            if found is not None:
                return found[0], [eqn][: eqn.primitive.name not in ("jit", "pjit")] + found[1]
    return None


def _check_callbacks(jaxpr: Any) -> None:
    if found := next(filter(dataflow.calls_back, dataflow.all_eqns(jaxpr)), None):
        raise ValueError(
            f"the model calls Python (jax.debug.print, {found.primitive.name}), which stages of a pipeline (mesh axis "
            f"{PIPE!r}) would do where they have no work too, with values of no use; return what it shows as a metric "
            f"in the loss's aux, or {_REMEDY}"
        )


def _check_body(loop: Loop, staged: Collection[str]) -> None:
    for item in loop.body.items:
        if isinstance(item, Call) and (item.unit not in staged or not all(item.shards.values())):
            raise ValueError(
                f"unit {item.unit!r} is called in every layer with the same weights, and stages of a pipeline (mesh "
                f"axis {PIPE!r}) share none; {_REMEDY}"
            )


def _check_beside(parts: Parts, names: Sequence[str]) -> None:
    jaxpr = parts.closed.jaxpr.replace(outvars=parts.beside)
    weights = [place in parts.shards or place >= parts.num_flat for place in range(len(jaxpr.invars))]
    by_layer, origins = parts.loop.split(parts.loop.inputs)[2], dataflow.passes_through(jaxpr)
    for atom, depends, at in zip(parts.beside, dataflow.depends_on(jaxpr, weights), origins, strict=True):
        if depends and at is not None and any(atom is x for x in by_layer):
            raise ValueError(
                f"{names[at]}: this weight of the layers is in no unit that they call, and stages of a pipeline (mesh "
                f"axis {PIPE!r}) have weights of such units only; name the class of the whole layer in units=, or "
                f"{_REMEDY}"
            )
        if depends:
            raise ValueError(
                f"the layers read a value of shape {atom.aval.shape} that depends on weights and is not handed from "
                "layer to layer (an encoder's output, learned positions), and stages of a pipeline (mesh axis "
                f"{PIPE!r}) compute what they read besides without weights, trained or frozen; hand it on in what the "
                "layers carry, where each layer changes it (x * 1.0 is enough: what all hand on as it is counts as "
                f"read from outside), or {_REMEDY}"
            )


def without_weights(traced: Traced, calls: Mapping[str, NamedCall], wanted: Sequence[bool]) -> tuple[Any, list[bool]]:
    """Return the program of some outputs of a trace, and which inputs it reads; `calls` as `part` takes them.

    Raises:
      ValueError: if it reads weights.
    """
    jaxpr, is_read = dce_jaxpr(_opened(traced.jaxpr, calls), list(wanted))
    for place, name in enumerate(traced.names):
        if is_read[place] and name:
            raise ValueError(
                f"{name}: the model's other state, or the weight of a loss that is scaled, depends on this parameter, "
                f"and stages of a pipeline (mesh axis {PIPE!r}) compute it without; {_REMEDY}"
            )
    return jaxpr, is_read


def _opened(jaxpr: Any, calls: Mapping[str, NamedCall]) -> Any:
    """Put what units compute in the place of their calls, whose derivatives hide which output needs weights.

    Gathers go with them: what is left of weights must not be run.
    """

    def open_one(eqn: Any) -> Any:
        call, inner = named(eqn, calls), eqn.params.get("jaxpr")
        if call is None and not isinstance(inner, ClosedJaxpr):
            return eqn
        opened = ClosedJaxpr(call.traced.jaxpr, ()) if call else ClosedJaxpr(_opened(inner.jaxpr, calls), inner.consts)
        return eqn.replace(params={**eqn.params, "jaxpr": opened})

    return jaxpr.replace(eqns=[open_one(eqn) for eqn in jaxpr.eqns])


def _only_needed(jaxpr: Any) -> Any:
    return dataflow.keep_outputs(jaxpr, [True] * len(jaxpr.outvars))
