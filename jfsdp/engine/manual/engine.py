"""Program `manual`: inside a `shard_map` every gather and every reduction stands where a schedule puts it.

[Note: a manual step]
The root is traced once, into a program of calls of units (program.py). The forward runs it and keeps gathers on
their way ahead of the compute, as far as `prefetch` says. The backward runs it in reverse: at each call the next
gathers start first, then the gradient of the call before is reduced, and then the call's own derivative is computed, so
that both have its matmuls to hide behind. Layers of a scan run in a scan, whose carry holds the weights that are on
their way and the gradient that waits; the first and last iterations, where the pattern differs, stand outside it. So no
gather is wasted at either end, and the program does not grow with depth.

The root's own weights are gathered while the last call before their first use computes, and reduced as soon as the
backward has passed that use.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jfsdp.compat import ClosedJaxpr
from jfsdp.engine.at_rest import open_full, rest_of
from jfsdp.engine.engine import Pull
from jfsdp.engine.manual.backward import Backward
from jfsdp.engine.manual.collectives import LocalEngine
from jfsdp.engine.manual.derivatives import Derivatives
from jfsdp.engine.manual.forward import Forward
from jfsdp.engine.manual.program import (
    Call,
    Code,
    Item,
    Loop,
    NamedCall,
    mark_active,
    mark_live,
    part_weights,
    read_program,
)
from jfsdp.engine.manual.schedule import Prefetch, frontiers, steady
from jfsdp.engine.manual.weights import Weights, after
from jfsdp.engine.unit import Arrays, Traced, call_traced
from jfsdp.layout.units import ROOT


@dataclasses.dataclass(frozen=True)
class ManualEngine(LocalEngine):
    """Runs a step by a schedule; see [Note: a manual step].

    Attributes:
      prefetch: how far gathers run ahead.
      is_asked: whether the user asked for a schedule, and is told where there is none.
      calls: the calls of units in the traces so far, by the name that they have there.
    """

    prefetch: Prefetch = dataclasses.field(default_factory=Prefetch)
    is_asked: bool = True
    calls: dict[str, NamedCall] = dataclasses.field(default_factory=dict, compare=False)

    def call_unit(self, name: str, traced: Traced, shards: Arrays, flat: Sequence[Any]) -> list[Any]:
        """Put a call of a unit into the trace under a name; left alone, it gathers where it stands."""
        if name == ROOT:
            return super().call_unit(name, traced, shards, flat)
        movement = self.movement(name, shards)

        def in_place(flat: list[Any], shards: Arrays) -> list[Any]:
            return call_traced(traced, shards, flat, movement)

        label = f"jfsdp_unit_{len(self.calls)}"
        in_place.__name__ = label
        self.calls[label] = NamedCall(name, traced, tuple(sorted(shards)))
        return jax.jit(in_place)(list(flat), shards)

    def vjp(self, traced: Traced, flat: Sequence[Any], source: Arrays) -> tuple[list[Any], Pull]:
        """Run the root by the schedule; see `Engine.vjp`.

        Warns:
          UserWarning: for units that no schedule reaches, and that gather where they are called.
        """
        shards = {place: path for place, path in enumerate(traced.names[: traced.num_flat]) if path}
        step = Step(self, ClosedJaxpr(traced.jaxpr, ()), shards, dict(source))
        if step.in_place and self.is_asked and self.prefetch != Prefetch(0, 0):
            warnings.warn(
                f"units {', '.join(step.in_place[:4])} are called inside another unit, a nested or reversed loop, a "
                "vmap, a derivative or a remat of the model's own, where no schedule reaches them: they are gathered "
                "when they are called, without prefetch; for a remat use jfsdp's own (remat=)",
                stacklevel=2,
            )
        forward = Forward(step)
        outs = forward.run(flat)
        return outs, lambda cotangent, sums: Backward(step, forward.records, sums).run(cotangent)

    def moves(self, call: Call, stage: str | None = None) -> bool:
        """Tell whether a call's weights must be gathered from another device."""
        leaves = [self.layout.by_path[path] for path in call.shards]
        return any(leaf.stage(stage or leaf.source).axes for leaf in leaves)


class Step:
    """One run of a program, forward and backward: what both passes share. It lives as long as the trace of a step.

    Attributes:
      source: all weights, as they are stored.
      block: the program.
      in_place: units that are called where no schedule reaches them.
      order, order_back: the calls of units, forward and backward.
      reached, reached_back: up to which call weights are on their way at each; see `frontiers`.
      scans: by loop, the iterations that run in a scan, forward and backward alike.
      root_vars, shard_vars: by leaf, the variable of the program that is its full weight in the root, or its shard.
      root_kept: what is kept of the root's weights that are gathered again, as they are stored.
      first_use: by item of the program, the stored weights of the root that no item before it reads.
    """

    def __init__(self, engine: ManualEngine, closed: Any, shards: Mapping[int, str], source: Arrays):
        self.engine, self.source = engine, source
        self.block, self.in_place = read_program(closed, shards, engine.calls)
        inputs, root = self.block.inputs, sorted(engine.layout.unit(ROOT).leaves)
        self.root_vars = dict(zip(root, inputs[len(inputs) - len(root) :], strict=True))
        self.shard_vars = {path: inputs[place] for place, path in shards.items()}
        self.derivatives = Derivatives(engine.layout)
        is_trained = self.derivatives.is_trained
        if engine.layout.policy(ROOT).reshard_after_forward:
            part_weights(self.block, self.root_vars)
        variables = self.root_vars | self.shard_vars
        mark_active(self.block, {var for path, var in variables.items() if is_trained(path)}, is_trained)
        mark_live(self.block, set(self.block.outputs[:1]))
        self.order = list(self.block.calls())
        self.order_back = [entry for entry in reversed(self.order) if entry[0].needs_backward]
        names, names_back = ([call.unit for call, _, _ in order] for order in (self.order, self.order_back))
        self.reached = frontiers(names, engine.prefetch.forward, "forward")
        self.reached_back = frontiers(names_back, engine.prefetch.backward, "backward")
        self.scans = {item: self._scanned(item) for item in self.block.items if isinstance(item, Loop)}
        self.first_use = self._first_uses()
        self.root_kept: Arrays = {}
        looped = frozenset(call for call, loop, _ in self.order if loop is not None)
        self.weights = Weights(engine, source, looped)

    def open(self, call: Call, full: Arrays) -> Arrays:
        """Return a call's gathered weights leaf by leaf."""
        layout = self.engine.layout
        return open_full(layout, full, rest_of(layout, call.shards))

    def gather_root(self, names: Sequence[str], tie: Any) -> Arrays:
        """Gather weights of the root; return them leaf by leaf, and keep of them what their policy says."""
        shards = {name: self.source[name] for name in names}
        movement = self.engine.movement(ROOT, shards)
        full = movement.gather(after(shards, tie))
        if self.engine.layout.policy(ROOT).reshard_after_forward and movement.keep is not None:
            self.root_kept |= movement.keep(full)
        return open_full(self.engine.layout, full, dict.fromkeys(full, 0))

    def regather_root(self, names: Sequence[str], tie: Any) -> Arrays:
        """Gather weights of the root again, for the backward."""
        if not self.root_kept:
            return self.gather_root(names, tie)
        kept = {name: self.root_kept[name] for name in names}
        movement = self.engine.movement(ROOT, {name: self.source[name] for name in names})
        full = movement.regather(after(kept, tie))
        return open_full(self.engine.layout, full, dict.fromkeys(full, 0))

    def own(self, item: Item) -> dict[str, Any]:
        """Return the variables of those of the root's weights that an item's backward gathers again, by name."""
        return item.weights if isinstance(item, Code) else {}

    def _scanned(self, loop: Loop) -> tuple[int, int]:
        start = next(place for place, entry in enumerate(self.order) if entry[1] is loop)
        low, high = steady(self.reached, start, len(loop.calls), loop.length)
        back = [place for place, entry in enumerate(self.order_back) if entry[1] is loop]
        if back:
            first, last = steady(self.reached_back, back[0], len(loop.live_calls), loop.length)
            # The first iteration of the backward finds another unit's gradient waiting.
            low, high = max(low, loop.length - last), min(high, loop.length - max(first, 1))
        return (low, high) if high - low > 1 else (0, 0)

    def _first_uses(self) -> dict[int, list[str]]:
        uses: dict[int, list[str]] = {}
        reads = [*([*item.inputs, *self.own(item).values()] for item in self.block.items), self.block.outputs]
        for name in dict.fromkeys(map(self.engine.layout.stored_name.__getitem__, self.root_vars)):
            own = [self.root_vars[path] for path in self.engine.layout.by_path[name].holds]
            readers = (place for place, atoms in enumerate(reads) if any(x is var for x in atoms for var in own))
            place = next(readers, None)
            if place is not None:
                uses.setdefault(place, []).append(name)
        return uses
