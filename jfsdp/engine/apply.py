"""Run a user's function on a sharded model: gather the root unit, and hook the calls of all other units."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax

from jfsdp.compat import FUSED_ATTENTION, core
from jfsdp.context.rows import BY_KEYS
from jfsdp.engine.engine import SCOPE, Engine, Pull, cast_floating
from jfsdp.engine.low_rank import decoded, with_adapters
from jfsdp.engine.unit import Arrays, Traced, trace_unit
from jfsdp.jaxprs import all_eqns, cuts, reads, value_names
from jfsdp.layout.mesh import EXPERT
from jfsdp.layout.policy import FUSED, UNIT_INPUT, saved_names
from jfsdp.layout.units import ROOT
from jfsdp.modules.adapted import dropout_key
from jfsdp.modules.model import FlaxModel, Hooks, UnitRun

_FORWARD_MODE = (
    "a unit or a jax.custom_vjp of the model is differentiated in forward mode (jax.jvp, jax.linearize, jax.jacfwd), "
    "but supports reverse mode only; use jax.vjp or jax.jacrev, or leave those modules out of units="
)
_CLOSED_OVER = (
    "the loss or the model closes over an array on the mesh and indexes it, which JAX does not allow in program "
    "'manual'; put the array into the batch or an nnx.Variable of the model, close over np.asarray(array), or index it "
    "with jnp.take(array, indices, axis=0)"
)
KeyOf = Callable[[Any], jax.Array | None]  # from a call's inputs other than weights to the key of adapter dropout


def _no_key(rest: Any) -> None:
    del rest


class ShardedApply:
    """A model, its layout and an engine as one pure function of arrays.

    The root unit is the user's function. Its leaves are gathered before it starts and stay gathered until its backward
    ends, unless they are resharded. Every other unit is gathered around each call of one of its methods.

    Args:
      check: called with every trace that is to be differentiated; may raise an error.
    """

    def __init__(self, model: FlaxModel, engine: Engine, check: Callable[[Traced], None] = lambda traced: None):
        self.model, self.engine, self.layout, self._check = model, engine, engine.layout, check
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
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], *inputs: Any
    ) -> tuple[Any, Arrays]:
        """Compute `fn(model, *inputs)`; return its output (a pytree of arrays) and the model's updated other state.

        Layout:  `params` as stored, in the layout of their `source` stage; all other arrays are unchanged.
        Cost, Memory: as `jfsdp.engine.unit.call_traced`, for each unit.

        Raises:
          ValueError: if a unit's weight is read outside its calls, if a call writes parameters, or if a unit is called
            on slices along a dim that is not a layer dim of the layout.
        """
        traced, flat = self.trace(fn, params, state, *inputs)
        root = {path: params[path] for path in self.layout.unit(ROOT).leaves}
        return jax.tree.unflatten(traced.tree, self.engine.call_unit(ROOT, traced, root, flat))

    def vjp(
        self, fn: Callable[..., Any], params: Mapping[str, Any], state: Mapping[str, Any], *inputs: Any
    ) -> tuple[Any, Arrays, Pull]:
        """Compute `fn(model, *inputs)` in training mode, and prepare its derivative; see `Engine.vjp`.

        Args:
          fn: returns a scalar, which is differentiated, and other outputs.

        Returns:
          The other outputs of `fn`; the model's other state; and the function from the scalar's cotangent to gradients.

        Raises:
          ValueError: as `__call__`; and if a name in a remat policy is not the name of any value.
        """
        traced, flat = self.trace_loss(fn, params, state, *inputs)
        outs, pull = self.engine.vjp(traced, flat, dict(params))
        (_, out), after = jax.tree.unflatten(traced.tree, outs)
        return out, after, pull

    def trace_loss(self, fn: Callable[..., Any], *given: Any) -> tuple[Traced, list[Any]]:
        """Trace a function that is to be differentiated; see `trace`.

        Raises:
          ValueError: as `__call__`; and if a name in a remat policy is not the name of any value.
        """
        traced, flat = self.trace(fn, *given, trains=True)
        self._check(traced)
        _check_names({name for policy in self.layout.policies for name in saved_names(policy.remat)}, traced.jaxpr)
        return traced, flat

    def trace(
        self,
        fn: Callable[..., Any],
        params: Mapping[str, Any],
        state: Mapping[str, Any],
        *inputs: Any,
        trains: bool = False,
    ) -> tuple[Traced, list[Any]]:
        """Trace and check `fn(model, *inputs)` as the root's call; return the trace and its inputs.

        The trace returns the output and the updated state. Its inputs are constants, then the order of `_parts`.

        Args:
          params: by leaf.
          trains: whether adapters apply dropout.

        Raises:
          ValueError: as `__call__`.
        """
        self.engine.calls.clear()  # restart the numbering of names: the same program has the same text
        try:
            key_of: KeyOf = (lambda rest: dropout_key(rest["state"])) if trains else _no_key
            run = _RootRun(self.model, fn, key_of, self._hooks_with)
            root, rest = self._parts(params, state, inputs)
            traced, flat = self._trace(ROOT, run, root, rest, key_of)
        except Exception as error:
            self._explain(error)
            raise
        if any(eqn.primitive.name == "custom_lin" for eqn in all_eqns(traced.jaxpr)):
            raise ValueError(_FORWARD_MODE)
        if trains and any(isinstance(x, core.Tracer) for x in flat[: len(flat) - len(jax.tree.leaves(rest))]):
            raise ValueError(
                "a value computed inside a unit's call (or a transform of JAX) is used outside it without being "
                "returned (through a closure, a global list or a set); return it from the call"
            )
        self._check_padded(traced)
        return traced, flat

    def _explain(self, error: Exception) -> None:
        """Replace an error of JAX by one with the cause and a remedy, if they are known."""
        text = str(error)
        if "different leading axis sizes" in text or "inconsistent sizes for array" in text:
            self._explain_stack(error)
        if "forward-mode" in text and "custom_vjp" in text:
            raise ValueError(_FORWARD_MODE) from error
        if "ScopeParamShapeError" in type(error).__name__ and any(leaf.row_cuts for leaf in self.layout.leaves):
            raise ValueError(
                f"{text.splitlines()[0]}. In a step, mesh axis {EXPERT!r} gives a device a part of the experts: create "
                "their weights with the first dim of the value that they multiply, (y.shape[0], ...)"
            ) from error
        if "Context mesh" in text and "should match the mesh of" in text:
            raise ValueError(_CLOSED_OVER) from error

    def _explain_stack(self, error: Exception) -> None:
        """Name a leaf whose padded dim a scan or a vmap of the model uses as its layer dim."""
        for leaf in self.layout.leaves:
            if leaf.dim == 0 and leaf.padding and not leaf.stacked and leaf.unit != ROOT:
                size = leaf.shape[0]
                raise ValueError(
                    f"{leaf.path}: dim 0 (size {size}) is padded to {size + leaf.padding}, and a scan or vmap of the "
                    f"model takes its layers along a dim of another size; if unit {leaf.unit!r} is a stack, declare "
                    "its layer dim: units=[jfsdp.Unit(..., stacked=1)]"
                ) from error

    def _parts(self, params: Mapping[str, Any], state: Mapping[str, Any], inputs: Any) -> tuple[Arrays, dict[str, Any]]:
        """Return the root's weights and all other inputs of its call."""
        root = {path: params[path] for path in self.layout.unit(ROOT).leaves}
        inner = {path: value for path, value in params.items() if path not in root}
        return root, {"params": inner, "state": dict(state), "batch": inputs, "inputs": []}

    def _hooks_with(self, key: jax.Array | None) -> Hooks:
        """Return hooks with the key of adapter dropout. They are a new object, so that Flax retraces its transforms."""
        call = functools.partial(self._call_unit, key_of=lambda rest: key)
        return self._hooks if key is None else dataclasses.replace(self._hooks, call=call)

    def _trace(
        self, name: str, run: UnitRun, shards: Arrays, rest: dict[str, Any], key_of: KeyOf
    ) -> tuple[Traced, list[Any]]:
        """Trace a unit's call; raise an error if it writes parameters."""
        run = decoded(with_adapters(run, self.model.adapters, key_of), self.model.codecs)
        traced, flat = trace_unit(run, self.engine.full_shapes(shards), self.engine.cast_inputs(name, rest))
        if traced.written:
            raise ValueError(
                f"unit {name or '(root)'}: its call writes to {len(traced.written)} of its parameters "
                f"({', '.join(traced.written[:4])}); a forward may only read parameters: keep values that it changes "
                "in another nnx.Variable, or call a copy (nnx.clone) of a module that normalizes its own weights"
            )
        return traced, flat

    def _call_unit(
        self, name: str, run: UnitRun, shards: Arrays, rest: dict[str, Any], key_of: KeyOf = _no_key
    ) -> tuple[Any, Any]:
        self._open.append(name)
        try:
            traced, flat = self._trace(name, run, shards, rest, key_of)
            out, state = jax.tree.unflatten(traced.tree, self.engine.call_unit(name, traced, shards, flat))
        finally:
            self._open.pop()
        return cast_floating(out, self.layout.policy(name).mp_policy.output_dtype), state

    def _check_padded(self, traced: Traced) -> None:
        """Raise an error if a weight is read outside its unit's calls where the padding would be visible.

        Such a read bypasses the model's guards through `nnx.state`, or where a transform of Linen maps variables. A
        layer that is sliced from a stack and passed to the unit's call is not a read. The engine's own slice, which
        removes the padding, is a read that is allowed.
        """
        padded = {leaf.path: leaf for leaf in self.layout.leaves if leaf.padding and leaf.unit != ROOT}
        if not padded:
            return
        is_own = lambda eqn: f"{SCOPE}." in str(eqn.source_info.name_stack)  # noqa: E731
        marked = [name in padded for name in traced.names]
        for place, eqn in reads(traced.jaxpr, marked, lambda eqn: cuts(eqn) and not is_own(eqn), is_own):
            if not is_own(eqn):
                leaf = padded[traced.names[place]]
                assert leaf.dim is not None
                axes, size = " x ".join(leaf.stage("opt").axes), leaf.shape[leaf.dim]
                raise ValueError(
                    f"{leaf.path}: read outside the calls of its unit {leaf.unit!r}, where dim {leaf.dim} (size "
                    f"{size}) is padded to {size + leaf.padding}, to be split over {axes}; replace a weight penalty "
                    "by weight decay in the optimizer, or leave that module out of units="
                )


def _check_names(wanted: set[str], jaxpr: Any) -> None:
    """Check that each name in a remat policy is the name of a value; otherwise the policy silently saves nothing."""
    seen = value_names(jaxpr) if wanted else set()
    if UNIT_INPUT in wanted & seen:
        raise ValueError(
            f"remat name {UNIT_INPUT}: reserved for inputs of units, and the model gives it to a value; rename that "
            "value (jax.ad_checkpoint.checkpoint_name)"
        )
    seen |= {UNIT_INPUT} | {FUSED for eqn in all_eqns(jaxpr) if _is_attention(eqn)}
    unused = sorted(wanted - seen)
    if unused:
        fused = f" ({FUSED} is fused attention, which this trace does not contain: XLA computes it)" * (FUSED in unused)
        raise ValueError(
            f"remat names {', '.join(unused)}: no value in the model has that name{fused}; names from "
            f"jax.ad_checkpoint.checkpoint_name: {', '.join(sorted(seen))}"
        )


def _is_attention(eqn: Any) -> bool:
    """Return whether an equation's result and statistics have the name `FUSED`."""
    return eqn.primitive.name in FUSED_ATTENTION or BY_KEYS in str(eqn.source_info.name_stack)


class _RootRun:
    """The user's function on the bound model, as the root unit's call."""

    def __init__(self, model: FlaxModel, fn: Callable[..., Any], key_of: KeyOf, hooks: Callable[[Any], Hooks]):
        self.model, self.fn, self.key_of, self.hooks = model, fn, key_of, hooks

    def __call__(self, full: Arrays, rest: Mapping[str, Any]) -> tuple[Any, Arrays, Arrays]:
        params = {**full, **rest["params"]}
        hooks = self.hooks(self.key_of(rest))
        out, after, state = self.model.run(self.fn, params, rest["state"], rest["batch"], hooks)
        return out, state, {path: after[path] for path, value in params.items() if after[path] is not value}
