"""Compile for H100s that are not there, and count the collectives of the scheduled HLO."""

import collections

from jax.experimental import topologies

from jfsdp.plan.collectives import find_collectives
from jfsdp.plan.hlo import parse_module, walk

# H100 SXM by its datasheet; the form is XLA's GpuTargetConfigProto.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84942979072
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
  device_interconnect_info { active_links: 18 }
}
platform_name: "CUDA"
runtime_version { major: 12 minor: 9 }
dnn_version_info { major: 9 minor: 10 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""


def h100s(hosts, per_host=8):
    """Return the devices of a cluster nobody has rented."""
    shape = f"1x{hosts}x{per_host}"
    topology = topologies.get_topology_desc(platform="cuda", topology_name="", topology=shape, target_config=H100)
    return topology.devices


def collectives(hlo, num_devices):
    """List the collectives of a scheduled module, loops multiplied out; bytes by the size of each one's group."""
    return find_collectives(parse_module(hlo), num_devices)


def wire_bytes(found):
    """Sum bytes on the wire per device and step by (kind, element type)."""
    total = collections.Counter()
    for item in found:
        for dtype, size in item.wire_by_dtype.items():
            total[item.kind, dtype] += item.count * size
    return dict(total)


def host_copies(hlo):
    """Sum the bytes that a module copies outside of loops from host memory to the device, and back."""
    into, out = 0, 0
    for _, line, times in walk(parse_module(hlo)):
        if line.opcode == "copy-start" and times == 1:
            target, source = (shape.memory for shape in line.shapes[:2])
            into += line.shapes[0].num_bytes * (source == "host" and target == "device")
            out += line.shapes[0].num_bytes * (target == "host" and source == "device")
    return into, out
