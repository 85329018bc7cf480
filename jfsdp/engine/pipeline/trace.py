"""A loss traced for a pipeline, and the inputs of the trace."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax

from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.driver.weights import at
from jfsdp.engine.pipeline.parts import Parts, part
from jfsdp.engine.unit import Arrays, is_inexact
from jfsdp.jaxprs import passes_through
from jfsdp.layout.units import ROOT


class Trace:
    """A traced loss in its parts, and the inputs of the trace.

    Attributes:
      calls: the calls of units in it.
      num_out: how many outputs are not the model's state.
      changing: the names of the state's values that a microbatch changes.
    """

    def __init__(self, apply: ShardedApply, fn: Callable[..., Any], source: Arrays, state: Arrays, rows: Any):
        layout = apply.layout
        self.traced, flat = apply.trace_loss(fn, dict(source), state, rows)
        self.num_out = len(self.traced.jaxpr.outvars) - len(state)
        self.names = sorted(path for path in source if path not in layout.unit(ROOT).leaves)
        self.consts = flat[: self.traced.num_flat - len(jax.tree.leaves((rows, state))) - len(self.names)]
        first, origins = self.traced.num_flat - len(state), passes_through(self.traced.jaxpr)[self.num_out :]
        pairs = zip(sorted(state), origins, strict=True)
        self.changing = [name for place, (name, origin) in enumerate(pairs) if origin != first + place]
        staged = {leaf.unit for leaf in layout.leaves if leaf.is_staged}
        self.calls = dict(apply.engine.calls)
        self.parts: Parts = part(self.traced, self.calls, staged)

    def flat(self, rows: Any, state: Arrays, weights: Arrays) -> list[Any]:
        """Return the inputs of the trace without the root's weights; None for weights that are not given."""
        inner = [weights.get(name) for name in self.names]
        return [*self.consts, *jax.tree.leaves(rows), *inner, *jax.tree.leaves(state)]


def rows_of(rows: Any, microbatch: Any) -> tuple[Any, Arrays]:
    """Return the rows of a microbatch, and the model's state before it.

    Args:
      rows: the rows of all microbatches, [M ...]; the state's values that change, before each, [M ...]; the rest of
        the state.
    """
    micro, before, always = rows
    rows_now, changed = jax.tree.map(lambda x: at(x, microbatch), (micro, before))
    return rows_now, always | changed


def inexact(values: Sequence[Any]) -> list[Any]:
    """Return the values, or variables, that may have a derivative."""
    return [x for x in values if is_inexact(getattr(x, "aval", x))]
