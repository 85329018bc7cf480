"""Computation on whole matrices: each device gets some of the matrices of a batch, and returns its results."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec

from jfsdp.compat import core
from jfsdp.engine.engine import Engine, pad_leaf
from jfsdp.engine.movements import ALL_TO_ALL, GATHER, UPDATE, Move
from jfsdp.layout.leaf import Leaf
from jfsdp.train.update.roles import place_array

Shape = tuple[int, ...]


def pad(engine: Engine, leaf: Leaf, value: jax.Array) -> jax.Array:
    """Bring an array in a leaf's logical shape to its stored shape, at stage `opt`. Moves no data between devices."""
    return _constrain(engine, leaf, pad_leaf(_constrain(engine, leaf, value), leaf)) if leaf.padding else value


def unpad(engine: Engine, leaf: Leaf, value: jax.Array) -> jax.Array:
    """Undo `pad`."""
    if not leaf.padding or leaf.dim is None:
        return value
    return _constrain(engine, leaf, jax.lax.slice_in_dim(value, 0, leaf.shape[leaf.dim], axis=leaf.dim))


def _constrain(engine: Engine, leaf: Leaf, value: jax.Array) -> jax.Array:
    return engine.constrain({leaf.path: value}, "opt")[leaf.path]


class Form:
    """The split form of an array of a leaf, before and after an exchange.

    Attributes:
      layers: the number of leading dims that are layers; 0: all layers have the same array.
      leaf, spec: the leaf, and its layout.
      local_layers: the sizes of these dims on a device, in a pipeline those of a stage; `num_stages` is their number.
      shape: the logical shape of one matrix.
      splits: by the axes of each split dim of a matrix, the dim and the number of parts.
    """

    def __init__(self, engine: Engine, leaf: Leaf, shape: Shape, layers: int, lead: Form | None = None):
        roles = [place_array(engine.layout, "", leaf.path, some) for some in (leaf.shape, shape)]
        self.leaf = leaf
        self.layers = layers if shape[:layers] == leaf.shape[:layers] else 0
        self.shape, self.padded_shape = shape[self.layers :], roles[1].stored_shape[self.layers :]
        of_leaf, of_array = (engine.layout.named_sharding(engine.mesh, role.spec).spec for role in roles)
        padded = (*of_array, *[None] * len(shape))[: len(shape)]
        spec = (*of_leaf, *[None] * layers)[: self.layers] + padded[self.layers :]  # stages of a pipeline as the leaf
        entries = [entry if isinstance(entry, tuple) else (entry,) for entry in spec]
        axes_of = [tuple(axis for axis in axes if axis) for axes in entries]
        if lead is not None:  # only splits that the leaf has
            axes_of[self.layers :] = [axes if axes in lead.splits else () for axes in axes_of[self.layers :]]
        sizes = [math.prod(engine.mesh.shape[axis] for axis in axes) for axes in axes_of]
        self.spec, self.num_stages = PartitionSpec(*[axes or None for axes in axes_of]), math.prod(sizes[: self.layers])
        self.local_layers = [n // size for n, size in zip(shape[: self.layers], sizes, strict=False)]
        of_matrix = zip(axes_of[self.layers :], sizes[self.layers :], strict=True)
        self.splits = {axes: (dim, size) for dim, (axes, size) in enumerate(of_matrix) if size > 1}

    @property
    def key(self) -> Any:
        """Forms of equal keys can be in one batch."""
        return self.shape, self.padded_shape, bool(self.layers), tuple(self.splits.items()), self.num_stages

    def moves(self, dtype: Any, steps: Sequence[Step], *, is_back: bool = False) -> Iterator[Move]:
        """Yield the movements of an array of a batch to the owners, or back."""
        elements = math.prod(self.padded_shape) // math.prod(size for _, size in self.splits.values())

        def move(kind: str, step: Step, num: int, size: int) -> Move:
            flat = dataclasses.replace(self.leaf, shape=(num,), stacked=0, dim=0, padding=0, cuts=())
            return Move(flat, UPDATE, kind, step.axes, dtype.name, size, is_of_matrices=True)

        for step in steps:
            num = step.num_each * step.owners * elements
            if step.axes in self.splits:
                yield move(ALL_TO_ALL, step, num, step.owners)
                elements *= step.size
                if not is_back:
                    yield move(GATHER, step, num * step.share, step.share)
            elif is_back:
                yield move(GATHER, step, num, step.owners)


@dataclasses.dataclass(frozen=True)
class Step:
    """Exchange over some mesh axes: `num` matrices are divided between `owners` groups of `size / owners` devices."""

    axes: tuple[str, ...]
    size: int
    owners: int
    num: int

    @classmethod
    def cheapest(cls, axes: tuple[str, ...], size: int, num: int) -> Step:
        """Choose the number of owners that sends the fewest bytes, there and back."""
        shares = [share for share in range(1, size + 1) if size % share == 0 and (share == 1 or len(axes) == 1)]

        def cost(share: int) -> float:
            owners = size // share
            return math.ceil(num / owners) * owners * (2 * (owners - 1) / owners + share - 1)

        return cls(axes, size, size // min(shares, key=cost), num)

    @property
    def share(self) -> int:
        """The number of devices that have the same matrices."""
        return self.size // self.owners

    @property
    def num_each(self) -> int:
        """The number of matrices of an owner, including padding."""
        return math.ceil(self.num / self.owners)

    @property
    def _groups(self) -> tuple[Any, Any]:
        """The devices that exchange parts, and those that share matrices."""
        places = np.arange(self.size).reshape(self.owners, self.share)
        return (None, None) if self.share in (1, self.size) else (places.T.tolist(), places.tolist())

    def to_whole(self, x: jax.Array, dim: int | None) -> jax.Array:
        """Bring [num ... d/size ...] to [num_each ... d ...]; `dim` is that of d, None if no dim is split."""
        x = jnp.pad(x, [(0, self.num_each * self.owners - x.shape[0]), *[(0, 0)] * (x.ndim - 1)])
        index, (others, same) = jax.lax.axis_index(self.axes), self._groups
        if dim is None:
            return jax.lax.dynamic_slice_in_dim(x, index // self.share * self.num_each, self.num_each)
        if self.owners > 1:
            x = jax.lax.all_to_all(x, self.axes, 0, dim, axis_index_groups=others, tiled=True)
        if self.share > 1:  # each device has a block of every owner's
            x = self._blocks(x, dim, 1)
            x = jax.lax.all_gather(x, self.axes, axis=dim + 1, axis_index_groups=same, tiled=True)
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 3 :])
        return x

    def to_split(self, x: jax.Array, dim: int | None) -> jax.Array:
        """Undo `to_whole`; without `dim`, gather the matrices of all owners."""
        index, (others, _) = jax.lax.axis_index(self.axes), self._groups
        if dim is not None and self.share > 1:
            x = jax.lax.dynamic_slice_in_dim(self._blocks(x, dim, self.share), index % self.share, 1, axis=dim + 1)
            x = x.reshape(*x.shape[:dim], -1, *x.shape[dim + 3 :])
        if self.owners > 1 and dim is None:
            x = jax.lax.all_gather(x, self.axes, axis=0, axis_index_groups=others, tiled=True)
        elif self.owners > 1:
            x = jax.lax.all_to_all(x, self.axes, dim, 0, axis_index_groups=others, tiled=True)
        return x[: self.num]

    def _blocks(self, x: jax.Array, dim: int, share: int) -> jax.Array:
        return x.reshape(*x.shape[:dim], self.owners, share, -1, *x.shape[dim + 1 :])


class Part(NamedTuple):
    """A computation on the whole matrices of one leaf.

    Attributes:
      leaf, layers: the leaf, and the number of its leading dims that are layers.
      jaxpr: the computation for one layer, whose dims of layers have size 1, from arrays like `moved` and `shared`.
      moved, shared, results: variables: arrays of the leaf, arrays that are equal for all matrices, and results.
    """

    leaf: Leaf
    layers: int
    jaxpr: Any
    moved: list[Any]
    shared: list[Any]
    results: list[Any]

    def forms(self, engine: Engine, lead: Form | None = None) -> tuple[list[Form], list[Form]]:
        """Return the forms of `moved` and of `results`."""
        groups = (self.moved, self.results)
        moved, results = ([Form(engine, self.leaf, x.aval.shape, self.layers, lead) for x in some] for some in groups)
        return moved, results

    def key(self, engine: Engine) -> Any:
        """Parts of equal keys are computed as one batch."""
        return str(self.jaxpr), *self.shared, *(form.key for forms in self.forms(engine) for form in forms)


def compute_whole(engine: Engine, parts: Sequence[Part], env: Mapping[Any, Any]) -> tuple[dict[Any, Any], list[Move]]:
    """Run parts of equal keys on whole matrices, each matrix on its owner.

    Arrays that are not split over the same axes as their leaf are gathered by XLA.

    Args:
      env: values of variables, in logical shapes.

    Returns:
      The values of the results, and the movements of a step.
    """
    lead = Form(engine, parts[0].leaf, parts[0].leaf.shape, parts[0].layers)
    nums = [math.prod(part.leaf.shape[: part.layers]) // lead.num_stages for part in parts]
    steps: list[Step] = []
    for axes, (_, size) in lead.splits.items():
        steps.append(Step.cheapest(axes, size, steps[-1].num_each if steps else sum(nums)))
    forms_in, forms_out = zip(*(part.forms(engine, lead) for part in parts), strict=True)

    def on_device(arrays: list[list[jax.Array]], shared: list[jax.Array]) -> list[list[jax.Array]]:
        whole = []
        for of_leaves, forms in zip(zip(*arrays, strict=True), zip(*forms_in, strict=True), strict=True):
            rows = [
                jnp.broadcast_to(x.reshape(-1 if f.layers else 1, *x.shape[f.layers :]), (num, *x.shape[f.layers :]))
                for x, f, num in zip(of_leaves, forms, nums, strict=True)
            ]
            whole.append(_to_whole(jnp.concatenate(rows), forms[0], steps))

        def of_one(*values: jax.Array) -> list[jax.Array]:
            given = [x.reshape(*[1] * f.layers, *f.shape) for x, f in zip(values, forms_in[0], strict=True)]
            found = core.eval_jaxpr(parts[0].jaxpr, (), *given, *shared)
            return [x.reshape(f.shape) for x, f in zip(found, forms_out[0], strict=True)]

        results = [_to_split(x, f, steps) for x, f in zip(jax.vmap(of_one)(*whole), forms_out[0], strict=True)]
        return [
            [x[end - num : end].reshape(*f.local_layers, *x.shape[1:]) for x, f in zip(results, forms, strict=True)]
            for end, num, forms in zip(np.cumsum(nums).tolist(), nums, forms_out, strict=True)
        ]

    def stored(change: Callable[..., jax.Array], leaf: Leaf, var: Any, value: jax.Array) -> jax.Array:
        return change(engine, leaf, value) if var.aval.shape == leaf.shape else value

    given = [[stored(pad, part.leaf, x, env[x]) for x in part.moved] for part in parts]
    specs_in, specs_out = ([[form.spec for form in some] for some in forms] for forms in (forms_in, forms_out))
    specs = specs_in, [PartitionSpec()] * len(parts[0].shared)
    run = jax.shard_map(on_device, mesh=engine.mesh, in_specs=specs, out_specs=specs_out, check_vma=False)
    found: dict[Any, Any] = {}
    for part, values in zip(parts, run(given, [env[x] for x in parts[0].shared]), strict=True):
        found |= {x: stored(unpad, part.leaf, x, value) for x, value in zip(part.results, values, strict=True)}
    moves = [move for f, x in zip(forms_in[0], parts[0].moved, strict=True) for move in f.moves(x.aval.dtype, steps)]
    pairs = zip(forms_out[0], parts[0].results, strict=True)
    return found, moves + [move for f, x in pairs for move in f.moves(x.aval.dtype, steps, is_back=True)]


def _to_whole(x: jax.Array, form: Form, steps: Sequence[Step]) -> jax.Array:
    """Bring the shards of all matrices [K ... n/N] to the device's whole matrices [K/N ... n]."""
    for step in steps:
        x = step.to_whole(x, form.splits[step.axes][0] + 1 if step.axes in form.splits else None)
    return x[(slice(None), *map(slice, form.shape))]


def _to_split(x: jax.Array, form: Form, steps: Sequence[Step]) -> jax.Array:
    """Undo `_to_whole`."""
    x = jnp.pad(x, [(0, 0), *((0, b - a) for a, b in zip(form.shape, form.padded_shape, strict=True))])
    for step in reversed(steps):
        x = step.to_split(x, form.splits[step.axes][0] + 1 if step.axes in form.splits else None)
    return x
