"""Training on one device with the user's own code, `jax.grad` and optax: the reference of a proof."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import optax

from jfsdp.jaxprs import all_eqns, draws
from jfsdp.layout.precision import is_key
from jfsdp.modules.model import Arrays, Hooks, PlainModel
from jfsdp.train.step.loss import as_loss
from jfsdp.train.update.roles import array_name


def fast_to_compile() -> dict[str, Any]:
    """Return options with which XLA:CPU compiles in a fraction of the time: a proof compiles more than it computes."""
    is_cpu = jax.default_backend() == "cpu"
    return {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True} if is_cpu else {}


_HOST_CALLS = ("pure_callback", "io_callback")
# Without units a model calls none of these: it runs as the user wrote it.
_NO_UNITS = Hooks({}, lambda *_: None, lambda unit: True, lambda x: x, lambda x: x)  # type: ignore[arg-type,return-value]


@contextlib.contextmanager
def _one_device() -> Iterator[None]:
    """Let JAX tell the user's code that there is one device."""
    one = jax.devices()[:1]
    shown = {"device_count": 1, "local_device_count": 1, "devices": one, "local_devices": one}
    with contextlib.ExitStack() as stack:
        for name, value in shown.items():
            stack.enter_context(mock.patch.object(jax, name, lambda *_, value=value, **__: value))
        yield


def data_of(x: jax.Array) -> jax.Array:
    """Return an array; the numbers of a random key."""
    return jax.random.key_data(x) if is_key(x) else x


@dataclasses.dataclass(frozen=True)
class Values:
    """Values of a run that a proof compares, by kind and name, such as `gradient`, `layers.0.kernel`.

    Attributes:
      arrays: logical arrays on the host. `gradient` is of the first step, before clipping to a norm.
      weights: of the loss, by step.
    """

    arrays: dict[tuple[str, str], Any]
    weights: tuple[float, ...] = ()

    def of(self, kind: str) -> dict[str, Any]:
        """Return the arrays of one kind by name."""
        return {name: value for (of, name), value in self.arrays.items() if of == kind}


@dataclasses.dataclass(frozen=True, eq=False)
class Reference:
    """A model with its loss and optimizer on one device.

    Attributes:
      trained: names of the trained parameters.
      batches: the global batch of each step.
    """

    model: PlainModel
    loss_fn: Callable[[Any, Any], Any]
    tx: optax.GradientTransformation
    params: Arrays
    state: Arrays
    trained: frozenset[str]
    batches: Sequence[Any]
    max_grad_norm: float | None = None

    def loss(self, params: Arrays, state: Arrays, rows: Any) -> tuple[jax.Array, Any]:
        """Return the total of the loss over rows, and `(weight, state afterwards)`."""
        fn = lambda model, rows: as_loss(self.loss_fn(model, rows))  # noqa: E731
        with _one_device():
            loss, _, after = self.model.run(fn, params, state, (rows,), _NO_UNITS)
        return loss.total, (loss.weight, after)

    @functools.cached_property
    def _grad(self) -> Callable[..., Any]:
        def compute(trained: Arrays, frozen: Arrays, state: Arrays, rows: Any) -> Any:
            return self.loss({**frozen, **trained}, state, rows)

        return jax.jit(jax.value_and_grad(compute, has_aux=True), compiler_options=fast_to_compile())

    def gradient(self, params: Arrays, state: Arrays, rows: Any) -> tuple[jax.Array, jax.Array, Arrays, Arrays]:
        """Return the total, its weight, the state afterwards, and the gradients of the total by name."""
        parts = [
            {name: x for name, x in params.items() if (name in self.trained) is wanted} for wanted in (True, False)
        ]
        (total, (weight, after)), grads = self._grad(*parts, state, rows)
        return total, weight, after, grads

    def train(self, accumulate: int, params: Arrays | None = None) -> Values:
        """Take a step for each batch; microbatch a has the rows b with b % accumulate == a.

        Args:
          params: to begin with; None: the model's.
        """
        params, state, found = dict(params or self.params), self.state, dict[tuple[str, str], Any]()
        tx, build, by_name = optax.with_extra_args_support(self.tx), self.model.tree.build, self.model.tree.by_name
        pick = lambda values: build({name: values[name] for name in self.trained})  # noqa: E731
        opt_state, weights = jax.jit(tx.init, compiler_options=fast_to_compile())(pick(params)), []
        update = jax.jit(tx.update, compiler_options=fast_to_compile())
        for index, batch in enumerate(self.batches):
            loss, weight, sums = 0.0, 0.0, None
            for part in range(accumulate):
                rows = jax.tree.map(lambda x, part=part: x[part::accumulate] if jnp.ndim(x) else x, batch)
                total, count, state, grads = self.gradient(params, state, rows)
                loss, weight = loss + total, weight + count
                sums = grads if sums is None else jax.tree.map(jnp.add, sums, grads)
            grads = {name: x / weight for name, x in (sums or {}).items()}
            weights.append(float(weight))
            found["loss", f"step {index + 1}"] = loss / weight
            norm = optax.tree.norm(grads)
            if index == 0:
                found |= {("gradient", name): x for name, x in grads.items()}
            if self.max_grad_norm is not None:
                grads = {name: x * jnp.minimum(1.0, self.max_grad_norm / norm) for name, x in grads.items()}
            updates, opt_state = update(pick(grads), opt_state, pick(params), value=loss / weight)
            params |= by_name(optax.apply_updates(pick(params), updates))
        found |= {("parameter", name): x for name, x in params.items()}
        for path, x in jax.tree_util.tree_leaves_with_path(opt_state):
            found["optimizer state", array_name(self.model.tree, path)] = data_of(x)
        found |= {("model state", name): data_of(x) for name, x in state.items()}
        return Values(jax.device_get(found), tuple(weights))

    @functools.cached_property
    def is_sum(self) -> bool:
        """Whether the loss is a sum with its weight, not a scalar."""
        found: list[bool] = []

        def probe(model: Any, rows: Any) -> Any:
            loss = self.loss_fn(model, rows)
            found.append(hasattr(loss, "total"))
            return loss

        shapes = self.params, self.state, self.batches[0]
        jax.eval_shape(dataclasses.replace(self, loss_fn=probe).loss, *shapes)
        return found[0]

    @functools.cached_property
    def jaxpr(self) -> Any:
        """The trace of the loss."""
        return jax.make_jaxpr(self.loss)(self.params, self.state, self.batches[0]).jaxpr

    @property
    def draws(self) -> bool:
        """Whether the loss draws random numbers."""
        return any(map(draws, all_eqns(self.jaxpr)))

    def check(self) -> None:
        """Check that the loss can be compared.

        Raises:
          ValueError: if it calls the host, or computes in 8 bits.
        """
        if found := [eqn.primitive.name for eqn in all_eqns(self.jaxpr) if eqn.primitive.name in _HOST_CALLS]:
            raise ValueError(f"prove: the loss has a {found[0]}, which may block simulated devices; compute it in JAX")
        if self.eps > 2**-5:
            raise ValueError("prove: the loss computes in 8 bits, whose rounding hides errors; use a wider dtype")

    @property
    def eps(self) -> float:
        """The relative rounding error of the narrowest floating dtype in the loss."""
        dtypes = {var.aval.dtype for eqn in all_eqns(self.jaxpr) for var in eqn.outvars if hasattr(var.aval, "dtype")}
        return max(float(jnp.finfo(x).eps) for x in dtypes if jnp.issubdtype(x, jnp.inexact))

    def moved(self) -> Arrays:
        """Return the parameters, each element changed by the rounding error `eps` with a random sign."""
        rng = np.random.default_rng(0)

        def move(x: jax.Array) -> jax.Array:
            signs = rng.choice([-1.0, 1.0], size=x.shape)
            return (x * (1 + self.eps * signs)).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.inexact) else x

        return {name: move(x) for name, x in self.params.items()}
