"""`jfsdp plan`: what training a job would do on a cluster, before it is rented."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jfsdp.cli.console import make_console
from jfsdp.train.options import StepOptions

if TYPE_CHECKING:
    from jfsdp.plan.hardware import Cluster
    from jfsdp.plan.plan import Plan
    from jfsdp.plan.search import Candidate, Search

FITS_NOT = 3
GB, GIB = 1e9, 2**30


@dataclasses.dataclass(frozen=True)
class PlanJob(StepOptions):
    """Say what training would do on GPUs that are not here: does it fit, what crosses the wire, how long a step takes.

    Compiles the training step with the real XLA for GPUs, which needs none. Takes the options of scripts/train.py that
    decide the step. Exit status: 0 fits, 3 does not fit, 2 bad arguments, 1 failure.
    """

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "none"
    """A recipe of scripts/train.py as defaults, which any other option overrides."""
    gpu: Annotated[str, tyro.conf.arg(metavar="NAME")] = "h100"
    """Such as h100, h200, a100-80, b200, gb200, l40s, rtx4090; an unknown name lists them all."""
    nodes: Annotated[int, tyro.conf.arg(metavar="N")] = 1
    """Machines."""
    gpus_per_node: Annotated[int, tyro.conf.arg(metavar="N")] = 0
    """GPUs of each; 0: what is usual for this GPU."""
    reserve: Annotated[float, tyro.conf.arg(metavar="GIB")] = 3.0
    """GiB of each GPU that the step must leave to CUDA, NCCL and the allocator."""
    target_config: Annotated[str | None, tyro.conf.arg(metavar="FILE|none")] = None
    """A file with XLA's GpuTargetConfigProto as text, for a GPU that jfsdp does not know."""
    dump_hlo: Annotated[str | None, tyro.conf.arg(metavar="FILE|none")] = None
    """Write the scheduled HLO there; `jfsdp audit` reads it."""
    timeline: Annotated[str | None, tyro.conf.arg(metavar="FILE|none")] = None
    """Draw when the step computes, sends and waits, as PNG or SVG."""
    search: bool = False
    """Also change strategy, mesh, remat, batch and XLA's options, to find what fits and is predicted fastest."""
    budget: Annotated[float, tyro.conf.arg(metavar="SECONDS")] = 900.0
    """How long --search may go on."""
    write_recipe: Annotated[str | None, tyro.conf.arg(metavar="FILE.json|none")] = None
    """With --search: write the fastest that fits as a recipe for scripts/train.py."""
    plot: Annotated[str | None, tyro.conf.arg(metavar="FILE|none")] = None
    """With --search: draw memory against time of all that was tried, as PNG or SVG."""
    analytic: bool = False
    """Do not compile: state, bytes by formula and a roofline only. Works without the compiler for GPUs."""
    json: bool = False
    """Print JSON: bytes per device, seconds per step."""

    def run(self) -> int:
        from jfsdp.plan.chart import plot_timeline
        from jfsdp.plan.hardware import Cluster, find_gpu
        from jfsdp.plan.target import PlanUnavailable

        cluster = Cluster(find_gpu(self.gpu), self.nodes, self.gpus_per_node)
        self._check_files()
        if self.analytic:
            return self._estimate(cluster)
        try:
            load_compiler(cluster)
        except PlanUnavailable as error:
            print(f"jfsdp: {error}\nWhat can be said without it (--analytic):", file=sys.stderr)
            self._estimate(cluster)
            return 1
        if self.search:
            return self._search(cluster)
        with failing_factory(self.factory):
            plan = self._plan(cluster)
        if self.dump_hlo:
            Path(self.dump_hlo).expanduser().write_text(plan.compiled.text)
        if self.timeline:
            plot_timeline(plan, Path(self.timeline).expanduser())
        if self.json:
            print(json.dumps(plan.to_dict(), indent=2))
        else:
            print_plan(plan)
        return 0 if plan.fits else FITS_NOT

    def _check_files(self) -> None:
        """Refuse what would be written nowhere, before anything takes time."""
        from jfsdp.plan.picture import ENDINGS

        if not self.search and (self.write_recipe or self.plot):
            raise ValueError("--write-recipe and --plot go with --search")
        if (self.dump_hlo or self.timeline) and (self.search or self.analytic):
            option = "--dump-hlo" if self.dump_hlo else "--timeline"
            raise ValueError(f"{option} goes with a plan of one program: without --search and --analytic")
        if self.search and self.analytic:
            raise ValueError("--search compiles, and --analytic does not; give one of them")
        suffixes = {
            "--write-recipe": (self.write_recipe, (".json",)),
            "--plot": (self.plot, ENDINGS),
            "--timeline": (self.timeline, ENDINGS),
        }
        for option, (name, known) in suffixes.items():
            if name and Path(name).suffix not in known:
                raise ValueError(f"{option} {name}: must end in {' or '.join(known)}")
        for name in (self.write_recipe, self.plot, self.dump_hlo, self.timeline):
            if name and not Path(name).expanduser().parent.is_dir():
                raise ValueError(f"{name}: there is no directory {str(Path(name).parent)!r}")

    def _plan(self, cluster: Cluster) -> Plan:
        from jfsdp.plan.jobs import plan_job

        with progress(quiet=self.json) as tell:
            return plan_job(self, cluster, **self._machine(), on_progress=tell)

    def _search(self, cluster: Cluster) -> int:
        from jfsdp.plan.pareto import plot_front
        from jfsdp.plan.search import search_job
        from jfsdp.train.recipes import read_recipe

        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(StepOptions)}
        with failing_factory(self.factory), progress(quiet=self.json) as tell:
            search = search_job(
                StepOptions(**fields), cluster, **self._machine(), budget_s=self.budget, on_progress=tell
            )
        base = {name: value for name, value in read_recipe(self.recipe).items() if name != "recipe"}
        search = dataclasses.replace(search, base=base)
        if search.best and self.write_recipe:
            search.write_recipe(Path(self.write_recipe).expanduser())
        if self.plot and any(one.is_planned for one in search.tried):
            plot_front(search, Path(self.plot).expanduser())
        if self.json:
            print(json.dumps(search.to_dict(), indent=2))
        else:
            print_search(search)
        return 0 if search.best else FITS_NOT

    def _machine(self) -> dict[str, Any]:
        from jfsdp.plan.target import read_target_config

        text = read_target_config(self.target_config) if self.target_config else None
        return {"target_config": text, "reserve_bytes": int(self.reserve * GIB)}

    def _estimate(self, cluster: Cluster) -> int:
        from jfsdp.plan.bounds import estimate_job

        with failing_factory(self.factory):
            estimate = estimate_job(self, cluster, reserve_bytes=int(self.reserve * GIB))
        if self.json:
            print(json.dumps(estimate, indent=2))
        else:
            print_estimate(estimate, cluster)
        return 0 if estimate["state_fits"] else FITS_NOT


def load_compiler(cluster: Cluster) -> None:
    """Load the compiler for GPUs without the remarks that it makes where there is none.

    Raises:
      PlanUnavailable: if it is not there.
    """
    from jfsdp.launch.runtime import without_plugin_chatter
    from jfsdp.plan.target import topology_devices

    with without_plugin_chatter():
        topology_devices(cluster)


class FactoryError(Exception):
    """A user's factory or model raised; its traceback is its own."""


@contextlib.contextmanager
def failing_factory(factory: str | None) -> Iterator[None]:
    """Show the traceback of what a user's own factory raises, from its first line on, and not ours."""
    from jfsdp.plan.plan import EagerComputation

    try:
        yield
    except (ValueError, OSError):
        raise
    except Exception as error:
        if factory is None:
            raise
        origin = error.__cause__ if isinstance(error, EagerComputation) and error.__cause__ else error
        frames = traceback.extract_tb(origin.__traceback__)
        own = [place for place, frame in enumerate(frames) if "/jfsdp/" not in frame.filename]
        shown = traceback.format_list(frames[own[0] :] if own else frames)
        text = "".join([*shown, *traceback.format_exception_only(error)])
        raise FactoryError(f"factory {factory!r} failed:\n{text}") from error


@contextlib.contextmanager
def progress(*, quiet: bool) -> Iterator[Callable[[str], None]]:
    """Show what is being done, on a terminal, until it is done."""
    if quiet or not sys.stderr.isatty():
        yield lambda text: None
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield lambda text: status.update(text)


def print_plan(plan: Plan) -> None:
    """Print a plan as tables."""
    from jfsdp.layout.report import summary

    console, cluster = make_console(), plan.cluster
    nodes = f"{cluster.nodes} node{'s' if cluster.nodes > 1 else ''} of {cluster.gpus_per_node}"
    console.print(f"{cluster.num_devices} x {cluster.gpu.full_name} ({nodes}): {summary(plan.layout)}")
    if plan.prefetch is not None:
        ahead = f"prefetch {plan.prefetch.forward} forward and {plan.prefetch.backward} backward"
        console.print(f"engine manual, {ahead}, storage {plan.layout.storage}")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    console.print(
        f"{verdict}: needs {plan.needed_bytes / GIB:.2f} GiB of {plan.limit_bytes / GIB:.2f} GiB per GPU "
        f"({plan.reserve_bytes / GIB:g} GiB of {cluster.gpu.memory_bytes / GIB:.1f} are reserved)"
    )
    rate, item = plan.items_per_s, plan.work.item
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    console.print(
        f"estimated: {plan.step_s:.3f} s per step, {rate:,.0f} {item}s/s/GPU{mfu}; bound by {plan.bound_by}; "
        f"compute-bound from {plan.compute_bound_rows} rows per device on (here {plan.work.rows})"
    )
    for table in (_memory(plan), _wire(plan), _overlap(plan)):
        console.print()
        console.print(table)
    for item_ in plan.ledger.unknown:
        console.print(
            f"unknown to theory: {item_.kind} {item_.dtype} {item_.total_bytes / GB:.3f} GB {short(item_.source)}"
        )
    console.print()
    console.print(
        "XLA: " + (" ".join(f"{name}={value}" for name, value in plan.compiled.options.items()) or "defaults")
    )
    console.print(f"compiled in {plan.compiled.compile_s:.1f} s; bytes are XLA's, seconds an estimate (docs/plan.md)")


def short(place: str) -> str:
    """Cut the working directory off a line of source."""
    return place.replace(f"{Path.cwd()}/", "")


_NUMBERS = ("GiB", "share", "times", "GB sent", "GB by theory", "ms", "tokens/s/GPU", "images/s/GPU", "MFU")


def _table(*columns: str) -> Any:
    from rich.table import Table

    table = Table(box=None, pad_edge=False)
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left")
    return table


def _memory(plan: Plan) -> Any:
    from jfsdp.plan.memory import largest_buffers

    memory = plan.memory
    table = _table("memory at the peak", "GiB", "share", "largest there")
    names: dict[str, list[str]] = {}
    for part, name, count, size in largest_buffers(memory, 40):
        names.setdefault(part, []).append(f"{name}{f' x{count}' if count > 1 else ''} {size / GIB:.2f}")
    rows = {**memory.parts, "fragmentation": memory.fragmentation_bytes}
    for part, size in sorted(rows.items(), key=lambda row: -row[1]):
        if size >= 2**20:
            share = size / plan.needed_bytes
            table.add_row(part, f"{size / GIB:.3f}", f"{share:.1%}", ", ".join(names.get(part, [])[:2]))
    table.add_row("in all", f"{plan.needed_bytes / GIB:.3f}", "100.0%", short(memory.moment))
    if memory.host_bytes:
        table.add_row("host memory", f"{memory.host_bytes / GIB:.3f}", "", "pinned, per device")
    return table


def _wire(plan: Plan) -> Any:
    from jfsdp.plan.ledger import OWN

    table = _table("unit", "what", "collective", "dtype", "over", "times", "GB sent", "GB by theory", "nodes")
    for row in plan.ledger.rows:
        if max(row.measured_bytes, row.expected_bytes) < 1e5:
            continue
        table.add_row(
            "" if row.what == OWN else row.unit or "(root)",
            row.what,
            row.kind,
            row.dtype,
            f"{'/'.join(row.axes)} ({row.group_size})",
            f"{row.count}",
            f"{row.measured_bytes / GB:.3f}",
            f"{row.expected_bytes / GB:.3f}",
            "across" if row.crosses_nodes else "inside",
        )
    ledger = plan.ledger
    if ledger.own_bytes:
        sent = f"{(ledger.wire_bytes - ledger.own_bytes) / GB:.3f}"
        table.add_row("without the model's own", "", "", "", "", "", sent, f"{ledger.wire_bytes_theory / GB:.3f}", "")
    sent, theory = f"{ledger.wire_bytes / GB:.3f}", f"{ledger.wire_bytes_theory / GB:.3f}"
    table.add_row("in all", "", "", "", "", "", sent, theory, f"ratio {ledger.wire_ratio:.4f}")
    return table


def _overlap(plan: Plan) -> Any:
    clock = plan.timeline
    table = _table("a step's time", "ms", "share")
    for name, seconds in clock.critical.items():
        table.add_row(_CLOCK[name], f"{seconds * 1e3:.1f}", f"{seconds / clock.step_s:.1%}")
    table.add_row("in all", f"{clock.step_s * 1e3:.1f}", "")
    for link, seconds in plan.link_s.items():
        if seconds:
            table.add_row(f"on the wire: {link}", f"{seconds * 1e3:.1f}", "")
    share = "none there" if clock.overlapped_share is None else f"{clock.overlapped_share:.1%}"
    table.add_row("bytes in loops with a matmul behind them", "", share)
    return table


_CLOCK = {
    "matmul_s": "matrix products",
    "attention_s": "fused attention",
    "memory_s": "everything else (memory-bound)",
    "slowdown_s": "slowed by communication beside",
    "exposed_s": "waiting for communication",
    "host_exposed_s": "waiting for the host's memory",
}


def print_search(search: Search) -> None:
    """Print what a search planned, the front of memory against time, why it did not plan the others, and the winner."""
    console = make_console()
    table = _table("tried", "GiB", f"{search.item}s/s/GPU", "MFU", "ms", "")
    table.columns[0].max_width = _LABEL_WIDTH
    front = set(map(id, search.front))
    for one in search.tried:
        if one.is_planned:
            mark = "best" if one is search.best else "front" if id(one) in front else "" if one.fits else "too large"
            mfu = "" if one.mfu is None else f"{one.mfu:.1%}"
            rate, ms = f"{one.items_per_s:,.0f}", f"{one.step_s * 1e3:.0f}"
            table.add_row(_short_label(one), f"{one.needed_bytes / GIB:.1f}", rate, mfu, ms, mark)
    console.print(search.title)
    console.print(table)
    for line in _not_planned(search):
        console.print(line)
    if search.best is None:
        console.print(search.advice)
        return
    gain = "what was given does not fit" if search.gain is None else f"{search.gain:.2f} times what was given"
    end = "" if search.is_complete else " (the budget ended it)"
    console.print(f"best: {search.best.label}")
    console.print(f"{gain}; {len(search.tried)} candidates in {search.elapsed_s:.0f} s{end}")


_LABEL_WIDTH, _LINE_WIDTH = 54, 100  # so that the table is no wider than the line


def _short_label(one: Candidate) -> str:
    return one.label.replace(",xla_gpu_", " ").replace("xla_gpu_", "")


def _not_planned(search: Search) -> Iterator[str]:
    """Yield a line per reason for which candidates were not planned: how many, and the first of them."""
    groups: dict[str, list[Candidate]] = {}
    for one in search.tried:
        if not one.is_planned:
            is_skipped = one.outcome.value == "skipped"  # their reasons say, after a colon, by how much
            reason = one.reason.partition(":")[0] if is_skipped else one.reason
            groups.setdefault(f"{one.outcome.value}: {reason}", []).append(one)
    for reason, several in groups.items():
        first = f"{', first' * (len(several) > 1)}: {_short_label(several[0])}"
        yield textwrap.shorten(f"{len(several)} {reason}{first}", _LINE_WIDTH, placeholder=" ...")


def print_estimate(estimate: dict[str, Any], cluster: Cluster) -> None:
    """Print what is known without compiling."""
    gib = {name: estimate[name] / GIB for name in ("state_bytes", "unit_bytes")}
    ms = {name: (estimate[name] or 0.0) * 1e3 for name in ("wire_s", "compute_s", "step_s_at_least")}
    lines = [
        f"ANALYTIC, nothing was compiled: {estimate['strategy']} on {cluster.num_devices} x {cluster.gpu.full_name}",
        f"state {gib['state_bytes']:.2f} GiB of {cluster.gpu.memory_bytes / GIB:.1f} GiB per GPU; the largest unit "
        f"takes {gib['unit_bytes']:.2f} GiB while it is gathered",
        f"on the wire by theory: {estimate['wire_bytes_theory'] / GB:.3f} GB, {ms['wire_s']:.1f} ms per step",
        f"computing at the datasheet's peak: {ms['compute_s']:.1f} ms per step",
        f"so a step takes at least {ms['step_s_at_least']:.1f} ms; activations and logits are not counted",
    ]
    make_console().print("\n".join(lines))
