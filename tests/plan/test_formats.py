"""Steps in 8 bits, compiled for H100s that are not there: what is sent and multiplied, and the audit of both."""

import dataclasses
import functools

import jfsdp
from jfsdp.plan.traffic.audit import audit
from jfsdp.plan.traffic.checks import stated_flops
from tests.plan import programs

GATHER, REDUCE = "float8", "int8:64@4"


@functools.cache
def compiled(is_float8=True):
    """Return the model, the trace and the text of a step with all formats, or with none."""
    task, policy = programs.job(), jfsdp.MixedPrecisionPolicy("bfloat16")
    if is_float8:
        policy = dataclasses.replace(policy, gather_wire=GATHER, reduce_wire=REDUCE)
        assert task.with_dot_general is not None
        task = dataclasses.replace(task, model=task.with_dot_general(task.model, jfsdp.float8_dot_general))
    model = jfsdp.fully_shard(task.model, mesh=programs.build().mesh, units=task.units, mp_policy=policy, remat="full")
    step, given, program = programs.compile_with_step(model, task.loss, task.batch(8, programs.SEQ_LEN))
    return model, step, step.read_trace(*given), program.as_text()


def sent(report, what):
    """Sum bytes by collective and dtype."""
    total = {}
    for row in report.ledger.rows:
        if row.what == what and row.unit == "layers":
            key = row.kind, row.dtype, row.group_size
            total[key] = total.get(key, 0) + row.measured_bytes
    return total


def test_everything_is_sent_and_multiplied_as_stated():
    model, step, trace, text = compiled()
    report = audit(text, model.layout, spec=step.spec, trace=trace)
    assert report.findings == ()
    assert abs(report.ledger.wire_ratio - 1) < 1e-3
    size = sum(leaf.shape[0] * leaf.shape[1] * leaf.shape[2] for leaf in model.layout.leaves if leaf.gather_wire)
    gathered = sent(report, "parameters")
    assert gathered["all-gather", "f8e4m3fn", 8] == 2 * size * 7 / 8
    reduced = sent(report, "gradients")
    assert reduced["reduce-scatter", "bf16", 4] == 2 * size * 3 / 4
    assert reduced["all-to-all", "s8", 2] == size / 4 / 2
    assert reduced["all-to-all", "bf16", 2] == 2 * size / 64 / 4 / 2
    maxima = [line for line in text.splitlines() if "jfsdp.scales" in line and " all-reduce" in line]
    assert len([line for line in maxima if "all-reduce(" in line or "all-reduce-start(" in line]) == 1
    (note,) = [note for note in report.notes if note.startswith("matrix products")]
    num, total = note.split()[3], note.split()[5].rstrip(",")
    assert int(total) - int(num) == 3  # the head: forward and two gradients
    stated = stated_flops(trace.jaxpr, 8)
    assert stated["float8"] > 4 * stated["bfloat16"]


def test_a_fall_back_to_bfloat16_is_named():
    model, step, trace, _ = compiled()
    _, _, _, text = compiled(is_float8=False)
    findings = {finding.trap for finding in audit(text, model.layout, spec=step.spec, trace=trace).findings}
    assert {"wire-dtype", "extra-bytes", "product-dtype"} <= findings
