"""Weights that axis `tensor` cuts: a device holds its part alone, and every step is that of one device.

The models, their steps and the limits are those of test_tensor.py, where nothing is cut.
"""

import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx
from jax.sharding import PartitionSpec

import jfsdp
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.traffic.attribution import group_axes
from tests import reference, states
from tests.engine import test_tensor
from tests.engine.test_parity import LEARNING_RATE, LIMITS
from tests.engine.test_tensor import LINEN, Listed, SplitBlock, SplitTower, check_model, make_mesh
from tests.models_small import VOCAB, linear, make_batches, token_loss
from tests.pairwise import cover
from tests.steps import fully_shard
from tests.thin import thin
from tests.ways import WAYS

AXIS = "tensor"
CUTS = {
    "**.up": (-1, AXIS),  # with its bias
    "**.down": (0, AXIS),
    "embed": (-1, AXIS),
}
LINEN_CUTS = {"LinenBlock_*.Dense_1": (-1, AXIS), "LinenBlock_*.Dense_0.kernel": (0, AXIS), "Embed_0": (-1, AXIS)}
MESHES = {
    "4x2": {"fsdp": 4, "tensor": 2},
    "2x2x2": {"replica": 2, "fsdp": 2, "tensor": 2},
    "2x4": {"fsdp": 2, "tensor": 4},
    "1x2": {"fsdp": 1, "tensor": 2},
}
pytestmark = pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")


XLA, MANUAL = {"program": "xla"}, {"program": "manual"}
FLAT, OFFLOADED = MANUAL | {"storage": "flat"}, {"offload_policy": jfsdp.OffloadPolicy(True, True, True)}
LAST, ONCE = {"step_options": {"sync": "last"}}, {"step_options": {"reshard_after_backward": False}}
CASES: dict[str, Any] = {
    "flat, listed, offloaded": ("4x2", "listed", FLAT | OFFLOADED),
    "tied, reduced once": ("2x2x2", "tied", MANUAL | LAST | {"accumulate": 2}),
    "Linen, one data shard": ("1x2", "linen", XLA),
}
PROOFS: dict[str, Any] = {
    "tied, four parts": ("2x4", "tied", XLA | {"strategy": "zero1"}),
    "flat": ("4x2", "stacked", FLAT),
    "listed, offloaded": ("4x2", "listed", MANUAL | OFFLOADED),
    "flat, listed, four parts": ("2x4", "listed", FLAT),
    "flat zero1, once": ("2x2x2", "stacked", FLAT | {"strategy": "zero1"}),
    "gathered once": ("4x2", "stacked", ONCE | {"accumulate": 2}),
    "offloaded": ("4x2", "stacked", XLA | OFFLOADED),
    "kept": ("4x2", "stacked", MANUAL | {"reshard_after_forward": False}),
    "neighbours": ("4x2", "stacked", MANUAL | {"reshard_after_forward": 2}),
    "prefetch 2": ("4x2", "listed", MANUAL | {"prefetch": 2}),
}


@pytest.mark.parametrize("case", [*CASES, *(pytest.param(case, marks=pytest.mark.proof) for case in PROOFS)])
def test_steps_equal_one_device(case):
    mesh, model, options = (CASES | PROOFS)[case]
    check(model, mesh, **options)


def check(model, mesh, **options: Any):
    test_tensor.check(model, MESHES[mesh], cuts=LINEN_CUTS if model == "linen" else CUTS, **options)


COLUMNS = {
    "strategy": list(WAYS),
    "program": ["xla", "manual"],
    "mesh": list(MESHES),
    "model": ["stacked", "listed", "tied", "linen"],
    "accumulate": [1, 2],
}


@pytest.mark.proof
@pytest.mark.parametrize("row", cover(COLUMNS))
def test_pairs_of_settings_equal_one_device(row):
    strategy, program, mesh, model, accumulate = row
    options: dict[str, Any] = {"strategy": WAYS[strategy]}
    if strategy == "node":
        options = {"reshard_after_forward": 2 if MESHES[mesh]["fsdp"] > 1 else True}
    check(model, mesh, program=program, accumulate=accumulate, **options)


OPTIMIZERS = {
    "adafactor": optax.adafactor(LEARNING_RATE, min_dim_size_to_factor=8),
    "masked": optax.adamw(LEARNING_RATE, eps=1e-4, mask=lambda p: jax.tree.map(lambda x: x.ndim > 2, p)),
    "low precision": jfsdp.optim.low_precision_state(optax.adamw(LEARNING_RATE, eps=1e-4)),
    "ema": optax.chain(optax.sgd(LEARNING_RATE), jfsdp.optim.track_ema(0.9)),
}


SEEN = list(itertools.product(OPTIMIZERS, ("xla", "manual")))


@pytest.mark.parametrize(("name", "program"), thin(SEEN, 9))
def test_optimizers_see_whole_leaves_and_hold_parts(name, program):
    tx = OPTIMIZERS[name]
    model = shard(SplitTower, "2x4", program=program)
    state, step = model.init(tx), model.train_step(token_loss, tx, check_loss=False)
    for batch in make_batches(3):
        state, _ = step(state, batch)
    wanted = reference.train(SplitTower, token_loss, tx, make_batches(3))
    params = {path: reference.logical(state, path, x) for path, x in state.params.items()}
    error, leaf = reference.worst_leaf(params, wanted.params, LEARNING_RATE * 3)
    # A moment that is rounded at random goes the other way where two sums differ in their last bit.
    assert error < (0.05 if name == "low precision" else LIMITS["params"]), leaf
    arrays = dict(zip((role.name for role in state.roles.arrays), jax.tree.leaves(state.opt_state), strict=True))
    large = {name: x for name, x in arrays.items() if x.size >= 1000 and ("up.kernel" in name or "down" in name)}
    assert large or name == "adafactor"
    for path, x in large.items():
        assert x.sharding.shard_shape(x.shape) != x.shape
        assert x.size == 8 * np.prod(x.sharding.shard_shape(x.shape)), path


def shard(source, mesh, **options):
    given = {"units": [SplitBlock], "min_size": 20, "cuts": CUTS} | options
    return fully_shard(source, mesh=make_mesh(MESHES[mesh]), **given)


@pytest.mark.parametrize(
    ("program", "storage"),
    thin([("manual", "flat"), ("manual", "per_parameter"), ("xla", "per_parameter")], 3),
)
def test_nothing_of_a_cut_weight_crosses_the_axis(program, storage):
    """Gathers and sums of weights run over the data axes, and bring a part of a leaf."""
    own = {name: cut for name, cut in CUTS.items() if name != "embed"}  # XLA may gather a table to look up few tokens
    model = shard(SplitTower, "4x2", program=program, storage=storage, cuts=own)
    step = model.train_step(token_loss, optax.sgd(1e-2), check_loss=False)
    state = model.abstract_state(optax.sgd(1e-2))
    module = parse_module(step.lower(state, make_batches(1)[0]).compile().as_text())
    cut = [leaf for leaf in model.layout.leaves if leaf.cuts and len(leaf.shape) - leaf.stacked == 2]
    sizes = {int(np.prod(shape[leaf.stacked :])) for leaf in cut for shape in (leaf.stored_shape, leaf.cut_shape)}
    num_gathers = 0
    for item in find_collectives(module, 8):
        axes = group_axes(model.layout, item.group)
        if ".gather." in item.op_name and "all_gather" in item.op_name:
            num_gathers += 1
            assert axes == ("fsdp",), item.op_name
        if AXIS in axes:
            assert not {int(np.prod(shape.dims)) for shape in item.parts} & sizes, item
    assert num_gathers > 0 or program == "xla"


def test_a_device_holds_its_part_alone():
    model = shard(Listed, "2x4")
    state = model.init(optax.sgd(1e-3))
    for path in ("blocks.0.up.kernel", "blocks.0.down.kernel", "embed.embedding"):
        parts = {str(shard.index) for shard in state.params[path].addressable_shards}
        assert len(parts) == 8, path
    for path, wanted in reference.named(reference.plain(Listed).params).items():
        np.testing.assert_array_equal(reference.logical(state, path, state.params[path]), wanted, err_msg=path)


class Unstated(nnx.Module):
    """States nothing: XLA finds from its weights how what it computes is split."""

    def __init__(self, rngs):
        self.embed, self.up = nnx.Embed(VOCAB, 16, rngs=rngs), linear(16, 64, rngs)
        self.down, self.head = linear(64, 16, rngs), linear(16, VOCAB, rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        return self.head(x + self.down(jnp.tanh(self.up(x))))


@pytest.mark.filterwarnings("error:mesh axis")
@pytest.mark.parametrize("program", thin(["manual", "xla"]))
def test_a_model_that_states_nothing_is_split_as_its_weights_are(program):
    names = {"up": (-1, AXIS), "down.kernel": (0, AXIS), "embed": (-1, AXIS), "head.kernel": (0, AXIS)}
    model = fully_shard(Unstated, mesh=make_mesh(MESHES["4x2"]), units=["*"], min_size=20, cuts=names, program=program)
    check_model(model, Unstated)


class NamedLinen(linen.Module):
    """Third-party style: logical names on kernels, and none on activations."""

    @linen.compact
    def __call__(self, tokens):
        init = linen.initializers.lecun_normal()
        wide = linen.with_logical_partitioning(init, ("embed", "mlp"))
        back = linen.with_logical_partitioning(init, ("mlp", "embed"))
        x = linen.Embed(VOCAB, 16)(tokens)
        x = x + linen.Dense(16, kernel_init=back)(linen.relu(linen.Dense(64, kernel_init=wide)(x)))
        return linen.Dense(VOCAB)(x)


class NamedBlock(SplitBlock):
    def __init__(self, dim, rngs):
        super().__init__(dim, rngs)
        init = nnx.initializers.lecun_normal()
        wide, back = nnx.with_partitioning(init, ("embed", "mlp")), nnx.with_partitioning(init, ("mlp", "embed"))
        self.up = nnx.Linear(dim, 4 * dim, kernel_init=wide, rngs=rngs)
        self.down = nnx.Linear(4 * dim, dim, kernel_init=back, use_bias=False, rngs=rngs)


class NamedNNX(nnx.Module):
    """A stack whose layer dim Flax names too."""

    def __init__(self, rngs):
        self.embed, self.head = nnx.Embed(VOCAB, 16, rngs=rngs), nnx.Linear(16, VOCAB, rngs=rngs)
        make = nnx.vmap(lambda rngs: NamedBlock(16, rngs), transform_metadata={nnx.PARTITION_NAME: "layers"})
        self.blocks = nnx.split_rngs(splits=3)(make)(rngs)

    def __call__(self, tokens):
        named = {nnx.PARTITION_NAME: "layers"}
        run = nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata=named)
        return self.head(run(self.embed(tokens), self.blocks))


NAMED = {
    "nnx": (NamedNNX, [NamedBlock], {"blocks.up.kernel": [2], "blocks.down.kernel": [1]}),
    # Of flax.linen the outer Dense is made first.
    "linen": ((NamedLinen(), LINEN[1]), ["Dense_*"], {"Dense_0.kernel": [0], "Dense_1.kernel": [1]}),
}


@pytest.mark.parametrize(("api", "program"), thin(list(itertools.product(NAMED, ("xla", "manual"))), 4))
def test_a_model_is_cut_by_its_own_names(api, program):
    source, units, dims = NAMED[api]
    named = {"units": units, "axis_rules": {"mlp": AXIS, "embed": None}}
    model = fully_shard(source, mesh=make_mesh(MESHES["4x2"]), min_size=20, program=program, **named)
    cuts = {leaf.path: leaf.cuts for leaf in model.layout.leaves if leaf.cuts}
    assert {path: [cut.dim for cut in found] for path, found in cuts.items()} == dims
    assert {cut.reason for found in cuts.values() for cut in found} == {"sharding metadata 'mlp'"}
    with nnx.use_eager_sharding(False):  # names of dims are those of no mesh
        check_model(model, source)


FORMS = [
    ({"fsdp": 1}, {}),
    ({"fsdp": 3}, {}),
    ({"fsdp": 2, "tensor": 2}, {}),
    ({"fsdp": 3, "tensor": 2}, {"program": "manual", "storage": "flat"}),
    ({"fsdp": 2, "tensor": 4}, {"strategy": "zero1"}),
    ({"fsdp": 1, "tensor": 4}, {"program": "manual", "storage": "flat"}),
]


@pytest.mark.parametrize("forms", [FORMS[4:2:-1], pytest.param(FORMS, marks=pytest.mark.proof)])
def test_checkpoints_go_from_any_degree_to_any_other_bit_by_bit(tmp_path, forms):
    tx = optax.adamw(LEARNING_RATE)
    models = [
        fully_shard(SplitTower, mesh=make_mesh(sizes), units=[SplitBlock], cuts=CUTS, **options)
        for sizes, options in forms
    ]
    wanted = None
    for place, source in enumerate(models):
        state = source.init(tx)
        if wanted is None:  # the first has moments too, and hands them on
            state, _ = source.train_step(token_loss, tx, check_loss=False)(state, make_batches(1)[0])
        else:
            state = jfsdp.checkpoint.restore(tmp_path / str(place - 1), like=source.abstract_state(tx))
        jfsdp.checkpoint.save(tmp_path / str(place), state)
        for target in models:
            back = jfsdp.checkpoint.restore(tmp_path / str(place), like=target.abstract_state(tx))
            found = states.logical(back)
            wanted = wanted or found
            jax.tree.map(np.testing.assert_array_equal, found, wanted)


def test_a_state_is_resharded_to_another_degree():
    tx, model, other = OPTIMIZERS["adafactor"], shard(SplitTower, "2x4", program="xla"), shard(SplitTower, "4x2")
    state, _ = model.train_step(token_loss, tx, check_loss=False)(model.init(tx), make_batches(1)[0])
    moved = jfsdp.checkpoint.reshard(state, other)
    assert moved.layout == other.layout
    jax.tree.map(np.testing.assert_array_equal, states.logical(moved), states.logical(state))


def test_a_factored_moment_keeps_the_cut_of_the_dim_that_it_keeps():
    roles = shard(SplitTower, "2x4").abstract_state(OPTIMIZERS["adafactor"]).roles.arrays
    found = {role.name.rpartition("0.")[2]: role.spec for role in roles if "blocks.up.kernel" in role.name}
    assert found["v_row.blocks.up.kernel"] == PartitionSpec(None, "fsdp"), found  # [layers, 16]: dim 64 is gone
    assert found["v_col.blocks.up.kernel"] == PartitionSpec(None, ("tensor", "fsdp")), found
