"""The derivative of each item of a program, traced at its first use."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jfsdp.compat import core
from jfsdp.engine.dataflow import is_literal
from jfsdp.engine.driver.program import Call, Code, Item
from jfsdp.engine.unit import Arrays, Linear, apply_remat, linearize, part, weave
from jfsdp.layout.layout import Layout
from jfsdp.layout.units import ROOT


class Derivatives:
    """Linearizations of items under the remat policy of their unit; the iterations of a loop share them.

    Attributes:
      fixed: by item, the residuals that are equal in every iteration of its loop.
    """

    def __init__(self, layout: Layout):
        self.layout = layout
        self.fixed: dict[Item, list[Any]] = {}
        self._linears: dict[Item, Linear] = {}

    def is_trained(self, path: str) -> bool:
        """Tell whether a parameter has a gradient."""
        return self.layout.by_path[path].trainable

    def full_shapes(self, item: Item) -> dict[str, jax.ShapeDtypeStruct]:
        """Return shapes and dtypes of the gathered weights of a call or of code."""
        names: Sequence[str] = getattr(item, "weights", ())
        shards = item.shards if isinstance(item, Call) else dict.fromkeys(names, 0)
        return self.layout.full_shapes(shards)

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
        pairs = zip(part(item.is_active, names)[0], fixed[0], strict=True)
        is_input = [not name and not is_fixed for name, is_fixed in pairs]  # no inner unit's weight
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
