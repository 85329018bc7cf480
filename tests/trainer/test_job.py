"""Jobs: how they are described, found by name or factory, configured, and what is refused."""

import dataclasses
from typing import Any

import pytest

from jfsdp.trainer.job import Job, as_job, find_job, job_names, load_job
from tests.options import config_of
from tests.refusals import refuses, refusing

FIELDS: dict[str, Any] = {"model": print, "loss": print, "batch": print, "units": [], "optimizer": print}
REQUIRED = ("model", "loss", "batch", "units", "optimizer")


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int = 4
    depth: int = 2


def configurable(**changes: Any) -> dict[str, Any]:
    return {**FIELDS, "config": Config(**changes), "configure": configurable}


def test_a_job_passes_through_unchanged():
    job = Job(**FIELDS)
    assert as_job(job, "other") is job


def test_a_dict_becomes_a_job_named_after_where_it_was_found():
    job = as_job({**FIELDS, "seq_len": 7}, "mine")
    assert (job.name, job.seq_len, job.vocab_size, job.config) == ("mine", 7, None, None)
    assert as_job({**FIELDS, "name": "own"}, "mine").name == "own"


@pytest.mark.parametrize("field", REQUIRED)
def test_a_missing_field_is_named(field):
    fields = {key: value for key, value in FIELDS.items() if key != field}
    with refusing("job 'mine'", "unknown fields []", f"missing fields ['{field}']"):
        as_job(fields, "mine")


def test_an_unknown_field_is_named():
    with refusing("'mine'", "['modle']", "[]"):
        as_job({**FIELDS, "modle": 1}, "mine")


@pytest.mark.parametrize("value", [None, 3, "job", [FIELDS]])
def test_anything_else_is_not_a_job(value):
    refuses(lambda: as_job(value, "mine"), "mine", "jfsdp.trainer.Job", type(value).__name__, error=TypeError)


@pytest.mark.parametrize("field", [{"seq_len": "9"}, {"loss": 3}, {"placements": [1]}, {"eval_data": "x"}])
def test_a_field_of_another_type_is_a_type_error_that_names_it(field):
    refuses(lambda: as_job({**FIELDS, **field}, "mine"), "'mine'", *field, error=TypeError)


def test_a_number_out_of_range_is_a_value_error():
    refuses(lambda: as_job({**FIELDS, "seq_len": 0}, "mine"), "seq_len=0", "at least 1")


def test_commands_say_what_is_wrong_with_the_type_of_a_job(workdir):
    (workdir / "wrong_jobs.py").write_text("JOB = dict(model=1, loss=3, batch=max, units=(), optimizer=max)\n")
    refuses(lambda: load_job(None, "wrong_jobs:JOB"), "wrong_jobs:JOB", "loss=3")


def test_an_unknown_kind_of_data_is_refused():
    refuses(
        lambda: as_job({**FIELDS, "data": "sounds"}, "mine"), "job 'mine'", "data='sounds'", "tokens, pairs", "f(share)"
    )


def test_a_job_takes_whatever_fully_shard_takes_as_model():
    module, inputs = find_job("gpt2").model
    assert type(module).__name__ == "GPT2" and [x.shape for x in inputs] == [(1, 1)]
    assert find_job("gpt2").eval_loss is not None and find_job("llama-tiny").eval_loss is None


def test_installed_models_are_found_by_name():
    assert {"llama-tiny", "llama-8b", "llama-405b"} <= set(job_names())
    job = find_job("llama-tiny")
    assert (job.name, job.vocab_size, job.seq_len) == ("llama-tiny", 264, 256)
    assert callable(job.model)


def test_every_listed_name_can_be_found():
    assert [find_job(name).name for name in job_names()] == job_names()


def test_an_unknown_name_lists_the_models():
    with refusing("'llama-9b'") as error:
        find_job("llama-9b")
    assert str(error.value).endswith(", ".join(job_names()))


class FakeEntryPoint:
    name = "offered"

    def __init__(self, value: Any):
        self.value = value

    def load(self) -> Any:
        return self.value


@pytest.mark.parametrize(
    "value",
    [Job(**FIELDS), FIELDS, {"offered": FIELDS}, {"offered": lambda: FIELDS}, lambda: FIELDS],
    ids=["job", "dict", "dict of jobs", "dict of functions", "function"],
)
def test_an_entry_point_may_give_a_job_in_any_form(value, monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [FakeEntryPoint(value)])
    assert dataclasses.replace(find_job("offered"), name="job") == Job(**FIELDS)


def test_without_any_offered_model_the_error_says_what_to_do(monkeypatch):
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    with pytest.raises(ValueError, match=r"the models are none .*--factory"):
        find_job("llama-tiny")


def test_a_factory_is_imported_from_the_working_directory(workdir):
    (workdir / "my_jobs.py").write_text(
        "def make():\n    return dict(model=1, loss=max, batch=max, units=(), optimizer=max)\n"
    )
    job = load_job(None, "my_jobs:make")
    assert (job.name, job.model, job.optimizer) == ("my_jobs:make", 1, max)


def test_a_factory_may_be_a_job_itself_and_in_a_package(workdir):
    (workdir / "pack").mkdir()
    (workdir / "pack" / "jobs.py").write_text("JOB = dict(model=1, loss=max, batch=max, units=(), optimizer=max)\n")
    assert load_job(None, "pack.jobs:JOB").loss is max


@pytest.mark.parametrize("spec", ["", "module", "module:", ":make", "my_jobs.make"])
def test_a_malformed_factory_is_refused(spec):
    with pytest.raises(ValueError, match=f"factory {spec!r} is not module:function"):
        load_job(None, spec)


def test_a_factory_in_a_module_that_is_not_there_names_module_and_directory(workdir):
    with refusing("'no_such_jobs:make'", "'no_such_jobs'", workdir):
        load_job(None, "no_such_jobs:make")
    with pytest.raises(ValueError, match="no module named 'no_such_jobs'"):
        load_job(None, "no_such_jobs.inner:make")


def test_a_function_that_is_not_there_is_named(workdir):
    (workdir / "empty_jobs.py").write_text("")
    with refusing("'empty_jobs:make'", "empty_jobs", "'make'"):
        load_job(None, "empty_jobs:make")


def test_a_factory_that_takes_arguments_is_refused(workdir):
    (workdir / "needy_jobs.py").write_text("def make(name):\n    return {}\n")
    with refusing("'needy_jobs:make'", "f()"):
        load_job(None, "needy_jobs:make")


def test_what_a_factory_raises_passes_through(workdir):
    (workdir / "broken_jobs.py").write_text("def make():\n    raise KeyError('the factory itself')\n")
    with pytest.raises(KeyError, match="the factory itself"):
        load_job(None, "broken_jobs:make")


def test_what_importing_a_factory_raises_passes_through(workdir):
    (workdir / "importing_jobs.py").write_text("import some_package_that_is_missing\n")
    with pytest.raises(ModuleNotFoundError, match="some_package_that_is_missing"):
        load_job(None, "importing_jobs:make")


def test_a_missing_import_is_not_blamed_on_the_factory_for_sharing_its_first_letters(workdir):
    (workdir / "absent_jobs.py").write_text("import absent\n")
    with pytest.raises(ModuleNotFoundError, match="absent"):
        load_job(None, "absent_jobs:make")


@pytest.mark.parametrize(("model", "factory"), [(None, None), ("llama-tiny", "my_jobs:make"), ("", "")])
def test_exactly_one_of_model_and_factory_is_asked_for(model, factory):
    with refusing("--model", "NAME", "--factory"):
        load_job(model, factory)


def test_config_pairs_are_literals_words_or_text():
    pairs = [
        "layers=2",
        "rate=1e-3",
        "stacked=false",
        "tied=True",
        "window=None",
        "kind=xla",
        "dims=(1, 2)",
        "text='8'",
    ]
    assert config_of(pairs) == {
        "layers": 2,
        "rate": 1e-3,
        "stacked": False,
        "tied": True,
        "window": None,
        "kind": "xla",
        "dims": (1, 2),
        "text": "8",
    }
    assert config_of(["path=a=b", "empty="]) == {"path": "a=b", "empty": ""}
    assert config_of([]) == {}


@pytest.mark.parametrize("pair", ["layers", "=2", ""])
def test_a_config_pair_without_name_or_equals_is_refused(pair):
    with pytest.raises(ValueError, match=f"model-config .*{pair!r} is not KEY=VALUE"):
        config_of([pair])


def test_with_config_gives_the_job_that_configure_makes():
    job = as_job(configurable(), "mine")
    changed = job.with_config(dim=9)
    assert (changed.config, changed.name) == (Config(dim=9), "mine")
    assert job.config == Config()
    assert job.with_config() is job


def test_with_config_reaches_the_model_of_an_installed_job():
    assert find_job("llama-tiny").with_config(num_layers=2).config.num_layers == 2


def test_with_config_refuses_an_unknown_field_and_lists_the_known():
    with refusing("'mine'", "'width'"):
        as_job(configurable(), "mine").with_config(width=9)


def test_with_config_of_a_job_without_configuration_is_refused():
    with refusing("'mine'"):
        as_job(FIELDS, "mine").with_config(dim=9, depth=1)


def test_what_was_replaced_of_a_job_stays_when_its_configuration_changes():
    job = dataclasses.replace(as_job(configurable(), "mine"), loss=repr, units=["blocks"])
    changed = job.with_config(dim=9).with_config(dim=7)
    assert (changed.loss, changed.units, changed.config, changed.batch) == (repr, ["blocks"], Config(dim=7), print)


def test_a_job_whose_model_was_replaced_does_not_get_another_one_from_its_configuration():
    job = dataclasses.replace(as_job(configurable(), "mine"), model=repr)
    with refusing("'mine'"):
        job.with_config(dim=9)


def test_the_cuts_of_0_2_are_refused_with_their_new_name():
    facts = ("cuts", "placements", "PartitionSpec(None, 'tensor')")
    refuses(lambda: as_job({"cuts": {"**.kernel": (1, "tensor")}}, "old"), *facts)
