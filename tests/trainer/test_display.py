"""What a run prints: the facts of its start, a live line on a terminal, and what takes long in a log."""

import sys

from jfsdp.trainer.display import Display, format_facts


def test_a_terminal_has_one_live_line_that_lines_for_good_replace(capsys, monkeypatch):
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", "20")
    display = Display(is_writer=True)
    display.show("step 1/9  " + "x" * 80)
    display.wait("compiling", 1.9)
    display.wait("compiling", 2.0)
    display.say("step 9/9")
    shown = capsys.readouterr().out.split("\r\x1b[2K")
    assert shown == ["", "step 1/9  " + "x" * 9, "compiling: 2 s", "step 9/9\n"]


def test_a_log_has_no_live_line_and_says_of_a_wait_when_its_time_doubles(capsys):
    display = Display(is_writer=True)
    display.show("step 1/9")
    for seconds in range(130):
        display.wait("compiling", seconds)
    display.wait("step 2", 0)
    display.wait("step 2", 30)
    display.wait("saving", 30)
    found = capsys.readouterr().out.splitlines()
    assert found == [f"{what}: {seconds} s so far" for what, seconds in _TOLD]


_TOLD = [("compiling", 30), ("compiling", 60), ("compiling", 120), ("saving", 30)]


def test_other_processes_print_nothing(capsys):
    display = Display(is_writer=False)
    display.say("step 9/9")
    display.wait("compiling", 60)
    assert capsys.readouterr().out == ""


def test_facts_are_aligned_and_continue_where_they_began():
    facts = {"run": "runs/a", "sharding": "full_shard on fsdp=8, 8 x cpu"}
    assert format_facts(facts, 30).splitlines() == [
        "run        runs/a",
        "sharding   full_shard on",
        "           fsdp=8, 8 x cpu",
    ]
    assert format_facts(facts, None).splitlines()[1] == "sharding   full_shard on fsdp=8, 8 x cpu"
