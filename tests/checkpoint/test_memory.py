"""Peak memory on the host while a state is restored and saved, in a process of its own."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MIB = 1 << 20
# Threads, executors, code loaded on the way: what does not grow with the state. Measured: at most 31 MiB.
CONSTANT = 48 * MIB
# glibc keeps freed blocks below a threshold that grows to 32 MiB, in an arena for each thread: 50 to 130 MiB here, by
# chance. With a fixed threshold every array is mapped alone, given back when freed, and the peak is what was held.
ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(64 << 10)}

# One process: makes a state of 288 MiB and saves it, or restores it, and says how its memory grew.
SCRIPT = """
import json, os, sys
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=4"
import jax, jax.numpy as jnp, optax
from flax import nnx
import jfsdp
from jfsdp.checkpoint import to_devices
from jfsdp.checkpoint.disk import reader
from jfsdp.checkpoint.disk.logical_arrays import contents
from jfsdp.checkpoint.store import bytes_of

MIB = 1 << 20
what, path, in_flight, cache, strategy = sys.argv[1], sys.argv[2], *map(int, sys.argv[3:5]), sys.argv[5]
to_devices.IN_FLIGHT_BYTES, reader.CACHE_BYTES = in_flight, cache

def memory(name):
    lines = dict(line.split(":", 1) for line in open("/proc/self/status"))
    return int(lines[name].split()[0]) * 1024

class Net(nnx.Module):
    def __init__(self, rngs):
        self.layers = nnx.List([nnx.Param(jnp.zeros((3072, 1024))) for _ in range(8)])  # 12 MiB each

model = jfsdp.fully_shard(Net, strategy=strategy)
tx = optax.adam(1e-3)
like = model.abstract_state(tx)
if what == "save":
    state = model.init(tx)
    state = jax.block_until_ready(jax.tree.map(lambda x: x + 1, state))
open("/proc/self/clear_refs", "w").write("5")  # the peak counts from here
before = memory("VmRSS")
if what == "save":
    jfsdp.checkpoint.save(path, state)
    arrays = 0
else:
    state = jfsdp.checkpoint.restore(path, like=like)
    arrays = sum(shard.data.nbytes for x in jax.tree.leaves(state) for shard in x.addressable_shards)
bound = to_devices.peak_bytes(contents(like)) + cache
print(json.dumps({"peak": memory("VmHWM") - before, "arrays": arrays, "bound": bound, "state": bytes_of(like)}))
"""


def measure(script: Path, *args) -> dict[str, int]:
    command, env = [sys.executable, script, *map(str, args)], {**os.environ, **ALLOCATOR}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=env, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    root = tmp_path_factory.mktemp("memory")
    (root / "script.py").write_text(SCRIPT)
    found = measure(root / "script.py", "save", root / "c", 16 * MIB, 16 * MIB, "full_shard")
    return root / "script.py", root / "c", found


def test_saving_takes_one_copy_of_what_the_process_writes(saved):
    _, _, found = saved
    assert 280 * MIB < found["state"] < 300 * MIB
    assert found["peak"] < found["state"] + CONSTANT, {name: value // MIB for name, value in found.items()}


@pytest.mark.parametrize("strategy", ["full_shard", pytest.param("ddp", marks=pytest.mark.proof)])
def test_restoring_stays_below_the_stated_bound(strategy, saved):
    """What the devices hold is in the same memory here, and is subtracted."""
    script, path, _ = saved
    found = measure(script, "restore", path, 16 * MIB, 16 * MIB, strategy)
    assert found["bound"] == (2 * 16 + 16) * MIB
    shown = {name: value // MIB for name, value in found.items()}
    assert found["peak"] - found["arrays"] < found["bound"] + CONSTANT, shown
