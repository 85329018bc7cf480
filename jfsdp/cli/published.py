"""`jfsdp published`: plans of runs that others have measured, beside what they measured."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated

import tyro

from jfsdp.cli.console import make_console, progress
from jfsdp.cli.plan import load_compiler

if TYPE_CHECKING:
    from jfsdp.plan.published.compare import Compared
    from jfsdp.plan.published.runs import PublishedRun


@dataclasses.dataclass(frozen=True)
class Published:
    """Plan training runs that others have published, and print predicted beside measured.

    Each takes some ten to sixty seconds of compiling, and no GPU. They are runs of other programs: MaxText, Paxml and
    AXLearn on XLA, and PyTorch's FSDP. What jfsdp's plan of a run does otherwise is printed with --list.
    """

    runs: Annotated[str, tyro.conf.arg(metavar="GLOB")] = "maxtext*"
    """Which runs, by name: '*' plans all 84."""
    list: bool = False
    """Plan nothing: print what was measured, who says so, and the command of the plan."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        from jfsdp.plan.cluster.target import PlanUnavailable
        from jfsdp.plan.published.compare import compare
        from jfsdp.plan.published.runs import find_runs

        runs, found = find_runs(self.runs), []
        if self.list:
            _list(runs, as_json=self.json)
            return 0
        try:
            for run in runs:
                load_compiler(run.cluster)
                with progress(quiet=self.json) as tell:
                    tell(f"planning {run.id}")
                    found.append(compare(run))
                if not self.json:
                    _print(found[-1])
        except PlanUnavailable as error:
            raise ValueError(str(error)) from error
        if self.json:
            print(json.dumps([one.to_dict() for one in found], indent=2))
        else:
            _summarize(found)
        return 0


def _list(runs: list[PublishedRun], *, as_json: bool) -> None:
    if as_json:
        print(json.dumps([{**dataclasses.asdict(run), "command": run.command} for run in runs], indent=2))
        return
    for run in runs:
        measured = [f"{run.step_s:.3f} s" if run.step_s else "", _memory(run)]
        print(f"{run.id}: {', '.join(filter(None, measured))}; {run.framework} ({run.software}), {run.gpu}")
        print(f"  {run.source['repository']}: {run.source['path']}, {run.source['date']}")
        lines = [*run.differs, *(f"not stated by the source, or ambiguous: {text}" for text in run.doubts)]
        lines += [] if run.basis else ["no basis for the clock, nor for what a plan says of itself"]
        print("".join(f"  {text}\n" for text in lines) + f"  {run.command}")


def _memory(run: PublishedRun) -> str:
    return f"{run.memory['gib']:.1f} GiB {run.memory['kind']}" if run.memory else ""


def _print(one: Compared) -> None:
    from jfsdp.plan.published.trust import left_out

    run, ratio = one.run, one.ratio
    seconds = f"predicted {one.step_s:8.3f} s"
    if ratio:
        seconds += f"  measured {run.step_s:8.3f} s  ratio {ratio:.3f} ({left_out(run):.3f} with its source left out)"
    memory = f"  needs {one.needed_bytes / 2**30:.1f} GiB" + (f", measured {_memory(run)}" if run.memory else "")
    print(f"{run.id:42s} {run.software:14s} {seconds}{memory}", flush=True)


def _summarize(found: list[Compared]) -> None:
    from jfsdp.plan.published.compare import NEAR, find_errors

    pairs = [(one.run, one.ratio) for one in found if one.ratio]
    if not pairs:
        return
    errors, num = find_errors(pairs), len(pairs)
    sources = len(errors.by_source)
    make_console().print(
        f"{num} run{'s' * (num > 1)} of {sources} source{'s' * (sources > 1)}, to which the clock was fitted: off by "
        f"{errors.median:.1%}, the median of the sources; within {NEAR:.0%}: {errors.near}. How far it is from sources "
        "that it did not know: docs/performance.md"
    )
