"""Splitting what a model computes over mesh axis `tensor`, where the program has one."""

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

AXIS = "tensor"
VOCABULARY = ("pipe", AXIS)  # stages of a pipeline share embedding and head: their vocabulary is cut over both axes
HEADS = "of queries, keys and values, their heads,"


Placements = dict[str, Any]


def last_dim(path: str, shape: tuple[int, ...]) -> PartitionSpec:
    """Return the spec that splits the last dim of a leaf over axis `tensor`."""
    return PartitionSpec(*[None] * (len(shape) - 1), AXIS)


def make_placements(
    columns: Iterable[str], rows: Iterable[str], vocabulary: Mapping[str, int] | None = None
) -> Placements:
    """Return which dim of which weights axis `tensor` cuts: the last of those that give a wide value, with their
    biases, and the first of those that take one (Megatron-LM, arXiv 1909.08053). For `jfsdp.fully_shard(placements=)`.

    Args:
      vocabulary: of embedding and head, the dim that is the vocabulary.
    """
    words = {name: PartitionSpec(*[None] * dim, VOCABULARY) for name, dim in (vocabulary or {}).items()}
    return {**dict.fromkeys(columns, last_dim), **dict.fromkeys(rows, PartitionSpec(AXIS)), **words}


def _size() -> int:
    return jax.sharding.get_abstract_mesh().shape.get(AXIS, 1)


def split_tokens(x: jax.Array) -> jax.Array:
    """State that the tokens of a row are split over axis `tensor`: between attention and MLP each token is by itself.

    Layout:  [B T D] -> [B T/tensor D], its gradient [B T/tensor D] -> [B T D]; rows whose length the axis does not
             divide stay as they are.
    Cost:    a reduce-scatter of what is a sum over `tensor`; an all-gather of its gradient.
    Source:  sequence parallelism of Megatron-LM (arXiv 2205.05198).
    """
    return stated(True, x) if _splits(x) else x


def whole_rows(x: jax.Array) -> jax.Array:
    """State that each device has whole rows, before what mixes tokens or splits another dim; undoes `split_tokens`.

    Cost:    an all-gather; a reduce-scatter of its gradient.
    """
    return stated(False, x) if _splits(x) else x


def looked_up(x: jax.Array) -> jax.Array:
    """State that rows that were looked up in a table cut along its rows are a sum over axis `tensor`, of whole rows.

    So is their gradient. Without it XLA may bring the table together, and sum a whole gradient of it over all devices;
    inside a `shard_map` over the other axes it does not (JAX 0.10.2), and scatters the sum unasked.
    """
    if not _splits(x) or AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        return x
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(free, None, free))


def _splits(x: jax.Array) -> bool:
    return _size() > 1 and x.shape[1] % _size() == 0


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def stated(is_split: bool, x: jax.Array) -> jax.Array:
    """State how tokens are split over the axis, and the other way round for the cotangent."""
    free = PartitionSpec.UNCONSTRAINED
    return jax.lax.with_sharding_constraint(x, PartitionSpec(free, AXIS if is_split else None, free))


# Two matrix products read the gradient of a sum over `tensor`: unless it is said to be whole, each gathers it.
stated.defvjp(lambda is_split, x: (stated(is_split, x), None), lambda is_split, _, d_x: (stated(not is_split, d_x),))


def over_tensor(x: jax.Array, dim: int, what: str = "of a value") -> jax.Array:
    """State that `dim` is split over axis `tensor`, and leave all other dims to the compiler.

    Layout:  [.. D ..] -> [.. D/tensor ..]; as it is where the mesh in context lacks the axis, or has it in size 1.

    Args:
      what: that dim is, for messages.

    Raises:
      ValueError: if the axis does not divide the dim.
    """
    size = _size()
    if size == 1:
        return x
    if x.shape[dim] % size:
        raise ValueError(
            f"dim {dim} (size {x.shape[dim]}) {what} cannot be split over mesh axis {AXIS!r} (size {size}); give that "
            "axis a size that divides it"
        )
    entries = [AXIS if place == dim % x.ndim else PartitionSpec.UNCONSTRAINED for place in range(x.ndim)]
    return jax.lax.with_sharding_constraint(x, PartitionSpec(*entries))


def fused_heads(x: jax.Array, kernel: jax.Array, bias: jax.Array, num_heads: int) -> list[jax.Array]:
    """Project to queries, keys and values by one kernel that has them side by side, each with its heads in order.

    A contiguous part of such a kernel is no set of heads. So each device takes the columns of its heads from a whole
    kernel; else whole activations would move, which are larger wherever a device has more tokens than D.

    Layout:  [B T D], [D 3*H*A/tensor] or [D 3*H*A], [3*H*A] -> three of [B T H/tensor A]
    Cost:    an all-gather of the gradient of the kernel over `tensor`; where the kernel is cut, one of the kernel too,
             in the forward and again where the unit is recomputed.
    Memory:  the whole kernel.
    """
    heads = (num_heads, kernel.shape[-1] // (3 * num_heads))
    kernel = over_tensor(kernel.reshape(-1, 3, *heads), 2, HEADS)
    qkv = jnp.einsum("btd,dcha->btcha", x, kernel) + over_tensor(bias.reshape(3, *heads), 1, HEADS)
    return [part.reshape(*x.shape[:-1], *heads) for part in jnp.split(qkv, 3, axis=2)]


def by_heads(attend: Callable[..., jax.Array], *heads: jax.Array, documents: Any) -> jax.Array:
    """Compute `attend(*heads, documents)` on each device's own heads.

    Inside a `shard_map` over the other axes of a mesh JAX (0.10.2, 0.12) cannot partition cuDNN's attention: so axis
    `tensor` is written out there too. So it is where the other axes split nothing: of a single row JAX's own rule for
    it fails. Elsewhere the compiler partitions it.

    Layout:  several of [B T H/tensor A], and arrays that all heads share -> [B T H/tensor A]
    """
    mesh = jax.sharding.get_abstract_mesh()
    inside = AxisType.Manual in mesh.axis_types
    if _size() == 1 or not (inside or mesh.size == _size()):
        return attend(*heads, documents)
    spec = PartitionSpec(None, None, AXIS)
    specs = (*[spec] * len(heads), None if documents is None else PartitionSpec())
    names = {AXIS} if inside else set(mesh.axis_names)
    run = jax.shard_map(attend, in_specs=specs, out_specs=spec, axis_names=names, check_vma=False)
    return run(*heads, documents)
