"""What a step of the manual engine should take, term by term, from the layout and from what its parts take alone.

[Note: the moments of a step]
Two kinds of moment compete for the peak, and the formula is the largest of them:

  loss        everything that the forward saves, the root's last weights, the logits; no unit is gathered.
  first unit  the first backward of a unit: k + 1 units gathered, its own gradient, and the root's, which is reduced
              meanwhile.
  unit        any later one: k + 1 units gathered, its own gradient, and that of the unit before, which is reduced.
  end         the gradient of what the root reads first, such as an embedding.

A stack of layers has room for all that it saves, and for all its reduced gradients, from the first to the last of them.
Layers in a list trade one for the other. Where the weights of a stack are stored in their own shapes, and split along
another dim than a layer's first, XLA (0.10.2) transposes their shards before its loops, all layers at once: a term of
its own. Whole weights of a unit are taken in the dtype in use, gradients that wait in the same, reduced ones in that of
their accumulator.

Not foretold: what XLA's heap leaves free between buffers (`Memory.fragmentation_bytes`), accumulation, offloading, and
`reshard_after_forward` other than True.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Mapping

from jfsdp.engine.schedule import Prefetch
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.table import Layout, Leaf
from jfsdp.layout.units import ROOT
from jfsdp.plan.alone import Alone

TERMS = {
    "state": "masters, optimizer states and counters of one device",
    "transposed shards": "copies of those of a stack that are not split along a layer's first dim",
    "reduced gradients": "shards of gradients, in the dtype of their accumulator",
    "saved activations": "what calls of units leave for the backward",
    "gathered units": "k + 1 of them",
    "unit gradients": "of the unit that computes, and of the one before, which is being reduced",
    "root weights": "those that the loss reads",
    "root gradient": "whole, until it is reduced",
    "logits": "as many live copies as are stated",
    "recompute": "of one unit, or of the root at the loss: what it takes beside the above, measured alone",
    "batch": "the step's inputs",
}


@dataclasses.dataclass(frozen=True)
class Shapes:
    """What the layout does not say of a step.

    Attributes:
      rows, seq_len, vocab_size: rows of one device, tokens of each, and scores of each token.
      logits_bytes: of one token's score, all live copies together: 6 is one in bfloat16 and one in float32.
      batch_bytes: of the step's inputs on one device.
    """

    rows: int
    seq_len: int
    vocab_size: int
    logits_bytes: int = 6
    batch_bytes: int = 0

    @property
    def logits(self) -> int:
        """Bytes of all live copies of the logits."""
        return self.rows * self.seq_len * self.vocab_size * self.logits_bytes


@dataclasses.dataclass(frozen=True)
class Formula:
    """The terms of each moment, in bytes of one device; see [Note: the moments of a step]."""

    moments: Mapping[str, Mapping[str, int]]

    @property
    def moment(self) -> str:
        """The moment of the peak."""
        return max(self.moments, key=lambda name: sum(self.moments[name].values()))

    @property
    def peak_bytes(self) -> int:
        """The sum of that moment's terms."""
        return sum(self.moments[self.moment].values())

    def __str__(self) -> str:
        head = f"{'GiB':18}" + "".join(f"{name:>12}" for name in self.moments)
        rows = [
            f"{term:18}" + "".join(f"{terms.get(term, 0) / 2**30:12.3f}" for terms in self.moments.values())
            for term in TERMS
        ]
        sums = f"{'sum':18}" + "".join(f"{sum(terms.values()) / 2**30:12.3f}" for terms in self.moments.values())
        return "\n".join([head, *rows, sums])


def memory_formula(
    layout: Layout, state_bytes: int, shapes: Shapes, alone: Mapping[str, Alone], *, prefetch: Prefetch
) -> Formula:
    """Say what a step of engine "manual" should take; see [Note: the moments of a step]. Moves no data.

    Args:
      state_bytes: of one device, `account(state).total`.
      alone: what the units and the root take by themselves, by name: from `measure_alone`, or stated.
      prefetch: that of the step; lists of units count as the longest of them.

    Raises:
      ValueError: if a unit has no figures, or there is none.
    """
    units = {
        unit.name: [layout.by_path[path] for path in unit.leaves]
        for unit in layout.units
        if unit.name != ROOT and unit.leaves
    }
    missing = [name for name in [*units, ROOT] if name not in alone]
    if missing or not units:
        raise ValueError(f"units {missing[:4]}: nothing says what they take, see measure_alone; or there are no units")
    head, first = root_ends(layout, shapes.vocab_size)
    base = {"state": state_bytes, "batch": shapes.batch_bytes, "transposed shards": _transposed(layout, units)}
    waits = bool(layout.buffers) or head == first  # until the last of an array's gradients is there
    root_grads = _whole(head, only_trained=True), _whole(first, only_trained=True)
    saved = sum(_num_calls(units[name]) * alone[name].saved_bytes for name in units)
    saved += max(alone[name].shared_bytes for name in units)
    loss = {
        "saved activations": saved,
        "root weights": _whole(head),
        "logits": shapes.logits,
        "recompute": max(alone[ROOT].work_bytes - shapes.logits, 0),
    }
    first_unit, unit = _backward(layout, units, alone, saved, _depth(prefetch) + 1)
    end = {"reduced gradients": _reduced(layout, layout.leaves), "unit gradients": first_unit["unit gradients"]}
    at_end = root_grads[1] + (root_grads[0] if waits and head != first else 0)
    return Formula(
        {
            "loss": base | loss,
            "first unit": base | first_unit | {"root gradient": root_grads[0]},
            "unit": base | unit | {"root gradient": root_grads[0] if waits else 0},
            "end": base | end | {"root gradient": at_end},
        }
    )


Terms = dict[str, int]


def _backward(
    layout: Layout, units: Mapping[str, list[Leaf]], alone: Mapping[str, Alone], saved: int, ahead: int
) -> tuple[Terms, Terms]:
    """Return what the first backward of a unit holds beside the root's, and the most that a later one does."""
    largest = max(units, key=lambda name: _whole(units[name]))
    gathered = min(ahead, sum(map(_num_calls, units.values()))) * _whole(units[largest])
    grads = _whole(units[largest], only_trained=True)
    both = {"gathered units": gathered, "recompute": max(alone[name].work_bytes for name in units)}
    stacked = [leaf for leaves in units.values() for leaf in leaves if leaf.stacked]
    begin = {"saved activations": saved, "reduced gradients": _reduced(layout, stacked)}
    last = {"saved activations": saved, "reduced gradients": _reduced(layout, layout.leaves)}
    later = [last]
    if not stacked:  # the last call has little that is saved and all that is reduced; the second the other way round
        last["saved activations"] = alone[largest].saved_bytes
        root = [layout.by_path[path] for path in layout.unit(ROOT).leaves]
        second = {"saved activations": saved - alone[largest].saved_bytes, "reduced gradients": _reduced(layout, root)}
        later.append(second)
    most = max(later, key=lambda terms: sum(terms.values()))
    return both | begin | {"unit gradients": grads}, both | most | {"unit gradients": 2 * grads}


def _depth(prefetch: Prefetch) -> int:
    ahead = prefetch.backward
    return ahead if isinstance(ahead, int) else max((len(names) for names in ahead.values()), default=0)


def call_bytes(leaf: Leaf) -> int:
    """Return the bytes of a leaf as one call gathers it. Moves no data."""
    return math.prod(leaf.stored_shape[leaf.stacked :]) * item_bytes(leaf.stage("use").dtype)


def root_ends(layout: Layout, vocab_size: int) -> tuple[list[Leaf], list[Leaf]]:
    """Return the root's leaves that its last code reads, and those that its first does. Moves no data.

    By Flax's convention an `embedding` is looked up first; the only leaf with the vocabulary as a dim is the head too.
    """
    root = [layout.by_path[path] for path in layout.unit(ROOT).leaves]
    wide = [leaf for leaf in root if vocab_size in leaf.shape]
    first = [leaf for leaf in root if leaf.path.rpartition(".")[2] == "embedding"]
    if len(wide) == 1:
        return wide, wide
    return [leaf for leaf in root if leaf not in first], first


def _num_calls(leaves: list[Leaf]) -> int:
    return max(math.prod(leaf.shape[: leaf.stacked]) for leaf in leaves)


def _whole(leaves: list[Leaf], *, only_trained: bool = False) -> int:
    return sum(call_bytes(leaf) for leaf in leaves if leaf.trainable or not only_trained)


def _reduced(layout: Layout, leaves: Iterable[Leaf]) -> int:
    return sum(layout.stage_bytes(leaf, "grad") for leaf in leaves if leaf.trainable)


def _transposed(layout: Layout, units: Mapping[str, list[Leaf]]) -> int:
    """Return the bytes of the shards that XLA transposes before a loop; under flat storage all are split alike."""
    stacked = [leaf for leaves in units.values() for leaf in leaves if leaf.stacked and not layout.buffers]
    return sum(layout.stage_bytes(leaf, leaf.source) for leaf in stacked if (leaf.dim or 0) > leaf.stacked)
