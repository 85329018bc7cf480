"""The cases of a proof: strategies, programs, meshes and options, each pair of values together in some case."""

from __future__ import annotations

import dataclasses
import itertools
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


def meshes(num_devices: int, axes: Sequence[str]) -> list[dict[str, int]]:
    """Return the meshes of a proof: the devices on `fsdp`, and two of them on each other axis, alone and together.

    Args:
      axes: those that the model supports, other than `replica` and `fsdp`.
    """
    others = ["replica", *axes] if num_devices > 1 else []
    found: list[dict[str, int]] = [{"fsdp": num_devices}, *({axis: 2, "fsdp": num_devices // 2} for axis in others)]
    pairs = itertools.combinations([axis for axis in others if axis != PIPE], 2) if num_devices % 4 == 0 else ()
    found += [{one: 2, other: 2, "fsdp": num_devices // 4} for one, other in pairs if {one, other} != {CONTEXT, EXPERT}]
    return found


def cover(columns: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Return rows with one value per column that contain every pair of values of any two columns (greedy)."""
    names = list(columns)
    places = list(itertools.combinations(range(len(names)), 2))
    rows = list(itertools.product(*(range(len(columns[name])) for name in names)))
    missing = {(i, row[i], j, row[j]) for row in rows for i, j in places}
    found = []
    while missing:
        row = max(rows, key=lambda row: sum((i, row[i], j, row[j]) in missing for i, j in places))
        missing -= {(i, row[i], j, row[j]) for i, j in places}
        found.append({name: columns[name][place] for name, place in zip(names, row, strict=True)})
    return found


def choose_cases(wanted: Mapping[str, Sequence[Any]], *, every: bool = False) -> list[Case]:
    """Return a covering set of cases, or every combination.

    Args:
      wanted: the values of each field of `Case`; meshes as sizes by axis.
    """
    columns = {name: [tuple(x.items()) if name == "mesh" else x for x in values] for name, values in wanted.items()}
    if every:
        rows = [dict(zip(columns, row, strict=True)) for row in itertools.product(*columns.values())]
    else:
        rows = cover(columns)
    # A pipeline exists in program manual only, and its microbatches fill the stages.
    fixed = ({**row, "program": "manual", "accumulate": 2} if PIPE in dict(row["mesh"]) else row for row in rows)
    return list(dict.fromkeys(Case(**row) for row in fixed))
