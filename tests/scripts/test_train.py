"""The training script as users run it: whole processes, two simulated devices, a model of a few thousand weights."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TINY = ["dim=16", "num_layers=2", "num_heads=2", "num_kv_heads=1", "ffn_dim=32"]
STEPS = 60


def command(*options):
    return [sys.executable, str(ROOT / "scripts" / "train.py"), *map(str, options)]


def environment():
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**kept, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def train(*options, cwd=None):
    return subprocess.run(command(*options), capture_output=True, text=True, env=environment(), cwd=cwd, timeout=300)


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_losses(run_dir):
    return [(line["step"], line["loss"], line["grad_norm"], line["eval_loss"]) for line in read_metrics(run_dir)]


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A small corpus, and room for runs."""
    root = tmp_path_factory.mktemp("train")
    (root / "corpus").mkdir()
    for number in range(40):
        text = "".join(f"def f{number}_{line}(x):\n    return x * {line * number}\n\n" for line in range(20))
        (root / "corpus" / f"{number:02}.py").write_text(text)
    return root


@pytest.fixture(scope="module")
def options(workspace):
    """What every run here has in common."""
    model = ["--model", "llama-tiny", "--model-config", *TINY, "--seq-len", 32, "--batch-per-device", 2]
    data = ["--data", workspace / "corpus", "--eval-fraction", 0.1, "--eval-batches", 2]
    when = ["--steps", STEPS, "--log-every", 1, "--checkpoint-every", 20, "--keep", 0, "--learning-rate", 3e-3]
    return [*model, *data, *when, "--simulate-devices", 2, "--cache-dir", workspace / "cache", "--remat", "none"]


@pytest.fixture(scope="module")
def unbroken(workspace, options):
    """A run from its first step to its last."""
    run_dir = workspace / "unbroken"
    more = ["--eval-every", 30, "--profile", "3:4", "--sample-tokens", 8, "--prompt", "def "]
    done = train(*options, *more, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir, done.stdout


def test_metrics_have_one_line_per_step_with_every_field(unbroken):
    lines = read_metrics(unbroken[0])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line.keys() >= {"loss", "grad_norm", "learning_rate", "mfu", "memory_bytes", "num_skipped"}
        assert line["tokens_seen"] == line["step"] * 2 * 2 * 32
        assert line["mfu"] is None, "the peak of a CPU is not known"
    assert lines[-1]["loss"] < lines[0]["loss"]
    assert [line["step"] for line in lines if line["eval_loss"] is not None] == [30, 60]
    assert lines[1]["tokens_per_s"] == pytest.approx(2 * lines[1]["tokens_per_s_per_device"])


def test_a_run_leaves_curve_events_trace_sample_and_summary(unbroken):
    run_dir, _ = unbroken
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert list((run_dir / "profile").rglob("*.xplane.pb")), "XProf reads this"
    assert list((run_dir / "profile").rglob("*.trace.json.gz")), "Perfetto reads this"
    assert (run_dir / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["is_done"] and summary["steps"] == STEPS
    assert summary["eval_loss"] == read_metrics(run_dir)[-1]["eval_loss"]


def test_plain_lines_tell_corpus_entropies_and_steps(unbroken):
    _, output = unbroken
    assert "40 documents" in output and "4 held out" in output
    assert "unigram" in output and "bigram" in output and "trigram" in output
    assert f"step {STEPS}/{STEPS}  loss" in output and "MFU -" in output


def wait_for_step(process, run_dir, step):
    for _ in range(6000):
        lines = (run_dir / "metrics.jsonl").read_text().count("\n") if (run_dir / "metrics.jsonl").exists() else 0
        if lines >= step:
            return
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.01)
    raise AssertionError("no metrics within a minute")


@pytest.fixture(scope="module")
def stopped(workspace, options, unbroken):
    """A run that SIGTERM ended in its middle. It is asked for too many steps, so that it cannot be done before."""
    run_dir = workspace / "stopped"
    long = [*options, "--eval-every", 30, "--run-dir", run_dir, "--steps", 100_000, "--decay-steps", STEPS]
    with subprocess.Popen(
        command(*long), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment()
    ) as process:
        wait_for_step(process, run_dir, 2)
        process.send_signal(signal.SIGTERM)
        output, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    return run_dir, output


def test_sigterm_saves_the_step_it_was_in_and_exits_cleanly(stopped):
    run_dir, output = stopped
    last = read_metrics(run_dir)[-1]["step"]
    assert f"stopped by SIGTERM after step {last}, which is saved" in output
    assert (run_dir / "checkpoints" / str(last)).is_dir()
    assert json.loads((run_dir / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    assert (run_dir / "loss.png").exists()


def test_resume_continues_bit_for_bit(stopped, unbroken, workspace, options):
    run_dir = workspace / "resumed"
    shutil.copytree(stopped[0], run_dir)
    first = read_metrics(run_dir)[-1]["step"]
    if first >= STEPS:
        pytest.fail(f"the run was stopped only after step {first}: nothing is left to resume")
    done = train(*options, "--eval-every", 30, "--run-dir", run_dir, "--resume", "--sample-tokens", 8)
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {first}" in done.stdout
    assert read_losses(run_dir) == read_losses(unbroken[0])


def test_resume_from_an_earlier_step_puts_later_ones_aside_and_repeats_them(unbroken, workspace, options):
    run_dir = workspace / "rewound"
    shutil.copytree(unbroken[0], run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "los')
    compiled = set((workspace / "cache").rglob("jit__step-*-cache"))
    done = train(*options, "--eval-every", 30, "--run-dir", run_dir, "--resume", 20, "--sample-tokens", 0)
    assert done.returncode == 0, done.stderr
    assert read_losses(run_dir) == read_losses(unbroken[0])
    assert sorted(path.name for path in (run_dir / "replaced-1").iterdir()) == ["40", "60", "metrics.jsonl"]
    assert compiled and set((workspace / "cache").rglob("jit__step-*-cache")) == compiled, "the step was compiled anew"


def test_a_run_goes_on_on_another_mesh_with_the_same_global_batch(unbroken, workspace, options):
    run_dir = workspace / "elsewhere"
    shutil.copytree(unbroken[0], run_dir)
    other = [
        "--simulate-devices",
        4,
        "--batch-per-device",
        1,
        "--mesh",
        "replica=2,fsdp=2",
        "--strategy",
        "hybrid_shard",
    ]
    done = train(*options, *other, "--eval-every", 30, "--run-dir", run_dir, "--resume", 40, "--sample-tokens", 0)
    assert done.returncode == 0, done.stderr
    assert "mesh was 'fsdp=-1', is 'replica=2,fsdp=2'" in done.stdout and "no longer bit for bit" in done.stdout
    ours, theirs = read_metrics(run_dir), read_metrics(unbroken[0])
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=0.01)


@pytest.mark.parametrize(
    ("more", "status", "words"),
    [
        ([], 1, "holds a run with checkpoints up to step 60; continue it with --resume"),
        (["--resume", "5"], 1, "has no checkpoint of step 5; the steps are 20, 40, 60"),
        (["--resume", "--model-config", *TINY[1:], "dim=32"], 1, "model_config.dim was 16, is 32"),
        (["--resume", "--seed", "1", "--seq-len", "64"], 1, "seed was 0, is 1; seq_len was 32, is 64"),
        (["--resume", "--steps", "90", "--data", str(ROOT / "models")], 1, "data (digest) was"),
        (["--mesh", "fsdp=3"], 2, "but there are 2"),
    ],
)
def test_a_run_is_not_continued_as_another(unbroken, options, more, status, words):
    before = {path: path.stat().st_mtime_ns for path in unbroken[0].rglob("*")}
    done = train(*options, "--run-dir", unbroken[0], *more)
    assert done.returncode == status and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in unbroken[0].rglob("*")} == before, "nothing may be touched"


def parse(*args):
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.parse(args)


def test_options_override_their_recipe_and_leave_the_rest():
    config = parse("--recipe", "stdlib", "--steps", "20", "--mesh", "fsdp=8", "--model-config", "dim=64", "tied=True")
    assert (config.model, config.steps, config.mesh, config.simulate_devices) == ("llama-tiny", 20, "fsdp=8", 8)
    assert config.model_config == ("dim=64", "tied=True")


@pytest.mark.parametrize(
    ("args", "resume"), [(["--resume"], "auto"), (["--resume", "--steps", "9"], "auto"), (["--resume", "40"], "40")]
)
def test_resume_takes_a_step_or_nothing(args, resume):
    assert parse("--recipe", "stdlib", *args).resume == resume


def test_a_factory_takes_the_place_of_the_recipes_model():
    config = parse("--recipe", "stdlib", "--factory", "my.jobs:job")
    assert (config.model, config.factory) == (None, "my.jobs:job")


def test_an_unknown_recipe_costs_one_line_and_status_2():
    done = train("--recipe", "imagenet")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "train.py: error: recipe 'imagenet' is unknown; the recipes are none, stdlib, llama-8b\n"


def test_missing_data_and_unwritable_directories_are_named_before_training(options, tmp_path):
    done = train(*options, "--run-dir", tmp_path / "run", "--data", tmp_path / "nothing")
    assert done.returncode == 1 and "no such file or directory" in done.stderr
    assert not (tmp_path / "run").exists(), "a run that never began leaves no directory"
    (tmp_path / "file").write_text("")
    done = train(*options, "--run-dir", tmp_path / "file" / "run")
    assert done.returncode == 1 and "cannot be written (Not a directory)" in done.stderr
