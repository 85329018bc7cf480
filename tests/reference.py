"""The single-device oracle: plain Flax, plain `jax.grad`, plain optax. Shares no code with jfsdp but the loss."""

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
    model_state: dict


class PlainNNX:
    """An NNX factory as functions of its parameters and its other state."""

    def __init__(self, factory, seed):
        self.graphdef, self.params, self.state = nnx.split(factory(nnx.Rngs(seed)), nnx.Param, ...)

    def loss(self, loss_fn, params, state, batch):
        # A map makes new variables: the given ones belong to an outer trace.
        model = nnx.merge(self.graphdef, *jax.tree.map(lambda x: x, (params, state)))
        loss = loss_fn(model, batch)
        return loss, nnx.split(model, nnx.Param, ...)[2]


class PlainLinen:
    """A Linen module with example inputs, as functions of its parameters and its other collections."""

    def __init__(self, source, seed):
        self.module, inputs = source
        args = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        # Compiled as jfsdp's init compiles on CPU: with optimization the last bit depends on the shape of a loop.
        init = jax.jit(self.module.init, compiler_options={"xla_backend_optimization_level": 0})
        variables = dict(init(jax.random.key(seed), *args))
        self.params, self.state = variables.pop("params"), variables

    def loss(self, loss_fn, params, state, batch):
        after = dict(state)

        def model(*args, **kwargs):
            out, changed = self.module.apply({"params": params, **after}, *args, mutable=list(after), **kwargs)
            after.update(changed)
            return out

        return loss_fn(model, batch), after


def plain(source, seed=0):
    """Return a model as functions of its parameters and its other state."""
    return PlainLinen(source, seed) if isinstance(source, tuple) else PlainNNX(source, seed)


def train(source, loss_fn, tx, batches, *, seed=0, max_grad_norm=None, accumulate=1):
    """Train on one device; return losses, parameters by dotted name, and Adam's moments by the same names.

    With `accumulate` microbatch a holds the rows b with b % accumulate == a, one after the other: losses, weights and
    gradients of the sums are added and divided once, and the model's other state goes from one to the next.
    """
    model = plain(source, seed)
    opt_state = tx.init(model.params)

    @jax.jit
    def step(params, state, opt_state, batch):
        def total(params, state, rows):
            loss, after = model.loss(loss_fn, params, state, rows)
            return loss.total, (loss.weight, after)

        grads, loss, weight = jax.tree.map(jnp.zeros_like, params), 0.0, 0.0
        for part in range(accumulate):
            rows = jax.tree.map(lambda x, part=part: x[part::accumulate], batch)
            (new_loss, (new_weight, state)), new = jax.value_and_grad(total, has_aux=True)(params, state, rows)
            grads, loss, weight = jax.tree.map(jnp.add, grads, new), loss + new_loss, weight + new_weight
        grads = jax.tree.map(lambda g: g / weight, grads)
        norm = optax.tree.norm(grads)
        if max_grad_norm is not None:
            scale = jnp.minimum(1.0, max_grad_norm / norm)
            grads = jax.tree.map(lambda g: g * scale, grads)
        updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss / weight, norm

    losses, norms, params, state = [], [], model.params, model.state
    for batch in batches:
        params, state, opt_state, loss, norm = step(params, state, opt_state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    adam = next(s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu"))
    moments = {f"{kind}.{name}": x for kind in ("mu", "nu") for name, x in named(getattr(adam, kind)).items()}
    return Trajectory(losses, norms, named(params), moments, named(state))


def named(state):
    """Name the arrays of an NNX state, or of Linen variables, by their dotted paths."""
    is_nnx = isinstance(state, nnx.State)
    flat = nnx.to_flat_state(state) if is_nnx else nnx.traversals.flatten_mapping(state).items()
    leaves = ((path, jax.tree.leaves(variable)[0]) for path, variable in flat)
    return {".".join(map(str, path)): np.asarray(x) for path, x in leaves if not is_key(x)}


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


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


def train_by_name(factory, loss_fn, tx, batches, *, seed=0):
    """Train on one device with an optimizer over a flat dict by dotted name, so that labels and masks can go by name.

    Returns the parameters and the arrays of the optimizer's state, both by dotted name.
    """
    graphdef, variables, rest = nnx.split(factory(nnx.Rngs(seed)), nnx.Param, ...)
    flat = nnx.to_flat_state(variables)
    names = [".".join(map(str, path)) for path, _ in flat]
    params = dict(zip(names, jax.tree.leaves(variables), strict=True))
    tree = jax.tree.structure(variables)
    opt_state = tx.init(params)

    @jax.jit
    def step(params, opt_state, batch):
        def mean_loss(params):
            # A map makes new variables: the given ones belong to an outer trace.
            variables = jax.tree.unflatten(tree, [params[name] for name in names])
            loss = loss_fn(nnx.merge(graphdef, variables, jax.tree.map(lambda x: x, rest)), batch)
            return loss.total / loss.weight

        updates, opt_state = tx.update(jax.grad(mean_loss)(params), opt_state, params)
        return optax.apply_updates(params, updates), opt_state

    for batch in batches:
        params, opt_state = step(params, opt_state, batch)
    arrays = jax.tree_util.tree_leaves_with_path(opt_state)
    return {name: np.asarray(x) for name, x in params.items()}, {
        ".".join(str(getattr(key, "key", getattr(key, "name", getattr(key, "idx", None)))) for key in path): x
        for path, x in arrays
    }
