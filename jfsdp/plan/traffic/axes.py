"""Along which mesh axes the devices of a collective differ, and so whose collective it is."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jfsdp.layout.layout import Layout
from jfsdp.layout.mesh import MODEL_AXES, OUTER_FIRST
from jfsdp.plan.hlo.collectives import Collective


def group_axes(layout: Layout, group: Sequence[int]) -> tuple[str, ...]:
    """Return the mesh axes along which the devices of a group differ; () if a group is no block of the mesh.

    Devices are numbered from the mesh's outermost axis to its innermost, which counts fastest. An axis that a group
    spans only in part counts.
    """
    places: list[list[int]] = []
    rest, sizes = list(group), [(axis, dict(layout.mesh_sizes).get(axis, 1)) for axis in OUTER_FIRST]
    for _, size in reversed(sizes):
        places.append([device % size for device in rest])
        rest = [device // size for device in rest]
    names = [name for name, _ in sizes]
    spans = {name: len(set(place)) for name, place in zip(names, reversed(places), strict=True)}
    axes = tuple(name for name in names if spans[name] > 1)
    return axes if math.prod(spans.values()) == len(set(group)) else ()


def is_own(layout: Layout, item: Collective) -> bool:
    """Tell whether a collective runs over the axes alone that the model itself is split over.

    No strategy moves anything there: it is what the model's own shardings cost; see activations.py.
    """
    axes = group_axes(layout, item.group)
    return bool(axes) and set(axes) <= set(MODEL_AXES)
