"""The launches of a step, compared with its HLO by another reader; and the difference of two plans."""

import dataclasses
import json
import math
from typing import Any

import jax
import pytest

from jfsdp.cli import main
from jfsdp.cli.report import print_plan
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.diff import differences
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.jobs import plan_job
from jfsdp.plan.launches import Launch, Loop, count_launches, overlapped_share, read_launches, walk
from jfsdp.trainer.options import StepOptions
from tests import hlo
from tests.cli.refused import refused
from tests.refusals import check_facts, refuses

BASE = {"model": "llama-tiny", "seq_len": 64}
CASES = {
    "manual": {},
    "xla": {"program": "xla"},
    "offload": {"offload": ("opt_state",), "strategy": "zero2"},
    "tensor": {"mesh": (("fsdp", -1), ("tensor", 2))},
    "ddp": {"strategy": "ddp"},
    "zero1": {"strategy": "zero1", "accumulate": 2, "batch_per_device": 2},
    "hybrid": {"mesh": (("replica", 2), ("fsdp", -1))},
    "list": {"model_config": (("stacked", False),)},
}
TINY = ("plan", "--model", "llama-tiny", "--seq-len", "64", "--gpu", "h100")


def planned(name="manual") -> Any:
    return plan_job(StepOptions(**BASE | CASES[name]), Cluster(find_gpu("h100")), launches=True)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def plan():
    if jax.__version_info__ < (0, 12):
        pytest.skip("this JAX shows no thunks")
    return planned()


def reread(plan, text=None, drop=0, share=None):
    """Read a plan's launches again, with another HLO, without some of its collectives, or with another share."""
    found = [timed.collective for timed in plan.timeline.collectives][drop:]
    share = plan.timeline.overlapped_share if share is None else share
    return read_launches(plan.compiled.thunks, parse_module(text or plan.compiled.text), found, share)


@pytest.mark.parametrize("name", ["manual", *(pytest.param(name, marks=pytest.mark.proof) for name in [*CASES][1:])])
def test_thunks_and_hlo_describe_the_same_step(plan, name):
    plan = planned(name) if name != "manual" else plan
    launches, counts = plan.launches, count_launches(plan.launches.items)
    sent, numbers = {}, {}
    for one in (timed.collective for timed in plan.timeline.collectives):
        sent[one.kind] = sent.get(one.kind, 0.0) + one.total_bytes
        numbers[one.kind] = numbers.get(one.kind, 0) + one.count
    assert {kind: counts[kind]["count"] for kind in numbers} == numbers
    assert {kind: row["wire_bytes"] for kind, row in counts.items() if row["wire_bytes"]} == pytest.approx(sent)
    assert overlapped_share(launches.items) == pytest.approx(plan.timeline.overlapped_share)
    assert launches.disagreements == ()
    assert counts["gemm"]["count"] == sum(num for num, _ in plan.products.values())
    into, out = hlo.host_copies(plan.compiled.text)
    copied = [counts.get(f"{way} copy", {"bytes": 0})["bytes"] for way in ("host-to-device", "device-to-host")]
    assert copied == [into, out] and bool(out) == (name == "offload")
    assert sum(launches.buffer_bytes) == pytest.approx(plan.needed_bytes + plan.memory.host_bytes, rel=0.02)


def test_every_collective_has_a_stream_and_a_wait_and_loops_have_the_trip_counts_of_hlo(plan):
    items = plan.launches.items
    known = {
        one.name: one.trip_count
        for c in parse_module(plan.compiled.text).computations.values()
        for one in c.instructions
        if one.opcode == "while"
    }
    assert {loop.name: loop.times for loop in items if isinstance(loop, Loop)} == known and len(known) == 2
    for block in (items, *(loop.body for loop in items if isinstance(loop, Loop))):
        begun = [str(item.token) for item in block if isinstance(item, Launch) and item.stream]
        waited = [str(item.token) for item in block if isinstance(item, Launch) and item.kind == "wait"]
        assert begun and sorted(begun) == sorted(waited)
    gathers = [one for one, *_ in walk(items) if one.kind == "all-gather"]
    assert {(one.dtype, len(one.group), one.stream) for one in gathers} == {("bf16", 8, "communication 0")}
    # A kernel of XLA, which only a ThunkProto describes.
    own = [one for one, *_ in walk(items) if one.kind == "all-reduce" and one.stream == "compute 0"]
    assert [(one.dtype, len(one.group)) for one in own] == [("bf16", 8)]
    forward = next(item for item in items if isinstance(item, Loop))
    (gather,) = [item for item in forward.body if isinstance(item, Launch) and item.kind == "all-gather"]
    place = forward.body.index(Launch("wait", "async_done", token=gather.token))
    carried = sum(item.num_bytes for item in forward.body[place:] if isinstance(item, Launch) and item.kind == "copy")
    assert gather.num_bytes / 2 < carried < gather.num_bytes  # XLA copies what is not gathered in place


def test_a_disagreement_is_listed_and_printed(plan, capsys):
    (line,) = reread(plan, drop=1).disagreements
    assert line.startswith("all-gather: ")
    (line,) = reread(plan, share=0.5).disagreements
    assert line == "overlapped share: 1.0 in the thunks, 0.5 in HLO"
    shown = dataclasses.replace(plan, launches=reread(plan, share=0.5))
    print_plan(shown, StepOptions(**BASE), (), {}, verbose=False)  # type: ignore[arg-type]
    assert line in capsys.readouterr().out


def test_a_loop_that_is_not_found_in_hlo_has_no_trip_count_and_no_totals(plan):
    name = next(one.condition[0].name for one in plan.launches.items if isinstance(one, Loop))
    found = reread(plan, plan.compiled.text.replace(f"{name} ", "unknown "))
    first = next(item for item in found.items if isinstance(item, Loop))
    assert (first.name, first.times) == ("", None)
    assert math.isnan(count_launches(found.items)["kernel"]["count"]) and found.disagreements


def test_the_list_is_folded_unless_verbose(plan, capsys):
    lines = {}
    for verbose in (False, True):
        print_plan(plan, StepOptions(**BASE), (), {}, verbose=verbose)  # type: ignore[arg-type]
        lines[verbose] = capsys.readouterr().out.partition("launches per step")[2].partition("\n\n")[0].splitlines()
    assert len(lines[True]) > len(plan.launches.items) > 3 * len(lines[False])
    total = plan.launches.to_dict()["total"]
    assert total == sum(times for one, times, _ in walk(plan.launches.items) if one.kind != "wait") > 500
    names = {one.name for one, *_ in walk(plan.launches.items) if one.kind == "gemm"}
    assert all(any(name in line for line in lines[True]) for name in names)


def test_an_older_jax_is_refused_by_name_before_any_work(monkeypatch, capsys):
    monkeypatch.setattr(jax, "__version_info__", (0, 10, 2))
    monkeypatch.setattr(jax, "__version__", "0.10.2")
    check_facts(refused(capsys, *TINY, "--launches"), "--launches", "0.12", "0.10.2")
    refuses(planned, "0.12", "0.10.2")


def test_a_plan_compared_with_itself_differs_in_nothing(tmp_path, capsys, plan, monkeypatch):
    """What a command compiles is compared with the fixture, which was compiled before."""
    path = tmp_path / "old.json"
    assert main([*TINY, "--launches", "--json"]) == 0
    path.write_text(capsys.readouterr().out)
    old = json.loads(path.read_text())
    assert old["versions"]["jax"] == jax.__version__ and old["launches"]["disagreements"] == []
    monkeypatch.setattr("jfsdp.plan.jobs.plan_job", lambda *args, **options: plan)
    assert main([*TINY, "--launches", "--diff", str(path)]) == 0
    assert capsys.readouterr().out.strip() == "no differences"
    old["launches"], old["compile_s"] = None, 1e9
    old["versions"]["jax"], old["memory"]["logits"] = "0.11.1", 2 * old["memory"]["logits"]
    path.write_text(json.dumps(old))
    assert main([*TINY, "--diff", str(path), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["differences"]
    assert [(one["what"], one["old"]) for one in found] == [
        ("memory: logits", old["memory"]["logits"]),
        ("versions: jax", "0.11.1"),
    ]
    assert main([*TINY, "--diff", str(path)]) == 0
    check_facts(capsys.readouterr().out, "memory: logits", "0.5000", "0.11.1", jax.__version__)


def test_differences_are_named_by_their_place_in_the_plan(plan):
    old = plan.to_dict()
    assert differences(json.loads(json.dumps(old)), old) == []
    new = json.loads(json.dumps(old)) | {"step_s": old["step_s"] * (1 + 1e-7), "compile_s": 0, "timeline": []}
    row = next(row for row in new["collectives"] if row["what"] == "gradients" and row["unit"] == "layers")
    row["count"] += 1
    new["options"]["xla_gpu_new"] = True
    new["launches"]["per_step"]["kernel"]["count"] += 5
    changed = differences(old | {"options": {}}, new | {"options": {"xla_gpu_new": True}})
    assert [(one["what"], one["old"] is None) for one in changed] == [
        ("collectives: layers gradients reduce-scatter bf16 ['fsdp'] 8: count", False),
        ("launches: per_step: kernel: count", False),
        ("options: xla_gpu_new", True),
    ]
    assert differences(old, new | {"launches": None}) and not differences(old, old | {"launches": None})


@pytest.mark.parametrize("text", [None, "not JSON", "[1]", '{"analytic": true, "job": {}}', '{"differences": []}'])
def test_a_file_that_is_no_plan_is_refused(tmp_path, capsys, text):
    path = tmp_path / "old.json"
    if text is not None:
        path.write_text(text)
    line = refused(capsys, *TINY, "--diff", path)
    assert str(path) in line and "`jfsdp plan --json`" in line


@pytest.mark.parametrize("more", ["--launches --analytic", "--diff x.json --search", "--launches --inference"])
def test_they_need_a_plan_of_one_program(capsys, more):
    assert more.split()[0] in refused(capsys, *TINY, *more.split())
