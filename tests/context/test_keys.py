"""Gathered keys equal attention of whole rows on one device, in float64: output and every gradient within 1e-12."""

import functools
import itertools
import types
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jfsdp.context import cudnn, kernels, keys
from jfsdp.context.kernels import Reach
from jfsdp.context.keys import attend_keys
from jfsdp.context.rows import positions, to_zigzag, whole_rows, zigzag_rows
from tests import hlo
from tests.compiling import free_programs
from tests.pairwise import cover
from tests.refusals import refusing
from tests.thin import each_value

TOKENS, SIZE, ROWS = 64, 4, 2
LIMIT = 1e-12


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def make_mesh(axes, devices=None):
    """A mesh of axis `context`, or of two axes that split rows together."""
    names = [f"context_{i}" for i in range(len(axes))] if len(axes) > 1 else ["context"]
    return Mesh(np.array((devices or jax.devices())[: np.prod(axes)]).reshape(axes), names)


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


REMATS = {
    "no remat": lambda attend: attend,
    "full": jax.checkpoint,
    "saved": functools.partial(jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names("attention")),
}


def zigzag(seq_len, parts):
    """The order of a row's tokens in which device i of C has the chunks i and 2C-1-i."""
    chunks = np.arange(seq_len).reshape(2 * parts, -1)
    return np.stack([chunks[:parts], chunks[parts:][::-1]], axis=1).reshape(-1)


def split(axes, ids=None, remat="no remat", **options):
    """Gathered keys over a mesh, from rows in order to rows in order."""
    mesh = make_mesh(axes)
    order = zigzag(TOKENS, mesh.size)
    attend = REMATS[remat](functools.partial(attend_keys, **options))
    arrays = () if ids is None else (ids[:, order],)
    spec = P(None, mesh.axis_names)
    mapped = jax.shard_map(attend, mesh=mesh, in_specs=(spec,) * (3 + len(arrays)), out_specs=spec, check_vma=False)
    return lambda *qkv: mapped(*(x[:, order] for x in qkv), *arrays)[:, np.argsort(order)]


def with_grads(attend, weights):
    """The weighted sum of the output, and its gradients."""
    return jax.jit(jax.value_and_grad(lambda *x: jnp.sum(attend(*x) * weights), argnums=(0, 1, 2)))


def distance(found, expected):
    pairs = zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True)
    return np.max([np.max(np.abs(x - y)) / max(np.max(np.abs(y)), 1) for x, y in pairs])  # NaN if any is


COLUMNS = {
    "axes": [(2,), (4,), (8,), (2, 2), (2, 4)],
    "heads": [(4, 2), (4, 1), (3, 3)],
    "ids": [None, PACKED, MANY],
    "window": [None, 1, 7, 40, TOKENS],
    "remat": list(REMATS),
}


def describe(value):
    return {id(PACKED): "packed", id(MANY): "many"}.get(id(value)) or str(value)


@pytest.mark.parametrize(tuple(COLUMNS), each_value(cover(COLUMNS)), ids=describe)
def test_keys_equal_one_device(axes, heads, ids, window, remat):
    *qkv, weights = inputs(*heads)
    expected = with_grads(functools.partial(whole, ids=ids, window=window), weights)(*qkv)
    found = with_grads(split(axes, ids, remat, window=window), weights)(*qkv)
    assert distance(found, expected) < LIMIT


@pytest.mark.proof
@pytest.mark.parametrize("row", list(itertools.product(*(COLUMNS[name] for name in ("axes", "ids", "window")))))
def test_keys_equal_one_device_in_every_combination(row):
    free_programs()
    axes, ids, window = row
    test_keys_equal_one_device(axes, (4, 2), ids, window, "saved")


def undefined(kernel):
    """The kernel of plain JAX, with NaN where a kernel may write anything: excluded queries and keys.

    Its backward also computes excluded queries: only their statistics and gradients exclude them.
    """

    def fill(x, count, dim):
        dim %= x.ndim
        index = jnp.arange(x.shape[dim]).reshape([-1 if i == dim else 1 for i in range(x.ndim)])
        return jnp.where(index < count.reshape(-1, *[1] * (x.ndim - 1)), x, jnp.nan)

    def queries_of(reach, query):
        lengths = [x for x in (reach.queries, reach.keys) if x is not None]
        queries = jnp.full(query.shape[0], query.shape[1]) if reach.queries is None else reach.queries
        is_valid = functools.reduce(jnp.logical_and, [jnp.all(x > 0) for x in lengths], True)
        return jnp.where(is_valid, queries, 0)  # a length of 0 spoils the whole call

    def forward(query, key, value, reach):
        output, sums = kernel.forward(query, key, value, reach)
        count = queries_of(reach, query)
        return fill(output, count, 1), fill(sums, count, -1)

    def backward(query, key, value, *more):
        *given, reach = more
        grads = kernel.backward(query, key, value, *given, reach._replace(queries=None))
        count = queries_of(reach, query)
        if reach.keys is None:
            return tuple(fill(x, count, 1) for x in grads)
        return fill(grads[0], count, 1), *(fill(x, reach.keys, 1) for x in grads[1:])

    return types.SimpleNamespace(forward=forward, backward=backward)


@pytest.mark.parametrize("ids", [None, PACKED, MANY], ids=describe)
def test_what_a_kernel_leaves_undefined_is_never_read(monkeypatch, ids):
    *qkv, weights = inputs(4, 2)
    expected = with_grads(functools.partial(whole, ids=ids, window=None), weights)(*qkv)
    monkeypatch.setitem(keys.KERNELS, "xla", undefined(kernels))
    found = with_grads(split((4,), ids), weights)(*qkv)
    assert distance(found, expected) < LIMIT


@pytest.mark.parametrize("axes", [(2,), (4,), (8,), (2, 4)])
def test_zigzag_gives_each_device_an_early_and_a_late_chunk(axes):
    mesh = make_mesh(axes)
    order, rows, spec = zigzag(TOKENS, mesh.size), jnp.arange(2 * TOKENS).reshape(2, -1), P(None, mesh.axis_names)

    def local(x):
        moved = to_zigzag(x, mesh.axis_names)
        with zigzag_rows(True):
            return moved, positions(x), to_zigzag(moved, mesh.axis_names, back=True), whole_rows(moved)

    specs = (spec, spec, spec, P())
    mapped = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=specs, check_vma=False)
    moved, places, back, whole = jax.jit(mapped)(rows)
    assert places[0].tolist() == order.tolist()
    assert moved.tolist() == rows[:, order].tolist()
    assert back.tolist() == whole.tolist() == rows.tolist()
    work = (order + 1).reshape(mesh.size, -1).sum(axis=1)
    assert set(work) == {TOKENS * (TOKENS + 1) // 2 // mesh.size}


def wire(mesh, arrays, remat="no remat", **options):
    """Bytes that each device sends in a forward and a backward, by kind and dtype of collective; and the program."""
    spec = P(None, mesh.axis_names)
    attend = REMATS[remat](functools.partial(attend_keys, **options))

    def local(*x):
        return jax.value_and_grad(lambda *qkv: jnp.sum(jnp.sin(attend(*qkv, *x[3:]))), argnums=(0, 1, 2))(*x[:3])

    specs = (spec,) * len(arrays)
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(), (spec,) * 3), check_vma=False)
    shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=NamedSharding(mesh, spec)) for x in arrays]
    program = jax.jit(mapped).lower(*shapes).compile().as_text() or ""
    return hlo.wire_bytes(hlo.collectives(program, mesh.size)), program


GATHERS = {"no remat": 2, "full": 3, "saved": 2}


@pytest.mark.parametrize(("axes", "remat"), each_value(list(itertools.product([(8,), (2, 4)], GATHERS))))
def test_bytes_are_those_of_the_formula(axes, remat):
    mesh = make_mesh(axes, hlo.h100s(1))
    found, _ = wire(mesh, inputs(4, 2)[:3], remat)
    keys_of_rows = ROWS * TOKENS * 2 * 2 * SIZE * 8 * (mesh.size - 1) // mesh.size
    assert found == {("all-gather", "f64"): GATHERS[remat] * keys_of_rows, ("reduce-scatter", "f64"): keys_of_rows}


def test_segment_ids_cost_4_bytes_per_token():
    found, _ = wire(make_mesh((4,)), [*inputs(4, 2)[:3], PACKED])
    assert found["all-gather", "s32"] == ROWS * TOKENS * 4 * 3 // 4


@pytest.mark.parametrize("is_packed", [False, True])
def test_cudnn_computes_each_part_once_on_h100s(is_packed):
    mesh = make_mesh((8,), hlo.h100s(1))
    tokens, heads, num_keys, size = 8192, 8, 2, 128
    arrays = [jax.ShapeDtypeStruct((1, tokens, num, size), jnp.bfloat16) for num in (heads, num_keys, num_keys)]
    if is_packed:
        arrays.append(jax.ShapeDtypeStruct((1, tokens), jnp.int32))
    found, program = wire(mesh, arrays, implementation="cudnn", max_documents=16 if is_packed else None)
    assert program.count('__cudnn$fmhaSoftmax"') == program.count('__cudnn$fmhaSoftmaxBackward"') == 3 + is_packed
    keys_of_rows = tokens * 2 * num_keys * size * 2 * 7 // 8
    assert found["all-gather", "bf16"] == 2 * keys_of_rows
    assert found["reduce-scatter", "bf16"] == keys_of_rows


def test_cudnn_copies_keys_for_each_query_head_in_older_jax(monkeypatch):
    monkeypatch.setattr(cudnn, "counts_query_heads", lambda: True)
    query, key = (jax.ShapeDtypeStruct((2, 16, num, 64), jnp.bfloat16) for num in (8, 2))
    reach = Reach(documents=jnp.zeros((2, 16), jnp.int32), max_documents=4)
    output, sums = jax.eval_shape(lambda q, k: cudnn.forward(q, k, k, reach), query, key)
    backward: Any = cudnn.backward
    grads = jax.eval_shape(lambda *x: backward(*x, reach), query, key, key, output, sums, output)
    assert [x.shape for x in grads] == [query.shape, key.shape, key.shape]


def test_cudnn_is_given_every_document_of_a_chunk():
    documents = jnp.array([[3, 3, 3, 7, 8, 8], [0, 0, 0, 0, 0, 0], [1, 2, 3, 4, 5, 6]], jnp.int32)
    query = jax.ShapeDtypeStruct((3, 6, 2, 8), jnp.bfloat16)
    kind, (lengths, of_keys, offsets, _) = cudnn._lengths(query, Reach(documents=documents, max_documents=4))
    assert kind == "PADDING_CAUSAL"
    assert lengths.tolist() == of_keys.tolist() == [[3, 1, 2, -1], [6, -1, -1, -1], [1, 1, 1, 1]]
    assert offsets.tolist() == [[0, 3, 4, -1, -1], [0, -1, -1, -1, -1], [0, 1, 2, 3, -1]]


def test_rows_with_too_many_documents_are_nan_with_cudnn(monkeypatch):
    monkeypatch.setattr(cudnn, "_bind", lambda *_, **__: [jnp.ones((2, 6, 2, 8), jnp.bfloat16), None])
    documents = jnp.array([[0, 0, 1, 2, 3, 4], [0, 0, 1, 2, 3, 3]], jnp.int32)
    reach = Reach(documents=documents, max_documents=4)
    array = jnp.ones((2, 6, 2, 8), jnp.bfloat16)
    output, _ = cudnn.forward(array, array, array, reach)
    assert jnp.isnan(output).all(axis=(1, 2, 3)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("names", "sizes", "options"),
    [
        (["causal", "context_by='heads'"], {}, {"causal": False}),
        (["3 tokens", "divisible by 16"], {"tokens": 24}, {}),
        (["query heads, 3", "2 key heads"], {"heads": 3}, {}),
        (["window", "0"], {}, {"window": 0}),
        (["implementation", "flash", "cudnn"], {}, {"implementation": "flash"}),
        (["window=4", "implementation='xla'"], {}, {"implementation": "cudnn", "window": 4}),
        (["float32"], {"dtype": jnp.float32}, {"implementation": "cudnn"}),
        (["heads of", "12"], {"size": 12}, {"implementation": "cudnn"}),
        (["even number", "got 3"], {"tokens": 48}, {"implementation": "cudnn"}),
        (["max_documents"], {"is_packed": True}, {"implementation": "cudnn"}),
    ],
)
def test_refusals_name_the_option_and_a_remedy(names, sizes, options):
    sizes = {"tokens": 64, "heads": 4, "size": 8, "dtype": jnp.bfloat16, "is_packed": False, **sizes}
    shapes = [(1, sizes["tokens"], num, sizes["size"]) for num in (sizes["heads"], 2, 2)]
    arrays = [jax.ShapeDtypeStruct(shape, sizes["dtype"]) for shape in shapes]
    if sizes["is_packed"]:
        arrays.append(jax.ShapeDtypeStruct((1, sizes["tokens"]), jnp.int32))
    with refusing(*names):
        wire(make_mesh((8,)), arrays, **options)


def test_half_precision_is_that_of_the_parts():
    *qkv, weights = (x.astype(jnp.bfloat16) for x in inputs(4, 2))
    exact = with_grads(functools.partial(whole, ids=PACKED, window=None), weights)(*(x.astype(float) for x in qkv))
    found = with_grads(split((4,), PACKED), weights)(*qkv)
    assert [x.dtype for x in jax.tree.leaves(found)[1:]] == [jnp.bfloat16] * 3
    assert distance(jax.tree.map(lambda x: x.astype(float), found), exact) < 0.02
