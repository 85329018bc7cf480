"""Settings of single leaves: strategy, training, codecs, and the origin of each setting."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfsdp.arguments import Size, check_call, checked, did_you_mean
from jfsdp.layout.codec import Codec, scales_of
from jfsdp.layout.cuts import AxisRules, find_dim, part_cuts
from jfsdp.layout.leaf import Cut
from jfsdp.layout.lora import Adapter
from jfsdp.layout.mesh import AXES, CUT_AXES, DATA_AXES
from jfsdp.layout.select import Selectors, select_leaves
from jfsdp.layout.strategy import STRATEGIES, Split, Strategy, get_strategy


@checked
@dataclasses.dataclass(frozen=True)
class Shard:
    """Split a leaf along this dim, over the strategy's axes.

    Attributes:
      dim: without layer dims of a stack; a negative dim counts from the end.
    """

    dim: int


@checked
@dataclasses.dataclass(frozen=True)
class Replicate:
    """Keep a leaf whole on every device, with its gradient and optimizer states."""


@checked
@dataclasses.dataclass(frozen=True)
class Ignore:
    """Keep a leaf whole on every device and in its own dtype, also in compute. It is trained like others."""


# By selector: Shard, Replicate, Ignore, a PartitionSpec, a strategy, None, or a function `f(path, shape)` of these.
Placements = Mapping[Any, Any]


class _Key(Enum):
    """Keys of `Placements` that are not selectors."""

    MIN_SIZE = "min_size"


@checked
def placements(*, min_size: Size) -> dict[Any, Any]:
    """Return placements that replicate leaves with fewer elements per layer; merge them with others by `|`.

    A leaf that a selector places ignores the size. Leaves below the size are never offloaded.
    """
    return {_Key.MIN_SIZE: min_size}


@checked
@dataclasses.dataclass(frozen=True)
class LeafRules:
    """The user's settings of single leaves.

    Attributes:
      frozen: leaves without gradient and optimizer state.
      placements: by selector, how a leaf is placed; see `fully_shard`. Its unit determines stage `kept`; see
        `UnitPolicy`.
      axis_rules: which dims are cut over the model axes; see `jfsdp.layout.cuts.find_cuts`.
      adapters: by leaf, its low-rank adapter, whose parts are leaves too. With adapters, all other leaves are frozen
        except `also`.
      codecs: by leaf, its codec; its scales are a leaf too, sharded and cut like its codes.
    Selectors are path globs, classes of variables and predicates; see `select_leaves`. They select among the model's
    own leaves; parts of adapters are placed by `Adapter.placement`.
    """

    frozen: Selectors = None
    placements: Placements | None = None
    axis_rules: AxisRules | None = None
    adapters: Mapping[str, Adapter] | None = None
    codecs: Mapping[str, Codec] | None = None
    also: Selectors = None

    @property
    def min_size(self) -> int | None:
        """The size below which leaves are replicated; None: the default of the storage form."""
        return (self.placements or {}).get(_Key.MIN_SIZE)


@dataclasses.dataclass(frozen=True)
class Placed:
    """The placement of one leaf, and the selector as text."""

    by: str
    value: Any
    stacked: int

    @property
    def spec(self) -> tuple[tuple[str, ...], ...] | None:
        """The axes of each dim, including layer dims; None if the value is neither a PartitionSpec nor None."""
        if self.value is not None and not isinstance(self.value, PartitionSpec):
            return None
        entries = self.value or ()
        return ((),) * self.stacked + tuple(x if isinstance(x, tuple) else () if x is None else (x,) for x in entries)

    @property
    def cuts(self) -> list[tuple[int, str, str]] | None:
        """The dims that model axes cut, with the axis and the reason; None: `axis_rules` decide."""
        if self.spec is None:
            return None
        reason = f"placements {self.by}"
        return [(dim, axis, reason) for dim, axes in enumerate(self.spec) for axis in axes if axis in CUT_AXES]

    @property
    def split(self) -> list[tuple[int, tuple[str, ...]]]:
        """The dims that a PartitionSpec splits over other axes, with these axes."""
        found = [(dim, tuple(one for one in axes if one not in CUT_AXES)) for dim, axes in enumerate(self.spec or ())]
        return [(dim, axes) for dim, axes in found if axes]


def find_placements(
    given: Placements | None,
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    stacked: Mapping[str, int],
    types: Mapping[str, type],
) -> dict[str, Placed]:
    """Return the placement of each leaf that a selector matches.

    Raises:
      ValueError: for selectors that match nothing or disagree, and specs with too many entries.
    """
    placed: dict[str, Placed] = {}
    for selector, value in (given or {}).items():
        if selector is _Key.MIN_SIZE:
            continue
        for path, by in select_leaves("placements", selector, leaves, types).items():
            shape = tuple(leaves[path].shape[stacked[path] :])
            found = value
            if callable(value) and not isinstance(value, type):
                check_call(f"placements {by}", value, "path", "shape")
                found = value(path, shape)
                if found is None:
                    continue
            if isinstance(found, PartitionSpec) and len(found) > len(shape):
                layers = f" without its {stacked[path]} layer dims" if stacked[path] else ""
                raise ValueError(f"{path}: {found} has more entries than shape {shape} has dims{layers}")
            if path in placed and placed[path].value != found:
                raise ValueError(
                    f"{path}: placements {placed[path].by} ({_show(placed[path].value)}) and {by} ({_show(found)}) "
                    "collide; make one of them narrower"
                )
            placed[path] = Placed(by, found, stacked[path])
    return placed


@dataclasses.dataclass(frozen=True)
class Choice:
    """The settings of one leaf: its strategy, its dim if its placement names it, the reasons as text, and how many
    values an element contains.
    """

    strategy: Strategy
    dim: int | None
    frozen: str | None
    placed: str | None
    cuts: tuple[Cut, ...]
    coded: str | None = None
    per_item: int = 1

    @property
    def is_ignored(self) -> bool:
        return self.strategy is _IGNORED

    @property
    def is_scales(self) -> bool:
        """Whether it contains the scales of codes."""
        return self.frozen == _BY_CODEC


_BY_CODEC, ADAPTER_PART = "quantized", "an adapter's part"
_IGNORED = Strategy("ignored", Split.WHOLE, Split.WHOLE, Split.WHOLE)


def choose_added(
    own: Mapping[str, Choice], adapters: Sequence[Adapter], codecs: Mapping[str, Codec], sizes: Mapping[str, int]
) -> dict[str, Choice]:
    """Return the settings of codes, and of additional leaves: parts of adapters, and scales."""
    choices: dict[str, Choice] = {}
    for one in adapters:
        placed = get_strategy(one.placement, sizes)
        for part in one.leaves:
            cuts = part_cuts(one, part, own[one.path].cuts)
            choices[one.name(part)] = Choice(placed, None, None, ADAPTER_PART, cuts)
    for path, codec in codecs.items():
        if own[path].frozen is None:
            raise ValueError(
                f"{path}: is quantized, but codes cannot be trained; freeze it (frozen=, jfsdp.lora), or leave it out "
                "of jfsdp.quantize"
            )
        coded = f"in {codec.name}, blocks of {codec.block}"
        choices[path] = dataclasses.replace(own[path], coded=coded, per_item=codec.per_item)
        choices[scales_of(path)] = dataclasses.replace(own[path], dim=None, frozen=_BY_CODEC, per_item=0)
    return choices


def choose_own(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    strategy: Strategy,
    rules: LeafRules,
    placed: Mapping[str, Placed],
    types: Mapping[str, type],
    sizes: Mapping[str, int],
    cuts: Mapping[str, tuple[Cut, ...]],
) -> dict[str, Choice]:
    """Return the settings of the model's own leaves.

    Raises:
      ValueError: for selectors that match nothing or collide, and placements that are impossible.
    """
    frozen = select_leaves("frozen", rules.frozen, leaves, types)
    if rules.adapters:
        also = select_leaves("lora also", rules.also, leaves, types)
        if both := [path for path in also if path in rules.adapters]:
            raise ValueError(
                f"{both[0]}: has an adapter, but lora also {also[both[0]]} trains the leaf itself; make one of them "
                "narrower"
            )
        frozen = {path: "lora" for path in leaves if path not in also} | frozen
    _check_axes("", strategy, sizes)
    choices = {}
    for path, leaf in leaves.items():
        own, dim, how = strategy, None, None
        if path in placed:
            own, dim = _own_strategy(path, tuple(leaf.shape), strategy, placed[path], sizes)
            if placed[path].spec is None or placed[path].split:  # otherwise its cuts have the reason
                how = f"{'ignored' if own is _IGNORED else 'placed'} by {placed[path].by}"
        if own is _IGNORED and cuts[path]:
            raise ValueError(
                f"{path}: {how}, so that every device has it whole, but {cuts[path][0].reason} cuts it over axis "
                f"{cuts[path][0].axis!r}; leave one of them out"
            )
        choices[path] = Choice(own, dim, frozen.get(path), how, cuts[path])
    return choices


def _show(placement: Any) -> str:
    return placement.name if isinstance(placement, Strategy) else repr(placement)


def _own_strategy(
    path: str, shape: tuple[int, ...], strategy: Strategy, placed: Placed, sizes: Mapping[str, int]
) -> tuple[Strategy, int | None]:
    """Return the strategy of one leaf, and its dim if the placement names it."""
    value = placed.value
    if isinstance(value, Ignore):
        return _IGNORED, None
    if isinstance(value, Shard):
        return strategy, find_dim(path, shape, placed.stacked, value.dim, f"placements {placed.by}")
    if placed.spec is None:
        try:
            own = STRATEGIES["ddp"] if isinstance(value, Replicate) else get_strategy(value, sizes)
        except (TypeError, ValueError) as error:
            raise type(error)(
                f"{path}: placements: {error}; or Shard(dim), Replicate(), Ignore(), a PartitionSpec or None"
            ) from error
        _check_axes(path, own, sizes)
        return own, None
    if not placed.split:
        return strategy, None
    if len(placed.split) > 1:
        dims = ", ".join(str(dim) for dim, _ in placed.split)
        raise ValueError(f"{path}: {value} splits dims {dims}; data axes split one dim of a leaf")
    ((dim, axes),) = placed.split
    for axis in axes:
        if axis not in DATA_AXES:
            raise ValueError(
                f"{path}: {value}: {axis!r} is not an axis of a mesh{did_you_mean(axis, AXES)}; the axes are "
                f"{', '.join(AXES)}"
            )
    wider = tuple(axis for axis in DATA_AXES if axis in axes or (axis in strategy.axes("opt") and axis in sizes))
    try:
        own = Strategy(str(value), axes, wider, wider)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _check_axes(path, own, sizes)
    return own, dim


def _check_axes(path: str, strategy: Strategy, sizes: Mapping[str, int]) -> None:
    """Check that the mesh has the axes that are given as tuples; axes of a `Split` count as 1 if they are missing."""
    for stage, axes in strategy.given_axes().items():
        missing = [axis for axis in axes if axis not in sizes]
        if missing:
            raise ValueError(
                f"{path or 'strategy'}: {strategy.name!r} splits {stage} over axis {missing[0]!r}, which the mesh "
                f"lacks; its axes are {', '.join(sizes)}"
            )
