"""`jfsdp doctor`: diagnose problems of this installation and its settings."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import jax

from jfsdp.cli.console import GIB, Reporting, make_console, make_table, print_facts, print_verdict
from jfsdp.launch.processes import initialize
from jfsdp.launch.watch import Watch, tell_and_end
from jfsdp.layout.report import show_bytes
from jfsdp.objects.path import on_disk
from jfsdp.plan.cluster import doctor
from jfsdp.plan.cluster.processes import Processes, examine_processes
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.options import Decimal, Location, optional
from jfsdp.trainer.parse import read_mesh


@dataclasses.dataclass(frozen=True)
class Doctor(Reporting):
    """Examine this machine: versions, devices, XLA flags, NCCL settings, limits of the host.

    With --processes, examine a cluster. Start it in every process, like the run, with srun or
    `jfsdp launch --nproc 8 jfsdp doctor --processes`. It reports the processes on each host, differences of versions
    and settings, clock differences, free disk space, and the speed of an all-gather over each mesh axis.

    Exit status: 0 no problems, 1 problems, with remedies. Notes do not count.
    """

    processes: bool = False
    """Examine all processes of a run together."""
    run_dir: Location = None
    """With --processes: directory that all processes must see. none: the working directory."""
    mesh: Annotated[tuple[tuple[str, int], ...] | None, optional(str, "AXIS=SIZE,...")] = option(None, read=read_mesh)
    """With --processes: mesh axes to test, as for a run: replica=4,fsdp=8. none: fsdp over all devices."""
    timeout: Decimal = option(None, least=1)
    """With --processes: limit in seconds for each phase. If one exceeds it, all processes end and name it. none: 60."""

    def run(self) -> int:
        if self.processes:
            return self._run_processes()
        for name in ("run_dir", "mesh", "timeout"):
            if getattr(self, name) is not None:
                raise ValueError(f"{spell(name)} needs --processes: add it, or leave {spell(name)} out")
        machine = doctor.inspect_machine()
        findings = doctor.diagnose(machine)
        self.report(doctor.report_to_dict(machine, findings), lambda: _print(machine, findings))
        return _status(findings)

    def _run_processes(self) -> int:
        compare = {name: value for name, value in dataclasses.asdict(self).items() if name != "json"}
        directory, limit_s = on_disk(self.run_dir or ".", "--run-dir").resolve(), self.timeout or 60.0
        with _others_on_stderr():
            found = self._examine(directory, Watch(limit_s, initialize(compare=compare, timeout_s=limit_s)))
        if jax.process_index() == 0:
            self.report(dataclasses.asdict(found), lambda: _print_processes(found, directory))
        return _status(found.findings)

    def _examine(self, directory: Path, watch: Watch) -> Processes:
        with watch:
            try:
                with watch.at("starting JAX"):
                    jax.devices()
                sizes = dict(self.mesh or ())
                return examine_processes(directory, sizes, lambda: doctor.check_settings(os.environ), watch.at)
            except (ValueError, OSError) as error:
                tell_and_end(str(error), 1)
                raise


@contextlib.contextmanager
def _others_on_stderr() -> Iterator[None]:
    """Redirect the output of libraries to stderr, to keep it out of the report."""
    sys.stdout.flush()
    out = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(out, 1)
        os.close(out)


def _print_processes(found: Processes, directory: Path) -> None:
    console = make_console()
    _print_verdict(console, found.findings, f"for {len(found.facts)} processes")
    names = ("host", "processes", "devices of each", "memory of each", f"free in {directory}", "free in /dev/shm")
    table = make_table(*names)
    by_host: dict[int, list[int]] = {}
    for process, one in enumerate(found.facts):
        by_host.setdefault(one["host"], []).append(process)
    for processes in by_host.values():
        one = found.facts[processes[0]]
        table.add_row(
            one["name"],
            ", ".join(map(str, processes)),
            f"{len(one['devices'])} x {one['devices'][0]}",
            *(_gib(one[name]) for name in ("memory_bytes", "free_bytes", "shm_bytes")),
        )
    console.print(table)
    console.print(f"clocks differ by at most {found.skew_s * 1e3:.1f} ms\n")
    table = make_table("axis", "size", "crosses", "all-gather", "GB/s per device")
    for link in found.links:
        table.add_row(link.axis, str(link.size), link.crosses, f"{link.seconds * 1e3:.2f} ms", f"{link.gb_per_s:.2f}")
    console.print(table)
    _print_findings(console, found.findings)


def _status(findings: list[doctor.Finding]) -> int:
    return int(any(finding.severity == "problem" for finding in findings))


def _gib(size: int | None) -> str:
    return "-" if size is None else f"{size / GIB:.1f} GiB"


def _print_verdict(console: Any, findings: list[doctor.Finding], what: str) -> None:
    problems, notes = (sum(one.severity == kind for one in findings) for kind in ("problem", "note"))
    counts = f"{problems} problem{'s' * (problems != 1)}, {notes} note{'s' * (notes != 1)}"
    print_verdict(console, not problems, "OK" if not problems else "NOT OK", f"{what}: {counts}")
    console.print()


def _print_findings(console: Any, findings: list[doctor.Finding]) -> None:
    for finding in findings:
        console.print()
        console.print(f"{finding.severity.value}: {finding.topic}")
        print_facts(console, {"found": finding.text, "remedy": finding.remedy})


def _print(machine: doctor.Machine, findings: list[doctor.Finding]) -> None:
    console, probe = make_console(), machine.probe
    memory = f", {_gib(probe.memory_bytes)} for JAX" if probe.memory_bytes else ""
    listed = ", ".join(f"{count} x {kind}" for kind, count in collections.Counter(probe.kinds).items())
    facts = {
        "python": machine.python,
        **{name: version for name, version in machine.versions.items() if version},
        "devices": f"{probe.backend}: {listed}{memory}" if probe.backend else "unknown",
        "locked memory": "no limit" if machine.locked_bytes is None else show_bytes(machine.locked_bytes),
        "/dev/shm": _gib(machine.shm_bytes),
        **doctor.relevant_settings(machine.env),
    }
    _print_verdict(console, findings, f"for {probe.backend.upper()}" if probe.backend else "no device is known")
    print_facts(console, facts)
    _print_findings(console, findings)
