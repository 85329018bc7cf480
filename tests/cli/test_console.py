"""Long work says what it is about where no terminal shows it."""

import time

from jfsdp.cli import console


def test_long_work_says_once_what_is_under_way_and_short_work_nothing(monkeypatch, capsys):
    monkeypatch.setattr(console, "SILENT_S", 0.2)
    with console.progress(quiet=False) as tell:
        tell("sharding")
        tell("lowering")
        time.sleep(1.0)
        tell("compiling")
    shown = capsys.readouterr()
    assert shown.out == "" and len(shown.err.splitlines()) == 1 and "lowering" in shown.err
    with console.progress(quiet=True) as tell:
        tell("sharding")
        time.sleep(0.5)
    with console.progress(quiet=False) as tell:
        tell("sharding")
    time.sleep(0.5)
    assert capsys.readouterr().err == ""
