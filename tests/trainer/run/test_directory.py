import json
import os

import pytest

from jfsdp.trainer.run import directory as runs
from tests.refusals import refuses


@pytest.fixture
def run(tmp_path):
    """A run with checkpoints 4, 8 and 12, metrics up to step 13 and half a line more."""
    for step in (4, 8, 12):
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    (tmp_path / "checkpoints" / "16.orbax-checkpoint-tmp").mkdir()
    lines = [json.dumps({"step": step}) for step in range(1, 14)]
    (tmp_path / "metrics.jsonl").write_text("\n".join([*lines, '{"ste']))
    runs.write_json(tmp_path / "config.json", {"config": {}, "decides": {"seed": 0, "model_config.dim": 64}})
    return tmp_path


def _steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def test_whole_checkpoints_are_listed_and_a_run_is_never_overwritten(run, tmp_path):
    assert runs.checkpoint_steps(run) == [4, 8, 12]
    assert (runs.resume_step(run, "auto"), runs.resume_step(run, "4")) == (12, 4)
    assert runs.resume_step(tmp_path / "nothing", "auto") == 0
    refuses(lambda: runs.resume_step(run, "5"), "4, 8, 12")
    refuses(lambda: runs.resume_step(run, "last"), "auto")
    refuses(lambda: runs.check_new(run), "step 12", "--resume")


def test_rewinding_to_the_last_checkpoint_drops_the_lines_after_it(run):
    runs.rewind(run, 12)
    assert _steps(run / "metrics.jsonl") == list(range(1, 13))
    assert not list(run.glob("replaced-*"))


def test_rewinding_further_puts_aside_what_it_takes_away(run):
    before = (run / "metrics.jsonl").read_text()
    runs.rewind(run, 4)
    assert _steps(run / "metrics.jsonl") == [1, 2, 3, 4]
    assert runs.checkpoint_steps(run) == [4]
    assert sorted(path.name for path in (run / "replaced-1").iterdir()) == ["12", "8", "metrics.jsonl"]
    assert (run / "replaced-1" / "metrics.jsonl").read_text() == before


def test_a_place_that_cannot_be_written_or_is_in_use_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (tmp_path / "checkpoints").write_text("")
    refuses(lambda: runs.check_writable(tmp_path), "--run-dir")
    refuses(lambda: runs.check_writable(tmp_path / "file" / "run"), "file/run")
    refuses(lambda: runs.lock_run_dir(tmp_path / "file" / "run").__enter__(), "file/run")
    with runs.lock_run_dir(tmp_path):
        refuses(lambda: runs.lock_run_dir(tmp_path).__enter__(), f"process {os.getpid()}")


def test_the_newest_run_of_a_name_is_the_last_one_that_saved_something(tmp_path):
    for name in ("stdlib-20260101-000000", "stdlib-20260102-000000"):
        (tmp_path / name / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "stdlib-20260103-000000").mkdir()
    (tmp_path / "stdlib-tiny-20260104-000000" / "checkpoints" / "5").mkdir(parents=True)  # another model
    assert runs.newest_run_dir("stdlib", str(tmp_path)).name == "stdlib-20260102-000000"
    refuses(lambda: runs.newest_run_dir("llama", str(tmp_path)), "--resume", "llama-DATE-TIME")
