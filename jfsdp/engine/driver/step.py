"""Shared data of the forward and the backward: the program, its calls in order, the weights of the root."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from jfsdp.engine.driver.derivatives import Derivatives
from jfsdp.engine.driver.program import Block, Code, Item, Loop, mark_active, mark_live, part_weights
from jfsdp.engine.driver.schedule import Prefetch, frontiers, steady
from jfsdp.engine.driver.weights import Weights
from jfsdp.engine.engine import Engine
from jfsdp.engine.unit import Arrays
from jfsdp.jaxprs import is_literal
from jfsdp.layout.units import ROOT


class Step:
    """Shared data of the forward and the backward of one program, which lives as long as the trace of a step.

    Attributes:
      prefetch: how far gathers run ahead.
      source: all weights as stored.
      given: the inputs other than weights that the derivative is with respect to.
      block: the program.
      order, order_back: the calls of units, forward and backward.
      reached, reached_back: for each call, the last call whose gather has started; see `frontiers`.
      scans: by loop, the iterations that run in a scan, the same forward and backward.
      root_vars, shard_vars: by leaf, the variable of the program for its full weight in the root, or for its shard.
      root_kept: the `kept` stage of the root's weights that are gathered again, as stored.
      first_use: by index of an item, the stored weights of the root that it is the first to read.
      live: the outputs that are differentiated; by default the first.
      first: the gathered weights of the first call for both passes, if they stay gathered.
    """

    def __init__(
        self,
        engine: Engine,
        prefetch: Prefetch,
        block: Block,
        shards: Mapping[int, str],
        source: Arrays,
        given: Sequence[Any] = (),
        live: Sequence[Any] | None = None,
        first: Arrays | None = None,
    ):
        self.engine, self.prefetch, self.block, self.source, self.given = engine, prefetch, block, source, given
        inputs, root = self.block.inputs, sorted(engine.layout.unit(ROOT).leaves)
        self.root_vars = dict(zip(root, inputs[len(inputs) - len(root) :], strict=True))
        self.shard_vars = {path: inputs[place] for place, path in shards.items()}
        self.derivatives = Derivatives(engine, block)
        is_trained = self.derivatives.is_trained
        if engine.layout.policy(ROOT).reshard_after_forward:
            part_weights(self.block, self.root_vars)
        variables = self.root_vars | self.shard_vars
        trained = {var for path, var in variables.items() if is_trained(path)}
        mark_active(self.block, trained.union(given), is_trained)
        self.live = self.block.outputs[:1] if live is None else live
        mark_live(self.block, {atom for atom in self.live if not is_literal(atom)})
        self.order = list(self.block.calls())
        self.order_back = [entry for entry in reversed(self.order) if entry[0].needs_backward]
        names, names_back = ([call.unit for call, _, _ in order] for order in (self.order, self.order_back))
        self.reached = frontiers(names, prefetch.forward, "forward")
        self.reached_back = frontiers(names_back, prefetch.backward, "backward")
        self.first = first
        self.scans = {item: self._scanned(item) for item in self.block.items if isinstance(item, Loop)}
        self.first_use = self._first_uses()
        self.root_kept: Arrays = {}
        looped = frozenset(call for call, loop, _ in self.order if loop is not None)
        self.weights = Weights(engine, source, looped)
        if first is not None:
            self.weights.first = self.order[0][0], first

    def gather_root(self, names: Sequence[str], tie: Any) -> Arrays:
        """Gather weights of the root, and keep what their policy requires."""
        shards = {name: self.source[name] for name in names}
        movement = self.engine.movement(ROOT, shards)
        full = movement.gather(self.weights.after(shards, tie) | self.weights.scales(dict.fromkeys(names, 0)))
        if self.engine.layout.policy(ROOT).reshard_after_forward and movement.keep is not None:
            self.root_kept |= movement.keep(full)
        return full

    def regather_root(self, names: Sequence[str], tie: Any) -> Arrays:
        """Gather weights of the root again, for the backward."""
        if not self.root_kept:
            return self.gather_root(names, tie)
        kept = {name: self.root_kept[name] for name in names}
        movement = self.engine.movement(ROOT, {name: self.source[name] for name in names})
        return movement.regather(self.weights.after(kept, tie) | self.weights.scales(dict.fromkeys(names, 0)))

    def own(self, item: Item) -> dict[str, Any]:
        """Return the variables of the root's weights that an item's backward gathers again, by name."""
        return item.weights if isinstance(item, Code) else {}

    def _scanned(self, loop: Loop) -> tuple[int, int]:
        start = next(place for place, entry in enumerate(self.order) if entry[1] is loop)
        low, high = steady(self.reached, start, len(loop.calls), loop.length)
        back = [place for place, entry in enumerate(self.order_back) if entry[1] is loop]
        if back:
            first, last = steady(self.reached_back, back[0], len(loop.live_calls), loop.length)
            # The backward's first iteration finds a waiting gradient of another unit, if gradients wait.
            low, high = max(low, loop.length - last), min(high, loop.length - max(first, int(self.engine.writes_order)))
        if self.first is not None:  # the iteration that starts its gather would look like the others
            low = max(low, 2)
        return (low, high) if high - low > 1 else (0, 0)

    def _first_uses(self) -> dict[int, list[str]]:
        uses: dict[int, list[str]] = {}
        reads = [*([*item.inputs, *self.own(item).values()] for item in self.block.items), self.block.outputs]
        for path in self.root_vars:
            variables = [self.root_vars[other] for other in self.engine.layout.moved_with([path])]
            readers = (place for place, atoms in enumerate(reads) if any(x is var for x in atoms for var in variables))
            place = next(readers, None)
            if place is not None:
                uses.setdefault(place, []).append(path)
        return uses
