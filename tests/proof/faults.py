"""Faults in losses, models and the engine, as users and maintainers make them, with the causes that `prove` may name.

Inspired by the tracker of other libraries: Megatron-LM#7452 and #5047, transformers#48687, #48690 and #36607,
Automodel#2995, text-generation-inference#1036, Fast-LLM#551, pytorch#170862, verl#7493, jax#3970, openxla/xla#46231.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

import jfsdp
from jfsdp import moe
from jfsdp.engine import engine, manual
from jfsdp.engine.manual import ManualEngine
from jfsdp.engine.movements import GATHER, REDUCE, SCATTER
from jfsdp.engine.xla import XlaEngine
from jfsdp.train.step import inspect_loss, step
from jfsdp.train.update.optimizer import ShardedOptimizer
from jfsdp.train.update.update import Update

ROWS, TOKENS, DIM, WIDE = 16, 8, 8, 12


@dataclasses.dataclass(frozen=True)
class Fault:
    """A program, and what `prove` should say of it.

    Attributes:
      name: what is wrong; a fact of the program if nothing is.
      given: the arguments of `prove`.
      causes: the names that are right; none if the program has no fault.
      seed: changes jfsdp's code with a `pytest.MonkeyPatch`.
      quick: whether it is tested in `make test`.
    """

    name: str
    given: Mapping[str, Any]
    causes: tuple[str, ...] = ()
    seed: Callable[[Any], None] = lambda patch: None
    quick: bool = False


# Models, losses and batches ------------------------------------------------------------------------------------------


def weight(rngs, *shape):
    return nnx.Param(jax.random.normal(rngs.params(), shape) * 0.5)


class Net(nnx.Module):
    """Rows [B D] or tokens [B T D] to numbers of the same shape."""

    def __init__(self, rngs, wide=WIDE):
        self.up, self.down = nnx.Linear(DIM, wide, rngs=rngs), nnx.Linear(wide, DIM, rngs=rngs)

    def hidden(self, x):
        return jnp.tanh(self.up(x))

    def __call__(self, x):
        return self.down(self.hidden(x))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = weight(rngs, DIM, WIDE), weight(rngs, WIDE, DIM)

    def __call__(self, x):
        return x + jnp.tanh(x @ self.up[...]) @ self.down[...]


class Stack(nnx.Module):
    """Four blocks whose parameters are stacked."""

    def __init__(self, rngs):
        self.blocks = nnx.split_rngs(splits=4)(nnx.vmap(Block))(rngs)

    def __call__(self, x):
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.blocks)


class Dropped(Net):
    """With dropout by the keys in its state."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.dropout = nnx.Dropout(0.5, rngs=rngs)

    def hidden(self, x):
        return self.dropout(jnp.tanh(self.up(x)))


class Counted(Net):
    """With a number of calls in its state, as a key of its noise if `draws`."""

    def __init__(self, rngs, draws=False):
        super().__init__(rngs)
        self.calls, self.draws = nnx.BatchStat(jnp.zeros((), jnp.int32)), draws

    def hidden(self, x):
        self.calls[...] = self.calls[...] + 1
        x = super().hidden(x)
        return x * jax.random.bernoulli(jax.random.key(self.calls[...]), 0.5, x.shape) if self.draws else x


class Averaged(Net):
    """With a running mean of its rows in its state."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.mean = nnx.BatchStat(jnp.zeros(WIDE))

    def hidden(self, x):
        x = super().hidden(x)
        self.mean[...] = 0.9 * self.mean[...] + 0.1 * jax.lax.stop_gradient(x.mean(0))
        return x - self.mean[...]


class Hidden(Net):
    """With a function of the hidden rows or tokens."""

    def __init__(self, rngs, fn):
        super().__init__(rngs)
        self.fn = fn

    def hidden(self, x):
        return self.fn(super().hidden(x))


class Tied(nnx.Module):
    """Tokens by one matrix in, and by the same matrix out."""

    def __init__(self, rngs, detaches=False, vocab=DIM):
        self.table, self.mix, self.detaches = weight(rngs, vocab, WIDE), weight(rngs, WIDE, WIDE), detaches

    def __call__(self, tokens):
        table = self.table[...]
        out = jax.lax.stop_gradient(table) if self.detaches and manual_axes() else table
        return jnp.tanh(table[tokens] @ self.mix[...]) @ out.T


class RowParallel(nnx.Module):
    """A residual layer whose second matrix is cut over axis `tensor` by the model's own `shard_map`."""

    def __init__(self, rngs, local):
        self.first = nnx.Linear(DIM, DIM, rngs=rngs)
        self.up, self.down, self.bias = weight(rngs, DIM, WIDE), weight(rngs, WIDE, DIM), weight(rngs, DIM)
        self.local = local

    def __call__(self, x):
        x = jnp.tanh(self.first(x))
        args = x, self.up[...], self.down[...], self.bias[...]
        if jax.sharding.get_abstract_mesh().shape.get("tensor", 1) == 1:
            return x + jnp.tanh(x @ args[1]) @ args[2] + args[3]
        specs = PartitionSpec(), PartitionSpec(None, "tensor"), PartitionSpec("tensor"), PartitionSpec()
        options = {"in_specs": specs, "out_specs": PartitionSpec(), "axis_names": {"tensor"}, "check_vma": False}
        return x + jax.shard_map(self.local, **options)(*args)


def whole_sum(x, up, down, bias):
    return jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor") + bias


def no_sum(x, up, down, bias):
    return jnp.tanh(x @ up) @ down + bias


def double_sum(x, up, down, bias):
    return jax.lax.psum(jax.lax.psum(jnp.tanh(x @ up) @ down, "tensor"), "tensor") + bias


def bias_on_each(x, up, down, bias):
    return jax.lax.psum(jnp.tanh(x @ up) @ down + bias, "tensor")


@jax.custom_vjp
def copy_to_tensor(x):
    """Megatron's copy to a region: its backward sums over the axis, as the `shard_map` around it does too."""
    return x


copy_to_tensor.defvjp(lambda x: (x, None), lambda _, grad: (jax.lax.psum(grad, "tensor"),))


def sum_in_backward(x, up, down, bias):
    return whole_sum(copy_to_tensor(x), up, down, bias)


class Experts(nnx.Module):
    def __init__(self, rngs):
        self.up, self.down = weight(rngs, 4, DIM, WIDE), weight(rngs, 4, WIDE, DIM)

    def __call__(self, y):
        return jnp.einsum("enf,efd->end", jnp.tanh(jnp.einsum("end,edf->enf", y, self.up[...])), self.down[...])


class Mixture(nnx.Module):
    """A layer of experts; `gate` changes the router's logits."""

    def __init__(self, rngs, gate=lambda logits: logits):
        self.first, self.router, self.experts, self.gate = (
            weight(rngs, DIM, DIM),
            weight(rngs, DIM, 4),
            Experts(rngs),
            gate,
        )

    def __call__(self, x):
        x = jnp.tanh(x @ self.first[...])
        y, self_routing = jfsdp.experts(x, self.gate(x @ self.router[...]), self.experts, k=2)
        return x + y, self_routing


class Fourier(Net):
    """With complex weights of the frequencies of a row."""

    def __init__(self, rngs):
        super().__init__(rngs)
        self.weights = nnx.Param(jax.random.normal(rngs.params(), (WIDE // 2 + 1,)) * (1 + 0.5j))

    def hidden(self, x):
        return jnp.fft.irfft(jnp.fft.rfft(super().hidden(x)) * self.weights[...], WIDE)


@jax.custom_vjp
def clip_cotangent(x):
    """Clip the cotangents of a device's rows by their norm."""
    return x


clip_cotangent.defvjp(lambda x: (x, None), lambda _, grad: (grad * jnp.minimum(1.0, 0.1 / jnp.linalg.norm(grad)),))


@jax.custom_vjp
def all_rows(x):
    """Gather rows; the backward keeps the cotangents of this device's rows, without a sum over devices."""
    axes = manual_axes()
    return jax.lax.all_gather(x, axes, axis=0, tiled=True) if axes else x


def own_rows(num, grad):
    axes = manual_axes()
    return (jax.lax.dynamic_slice_in_dim(grad, jax.lax.axis_index(axes) * num, num) if axes else grad,)


all_rows.defvjp(lambda x: (all_rows(x), len(x)), own_rows)


class Attend(Net):
    """Causal attention over whole rows, with positions."""

    def hidden(self, x):
        at = jfsdp.positions(x)
        x = super().hidden(x + jnp.sin(at[..., None] * 0.3))
        heads = x.reshape(*x.shape[:2], 4, -1)
        return jfsdp.attention(heads, heads, heads, causal=True).reshape(x.shape)


def manual_axes(*names):
    """Return the axes that are manual here, as users' code asks JAX."""
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    names = names or ("replica", "fsdp", "context", "expert")
    return tuple(name for name in names if kinds.get(name) == AxisType.Manual and mesh.shape[name] > 1)


def num_devices():
    """Return the number of devices that share the batch, as users' code asks JAX."""
    axes = manual_axes()
    return jax.lax.axis_size(axes) if axes else 1


def row_losses(out, batch):
    losses = jnp.square(out - batch["y"]).mean(-1)
    return losses * batch["mask"].reshape(batch["mask"].shape + (1,) * (losses.ndim - batch["mask"].ndim))


def squares(model, batch):
    """The right loss: a sum with its weight."""
    losses = row_losses(model(batch["x"]), batch)
    return jfsdp.Loss(losses.sum(), batch["mask"].sum() * losses.size / len(losses))


def mean_of_means(model, batch):
    losses = row_losses(model(batch["x"]), batch)
    return jfsdp.Loss(losses.sum() / batch["mask"].sum() * len(losses), len(losses))


def by_device_count(model, batch):
    loss = squares(model, batch)
    return jfsdp.Loss(loss.total / jax.device_count(), loss.weight)


def nearly_right(model, batch):
    """A sum of a device's rows that is off by 1e-5."""
    loss = squares(model, batch)
    return jfsdp.Loss(loss.total * (1 - 1e-5 * (len(batch["x"]) < ROWS)), loss.weight)


def mean_with_weight_one(model, batch):
    losses = row_losses(model(batch["x"]), batch)
    return jfsdp.Loss(losses.sum() / batch["mask"].sum(), 1.0)


def global_count(model, batch):
    losses = row_losses(model(batch["x"]), batch)
    return jfsdp.Loss(losses.sum(), batch["num_items"])


def at_least_one(model, batch):
    losses = row_losses(model(batch["x"]), batch)
    return jfsdp.Loss(losses.sum(), jnp.maximum(batch["mask"].sum(), 1.0))


def similar(a, b):
    """Cross entropy of each row of a against all rows of b."""
    scores = a @ b.T
    return jax.nn.logsumexp(scores, -1) - jnp.sum(a * b, -1)


def contrastive(model, batch):
    losses = similar(model(batch["x"]), batch["y"])
    return jfsdp.Loss(losses.sum(), len(losses))


def contrastive_mean(model, batch):
    return similar(model(batch["x"]), batch["y"]).mean()


def contrastive_of_gathered(model, batch):
    """OpenCLIP without `gather_with_grad`: the keys of all devices, without a derivative."""
    out = model(batch["x"])
    axes = manual_axes()
    keys = jax.lax.stop_gradient(jax.lax.all_gather(out, axes, axis=0, tiled=True)) if axes else out
    losses = jax.nn.logsumexp(out @ keys.T, -1) - jnp.sum(out * batch["y"], -1)
    return jfsdp.Loss(losses.sum(), len(losses))


def contrastive_of_all_rows(model, batch):
    out = model(batch["x"])
    losses = jax.nn.logsumexp(batch["y"] @ all_rows(out).T, -1) - jnp.sum(out * batch["y"], -1)
    return jfsdp.Loss(losses.sum(), len(losses))


def mean_in_sum(model, batch):
    """A mean, the z-loss, is added to a sum."""
    loss, z = squares(model, batch), jax.nn.logsumexp(model(batch["x"]), -1)
    return jfsdp.Loss(loss.total + 0.5 * jnp.square(z).mean(), loss.weight)


def last_token(model, batch):
    losses = jnp.square(model(batch["x"]) - batch["y"]).mean(-1)
    return jfsdp.Loss(losses[:, -1].sum() * losses.shape[1], losses.size)


def pairs(model, batch):
    """Chosen and rejected texts in neighbouring rows."""
    scores = jnp.sum(model(batch["x"]) * batch["y"], -1)
    losses = jax.nn.softplus(scores[1::2] - scores[::2])
    return jfsdp.Loss(losses.sum(), len(losses))


def noisy(model, batch):
    x = batch["x"] + jax.random.normal(jax.random.key(3), batch["x"].shape)
    return squares(model, {**batch, "x": x})


def host_noise(model, batch):
    return squares(model, {**batch, "x": batch["x"] * HOST.normal(size=batch["x"].shape[1:])})


HOST = np.random.default_rng()


def summed(model, batch):
    """The total is summed over devices by the loss, and again by jfsdp."""
    loss, axes = squares(model, batch), manual_axes()
    return jfsdp.Loss(jax.lax.psum(loss.total, axes) if axes else loss.total, loss.weight)


def averaged(model, batch):
    loss = squares(model, batch)
    return jfsdp.Loss(loss.total / num_devices(), loss.weight)


def penalized(model, batch):
    """An auxiliary loss is multiplied by the number of devices, to undo an average that nobody takes."""
    loss, hidden = squares(model, batch), model.hidden(batch["x"])
    penalty = jnp.square(hidden).mean(-1).sum()
    return jfsdp.Loss(loss.total + 0.1 * penalty * num_devices(), loss.weight)


def shifted(model, batch):
    """The next token is the target; a device has no target of its last token."""
    out = model(batch["x"])
    losses = jnp.square(out[:, :-1] - batch["x"][:, 1:]).mean(-1)
    return jfsdp.Loss(losses.sum(), losses.size)


def pooled(model, batch):
    """A number of the mean over the tokens of a row."""
    losses = jnp.square(jnp.tanh(model(batch["x"]).mean(1)) - batch["label"][:, None]).mean(-1)
    return jfsdp.Loss(losses.sum(), len(losses))


def pooled_by_token(model, batch):
    loss = pooled(model, batch)
    return jfsdp.Loss(loss.total * batch["x"].shape[1], batch["x"].shape[0] * batch["x"].shape[1])


def predicted(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"])
    return jfsdp.Loss(losses.sum(), losses.size)


def balanced(model, batch):
    out, routing = model(batch["x"])
    losses = row_losses(out, batch)
    return jfsdp.Loss(losses.sum() + routing.balance.sum(), losses.size)


def own_balance(model, batch):
    """Switch's balance loss, of the tokens of one device."""
    out, _ = model(batch["x"])
    likely = jax.nn.softmax(jnp.tanh(batch["x"] @ model.first[...]) @ model.router[...])
    share = jax.nn.one_hot(likely.argmax(-1), 4).mean((0, 1))
    losses = row_losses(out, batch)
    return jfsdp.Loss(losses.sum() + losses.size * 4 * jnp.sum(share * likely.mean((0, 1))), losses.size)


def make_batch(tokens=False, mask=None):
    rng = np.random.default_rng(0)
    shape = (ROWS, TOKENS, DIM) if tokens else (ROWS, DIM)
    x, y = rng.normal(size=(2, *shape)).astype(np.float32)
    mask = (rng.random(ROWS) < np.linspace(0.2, 1.1, ROWS)).astype(np.float32) if mask is None else mask
    return {"x": x, "y": y, "mask": mask, "label": rng.normal(size=ROWS).astype(np.float32)}


def token_batch(vocab=DIM):
    tokens = np.random.default_rng(0).integers(0, vocab, (2, ROWS, TOKENS)).astype(np.int32)
    return {"tokens": tokens[0], "targets": tokens[1]}


MASK_LAST = np.r_[np.ones(ROWS - 4), np.zeros(4)].astype(np.float32)
SPLIT = jfsdp.placements(min_size=0)
CUT = {"up": PartitionSpec(None, "tensor"), "down": PartitionSpec("tensor")} | SPLIT
BY_EXPERT = {"experts.*": PartitionSpec("expert")} | SPLIT


def of(
    model: Any = Net,
    loss_fn: Any = squares,
    *,
    batch: Any = None,
    tx: Any = None,
    mesh: Any = None,
    strategy: Any = "full_shard",
    program: str = "manual",
    accumulate: int = 1,
    **options: Any,
) -> dict[str, Any]:
    """Return the arguments of a proof of one case."""
    given = {"model": model, "loss_fn": loss_fn, "tx": tx or optax.adamw(0.01), "batch": batch or make_batch()}
    given |= {"meshes": [mesh or {"fsdp": 4}], "strategies": [strategy], "programs": [program]}
    given |= {"accumulate": [accumulate], "reshard_after_forward": [None], "remat": ["none"]}
    return given | {"placements": SPLIT} | options


def with_tokens(model: Any, loss_fn: Any = squares, **options: Any) -> dict[str, Any]:
    return of(model, loss_fn, **{"batch": make_batch(tokens=True), "mesh": {"fsdp": 2, "context": 2}} | options)


def hidden(fn: Callable[[jax.Array], jax.Array]) -> Any:
    return functools.partial(Hidden, fn=fn)


def batch_norm(x):
    return (x - x.mean(0)) / jnp.sqrt(x.var(0) + 0.1)


def own_positions(x):
    return x * (1 + jnp.arange(x.shape[1])[:, None])


def token_shift(x):
    return x + jnp.pad(x[:, :-1], ((0, 0), (1, 0), (0, 0)))


def running_mean(x):
    return jnp.cumsum(x, 1) / (1 + jnp.arange(x.shape[1])[:, None])


def own_attention(x):
    scores = jnp.where(jnp.tri(x.shape[1]) > 0, jnp.einsum("btd,bsd->bts", x, x), -1e9)
    return jnp.einsum("bts,bsd->btd", jax.nn.softmax(scores), x)


def in_bfloat16(x):
    return jnp.tanh(x.astype(jnp.bfloat16)).astype(x.dtype)


def detached_gate(logits):
    """The router's logits of all devices, gathered without a derivative; this device uses its own."""
    axes = manual_axes()
    if not axes:
        return logits
    every = jax.lax.stop_gradient(jax.lax.all_gather(logits, axes))
    return every[jax.lax.axis_index(axes)]


# Faults of the engine ------------------------------------------------------------------------------------------------


def collecting(change: Callable[..., Any], when: Callable[[Any, Any], bool]) -> Callable[[Any], None]:
    """Change collectives of program `manual`: `change(collect, move, value, dim)`."""

    def seed(patch):
        real = ManualEngine._collect

        def collect(self, move, value, leaf, sliced):
            run = lambda x: real(self, move, x, leaf, sliced)  # noqa: E731
            return change(run, self._axes_of(move), value, (leaf.dim or 0) - sliced) if when(move, leaf) else run(value)

        patch.setattr(ManualEngine, "_collect", collect)

    return seed


def is_sum(move, leaf):
    return move.kind in (SCATTER, REDUCE)


def own_part(run, axes, value, dim):
    """Keep the part of this device's own sum, in place of a reduce-scatter."""
    size = value.shape[dim] // jax.lax.axis_size(axes)
    return jax.lax.dynamic_slice_in_dim(value, jax.lax.axis_index(axes) * size, size, dim)


def rotate_shards(run, axes, value, dim):
    num = jax.lax.axis_size(axes)
    return jax.lax.ppermute(run(value), axes, [(i, (i + 1) % num) for i in range(num)])


def rotate_whole(run, axes, value, dim):
    return jnp.roll(run(value), value.shape[dim], dim)


def cast_to(dtype):
    return lambda run, axes, value, dim: run(value.astype(dtype)).astype(value.dtype)


def changing(change: Callable[[str, jax.Array, Any], jax.Array]) -> Callable[[Any], None]:
    """Change the gradients of a step: `change(path, gradient, leaf)`."""

    def seed(patch):
        real = step.BatchStep.mean_gradients

        def mean_gradients(self, state, batch):
            found = real(self, state, batch)
            by_path = self.layout.by_path
            return found._replace(grads={path: change(path, x, by_path[path]) for path, x in found.grads.items()})

        patch.setattr(step.BatchStep, "mean_gradients", mean_gradients)

    return seed


def scaled_loss(patch):
    real = step.BatchStep.mean_gradients

    def mean_gradients(self, state, batch):
        found = real(self, state, batch)
        return found._replace(metrics={**found.metrics, "loss": found.metrics["loss"] * 4})

    patch.setattr(step.BatchStep, "mean_gradients", mean_gradients)


def stale_weights(patch):
    """Each step computes with the weights of the first."""
    real, call = step.BatchStep.mean_gradients, step.TrainStep.__call__
    first = {}

    def take(self, state, batch):
        first.update({} if first else {path: np.array(x) for path, x in state.params.items()})
        return call(self, state, batch)

    def mean_gradients(self, state, batch):
        params = {path: jnp.asarray(x) for path, x in first.items()}
        return real(self, dataclasses.replace(state, params=params), batch)

    patch.setattr(step.TrainStep, "__call__", take)
    patch.setattr(step.BatchStep, "mean_gradients", mean_gradients)


def last_microbatch(patch):
    real = ManualEngine.vjp

    def vjp(self, *args):
        outs, pull = real(self, *args)
        return outs, lambda cotangent, sums: pull(cotangent, None)

    patch.setattr(ManualEngine, "vjp", vjp)


def first_microbatch_twice(patch):
    real = engine.Engine.split_rows

    def split_rows(self, batch, num):
        return jax.tree.map(lambda x: x.at[-1].set(x[0]), real(self, batch, num))

    patch.setattr(engine.Engine, "split_rows", split_rows)


def low_precision_reduce(patch):
    real = XlaEngine.reduce

    def reduce(self, pairs, grads):
        found = real(self, pairs, {path: x.astype(jnp.float16) for path, x in grads.items()})
        return {path: x.astype(grads[path].dtype) for path, x in found.items()}

    patch.setattr(XlaEngine, "reduce", reduce)


def double_reduce(patch):
    """A sum over a group that has the whole sum already, as of a global loss in program xla."""
    real = XlaEngine.reduce_whole

    def reduce_whole(self, pairs, grads):
        return {path: x * 4 for path, x in real(self, pairs, grads).items()}

    patch.setattr(XlaEngine, "reduce_whole", reduce_whole)


def keys_alike(patch):
    patch.setattr(ManualEngine, "own_state", lambda self, state: state)


def keys_stay_folded(patch):
    patch.setattr(ManualEngine, "common_state", lambda self, before, after: after)


def state_stays(patch):
    patch.setattr(engine.Engine, "common_state", lambda self, before, after: before)


def allow_own_statistics(patch):
    patch.setattr(inspect_loss, "_state_problem", lambda *args: None)


def updating(change: Callable[[Any, Any], dict[str, jax.Array]]) -> Callable[[Any], None]:
    """Change parameters after an update: `change(old state, new state)`."""

    def seed(patch):
        real = Update.__call__

        def update(self, state, *args):
            new = real(self, state, *args)
            return dataclasses.replace(new, params=new.params | change(state, new))

        patch.setattr(Update, "__call__", update)

    return seed


def optimizing(change: Callable[[jax.Array], jax.Array]) -> Callable[[Any], None]:
    """Change every array of the optimizer's state after an update."""

    def seed(patch):
        real = ShardedOptimizer.update

        def update(self, *args):
            updates, state = real(self, *args)
            return updates, state._replace(inner=jax.tree.map(change, state.inner))

        patch.setattr(ShardedOptimizer, "update", update)

    return seed


def round_moments(x):
    return x.astype(jnp.bfloat16).astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.floating) else x


def count_twice(x):
    return x + 1 if jnp.issubdtype(x.dtype, jnp.integer) else x


def local_norms(patch):
    def clip(grads, norm, max_norm):
        return {path: x * jnp.minimum(1.0, max_norm / jnp.linalg.norm(x.ravel())) for path, x in grads.items()}

    patch.setattr(step, "clip_by_norm", clip)


def ones_as_padding(patch):
    real = manual.pad_all

    def pad_all(pairs, values):
        found = real(pairs, values)
        extra = real(pairs, {path: jnp.ones_like(x) for path, x in values.items()})
        return {path: jnp.where(extra[path] == 0, 1.0, x) for path, x in found.items()}

    patch.setattr(manual, "pad_all", pad_all)


def own_counts(patch):
    patch.setattr(moe, "sum_over_devices", lambda x: x)


GRID = {"replica": 2, "fsdp": 2}
FAULTS = [
    # Losses.
    Fault("loss: a mean of masked means", of(loss_fn=mean_of_means), ("unequal-weights",), quick=True),
    Fault("loss: a mean with weight 1", of(loss_fn=mean_with_weight_one), ("refused",)),
    Fault(
        "loss: the items of the global batch as each device's weight",
        of(loss_fn=global_count, batch={**make_batch(), "num_items": np.float32(ROWS)}),
        ("refused", "factor"),
    ),
    Fault(
        "loss: a device without items counts one",
        of(loss_fn=at_least_one, batch=make_batch(mask=MASK_LAST), strategy="zero2"),
        ("unequal-weights", "factor"),
    ),
    Fault(
        "loss: not a number on a device without items",
        of(loss_fn=mean_of_means, batch=make_batch(mask=MASK_LAST), strategy="ddp"),
        ("not-finite",),
    ),
    Fault("loss: contrastive, of a device's rows", of(loss_fn=contrastive), ("coupled-rows",), quick=True),
    Fault(
        "loss: contrastive, of a microbatch's rows in program xla, as a mean",
        of(loss_fn=contrastive_mean, program="xla", accumulate=2),
    ),
    Fault(
        "loss: contrastive, keys gathered without a derivative",
        of(loss_fn=contrastive_of_gathered),
        ("detached", "coupled-rows", "backward"),
    ),
    Fault(
        "loss: contrastive, own cotangents of gathered keys, in float32",
        of(loss_fn=contrastive_of_all_rows, wide=False),
        ("backward", "detached"),
    ),
    Fault("loss: divided by jax.device_count()", of(loss_fn=by_device_count), ("factor",), quick=True),
    Fault("loss: 0.99999 of a device's sum", of(loss_fn=nearly_right), ("factor",)),
    Fault("loss: a mean is added to a sum", of(loss_fn=mean_in_sum), ("forward", "factor"), quick=True),
    Fault("loss: of each device's last token", with_tokens(Net, last_token), ("coupled-tokens",)),
    Fault("loss: pairs of neighbouring rows, torn by microbatches", of(loss_fn=pairs, accumulate=2), ("coupled-rows",)),
    Fault("loss: noise from a key made in the loss", of(loss_fn=noisy), ("shared-key", "random-masks", "refused")),
    Fault("loss: noise of the host, drawn in each trace", of(loss_fn=host_noise), ("random-masks",)),
    Fault("loss: its sum over devices is summed again", of(loss_fn=summed, strategy="zero1"), ("factor",)),
    Fault("loss: its total is divided by the number of devices", of(loss_fn=averaged, mesh=GRID), ("factor",)),
    Fault("loss: a part times the number of devices", of(loss_fn=penalized), ("factor", "forward")),
    Fault("loss: next tokens of a device's tokens", with_tokens(Net, shifted), ("coupled-tokens",)),
    Fault("loss: of a mean over a device's tokens", with_tokens(Net, pooled), ("refused",)),
    Fault("loss: of a mean over a device's tokens, by token", with_tokens(Net, pooled_by_token), ("coupled-tokens",)),
    # Models.
    Fault("model: batch norm of a device's rows", of(hidden(batch_norm)), ("coupled-rows",)),
    Fault("model: cotangents are clipped by a device", of(hidden(clip_cotangent)), ("coupled-rows", "backward")),
    Fault("model: positions of a device's tokens", with_tokens(hidden(own_positions)), ("coupled-tokens",), quick=True),
    Fault("model: a shift of a device's tokens", with_tokens(hidden(token_shift)), ("coupled-tokens",)),
    Fault("model: a running mean of a device's tokens", with_tokens(hidden(running_mean)), ("coupled-tokens",)),
    Fault("model: attention to a device's tokens", with_tokens(hidden(own_attention)), ("coupled-tokens",)),
    Fault(
        "model: dropout by a key of a counter in the state",
        of(functools.partial(Counted, draws=True)),
        ("shared-key", "random-masks", "refused"),
    ),
    Fault(
        "model: no sum over axis tensor",
        of(functools.partial(RowParallel, local=no_sum), mesh={"fsdp": 2, "tensor": 2}, placements=CUT),
        ("missing-sum", "partial-copies"),
    ),
    Fault(
        "model: two sums over axis tensor",
        of(functools.partial(RowParallel, local=double_sum), mesh={"fsdp": 2, "tensor": 2}, placements=CUT),
        ("factor", "forward"),
    ),
    Fault(
        "model: a bias is added on each device of axis tensor",
        of(functools.partial(RowParallel, local=bias_on_each), mesh={"fsdp": 2, "tensor": 2}, placements=CUT),
        ("factor", "forward"),
    ),
    Fault(
        "model: cotangents are summed twice over axis tensor",
        of(functools.partial(RowParallel, local=sum_in_backward), mesh={"fsdp": 2, "tensor": 2}, placements=CUT),
        ("factor", "backward"),
    ),
    Fault(
        "model: the router's logits are gathered without a derivative",
        with_tokens(functools.partial(Mixture, gate=detached_gate), balanced, mesh={"fsdp": 4}),
        ("detached",),
        quick=True,
    ),
    Fault(
        "model: a balance loss of a device's tokens",
        with_tokens(Mixture, own_balance, mesh={"fsdp": 4}),
        ("coupled-rows",),
    ),
    Fault(
        "model: one use of a tied matrix is detached",
        of(functools.partial(Tied, detaches=True), predicted, batch=token_batch()),
        ("detached", "backward"),
    ),
    # The engine: sums.
    Fault(
        "engine: no sum over replicas",
        of(mesh=GRID),
        ("missing-sum", "partial-copies"),
        collecting(
            lambda run, axes, value, dim: value, lambda move, leaf: is_sum(move, leaf) and "replica" in move.axes
        ),
        quick=True,
    ),
    Fault(
        "engine: a device keeps its part of its own sum",
        of(),
        ("missing-sum",),
        collecting(own_part, is_sum),
        quick=True,
    ),
    Fault(
        "engine: no sum of one leaf, ddp",
        of(strategy="ddp"),
        ("missing-sum", "partial-copies"),
        collecting(
            lambda run, axes, value, dim: value, lambda move, leaf: leaf.path == "up.bias" and is_sum(move, leaf)
        ),
    ),
    Fault(
        "engine: no last sum, zero1",
        of(strategy="zero1", accumulate=2),
        ("missing-sum",),
        collecting(own_part, lambda move, leaf: is_sum(move, leaf) and leaf.path == "down.kernel"),
    ),
    Fault(
        "engine: sums of ddp are summed twice",
        of(strategy="ddp"),
        ("factor",),
        collecting(lambda run, axes, value, dim: run(run(value)), is_sum),
    ),
    Fault(
        "engine: sums of program xla are summed twice",
        of(program="xla", units=[nnx.Linear]),
        ("factor",),
        double_reduce,
    ),
    Fault(
        "engine: gradients are divided by the number of microbatches",
        of(strategy="zero2", accumulate=2),
        ("factor",),
        changing(lambda path, x, leaf: x / 2),
    ),
    Fault(
        "engine: rows of one device count twice",
        of(),
        ("unequal-weights",),
        collecting(lambda run, axes, value, dim: run(value * jnp.where(jax.lax.axis_index(axes) == 0, 2, 1)), is_sum),
    ),
    Fault("engine: only the last microbatch", of(accumulate=2, strategy="zero2"), ("missing-sum",), last_microbatch),
    Fault(
        "engine: the first microbatch twice",
        of(accumulate=2),
        ("unequal-weights", "missing-sum"),
        first_microbatch_twice,
    ),
    Fault(
        "engine: gradients of experts are divided by axis expert",
        with_tokens(Mixture, balanced, mesh={"fsdp": 2, "expert": 2}, placements=BY_EXPERT),
        ("factor",),
        changing(lambda path, x, leaf: x / 2 if "experts" in path else x),
    ),
    Fault(
        "engine: experts are not summed over fsdp",
        with_tokens(Mixture, balanced, mesh={"fsdp": 2, "expert": 2}, placements=BY_EXPERT),
        ("missing-sum",),
        collecting(own_part, lambda move, leaf: is_sum(move, leaf) and "experts" in leaf.path),
    ),
    Fault(
        "engine: loads of experts are a device's own",
        with_tokens(Mixture, balanced, mesh={"fsdp": 2, "expert": 2}, placements=BY_EXPERT),
        ("coupled-rows",),
        own_counts,
    ),
    Fault(
        "engine: a tied matrix counts twice",
        of(Tied, predicted, batch=token_batch()),
        ("factor",),
        changing(lambda path, x, leaf: x * 2 if path == "table" else x),
    ),
    Fault("engine: the reported loss is a sum over devices", of(), ("factor",), scaled_loss),
    # The engine: values and places.
    Fault("engine: sums in bfloat16", of(), ("cast",), collecting(cast_to(jnp.bfloat16), is_sum), quick=True),
    Fault(
        "engine: sums in float16, program xla", of(program="xla", units=[nnx.Linear]), ("cast",), low_precision_reduce
    ),
    Fault("engine: shards of gradients on the next device", of(), ("wrong-place",), collecting(rotate_shards, is_sum)),
    Fault(
        "engine: gathered weights in another order",
        of(),
        ("wrong-place", "forward"),
        collecting(rotate_whole, lambda move, leaf: move.kind == GATHER),
    ),
    Fault(
        "engine: gradients of layers in reverse",
        of(Stack, units=[jfsdp.Unit(Block, stacked=1)]),
        ("wrong-place",),
        changing(lambda path, x, leaf: x[::-1] if leaf.stacked else x),
        quick=True,
    ),
    Fault(
        "engine: padding enters the norm",
        of(functools.partial(Net, wide=13), max_grad_norm=0.1),
        ("optimizer",),
        ones_as_padding,
    ),
    # The engine: updates and states.
    Fault(
        "engine: a frozen leaf decays",
        of(frozen="up.*"),
        ("frozen",),
        updating(lambda old, new: {"up.kernel": old.params["up.kernel"] * 0.999}),
    ),
    Fault(
        "engine: a trained leaf is not updated",
        of(program="xla"),
        ("frozen",),
        updating(lambda old, new: {"down.kernel": old.params["down.kernel"]}),
    ),
    Fault("engine: each step computes with the first weights", of(), ("optimizer",), stale_weights),
    Fault("engine: clips each leaf by its own norm", of(max_grad_norm=0.1), ("optimizer", "factor"), local_norms),
    Fault(
        "engine: weights decay twice",
        of(),
        ("optimizer",),
        updating(lambda old, new: {path: x - 1e-4 * old.params[path] for path, x in new.params.items()}),
    ),
    Fault("engine: moments in bfloat16", of(program="xla"), ("cast", "optimizer"), optimizing(round_moments)),
    Fault("engine: an update counts two steps", of(), ("optimizer",), optimizing(count_twice)),
    Fault("engine: devices share dropout masks", of(Dropped), ("shared-key",), keys_alike, quick=True),
    Fault(
        "engine: keys of the state stay a device's own",
        of(Dropped),
        ("random-masks", "partial-copies", "model-state"),
        keys_stay_folded,
    ),
    Fault("engine: the model's state is not stored", of(Counted, program="xla"), ("model-state",), state_stays),
    Fault("engine: statistics of one device's rows", of(Averaged), ("model-state",), allow_own_statistics),
    # No fault.
    Fault("none: dropout", of(Dropped)),
    Fault("none: dropout and microbatches, program xla", of(Dropped, program="xla", accumulate=2)),
    Fault("none: a tied matrix", of(Tied, predicted, batch=token_batch(), accumulate=2), quick=True),
    Fault(
        "none: padding and Adafactor",
        of(functools.partial(Net, wide=13), tx=optax.adafactor(0.01, min_dim_size_to_factor=4), max_grad_norm=0.1),
    ),
    Fault("none: computes in bfloat16", of(hidden(in_bfloat16), mesh=GRID)),
    Fault("none: int state", of(Counted, strategy="zero1", accumulate=2)),
    Fault("none: batch statistics, program xla", of(Averaged, program="xla")),
    Fault(
        "none: masks, a schedule and MultiSteps",
        of(
            strategy="zero2",
            tx=optax.MultiSteps(
                optax.chain(
                    optax.masked(optax.add_decayed_weights(0.1), lambda p: jax.tree.map(lambda x: x.ndim > 1, p)),
                    optax.sgd(optax.linear_schedule(0.1, 0.01, 3), momentum=0.9),
                ),
                2,
            ),
        ),
    ),
    Fault("none: complex parameters", of(Fourier, tx=optax.sgd(0.1)), quick=True),
    Fault("none: a random key in the optimizer's state", of(tx=optax.add_noise(0.1, 0.5, jax.random.key(1)))),
    Fault("none: Muon", of(tx=optax.contrib.muon(0.02), strategy="ddp", mesh=GRID)),
    Fault("none: attention over axis context", with_tokens(Attend, units=[nnx.Linear])),
    Fault("none: experts", with_tokens(Mixture, balanced, mesh={"fsdp": 2, "expert": 2}, placements=BY_EXPERT)),
    Fault(
        "none: a sum over axis tensor",
        of(functools.partial(RowParallel, local=whole_sum), mesh={"fsdp": 2, "tensor": 2}, placements=CUT),
    ),
]
