"""Compiling for clusters that are not there: every GPU of the table, and what is said where it cannot be done."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jfsdp.launch.hosts import hosts
from jfsdp.plan.cluster.hardware import GPUS, Cluster, find_gpu
from jfsdp.plan.cluster.target import PlanUnavailable, render_target_config, require_gpu_compiler, topology_devices
from tests import hlo
from tests.refusals import check_facts, refusing
from tests.thin import thin


def compile_matmul(devices):
    """A matmul whose weight is gathered, compiled for these devices."""
    mesh = Mesh(devices, ("fsdp",))
    split, whole = NamedSharding(mesh, PartitionSpec("fsdp")), NamedSharding(mesh, PartitionSpec())

    def loss(w, x):
        return jnp.tanh(x @ jax.lax.with_sharding_constraint(w, whole)).astype(jnp.float32).sum()

    # Large enough for XLA to gather the weight and not the sum.
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=split) for shape in ((512, 512), (1024, 512))]
    return jax.jit(loss).lower(*arrays).compile()


# Each GPU once on 8 devices or on 16, and then on the others.
SIZES = [(gpu, (8, 16)[(place + turn) % 2]) for place, gpu in enumerate(GPUS) for turn in (0, 1)]


@pytest.mark.parametrize(("gpu", "num_devices"), thin(SIZES), ids=lambda value: getattr(value, "name", None))
def test_every_gpu_of_the_table_compiles(gpu, num_devices):
    cluster = Cluster(gpu, nodes=num_devices // gpu.gpus_per_node)
    devices = topology_devices(cluster)
    assert [device.id for device in devices] == list(range(num_devices))
    assert {device.device_kind for device in devices} == {gpu.full_name}
    assert hosts(devices) == tuple(place // cluster.gpus_per_node for place in range(num_devices))
    found = hlo.collectives(compile_matmul(devices).as_text(), num_devices)
    gathers = [item.wire_bytes for item in found if item.kind == "all-gather"]
    assert gathers == [512 * 512 * 2 * (num_devices - 1) / num_devices]


@pytest.mark.parametrize("name", thin(["a100-80", "h100", "b200", "l40s"]))
def test_cudnn_attention_compiles_for_every_architecture(name):
    mesh = Mesh(topology_devices(Cluster(find_gpu(name))), ("fsdp",))
    split = NamedSharding(mesh, PartitionSpec("fsdp"))
    q = jax.ShapeDtypeStruct((8, 512, 4, 64), jnp.bfloat16, sharding=split)

    def loss(q):
        out = jax.nn.dot_product_attention(q, q, q, is_causal=True, implementation="cudnn")
        return out.astype(jnp.float32).sum()

    assert "__cudnn$fmha" in (jax.jit(jax.grad(loss)).lower(q).compile().as_text() or "")


def test_a_rack_is_one_domain_of_many_hosts():
    devices = topology_devices(Cluster(find_gpu("gb200"), nodes=18))
    assert len(devices) == 72
    assert hosts(devices)[-1] == 17


def test_a_field_that_this_jaxlib_does_not_know_is_left_out(monkeypatch):
    """A jaxlib between those that were tried may refuse a field; the plainest text must still go through."""
    monkeypatch.setattr("jfsdp.plan.cluster.target.FIELDS_SINCE", {"no_such_field: 1": (0, 1)})
    assert "no_such_field" in render_target_config(find_gpu("h100"))
    assert len(topology_devices(Cluster(find_gpu("h100")))) == 8


def test_newer_fields_go_to_newer_versions_only():
    gpu = find_gpu("b200")
    assert "collective_memory_granularity" in render_target_config(gpu, (0, 12, 0, 1))
    assert "collective_memory_granularity" not in render_target_config(gpu, (0, 10, 2))
    assert "device_interconnect_info" not in render_target_config(find_gpu("l40s"))
    check_facts(render_target_config(gpu), "major: 10", "ACCELERATED_FEATURES")


def installed(**versions):
    return lambda name: versions.get(name.replace("-", "_"))


def test_a_missing_plugin_is_refused_with_what_to_install():
    with refusing("jax-cuda12-plugin", "nvidia-cudnn-cu12", error=PlanUnavailable):
        require_gpu_compiler(installed(jaxlib="0.10.2"))


def test_a_plugin_of_another_version_is_refused_with_both_versions():
    others = installed(jaxlib="0.10.2", jax_cuda12_plugin="0.10.1", jax_cuda12_pjrt="0.10.2")
    with refusing("0.10.2", "jax-cuda12-plugin", "0.10.1", "plugin==0.10.2", error=PlanUnavailable):
        require_gpu_compiler(others)
    # JAX compares every number: a plugin 0.12.0 does not serve jaxlib 0.12.0.1.
    near = installed(jaxlib="0.12.0.1", jax_cuda13_plugin="0.12.0", jax_cuda13_pjrt="0.12.0")
    with refusing("jax-cuda13-plugin", "0.12.0", "jax-cuda13-pjrt", error=PlanUnavailable):
        require_gpu_compiler(near)


USE = """
import os, jax
{before}
from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.cluster.target import PlanUnavailable, topology_devices
try:
    print(len(topology_devices(Cluster(find_gpu("h100")))), sorted(n for n in os.environ if "CONSTRAINTS" in n))
except PlanUnavailable as error:
    print("refused:", error)
print(float(jax.numpy.ones(2).sum()))
"""


def outcome(monkeypatch, before, platforms=None):
    monkeypatch.delenv("JAX_PLATFORMS")
    if platforms:
        monkeypatch.setenv("JAX_PLATFORMS", platforms)
    done = subprocess.run([sys.executable, "-c", USE.format(before=before)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_a_process_that_has_used_the_cpu_by_name_can_still_compile(monkeypatch):
    assert outcome(monkeypatch, "jax.devices()", "cpu") == "8 []\n2.0\n"


def test_a_process_whose_plugin_gave_up_says_so_and_goes_on(monkeypatch):
    """Where a GPU is attached the plugin does not give up, and all is well."""
    said = outcome(monkeypatch, "jax.devices()")
    assert said.endswith("2.0\n")
    assert said.startswith("8 ") or "start the process with JAX_PLATFORMS=cpu" in said
