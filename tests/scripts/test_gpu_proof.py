"""The checks of `make gpu` that need no GPU, and its report."""

import json

import pytest

from scripts import gpu_proof
from scripts.gpu_proof import CHECKS, Checks, NotShown, ProofOptions, main, run_checks, write_report


@pytest.fixture(scope="module")
def proof(tmp_path_factory):
    options = ProofOptions(steps=3, model="llama-tiny", model_config=(("num_layers", 1), ("dim", 32)), seq_len=32)
    return Checks(options, tmp_path_factory.mktemp("traces"))


@pytest.mark.parametrize(
    "name", ["checkpoint", "lora", *(pytest.param(x, marks=pytest.mark.proof) for x in ("prove", "float8"))]
)
def test_checks_pass_on_the_cpu(proof, name):
    text, data = getattr(proof, name)()
    assert text and data


def test_a_step_is_measured_and_profiled(proof):
    text, data = proof.measure()
    assert "no plan for these devices" in text and data["step_s"] > 0 and data["peak_bytes"] is None
    text, data = proof.profile()
    assert data["num_steps"] >= 1 and data["seconds"]["matmul_s"] > 0 and "matrix products" in text


@pytest.mark.parametrize("name", ["attention", "offload", "race"])
def test_what_needs_a_gpu_is_not_shown(proof, name):
    with pytest.raises(NotShown):
        getattr(proof, name)()


@pytest.mark.proof
def test_the_race_with_fsdp2_runs_on_the_cpu(proof, monkeypatch, tmp_path):
    pytest.importorskip("transformers")
    monkeypatch.setattr(gpu_proof, "_gpu_memory", lambda: [1.0])
    options = ProofOptions(model="llama-tiny", seq_len=32, mesh=(("fsdp", 2),))
    text, data = Checks(options, tmp_path).race()
    assert "FSDP2" in text and data["devices"] == 2 and data["settings"]["torch-fsdp2"]["step_s"] > 0


def test_losses_that_differ_fail(proof):
    with pytest.raises(AssertionError, match="differ"):
        proof._compare(proof._small(), proof._small(seq_len=32), 1e-6)


class Fake:
    """A machine on which some checks fail."""

    def __getattr__(self, name):
        def check():
            if name == "lora":
                raise ValueError("losses differ\nby much")
            if name == "race":
                raise NotShown("no torch")
            return f"{name} | is right", {"name": name}

        return check


def test_the_report_has_every_check_and_goes_on_after_a_failure(tmp_path, monkeypatch):
    seen = []
    results = run_checks(Fake(), 1.0, seen.append)
    assert [one.name for one in results] == [*CHECKS] and seen == results
    status = {one.name: one.status for one in results}
    assert (status["lora"], status["race"], status["measure"]) == ("failed", "not shown", "passed")
    write_report(tmp_path, results)
    found = json.loads((tmp_path / "gpu-proof.json").read_text())
    assert found["about"]["jax"] and [one["status"] for one in found["checks"]] == [*status.values()]
    page = (tmp_path / "gpu-proof.md").read_text()
    assert "| lora | failed | ValueError: losses differ |" in page and "prove / is right" in page
    assert [one.status for one in run_checks(Fake(), -1.0, seen.append)] == ["not shown"] * len(CHECKS)
    monkeypatch.setattr(gpu_proof, "Checks", lambda *_: Fake())
    assert main(["--directory", str(tmp_path)]) == 1


def test_a_directory_that_is_not_there_is_refused(capsys):
    assert main(["--directory", "/nowhere"]) == 2
    assert "--directory /nowhere" in capsys.readouterr().err
    assert main(["--directory", ".", "--model", "nope"]) == 2
    assert "'nope'" in capsys.readouterr().err
