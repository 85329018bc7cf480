import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from jfsdp.launch.runtime import configure_xla, enable_compilation_cache, merge_flags, without_plugin_chatter
from jfsdp.trainer.run.stop import StopSignal
from tests.refusals import check_facts, refuses

ROOT = Path(__file__).parents[2]


def test_flags_after_jax_is_imported_and_counts_that_cannot_be_simulated_are_refused(tmp_path):
    assert merge_flags("--xla_a=1 --xla_ab=2", {"xla_a": "3"}).split() == ["--xla_ab=2", "--xla_a=3"]
    refuses(lambda: configure_xla(simulate_devices=2), "too late", error=RuntimeError)
    for count in (-1, 100_000_000):
        refuses(lambda count=count: configure_xla(simulate_devices=count), f"simulate_devices={count}")
    # XLA:CPU (jaxlib 0.10.2) forgets on the disk in which order collectives run.
    assert enable_compilation_cache(tmp_path) is None and not list(tmp_path.iterdir())


def test_devices_that_the_launcher_gives_are_not_replaced_by_others():
    code = """
import os
from jfsdp.launch.runtime import configure_xla
for asked in (0, 2, 8):
    configure_xla(simulate_devices=asked)
    print([flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" in flag][0][-2:])
"""
    done = start("-c", code, JFSDP_DEVICES="2", XLA_FLAGS="--xla_force_host_platform_device_count=2")
    assert (done.returncode, done.stdout) == (1, "=2\n=2\n")
    check_facts(done.stderr, "simulate_devices=8", "--devices-per-proc 2")


def test_the_first_signal_asks_to_stop_and_the_second_is_not_caught():
    caught, number = [], signal.SIGTERM
    before = signal.signal(number, lambda *_: caught.append(number))
    try:
        with StopSignal() as stop:
            assert not stop.is_agreed(may_gather=True)
            os.kill(os.getpid(), number)
            assert stop.is_agreed(may_gather=False) and stop.name == number.name
            os.kill(os.getpid(), number)
            assert not caught, "at once after the first it is the same, sent by two"
            stop._since -= 5
            os.kill(os.getpid(), number)
            assert caught == [number]
    finally:
        signal.signal(number, before)


def test_only_the_plugins_chatter_is_held_back(capfd):
    with without_plugin_chatter():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers on your machine\n")
        os.write(2, b"E1127 gpu_hlo_schedule.cc:1076] The byte size of arguments (2) exceeds the base limit (1).\n")
        os.write(2, b"something that matters\n")
    os.write(2, b"and afterwards\n")
    assert capfd.readouterr().err == "something that matters\nand afterwards\n"


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), signal.SIGKILL)", "os.killpg(0, signal.SIGINT)"])
def test_what_is_said_before_a_process_ends_is_not_lost(end):
    code = (
        "import os, signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n"
        "from jfsdp.launch.runtime import without_plugin_chatter\n"
        f"with without_plugin_chatter():\n os.write(2, b'cudart_stub.cc: no driver\\nthe last word')\n {end}"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, start_new_session=True)
    assert done.returncode != 0
    assert done.stderr.startswith("the last word") and "cudart" not in done.stderr


def start(*command, **environment):
    kept = {name: value for name, value in os.environ.items() if name not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    return subprocess.run(
        [sys.executable, *command], capture_output=True, text=True, env=kept | environment, cwd=ROOT, timeout=100
    )


def test_what_stops_jax_at_its_start_is_said(tmp_path):
    flag, platform = {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_bad=1"}, {"JAX_PLATFORMS": "nothere"}
    train = "scripts/train.py", "--recipe", "stdlib", "--simulate-devices", "0", "--run-dir", str(tmp_path / "run")
    plan = "-m", "jfsdp", "plan", "--model", "llama-tiny"
    for command, environment, status, words in (
        (train, flag, (1, -signal.SIGABRT), "--xla_bad=1"),
        (plan, platform, (2,), "'nothere'"),
    ):
        done = start(*command, **environment)
        assert done.returncode in status
        assert words in done.stderr and "Traceback" not in done.stderr, done.stderr
