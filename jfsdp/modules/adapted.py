"""A Flax model with low-rank adapters of some of its parameters; the user's modules are not changed.

[Note: where adapters are]
The parts of an adapter are parameters of the module that has the matrix, and are named after it:
`q_proj.kernel.lora_a`. The user's code does not read them, but scans, remats and units carry them along with the
matrix. A unit's call computes with them (`jfsdp.engine.low_rank`).

[Note: masks of dropout]
The mask of an adapter's input is drawn from a key in the model's state and a count that every microbatch increases, so
that it is carried, saved, and folded on each device like any rng state. The matrix's name is folded in and, for a
stack, the number of the layer. This number is an array next to the matrix, since inside a scan nothing else
distinguishes layers.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.codec import Codec, coded_shapes, find_codecs, scales_of
from jfsdp.layout.lora import LAYER, MAGNITUDE, A, Adapter, B, find_adapters, layer_shapes, part_shapes
from jfsdp.layout.units import ModuleInfo, UnitInfo, with_added_leaves
from jfsdp.layout.wrapped import WrappedModel
from jfsdp.modules.model import Arrays, FlaxModel, Hooks, ParamTree, PlainModel

DROPOUT_KEY, DROPOUT_COUNT = "lora_dropout.key", "lora_dropout.count"


def adapt(
    wrapped: WrappedModel, base: PlainModel, units: Mapping[str, UnitInfo]
) -> tuple[FlaxModel, Mapping[str, UnitInfo]]:
    """Return a wrapped model with its adapters and codes, and the units with the added leaves.

    Raises:
      ValueError: as `find_adapters` and `find_codecs`.
    """
    if not wrapped.loras and not wrapped.codecs:
        return base, units
    stacked = {leaf: unit.stacked for unit in units.values() for leaf in unit.leaves}
    leaves = base.params, stacked, base.types
    model = AdaptedModel(base, find_adapters(wrapped.loras, *leaves), find_codecs(wrapped.codecs, *leaves))
    return model, {name: with_added_leaves(unit, model.added) for name, unit in units.items()}


class AdaptedModel:
    """A model with adapters, and with codes in place of some weights; see `FlaxModel`.

    In the tree that optimizers see, an adapted array is replaced by a dict of the parts of its adapter.

    Args:
      base: the user's model.
      adapters, codecs: by path of their leaf.
    """

    def __init__(self, base: PlainModel, adapters: Mapping[str, Adapter], codecs: Mapping[str, Codec]):
        coded = coded_shapes(codecs, base.params)
        scales = {name: leaf for name, leaf in coded.items() if name not in base.params}
        extra = part_shapes(adapters) | layer_shapes(adapters) | scales
        self.base, self.adapters, self.codecs, self._whole = base, adapters, codecs, base.with_params(extra)
        self.params, self.types = {**self._whole.params, **coded}, self._whole.types
        draws = any(one.dropout for one in adapters.values())
        self.state = base.state | (jax.eval_shape(_first_rngs, 0) if draws else {})
        self.dim_names, self.aliases, self.instance = base.dim_names, base.aliases, base.instance
        self.modules: list[ModuleInfo] = base.modules
        views = {path: {part: one.name(part) for part in one.parts} for path, one in adapters.items()}
        self.tree = ParamTree(base.named({name: views.get(name, name) for name in base.params}))

    @property
    def added(self) -> dict[str, jax.ShapeDtypeStruct]:
        """The leaves that are not the model's own parameters: parts of adapters, and scales."""
        return {name: leaf for name, leaf in self.params.items() if name not in self.base.params}

    def create(self, seed: Any) -> tuple[Arrays, Arrays]:
        """Return parameters and other state by name; see `FlaxModel.create`."""
        made, state = self.base.create(seed)
        params = dict(jax.lax.optimization_barrier(made))  # otherwise XLA recomputes weights for norms, in other bits
        for path, codec in self.codecs.items():
            params[path], params[scales_of(path)] = codec.encode(params[path])
        adapters = create_adapters(self.adapters, decode_all(self.codecs, params), seed)
        return {**params, **adapters}, state | (_first_rngs(seed) if DROPOUT_KEY in self.state else {})

    def run(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any, hooks: Hooks
    ) -> tuple[Any, Arrays, Arrays]:
        """Compute `fn(model, *inputs)` like the base model: the calls of its units decode, and add the adapters."""
        own = {name: state[name] for name in self.state if name not in self.base.state}
        given = {name: state[name] for name in self.base.state}
        out, params, after = self._whole.run(fn, params, given, inputs, hooks)
        return out, params, after | {name: x + 1 if name == DROPOUT_COUNT else x for name, x in own.items()}

    def plain(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> Any:
        """Return the user's own model, decoded, with each adapter added to its matrix.

        These matrices are in the model's own dtype, since fewer bits at rest would round away the adapters.
        """
        values = decode_all(self.codecs, params)
        own = {path: values[path].astype(self.base.params[path].dtype) for path in self.adapters}
        merged = {path: merge(own[path], one, values) for path, one in self.adapters.items()}
        return self.base.plain({**values, **merged}, {name: state[name] for name in self.base.state})


def decode_all(codecs: Mapping[str, Codec], params: Mapping[str, Any]) -> dict[str, Any]:
    """Return parameters by name, with decoded values in place of codes."""
    found = dict(params)
    for path in codecs.keys() & found.keys():
        found[path] = codecs[path].decode(found[path], found[scales_of(path)])
    return found


def create_adapters(adapters: Mapping[str, Adapter], params: Mapping[str, jax.Array], seed: Any) -> Arrays:
    """Return initial parts of adapters by name, in float32; they do not change a model's outputs.

    Args:
      params: by name, at least the leaves with adapters, of logical shape.
    """
    found: Arrays = {}
    for path, one in adapters.items():
        key = jax.random.fold_in(jax.random.key(seed), np.uint32(zlib.crc32(path.encode())))
        bound = 1 / np.sqrt(np.prod(one.shape[one.stacked : one.stacked + one.num_in]))
        found[one.name(A)] = jax.random.uniform(key, one.part_shape(A), jnp.float32, -bound, bound)
        found[one.name(B)] = jnp.zeros(one.part_shape(B), jnp.float32)
        if one.dropout:
            layers = one.part_shape(LAYER)
            found[one.name(LAYER)] = jnp.arange(np.prod(layers), dtype=jnp.uint32).reshape(layers)
        if one.has_magnitude:
            found[one.name(MAGNITUDE)] = column_norms(params[path], one)
    return found


def _first_rngs(seed: Any) -> Arrays:
    return {DROPOUT_KEY: jax.random.fold_in(jax.random.key(seed), 1), DROPOUT_COUNT: jnp.zeros((), jnp.int32)}


def dropout_key(state: Mapping[str, Any]) -> jax.Array | None:
    """Return the key of a microbatch's masks, from a model's state; None if no adapter has dropout."""
    return jax.random.fold_in(state[DROPOUT_KEY], state[DROPOUT_COUNT]) if DROPOUT_KEY in state else None


def dropout_keys(key: jax.Array, adapter: Adapter, layers: jax.Array) -> jax.Array:
    """Return a key for each of the given layers of an adapted matrix; see [Note: masks of dropout]."""
    own = jax.random.fold_in(key, np.uint32(zlib.crc32(adapter.path.encode())))
    return jax.vmap(jax.random.fold_in, (None, 0))(own, layers.reshape(-1)).reshape(layers.shape)


def column_norms(weight: jax.Array, adapter: Adapter) -> jax.Array:
    """Return the norm of each column of a matrix, in float32: over the input dims, for each output."""
    dims = tuple(range(weight.ndim - len(adapter.shape) + adapter.stacked, weight.ndim))[: adapter.num_in]
    return jnp.sqrt(jnp.sum(jnp.square(weight.astype(jnp.float32)), dims))


def merge(weight: jax.Array, adapter: Adapter, parts: Mapping[str, jax.Array]) -> jax.Array:
    """Return the sum of a matrix and its adapter, in the dtype of the matrix.

    Layout:  layer dims, [in, out], [in, rank] and [rank, out] -> [in, out]
    """
    a, b = (parts[adapter.name(part)].astype(jnp.float32) for part in (A, B))
    layers, ins = weight.ndim - len(adapter.shape) + adapter.stacked, adapter.num_in
    flat_a, flat_b = a.reshape(*a.shape[:layers], -1, adapter.rank), b.reshape(*b.shape[: layers + 1], -1)
    product = jnp.matmul(flat_a, flat_b, precision="highest").reshape(weight.shape)
    whole = weight.astype(jnp.float32) + adapter.scale * product
    if adapter.has_magnitude:
        gain = parts[adapter.name(MAGNITUDE)].astype(jnp.float32) / column_norms(whole, adapter)
        whole = whole * jnp.expand_dims(gain, tuple(range(layers, layers + ins)))
    return whole.astype(weight.dtype)
