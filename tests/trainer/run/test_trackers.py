"""Trackers: what they write, the run that a resumed one goes on in, and that a failure ends no run."""

import json
import math
import threading

import pytest

from jfsdp.trainer.run.trackers import BackgroundTracker, MLflow, Wandb, run_id

RECORDS = [
    {"step": 1, "loss": 2.0, "mfu": None, "grad_norm": math.nan, "num_skipped": 0},
    {"step": 2, "loss": 1.5, "mfu": 0.4, "grad_norm": 1.0, "num_skipped": 0},
]


@pytest.fixture
def described(tmp_path):
    return {"config": {"model": "llama-tiny", "steps": 2}, "begun": 1764000000.25, "run_dir": str(tmp_path / "a run")}


def write_twice(kind, described):
    """Two starts of one run: the second goes on after the first step."""
    for record in RECORDS:
        tracker = kind("jfsdp-test", described)
        tracker.write(record)
        tracker.close()


def test_an_id_is_that_of_the_run_and_has_no_odd_letters(described):
    assert run_id(described) == "a-run-1764000000"


def test_mlflow_goes_on_in_the_same_run(described, tmp_path, monkeypatch):
    import mlflow

    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{tmp_path / 'mlflow'}")
    write_twice(MLflow, described)
    (run,) = mlflow.search_runs(experiment_names=["jfsdp-test"], output_format="list")
    assert run.data.params["steps"] == "2" and (run.info.run_name, run.info.status) == ("a run", "FINISHED")
    assert run.data.metrics == {"step": 2, "loss": 1.5, "mfu": 0.4, "grad_norm": 1.0, "num_skipped": 0}
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    assert [(one.step, one.value) for one in history] == [(1, 2.0), (2, 1.5)]


def test_wandb_offline_goes_on_in_a_run_of_the_same_id(described, tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    (tmp_path / "a run").mkdir()
    write_twice(Wandb, described)
    found = list((tmp_path / "a run" / "wandb").glob("offline-run-*/*.wandb"))
    assert [path.name for path in found] == ["run-a-run-1764000000.wandb"] * 2


class Broken:
    def __init__(self, fails):
        self.fails, self.written, self.closed = fails, [], False

    def write(self, record):
        if record["step"] == self.fails:
            raise ConnectionError("no route")
        self.written.append(record)

    def close(self):
        self.closed = True


def test_a_tracker_that_fails_is_said_once_and_written_to_no_more():
    told: list[str] = []
    inner = Broken(2)
    tracker = BackgroundTracker("--wandb x", lambda: inner, told.append)
    for step in (1, 2, 3):
        tracker.write({"step": step})
    tracker.close()
    (line,) = told
    assert inner.written == [{"step": 1}] and not inner.closed
    assert all(fact in line for fact in ("--wandb x", "ConnectionError", "no route", "WANDB_MODE=offline"))


def test_a_tracker_that_hangs_holds_up_nothing():
    told: list[str] = []
    hanging = threading.Event()
    tracker = BackgroundTracker("--wandb x", hanging.wait, told.append, patience_s=0.05)
    tracker.write({"step": 1})
    tracker.close()
    hanging.set()
    assert len(told) == 1 and "0.05 s" in told[0]


def test_a_tracker_that_does_not_begin_is_said_too():
    told: list[str] = []
    tracker = BackgroundTracker("--mlflow x", lambda: json.loads("{"), told.append)
    tracker.write({"step": 1})
    tracker.close()
    assert len(told) == 1
