"""Collectives of small hand-written schedules in every printed form."""

import pytest

from jfsdp.engine.movements import wire_bytes
from jfsdp.plan.hlo import parse as plan_hlo
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.device_groups import read_group

EIGHT = "replica_groups=mesh['fsdp'=8] {'fsdp'}"


def module(*lines, before="", parameters="%x = bf16[8,4]{1,0} parameter(0)"):
    """A scheduled module of 8 partitions whose entry holds these lines."""
    body = "\n".join(f"  {line}" for line in (parameters, *lines, "ROOT %end = () tuple()"))
    return plan_hlo.parse_module(
        f"HloModule jit_step, is_scheduled=true, num_partitions=8\n\n{before}\n"
        f"ENTRY %main (x: bf16[8,4]) -> () {{\n{body}\n}}\n"
    )


def only(*lines, **text):
    (found,) = find_collectives(module(*lines, **text), 8)
    return found


WRAPPED = """\
%wrapped (p: bf16[8,4]) -> bf16[64,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  ROOT %all-gather.9 = bf16[64,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
}
"""

# Name: the lines, and lines before the entry. All gather bf16[8,4] into bf16[64,4] over 8 devices.
GATHERS = {
    "plain (0.12)": ([f"%ag = bf16[64,4]{{1,0}} all-gather(%x), channel_id=1, {EIGHT}, dimensions={{0}}"], ""),
    "start with one operand (0.10)": (
        [
            f"%s = (bf16[8,4]{{1,0}}, bf16[64,4]{{1,0}}) all-gather-start(%x), {EIGHT}, dimensions={{0}}",
            "%d = bf16[64,4]{1,0} all-gather-done(%s)",
        ],
        "",
    ),
    "start with nested operands (0.12)": (
        [
            f"%s = ((bf16[8,4]{{1,0}}), bf16[64,4]{{1,0}}) all-gather-start(%x), {EIGHT}, dimensions={{0}}",
            "%d = bf16[64,4]{1,0} all-gather-done(%s)",
        ],
        "",
    ),
    "async wrapper": (
        [
            "%s = ((bf16[8,4]{1,0}), bf16[64,4]{1,0}, s32[]) async-start(%x), calls=%wrapped",
            "%u = ((bf16[8,4]{1,0}), bf16[64,4]{1,0}, s32[]) async-update(%s)",
            "%d = bf16[64,4]{1,0} async-done(%u)",
        ],
        WRAPPED,
    ),
    "part of a fusion": (["%f = bf16[64,4]{1,0} fusion(%x), kind=kCustom, calls=%wrapped"], WRAPPED),
}


@pytest.mark.parametrize("form", GATHERS)
def test_every_form_of_one_gather_moves_the_same_bytes(form):
    lines, before = GATHERS[form]
    found = only(*lines, before=before)
    assert (found.kind, found.dtype, found.group_size) == ("all-gather", "bf16", 8)
    assert [part.dims for part in found.parts] == [(64, 4)]
    assert found.wire_bytes == found.total_bytes == 64 * 4 * 2 * 7 / 8
    assert (found.start, found.done) == (1, len(lines)), "from its first to its last line"
    assert (found.start != found.done) == (len(lines) > 1)


def test_a_combined_gather_counts_each_part_by_its_type():
    found = only(
        "%y = f32[2]{0} parameter(1)",
        f"%s = ((bf16[8,4]{{1,0}}, f32[2]{{0}}), (bf16[64,4]{{1,0}}, f32[16]{{0}})) all-gather-start(%x, %y), {EIGHT}",
        "%d = (bf16[64,4]{1,0}, f32[16]{0}) all-gather-done(%s)",
    )
    assert found.wire_by_dtype == {"bf16": 512 * 7 / 8, "f32": 64 * 7 / 8}
    assert (found.dtype, found.num_bytes, found.wire_bytes) == ("bf16", 576, 576 * 7 / 8)


@pytest.mark.parametrize(
    ("line", "full", "sent"),
    [
        ("((bf16[8,4]{1,0}), bf16[1,4]{1,0}) reduce-scatter-start(%x)", (8, 4), 64 * 7 / 8),
        ("bf16[1,4]{1,0} reduce-scatter(%x)", (8, 4), 64 * 7 / 8),
        ("bf16[8,4]{1,0} all-reduce-start(%x)", (8, 4), 2 * 64 * 7 / 8),  # 0.10: the result alone
        ("((bf16[8,4]{1,0}), bf16[8,4]{1,0}) all-reduce-start(%x)", (8, 4), 2 * 64 * 7 / 8),  # 0.12
        ("bf16[8,4]{1,0} all-reduce(%x)", (8, 4), 2 * 64 * 7 / 8),
        ("bf16[8,4]{1,0} all-to-all(%x)", (8, 4), 64 * 7 / 8),
    ],
)
def test_bytes_follow_the_kind(line, full, sent):
    found = only(f"%c = {line}, {EIGHT}, dimensions={{0}}, to_apply=%end")
    assert [part.dims for part in found.parts] == [full]
    assert found.wire_bytes == sent


def test_a_permute_sends_all_of_it_among_those_its_pairs_join():
    found = only(
        "%p = (bf16[8,4]{1,0}, bf16[8,4]{1,0}, u32[], u32[]) collective-permute-start(%x), "
        "source_target_pairs={{0,2},{2,4},{4,0},{1,3},{3,1}}"
    )
    assert (found.kind, found.group, found.wire_bytes) == ("collective-permute", (0, 2, 4), 64)


def test_a_start_marked_synchronous_is_synchronous():
    found = only(
        f"%s = (bf16[8,4]{{1,0}}, bf16[64,4]{{1,0}}) all-gather-start(%x), {EIGHT}, "
        'backend_config={"collective_backend_config":{"is_sync":true}}',
        "%d = bf16[64,4]{1,0} all-gather-done(%s)",
    )
    assert found.start == found.done


def test_collectives_grouped_in_one_wrapper_are_each_listed():
    found = find_collectives(
        module("%s = ((bf16[8,4]{1,0}), bf16[64,4]{1,0}) async-start(%x), calls=%wrapped", before=GROUPED), 8
    )
    assert [one.name for one in found] == ["s/all-gather.9", "s/all-reduce.3"]


GROUPED = """\
%wrapped (p: bf16[8,4]) -> bf16[8,4] {
  %p = bf16[8,4]{1,0} parameter(0)
  %all-gather.9 = bf16[64,4]{1,0} all-gather(%p), replica_groups={{0,1,2,3,4,5,6,7}}, dimensions={0}
  ROOT %all-reduce.3 = bf16[8,4]{1,0} all-reduce(%p), replica_groups={}
}
"""


def test_loops_multiply_and_are_marked():
    loop = f"""\
%body (p: bf16[8,4]) -> bf16[8,4] {{
  %p = bf16[8,4]{{1,0}} parameter(0)
  %ag = bf16[64,4]{{1,0}} all-gather(%p), {EIGHT}, dimensions={{0}}, metadata={{op_name="jit(step)/while/body/gather"}}
  ROOT %c = bf16[8,4]{{1,0}} copy(%p)
}}

%cond (q: bf16[8,4]) -> pred[] {{
  %q = bf16[8,4]{{1,0}} parameter(0)
  ROOT %t = pred[] constant(true)
}}
"""
    found = only(
        '%w = bf16[8,4]{1,0} while(%x), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"32"}}',
        before=loop,
    )
    assert (found.count, found.in_loop, found.computation) == (32, True, "body")
    assert found.total_bytes == 32 * found.wire_bytes
    assert found.op_name == "jit(step)/while/body/gather"


@pytest.mark.parametrize(
    ("text", "first"),
    [
        ("replica_groups={}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups={{0,4},{1,5},{2,6},{3,7}}", (0, 4)),
        ("replica_groups=[2,4]<=[8]", (0, 1, 2, 3)),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", (0, 4)),
        ("replica_groups=[2,4]<=[2,2,2]T(1,0,2)", (0, 1, 4, 5)),
        ("replica_groups=mesh['a'=2,'b'=4] {'b'}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}", (0, 4)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b'}", (0, 1, 2, 3, 4, 5, 6, 7)),
        ("replica_groups=mesh['a'=2,'b'=2,'c'=2] {'c','a'}", (0, 4, 1, 5)),
        ("replica_groups=mesh['a.b'=8] {'a.b':(2)4}", (0, 1, 2, 3)),
        ("replica_groups=mesh['a'=8] {'a':(1)2}", (0, 4)),
        ("replica_groups=mesh['a'=8] {'a':(2)2}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {'a','b':(1)2}", (0, 2, 4, 6)),
        ("replica_groups=mesh['a'=2,'b'=1,'c'=4], device_ids=([4,2]T(1,0)) {'a'}", (0, 1)),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=(0,2,1,3) {'b'}", (0, 2)),
        ("replica_groups=mesh['a'=2,'b'=4] {}", (0,)),
    ],
)
def test_groups_are_read_in_every_printed_form(text, first):
    assert read_group(f"channel_id=1, {text}, dimensions={{0}}", 8) == first


def test_groups_in_an_unknown_form_are_an_error():
    with pytest.raises(ValueError, match="unknown form"):
        read_group("replica_groups=<8 of them>", 8)


def test_a_group_of_one_sends_nothing():
    for kind in ("all-gather", "reduce-scatter", "all-reduce", "all-to-all", "collective-permute"):
        assert wire_bytes(kind, 100, 1) == 0
