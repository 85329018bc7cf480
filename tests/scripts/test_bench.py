"""`scripts/bench.py` times the same program on both sides, says what each takes, and refuses what it cannot time."""

import importlib
import json
from pathlib import Path

import pytest

from jfsdp import extras
from tests.refusals import check_facts

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["--model", "llama-tiny", "--model-config", "num_layers=1", "dim=64", "ffn_dim=96", "--seq-len", "16"]
TORCH = "torch-fsdp2"
SHORT = ["--rounds", "1", "--steps", "2", "--warmup", "1", "--param-dtype", "none"]


@pytest.fixture
def bench(monkeypatch):
    """The script as a module. It starts no JAX: this process has."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return importlib.import_module("bench")


@pytest.fixture
def result(bench, capsys):
    def run(*args):
        status = bench.main([*TINY, *args, "--json"])
        out, err = capsys.readouterr()
        assert status == 0, err
        return json.loads(out)["settings"]

    return run


def test_jfsdp_and_pytorch_compute_the_same_losses(result):
    names = ["manual", "torch-fsdp2"]
    settings = result(*SHORT, "--settings", *names, "--remat", "full")
    assert list(settings) == names
    for own in settings.values():
        assert len(own["losses"][0]) == 4 and len(own["seconds"][0]) == 2
        assert own["losses"][0] == pytest.approx(settings["manual"]["losses"][0], rel=1e-5)
        assert own["first_step_s"] > 0 < own["step_s"] and own["memory"]["resident"] > 2**27
    assert settings["torch-fsdp2"]["loss_difference"]["relative"] < 1e-5
    assert settings["manual"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert settings["manual"]["memory"]["compiled"] > 0


@pytest.mark.proof
def test_every_setting_has_a_row(result):
    names = ["plain", "xla", "manual", "flat", "torch-fsdp2-compile"]
    settings = result(*SHORT, "--settings", *names)
    assert [settings[name]["ratio"]["median"] > 0 for name in names] == [True] * len(names)


WORKER = """
import json, sys, time
from pathlib import Path
spec, rank = json.loads(Path(sys.argv[1]).read_text()), sys.argv[2]
loss, is_loser = (2.0, False) if spec["name"] == "xla" else (2.1, True)
if is_loser and rank == str(spec["world"] - 1):
    {}
answer = {{"losses": [loss] * 4, "seconds": [0.1] * 4, "memory": {{"resident": 1}}}}
Path(spec["case"]["answer"] + "." + rank).write_text(json.dumps(answer))
"""


@pytest.fixture
def workers(bench, tmp_path, monkeypatch):
    """Let contenders be processes that compute nothing; the text is what the last process of a loser does."""

    def write(text="pass"):
        (tmp_path / "worker.py").write_text(WORKER.format(text))
        monkeypatch.setattr("benchmark.race.WORKER", tmp_path / "worker.py")

    return write


def test_contenders_with_other_losses_lose_the_race(bench, workers, capsys):
    workers()
    assert bench.main([*TINY, *SHORT, "--rounds", "2", "--settings", "xla", "manual", "--json"]) == 1
    out, err = capsys.readouterr()
    settings = json.loads(out)["settings"]
    assert settings["xla"]["losses"] == [[2.0] * 4] * 2 and settings["manual"]["losses"] == [[2.1] * 4] * 2
    assert settings["manual"]["ratio"]["median"] == 1.0 and len(settings["manual"]["seconds"]) == 2
    assert "error: manual: the loss of step" in err and "--loss-tolerance 0.0001" in err


@pytest.mark.parametrize(
    ("line", "timeout", "message"),
    [
        ("raise RuntimeError('broken')", "60", "torch-fsdp2: process 1 ended with status 1"),
        ("time.sleep(60)", "1", "torch-fsdp2: process 1 exceeded --timeout 1 s"),
    ],
)
def test_a_process_that_dies_or_hangs_is_named(bench, workers, capsys, monkeypatch, line, timeout, message):
    workers(line)
    monkeypatch.setattr("benchmark.case.write_for_torch", lambda *_: {})
    assert bench.main([*TINY, *SHORT, "--settings", "torch-fsdp2", "--timeout", timeout]) == 1
    assert message in capsys.readouterr().err


@pytest.fixture
def refuse(bench, capsys):
    """Run the script in this process, where it must end before anything starts; return its one line."""

    def run(*args):
        assert bench.main(args) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


KNOWN = "plain, xla, manual, flat, torch-fsdp2, torch-fsdp2-compile"


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        ([*TINY, "--settings", "fast"], ["--settings fast", KNOWN]),
        ([*TINY, "--settings", "xla", "xla"], ["--settings", "once"]),
        ([*TINY, "--rounds", "0"], ["--rounds 0"]),
        ([*TINY, "--devices", "4096"], ["--devices 4096"]),
        ([*TINY, "--param-dtype", "int8"], ["int8"]),
        ([*TINY, "--mesh", "fsdp=3"], ["fsdp=3", "3 devices", "2"]),
        ([*TINY, "--settings", TORCH, "--accumulate", "2"], ["--accumulate 2", TORCH]),
        ([*TINY, "--settings", TORCH, "--remat", "dots"], ["--remat dots", TORCH]),
        ([*TINY, "--settings", TORCH, "--param-dtype", "float16"], ["--param-dtype float16", TORCH]),
        (["--factory", "examples.vit:job", "--settings", TORCH], [TORCH, "vit", "pretrained"]),
        (["--model", "gpt2", "--settings", TORCH], [TORCH, "--model-config dropout=0"]),
    ],
)
def test_what_cannot_be_timed_or_run_by_pytorch_the_same_way_is_named(refuse, args, facts):
    check_facts(refuse(*args), *facts)


def test_a_missing_library_is_named_with_the_extra_that_has_it(refuse, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "transformers" else object())
    check_facts(refuse(*TINY, "--settings", TORCH), "transformers", ".[bench]")
