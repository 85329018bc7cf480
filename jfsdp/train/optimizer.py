"""How an optimizer is run on stored arrays: it sees the logical leaves, as on one device.

[Note: optimizers see logical leaves]
A leaf that no mesh divides is stored padded. Elementwise updates do not mind the padding; anything else does (three
steps of padded Adafactor were off by 1.8 % of the update, of Muon by 1.9 %), and so does whatever counts elements,
draws noise by position or starts from another value than zero. So the padding is cut off before the optimizer and put
back, as zeros, after it. That is free: a logical dim of size d over n devices, ceil(d / n) each, is how the padded one
lies already, so no byte moves. Measured on JAX 0.10.2 and 0.12.0: the AdamW update of padded leaves has no collective.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import optax

from jfsdp.engine.engine import Engine, pad_leaf
from jfsdp.engine.flat import pack_tree, unpack_tree
from jfsdp.layout.table import Layout, Leaf
from jfsdp.train.roles import Role, Roles, dotted, opt_state_by_leaf, pack_opt_state, pack_roles


def on_logical_leaves(engine: Engine, tx: optax.GradientTransformation) -> optax.GradientTransformation:
    """Return `tx` for arrays as they are stored: `init` and `update` take and return them padded.

    Layout:  gradients, parameters and parameter-shaped states [D+pad/axes F] -> [D/axes F] (unevenly) -> back.
    Cost:    none for the cut ([Note: optimizers see logical leaves]); what `tx` does over split dims, XLA inserts: an
             all-reduce of one scalar per norm, of vectors for factored moments. An update that mixes whole matrices
             (Muon) has XLA gather whole stacks of them: 129 GB for Llama-3-8B on 64 devices (docs/log.md).

    Raises:
      ValueError: if `update` is given the state of another optimizer; lists what differs.
    """
    layout = engine.layout
    padded = {leaf.path: leaf for leaf in layout.leaves if leaf.padding}
    shapes, roles = opt_state_by_leaf(layout, tx)
    stored = pack_roles(layout, shapes, roles)[1]

    def init(params: Any) -> Any:
        return pack_opt_state(layout, roles, roles.map(pad_state, tx.init(cut(params))))

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        _check_state(stored, state)
        logical = None if params is None else cut(params)
        updates, state = tx.update(cut(updates), roles.map(cut_state, unpack_tree(layout, state)), logical)
        return pad(updates), pack_opt_state(layout, roles, roles.map(pad_state, state))

    def cut(values: dict[str, Any]) -> dict[str, Any]:
        values = engine.constrain(unpack_tree(layout, dict(values)), "opt") if layout.buffers else values
        return {path: _cut(engine, padded[path], x) if path in padded else x for path, x in values.items()}

    def pad(values: Mapping[str, Any]) -> dict[str, Any]:
        whole = {path: _pad(engine, padded[path], x) if path in padded else x for path, x in values.items()}
        return pack_tree(layout, whole)

    def cut_state(role: Role, value: Any) -> Any:
        return _cut(engine, padded[role.leaf or ""], value) if role.padding else value

    def pad_state(role: Role, value: Any) -> Any:
        # One that changed its shape is left as it is: the step compares types, and says which array it was.
        return _pad(engine, padded[role.leaf or ""], value) if role.padding and value.shape == role.shape else value

    return optax.GradientTransformation(init, update)


def _cut(engine: Engine, leaf: Leaf, value: jax.Array) -> jax.Array:
    assert leaf.dim is not None
    return _constrain(engine, leaf, jax.lax.slice_in_dim(value, 0, leaf.shape[leaf.dim], axis=leaf.dim))


def _pad(engine: Engine, leaf: Leaf, value: jax.Array) -> jax.Array:
    return _constrain(engine, leaf, pad_leaf(_constrain(engine, leaf, value), leaf))


def _constrain(engine: Engine, leaf: Leaf, value: jax.Array) -> jax.Array:
    return engine.constrain({leaf.path: value}, "opt")[leaf.path]


def _check_state(roles: Roles, state: Any) -> None:
    wanted = {role.name: role.stored_shape for role in roles.arrays}
    arrays = jax.tree_util.tree_leaves_with_path(state)
    found = {"opt_state." + dotted(path): tuple(x.shape) for path, x in arrays}
    differing = sorted(name for name in wanted.keys() | found.keys() if wanted.get(name) != found.get(name))
    if differing:
        shown = [f"{n}: the state has {found.get(n)}, the optimizer {wanted.get(n)}" for n in differing[:4]]
        raise ValueError(
            f"the state is of another optimizer than this step; {len(differing)} arrays differ ({'; '.join(shown)}); "
            "give init and train_step the same tx"
        )


def check_optimizer(layout: Layout, tx: optax.GradientTransformation) -> None:
    """Refuse an optimizer that cannot run in a step, before anything is compiled. Moves no data.

    Raises:
      ValueError: if its update asks for more than gradients, state and parameters.
    """
    logical = {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layout.leaves if x.trainable}
    try:
        jax.eval_shape(lambda grads, params: tx.update(grads, tx.init(params), params), logical, logical)
    except TypeError as error:
        if "missing" not in str(error):
            raise
        raise ValueError(
            f"optimizer: its update asks for more than gradients, state and parameters ({error}); the step has nothing "
            "else to give it: leave out what needs it (a line search, a plateau schedule)"
        ) from error
