"""Low-rank adapters: which leaves have one, of which shapes, and where they are."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from jfsdp.arguments import Count, checked
from jfsdp.layout.select import Selectors, select_leaves
from jfsdp.layout.strategy import Strategy

A, B, MAGNITUDE = "lora_a", "lora_b", "lora_magnitude"
LAYER = "lora_layer"  # the number of each layer of a stack, for dropout: what tells its masks from the others'


@checked
@dataclasses.dataclass(frozen=True)
class LoRA:
    """Train low-rank adapters beside frozen weights: `x @ W` becomes `x @ W + scale * (x @ A) @ B`.

    Attributes:
      targets: the matrices that get an adapter: path globs, classes of variables, predicates `f(path, shape) -> bool`,
        or a list of these; or by selector, how many of the first dims take the input, for weights of more than two dims
        (`{"**.query.kernel": 1, "**.out.kernel": 2}`). Layer dims of a stack do not count.
      rank: the inner size of A [in, rank] and B [rank, out].
      alpha: the scale is alpha / rank.
      dropout: the share of its input that A sees as zeros while the model trains, from 0 to below 1; the rest is
        divided by 1 - dropout. Each matrix, layer and microbatch has a mask of its own. With `dora` W sees them too,
        for what the adapter adds, by one more product with it.
      rslora: the scale is alpha / sqrt(rank) (arXiv 2312.03732).
      dora: train the norm of each column of W + scale * A @ B apart from its direction (arXiv 2402.09353).
      also: leaves of the model that are trained as they are: norms, a new head; not those that `frozen=` chooses.
      placement: the strategy of the adapters' own leaves. They are small: whole on every device they need no gather,
        and one sum of gradients per unit.
    Source: LoRA (arXiv 2106.09685). A begins uniform in +-1/sqrt(in), as PEFT's does, and B at zero.
    """

    targets: Selectors | Mapping[Any, int]
    rank: Count = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    also: Selectors = None
    placement: str | int | Strategy = "ddp"

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LoRA(alpha={self.alpha}): scales what adapters add; say a number above 0")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"LoRA(dropout={self.dropout}): is the share of the input that A does not see; say 0 or more, below 1"
            )


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of one leaf.

    Attributes:
      path: the leaf's.
      stacked: how many of its leading dims are layer dims.
      num_in: how many dims after these take the input; the rest are those of the output.
      shape: of the leaf.
      alpha, rslora: of which the scale is made.
    """

    path: str
    stacked: int
    num_in: int
    shape: tuple[int, ...]
    rank: int
    alpha: float
    rslora: bool
    has_magnitude: bool
    placement: str | int | Strategy = "ddp"
    dropout: float = 0.0

    @property
    def scale(self) -> float:
        """What A @ B is multiplied by."""
        return scale_of(self.rank, self.alpha, self.rslora)

    @property
    def parts(self) -> tuple[str, ...]:
        """What is trained of it."""
        return (A, B, MAGNITUDE) if self.has_magnitude else (A, B)

    @property
    def leaves(self) -> tuple[str, ...]:
        """What it is made of: its parts, and what its dropout needs."""
        return (*self.parts, LAYER) if self.dropout else self.parts

    def name(self, part: str) -> str:
        """Return the name of the leaf that is one part of it."""
        return f"{self.path}.{part}"

    def part_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of one part, layer dims included."""
        layers, ins, outs = self._split(self.shape)
        return (*layers, *{A: (*ins, self.rank), B: (self.rank, *outs), MAGNITUDE: outs, LAYER: ()}[part])

    def _split(self, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        middle = self.stacked + self.num_in
        return sizes[: self.stacked], sizes[self.stacked : middle], sizes[middle:]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data that `json` writes, but for where its parts are."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "placement"}

    def describe(self) -> str:
        """Say in a line what decides what it computes, and where."""
        return f"{self.path}: {self.kind}"

    @property
    def kind(self) -> str:
        """What decides what it computes, in words."""
        more = ["rslora"] * self.rslora + ["dora"] * self.has_magnitude
        more += [f"dropout {self.dropout:g}"] if self.dropout else []
        return ", ".join([f"rank {self.rank}", f"alpha {self.alpha:g}", *more])

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Adapter:
        """Undo `to_dict`."""
        return Adapter(**{**data, "shape": tuple(data["shape"])})


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """Return what A @ B is multiplied by."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def part_shapes(adapters: Mapping[str, Adapter]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of what is trained of adapters, by name."""
    ones = [(one, part) for one in adapters.values() for part in one.parts]
    return {one.name(part): jax.ShapeDtypeStruct(one.part_shape(part), jax.numpy.float32) for one, part in ones}


def layer_shapes(adapters: Mapping[str, Adapter]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of what is not trained of adapters, by name: numbers of layers."""
    ones = [one for one in adapters.values() if one.dropout]
    return {one.name(LAYER): jax.ShapeDtypeStruct(one.part_shape(LAYER), jax.numpy.uint32) for one in ones}


def also(loras: Sequence[LoRA]) -> list[Any] | None:
    """Return the selectors of what is trained beside adapters; None for none."""
    chosen = []
    for lora in loras:
        chosen += lora.also if isinstance(lora.also, (list, tuple)) else [] if lora.also is None else [lora.also]
    return chosen or None


def find_adapters(
    loras: Sequence[LoRA],
    leaves: Mapping[str, jax.ShapeDtypeStruct],
    stacked: Mapping[str, int],
    types: Mapping[str, type],
) -> dict[str, Adapter]:
    """Return the adapters by the leaf that they adapt.

    Args:
      loras: several are for different leaves.
      stacked: by path, how many leading dims are layer dims.
      types: as `select_leaves` takes them.

    Raises:
      ValueError: for targets that match nothing, that two LoRAs match, or that are no matrices; for a rank above a dim.
    """
    found: dict[str, Adapter] = {}
    for lora in loras:
        for path, num_in in _targets(lora, leaves, types).items():
            if path in found:
                raise ValueError(f"{path}: two LoRAs have it among their targets; make one of them narrower")
            found[path] = _adapter(lora, path, leaves[path], stacked[path], num_in)
    return found


def _targets(
    lora: LoRA, leaves: Mapping[str, jax.ShapeDtypeStruct], types: Mapping[str, type]
) -> dict[str, int | None]:
    given = lora.targets.items() if isinstance(lora.targets, Mapping) else [(lora.targets, None)]
    chosen: dict[str, int | None] = {}
    for selector, num_in in given:
        for path in select_leaves("lora targets", selector, leaves, types):
            if chosen.get(path, num_in) != num_in:
                raise ValueError(
                    f"{path}: targets of one LoRA differ in how many dims take the input; make one narrower"
                )
            chosen[path] = num_in
    if not chosen:
        raise ValueError("lora targets are empty; name the matrices, such as targets=['**.q_proj.kernel']")
    return chosen


def _adapter(lora: LoRA, path: str, leaf: jax.ShapeDtypeStruct, stacked: int, num_in: int | None) -> Adapter:
    shape = tuple(leaf.shape)
    dims = shape[stacked:]
    if not jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating) or len(dims) < 2:
        raise ValueError(
            f"{path}: lora targets choose it, and its shape {dims} ({leaf.dtype}) is that of no matrix; choose "
            "kernels, such as '**.kernel'"
        )
    if num_in is None and len(dims) > 2:
        raise ValueError(
            f"{path}: lora targets choose it, and of its {len(dims)} dims {dims} it is not said how many take the "
            f"input; say targets={{{path!r}: 1}}, or, if the first is a layer dim, make a unit of its module "
            "(jfsdp.Unit(..., stacked=1))"
        )
    num_in = 1 if num_in is None else num_in
    if not 0 < num_in < len(dims):
        raise ValueError(
            f"{path}: lora targets: {num_in} of its {len(dims)} dims are to take the input; say 1..{len(dims) - 1}"
        )
    sizes = math.prod(dims[:num_in]), math.prod(dims[num_in:])
    if lora.rank > min(sizes):
        raise ValueError(
            f"{path}: rank {lora.rank} is above the smaller size of the matrix {sizes[0]} x {sizes[1]}, and an adapter "
            f"would be larger than it; take a rank up to {min(sizes)}, or leave this leaf out of the targets"
        )
    return Adapter(
        path, stacked, num_in, shape, lora.rank, lora.alpha, lora.rslora, lora.dora, lora.placement, lora.dropout
    )
