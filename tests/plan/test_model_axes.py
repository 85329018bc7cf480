"""What a model's own shardings over `tensor` put on the wire: told apart from the strategy's, and no trap.

A narrow Llama of two layers, compiled for 16 H100s that are not there.
"""

import functools

import pytest

import jfsdp
from jfsdp.plan.program.collectives import find_collectives
from jfsdp.plan.program.hlo import parse_module
from jfsdp.plan.wire.audit import audit
from jfsdp.plan.wire.axes import is_own
from jfsdp.plan.wire.ledger import OWN, make_ledger
from tests import hlo
from tests.plan import programs
from tests.thin import thin

NUM_DEVICES = 16
pytestmark = pytest.mark.filterwarnings("ignore:mesh axis 'tensor' .* splits what the model computes")


@functools.cache
def program(engine, fsdp, tensor):
    job = programs.job(attention="xla")
    model = jfsdp.fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(2), fsdp=fsdp, tensor=tensor),
        units=job.units,
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
    assert {row.axes for row in rest} == {("fsdp",)}


@pytest.mark.parametrize("engine", ["auto", "manual"])
def test_no_trap_is_seen_in_what_the_model_asked_for(engine):
    module, layout = program(engine, 8, 2)
    report = audit(module, layout)
    assert report.is_ok, str(report)
    assert any("are the model's own" in note for note in report.notes)


@pytest.mark.proof
@pytest.mark.proof
def test_without_the_axis_nothing_is_the_models_own():
    module, layout = program("manual", 16, 1)
    found = make_ledger(layout, find_collectives(module, NUM_DEVICES))
    assert found.own_bytes == 0
    assert OWN not in {row.what for row in found.rows}
