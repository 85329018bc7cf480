"""Matrix products in float8, as the `dot_general` of Flax layers.

[Note: scales of rows]
Products of float8 operands run at twice the rate of bfloat16 from Hopper (H100) on. Operands are quantized with current
scales, which are powers of two: a weight has one, activations and gradients have one for each row of the batch. The
scale of a device's own rows together would make results depend on the mesh and on the number of microbatches. The
gradient of a weight sums over rows, so it is one product per row of the batch, scaled and summed in float32. With one
row per device and microbatch this costs nothing extra. Operands go to the product as float8 and the result is scaled
afterwards. For "dequantize, then multiply" XLA compiles a product in bfloat16.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh

from jfsdp.context.rows import axes_here, own_axes
from jfsdp.layout.codec import POWER_OF_TWO, Codec, matrix_amax
from jfsdp.layout.mesh import ROW_AXES

SCOPE = "jfsdp.float8"  # in the names of these products
NOT = f"{SCOPE}.not."  # in the names of products that are not in float8, before the reason
NOT_CHOSEN, TOKENS = "not_chosen", "gradient_without_tokens"  # reasons; others are odd sizes
E4M3, E5M2 = (
    Codec(name, 8, 0, scale=POWER_OF_TWO, dtype=name, top=int(jnp.finfo(name).max))
    for name in ("float8_e4m3fn", "float8_e5m2")
)
MULTIPLE = 16  # cuBLAS requires that it divides all dims of a float8 product
LEAST_CAPABILITY = (8, 9)
Dims = tuple[tuple[int, ...], tuple[int, ...]]


def float8_dot_general(
    lhs: Any,
    rhs: Any,
    dimension_numbers: Any,
    precision: Any = None,
    preferred_element_type: Any = None,
    **options: Any,
) -> jax.Array:
    """Multiply activations by a weight in float8: `jax.lax.dot_general` for the argument `dot_general=` of Flax layers.

    Products with dims that 16 does not divide, with batch dims, or with integers are computed by
    `jax.lax.dot_general`; `jfsdp explain --matmul float8` lists them. Without a dim of tokens (`lhs` [B D]) the
    gradient of the weight is a product in the dtype of `lhs`.

    Layout:  lhs [B T D], rhs [D F] -> [B T F]; dim 0 of `lhs` is the rows of the batch.
    Dtype:   operands float8_e4m3fn, gradients of the result float8_e5m2; result `preferred_element_type`, default that
             of `lhs` and `rhs`.
    Cost:    no collective, except a maximum of [B] over axis `context` where it splits rows. A pass over each operand.
    Memory:  for the backward the operands in float8, and with `lhs` [B D] also `lhs`.

    Args:
      lhs: activations.
      rhs: the weight.
      precision: ignored by float8 products.
      options: other options of `jax.lax.dot_general`.
    """
    ((contracted, of_rhs), batch) = dimension_numbers
    dims = tuple(dim % lhs.ndim for dim in contracted), tuple(dim % rhs.ndim for dim in of_rhs)
    if reason := why_not(lhs, rhs, dims, batch):
        with jax.named_scope(f"{NOT}{reason}"):
            return jax.lax.dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, **options)
    dtype = jnp.dtype(preferred_element_type or jnp.result_type(lhs, rhs)).name
    with jax.named_scope(SCOPE):
        return _product(_Product(dims, dtype, lhs.dtype.name, rhs.dtype.name), lhs, rhs)


def check_devices(mesh: Any) -> None:
    """Check that the GPUs of a mesh multiply in float8.

    Raises:
      ValueError: naming the GPU and its compute capability.
    """
    device = None if isinstance(mesh, AbstractMesh) else mesh.devices.flat[0]
    capability = str(getattr(device, "compute_capability", ""))
    if capability and tuple(map(int, capability.split("."))) < LEAST_CAPABILITY:
        raise ValueError(
            f"--matmul float8: {getattr(device, 'device_kind', 'this GPU')} has compute capability {capability} and no "
            f"products in float8, which begin with {'.'.join(map(str, LEAST_CAPABILITY))} (Ada, Hopper); remove the "
            "option"
        )


def why_not(lhs: Any, rhs: Any, dims: Dims, batch: Any) -> str:
    """Return why a product is not in float8, in one word; "" if it is."""
    if not all(jnp.issubdtype(x.dtype, jnp.floating) for x in (lhs, rhs)):
        return "integers"
    if any(batch) or 0 in dims[0] or lhs.ndim == len(dims[0]):
        return "batch_dims"
    free = math.prod(size for dim, size in enumerate(rhs.shape) if dim not in dims[1])
    odd = [size for size in (math.prod(rhs.shape[dim] for dim in dims[1]), free) if size % MULTIPLE]
    return f"size_{odd[0]}" if odd else ""


@dataclasses.dataclass(frozen=True)
class _Product:
    """The contracted dims of a product, its dtype, and the dtypes of its operands."""

    dims: Dims
    dtype: str
    of_lhs: str
    of_rhs: str


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(how: _Product, lhs: jax.Array, rhs: jax.Array) -> jax.Array:
    return _forward(how, lhs, rhs)[0]


def _forward(how: _Product, lhs: jax.Array, rhs: jax.Array) -> tuple[jax.Array, Any]:
    (x, by_row), (w, scale) = _rows_in(E4M3, lhs), _encode(E4M3, rhs, matrix_amax(rhs, 0))
    sums_rows = _sums_rows(how.dims, lhs.shape)
    with contextlib.nullcontext() if sums_rows else jax.named_scope(f"{NOT}{TOKENS}"):
        out = _scaled(x, w, how.dims, by_row * scale, how.dtype)
    return out, (x if sums_rows else lhs, by_row, w, scale)


def _backward(how: _Product, residuals: Any, grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    x, x_scale, w, w_scale = residuals
    of_lhs, of_rhs = how.dims
    tokens = [dim for dim in range(x.ndim) if dim not in of_lhs]  # with the rows, dim 0
    outputs = [dim for dim in range(w.ndim) if dim not in of_rhs]
    of_grad = [*range(len(tokens), grad.ndim)]
    with jax.named_scope(SCOPE):
        g, g_scale = _rows_in(E5M2, grad)
        dx = _scaled(g, w, (of_grad, outputs), g_scale * w_scale, how.of_lhs)
        # The product has the tokens, then the contracted dims of `rhs` in their order there.
        order = [*tokens, *(of_lhs[of_rhs.index(dim)] for dim in sorted(of_rhs))]
        dx = jnp.transpose(dx, _inverse(order))
        order = [*(of_rhs[of_lhs.index(dim)] for dim in sorted(of_lhs)), *outputs]
        if not _sums_rows(how.dims, x.shape):
            dw = jax.lax.dot_general(x, grad, ((tokens, range(len(tokens))), ((), ())))
        else:
            x, g = _padded(x, tokens[-1]), _padded(g, len(tokens) - 1)
            contract = [dim - 1 for dim in tokens[1:]], [*range(len(tokens) - 1)]
            dw = _sum_of_rows(x, g, contract, x_scale * g_scale, how.dtype)
    return dx, jnp.transpose(dw, _inverse(order)).astype(how.of_rhs)


_product.defvjp(_forward, _backward)


def _sums_rows(dims: Dims, shape: tuple[int, ...]) -> bool:
    """Return whether the gradient of a weight is in float8: rows have a dim of tokens."""
    return len(shape) - len(dims[0]) > 1


def _padded(x: jax.Array, dim: int) -> jax.Array:
    """Pad a dim with zeros to a multiple of 16."""
    return jnp.pad(x, [(0, -size % MULTIPLE if place == dim else 0) for place, size in enumerate(x.shape)])


def _sum_of_rows(x: jax.Array, g: jax.Array, dims: Any, scales: jax.Array, dtype: str) -> jax.Array:
    """Return the sum over rows of `scale * x[row] @ g[row]`, in float32 or wider; see [Note: scales of rows].

    Where XLA splits the rows, the products are one batched product, since a loop would gather the rows.
    """
    wide = jnp.promote_types(dtype, jnp.float32)
    if x.shape[0] == 1:
        return _narrow(x[0], g[0], dims, dtype).astype(wide) * scales[0]
    if axes_here(ROW_AXES, is_manual=False):
        of_x, of_g = ([dim + 1 for dim in side] for side in dims)
        products = jax.lax.dot_general(x, g, ((of_x, of_g), ((0,), (0,))), preferred_element_type=_result(dtype))
        return jnp.einsum("b...,b->...", products.astype(wide), scales)

    def add(total: jax.Array, row: Any) -> tuple[jax.Array, None]:
        x, g, scale = row
        return total + _narrow(x, g, dims, dtype).astype(wide) * scale, None

    shape = jax.eval_shape(lambda x, g: _narrow(x, g, dims, dtype), x[0], g[0]).shape
    return jax.lax.scan(add, jnp.zeros(shape, wide), (x, g, scales))[0]


def _narrow(a: jax.Array, b: jax.Array, dims: Any, dtype: Any) -> jax.Array:
    return jax.lax.dot_general(a, b, (dims, ((), ())), preferred_element_type=_result(dtype))


def _result(dtype: Any) -> Any:
    """Return the dtype of a product before its scale: float16 may not have its range."""
    return jnp.float32 if jnp.dtype(dtype) == jnp.float16 else jnp.dtype(dtype)


def _scaled(a: jax.Array, b: jax.Array, dims: Any, by_row: jax.Array, dtype: Any) -> jax.Array:
    """Multiply, then scale the rows, which are dim 0 of the result."""
    product = _narrow(a, b, dims, dtype)
    wide = product.astype(jnp.promote_types(dtype, jnp.float32))
    return (wide * by_row.reshape(-1, *[1] * (product.ndim - 1))).astype(dtype)


def _rows_in(codec: Codec, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Encode with a scale per row. Layout: [B ...] -> [B ...], [B]."""
    amax = matrix_amax(x, 1)
    if axes := own_axes():
        amax = jax.lax.pmax(amax, axes)
    return _encode(codec, x, amax)


def _encode(codec: Codec, x: jax.Array, amax: jax.Array) -> tuple[jax.Array, jax.Array]:
    codes, scales = codec.encode(x, scales=codec.to_scales(amax))
    return codes, scales.astype(jnp.float32)


def _inverse(order: Sequence[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)
