"""Program `xla`: sharding constraints on a mesh with `Auto` axes, for which XLA inserts the collectives.

[Note: low precision on the wire]
The *sharded* layout of the cast value is stated first, then a barrier, then the whole layout. Without both, XLA gathers
41 % of the bytes of Llama-3-8B in the master's float32 and casts afterwards. Under the derivative of `engine/unit.py`
either one of the two was enough on JAX 0.10.2 and 0.12.0. Neither behaviour is documented, so both are used.
docs/log.md has the counts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
from jax.sharding import NamedSharding, PartitionSpec

from jfsdp.engine.driver.run import run
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.engine import Engine, Pairs, Pull, pad_all, to_device
from jfsdp.engine.unit import Arrays, Traced
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import batch_spec


@dataclasses.dataclass(frozen=True)
class XlaEngine(Engine):
    """The engine that gathers and reduces by sharding constraints; it sees the rows of all devices together."""

    def vjp(self, traced: Traced, flat: Sequence[Any], source: Arrays) -> tuple[list[Any], Pull]:
        """Run the root unit, gathering each unit when it is called; see `Engine.vjp`."""
        outs, pull, _ = run(self, Prefetch(0, 0), traced, flat, source)
        return outs, pull

    def split_rows(self, batch: Any, num: int) -> Any:
        """Split a batch into microbatches, with the rows of each sharded as a batch; see `Engine.split_rows`."""

        def state(x: jax.Array) -> jax.Array:
            sharding = NamedSharding(self.mesh, PartitionSpec(None, *batch_spec(self.mesh, x.ndim - 1)))
            return jax.lax.with_sharding_constraint(x, sharding) if x.ndim > 1 else x

        return jax.tree.map(state, super().split_rows(batch, num))

    def gather(self, pairs: Pairs, shards: Arrays) -> Arrays:
        """All-gather leaves in their dtype in use, or as codes; see [Note: low precision on the wire]."""
        return self._gather(pairs, shards, None)

    def _gather(self, pairs: Pairs, values: Arrays, stage: str | None) -> Arrays:
        """Gather from a stage; None: from rest."""
        sent: dict[str, Sequence[jax.Array]] = {}
        for leaf, sliced in pairs:
            value = values[leaf.path]
            sent[leaf.path] = self.encode(leaf, sliced, value, values) if leaf.gather_wire else (value,)

        def constrain(sent: Any, stage: str | None) -> Any:
            def one(x: jax.Array, leaf: Leaf, sliced: int) -> jax.Array:
                is_leaf = x.ndim == len(leaf.shape) - sliced  # and no scale
                return self._constrain(x, leaf, stage or leaf.source, sliced) if is_leaf else x

            return {leaf.path: [one(x, leaf, sliced) for x in sent[leaf.path]] for leaf, sliced in pairs}

        whole = constrain(jax.lax.optimization_barrier(constrain(sent, stage)), "use")
        for leaf, _ in pairs:
            parts, wire = whole[leaf.path], leaf.gather_wire
            whole[leaf.path] = wire.codec.decode(*parts, dtype=leaf.stage("use").dtype) if wire else parts[0]
        return whole

    def keep(self, pairs: Pairs, whole: Arrays) -> Arrays:
        """Slice whole leaves to their `kept` stage. Moves no data between devices."""
        return {leaf.path: self._constrain(whole[leaf.path], leaf, "kept", sliced) for leaf, sliced in pairs}

    def regather(self, pairs: Pairs, kept: Arrays) -> Arrays:
        """All-gather leaves from their `kept` stage."""
        coded = [(leaf, sliced) for leaf, sliced in pairs if leaf.gather_wire]
        whole = {leaf.path: self._constrain(kept[leaf.path], leaf, "use", sliced) for leaf, sliced in pairs}
        return whole | self._gather(coded, kept, "kept")

    def reduce(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients over the data axes into the layout of their accumulator.

        For matrices the whole layout is stated first; otherwise XLA may move activations instead of gradients (it
        turned the scatter-add of an embedding's gradient into an all-to-all). Vectors are not constrained first: a
        norm's scale is summed in float32 and then cast, and a cast between two constraints would keep the all-reduce
        from becoming a reduce-scatter.
        """
        reduced = {}
        for leaf, sliced in pairs:
            grad = grads[leaf.path]
            if grad.ndim > 1:
                grad = self._constrain(grad, leaf, "use", sliced)
            reduced[leaf.path] = self._constrain(grad, leaf, "grad", sliced)
        return reduced

    def reduce_whole(self, pairs: Pairs, grads: Arrays) -> Arrays:
        """Sum gradients of logical shape over the data axes into the layout of their accumulator; see `reduce`."""
        reduced = self.reduce(pairs, pad_all(pairs, grads))
        return {leaf.path: reduced[leaf.path].astype(leaf.stage("grad").dtype) for leaf, _ in pairs}

    def finish_in_place(self, path: str, grad: jax.Array) -> jax.Array:
        """Bring a gradient from the derivative of a unit's call to the dtype and layout of its accumulator."""
        leaf = self.layout.by_path[path]
        return self._constrain(to_device(grad).astype(leaf.stage("grad").dtype), leaf, "grad", 0)

    def constrain(self, values: Arrays, stage: str) -> Arrays:
        """Constrain stored leaves to their layout at `stage`; XLA inserts the collectives for it."""
        return {path: self._constrain(value, self.layout.by_path[path], stage, 0) for path, value in values.items()}

    def _constrain(self, value: jax.Array, leaf: Leaf, stage: str, sliced: int) -> jax.Array:
        sharding = self.layout.on_device(self.mesh, leaf, stage, sliced=sliced)
        return jax.lax.with_sharding_constraint(value, sharding)
