"""Every trap planted in a compiled step, and named by the audit; what is as it should be passes."""

import dataclasses
import functools
import re
from typing import Any

import jax
import pytest

import jfsdp
from jfsdp.engine.engine import Engine
from jfsdp.engine.xla import XlaEngine
from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.plan.traffic.audit import audit
from jfsdp.testing import assert_collectives
from jfsdp.train.step import step as step_module
from tests.plan import programs
from tests.refusals import check_facts, refusing
from tests.steps import spec_of
from tests.thin import thin
from tests.ways import WAYS

BARE = {
    "xla_gpu_all_gather_combine_threshold_bytes": None,
    "xla_gpu_experimental_parallel_collective_overlap_limit": None,
    "xla_gpu_enable_pipelined_all_gather": None,
    "xla_gpu_pipeline_all_gather": None,
}


def traps(report):
    return {finding.trap for finding in report.findings}


def found(report, trap):
    return next(finding for finding in report.findings if finding.trap == trap)


@functools.cache
def clean():
    return programs.program(config=(("num_layers", 4),))  # of two layers pipelining leaves no loop


def test_a_step_as_it_should_be_passes():
    text, layout = clean()
    report = audit(text, layout, min_overlap=0.9)
    assert report.findings == ()
    assert report.is_ok
    assert report.notes == ()
    assert report.overlap is not None and report.overlap > 0.9
    assert report.to_dict()["ok"]
    assert_collectives(text, layout)


@pytest.mark.proof
def test_a_wire_in_float32_is_named(monkeypatch):
    def to_use(self, pairs, shards):
        split = [(leaf, gone) for leaf, gone in pairs if leaf.stage(leaf.source).axes]
        whole = shards | self.gather(split, {leaf.path: shards[leaf.path] for leaf, _ in split})
        return {leaf.path: jax.lax.optimization_barrier(whole[leaf.path]).astype("bfloat16") for leaf, _ in pairs}

    monkeypatch.setattr(Engine, "to_use", to_use)
    model = programs.build()
    report = audit(programs.compile_step(model), model.layout)
    assert traps(report) == {"wire-dtype", "extra-bytes"}
    finding = next(finding for finding in report.findings if "'layers'" in finding.message)
    expected = 2 * sum(row.expected_bytes for row in report.ledger.rows if (row.unit, row.kind) == LAYERS_GATHERED)
    assert finding.bytes == pytest.approx(expected / 2, rel=1e-3), "half of the bytes in float32 are too many"
    assert finding.path.startswith("layers.")
    assert "all-gather in f32" in finding.message
    with refusing("'layers'", "f32", error=AssertionError):
        assert_collectives(programs.compile_step(model), model.layout)


def test_a_wire_narrower_than_the_policy_is_named():
    """The program gathers and sums in bfloat16; the layout says float32."""
    text, _ = clean()
    layout = programs.build(config=(("num_layers", 4),), dtype="float32").layout
    report = audit(text, layout)
    assert traps(report) == {"wire-dtype"}
    messages = [finding.message for finding in report.findings if "'layers'" in finding.message]
    assert any("all-gather in bf16, narrower than" in text and "param_dtype" in text for text in messages)
    assert any("reduce-scatter in bf16, narrower than" in text and "reduce_dtype" in text for text in messages)
    assert all(finding.bytes == 0 and finding.path for finding in report.findings)


LAYERS_GATHERED = ("layers", "all-gather")


def test_a_replicated_leaf_and_unsharded_optimizer_states_are_named(monkeypatch):
    """The state arrives with one parameter and one moment whole on every device."""

    model = programs.build()
    state = model.abstract_state(programs.job().optimizer(3e-4))

    def whole(x: Any, is_chosen: bool) -> Any:
        sharding = jax.sharding.NamedSharding(x.sharding.mesh, jax.sharding.PartitionSpec())
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) if is_chosen else x

    chosen = "opt_state.0.mu.layers.mlp.up_proj.kernel"
    params = {name: whole(x, name == "lm_head.kernel") for name, x in state.params.items()}
    opt_state = state.roles.map(lambda role, x: whole(x, role.name == chosen), state.opt_state)
    state = dataclasses.replace(state, params=params, opt_state=opt_state)
    shardings = jax.tree.map(lambda x: x.sharding, state)
    monkeypatch.setattr(step_module, "state_shardings", lambda *_: shardings)
    report = audit(programs.compile_step(model, state=state), model.layout)
    replicated, moments = found(report, "replicated"), found(report, "optimizer-state")
    assert replicated.path == "lm_head.kernel"
    assert replicated.bytes == 4 * 4096 * 1024 * 7 / 8
    assert moments.path == "layers.mlp.up_proj.kernel"
    assert moments.bytes == 4 * 2 * 1024 * 2048 * 7 / 8
    assert "mu" in moments.source
    assert "f32[2, 1024, 2048]" in moments.message


def test_an_all_reduce_in_place_of_a_reduce_scatter_is_named(monkeypatch):
    def reduce(self, pairs, grads):
        whole = {leaf.path: self._constrain(grads[leaf.path], leaf, "use", gone) for leaf, gone in pairs}
        # A second reader of the whole gradient, such as its norm, breaks the pattern.
        small = {path: grad / (1 + jax.numpy.sum(grad * grad)) for path, grad in whole.items()}
        return {leaf.path: self._constrain(small[leaf.path], leaf, "grad", gone) for leaf, gone in pairs}

    monkeypatch.setattr(XlaEngine, "reduce", reduce)
    model = programs.build()
    report = audit(programs.compile_step(model), model.layout)
    assert {"all-reduce", "extra-bytes"} <= traps(report) <= {"all-reduce", "extra-bytes", "wire-dtype"}
    layers = next(f for f in report.findings if f.trap == "all-reduce" and "'layers'" in f.message)
    scattered = 2 * 2 * (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 2048) * 7 / 8
    assert layers.bytes == pytest.approx(scattered, rel=1e-2), "an all-reduce sends twice what a reduce-scatter does"


@pytest.mark.parametrize("stacked", thin([True, False]))
def test_weights_held_from_forward_to_backward_are_named(stacked):
    config = (("stacked", stacked),)
    kept = programs.build(
        config=config, per_unit={"layers" if stacked else "layers.*": {"reshard_after_forward": False}}
    )
    strict = programs.build(config=config).layout
    compiled = programs.compile_step(kept)
    report = audit(compiled, strict)
    assert traps(report) == {"held"}
    held = 2 * 2 * (2 * 1024**2 + 2 * 1024 * 512 + 3 * 1024 * 2048 + 2 * 1024)
    # XLA combines gathers of two layers in a list, and two small leaves of one shape then count as one.
    assert sum(finding.bytes for finding in report.findings) == pytest.approx(held, rel=1e-2 if stacked else 0.2)
    assert all(finding.path.startswith("layers.") for finding in report.findings)
    assert audit(compiled, kept.layout).is_ok, "what the layout keeps is no trap"


@pytest.mark.proof
def test_missing_overlap_is_named():
    model = programs.build()
    known = model.train_step(programs.job().loss, programs.job().optimizer(1e-3)).compiler_options
    bare = {name: value for name, value in BARE.items() if name in known}
    compiled = programs.compile_step(model, compiler_options=bare)
    report = audit(compiled, model.layout, min_overlap=0.9)
    assert traps(report) == {"overlap"}
    finding = found(report, "overlap")
    assert report.overlap is not None and report.overlap < 0.9
    assert finding.bytes > 0.1 * report.ledger.wire_bytes_theory
    assert finding.path.startswith("layers.")
    assert audit(compiled, model.layout).is_ok, "nobody asked for overlap"


def test_an_overlap_that_nothing_shows_is_a_finding():
    """Of two layers pipelining leaves no loop; who asks for overlap is not told that all is well."""
    text, layout = programs.program(config=(("stacked", False),))
    report = audit(text, layout, min_overlap=0.5)
    assert report.overlap is None and traps(report) == {"overlap"}
    assert "no loop of this program has a collective" in found(report, "overlap").message
    assert audit(text, layout).is_ok
    with pytest.raises(AssertionError, match="no loop of this program"):
        assert_collectives(text, layout, min_overlap=0.0)


def test_a_program_of_another_strategy_is_told_apart_from_a_wrong_one():
    text, _ = clean()
    layout = programs.build(WAYS["kept"], config=(("num_layers", 4),)).layout
    report = audit(text, layout)
    assert traps(report) == {"repeated-gather", "extra-bytes"}
    message = found(report, "repeated-gather").message
    assert "more often than strategy 'kept' says" in message
    assert "until the backward" in message and "calls=" not in message
    (note,) = report.notes
    assert note.startswith("the layout is 'kept' on fsdp=8; if the program was compiled for another strategy")
    check_facts(note, "repeated-gather", "options")


def repeat_gathers(text, suffix):
    """Write every gather of the layer loops a second time, as XLA's rematerialization does with what it recomputes."""
    lines = []
    for line in text.splitlines():
        lines.append(line)
        if " all-gather-start(" in line and "jfsdp.gather.layers" in line and not line.startswith("ENTRY"):
            lines.append(re.sub(r"^(\s+)%([\w.\-]+) =", rf"\1%\2{suffix} =", line))
    return "\n".join(lines)


@pytest.mark.parametrize(("suffix", "cause"), [(".remat", "XLA's rematerialization"), (".again", "calls=")])
def test_gathers_that_run_again_are_named(suffix, cause):
    text, layout = clean()
    report = audit(repeat_gathers(text, suffix), layout)
    assert traps(report) == {"repeated-gather", "extra-bytes"}
    assert any(note.startswith("rematerialized:") for note in report.notes) == (suffix == ".remat")
    finding = found(report, "repeated-gather")
    wanted = sum(row.expected_bytes for row in report.ledger.rows if (row.unit, row.kind) == LAYERS_GATHERED)
    assert finding.bytes == pytest.approx(wanted, rel=3e-2), "XLA has moved a few out of the loops"
    assert cause in finding.message
    assert "unit 'layers' all-gather" in found(report, "extra-bytes").message
    if suffix == ".again":
        assert audit(repeat_gathers(text, suffix), layout, tolerance=2.0).is_ok


def test_slices_that_were_compiled_in_another_order_are_named():
    """Every layer's weights read forwards in the backward; see jax-ml/jax#46231."""
    text, layout = clean()
    stride = r'"byte_offset":"\d+","byte_stride":"-(\d+)"'
    text, num_slices = re.subn(stride, r'"byte_offset":"0","byte_stride":"\1"', text)
    report = audit(text, layout)
    assert num_slices and "wrong-slice" in traps(report)
    check_facts(found(report, "wrong-slice").message, "3", "2", "bf16", "46231")


def test_activations_that_move_are_named():
    text, layout = clean()
    lines = text.splitlines()
    place = next(i for i, line in enumerate(lines) if line.startswith("ENTRY")) + 1
    moved = (
        "  %all-to-all.99 = bf16[8,512,1031]{2,1,0} all-to-all(%fusion.1), replica_groups={{0,1,2,3,4,5,6,7}}, "
        'metadata={op_name="jit(_step)/jvp(moe)/dispatch"}'
    )
    argument = "  %fusion.1 = bf16[8,512,1031]{2,1,0} iota(), iota_dimension=0"
    report = audit("\n".join([*lines[:place], argument, moved, *lines[place:]]), layout)
    finding = found(report, "unknown")
    assert finding.bytes == 2 * 8 * 512 * 1031 * 7 / 8
    assert finding.source == "jit(_step)/jvp(moe)/dispatch"
    assert "all-to-all" in finding.message
    assert "bf16[8, 512, 1031]" in finding.message


def test_a_program_without_named_arguments_says_what_was_not_looked_for():
    text, layout = clean()
    report = audit(text.replace('op_name="state.', 'op_name="args.'), layout)
    assert report.is_ok
    assert "were not checked" in report.notes[0]


def test_fewer_bytes_than_theory_are_a_note_and_no_finding():
    text, layout = clean()
    report = audit(text, layout, spec=spec_of(layout, accumulate=2))
    assert report.is_ok
    assert "fewer bytes than theory" in report.notes[0]


def test_a_layout_of_another_mesh_is_refused():
    text, _ = clean()
    other = jfsdp.fully_shard(programs.job().model, mesh=make_abstract_mesh({"fsdp": 64}), units=programs.job().units)
    with refusing("8", "fsdp=64", "64"):
        audit(text, other.layout)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("nothing\nlike it", "no line begins with 'HloModule'"),
        ("HloModule jit_step, num_partitions=8\n\nENTRY %main {\n}\n", "is not scheduled"),
        ("no/such/file.hlo.txt", "no/such/file.hlo.txt: no such file"),
    ],
)
def test_what_is_no_scheduled_program_is_refused(text, message):
    with pytest.raises(ValueError, match=message):
        audit(text, clean()[1])
    with pytest.raises(TypeError, match="int is neither a compiled program"):
        audit(3, clean()[1])
