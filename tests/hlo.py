"""Compile for H100s that are not there, and count the collectives of the scheduled HLO."""

import collections
import dataclasses
import math
import re

from jax.experimental import topologies

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


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a step: kind, element type, how often it runs, devices of a group, bytes sent by each."""

    kind: str
    dtype: str
    count: int
    group: int
    wire_bytes: float


_SIZES = {"pred": 1, "s8": 1, "u8": 1, "f16": 2, "bf16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_KINDS = "all-gather|reduce-scatter|all-reduce|all-to-all|collective-permute"


def collectives(hlo, num_devices):
    """List the collectives of a scheduled module, loops multiplied out; bytes by the size of each one's group."""
    bodies, entry = _computations(hlo)
    found = []

    def visit(name, times):
        for line in bodies[name]:
            found.extend(_read(line, times, num_devices))
            loop = re.search(r" while\(.*body=%?([\w.\-]+)", line)
            if loop:
                (count,) = re.findall(r'known_trip_count":\{"n":"(\d+)"', line)
                visit(loop[1], times * int(count))
            call = re.search(r"(?:async-start|call)\(.*(?:calls|to_apply)=%?([\w.\-]+)", line)
            if call:
                visit(call[1], times)

    visit(entry, 1)
    return found


def _computations(hlo):
    bodies, entry, name = {}, None, None
    for line in hlo.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if header and not line.startswith(" "):
            name = header[2]
            bodies[name] = []
            entry = name if header[1] else entry
        elif name:
            bodies[name].append(line)
    return bodies, entry


def _read(line, times, num_devices):
    match = re.search(rf"= (.*?) ({_KINDS})(-start)?\(", line)
    if not match:
        return
    shapes = re.findall(r"(\w+)\[([\d,]*)\]", match[1])
    # A start's type holds its operands, then its results; that of an all-reduce only from JAX 0.12 on.
    if match[3] and (match[2] != "all-reduce" or match[1].startswith("((")):
        shapes = shapes[len(shapes) // 2 :]
    group = _group_size(line, num_devices)
    for dtype, dims in shapes:
        size = _SIZES[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim)
        others = group - 1
        factor = {"all-gather": others / group, "reduce-scatter": others, "all-reduce": 2 * others / group}
        yield Collective(match[2], dtype, times, group, size * factor.get(match[2], 1))


def _group_size(line, num_devices):
    """Read how many devices take part: `[8,4]<=[32]`, `{{0,1},{2,3}}`, or `mesh['a'=2,'b'=4] {'b'}`."""
    if iota := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", line):
        return int(iota[2])
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", line):
        return len(listed[1].split(","))
    if named := re.search(r"replica_groups=mesh\[(.*?)\](?:, device_ids=\(.*?\))? \{(.*?)\}", line):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        assert not re.search(r":\(", named[2]), f"part of an axis: {named[0]}"
        return math.prod(sizes[name] for name in re.findall(r"'(\w+)'", named[2]))
    assert "replica_groups" not in line or "replica_groups={}" in line, line[:400]
    return num_devices


def wire_bytes(found):
    """Sum bytes on the wire per device and step by (kind, element type)."""
    total = collections.Counter()
    for item in found:
        total[item.kind, item.dtype] += item.count * item.wire_bytes
    return dict(total)


def wire_bytes_by_group(found):
    """Sum bytes on the wire per device and step by (kind, element type, devices in a group)."""
    total = collections.Counter()
    for item in found:
        total[item.kind, item.dtype, item.group] += item.count * item.wire_bytes
    return dict(total)


def host_copies(hlo):
    """Sum the bytes that a module copies outside of loops from host memory to the device, and back."""
    into, out = 0, 0
    for line in hlo.splitlines():
        copy = re.search(r"= \((.*)\) copy-start\(", line)
        if not copy:
            continue
        (to_host, size), (from_host, _) = (
            ("S(5)" in layout, _SIZES[dtype] * math.prod(int(dim) for dim in dims.split(",") if dim))
            for dtype, dims, layout in re.findall(r"(\w+)\[([\d,]*)\](\{[^}]*\})", copy[1])[:2]
        )
        into, out = into + size * (from_host and not to_host), out + size * (to_host and not from_host)
    return into, out
