"""How an optimizer is run on stored arrays: it sees what it would see on one device.

[Note: what an optimizer sees]
`tx.init` and `tx.update` get one tree, the model's own (`jfsdp.modules.model.ParamTree`), so that masks, labels and
whatever else goes by key path mean what they mean without jfsdp. What is not trained is `optax.MaskedNode()` there, as
under `optax.masked`. The step keeps gradients and parameters by dotted name. What an optimizer is given is converted
here, and what a loop of the user's own is given in grad_step.py.

A leaf that no mesh divides is stored padded. Elementwise updates do not mind the padding; anything else does (three
steps of padded Adafactor were off by 1.8 % of the update, of Muon by 1.9 %), and so does whatever counts elements,
draws noise by position or starts from another value than zero. So the padding is cut off before the optimizer and put
back, as zeros, after it. That is free: a logical dim of size d over n devices, ceil(d / n) each, is how the padded one
lies already, so no byte moves. Measured on JAX 0.10.2 and 0.12.0: the AdamW update of padded leaves has no collective.
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

from jfsdp.engine.engine import Engine, pad_leaf
from jfsdp.engine.unit import Arrays
from jfsdp.layout.leaf import Leaf
from jfsdp.modules.model import ParamTree
from jfsdp.train.update.roles import Role, Roles, abstract_opt_state, array_name, logical_shapes


@dataclasses.dataclass(frozen=True)
class ShardedOptimizer:
    """An optax transformation on stored arrays: `init` and `update` take and return them by name, padded.

    Layout:  gradients, parameters and parameter-shaped states [D+pad/axes F] -> [D/axes F] (unevenly) -> back.
    Cost:    none for the cut ([Note: what an optimizer sees]); what `tx` does over split dims, XLA inserts: an
             all-reduce of one scalar per norm, of vectors for factored moments. An update that mixes whole matrices
             (Muon) has XLA gather whole stacks of them: 129 GB for Llama-3-8B on 64 devices (docs/log.md).

    Attributes:
      engine: states the layouts.
      tree: the tree in which the user sees the parameters.
      tx: the user's transformation.
    """

    engine: Engine
    tree: ParamTree
    tx: optax.GradientTransformation

    @functools.cached_property
    def abstract(self) -> tuple[Any, Roles]:
        """The shapes of its state as it is stored, and the role of each of its arrays.

        Raises:
          ValueError: if `tx` fails on the model's tree; names the transformation.
        """
        with _naming_what_fails():
            return abstract_opt_state(self.engine.layout, self.tree, self.tx)

    @property
    def roles(self) -> Roles:
        """The roles of the arrays of its state."""
        return self.abstract[1]

    def init(self, params: Arrays) -> Any:
        """Return the state for trained parameters on the device: the structure of `tx.init`, in stored shapes."""
        return self.roles.map(self._pad_state, self.tx.init(self.tree.build(self._cut_all(params))))

    def update(self, grads: Arrays, state: Any, params: Arrays, extra: Mapping[str, Any]) -> tuple[Arrays, Any]:
        """Return the updates of trained parameters, and the new state.

        Args:
          grads, params: as they are stored, in the layout of stage `opt`.
          extra: what `tx.update` is given besides, by name.

        Raises:
          ValueError: if the state is that of another optimizer; lists what differs.
        """
        _check_state(self.tree, self.roles, state)
        logical = self.tree.build(self._cut_all(grads)), self.tree.build(self._cut_all(params))
        state = self.roles.map(self._cut_state, state)
        updates, state = self._update(logical[0], state, logical[1], extra)
        padded = {path: self._pad(path, x) for path, x in self.tree.by_name(updates).items()}
        return padded, self.roles.map(self._pad_state, state)

    def check(self, extra: Mapping[str, Any] | None = None) -> None:
        """Refuse a transformation that cannot run in a step, before anything is compiled.

        Args:
          extra: what its update is given besides; None: what a training step gives.

        Raises:
          ValueError: if it fails on the model's tree, asks for more than gradients, state, parameters and the loss, or
            returns updates of another tree; names the transformation.
        """
        with _naming_what_fails():
            updates, after = self._first(self.given(1.0) if extra is None else extra)
            self.tree.by_name(updates)
            if jax.tree.structure(after) != jax.tree.structure(self.abstract[0]):
                raise ValueError(
                    "its state has another structure after an update than tx.init gave it (optax.monitor's)"
                )
            ignored = [name for name in extra or () if self._ignores(name, extra or {})]
        if ignored:
            raise ValueError(f"apply_gradients: this tx takes no {ignored[0]}=, and would ignore it; leave it out")

    def _ignores(self, name: str, extra: Mapping[str, Any]) -> bool:
        """Tell whether the update is the same program without one of what it is given besides."""
        programs = []
        for given in (extra, {other: value for other, value in extra.items() if other != name}):
            first, *shapes = self._of_shapes(given)
            try:
                programs.append(re.sub(r"0x[0-9a-f]+", "", str(jax.make_jaxpr(first)(*shapes))))
            except (TypeError, ValueError):  # it needs it
                return False
        return programs[0] == programs[1]

    def given(self, value: Any) -> dict[str, Any]:
        """Return what a training step gives `tx.update` besides: the loss, wherever it can be taken."""
        return {"value": jnp.asarray(value)} if self._takes_value else {}

    @functools.cached_property
    def _takes_value(self) -> bool:
        try:
            self._first({"value": jnp.ones(())})
        except TypeError:
            with contextlib.suppress(TypeError):
                self._first({})
                return False
        return True

    def _first(self, extra: Mapping[str, Any]) -> tuple[Any, Any]:
        """Return the shapes of the first updates, and of the state after them."""
        return jax.eval_shape(*self._of_shapes(extra))

    def _of_shapes(self, extra: Mapping[str, Any]) -> tuple[Any, Any, Any]:
        """Return the first update as a function of gradients and parameters, and their shapes."""
        shapes = logical_shapes(self.engine.layout, self.tree)
        first = lambda grads, params: self._update(grads, self.tx.init(params), params, extra)  # noqa: E731
        return first, shapes, shapes

    def _update(self, grads: Any, state: Any, params: Any, extra: Mapping[str, Any]) -> tuple[Any, Any]:
        tx = self.tx.gradient_transformation() if isinstance(self.tx, optax.MultiSteps) else self.tx
        with _averages_seen() as seen:
            updates, after = optax.with_extra_args_support(tx).update(grads, state, params, **extra)
        if {id(x) for x in seen} - {id(x) for x in jax.tree.leaves(updates)}:
            raise ValueError(
                "track_ema is not last: what comes after it changes the updates, and the averages would be of other "
                "parameters; say optax.chain(..., jfsdp.optim.track_ema(decay))"
            )
        return updates, after

    def _cut_all(self, values: Arrays) -> Arrays:
        return {path: self._cut(path, x) for path, x in values.items()}

    def _cut_state(self, role: Role, value: Any) -> Any:
        return self._cut(role.leaf or "", value) if role.padding else value

    def _pad_state(self, role: Role, value: Any) -> Any:
        # One that changed its shape is left as it is: the step compares types, and says which array it was.
        return self._pad(role.leaf or "", value) if role.padding and value.shape == role.shape else value

    def _cut(self, path: str, value: jax.Array) -> jax.Array:
        leaf = self.engine.layout.by_path[path]
        if not leaf.padding or leaf.dim is None:
            return value
        return self._constrain(leaf, jax.lax.slice_in_dim(value, 0, leaf.shape[leaf.dim], axis=leaf.dim))

    def _pad(self, path: str, value: jax.Array) -> jax.Array:
        leaf = self.engine.layout.by_path[path]
        return self._constrain(leaf, pad_leaf(self._constrain(leaf, value), leaf)) if leaf.padding else value

    def _constrain(self, leaf: Leaf, value: jax.Array) -> jax.Array:
        return self.engine.constrain({leaf.path: value}, "opt")[leaf.path]


_SEEN: list[list[Any]] = []


def averaged(updates: Any) -> None:
    """Note with which updates `track_ema` computes averages, for the update that is being traced."""
    for seen in _SEEN[-1:]:
        seen.extend(jax.tree.leaves(updates))


@contextlib.contextmanager
def _averages_seen() -> Iterator[list[Any]]:
    _SEEN.append([])
    try:
        yield _SEEN[-1]
    finally:
        _SEEN.pop()


def _check_state(tree: ParamTree, roles: Roles, state: Any) -> None:
    wanted = {role.name: role.stored_shape for role in roles.arrays}
    found = {array_name(tree, path): tuple(x.shape) for path, x in jax.tree_util.tree_leaves_with_path(state)}
    differing = sorted(name for name in {**wanted, **found} if wanted.get(name) != found.get(name))
    if differing:
        shown = [f"{n}: the state has {found.get(n)}, the optimizer {wanted.get(n)}" for n in differing[:4]]
        raise ValueError(
            f"the state is of another optimizer than this step; {len(differing)} arrays differ ({'; '.join(shown)}); "
            "give init and train_step the same tx"
        )


@contextlib.contextmanager
def _naming_what_fails() -> Iterator[None]:
    try:
        yield
    except (TypeError, KeyError, AttributeError, ValueError) as error:
        if re.match(r"(track_ema|alternate|low_precision_state|rate_scale)\b", str(error)):
            raise
        frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
        names = [frame.f_code.co_qualname for frame in frames if not frame.f_globals["__name__"].startswith("jfsdp.")]
        made_by = [found[1] for text in (*names, str(error)) if (found := re.search(r"([^\W_]\w*)\.<locals>", text))]
        raise ValueError(
            f"optimizer: {made_by[-1] if made_by else 'tx'} failed on the model's parameters ({type(error).__name__}: "
            f"{error}). A step gives it gradients, state, parameters and value= (the loss), and no more: leave out "
            "what needs a function of the loss (a line search, as in lbfgs) or two sets of parameters (lookahead). "
            "Masks and labels are trees like the parameters: Linen's nested params, or what "
            "nnx.split(model, nnx.Param, ...)[1] returns"
        ) from error
