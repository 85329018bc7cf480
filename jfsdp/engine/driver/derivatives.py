"""The derivative of each item of a program, traced at its first use."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jfsdp.compat import core
from jfsdp.engine.driver.program import Block, Call, Code, Item, Loop
from jfsdp.engine.engine import Engine
from jfsdp.engine.unit import Arrays, Linear, apply_remat, linearize, part, weave
from jfsdp.jaxprs import is_literal
from jfsdp.layout.units import ROOT


class Derivatives:
    """Linearizations of items under the remat policy of their unit; the iterations of a loop share them.

    Attributes:
      fixed: by item, the residuals that are equal in every iteration of its loop.
    """

    def __init__(self, engine: Engine, block: Block):
        self.engine, self.layout = engine, engine.layout
        blocks = [block, *(item.body for item in block.items if isinstance(item, Loop))]
        calls = [item for one in blocks for item in one.items if isinstance(item, Call)]
        reads = collections.Counter(atom for call in calls for atom in call.inputs if not is_literal(atom))
        self._shared = {atom for atom, count in reads.items() if count > 1}
        self.fixed: dict[Item, list[Any]] = {}
        self._linears: dict[Item, Linear] = {}

    def is_trained(self, path: str) -> bool:
        """Tell whether a parameter has a gradient."""
        return self.layout.by_path[path].trainable

    def full_shapes(self, item: Item) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the gathered weights of a call or of code."""
        names: Sequence[str] = getattr(item, "weights", ())
        shards = item.shards if isinstance(item, Call) else dict.fromkeys(names, 0)
        return self.engine.shapes(shards)

    def prepare(self, item: Item, known: Mapping[Any, Any]) -> None:
        """Trace an item of a loop, and compute the residuals that depend only on `known`, the loop's constants."""
        self._linears[item] = self._linearize(item, [is_literal(atom) or atom in known for atom in item.inputs])
        values = [atom.val if is_literal(atom) else known.get(atom) for atom in item.inputs]
        self.fixed[item] = self._linears[item].fixed(*part(item.is_active, values))

    def of(self, item: Item) -> Linear:
        """Return the derivative of an item."""
        if item not in self._linears:
            self._linears[item] = self._linearize(item, None)
        return self._linears[item]

    def _linearize(self, item: Item, is_fixed: Sequence[bool] | None) -> Linear:
        def compute(weights: Arrays, diff: Sequence[Any], other: Sequence[Any]) -> list[Any]:
            return run_item(item, weights, weave(item.is_active, diff, other))

        full, shapes = self.full_shapes(item), [atom.aval for atom in item.inputs]
        unit, names = ROOT, [""] * len(shapes)
        if isinstance(item, Call):
            unit, names = item.unit, item.call.traced.names[: len(shapes)]
        fixed = part(item.is_active, [False] * len(shapes) if is_fixed is None else is_fixed)
        # Neither an inner unit's weight, nor a value that several calls share, such as the memory of an encoder.
        pairs = zip(names, item.inputs, strict=True)
        once = [not name and not is_literal(atom) and atom not in self._shared for name, atom in pairs]
        is_input = [one and not equal for one, equal in zip(part(item.is_active, once)[0], fixed[0], strict=True)]
        return linearize(
            apply_remat(compute, self.layout.policy(unit).remat, is_input),
            full,
            *part(item.is_active, shapes),
            trainable=frozenset(filter(self.is_trained, full)),
            is_fixed=fixed[0] + fixed[1],
            is_live=item.is_live,
        )


def run_item(item: Item, weights: Arrays, values: Sequence[Any]) -> list[Any]:
    """Compute a call, or code of the root, on full weights."""
    if isinstance(item, Call):
        return item.call.traced(weights, values)
    assert isinstance(item, Code)
    return core.eval_jaxpr(item.jaxpr, (), *values, *jax.tree.leaves(weights))
