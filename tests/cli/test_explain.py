"""`jfsdp explain` and the entry point: what is printed, as text and as JSON, and how bad input ends."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import time

import pytest

import jfsdp
from jfsdp.cli import main
from tests.cli.refused import refused
from tests.refusals import check_facts

TINY = ("explain", "--model", "llama-tiny")
FACTORY = """
import dataclasses, jax, jax.numpy as jnp, optax
from flax import nnx

class Net(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(64, 96, use_bias=False, rngs=rngs)
        self.odd = nnx.Linear(33, 35, use_bias=False, rngs=rngs)
        self.scale = nnx.Param(jnp.ones(7))

def loss(model, batch):
    return model.up(batch).sum()

def batch(rows, seq_len, width=64):
    return jax.ShapeDtypeStruct((rows, width), jnp.float32)

def make():
    return dict(model=Net, loss=loss, batch=batch, units=["up"], optimizer=optax.adam)

def misspelt():
    return dict(model=Net, loss=loss, batch=batch, unit=["up"], optimizer=optax.adam)

class Wide(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(4096, 1024, use_bias=False, rngs=rngs)

def no_units():
    return make() | {"model": Wide, "units": (), "batch": lambda rows, seq_len: batch(rows, seq_len, 4096)}

def nothing_matches():
    return make() | {"units": ["layers.*"]}
"""


@pytest.fixture
def factory(workdir):
    """The name of a module with jobs, importable from the working directory."""
    (workdir / "explained_jobs.py").write_text(FACTORY)
    return "explained_jobs"


def run_json(capsys, *args: str) -> dict:
    assert main([*args, "--json"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    return json.loads(captured.out)


def test_ctrl_c_ends_a_command_in_one_line(monkeypatch, capsys):
    def interrupt(*_):
        raise KeyboardInterrupt

    monkeypatch.setattr("jfsdp.cli.commands.parse", interrupt)
    assert main([*TINY]) == 130
    assert capsys.readouterr().err == "jfsdp: interrupted\n"


def test_json_of_a_factory_counts_to_the_byte(capsys, factory):
    """A matrix that divides, one padded from 35 to 40, a vector below min_size; 12 bytes each, and 3 counters."""
    table = run_json(capsys, "explain", "--factory", f"{factory}:make", "--mesh", "fsdp=8")
    assert table["num_parameters"] == 64 * 96 + 33 * 35 + 7
    assert table["replicated_bytes_per_device"] == 12 * 7
    assert table["padding_bytes_per_device"] == pytest.approx(12 * 5 * 33 / 8, abs=3)  # 35 grows by less: to 40
    assert table["state_bytes_per_device"] == 12 * (64 * 96 + 33 * 40) // 8 + 12 * 7 + 12
    rows = {row["path"]: row for row in table["leaves"]}
    assert (rows["up.kernel"]["unit"], rows["scale"]["unit"]) == ("up", "")
    assert (rows["odd.kernel"]["dim"], rows["odd.kernel"]["padding"]) == (1, 5)
    assert "7 elements, below min_size 1024" in rows["scale"]["reason"]


def test_text_has_every_leaf_and_wide_text_all_of_it(capsys, monkeypatch):
    """On a terminal of 80 columns too, where a line of the wide text is as long as it needs."""
    for name, value in {"TTY_COMPATIBLE": "1", "COLUMNS": "80", "NO_COLOR": "1", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    table = run_json(capsys, *TINY, "--strategy", "zero1")
    assert main([*TINY, "--strategy", "zero1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines if line} >= {row["path"] for row in table["leaves"]}
    assert f"({table['state_bytes_per_device']:,} bytes)" in "\n".join(lines)
    assert main([*TINY, "--strategy", "zero1", "--wide"]) == 0
    lines = capsys.readouterr().out.splitlines()
    for row in table["leaves"]:
        (line,) = [line for line in lines if line.startswith(row["path"] + " ")]
        check_facts(line, row["reason"], f" {row['bytes_per_device']:,} ", " ".join(map(str, row["shape"])))


def test_options_reach_the_layout(capsys):
    table = run_json(
        capsys,
        *TINY,
        *("--mesh", "replica=2,fsdp=4", "--strategy", "hsdp", "--param-dtype", "float32", "--min-size", "100000"),
        *("--model-config", "num_layers=2", "stacked=false"),
    )
    assert table["strategy"] == "full_shard"
    assert table["mesh"] == {"pipe": 1, "replica": 2, "fsdp": 4, "expert": 1, "context": 1, "tensor": 1}
    assert table["mp_policy"]["param_dtype"] == "float32"
    assert len(table["units"]) == 3
    assert all("below min_size 100000" in row["reason"] for row in table["leaves"])
    assert {row["stages"]["use"]["dtype"] for row in table["leaves"]} == {"float32"}


def test_frozen_leaves_and_stages_of_the_strategy_are_shown(capsys):
    table = run_json(capsys, *TINY, "--frozen", "embed", "--frozen", "lm_head,norm")
    frozen = {row["path"] for row in table["leaves"] if not row["trainable"]}
    assert frozen == {"embed.embedding", "lm_head.kernel", "norm.scale"}
    assert table["num_frozen_parameters"] == 2 * 264 * 128 + 128
    stages = dict.fromkeys(("param", "grad", "opt"), "group")
    assert table["strategy_stages"] == stages | {"reshard_after_forward": "true"}


def test_what_is_offloaded_is_shown_on_the_host(capsys):
    plain, table = run_json(capsys, *TINY), run_json(capsys, *TINY, "--offload", "opt_state,params")
    host = table["host_bytes_per_device"]
    assert host == table["host_param_bytes_per_device"] + table["host_opt_bytes_per_device"] > 0
    assert host == sum(row["host_bytes_per_device"] for row in table["leaves"])
    assert host + table["state_bytes_per_device"] == plain["state_bytes_per_device"]


def test_absurd_settings_are_warned_of_in_the_last_lines(capsys):
    args = (*TINY, "--mesh", "replica=8", "--min-size", "1000000")
    table = run_json(capsys, *args)
    assert [warning.split()[0] for warning in table["warnings"]] == ["full_shard"]
    assert main(args) == 0
    assert capsys.readouterr().out.splitlines()[-1:] == [f"warning: {warning}" for warning in table["warnings"]]
    assert run_json(capsys, *TINY)["warnings"] == []


def test_a_linen_model_is_explained_as_well(capsys):
    table = run_json(capsys, "explain", "--model", "gpt2-xl", "--mesh", "fsdp=64", "--frozen", "wte", "--strategy", "2")
    assert (table["strategy"], table["num_parameters"]) == ("zero2", 1_557_611_200)
    rows = {row["path"]: row for row in table["leaves"]}
    assert not rows["wte.embedding"]["trainable"] and rows["h.mlp.c_fc.kernel"]["unit"] == "h"


def test_llama_405b_on_1024_devices_is_explained_in_seconds(capsys):
    start = time.monotonic()
    table = run_json(capsys, "explain", "--model", "llama-405b", "--strategy", "full_shard", "--mesh", "fsdp=1024")
    assert time.monotonic() - start < 60
    assert table["num_parameters"] == 405_853_388_800
    assert table["padding_bytes_per_device"] == table["replicated_bytes_per_device"] == 0
    assert table["state_bytes_per_device"] == 12 * 405_853_388_800 // 1024 + 12


@pytest.mark.parametrize(
    ("args", "facts"),
    [
        ("--model llama-tiny --strategy zero4", ["--strategy 'zero4'", "did you mean 'zero3'?", "ddp, zero1"]),
        ("--model llama-tiny --param-dtype int8", ["--param-dtype 'int8'", "float32, bfloat16, float16"]),
        ("--model llama-tiny --mesh fsdp=-1", ["a mesh without devices needs every size"]),
        ("--model llama-tiny --reshard-after-forward node", ["--reshard-after-forward n"]),
        ("--model llama-tiny --strategy HYBRID_SHARD", ["replica=2,fsdp=4"]),
        ("--model llama-tiny --strategy ddp --opt-over fsdp", ["--opt-over"]),
        ("--model llama-tiny --frozen head", ["--frozen 'head'", "embed"]),
        ("--model llama-tiny --storage flat --program xla", ["--program manual"]),
        ("", ["--model NAME", "--factory module:function"]),
        ("--factory explained_jobs:misspelt", ["['unit']", "['units']"]),
        ("--factory explained_jobs:nothing_matches", ["'layers.*'", "Linear, Net"]),
    ],
)
def test_bad_input_ends_with_status_2_and_one_line(capsys, factory, args, facts):
    check_facts(refused(capsys, "explain", *args.split()), *facts)


def test_version_is_printed(capsys):
    assert main(("--version",)) == 0
    assert capsys.readouterr().out == f"jfsdp {jfsdp.__version__}\n"


@pytest.mark.parametrize(("args", "command"), [((), "explain"), (("checkpoint",), "verify")])
def test_without_a_subcommand_the_error_stream_lists_them_and_the_status_is_2(capsys, args, command):
    with pytest.raises(SystemExit) as end:
        main(args)
    assert end.value.code == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert command in err


def test_what_the_library_says_aloud_is_told_once(capsys, factory):
    assert main(["explain", "--factory", f"{factory}:no_units"]) == 0
    captured = capsys.readouterr()
    assert captured.err == ""
    assert captured.out.count("no units: all 4,194,304 split parameters are gathered at once") == 1


@pytest.mark.parametrize(
    "command", [["-m", "jfsdp", "models"], ["scripts/train.py", "--help"]], ids=["jfsdp", "train.py"]
)
def test_a_reader_that_leaves_ends_the_command_without_a_traceback(command):
    root = pathlib.Path(__file__).parents[2]
    path = os.pathsep.join([str(root), os.environ.get("PYTHONPATH", "")])
    environment = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    line, pipe = [sys.executable, *command], subprocess.PIPE
    with subprocess.Popen(line, cwd=root, env=environment, stdout=pipe, stderr=pipe) as done:
        assert done.stdout is not None and done.stderr is not None
        done.stdout.close()
        err = done.stderr.read().decode()
    assert (done.returncode, "Traceback" in err, "Broken pipe" in err) == (-signal.SIGPIPE, False, False), err


@pytest.mark.parametrize(
    ("options", "meant"),
    [
        (("--model", "llama-tny"), "llama-tiny"),
        ((*TINY[1:], "--param-dtype", "bf16"), "bfloat16"),
        ((*TINY[1:], "--strategy", "full_shards"), "full_shard"),
        ((*TINY[1:], "--lora", "targets=q_proj"), "**.q_proj.**"),
        ((*TINY[1:], "--lora", "targets=all-linear"), "**.kernel"),
        ((*TINY[1:], "--lora", "targets=**.qkv_proj.kernel"), "**.v_proj.kernel"),
    ],
)
def test_a_name_that_is_nearly_right_is_told_the_right_one(options, meant, capsys):
    assert main(["explain", *options]) == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err


@pytest.mark.parametrize(("args", "meant"), [("verify x", "checkpoint verify"), ("checkpoint verfy x", "verify")])
def test_unknown_commands_get_a_suggestion(args, meant, capsys):
    assert main(args.split()) == 2
    assert f"did you mean '{meant}'?" in capsys.readouterr().err
