"""Runs on choices between two answers: what the reference is, that it stays, and that a resumed run goes on with it."""

import json
import random

import numpy as np
import pytest

from jfsdp.cli.commands import main
from tests.scripts.command import read_metrics

MODEL = ["--model", "llama-tiny", "--model-config", "dim=16", "num_layers=1", "ffn_dim=32", "--seq-len", 24]
COMMON = [*MODEL, "--simulate-devices", 2, "--batch-per-device", 4, "--param-dtype", "float32", "--sample-tokens", 0]
COMMON += ["--no-check-loss", "--remat", "none"]


def write_records(path, **fields):
    draw = random.Random(0)
    pairs = [(draw.randint(0, 99), draw.randint(0, 99)) for _ in range(80)]
    lines = [{name: text.format(a, b, a + b, a - b) for name, text in fields.items()} for a, b in pairs]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.fixture(scope="module")
def workspace(tmp_path_factory, serve):
    """Weights to begin from, pairs, and a run on them with adapters."""
    root = tmp_path_factory.mktemp("preferences")
    answers = write_records(root / "answers.jsonl", prompt="{}+{}=", completion="{2}")
    write_records(root / "pairs.jsonl", prompt="{}+{}=", chosen="{2}", rejected="{3}")
    assert serve(*COMMON, "--data", answers, "--steps", 10, "--run-dir", root / "begin").returncode == 0
    done = serve(*preferring(root), "--run-dir", root / "run")
    assert done.returncode == 0, done.stderr
    assert "log-likelihoods of 80 pairs" in done.stdout
    return root


def preferring(root, *more):
    lora = ["--lora", "rank=4,alpha=8,targets=**.attn.*.kernel", "--learning-rate", 1e-2]
    saved = ["--steps", 20, "--checkpoint-every", 10, "--log-every", 1, "--keep", 0]
    data = ["--data", root / "pairs.jsonl", "--preference", "dpo", "--beta", 0.2, "--init-from", root / "begin"]
    return [*COMMON, *lora, *saved, *data, *more]


def losses(run_dir):
    return [(line["step"], line["loss"], line["eval_loss"]) for line in read_metrics(run_dir)]


def test_a_run_begins_at_its_reference_and_learns(workspace):
    found = losses(workspace / "run")
    assert found[0][1] == pytest.approx(np.log(2), rel=1e-5)  # nothing has changed yet
    assert found[-1][1] < 0.68 and read_metrics(workspace / "run")[-1]["eval_correct"] > 0.5
    assert {"reward_chosen", "reward_rejected", "correct"} <= read_metrics(workspace / "run")[-1].keys()


def test_a_resumed_run_goes_on_bit_for_bit_with_and_without_the_file(workspace, serve):
    before, file = losses(workspace / "run"), workspace / "run" / "reference.npy"
    table = np.load(file)
    for remove in (False, True):
        if remove:
            file.unlink()
        done = serve(*preferring(workspace), "--run-dir", workspace / "run", "--resume", 10)
        assert done.returncode == 0, done.stderr
        assert ("log-likelihoods of 80 pairs" in done.stdout) is remove
        assert losses(workspace / "run") == before
        np.testing.assert_array_equal(np.load(file), table)


def test_another_reference_is_computed_by_its_own_weights(workspace, tmp_path, serve):
    done = serve(*preferring(workspace, "--reference", workspace / "begin"), "--run-dir", tmp_path / "same")
    assert done.returncode == 0, done.stderr
    np.testing.assert_allclose(
        np.load(tmp_path / "same" / "reference.npy"), np.load(workspace / "run" / "reference.npy"), rtol=1e-5
    )


def test_a_run_with_adapters_is_evaluated_like_its_export(workspace, tmp_path, capsys):
    def evaluate(*args):
        data = ["--data", workspace / "answers.jsonl", "--seq-len", 24, "--param-dtype", "float32", "--json"]
        assert main(["evaluate", *map(str, (*args, *data))]) == 0
        return json.loads(capsys.readouterr().out)

    for source, target in (("begin", "base"), ("run", "adapter")):
        assert main(["checkpoint", "export", str(workspace / source), str(tmp_path / target)]) == 0
    capsys.readouterr()
    before, tuned = evaluate(workspace / "begin"), evaluate(workspace / "run")
    exported = evaluate(tmp_path / "base", "--adapter", tmp_path / "adapter", "--tokenizer", "byte")
    assert tuned["loss"] == pytest.approx(exported["loss"], rel=1e-5)
    assert abs(tuned["loss"] - before["loss"]) > 1e-3
    assert tuned["weight"] == before["weight"] == exported["weight"]


@pytest.mark.parametrize(
    ("more", "expected"),
    [
        (["--reference", "{root}/run"], "adapters"),
        (["--reference", "{root}/nowhere"], "nowhere"),
        pytest.param(["--reference", "{root}/other"], "is of another model", marks=pytest.mark.proof),
        (["--data", "{root}/answers.jsonl"], "--preference dpo needs records with chosen"),
        (["--preference", "none", "--beta", "0.1"], "are pairs of answers; choose a loss with --preference"),
    ],
)
def test_what_cannot_be_preferred_is_refused_before_training(workspace, tmp_path, more, expected, serve):
    if "other" in str(more) and not (workspace / "other").exists():
        wide = ["--model-config", "dim=24", "num_layers=1", "ffn_dim=32", "--data", workspace / "answers.jsonl"]
        assert serve(*COMMON, *wide, "--steps", 1, "--run-dir", workspace / "other").returncode == 0
    more = [one.format(root=workspace) for one in more]
    done = serve(*preferring(workspace, *more), "--run-dir", tmp_path / "run")
    assert done.returncode == 2 and expected in done.stderr, (done.returncode, done.stderr)
    assert "Traceback" not in done.stderr
