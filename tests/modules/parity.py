"""Train a plain Flax model on one device and the same model sharded; compare everything that they hold."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx, traverse_util

import jfsdp
from jfsdp.engine.xla import XlaEngine
from tests.refusals import refuses
from tests.sharding import fully_shard

DIM, ROWS = 16, 16
TX = optax.sgd(0.1)


def data(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape or (ROWS, DIM)).astype(np.float32)


def tokens(rows=ROWS, length=5, vocab=37, seed=0):
    return np.random.default_rng(seed).integers(0, vocab, (rows, length)).astype(np.int32)


def flat(tree):
    """Name arrays by dotted path; keys as their data."""
    named = {jax.tree_util.keystr(path, simple=True, separator="."): x for path, x in jax.tree.leaves_with_path(tree)}
    return {name: key_data(x) for name, x in named.items()}


def key_data(x):
    return np.asarray(jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x)


def assert_close(found, wanted, rtol=2e-5, atol=2e-6):
    """Compare dicts of arrays by name; padding is cut off."""
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        cut = key_data(found[name])[tuple(slice(0, size) for size in value.shape)]
        np.testing.assert_allclose(cut, value, rtol=rtol, atol=atol, err_msg=name)


def mean_square(model, batch):
    return (model(batch) ** 2).mean()


def square(model, batch):
    """The same as a sum, which program `manual` takes for less."""
    out = model(batch)
    return jfsdp.Loss((out.astype(jnp.float32) ** 2).sum(), jnp.float32(out.size))


def train_sharded(model, loss, batches, state=None):
    state, step, losses = state or model.init(TX), model.train_step(loss, TX, program="xla", check_loss=False), []
    for batch in batches:
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, state


def trace(model, loss, batch):
    """Trace a step for shapes alone."""
    return model.train_step(loss, TX, program="xla").trace(model.abstract_state(TX), batch)


def refused(model, loss, batch, *facts, error: type[Exception] = ValueError):
    """Check that a step is refused before anything is made or compiled."""
    refuses(lambda: trace(model, loss, batch), *facts, error=error)


def unsharded(model, state):
    """Copy the parameters and the other state to one device, in their logical shapes."""
    shapes = {name: value.shape for name, value in model.model.params.items()}
    cut = {name: np.asarray(state.params[name])[tuple(map(slice, shape))] for name, shape in shapes.items()}
    one = jax.devices()[0]
    return jax.tree.map(jnp.asarray, cut), {
        name: jnp.copy(jax.device_put(x, one)) for name, x in state.model_state.items()
    }


def check_nnx(factory, loss, batch, units, *, steps=2, **options):
    """Take steps with the plain NNX model and the sharded one; losses, parameters and other state must agree."""
    model = fully_shard(factory, units=units, min_size=1, **options)
    state = model.init(TX)
    graphdef, abstract, abstract_rest = nnx.split(nnx.eval_shape(lambda: factory(nnx.Rngs(0))), nnx.Param, ...)
    arrays, other = unsharded(model, state)
    params = jax.tree.unflatten(jax.tree.structure(abstract), [arrays[name] for name in flat_names(abstract)])
    rest = jax.tree.unflatten(jax.tree.structure(abstract_rest), [other[name] for name in flat_names(abstract_rest)])
    losses, state = train_sharded(model, loss, [batch] * steps, state)

    @jax.jit
    def step(params, rest):
        def evaluate(params):
            copy = nnx.merge(graphdef, *jax.tree.map(lambda x: x, (params, rest)))
            value = loss(copy, batch)
            nnx.pop(copy, nnx.Intermediate)
            return value, nnx.state(copy, nnx.Not(nnx.Param))

        (value, rest), grads = jax.value_and_grad(evaluate, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), rest, value

    wanted = []
    for _ in range(steps):
        params, rest, value = step(params, rest)
        wanted.append(float(value))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_close(state.params, flat(nnx.to_pure_dict(params)))
    assert_close(state.model_state, flat(nnx.to_pure_dict(rest)), rtol=1e-4)
    return model


def flat_names(state):
    return [".".join(map(str, path)) for path, _ in nnx.to_flat_state(state)]


def check_linen(module, example, call, batch, units, *, loss=None, steps=2, mutable=(), **options):
    """Take steps with the plain Linen model and the sharded one; losses, parameters and other state must agree.

    Args:
      call: `f(apply, batch) -> scalar`; `apply` takes the arguments of `module.apply` after the variables. For the
        sharded model it is the model itself, for the plain one it applies the module to its variables, under the rng
        key that the rule of LinenModel says, and keeps the collections in `mutable`; asked for others, it returns them.
    """
    model = fully_shard((module, example), units=units, min_size=1, **options)
    state = model.init(TX)
    params, variables = map(nested, unsharded(model, state))
    variables.pop("rngs")
    losses, state = train_sharded(model, loss or call, [batch] * steps, state)

    @jax.jit
    def step(params, variables, count):
        def evaluate(params):
            kept, calls = dict(variables), [count]

            def apply(*args, **kwargs):
                kwargs = {"rngs": jax.random.fold_in(jax.random.key(0), calls[0]), "mutable": list(mutable)} | kwargs
                calls[0] += 1
                out, new = module.apply({"params": params, **kept}, *args, **kwargs)
                kept.update({name: new[name] for name in mutable})
                return (out, new) if kwargs["mutable"] != list(mutable) else out

            return call(apply, batch), (kept, calls[0])

        (value, (kept, count)), grads = jax.value_and_grad(evaluate, has_aux=True)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), kept, count, value

    count, wanted = jnp.zeros((), jnp.int32), []
    for _ in range(steps):
        params, variables, count, value = step(params, variables, count)
        wanted.append(float(value))
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    assert_close(state.params, flat(params))
    found = {name: value for name, value in state.model_state.items() if not name.startswith("rngs.")}
    assert_close(found, flat(variables), rtol=1e-4)
    assert int(state.model_state["rngs.count"]) == int(count)
    return model


def nested(arrays):
    return traverse_util.unflatten_dict({tuple(name.split(".")): value for name, value in arrays.items()})


def plain_variables(model):
    """Init the module of a sharded Linen model, unsharded."""
    args, kwargs = jax.tree.map(
        lambda x: jnp.zeros(x.shape, x.dtype) if isinstance(x, jax.ShapeDtypeStruct) else x,
        (model.model._args, model.model._kwargs),
    )
    init = lambda: model.model.module.init(jax.random.key(0), *args, **kwargs)  # noqa: E731
    # As engine/options.py compiles init on CPU.
    return jax.jit(init, compiler_options={"xla_backend_optimization_level": 0})()


def count_calls(monkeypatch, model, loss, batch):
    """Trace a loss once; count the calls of each unit, that is, its gathers forward."""
    counts, original = {}, XlaEngine.call_unit

    def counted(self, name, *args):
        counts[name] = counts.get(name, 0) + 1
        return original(self, name, *args)

    monkeypatch.setattr(XlaEngine, "call_unit", counted)
    shape = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    state = model.abstract_state(TX)
    jax.eval_shape(lambda *args: model.apply(loss, *args), state.source, state.model_state, shape)
    return counts
