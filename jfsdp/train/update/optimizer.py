"""Runs an optimizer on stored arrays, with the tree and the shapes that it would have on one device.

[Note: what an optimizer sees]
`tx.init` and `tx.update` receive the model's own tree (`jfsdp.modules.model.ParamTree`), so that masks, labels and
other functions of key paths work as without jfsdp. Frozen leaves are `optax.MaskedNode()` there, as with
`optax.masked`. Steps keep gradients and parameters by dotted name. This module converts them for the optimizer, and
grad_step.py for custom training loops.

A leaf whose split dim does not divide evenly is stored padded. Elementwise updates are not affected by padding. Other
updates are: three steps of padded Adafactor were off by 1.8 % of the update, of Muon by 1.9 %. Updates that count
elements, draw noise by position or start from a value other than zero are affected too. So the padding is removed
before the optimizer, and added again, as zeros, after it. No byte moves: a logical dim of size d over n
devices, ceil(d / n) each, has the same shards as the padded one. Measured on JAX 0.10.2 and 0.12.0: the AdamW update of
padded leaves has no collective.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import re
import traceback
from collections.abc import Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfsdp.engine.engine import Engine
from jfsdp.engine.movements import Move
from jfsdp.engine.unit import Arrays
from jfsdp.modules.model import ParamTree
from jfsdp.train.update.exchange import pad, unpad
from jfsdp.train.update.matrices import model_of_update, warn_of_products
from jfsdp.train.update.roles import Role, Roles, abstract_opt_state, array_name, logical_shapes


@dataclasses.dataclass(frozen=True)
class ShardedOptimizer:
    """An optax transformation on stored arrays: `init` and `update` take and return arrays by name, padded.

    Layout:  gradients, parameters and parameter-shaped states [D+pad/axes F] -> [D/axes F] (unevenly) -> back.
    Cost:    none for the padding ([Note: what an optimizer sees]). XLA inserts the collectives of `tx` over split dims:
             an all-reduce of one scalar per norm, of vectors for factored moments. For an update of whole matrices
             (Muon) XLA gathers whole stacks of them: 129 GB for Llama-3-8B on 64 devices (docs/log.md).

    Attributes:
      engine: constrains arrays to their layouts.
      tree: the user's tree of parameters.
      tx: the user's transformation.
    """

    engine: Engine
    tree: ParamTree
    tx: optax.GradientTransformation

    @functools.cached_property
    def abstract(self) -> tuple[Any, Roles]:
        """The stored shapes of the optimizer's state, and the role of each of its arrays.

        Raises:
          ValueError: if `tx` fails on the model's tree; names the transformation.
        """
        with _explain_failure():
            return abstract_opt_state(self.engine.layout, self.tree, self.tx)

    @property
    def roles(self) -> Roles:
        """The roles of the arrays of the optimizer's state."""
        return self.abstract[1]

    def init(self, params: Arrays) -> Any:
        """Return the state for trained parameters on the device: the result of `tx.init`, in stored shapes."""
        return self.roles.map(self._pad_state, self.tx.init(self.tree.build(self._unpad_all(params))))

    def update(self, grads: Arrays, state: Any, params: Arrays, extra: Mapping[str, Any]) -> tuple[Arrays, Any]:
        """Return the updates of trained parameters, and the new state.

        Args:
          grads, params: arrays in stored shapes, in the layout of stage `opt`.
          extra: extra arguments of `tx.update`, by name.

        Raises:
          ValueError: for the state of another optimizer; lists the differences.
        """
        self.check_state(state)
        logical = self.tree.build(self._unpad_all(grads)), self.tree.build(self._unpad_all(params))
        state = self.roles.map(self._unpad_state, state)
        with model_of_update(self.engine, self.tree):
            updates, state = self._update(logical[0], state, logical[1], extra)
        by_path = self.engine.layout.by_path
        padded = {path: pad(self.engine, by_path[path], x) for path, x in self.tree.by_name(updates).items()}
        return padded, self.roles.map(self._pad_state, state)

    def check_state(self, state: Any) -> None:
        """Check that a state is one of this optimizer.

        Raises:
          ValueError: for the state of another optimizer; lists the differences.
        """
        trees = state, self.abstract[0]
        found, wanted = ({array_name(self.tree, at): x.shape for at, x in jax.tree.leaves_with_path(t)} for t in trees)
        differing = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
        if not differing and jax.tree.structure(trees[0]) == jax.tree.structure(trees[1]):
            return
        shown = [f"{n}: the state has {found.get(n)}, the optimizer {wanted.get(n)}" for n in differing[:4]]
        what = f"; {len(differing)} arrays differ ({'; '.join(shown)})" if differing else ""
        raise ValueError(f"the state is of another optimizer than this step{what}; pass init and train_step one tx")

    def check(self, extra: Mapping[str, Any] | None = None) -> tuple[Move, ...]:
        """Check that a transformation can run in a step, before compilation; return its movements (`by_matrix`).

        Args:
          extra: extra arguments of its update; None: the extra arguments of a training step.

        Raises:
          ValueError: if it fails on the model's tree, needs more than gradients, state, parameters and the loss, or
            returns updates of another tree; names the transformation.

        Warns: if it computes with whole matrices that are split, without `by_matrix`.
        """
        with _explain_failure():
            given = self.extra_arguments(1.0) if extra is None else extra
            first, *shapes = self._abstract_update(given)
            with model_of_update(self.engine, self.tree) as moves:
                jaxpr, (updates, after) = jax.make_jaxpr(first, return_shape=True)(*shapes)
            warn_of_products(self.engine, self.tree, jaxpr, shapes)
            self.tree.by_name(updates)
            if jax.tree.structure(after) != jax.tree.structure(self.abstract[0]):
                raise ValueError("the structure of its state changes in an update (as with optax.monitor)")
            ignored = [name for name in extra or () if self._ignores(name, extra or {})]
        if ignored:
            raise ValueError(f"apply_gradients: this tx does not use {ignored[0]}=; remove it")
        return tuple(moves)

    def _ignores(self, name: str, extra: Mapping[str, Any]) -> bool:
        """Return whether the update is the same program without one of its extra arguments."""
        programs = []
        for given in (extra, {other: value for other, value in extra.items() if other != name}):
            first, *shapes = self._abstract_update(given)
            try:
                programs.append(re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(first)(*shapes))))
            except (TypeError, ValueError):  # the argument is required
                return False
        return programs[0] == programs[1]

    def extra_arguments(self, value: Any) -> dict[str, Any]:
        """Return the extra arguments of `tx.update` in a training step: the loss, if it accepts `value`."""
        return {"value": jnp.asarray(value)} if self._accepts_value else {}

    @functools.cached_property
    def _accepts_value(self) -> bool:
        try:
            self._first_update({"value": jnp.ones(())})
        except TypeError:
            with contextlib.suppress(TypeError):
                self._first_update({})
                return False
        return True

    def _first_update(self, extra: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the shapes of the first updates, and of the state after them."""
        return jax.eval_shape(*self._abstract_update(extra))

    def _abstract_update(self, extra: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return the first update as a function of gradients and parameters, and their shapes."""
        shapes = logical_shapes(self.engine.layout, self.tree)
        first = lambda grads, params: self._update(grads, self.tx.init(params), params, extra)  # noqa: E731
        return first, shapes, shapes

    def _update(self, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]) -> tuple[Any, Any]:
        tx = self.tx.gradient_transformation() if isinstance(self.tx, optax.MultiSteps) else self.tx
        with _recorded_averages() as record:
            updates, after = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
        if {id(x) for x in record} - {id(x) for x in jax.tree.leaves(updates)}:
            raise ValueError(
                "track_ema is not last: a later transformation changes the updates, so the averages would be of other "
                "parameters; use optax.chain(..., jfsdp.optim.track_ema(decay)), outside of by_matrix"
            )
        return updates, after

    def _unpad_all(self, values: Arrays) -> Arrays:
        return {path: unpad(self.engine, self.engine.layout.by_path[path], x) for path, x in values.items()}

    def _unpad_state(self, role: Role, value: Any) -> Any:
        return unpad(self.engine, self.engine.layout.by_path[role.leaf or ""], value) if role.padding else value

    def _pad_state(self, role: Role, value: Any) -> Any:
        # An array that changed its shape is not padded: `check_kept_types` raises and names it.
        if not role.padding or value.shape != role.shape:
            return value
        return pad(self.engine, self.engine.layout.by_path[role.leaf or ""], value)


_RECORDS: list[list[Any]] = []


def record_averaged(updates: Any) -> None:
    """Record the updates that `track_ema` averages in the update that is being traced."""
    for record in _RECORDS[-1:]:
        record.extend(jax.tree.leaves(updates))


@contextlib.contextmanager
def _recorded_averages() -> Iterator[list[Any]]:
    _RECORDS.append([])
    try:
        yield _RECORDS[-1]
    finally:
        _RECORDS.pop()


@contextlib.contextmanager
def _explain_failure() -> Iterator[None]:
    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if re.match(r"(track_ema|alternate|low_precision_state|rate_scale|by_matrix)\b", str(error)):
            raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = [frame.f_code.co_qualname for frame in frames if not frame.f_globals["__name__"].startswith("jfsdp.")]
        made_by = [found[1] for text in (*names, str(error)) if (found := re.search(r"([^\W_]\w*)\.<locals>", text))]
        raise ValueError(
            f"optimizer: {made_by[-1] if made_by else 'tx'} failed on the model's parameters ({type(error).__name__}: "
            f"{error}). A step passes only gradients, state, parameters and value= (the loss): transformations that "
            "need a function of the loss (a line search, as in lbfgs) or two sets of parameters (lookahead) are not "
            "supported. Make masks and labels as trees like the parameters: Linen's nested params, or "
            "nnx.split(model, nnx.Param, ...)[1]"
        ) from error
