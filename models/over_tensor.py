"""Shardings of a model's weights and activations over mesh axis `tensor`, if the mesh has one.

Axis `context`, which may split the tokens of rows, is named next to it where the compiler partitions values over it.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

AXIS = "tensor"
VOCABULARY = ("pipe", AXIS)  # pipeline stages share embedding and head, so both axes cut their vocabulary
HEADS = "(heads of queries, keys and values)"


Placements = dict[str, Any]


def last_dim(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Return the spec that splits the last dim of a leaf over axis `tensor`."""
    return PartitionSpec(*[None] * (len(shape) - 1), AXIS)


def make_placements(
    columns: Iterable[str], rows: Iterable[str], vocabulary: Mapping[str, int] | None = None
) -> Placements:
    """Return placements over axis `tensor` for `jfsdp.fully_shard(placements=)`, as in Megatron-LM (arXiv 1909.08053).

    Args:
      columns: globs of weights and biases with a wide output, whose last dim is cut.
      rows: globs of weights with a wide input, whose first dim is cut.
      vocabulary: the vocabulary dim of embedding and head, by name.
    """
    tables = {name: PartitionSpec(*[None] * dim, VOCABULARY) for name, dim in (vocabulary or {}).items()}
    return {**dict.fromkeys(columns, last_dim), **dict.fromkeys(rows, PartitionSpec(AXIS)), **tables}


def tensor_size() -> int:
    """Return the size of axis `tensor`; 1 if the mesh in context lacks it."""
    return token_parts([AXIS])


def context_axes() -> tuple[str, ...]:
    """Return the axes (`context`) over which the compiler splits the tokens of rows; none inside a `shard_map`."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = zip(mesh.axis_names, mesh.axis_types, strict=True)
    named = (name for name, kind in kinds if name.startswith("context") and kind == AxisType.Auto)
    return tuple(name for name in named if mesh.shape[name] > 1)


def token_parts(axes: Iterable[str]) -> int:
    """Return the number of parts into which these axes of the mesh in context split a dim."""
    shape = jax.sharding.get_abstract_mesh().shape
    return math.prod(shape.get(axis, 1) for axis in axes)


def split_tokens(x: jax.Array) -> jax.Array:
    """State that the tokens of a row are split over axis `tensor`, where computation is independent per token.

    Layout:  [B T D] -> [B T/tensor D], its gradient [B T/tensor D] -> [B T D]; unchanged if the axis does not divide T.
    Cost:    a reduce-scatter of the partial sums over `tensor`; an all-gather of the gradient.
    Source:  sequence parallelism of Megatron-LM (arXiv 2205.05198).
    """
    return stated(True, x) if _splits(x) else x


def whole_rows(x: jax.Array) -> jax.Array:
    """State that each device has whole rows, before computation across tokens; undoes `split_tokens`.

    Cost:    an all-gather; a reduce-scatter of the gradient.
    """
    return stated(False, x) if _splits(x) else x


def looked_up(x: jax.Array) -> jax.Array:
    """State that rows looked up in a table cut along its vocabulary are whole: a sum over axis `tensor`.

    Their gradient is whole too. Otherwise XLA may gather the table, and all-reduce a whole gradient of it. Inside a
    `shard_map` over the other axes it does not (JAX 0.10.2): there it reduce-scatters the sum.
    """
    if not _splits(x) or AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return x
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(free, context_axes() or None, free))


def _splits(x: jax.Array) -> bool:
    return tensor_size() > 1 and x.shape[1] % token_parts((*context_axes(), AXIS)) == 0


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def stated(is_split: bool, x: jax.Array) -> jax.Array:
    """State whether the axis splits tokens, and the opposite for the cotangent."""
    free = PartitionSpec.UNCONSTRAINED
    axes = (*context_axes(), *[AXIS] * is_split)
    return jax.lax.with_sharding_constraint(x, PartitionSpec(free, axes or None, free))


# Two matrix products read the gradient of a sum over `tensor`: unless it is stated as whole, each gathers it.
stated.defvjp(lambda is_split, x: (stated(is_split, x), None), lambda is_split, _, d_x: (stated(not is_split, d_x),))


def over_tensor(x: jax.Array, dim: int, what: str = "of a value") -> jax.Array:
    """State that `dim` is split over axis `tensor`, and leave all other dims to the compiler.

    Layout:  [.. D ..] -> [.. D/tensor ..]; unchanged if the mesh in context lacks the axis, or its size is 1.

    Args:
      what: description of the dim for messages.

    Raises:
      ValueError: if the axis does not divide the dim.
    """
    size = tensor_size()
    if size == 1:
        return x
    if x.shape[dim] % size:
        raise ValueError(
            f"dim {dim} (size {x.shape[dim]}) {what} cannot be split over mesh axis {AXIS!r} (size {size}); use a size "
            "that divides the dim"
        )
    entries = [AXIS if i == dim % x.ndim else PartitionSpec.UNCONSTRAINED for i in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


DotGeneral = Callable[..., jax.Array] | None  # None: jax.lax.dot_general


def multiply(x: jax.Array, kernel: jax.Array, dot_general: DotGeneral) -> jax.Array:
    """Multiply by a kernel with `dot_general`, or as `jnp.einsum`. Layout: [.. D], [D ...] -> [.. ...]."""
    if dot_general is None:
        return jnp.tensordot(x, kernel, 1) if kernel.ndim > 2 else x @ kernel
    return dot_general(x, kernel, (((x.ndim - 1,), (0,)), ((), ())))


def fused_heads(
    x: jax.Array, kernel: jax.Array, bias: jax.Array, num_heads: int, dot_general: DotGeneral = None
) -> list[jax.Array]:
    """Project to queries, keys and values with one kernel that concatenates them, each with its heads in order.

    A contiguous shard of such a kernel is not a set of heads. So each device reads the columns of its heads from the
    gathered kernel. The alternative, gathering activations, costs more if a device has more tokens than D.

    Layout:  [B T D], [D 3*H*A/tensor] or [D 3*H*A], [3*H*A] -> three of [B T H/tensor A]
    Cost:    an all-gather of the kernel's gradient over `tensor`; if the kernel is cut, also an all-gather of the
             kernel, in the forward and in each recomputation of the unit.
    Memory:  the gathered kernel.
    """
    heads = (num_heads, kernel.shape[-1] // (3 * num_heads))
    kernel = over_tensor(kernel.reshape(-1, 3, *heads), 2, HEADS)
    qkv = multiply(x, kernel, dot_general) + over_tensor(bias.reshape(3, *heads), 1, HEADS)
    return [part.reshape(*x.shape[:-1], *heads) for part in jnp.split(qkv, 3, axis=2)]


def by_heads(attend: Callable[..., jax.Array], *heads: jax.Array, documents: Any) -> jax.Array:
    """Compute `attend(*heads, documents)` for the local heads of each device.

    JAX (0.10.2, 0.12) cannot partition cuDNN's attention inside a `shard_map` over the other axes of a mesh, so a
    nested `shard_map` over axis `tensor` is used there. It is also used if all other axes have size 1, because JAX's
    partitioning rule fails for a single row. Otherwise the compiler partitions it.

    Layout:  several of [B T H/tensor A], and arrays that all heads share -> [B T H/tensor A]
    """
    mesh = jax.sharding.get_abstract_mesh()
    inside = AxisType.Manual in mesh.axis_types
    if tensor_size() == 1 or not (inside or mesh.size == tensor_size()):
        return attend(*heads, documents)
    spec = PartitionSpec(None, None, AXIS)
    specs = (*[spec] * len(heads), None if documents is None else PartitionSpec())
    names = {AXIS} if inside else set(mesh.axis_names)
    run = jax.shard_map(attend, in_specs=specs, out_specs=spec, axis_names=names, check_vma=False)
    return run(*heads, documents)
