"""A plan of generation: weights and cache by formula are what the compiler takes in; the cache is written in place."""

import pytest

from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.inference import plan_inference
from jfsdp.trainer.options import ShardingOptions
from tests.options import made
from tests.thin import thin


@pytest.mark.parametrize("mesh", thin(["fsdp=2,tensor=4", "fsdp=8"]))
def test_weights_and_cache_are_what_the_compiler_takes_in(mesh):
    cluster = Cluster(find_gpu("h100"), 1, 8)
    rows, length, shards = 4, 4096, 8 if mesh == "fsdp=8" else 2
    plan = plan_inference(made(ShardingOptions, model="llama-8b", mesh=mesh), cluster, rows, length)
    heads = 8 if mesh == "fsdp=8" else 2
    assert plan.cache_bytes == 2 * 32 * rows * length * heads * 128 * 2
    assert plan.weight_bytes == pytest.approx(8_030_261_248 * 2 / 8, rel=1e-3)
    for program in (plan.token, plan.prompts):
        assert program.argument_bytes == pytest.approx(plan.cache_bytes + plan.weight_bytes, rel=1e-3)
        assert program.needed_bytes >= program.argument_bytes
    gathered = (8_030_261_248 * 2) * (shards - 1) / shards / (1 if mesh == "fsdp=8" else 4)
    assert plan.token.wire_bytes == pytest.approx(gathered, rel=0.02)
    assert plan.fits and plan.tokens_per_s > 0


@pytest.mark.proof
def test_the_cache_is_written_in_place():
    """A second cache would show: twice the length takes a second layer's part at most."""
    options, cluster = made(ShardingOptions, model="llama-8b", mesh="fsdp=2,tensor=4"), Cluster(find_gpu("h100"), 1, 8)
    plan, longer = (plan_inference(options, cluster, 4, length) for length in (4096, 8192))
    assert longer.token.needed_bytes - plan.token.needed_bytes < 1.15 * (longer.cache_bytes - plan.cache_bytes)
