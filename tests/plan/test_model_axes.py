"""What a model's own shardings over `tensor` put on the wire: told apart from the strategy's, and no trap.

A narrow Llama of two layers, compiled for 16 H100s that are not there.
"""

import functools
import math

import jax
import pytest
from jax.sharding import PartitionSpec

from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.traffic.attribution import split_activations
from jfsdp.plan.traffic.audit import audit
from jfsdp.plan.traffic.checks import excess_elements
from jfsdp.plan.traffic.ledger import OWN, make_ledger
from jfsdp.testing import assert_collectives
from jfsdp_models import over_tensor  # pyright: ignore[reportMissingImports]
from tests.plan import programs
from tests.thin import thin

NUM_DEVICES = 16
FREE = PartitionSpec.UNCONSTRAINED
pytestmark = pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")


@functools.cache
def program(kind, fsdp, tensor, remat="full", num_layers=2, seq_len=512):
    """The compiled step as a module, its layout, and its trace."""
    config = (("num_layers", num_layers), ("attention", "xla"))
    mesh = (("fsdp", fsdp), ("tensor", tensor))
    model = programs.build(hosts=2, mesh=mesh, config=config, program=kind, remat=remat)
    job = programs.job(**dict(config))
    step, given, compiled = programs.compile_with_step(model, job.loss, job.batch(fsdp, seq_len))
    return parse_module(compiled.as_text()), model.layout, step.read_trace(*given)


@pytest.mark.parametrize("kind", thin(["manual", "xla"]))
def test_weights_move_as_theory_says_and_the_models_own_is_told_apart(kind):
    module, layout, _ = program(kind, 8, 2)
    collectives = find_collectives(module, NUM_DEVICES)
    found = make_ledger(layout, collectives)
    assert found.unknown == ()
    assert found.wire_ratio == pytest.approx(1, abs=5e-4)
    own = [row for row in found.rows if row.what == OWN]
    assert own
    assert {row.axes for row in own} == {("tensor",)}
    assert {row.expected_bytes for row in own} == {0.0}
    assert found.own_bytes == pytest.approx(
        sum(item.total_bytes for item in collectives if split_activations(layout, item)[0].parts)
    )
    rest = [row for row in found.rows if row.what not in (OWN, "scalars")]
    both = [row for row in rest if row.axes == ("fsdp", "tensor")]  # XLA sums vectors over all that saw other tokens
    assert {row.axes for row in rest if row not in both} == {("fsdp",)}
    assert both == [] or kind == "xla"
    assert all(row.what == "gradients" and not layout.by_path[path].cuts for row in both for path in row.paths)


def test_sequence_parallelism_moves_what_theory_says():
    """Of a layer: two gathers and two scatters forward, two gathers and one scatter in the remat, two and two backward.

    Beside the layers: the embedding's sum and its gradient, the gather before the head and the sum behind its gradient.
    """
    module, layout, _ = program("manual", 8, 2)
    rows = [row for row in make_ledger(layout, find_collectives(module, NUM_DEVICES)).rows if row.what == OWN]
    config = programs.job(attention="xla").config
    sent = 512 * config.dim * 2 / 2  # one row of tokens in bfloat16; a device sends the half that the other lacks
    measured = {
        kind: sum(row.measured_bytes for row in rows if row.kind == kind) for kind in ("all-gather", "reduce-scatter")
    }
    layers = config.num_layers
    assert measured["reduce-scatter"] == (5 * layers + 2) * sent
    assert measured["all-gather"] == pytest.approx((6 * layers + 2) * sent, rel=0.01)  # and token ids
    logits = [
        item for item in find_collectives(module, NUM_DEVICES) for part in item.parts if config.vocab_size in part.dims
    ]
    assert not logits


@pytest.mark.parametrize("kind", thin(["manual", "xla"]))
def test_no_trap_is_seen_in_what_the_model_asked_for(kind):
    module, layout, trace = program(kind, 8, 2)
    for known in (None, trace):
        report = audit(module, layout, trace=known)
        assert report.is_ok, str(report)
        (note,) = (note for note in report.notes if "the model's own collectives" in note)
        assert ("by theory (ratio 1.00" if known else "needs the step's trace") in note
    assert report.ledger.own_ratio == pytest.approx(1, abs=1e-3)
    assert_collectives(module, layout, trace=trace)


@pytest.mark.proof
@pytest.mark.parametrize("remat", ["none", "dots"])
@pytest.mark.parametrize("kind", ["manual", "xla"])
def test_theory_of_activations_is_what_is_compiled(kind, remat):
    """Row by row where bytes count: crumbs are the token ids and the maxima of logits, in a form that XLA chooses."""
    module, layout, trace = program(kind, 8, 2, remat, num_layers=3)
    found = make_ledger(layout, find_collectives(module, NUM_DEVICES), trace=trace)
    assert found.own_theory is not None
    assert found.own_theory.unknown == ()
    wide = [row for row in found.rows if row.what == OWN and row.dtype == "bf16"]
    assert {row.kind for row in wide} == {"all-gather", "reduce-scatter", *["all-reduce"] * (kind == "xla")}
    assert all(row.measured_bytes == row.expected_bytes for row in wide)
    assert found.own_ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.proof
def test_rows_that_the_axis_does_not_divide_are_all_reduced_by_theory_too():
    module, layout, trace = program("manual", 8, 2, seq_len=511)
    found = make_ledger(layout, find_collectives(module, NUM_DEVICES), trace=trace)
    (wide,) = (row for row in found.rows if row.what == OWN and row.dtype == "bf16")
    assert (wide.kind, wide.measured_bytes) == ("all-reduce", wide.expected_bytes)
    assert found.own_ratio == pytest.approx(1, abs=1e-3)


@pytest.mark.proof  # tests/cli/test_plan.py has the trap with the tests
def test_a_gradient_that_is_gathered_twice_is_a_trap(monkeypatch):
    """What XLA did until the models stated of gradients too how they are split: 8 gathers a layer."""
    *_, trace = program("manual", 8, 2)
    spec = {True: PartitionSpec(FREE, "tensor", FREE), False: PartitionSpec(FREE, None, FREE)}
    monkeypatch.setattr(over_tensor, "stated", lambda split, x: jax.lax.with_sharding_constraint(x, spec[split]))
    module, layout, _ = program.__wrapped__("manual", 8, 2)
    report = audit(module, layout, trace=trace)
    (finding,) = report.findings
    assert finding.trap == "activations"
    assert "most of it: all-gather bf16" in finding.message
    assert report.ledger.own_bytes > 1.1 * report.ledger.own_bytes_theory


def test_a_cut_weight_that_arrives_whole_along_the_axis_is_too_large():
    _, layout, _ = program("manual", 8, 2)
    leaf = layout.by_path["layers.mlp.up_proj.kernel"]
    shard = layout.shard_shape(leaf, "param")
    (cut,) = leaf.cuts
    whole = tuple(size * (2 if dim == cut.dim else 1) for dim, size in enumerate(shard))
    assert excess_elements(layout, leaf, "param", shard) == 0
    assert excess_elements(layout, leaf, "param", whole) == math.prod(shard)
