"""The memory of a step: XLA's texts are read to the byte, and the peak of real steps has a name for every part."""

import functools
import pathlib
import re
import types

import jax
import jax.numpy as jnp
import optax
import pytest

import jfsdp
from jfsdp.plan.cluster.compile import compile_step
from jfsdp.plan.hlo.flow import Flow
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.memory import buffer_assignment
from jfsdp.plan.memory import peak as memory
from jfsdp.plan.memory.classify import user_line
from jfsdp.train.state_bytes import account
from jfsdp.trainer.job import find_job
from jfsdp_models.losses import next_token_loss  # pyright: ignore[reportMissingImports]
from tests import hlo


@pytest.fixture(autouse=True, scope="module")
def _lines_of_source():
    """The programs of other tests have none (tests/conftest.py); here buffers are named by them."""
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


LIVE_RANGES = """HloLiveRange (max 4):
  InstructionSequence:
    0:param.1
    1:wide
    2:next
    3:last
  BufferLiveRange:
    param.1{}:0-3
    wide{}:1-2
    next{0}:2-3
    last{1,0}:3-3
  Live ranges at 2 (peak):
    wide{}: 600 bytes (cumulative: 600 bytes)
"""

ASSIGNMENT = """BufferAssignment:
allocation 0: size 100, parameter 3, shape |f32[25]| at ShapeIndex {}, maybe-live-out:
 value: <1 param.1 @0> (size=100,offset=0): f32[25]{0}
allocation 1: size 8, thread-local:
 value: <2 add.1 @0> (size=8,offset=0): f32[2]{0}
allocation 2: size 1000, preallocated-temp:
 value: <3 wide{} @0> (size=600,offset=0): bf16[300]{0}
 value: <4 next{0} @0> (size=300,offset=600): (f32[3]{0}, f32[4]{0})
 value: <5 last{1,0} (phi) @0> (size=400,offset=600): u8[400]{0}
allocation 3: size 50, color 5, page 0, preallocated-temp:

Total bytes used: 1158
"""


def moment_of(*values):
    """The peak of values given as (offset, bytes, first step, last step)."""
    made = [
        buffer_assignment.Value(f"v{i}", (), offset, size, "u8[1]") for i, (offset, size, _, _) in enumerate(values)
    ]
    ranges = {(f"v{i}", ()): (start, end) for i, (_, _, start, end) in enumerate(values)}
    heap = buffer_assignment.Allocation(1000, None, True, False, False, False, tuple(made))
    return buffer_assignment.find_peak([heap], ranges)


def test_readers_take_every_form_of_a_line():
    assert buffer_assignment.read_schedule(LIVE_RANGES) == {0: "param.1", 1: "wide", 2: "next", 3: "last"}
    assert buffer_assignment.read_live_ranges(LIVE_RANGES) == {
        ("param.1", ()): (0, 3),
        ("wide", ()): (1, 2),
        ("next", (0,)): (2, 3),
        ("last", (1, 0)): (3, 3),
    }
    argument, thread_local, heap, host = buffer_assignment.read_allocations(ASSIGNMENT)
    assert (argument.parameter, argument.is_temp, argument.num_bytes) == (3, False, 100)
    assert thread_local.is_thread_local and host.is_host and heap.is_temp and not heap.is_host
    assert [(v.name, v.index, v.offset, v.num_bytes) for v in heap.values] == [
        ("wide", (), 0, 600),
        ("next", (0,), 600, 300),
        ("last", (1, 0), 600, 400),
    ]
    assert [v.is_table for v in heap.values] == [False, True, False]
    assert (heap.values[0].dtype, heap.values[0].dims) == ("bf16", (300,))


def test_a_line_that_has_changed_is_refused_and_not_skipped():
    with pytest.raises(ValueError, match="its format has changed"):
        buffer_assignment.read_allocations(ASSIGNMENT.replace("offset=600", "at=600"))


def test_what_a_step_reads_and_what_it_writes_are_in_memory_together():
    moment = moment_of((0, 500, 0, 2), (500, 400, 2, 3))
    assert (moment.step, moment.num_bytes) == (2, 900)


def test_bytes_that_values_share_count_once():
    moment = moment_of((0, 500, 0, 3), (0, 500, 1, 2), (100, 50, 2, 2), (450, 100, 1, 2))
    assert moment.num_bytes == 550
    assert sum(size for _, size in moment.covered) == 550


def test_the_fullest_step_is_found_where_shared_bytes_mislead():
    # Step 1 has more bytes of values, step 5 more bytes of memory.
    moment = moment_of((0, 400, 1, 1), (10, 390, 1, 1), (0, 500, 5, 5))
    assert (moment.step, moment.num_bytes) == (5, 500)


FLOW = """HloModule m, is_scheduled=true

%body (p: (s32[], f32[8], f32[2,8])) -> (s32[], f32[8], f32[2,8]) {
  %p = (s32[], f32[8], f32[2,8]) parameter(0)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[8] get-tuple-element(%p), index=1
  %w = f32[2,8] get-tuple-element(%p), index=2
  %y = f32[8] custom-call(%x, %w), custom_call_target="mix"
  ROOT %out = (s32[], f32[8], f32[2,8]) tuple(%i, %y, %w)
}

%cond (q: (s32[], f32[8], f32[2,8])) -> pred[] {
  %q = (s32[], f32[8], f32[2,8]) parameter(0)
  ROOT %more = pred[] custom-call(%q), custom_call_target="more"
}

ENTRY %main (a: f32[8], b: f32[1,8], c: s32[]) -> f32[8] {
  %a = f32[8] parameter(0), metadata={op_name="batch['x']"}
  %b = f32[1,8] parameter(1), metadata={op_name="state.params['w']"}
  %c = s32[] parameter(2)
  %start = (f32[1,8], f32[2,8]) all-gather-start(%b), dimensions={0}
  %done = f32[2,8] all-gather-done(%start)
  %init = (s32[], f32[8], f32[2,8]) tuple(%c, %a, %done)
  %loop = (s32[], f32[8], f32[2,8]) while(%init), condition=%cond, body=%body
  ROOT %result = f32[8] get-tuple-element(%loop), index=1
}
"""


def test_flow_follows_values_through_gathers_and_loops():
    flow = Flow(parse_module(FLOW))
    weight, changed = flow.origin("loop", (2,)), flow.origin("result")
    assert (weight[0].name, weight[1]) == ("start", (1,))
    assert changed[0].name == "y"
    assert flow.depends_on(weight) == 0b10 | flow.gathered_bit
    assert flow.depends_on(changed) & 0b11 == 0b11
    after = flow.destination(flow.by_name["done"])
    assert after is not None and (after[0].name, after[1]) == ("loop", (2,))


@functools.cache
def step_memory(strategy="full_shard", offload=False):
    """Compile two layers of Llama-3-8B for 8 H100 and break its memory down."""
    job = find_job("llama-8b").with_config(num_layers=2, attention="cudnn")
    policy = jfsdp.OffloadPolicy(opt_state=True) if offload else None
    model = jfsdp.fully_shard(
        job.model,
        mesh=jfsdp.make_mesh(devices=hlo.h100s(1), fsdp=8),
        strategy=strategy,
        units=job.units,
        mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype=jnp.bfloat16),
        offload_policy=policy,
    )
    tx = optax.adamw(1e-3)
    state = model.abstract_state(tx)
    lowered = model.train_step(next_token_loss, tx, max_grad_norm=1.0, program="xla").lower(state, job.batch(8, 2048))
    compiled = compile_step(lowered, {})
    found, stats = memory.breakdown(compiled, parse_module(compiled.text), model.layout), compiled.memory_stats
    return found, stats, account(state), model.layout


def test_the_parts_add_up_to_the_peak_that_xla_states():
    found, stats, _, _ = step_memory()
    assert found.peak_bytes == stats.peak_memory_in_bytes == sum(found.parts.values())
    assert set(found.parts) == set(memory.PARTS)
    for part in set(memory.PARTS) - {"unattributed"}:
        assert found.parts[part] == sum(buffer.num_bytes for buffer in found.buffers if buffer.part == part), part
    held = stats.argument_size_in_bytes + stats.output_size_in_bytes - stats.alias_size_in_bytes
    assert found.allocated_bytes == pytest.approx(held + stats.temp_size_in_bytes, abs=4096)


def test_the_state_at_rest_is_what_the_layout_accounts_for():
    found, _, counted, _ = step_memory()
    assert found.parts["parameters"] == counted.params
    assert found.parts["optimizer"] == counted.opt
    assert found.parts["work"] == counted.work == 0
    names = {part: {one.name for one in found.buffers if one.part == part} for part in ("parameters", "gradients")}
    assert all(name.startswith("state.params[") for name in names["parameters"]), "no gradient is called a parameter"
    assert not any(name.startswith("state.") for name in names["gradients"]), "nor a parameter a gradient"


def test_the_logits_of_a_large_vocabulary_are_a_part_of_the_peak():
    found, _, _, _ = step_memory()
    assert found.parts["logits"] == 2048 * 128256 * 2


@pytest.mark.proof
def test_weights_that_are_kept_show_up_as_gathered():
    kept, resharded = step_memory("SHARD_GRAD_OP")[0], step_memory()[0]
    layout = step_memory()[3]
    layers = sum(layout.stage_bytes(leaf, "use") for leaf in layout.leaves if leaf.unit == "layers")
    assert kept.parts["gathered"] - resharded.parts["gathered"] >= 0.98 * layers
    names = {buffer.name for buffer in kept.buffers if buffer.part == "gathered"}
    assert "layers.mlp.up_proj.kernel" in names


def test_offloaded_states_are_counted_for_the_host_and_not_for_the_device():
    found, stats, counted, _ = step_memory(offload=True)
    assert found.host_bytes >= counted.host_opt > 0
    assert found.parts["optimizer"] == counted.opt
    assert found.peak_bytes == pytest.approx(stats.peak_memory_in_bytes - counted.host_opt, abs=4096)


def test_the_largest_buffers_have_names_of_the_model():
    found, _, _, _ = step_memory()
    names = [name for _, name, _, _ in memory.largest_buffers(found, 6)]
    assert any(name == "lm_head.kernel" for name in names)
    assert any(re.search(r"models/losses\.py:\d+$", name) for name in names)
    sizes = [size for *_, size in memory.largest_buffers(found)]
    assert sizes == sorted(sizes, reverse=True)
    assert "at " in found.moment


@pytest.mark.parametrize(
    ("files", "wanted"),
    [
        (["site-packages/jax/lax.py", "nets.py", "jfsdp/engine/unit.py", "train.py"], "nets.py"),
        (["jfsdp/modules/nnx.py", "nets.py", "site-packages/flax/nnx.py", "jfsdp/engine/unit.py"], "nets.py"),
        (["jfsdp/engine/pipeline/run.py", "jfsdp/cli/plan.py", "<frozen runpy>"], "jfsdp/engine/pipeline/run.py"),
        (["nets.py", "train.py"], "nets.py"),
    ],
)
def test_the_line_of_an_operation_is_the_model_s_and_not_that_of_who_calls_jfsdp(files, wanted):
    home = str(pathlib.Path(jfsdp.__file__).parent.parent)
    stack = [f"{home}/{file}:7" if file.startswith("jfsdp") else f"/x/{file}:7" for file in files]
    found = user_line(types.SimpleNamespace(stack=tuple(stack), source=stack[0]))  # type: ignore[arg-type]
    assert found.endswith(f"/{wanted}:7")


def test_a_dump_that_is_not_there_says_how_to_make_one(tmp_path):
    with pytest.raises(ValueError, match="xla_dump_to"):
        buffer_assignment.read_dump(tmp_path, "jit__step")
