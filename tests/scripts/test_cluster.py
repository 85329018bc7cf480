"""The jobs for Slurm and Kubernetes in examples/: their command parses, and a stopped job is queued again."""

import os
import pathlib
import re
import shlex
import subprocess

import pytest

from jfsdp.layout.mesh import make_abstract_mesh
from jfsdp.trainer.run.build import with_global_batch
from jfsdp.trainer.run.config import TrainConfig
from scripts.train import parse

FOLDER = pathlib.Path(__file__).parent.parent.parent / "examples"
SCRIPTS = ("slurm/job.sh", "slurm/job-per-gpu.sh")


def command(script: str) -> TrainConfig:
    text = (FOLDER / script).read_text().replace("\\\n", " ")
    return parse(shlex.split(re.findall(r"scripts/train\.py (.*?)(?:;|& run)", text, re.S)[0]))


@pytest.mark.parametrize("script", [*SCRIPTS, "kubernetes/jobset.yaml"])
@pytest.mark.parametrize("num_devices", [8, 32, 64])
def test_the_rows_of_a_step_are_the_same_on_any_number_of_machines(script, num_devices):
    config = with_global_batch(command(script), make_abstract_mesh({"fsdp": num_devices}))
    assert (config.batch_per_device * num_devices, config.batch_per_device // config.accumulate) == (256, 2)


def run(script: str, tmp_path: pathlib.Path, code: int, summary: str | None) -> tuple[int, bool]:
    """Run a script whose `srun` ends with a status; return its own, and whether the job was queued again."""
    text = (FOLDER / script).read_text().replace("RUN=/shared/runs/llama", f"RUN={tmp_path}")
    if summary is not None:
        (tmp_path / "summary.json").write_text(summary)
    for name, does in {"srun": f"exit {code}", "scontrol": f'echo "$@" > {tmp_path}/asked'}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_CPUS_PER_TASK": "12"}
    status = subprocess.run(["bash", "-c", text], env=environment, check=False).returncode
    asked = tmp_path / "asked"
    return status, asked.exists() and asked.read_text() == "requeue 7\n"


@pytest.mark.parametrize("script", SCRIPTS)
@pytest.mark.parametrize(
    ("code", "summary", "expected"),
    [
        (0, '{"is_done": true}', (0, False)),
        (0, '{"is_done": false}', (0, True)),
        (143, None, (0, True)),
        (143, '{"is_done": true}', (0, True)),
        (1, '{"is_done": false}', (1, False)),
        (2, None, (2, False)),
        (75, None, (75, False)),
    ],
)
def test_a_job_that_was_stopped_is_queued_again_and_one_that_is_done_or_failed_is_not(
    script, code, summary, expected, tmp_path
):
    assert run(script, tmp_path, code, summary) == expected
