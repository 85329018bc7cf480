"""The options of XLA that a step is compiled with: computed from its layout, valid for this JAX, overridable."""

import jax
import optax
import pytest

import jfsdp
from jfsdp.engine.options import COMBINE_BYTES, SLICE_COPIES, check_options, compiler_options, unit_bytes
from jfsdp.trainer.job import find_job
from tests import hlo
from tests.refusals import refusing

LAYER_PARAMETERS = (8_030_261_248 - 1_050_677_248) // 32


def sharded(mesh, **config):
    job = find_job("llama-8b").with_config(attention="xla", **config)
    return job, jfsdp.fully_shard(job.model, mesh=mesh, units=job.units)


@pytest.mark.parametrize("stacked", [True, False])
def test_collectives_are_combined_up_to_one_layer(stacked):
    _, model = sharded(jfsdp.make_mesh(devices=hlo.h100s(1)), num_layers=2, stacked=stacked)
    assert unit_bytes(model.layout) == (4 * LAYER_PARAMETERS, LAYER_PARAMETERS // 2)
    options = compiler_options(model.mesh, model.layout)
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == 4 * LAYER_PARAMETERS
    assert options["xla_gpu_reduce_scatter_combine_threshold_bytes"] == LAYER_PARAMETERS // 2
    assert options["xla_gpu_enable_latency_hiding_scheduler"] is True
    assert options["xla_disable_hlo_passes"] == "rematerialization"


def test_small_units_leave_the_threshold_of_xla():
    job = find_job("llama-tiny")
    model = jfsdp.fully_shard(job.model, mesh=jfsdp.make_mesh(devices=hlo.h100s(1)), units=job.units)
    options = compiler_options(model.mesh, model.layout)
    assert options["xla_gpu_all_gather_combine_threshold_bytes"] == COMBINE_BYTES


def test_other_platforms_get_no_options():
    job = find_job("llama-tiny")
    model = jfsdp.fully_shard(job.model, mesh=jfsdp.make_mesh(), units=job.units)
    assert compiler_options(model.mesh, model.layout) == {}
    assert model.train_step(job.loss, optax.sgd(0.1)).compiler_options == {}


@pytest.mark.parametrize("is_scheduled", [True, False])
def test_slices_of_stacks_are_copied_asynchronously_where_xla_orders_the_gathers_only(is_scheduled):
    _, model = sharded(jfsdp.make_mesh(devices=hlo.h100s(1)), num_layers=2)
    options = compiler_options(model.mesh, model.layout, is_scheduled=is_scheduled)
    assert (SLICE_COPIES in options["xla_disable_hlo_passes"].split(",")) == is_scheduled


@pytest.mark.parametrize(("stacked", "num"), [(True, 8), (False, 2)])
def test_a_list_of_layers_has_a_gather_and_a_reduction_in_flight(stacked, num):
    _, model = sharded(jfsdp.make_mesh(devices=hlo.h100s(1)), num_layers=2, stacked=stacked)
    options = compiler_options(model.mesh, model.layout, is_scheduled=True)
    assert options["xla_gpu_experimental_parallel_collective_overlap_limit"] == num


def test_options_are_overridden_and_taken_away_by_name():
    job, model = sharded(jfsdp.make_mesh(devices=hlo.h100s(1)), num_layers=2)
    limit = "xla_gpu_experimental_parallel_collective_overlap_limit"
    step = model.train_step(job.loss, optax.sgd(0.1), compiler_options={limit: 2, "xla_disable_hlo_passes": None})
    assert step.compiler_options[limit] == 2
    assert "xla_disable_hlo_passes" not in step.compiler_options


def test_this_xla_knows_every_option():
    """Compiling refuses unknown options, so this fails when a new JAX renames one."""
    mesh = jfsdp.make_mesh(devices=hlo.h100s(1))
    _, model = sharded(mesh, num_layers=2)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    x = jax.ShapeDtypeStruct((8,), "float32", sharding=sharding)
    double = jax.jit(lambda x: x + x, compiler_options=compiler_options(mesh, model.layout))
    assert "add" in (double.lower(x).compile().as_text() or "")


@pytest.mark.parametrize("given", [{"nothere": 1}, {"xla_cpu_enable_fast_math": "banana"}])
def test_an_option_that_xla_refuses_is_named(given):
    with refusing(f"compiler_options['{next(iter(given))}']"):
        check_options(given)
