"""The training script: two simulated devices, a model of a few thousand weights.

What is about signals, other devices and exit statuses runs in a process of its own; all else in one (`serve`).
"""

import errno
import importlib.util
import json
import re
import shutil
import signal
import subprocess
import time
import typing
from unittest import mock

import pytest

from jfsdp.launch.watch import Watch
from jfsdp.trainer.help_groups import groups_of
from jfsdp.trainer.job import load_job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.run.weights import describe_model, stated_by_weights
from tests.refusals import check_facts
from tests.scripts.command import ROOT, TINY, command, environment, read_losses, read_metrics, train, write_corpus

STEPS = 60


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A small corpus, and room for runs."""
    root = tmp_path_factory.mktemp("train")
    write_corpus(root / "corpus")
    return root


@pytest.fixture(scope="module")
def options(workspace):
    """What every run here has in common."""
    model = ["--model", "llama-tiny", "--model-config", *TINY, "--seq-len", 32, "--batch-per-device", 2]
    data = ["--data", workspace / "corpus", "--eval-fraction", 0.1, "--eval-batches", 2]
    when = ["--steps", STEPS, "--log-every", 1, "--checkpoint-every", 20, "--keep", 0, "--learning-rate", 3e-3]
    return [*model, *data, *when, "--simulate-devices", 2, "--cache-dir", workspace / "cache", "--remat", "none"]


@pytest.fixture(scope="module")
def unbroken(workspace, options, serve):
    """A run from its first step to its last."""
    run_dir = workspace / "unbroken"
    more = ["--eval-every", 30, "--profile", "3:4", "--sample-tokens", 8, "--prompt", "def "]
    more += ["--tracker", "tests.scripts.tracker:Tracker"]
    done = serve(*options, *more, "--run-dir", run_dir)
    assert done.returncode == 0, done.stderr
    return run_dir, done.stdout


def test_metrics_have_one_line_per_step_with_every_field(unbroken):
    lines = read_metrics(unbroken[0])
    assert [line["step"] for line in lines] == list(range(1, STEPS + 1))
    for line in lines:
        assert line.keys() >= {"loss", "grad_norm", "learning_rate", "mfu", "memory_bytes", "num_skipped", "data_s"}
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


def test_a_tracker_of_ones_own_is_told_what_the_lines_say(unbroken):
    told = (unbroken[0] / "mine.txt").read_text().splitlines()
    lines = [f"{line['step']} {line['loss']}" for line in read_metrics(unbroken[0])]
    assert told == [str(STEPS), *lines, "closed"]


def test_plain_lines_tell_corpus_and_steps(unbroken):
    _, output = unbroken
    assert "40 documents" in output and "4 held out" in output
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
    check_facts(output, "SIGTERM", f"step {last}")
    assert (run_dir / "checkpoints" / str(last)).is_dir()
    assert json.loads((run_dir / "summary.json").read_text())["stopped_by"] == "SIGTERM"
    assert (run_dir / "loss.png").exists()


def test_a_stopped_run_keeps_its_last_evaluation_in_its_summary(options, tmp_path, serve):
    stopping = ["--eval-every", 2, "--tracker", "tests.scripts.tracker:Stopping", "--run-dir", tmp_path / "run"]
    done = serve(*options, *stopping)
    assert done.returncode == 0, done.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    evaluated = next(line for line in read_metrics(tmp_path / "run") if line["step"] == 2)
    assert (summary["is_done"], summary["stopped_by"], summary["eval_step"]) == (False, "SIGTERM", 2)
    assert (summary["eval_loss"], summary["eval_correct"]) == (evaluated["eval_loss"], evaluated["eval_correct"])
    assert f"held-out loss after step 2 {summary['eval_loss']:.4f}" in done.stdout


def test_resume_continues_bit_for_bit(stopped, unbroken, workspace, options):
    run_dir = workspace / "resumed"
    shutil.copytree(stopped[0], run_dir)
    first = read_metrics(run_dir)[-1]["step"]
    if first >= STEPS:
        pytest.fail(f"the run was stopped only after step {first}: nothing is left to resume")
    # In a process of its own, which has compiled nothing for the unbroken run.
    done = train(*options, "--eval-every", 30, "--run-dir", run_dir, "--resume", "--sample-tokens", 8)
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {first}" in done.stdout
    assert read_losses(run_dir) == read_losses(unbroken[0])


@pytest.mark.parametrize("is_named", [True, False])
def test_a_run_that_its_launcher_starts_again_goes_on_by_itself(is_named, options, tmp_path, serve):
    """Without --run-dir in the directory that its first attempt made, and not in that of an older run."""
    where = tmp_path / "run" if is_named else tmp_path / "runs" / "llama-tiny-20260102-030405"
    ours = [*options, "--sample-tokens", 0, "--decay-steps", 4, *(["--run-dir", where] if is_named else [])]
    (tmp_path / "runs" / "llama-tiny-20990101-000000" / "checkpoints" / "9").mkdir(parents=True)
    for attempt, steps in enumerate((2, 4)):
        told = {"JFSDP_RESTART": str(attempt), "JFSDP_LAUNCHED": "20260102-030405"}
        done = serve(*ours, "--steps", steps, cwd=tmp_path, **told)
        assert done.returncode == 0, done.stderr
        assert ("resumed after step 2" in done.stdout) == ("--resume auto" in done.stdout) == (attempt == 1)
    assert [line["step"] for line in read_metrics(where)] == [1, 2, 3, 4]


def test_resume_from_an_earlier_step_puts_later_ones_aside_and_repeats_them(unbroken, workspace, options, serve):
    run_dir = workspace / "rewound"
    shutil.copytree(unbroken[0], run_dir)
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write('{"step": 61, "los')
    done = serve(*options, "--eval-every", 30, "--run-dir", run_dir, "--resume", 20, "--sample-tokens", 0)
    assert done.returncode == 0, done.stderr
    assert read_losses(run_dir) == read_losses(unbroken[0])
    assert sorted(path.name for path in (run_dir / "replaced-1").iterdir()) == ["40", "60", "metrics.jsonl"]


@pytest.mark.proof
def test_a_resumed_run_finds_its_compiled_step_in_the_cache(workspace, options):
    """On one device: programs for several devices of a CPU are not kept."""
    cache = workspace / "cache"
    alone = [*options, "--simulate-devices", 1, "--checkpoint-every", 1, "--eval-every", 0, "--sample-tokens", 0]
    compiled = []
    for more in (["--steps", 1], ["--steps", 2, "--resume"]):
        done = train(*alone, *more, "--decay-steps", 2, "--run-dir", workspace / "cached")
        assert done.returncode == 0, done.stderr
        compiled.append({path.name for path in cache.rglob("jit__step-*-cache")})
    assert compiled[0] and compiled[1] == compiled[0], "the step was compiled anew"


def test_a_run_goes_on_on_another_mesh_with_the_same_global_batch(unbroken, workspace, options):
    run_dir = workspace / "elsewhere"
    shutil.copytree(unbroken[0], run_dir)
    other = ["--simulate-devices", 4, "--batch-per-device", 1, "--mesh", "replica=2,fsdp=2"]
    done = train(*options, *other, "--eval-every", 30, "--run-dir", run_dir, "--resume", 40, "--sample-tokens", 0)
    assert done.returncode == 0, done.stderr
    assert "'fsdp=-1', is 'replica=2,fsdp=2'" in done.stdout and "no longer bit for bit" in done.stdout
    ours, theirs = read_metrics(run_dir), read_metrics(unbroken[0])
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=0.01)


@pytest.mark.proof
def test_a_run_goes_on_with_other_settings_that_only_round(unbroken, workspace, options):
    run_dir = workspace / "offloaded"
    shutil.copytree(unbroken[0], run_dir)
    other = ["--offload", "params,opt_state", "--no-reshard-after-backward", "--sync", "last", "--remat", "full"]
    done = train(*options, *other, "--eval-every", 30, "--run-dir", run_dir, "--resume", 40, "--sample-tokens", 0)
    assert done.returncode == 0, done.stderr
    assert "offload was [], is ['params,opt_state']" in done.stdout and "no longer bit for bit" in done.stdout
    ours, theirs = read_metrics(run_dir), read_metrics(unbroken[0])
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=0.01)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "holds a run with checkpoints up to step 60; continue it with --resume"),
        (["--resume", "5"], "has no checkpoint of step 5; the steps are 20, 40, 60"),
        (["--resume", "--model-config", *TINY[1:], "dim=32"], "model_config.dim was 16, is 32"),
        (["--resume", "--seed", "1", "--seq-len", "64"], "seed was 0, is 1; seq_len was 32, is 64"),
        (["--resume", "--steps", "90", "--data", str(ROOT / "models")], "data (digest) was"),
        (["--resume", "--ema", "0.9"], "ema was None, is 0.9"),
        (["--resume", "--frozen", "norm", "--opt-state-dtype", "bfloat16"], "frozen was None, is ['norm']"),
        (["--mesh", "fsdp=3"], "but there are 2"),
    ],
)
def test_a_run_is_not_continued_as_another(unbroken, options, more, words, serve):
    before = {path: path.stat().st_mtime_ns for path in unbroken[0].rglob("*")}
    done = serve(*options, "--run-dir", unbroken[0], *more)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.stat().st_mtime_ns for path in unbroken[0].rglob("*")} == before, "nothing may be touched"


STEEP = """
import jax, jfsdp, optax
from flax import nnx

class Steep(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.numpy.ones(8))

def steep():
    \"\"\"A parabola, down which small steps lead, and large ones up and up to infinity.\"\"\"
    ids = lambda rows, length: {name: jax.ShapeDtypeStruct((rows, length), "int32") for name in ("tokens", "targets")}
    loss = lambda model, batch: (model.w[...] ** 2).sum().astype("float32")
    return jfsdp.trainer.Job(model=Steep, loss=loss, batch=ids, units=[], optimizer=optax.sgd, vocab_size=264)
"""


def test_the_advice_to_a_run_that_diverged_can_be_followed(options, tmp_path, serve):
    (tmp_path / "steep_jobs.py").write_text(STEEP)
    ours = [*options[options.index("--seq-len") :], "--factory", "steep_jobs:steep", "--param-dtype", "none"]
    ours += ["--sample-tokens", 0, "--run-dir", tmp_path / "run", "--steps", 40, "--checkpoint-every", 5]
    ours += ["--eval-fraction", 0, "--max-grad-norm", "none", "--warmup", 0, "--keep", 0]
    ours[ours.index("--learning-rate") + 1] = 1e3
    done = serve(*ours, cwd=tmp_path)
    assert done.returncode == 1
    assert "diverged" in done.stderr and "--resume" in done.stderr and "--learning-rate" in done.stderr
    ours[ours.index("--learning-rate") + 1] = 0.1
    done = serve(*ours, "--resume", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "learning_rate was 1000.0, is 0.1" in done.stdout and "no longer bit for bit" in done.stdout
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == list(range(1, 41))
    saved = int(done.stdout.partition("resumed after step ")[2].split()[0])
    assert all(line["learning_rate"] > 50 for line in lines[:saved])
    assert all(line["learning_rate"] <= 0.1 for line in lines[saved:])
    change = {"after_step": saved, "learning_rate": [1e3, 0.1]}
    assert json.loads((tmp_path / "run" / "config.json").read_text())["changes"] == [change]
    place = ours.index("--learning-rate")
    less = [*ours[:place], *ours[place + 2 :]]
    while "--keep" in less:
        del less[less.index("--keep") : less.index("--keep") + 2]
    done = serve(*less, "--resume", "--steps", 42, "--skip-nonfinite", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--learning-rate 0.1" in done.stdout
    assert "skip_nonfinite was False, is True" in done.stdout
    changes = json.loads((tmp_path / "run" / "config.json").read_text())["changes"]
    assert changes == [change, {"after_step": 40, "skip_nonfinite": [False, True]}]
    assert read_metrics(tmp_path / "run")[-1]["learning_rate"] <= 0.1
    there = {int(path.name) for path in (tmp_path / "run" / "checkpoints").iterdir() if path.name.isdecimal()}
    assert set(range(saved, 41, 5)) <= there, "what the run protected is deleted by one that says nothing of it"


# ---- other models, other data ----


JOBS_OF_OUR_OWN = """
import dataclasses
import jfsdp
from examples import vit

def with_evaluation_of_its_own():
    def eval_loss(model, batch):
        return jfsdp.Loss(42.0 * batch["weights"].sum(), batch["weights"].sum())
    return dataclasses.replace(vit.job(), eval_loss=eval_loss)
"""
BIGRAM = """
import jax, jfsdp, optax
from flax import nnx

class Bigram(nnx.Module):
    def __init__(self, rngs):
        self.table = nnx.Embed(264, 264, rngs=rngs)
    def __call__(self, tokens):
        return self.table(tokens)

def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]).astype("float32"), batch["targets"])
    return jfsdp.Loss((losses * batch["weights"]).sum(), batch["weights"].sum())

def bigram():
    ids = lambda rows, length: {name: jax.ShapeDtypeStruct((rows, length), "int32") for name in ("tokens", "targets")}
    return jfsdp.trainer.Job(model=Bigram, loss=loss, batch=ids, units=["table"], optimizer=optax.sgd, vocab_size=264)
"""


@pytest.mark.proof
def test_a_job_with_data_of_its_own_reports_rows_and_accuracy_and_resumes_bit_for_bit(workspace):
    """Its state holds the counts of its dropout, which a resume must bring back too."""
    when = ["--log-every", 1, "--checkpoint-every", 5, "--eval-every", 5, "--learning-rate", 2e-3, "--decay-steps", 15]
    more = ["--batch-per-device", 16, "--eval-batches", 0, "--simulate-devices", 2, "--cache-dir", workspace / "cache"]
    options = ["--factory", "examples.vit:job", *when, *more, "--remat", "none"]
    whole, parted = workspace / "rows", workspace / "rows-parted"
    done = train(*options, "--steps", 15, "--run-dir", whole)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(whole)
    assert [line["rows_seen"] for line in lines] == [32 * step for step in range(1, 16)]
    evaluated = [line for line in lines if line["eval_loss"] is not None]
    assert [(line["step"], line["eval_rows"]) for line in evaluated] == [(5, 200), (10, 200), (15, 200)]
    assert all(0 < line["eval_correct"] <= 1 for line in evaluated)
    summary = json.loads((whole / "summary.json").read_text())
    assert summary["eval_correct"] == evaluated[-1]["eval_correct"]
    assert not (whole / "sample.txt").exists(), "a job with custom data writes no text"
    assert "data of job 'vit'" in done.stdout and "32 rows per step" in done.stdout
    assert f"nats per row, accuracy {100 * summary['eval_correct']:.2f} %" in done.stdout
    assert "rows/s" in done.stdout and "tokens" not in done.stdout
    for steps, resume in ((10, []), (15, ["--resume"])):
        done = train(*options, "--steps", steps, "--run-dir", parted, *resume)
        assert done.returncode == 0, done.stderr
    assert read_losses(parted) == read_losses(whole)


@pytest.mark.proof
def test_evaluation_takes_the_jobs_own_loss(workspace, tmp_path):
    (tmp_path / "own_jobs.py").write_text(JOBS_OF_OUR_OWN)
    more = ["--steps", 2, "--simulate-devices", 2, "--cache-dir", workspace / "cache", "--run-dir", tmp_path / "run"]
    done = train("--factory", "own_jobs:with_evaluation_of_its_own", *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "held-out loss 42.0000 nats per row" in done.stdout
    assert read_metrics(tmp_path / "run")[-1]["loss"] < 10


@pytest.mark.proof
def test_gpt2_in_linen_trains_with_dropout_writes_a_sample_and_resumes_bit_for_bit(workspace, options):
    sizes = ["dim=16", "num_layers=2", "num_heads=2", "dropout=0.1", "attention_dropout=0.1"]
    linen = [*options, "--model", "gpt2-tiny", "--model-config", *sizes, "--decay-steps", STEPS, "--sample-tokens", 8]
    whole, parted = workspace / "gpt2", workspace / "gpt2-parted"
    done = train(*linen, "--run-dir", whole, "--prompt", "def ")
    assert done.returncode == 0, done.stderr
    lines = read_metrics(whole)
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5
    assert (whole / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    for steps, resume in ((40, []), (STEPS, ["--resume"])):
        done = train(*linen, "--steps", steps, "--run-dir", parted, *resume)
        assert done.returncode == 0, done.stderr
    assert [line[:3] for line in read_losses(parted)] == [line[:3] for line in read_losses(whole)]
    assert read_losses(parted)[-1] == read_losses(whole)[-1]


def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(*args):
    return script().parse(args)


@pytest.mark.parametrize(
    ("text", "status"),
    [
        ("Gloo all-reduce failed: [pair.cc:534] Timed out waiting 30000ms for recv operation to complete", 75),
        ("DEADLINE_EXCEEDED: Gloo ReduceScatter timed out: 30000ms", 75),
        ("Gloo all-reduce failed: Connection closed by peer [127.0.1.1]:4711", 1),
        ("the socket timed out", 1),
    ],
)
def test_a_collective_that_times_out_by_itself_is_a_hang(text, status, monkeypatch, capsys):
    train, told = script(), []
    monkeypatch.setattr(train, "train", mock.Mock(side_effect=RuntimeError(text)))
    monkeypatch.setattr(train, "tell_and_end", lambda *said: told.append(said))
    assert train.main([]) == status and told == [(f"RuntimeError: {text}", status)]


def test_a_full_disk_is_told_with_the_run_directory(tmp_path, monkeypatch, capsys):
    run = mock.Mock(run=mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")), loop=None, first=1)
    train = script()
    monkeypatch.setattr("jfsdp.trainer.run.training.Run", lambda *_: run)
    monkeypatch.setattr("jfsdp.trainer.run.build.build", lambda *_: None)
    config = train.parse(["--run-dir", str(tmp_path / "run")])
    with pytest.raises(OSError, match=rf"No space left on device.*{tmp_path}/run"):
        train._run(config, [], 0.0, Watch(0))


def test_options_override_their_recipe_and_leave_the_rest():
    config = parse("--recipe", "stdlib", "--steps", "20", "--mesh", "fsdp=8", "--model-config", "dim=64", "tied=True")
    assert (config.model, config.steps, dict(config.mesh), config.simulate_devices) == (
        "llama-tiny",
        20,
        {"fsdp": 8},
        8,
    )
    assert dict(config.model_config) == {"dim": 64, "tied": True}


def test_the_launchers_devices_override_a_recipes(monkeypatch):
    monkeypatch.setenv("JFSDP_DEVICES", "2")
    assert parse("--recipe", "stdlib").simulate_devices == 2
    assert parse("--recipe", "stdlib", "--simulate-devices", "4").simulate_devices == 4, "which is refused"


@pytest.mark.parametrize(("recipe", "model"), [("gpt2-stdlib", "gpt2-tiny"), ("stdlib", "llama-tiny")])
def test_recipes_run_on_eight_simulated_devices(recipe, model):
    config = parse("--recipe", recipe)
    assert (config.recipe, config.model, config.simulate_devices) == (recipe, model, 8)


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
    known = "none, gpt2-stdlib, llama-8b, stdlib, or a file *.json"
    check_facts(done.stderr, "--recipe 'imagenet'", known)


@pytest.mark.proof
def test_with_averages_held_out_losses_are_theirs(unbroken, workspace, options):
    run_dir = workspace / "averages"
    more = ["--steps", 30, "--decay-steps", STEPS, "--ema", 0.9999, "--sample-tokens", 0, "--run-dir", run_dir]
    done = train(*options, *more)
    assert done.returncode == 0, done.stderr
    ours, theirs = read_metrics(run_dir), read_metrics(unbroken[0])[:30]
    assert [line["loss"] for line in ours] == [line["loss"] for line in theirs], "averages change no update"
    first, last = ours[0]["loss"], ours[-1]["eval_loss"]
    assert theirs[-1]["eval_loss"] < first - 0.5, "the parameters have learned"
    assert last == pytest.approx(first, abs=0.1), "and the averages have hardly moved"


def begin_from(form, run_dir, where):
    """Write the newest weights of a run in another form; return the options that begin from it."""
    from jfsdp.cli import main as jfsdp

    assert jfsdp(["checkpoint", "export", str(run_dir), str(where / "hf"), "--json"]) == 0
    if form == "ours":
        return "--init-from", run_dir
    if form == "hugging face":
        return "--init-from", where / "hf", "--tokenizer", "byte"
    import safetensors.torch
    import torch

    torch.save({"net": safetensors.torch.load_file(where / "hf" / "model.safetensors")}, where / "weights.pt")
    return "--init-from", where / "weights.pt", "--init-key", "net", "--tokenizer", "byte"


@pytest.mark.parametrize(
    "form",
    [
        "hugging face",
        pytest.param("torch", marks=pytest.mark.proof),
        pytest.param("ours", marks=pytest.mark.proof),
    ],
)
def test_a_run_begins_where_the_weights_that_it_is_given_were(form, unbroken, options, tmp_path, serve):
    begin = begin_from(form, unbroken[0], tmp_path)
    config = tmp_path / "hf" / "config.json"
    theirs = {"eos_token_id": 7, "max_position_embeddings": 4096}
    config.write_text(json.dumps(json.loads(config.read_text()) | theirs))
    still = ["--steps", 1, "--learning-rate", 1e-20, "--eval-every", 1, "--run-dir", tmp_path / "run"]
    done = serve(*options, *begin, *still)
    assert done.returncode == 0, done.stderr
    assert "tokenizer byte" in done.stdout
    if form == "hugging face":
        assert f"model llama-tiny with the sizes of {tmp_path / 'hf'}: " in done.stdout
    lines, before = read_metrics(tmp_path / "run"), read_metrics(unbroken[0])
    assert lines[-1]["step"] == 1
    assert lines[-1]["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=1e-5)
    assert lines[-1]["loss"] < 0.9 * before[0]["loss"]
    stated = json.loads((tmp_path / "run" / "config.json").read_text())["pretrained"]
    if form == "hugging face":
        assert {name: stated[name] for name in theirs} == theirs, "what no model computes with is kept for an export"
    else:
        assert stated["max_position_embeddings"] == 32


def test_a_resumed_run_says_of_its_weights_what_it_said_before():
    before = {"eos_token_id": 7, "max_position_embeddings": 4096, "hidden_size": 1}
    theirs = stated_by_weights(parse("--recipe", "stdlib", "--resume"), {"pretrained": before})
    job = load_job("llama-tiny", None)
    short, long = describe_model(job, 16, theirs), describe_model(job, 8192, theirs)
    assert short is not None and long is not None
    assert (short["eos_token_id"], short["hidden_size"]) == (7, job.config.dim)
    assert (short["max_position_embeddings"], long["max_position_embeddings"]) == (4096, 8192)


def test_a_run_that_resumes_from_nothing_yet_says_of_its_weights_what_they_say(tmp_path):
    """A job that is always started with --resume, so that it goes on wherever it was stopped."""
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    config = parse("--recipe", "stdlib", "--resume", "--init-from", str(tmp_path))
    stated = describe_model(load_job("llama-tiny", None), 16, stated_by_weights(config, {}))
    assert stated is not None and stated["eos_token_id"] == 7


@pytest.mark.proof
def test_float16_scales_the_loss_and_metrics_show_by_what(workspace, options, tmp_path):
    (tmp_path / "own_jobs.py").write_text(BIGRAM)
    more = ["--steps", 4, "--param-dtype", "float16", "--sample-tokens", 0, "--run-dir", tmp_path / "run"]
    ours = [*options[options.index("--seq-len") :], "--factory", "own_jobs:bigram"]
    done = train(*ours, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert [line["loss_scale"] for line in read_metrics(tmp_path / "run")] == [2.0**16] * 4


def test_weights_that_are_not_there_are_named_before_data_are_read_and_nothing_is_made(options, tmp_path, serve):
    begin = ["--init-from", "org/Some-1.5B", "--data", tmp_path / "nothing", "--run-dir", tmp_path / "run"]
    done = serve(*options, *begin)
    assert done.returncode == 2 and not (tmp_path / "run").exists()
    assert done.stderr.count("\n") == 1 and "--init-from: org/Some-1.5B" in done.stderr
    check_facts(done.stderr, "hf download org/Some-1.5B --local-dir Some-1.5B")


def test_missing_data_and_unwritable_directories_are_named_before_training(options, tmp_path, serve):
    done = serve(*options, "--run-dir", tmp_path / "run", "--data", tmp_path / "nothing")
    assert done.returncode == 2 and "no such file or directory" in done.stderr
    assert not (tmp_path / "run").exists(), "a run that never began leaves no directory"
    (tmp_path / "file").write_text("")
    done = serve(*options, "--run-dir", tmp_path / "file" / "run")
    assert done.returncode == 2 and "cannot be written (Not a directory)" in done.stderr


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--remat", "names:nope"], "remat names nope, and no value in the model has that name"),
        (["--mesh", "tensor=2"], "cannot be split over mesh axis 'tensor' (size 2)"),
        (["--prefetch", "99"], "a step gathers 2 units forward; ask for no more"),
    ],
)
def test_what_the_steps_trace_refuses_leaves_nothing_behind(args, words, options, tmp_path, serve):
    done = serve(*options, "--run-dir", tmp_path / "run", *args)
    assert done.returncode == 2 and words in done.stderr, done.stderr
    assert not (tmp_path / "run").exists(), "the same command, mended, would be refused"


def test_what_is_refused_in_the_first_step_cannot_begin_and_begins_mended_in_the_same_directory(
    options, tmp_path, serve
):
    done = serve(*options, "--run-dir", tmp_path / "run", "--tracker", "json:dumps")
    words = "--tracker json:dumps returned a str; return an object with write(record) and close()"
    assert done.returncode == 2 and words in done.stderr, done.stderr
    done = serve(*options, "--run-dir", tmp_path / "run", "--param-dtype", "float16")
    assert done.returncode == 2 and "--param-dtype float16" in done.stderr
    done = serve(*options, "--run-dir", tmp_path / "run", "--steps", 1)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]


def test_help_shows_the_options_in_groups_and_in_order(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    with pytest.raises(SystemExit):
        parse("--help")
    shown = re.findall(r"^\W*(\w[\w ]*) options\W*$|^\W{0,3}--([a-z][a-z-]*)", capsys.readouterr().out, re.M)
    expected = [
        line
        for title, names in groups_of(TrainConfig).items()
        for line in [(title, ""), *(("", name.replace("_", "-")) for name in names)]
    ]
    assert shown == expected


def test_every_option_that_may_be_left_out_is_shown_and_read_alike(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    assert "{None}" not in capsys.readouterr().out
    types = typing.get_type_hints(type(parse()))
    optional = [name for name, kind in types.items() if type(None) in typing.get_args(kind)]
    assert {"seq_len", "max_grad_norm", "run_dir", "ema", "sync"} <= set(optional)
    for word in ("none", "None"):
        config = parse(*(part for name in optional for part in (f"--{name.replace('_', '-')}", word)))
        assert {name: getattr(config, name) for name in optional} == dict.fromkeys(optional)
    assert parse("--seq-len", "128", "--max-grad-norm", "0.5").seq_len == 128
