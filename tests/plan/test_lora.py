"""A step that trains adapters sends and computes nothing for the frozen weights but what it reads of them.

A narrow Llama of two layers, compiled for 8 H100s that are not there.
"""

import functools

import pytest

import jfsdp
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.op_names import find_argument
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.traffic.audit import audit
from jfsdp.plan.traffic.ledger import make_ledger
from jfsdp.trainer.job import find_job
from tests.plan import programs
from tests.thin import thin

SEQ_LEN = 384  # no dim of a weight
TARGETS = ("**.attn.*.kernel", "**.mlp.*.kernel")
# What hands arrays on, whole or in parts, or gathers them.
MOVES = {"parameter", "tuple", "get-tuple-element", "while", "conditional", "call", "bitcast"}
MOVES |= {"optimization-barrier", "concatenate"}
MOVES |= {f"{verb}{end}" for verb in ("copy", "all-gather", "async") for end in ("", "-start", "-update", "-done")}


@functools.cache
def program(kind, *, is_fused=False, also=(), config=(), **options):
    job = programs.job(**dict(config))
    lora = {name: options.pop(name) for name in ("rslora", "placement") if name in options}
    model = programs.build(
        config=config,
        mp_policy=jfsdp.MixedPrecisionPolicy("bfloat16", frozen_dtype="bfloat16"),
        program=kind,
        lora=jfsdp.LoRA(targets=list(TARGETS), rank=8, also=list(also) or None, **lora),
        **options,
    )
    loss = find_job("llama-8b").loss if is_fused else job.loss
    step, _, compiled = programs.compile_with_step(model, loss, job.batch(8, SEQ_LEN))
    assert step.spec.program == kind
    return parse_module(compiled.as_text()), model.layout


def computed(module, layout):
    """Return the arrays of a frozen matrix's shape, either way round, that some instruction computes."""
    leaves = [leaf for leaf in layout.leaves if not leaf.trainable and len(leaf.shape) > leaf.stacked + 1]
    every = {shape for leaf in leaves for shape in (leaf.shape, leaf.shape[leaf.stacked :])}
    found = []
    for computation in module.computations.values():
        for line in computation.instructions:
            dims = [tuple(size for size in shape.dims if size > 1) for shape in line.shapes]
            if line.opcode not in MOVES and any(each in every or each[::-1] in every for each in dims):
                found.append(line)
    return found


ENGINES = ["manual", "xla"]
SETTINGS = {
    "plain": {"is_fused": True},  # with the loss of the script
    "logits": {},
    "listed": {"config": (("stacked", False),)},
    "hybrid": {"mesh": (("replica", 2), ("fsdp", 4))},
    "rslora": {"rslora": True},
    "split": {"placement": "full_shard"},
}


def check_wire(kind, **options):
    module, layout = program(kind, **options)
    ledger = make_ledger(layout, find_collectives(module, 8))
    assert ledger.unknown == ()
    assert ledger.wire_ratio == pytest.approx(1, abs=5e-4)
    sums = [row for row in ledger.rows if row.what in ("gradients", "replicated")]
    trained = {leaf.path for leaf in layout.leaves if leaf.trainable}
    assert {path for row in sums for path in row.paths} == trained
    assert all(path.rpartition(".")[2].startswith("lora_") for path in trained)
    assert all(row.measured_bytes == pytest.approx(row.expected_bytes) for row in sums)
    return module, layout


@pytest.mark.parametrize(
    "case", ["plain", *(pytest.param(case, marks=pytest.mark.proof) for case in SETTINGS if case != "plain")]
)
@pytest.mark.parametrize("kind", thin(ENGINES))
def test_every_setting_sends_and_computes_nothing_for_frozen_weights(kind, case):
    module, layout = check_wire(kind, **SETTINGS[case])
    assert case not in ("plain", "logits") or sum(leaf.trainable for leaf in layout.leaves) == 2 * 7
    assert not computed(module, layout)
    assert case != "plain" or not head_sums(module)
    report = audit(module, layout)
    assert report.is_ok and report.findings == (), str(report)


@pytest.mark.proof
def test_the_derivative_of_a_weight_that_is_trained_is_seen():
    module, _ = program("manual", also=("lm_head",))
    _, layout = program("manual")
    assert computed(module, layout)


def head_sums(module):
    """Return the float32 arrays of the head's shape, which a loss makes that forms the head's gradient forward."""
    lines = (line for computation in module.computations.values() for line in computation.instructions)
    return [line for line in lines for shape in line.shapes if shape.dtype == "f32" and shape.dims == (1024, 4096)]


@pytest.mark.proof
def test_a_loss_forms_the_gradient_of_a_head_that_is_trained():
    module, _ = program("manual", is_fused=True, also=("lm_head",))
    assert head_sums(module)


def test_moments_of_an_adapter_are_told_from_those_of_its_matrix():
    module, layout = program("manual", is_fused=True)
    found = [find_argument(line.op_name, layout.by_path) for line in module.entry.instructions]
    moments = {leaf for field, leaf in found if field == "opt_state" and leaf}
    assert moments == {leaf.path for leaf in layout.leaves if leaf.trainable}
