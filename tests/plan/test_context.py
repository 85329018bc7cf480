"""What attention sends over axis `context` in programs for GPUs, next to theory and to a formula in sizes."""

import functools

import pytest

from jfsdp.plan import Cluster, find_gpu
from jfsdp.plan.hlo.collectives import Collective
from jfsdp.plan.hlo.op_names import find_scopes
from jfsdp.plan.hlo.parse import Shape
from jfsdp.plan.jobs import plan_job
from jfsdp.plan.traffic.attribution import split_activations
from jfsdp.plan.traffic.ledger import OWN
from jfsdp.trainer.options import StepOptions
from tests.plan import programs
from tests.thin import thin

H100 = Cluster(find_gpu("h100"), nodes=1, gpus_per_node=8)
TOKENS, LAYERS, HEADS, KEYS, SIZE = 8192, 2, 32, 8, 128
KEPT = (("save", ("attention",)),)


@functools.cache
def plan(mesh, config=(), **options):
    config = (("num_layers", LAYERS), *config)
    return plan_job(StepOptions(model="llama-8b", mesh=mesh, seq_len=TOKENS, model_config=config, **options), H100)


def by_heads(context, passes, rows=1):
    """Bytes sent by all-to-alls of queries, keys, values and results, in bfloat16."""
    keys = KEYS * context // min(KEYS, context) if context > KEYS else KEYS
    values = rows * TOKENS // context * (2 * HEADS + 2 * keys) * SIZE
    return LAYERS * passes * values * 2 * (context - 1) / context


def sent(found, kind, axes):
    rows = [row for row in found.ledger.rows if row.what == OWN and (row.kind, row.axes) == (kind, axes)]
    assert all(row.crosses_nodes is False for row in rows)
    return sum(row.measured_bytes for row in rows if row.dtype == "bf16")


CASES = {
    "full": ((("context", 8),), {"remat": "full"}, by_heads(8, 3), ("context",)),
    "none": ((("context", 8),), {"remat": "none"}, by_heads(8, 2), ("context",)),
    "attention kept": ((("context", 4), ("fsdp", 2)), {"remat": KEPT}, by_heads(4, 3), ("context",)),
    "xla": ((("context", 2), ("fsdp", 4)), {"program": "xla"}, by_heads(2, 3), ("context",)),
    "tensor": ((("context", 4), ("tensor", 2)), {"remat": "full"}, by_heads(4, 3) / 2, ("context",)),
}


@pytest.mark.parametrize(
    "name", [*thin(["full", "none", "xla", "attention kept"]), pytest.param("tensor", marks=pytest.mark.proof)]
)
def test_all_to_alls_send_the_bytes_of_the_formula_and_of_theory(name):
    mesh, options, expected, axes = CASES[name]
    found = plan(mesh, **options)
    assert sent(found, "all-to-all", axes) == expected
    assert found.ledger.own_bytes == pytest.approx(
        found.ledger.own_bytes_theory, rel=0.02 if "tensor" in name else 1e-6
    )
    assert not [item for item in found.ledger.unknown if item.kind != "collective-permute"]


@pytest.mark.parametrize(("remat", "gathers"), thin([(KEPT, 2), ("full", 3)]))
def test_gathered_keys_send_the_bytes_of_the_formula_and_of_theory(remat, gathers):
    found = plan((("context", 8),), (("context_by", "keys"),), remat=remat)
    keys = LAYERS * TOKENS * 2 * KEYS * SIZE * 2 * 7 / 8
    assert sent(found, "all-gather", ("context",)) == gathers * keys
    assert sent(found, "reduce-scatter", ("context",)) == keys
    assert found.ledger.own_bytes == pytest.approx(found.ledger.own_bytes_theory, rel=1e-3)  # XLA merges segment ids
    assert not found.ledger.unknown


def test_devices_of_a_row_share_its_tokens():
    mesh, options, *_ = CASES["full"]
    found = plan(mesh, **options)
    assert found.items_per_s == pytest.approx(TOKENS / 8 / found.step_s)
    assert found.step_range_s is None


@pytest.mark.proof
def test_of_many_layers_what_moves_is_hidden():
    found = plan((("context", 8),), (("num_layers", 6),))
    assert (found.state_overlapped_share, found.timeline.overlapped_share) == (1, pytest.approx(0.9, abs=0.09))


NAMED, LOST = "jvp(jfsdp.context)/all_gather", "jit(_step)/shard_map/while/body/all_to_all"
WEIGHT, ROW = (1024, 2048), (1, TOKENS)
ARRAYS = {
    "combined": ("all-gather", f"jit(_step)/({NAMED}:jfsdp.gather.layers/all_gather)", (ROW, WEIGHT), (ROW,)),
    "shared prefix": ("all-gather", "jvp(jfsdp.context)/(all_gather:copy)", (ROW, WEIGHT), (ROW, WEIGHT)),
    "a weight": ("all-gather", "jfsdp.gather.layers/all_gather", (WEIGHT,), ()),
    "a lost name": ("all-to-all", LOST, (ROW,), (ROW,)),
    "a matrix of the update": ("all-to-all", "jfsdp.update/jfsdp.matrices.layers.mlp/all_to_all", (WEIGHT,), ()),
}


@pytest.mark.parametrize(("kind", "name", "shapes", "own"), ARRAYS.values(), ids=ARRAYS)
def test_arrays_that_xla_combines_are_told_apart(kind, name, shapes, own):
    parts = tuple(Shape("bf16", shape) for shape in shapes)
    item = Collective(kind, "x", parts, "bf16", tuple(range(8)), 1, "main", 0, 1, False, name)
    layout = programs.build(mesh=(("fsdp", 1), ("context", 8))).layout
    found, rest = split_activations(layout, item)
    assert tuple(part.dims for part in found.parts) == own
    assert found.wire_bytes + rest.wire_bytes == item.wire_bytes
    assert not find_scopes(found.op_name) or not found.parts
