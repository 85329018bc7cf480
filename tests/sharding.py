"""`jfsdp.fully_shard` with placements and wrappers as arguments."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from jax.sharding import PartitionSpec

import jfsdp


def place(
    placements: Mapping[Any, Any] | None = None,
    *,
    min_size: int | None = None,
    cuts: Mapping[Any, Any] | None = None,
    ignored: Any = (),
    shard_dim: Callable[[str, tuple[int, ...]], int | None] | None = None,
) -> dict[Any, Any] | None:
    """Return placements.

    Args:
      min_size: as in `jfsdp.placements`.
      cuts: for each selector, (dim, axis or axes) without layer dims, or None.
      ignored: selectors of leaves to ignore.
      shard_dim: `f(path, shape)` returns the dim to split, or None for the default.
    """
    found = {} if min_size is None else jfsdp.placements(min_size=min_size)
    found |= {selector: cut(*wanted) if wanted else None for selector, wanted in (cuts or {}).items()}
    several = isinstance(ignored, Sequence) and not isinstance(ignored, str)
    found |= dict.fromkeys(ignored if several else [ignored], jfsdp.Ignore())
    if shard_dim is not None:
        found["**"] = lambda path, shape: None if (dim := shard_dim(path, shape)) is None else jfsdp.Shard(dim)
    return {**found, **(placements or {})} or None


def cut(dim: int, axis: Any) -> Callable[[str, tuple[int, ...]], PartitionSpec]:
    """Return the placement that cuts one dim over an axis of the model; a negative dim counts from the end."""
    return lambda path, shape: PartitionSpec(*[None] * (dim % len(shape)), axis)


WORDS = ("min_size", "cuts", "ignored", "shard_dim")


def fully_shard(
    model: Any,
    *,
    placements: Mapping[Any, Any] | None = None,
    lora: Any = None,
    quantized: Mapping[Any, str] | None = None,
    **options: Any,
) -> jfsdp.ShardedModel:
    """Shard a model, with remat "full" by default; options in `WORDS` are passed to `place`."""
    model = model if lora is None else jfsdp.lora(model, lora)
    model = model if quantized is None else jfsdp.quantize(model, quantized)
    words = {name: options.pop(name) for name in WORDS if name in options}
    return jfsdp.fully_shard(model, placements=place(placements, **words), **{"remat": "full", **options})
