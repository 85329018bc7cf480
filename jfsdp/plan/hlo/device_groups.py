"""Parse the device groups of a collective, in every form that XLA prints."""

import functools
import itertools
import math
import re

_LISTS = re.compile(r"replica_groups=\{((?:\{[\d,]*\},?)*)\}")
_IOTA = re.compile(r"replica_groups=\[(\d+),(\d+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\](?:, device_ids=\((.*?)\))? \{([^}]*)\}")
_PAIRS = re.compile(r"source_target_pairs=\{((?:\{\d+,\d+\},?)*)\}")
_IDS = re.compile(r"\[([\d,]+)\](?:T\(([\d,]+)\))?")


@functools.lru_cache(maxsize=256)
def read_group(attributes: str, num_devices: int) -> tuple[int, ...]:
    """Return the first group of devices of a collective's attributes, in the order of the group.

    Forms: `{{0,1},{2,3}}`, `{}` (all devices), `[2,4]<=[8]`, `[4,2]<=[2,4]T(1,0)`, `mesh['a'=2,'b'=4] {'b'}`, the same
    with `device_ids=([4,2]T(1,0))` or `device_ids=(0,2,1,3)`, a sub-axis `'b':(2)2` (of size 2, inside an outer
    sub-axis of size 2), and `source_target_pairs={{0,1},{1,2}}`, for which the largest connected group is returned.

    Raises:
      ValueError: for groups in another form; quotes the text.
    """
    if pairs := _PAIRS.search(attributes):
        return _joined([_numbers(pair) for pair in re.findall(r"\{(\d+,\d+)\}", pairs[1])])
    if lists := _LISTS.search(attributes):
        first = re.search(r"\{([\d,]*)\}", lists[1])
        return _numbers(first[1]) if first else tuple(range(num_devices))
    if iota := _IOTA.search(attributes):
        return _iota(iota[3], iota[4])[: int(iota[2])]
    if mesh := _MESH.search(attributes):
        return _of_mesh(mesh[1], mesh[2], mesh[3])
    if "replica_groups=" not in attributes:
        return tuple(range(num_devices))
    text = attributes[attributes.index("replica_groups=") :][:120]
    raise ValueError(f"groups of a collective in an unknown form: {text!r}; is the HLO of another version?")


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(int(number) for number in text.split(",") if number)


def _iota(dims: str, permutation: str | None) -> tuple[int, ...]:
    """Return the row-major numbers of an array of `dims`, in the order of its permuted dims."""
    sizes = _numbers(dims)
    strides = [math.prod(sizes[dim + 1 :]) for dim in range(len(sizes))]
    order = _numbers(permutation) if permutation else range(len(sizes))
    places = itertools.product(*(range(0, sizes[dim] * strides[dim], strides[dim]) for dim in order))
    return tuple(sum(place) for place in places)


def _of_mesh(axes: str, device_ids: str | None, grouped: str) -> tuple[int, ...]:
    """Return the devices at index 0 of all axes but the grouped ones, of which the first varies slowest."""
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", axes)}
    names = list(sizes)
    strides = {name: math.prod(sizes[other] for other in names[place + 1 :]) for place, name in enumerate(names)}
    ranges = []
    for name, before, part in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", grouped):
        size = int(part) if part else sizes[name]
        stride = strides[name] * (sizes[name] // (int(before) * size) if part else 1)
        ranges.append(range(0, size * stride, stride))
    places = [sum(place) for place in itertools.product(*ranges)]
    found = _IDS.fullmatch(device_ids or "")
    ids = _iota(found[1], found[2]) if found else _numbers(device_ids or "")  # none: in the order of the mesh
    return tuple(ids[place] for place in places) if ids else tuple(places)


def _joined(pairs: list[tuple[int, ...]]) -> tuple[int, ...]:
    groups: list[dict[int, None]] = []
    for pair in pairs:
        touched = [group for group in groups if any(device in group for device in pair)]
        merged = {device: None for group in touched for device in group} | dict.fromkeys(pair)
        groups = [group for group in groups if group not in touched] + [merged]
    return tuple(max(groups, key=len, default={}))  # a pair of a device with itself is a group of one
