"""The training script: two simulated devices, a model of a few thousand weights.

What is about signals, other devices and exit statuses runs in a process of its own; all else in one (`serve`).
"""

import errno
import importlib.util
import json
import shutil
import typing
from typing import Any
from unittest import mock

import numpy as np
import pytest

from jfsdp.launch.watch import Watch
from jfsdp.trainer.job import load_job
from jfsdp.trainer.run.directory import read_config
from jfsdp.trainer.run.load_model import load_frozen
from jfsdp.trainer.run.weights import describe_model, find_job, initial_hf_config
from tests.refusals import check_facts
from tests.scripts.command import ONE_LAYER, ROOT, read_losses, read_metrics, train, write_corpus

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
    model = ["--model", "llama-tiny", "--model-config", *ONE_LAYER, "--seq-len", 32, "--batch-per-device", 2]
    data = ["--data", workspace / "corpus", "--eval-fraction", 0.1, "--eval-batches", 2]
    when = ["--steps", STEPS, "--log-every", 1, "--checkpoint-every", 20, "--keep", 0, "--learning-rate", 3e-3]
    where = ["--simulate-devices", 2, "--cache-dir", workspace / "cache"]
    return [*model, *data, *when, *where, "--sample-tokens", 0, "--remat", "none", "--no-check-loss"]


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


def test_a_run_leaves_curve_events_trace_sample_and_summary_and_tells_a_tracker_and_the_terminal(unbroken):
    run_dir, output = unbroken
    told = [f"{line['step']} {line['loss']}" for line in read_metrics(run_dir)]
    assert (run_dir / "mine.txt").read_text().splitlines() == [str(STEPS), *told, "closed"]
    saved = read_config(run_dir / "checkpoints" / str(STEPS))
    assert saved == read_config(run_dir), "what a tracker is told besides is in no checkpoint"
    check_facts(output, "40 documents", "4 held out", f"step {STEPS}/{STEPS}")
    assert (run_dir / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert list((run_dir / "tensorboard").glob("events.out.tfevents.*"))
    assert list((run_dir / "profile").rglob("*.xplane.pb")), "XProf reads this"
    assert list((run_dir / "profile").rglob("*.trace.json.gz")), "Perfetto reads this"
    assert (run_dir / "sample.txt").read_text(encoding="utf-8").startswith("def ")
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["is_done"] and summary["steps"] == STEPS
    assert summary["eval_loss"] == read_metrics(run_dir)[-1]["eval_loss"]


def test_sigterm_saves_the_step_it_was_in_and_resume_continues_bit_for_bit(unbroken, options, tmp_path, serve):
    ours, run_dir = [*options, "--eval-every", 30, "--run-dir", tmp_path / "run"], tmp_path / "run"
    done = serve(*ours, "--tracker", "tests.scripts.tracker:Stopping")
    assert done.returncode == 0, done.stderr
    last, evaluated = read_metrics(run_dir)[-1]["step"], read_metrics(run_dir)[29]
    summary = json.loads((run_dir / "summary.json").read_text())
    assert (summary["is_done"], summary["stopped_by"], summary["eval_step"]) == (False, "SIGTERM", 30)
    assert (summary["eval_loss"], summary["eval_correct"]) == (evaluated["eval_loss"], evaluated["eval_correct"])
    check_facts(done.stdout, "SIGTERM", f"step {last}", "step 30", f"{summary['eval_loss']:.4f}")
    assert 31 <= last < STEPS and (run_dir / "checkpoints" / str(last)).is_dir() and (run_dir / "loss.png").exists()
    # In a process of its own, which has compiled nothing for the unbroken run.
    done = train(*ours, "--resume")
    assert done.returncode == 0, done.stderr
    assert f"resumed after step {last}" in done.stdout
    assert read_losses(run_dir) == read_losses(unbroken[0])


def test_a_run_that_its_launcher_starts_again_goes_on_by_itself(options, tmp_path, serve):
    """Without --run-dir in the directory that its first attempt made, and not in that of an older run."""
    where = tmp_path / "runs" / "llama-tiny-20260102-030405"
    ours = [*options, "--decay-steps", STEPS]
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
    done = serve(*options, "--eval-every", 30, "--run-dir", run_dir, "--resume", 20)
    assert done.returncode == 0, done.stderr
    assert read_losses(run_dir) == read_losses(unbroken[0])
    assert sorted(path.name for path in (run_dir / "replaced-1").iterdir()) == ["40", "60", "metrics.jsonl"]


@pytest.mark.proof
def test_a_resumed_run_finds_its_compiled_step_in_the_cache(workspace, options):
    """On one device: programs for several devices of a CPU are not kept."""
    cache = workspace / "cache"
    alone = [*options, "--simulate-devices", 1, "--checkpoint-every", 1, "--eval-every", 0]
    compiled = []
    for more in (["--steps", 1], ["--steps", 2, "--resume"]):
        done = train(*alone, *more, "--decay-steps", 2, "--run-dir", workspace / "cached")
        assert done.returncode == 0, done.stderr
        compiled.append({path.name for path in cache.rglob("jit__step-*-cache")})
    assert compiled[0] and compiled[1] == compiled[0], "the step was compiled anew"


# Options of a run that goes on, and what it says of the change.
ELSEWHERE = ["--mesh", "replica=2,fsdp=1"]
ROUNDING = ["--offload", "params,opt_state", "--no-reshard-after-backward", "--sync", "last", "--remat", "full"]


@pytest.mark.parametrize(
    ("more", "fact"),
    [
        (ELSEWHERE, "'fsdp=-1', is 'replica=2,fsdp=1'"),
        pytest.param(ROUNDING, "offload was [], is ['params,opt_state']", marks=pytest.mark.proof),
    ],
)
def test_a_run_goes_on_on_another_mesh_or_with_settings_that_round(more, fact, unbroken, options, tmp_path, serve):
    shutil.copytree(unbroken[0], tmp_path / "run")
    when = ["--eval-every", 0, "--resume", 40]
    done = serve(*options, *more, *when, "--run-dir", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    check_facts(done.stdout, fact, "no longer bit for bit")
    ours, theirs = read_metrics(tmp_path / "run"), read_metrics(unbroken[0])
    assert [line["loss"] for line in ours] == pytest.approx([line["loss"] for line in theirs], rel=0.01)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ([], "holds a run with checkpoints up to step 60; continue it with --resume"),
        (["--resume", "--seed", "1", "--seq-len", "64"], "seed was 0, is 1; seq_len was 32, is 64"),
        (["--resume", "--steps", "90", "--data", str(ROOT / "models")], "data (digest) was"),
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
    ours += ["--run-dir", tmp_path / "run", "--steps", 40, "--checkpoint-every", 5]
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
    assert f" {summary['eval_loss']:.4f}, accuracy {100 * summary['eval_correct']:.2f} %" in done.stdout
    assert "nats" not in done.stdout, "its loss has no known unit"
    assert "rows/s" in done.stdout and "tokens" not in done.stdout
    for steps, resume in ((10, []), (15, ["--resume"])):
        done = train(*options, "--steps", steps, "--run-dir", parted, *resume)
        assert done.returncode == 0, done.stderr
    assert read_losses(parted) == read_losses(whole)


def script():
    """The script as a module."""
    spec = importlib.util.spec_from_file_location("train_script", ROOT / "scripts" / "train.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def parse(*args):
    return script().parse(args)


def test_a_collective_that_times_out_by_itself_is_a_hang(monkeypatch, capsys):
    train, told = script(), []
    monkeypatch.setattr(train, "tell_and_end", lambda *said: told.append(said))
    for text, status in (
        ("Gloo all-reduce failed: [pair.cc:534] Timed out waiting 30000ms for recv operation to complete", 75),
        ("DEADLINE_EXCEEDED: Gloo ReduceScatter timed out: 30000ms", 75),
        ("Gloo all-reduce failed: Connection closed by peer [127.0.1.1]:4711", 1),
        ("the socket timed out", 1),
    ):
        monkeypatch.setattr(train, "train", mock.Mock(side_effect=RuntimeError(text)))
        assert train.main([]) == status and told.pop() == (f"RuntimeError: {text}", status, None)


def test_a_full_disk_is_told_with_the_run_directory(tmp_path, monkeypatch, capsys):
    run = mock.Mock(run=mock.Mock(side_effect=OSError(errno.ENOSPC, "No space left on device")), loop=None, first=1)
    train = script()
    monkeypatch.setattr("jfsdp.trainer.run.training.Run", lambda *_: run)
    monkeypatch.setattr("jfsdp.trainer.run.build.build", lambda *_: None)
    config = train.parse(["--run-dir", str(tmp_path / "run")])
    with pytest.raises(OSError, match=rf"No space left on device.*{tmp_path}/run"):
        train._run(config, [], 0.0, Watch(0))


def test_options_override_their_recipe_and_leave_the_rest(monkeypatch):
    config = parse("--recipe", "stdlib", "--steps", "20", "--mesh", "fsdp=8", "--model-config", "dim=64", "tied=True")
    assert (config.recipe, config.model, config.steps) == ("stdlib", "llama-tiny", 20)
    assert (dict(config.mesh), config.simulate_devices) == ({"fsdp": 8}, 8)
    assert dict(config.model_config) == {"dim": 64, "tied": True}
    config = parse("--recipe", "gpt2-stdlib", "--resume", "--steps", "9")
    assert (config.model, config.resume, parse("--resume", "40").resume) == ("gpt2-tiny", "auto", "40")
    config = parse("--recipe", "stdlib", "--factory", "my.jobs:job")
    assert (config.model, config.factory) == (None, "my.jobs:job")
    monkeypatch.setenv("JFSDP_DEVICES", "2")
    assert parse("--recipe", "stdlib").simulate_devices == 2, "as the launcher says"
    assert parse("--recipe", "stdlib", "--simulate-devices", "4").simulate_devices == 4, "which is refused"


def test_every_option_that_may_be_left_out_is_read_alike():
    types = typing.get_type_hints(type(parse()))
    optional = [name for name, kind in types.items() if type(None) in typing.get_args(kind)]
    assert {"seq_len", "max_grad_norm", "run_dir", "ema", "sync"} <= set(optional)
    for word in ("none", "None"):
        config = parse(*(part for name in optional for part in (f"--{name.replace('_', '-')}", word)))
        assert {name: getattr(config, name) for name in optional} == dict.fromkeys(optional)


@pytest.mark.proof
def test_with_averages_held_out_losses_are_theirs(unbroken, workspace, options):
    run_dir = workspace / "averages"
    more = ["--steps", 30, "--decay-steps", STEPS, "--ema", 0.9999, "--run-dir", run_dir]
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
        assert f"llama-tiny with the sizes of {tmp_path / 'hf'}: " in done.stdout
    lines, before = read_metrics(tmp_path / "run"), read_metrics(unbroken[0])
    assert lines[-1]["step"] == 1
    assert lines[-1]["eval_loss"] == pytest.approx(before[-1]["eval_loss"], rel=1e-5)
    assert lines[-1]["loss"] < 0.9 * before[0]["loss"]
    stated = json.loads((tmp_path / "run" / "config.json").read_text())["pretrained"]
    if form == "hugging face":
        assert {name: stated[name] for name in theirs} == theirs, "what no model computes with is kept for an export"
    else:
        assert stated["max_position_embeddings"] == 32


def test_adapters_resume_on_the_weights_that_they_began_from(unbroken, options, tmp_path, serve):
    given = ["--init-from", unbroken[0], "--lora", "rank=2,targets=**.q_proj.kernel", "--run-dir", tmp_path / "run"]
    for steps in (1, 2):
        done = serve(*options, *given, "--steps", steps, "--resume", "auto", "--log-every", 1)
        assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1, 2]


def test_a_run_of_deepspeed_continues_with_its_next_step(tmp_path, serve):
    tokens = np.random.default_rng(0).integers(18, size=4000).astype(np.uint16)
    (tmp_path / "tokens.bin").write_bytes(tokens.tobytes())
    (tmp_path / "tokens.bin.json").write_text('{"dtype": "uint16", "eod_id": 18}')
    theirs = ROOT / "tests" / "checkpoint" / "foreign" / "theirs" / "zero1"
    given = ["--model", "llama-tiny", "--init-from", theirs, "--init-key", "module", "--init-optimizer"]
    given += ["--data", tmp_path / "tokens.bin"]
    given += ["--seq-len", 8, "--batch-per-device", 4, "--eval-fraction", 0, "--log-every", 1]
    given += ["--lr-schedule", "linear", "--warmup", 0, "--min-learning-rate", 0, "--run-dir", tmp_path / "run"]
    done = serve(*given, "--steps", 3)
    assert done.returncode == 2 and not (tmp_path / "run").exists(), done.stderr
    check_facts(done.stderr, "--init-optimizer", "3 steps", "--steps")
    done = serve(*given, "--steps", 5, "--decay-steps", 10, "--learning-rate", 1e-2)
    assert done.returncode == 0, done.stderr
    lines = read_metrics(tmp_path / "run")
    assert [line["step"] for line in lines] == [4, 5]
    assert [line["learning_rate"] for line in lines] == pytest.approx([7e-3, 6e-3])
    done = serve(*given, "--steps", 6, "--resume", "--learning-rate", 1e-2)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [4, 5, 6]
    config = parse(*map(str, given))
    _, state, source = load_frozen(config, find_job(config), tmp_path / "run" / "checkpoints" / "6")  # as `generate`
    assert source.endswith("/6") and not state.opt_state


def test_a_resumed_run_says_of_its_weights_what_it_said_before_or_what_they_say(tmp_path):
    before = {"eos_token_id": 7, "max_position_embeddings": 4096, "hidden_size": 1}
    theirs = initial_hf_config(parse("--recipe", "stdlib", "--resume"), {"pretrained": before})
    job: Any = load_job("llama-tiny", None)
    short, long = (describe_model(job, seq_len, theirs) or {} for seq_len in (16, 8192))
    assert (short["eos_token_id"], short["hidden_size"]) == (7, job.config.dim)
    assert (short["max_position_embeddings"], long["max_position_embeddings"]) == (4096, 8192)
    # A job that is always started with --resume, so that it goes on wherever it was stopped.
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": 7}))
    config = parse("--recipe", "stdlib", "--resume", "--init-from", str(tmp_path))
    assert (describe_model(job, 16, initial_hf_config(config, {})) or {})["eos_token_id"] == 7


REFUSED = [
    (["--data", "nothing"], ["--data 'nothing'", "no such file or directory"]),
    (["--eval-data", "nothing", "--eval-fraction", 0], ["--eval-data 'nothing'", "no such file or directory"]),
    (["--run-dir", "memory://runs/one"], ["--run-dir memory://runs/one", "s3://BUCKET/PATH"]),
    (["--run-dir", ROOT / "README.md" / "run"], ["cannot be written"]),
    (["--recipe", "imagenet"], ["--recipe 'imagenet'", "gpt2-stdlib", "*.json"]),
    (["--remat", "names:nope"], ["remat names nope"]),
]


@pytest.mark.parametrize(("args", "facts"), REFUSED)
def test_what_is_refused_before_training_leaves_nothing_behind(args, facts, options, tmp_path, serve):
    """The same command, mended, would be refused where a directory was left."""
    done = serve(*options, "--run-dir", tmp_path / "run", *args)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    check_facts(done.stderr, *facts)
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize("option", ["--data", "--run-dir"])
def test_an_address_without_credentials_is_refused_before_training(option, options, tmp_path, serve):
    given = ["--run-dir", tmp_path / "run", option, f"s3://refused/{option}"]
    done = serve(*options, *given, AWS_PROFILE="nosuch")
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    check_facts(done.stderr, "nosuch", "s3://refused")


def test_what_is_refused_in_the_first_step_begins_mended_in_the_same_directory(options, tmp_path, serve):
    for args in (["--tracker", "json:dumps"], ["--param-dtype", "float16"]):
        done = serve(*options, "--run-dir", tmp_path / "run", *args)
        assert done.returncode == 2 and " ".join(args) in done.stderr, done.stderr
    done = serve(*options, "--run-dir", tmp_path / "run", "--steps", 1, "--decay-steps", STEPS)
    assert done.returncode == 0, done.stderr
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [1]
