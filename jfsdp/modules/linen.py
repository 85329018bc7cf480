"""Flax Linen models as pure functions of named arrays; units are hooked in linen_unit.py."""

from __future__ import annotations

import copy
import dataclasses
import functools
import inspect
import operator
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen
from flax.core import meta, unfreeze
from flax.core.scope import DenyList, in_filter
from flax.errors import ScopeParamNotFoundError

from jfsdp.arguments import checked
from jfsdp.layout.codec import Codec
from jfsdp.layout.lora import Adapter
from jfsdp.layout.precision import is_key
from jfsdp.layout.report import list_differences
from jfsdp.layout.units import is_within, list_modules
from jfsdp.modules.linen_unit import IN_UNIT, Labelled, NotGathered, is_box, make_interceptor
from jfsdp.modules.model import Arrays, Hooks, ParamTree, join_path, local_rules, struct_of
from jfsdp.modules.parted import Parted, can_cast, map_arrays

PARAMS, RNG_KEY, RNG_COUNT = "params", "rngs.key", "rngs.count"


@checked
class LinenModel:
    """A Linen model as a `FlaxModel`; see `jfsdp.modules.model.FlaxModel`.

    Names are dotted paths: `h_0.attn.kernel` for parameters, `<collection>.<path>` for other variables. The state also
    has a key and a count, `rngs.key` and `rngs.count`: call number n uses `fold_in(key, n)` for all its rng streams, so
    that a loss need not pass `rngs`. A collection that `sow` fills during init is not state.

    Initial parameters are those of `module.init(jax.random.key(seed), *example_inputs)`, which draws every stream from
    that one key. They are the same draws, and the same bits if XLA compiles both alike (on CPU, an init inside nn.scan
    differed by an ulp). Between meshes and strategies no bit differs. `rngs.key` is the same key.

    Args:
      module: an unbound module.
      example_inputs: the inputs of init: a tuple or list of positional arguments, a dict of keyword arguments, or one
        array. A `jax.ShapeDtypeStruct` becomes zeros; other values (`train=False`) are passed unchanged.
      variables: weights to keep, and all other collections, as `module.init` returns them.

    Raises:
      ValueError: if init fails on bare numbers (a shape instead of an array), if the variables are those of another
        module, or for a collection called `rngs`.
    """

    def __init__(self, module: linen.Module, example_inputs: Any, variables: Mapping[str, Any] | None = None):
        self.module = module
        self.adapters: Mapping[str, Adapter] = {}
        self.codecs: Mapping[str, Codec] = {}
        self._args, self._kwargs = _example(example_inputs)
        classes: dict[str, type] = {}
        callers: dict[str, list[str]] = {}
        with linen.intercept_methods(functools.partial(_record, (classes, callers, []))):
            abstract = self._init_abstract(example_inputs)
            after = self._apply_abstract(abstract) if _needs_apply(abstract, classes) else abstract
        if "rngs" in abstract:
            raise ValueError("collection 'rngs': jfsdp stores the rng key and count under this name; rename it")
        self._sown = {name for name, x in abstract.items() if jax.tree.structure(x) != jax.tree.structure(after[name])}
        self._tree = jax.tree.structure(abstract.get(PARAMS, {}))
        self._state_tree = jax.tree.structure(self._collections(abstract))
        params, state = self._split(abstract, jax.random.key(0))
        self.instance = None if variables is None else self._check_given(_plain(variables), {**params, **state})
        if self.instance is not None:
            params, state = self._split(self.instance, jax.random.key(0))
        self.params = {name: struct_of(value) for name, value in params.items()}
        self.state = {name: struct_of(value) for name, value in state.items()}
        self.types: dict[str, type] = {}
        self.aliases: dict[str, str] = {}  # a parameter is named after the module that made it, for all callers
        self.dim_names = {name: names for name, names in self._dim_names.items() if name in self.params and names}
        self.tree = ParamTree(self.named({name: name for name in self.params}))
        self.modules = list_modules(classes, list(self.params), callers)

    def _init_abstract(self, example_inputs: Any) -> dict[str, Any]:
        try:
            return jax.eval_shape(self._init, jax.random.key(0))
        except Exception as error:
            if "not found in mesh" in str(error):
                raise ValueError(
                    f"model: init of {type(self.module).__name__} failed ({error}): nn.with_partitioning takes names "
                    "of mesh axes, such as (None, 'tensor'); for other names use nn.with_logical_partitioning"
                ) from error
            # Numbers may be inputs (of a table of that length): they are treated as a shape only if init fails.
            if not self._args or not all(type(x) is int for x in self._args):
                raise
            raise ValueError(
                f"example_inputs {example_inputs!r}: init of {type(self.module).__name__} failed with these numbers "
                f"({error}); for a shape pass an array or (jax.ShapeDtypeStruct({tuple(self._args)}, 'float32'),)"
            ) from error

    def _init(self, key: jax.Array) -> dict[str, Any]:
        args, kwargs = jax.tree.map(_concrete, (self._args, self._kwargs))
        variables = self.module.init(key, *args, **kwargs)
        self._dim_names = _dim_names(variables)
        return _plain(variables)

    def _apply_abstract(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        """Return shapes of the variables after one call, with a name on each parameter."""
        names, params = iter(_named(variables.get(PARAMS, {}))), variables.get(PARAMS, {})
        labelled = jax.tree.map(lambda x: Labelled(x, next(names), "", tuple(x.shape), self), params)

        def call(variables: Any, key: jax.Array) -> Any:
            args, kwargs = jax.tree.map(_concrete, (self._args, self._kwargs))
            return _plain(self.module.apply(variables, *args, rngs=key, mutable=DenyList(PARAMS), **kwargs)[1])

        return {**variables, **jax.eval_shape(call, {**variables, PARAMS: labelled}, jax.random.key(0))}

    def _collections(self, variables: Mapping[str, Any]) -> dict[str, Any]:
        return {name: value for name, value in variables.items() if name != PARAMS and name not in self._sown}

    def _split(self, variables: Mapping[str, Any], key: jax.Array) -> tuple[Arrays, Arrays]:
        """Split variables into named parameters and state, and add the state of the rngs."""
        rngs = {RNG_KEY: key, RNG_COUNT: jnp.zeros((), jnp.int32)}
        return _named(variables.get(PARAMS, {})), {**_named(self._collections(variables)), **rngs}

    def _check_given(self, variables: dict[str, Any], wanted: Arrays) -> dict[str, Any]:
        params, state = self._split(variables, wanted[RNG_KEY])
        given = {**params, **state}
        there, here = ({name: str(list(x.shape)) for name, x in of.items()} for of in (given, wanted))
        kinds = ("extra", "missing", "of another shape")
        lines = list_differences(there, here, owners=("the variables have", "init makes"), kinds=kinds)
        if lines:
            name = type(self.module).__name__
            raise ValueError(
                f"the given variables do not match {name}:\n{lines}\n  pass all variables that module.init returns"
            )
        return variables

    def create(self, seed: Any) -> tuple[Arrays, Arrays]:
        """Return parameters and other state by name; call it inside `jit`. Given variables are kept."""
        key = jax.random.key(seed)
        return self._split(self._init(key) if self.instance is None else self.instance, key)

    def run(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any, hooks: Hooks
    ) -> tuple[Any, Arrays, Arrays]:
        """Compute `fn(model, *inputs)`, `model` being a `BoundModel`; see `FlaxModel.run`."""
        owners = hooks.owners()
        boxed = dict(params)
        for path in filter(owners.__contains__, params):
            boxed[path] = NotGathered(params[path], path, owners[path], tuple(self.params[path].shape), hooks.call)
        collections = self.plain(boxed, state)
        model = BoundModel(self.module, collections.pop(PARAMS), collections, (state[RNG_KEY], state[RNG_COUNT]), hooks)
        with local_rules():
            out = fn(model, *inputs)
        return out, dict(params), self._collect(model)

    def plain(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> dict[str, Any]:
        """Return the collections of the module, as `module.init` returns them, with these arrays."""
        names = [name for name in self.state if name not in (RNG_KEY, RNG_COUNT)]
        collections = jax.tree.unflatten(self._state_tree, [state[name] for name in names])
        return {PARAMS: self.named(params), **collections}

    def named(self, values: Mapping[str, Any]) -> Any:
        """Return the collection of parameters, with any values by name."""
        return jax.tree.unflatten(self._tree, [values[name] for name in self.params])

    def with_params(self, extra: Mapping[str, jax.ShapeDtypeStruct]) -> LinenModel:
        """Return the model with more parameters; see `PlainModel.with_params`."""
        params = self.named(self.params)
        places = dict(zip(self.params, (path for path, _ in jax.tree_util.tree_leaves_with_path(params)), strict=True))
        for name, leaf in extra.items():
            target = name.rpartition(".")[0]
            *outer, last = (key.key for key in places[target])
            functools.reduce(operator.getitem, outer, params)[f"{last}{name.removeprefix(target)}"] = leaf
        other = copy.copy(self)
        other._tree, other.params = jax.tree.structure(params), _named(params)
        return other

    def _collect(self, model: BoundModel) -> Arrays:
        key, count = model._rngs
        state = {**_named(model._state), RNG_KEY: key, RNG_COUNT: count + model._num_calls}
        changed = sorted(state.keys() ^ self.state.keys())
        if changed:
            raise ValueError(f"the call created or removed state: {', '.join(changed[:4])}; create it in init")
        return {name: state[name] for name in self.state}


class BoundModel:
    """A Linen module with its variables, as a loss function receives it.

    `model(x, train=True)` and `model.method_name(x)` are `module.apply` on the bound variables, and return the method's
    output. Collections from init (batch statistics, caches) are mutable, and the changes of a call are kept. With
    `mutable=` a call returns `(out, variables)` as in Linen, and keeps the changes of existing collections that it
    names. Each call has different rng keys, unless `rngs=` is given. `model.apply` is pure.
    """

    def __init__(self, module: linen.Module, params: Any, state: dict[str, Any], rngs: tuple[Any, Any], hooks: Hooks):
        self.module, self._params, self._state, self._hooks = module, params, state, hooks
        self._rngs, self._num_calls = rngs, 0

    @property
    def params(self) -> Any:
        """The parameters: arrays for the root unit; for other units, objects that raise when they are used."""
        return jax.tree.map(lambda x: x.unbox() if is_box(x) else x, self._params, is_leaf=is_box)

    @property
    def variables(self) -> dict[str, Any]:
        """All collections; parameters as in `params`."""
        return {PARAMS: self.params, **self._state}

    def __call__(self, *args: Any, rngs: Any = None, mutable: Any = None, method: Any = None, **kwargs: Any) -> Any:
        """Call the module, or a method of it by name or function; see the class.

        Raises:
          ValueError: if `mutable` includes the parameters; see also `ShardedApply.__call__`.
        """
        if rngs is None:
            rngs = jax.random.fold_in(self._rngs[0], self._rngs[1] + self._num_calls)
            self._num_calls += 1
        captures = bool(kwargs.get("capture_intermediates"))
        allowed = list(self._state) if mutable is None else mutable
        inputs = Parted((args, kwargs), can_cast, is_data=can_cast)
        if method in (None, "__call__"):
            args, kwargs = map_arrays(self._hooks.cast_inputs, inputs, (args, kwargs))
        out = self.apply(self._state, *args, rngs=rngs, mutable=allowed, method=method, **kwargs)
        out, after = out if allowed is not False or captures else (out, {})
        self._state = {name: after.get(name, value) for name, value in self._state.items()}
        if method in (None, "__call__"):
            inputs.write_back()
            out = map_arrays(self._hooks.cast_outputs, Parted(out, can_cast, is_data=can_cast), out)
        return out if mutable in (None, False) and not captures else (out, after)

    def apply(self, variables: Mapping[str, Any], *args: Any, mutable: Any = False, **kwargs: Any) -> Any:
        """Apply the module to given collections and the model's parameters, like `module.apply`, without side effects.

        For loops of JAX (`lax.scan` over decoding steps). Pass `rngs` too if the module draws random numbers.

        Raises:
          ValueError: if parameters are given or mutable; see also `ShardedApply.__call__`.
        """
        if PARAMS in variables:
            raise ValueError("apply: collection 'params' is the model's own; pass only other collections")
        if in_filter(mutable, PARAMS):
            raise ValueError(f"mutable={mutable!r} includes the parameters; name collections, or DenyList('params')")
        captures = kwargs.get("capture_intermediates")
        if callable(captures):
            kwargs["capture_intermediates"] = lambda module, name: name != IN_UNIT and captures(module, name)
        with linen.intercept_methods(make_interceptor(self._hooks)):
            try:
                return self.module.apply({**variables, PARAMS: self._params}, *args, mutable=mutable, **kwargs)
            except ScopeParamNotFoundError as error:
                if not self._hooks.units:
                    raise
                raise ValueError(
                    f"{error} Init made no such parameter; if a module maps a unit's weights from outside and names it "
                    "after them (nn.WeightNorm), make a unit of a module that contains both, or leave it to the root"
                ) from error

    def __getattr__(self, name: str) -> Any:
        cls, fields = type(self.module), {field.name for field in dataclasses.fields(self.module)}
        if name in fields:
            return getattr(self.module, name)
        is_own = not name.startswith("_") and not hasattr(linen.Module, name)
        if is_own and inspect.isfunction(getattr(cls, name, None)):
            return functools.partial(self, method=name)
        raise AttributeError(f"{cls.__name__} has no method or field {name!r}; call submodules through methods")


def _record(seen: Any, next_fun: Any, args: Any, kwargs: Any, context: Any) -> Any:
    """Record the class of a called module by path, and callers that do not contain it."""
    if context.module.scope is None:
        return next_fun(*args, **kwargs)
    (classes, callers, running), path = seen, join_path(context.module.path)
    classes.setdefault(path, _own_class(type(context.module)))
    if running and not is_within(path, running[-1]):
        callers.setdefault(path, []).append(running[-1])
    running.append(path)
    try:
        return next_fun(*args, **kwargs)
    finally:
        running.pop()


def _own_class(cls: type) -> type:
    """Return the user's class below the subclasses that nn.scan, nn.remat, nn.vmap and nn.jit make."""
    while cls.__module__ == "flax.linen.transforms":
        cls = cls.__bases__[0]
    return cls


def _example(inputs: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(inputs, Mapping):
        return (), dict(inputs)
    return (tuple(inputs), {}) if isinstance(inputs, (tuple, list)) else ((inputs,), {})


def _concrete(value: Any) -> Any:
    if not isinstance(value, jax.ShapeDtypeStruct):
        # As numpy constants, which do not belong to a device: init may be compiled for other devices.
        return np.asarray(value) if isinstance(value, jax.Array) and not is_key(value) else value
    return jnp.broadcast_to(jax.random.key(0), value.shape) if is_key(value) else jnp.zeros(value.shape, value.dtype)


def _plain(variables: Any) -> dict[str, Any]:
    """Unwrap variables from FrozenDicts and boxes (nn.Partitioned), whose names are metadata only."""
    unboxed = jax.tree.map(lambda x: x.value if _is_named(x) else x, unfreeze(variables), is_leaf=_is_named)
    return meta.unbox(unboxed)


def _is_named(x: Any) -> bool:
    return isinstance(x, meta.Partitioned)


def _dim_names(variables: Any) -> dict[str, tuple[Any, ...]]:
    """Return the names of dims in the boxes of parameters (`nn.with_partitioning`, `nn.with_logical_partitioning`)."""
    boxes = jax.tree.leaves(unfreeze(variables).get(PARAMS, {}), is_leaf=_is_named)
    names = _named(_plain(variables).get(PARAMS, {}))
    return {name: tuple(box.names) for name, box in zip(names, boxes, strict=True) if _is_named(box)}


def _needs_apply(variables: Mapping[str, Any], classes: Mapping[str, type]) -> bool:
    """Tell whether a call is needed after init: for modules that nn.jit did not retrace, or tuples that `sow` fills."""
    state = [value for name, value in variables.items() if name != PARAMS]
    keys = [key for path, _ in jax.tree_util.tree_leaves_with_path(state) for key in path[1:]]
    names = _named(variables.get(PARAMS, {}))
    unseen = {name.rpartition(".")[0] for name in names} - classes.keys()
    return bool(unseen) or any(not isinstance(key, jax.tree_util.DictKey) for key in keys)


def _named(tree: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    flat = [(jax.tree_util.keystr(path, simple=True, separator="."), value) for path, value in leaves]
    named = dict(flat)
    if len(named) < len(flat):
        twice = next(name for name, _ in flat if [other for other, _ in flat].count(name) > 1)
        raise ValueError(f"{twice}: two variables of the model have this dotted name; rename one of them")
    return named
