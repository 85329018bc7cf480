"""Eight simulated CPU devices for every test; must run before JAX starts its backend."""

import atexit
import os
import shutil
import sys
import tempfile

import pytest

NUM_DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
# Nothing is fetched: models of other people are made here, with random weights.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        # A loaded 2-core machine may leave a rendezvous of 8 threads waiting longer than the default 40 s.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)

# Most of a test's time is XLA's: compile quickly rather than well, and what another test has compiled only once.
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
if "PYTEST_XDIST_WORKER" not in os.environ:
    cache = tempfile.mkdtemp(prefix="jfsdp-tests-")
    atexit.register(shutil.rmtree, cache, ignore_errors=True)
    os.environ["JAX_COMPILATION_CACHE_DIR"] = cache
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
    os.environ["JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES"] = "-1"


def pytest_sessionstart(session):
    import jax

    assert jax.device_count() == NUM_DEVICES, f"tests need {NUM_DEVICES} devices, found {jax.device_count()}"


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A working directory to write factories into; modules imported from it do not outlive the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
