"""Where the lines of metrics.jsonl go besides: TensorBoard, Weights & Biases, MLflow, or a tracker of the user's own.

A tracker has `write(record)`, called with each line in the order of the steps, and `close()`. A resumed run goes on in
the tracker's run with the same id: the name of the run's directory and the second in which the run began.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from jfsdp.extras import load


class TensorBoard:
    """Writes records as TensorBoard scalars under the names they have in metrics.jsonl.

    Args:
      first_step: events of an earlier start from this step on are hidden.
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
    """Writes records to a project of Weights & Biases, or with WANDB_MODE=offline below `wandb/` of the run.

    Args:
      project: its name.
      described: the configuration of the run with `run_dir` and `begun`, as a tracker of the user's own gets it.
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
    """Writes records to an experiment of MLflow, on the server that MLFLOW_TRACKING_URI names.

    Args:
      experiment: its name.
      described: as for `Wandb`.
    """

    def __init__(self, experiment: str, described: Mapping[str, Any]):
        self._mlflow, tag = load("mlflow", "mlflow"), {"jfsdp.run": run_id(described)}
        self._mlflow.set_experiment(experiment)
        (key, value), *_ = tag.items()
        found = self._mlflow.search_runs(filter_string=f"tags.`{key}` = '{value}'", output_format="list")
        begun = {"run_id": found[0].info.run_id} if found else {"run_name": Path(described["run_dir"]).name}
        self._mlflow.start_run(**begun, tags=tag)
        if not found:
            self._mlflow.log_params(described["config"])

    def write(self, record: Mapping[str, Any]) -> None:
        self._mlflow.log_metrics(numbers_of(record), step=record["step"])

    def close(self) -> None:
        self._mlflow.end_run()


class Lenient:
    """A tracker that ends no run: what fails is said, and after that nothing more is written.

    Args:
      name: for messages.
      make: begins the tracker.
      say: prints a line.
    """

    def __init__(self, name: str, make: Callable[[], Any], say: Callable[[str], None]):
        self._name, self._say = name, say
        self._tracker: Any = self._try(make)

    def write(self, record: Mapping[str, Any]) -> None:
        if self._tracker is not None:
            self._try(lambda: self._tracker.write(record))

    def close(self) -> None:
        if self._tracker is not None:
            self._try(self._tracker.close)

    def _try(self, do: Callable[[], Any]) -> Any:
        try:
            return do()
        except Exception as error:  # of its network, its server, its disk
            self._tracker = None
            self._say(f"note: {self._name} gets no more of this run: {type(error).__name__}: {error}")
            return None


def run_id(described: Mapping[str, Any]) -> str:
    """Return the id of a run in a tracker: of letters, digits, dashes and underscores."""
    name = re.sub(r"[^\w-]", "-", Path(described["run_dir"]).resolve().name, flags=re.ASCII)
    return f"{name}-{int(described['begun'])}"


def numbers_of(record: Mapping[str, Any]) -> dict[str, float]:
    """Return what of a record is a finite number."""
    return {name: value for name, value in record.items() if value is not None and math.isfinite(value)}
