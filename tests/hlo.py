"""Devices of GPU clusters to compile for, and collectives of scheduled HLO."""

import collections

from jfsdp.plan.cluster.hardware import Cluster, find_gpu
from jfsdp.plan.cluster.target import topology_devices
from jfsdp.plan.hlo.collectives import find_collectives
from jfsdp.plan.hlo.parse import parse_module
from jfsdp.plan.hlo.trip_counts import walk


def h100s(nodes, per_node=8):
    """Return the devices of a described H100 cluster."""
    return gpus("h100", nodes, per_node)


def gpus(name, nodes=1, per_node=8):
    """Return the devices of a described cluster."""
    return topology_devices(Cluster(find_gpu(name), nodes, per_node))


def collectives(hlo, num_devices):
    """List the collectives of a scheduled module with loops multiplied out; bytes depend on the group size."""
    return find_collectives(parse_module(hlo), num_devices)


def wire_bytes(found):
    """Sum the bytes sent per device and step by (kind, element type)."""
    total = collections.Counter()
    for item in found:
        for dtype, size in item.wire_by_dtype.items():
            total[item.kind, dtype] += item.count * size
    return dict(total)


def host_copies(hlo):
    """Sum the bytes that a module copies outside of loops from the host to the device, and back."""
    into, out = 0, 0
    for _, line, times in walk(parse_module(hlo)):
        if line.opcode == "copy-start" and times == 1:
            target, source = (shape.memory for shape in line.shapes[:2])
            into += line.shapes[0].num_bytes * (source == "host" and target == "device")
            out += line.shapes[0].num_bytes * (target == "host" and source == "device")
    return into, out
