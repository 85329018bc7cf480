import os
import signal

import pytest

from jfsdp.launch.runtime import configure_xla, initialize_processes, merge_flags, without_plugin_chatter
from jfsdp.train.run.stop import StopSignal


def test_flags_replace_those_of_the_same_name_and_keep_the_others():
    merged = merge_flags("--xla_a=1 --xla_ab=2", {"xla_a": "3"})
    assert merged.split() == ["--xla_ab=2", "--xla_a=3"]


def test_flags_after_jax_is_imported_are_an_error_and_not_ignored():
    with pytest.raises(RuntimeError, match="too late"):
        configure_xla(simulate_devices=2)


def test_a_coordinator_without_its_numbers_is_refused():
    with pytest.raises(ValueError, match="needs --num-processes and --process-id"):
        initialize_processes("localhost:1234", None, None)
    with pytest.raises(ValueError, match="belong to --coordinator"):
        initialize_processes(None, 2, 0)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_asks_to_stop_and_the_second_is_not_caught(number):
    before = signal.getsignal(number)
    with StopSignal() as stop:
        assert not stop.is_agreed(may_gather=True)
        os.kill(os.getpid(), number)
        assert stop.is_agreed(may_gather=False) and stop.name == number.name
        assert signal.getsignal(number) is before


def test_only_the_plugins_chatter_is_held_back(capfd):
    with without_plugin_chatter():
        os.write(2, b"WARNING: All log messages before absl::InitializeLog() is called are written to STDERR\n")
        os.write(2, b"I0000 cudart_stub.cc:31] Could not find cuda drivers on your machine\n")
        os.write(2, b"something that matters\n")
    os.write(2, b"and afterwards\n")
    assert capfd.readouterr().err == "something that matters\nand afterwards\n"
