"""What is chosen for single leaves: the strategy of each, whether it is trained, coded or ignored, and who said so."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from jfsdp.arguments import checked
from jfsdp.layout.codec import Codec, scales_of
from jfsdp.layout.cuts import AxisRules, Cuts, part_cuts
from jfsdp.layout.leaf import Cut
from jfsdp.layout.lora import Adapter
from jfsdp.layout.mesh import DATA_AXES, MODEL_AXES
from jfsdp.layout.select import Selectors, select_leaves
from jfsdp.layout.strategy import Split, Strategy, get_strategy

ShardDim = Callable[[str, tuple[int, ...]], int | None]
Placements = Mapping[Any, Any]  # to a name or number of a strategy, a `Strategy`, or a PartitionSpec


@checked
@dataclasses.dataclass(frozen=True)
class LeafRules:
    """What the user says about single leaves.

    Attributes:
      shard_dim: `f(path, shape) -> dim or None`; None leaves the choice to the rule.
      frozen: leaves without gradient and optimizer state.
      ignored: leaves that stay whole on every device, in the dtype that they have; as in `placements` with "ignored".
      placements: by selector, another strategy for some leaves, the PartitionSpec of their `param` stage, or "ignored".
        What is kept of them between forward and backward stays their unit's matter: see `UnitPolicy`.
      axis_rules, cuts: which dims are cut over axis `tensor`; see `jfsdp.layout.cuts.find_cuts`.
      adapters: by leaf, its low-rank adapter, whose parts are leaves too. With any, what is no part of one is frozen,
        but for `also`.
      codecs: by leaf, how it is coded; its scales are a leaf too, sharded and cut as its codes are.
      frozen_dtype: dtype at rest of floating leaves that are not trained; None: as the model makes them.
    Selectors are path globs, classes of variables and predicates; see `select_leaves`. They choose among the model's
    own leaves; parts of adapters are placed as `Adapter` says.
    """

    shard_dim: ShardDim | None = None
    frozen: Selectors = None
    ignored: Selectors = None
    placements: Placements | None = None
    axis_rules: AxisRules | None = None
    cuts: Cuts | None = None
    adapters: Mapping[str, Adapter] | None = None
    codecs: Mapping[str, Codec] | None = None
    also: Selectors = None
    frozen_dtype: Any = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """What was chosen for one leaf: its strategy, its dim if given by a PartitionSpec, reasons in words, and how many
    values an element holds.
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
        """Whether it is the scales of codes."""
        return self.frozen == _BY_CODEC


_BY_CODEC = "quantized"
_IGNORED = Strategy("ignored", Split.WHOLE, Split.WHOLE, Split.WHOLE)


def choose_beside(
    own: Mapping[str, Choice], adapters: Sequence[Adapter], codecs: Mapping[str, Codec], sizes: Mapping[str, int]
) -> dict[str, Choice]:
    """Choose for codes, and for what is beside the model's own leaves: parts of adapters, and scales."""
    choices: dict[str, Choice] = {}
    for one in adapters:
        placed = get_strategy(one.placement, sizes)
        for part in one.leaves:
            cuts = part_cuts(one, part, own[one.path].cuts)
            choices[one.name(part)] = Choice(placed, None, None, "an adapter's part", cuts)
    for path, codec in codecs.items():
        if own[path].frozen is None:
            raise ValueError(
                f"{path}: is quantized, and codes are not trained; freeze it (frozen=, lora=), or leave it out of "
                "quantized="
            )
        said = f"in {codec.name}, blocks of {codec.block}"
        choices[path] = dataclasses.replace(own[path], coded=said, per_item=codec.per_item)
        choices[scales_of(path)] = dataclasses.replace(own[path], dim=None, frozen=_BY_CODEC, per_item=0)
    return choices


def choose_own(
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    strategy: Strategy,
    rules: LeafRules,
    types: Mapping[str, type],
    sizes: Mapping[str, int],
    cuts: Mapping[str, tuple[Cut, ...]],
) -> dict[str, Choice]:
    """Choose for the model's own leaves.

    Raises:
      ValueError: for selectors that choose nothing or collide, and placements that cannot work.
    """
    frozen = select_leaves("frozen", rules.frozen, leaves, types)
    if rules.adapters:
        also = select_leaves("lora also", rules.also, leaves, types)
        if both := [path for path in also if path in rules.adapters]:
            raise ValueError(
                f"{both[0]}: has an adapter, and lora also {also[both[0]]} trains it as it is; make one of them "
                "narrower"
            )
        frozen = {path: "lora" for path in leaves if path not in also} | frozen
    ignored = select_leaves("ignored", rules.ignored, leaves, types)
    placed: dict[str, tuple[str, Any]] = {path: (by, _IGNORED.name) for path, by in ignored.items()}
    for selector, placement in (rules.placements or {}).items():
        for path, by in select_leaves("placements", selector, leaves, types).items():
            if path in placed and placed[path][1] != placement:
                raise ValueError(
                    f"{path}: placements {placed[path][0]} ({_show(placed[path][1])}) and {by} ({_show(placement)}) "
                    "collide; make one of them narrower"
                )
            placed[path] = (by, placement)
    _check_axes("", strategy, sizes)
    choices = {}
    for path, leaf in leaves.items():
        by, placement = placed.get(path, (None, strategy))
        own, dim = _own_strategy(path, tuple(leaf.shape), strategy, placement, sizes)
        how = by and f"{'ignored' if own is _IGNORED else 'placed'} by {by}"
        if own is _IGNORED and cuts[path]:
            raise ValueError(
                f"{path}: {how}, so that every device holds it whole, and {cuts[path][0].reason} cuts it over axis "
                f"{cuts[path][0].axis!r}; leave one of them out"
            )
        choices[path] = Choice(own, dim, frozen.get(path), how, cuts[path])
    return choices


def _show(placement: Any) -> str:
    return placement.name if isinstance(placement, Strategy) else repr(placement)


def _own_strategy(
    path: str, shape: tuple[int, ...], strategy: Strategy, placement: Any, sizes: Mapping[str, int]
) -> tuple[Strategy, int | None]:
    """Return the strategy of one leaf, and its dim where a PartitionSpec names it."""
    if placement == _IGNORED.name:
        return _IGNORED, None
    if not isinstance(placement, PartitionSpec):
        try:
            own = get_strategy(placement, sizes)
        except ValueError as error:
            raise ValueError(f"{path}: placements: {error} or {_IGNORED.name!r}, or a PartitionSpec") from error
        _check_axes(path, own, sizes)
        return own, None
    if len(placement) > len(shape):
        raise ValueError(f"{path}: {placement} has more entries than shape {shape} has dims")
    split = {dim: entry for dim, entry in enumerate(placement) if entry not in (None, ())}
    if len(split) > 1:
        raise ValueError(
            f"{path}: {placement} splits dims {', '.join(map(str, split))}; data axes split one dim of a leaf, and "
            "what axis 'tensor' cuts is said by cuts="
        )
    dim, entry = next(iter(split.items()), (None, ()))
    axes = entry if isinstance(entry, tuple) else (entry,)
    if cutting := [axis for axis in axes if axis in MODEL_AXES]:
        raise ValueError(
            f"{path}: placements: {placement} names axis {cutting[0]!r}, which cuts leaves for all of their life; say "
            f"cuts={{{path!r}: ({dim}, {cutting[0]!r})}}"
        )
    wider = tuple(axis for axis in DATA_AXES if axis in axes or (axis in strategy.axes("opt") and axis in sizes))
    try:
        own = Strategy(str(placement), axes, wider, wider)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from error
    _check_axes(path, own, sizes)
    return own, dim


def _check_axes(path: str, strategy: Strategy, sizes: Mapping[str, int]) -> None:
    """Axes that are given by hand must be there; those of a `Split` count as 1 where they are not."""
    for stage, axes in strategy.given_axes().items():
        missing = [axis for axis in axes if axis not in sizes]
        if missing:
            raise ValueError(
                f"{path or 'strategy'}: {strategy.name!r} splits {stage} over axis {missing[0]!r}, which the mesh "
                f"lacks; its axes are {', '.join(sizes)}"
            )
