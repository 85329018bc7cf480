"""What a model's own shardings over `tensor` put on the wire: told apart from the strategy's, and no trap.

A narrow Llama of two layers, compiled for 16 H100s that are not there.
"""

import functools
import math

import pytest

import jfsdp
from jfsdp.plan.program.collectives import find_collectives
from jfsdp.plan.program.hlo import parse_module
from jfsdp.plan.wire.audit import audit
from jfsdp.plan.wire.axes import is_own
from jfsdp.plan.wire.ledger import OWN, make_ledger
from jfsdp.plan.wire.traps import excess_elements
from tests import hlo
from tests.plan import programs
from tests.thin import thin

NUM_DEVICES = 16
pytestmark = pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* repeats")


@functools.cache
def program(engine, fsdp, tensor):
    job = programs.job(attention="xla")
    model = jfsdp.fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(2), fsdp=fsdp, tensor=tensor),
        units=job.units,
        cuts=job.cuts,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype="bfloat16"),
        engine=engine,
    )
    tx = job.optimizer(3e-4)
    step = model.train_step(job.loss, tx, max_grad_norm=1.0)
    compiled = step.lower(model.abstract_state(tx), job.batch(fsdp, 512)).compile(step.compiler_options)
    return parse_module(compiled.as_text()), model.layout


@pytest.mark.parametrize("engine", thin(["manual", "auto"]))
def test_weights_move_as_theory_says_and_the_models_own_is_told_apart(engine):
    module, layout = program(engine, 8, 2)
    collectives = find_collectives(module, NUM_DEVICES)
    found = make_ledger(layout, collectives)
    assert found.unknown == ()
    assert found.wire_ratio == pytest.approx(1, abs=5e-4)
    own = [row for row in found.rows if row.what == OWN]
    assert own
    assert {row.axes for row in own} == {("tensor",)}
    assert {row.expected_bytes for row in own} == {0.0}
    assert found.own_bytes == pytest.approx(sum(item.total_bytes for item in collectives if is_own(layout, item)))
    rest = [row for row in found.rows if row.what not in (OWN, "scalars")]
    both = [row for row in rest if row.axes == ("fsdp", "tensor")]  # XLA sums vectors over all that saw other tokens
    assert {row.axes for row in rest if row not in both} == {("fsdp",)}
    assert both == [] or engine == "auto"
    assert all(row.what == "gradients" and not layout.by_path[path].cuts for row in both for path in row.paths)


def test_sequence_parallelism_moves_what_theory_says():
    """Of a layer: two gathers and two scatters forward, two gathers and one scatter in the remat, two and two backward.

    Beside the layers: the embedding's sum and its gradient, the gather before the head and the sum behind its gradient.
    """
    module, layout = program("manual", 8, 2)
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


@pytest.mark.parametrize("engine", ["auto", "manual"])
def test_no_trap_is_seen_in_what_the_model_asked_for(engine):
    module, layout = program(engine, 8, 2)
    report = audit(module, layout)
    assert report.is_ok, str(report)
    assert any("are the model's own" in note for note in report.notes)


def test_a_cut_weight_that_arrives_whole_along_the_axis_is_too_large():
    _, layout = program("auto", 8, 2)
    leaf = layout.by_path["layers.mlp.up_proj.kernel"]
    shard = layout.shard_shape(leaf, "param")
    (cut,) = leaf.cuts
    whole = tuple(size * (2 if dim == cut.dim else 1) for dim, size in enumerate(shard))
    assert excess_elements(layout, leaf, "param", shard) == 0
    assert excess_elements(layout, leaf, "param", whole) == math.prod(shard)


@pytest.mark.proof
def test_without_the_axis_nothing_is_the_models_own():
    module, layout = program("manual", 16, 1)
    found = make_ledger(layout, find_collectives(module, NUM_DEVICES))
    assert found.own_bytes == 0
    assert OWN not in {row.what for row in found.rows}
