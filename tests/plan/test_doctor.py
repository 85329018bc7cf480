"""What the doctor finds, one fault at a time, on a machine that is otherwise in order."""

import dataclasses
import os
import tomllib
from pathlib import Path

import pytest

import jfsdp
from jfsdp.plan.cluster.doctor import (
    MINIMUM,
    SHOWN,
    Machine,
    Probe,
    Severity,
    diagnose,
    inspect_machine,
    probe_jax,
    report_to_dict,
)
from tests.refusals import check_facts

VERSIONS = dict.fromkeys(SHOWN) | {
    "jfsdp": "0.2.0",
    "jax": "0.10.2",
    "jaxlib": "0.10.2",
    "flax": "0.12.8",
    "optax": "0.2.8",
    "orbax-checkpoint": "0.12.8",
    "jax-cuda12-plugin": "0.10.2",
    "jax-cuda12-pjrt": "0.10.2",
    "nvidia-cudnn-cu12": "9.28.0.42",
}
GPUS = Machine(
    python="3.11.2",
    versions=VERSIONS,
    env={},
    num_gpus=8,
    has_infiniband=True,
    locked_bytes=None,
    shm_bytes=2**34,
    probe=Probe("gpu", ("NVIDIA H100 80GB HBM3",) * 8, 60 * 2**30),
)
LAPTOP = dataclasses.replace(
    GPUS, num_gpus=0, has_infiniband=False, env={"JAX_PLATFORMS": "cpu"}, probe=Probe("cpu", ("cpu",))
)


def found(machine=GPUS, **changes):
    return diagnose(dataclasses.replace(machine, **changes))


def only(machine=GPUS, **changes):
    (finding,) = found(machine, **changes)
    return finding


@pytest.mark.parametrize("machine", [GPUS, LAPTOP], ids=["gpus", "laptop"])
def test_a_machine_in_order_has_no_findings(machine):
    assert diagnose(machine) == []


@pytest.mark.parametrize(
    ("name", "version", "text", "remedy"),
    [
        ("jaxlib", "0.11.0", "does not belong to jax 0.10.2", "pip install 'jaxlib==0.10.2'"),
        ("flax", "0.12.7", "is older than 0.12.8, which jfsdp needs", "pip install 'flax>=0.12.8'"),
        ("optax", None, "is not installed", "pip install 'optax>=0.2.8'"),
        (
            "jax-cuda12-pjrt",
            "0.10.1",
            "does not have jaxlib's version, 0.10.2",
            "pip install 'jax-cuda12-pjrt==0.10.2'",
        ),
        ("jax-cuda13-plugin", "0.10.2", "are both installed", "uninstall one, with its pjrt wheel"),
        ("nvidia-cudnn-cu12", "9.1.0.70", "is older than 9.8, which JAX's plugin needs", "'nvidia-cudnn-cu12>=9.8'"),
    ],
)
def test_versions_that_do_not_fit_are_problems_with_a_remedy(name, version, text, remedy):
    first = found(versions=VERSIONS | {name: version})[0]
    assert first.severity is Severity.PROBLEM
    assert name in first.topic and text in first.text and remedy in first.remedy


def test_the_versions_asked_for_are_those_of_the_package():
    project = tomllib.loads((Path(jfsdp.__file__).parents[1] / "pyproject.toml").read_text())["project"]
    assert {f"{name}>={version}" for name, version in MINIMUM.items()} <= set(project["dependencies"])


@pytest.mark.parametrize(
    ("flags", "effect"),
    [
        ("--xla_gpu_enable_latency_hiding_scheduler=false", "no collective overlaps"),
        ("--xla_gpu_disable_async_collectives=ALLREDUCE,ALLGATHER", "collectives wait"),
        ("--xla_disable_hlo_passes=rematerialization,latency-hiding-scheduler", "no collective overlaps"),
        ("--xla_gpu_autotune_level=0", "first kernel"),
    ],
)
def test_flags_that_hurt_are_problems(flags, effect):
    finding = only(env={"XLA_FLAGS": f"--xla_gpu_enable_triton_gemm=false {flags}"})
    assert finding.severity is Severity.PROBLEM
    assert finding.topic == f"XLA_FLAGS {flags}" and effect in finding.text


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_P2P_DISABLE", "1"), ("NCCL_IB_DISABLE", ""), ("NCCL_SOCKET_IFNAME", "lo"), ("NCCL_NET", "Socket")],
)
def test_settings_that_hurt_are_found(name, value):
    finding = only(env={name: value})
    assert (finding.severity, finding.topic) == (Severity.PROBLEM, f"{name}={value}" if value else name)
    assert finding.remedy


def test_an_idle_gpu_is_a_problem_that_names_what_hides_it():
    cpu = Probe("cpu", ("cpu",))
    assert only(probe=cpu, env={"JAX_PLATFORMS": "cpu"}).text == "hides this machine's GPU"
    assert only(probe=cpu, env={"CUDA_VISIBLE_DEVICES": ""}).topic == "CUDA_VISIBLE_DEVICES"
    check_facts(only(probe=cpu).remedy, "pip install", ".[cuda12]")


def test_little_lockable_memory_is_a_problem_only_where_infiniband_needs_it():
    assert only(locked_bytes=65536).severity is Severity.PROBLEM
    assert only(locked_bytes=65536, has_infiniband=False).severity is Severity.NOTE


def test_little_shared_memory_is_a_problem_only_with_gpus():
    finding = only(shm_bytes=64 * 2**20)
    assert finding.severity is Severity.PROBLEM and "has 64 MiB" in finding.text and "--shm-size" in finding.remedy
    assert only(LAPTOP, shm_bytes=64 * 2**20).severity is Severity.NOTE


def test_what_plan_lacks_is_a_note_with_what_to_install():
    lacking = VERSIONS | {"jax-cuda12-plugin": None, "jax-cuda12-pjrt": None}
    finding = only(LAPTOP, versions=lacking)
    assert finding.severity is Severity.NOTE and finding.topic == "jfsdp plan"
    assert finding.remedy.startswith("pip install 'jax-cuda12-plugin==")
    assert "cuDNN's wheel" in only(LAPTOP, versions=VERSIONS | {"nvidia-cudnn-cu12": None}).text


def test_a_bad_value_of_a_flag_is_named():
    probe = probe_jax(os.environ | {"XLA_FLAGS": "--xla_gpu_autotune_level=abc"}, timeout_s=120)
    check_facts(probe.error, "abc", "xla_gpu_autotune_level")


def test_a_backend_that_hangs_is_given_up_and_reported():
    probe = probe_jax(os.environ, timeout_s=0.01)
    assert probe.timed_out and "0.01 s" in only(probe=probe).text


def test_this_machine_is_read_and_reported_as_plain_data(monkeypatch):
    monkeypatch.setenv("NCCL_DEBUG", "INFO")
    monkeypatch.setenv("MY_TOKEN", "secret")
    monkeypatch.setenv("TF_CLI_CONFIG_FILE", "no business of ours")
    machine = inspect_machine()
    report = report_to_dict(machine, diagnose(machine))
    assert report["backend"] == "cpu" and len(report["devices"]) == 8
    assert (
        report["settings"]["NCCL_DEBUG"] == "INFO"
        and not {"MY_TOKEN", "TF_CLI_CONFIG_FILE"} & report["settings"].keys()
    )
    assert {"severity", "topic", "text", "remedy"} == set(report["findings"][0])
