"""Codecs: frozen weights in 8 or 4 bits, at rest and in gathers, with a scale for each block.

[Note: where codes are]
The codes of a leaf replace its values, and its scales are a separate leaf next to it: `kernel` and `kernel.scales`.
Layouts, gathers, theory, plans and checkpoints treat both like other leaves. A unit's call decodes the gathered codes.
Blocks are along the last dim of the logical shape, so that the bits of the codes are the same on every mesh.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.select import select_leaves

SCALES = "scales"

# Quantiles of a normal distribution, with zero among them (QLoRA, arXiv 2305.14314, appendix E).
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0),
)
_INT4 = tuple(level / 7 for level in range(-8, 8))  # -8 is never used


@dataclasses.dataclass(frozen=True)
class Codec:
    """The encoding of a weight, in blocks of its last dim.

    Attributes:
      bits: bits of a code; two codes of 4 bits share a byte, the first in its low half.
      block: elements that share a scale, which is their largest absolute value.
      levels: values of the codes, in units of the scale; (): code / 127.
      scale_dtype: the dtype of the scales.
    """

    name: str
    bits: int
    block: int
    levels: tuple[float, ...] = ()
    scale_dtype: str = "bfloat16"

    @property
    def dtype(self) -> str:
        """The dtype of the codes at rest and in gathers."""
        return "int8" if self.bits == 8 else "uint8"

    @property
    def per_item(self) -> int:
        """How many codes share an item of the array."""
        return 8 // self.bits

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.per_item)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.block)

    def value_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the decoded values."""
        return (*codes[:-1], codes[-1] * self.per_item)

    def encode(self, values: Any, xp: Any = jnp) -> tuple[Any, Any]:
        """Return codes and scales of floating-point values.

        Layout:  [... F] -> [... F/per_item], [... F/block]

        Args:
          xp: jax.numpy, or numpy for values on the host; codes are equal.
        """
        blocks, scales = self._blocks(values, xp), self.scales(values, xp)
        wide = scales.astype(xp.float32)[..., None]
        ratio = xp.where(wide == 0, 0, blocks / xp.where(wide == 0, 1, wide)).reshape(values.shape)
        if not self.levels:
            return xp.clip(xp.round(ratio * 127), -127, 127).astype(xp.int8), scales
        levels = np.asarray(self.levels, np.float32)
        places = xp.searchsorted(xp.asarray((levels[1:] + levels[:-1]) / 2), ratio).astype(xp.uint8)
        pairs = places.reshape(*values.shape[:-1], -1, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4), scales

    def scales(self, values: Any, xp: Any = jnp) -> Any:
        """Return only the scales of `encode`. Layout: [... F] -> [... F/block]."""
        return xp.max(xp.abs(self._blocks(values, xp)), axis=-1).astype(jnp.dtype(self.scale_dtype))

    def _blocks(self, values: Any, xp: Any) -> Any:
        return values.astype(xp.float32).reshape(*values.shape[:-1], -1, self.block)

    def decode(self, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return the values, in the dtype of the scales. Moves no data between devices.

        Layout:  [... F/per_item], [... F/block] -> [... F]
        """
        if self.levels:
            pairs = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
            ratio = jnp.asarray(self.levels, jnp.float32)[pairs]
        else:
            ratio = codes.astype(jnp.float32) / 127
        blocks = ratio.reshape(*scales.shape, self.block) * scales.astype(jnp.float32)[..., None]
        return blocks.reshape(*scales.shape[:-1], -1).astype(scales.dtype)


CODECS = {codec.name: codec for codec in (Codec("nf4", 4, 64, _NF4), Codec("int4", 4, 64, _INT4), Codec("int8", 8, 64))}
Coded = Mapping[Any, str]  # by selector, the name of a codec


def scales_of(path: str) -> str:
    """Return the name of a leaf's scales."""
    return f"{path}.{SCALES}"


def find_codecs(
    coded: Coded, leaves: Mapping[str, jax.ShapeDtypeStruct], stacked: Mapping[str, int], types: Mapping[str, type]
) -> dict[str, Codec]:
    """Return the codec of each leaf that is quantized.

    Raises:
      ValueError: for an unknown codec, leaves that are not floating-point matrices, and a last dim that blocks do not
        divide.
    """
    found: dict[str, Codec] = {}
    for selector, name in coded.items():
        if name not in CODECS:
            raise ValueError(f"jfsdp.quantize: codec {name!r} is unknown; the codecs are {', '.join(CODECS)}")
        for path, by in select_leaves("jfsdp.quantize", selector, leaves, types).items():
            codec, leaf = CODECS[name], leaves[path]
            if found.get(path, codec) != codec:
                raise ValueError(f"{path}: jfsdp.quantize {by} and another selector differ; make one of them narrower")
            if not jnp.issubdtype(leaf.dtype, jnp.floating) or len(leaf.shape) - stacked[path] < 2:
                raise ValueError(
                    f"{path}: jfsdp.quantize {by} matches it, but shape {tuple(leaf.shape)} ({leaf.dtype}) is not "
                    "a floating-point matrix; select kernels, such as '**.kernel'"
                )
            if leaf.shape[-1] % codec.block:
                raise ValueError(
                    f"{path}: dim {len(leaf.shape) - 1} (size {leaf.shape[-1]}) is not a multiple of {codec.block}, "
                    f"the block of codec {name!r}; leave this leaf out of jfsdp.quantize"
                )
            found[path] = codec
    return found


def coded_shapes(codecs: Mapping[str, Codec], leaves: Mapping[str, Any]) -> dict[str, jax.ShapeDtypeStruct]:
    """Return shapes and dtypes of codes and scales, by name."""
    found = {}
    for path, codec in codecs.items():
        shape = tuple(leaves[path].shape)
        found[path] = jax.ShapeDtypeStruct(codec.code_shape(shape), jnp.dtype(codec.dtype))
        found[scales_of(path)] = jax.ShapeDtypeStruct(codec.scale_shape(shape), jnp.dtype(codec.scale_dtype))
    return found
