"""The directory of a run: never overwritten, and resumed only by the configuration that began it.

config.json      the configuration, under "decides" all that the numbers depend on, and under "changes" what a resumed
                 run went on with another value of, and after which step
checkpoints/     one directory per kept step
metrics.jsonl    one line per logged step
tensorboard/     the same for TensorBoard
goodput.json     where the time of all starts went
summary.json     how the run ended
loss.png         the loss curve
reference.npy    of a run on pairs: the log-likelihoods of all answers by the frozen reference
sample.txt       text generated from the model
profile/         traces
replaced-N/      what a `--resume STEP` put aside: later checkpoints, and metrics.jsonl as it was
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from jfsdp.checkpoint.disk.lock import Lock
from jfsdp.launch.environment import LAUNCHED
from jfsdp.trainer.run import resume_rules


def new_run_dir(name: str, root: str = "runs") -> Path:
    """Return `runs/NAME-DATE-TIME`, a directory that does not exist yet; of a launcher's restarts that of its first."""
    return Path(root) / f"{name}-{os.environ.get(LAUNCHED) or time.strftime('%Y%m%d-%H%M%S')}"


def newest_run_dir(name: str, root: str = "runs") -> Path:
    """Return the latest of `runs/NAME-DATE-TIME` that holds checkpoints.

    Raises:
      ValueError: if there is none.
    """
    runs = Path(root).iterdir() if Path(root).is_dir() else ()
    # gpt2-tiny-DATE-TIME is not a run of gpt2
    of_name = re.compile(rf"{re.escape(name)}-\d{{8}}-\d{{6}}")
    found = sorted(path for path in runs if of_name.fullmatch(path.name) and checkpoint_steps(path))
    if not found:
        wanted = f"{root}/{name}-DATE-TIME"
        raise ValueError(f"--resume: there is no {wanted} with checkpoints to go on from; name the run with --run-dir")
    return found[-1]


def checkpoint_steps(run_dir: Path) -> list[int]:
    """List the complete checkpoints of a run without opening them."""
    directory = run_dir / "checkpoints"
    return sorted(int(path.name) for path in directory.glob("*") if path.name.isdecimal()) if directory.is_dir() else []


def check_writable(run_dir: Path) -> None:
    """Make the directory, and write into it.

    Raises:
      ValueError: if either fails, or a file is where its checkpoints go; names the directory and the reason.
    """
    with _named(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=run_dir) as file:
            file.write(b"\0" * 4096)
    if (run_dir / "checkpoints").is_file():
        raise ValueError(f"{str(run_dir / 'checkpoints')!r} is a file; remove it, or name another --run-dir")


@contextlib.contextmanager
def _named(run_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ValueError(
            f"run directory {str(run_dir)!r} cannot be written ({error.strerror}); name another with --run-dir"
        ) from error


def check_new(run_dir: Path) -> None:
    """Refuse a directory that holds a run. An empty metrics.jsonl is of one that was refused before its first line.

    Raises:
      ValueError: if it has checkpoints or metrics.
    """
    steps = checkpoint_steps(run_dir)
    if steps:
        raise ValueError(
            f"run directory {str(run_dir)!r} holds a run with checkpoints up to step {steps[-1]}; continue it with "
            "--resume, or name another directory with --run-dir"
        )
    metrics = run_dir / "metrics.jsonl"
    if metrics.exists() and metrics.stat().st_size:
        raise ValueError(
            f"run directory {str(run_dir)!r} holds metrics of a run without checkpoints; begin it again with --resume, "
            "or name another directory with --run-dir"
        )


def resume_step(run_dir: Path, resume: str) -> int:
    """Return the step that `--resume` means: the one given; for "auto" the latest, or 0 where there is none yet.

    Raises:
      ValueError: if it is neither "auto" nor a number, or there is no such checkpoint; lists those there are.
    """
    steps = checkpoint_steps(run_dir)
    if resume == "auto":
        return steps[-1] if steps else 0
    if not resume.isdecimal():
        raise ValueError(f"--resume {resume!r} is neither auto nor a step")
    if int(resume) not in steps:
        there = ", ".join(map(str, steps)) or "none"
        raise ValueError(f"{str(run_dir)!r} has no checkpoint of step {resume}; the steps are {there}")
    return int(resume)


def write_json(path: Path, value: Any) -> None:
    """Write a JSON file whole or not at all."""
    partial = path.with_name(f".{path.name}.partial")
    partial.write_text(json.dumps(value, indent=2, sort_keys=True, default=str) + "\n")
    os.replace(partial, path)


def read_config(run_dir: Path) -> dict[str, Any]:
    """Read `config.json`; empty if there is none.

    Raises:
      ValueError: if the file is not what `write_json` wrote.
    """
    path = run_dir / "config.json"
    if not path.exists():
        return {}
    try:
        config = json.loads(path.read_text())
        return {**config, "decides": dict(config["decides"])}
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not the configuration of a run ({error}); restore it, or remove it") from error


def check_same(run_dir: Path, ours: Mapping[str, Any]) -> None:
    """Refuse to continue a run under another configuration (`rules.RULES`).

    Raises:
      ValueError: naming each setting that differs, what it was and what it is.
    """
    if refused := resume_rules.refused(read_config(run_dir), ours):
        raise ValueError(
            f"run directory {str(run_dir)!r} holds another run: {resume_rules.describe(refused)}. Resume with the "
            f"settings that began it, or start a new run with another --run-dir (from these weights with --init-from "
            f"{run_dir})"
        )


def rewind(run_dir: Path, step: int) -> Path | None:
    """Make `step` the last of a run: later checkpoints are put aside, later lines leave metrics.jsonl.

    Nothing is lost: both go to `replaced-N`, if a checkpoint is concerned. Lines alone, which a run wrote after its
    last checkpoint and before it was killed, are dropped: they are about to be written again.

    Returns:
      Where things were put aside; None if nothing was.
    """
    aside = None
    later = [other for other in checkpoint_steps(run_dir) if other > step]
    metrics = run_dir / "metrics.jsonl"
    if later:
        aside = next(path for n in range(1, 10**6) if not (path := run_dir / f"replaced-{n}").exists())
        aside.mkdir()
        if metrics.exists():
            shutil.copy2(metrics, aside)
        for other in later:
            os.replace(run_dir / "checkpoints" / str(other), aside / str(other))
    if metrics.exists():
        lines = metrics.read_text().splitlines()
        kept = [line for line in lines if (at := _step_of(line)) is not None and at <= step]
        partial = metrics.with_name(f".{metrics.name}.partial")
        partial.write_text("".join(f"{line}\n" for line in kept))
        os.replace(partial, metrics)
    return aside


def _step_of(line: str) -> int | None:
    """Return the step of a line; None for one that a killed process left half written."""
    try:
        return int(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return None


@contextlib.contextmanager
def only_writer(run_dir: Path) -> Iterator[None]:
    """Make the directory, and hold it for this process: two runs in one directory would destroy each other.

    Raises:
      ValueError: if it cannot be made, or another process holds it; names it.
    """
    what = f"run directory {str(run_dir)!r} is in use by"
    with _named(run_dir):
        run_dir.mkdir(parents=True, exist_ok=True)
        lock = Lock(run_dir / "lock", what, "stop it, or name another --run-dir")
    try:
        yield
    finally:
        lock.release()
