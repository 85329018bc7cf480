"""Run a user's function on a sharded model: gather the root unit, hook every other unit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax import core
from jax.interpreters.partial_eval import dce_jaxpr

from jfsdp.engine.dataflow import cuts, keep_outputs, num_readers, passes_through, reads
from jfsdp.engine.engine import SCOPE, Engine, Pull, cast_floating, label_params
from jfsdp.engine.flat import unpack_all
from jfsdp.engine.unit import Arrays
from jfsdp.layout.policy import saved_names
from jfsdp.layout.units import ROOT
from jfsdp.modules.model import FlaxModel, Hooks, UnitRun


class ShardedApply:
    """A model, its layout and an engine, as one pure function of arrays.

    The root unit is the user's function itself: its leaves are gathered before it starts and, unless they are
    resharded, stay until its backward ends. Every other unit is gathered around each call of one of its methods.
    """

    def __init__(self, model: FlaxModel, engine: Engine):
        self.model, self.engine, self.layout = model, engine, engine.layout
        self._open: list[str] = []
        policy = self.layout.policy(ROOT).mp_policy
        cast_dtype = policy.param_dtype if policy.cast_forward_inputs else None
        self._hooks = Hooks(
            units={unit.name: unit for unit in self.layout.units if unit.name != ROOT and unit.leaves},
            call=self._call_unit,
            is_open=lambda unit: unit in self._open,
            cast_inputs=lambda x: cast_floating(x, cast_dtype),
            cast_outputs=lambda x: cast_floating(x, policy.output_dtype),
        )

    def __call__(
        self,
        fn: Callable[..., Any],
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        *inputs: Any,
    ) -> tuple[Any, Arrays]:
        """Compute `fn(model, *inputs)`; return its output (a pytree of arrays) and the model's other state afterwards.

        Layout:  `params` as they are stored, in the layout of their `source` stage, anything else as it comes.
        Cost, Memory: as `jfsdp.engine.unit.call_unit`, for each unit.

        Raises:
          ValueError: if a unit's weight is read outside its calls, if a call writes parameters, or if a unit is called
            on slices that the layout does not know.
        """
        run, root, rest = self._root(fn, params, state, inputs)
        self._check_padded(run, root, rest)
        out = self.engine.call_unit(ROOT, run, root, rest)
        self._check_writes(ROOT, run, root, rest)
        return out

    def vjp(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], *inputs: Any
    ) -> tuple[Any, Arrays, Pull]:
        """Compute `fn(model, *inputs)`, what is trained, and prepare its derivative; see `Engine.vjp`.

        Args:
          fn: returns a scalar, and anything else: it is the scalar that is differentiated.

        Returns:
          What `fn` returns beside the scalar; the model's other state; and the function from the scalar's cotangent to
          gradients.

        Raises:
          ValueError: as `__call__`; and if no value has a name that a remat is to save.
        """
        run, root, rest = self._root(fn, params, state, inputs)
        self._check_padded(run, root, rest)
        wanted = {name for policy in self.layout.policies for name in saved_names(policy.remat)}
        seen = set() if wanted else None
        ((_, out), after), pull = self.engine.vjp(run, root, rest, seen, params)
        _check_names(wanted, seen or set())
        self._check_writes(ROOT, run, root, rest)
        return out, after, pull

    def _root(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any
    ) -> tuple[_RootRun, Arrays, dict[str, Any]]:
        """Return the root's call, its weights, and everything else that it reads."""
        params = unpack_all(self.layout, dict(params))
        root = {path: params[path] for path in self.layout.unit(ROOT).leaves}
        inner = {path: value for path, value in params.items() if path not in root}
        rest = {"params": inner, "state": dict(state), "batch": inputs, "inputs": []}
        return _RootRun(self.model, fn, self._hooks), root, rest

    def shared_weights(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], *inputs: Any
    ) -> list[str]:
        """List the root unit's weights that several operations of `fn` read, such as tied embeddings. Moves no data."""
        run, root, rest = self._root(fn, params, state, inputs)
        full = self.engine.full_shapes(root)
        counts = num_readers(jax.make_jaxpr(run)(full, rest).jaxpr)
        return [path for path, count in zip(sorted(full), counts) if count > 1]

    def constant(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], *inputs: Any
    ) -> float | None:
        """Return the scalar that `fn` returns if it depends on no array at all, else None. Moves no data."""
        run, root, rest = self._root(fn, params, state, inputs)
        closed = jax.make_jaxpr(lambda full, rest: run(full, rest)[0])(self.engine.full_shapes(root), rest)
        # Inside calls and loops too: what computes the scalar there may compute with arrays beside it.
        jaxpr, is_read = dce_jaxpr(keep_outputs(closed.jaxpr, [True]), [True])
        if any(is_read):
            return None
        # On a device that is here: a step may be lowered for others.
        with jax.default_device(jax.local_devices()[0]), jax.ensure_compile_time_eval():
            return float(core.eval_jaxpr(jaxpr, closed.consts)[0])

    def _call_unit(self, name: str, run: UnitRun, shards: Arrays, rest: dict[str, Any]) -> tuple[Any, Any]:
        self._open.append(name)
        try:
            out, state = self.engine.call_unit(name, run, shards, rest)
            self._check_writes(name, run, shards, rest)
        finally:
            self._open.pop()
        return cast_floating(out, self.layout.policy(name).mp_policy.output_dtype), state

    def _check_padded(self, run: _RootRun, root: Arrays, rest: dict[str, Any]) -> None:
        """Refuse a read of a unit's weight outside its calls where it would see the padding.

        It comes past the model's own guards through `nnx.state`, or where a transform of Linen maps variables. A layer
        that is cut out of a stack, and handed to the unit's call, is no read. The engine's own cut, of the padding, is.
        """
        labels = jax.tree.leaves((dict.fromkeys(root, ""), label_params(rest)))
        marked = [label != "" and self.layout.by_path[label].padding > 0 for label in labels]
        if not any(marked):
            return
        jaxpr = jax.make_jaxpr(run)(self.engine.full_shapes(root), rest).jaxpr
        is_own = lambda eqn: f"{SCOPE}." in str(eqn.source_info.name_stack)  # noqa: E731
        for place, eqn in reads(jaxpr, marked, lambda eqn: cuts(eqn) and not is_own(eqn)):
            if not is_own(eqn):
                leaf = self.layout.by_path[labels[place]]
                assert leaf.dim is not None
                axes, size = " x ".join(leaf.stage("opt").axes), leaf.shape[leaf.dim]
                raise ValueError(
                    f"{leaf.path}: read outside the calls of its unit {leaf.unit!r}, where dim {leaf.dim} (size "
                    f"{size}) is padded to {size + leaf.padding}, to be split over {axes}; of a penalty on weights "
                    "make weight decay, in the optimizer, or leave that module out of units="
                )

    def _check_writes(self, unit: str, run: UnitRun, shards: Arrays, rest: dict[str, Any]) -> None:
        """Refuse a call that writes parameters.

        A transform such as nnx.remat hands back as new values what it was given: so they are traced to where they come
        from.
        """
        if not run.may_write:
            return
        full = self.engine.full_shapes(shards)
        before = jax.tree.leaves((_names(full), label_params(rest)))
        closed, after = jax.make_jaxpr(run.params_after, return_shape=True)(full, rest)
        pairs = zip(jax.tree.leaves(_names(after)), passes_through(closed.jaxpr), strict=True)
        written = [name for name, at in pairs if at is None or before[at] != name]
        if written:
            raise ValueError(
                f"unit {unit or '(root)'}: its call writes to {len(written)} of its parameters "
                f"({', '.join(written[:4])}); a forward may read parameters only: keep what it changes in another "
                "nnx.Variable"
            )


def _check_names(wanted: set[str], seen: set[str]) -> None:
    """Refuse names that no value has: a policy of them saves nothing, and says nothing."""
    unused = sorted(wanted - seen)
    if unused:
        raise ValueError(
            f"remat is to save {', '.join(unused)}, and no value in the model has that name; names given there by "
            f"jax.ad_checkpoint.checkpoint_name: {', '.join(sorted(seen)) or 'none'}"
        )


class _RootRun:
    """The user's function on the bound model, as the root unit's call."""

    def __init__(self, model: FlaxModel, fn: Callable[..., Any], hooks: Hooks):
        self.model, self.fn, self.hooks, self.may_write = model, fn, hooks, False

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[Any, Arrays]:
        params = {**full, **rest["params"]}
        out, after, state = self.model.run(self.fn, params, rest["state"], rest["batch"], self.hooks)
        self.may_write = any(after[path] is not value for path, value in params.items())
        return out, state

    def params_after(self, full: Arrays, rest: Mapping[str, Any]) -> Arrays:
        params = {**full, **rest["params"]}
        return self.model.run(self.fn, params, rest["state"], rest["batch"], self.hooks)[1]


def _names(arrays: Mapping[str, Any]) -> dict[str, str]:
    return {name: name for name in arrays}
