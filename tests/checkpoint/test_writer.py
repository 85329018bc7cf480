"""What a save copies, what `one_replica` computes with, and what becomes of a save when the program ends."""

import subprocess
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec, SingleDeviceSharding

import jfsdp
from jfsdp.checkpoint import one_replica
from jfsdp.checkpoint.disk.pieces import copy_shard


@pytest.mark.parametrize(("platform", "kind"), [("cpu", "device"), ("cuda", "pinned_host"), ("cuda", "unpinned_host")])
def test_what_lies_in_host_memory_is_copied_and_not_viewed(platform, kind):
    """An offloaded array comes as a view of its own buffer, as on CPUs, and the next step overwrites that."""
    array = jax.device_put(jnp.arange(8.0), SingleDeviceSharding(jax.devices()[0], memory_kind=kind))
    (there,) = array.addressable_shards
    shard = SimpleNamespace(data=there.data, index=there.index, device=SimpleNamespace(platform=platform))
    data = copy_shard(shard)
    assert np.shares_memory(np.asarray(there.data), np.asarray(there.data)), "what is tested: it is a view"
    assert not np.shares_memory(data, np.asarray(there.data))
    assert np.array_equal(data, np.arange(8))


def test_what_one_replica_read_is_summed_on_the_devices_wherever_it_lies(monkeypatch):
    """GPUs compute with nothing that lies in host memory."""
    seen, make = [], one_replica.summing
    mesh = jfsdp.make_mesh(replica=2)

    def watched(*args):
        return lambda array: seen.append(array.sharding.memory_kind) or make(*args)(array)

    monkeypatch.setattr(one_replica, "summing", watched)
    sharding = NamedSharding(mesh, PartitionSpec("fsdp"), memory_kind="pinned_host")
    blocks = [
        jax.device_put(
            jnp.full(2, -float(place)) if one_replica.is_first_replica(sharding, device) else jnp.zeros(2),
            SingleDeviceSharding(device, memory_kind="pinned_host"),
        )
        for place, device in enumerate(mesh.devices.flat)
    ]
    array = jax.make_array_from_single_device_arrays((8,), sharding, blocks)
    found = one_replica.from_first_replica(array)
    assert seen == ["device"] and found.sharding == sharding
    assert all(np.array_equal(shard.data, np.asarray(found)[shard.index]) for shard in found.addressable_shards)
    assert np.asarray(found).tobytes() == np.array([-0.0, -0.0, -1, -1, -2, -2, -3, -3], np.float32).tobytes()


UNCLOSED = """
import sys
import jax
import jfsdp
from flax import nnx
import optax

class Net(nnx.Module):
    def __init__(self, rngs):
        self.weight = nnx.Param(jax.random.normal(rngs.params(), (512, 512)))

run = jfsdp.checkpoint.Checkpointer(sys.argv[1])
run.save(1, jfsdp.fully_shard(Net, units=[Net]).init(optax.adam(1e-3)))
if len(sys.argv) > 2:
    import jfsdp.checkpoint.disk.commit as commit
    def fail(*args): raise OSError("no such luck")
    commit.write_digests = fail
    raise KeyError("mine")
"""


def test_a_program_does_not_end_before_its_save_is_written(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "run")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert jfsdp.checkpoint.Checkpointer(tmp_path / "run").steps() == [1]
    assert "cannot schedule" not in done.stderr


def test_a_save_that_fails_while_a_program_ends_is_told(tmp_path):
    command = [sys.executable, "-c", UNCLOSED, str(tmp_path / "run"), "fail"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and "KeyError: 'mine'" in done.stderr
    assert "not written: no such luck" in done.stderr
    assert jfsdp.checkpoint.Checkpointer(tmp_path / "run").steps() == []
