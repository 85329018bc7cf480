"""Sharding metadata of Flax (logical names, names of mesh axes) on parameters: it changes no number and no layout."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn
from flax import nnx
from flax.linen.spmd import with_logical_constraint
from jax.sharding import AxisType, PartitionSpec

import jfsdp
from tests.modules.parity import DIM, ROWS, TX, check_linen, check_nnx, data, mean_square, square, train_sharded
from tests.refusals import refusing
from tests.steps import fully_shard
from tests.thin import thin

X = jax.ShapeDtypeStruct((ROWS, DIM), jnp.float32)
RULES = (("embed", None), ("mlp", "fsdp"), ("batch", "fsdp"))


def named(init, *names):
    return nnx.with_partitioning(init, names)


class Block(nnx.Module):
    def __init__(self, rngs, names=("embed", "mlp")):
        init = nnx.initializers.lecun_normal()
        self.up = nnx.Linear(DIM, 2 * DIM, kernel_init=named(init, *names), rngs=rngs)
        self.down = nnx.Linear(2 * DIM, DIM, kernel_init=named(init, *reversed(names)), use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(DIM), out_sharding=names[:1])
        self.dropout = nnx.Dropout(0.3, rngs=rngs)

    def __call__(self, x):
        return x + self.dropout(self.down(jax.nn.relu(self.up(x)))) * self.scale


class Net(nnx.Module):
    def __init__(self, rngs, stacked=False, names=("embed", "mlp")):
        self.stacked = stacked
        if stacked:
            make = nnx.vmap(
                lambda rngs: Block(rngs, names), out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"}
            )
            self.blocks = nnx.split_rngs(splits=3)(make)(rngs)
        else:
            self.blocks = nnx.List([Block(rngs, names) for _ in range(2)])

    def __call__(self, x):
        if not self.stacked:
            for block in self.blocks:  # pyright: ignore[reportGeneralTypeIssues]
                x = block(x)
            return x

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def scan(x, block):
            return block(x)

        return scan(x, self.blocks)


def lower(source, unit, **options):
    """Trace init and a step; return the model."""
    model = fully_shard(source, units=[unit], min_size=1, **options)
    model.lower_init(TX)
    model.train_step(square, TX).lower(model.abstract_state(TX), X)
    return model


class Tied(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(8, DIM, rngs=rngs)
        self.head = self.embed


def test_a_tied_leaf_is_cut_by_its_own_name_and_the_other_one_is_refused():
    mesh = jfsdp.make_abstract_mesh({"fsdp": 4, "tensor": 2})
    model = fully_shard(Tied, mesh=mesh, cuts={"embed": (0, "tensor")})
    assert model.layout.by_path["embed.embedding"].cuts
    with refusing("embed.embedding", "'head'", "head.embedding"):
        fully_shard(Tied, mesh=mesh, cuts={"head": (0, "tensor")})


@pytest.mark.parametrize("stacked", [False, True])
def test_a_factory_with_names_needs_no_mesh_and_no_setting_of_flax(stacked):
    lower(lambda rngs: Net(rngs, stacked), Block)


@pytest.mark.parametrize("names", [("embed", "mlp"), ("fsdp", None), (None, "tensor")])
def test_names_change_no_layout(names):
    plain = fully_shard(lambda rngs: Net(rngs, names=(None, None)), units=[Block], min_size=1)
    assert lower(lambda rngs: Net(rngs, names=names), Block).layout == plain.layout


def test_a_stack_with_names_trains_as_on_one_device_and_the_loss_sees_the_names():
    def checked(model, batch):
        assert model.blocks.up.kernel.get_metadata("out_sharding") == ("layers", "embed", "mlp")
        return mean_square(model, batch)

    with nnx.use_eager_sharding(False):  # for the plain model
        check_nnx(lambda rngs: Net(rngs, stacked=True), checked, data(), [Block])


def test_an_instance_that_flax_has_placed_on_a_mesh_trains_as_its_factory():
    mesh = jax.make_mesh((8,), ("mlp",), axis_types=(AxisType.Auto,))
    with jax.set_mesh(mesh), nn.logical_axis_rules((("embed", None), ("mlp", "mlp"))):
        instance: Any = nnx.jit(lambda: Net(nnx.Rngs(0)))()
    assert instance.blocks[0].up.kernel.sharding.spec == PartitionSpec(None, "mlp")
    losses = [
        train_sharded(fully_shard(source, units=[Block], min_size=1), mean_square, [data()])[0]
        for source in (instance, Net)
    ]
    np.testing.assert_allclose(*losses, rtol=1e-5)


def test_a_variable_with_names_may_be_made_by_a_call():
    class Caching(Net):
        def __call__(self, x):
            self.cache = nnx.Cache(x, out_sharding=("batch", "embed"))
            return super().__call__(self.cache[...])

    def popped(model, batch):
        out = mean_square(model, batch)
        nnx.pop(model, nnx.Cache)
        return out

    model = fully_shard(Caching, units=[Block], min_size=1)
    model.train_step(popped, TX).lower(model.abstract_state(TX), X)


@pytest.mark.filterwarnings("ignore:Variable hooks are deprecated")
def test_hooks_of_a_user_on_a_unit_s_parameters_are_run():
    class Hooked(nnx.Module):
        def __init__(self, rngs):
            twice, more = (lambda _, x: 2 * x), (lambda _, x: x + 1)
            self.one = nnx.Param(jnp.ones(DIM), on_get_value=twice)
            self.two = nnx.Param(jnp.ones(DIM), on_get_value=(twice, more))

        def __call__(self, x):
            return x * self.one[...] * self.two[...]

    model = fully_shard(lambda rngs: nnx.Sequential(Hooked(rngs)), units=[Hooked], min_size=1)
    found = model.forward(lambda model, x: model(x))(model.init(TX), data())
    np.testing.assert_allclose(found, data() * 6, rtol=1e-6)


class LinenBlock(nn.Module):
    partition: Any = staticmethod(nn.with_logical_partitioning)

    @nn.compact
    def __call__(self, x):
        init = self.partition(nn.initializers.lecun_normal(), ("embed", "mlp"))
        x = with_logical_constraint(x, ("batch", "embed"))
        h = with_logical_constraint(nn.relu(nn.Dense(2 * DIM, kernel_init=init)(x)), ("batch", "mlp"))
        return x + nn.Dense(DIM)(h)


class LinenNet(nn.Module):
    partition: Any = staticmethod(nn.with_logical_partitioning)

    @nn.compact
    def __call__(self, x):
        def body(block, x, _):
            return block(x), None

        axes: Any = {"variable_axes": {"params": 0}, "split_rngs": {"params": True}}
        scan = nn.scan(body, length=3, metadata_params={nn.PARTITION_NAME: "layers"}, **axes)
        return scan(LinenBlock(self.partition, name="layers"), x, None)[0]


def test_a_linen_stack_with_logical_names_and_rules_trains_as_on_one_device():
    with nn.logical_axis_rules(RULES):
        check_linen(LinenNet(), (X,), mean_square, data(), [LinenBlock])


@pytest.mark.parametrize(
    ("partition", "options"),
    thin(
        [
            (nn.with_logical_partitioning, {"program": "manual"}),
            (nn.with_logical_partitioning, {}),
            (nn.with_partitioning, {}),
            (nn.with_partitioning, {"program": "manual"}),
            (nn.with_partitioning, {"program": "manual", "storage": "flat"}),
            (nn.with_logical_partitioning, {"program": "manual", "storage": "flat"}),
        ]
    ),
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_a_linen_model_with_names_runs_under_every_engine_with_rules_and_without(partition, options):
    source = (LinenNet(partition), (X,))
    for rules in ((), RULES):
        with nn.logical_axis_rules(rules):
            lower(source, LinenBlock, **options)


@pytest.mark.filterwarnings("ignore:mesh axis 'tensor'")
def test_activations_stated_over_the_batch_s_axis_are_refused_by_name_where_each_device_has_its_own_rows():
    mesh = jfsdp.make_mesh(fsdp=4, tensor=2)
    with nn.logical_axis_rules(RULES), refusing("mesh axis 'fsdp'"):
        lower((LinenNet(), (X,)), LinenBlock, mesh=mesh, program="manual")


@pytest.mark.parametrize("options", [{}, {"program": "manual"}], ids=str)
@pytest.mark.parametrize("source", [(Net, Block), ((LinenNet(), (X,)), LinenBlock)], ids=["nnx", "linen"])
def test_a_mesh_that_the_user_has_set_for_something_else_changes_nothing(source, options):
    mesh = jax.make_mesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)
    with jax.set_mesh(mesh), nn.logical_axis_rules((("embed", None), ("mlp", "model"), ("batch", "data"))):
        lower(*source, **options)


def test_boxed_variables_that_are_given_are_unboxed_whatever_mesh_is_set():
    module = LinenNet(nn.with_partitioning)
    variables = module.init(jax.random.key(0), data())
    with jax.set_mesh(jax.make_mesh((8,), ("data",), axis_types=(AxisType.Auto,))):
        model = fully_shard((module, (X,), variables), units=[LinenBlock], min_size=1)
    assert model.layout.by_path["layers.Dense_0.kernel"].unit == "layers"


def test_a_set_mesh_with_explicit_axes_is_refused_with_what_to_do():
    mesh = jax.make_mesh((8,), ("data",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh), refusing("Explicit", "('data',)"):
        fully_shard(Net, units=[Block])
