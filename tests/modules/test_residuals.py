"""What whole models save between forward and backward: of a resharded unit, nothing that depends on weights alone.

Each model reads its weights through every back door: reshaped, transposed, cast, and through a function of them.
"""

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from flax import linen as nn
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

import jfsdp
from jfsdp.compat import misorders_offloads
from tests import hlo, steps
from tests.modules.parity import ROWS, TX
from tests.sharding import fully_shard

SIZE, LAYERS = 24, 2
X = jax.ShapeDtypeStruct((ROWS, SIZE), jnp.float32)
POLICIES = {
    "none": "none",
    "full": "full",
    "dots": "dots",
    "names": ("hidden",),
    "offloaded names": jfsdp.SaveNames(save=("out",), offload=("hidden",)),
    "offloaded input": jfsdp.SaveNames(offload=(jfsdp.UNIT_INPUT,)),
    "everything": jax.checkpoint_policies.everything_saveable,
    "all but a name": jax.checkpoint_policies.save_anything_except_these_names("out"),
    "dots with no batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


def back_doors(kernel, x):
    h = jnp.einsum("rd,dkj->rkj", x, kernel.reshape(SIZE, 2, SIZE // 2)).reshape(x.shape)
    h = checkpoint_name(jnp.tanh(h), "hidden") @ kernel.T.astype(jnp.bfloat16).astype(jnp.float32)
    return checkpoint_name(jnp.tanh(h @ jnp.sin(kernel)), "out")


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x, _=None):
        return back_doors(self.param("kernel", nn.initializers.lecun_normal(), (SIZE, SIZE)), x), None


class LinenNet(nn.Module):
    stacked: bool

    @nn.compact
    def __call__(self, x):
        if self.stacked:
            scan: Any = nn.scan(LinenLayer, variable_axes={"params": 0}, split_rngs={"params": True}, length=LAYERS)
            return scan(name="layers")(x, None)[0]
        for _ in range(LAYERS):
            x, _ = LinenLayer()(x)
        return x


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.kernel = nnx.Param(jax.random.normal(rngs.params(), (SIZE, SIZE)))

    def __call__(self, x):
        return back_doors(self.kernel[...], x)


class Net(nnx.Module):
    def __init__(self, rngs, stacked):
        self.stacked = stacked
        if stacked:
            self.layers = nnx.split_rngs(splits=LAYERS)(nnx.vmap(Layer, in_axes=0, out_axes=0))(rngs)
        else:
            self.layers = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def __call__(self, x):
        if self.stacked:
            return nnx.scan(lambda x, layer: layer(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.layers)
        for layer in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = layer(x)
        return x


class Outer(nnx.Module):
    """A unit with a unit inside."""

    def __init__(self, rngs):
        self.own, self.inner = nnx.Param(jax.random.normal(rngs.params(), (SIZE, SIZE))), Layer(rngs)

    def __call__(self, x):
        return back_doors(self.own[...], self.inner(x))


class Nested(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([Outer(rngs)])

    def __call__(self, x):
        return self.layers[0](x)


STACK = 1  # layer dims
MODELS: dict[str, Any] = {
    "nnx list": (lambda rngs: Net(rngs, False), [Layer]),
    "nnx stack": (lambda rngs: Net(rngs, True), [jfsdp.Unit(Layer, STACK)]),
    "nnx nested": (Nested, [Outer, Layer]),
    "linen list": ((LinenNet(False), (X,)), [LinenLayer]),
    "linen stack": ((LinenNet(True), (X,)), [jfsdp.Unit(LinenLayer, STACK)]),
}


def kept(name, remat, reshard=True):
    """Return the types of all arrays that the forward keeps, besides the weights at rest and the batch."""
    source, units = MODELS[name]
    model = fully_shard(source, units=units, min_size=1, remat=POLICIES[remat], reshard_after_forward=reshard)
    state = model.abstract_state(TX)

    def forward(params, model_state, x):
        call = lambda params: model.apply(lambda model, x: model(x), params, model_state, x)[0]  # noqa: E731
        return jax.tree.leaves(jax.vjp(call, params)[1])

    jaxpr = jax.make_jaxpr(forward)(state.params, state.model_state, X).jaxpr
    avals: list[Any] = [var.aval for var in jaxpr.outvars if var not in jaxpr.invars]
    return avals


def weights_saved(name, remat, reshard):
    """Count the kept arrays of a weight's size, or a stack's."""
    sizes = SIZE**2, LAYERS * SIZE**2
    return sum(aval.size in sizes for aval in kept(name, remat, reshard))


@pytest.mark.parametrize("remat", POLICIES)
@pytest.mark.parametrize("model", MODELS)
def test_a_resharded_unit_saves_nothing_that_depends_on_weights_alone(model, remat):
    assert weights_saved(model, remat, True) == 0


@pytest.mark.parametrize("model", MODELS)
def test_a_unit_that_is_not_resharded_saves_its_weights_and_the_count_sees_them(model):
    assert weights_saved(model, "full", False) > 0


@pytest.mark.parametrize("model", MODELS)
def test_inputs_of_units_wait_in_host_memory(model):
    """Of nested units those of the outer one, which computes those of the inner one again."""
    found = [aval for aval in kept(model, "offloaded input") if aval.size % (ROWS * SIZE) == 0]
    assert sum(aval.size for aval in found) // (ROWS * SIZE) == (1 if model == "nnx nested" else LAYERS)
    assert {str(aval.memory_space) for aval in found} == {"MemorySpace.Host"}


class Shared(Net):
    """Layers that all read the same value, such as the memory of an encoder."""

    def __init__(self, rngs):
        super().__init__(rngs, False)
        self.encoder = Layer(rngs)

    def __call__(self, x):
        memory, x = self.encoder(x), jnp.tanh(x)
        for layer in self.layers:  # pyright: ignore[reportGeneralTypeIssues]
            x = layer(x, memory)
        return x


@pytest.mark.skipif(misorders_offloads(), reason="refused on GPUs before JAX 0.11.1")
def test_an_input_that_several_units_share_stays_on_the_device(monkeypatch):
    monkeypatch.setattr(Layer, "__call__", lambda self, x, memory=0.0: back_doors(self.kernel[...], x + memory))
    assert len(offloaded(Shared, [Layer], "manual")) == LAYERS - 1


@pytest.mark.skipif(misorders_offloads(), reason="refused on GPUs before JAX 0.11.1")
@pytest.mark.parametrize("program", ["xla", "manual"])
@pytest.mark.parametrize("model", ["nnx list", "nnx stack"])
def test_a_step_offloads_inputs_that_depend_on_weights_and_nothing_else(model, program):
    source, units = MODELS[model]
    moved = offloaded(source, units, program)
    rows = ROWS if program == "xla" else ROWS // 8
    assert {f"tensor<{rows}x{SIZE}xf32>" in line for line in moved} == {True}
    if model == "nnx list":
        assert len(moved) == LAYERS - 1, "the batch depends on no weight"


def offloaded(source, units, program):
    """Return the lines of a step for 8 GPUs that copy a value to host memory."""
    mesh = jfsdp.make_mesh(devices=hlo.h100s(1))
    sharded = steps.fully_shard(source, mesh=mesh, units=units, remat=POLICIES["offloaded input"], program=program)
    step = sharded.train_step(
        lambda model, x: jfsdp.Loss(jnp.sum(model(x)), jnp.float32(x.shape[0])), TX, check_loss=False
    )
    lines = step.lower(sharded.abstract_state(TX), X).as_text().splitlines()
    return [line for line in lines if "annotate_device_placement" in line and '"pinned_host"' in line]
