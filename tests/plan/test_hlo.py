"""The reader of scheduled HLO, on small texts in every form that JAX 0.10 and 0.12 print."""

import pytest

from jfsdp.plan.hlo import parse, trip_counts
from jfsdp.plan.hlo.parse import Shape
from tests.refusals import refuses

SMALL = """\
HloModule jit_step, is_scheduled=true, entry_computation_layout={(f32[4]{0})->f32[4]{0}}, num_partitions=8

FileNames
1 "models/llama.py"
2 "jfsdp/engine/auto.py"

FunctionNames
1 "Block.__call__"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}
2 {file_name_id=2 function_name_id=1 line=61 end_line=61 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}
2 {file_location_id=2 parent_frame_id=2}

%fused_add (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  ROOT %add.1 = f32[4]{0} add(%p, %p)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %x = f32[4]{0} parameter(0), metadata={op_name="state['w']"}
  %constant.7 = s32[] constant(32)
  %gemm = (bf16[8,4]{1,0:T(8,128)(2,1)S(5)}, s8[0]{0}, /*index=2*/u32[]) custom-call(%x, /*index=1*/%constant.7), \
custom_call_target="__cublas$gemm", metadata={op_name="jit(step)/dot (a)" stack_frame_id=2}, \
backend_config={"a":"calls=%no"}
  %old = f32[4]{0} copy(f32[4]{0:T(256)} %x), metadata={op_name="copy" source_file="models/old.py" source_line=7}
  ROOT %fusion = f32[4]{0} fusion(%x), kind=kLoop, calls=%fused_add, metadata={stack_frame_id=1}
}
"""


@pytest.fixture
def small():
    return parse.parse_module(SMALL)


def test_the_module_says_its_name_partitions_and_entry(small):
    assert (small.name, small.num_partitions, small.entry.name) == ("jit_step", 8, "main")
    assert list(small.computations) == ["fused_add", "main"]


def test_tuples_layouts_and_comments_are_read_through(small):
    gemm = small.entry.by_name["gemm"]
    assert gemm.shapes == (Shape("bf16", (8, 4), "host"), Shape("s8", (0,)), Shape("u32", ()))
    assert [shape.num_bytes for shape in gemm.shapes] == [64, 0, 4]
    assert gemm.operands == ("x", "constant.7")
    assert gemm.called == (), "text inside backend_config is no call"
    assert (gemm.opcode, gemm.index) == ("custom-call", 2)
    assert gemm.op_name == "jit(step)/dot (a)"


def test_operands_printed_with_their_types_are_read(small):
    assert small.entry.by_name["old"].operands == ("x",)


def test_parents_printed_without_the_offset_are_understood():
    plain = SMALL.replace("parent_frame_id=1}", "parent_frame_id=0}").replace(
        "parent_frame_id=2}", "parent_frame_id=1}"
    )
    assert parse.parse_module(plain).entry.by_name["gemm"].stack == ("jfsdp/engine/auto.py:61", "models/llama.py:12")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("module @jit_step { stablehlo.add }", "StableHLO"),
        ("HloModule jit_step, entry_computation_layout={}", "not scheduled"),
        ("HloModule jit_step, is_scheduled=true\n", "ENTRY"),
        ("HloModule a, is_scheduled=true\nENTRY %m (x: f32[]) -> f32[] {\n  %x := f32[]\n}\n", "another version"),
        ("HloModule a, is_scheduled=true\nENTRY %m (x: f32[]) -> f32[] {\n  %y = f32[] add(%x, %\n}\n", "cut off"),
    ],
)
def test_other_text_is_refused_with_what_was_missing(text, message):
    with pytest.raises(ValueError, match=message):
        parse.parse_module(text)


NESTED = """\
HloModule nested, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%yes (p.1: f32[8]) -> f32[8] {
  ROOT %p.1 = f32[8]{0} parameter(0)
}

%no (p.2: f32[8]) -> f32[8] {
  ROOT %p.2 = f32[8]{0} parameter(0)
}

%wrapped (p.3: f32[8]) -> f32[] {
  %p.3 = f32[8]{0} parameter(0)
  %zero = f32[] constant(0)
  ROOT %reduce = f32[] reduce(%p.3, %zero), dimensions={0}, to_apply=%add
}

%inner (p.4: f32[8]) -> f32[8] {
  %p.4 = f32[8]{0} parameter(0)
  %start = ((f32[8]{0}), f32[], s32[]) async-start(%p.4), calls=%wrapped
  %done = f32[] async-done(%start)
  %which = s32[] constant(0)
  ROOT %cond = f32[8]{0} conditional(%which, %p.4, %p.4), branch_computations={%yes, %no}
}

%always (p.5: f32[8]) -> pred[] {
  %p.5 = f32[8]{0} parameter(0)
  ROOT %true = pred[] constant(true)
}

%outer (p.6: f32[8]) -> f32[8] {
  %p.6 = f32[8]{0} parameter(0)
  ROOT %while.1 = f32[8]{0} while(%p.6), condition=%always, body=%inner, backend_config={"known_trip_count":{"n":"3"}}
}

ENTRY %main (x: f32[8]) -> f32[8] {
  %x = f32[8]{0} parameter(0)
  %call = f32[8]{0} call(%x), to_apply=%yes
  ROOT %while.2 = f32[8]{0} while(%call), condition=%always, body=%outer, backend_config={"known_trip_count":{"n":"4"}}
}
"""


def test_walk_multiplies_loops_and_enters_calls_branches_and_async_bodies():
    module = parse.parse_module(NESTED)
    times = {
        name: (found.times, found.in_loop)
        for found in trip_counts.executions(module)
        for name in [found.computation.name]
    }
    assert times == {
        "main": (1, False),
        "yes": (1 + 12, True),
        "outer": (4, True),
        "inner": (12, True),
        "wrapped": (12, True),
        "no": (12, True),
        "always": (5 + 4 * 4, True),
    }
    assert sum(count for _, found, count in trip_counts.walk(module) if found.opcode == "reduce") == 12


def test_a_loop_of_which_xla_does_not_say_how_often_it_runs_is_an_error():
    module = parse.parse_module(NESTED.replace("known_trip_count", "none"))
    refuses(lambda: trip_counts.executions(module), "while.2", "a loop of fixed length")


PIPELINED = """HloModule jit_step, is_scheduled=true

%below (p.1: s32[]) -> pred[] {
  %p.1 = s32[] parameter(0)
  %end = s32[] constant(5)
  ROOT %compare = pred[] compare(%p.1, %end), direction=LT
}

%condition (p.2: (s32[], f32[8])) -> pred[] {
  %p.2 = (s32[], f32[8]{0}) parameter(0)
  %counter = s32[] get-tuple-element(%p.2), index=0
  ROOT %fusion = pred[] fusion(%counter), kind=kLoop, calls=%below
}

%body (p.3: (s32[], f32[8])) -> (s32[], f32[8]) {
  ROOT %p.3 = (s32[], f32[8]{0}) parameter(0)
}

ENTRY %main (x: f32[8]) -> (s32[], f32[8]) {
  %x = f32[8]{0} parameter(0)
  %zero = s32[] constant(2)
  %copied = s32[] copy(%zero)
  %tuple = (s32[], f32[8]{0}) tuple(%copied, %x)
  ROOT %while.3 = (s32[], f32[8]{0}) while(%tuple), condition=%condition, body=%body, CONFIG
}
""".replace("CONFIG", 'backend_config={"known_induction_variable":{"tuple_index":"0"}}')


def test_a_pipelined_loop_runs_from_its_first_to_its_last_count():
    """XLA pipelines the microbatches of program xla, and then states only which value counts."""

    def runs(text):
        return {found.computation.name: found.times for found in trip_counts.executions(parse.parse_module(text))}

    assert runs(PIPELINED) == {"main": 1, "body": 3, "condition": 4}
    for other in ("direction=GT", "direction=NE"):
        refuses(lambda other=other: runs(PIPELINED.replace("direction=LT", other)), "while.3", "a loop of fixed length")
    unknown = PIPELINED.replace("%end = s32[] constant(5)", "%end = s32[] copy(%p.1)")
    refuses(lambda: runs(unknown), "while.3", "a loop of fixed length")
