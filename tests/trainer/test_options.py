"""The options that both commands share: what they mean and what they refuse."""

import inspect
import json
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest
import tyro

import jfsdp
from jfsdp.train.update.ema import TrackEmaState
from jfsdp.train.update.low_precision import LowPrecisionState
from jfsdp.trainer import options
from jfsdp.trainer.help_groups import read_command
from jfsdp.trainer.option_errors import ELSEWHERE, check_known
from jfsdp.trainer.options import ShardingOptions
from jfsdp.trainer.parse import write
from jfsdp.trainer.recipes import load_recipe, option_value, write_recipe
from jfsdp.trainer.run.config import TrainConfig
from tests.models_small import Tower
from tests.options import made
from tests.refusals import refuses
from tests.sharding import fully_shard


def read(**texts):
    return made(ShardingOptions, **texts)


def arguments(**texts):
    return options.sharding_arguments(read(**texts))


def test_defaults_are_those_of_the_library_but_for_bfloat16_and_remat():
    ours = arguments() | {"mp_policy": None, "offload_policy": None, "remat": "none"}
    defaults = {name: x.default for name, x in inspect.signature(jfsdp.fully_shard).parameters.items()}
    assert ours == {name: defaults[name] for name in ours}
    assert arguments()["mp_policy"] == jfsdp.MixedPrecisionPolicy("bfloat16")
    assert arguments()["offload_policy"] == jfsdp.OffloadPolicy()
    assert arguments()["remat"] == "full"


@pytest.mark.parametrize(
    ("changes", "name", "value"),
    [
        ({"strategy": "3"}, "strategy", 3),
        ({"strategy": "hsdp"}, "strategy", "hsdp"),
        ({"opt_over": "replica,fsdp"}, "opt_over", ("replica", "fsdp")),
        ({"reshard_after_forward": "none"}, "reshard_after_forward", None),
        ({"reshard_after_forward": "True"}, "reshard_after_forward", True),
        ({"reshard_after_forward": "false"}, "reshard_after_forward", False),
        ({"reshard_after_forward": "8"}, "reshard_after_forward", 8),
        ({"remat": "dots"}, "remat", "dots"),
        ({"remat": "names:a,b"}, "remat", jfsdp.SaveNames(save=("a", "b"))),
        ({"remat": "offload:c"}, "remat", jfsdp.SaveNames(offload=("c",))),
        ({"remat": "offload:input"}, "remat", jfsdp.SaveNames(offload=(jfsdp.UNIT_INPUT,))),
        ({"remat": "names:a,b+offload:c"}, "remat", jfsdp.SaveNames(("a", "b"), ("c",))),
        ({"remat": "offload:c+names:a"}, "remat", jfsdp.SaveNames(("a",), ("c",))),
        ({"offload": ("params,opt_state",)}, "offload_policy", jfsdp.OffloadPolicy(params=True, opt_state=True)),
        ({"offload": ("grads", "params")}, "offload_policy", jfsdp.OffloadPolicy(params=True, grads=True)),
        ({"frozen": ("embed,norm", "layers.*")}, "frozen", ("embed", "norm", "layers.*")),
        ({"frozen_dtype": "bfloat16"}, "mp_policy", jfsdp.MixedPrecisionPolicy("bfloat16", frozen_dtype="bfloat16")),
        ({"param_dtype": None}, "mp_policy", jfsdp.MixedPrecisionPolicy()),
        (
            {"param_dtype": "float16", "reduce_dtype": "float32"},
            "mp_policy",
            jfsdp.MixedPrecisionPolicy("float16", "float32"),
        ),
    ],
)
def test_an_option_becomes_its_argument(changes, name, value):
    got = arguments(**changes)[name]
    assert got == value
    assert type(got) is type(value), "1 is not True"


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mesh": "8"}, ["--mesh '8'", "AXIS=SIZE"]),
        ({"mesh": "fsdp=2,fsdp=4"}, ["--mesh", "'fsdp'", "twice"]),
        ({"mesh": "fsdp=8,"}, ["''", "AXIS=SIZE"]),
        ({"mesh": "fsdp=2.5"}, ["'fsdp=2.5'", "AXIS=SIZE"]),
        ({"reshard_after_forward": "half"}, ["--reshard-after-forward 'half'", "none, true, false, node"]),
        ({"reshard_after_forward": "0"}, ["--reshard-after-forward '0'"]),
        ({"remat": "some"}, ["--remat 'some'", "none, full, dots, names:a,b"]),
        ({"remat": "names:"}, ["--remat 'names:'", "unknown"]),
        ({"remat": "names:a+names:b"}, ["--remat 'names:a+names:b'", "unknown"]),
        ({"remat": "names:a+offload:a"}, ["--remat 'names:a+offload:a'", "a cannot be both"]),
        ({"offload": ("",)}, ["--offload ''", "leave it out"]),
        ({"frozen": (",",)}, ["--frozen ','", "leave it out"]),
        ({"offload": ("params,state",)}, ["--offload 'params,state'", "'state'", "params, grads, opt_state"]),
        ({"profile": "3"}, ["--profile '3'", "START:STOP"]),
    ],
)
def test_what_cannot_be_read_names_the_option_and_what_it_takes(changes, words):
    refuses(lambda: made(TrainConfig, **changes), *words)


def wrap(**changes):
    return options.wrap_model(read(**changes), job())


LORAS = {
    "targets=**.up.kernel": jfsdp.LoRA(targets=("**.up.kernel",)),
    "rank=8,alpha=16,targets=**.q,**.v": jfsdp.LoRA(targets=("**.q", "**.v"), rank=8, alpha=16.0),
    "dropout=0.05,targets=a": jfsdp.LoRA(targets=("a",), dropout=0.05),
    "targets=a,rslora=True,dora=false,also=norm,head": jfsdp.LoRA(targets=("a",), rslora=True, also=("norm", "head")),
    "alpha=1e-1,targets=a,rank=3,targets=b,c": jfsdp.LoRA(targets=("a", "b", "c"), rank=3, alpha=0.1),
}


def test_loras_and_codecs_wrap_the_model_once():
    wrapped = wrap(lora=tuple(LORAS), quantized=("a=nf4", "b=int8"))
    assert (wrapped.model, wrapped.loras, wrapped.codecs) == (None, tuple(LORAS.values()), {"a": "nf4", "b": "int8"})
    assert wrap() is None, "the job's model, as it is"


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("", ["targets"]),
        ("rank=8", ["--lora 'rank=8'", "targets"]),
        ("**.up.kernel", ["'**.up.kernel'", "KEY=VALUE", "rank, alpha"]),
        ("targets=a,r=8", ["--lora 'targets=a,r=8'", "'r'", "rank, alpha"]),
        *(
            (f"targets=a,{part}", [part])
            for part in ("rank=8.5", "rank=8,16", "alpha=much", "dora=1", "rank=", "rank=0")
        ),
        ("targets=a,alpha=0", ["alpha=0.0"]),
        ("=a", ["'=a'"]),
    ],
)
def test_a_lora_that_cannot_be_read_is_refused_by_key(text, facts):
    refuses(lambda: wrap(lora=(text,)), *facts)


def job(learning_rate=optax.adam):
    return jfsdp.trainer.Job(model=None, loss=divmod, batch=lambda b, t: None, units=[], optimizer=learning_rate)


def test_moments_are_rounded_and_averages_are_not():
    model = fully_shard(Tower)
    tx = options.make_optimizer(read(opt_state_dtype="bfloat16", ema=0.9), job(), model, 1e-3)
    state = jax.eval_shape(tx.init, {"w": jnp.ones((4, 4))})
    low, ema = state
    assert isinstance(low, LowPrecisionState) and low.inner[0].mu["w"].dtype == jnp.bfloat16
    assert isinstance(ema, TrackEmaState) and ema.ema["w"].dtype == jnp.float32
    for wrong, fact in (
        (ShardingOptions(ema=1.0), "--ema 1.0"),
        (ShardingOptions(opt_state_dtype="int8"), "--opt-state-dtype 'int8'"),
    ):
        refuses(lambda wrong=wrong: options.make_optimizer(wrong, job(), model, 1e-3), fact)


@pytest.mark.parametrize(
    ("message", "words"),
    [
        ('sync="last": needs reshard_after_backward=False', "--sync last: needs --no-reshard-after-backward"),
        ("check_loss=False skips it", "--no-check-loss skips it"),
        ("prefetch=-1.5e-05, min_size=None", "--prefetch -1.5e-05, --min-size none"),
        ("GPT2Config.remat=3 and frozen=('a',)", "GPT2Config.remat=3 and frozen=('a',)"),
    ],
)
def test_messages_of_the_library_are_said_in_options(message, words):
    assert options.as_options(message).lower() == words.lower()


def test_an_unknown_option_is_refused_with_close_ones():
    for args, facts in (
        (["--lr", "3"], ["--lr:", "--learning-rate"]),
        (["--batchsize=4"], ["--batchsize:", "--batch-per-device"]),
        (["--epochs", "3"], ["--epochs:", "--steps"]),
        (["--optim", "adamw_torch"], ["--optim:", "--optimizer"]),
        (["--adam_beta1", "0.9"], ["--adam_beta1:", "--beta1"]),
        (["--lr_scheduler_type", "cosine"], ["--lr_scheduler_type:", "--lr-schedule"]),
        (["--optimizer.name", "AdamW"], ["--optimizer.name:", "--optimizer"]),
        (["--nonsense", "3"], ["--nonsense:", "--help"]),
        (["--eod-id", "3"], ["--eod-id:", "FILE.bin.json"]),
        (["--no-deterministic"], ["--no-deterministic:", "XLA_FLAGS=--xla_gpu_deterministic_ops=true"]),
    ):
        refuses(lambda args=args: check_known(args, TrainConfig), *facts)
    check_known(["--no-check-loss", "--run_dir", "x", "--seed=1", "--help", "-h", "word"], TrainConfig)


def test_what_stands_for_options_of_other_programs_are_options():
    for instead in ELSEWHERE.values():
        name, *value = instead.split()[:2]
        check_known([name], TrainConfig)
        if value and value[0].isidentifier():
            read_command(TrainConfig, [name, *value], default=TrainConfig(), prog="train.py", description="")


@pytest.mark.parametrize(
    ("fields", "error", "facts"),
    [
        *(({n: x}, ValueError, [f"{n}={x}"]) for n in ("batch_per_device", "accumulate") for x in (-2, 0, 2**31)),
        ({"seq_len": float("nan")}, TypeError, ["seq_len=nan"]),
        ({"steps": "9"}, TypeError, ["steps='9'", "whole number"]),
        ({"mesh": "fsdp=2"}, TypeError, ["mesh='fsdp=2'"]),
        ({"mesh": (("fsdp", "2"),)}, TypeError, ["mesh[0][1]='2'"]),
        ({"skip_nonfinite": 1}, TypeError, ["skip_nonfinite=1"]),
    ],
)
def test_values_and_types_that_no_option_takes_are_refused_in_python(fields, error, facts):
    refuses(lambda: TrainConfig(**fields), *facts, error=error)


@pytest.mark.parametrize("option", ["--run-dir", "--init-from", "--text-field", "--tracker"])
def test_an_empty_text_is_no_value(option, capsys):
    with pytest.raises(SystemExit):
        tyro.cli(TrainConfig, args=[option, ""], config=(tyro.conf.OmitArgPrefixes,))
    assert re.search(rf"{option}: must not be empty; give [\w:]+, or none", capsys.readouterr().err)


def _recipe(tmp_path, **fields):
    path = tmp_path / "recipe.json"
    path.write_text(json.dumps(fields))
    return str(path)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"steps": 0}, ["steps", "0", "1 to"]),
        ({"steps": "many"}, ["--steps 'many'", "whole number"]),
        ({"steps": True}, ["--steps True", "whole number"]),
        ({"steps": 1.5}, ["--steps 1.5", "whole number"]),
        ({"reshard_after_forward": 0}, ["--reshard-after-forward 0", "node"]),
        ({"rate_scale": {"embed": -1}}, ["--rate-scale", "embed=-1", "from 0 on"]),
        ({"frozen": [1]}, ["frozen[0]=1"]),
        ({"seed": None}, ["seed=None"]),
        ({"data": 3}, ["data=3"]),
        ({"model": 3}, ["model=3", "text"]),
        ({"check_loss": "yes"}, ["check_loss='yes'"]),
    ],
)
def test_a_recipe_with_values_that_no_command_takes_is_refused_by_option(fields, words, tmp_path):
    refuses(lambda: load_recipe(TrainConfig(), _recipe(tmp_path, **fields)), "recipe.json", *words)


@pytest.mark.parametrize("ending", ["toml", "json"])
def test_a_written_recipe_is_read_as_the_same_options(ending, tmp_path):
    changed = {name: made(TrainConfig, **{name: text}) for name, text in TEXTS.items()}
    fields = {name: getattr(config, name) for name, config in changed.items()}
    fields |= {"model": 'a "name" with \\ 🦙', "steps": 7, "learning_rate": 1e-20, "skip_nonfinite": True}
    fields |= {"program": None, "max_grad_norm": None, "param_dtype": None}  # only the first is a default
    given = fields | {
        "model_config": dict(fields["model_config"]),
        "nodes": 8,
    }  # as a recipe has it; a plan's own option
    write_recipe(path := str(tmp_path / f"mine.{ending}"), given, TrainConfig)
    found = load_recipe(TrainConfig(), path)
    assert {name: getattr(found, name) for name in fields} == fields
    if ending == "toml":
        assert Path(path).read_text().count("# ") == len(fields) - 1  # all but `program`, which has no value


def test_of_two_values_the_last_counts_and_xla_takes_texts():
    assert option_value("--recipe", ["--recipe", "stdlib", "--steps", "2", "--recipe=gpt2-stdlib"]) == "gpt2-stdlib"
    assert made(TrainConfig, xla=TEXTS["xla"]).xla == (("a", "1,2"), ("b", "1.5"), ("c", None))
    assert made(TrainConfig, quantized=("a=nf4", "a=int8")).quantized == (("a", "int8"),)


def test_a_recipe_reads_texts_and_numbers_as_a_command_does(tmp_path):
    fields = {"warmup": "none", "steps": "9", "strategy": 3, "reshard_after_forward": True, "learning_rate": 1}
    found = load_recipe(TrainConfig(warmup=3), _recipe(tmp_path, **fields))
    assert (found.warmup, found.steps, found.strategy, found.learning_rate) == (None, 9, 3, 1.0)
    assert found.reshard_after_forward is True


TEXTS = {
    "xla": ("a=1", "a=1,2", "b=1.5", "c=none"),
    "model_config": ("x=[1,2]", "y=1e-3", "stacked=False"),
    "rate_scale": ("head=2.0", "embed=0.12345678"),
    "quantized": ("a=nf4", "b=int8"),
    "mesh": "replica=2,fsdp=-1",
    "remat": "names:a,b+offload:c",
    "reshard_after_forward": "node",
    "offload": ("params,grads",),
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_of_a_value_is_read_as_that_value(name):
    value = getattr(made(TrainConfig, **{name: TEXTS[name]}), name)
    parts = [write((part,)) for part in value] if isinstance(TEXTS[name], tuple) else write(value)
    assert getattr(made(TrainConfig, **{name: parts}), name) == value
