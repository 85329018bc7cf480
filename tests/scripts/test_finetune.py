"""What `make finetune` trains on. The whole of it is run by hand: it takes minutes, and PEFT."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "finetune.py"


def load_script(monkeypatch):
    spec = importlib.util.spec_from_file_location("finetune_script", SCRIPT)
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "finetune_script", script)  # where its dataclass looks for names
    spec.loader.exec_module(script)
    return script


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"steps": 0}, "steps=0 must be a number from 1"),
        ({"base_steps": -1}, "base_steps=-1 must be"),
        ({"held_out": 1}, "held_out=1 must be a number from 2"),
        ({"run_dir": Path(__file__)}, "exists already; name a new one"),
        ({"base": Path("nothere")}, "--base nothere: is not a directory; name the directory of a run"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_made(changes, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script = load_script(monkeypatch)
    with pytest.raises(ValueError, match=words):
        script.main(script.FinetuneConfig(**changes))
    assert not list(tmp_path.iterdir())


def test_functions_of_the_standard_library_become_short_pairs_and_are_trained_or_held_out(tmp_path, monkeypatch):
    script = load_script(monkeypatch)
    train, held_out, prompts = script.write_records(tmp_path, 10)
    kept, out = ([json.loads(line) for line in path.read_text().splitlines()] for path in (train, held_out))
    assert len(kept) > 1000 and abs(len(out) - len(kept) / 9) < 2
    assert not {one["prompt"] for one in kept} & {one["prompt"] for one in out}
    for one in kept + out:
        assert len((one["prompt"] + one["completion"]).encode()) <= 250
        assert '"""' not in one["prompt"] and one["completion"].strip()
    assert len(set(prompts)) == 3 and set(prompts) <= {one["prompt"] for one in out}
