"""Eight simulated CPU devices for every test; must run before JAX starts its backend."""

import os

NUM_DEVICES = 8

os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = " ".join(
    [
        os.environ.get("XLA_FLAGS", ""),
        f"--xla_force_host_platform_device_count={NUM_DEVICES}",
        # A loaded 2-core machine may leave a rendezvous of 8 threads waiting longer than the default 40 s.
        "--xla_cpu_collective_call_terminate_timeout_seconds=600",
    ]
)


def pytest_sessionstart(session):
    import jax

    assert jax.device_count() == NUM_DEVICES, f"tests need {NUM_DEVICES} devices, found {jax.device_count()}"
