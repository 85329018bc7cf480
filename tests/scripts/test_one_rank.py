"""A rank of a mesh on the devices that are here: what is made of a job's shapes, and a machine without a GPU."""

import jax
import pytest

from jfsdp.layout.mesh import make_mesh
from scripts import one_rank
from tests.refusals import check_facts


def test_a_rank_holds_its_shards_of_the_state():
    lora = (("rank", 2), ("targets", ("**.q_proj.kernel",)))
    options = one_rank.RankOptions(
        model="llama-tiny", model_config=(("num_layers", 1),), seq_len=16, steps=2, offload=("opt_state",), lora=(lora,)
    )
    mesh = make_mesh(fsdp=4, devices=jax.devices()[:4])
    shapes = one_rank.shard_planned(options, mesh=mesh).step.abstract_state()
    shards = [
        jax.eval_shape(lambda x=x: jax.numpy.zeros(x.sharding.shard_shape(x.shape), x.dtype))
        for x in jax.tree.leaves(shapes)
    ]
    found = one_rank.measure(options, mesh)
    assert found["state_bytes"] == sum(x.size * x.dtype.itemsize for x in shards)
    assert found["compiled_bytes"] > 0 == found["peak_bytes"]


@pytest.mark.parametrize(
    ("given", "facts"), [([], ["GPU", "jfsdp plan"]), (["--mesh", "fsdp=3"], ["--mesh fsdp=3", "8"])]
)
def test_it_refuses_what_cannot_be_measured(given, facts, capfd):
    assert one_rank.main(["--model", "llama-tiny", *given]) == 2
    check_facts(capfd.readouterr().err, *facts)
