"""Plans of TPUs: slices and their links, what XLA:TPU writes, and small steps compiled by libtpu where it is there."""

import dataclasses
import importlib.util
import json

import pytest

from jfsdp.cli import main
from jfsdp.plan import hlo as plan_hlo
from jfsdp.plan.buffers import read_allocations
from jfsdp.plan.collectives import find_collectives
from jfsdp.plan.compile import OutOfMemory
from jfsdp.plan.jobs import plan_job
from jfsdp.plan.target import PlanUnavailable
from jfsdp.plan.timeline import overlapped_share, simulate
from jfsdp.plan.tpus import ICI_EFFICIENCY, TPUS, Slice, TpuRates, find_tpu, parse_slice
from jfsdp.plan.work import Kind, Work, work_of
from jfsdp.train.options import StepOptions

needs_libtpu = pytest.mark.skipif(not importlib.util.find_spec("libtpu"), reason="libtpu is not installed")

# What libtpu 0.0.42.1 writes of a gather that it hides, cut to what is read: started, carried on by a fusion that
# multiplies, ended; then a small gather as an all-reduce of shards among zeros, and the sum of a gradient.
GROUP = "channel_id={}, replica_groups=mesh['a'=4] {{'a'}}, frontend_attributes={{chain_id=\"3\"}}"
CYCLES = 'backend_config={"window_config":{"estimated_cycles":"1500"}}'
PIECES = f"""\
HloModule jit_step, is_scheduled=true, num_partitions=4

%start (p: bf16[16,64]) -> (bf16[16,64], bf16[64,64]) {{
  %p = bf16[16,64]{{1,0:T(8,128)(2,1)S(1)}} parameter(0)
  %all-gather.1 = bf16[64,64]{{1,0:T(8,128)(2,1)}} all-gather(%p), {GROUP.format(5)}, dimensions={{0}}
  ROOT %custom-call.1 = (bf16[16,64], bf16[64,64]) custom-call(%all-gather.1), custom_call_target="AsyncCollectiveStart"
}}

%go_on (q: bf16[16,64], r: bf16[8,64], s: bf16[64,32]) -> (bf16[8,32], bf16[64,64]) {{
  %q = bf16[16,64]{{1,0}} parameter(0)
  %r = bf16[8,64]{{1,0}} parameter(1)
  %s = bf16[64,32]{{1,0}} parameter(2)
  %convolution.1 = bf16[8,32]{{1,0}} convolution(%r, %s), dim_labels=bf_io->bf
  %all-gather.2 = bf16[64,64]{{1,0}} all-gather(%q), {GROUP.format(5)}, dimensions={{0}}
  ROOT %tuple.1 = (bf16[8,32]{{1,0}}, bf16[64,64]{{1,0}}) tuple(%convolution.1, %all-gather.2)
}}

%done (t: bf16[16,64]) -> bf16[64,64] {{
  %t = bf16[16,64]{{1,0}} parameter(0)
  %all-gather.3 = bf16[64,64]{{1,0}} all-gather(%t), {GROUP.format(5)}, dimensions={{0}}
  ROOT %custom-call.2 = bf16[64,64]{{1,0}} custom-call(%all-gather.3), custom_call_target="AsyncCollectiveDone"
}}

%placed (z: bf16[64,8], y: bf16[16,8], i: s32[]) -> bf16[64,8] {{
  %z = bf16[64,8]{{1,0}} parameter(0)
  %y = bf16[16,8]{{1,0}} parameter(1)
  %i = s32[] parameter(2)
  ROOT %dynamic-update-slice.1 = bf16[64,8]{{1,0}} dynamic-update-slice(%z, %y, %i, %i)
}}

ENTRY %main (a: bf16[16,64], b: bf16[8,64], c: bf16[64,32], d: bf16[16,8], e: s32[]) -> bf16[64,64] {{
  %a = bf16[16,64]{{1,0:T(8,128)(2,1)}} parameter(0)
  %b = bf16[8,64]{{1,0}} parameter(1)
  %c = bf16[64,32]{{1,0}} parameter(2)
  %d = bf16[16,8]{{1,0}} parameter(3)
  %e = s32[] parameter(4)
  %zero = bf16[] constant(0)
  %zeros = bf16[64,8]{{1,0}} broadcast(%zero), dimensions={{}}
  %copy-start.1 = (bf16[64,32]{{1,0:S(1)}}, bf16[64,32]{{1,0}}, u32[]{{:S(2)}}) copy-start(%c)
  %async-collective-start = (bf16[16,64]{{1,0}}, bf16[64,64]{{1,0}}) fusion(%a), kind=kCustom, calls=%start
  %copy-done.1 = bf16[64,32]{{1,0:S(1)}} copy-done(%copy-start.1)
  %fusion.1 = (bf16[8,32]{{1,0}}, bf16[64,64]{{1,0}}) fusion(%a, %b, %copy-done.1), kind=kOutput, calls=%go_on, {CYCLES}
  %async-collective-done = bf16[64,64]{{1,0}} fusion(%a), kind=kCustom, calls=%done
  %placed.1 = bf16[64,8]{{1,0}} fusion(%zeros, %d, %e), kind=kLoop, calls=%placed
  %all-reduce.1 = bf16[64,8]{{1,0}} all-reduce(%placed.1), {GROUP.format(6)}, to_apply=%add
  ROOT %all-reduce.2 = bf16[64,64]{{1,0}} all-reduce(%async-collective-done), {GROUP.format(7)}, to_apply=%add
}}
"""


def test_a_gather_in_several_fusions_counts_once_and_hides_behind_what_carries_it_on():
    module = plan_hlo.parse_module(PIECES)
    gather, small, gradient = find_collectives(module, 4)
    assert (gather.kind, gather.total_bytes) == ("all-gather", 64 * 64 * 2 * 3 / 4)
    lines = [line.name for line in module.entry.instructions]
    assert (lines[gather.start], lines[gather.done]) == ("async-collective-start", "async-collective-done")
    assert (small.is_gather, small.total_bytes) == (True, 2 * 64 * 8 * 2 * 3 / 4)
    assert (gradient.kind, gradient.is_gather, gradient.is_async) == ("all-reduce", False, False)
    assert overlapped_share(module, [dataclasses.replace(gather, in_loop=True)]) == 1.0


def test_a_second_run_of_the_same_channel_counts_again():
    lines = [line for line in PIECES.splitlines() if "%async-collective-" in line and "fusion(%a)" in line]
    again = [line.replace("-start =", "-start.2 =").replace("-done =", "-done.2 =") for line in lines]
    module = plan_hlo.parse_module(PIECES.replace(lines[1], "\n".join([lines[1], *again])))
    assert [one.kind for one in find_collectives(module, 4)] == ["all-gather", "all-gather", "all-reduce", "all-reduce"]


def test_cycles_are_read_and_prefetches_cost_nothing():
    module = plan_hlo.parse_module(PIECES)
    works = {line.name: work_of(module, module.entry, line) for line in module.entry.instructions}
    assert works["fusion.1"] == Work(Kind.MATMUL, cycles=1500)
    assert works["copy-start.1"].kind is works["async-collective-start"].kind is Kind.NONE
    rates = TpuRates(parse_slice("v5e:2x2"), parse_slice("v5e:2x2").places())
    clock = simulate(module, find_collectives(module, 4), rates)
    assert rates.work_s(works["fusion.1"]) == 1500 / 1.5e9
    assert clock.matmul_s == 1500 / 1.5e9
    assert clock.step_s == pytest.approx(clock.compute_s + clock.exposed_s)


def test_links_count_by_the_dims_that_a_group_spans_and_a_ring_has_two():
    large, link = 2**40, 50e9 * ICI_EFFICIENCY
    whole, line = parse_slice("v5e:16x16"), parse_slice("v5e:8x8")
    assert whole.wraps == (True, True) and line.wraps == (False, False)
    assert whole.group_bandwidth(range(256), large) == pytest.approx(4 * link, rel=1e-3)
    assert whole.group_bandwidth(range(16), large) == pytest.approx(2 * link, rel=1e-3)
    assert line.group_bandwidth(range(64), large) == pytest.approx(2 * link, rel=1e-3)
    assert line.group_bandwidth(range(0, 64, 8), large) == pytest.approx(link, rel=1e-3)
    assert parse_slice("v5p:4x4x4").group_bandwidth(range(64), large) == pytest.approx(
        6 * 100e9 * ICI_EFFICIENCY, rel=1e-3
    )
    with pytest.raises(ValueError, match="are not all in a slice of 64"):
        line.group_bandwidth([64], large)


@pytest.mark.parametrize("tpu", TPUS, ids=lambda tpu: tpu.name)
def test_every_tpu_has_its_facts(tpu):
    assert tpu.source and tpu.memory_bytes > 2**33 and tpu.peak_flops("bf16") > 1e14
    assert tpu.peak_flops("tf32") == tpu.peak_flops("bfloat16")  # JAX's default precision
    assert all(find_tpu(name) is tpu for name in (tpu.name, f"TPU {tpu.name.upper()}", *tpu.aliases))
    with pytest.raises(ValueError, match=f"{tpu.name}: the peak for int4 is not known"):
        tpu.peak_flops("int4")
    with pytest.raises(ValueError, match="dims of 1 or more; give for example"):
        Slice(tpu, (4,))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v9:4x4", r"no TPU is called 'v9'; there are .*v5e.*, and a slice is written as KIND:AxB"),
        ("v5e", "'v5e': a TPU slice is written as KIND:AxB .*KIND is one of v5e, v5p, v6e"),
        ("v5e:4by4", "is written as KIND:AxB"),
        ("v5e:4x4x4", "v5e:4x4x4: a slice of v5e has 2 dims"),
        ("v5p:10000x10000x100", "v5p:10000x10000x100: 10,000,000,000 devices.* at most 262,144"),
        ("v5e:0x4", "v5e:0x4: a slice of v5e has 2 dims of 1 or more"),
    ],
)
def test_a_slice_in_another_form_is_refused_with_the_form(text, message):
    with pytest.raises(ValueError, match=message):
        parse_slice(text)


def test_allocations_say_in_which_memory_they_lie():
    lines = ("size 8, color 1, preallocated-temp:", "size 9, parameter 2, shape |f32[2]| at ShapeIndex {}:")
    text = "\n".join(f"allocation {number}: {line}" for number, line in enumerate(lines))
    vmem, argument = read_allocations(f"BufferAssignment:\n{text}\n")
    assert (vmem.color, vmem.is_temp, vmem.is_host) == (1, True, False)
    assert (argument.color, argument.parameter) == (0, 2)


TINY = ("--model", "llama-tiny", "--seq-len", "128", "--tpu", "v5e:2x4")


def test_without_libtpu_a_plan_says_what_to_install_and_what_is_known(monkeypatch, capsys):
    monkeypatch.setattr("jfsdp.plan.target._version", lambda name: None if name == "libtpu" else "0.10.2")
    assert main(["plan", *TINY]) == 1
    captured = capsys.readouterr()
    assert "pip install 'jfsdp[tpu]'" in captured.err and "--analytic" in captured.err
    assert captured.out.startswith("ANALYTIC, nothing was compiled: full_shard on 8 x TPU v5e")
    with pytest.raises(PlanUnavailable, match="libtpu"):
        plan_job(StepOptions(model="llama-tiny"), parse_slice("v5e:2x4"))


def test_what_the_compiler_refuses_for_memory_does_not_fit(monkeypatch, capsys):
    def refuse(*args, **kwargs):
        raise OutOfMemory("Ran out of memory on HBM")

    monkeypatch.setattr("jfsdp.cli.plan.load_compiler", lambda cluster: None)
    monkeypatch.setattr("jfsdp.plan.jobs.plan_job", refuse)
    assert main(["plan", *TINY]) == 3
    assert "DOES NOT FIT on 8 x TPU v5e (v5e:2x4). The compiler says: Ran out of" in capsys.readouterr().out
    assert main(["plan", *TINY, "--json"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found["fits"] is False and found["cluster"]["topology"] == "v5e:2x4"


@needs_libtpu
def test_a_small_step_is_planned_on_a_slice(capsys):
    """On two rows of chips XLA:TPU makes reduce-scatters; padded to whole tiles, and the shards moved back."""
    assert main(["plan", *TINY, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["cluster"] == {"tpu": "v5e", "topology": "v5e:2x4", "num_devices": 8}
    assert {row["kind"] for row in found["collectives"] if row["what"] == "gradients"} == {"reduce-scatter"}
    assert {one["kind"] for one in found["unknown_collectives"]} <= {"collective-permute"}
    assert 1 <= found["wire_ratio"] < 1.1
    assert sum(found["memory"].values()) == found["needed_bytes"]
    assert 0 <= found["memory"]["unattributed"] <= 0.05 * found["peak_bytes"]
    assert found["state_bytes"] < found["peak_bytes"] <= found["needed_bytes"] < found["limit_bytes"]
    assert found["step_s"] == pytest.approx(sum(found["critical"].values()))
    assert found["tokens_per_s_per_tpu"] > 0 and 0 < found["mfu"] < 1


NARROW = {"dim": 1024, "ffn_dim": 4096, "num_heads": 8, "num_kv_heads": 8, "vocab_size": 32768, "num_layers": 4}


@needs_libtpu
@pytest.mark.proof
@pytest.mark.parametrize(("topology", "factor"), [("v5e:2x4", 1), ("v5e:4x4", 2), ("v5p:4x4x4", 2), ("v6e:4x4", 2)])
def test_gathers_send_what_theory_says_and_sums_over_two_dims_twice_that(topology, factor):
    config = tuple(f"{name}={value}" for name, value in NARROW.items())
    plan = plan_job(StepOptions(model="llama-8b", model_config=config, seq_len=512), parse_slice(topology))
    theory, sent = (dict.fromkeys(("parameters", "gradients"), 0.0) for _ in range(2))
    for row in plan.ledger.rows:
        if row.what in theory:
            theory[row.what] += row.expected_bytes
            sent[row.what] += row.measured_bytes
    assert sent["gradients"] == pytest.approx(factor * theory["gradients"], rel=0.01)
    assert 1 <= sent["parameters"] / theory["parameters"] < 1.1  # what is small is gathered by an all-reduce
    assert {one.kind for one in plan.ledger.unknown} <= {"collective-permute"}
    assert plan.fits and plan.reserve_bytes == 0
