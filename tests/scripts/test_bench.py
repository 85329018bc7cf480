"""`scripts/bench.py` times the same program on both sides, says what each takes, and refuses what it cannot time."""

import importlib
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from jfsdp import extras
from tests.scripts.command import environment as training_environment

SCRIPTS = Path(__file__).parents[2] / "scripts"
TINY = ["--model", "llama-tiny", "--model-config", "num_layers=1", "dim=64", "ffn_dim=96", "--seq-len", "16"]
SHORT = ["--rounds", "1", "--steps", "2", "--warmup", "1", "--param-dtype", "none"]


def run(*args, model=TINY, scripts=SCRIPTS, **environment):
    command = [sys.executable, "-W", "ignore", str(scripts / "bench.py"), *model, *args]
    variables = training_environment() | environment
    return subprocess.run(command, capture_output=True, text=True, env=variables)


def result(*args, **how):
    done = run(*args, "--json", **how)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.proof
def test_jfsdp_and_pytorch_compute_the_same_losses_in_processes_of_their_own(tmp_path):
    names = ["manual", "torch-ddp"]
    found = result(*SHORT, "--settings", *names, "--remat", "full", "--plot", str(tmp_path / "a.svg"))
    settings = found["settings"]
    assert list(settings) == names
    for own in settings.values():
        assert len(own["losses"][0]) == 4 and len(own["seconds"][0]) == 2
        assert own["losses"][0] == pytest.approx(settings["manual"]["losses"][0], rel=1e-5)
    assert settings["torch-ddp"]["ratio"]["low"] is None  # of one round
    assert (tmp_path / "a.svg").read_text().startswith("<?xml")


def test_jfsdp_and_pytorch_compute_the_same_losses_in_single_steps_in_turn_and_are_profiled():
    names = ["manual", "torch-fsdp2"]
    found = result(*SHORT, "--together", "--rounds", "3", "--settings", *names, "--remat", "full", "--profile")
    settings = found["settings"]
    for own in settings.values():
        assert len(own["seconds"]) == 3 and len(own["losses"][0]) == 5
        assert own["losses"][0] == pytest.approx(settings["manual"]["losses"][0], rel=1e-5)
        assert own["first_step_s"] > own["step_s"] > 0 and own["memory"]["resident"] > 2**27
    assert settings["torch-fsdp2"]["loss_difference"]["relative"] < 1e-5
    assert settings["manual"]["ratio"] == {"median": 1.0, "low": 1.0, "high": 1.0}
    assert settings["manual"]["memory"]["compiled"] > 0 and settings["manual"]["compile_s"] > 0
    for profile in found["profile"].values():
        kinds = profile["kinds"]
        assert kinds["matmul"] > 0 and kinds["collectives"] > 0 and kinds["optimizer and clipping"] > 0
        assert profile["step_ms"] > 0 and profile["longest"]


@pytest.mark.proof
def test_every_setting_has_a_row():
    names = ["plain", "xla", "manual", "flat", "auto", "watched", "torch", "torch-fsdp2-compile"]
    settings = result(*SHORT, "--settings", *names)["settings"]
    assert [settings[name]["ratio"]["median"] > 0 for name in names] == [True] * len(names)


@pytest.mark.proof
@pytest.mark.parametrize("dtypes", [["bfloat16"], ["bfloat16", "--reduce-dtype", "float32"]])
def test_gpt2_in_bfloat16_computes_the_same(dtypes):
    gpt2 = ["--model", "gpt2-tiny", "--model-config", "num_layers=1", "--seq-len", "16"]
    names = ["manual", "torch-fsdp2", "torch-ddp"]
    settings = result(*SHORT[:-1], *dtypes, "--settings", *names, model=gpt2)["settings"]
    assert all(settings[name]["loss_difference"]["relative"] < 2e-2 for name in names[1:])


@pytest.mark.proof
def test_contenders_of_jfsdp_run_in_the_processes_of_a_launcher():
    jfsdp = str(Path(sys.executable).with_name("jfsdp"))
    command = [jfsdp, "launch", "--nproc", "2", str(SCRIPTS / "bench.py"), *TINY, "--rounds", "3"]
    variables = os.environ | {"XLA_FLAGS": ""}
    done = subprocess.run([*command, "--settings", "auto", "watched"], capture_output=True, text=True, env=variables)
    assert done.returncode == 0, done.stderr
    assert "watched" in done.stdout and "on 2 x cpu" in done.stdout


def changed(tmp_path, file, old, new):
    """Copy the scripts with one line of one file changed."""
    for source in [*SCRIPTS.glob("bench*.py"), *(SCRIPTS / "benchmark").glob("*.py")]:
        target = tmp_path / source.relative_to(SCRIPTS)
        target.parent.mkdir(exist_ok=True)
        text = source.read_text()
        assert source.name != file or text.count(old) == 1
        target.write_text(text.replace(old, new) if source.name == file else text)
    return tmp_path


@pytest.mark.proof
def test_a_contender_with_other_weights_loses_the_race(tmp_path):
    load = "    return model.train()"
    other = "    model.lm_head.weight.data *= 1.01 if 'torch-ddp' in case['rendezvous'] else 1.0"
    scripts = changed(tmp_path, "torch_side.py", load, f"{other}\n{load}")
    done = run(*SHORT, "--settings", "torch", "torch-ddp", scripts=scripts)
    assert done.returncode == 1
    assert "error: torch-ddp: the loss of step" in done.stderr and "--loss-tolerance 0.0001" in done.stderr


HANG = "torch-ddp: process 0, 1 did not answer within --timeout 4 s (asked for: first)"


@pytest.mark.proof
def test_a_process_that_hangs_where_others_wait_for_it_is_an_error_and_no_hang(tmp_path):
    begin = '        self._case, self._is_cuda, self._world = case, case["platform"] == "cuda", world\n'
    scripts = changed(tmp_path, "torch_side.py", begin, f"{begin}        if rank == 1:\n            time.sleep(60)\n")
    done = run(*SHORT, "--settings", "torch-ddp", "--timeout", "4", scripts=scripts)
    assert done.returncode == 1
    assert HANG in done.stderr


@pytest.fixture
def bench(monkeypatch):
    """The script as a module. It starts no JAX: this process has."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    return importlib.import_module("bench")


WORKER = """
import json, sys, time
path, rank = sys.argv[1:]
loss = 2.0 if json.load(open(path))["name"] == "xla" else 2.1
for line in sys.stdin:
    asked = json.loads(line)
    count = asked.get("count", 1)
    if rank == "1" or asked["do"] == "memory" and loss > 2:
        {}
    memory = {{"resident": 1, "compiled": None}}
    print(json.dumps(memory if asked["do"] == "memory" else {{"losses": [loss] * count, "seconds": [0.1] * count}}))
    sys.stdout.flush()
"""


@pytest.fixture
def workers(bench, tmp_path, monkeypatch):
    """Let contenders be processes that compute nothing; the text is what a process 1, or a loser at its end, does."""

    def write(text="pass"):
        (tmp_path / "worker.py").write_text(WORKER.format(text))
        monkeypatch.setattr("benchmark.processes.WORKER", tmp_path / "worker.py")

    return write


def test_contenders_with_other_losses_lose_the_race(bench, workers, capsys):
    workers()
    assert bench.main([*TINY, *SHORT, "--rounds", "2", "--settings", "xla", "manual", "--json"]) == 1
    out, err = capsys.readouterr()
    settings = json.loads(out)["settings"]
    assert settings["xla"]["losses"] == [[2.0] * 4] * 2 and settings["manual"]["losses"] == [[2.1] * 4] * 2
    assert settings["manual"]["ratio"]["median"] == 1.0 and len(settings["manual"]["seconds"]) == 2
    assert "error: manual: the loss of step" in err and "--loss-tolerance 0.0001" in err


def test_a_contender_that_dies_is_an_error(bench, workers, capsys):
    workers("raise RuntimeError('broken')")
    assert bench.main([*TINY, *SHORT, "--settings", "xla", "manual"]) == 1
    assert "manual: process 0 ended with status 1 (asked for: memory)" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "timeout", "message"),
    [
        ("raise RuntimeError('broken')", 60, "torch-ddp: process 1 ended with status 1 (asked for: first)"),
        ("time.sleep(60)", 1, "torch-ddp: process 1 did not answer within --timeout 1 s (asked for: first)"),
    ],
)
def test_a_process_that_dies_or_hangs_is_named(bench, workers, tmp_path, line, timeout, message):
    from benchmark.processes import ContenderFailed, Processes  # pyright: ignore[reportMissingImports]

    workers(line)
    (tmp_path / "spec.json").write_text('{"name": "torch-ddp"}')
    with (
        Processes("torch-ddp", tmp_path / "spec.json", 2, {}, timeout) as processes,
        pytest.raises(ContenderFailed, match=re.escape(message)),
    ):
        processes.ask("first")


@pytest.fixture
def refuse(bench, capsys):
    """Run the script in this process, where it must end before anything starts; return its one line."""

    def run(*args):
        assert bench.main(args) == 2
        (line,) = capsys.readouterr().err.splitlines()
        return line

    return run


KNOWN = "plain, xla, manual, flat, auto, watched, torch, torch-fsdp2, torch-ddp, torch-fsdp2-compile"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--settings", "fast"], f"--settings fast: use {KNOWN}"),
        (["--settings", "xla", "xla"], "--settings: name each contender once"),
        (["--rounds", "0"], "--rounds 0 must be a number from 1"),
        (["--devices", "4096"], "--devices 4096: at most"),
        (["--threads", "4096"], "--threads 4096: this process may use"),
        (["--param-dtype", "int8"], "--param-dtype int8: use none, float32"),
        (["--plot", "a.pdf"], "a.pdf: a plot is a .png or a .svg"),
        (["--plot", "/nowhere/a.png"], "--plot /nowhere/a.png: there is no directory /nowhere"),
        (["--plan", "abacus"], "abacus"),
        (["--mesh", "fsdp=3"], "mesh fsdp=3 needs 3 devices, but there are 2"),
        (["--settings", "torch", "--accumulate", "2"], "--accumulate is not built for torch; leave out --accumulate"),
        (["--settings", "torch", "--remat", "dots"], "--remat dots is not built for torch; use none or full"),
    ],
)
def test_what_cannot_be_timed_is_named(refuse, args, message):
    assert message in refuse(*TINY, *args)


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("vit-tiny", "--settings torch-ddp: vit-tiny cannot be exported for transformers (its field pretrained)"),
        ("gpt2", "--settings torch-ddp: the masks of dropout differ between libraries; --model-config dropout=0"),
    ],
)
def test_a_model_that_pytorch_cannot_run_the_same_way_is_named(refuse, model, message):
    assert message in refuse("--model", model, "--settings", "torch-ddp")


def test_a_missing_library_is_named_with_the_extra_that_has_it(refuse, monkeypatch):
    monkeypatch.setattr(extras, "find_spec", lambda name: None if name == "transformers" else object())
    said = refuse(*TINY, "--settings", "torch")
    assert "needs transformers; in the clone of jfsdp: pip install '.[bench]' -c constraints.txt" in said
