"""`jfsdp models`: list the models of installed packages."""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any

from jfsdp.cli.console import Reporting, make_console, make_table
from jfsdp.trainer.job import find_job, job_names


@dataclasses.dataclass(frozen=True)
class Models(Reporting):
    """List the models that installed packages provide (entry-point group jfsdp.jobs)."""

    def run(self) -> int:
        from jfsdp.modules.adapt import as_model

        rows = []
        for name in job_names():
            try:
                job = find_job(name)
                count = sum(math.prod(x.shape) for x in as_model(job.model).params.values())
            except Exception as error:  # from any package
                print(f"warning: {name} cannot be loaded: {type(error).__name__}: {error}", file=sys.stderr)
                continue
            row = {"model": name, "parameters": count, "seq_len": job.seq_len, "vocab_size": job.vocab_size}
            rows.append(row | {"pretrained": bool(job.pretrained)})
        self.report(rows, lambda: _print(rows))
        return 0


def _print(rows: list[dict[str, Any]]) -> None:
    numbers = ("parameters", "row length", "vocabulary")
    table = make_table("model", *numbers, right=numbers)
    for row in rows:
        name, *sizes, _ = row.values()
        table.add_row(name, *(f"{size:,}" if size else "-" for size in sizes))
    make_console().print(table if rows else "no installed package provides a model; use --factory module:function")
