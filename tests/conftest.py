"""Settings of all tests, such as eight simulated CPU devices; must run before JAX starts its backend."""

import gc
import os
import sys

import pytest
from jaxlib.version import __version_info__ as jaxlib_version

from tests.compiling import compile_once, free_programs

NUM_DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
# Nothing is downloaded: models of other libraries are created with random weights.
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        # On a loaded 2-core machine, a rendezvous of 8 threads may take longer than the default of 40 s.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
        # Programs are small: they compile a fifth faster in one part than in 32.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)

# Tests spend most time in XLA: compile quickly, without optimizations. There is no compilation cache, because XLA:CPU
# loses the order of collectives in programs that it loads (docs/log.md).
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# Operations have names, but no source lines, so that programs of different tests can be equal.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
if jaxlib_version < (0, 11):  # The older emitter, removed in 0.11, compiles twice as fast.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


def pytest_sessionstart(session):
    import jax

    assert jax.device_count() == NUM_DEVICES, f"tests need {NUM_DEVICES} devices, found {jax.device_count()}"
    # Tracing makes many small objects: with Python's default thresholds a tenth of the time is garbage collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    compile_once()


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Free programs before each test file if there are many."""
    free_programs()


@pytest.fixture
def workdir(tmp_path, monkeypatch):
    """A working directory for test modules; modules imported from it are removed after the test."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        if str(tmp_path) in str(getattr(sys.modules[name], "__file__", "")):
            del sys.modules[name]
