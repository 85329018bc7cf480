"""`jfsdp profile`: the time of traced steps, next to the plan of the run."""

from __future__ import annotations

import dataclasses
import statistics
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.cli.console import Reporting, make_console, make_table
from jfsdp.cli.report import CLOCK
from jfsdp.launch.runtime import without_plugin_chatter
from jfsdp.plan.cluster.gpus import gpu_of_device
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.time.profile import read_profile
from jfsdp.trainer.options import StepOptions
from jfsdp.trainer.recipes import with_fields
from jfsdp.trainer.run.directory import read_config

ROWS = {**CLOCK, "idle_s": "idle"}


@dataclasses.dataclass(frozen=True)
class ProfileRun(Reporting):
    """Print where the time of the traced steps of a run went, next to the plan of its options.

    The trace is that of `scripts/train.py --profile START:STOP`, the newest one in the run's directory.
    """

    run_dir: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="RUN")]]

    def run(self) -> int:
        run_dir = Path(self.run_dir).expanduser()
        if not run_dir.is_dir():
            raise ValueError(f"{run_dir} is not a directory; pass the directory of a run")
        profiles = read_profile(run_dir / "profile")
        found = {"devices": [dataclasses.asdict(one) for one in profiles], **_plan(run_dir)}
        self.report(found, lambda: _print(found))
        return 0


def _plan(run_dir: Path) -> dict[str, Any]:
    """Return the planned seconds of a step of the run, or the reason why there are none."""
    from jfsdp.plan.jobs import plan_job

    try:
        if "devices" not in (stored := read_config(run_dir)):
            raise ValueError(f"{run_dir} has no config.json with the devices of the run")
        kind, nodes, per_node = stored["devices"]
        if (gpu := gpu_of_device(kind)) is None:
            raise ValueError(f"the devices of the run are {kind}, an unknown GPU")
        usual = StepOptions()
        fields = {name: value for name, value in stored["config"].items() if hasattr(usual, name)}
        with without_plugin_chatter():
            clock = plan_job(with_fields(usual, fields, "config.json"), Cluster(gpu, nodes, per_node)).timeline
    except Exception as error:  # the profile is printed anyway
        reason = str(error) if isinstance(error, ValueError) else f"{type(error).__name__}: {error}"
        return {"planned": None, "planned_hidden_s": 0.0, "not_planned": reason}
    return {"planned": clock.critical, "planned_hidden_s": clock.wire_s - clock.exposed_s, "not_planned": ""}


def _print(found: dict[str, Any]) -> None:
    devices, planned, console = found["devices"], found["planned"] or {}, make_console()
    parts = {name: statistics.mean(one["seconds"].get(name, 0.0) for one in devices) for name in ROWS}
    totals = sum(parts.values()), sum(planned.values())
    rows = [(title, parts[name], planned.get(name, 0.0)) for name, title in ROWS.items()]
    hidden_s = statistics.mean(one["hidden_s"] for one in devices)
    rows += [("total", *totals), ("hidden communication", hidden_s, found["planned_hidden_s"])]
    numbers = ("measured, ms", "share", *["planned, ms"] * bool(planned))
    table = make_table("mean of a step", *numbers, right=numbers)
    for title, measured_s, planned_s in (row for row in rows if any(row[1:])):
        cells = f"{1e3 * measured_s:.1f}", f"{measured_s / totals[0]:.1%}", f"{1e3 * planned_s:.1f}"
        table.add_row(title, *cells[: len(numbers)])
    counted = f"{devices[0]['num_steps']} steps, counted by {devices[0]['counted_by']}"
    console.print(f"{counted}, on {len(devices)} device{'s' * (len(devices) > 1)}\n", table)
    if found["not_planned"]:
        console.print(f"no plan: {found['not_planned']}")
