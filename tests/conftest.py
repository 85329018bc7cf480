"""Eight simulated CPU devices for every test; must run before JAX starts its backend."""

import gc
import os
import sys

import pytest
from jaxlib.version import __version_info__ as jaxlib_version

from tests.compiling import compile_once, free_programs

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
        # Programs here are small: in one part they compile a fifth faster than in 32.
        "--xla_cpu_parallel_codegen_split_count=1",
    ]
)

# Most of a test's time is XLA's: compile quickly rather than well. Nothing is kept in a compilation cache, as XLA:CPU
# loses the order of collectives in programs that it loads (docs/log.md).
os.environ["JAX_DISABLE_MOST_OPTIMIZATIONS"] = "1"
os.environ.pop("JAX_COMPILATION_CACHE_DIR", None)
# Operations have their names, and no lines of source: so programs of two tests may be the same.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
if jaxlib_version < (0, 11):  # Newer ones do not know the older emitter, which compiles twice as fast.
    os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"


def pytest_sessionstart(session):
    import jax

    assert jax.device_count() == NUM_DEVICES, f"tests need {NUM_DEVICES} devices, found {jax.device_count()}"
    # Tracing makes many small objects: with Python's own thresholds a tenth of the time is collection.
    gc.collect()
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)
    compile_once()


@pytest.fixture(scope="module", autouse=True)
def few_programs():
    """Begin every file of tests with room for programs."""
    free_programs()


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
