"""Which of the two programs a step is, and why: the one place that asks.

[Note: two programs]
`xla`: the rows of all devices stand in one array, layouts are stated, and XLA inserts the collectives. The loss may be
anything. Every microbatch is reduced over every axis.
`manual`: everything runs in one `shard_map` over the data axes, where a device sees its own rows, and every gather and
reduction is written out. So the loss has to be a sum over rows (`jfsdp.Loss`), a model whose state depends on the rows
(batch statistics) cannot run there, nor one that states shardings over the data axes; rng keys are folded with the
device's index. Over axes of its own (`tensor`) a model may state what it likes: the `shard_map` is over all others.

`auto` takes `manual` where XLA would send more than is needed. It makes a reduce-scatter of an all-reduce that one
slice reads. A pad between them (padded leaves), an accumulator that is split further than its parameter, several
gradients that are added afterwards (a weight with several uses, such as tied embeddings), or a gradient that the model
sums itself (a loss in chunks, under `jax.custom_vjp`) keep it from that and cost up to twice the bytes. And it cannot
leave an axis for after the last microbatch. A `shard_map` over axis `replica` alone would leave the group to XLA, but
there JAX (0.10.2, 0.12) cannot partition cuDNN's attention.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

from jax.sharding import Mesh

from jfsdp.engine.driver.schedule import Prefetch, as_prefetch
from jfsdp.engine.engine import Engine
from jfsdp.engine.manual import ManualEngine
from jfsdp.engine.movements import MANUAL, XLA, deferred_axes, group_axes
from jfsdp.engine.xla import XlaEngine
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import PIPE
from jfsdp.layout.table import Layout
from jfsdp.train.step.survey import Survey

AUTO = "auto"
ENGINES = (AUTO, XLA, MANUAL)
OPEN = "depends on the loss"
_ALIKE = "the loss draws from random keys that are not in the model's state, and each device would draw the same"

_GATHERS = (
    "the model states of a value that depends on the rows that its first dim is split over nothing (None): in program "
    "'xla' every device then holds and computes the rows of all; say PartitionSpec.UNCONSTRAINED where the model has "
    "nothing to say"
)


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the user asked for.

    Attributes:
      engine: one of ENGINES.
      prefetch: how far gathers run ahead under `manual`; None: as far as by default.
      needs: the options given that only `manual` has, in words.
    """

    engine: str = AUTO
    prefetch: Prefetch | None = None
    needs: tuple[str, ...] = ()


class Choice(NamedTuple):
    """What was chosen.

    Attributes:
      program: its name; None where it is open.
      reason: in words.
      notes: what to warn of.
      prefetch: how far its gathers run ahead; None: XLA orders them.
      waits: whether what the loss and the model do still decides, or may forbid it.
    """

    program: str | None
    reason: str
    notes: tuple[str, ...] = ()
    prefetch: Prefetch | None = None
    waits: bool = False


def choose(
    layout: Layout, asked: Asked, *, accumulate: int = 1, once: bool = False, found: Survey | None = None
) -> Choice:
    """Choose the program of a step; see [Note: two programs].

    Args:
      accumulate, once: the number of microbatches, and whether they share one reduction where the program can.
      found: what the loss and the model do; None: not known yet.

    Raises:
      ValueError: for what cannot run in the program asked for, naming what asked for it.
    """
    program, reason = _program(layout, asked, accumulate, once, found)
    notes = []
    if asked.engine == AUTO and program == XLA and _falls_short(layout, accumulate=accumulate, once=once):
        notes.append(f"{layout.strategy.name}: {reason}")
    if found and program == MANUAL and found.draws_alike and layout.data_axes:
        notes.append(f"{reason}: {_ALIKE}; draw from keys in the model's state")
    if found and program == XLA and found.gathers_rows and layout.data_axes:
        notes.append(_GATHERS)
    prefetch = as_prefetch(asked.prefetch) if program == MANUAL else None
    return Choice(program, reason, tuple(notes), prefetch, found is None and program != XLA)


def make_engine(
    program: str | None, layout: Layout, mesh: Mesh, asked: Asked, *, later: tuple[str, ...], own_axes: tuple[str, ...]
) -> Engine:
    """Make the engine of a program.

    Args:
      later: the axes that wait for the last microbatch, where the program can leave any.
      own_axes: the mesh axes over which the model states shardings of its own.
    """
    if program == XLA:
        return XlaEngine(layout, mesh)
    is_asked = asked.engine == MANUAL or asked.prefetch is not None
    return ManualEngine(layout, mesh, later, own_axes, as_prefetch(asked.prefetch), is_asked)


def _program(layout: Layout, asked: Asked, accumulate: int, once: bool, found: Survey | None) -> tuple[str | None, str]:
    if asked.engine == XLA and asked.needs:
        raise ValueError(
            f"{asked.needs[0]}: engine='xla' leaves the collectives to XLA: which arrays, when, and in which dtype; "
            "leave one of the two out, or use engine='manual'"
        )
    if not layout.data_axes and layout.num_stages == 1:
        return XLA, "there is one data shard, with all rows: no weight moves"
    if asked.engine == XLA:
        return XLA, "engine='xla'" + _falls_short(layout, accumulate=accumulate, once=once)
    forced = "engine='manual'" if asked.engine == MANUAL else next(iter(asked.needs), "")
    if found is None:
        return (MANUAL, forced) if forced else (None, OPEN)
    if PIPE in found.model_axes and layout.num_stages > 1:
        raise ValueError(
            f"the model states a sharding over mesh axis {PIPE!r} (size {layout.num_stages}), which inside of its "
            "layers is none that it may name; leave the axis out there, and cut weights before and after the layers "
            f"over it: placements={{name: PartitionSpec({PIPE!r})}} splits what is computed with them too"
        )
    obstacle = found.problem or found.no_sum
    if forced:
        if obstacle:
            apart = ", and each device sees its own rows only" if layout.data_axes else ""
            raise ValueError(f"{forced}: {obstacle}{apart}; {_remedy(asked, found)}")
        return MANUAL, forced
    gain = _gain(layout, found, accumulate=accumulate, once=once)
    if not gain:
        return XLA, "XLA sends no more than it must"
    obstacle = obstacle or (_ALIKE if found.draws_alike else None)
    if obstacle:
        return XLA, obstacle + _falls_short(layout, accumulate=accumulate, once=once)
    masks = "; dropout masks differ from one device's; engine='xla' keeps them" if found.draws else ""
    return MANUAL, gain + masks


def _remedy(asked: Asked, found: Survey) -> str:
    """Say what to do about a loss or a model that cannot see its device's rows only."""
    if found.problem:
        return way_to_xla(asked)
    count = "return jfsdp.Loss(total, weight): a sum over the rows at hand, and how much it counts"
    return f"of a mean over rows {count}; if rows depend on each other, {way_to_xla(asked)}"


def way_to_xla(asked: Asked) -> str:
    """Say what to ask for instead, for all rows to be seen together; "": nothing else."""
    use = "use engine='xla'" if asked.engine == MANUAL else ""
    needs = " and ".join(asked.needs)
    return " and ".join(filter(None, [use, needs and f"leave out {needs}"]))


def _falls_short(layout: Layout, *, accumulate: int, once: bool) -> str:
    """Say what `xla` does to a strategy that sums over some axes once per step; "": nothing."""
    later = _after_the_last(layout, accumulate, once)
    return f": every microbatch is reduced over {', '.join(later)}, and not the last one only" if later else ""


def _gain(layout: Layout, found: Survey, *, accumulate: int, once: bool) -> str:
    """Say what XLA, left to itself, sends more than it must; "": nothing."""
    if later := _after_the_last(layout, accumulate, once):
        return f"sums over {', '.join(later)} once per step and not per microbatch"
    if groups := group_axes(layout):
        return f"sums over {', '.join(groups)} of shards alone"
    if any(leaf.trainable and leaf.padding for leaf in layout.leaves):
        return "padded leaves: XLA would all-reduce their gradients"
    if any(map(_is_split_further, layout.leaves)):
        return "gradients are split further than parameters: XLA would all-reduce them"
    if found.shared:
        return f"{found.shared[0]} has several uses: XLA would all-reduce each use's gradient"
    if found.derived:
        return f"the model forms the gradient of {found.derived[0]} itself: XLA would all-reduce it"
    return ""


def _after_the_last(layout: Layout, accumulate: int, once: bool) -> tuple[str, ...]:
    """Return the axes over which `manual` sums after the last of several microbatches."""
    return deferred_axes(layout, accumulate=accumulate, once=once) if accumulate > 1 else ()


def _is_split_further(leaf: Leaf) -> bool:
    split = leaf.stage(leaf.source).axes
    return leaf.trainable and bool(split) and leaf.stage("grad").axes != split


def needs_of(layout: Layout) -> list[str]:
    """Say what of a layout XLA could not do: arrays that are to move together, sums in another dtype."""
    found = [f"storage={layout.storage!r}"] if layout.packed else []
    found += [f"mesh axis {PIPE!r} (size {layout.num_stages})"] if layout.num_stages > 1 else []
    for leaf in layout.leaves:
        wanted, use = layout.reduce_dtype(leaf), leaf.stage("use").dtype
        if leaf.trainable and wanted != use:
            found.append(f"reduce_dtype={wanted!r} (weights of unit {leaf.unit or '(root)'} travel in {use})")
            break
    return found
