"""Flat storage: one array per unit, dtype and life; and nobody but the engine can tell.

Parity with one device stands in tests/engine/test_manual_parity.py, checkpoints and `reshard` between storage forms in
their own tests.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st

import jfsdp
from jfsdp.engine.at_rest import pack, unpack
from jfsdp.layout.flat import Buffer
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.plan.traffic.ledger import one_microbatch
from jfsdp.plan.traffic.theory import expected_wire
from jfsdp.train.state import array_bytes
from jfsdp.train.state_bytes import account
from jfsdp.train.storage import by_leaf, in_storage
from tests import hlo
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.steps import fully_shard
from tests.thin import thin

TX = optax.adam(1e-2)
MESHES = {"8": {"fsdp": 8}, "2x4": {"replica": 2, "fsdp": 4}, "3": {"fsdp": 3}, "1": {"fsdp": 1}}


def make(source: Any = Tower, mesh="8", **options: Any):
    sizes = MESHES[mesh]
    devices = jax.devices()[: int(np.prod(list(sizes.values())))]
    options = {"units": [Block], "program": "manual", "storage": "flat"} | options
    return fully_shard(source, mesh=jfsdp.make_mesh(**sizes, devices=devices), **options)


def train(model, tx=TX, num=2, **step_options):
    state, step = model.init(tx), model.train_step(token_loss, tx, max_grad_norm=0.5, check_loss=False, **step_options)
    for batch in make_batches(num, rows=24):
        state, metrics = step(state, batch)
    return state, metrics


def assert_equal(found, wanted):
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(found), jax.device_get(wanted))


def test_a_unit_is_one_array_per_stage():
    state = make().init(TX)
    assert set(state.params) == {"blocks.flat_param", "flat_param"}
    # Per layer a norm [16], up [16 64] and its bias [64], down [64 16]: all divide by 8.
    assert state.params["blocks.flat_param"].shape == (3, 16 + 16 * 64 + 64 + 64 * 16)
    # embed [37 16], head [16 37] and its bias [37], padded to 40.
    assert state.params["flat_param"].shape == (37 * 16 + 16 * 37 + 40,)


def test_a_chunk_is_what_the_device_holds_of_each_leaf():
    model = make()
    state, leaves = model.init(TX), by_leaf(model.init(TX))
    for buffer in model.layout.packed:
        for shard in state.params[buffer.path].addressable_shards:
            own = [
                next(x.data for x in leaves.params[path].addressable_shards if x.device == shard.device)
                for path in buffer.holds
            ]
            lead = shard.data.shape[:-1]
            wanted = np.concatenate([np.asarray(x).reshape(*lead, -1) for x in own], axis=-1)
            np.testing.assert_array_equal(shard.data, wanted)


# Each form of layers on every second mesh.
@pytest.mark.parametrize(
    ("mesh", "stacked"),
    [
        pytest.param(mesh, stacked, marks=[pytest.mark.proof] * (place % 2 == stacked))
        for place, mesh in enumerate(MESHES)
        for stacked in (True, False)
    ],
)
def test_the_first_state_is_bitwise_that_of_per_parameter_storage(mesh, stacked):
    source = lambda rngs: Tower(rngs, stacked=stacked)  # noqa: E731
    wanted = make(source, mesh, storage="per_parameter", min_size=0).init(TX)
    found = by_leaf(make(source, mesh).init(TX))
    assert found.layout == wanted.layout
    assert found.roles == wanted.roles
    assert jax.tree.map(lambda x: x.sharding, found) == jax.tree.map(lambda x: x.sharding, wanted)
    assert_equal(found, wanted)


def test_a_model_given_with_its_weights_keeps_them():
    plain: Any = Tower(nnx.Rngs(3))
    state = make(plain).init(TX)
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, "head.bias"), plain.head.bias[...])
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, "blocks.up.kernel"), plain.blocks.up.kernel[...])


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda x: x.ndim > 2, params)


def embed_or_other(params: Any) -> Any:
    return jax.tree_util.tree_map_with_path(lambda path, _: "embed" if "embed" in str(path) else "other", params)


OPTIMIZERS = {
    "masked decay": optax.adamw(1e-2, weight_decay=0.5, mask=matrices),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8, momentum=0.9),
    "partition": optax.partition(
        {"embed": optax.adam(1e-2), "other": optax.sgd(1e-2, 0.9)},
        embed_or_other,
    ),
    "bfloat16 moments and averages": optax.chain(
        jfsdp.optim.low_precision_state(optax.adam(1e-2)), jfsdp.optim.track_ema(0.9)
    ),
}


# test_recipes.py trains masks and factored moments under flat storage too.
@pytest.mark.parametrize("name", thin(["partition", "masked decay", "bfloat16 moments and averages", "adafactor"]))
def test_optimizers_see_the_leaves_by_name_and_shape(name):
    tx = OPTIMIZERS[name]
    wanted, metrics = train(make(storage="per_parameter", min_size=0), tx)
    state, found = train(make(), tx)
    for key, value in metrics.items():
        np.testing.assert_allclose(found[key], value, rtol=1e-5)
    state = by_leaf(state)
    assert [role.name for role in state.roles.arrays] == [role.name for role in wanted.roles.arrays]
    pairs = zip(jax.tree.leaves((state.params, state.opt_state)), jax.tree.leaves((wanted.params, wanted.opt_state)))
    for a, b in pairs:
        np.testing.assert_allclose(np.float32(a), np.float32(b), atol=2e-3 * float(np.abs(np.float32(b)).max()) + 1e-6)


def test_the_state_of_an_optimizer_has_the_structure_that_its_init_returned():
    forms = (make(storage=form, min_size=0) for form in ("flat", "per_parameter"))
    state, leaves = (model.init(OPTIMIZERS["partition"]) for model in forms)
    assert jax.tree.structure(state.opt_state) == jax.tree.structure(leaves.opt_state)
    assert state.roles == leaves.roles


def test_frozen_leaves_have_a_buffer_of_their_own_and_are_not_reduced():
    model = make(frozen=["blocks.up"])
    names = {buffer.path for buffer in model.layout.packed}
    assert names == {"flat_param", "blocks.flat_param", "blocks.flat_param_2"}
    frozen = next(buffer for buffer in model.layout.packed if not buffer.trainable)
    assert frozen.holds == ("blocks.up.bias", "blocks.up.kernel")
    before = jax.device_get(model.init(TX).params)
    after = jax.device_get(train(model)[0].params)
    assert not [role for role in model.init(TX).roles.arrays if (role.leaf or "").startswith("blocks.up")]
    changed = {name: bool((after[name] != before[name]).any()) for name in after}
    assert changed == {buffer.path: buffer.trainable for buffer in model.layout.packed}


def test_leaves_of_other_dtypes_have_buffers_of_their_own():
    class Mixed(nnx.Module):
        def __init__(self, rngs):
            self.tower = Tower(rngs)
            self.table = nnx.Param(jnp.arange(16))
            self.half = nnx.Param(jnp.ones((8, 8), jnp.bfloat16))

        def __call__(self, tokens):
            return self.tower(tokens) * self.half[...].astype(jnp.float32).mean() + self.table[...].sum() * 0

    layout = make(Mixed).layout
    assert {buffer.dtype for buffer in layout.packed} == {"float32", "bfloat16", "int32"}
    found, wanted = train(make(Mixed))[1], train(make(Mixed, storage="per_parameter"))[1]
    np.testing.assert_allclose(found["loss"], wanted["loss"], rtol=1e-6)


@pytest.mark.parametrize("strategy", thin(["hfsdp", "full_shard", "zero1"], 3))
def test_live_bytes_are_those_of_the_leaves(strategy):
    policy = jfsdp.MixedPrecisionPolicy("bfloat16")
    model = make(mesh="2x4", strategy=strategy, mp_policy=policy)
    state, count = model.init(TX), account(model.abstract_state(TX))
    flat, leaves = (sum(map(array_bytes, jax.tree.leaves(form))) for form in (state, by_leaf(state)))
    assert flat == leaves == count.total
    assert set(count.by_leaf) == {leaf.path for leaf in model.layout.leaves}


def test_averages_evaluation_and_full_see_the_leaves():
    tx = optax.chain(TX, jfsdp.optim.track_ema(0.5))
    model, plain = make(), make(storage="per_parameter", min_size=0, program=None)
    state = train(model, tx)[0]
    moved = jfsdp.checkpoint.reshard(state, plain)
    fn = lambda model, tokens: model(tokens)  # noqa: E731
    tokens = make_batches(1)[0]["tokens"]
    for change in (lambda s: s, jfsdp.optim.with_ema):
        found, wanted = model.forward(fn)(change(state), tokens), plain.forward(fn)(change(moved), tokens)
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)
    name = "opt_state.0.0.nu.blocks.down.kernel"
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, name), jfsdp.checkpoint.gather_leaf(moved, name))
    with pytest.raises(ValueError, match=r"blocks.dwn.kernel: the state has no array of this name; close names are"):
        jfsdp.checkpoint.gather_leaf(state, "blocks.dwn.kernel")


def test_a_state_goes_out_of_its_buffers_and_back():
    model = make(mesh="3", strategy="zero1", mp_policy=jfsdp.MixedPrecisionPolicy("bfloat16"))
    state = model.init(TX)
    back = in_storage(by_leaf(state), model.layout)
    assert jax.tree.structure(back) == jax.tree.structure(state)
    assert_equal(back, state)


shapes = st.lists(st.lists(st.integers(0, 5), min_size=0, max_size=3), min_size=1, max_size=4)


buffers = given(shapes=shapes, num_layers=st.none() | st.integers(1, 3), num_devices=st.integers(1, 5))


@buffers
@settings(max_examples=15, deadline=None)
def test_any_leaves_come_back_from_a_buffer(shapes, num_layers, num_devices):
    check_buffers(shapes, num_layers, num_devices)


@pytest.mark.proof
@buffers
@settings(max_examples=300, deadline=None)
def test_very_many_leaves_come_back_from_a_buffer(shapes, num_layers, num_devices):
    check_buffers(shapes, num_layers, num_devices)


def check_buffers(shapes, num_layers, num_devices):
    lead = () if num_layers is None else (num_layers,)

    class Odd(nnx.Module):
        def __init__(self, rngs):
            for place, shape in enumerate(shapes):
                setattr(self, f"leaf{place}", nnx.Param(jnp.zeros((*lead, *shape))))

        def __call__(self, x):
            return x

    class Model(nnx.Module):
        def __init__(self, rngs):
            self.odd = Odd(rngs)

    layout = fully_shard(
        Model,
        mesh=make_abstract_mesh({"fsdp": num_devices}),
        units=[jfsdp.Unit(Odd, stacked=len(lead))],
        program="manual",
        storage="flat",
    ).layout
    for buffer in layout.packed:
        assert isinstance(buffer, Buffer)
        leaves = {path: layout.by_path[path] for path in buffer.holds}
        draw = np.random.default_rng(0)
        values: dict[str, Any] = {path: draw.random(x.stored_shape, np.float32) for path, x in leaves.items()}
        packed = pack(buffer, values)
        assert packed.shape == buffer.shape
        found = unpack(buffer, packed)
        for path, value in values.items():
            np.testing.assert_array_equal(found[path], value)


def test_xla_refuses_it_and_a_step_refuses_a_state_of_the_other_form():
    with pytest.raises(ValueError, match="storage='flat': program='xla' leaves the collectives to XLA"):
        fully_shard(Tower, storage="flat", program="xla").train_step(token_loss, TX)
    with pytest.raises(ValueError, match="storage 'round' is unknown; the storage forms are per_parameter, flat"):
        fully_shard(Tower, storage="round")
    step = make().train_step(token_loss, TX)
    with pytest.raises(ValueError, match=r"the state has another layout .* than this model .* 2 flat buffers"):
        step(make(storage="per_parameter").init(TX), make_batches(1)[0])


def test_a_state_whose_leaves_stand_elsewhere_in_their_arrays_is_refused():
    """Square matrices, split along one dim or the other: the arrays have one shape and the leaves other places."""
    one, other = (
        make(shard_dim=lambda path, shape, dim=dim: dim if path.startswith("blocks.") and len(shape) > 1 else None)
        for dim in (0, 1)
    )
    state = one.init(TX)
    assert {name: x.shape for name, x in state.params.items()} == {
        name: x.shape for name, x in other.init(TX).params.items()
    }
    with pytest.raises(ValueError, match="the state has another layout"):
        other.train_step(token_loss, TX)(state, make_batches(1)[0])
    with pytest.raises(ValueError, match="the state has another layout"):
        other.forward(lambda model, tokens: model(tokens))(state, make_batches(1)[0]["tokens"])


def test_a_reshard_that_is_refused_leaves_the_state_alive():
    state = make().init(TX)
    mesh = jfsdp.make_mesh(fsdp=2, devices=jax.devices()[:2])
    with pytest.raises(ValueError, match="the mesh given has axes"):
        jfsdp.checkpoint.reshard(state, make(storage="per_parameter").layout, mesh=mesh, donate=True)
    assert not any(x.is_deleted() for x in state.params.values())
    jfsdp.checkpoint.reshard(state, make(storage="per_parameter"), donate=True)
    assert all(x.is_deleted() for x in state.params.values())


class Mixed(nnx.Module):
    """A block that is called by schedule, and inside a vmap, where no schedule reaches it."""

    def __init__(self, rngs):
        self.block = Block(16, rngs)

    def __call__(self, x):
        x = self.block(x)
        return x + jax.vmap(self.block)(x[None])[0]


@pytest.mark.parametrize("storage", ["per_parameter", "flat"])
@pytest.mark.filterwarnings("ignore:units block are called inside:UserWarning")
def test_offloaded_weights_of_a_unit_that_is_also_called_in_place(storage):
    def loss(model, batch):
        out = model(batch)
        return jfsdp.Loss((out**2).sum(), jnp.asarray(out.size, jnp.float32))

    rows = np.random.default_rng(0).normal(size=(16, 16)).astype(np.float32)
    found = []
    for offload in (None, jfsdp.OffloadPolicy(params=True)):
        model = make(Mixed, storage=storage, min_size=0, offload_policy=offload)
        found.append(model.train_step(loss, TX)(model.init(TX), rows)[1])
    np.testing.assert_allclose(found[0]["grad_norm"], found[1]["grad_norm"], rtol=1e-6)


def test_an_undeclared_stack_is_named():
    model = make(units=[jfsdp.Unit(Block, stacked=0)], strategy="ddp")
    with pytest.raises(ValueError, match=r"blocks.down.kernel: is stored in one array.*stacked=1"):
        train(model)


def test_averages_of_some_leaves_in_another_dtype():
    class Half(Tower):
        def __init__(self, rngs):
            super().__init__(rngs)
            for leaf in jax.tree.leaves(self.head, is_leaf=lambda x: isinstance(x, nnx.Param)):
                leaf[...] = leaf[...].astype(jnp.bfloat16)

    mask = lambda params: jax.tree.map(lambda x: x.ndim == 1, params)  # noqa: E731
    tx = optax.chain(TX, optax.masked(jfsdp.optim.track_ema(0.5), mask))
    model = make(Half)
    state = jfsdp.optim.with_ema(model.init(tx))
    assert jax.tree.structure(state) == jax.tree.structure(model.init(tx))


def test_an_optimizers_own_arrays_stay_its_own():
    """An array for each parameter that happens to have the stored shape of a padded one, and a name of ours."""

    def init(params):
        return {"own": jax.tree.map(lambda x: jnp.arange(40.0), params), "flat_param": jnp.ones(5)}

    own = optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))
    state = make().init(optax.chain(own, optax.sgd(0.1)))
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, "opt_state.0.own.head.bias"), np.arange(40))
    np.testing.assert_array_equal(jfsdp.checkpoint.gather_leaf(state, "opt_state.0.flat_param"), np.ones(5))


def test_theory_shows_the_padding_of_leaves():
    layout = make(mesh="3").layout
    rows = expected_wire(layout, one_microbatch(layout))
    assert sum(row.wire_bytes for row in rows if row.what == "padding") > 0


def test_a_parameter_of_a_buffers_name_is_refused():
    class Taken(nnx.Module):
        def __init__(self, rngs):
            self.flat_param = nnx.Param(jnp.zeros(8))

    with pytest.raises(ValueError, match="flat_param: flat storage gives this name to a buffer"):
        make(Taken, units=[])


def test_a_step_has_one_gather_and_one_reduction_per_unit():
    devices = hlo.h100s(1)
    source = lambda rngs: Tower(rngs, stacked=False, dim=64)  # noqa: E731
    model = fully_shard(source, mesh=jfsdp.make_mesh(devices=devices), units=[Block], program="manual", storage="flat")
    # Thresholds of one byte: what XLA would combine by itself stays apart, so that what is counted is ours.
    apart = {f"xla_gpu_{k}_combine_threshold_bytes": 1 for k in ("all_gather", "reduce_scatter", "all_reduce")}
    step = model.train_step(token_loss, TX, compiler_options=apart)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), make_batches(1)[0])
    text = step.lower(model.abstract_state(TX), batch).compile().as_text()
    counts = dict.fromkeys(("all-gather", "reduce-scatter"), 0)
    for item in hlo.collectives(text, 8):
        if item.kind in counts:
            counts[item.kind] += item.count * len(item.parts)
    assert counts == {"all-gather": 2 * 3 + 1, "reduce-scatter": 3 + 1}
