"""Compile for H100s that are not there, and count what the scheduled HLO moves."""

import collections
import math
import re

from jfsdp.plan.collectives import find_collectives
from jfsdp.plan.hardware import Cluster, find_gpu
from jfsdp.plan.hlo import parse_module
from jfsdp.plan.target import topology_devices

_SIZES = {"bf16": 2, "f16": 2, "f32": 4, "s32": 4}


def h100s(nodes, per_node=8):
    """Return the devices of a cluster nobody has rented."""
    return topology_devices(Cluster(find_gpu("h100"), nodes, per_node))


def found_collectives(text, num_devices):
    """List the collectives of a scheduled module, loops multiplied out."""
    return find_collectives(parse_module(text), num_devices)


def wire_bytes(found):
    """Sum bytes on the wire per device and step by (kind, element type)."""
    return _sum(found, lambda item, dtype: (item.kind, dtype))


def wire_bytes_by_group(found):
    """Sum bytes on the wire per device and step by (kind, element type, devices in a group)."""
    return _sum(found, lambda item, dtype: (item.kind, dtype, len(item.group)))


def _sum(found, key):
    total = collections.Counter()
    for item in found:
        for dtype, size in item.wire_by_dtype.items():
            total[key(item, dtype)] += item.count * size
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
