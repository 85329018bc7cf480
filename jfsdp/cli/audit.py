"""`jfsdp audit`: compare a compiled step with its layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Annotated

import tyro

from jfsdp.cli.console import BROKEN, Reporting, make_console
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Real, StepOptions, as_options, optional


@dataclasses.dataclass(frozen=True)
class AuditProgram(Reporting, StepOptions):
    """Compare a saved program with its job: bytes and dtypes sent, replication, overlap.

    FILE is scheduled HLO as text, from `jfsdp plan --dump-hlo FILE`, XLA's dump, or
    `step.lower(...).compile().as_text()`. Pass the options that it was compiled with. Exit status: 0 no findings, 4
    findings, 2 bad arguments.
    """

    hlo: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="FILE")]] = ""
    """Scheduled HLO; `jfsdp plan --dump-hlo FILE` writes it."""
    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("none", "most used")
    """Recipe of scripts/train.py with defaults. Other options override them."""
    gpus_per_node: Count = option(8, "audit", least=1)
    """GPUs per node, to report which bytes cross nodes."""
    tolerance: Real = option(0.01, "audit", least=0)
    """Fraction by which the program may exceed theory's bytes."""
    min_overlap: Annotated[float | None, optional(float, "SHARE")] = option(None, "audit", least=0)
    """Least fraction of the bytes in loops that must overlap with a matmul. A program without such bytes fails too.
    none: not checked."""

    def run(self) -> int:
        from jfsdp.plan.jobs import shard_planned
        from jfsdp.plan.traffic.audit import audit, read_module

        if not self.hlo:
            raise ValueError("no program is given; run jfsdp audit FILE")
        module = read_module(Path(self.hlo).expanduser())
        planned = shard_planned(self, num_devices=module.num_partitions or 1)
        spec = planned.step.resolve(planned.batch)
        reason = as_options(spec.reason)
        report = audit(
            module,
            planned.model.layout,
            tolerance=self.tolerance,
            min_overlap=self.min_overlap,
            gpus_per_node=self.gpus_per_node,
            spec=spec,
            trace=planned.step.read_trace(planned.step.abstract_state(), planned.batch),
        )
        text = f"with these options the program is {spec.program}: {reason}\n{report}"
        program = {"program": spec.program, "reason": reason}
        self.report(program | report.to_dict(), lambda: make_console().print(text))
        return 0 if report.is_ok else BROKEN
