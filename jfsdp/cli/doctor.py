"""`jfsdp doctor`: what of this installation and its settings would stop a run or slow it down."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from jfsdp.cli.console import make_console

if TYPE_CHECKING:
    from jfsdp.plan.cluster.doctor import Machine
    from jfsdp.plan.cluster.settings import Finding


@dataclasses.dataclass(frozen=True)
class Doctor:
    """Examine this machine: versions, devices, XLA flags, NCCL and memory settings, limits of the host.

    Exit status 0: nothing is wrong; 1: something is, with what to do about it. Notes do not count.
    """

    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from jfsdp.plan.cluster.doctor import diagnose, inspect_machine, report_to_dict
        from jfsdp.plan.cluster.settings import Severity

        machine = inspect_machine()
        findings = diagnose(machine)
        if self.json:
            print(json.dumps(report_to_dict(machine, findings), indent=2))
        else:
            _print(machine, findings)
        return int(any(finding.severity is Severity.PROBLEM for finding in findings))


def _print(machine: Machine, findings: list[Finding]) -> None:
    from rich.table import Table

    console = make_console()
    facts = Table(box=None, show_header=False, pad_edge=False)
    for name, value in _facts(machine).items():
        facts.add_row(name, value)
    console.print(facts)
    console.print()
    table = Table("", "about", "what was found", "what to do", box=None, pad_edge=False)
    for finding in findings:
        table.add_row(finding.severity.value, finding.topic, finding.text, finding.remedy)
    console.print(table if findings else "nothing is wrong")


def _facts(machine: Machine) -> dict[str, str]:
    from jfsdp.plan.cluster.doctor import relevant_settings

    probe = machine.probe
    kinds = {kind: probe.kinds.count(kind) for kind in probe.kinds}
    memory = f", {probe.memory_bytes / 2**30:.1f} GiB for JAX" if probe.memory_bytes else ""
    listed = ", ".join(f"{count} x {kind}" for kind, count in kinds.items())
    return {
        "python": machine.python,
        **{name: version for name, version in machine.versions.items() if version},
        "devices": f"{probe.backend}: {listed}{memory}" if probe.backend else "unknown",
        "locked memory": "no limit" if machine.locked_bytes is None else f"{machine.locked_bytes:,} bytes",
        "/dev/shm": "none" if machine.shm_bytes is None else f"{machine.shm_bytes / 2**30:.1f} GiB",
        **relevant_settings(machine.env),
    }
