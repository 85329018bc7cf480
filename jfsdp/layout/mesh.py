"""Device meshes and the roles of their axes.

The axes, from outer to inner: `pipe`, `replica`, `fsdp`, `expert`, `context`, `tensor`. Outer axes span hosts, inner
axes stay on the fast links inside a host. In a mesh they are in the order in which a step's `shard_map`s make them
manual, with `pipe` after the data axes: XLA (0.12) aborts if an axis comes before others that are made manual earlier.
Code asks for the role of an axis ("the batch is split over ..."), never for a literal name.

The state is split, and gradients are summed, over the data axes. Three of them split the rows of a batch, and
`context` splits the tokens of a row. `expert` also cuts the weights of experts, whose gradients are not summed over it.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, AxisType, Mesh, PartitionSpec

from jfsdp.arguments import checked
from jfsdp.launch.hosts import hosts
from jfsdp.layout.limits import check_number

PIPE, CONTEXT, EXPERT = "pipe", "context", "expert"
ROW_AXES = ("replica", "fsdp", EXPERT)  # the rows of a batch are split over these
DATA_AXES = (*ROW_AXES, CONTEXT)  # the batch is split over these
AXES = (*DATA_AXES, PIPE, "tensor")
OUTER_FIRST = (PIPE, *DATA_AXES, "tensor")
GROUP_AXES = ("fsdp", EXPERT, CONTEXT)  # a strategy shards over these and replicates over the other data axes
MODEL_AXES = ("tensor", PIPE)  # the model is split over these: its computation, or its layers
CUT_AXES = (*MODEL_AXES, EXPERT)  # these may cut leaves
SHARED_AXES = (*MODEL_AXES, CONTEXT)  # the devices along these share rows, and send activations
SENT_AXES = (*SHARED_AXES, EXPERT)  # activations are sent over these
_MEANT = {"dp": "replica", "dp_replicate": "replica", "dp_shard": "fsdp", "tp": "tensor", "pp": PIPE, "ep": EXPERT}
_MEANT |= {"cp": CONTEXT, "sp": CONTEXT, "sequence": CONTEXT, "ulysses": CONTEXT}
_PLACES = [OUTER_FIRST.index(axis) for axis in AXES]
_MOST_PARTS = 32  # of an axis: each is at least 2, and no mesh has 2**32 devices
# Parts of a data axis over which some stage is only partly split (hpZ): `fsdp_0`, `fsdp_1`, ..., major to minor.
SUB_AXES = {axis: tuple(f"{axis}_{place}" for place in range(_MOST_PARTS)) for axis in DATA_AXES}


def check_sizes(sizes: Mapping[str, int]) -> None:
    """Check axis names and sizes, and that at most one size is -1.

    Raises:
      ValueError: naming the axis and its size.
    """
    unknown = [name for name in sizes if name not in AXES]
    if unknown:
        other = f"called {_MEANT[unknown[0]]!r} in jfsdp" if unknown[0] in _MEANT else "unknown"
        raise ValueError(f"mesh axis {unknown[0]!r} is {other}; the axes are {', '.join(OUTER_FIRST)}")
    bad = {name: size for name, size in sizes.items() if size < 1 and size != -1}
    if bad:
        raise ValueError(f"mesh axis sizes must be positive, or -1 for the rest; got {bad}")
    check_number(f"mesh {dict(sizes)}", abs(math.prod(sizes.values())))
    if list(sizes.values()).count(-1) > 1:
        raise ValueError(f"only one mesh axis may be -1 (the rest of the devices); got {dict(sizes)}")


def resolve_sizes(sizes: Mapping[str, int], num_devices: int) -> dict[str, int]:
    """Replace a size of -1 by the size for the remaining devices, and order the axes as `AXES`.

    Raises:
      ValueError: if the product of the sizes is not `num_devices`.
    """
    check_sizes(sizes)
    ordered = {name: sizes[name] for name in AXES if name in sizes}
    known = math.prod(size for size in ordered.values() if size != -1)
    rest = num_devices // known
    resolved = {name: rest if size == -1 else size for name, size in ordered.items()}
    if math.prod(resolved.values()) != num_devices:
        text = ",".join(f"{name}={size}" for name, size in ordered.items())
        odd = [name for name, size in ordered.items() if num_devices % size]
        fits = ", ".join(str(size) for size in range(1, num_devices + 1) if num_devices % size == 0)
        remedy = f"axis {odd[0]!r} may have size {fits}" if odd else "change the sizes or the devices"
        raise ValueError(
            f"mesh {text} needs {'a multiple of ' if -1 in ordered.values() else ''}{known} devices, but there are "
            f"{num_devices}; {remedy}, or set one axis size to -1"
        )
    return resolved


@checked
def make_mesh(
    *,
    pipe: int = 1,
    replica: int = 1,
    fsdp: int = -1,
    expert: int = 1,
    context: int = 1,
    tensor: int = 1,
    sharding_factor: int | None = None,
    devices: Sequence[Any] | None = None,
    **unknown: int,
) -> Mesh:
    """Arrange devices into the mesh (replica, fsdp, expert, context, pipe, tensor).

    Devices of one host are neighbours along the inner axes, so that `tensor`, then `context`, `expert` and `fsdp` use
    the links inside a host, and `replica` and `pipe` cross hosts, for any assignment of processes to hosts.

    Cost: for devices of several processes, that of `jfsdp.launch.hosts.hosts`: every process must make the mesh.

    Args:
      pipe, replica, fsdp, expert, context, tensor: axis sizes; at most one is -1 and takes the rest of the devices.
      sharding_factor: size of axis `fsdp`; `replica` gets the rest of `replica * fsdp`. Without other axes, the state
        is sharded over groups of this many neighbouring devices.
      devices: the devices to use; default all of `jax.devices()`. May be devices of a deviceless topology.
      unknown: must be empty.

    Raises:
      TypeError: if `devices` contains other objects.
      ValueError: if the product of the sizes is not the number of devices, or for an axis that jfsdp does not know.
    """
    check_sizes(unknown)
    devices = list(jax.devices() if devices is None else devices)
    if not devices:
        raise ValueError("a mesh needs devices, and the list given is empty; leave out devices= to use all devices")
    if other := [device for device in devices if not hasattr(device, "platform")]:
        raise TypeError(f"devices has {other[0]!r} (a {type(other[0]).__name__}); pass devices of jax.devices()")
    if len(set(devices)) < len(devices):
        raise ValueError("devices has a device twice; pass each one once, as jax.devices() returns them")
    sizes = {PIPE: pipe, "replica": replica, "fsdp": fsdp, EXPERT: expert, CONTEXT: context, "tensor": tensor}
    sizes = resolve_sizes(sizes, len(devices))
    sizes = sizes if sharding_factor is None else regroup(sizes, sharding_factor)
    shape = tuple(sizes[axis] for axis in OUTER_FIRST)
    host = dict(zip(devices, hosts(devices), strict=True))
    devices.sort(key=lambda d: (getattr(d, "slice_index", 0) or 0, host[d], d.process_index, d.id))
    grid = np.asarray(devices, dtype=object).reshape(shape)
    return place_devices(grid, sizes)


def place_devices(devices: np.ndarray, sizes: Mapping[str, int]) -> Mesh:
    """Make the mesh of devices that are ordered from the outermost axis to the innermost."""
    grid = devices.reshape([sizes.get(axis, 1) for axis in OUTER_FIRST])
    return Mesh(grid.transpose(_PLACES), AXES, axis_types=(AxisType.Auto,) * len(AXES))


def outer_first(numbers: np.ndarray, sizes: Mapping[str, int]) -> np.ndarray:
    """Reorder an array from the order of a mesh of these sizes to outermost axis first, and flatten it."""
    return numbers.reshape([sizes.get(axis, 1) for axis in AXES]).transpose(np.argsort(_PLACES)).reshape(-1)


@checked
def make_abstract_mesh(sizes: Mapping[str, int], *, sharding_factor: int | None = None) -> AbstractMesh:
    """Make a mesh of axis names and sizes without devices, for layouts and plans; see `make_mesh`."""
    if -1 in sizes.values():
        raise ValueError(f"a mesh without devices needs every size; got {dict(sizes)}")
    full = {name: sizes.get(name, 1) for name in AXES}
    check_sizes(sizes)
    full = full if sharding_factor is None else regroup(full, sharding_factor)
    return AbstractMesh(tuple(full.values()), tuple(full), axis_types=(AxisType.Auto,) * len(full))


def axis_sizes(mesh: Mesh | AbstractMesh) -> dict[str, int]:
    """Return the sizes of a mesh by axis name, and check that jfsdp knows the axes.

    Raises:
      ValueError: if an axis is unknown or is not of type Auto (on `Explicit` axes an unmodified model does not trace).
    """
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True):
        if name not in AXES:
            raise ValueError(f"unknown mesh axis {name!r}; the axes are {', '.join(OUTER_FIRST)}: use jfsdp.make_mesh")
        if kind != AxisType.Auto:
            raise ValueError(
                f"mesh axis {name!r} has type {kind.name}; use jfsdp.make_mesh, or pass axis_types=(AxisType.Auto, ...)"
            )
    return dict(mesh.shape)


def num_data_shards(sizes: Mapping[str, int]) -> int:
    """Return the number of parts that the rows of a batch are split into."""
    return math.prod(sizes.get(axis, 1) for axis in ROW_AXES)


def axes_of(mesh: Mesh | AbstractMesh, axes: Iterable[str]) -> tuple[str, ...]:
    """Return the axes of a mesh that are one of `axes`, or a part of one that `split_mesh` makes."""
    return tuple(name for name in mesh.axis_names if is_axis(name, axes))


def is_axis(name: str, axes: Iterable[str]) -> bool:
    """Tell whether an axis of a mesh is one of these data axes, or a part of one that `split_mesh` makes."""
    return any(name == axis or name in SUB_AXES[axis] for axis in axes)


def batch_spec(mesh: Mesh | AbstractMesh, num_dims: int) -> PartitionSpec:
    """Return the spec of a leaf of a batch [rows, tokens, ...]; a leaf without dims is replicated."""
    rows, tokens = (axes_of(mesh, axes) for axes in (ROW_AXES, (CONTEXT,)))
    return PartitionSpec(*(rows, tokens)[: min(num_dims, 2 if num_contexts(mesh) > 1 else 1)])


def model_axes(mesh: Mesh | AbstractMesh) -> tuple[str, ...]:
    """Return the axes of size above 1 over which a model may be split."""
    return tuple(name for name in MODEL_AXES if mesh.shape.get(name, 1) > 1)


def num_contexts(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of parts that the tokens of a row are split into."""
    return math.prod(mesh.shape[axis] for axis in axes_of(mesh, (CONTEXT,)))


def crosses_hosts(mesh: Mesh | AbstractMesh, axis: str) -> bool:
    """Tell whether neighbours along an axis are on different hosts. Cost: as for `make_mesh`."""
    if isinstance(mesh, AbstractMesh):
        return False
    grid = _host_grid(mesh)
    first = np.take(grid, [0], axis=mesh.axis_names.index(axis))
    return bool((grid != first).any())


def _host_grid(mesh: Mesh) -> np.ndarray:
    return np.reshape(hosts(list(mesh.devices.flat)), mesh.devices.shape)


@functools.lru_cache(maxsize=8)  # an evaluation reads it for each batch
def row_shares(mesh: Mesh | AbstractMesh) -> dict[int, int]:
    """Return by process the index of its share of a batch's rows; processes with the same rows have the same index.

    Processes whose devices differ only along other axes (`tensor` or `context` across processes) have the same rows.

    Raises:
      ValueError: if the rows of two processes overlap partly.
    """
    if isinstance(mesh, AbstractMesh):
        return {0: 0}
    axes = axes_of(mesh, ROW_AXES)
    places = [mesh.axis_names.index(axis) for axis in axes]
    num_parts = math.prod(mesh.shape[axis] for axis in axes)
    parts = np.moveaxis(mesh.devices, places, range(len(places))).reshape(num_parts, -1)
    rows: dict[int, set[int]] = {}
    for row, devices in enumerate(parts):
        for device in devices:
            rows.setdefault(device.process_index, set()).add(row)
    shares = list(dict.fromkeys(frozenset(own) for own in rows.values()))
    if sum(map(len, shares)) != num_parts:
        sizes = {axis: size for axis, size in mesh.shape.items() if axis not in axes and size > 1}
        raise ValueError(
            f"mesh axes {sizes} split processes so that some share a part of their rows: each has "
            f"{mesh.size // len(rows)} of the mesh's devices; use sizes whose product divides this number, or is a "
            "multiple of it"
        )
    return {process: shares.index(frozenset(own)) for process, own in rows.items()}


@contextlib.contextmanager
def model_mesh(mesh: Mesh | AbstractMesh) -> Iterator[None]:
    """Allow a model to state shardings as bare PartitionSpecs while it is traced, if the mesh has model axes.

    Axes `context` and `expert` count here: attention and experts read them (`jfsdp.over_context`, `jfsdp.experts`).
    Moves no data. If these axes have size 1, no mesh is set, so that programs are the same as without. A mesh that
    the user has set stays set if it has the same axes, and is hidden otherwise, since the state is not on its axes.

    Raises:
      ValueError: if the user has set a mesh with `Explicit` axes.
    """
    there = jax.sharding.get_abstract_mesh()
    if AxisType.Explicit in there.axis_types:
        raise ValueError(
            f"a mesh with Explicit axes {there.axis_names} is set (jax.set_mesh), but an unmodified model can only be "
            "traced on Auto axes; call jfsdp outside of it, or set a mesh with axis_types=(AxisType.Auto, ...)"
        )
    if model_axes(mesh) or math.prod(mesh.shape[axis] for axis in axes_of(mesh, (EXPERT, CONTEXT))) > 1:
        here = mesh if isinstance(mesh, AbstractMesh) else mesh.abstract_mesh
    elif there.empty or dict(there.shape) == dict(mesh.shape):
        yield
        return
    else:
        here = AbstractMesh((), ())
    with jax.sharding.use_abstract_mesh(here):
        yield


def split_mesh(mesh: Mesh, sub_axes: Mapping[str, Sequence[tuple[str, int]]]) -> Mesh:
    """Return a mesh of the same devices in the same order, with some axes split into several."""
    if not sub_axes:
        return mesh
    parts = [part for axis, size in mesh.shape.items() for part in sub_axes.get(axis, [(axis, size)])]
    names, sizes = zip(*parts, strict=True)
    kinds = (AxisType.Auto,) * len(names)
    if isinstance(mesh, AbstractMesh):
        return AbstractMesh(sizes, names, axis_types=kinds)  # type: ignore[return-value]
    return Mesh(mesh.devices.reshape(sizes), names, axis_types=kinds)


def num_processes(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of processes with devices in a mesh; 1 for a mesh without devices."""
    return 1 if isinstance(mesh, AbstractMesh) else len({device.process_index for device in mesh.devices.flat})


def spans_run(mesh: Mesh | AbstractMesh) -> bool:
    """Tell whether a run has several processes and all of them have devices in a mesh.

    Exchanges between processes through JAX include all of them or none.
    """
    return 1 < num_processes(mesh) == jax.process_count()  # in this order: a mesh without devices does not start JAX


def node_size(mesh: Mesh | AbstractMesh) -> int:
    """Return the number of neighbouring parts of the state on one host: its devices, over axis `tensor`'s size.

    Cost: as for `make_mesh`.

    Raises:
      ValueError: if the mesh has no devices, hosts have different numbers of parts, or a host's devices are not
        neighbours (in a mesh from `make_mesh` they are).
    """
    if isinstance(mesh, AbstractMesh):
        raise ValueError("the mesh has sizes but no devices, so its hosts are unknown")
    axes = axes_of(mesh, DATA_AXES)
    places, num_parts = [mesh.axis_names.index(axis) for axis in axes], math.prod(mesh.shape[axis] for axis in axes)
    lines = np.moveaxis(_host_grid(mesh), places, range(-len(places), 0)).reshape(-1, num_parts)
    runs = [[(host, len(list(run))) for host, run in itertools.groupby(line)] for line in lines.tolist()]
    sizes = {size for line in runs for _, size in line}
    if len(sizes) > 1 or any(len(dict(line)) < len(line) for line in runs):
        raise ValueError(f"the mesh's hosts have no equal blocks of the state, but in order (host, parts) {runs[0]}")
    return sizes.pop()


def regroup(sizes: Mapping[str, int], sharding_factor: int) -> dict[str, int]:
    """Return the sizes of a mesh with axis `fsdp` of this size, and axis `replica` of the remaining data shards.

    Raises:
      ValueError: if `sharding_factor` does not divide the number of data shards.
    """
    num_shards = sizes.get("replica", 1) * sizes.get("fsdp", 1)
    if sharding_factor < 1 or num_shards % sharding_factor:
        divisors = ", ".join(str(n) for n in range(1, num_shards + 1) if num_shards % n == 0)
        raise ValueError(
            f"sharding_factor={sharding_factor} does not divide the {num_shards} devices of axes 'replica' and "
            f"'fsdp'; use one of {divisors}"
        )
    return {**sizes, "replica": num_shards // sharding_factor, "fsdp": sharding_factor}
