"""Fit the clock's constants to published runs: `python scripts/fit_clock.py --programs /scratch/programs`.

It plans every run of published.json, which takes about 20 minutes on two cores. Programs in --programs are not compiled
again, so use a separate directory for each version of jfsdp.

Then it fits constants: on runs of XLA and torch.compile, the fraction of their rates that an A100 and an H100 sustain
under load, and the spread between GPUs; on runs of eager PyTorch, how often kernels move their bytes. Every source has
the same weight.

Then each source is left out in turn, and its runs are predicted from the others. docs/performance.md has these errors,
and `CLOCK_RANGE` of jfsdp/plan/time/rates.py follows from them. Change the rounded constants in the code manually.
--list only prints each run with the command of its plan.
"""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import math
import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import jax
import tyro
from published import EAGER, PublishedRun, predict, program_of, published_runs

from jfsdp.launch.runtime import without_plugin_chatter
from jfsdp.plan.cluster.gpus import find_gpu
from jfsdp.plan.cluster.target import PlanUnavailable, topology_devices
from jfsdp.plan.jobs import plan_job
from jfsdp.trainer.help_groups import Options, option

Constants = dict[str, float]
START: Constants = {"a100": 0.95, "h100": 0.8, "spread": 0.03, "passes": 1.5}
BOUNDS = {"a100": (0.6, 1.0), "h100": (0.5, 1.0), "spread": (0.0, 0.08), "passes": (1.0, 4.0)}
LARGE = 0.15  # |log ratio| above which an error counts linearly, so that a few outliers do not dominate
NEAR = 0.12


@dataclasses.dataclass(frozen=True)
class FitOptions(Options):
    """Options of the fit."""

    programs: Path = Path("programs")
    """Directory for the compiled programs, one file per run."""
    jobs: int = option(2, least=1)
    """Runs to plan in parallel."""
    json: Path | None = None
    """File for the errors with each source left out, which `refresh_figures.py --clock` reads."""
    list: bool = False
    """Only print each run with its source and the command of its plan."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A published run, and its prediction as a function of the constants."""

    run: PublishedRun
    needed_bytes: int
    predict: Callable[[Constants], float]


def main(argv: Sequence[str]) -> int:
    """Plan, fit, cross-validate and print. Return the exit status: 2 if the directory or a topology is unusable."""
    options = tyro.cli(FitOptions, args=list(argv), prog="fit_clock.py", description=__doc__)
    if options.list:
        for run in published_runs():
            print(f"{run.id}: {run.source['repository']}: {run.source['path']}\n  {run.command}")
        return 0
    try:
        options.programs.mkdir(parents=True, exist_ok=True)
        with without_plugin_chatter():
            topology_devices(published_runs()[0].cluster)
    except (ValueError, OSError, PlanUnavailable) as error:
        print(f"fit_clock.py: error: {error}", file=sys.stderr)
        return 2
    missing = [run for run in published_runs() if not _file(options.programs, run).exists()]
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        for line in pool.map(_plan, missing, [options.programs] * len(missing)):
            print(line, flush=True)
    cases = [_case(run, options.programs) for run in published_runs()]
    timed = [case for case in cases if case.run.step_s]
    constants = fit(timed)
    ratios = _ratios(timed, constants)
    left_out: dict[str, float] = {}
    for source in dict.fromkeys(case.run.source["repository"] for case in timed):
        others = [case for case in timed if case.run.source["repository"] != source]
        found = fit(others)
        left_out |= _ratios([case for case in timed if case not in others], found)
        print(f"without {source}: {_show(found)}", flush=True)
    committed = _ratios(timed, {})
    _print(timed, constants, ratios, left_out, committed)
    found = sorted(1 / left_out[case.run.id] for case in timed if case.run.basis)
    low, high = (found[int(share * len(found))] for share in (0.05, 0.95))
    print(f"CLOCK_RANGE, measured / predicted of nine of ten runs: {low:.3f} to {high:.3f}")
    if options.json:
        by_source = {source: statistics.median(errors) for source, errors in _errors(timed, left_out).items()}
        near = sum(abs(ratio - 1) <= NEAR for ratio in left_out.values())
        kept = {source: f"{error:.1%}".removesuffix("%") for source, error in by_source.items()}
        kept |= {name: f"{ratio:.2f}" for name, ratio in left_out.items()}
        kept |= {"median": f"{statistics.median(by_source.values()):.1%}".removesuffix("%"), "within": str(near)}
        kept |= {"timed": str(len(timed)), "low": f"{low:.2f}", "high": f"{high:.2f}"}
        options.json.write_text(json.dumps(kept, indent=1))
    for case in cases:
        if memory := case.run.memory:
            ratio = memory["gib"] * 2**30 / case.needed_bytes
            print(f"{case.run.id:42s} {memory['kind']} {ratio:.2f} times the plan's bytes")
    return 0


def _file(programs: Path, run: PublishedRun) -> Path:
    """Return the file of a run's program. Its name depends on the command and the version of JAX."""
    what = hashlib.sha256(f"{run.command} {jax.__version__}".encode()).hexdigest()[:12]
    return programs / f"{run.id}-{what}.json.gz"


def _plan(run: PublishedRun, programs: Path) -> str:
    with without_plugin_chatter():
        topology_devices(run.cluster)
    plan = plan_job(run.step_options, run.cluster)
    kept = {"needed_bytes": plan.needed_bytes, "text": plan.compiled.text}
    path = _file(programs, run)
    with gzip.open(path.with_suffix(".part"), "wt", compresslevel=3) as file:
        json.dump(kept, file)
    path.with_suffix(".part").replace(path)
    return f"planned {run.id}"


def _case(run: PublishedRun, programs: Path) -> Case:
    with gzip.open(_file(programs, run), "rt") as file:
        kept = json.load(file)
    module, collectives = program_of(run, kept["text"])
    chip = {(8, 0): "a100", (9, 0): "h100"}[run.cluster.gpu.capability]
    usual, works = find_gpu(chip).sustained, {}

    def seconds(constants: Constants) -> float:
        """Return the predicted seconds with these constants, and the code's for missing ones."""
        given = {name: value for name, value in constants.items() if name not in ("a100", "h100")}
        if chip in constants:  # scaled for a card with a lower power limit
            given["sustained"] = constants[chip] * run.cluster.gpu.sustained / usual
        return predict(run, module, collectives, works=works, **given)

    return Case(run, kept["needed_bytes"], seconds)


def fit(cases: Sequence[Case]) -> Constants:
    """Return the best constants: first the common ones, on fused programs; then the one of eager PyTorch."""
    fused = [case for case in cases if case.run.basis and case.run.software != EAGER]
    eager = [case for case in cases if case.run.basis and case.run.software == EAGER]
    return _descend(eager, _descend(fused, START, ("a100", "h100", "spread")), ("passes",))


def _descend(cases: Sequence[Case], start: Constants, names: Sequence[str]) -> Constants:
    """Minimize the loss by changing one constant at a time."""
    best, steps = dict(start), dict.fromkeys(names, 0.1)
    least = _loss(cases, best)
    while cases and max(steps.values()) > 0.005:
        for name in names:
            for factor in (1 + steps[name], 1 / (1 + steps[name])):
                low, high = BOUNDS[name]
                tried = best | {name: min(max(best[name] * factor, low), high)}
                loss = _loss(cases, tried)
                if loss < least - 1e-7:
                    best, least = tried, loss
                    break
            else:
                steps[name] /= 2
    return best


def _loss(cases: Sequence[Case], constants: Constants) -> float:
    errors: dict[str, list[float]] = {}
    for case in cases:
        error = abs(math.log(case.predict(constants) / (case.run.step_s or 1)))
        error = error**2 / 2 / LARGE if error < LARGE else error - LARGE / 2
        errors.setdefault(case.run.source["repository"], []).append(error)
    return statistics.mean(map(statistics.mean, errors.values())) if errors else 0.0


def _ratios(cases: Sequence[Case], constants: Constants) -> dict[str, float]:
    return {case.run.id: case.predict(constants) / (case.run.step_s or 1) for case in cases}


def _errors(cases: Sequence[Case], ratios: Mapping[str, float]) -> dict[str, list[float]]:
    """Return |predicted / measured - 1| of the runs of each source."""
    errors: dict[str, list[float]] = {}
    for case in cases:
        errors.setdefault(case.run.source["repository"], []).append(abs(ratios[case.run.id] - 1))
    return errors


def _show(constants: Constants) -> str:
    return ", ".join(f"{name} {value:.3f}" for name, value in constants.items())


def _print(
    cases: Sequence[Case],
    constants: Constants,
    ratios: Mapping[str, float],
    left_out: Mapping[str, float],
    committed: Mapping[str, float],
) -> None:
    at_bound = [name for name, value in constants.items() if value in BOUNDS[name]]
    print(f"all sources: {_show(constants)}" + f"; at its bound: {', '.join(at_bound)}" * bool(at_bound))
    print("predicted / measured: fitted, with its source left out, with the code's constants")
    for case in cases:
        name = case.run.id
        print(f"{name:42s} {ratios[name]:.3f}  {left_out[name]:.3f}  {committed[name]:.3f}")
    for what, found in (("fitted", ratios), ("left out", left_out), ("the code's", committed)):
        errors_of = _errors(cases, found)
        by_source = {source: statistics.median(errors) for source, errors in errors_of.items()}
        near = statistics.mean(error <= NEAR for errors in errors_of.values() for error in errors)
        print(f"{what}: median over sources {statistics.median(by_source.values()):.1%}; within {NEAR:.0%}: {near:.0%}")
        print("  " + ", ".join(f"{source} {error:.1%}" for source, error in by_source.items()))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
