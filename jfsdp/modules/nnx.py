"""Flax NNX models as pure functions of named arrays; units are hooked in nnx_unit.py."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import jax
from flax import nnx

from jfsdp.arguments import check_call
from jfsdp.layout.codec import Codec
from jfsdp.layout.lora import Adapter
from jfsdp.layout.units import ROOT, ModuleInfo, list_modules
from jfsdp.modules.model import Arrays, Hooks, ParamTree, join_path, local_rules, not_gathered, struct_of
from jfsdp.modules.nnx_unit import hook_root, hook_unit


class NNXModel:
    """An NNX model as a `FlaxModel`; see `jfsdp.modules.model.FlaxModel`.

    Names are dotted paths: `layers.0.attn.kernel`. Variables other than `nnx.Param` are state.

    Args:
      source: a factory `f(rngs) -> nnx.Module`, or an `nnx.Module` whose weights are kept.
    """

    def __init__(self, source: Any):
        self.instance = source if isinstance(source, nnx.Module) else None
        self.factory = source
        self.adapters: Mapping[str, Adapter] = {}
        self.codecs: Mapping[str, Codec] = {}
        split = _abstract(source) if self.instance is None else nnx.split(self.instance, nnx.Param, ...)
        self.graphdef, params, state = split
        self._params, self._state = nnx.to_flat_state(params), nnx.to_flat_state(state)
        self.params = {name: struct_of(value) for name, value in _arrays(self._params).items()}
        self.state = {name: struct_of(value) for name, value in _arrays(self._state).items()}
        self.types = _types(self._params)
        self.dim_names = _dim_names(self._params)
        self.tree = ParamTree(self.named({name: name for name in self.params}))
        model = self.instance if self.instance is not None else nnx.merge(self.graphdef, params, state)
        self.modules = _modules(model, list(self.params))
        self.aliases = _aliases(model, self.params)

    def create(self, seed: Any) -> tuple[Arrays, Arrays]:
        """Return parameters and other state by name; call it inside `jit`. A given instance keeps its weights."""
        model = self.instance if self.instance is not None else _make(self.factory, jax.random.key(seed))
        _, params, state = nnx.split(model, nnx.Param, ...)
        return _arrays(nnx.to_flat_state(params)), _arrays(nnx.to_flat_state(state))

    def run(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any, hooks: Hooks
    ) -> tuple[Any, Arrays, Arrays]:
        """Compute `fn(model, *inputs)` on a traced copy of the user's model; see `FlaxModel.run`."""
        model = self._bind(params, state, hooks)
        with local_rules(), nnx.use_eager_sharding(False):  # variables that a call creates; see `_make`
            out = fn(model, *inputs)
        return out, *self._collect(model)

    def plain(self, params: Mapping[str, Any], state: Mapping[str, Any]) -> nnx.Module:
        """Return the model with these arrays."""
        flat = [_with_arrays(self._params, params), _with_arrays(self._state, state)]
        return nnx.merge(self.graphdef, *(nnx.from_flat_state(part) for part in flat))

    def named(self, values: Mapping[str, Any]) -> nnx.State:
        """Return the state of `nnx.Param` with any values by name."""
        return nnx.from_flat_state(_with_arrays(self._params, values))

    def with_params(self, extra: Mapping[str, jax.ShapeDtypeStruct]) -> NNXModel:
        """Return the model with more parameters; see `PlainModel.with_params`."""
        model = self.plain(self.params, self.state)
        nodes = {join_path(path): node for path, node in nnx.iter_graph(model)}
        owners = {name: path for path, _ in self._params for name in [join_path(path)]}
        for name, leaf in extra.items():
            target = name.rpartition(".")[0]
            if target not in owners:
                raise ValueError(f"{target}: this variable has several arrays; adapters support variables with one")
            module, key = nodes[join_path(owners[target][:-1])], owners[target][-1]
            if not isinstance(key, str):
                raise ValueError(f"{target}: is in a list; adapters support attributes of a module only")
            setattr(module, f"{key}{name.removeprefix(target)}", nnx.Param(leaf))
        other = copy.copy(self)
        other.graphdef, params, _ = nnx.split(model, nnx.Param, ...)
        other._params = nnx.to_flat_state(params)
        other.params = {name: struct_of(value) for name, value in _arrays(other._params).items()}
        other.types = _types(other._params)
        return other

    def _bind(self, params: Mapping[str, Any], state: Mapping[str, Any], hooks: Hooks) -> nnx.Module:
        """Return the model with these arrays, with hooks at its units and guards on their parameters."""
        model = self.plain(params, state)
        owners = hooks.owners()
        for path, node in nnx.iter_graph(model):
            name = join_path(path)
            if isinstance(node, nnx.Param) and name in owners:
                own = node.get_metadata("on_get_value", ())  # the user's hooks
                own = own if isinstance(own, tuple) else (own,)
                node.set_metadata(on_get_value=(_guard(name, owners[name], hooks), *own))
            elif isinstance(node, nnx.Module) and name == ROOT:
                hook_root(node, hooks)
            elif isinstance(node, nnx.Module) and name in hooks.units:
                hook_unit(node, hooks.units[name], hooks)
        return model

    def _collect(self, model: nnx.Module) -> tuple[Arrays, Arrays]:
        """Return the parameters and the other state of a bound model; sown values are dropped."""
        _, *parts = nnx.split(model, nnx.Param, nnx.Intermediate, ...)
        params, sown, state = (_arrays(nnx.to_flat_state(part)) for part in parts)
        state |= {name: value for name, value in sown.items() if name in self.state}
        changed = sorted((params.keys() ^ self.params.keys()) | (state.keys() ^ self.state.keys()))
        if changed:
            raise ValueError(f"the call created or removed state: {', '.join(changed[:4])}; create it in __init__")
        return params, state


def _guard(path: str, unit: str, hooks: Hooks) -> Callable[..., Any]:
    def guard(variable: Any, value: Any) -> Any:
        del variable
        if not hooks.is_open(unit):
            raise not_gathered(path, unit)
        return value

    return guard


def _abstract(factory: Any) -> tuple[Any, nnx.State, nnx.State]:
    """Split a factory's model into its graph definition and shapes. This happens inside the trace: outside, flax
    (0.12.8) treats a bare shape in a dict or a list as static.
    """
    if not callable(factory):
        raise TypeError(
            f"model {factory!r} is neither an nnx.Module, a factory f(rngs) -> nnx.Module, nor (linen_module, "
            "example_inputs)"
        )
    if isinstance(factory, type) and issubclass(factory, nnx.Module):
        _check_class(factory)
    else:
        check_call("model", factory, "rngs", remedy="; pass a factory such as lambda rngs: Net(rngs)")
    graphdefs = []

    def make() -> Any:
        graphdef, *parts = nnx.split(_make(factory, 0), nnx.Param, ...)
        graphdefs.append(graphdef)
        return parts

    params, state = jax.eval_shape(make)
    return graphdefs[0], params, state


def _check_class(module: type) -> None:
    """Check that a class can be constructed from rngs only. Binding to the class itself accepts any arguments."""
    name, signature = module.__name__, inspect.signature(module.__init__)
    try:
        signature.bind("self", "rngs")
    except TypeError as error:
        raise ValueError(f"model {name} needs more than rngs ({error}); pass lambda rngs: {name}(...)") from None


def _make(factory: Any, seed: Any) -> nnx.Module:
    """Make a model inside a trace.

    Its sharding metadata stays metadata. By default Flax applies it when a variable is created, and raises for logical
    names without rules, and for all names without a mesh in context. A variable remembers this setting. It is reset
    here, so that trees of variables equal those of the user's own model.
    """
    with nnx.use_eager_sharding(False):
        model = factory(nnx.Rngs(seed))
    if not isinstance(model, nnx.Module):
        raise TypeError(f"the model factory returned {type(model).__name__}; it must return an nnx.Module")
    for _, node in nnx.iter_graph(model):
        if isinstance(node, nnx.Variable):
            node.set_metadata("eager_sharding", nnx.using_eager_sharding())
        elif isinstance(node, nnx.Module):
            # Bare arrays are data, as in a model that is made outside a trace. Inside one, flax (0.12.8, 0.12.12)
            # treats them as static: `isinstance(tracer, tp.Union[jax.Array, ...])` is False on Python 3.11 and 3.12.
            # Remove this when Flax recognizes tracers.
            for name, value in list(vars(node).items()):
                if isinstance(value, jax.Array):
                    setattr(node, name, nnx.data(value))
    return model


def _arrays(flat: Any) -> Arrays:
    """Name every array of a flat state; the arrays of a variable with several get numbers."""
    named = {}
    for path, variable in flat:
        leaves = jax.tree.leaves(variable)
        for index, leaf in enumerate(leaves):
            name = join_path(path) if len(leaves) == 1 else f"{join_path(path)}.{index}"
            if name in named:
                raise ValueError(f"{name}: two arrays would have this name; remove the '.' from the key of one")
            named[name] = leaf
    return named


def _types(flat: Any) -> dict[str, type]:
    return {name: type(variable) for path, variable in flat for name in _arrays([(path, variable)])}


def _dim_names(flat: Any) -> dict[str, tuple[Any, ...]]:
    """Return the names of dims in the metadata of variables (`nnx.with_partitioning`, `out_sharding=`)."""
    found = {}
    for path, variable in flat:
        sharding = variable.get_metadata("out_sharding", None)
        if sharding is not None:
            spec = getattr(sharding, "spec", sharding)
            names = (spec,) if isinstance(spec, str) else tuple(spec)
            named = tuple(name if isinstance(name, str | tuple) else None for name in names)  # others: left to XLA
            found |= dict.fromkeys(_arrays([(path, variable)]), named)
    return found


def _with_arrays(flat: Any, arrays: Mapping[str, Any]) -> Any:
    names = list(_arrays(flat))
    return jax.tree.unflatten(jax.tree.structure(flat), [arrays[name] for name in names])


def _aliases(model: nnx.Module, names: Iterable[str]) -> dict[str, str]:
    """Return by other name of a parameter with several paths in the model, its own name."""
    found = {}
    for first, *others in nnx.find_duplicates(model):
        at = join_path(first)
        below = [name for name in names if name == at or name.startswith(f"{at}.")]
        found |= {join_path(other) + name[len(at) :]: name for other in others for name in below}
    return found


def _modules(model: nnx.Module, leaves: Sequence[str]) -> list[ModuleInfo]:
    """List the modules, the root first; a module with several paths has the first as its name."""
    found = {path: type(node) for path, node in nnx.iter_graph(model) if isinstance(node, nnx.Module)}
    in_order = sorted(found, key=lambda path: [(isinstance(key, str), key) for key in path])
    ways = {join_path(path): [join_path(way[:-1]) for way in ways] for path, *ways in nnx.find_duplicates(model)}
    return list_modules({join_path(path): found[path] for path in in_order}, leaves, ways)
