import json
import os
from contextlib import nullcontext

import pytest

from jfsdp.trainer.run import directory as runs
from jfsdp.trainer.run import resume_rules
from jfsdp.trainer.run.build import build
from jfsdp.trainer.run.config import TrainConfig
from tests.options import made
from tests.refusals import refusing


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


def test_incomplete_checkpoints_are_not_listed(run):
    assert runs.checkpoint_steps(run) == [4, 8, 12]


def test_resume_auto_is_the_latest_step(run, tmp_path):
    assert runs.resume_step(run, "auto") == 12
    assert runs.resume_step(run, "4") == 4
    assert runs.resume_step(tmp_path / "nothing", "auto") == 0


@pytest.mark.parametrize(("resume", "words"), [("5", "the steps are 4, 8, 12"), ("last", "neither auto nor a step")])
def test_resume_of_a_step_that_is_not_there_raises(run, resume, words):
    with pytest.raises(ValueError, match=words):
        runs.resume_step(run, resume)


def test_a_run_is_never_overwritten(run):
    with pytest.raises(ValueError, match="up to step 12; continue it with --resume"):
        runs.check_new(run)


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


def test_another_configuration_is_refused_by_name(run):
    runs.check_same(run, {"seed": 0, "model_config.dim": 64})
    with refusing("model_config.dim", "was 64", "128", "model_config.tied"):
        runs.check_same(run, {"seed": 0, "model_config.dim": 128, "model_config.tied": True})


def test_what_may_change_is_not_refused_and_what_is_refused_is_all_the_rest(run):
    decides = build(made(TrainConfig, model="llama-tiny", model_config=("dim=16", "num_layers=1")), {}).decides
    may = resume_rules.options_of("said, kept", "said")
    assert {"learning_rate", "decay_steps", "warmup", "skip_nonfinite"} < set(may) < decides.keys()
    runs.write_json(run / "config.json", {"config": {}, "decides": decides})
    for name in decides:
        with nullcontext() if name in may else pytest.raises(ValueError, match=f"{name} was"):
            runs.check_same(run, decides | {name: "another"})


def test_a_file_where_checkpoints_go_is_refused(tmp_path):
    (tmp_path / "checkpoints").write_text("")
    with refusing("--run-dir"):
        runs.check_writable(tmp_path)


def test_a_directory_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with refusing("file/run"):
        runs.check_writable(tmp_path / "file" / "run")
    in_vain = refusing("file/run")
    with in_vain, runs.only_writer(tmp_path / "file" / "run"):
        pass


def test_the_newest_run_of_a_name_is_the_last_one_that_saved_something(tmp_path):
    for name in ("stdlib-20260101-000000", "stdlib-20260102-000000"):
        (tmp_path / name / "checkpoints" / "5").mkdir(parents=True)
    (tmp_path / "stdlib-20260103-000000").mkdir()
    (tmp_path / "stdlib-tiny-20260104-000000" / "checkpoints" / "5").mkdir(parents=True)  # another model
    assert runs.newest_run_dir("stdlib", str(tmp_path)).name == "stdlib-20260102-000000"
    with pytest.raises(ValueError, match=r"--resume: there is no .*llama-DATE-TIME"):
        runs.newest_run_dir("llama", str(tmp_path))


def test_a_directory_in_use_is_refused_and_names_its_holder(tmp_path):
    in_use = pytest.raises(ValueError, match=rf"in use by process {os.getpid()} on")
    with runs.only_writer(tmp_path), in_use, runs.only_writer(tmp_path):
        pass
    with runs.only_writer(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []
