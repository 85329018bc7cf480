"""Low-rank adapters: which leaves have one, and the shapes and names of their parts."""

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
LAYER = "lora_layer"  # the number of each layer of a stack, for different dropout masks in each


@checked
@dataclasses.dataclass(frozen=True)
class LoRA:
    """Low-rank adapters that are trained next to frozen weights: `x @ W` becomes `x @ W + scale * (x @ A) @ B`.

    Attributes:
      targets: the matrices that get an adapter: path globs, classes of variables, predicates `f(path, shape) -> bool`,
        or a list of these; or a dict from selectors to how many of the first dims take the input, for weights of more
        than two dims (`{"**.query.kernel": 1, "**.out.kernel": 2}`). Layer dims of a stack do not count.
      rank: the inner size of A [in, rank] and B [rank, out].
      alpha: the scale is alpha / rank.
      dropout: the share of A's input that is set to zero in training, from 0 to below 1; the rest is divided by
        1 - dropout. Each matrix, layer and microbatch has a separate mask. With `dora`, the adapter's contribution
        through W uses the masked input too, which takes one more product with W.
      rslora: the scale is alpha / sqrt(rank) (arXiv 2312.03732).
      dora: train the norm of each column of W + scale * A @ B separately from its direction (arXiv 2402.09353).
      stacks: those targets whose first dim is a stack of matrices, such as experts: each matrix has an adapter of its
        own. Layer dims do not count. Not with `dropout` or `dora`, which PEFT does not apply to them either.
      also: leaves of the model that are trained themselves, such as norms or a new head; `frozen=` must not match them.
      placement: the strategy of the adapters' leaves. They are small: replicated, they need no gather and one reduction
        of gradients per unit.
    Source: LoRA (arXiv 2106.09685). A is initialized uniformly in +-1/sqrt(in), as in PEFT, and B to zero.
    """

    targets: Selectors | Mapping[Any, int]
    rank: Count = 16
    alpha: float = 32.0
    dropout: float = 0.0
    rslora: bool = False
    dora: bool = False
    also: Selectors = None
    placement: str | int | Strategy = "ddp"
    stacks: Selectors = None

    def __post_init__(self) -> None:
        if not 0 < self.alpha < math.inf:
            raise ValueError(f"LoRA(alpha={self.alpha}): must be a number above 0; the adapters' scale is alpha / rank")
        if not 0 <= self.dropout < 1:
            raise ValueError(
                f"LoRA(dropout={self.dropout}): must be at least 0 and below 1; it is the share of A's input that is "
                "set to zero"
            )


@dataclasses.dataclass(frozen=True)
class Adapter:
    """The adapter of one leaf.

    Attributes:
      path: the leaf's path.
      stacked: how many of its leading dims are layer dims, or the dim of a stack of matrices.
      num_in: how many dims after these take the input; the others are output dims.
      shape: the leaf's shape.
      alpha, rslora: they determine the scale.
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
        """The factor of A @ B."""
        return scale_of(self.rank, self.alpha, self.rslora)

    @property
    def parts(self) -> tuple[str, ...]:
        """Its trained parts."""
        return (A, B, MAGNITUDE) if self.has_magnitude else (A, B)

    @property
    def leaves(self) -> tuple[str, ...]:
        """All its leaves: its parts, and the layer numbers for dropout."""
        return (*self.parts, LAYER) if self.dropout else self.parts

    def name(self, part: str) -> str:
        """Return the name of the leaf of a part."""
        return f"{self.path}.{part}"

    def part_shape(self, part: str) -> tuple[int, ...]:
        """Return the shape of one part, layer dims included."""
        layers, ins, outs = self._split(self.shape)
        return (*layers, *{A: (*ins, self.rank), B: (self.rank, *outs), MAGNITUDE: outs, LAYER: ()}[part])

    def _split(self, sizes: Sequence[Any]) -> tuple[Sequence[Any], Sequence[Any], Sequence[Any]]:
        middle = self.stacked + self.num_in
        return sizes[: self.stacked], sizes[self.stacked : middle], sizes[middle:]

    def to_dict(self) -> dict[str, Any]:
        """Return it as plain data for `json`, without the placement."""
        return {name: value for name, value in dataclasses.asdict(self).items() if name != "placement"}

    def describe(self) -> str:
        """Return path and settings in one line."""
        return f"{self.path}: {self.kind}"

    @property
    def kind(self) -> str:
        """The settings that determine its computation, as text."""
        more = ["rslora"] * self.rslora + ["dora"] * self.has_magnitude
        more += [f"dropout {self.dropout:g}"] if self.dropout else []
        return ", ".join([f"rank {self.rank}", f"alpha {self.alpha:g}", *more])

    @staticmethod
    def from_dict(data: Mapping[str, Any]) -> Adapter:
        """Make an adapter from the result of `to_dict`."""
        return Adapter(**{**data, "shape": tuple(data["shape"])})


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """Return the factor of A @ B."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def part_shapes(adapters: Mapping[str, Adapter]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the adapters' trained parts, by name."""
    ones = [(one, part) for one in adapters.values() for part in one.parts]
    return {one.name(part): jax.ShapeDtypeStruct(one.part_shape(part), jax.numpy.float32) for one, part in ones}


def layer_shapes(adapters: Mapping[str, Adapter]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of the adapters' layer numbers, which are not trained, by name."""
    ones = [one for one in adapters.values() if one.dropout]
    return {one.name(LAYER): jax.ShapeDtypeStruct(one.part_shape(LAYER), jax.numpy.uint32) for one in ones}


def also(loras: Sequence[LoRA]) -> list[Any] | None:
    """Return the selectors of leaves that are trained in addition to adapters; None for none."""
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
    """Return the adapters by path of their leaf.

    Args:
      loras: for different leaves.
      stacked: by path, how many leading dims are layer dims.
      types: as in `select_leaves`.

    Raises:
      ValueError: for targets that match nothing, that two LoRAs match, or that are not matrices; for a rank above a
        dim.
    """
    found: dict[str, Adapter] = {}
    for lora in loras:
        targets = _targets(lora, leaves, types)
        stacks = {} if lora.stacks is None else select_leaves("lora stacks", lora.stacks, leaves, types)
        if other := [path for path in stacks if path not in targets]:
            raise ValueError(f"{other[0]}: lora stacks match it, but targets do not; name only targets")
        for path, num_in in targets.items():
            if path in found:
                raise ValueError(f"{path}: two LoRAs have it among their targets; make one of them narrower")
            if path in stacks and (lora.dropout or lora.dora):
                field = "dropout" if lora.dropout else "dora"
                raise ValueError(f"{path}: lora stacks match it, for which {field} is not available; remove {field}")
            found[path] = _adapter(lora, path, leaves[path], stacked[path] + (path in stacks), num_in)
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
                    f"{path}: targets of one LoRA differ in how many of its dims take the input; make one narrower"
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
            f"{path}: lora targets match it, but shape {dims} ({leaf.dtype}) is not a floating-point matrix; "
            "select kernels, such as '**.kernel'"
        )
    if num_in is None and len(dims) > 2:
        raise ValueError(
            f"{path}: lora targets match it, but do not define how many of its {len(dims)} dims {dims} take the input; "
            f"set targets={{{path!r}: 1}}; if the first is a stack of matrices, such as experts, stacks=[{path!r}]; if "
            "it is a layer dim, make a unit of its module (jfsdp.Unit(..., stacked=1))"
        )
    num_in = 1 if num_in is None else num_in
    if not 0 < num_in < len(dims):
        raise ValueError(
            f"{path}: lora targets: {num_in} of its {len(dims)} dims cannot take the input; use 1..{len(dims) - 1}"
        )
    sizes = math.prod(dims[:num_in]), math.prod(dims[num_in:])
    if lora.rank > min(sizes):
        raise ValueError(
            f"{path}: rank {lora.rank} is above the smaller size of the matrix {sizes[0]} x {sizes[1]}, so the adapter "
            f"would be larger than it; use a rank up to {min(sizes)}, or leave this leaf out of the targets"
        )
    return Adapter(
        path, stacked, num_in, shape, lora.rank, lora.alpha, lora.rslora, lora.dora, lora.placement, lora.dropout
    )
