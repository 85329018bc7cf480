"""What experts send over axis `expert` in programs for GPUs, next to theory and to a formula in sizes."""

import functools
import math

import pytest

from jfsdp.plan import Cluster, find_gpu
from jfsdp.plan.jobs import plan_job
from jfsdp.plan.search.space import SearchSpace, splits
from jfsdp.plan.traffic.ledger import OWN
from jfsdp.trainer.options import StepOptions
from tests.refusals import warning

H100 = Cluster(find_gpu("h100"), nodes=1, gpus_per_node=8)
TOKENS, LAYERS, DIM, WIDE, EXPERTS, K = 4096, 2, 4096, 14_336, 8, 2
PLACES = math.ceil(1.25 * TOKENS * K / EXPERTS)
KEPT = (("save", ("expert_tokens", "expert_places")),)


@functools.cache
def plan(mesh, config=(), **options):
    config = (("num_layers", LAYERS), *config)
    return plan_job(StepOptions(model="mixtral-8x7b", mesh=mesh, seq_len=TOKENS, model_config=config, **options), H100)


def of_copies(size, passes, weights):
    """Bytes of all-to-alls of copies, and of their weights, in bfloat16."""
    return LAYERS * EXPERTS * PLACES * (DIM * passes + weights) * 2 * (size - 1) / size


CASES = {
    "full": ((("expert", 8),), (), "full", {"all-to-all": of_copies(8, 5, 3)}),
    "kept": ((("expert", 4), ("fsdp", 2)), (), KEPT, {"all-to-all": of_copies(4, 4, 2)}),
    "parts": ((("expert", 8),), (("expert_parts", 2),), "none", {"all-to-all": of_copies(8, 4, 2)}),
    "tokens": (
        (("expert", 4), ("fsdp", 2)),
        (("expert_send", "tokens"),),
        KEPT,
        dict.fromkeys(("all-gather", "reduce-scatter"), LAYERS * 2 * TOKENS * DIM * 2 * 3),
    ),
}


@pytest.mark.parametrize("name", ["kept", *[pytest.param(x, marks=pytest.mark.proof) for x in CASES if x != "kept"]])
def test_activations_and_weights_send_the_bytes_of_the_formula_and_of_theory(name):
    mesh, config, remat, expected = CASES[name]
    found, sizes = plan(mesh, config, remat=remat).ledger, dict(mesh)
    own = [row for row in found.rows if row.what == OWN and row.dtype == "bf16"]
    for kind, num_bytes in expected.items():
        assert sum(row.measured_bytes for row in own if row.kind == kind) == num_bytes
    assert found.own_bytes == pytest.approx(found.own_bytes_theory, rel=1e-6)
    assert found.wire_ratio == pytest.approx(1, abs=1e-4) and not found.unknown
    # Weights of experts are gathered and reduced over fsdp only.
    shard = LAYERS * 3 * EXPERTS * DIM * WIDE // sizes["expert"] * 2 / 2
    over_fsdp = [row for row in found.rows if row.what != OWN and row.axes == ("fsdp",)]
    passes = {row.kind: row.measured_bytes / shard for row in over_fsdp}
    assert passes == ({"all-gather": 2, "reduce-scatter": 1} if "fsdp" in sizes else {})


def test_search_tries_sizes_of_the_axis_with_the_same_rows():
    given = StepOptions(model="mixtral-8x7b", mesh=(("fsdp", -1),), batch_per_device=3)
    found = list(splits(given, given, H100, SearchSpace(tensor_sizes=(), context_sizes=())))
    meshes = {dict(one.mesh).get("expert", 1): (one.batch_per_device, one.accumulate) for one in found}
    assert meshes == dict.fromkeys((1, 2, 4, 8), (3, 1))
    dense = StepOptions(model="llama-8b", mesh=(("fsdp", -1),))
    assert not [one for one in splits(dense, dense, H100, SearchSpace()) if "expert" in dict(one.mesh)]


def test_a_ragged_product_is_told_what_it_costs_on_a_gpu(workdir):
    (workdir / "ragged.py").write_text(RAGGED)
    with warning("jax.lax.ragged_dot", "8 groups"):
        plan_job(StepOptions(factory="ragged:job", mesh=(("fsdp", 8),), seq_len=64), H100)


RAGGED = """
import jax, jax.numpy as jnp, optax
from flax import nnx
from types import SimpleNamespace

class Block(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((8, 64, 64)))
    def __call__(self, x):
        sizes = jnp.full((8,), x.shape[0] * x.shape[1] // 8, jnp.int32)
        return jax.lax.ragged_dot(x.reshape(-1, 64), self.weight[...], sizes).reshape(x.shape)

class Net(nnx.Module):
    def __init__(self, rngs):
        self.tokens, self.block = nnx.Embed(64, 64, rngs=rngs), Block(rngs)

def loss(model, batch):
    x = model.block(model.tokens(batch["tokens"]))
    return SimpleNamespace(total=jnp.sum(x**2), weight=jnp.sum(batch["tokens"] >= 0), aux=None)

def job():
    ids = lambda rows, length: {"tokens": jax.ShapeDtypeStruct((rows, length), jnp.int32)}
    units = [{"match": Block, "stacked": 0}]
    return {"model": Net, "loss": loss, "batch": ids, "units": units, "optimizer": optax.adamw, "vocab_size": 64}
"""
