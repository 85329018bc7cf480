"""Wire formats: collectives that send a weight or a gradient in 8 bits.

[Note: what a wire format means]
Weights: every matrix of a unit with a `gather_wire` is rounded when it is used, whether or not it is gathered. The
codes depend on the logical array only. So a run on any mesh equals a run on one device with the same rounding, in both
programs.
Gradients: each device rounds its partial sum, the codes are exchanged by an all-to-all, and summed in float32. A
reduction in 8 bits would sum in 8 bits. So a step equals a reference that rounds the same partial sums, and depends on
their number. An all-reduce is this exchange, followed by an all-gather of the sums in `reduce_dtype`.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from jfsdp.arguments import Size, checked, did_you_mean
from jfsdp.layout.codec import AMAX, POWER_OF_TWO, Codec
from jfsdp.layout.strategy import NODE

_SCALES = (POWER_OF_TWO, AMAX)
_DTYPES = dict.fromkeys(("float8", "fp8", "float8_e4m3", "float8_e4m3fn"), "float8_e4m3fn") | {"int8": "int8"}


@checked
@dataclasses.dataclass(frozen=True)
class Wire:
    """A wire format, for `MixedPrecisionPolicy`.

    Attributes:
      dtype: "float8" (e4m3fn) or "int8".
      block: the number of elements of the last dim that share a scale; 0: one scale for a matrix (of each layer). None:
        0 in float8, 256 in int8. A shorter last dim is one block.
      scale: "power_of_two", or "bfloat16": the largest absolute value; None: "power_of_two" in float8, "bfloat16" in
        int8. With powers of two, a decoded value is encoded and decoded to itself.
      between: only between groups of this many neighbouring devices; inside a group values are sent in the dtype in
        use. "node": the devices of a host. None: between all devices. Weights that a step gathers once, before its
        first microbatch, are sent in this format between all devices.
    """

    dtype: Any = "float8"
    block: Size | None = None
    scale: Annotated[str, ", ".join(_SCALES)] | None = None
    between: int | str | None = None

    def __post_init__(self) -> None:
        name = getattr(self.dtype, "__name__", None) or str(self.dtype)
        if name not in _DTYPES:
            raise ValueError(f"Wire: dtype {self.dtype!r} is not float8 or int8{did_you_mean(name, _DTYPES)}")
        dtype = _DTYPES[name]
        object.__setattr__(self, "dtype", dtype)
        if self.scale is None:
            object.__setattr__(self, "scale", AMAX if dtype == "int8" else POWER_OF_TWO)
        if self.scale not in _SCALES:
            raise ValueError(f"Wire: scale {self.scale!r} is not one of {', '.join(_SCALES)}")
        if self.block is None:
            object.__setattr__(self, "block", 256 if dtype == "int8" else 0)
        if dtype == "int8" and not self.block:
            raise ValueError("Wire: int8 with one scale for a matrix (block=0) is too coarse; pass block=256")
        if not (self.between in (None, NODE) or (isinstance(self.between, int) and self.between > 0)):
            raise ValueError(f"Wire: between={self.between!r} is not None, {NODE!r} or a number of devices")

    def of_rows(self, size: int) -> Wire:
        """Return the format for a matrix whose last dim has this size: a shorter dim than a block is one block."""
        return dataclasses.replace(self, block=min(self.block, size)) if self.block else self

    @property
    def codec(self) -> Codec:
        """The encoding of a matrix."""
        top = 127 if self.dtype == "int8" else 448
        return Codec(str(self), 8, self.block or 0, scale=self.scale or AMAX, dtype=self.dtype, top=top)

    def __str__(self) -> str:
        blocks = f" in blocks of {self.block}" if self.block else ""
        return f"{self.dtype}{blocks}" + (f" between groups of {self.between} devices" if self.between else "")


def as_wire(field: str, value: Any) -> Wire | None:
    """Return a wire format, from a `Wire`, a dtype, or text: "int8", "int8:128" (block), "int8:128@node" (between).

    Raises:
      ValueError: naming the field.
    """
    if value is None or isinstance(value, Wire):
        return value
    try:
        if not (isinstance(value, str) and (found := re.fullmatch(r"(\w+)(?::(\d+))?(?:@(\w+))?", value))):
            return Wire(value)
        dtype, block, between = found.groups()
        groups = int(between) if between and between.isdigit() else between
        return Wire(dtype, int(block) if block else None, between=groups)
    except (TypeError, ValueError) as error:
        raise type(error)(f"{field}: {error}") from None


def num_inside(sizes: Mapping[str, int], axes: Sequence[str], between: int | None, *, ways: int | None = None) -> int:
    """Return how many devices of a collective's group are in the same group of `between` neighbouring devices.

    Args:
      sizes: sizes of all data axes, outer to inner.
      axes: the axes of the collective; over the first of them, its group may be only `ways` neighbouring devices.

    Raises:
      ValueError: if `between` does not divide an axis into groups.
    """
    stride, inside = 1, 1
    for axis in reversed([*sizes]):
        size = sizes[axis]
        part = min(size, max(1, (between or 1) // stride))
        if between and stride < between and (between % stride or size % part):
            fits = max(num for num in range(1, min(between, stride * size) + 1) if stride * size % num == 0)
            raise ValueError(
                f"Wire(between={between}): axis {axis!r} (size {size}) has no groups of {between} neighbouring "
                f"devices; use a number that divides {stride * size}, such as {fits}, or leave it out"
            )
        if axis in axes:
            inside *= min(part, ways) if ways and axis == axes[0] else part
        stride *= size
    return inside


def check_blocks(path: str, field: str, wire: Wire, shape: Sequence[int], parts: int) -> None:
    """Check that blocks do not straddle parts of the last dim.

    Args:
      shape: the logical shape.
      parts: the number of parts into which the last dim is split, cuts included.

    Raises:
      ValueError: naming the leaf, its last dim, and a block that fits.
    """
    size, block = shape[-1], wire.block
    if not block or (size % block == 0 and (-(-size // parts)) % block == 0):
        return
    fits = math.gcd(size, -(-size // parts), block)
    part = f", in {parts} parts of {-(-size // parts)}" if parts > 1 else ""
    raise ValueError(
        f"{path}: dim {len(shape) - 1} (size {size}{part}) is not a multiple of {block}, the block of {field}; use "
        f"block={fits}, or leave its unit out (per_unit)"
    )
