"""Trackers that receive the lines of metrics.jsonl: TensorBoard, Weights & Biases, MLflow, or a custom one.

A tracker has `write(record)`, called with each line in the order of the steps, and `close()`. A resumed run continues
the tracker's run with the same id: the name of the run's directory and its start time in seconds.
"""

from __future__ import annotations

import math
import queue
import re
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jfsdp.extras import load


class TensorBoard:
    """Writes records as TensorBoard scalars with the names in metrics.jsonl.

    Args:
      first_step: first step of this start; later events of earlier starts are hidden.
    """

    def __init__(self, directory: Path, first_step: int):
        self._writer = load("tensorboardX").SummaryWriter(str(directory), purge_step=first_step)

    def write(self, record: Mapping[str, Any]) -> None:
        for name, value in record.items():
            if name != "step" and value is not None:
                self._writer.add_scalar(name, value, record["step"])

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Writes records to a project of Weights & Biases; with WANDB_MODE=offline, to `wandb/` in the run's directory.

    Args:
      project: name of the project.
      described: the run's configuration with `run_dir` and `begun`, as for a custom tracker.
    """

    def __init__(self, project: str, described: Mapping[str, Any]):
        names = {"id": run_id(described), "name": Path(described["run_dir"]).name, "dir": described["run_dir"]}
        wandb = load("wandb", "wandb")
        self._run = wandb.init(project=project, resume="allow", config=described["config"], **names)
        self._run.define_metric("*", step_metric="step")  # a resumed run may write a step again

    def write(self, record: Mapping[str, Any]) -> None:
        self._run.log(numbers_of(record))

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Writes records to an experiment of MLflow, on the server of MLFLOW_TRACKING_URI.

    Args:
      experiment: name of the experiment.
      described: as for `Wandb`.
    """

    def __init__(self, experiment: str, described: Mapping[str, Any]):
        mlflow, name = load("mlflow", "mlflow"), run_id(described)
        self._entities, self._client = load("mlflow.entities", "mlflow"), mlflow.MlflowClient()
        where = mlflow.set_experiment(experiment).experiment_id
        found = self._client.search_runs([where], f"tags.`jfsdp.run` = '{name}'")
        title = Path(described["run_dir"]).name
        run = found[0] if found else self._client.create_run(where, tags={"jfsdp.run": name}, run_name=title)
        self._id = run.info.run_id
        for key, value in {} if found else described["config"].items():
            self._client.log_param(self._id, key, value)

    def write(self, record: Mapping[str, Any]) -> None:
        now, step = int(time.time() * 1000), record["step"]
        metrics = [self._entities.Metric(name, value, now, step) for name, value in numbers_of(record).items()]
        self._client.log_batch(self._id, metrics)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class BackgroundTracker:
    """Runs a tracker in a thread, so that it neither fails nor delays a run. Errors are printed as notes.

    Args:
      name: name for messages.
      make: returns the tracker.
      say: prints a line.
      patience_s: seconds that the end of a run waits for unsent records.
    """

    def __init__(self, name: str, make: Callable[[], Any], say: Callable[[str], None], patience_s: float = 60.0):
        self._name, self._make, self._say, self._patience_s = name, make, say, patience_s
        self._records: queue.SimpleQueue[Mapping[str, Any] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._work, name=f"jfsdp {name}", daemon=True)
        self._thread.start()

    def write(self, record: Mapping[str, Any]) -> None:
        self._records.put(record)

    def close(self) -> None:
        self._records.put(None)
        self._thread.join(self._patience_s)
        if self._thread.is_alive():
            self._say(f"note: {self._name} did not take the last lines within {self._patience_s:g} s")

    def _work(self) -> None:
        try:
            tracker = self._make()
            while (record := self._records.get()) is not None:
                tracker.write(record)
            tracker.close()
        except Exception as error:  # a tracker's network, server or disk
            remedy = "; WANDB_MODE=offline needs no server" * self._name.startswith("--wandb ")
            self._say(f"note: {self._name} cannot receive metrics: {type(error).__name__}: {error}{remedy}")


def run_id(described: Mapping[str, Any]) -> str:
    """Return the id of a run in a tracker, with letters, digits, dashes and underscores."""
    name = re.sub(r"[^\w-]", "-", Path(described["run_dir"]).resolve().name, flags=re.ASCII)
    return f"{name}-{int(described['begun'])}"


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of a record."""
    return {name: value for name, value in record.items() if value is not None and math.isfinite(value)}
