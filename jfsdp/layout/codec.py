"""Codecs: values in 8 or 4 bits, with a scale for each block, or one for a matrix: frozen weights and wire formats.

[Note: where codes are]
The codes of a leaf replace its values, and its scales are a separate leaf next to it: `kernel` and `kernel.scales`.
Layouts, gathers, theory, plans and checkpoints treat both like other leaves. A unit's call decodes the gathered codes.
Blocks are along the last dim of the logical shape, so that the bits of the codes are the same on every mesh.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.select import select_leaves

SCALES = "scales"
AMAX, POWER_OF_TWO = "bfloat16", "power_of_two"  # forms of scales
SCALE_DTYPE = "bfloat16"

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
      block: elements that share a scale; 0: all elements of a matrix.
      levels: values of the codes, in units of the scale; (): the codes are numbers.
      scale: AMAX: scales are the largest absolute values. POWER_OF_TWO: the smallest powers of two with which all
        elements are in the range of the codes; a decoded value is then decoded to itself again.
      scale_dtype: the dtype of the scales.
      dtype: the dtype of the codes at rest and in collectives.
      top: the largest code.
    """

    name: str
    bits: int
    block: int
    levels: tuple[float, ...] = ()
    scale: str = AMAX
    scale_dtype: str = SCALE_DTYPE
    dtype: str = "int8"
    top: int = 127

    @property
    def per_item(self) -> int:
        """How many codes share an item of the array."""
        return 8 // self.bits

    def code_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.per_item)

    def scale_shape(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (*shape[:-1], shape[-1] // self.block)

    @property
    def _steps(self) -> int:
        """The code whose value is the scale."""
        return self.top if self.scale == AMAX else 1

    def value_shape(self, codes: tuple[int, ...]) -> tuple[int, ...]:
        """Return the shape of the decoded values."""
        return (*codes[:-1], codes[-1] * self.per_item)

    def encode(self, values: Any, xp: Any = jnp, scales: Any = None) -> tuple[Any, Any]:
        """Return codes and scales of floating-point values.

        Layout:  [... F] -> [... F/per_item], [... F/block]; with one scale per matrix [L D F] -> [L D F], [L].

        Args:
          xp: jax.numpy, or numpy for values on the host; codes are equal.
          scales: from `scales`; required if a matrix has one scale.
        """
        blocks, scales = self._blocks(values, xp), self.scales(values, xp) if scales is None else scales
        wide = self._spread(scales, blocks)
        ratio = xp.where(wide == 0, 0, blocks / xp.where(wide == 0, 1, wide)).reshape(values.shape)
        if not self.levels:
            ratio = ratio * self._steps
            ratio = ratio if self.dtype != "int8" else xp.round(ratio)
            return xp.clip(ratio, -self.top, self.top).astype(jnp.dtype(self.dtype)), scales
        levels = np.asarray(self.levels, np.float32)
        places = xp.searchsorted(xp.asarray((levels[1:] + levels[:-1]) / 2), ratio).astype(xp.uint8)
        pairs = places.reshape(*values.shape[:-1], -1, 2)
        return pairs[..., 0] | (pairs[..., 1] << 4), scales

    def scales(self, values: Any, xp: Any = jnp) -> Any:
        """Return only the scales of `encode`. Layout: [... F] -> [... F/block]."""
        return self.to_scales(xp.max(xp.abs(self._blocks(values, xp)), axis=-1), xp)

    def to_scales(self, amax: Any, xp: Any = jnp) -> Any:
        """Return the scales for these largest absolute values (float32); they are not finite if the values are not."""
        scales = amax if self.scale == AMAX else power_of_two(amax, self.top, xp)
        return scales.astype(jnp.dtype(self.scale_dtype))

    def _blocks(self, values: Any, xp: Any) -> Any:
        wide = values.astype(xp.float32)
        return wide.reshape(*values.shape[:-1], -1, self.block) if self.block else wide

    def _spread(self, scales: Any, blocks: Any) -> Any:
        """Bring scales to float32 and to a shape that broadcasts against blocks."""
        return scales.astype(np.float32).reshape(*scales.shape, *[1] * (blocks.ndim - scales.ndim))

    def decode(self, codes: jax.Array, scales: jax.Array, dtype: Any = None) -> jax.Array:
        """Return the values, by default in the dtype of the scales. Moves no data between devices.

        Layout:  as `encode`, reversed.
        """
        if self.levels:
            pairs = jnp.stack([codes & 15, codes >> 4], -1).reshape(*codes.shape[:-1], -1)
            ratio = jnp.asarray(self.levels, jnp.float32)[pairs]
        else:
            ratio = codes.astype(jnp.float32) / self._steps
        blocks = ratio.reshape(*scales.shape, self.block) if self.block else ratio
        values = (blocks * self._spread(scales, blocks)).reshape(ratio.shape)
        return values.astype(dtype or scales.dtype)

    def rounding(self, values: jax.Array, codes: jax.Array, scales: jax.Array) -> jax.Array:
        """Return sums of squares of the rounding errors and of the values, and how many values exceed the largest code.

        A value that is not finite exceeds it. Layout: as `encode` -> [3]{unreduced} in float32.
        """
        wide, found = values.astype(jnp.float32), self.decode(codes, scales, jnp.float32)
        blocks = self._blocks(wide, jnp)
        largest = self._spread(scales, blocks) * (self.top / self._steps * (1 + 2.0**-8))  # scales are rounded
        exceeds = jnp.sum(~((jnp.abs(blocks) <= largest) & jnp.isfinite(blocks)))
        return jnp.stack([jnp.sum(jnp.square(found - wide)), jnp.sum(jnp.square(wide)), exceeds.astype(jnp.float32)])


def matrix_amax(values: jax.Array, layers: int) -> jax.Array:
    """Return the largest absolute value of each matrix in a stack, in float32. Layout: [layers ...] -> [layers]."""
    return jnp.max(jnp.abs(values), tuple(range(layers, values.ndim))).astype(jnp.float32)


def power_of_two(amax: Any, top: float, xp: Any = jnp) -> Any:
    """Return the smallest power of two (float32) by which `amax` is divided to at most `top`; 1 for 0.

    It is not finite if `amax` is not.
    """
    (mantissa, exponent), (of_top, top_exponent) = xp.frexp(amax.astype(np.float32)), math.frexp(top)
    power = xp.ldexp(xp.ones_like(mantissa), xp.clip(exponent - top_exponent + (mantissa > of_top), -126, 127))
    return xp.where(amax == 0, 1, xp.where(xp.isfinite(amax), power, amax)).astype(np.float32)


_PACKED = functools.partial(Codec, bits=4, block=64, dtype="uint8")
_KINDS = (_PACKED("nf4", levels=_NF4), _PACKED("int4", levels=_INT4), Codec("int8", 8, 64))
CODECS = {codec.name: codec for codec in _KINDS}  # of `jfsdp.quantize`
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
