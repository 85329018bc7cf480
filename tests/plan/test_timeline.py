"""The clock, on hand-written schedules whose answer is known; and what instructions are counted as."""

import dataclasses

import pytest

from jfsdp.plan.cluster import hardware
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.time.timeline import Rates, overlapped_share, simulate
from jfsdp.plan.time.work import Kind, Matmul, Work, num_matmuls, work_of

H100S = hardware.Cluster(hardware.find_gpu("h100"), 8)


@dataclasses.dataclass(frozen=True)
class Clockwork:
    """Every matmul takes 10 seconds, everything else that computes 1, and every collective `wire`."""

    wire: float = 6.0
    overlap_slowdown: float = 1.0
    host: float = 4.0
    documents_per_row: int = 1

    def work_s(self, work):
        return {Kind.NONE: 0.0, Kind.MATMUL: 10.0, Kind.HOST: self.host}.get(work.kind, 1.0)

    def collective_s(self, collective):
        return self.wire


DOT = "= f32[8,8]{1,0} dot(%x, %x), lhs_contracting_dims={1}, rhs_contracting_dims={0}"
COPY = "= f32[8,8]{1,0} copy(%x)"


def start(name, sync=False):
    return (
        f"%{name} = (f32[8,8]{{1,0}}, f32[64,8]{{1,0}}) all-gather-start(%x), replica_groups={{}}, dimensions={{0}}"
        + ', backend_config={"is_sync":true}' * sync
    )


def done(name):
    return f"%{name}.done = f32[64,8]{{1,0}} all-gather-done(%{name})"


def body(*lines, name="main", header="ENTRY "):
    text = "\n".join(f"  {line}" for line in ("%x = f32[8,8]{1,0} parameter(0)", *lines, "ROOT %end = () tuple()"))
    return f"{header}%{name} (x: f32[8,8]) -> () {{\n{text}\n}}\n"


def read(*computations):
    return parse_module("HloModule jit_step, is_scheduled=true\n\n" + "\n".join(computations))


def timeline(*lines, rates=None, before=()):
    module, clock = read(*before, body(*lines)), rates or Clockwork()
    return simulate(module, find_collectives(module, 8), clock)  # type: ignore[arg-type]


def loop(name, times, *lines):
    """A loop's computations, and the line that runs it."""
    condition = body("%t = pred[] constant(true)", name=f"{name}_cond", header="")
    line = f"%{name}_loop = () while(%x), condition=%{name}_cond, body=%{name}, "
    return (condition, body(*lines, name=name, header="")), line + (
        f'backend_config={{"known_trip_count":{{"n":"{times}"}}}}'
    )


def exposed(found):
    return {one.collective.name: one.exposed_s for one in found.collectives}


PLAIN = "%g = f32[64,8]{1,0} all-gather(%x), replica_groups={}, dimensions={0}"
A, B, C = f"%a {DOT}", f"%b {DOT}", f"%c {COPY}"


@pytest.mark.parametrize(
    ("lines", "wire", "wanted", "step_s"),
    [
        ((A, start("g"), done("g"), B), 6, {"g": 6}, 26),
        ((start("g", sync=True), A, done("g")), 6, {"g": 6}, 16),
        ((A, PLAIN, B), 6, {"g": 6}, 26),
        ((start("g"), A, done("g")), 6, {"g": 0}, 10),
        ((start("g"), A, C, done("g")), 14, {"g": 3}, 14),  # exposed by what is longer than the compute between
        ((start("g"), start("h"), A, done("g"), done("h")), 6, {"g": 0, "h": 2}, 12),  # no matmul is claimed twice
        ((start("g"), start("h"), done("h"), A, done("g")), 6, {"g": 6, "h": 6}, 22),  # waits for those before it
    ],
)
def test_what_no_compute_hides_is_exposed(lines, wire, wanted, step_s):
    found = timeline(*lines, rates=Clockwork(wire=wire))
    assert exposed(found) == wanted
    assert found.step_s == step_s
    assert (found.wire_s, found.exposed_s) == (wire * len(wanted), sum(wanted.values()))
    assert all(one.hidden_s + one.exposed_s == wire for one in found.collectives)
    assert found.overlapped_share is None, "no collective is in a loop"


def test_loops_multiply_compute_and_exposure():
    before, line = loop("layer", 4, start("g"), f"%a {DOT}", done("g"), start("h"), done("h"))
    found = timeline(line, f"%last {DOT}", before=before)
    assert exposed(found) == {"g": 0, "h": 6}
    assert (found.matmul_s, found.exposed_s, found.wire_s, found.step_s) == (50, 24, 48, 74)
    assert found.overlapped_share == 0.5


ATTENTION = '= (f32[8,8]{1,0}) custom-call(%x), custom_call_target="__cudnn$fmhaSoftmax"'


@pytest.mark.parametrize(
    ("line", "share"),
    [
        (DOT, 1),
        (ATTENTION, 1),
        ("= f32[8,8]{1,0} convolution(%x, %x), dim_labels=bf_io->bf", 1),
        ('= f32[8,8]{1,0} custom-call(%x), custom_call_target="__cudnn$convForward"', 1),
        ('= f32[8,8]{1,0} custom-call(%x), custom_call_target="TopK"', 0),
        (COPY, 0),
    ],
)
def test_what_multiplies_matrices_hides_the_bytes_of_a_loop(line, share):
    before, whole = loop("layer", 4, start("g"), f"%a {line}", done("g"))
    module = read(*before, body(whole))
    assert overlapped_share(module, find_collectives(module, 8)) == share


def test_a_loop_between_hides_by_what_it_runs_and_scalars_do_not_count():
    inner, line = loop("inner", 3, f"%a {DOT}")
    before, outer = loop("outer", 2, start("g"), line, done("g"), "%s = f32[8]{0} all-reduce(%x), replica_groups={}")
    module = read(*inner, *before, body(outer))
    assert num_matmuls(module, module.entry.instructions) == 6
    assert overlapped_share(module, find_collectives(module, 8)) == 1


def test_a_collective_around_a_loop_hides_only_where_the_loop_leaves_the_wire_free():
    before, line = loop("layer", 2, start("g"), f"%a {DOT}", done("g"))
    found = timeline(start("outer"), line, done("outer"), before=before, rates=Clockwork(wire=9))
    assert exposed(found) == {"outer": 7, "g": 0}, "each of the two rounds leaves it one second"
    outer = next(one for one in found.collectives if one.collective.name == "outer")
    assert outer.num_matmuls_between == 2
    assert found.step_s == 27


def test_a_matmul_under_a_collective_takes_longer():
    found = timeline(start("g"), f"%a {DOT}", done("g"), rates=Clockwork(wire=6, overlap_slowdown=1.5))
    assert found.slowdown_s == pytest.approx(2), "6 seconds beside the wire do the work of 4"
    assert found.step_s == pytest.approx(12)
    bound = timeline(start("g"), f"%a {DOT}", done("g"), rates=Clockwork(wire=20, overlap_slowdown=1.5))
    assert bound.step_s == pytest.approx(20), "a step that waits for the wire takes the time of the wire"


def test_copies_from_the_host_have_a_stream_of_their_own():
    fetch = "%f = (f32[8,8]{1,0}, f32[8,8]{1,0:S(5)}, u32[]) copy-start(%x)"
    found = timeline(fetch, start("g"), f"%a {DOT}", done("g"), "%f.done = f32[8,8]{1,0} copy-done(%f)")
    assert (found.host_s, found.host_exposed_s, found.exposed_s, found.step_s) == (4, 0, 0, 10)
    late = timeline(fetch, "%f.done = f32[8,8]{1,0} copy-done(%f)", f"%a {DOT}")
    assert (late.host_exposed_s, late.step_s) == (4, 14)


@pytest.mark.parametrize("wire", [0.0, 0.5, 3.0, 11.0, 50.0])
def test_the_parts_of_a_step_add_up_and_hidden_plus_exposed_is_the_wire(wire):
    before, line = loop("layer", 3, start("g"), start("h"), f"%a {DOT}", done("g"), f"%c {COPY}", done("h"))
    found = timeline(start("k"), f"%b {DOT}", line, done("k"), before=before, rates=Clockwork(wire, 1.35))
    assert sum(found.critical.values()) == pytest.approx(found.step_s)
    for one in found.collectives:
        assert one.hidden_s + one.exposed_s == pytest.approx(wire)
    assert max(found.compute_s, found.wire_s) <= found.step_s + 1e-9 <= found.compute_s * 1.35 + found.wire_s + 1e-8


# What instructions are counted as.

FUSED = """\
%gemm_computation (p0: bf16[8192,4096], p1: bf16[4096,14336]) -> bf16[8192,14336] {
  %p0 = bf16[8192,4096]{1,0} parameter(0)
  %p1 = bf16[4096,14336]{1,0} parameter(1)
  ROOT %dot = bf16[8192,14336]{1,0} dot(%p0, %p1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}

%slice_computation (q0: f32[32,64,8], q1: s32[]) -> f32[1,64,8] {
  %q0 = f32[32,64,8]{2,1,0} parameter(0)
  %q1 = s32[] parameter(1)
  ROOT %slice = f32[1,64,8]{2,1,0} dynamic-slice(%q0, %q1, %q1, %q1), dynamic_slice_sizes={1,64,8}
}

%update_computation (r0: f32[32,64,8], r1: f32[1,64,8], r2: s32[]) -> f32[32,64,8] {
  %r0 = f32[32,64,8]{2,1,0} parameter(0)
  %r1 = f32[1,64,8]{2,1,0} parameter(1)
  %r2 = s32[] parameter(2)
  ROOT %update = f32[32,64,8]{2,1,0} dynamic-update-slice(%r0, %r1, %r2, %r2, %r2)
}

"""
SETUP = (
    "%a = bf16[8192,4096]{1,0} parameter(1)",
    "%b = bf16[4096,14336]{1,0} parameter(2)",
    "%c = bf16[16,1024,512]{2,1,0} parameter(3)",
    "%d = bf16[16,256,512]{2,1,0} parameter(4)",
    "%stack = f32[32,64,8]{2,1,0} parameter(5)",
    "%one = f32[1,64,8]{2,1,0} parameter(6)",
    "%i = s32[] parameter(7)",
    "%q = bf16[2,1024,32,128]{3,2,1,0} parameter(8)",
)
FMHA = (
    "%w = (bf16[2,32,1024,128]{3,1,2,0}, f32[2,32,1024]{2,1,0}, u8[0]{0}) custom-call(%q, %q, %q), "
    'custom_call_target="__cudnn$fmhaSoftmax@", backend_config={"cudnn_fmha_backend_config": '
    '{"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "32", "1024", "1024"]}, '
    '"mask_type": "CAUSAL", "sliding_window_length": 0}}'
)


def work(line):
    module = read(FUSED, body(*SETUP, line))
    return work_of(module, module.entry, module.entry.by_name["w"])


def test_a_gemm_fusion_counts_the_dot_inside():
    found = work("%w = bf16[8192,14336]{1,0} fusion(%a, %b), kind=kCustom, calls=%gemm_computation")
    assert found.matmuls == (Matmul(1, 8192, 14336, 4096, "bf16"),)
    assert found.num_flops == 2 * 8192 * 14336 * 4096


def test_a_float32_dot_runs_in_tf32_unless_it_is_asked_to_be_precise():
    assert work(f"%w {DOT}").matmuls == (Matmul(1, 8, 8, 8, "tf32"),)
    assert work(f"%w {DOT}, operand_precision={{highest,highest}}").matmuls[0].dtype == "f32"


def test_causal_attention_counts_half_and_its_backward_five_halves_of_that():
    forward = work(FMHA.replace("@", ""))
    assert forward.num_flops == 2 * 2 * (2 * 32 * 1024 * 1024) * 128 / 2
    assert work(FMHA.replace("@", "Backward")).num_flops == 2.5 * forward.num_flops
    assert work(FMHA.replace("@", "").replace("CAUSAL", "NO_MASK")).num_flops == 2 * forward.num_flops
    assert (forward.kind, forward.is_backward, forward.dtype) == (Kind.ATTENTION, False, "bf16")


def test_documents_divide_the_attention_of_packed_rows_alone():
    packed = FMHA.replace("@", "").replace("CAUSAL", "PADDING_CAUSAL")
    whole = work(packed)
    assert whole.num_flops == work(FMHA.replace("@", "")).num_flops, "one document is the whole row"
    assert whole.with_documents(1) == whole
    assert whole.with_documents(8).num_flops == whole.num_flops / 8
    assert work(FMHA.replace("@", "")).with_documents(8) == work(FMHA.replace("@", ""))
    window = work(packed.replace('length": 0', 'length": 128'))
    assert window.num_flops == whole.num_flops / 4
    assert window.with_documents(2) == window, "documents of four windows"
    assert window.with_documents(16).num_flops == whole.num_flops / 16


@pytest.mark.parametrize(
    "line",
    [
        "%w = f32[1,64,8]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%slice_computation",
        "%w = ((f32[32,64,8]{2,1,0}, s32[]), f32[1,64,8]{2,1,0}, u32[]) fusion-start(%stack, %i), "
        "kind=kLoop, calls=%slice_computation",
        "%w = f32[32,64,8]{2,1,0} fusion(%stack, %one, %i), kind=kLoop, calls=%update_computation",
    ],
)
def test_a_slice_of_a_stack_touches_one_layer(line):
    assert work(line).num_bytes == 2 * 4 * 64 * 8 + 4


# Rates.


def gather(group):
    listed = ",".join(map(str, group))
    line = f"%g = bf16[65536,8192]{{1,0}} all-gather(%x), replica_groups={{{{{listed}}}}}, dimensions={{0}}"
    (found,) = find_collectives(read(body(line)), 64)
    return Rates(H100S).collective_s(found)


def test_a_gather_of_a_gib_takes_its_bytes_by_the_bus_bandwidth_of_its_group():
    assert gather(range(8)) == pytest.approx(7 / 8 * 2**30 / 388e9, rel=0.02), "measured: 344 to 402 GB/s"
    assert gather(range(64)) == pytest.approx(63 / 64 * 2**30 / (8 * 50e9 * 0.85), rel=0.05)
    assert gather(range(0, 64, 8)) == pytest.approx(7 / 8 * 2**30 / (50e9 * 0.85), rel=0.05), "one adapter per node"


def test_a_square_matmul_of_4096_takes_what_was_measured():
    size = Matmul(1, 4096, 4096, 4096, "bf16")
    quiet = Rates(H100S, sustained=1.0, spread=0.0)
    seconds = quiet.work_s(Work(Kind.MATMUL, size.num_flops, 3 * 2 * 4096**2, (size,)))
    assert size.num_flops / seconds == pytest.approx(780e12, rel=0.03)
