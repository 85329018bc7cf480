"""What a resumed run does with another value of each option: every option has one rule, and the rule holds."""

import dataclasses
import json

import pytest

from jfsdp.trainer.run import resume_rules
from jfsdp.trainer.run.build import build
from jfsdp.trainer.run.config import TrainConfig
from tests.options import changed, made

CONFIG = made(TrainConfig, model="llama-tiny", model_config=("dim=16", "num_layers=1"), data="README.md")

# One value of each option that losses depend on and that is no matter of the data, but what every run must have.
DECIDE = {
    "model_config": ("dim=16", "num_layers=2"),
    "seq_len": 64,
    "global_batch": 16,
    "batch_per_device": 3,
    "seed": 1,
    "param_dtype": "float32",
    "reduce_dtype": "float32",
    "gather_wire": "float8",
    "reduce_wire": "int8",
    "matmul": "float8",
    "opt_state_dtype": "bfloat16",
    "ema": 0.9,
    "rate_scale": ("embed=2",),
    "optimizer": "muon",
    "weight_decay": 0.2,
    "beta1": 0.5,
    "beta2": 0.5,
    "eps": 1e-6,
    "momentum": 0.5,
    "frozen": ("embed",),
    "frozen_dtype": "bfloat16",
    "lora": ("targets=a",),
    "quantized": ("a=int8",),
}
CHANGE = {
    "learning_rate": 1.0,
    "min_learning_rate": 0.5,
    "lr_schedule": "wsd",
    "warmup": 3,
    "decay_steps": 77,
    "max_grad_norm": 2.0,
    "skip_nonfinite": True,
    "accumulate": 2,
}
ROUND = {
    "strategy": "ddp",
    "opt_over": "fsdp",
    "offload": ("params",),
    "sync": "last",
    "reshard_after_backward": False,
    "reshard_after_forward": "2",
    "remat": "none",
    "mesh": "fsdp=2",
    "min_size": 0,
    "xla": ("a=b",),
}
BUILT = {"model_config", "seq_len", "global_batch", "batch_per_device", "warmup", "decay_steps"}  # said by `build`


def _decides(**changes):
    config = changed(CONFIG, **changes)
    return build(config, {}).decides if changes.keys() & BUILT else resume_rules.loss_settings(config)


def _stored(**changes):
    """What `config.json` of a run holds."""
    config = dataclasses.asdict(changed(CONFIG, **changes))
    return json.loads(json.dumps({"config": config, "decides": _decides(**changes)}))


@pytest.fixture(scope="module")
def whole():
    return build(CONFIG, {}).decides


@pytest.mark.parametrize("name", DECIDE)
def test_another_value_of_what_decides_is_refused(name, whole):
    assert name in resume_rules.options_of("refused")
    ours = _decides(**{name: DECIDE[name]})
    assert resume_rules.refused({"decides": {key: whole[key] for key in ours}}, ours)


@pytest.mark.parametrize("name", CHANGE)
def test_another_value_of_what_may_change_is_said(name, whole):
    assert name in resume_rules.options_of("noted, kept", "noted")
    now = changed(CONFIG, **{name: CHANGE[name]})
    ours = _decides(**{name: CHANGE[name]})
    before = {"config": dataclasses.asdict(CONFIG), "decides": {key: whole[key] for key in ours}}
    assert not resume_rules.refused(before, ours)
    assert name in resume_rules.changed(before, ours, now)


@pytest.mark.parametrize("name", ROUND)
def test_another_value_of_what_rounds_is_said_and_decides_nothing(name):
    assert name in resume_rules.options_of("rounding")
    now = changed(CONFIG, **{name: ROUND[name]})
    assert resume_rules.loss_settings(now) == resume_rules.loss_settings(CONFIG)
    assert list(resume_rules.changed(_stored(), resume_rules.loss_settings(now), now)) == [name]


def test_the_rest_of_the_rules_is_of_the_same_options():
    """Those of the tables above that decide alone are all that do; the rest of "refused" are data, names, pairs."""
    rest = set(resume_rules.options_of("refused")) - DECIDE.keys()
    rest -= {"data", "tokenizer", "text_field", "chat_template", "answers"}
    rest -= {"eod_token", "eval_fraction", "cross_documents", "model", "factory"}
    assert rest == {"preference", "beta", "reference"}
    assert CHANGE.keys() == set(resume_rules.options_of("noted, kept", "noted"))


def test_what_a_command_leaves_out_is_as_the_run_had_it():
    asked = {"learning_rate": 1.0, "keep": 9, "steps": 7, "log_every": 1}
    kept = resume_rules.kept(_stored(**asked))
    assert kept["learning_rate"] == 1.0 and kept["keep"] == 9
    assert not kept.keys() & {"steps", "log_every", "accumulate"}
    assert resume_rules.kept({}) == {}


def test_one_meaning_has_one_spelling():
    spelled = changed(CONFIG, frozen=("b,a",), mesh="fsdp=2", quantized=("a=int8",))
    other = changed(CONFIG, frozen=("a", "b", "a"), mesh={"fsdp": 2}, quantized={"a": "int8"})
    assert resume_rules.loss_settings(spelled) == resume_rules.loss_settings(other)


def test_an_optimizer_is_compared_with_its_defaults():
    spelled = changed(CONFIG, optimizer="adamw", beta1=0.9, weight_decay=0.1)
    plain = resume_rules.loss_settings(changed(CONFIG, optimizer="adamw"))
    assert resume_rules.loss_settings(spelled) == plain and plain["beta2"] == 0.95 and plain["momentum"] is None
    other = resume_rules.loss_settings(changed(CONFIG, optimizer="adamw", beta1=0.8))
    assert resume_rules.refused({"decides": plain}, other) == {"beta1": [0.9, 0.8]}


def test_a_run_from_before_the_optimizer_was_an_option_continues(whole):
    new = {"optimizer", "weight_decay", "beta1", "beta2", "eps", "momentum", "lr_schedule"}
    config = {name: x for name, x in dataclasses.asdict(CONFIG).items() if name not in new}
    before = {"config": config, "decides": {name: x for name, x in whole.items() if name not in new}}
    assert not resume_rules.refused(before, whole) and not resume_rules.changed(before, whole, CONFIG)
    assert not resume_rules.kept(before).keys() & new
    muon = _decides(optimizer="muon")
    assert resume_rules.refused(before, whole | muon)["optimizer"] == [None, "muon"]


def test_a_removed_option_is_refused_at_another_value_than_its_default(whole):
    assert not resume_rules.refused({"decides": whole | {"output_dtype": None, "shuffle_rows": 1024}}, whole)
    found = resume_rules.refused({"decides": whole | {"output_dtype": "float32"}}, whole)
    told = resume_rules.describe(found)
    assert "output_dtype was 'float32'" in told and "a loss that casts" in told


def test_texts_of_an_older_run_are_compared_by_what_they_mean(whole):
    theirs = {"rate_scale": ["head=2.0", "embed=1e-1"], "model_config.fields": ["x=1e-3", "stacked=False"]}
    ours = {"rate_scale": ["head=2.0", "embed=0.1"], "model_config.fields": ["x=0.001", "stacked=false"]}
    assert not resume_rules.refused({"decides": whole | theirs}, whole | ours)
    other = ours | {"rate_scale": ["head=2.0000001", "embed=0.1"]}
    assert list(resume_rules.refused({"decides": whole | theirs}, whole | other)) == ["rate_scale"]


def test_removed_options_that_a_run_had_are_named_with_what_replaces_them():
    had = {"checkpoint_minutes": 15.0, "engine": "manual", "reduce": None, "extensions": []}
    assert resume_rules.removed({"config": had}) == {
        "checkpoint_minutes": "--checkpoint-every STEPS",
        "engine": "--program xla or --program manual",
    }
    assert resume_rules.removed({}) == {}


def test_of_a_run_of_which_nothing_is_known_nothing_differs():
    assert resume_rules.refused({}, {"seed": 1}) == {} and resume_rules.changed({}, {"seed": 1}, CONFIG) == {}
