"""Wire formats: steps against one device that rounds the same weights, and the same partial sums of gradients."""

import functools
import itertools

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from tests.models_small import VOCAB, Block, Tower, make_batches, token_loss
from tests.sharding import fully_shard

DIM, LAYERS = 32, 3


def power_of_two(amax, top):
    """The smallest power of two by which amax is divided to at most `top`, in exact arithmetic."""
    power = 2.0 ** np.ceil(np.log2(np.where(amax == 0, top, amax).astype(np.float64) / top))
    return np.where(amax == 0, 1, power)


def round_float8(x, dims):
    scale = power_of_two(np.abs(x).max(dims, keepdims=True), 448)
    return ((x / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(np.float64) * scale).astype(x.dtype)


def round_int8(x, block):
    blocks = x.astype(np.float32).reshape(*x.shape[:-1], -1, block)
    scale = np.abs(blocks).max(-1, keepdims=True).astype(ml_dtypes.bfloat16).astype(np.float32)
    codes = np.clip(np.round(blocks / np.where(scale == 0, 1, scale) * 127), -127, 127)
    return (codes / np.float32(127) * scale).reshape(x.shape).astype(x.dtype)


def rounded_weights(params, how):
    """Round the matrices of the blocks, each layer separately."""
    if how is None:
        return params
    round_one = {"float8": lambda x: round_float8(x, (-2, -1)), "int8": lambda x: round_int8(x, 32)}[how]
    is_matrix = lambda path: path[0].key == "blocks" and path[-1].key == "kernel"  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: round_one(np.asarray(x)) if is_matrix(path) else x, params)


class Reference:
    """The tower on one device with plain Flax."""

    def __init__(self):
        self.graph, params, self.rest = nnx.split(tower(nnx.Rngs(0)), nnx.Param, ...)
        self.params = nnx.to_pure_dict(params)

        def total(params, batch):
            return token_loss(nnx.merge(self.graph, params, self.rest), batch).total

        self.grad = jax.jit(jax.value_and_grad(total))

    def sums(self, params, batch, rows=slice(None)):
        part = jax.tree.map(lambda x: x[rows], batch)
        return jax.tree.map(np.asarray, self.grad(params, part))


def tower(rngs):
    return Tower(rngs, dim=DIM, num_layers=LAYERS)


def flat(tree):
    return {".".join(str(key.key) for key in path): x for path, x in jax.tree_util.tree_flatten_with_path(tree)[0]}


def shard(sizes, strategy="full_shard", *, gather=None, reduce=None, **options):
    mesh = jfsdp.make_mesh(devices=jax.devices()[: np.prod(list(sizes.values()))], **sizes)
    policy = jfsdp.MixedPrecisionPolicy(gather_wire=gather, reduce_wire=reduce)
    return fully_shard(tower, mesh=mesh, strategy=strategy, units=[Block], mp_policy=policy, **options)


def gradients(model, batch, accumulate=1, **options):
    step = model.grad_step(token_loss, accumulate=accumulate, **options)
    state = model.init(optax.sgd(0.1))
    found = step(state, batch)
    return found


if __name__ == "__main__":
    pass
