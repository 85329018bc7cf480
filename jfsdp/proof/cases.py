"""The cases of a proof: strategies, programs, meshes and options, each pair of values together in some case."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any

from jfsdp.layout.mesh import CONTEXT, EXPERT, PIPE

STRATEGIES = ("full_shard", "zero1", "zero2", "ddp")


@dataclasses.dataclass(frozen=True)
class Case:
    """One way to train. `mesh` has the sizes of axes by name, as pairs."""

    mesh: tuple[tuple[str, int], ...]
    strategy: Any = "full_shard"
    program: str | None = None
    accumulate: int = 1
    reshard: bool | None = None
    remat: Any = "none"

    @property
    def name(self) -> str:
        """The case in one line."""
        mesh = ",".join(f"{axis}={size}" for axis, size in self.mesh)
        more = f" accumulate={self.accumulate}" if self.accumulate > 1 else ""
        more += "" if self.reshard is None else f" reshard={str(self.reshard).lower()}"
        more += f" remat={self.remat}" if self.remat != "none" else ""
        return f"{mesh} {getattr(self.strategy, 'name', self.strategy)} {self.program or 'auto'}{more}"


def cover(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return some of the rows, which contain every pair of values of any two columns that all contain (greedy)."""
    pairs = [set(itertools.combinations(sorted((name, repr(x)) for name, x in row.items()), 2)) for row in rows]
    missing, found = set[Any]().union(*pairs), []
    while missing:
        best = max(range(len(rows)), key=lambda place: len(pairs[place] & missing))
        missing -= pairs[best]
        found.append(rows[best])
    return found


def choose_cases(
    wanted: Mapping[str, Sequence[Any]],
    meshes: Sequence[Mapping[str, int]] | None,
    num_devices: int,
    axes: Sequence[str] = (),
    *,
    every: bool = False,
) -> list[Case]:
    """Return a covering set of cases, or every combination.

    Args:
      wanted: the values of each field of `Case` other than the mesh.
      meshes: sizes by axis; None: two devices on up to two of the axes at once, and the others on `fsdp`.
      axes: those that the model supports, other than `replica` and `fsdp`.
    """
    others = ["replica", *axes] if meshes is None and num_devices > 1 else []
    columns = {**wanted, **(dict.fromkeys(others, (1, 2)) if meshes is None else {"mesh": meshes})}
    most = min(2, (num_devices & -num_devices).bit_length() - 1)  # devices for at most this number of axes of size 2

    def allows(row: dict[str, Any]) -> bool:
        used = [axis for axis in others if row[axis] > 1]
        return len(used) <= most and not {PIPE, CONTEXT} <= {*used}

    rows = [row for values in itertools.product(*columns.values()) if allows(row := dict(zip(columns, values)))]
    rows = rows if every else cover(rows)
    return list(dict.fromkeys(_case(row, others, num_devices) for row in rows))


def _case(row: dict[str, Any], others: Sequence[str], num_devices: int) -> Case:
    sizes = {axis: row.pop(axis) for axis in others}
    used = {axis: size for axis, size in sizes.items() if size > 1}
    mesh = row.pop("mesh", None) or {**used, "fsdp": num_devices // math.prod(used.values())}
    sizes = {axis for axis, size in mesh.items() if size > 1}
    row |= {"program": "manual"} if {PIPE, EXPERT} & sizes else {}  # these exist in program manual only
    row |= {"accumulate": max(2, row["accumulate"])} if PIPE in sizes else {}  # microbatches fill the stages
    return Case(tuple(mesh.items()), **row)
