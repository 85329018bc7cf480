"""Run a user's function on a sharded model: bind it, gather the root unit, hook every other unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from jfsdp.engine.auto import AutoEngine, cast_floating
from jfsdp.engine.dataflow import passes_through
from jfsdp.engine.unit import Arrays
from jfsdp.layout.units import ROOT
from jfsdp.modules.nnx import NNXModel, inner_names, root_hook, unit_hook


class ShardedApply:
    """A model, its layout and an engine, as one pure function of arrays.

    The root unit is the user's function itself: its leaves are gathered before it starts and, unless they are
    resharded, stay until its backward ends. Every other unit is gathered around its own `__call__`.
    """

    def __init__(self, model: NNXModel, engine: AutoEngine):
        self.model, self.engine, self.layout = model, engine, engine.layout
        self._open: list[str] = []
        self._guards = {
            leaf.path: self._guard(leaf.path, leaf.unit) for leaf in self.layout.leaves if leaf.unit != ROOT
        }
        self._hooks = {
            unit.name: unit_hook(model.module_class(unit.name), unit, self._call_unit)
            for unit in self.layout.units
            if unit.name != ROOT and unit.leaves
        }
        policy = self.layout.policy(ROOT).mp_policy
        cast_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._hooks[ROOT] = root_hook(
            model.module_class(ROOT),
            lambda x: cast_floating(x, cast_dtype),
            lambda x: cast_floating(x, policy.output_dtype),
        )

    def __call__(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], *inputs: Any
    ) -> tuple[Any, Arrays]:
        """Compute `fn(model, *inputs)`; return its output (a pytree of arrays) and the model's other state afterwards.

        Layout:  `params` by name in the layout of their `source` stage, anything else as it comes.
        Cost, Memory: as `jfsdp.engine.unit.call_unit`, for each unit.

        Raises:
          ValueError: if a unit's weight is read outside its `__call__`, if a call writes parameters, or if a unit is
            called on slices that the layout does not know.
        """
        root = {path: params[path] for path in self.layout.unit(ROOT).leaves}
        inner = {path: value for path, value in params.items() if path not in root}

        def evaluate(full: Arrays, rest: Any) -> tuple[Any, Arrays, Arrays]:
            model = self.model.bind({**full, **rest["params"]}, rest["state"], self._hooks, self._guards)
            out = fn(model, *rest["batch"])
            return out, *self.model.collect(model)

        names, may_write = [*root, *inner], False

        def params_after(full: Arrays, rest: Any) -> Any:
            after = evaluate(full, rest)[1]
            return [after[path] for path in names]

        def run(full: Arrays, rest: Any) -> Any:
            nonlocal may_write
            out, after, state = evaluate(full, rest)
            may_write = any(after[path] is not value for path, value in (*full.items(), *rest["params"].items()))
            return out, state

        rest = {"params": inner, "state": dict(state), "batch": inputs, "inputs": []}
        out = self.engine.call_unit(ROOT, run, root, rest)
        if may_write:
            self._check_writes(ROOT, params_after, names, root, rest)
        return out

    def _call_unit(self, name: str, run: Any, shards: Arrays, rest: Any) -> Any:
        self._open.append(name)
        try:
            out, state = self.engine.call_unit(name, run, shards, rest)
            if run.may_write:
                self._check_writes(name, run.params_after, run.names, shards, rest)
        finally:
            self._open.pop()
        return cast_floating(out, self.layout.policy(name).mp_policy.output_dtype), state

    def _check_writes(self, unit: str, params_after: Any, names: Sequence[str], shards: Arrays, rest: Any) -> None:
        """Refuse a call that writes parameters.

        A transform such as nnx.remat hands back as new values what it was given: so they are traced to where they come
        from. `params_after(full, rest)` returns the parameters after the call in the order of `names`.
        """
        full = self.engine.full_shapes(unit, shards)
        before = jax.tree.leaves(({path: path for path in full}, _name_params(rest)))
        jaxpr = jax.make_jaxpr(params_after)(full, rest).jaxpr
        written = [
            name for name, at in zip(names, passes_through(jaxpr), strict=True) if at is None or before[at] != name
        ]
        if written:
            raise ValueError(
                f"unit {unit or '(root)'}: its call writes to {len(written)} of its parameters "
                f"({', '.join(written[:4])}); a forward may read parameters only: keep what it changes in another "
                "nnx.Variable"
            )

    def _guard(self, path: str, unit: str) -> Callable[..., Any]:
        def guard(variable: Any, value: Any) -> Any:
            if unit not in self._open:
                raise ValueError(
                    f"{path}: read outside the __call__ of its unit {unit!r}, where it is not gathered (a tied weight, "
                    "or another method of the module?); leave it to the root unit, or make a unit of a module whose "
                    "__call__ holds all its uses"
                )
            return value

        return guard


def _name_params(rest: dict[str, Any]) -> dict[str, Any]:
    """Put names in place of the inner weights of a call's other arguments, and nothing in place of other arrays."""
    named = {key: jax.tree.map(lambda _: "", value) for key, value in rest.items()}
    params = rest["params"]
    is_named = isinstance(params, dict)
    return named | {"params": {path: path for path in params} if is_named else inner_names(params)}
