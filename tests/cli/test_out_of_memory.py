"""What a run prints after a device ran out of memory: XLA's error, the plan of its options, options that need less."""

import types
from unittest import mock

import jax
import pytest

from jfsdp.cli import out_of_memory
from jfsdp.cli.out_of_memory import OutOfMemory
from jfsdp.launch import watch
from jfsdp.launch.watch import Watch
from jfsdp.trainer.job import load_job
from jfsdp.trainer.run.config import TrainConfig
from tests.refusals import check_facts
from tests.scripts.test_train import script

XLA = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 96636764160 bytes."
CONFIG = TrainConfig(model="llama-tiny", seq_len=128, batch_per_device=4, remat="none")
SMALLER = (("num_layers", 1), ("dim", 64))


def pretend(monkeypatch, kind, **stats):
    device = types.SimpleNamespace(memory_stats=lambda: stats)
    monkeypatch.setattr(out_of_memory, "run_devices", lambda: (kind, 1, 8))
    monkeypatch.setattr(jax, "local_devices", lambda: [device])


def full(config=CONFIG, text=XLA):
    cause = jax.errors.JaxRuntimeError(text)
    error = OutOfMemory(cause, config, load_job("llama-tiny", None).with_config(**dict(SMALLER)))
    error.__cause__ = cause
    return error


def test_a_full_h100_is_explained_by_the_plan_of_the_run(monkeypatch, capfd):
    pretend(monkeypatch, "NVIDIA H100 80GB HBM3", bytes_limit=2 * 2**20, bytes_in_use=2**20)
    train = script()
    monkeypatch.setattr(train, "train", mock.Mock(side_effect=full()))
    monkeypatch.setattr(jax, "device_put", None)  # nothing is put on a device
    assert train.main([]) == 1
    said = capfd.readouterr().err
    check_facts(said, XLA, "JaxRuntimeError", "90.0 GiB", "in use 1.00 MiB", "of 2.00 MiB per GPU", "DOES NOT FIT")
    check_facts(said, "8 x NVIDIA H100", "num_layers=1", "dim=64", "4 rows x 128 tokens", "remat none", "--remat full")
    parts = said[said.index("memory at the peak") :]
    check_facts(parts, "activations", "optimizer", "fragmentation", "total", "what changes")
    assert said.index(XLA) < said.index("of 2.00 MiB per GPU")


@pytest.mark.parametrize("kind", ["cpu", "NVIDIA RTX 9999"])
def test_an_unknown_device_is_named_and_nothing_is_planned(monkeypatch, capfd, kind):
    pretend(monkeypatch, kind)
    monkeypatch.setattr(out_of_memory.subprocess, "run", None)
    full().explain()
    assert kind in (said := capfd.readouterr().err) and "--gpu FILE.toml" in said and said.count("\n") == 1


def test_without_a_compiler_the_bound_is_printed_and_named(monkeypatch, capfd):
    def run(command, **_):
        is_bound = "--analytic" in command
        return types.SimpleNamespace(returncode=0, stdout="all" * is_bound, stderr="no compiler\n" * (not is_bound))

    pretend(monkeypatch, "NVIDIA H200")
    monkeypatch.setattr(out_of_memory.subprocess, "run", run)
    full().explain()
    said = capfd.readouterr().err
    assert said.index("no plan of the step's memory: no compiler") < said.index("the bound of the step's memory")


def test_a_plan_that_takes_too_long_is_given_up(monkeypatch, capfd):
    pretend(monkeypatch, "NVIDIA H200")
    monkeypatch.setattr(out_of_memory, "_LIMITS_S", {"plan": 0.1, "bound": 0.1})
    full().explain()
    check_facts(capfd.readouterr().err, "no plan", "no bound", "0.1 s")


@pytest.mark.parametrize("text", [XLA, "INTERNAL: something else"])
def test_only_an_exhausted_memory_is_explained(tmp_path, monkeypatch, text):
    error = jax.errors.JaxRuntimeError(text)
    parts = types.SimpleNamespace(job=load_job("llama-tiny", None))
    run = mock.Mock(run=mock.Mock(side_effect=error), config=CONFIG, parts=parts)
    train = script()
    monkeypatch.setattr("jfsdp.trainer.run.training.Run", lambda *_: run)
    monkeypatch.setattr("jfsdp.trainer.run.build.build", lambda *_: None)
    config = train.parse(["--run-dir", str(tmp_path / "run"), "--cache-dir", str(tmp_path)])
    with pytest.raises(RuntimeError) as raised:
        train._run(config, [], 0.0, Watch(0))
    assert error in (raised.value, raised.value.__cause__)
    options = raised.value.options if isinstance(raised.value, OutOfMemory) else None
    assert (options and options.batch_per_device) == (4 if text == XLA else None)


def test_the_others_read_the_error_before_it_is_explained(monkeypatch):
    told = []
    store = types.SimpleNamespace(key_value_set=lambda *_: told.append("store"), key_value_try_get=lambda _: "[1, 2")
    monkeypatch.setattr("jfsdp.compat.coordination_store", lambda: (store, 0, 2))
    monkeypatch.setattr(watch, "end_process", lambda *_: told.append("end"))

    def explain():
        told.append("explain")
        raise ValueError("of the explanation")

    watch.tell_and_end("full", 1, explain)
    assert told == ["store", "explain", "end"]
    monkeypatch.setattr("jfsdp.compat.coordination_store", lambda: (store, 1, 2))
    watch.tell_and_end("full", 1, explain)
    assert told[3:] == ["store", "end"]
