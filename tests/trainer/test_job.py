"""Jobs: how they are described, found by name or factory, configured, and what is refused."""

import dataclasses
from typing import Any

import pytest

from jfsdp.trainer.job import Job, as_job, find_job, job_names, load_job
from tests.options import config_of
from tests.refusals import refuses

FIELDS: dict[str, Any] = {"model": print, "loss": print, "batch": print, "units": [], "optimizer": print}


@dataclasses.dataclass(frozen=True)
class Config:
    dim: int = 4
    depth: int = 2


def configurable(**changes: Any) -> dict[str, Any]:
    return {**FIELDS, "config": Config(**changes), "configure": configurable}


def test_a_dict_becomes_a_job_named_after_where_it_was_found():
    job = as_job({**FIELDS, "seq_len": 7}, "mine")
    assert (job.name, job.seq_len, job.vocab_size, job.config) == ("mine", 7, None, None)
    assert as_job({**FIELDS, "name": "own"}, "mine").name == "own"
    assert as_job(job, "other") is job


@pytest.mark.parametrize("field", FIELDS)
def test_a_missing_field_is_named(field):
    fields = {key: value for key, value in FIELDS.items() if key != field}
    refuses(lambda: as_job(fields, "mine"), "job 'mine'", f"missing fields ['{field}']")


@pytest.mark.parametrize(
    ("value", "error", "facts"),
    [
        ({**FIELDS, "modle": 1}, ValueError, ["'mine'", "['modle']"]),
        ({**FIELDS, "seq_len": 0}, ValueError, ["seq_len=0", "at least 1"]),
        ({**FIELDS, "data": "sounds"}, ValueError, ["data='sounds'", "tokens, pairs", "f(share)"]),
        *[
            ({**FIELDS, name: x}, TypeError, [name])
            for name, x in {"seq_len": "9", "loss": 3, "eval_data": "x"}.items()
        ],
        *[(x, TypeError, ["jfsdp.trainer.Job", type(x).__name__]) for x in (None, "job", [FIELDS])],
    ],
)
def test_what_is_no_job_is_refused_by_field(value, error, facts):
    refuses(lambda: as_job(value, "mine"), *facts, error=error)


def test_installed_models_are_found_by_name():
    assert {"llama-tiny", "llama-8b", "llama-405b"} <= set(job_names())
    job = find_job("llama-tiny")
    assert (job.name, job.vocab_size, job.seq_len, callable(job.model)) == ("llama-tiny", 264, 256, True)
    assert job.with_config(num_layers=2).config.num_layers == 2
    module, inputs = find_job("gpt2").model
    assert type(module).__name__ == "GPT2" and [x.shape for x in inputs] == [(1, 1)]
    refuses(lambda: find_job("llama-9b"), "'llama-9b'", ", ".join(job_names()))


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
    monkeypatch.setattr("importlib.metadata.entry_points", lambda group: [])
    refuses(lambda: find_job("llama-tiny"), "none", "--factory")


FACTORIES = """
JOB = dict(model=1, loss=max, batch=max, units=(), optimizer=max)
WRONG = dict(JOB, loss=3)

def make():
    return JOB

def needy(name):
    return {}

def broken():
    raise KeyError("the factory itself")
"""


def test_a_factory_is_imported_from_the_working_directory(workdir):
    (workdir / "pack").mkdir()
    (workdir / "pack" / "jobs.py").write_text(FACTORIES)
    (workdir / "my_jobs.py").write_text(FACTORIES)
    (workdir / "importing_jobs.py").write_text("import importing")  # its own name begins so too
    job = load_job(None, "my_jobs:make")
    assert (job.name, job.model, job.optimizer) == ("my_jobs:make", 1, max)
    assert load_job(None, "pack.jobs:JOB").loss is max
    for spec, error, facts in (
        ("my_jobs:WRONG", ValueError, ["loss=3"]),
        ("my_jobs:nothing", ValueError, ["my_jobs", "'nothing'"]),
        ("my_jobs:needy", ValueError, ["f()"]),
        ("my_jobs:broken", KeyError, ["the factory itself"]),
        ("importing_jobs:make", ModuleNotFoundError, ["importing"]),
        ("no_such_jobs:make", ValueError, ["'no_such_jobs'", workdir]),
        ("no_such_jobs.inner:make", ValueError, ["'no_such_jobs'"]),
        *((spec, ValueError, [repr(spec), "module:function"]) for spec in ("", "module", ":make", "my_jobs.make")),
    ):
        refuses(lambda spec=spec: load_job(None, spec), *facts, error=error)
    for pair in ((None, None), ("llama-tiny", "my_jobs:make"), ("", "")):
        refuses(lambda pair=pair: load_job(*pair), "--model", "NAME", "--factory")


def test_config_pairs_are_literals_words_or_text():
    pairs = ["layers=2", "rate=1e-3", "stacked=false", "window=None", "kind=xla", "dims=(1, 2)", "text='8'", "path=a=b"]
    found = {"layers": 2, "rate": 1e-3, "stacked": False, "window": None, "kind": "xla", "dims": (1, 2), "text": "8"}
    assert config_of([*pairs, "empty="]) == {**found, "path": "a=b", "empty": ""}
    for pair in ("layers", "=2", ""):
        refuses(lambda pair=pair: config_of([pair]), "model-config", repr(pair), "KEY=VALUE")


def test_with_config_gives_the_job_that_configure_makes_with_what_was_replaced():
    job = as_job(configurable(), "mine")
    changed = job.with_config(dim=9)
    assert (changed.config, changed.name, job.config) == (Config(dim=9), "mine", Config())
    assert job.with_config() is job
    replaced = dataclasses.replace(job, loss=repr, units=["blocks"]).with_config(dim=9).with_config(dim=7)
    assert (replaced.loss, replaced.units, replaced.config, replaced.batch) == (repr, ["blocks"], Config(dim=7), print)
    refuses(lambda: job.with_config(width=9), "'mine'", "'width'", "dim")
    refuses(lambda: as_job(FIELDS, "mine").with_config(dim=9), "'mine'")
    refuses(lambda: dataclasses.replace(job, model=repr).with_config(dim=9), "'mine'")
