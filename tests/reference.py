"""Reference training on one device with plain Flax, `jax.grad` and optax. Shares no code with jfsdp except the loss."""

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
    opt_state: dict


# Models are initialized as in jfsdp's init on CPU: in one program, because JAX 0.10.2 rounds differently operation by
# operation, and without optimization, with which the last bit depends on the shape of a loop.
INIT_OPTIONS = {"xla_backend_optimization_level": 0}


class PlainNNX:
    """An NNX factory as functions of its parameters and its other state."""

    def __init__(self, factory, seed):
        self.graphdef, self.params, self.state = nnx.split(factory(nnx.Rngs(seed)), nnx.Param, ...)

    def loss(self, loss_fn, params, state, batch):
        # The map makes new variables, because these belong to an outer trace.
        model = nnx.merge(self.graphdef, *jax.tree.map(lambda x: x, (params, state)))
        loss = loss_fn(model, batch)
        return loss, nnx.split(model, nnx.Param, ...)[2]


class PlainLinen:
    """A Linen module with example inputs, as functions of its parameters and its other collections."""

    def __init__(self, source, seed):
        self.module, inputs = source
        args = [jnp.zeros(x.shape, x.dtype) for x in inputs]
        init = jax.jit(self.module.init, compiler_options=INIT_OPTIONS)
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


def first_params(source):
    """Return the parameters that Flax initializes in one program, which are bitwise equal to those of `init`."""
    if isinstance(source, tuple):
        return PlainLinen(source, 0).params
    init = lambda: nnx.split(source(nnx.Rngs(0)), nnx.Param, ...)[1]  # noqa: E731
    return jax.jit(init, compiler_options=INIT_OPTIONS)()


def train(source, loss_fn, tx, batches, *, seed=0, max_grad_norm=None, accumulate=1, frozen=()):
    """Train on one device and return the `Trajectory`.

    It has parameters by dotted name, Adam's moments by the same names, and all arrays of the optimizer's state by
    dotted path.

    Args:
      accumulate: number of microbatches; microbatch a has the rows b with b % accumulate == a. Losses, weights and
        gradients of the sums are added and divided once. Each microbatch gets the model's state of the previous one.
      frozen: prefixes of the names of parameters that are not trained.
    """
    model = plain(source, seed)
    if frozen:
        is_frozen = lambda path, _: dotted(path).startswith(tuple(frozen))  # noqa: E731
        mask = jax.tree_util.tree_map_with_path(is_frozen, model.params)
        tx = optax.chain(optax.masked(tx, jax.tree.map(lambda x: not x, mask)), optax.masked(optax.set_to_zero(), mask))
    tx = optax.with_extra_args_support(tx)
    opt_state = jax.jit(tx.init)(model.params)  # without jit each operation is a program

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
        try:
            updates, opt_state = tx.update(grads, opt_state, params, value=loss / weight)
        except TypeError:  # accepts only gradients, state and parameters
            updates, opt_state = tx.update(grads, opt_state, params)
        return optax.apply_updates(params, updates), state, opt_state, loss / weight, norm

    losses, norms, params, state = [], [], model.params, model.state
    for batch in batches:
        params, state, opt_state, loss, norm = step(params, state, opt_state, batch)
        losses.append(float(loss))
        norms.append(float(norm))
    states = [s for s in jax.tree.leaves(opt_state, is_leaf=lambda s: hasattr(s, "mu")) if hasattr(s, "mu")]
    kinds = [(s, kind) for s in states[:1] for kind in ("mu", "nu") if hasattr(s, kind)]
    moments = {f"{kind}.{name}": x for s, kind in kinds for name, x in moment(s, kind).items()}
    arrays = {dotted(path): x for path, x in jax.tree_util.tree_leaves_with_path(opt_state)}
    arrays = {name.removeprefix("0.inner_state.") if frozen else name: x for name, x in arrays.items()}
    return Trajectory(losses, norms, named(params), moments, named(state), arrays)


def moment(state, kind):
    """Return the arrays of one of Adam's moments by dotted name, as `named`."""
    return {dotted(path): np.asarray(x) for path, x in jax.tree_util.tree_leaves_with_path(getattr(state, kind))}


def dotted(path):
    """Return the dotted name of a path in a tree; an NNX value has its variable's name."""
    keys = [next(str(getattr(key, kind)) for kind in ("key", "idx", "name") if hasattr(key, kind)) for key in path]
    return ".".join(keys[:-1] if keys and keys[-1] == "value" else keys)


def named(state):
    """Return the arrays of an NNX state, or of Linen variables, by dotted path."""
    is_nnx = isinstance(state, nnx.State)
    flat = nnx.to_flat_state(state) if is_nnx else nnx.traversals.flatten_mapping(state).items()
    leaves = ((path, jax.tree.leaves(variable)[0]) for path, variable in flat)
    return {".".join(map(str, path)): np.asarray(x) for path, x in leaves if not is_key(x)}


def is_key(x):
    return jnp.issubdtype(x.dtype, jax.dtypes.prng_key)


def logical(state, name, value):
    """Remove the padding of a stored array."""
    shape = state.layout.by_path[name].shape
    return np.asarray(value)[tuple(slice(0, size) for size in shape)]


def worst_leaf(found, wanted, scale):
    """Return the maximum over leaves of `max|d| / max(scale, max|ref|)`, with the leaf's name."""
    assert found.keys() == wanted.keys()
    errors = {
        name: float(np.abs(found[name] - wanted[name]).max() / max(scale, np.abs(wanted[name]).max()))
        for name in wanted
    }
    return max((error, name) for name, error in errors.items())
