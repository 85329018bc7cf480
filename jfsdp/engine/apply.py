"""Run a user's function on a sharded model: bind it, gather the root unit, hook every other unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from jfsdp.engine.auto import AutoEngine, cast_floating
from jfsdp.engine.unit import Arrays
from jfsdp.layout.units import ROOT
from jfsdp.modules.nnx import NNXModel, root_hook, unit_hook


class ShardedApply:
    """A model, its layout and an engine, as one pure function of arrays.

    The root unit is the user's function itself: its leaves are gathered before it starts and, unless they are
    resharded, stay until its backward ends. Every other unit is gathered around its own `__call__`.
    """

    def __init__(self, model: NNXModel, engine: AutoEngine):
        self.model, self.engine, self.layout = model, engine, engine.layout
        self._called: set[str] = set()
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
          ValueError: if a unit is never called, or is called on slices that the layout does not know.
        """
        root = {path: params[path] for path in self.layout.unit(ROOT).leaves}
        inner = {path: value for path, value in params.items() if path not in root}
        self._called.clear()

        def run(full: Arrays, rest: Any) -> Any:
            model = self.model.bind({**full, **rest["params"]}, rest["state"], self._hooks)
            out = fn(model, *rest["batch"])
            return out, self.model.collect(model)

        rest = {"params": inner, "state": dict(state), "batch": inputs, "inputs": []}
        out = self.engine.call_unit(ROOT, run, root, rest)
        self._check_called()
        return out

    def _call_unit(self, name: str, run: Any, shards: Arrays, rest: Any) -> Any:
        self._called.add(name)
        out, state = self.engine.call_unit(name, run, shards, rest)
        return cast_floating(out, self.layout.policy(name).mp_policy.output_dtype), state

    def _check_called(self) -> None:
        silent = [name for name in self._hooks if name != ROOT and name not in self._called]
        if silent:
            raise ValueError(
                f"units never called: {', '.join(map(repr, silent))}; a unit is gathered around its __call__, so its "
                "weights would be read while they are sharded: choose as units the modules that are called, or none"
            )
