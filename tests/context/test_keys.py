"""Gathered keys equal attention of whole rows on one device, in float64: output and every gradient within 1e-12."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jfsdp.context.keys import attend_keys, zigzag

TOKENS, SIZE, ROWS = 64, 4, 2
LIMIT = 1e-12
AXES = {
    2: ("context",),
    4: ("context",),
    8: ("context",),
    22: ("context_0", "context_1"),
    24: ("context_0", "context_1"),
}


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def make_mesh(split):
    """A mesh of axis `context`; 24 is (2, 4) over two axes."""
    sizes = [int(x) for x in str(split)]
    return Mesh(np.array(jax.devices()[: np.prod(sizes)]).reshape(sizes), AXES[split])


def inputs(heads, num_keys, seed=0):
    random = np.random.default_rng(seed)
    shapes = [(ROWS, TOKENS, num, SIZE) for num in (heads, num_keys, num_keys, heads)]
    return [jnp.asarray(random.normal(size=shape)) for shape in shapes]


def documents(*lengths):
    """Segment ids of one row; the last length is padding."""
    ids = [*range(1, len(lengths)), 0]
    assert sum(lengths) == TOKENS
    return np.repeat(ids, lengths).astype(np.int32)


PACKED = np.stack([documents(5, 1, 30, 1, 1, 10, 13, 3), documents(64, 0)])
MANY = np.stack([documents(*[1] * 20, 43, 1, 0), documents(3, 8, 8, 8, 8, 8, 8, 8, 5, 0)])


def whole(query, key, value, ids, window):
    """Attention of whole rows, written out."""
    key, value = (jnp.repeat(x, query.shape[2] // x.shape[2], axis=2) for x in (key, value))
    rows, columns = np.arange(TOKENS)[:, None], np.arange(TOKENS)[None]
    seen = ((columns <= rows) & (columns > rows - (window or TOKENS)))[None]
    if ids is not None:
        seen = seen & (ids[:, :, None] == ids[:, None])
    scores = jnp.where(seen[:, None], jnp.einsum("bqha,bkha->bhqk", query, key) * SIZE**-0.5, -jnp.inf)
    return jnp.einsum("bhqk,bkha->bqha", jax.nn.softmax(scores, axis=-1), value)


def split(split_by, ids, **options):
    """Gathered keys over a mesh, from rows in order to rows in order."""
    mesh = make_mesh(split_by)
    spec = P(None, AXES[split_by])
    order = zigzag(TOKENS, mesh.size)
    attend = functools.partial(attend_keys, axes=AXES[split_by], **options)
    if options.pop("remat", False):
        attend = jax.checkpoint(functools.partial(attend_keys, axes=AXES[split_by], **options))
    arrays = () if ids is None else (ids[:, order],)

    def run(*qkv):
        mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * (3 + len(arrays)), out_specs=spec, check_vma=False)
        return mapped(*(x[:, order] for x in qkv), *arrays)[:, np.argsort(order)]

    return run


def with_grads(attend, weights):
    """The weighted sum of the output, and its gradients."""
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attend(*x) * weights), argnums=(0, 1, 2)))


def distance(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return max(float(np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1)) for x, y in pairs)


@pytest.mark.parametrize("window", [None, 1, 7, 40])
@pytest.mark.parametrize("ids", [None, PACKED, MANY], ids=["whole", "packed", "many"])
@pytest.mark.parametrize("split_by", AXES)
def test_keys_equal_one_device(split_by, ids, window):
    *qkv, weights = inputs(4, 2)
    expected = with_grads(functools.partial(whole, ids=ids, window=window), weights)(*qkv)
    found = with_grads(split(split_by, ids, window=window), weights)(*qkv)
    assert distance(found, expected) < LIMIT
