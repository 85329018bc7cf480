"""The single-device oracle: plain NNX, plain `jax.grad`, plain optax. Shares no code with jfsdp but the loss."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx


@dataclasses.dataclass
class Trajectory:
    losses: list
    grad_norms: list
    params: dict
    moments: dict


def train(factory, loss_fn, tx, batches, *, seed=0, max_grad_norm=None):
    """Train on one device; return losses, parameters by dotted name, and Adam's moments by the same names."""
    graphdef, params, rest = nnx.split(factory(nnx.Rngs(seed)), nnx.Param, ...)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        def mean_loss(params):
            # A map makes new variables: the given ones belong to an outer trace.
            loss = loss_fn(nnx.merge(graphdef, *jax.tree.map(lambda x: x, (params, rest))), batch)
            return loss.total / loss.weight

        loss, grads = jax.value_and_grad(mean_loss)(params)
        norm = optax.tree.norm(grads)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, loss, norm

    losses, norms = [], []
    for batch in batches:
        params, opt_state, loss, norm = step(params, opt_state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    adam = next(s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    moments = {f"{kind}.{name}": x for kind in ("mu", "nu") for name, x in named(getattr(adam, kind)).items()}
    return Trajectory(losses, norms, named(params), moments)


def named(state):
    """Name the arrays of an NNX state by their dotted paths."""
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): np.asarray(jax.tree.leaves(variable)[0]) for path, variable in flat}


def logical(state, name, value):
    """Cut a stored array to its leaf's logical shape."""
    shape = state.layout.by_path[name].shape
    return np.asarray(value)[tuple(slice(0, size) for size in shape)]


def worst_leaf(found, wanted, scale):
    """Return max over leaves of `max|d| / max(scale, max|ref|)`, and the leaf's name."""
    assert found.keys() == wanted.keys()
    errors = {
        name: float(np.abs(found[name] - wanted[name]).max() / max(scale, np.abs(wanted[name]).max()))
        for name in wanted
    }
    return max((error, name) for name, error in errors.items())
