"""`jfsdp.optim.by_matrix`: updates of whole matrices equal those of one device, and move what theory says."""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jfsdp
from jfsdp.optim import by_matrix
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.traffic.ledger import make_ledger
from tests import reference
from tests.plan import programs
from tests.refusals import refuses
from tests.sharding import fully_shard
from tests.states import logical

RATE, STEPS, DIM, FEATURES, LAYERS = 1e-2, 10, 12, 20, 4
WIDE: Any = {"dtype": jnp.float64, "param_dtype": jnp.float64}


class Block(nnx.Module):
    def __init__(self, rngs):
        linear = functools.partial(nnx.Linear, rngs=rngs, **WIDE)
        self.query, self.out = linear(DIM, DIM), linear(DIM, DIM, use_bias=False)
        self.up, self.down = linear(DIM, FEATURES), linear(FEATURES, DIM, use_bias=False)
        self.filter = nnx.Param(jnp.ones((DIM, 3, 2)))

    def __call__(self, x):
        return x + self.out(self.query(x)) + self.down(self.up(x)) * self.filter[...].sum()


class Net(nnx.Module):
    def __init__(self, rngs, stacked=False):
        self.inputs = nnx.Linear(7, DIM, rngs=rngs, **WIDE)
        if stacked:
            make = nnx.vmap(Block, in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=LAYERS)(make)(rngs)
        else:
            self.layers = nnx.List([Block(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        raise NotImplementedError


def is_kernel(path, x):
    return reference.dotted(path).endswith("kernel")


def muon_dims(params):
    dims = lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: dims(x) if is_kernel(path, x) else None, params)


def muon_dims_of_layers(params):
    dims = lambda x: optax.contrib.MuonDimensionNumbers(x.ndim - 2, x.ndim - 1)  # noqa: E731
    is_matrix = lambda path: is_kernel(path, None) and "layers" in reference.dotted(path)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: dims(x) if is_matrix(path) else None, params)


def muon(**options):
    return optax.contrib.muon(RATE, muon_weight_dimension_numbers=muon_dims, weight_decay=0.1, **options)


def by_head(params):
    """One matrix of all layers of a stack: [L*m, n]."""
    dims = lambda x: optax.contrib.MuonDimensionNumbers(tuple(range(x.ndim - 1)), x.ndim - 1)  # noqa: E731
    return jax.tree_util.tree_map_with_path(lambda path, x: dims(x) if is_kernel(path, x) else None, params)


def shampoo(rate):
    """Keep a preconditioner of each side of every matrix, as in Gupta et al. (2018)."""

    def sides(x):
        return {side: jnp.zeros((*x.shape[:-2], x.shape[dim], x.shape[dim])) for side, dim in (("l", -2), ("r", -1))}

    def init(params):
        is_matrix = jax.tree_util.tree_map_with_path(is_kernel, params)
        return jax.tree.map(lambda x, matrix: sides(x) if matrix else None, params, is_matrix)

    def root(x):
        values, vectors = jnp.linalg.eigh(x + 1e-3 * jnp.eye(x.shape[-1]))
        return vectors * values**-0.25 @ vectors.T

    def of_matrix(x, kept):
        new = {"l": kept["l"] + x @ x.T, "r": kept["r"] + x.T @ x}
        return -rate * root(new["l"]) @ x @ root(new["r"]), new

    def update(grads, state, params=None):
        leaves, tree = jax.tree.flatten(grads)
        updates, after = [], []
        for x, kept in zip(leaves, tree.flatten_up_to(state), strict=True):
            run = jax.vmap(of_matrix) if x.ndim == 3 else of_matrix
            one, new = (-rate * x, None) if kept is None else run(x, kept)
            updates.append(one)
            after.append(new)
        return tree.unflatten(updates), tree.unflatten(after)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


def of_stacks(change):
    """Update the kernels of a stack by `change(x, side)`, which returns an update and the next side: a matrix."""

    def is_stack(path, x):
        return is_kernel(path, x) and x.ndim == 3

    def init(params):
        side = lambda path, x: jnp.eye(x.shape[1]) if is_stack(path, x) else None  # noqa: E731
        return jax.tree_util.tree_map_with_path(side, params)

    def update(grads, state, params=None):
        pairs, tree = jax.tree_util.tree_flatten_with_path(grads)
        sides = tree.flatten_up_to(state)
        found = [change(x, y) if is_stack(at, x) else (x, y) for (at, x), y in zip(pairs, sides, strict=True)]
        updates, after = zip(*found, strict=True)
        return jax.tree.map(lambda x: -RATE * x, tree.unflatten(updates)), tree.unflatten(after)

    return optax.GradientTransformation(init, update)  # pyright: ignore[reportArgumentType]


@jax.vmap
def squared(x):
    return x @ x.T @ x


def carry(total, x):
    return total + x.sum(), x * total


def with_side(x, side):
    side = side + x.sum(0) @ x.sum(0).T
    return side @ x, side


MIXES = {  # the layers of a stack
    "a carry": lambda x, side: (jax.lax.scan(carry, 0.0, squared(x))[1], side),
    "a sort": lambda x, side: (jax.lax.sort(squared(x), dimension=0), side),
    "an inverse": lambda x, side: (jax.vmap(lambda x: jnp.linalg.inv(x @ x.T + jnp.eye(len(x))) @ x)(x), side),
    "a cumulative sum": lambda x, side: (jnp.cumsum(squared(x), 0), side),
    "a reshape": lambda x, side: (squared(x) + squared(x).reshape(x.shape[1], x.shape[0], -1).sum(0)[:, None], side),
    "a loop over layers": lambda x, side: (jax.lax.map(squared, x[:, None])[:, 0], side),
    "a side": with_side,
    "an order": lambda x, side: (squared(x)[jax.lax.iota(int, len(x)) ^ 1], side),
}

OPTIMIZERS = {
    "muon": muon,
    "muon of a clipped norm": lambda: optax.chain(optax.clip_by_global_norm(0.1), muon(consistent_rms=0.2)),
    "muon with coefficients by step": lambda: muon(ns_coeffs="dion"),
    "muon in bfloat16": lambda: muon(mu_dtype=jnp.bfloat16),
    "muon of whole stacks": lambda: optax.contrib.muon(RATE, muon_weight_dimension_numbers=by_head),
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=4),
    "shampoo": lambda: shampoo(RATE),
} | {f"layers with {name}": functools.partial(of_stacks, mix) for name, mix in MIXES.items()}
CUTS = {f"layers.**.{name}.kernel": (dim, "tensor") for name, dim in {"up": -1, "down": 0, "out": 0}.items()}
MESHES: dict[str, tuple[dict[str, int], dict[str, Any]]] = {
    "8": ({"fsdp": 8}, {}),
    "3": ({"fsdp": 3}, {}),
    "2, zero1": ({"fsdp": 2}, {"strategy": "zero1"}),
    "2 x 4, opt over all": ({"replica": 2, "fsdp": 4}, {"opt_over": ("replica", "fsdp")}),
    "2 x 2": ({"replica": 2, "fsdp": 2}, {"strategy": "zero2"}),
    "4, ddp": ({"fsdp": 4}, {"strategy": "ddp"}),
    "4 x tensor 2": ({"fsdp": 4, "tensor": 2}, {"cuts": CUTS}),
    "tensor 2": ({"fsdp": 1, "tensor": 2}, {"cuts": CUTS}),
    "pipe 2 x 2": ({"pipe": 2, "fsdp": 2}, {}),
    "2, offloaded": ({"fsdp": 2}, {"offload_policy": jfsdp.OffloadPolicy(opt_state=True)}),
}


@pytest.fixture(autouse=True)
def _wide():
    with jax.enable_x64(True):
        yield


def make_grads(like, step):
    rng = np.random.default_rng(step)
    return jax.tree.map(lambda x: jnp.asarray(rng.standard_normal(x.shape)), like)


@functools.cache
def wanted(optimizer, stacked):
    """Parameters and states after some updates on one device."""
    tx = OPTIMIZERS[optimizer]()
    params = nnx.split(nnx.jit(lambda: Net(nnx.Rngs(0), stacked))(), nnx.Param)[1]
    state = tx.init(params)

    @jax.jit
    def step(params, state, grads):
        updates, state = tx.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for i in range(STEPS):
        params, state = step(params, state, make_grads(params, i))
    pairs = jax.tree_util.tree_leaves_with_path(state)
    arrays = {f"opt_state.{reference.dotted(path).replace('.value.', '.')}": x for path, x in pairs}
    return {f"params.{name}": x for name, x in reference.named(params).items()} | arrays


def shard(stacked, sizes, options):
    mesh = jfsdp.make_mesh(**sizes, devices=jax.devices()[: math.prod(sizes.values())])
    units = [jfsdp.Unit("layers", stacked=1)] if stacked else [Block]
    return fully_shard(lambda rngs: Net(rngs, stacked), mesh=mesh, units=units, min_size=4, **options)


def check(optimizer, stacked, place):
    sizes, options = MESHES[place]
    model, tx = shard(stacked, sizes, options), by_matrix(OPTIMIZERS[optimizer]())
    state = model.init(tx)
    like = nnx.split(Net(nnx.Rngs(0), stacked), nnx.Param)[1]
    for i in range(STEPS):
        state = model.apply_gradients(state, make_grads(like, i), tx)
    found = logical(state)
    for name, x in wanted(optimizer, stacked).items():
        limit = 1e-2 if x.dtype == jnp.bfloat16 else 1e-10
        np.testing.assert_allclose(
            np.asarray(found[name], np.float64), np.asarray(x, np.float64), rtol=limit, atol=limit, err_msg=name
        )


pytestmark = pytest.mark.filterwarnings("ignore::jfsdp.layout.lint.LayoutWarning")
QUICK = {("2 x 4, opt over all", True), ("4 x tensor 2", False), ("pipe 2 x 2", True)}


@pytest.mark.parametrize(
    ("place", "stacked"),
    [
        pytest.param(place, stacked, marks=[] if (place, stacked) in QUICK else [pytest.mark.proof])
        for place in MESHES
        for stacked in (True, False)
        if stacked or "pipe" not in place
    ],
)
def test_muon_equals_one_device(stacked, place):
    check("muon", stacked, place)


@pytest.mark.parametrize(
    ("optimizer", "stacked"),
    [
        pytest.param("muon of a clipped norm", False, marks=pytest.mark.proof),
        pytest.param("muon with coefficients by step", True, marks=pytest.mark.proof),
        pytest.param("muon in bfloat16", True, marks=pytest.mark.proof),
        pytest.param("muon of whole stacks", True, marks=pytest.mark.proof),
        ("adafactor", True),
        ("shampoo", True),
    ],
)
def test_an_optimizer_equals_one_device(optimizer, stacked):
    check(optimizer, stacked, "4 x tensor 2" if stacked else "8")


@pytest.mark.proof
@pytest.mark.parametrize("place", MESHES)
def test_arrays_of_other_shapes_equal_one_device(place):
    check("shampoo", True, place)


def test_a_checkpoint_continues_on_another_mesh(tmp_path):
    """Its bits equal those that `reshard` moves, also after another step. The values are those of the old mesh."""
    (sizes, options), (new_sizes, new_options) = MESHES["2 x 4, opt over all"], MESHES["pipe 2 x 2"]
    old, new, tx = shard(True, sizes, options), shard(True, new_sizes, new_options), by_matrix(muon())
    like = nnx.split(Net(nnx.Rngs(0), True), nnx.Param)[1]
    step = lambda model, state, i: model.apply_gradients(state, make_grads(like, i), tx)  # noqa: E731
    state = step(old, old.init(tx), 0)
    jfsdp.checkpoint.save(tmp_path / "state", state)
    states = [jfsdp.checkpoint.restore(tmp_path / "state", like=new.abstract_state(tx))]
    states.append(jfsdp.checkpoint.reshard(state, new))
    for _ in range(2):
        restored, moved = map(logical, states)
        for name, x in logical(state).items():
            assert restored[name].tobytes() == moved[name].tobytes(), name
            np.testing.assert_allclose(restored[name], x, rtol=1e-10, atol=1e-10, err_msg=name)
        state, *states = (step(model, some, 1) for model, some in zip((old, new, new), (state, *states), strict=True))


@pytest.mark.parametrize("mix", MIXES)
def test_layers_that_depend_on_each_other(mix):
    check(f"layers with {mix}", True, "8")


def moves_of(place, stacked, tx=None, **options):
    sizes, given = MESHES[place]
    model = shard(stacked, sizes, {**given, **options})
    step = model.train_step(lambda model, batch: None, by_matrix(muon()) if tx is None else tx)
    return [
        (move.leaf.path, move.kind, move.axes, move.group_size, move.wire_bytes)
        for move in step._update_moves
        if move.wire_bytes
    ]


def test_theory_of_the_moves():
    """Over 8 devices, 8 square matrices, 4 of (12, 20) or (20, 12) and 1 of (7, 12); 7 is padded to 8, 12 to 16, and
    20 to 24.

    A device sends 7/8 of its shards of the square ones, both ways. Of the others two devices share a matrix: each
    sends 3/4 of its shards both ways, and its half of the matrix to the other one. All have the single one.
    """
    square, wide, single = 8 * 12 * 16 // 8 * 8, 4 * 12 * 24 // 8 * 8, 8 * 12 // 8 * 8
    assert sorted(moves_of("8", False)) == sorted(
        2 * [("layers.0.out.kernel", "all-to-all", ("fsdp",), 8, square * 7 / 8)]
        + 2 * [("layers.0.up.kernel", "all-to-all", ("fsdp",), 4, wide * 3 / 4)]
        + 2 * [("layers.0.down.kernel", "all-to-all", ("fsdp",), 4, wide * 3 / 4)]
        + [(f"layers.0.{name}.kernel", "all-gather", ("fsdp",), 2, float(wide)) for name in ("up", "down")]
        + [("inputs.kernel", "all-gather", ("fsdp",), 8, single * 7.0)]
    )


def test_a_global_norm_inside_changes_no_moves():
    clipped = by_matrix(OPTIMIZERS["muon of a clipped norm"]())
    assert moves_of("8", False, clipped) == moves_of("8", False)


BY_LAYER = {"muon": True, "shampoo": True, "layers with an inverse": True, "muon of whole stacks": False}


@pytest.mark.parametrize(("optimizer", "is_by_layer"), BY_LAYER.items())
def test_layers_of_a_stack_are_moved_to_several_devices(optimizer, is_by_layer):
    """Over 3 devices, 4 layers: each has up to 2 of them. A stack that is one matrix is whole on every device."""
    found = moves_of("3", True, by_matrix(OPTIMIZERS[optimizer]()))
    assert (("layers.up.kernel", "all-to-all") in {(path, kind) for path, kind, *_ in found}) is is_by_layer


def test_ddp_moves_nothing():
    assert moves_of("4, ddp", True) == []


def test_reductions_are_not_moved():
    assert moves_of("8", True, by_matrix(optax.adafactor(RATE, min_dim_size_to_factor=4))) == []


@pytest.mark.filterwarnings("ignore:optimizer:UserWarning")
def test_a_selection_limits_the_moves():
    moves = moves_of("8", True, by_matrix(muon(), matrices="layers.up.kernel"))
    assert {path for path, *_ in moves} == {"layers.up.kernel"}


@pytest.mark.parametrize(
    ("selector", "facts"),
    [
        ("layers.up.bias", ["layers.up.bias", "(4, 20)", "matrices="]),
        ("layers.nothing", ["layers.nothing", "layers.up.kernel"]),
        ("inputs.bias", ["inputs.bias", "matrices="]),
    ],
)
def test_a_selection_of_no_matrix_is_refused(selector, facts):
    error = refuses(lambda: moves_of("8", True, by_matrix(muon(), matrices=selector)), *facts)
    assert str(error).startswith("by_matrix: matrices=")


def test_a_vector_that_is_not_split_is_no_matrix():
    refuses(lambda: moves_of("4, ddp", True, by_matrix(muon(), matrices="layers.up.bias")), "layers.up.bias", "(4, 20)")


def test_products_of_split_matrices_warn():
    with pytest.warns(UserWarning, match="by_matrix") as caught:
        moves_of("8", False, muon())
    assert all(fact in str(caught[0].message) for fact in ("17 of them", "inputs.kernel", "fsdp"))


def test_without_a_sharded_model_it_is_the_optimizer_itself():
    params: Any = {"layers": {"kernel": jnp.ones((3, 4))}}
    tx, plain = by_matrix(muon()), muon()
    found, wanted = (jax.tree.leaves(x.update(params, x.init(params), params)[0]) for x in (tx, plain))
    np.testing.assert_array_equal(found[0], wanted[0])


@pytest.mark.proof
@pytest.mark.parametrize("stacked", [True, False], ids=["stack", "list"])
def test_what_xla_compiles_is_what_theory_says(stacked):
    """In float32, of a narrow Llama for 8 GPUs. A momentum is not gathered, and nothing else moves than with AdamW."""
    with jax.enable_x64(False):
        model, task = programs.build(config=(("stacked", stacked), ("num_layers", 4))), programs.job(num_layers=4)
        tx = by_matrix(optax.contrib.muon(RATE, muon_weight_dimension_numbers=muon_dims_of_layers))
        step = model.train_step(task.loss, tx)
        batch = task.batch(8, programs.SEQ_LEN)
        text = step.lower(model.abstract_state(tx), batch).compile().as_text()
        collectives = find_collectives(parse_module(text), 8)
        found = make_ledger(model.layout, collectives, step.resolve(batch))
        assert (found.unknown, found.wire_ratio) == ((), pytest.approx(1, abs=5e-4))
        measured = {row.group_size: row.measured_bytes for row in found.rows if row.kind == "all-to-all"}
        sizes = {x.path: math.prod(x.shape) for x in model.layout.leaves if "layers" in x.path and "kernel" in x.path}
        down = sum(size for path, size in sizes.items() if "down_proj" in path)
        shards = {8: 4 * (sum(sizes.values()) - down) / 8, 4: 4 * down / 8}  # in pairs, 8 devices share 4 of `down`
        assert measured == pytest.approx({size: 2 * shards[size] * (size - 1) / size for size in shards})
