"""What `jfsdp plan` prints: a plan, a search, an estimate, a refusal."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfsdp.cli.console import make_console, make_table

if TYPE_CHECKING:
    from jfsdp.plan.cluster.hardware import Cluster
    from jfsdp.plan.plan import Plan
    from jfsdp.plan.search.search import Candidate, Search

GB, GIB = 1e9, 2**30


def print_plan(plan: Plan) -> None:
    """Print a plan as tables."""
    from jfsdp.layout.report import summary
    from jfsdp.trainer.options import as_options

    console, cluster = make_console(), plan.cluster
    console.print(f"{cluster.describe()}: {summary(plan.layout)}")
    console.print(f"program {plan.spec.program}: {as_options(plan.spec.reason)}")
    if prefetch := plan.spec.prefetch:
        ahead = f"prefetch {prefetch.forward} forward and {prefetch.backward} backward"
        console.print(f"{ahead}, storage {plan.layout.storage}")
    if pipe := plan.pipeline:
        console.print(
            f"pipeline {pipe.name}: {pipe.stages} stages of {pipe.repeats} part{'s' * (pipe.repeats > 1)}, "
            f"{pipe.microbatches} microbatches, of which {pipe.live} wait at most for their backward; bubble "
            f"{pipe.bubble:.1%} of the passes, {pipe.bubble_share:.1%} of the step"
        )
    if plan.work.attention:
        console.print(f"attention {plan.work.attention}")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    console.print(
        f"{verdict}: needs {plan.needed_bytes / GIB:.2f} GiB of {plan.limit_bytes / GIB:.2f} GiB per GPU "
        f"({plan.reserve_bytes / GIB:g} GiB of {cluster.gpu.memory_bytes / GIB:.1f} are reserved)"
    )
    rate, item = plan.items_per_s, plan.work.item
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    if mfu and plan.mfu_causal not in (None, plan.mfu):
        mfu += f" ({plan.mfu_causal:.1%} counting keys that are seen)"
    console.print(
        f"estimated: {plan.step_s:.3f} s per step, {rate:,.0f} {item}s/s/GPU{mfu}; bound by {plan.bound_by}; "
        f"compute-bound from {plan.compute_bound_rows} rows per device on (here {plan.work.rows})"
    )
    _print_error()
    for table in (_memory(plan), _wire(plan), _overlap(plan)):
        console.print()
        console.print(table)
    for one in plan.ledger.unknown:
        console.print(f"unknown to theory: {one.kind} {one.dtype} {one.total_bytes / GB:.3f} GB {short(one.source)}")
    options = " ".join(f"{name}={value}" for name, value in plan.compiled.options.items())
    console.print(f"\nXLA: {options or 'defaults'}")
    num = plan.work.documents_per_row
    rows = f", for rows of {num} document{'s' * (num > 1)} each" if item == "token" else ""
    console.print(
        f"compiled in {plan.compiled.compile_s:.1f} s; bytes are XLA's, seconds an estimate{rows} (docs/plan.md)"
    )


def _print_error() -> None:
    from jfsdp.plan.time.rates import CLOCK_ERROR

    make_console().print(
        f"  seconds: within {CLOCK_ERROR:.0%} of four of five published runs of other programs on A100s and H100s; "
        "jfsdp itself was not timed on GPUs (docs/performance.md)"
    )


def print_inference(plan: Any) -> None:
    """Print a plan of generation."""
    from jfsdp.layout.report import summary

    console, gib = make_console(), lambda size: f"{size / GIB:.2f} GiB"
    console.print(f"{plan.cluster.describe()}: {summary(plan.layout)}")
    console.print(f"generation, {plan.rows} rows of {plan.length} tokens for each data shard, prompts among them")
    verdict = "fits" if plan.fits else "DOES NOT FIT"
    console.print(f"{verdict}: needs {gib(plan.needed_bytes)} of {gib(plan.limit_bytes)} per GPU")
    console.print(
        f"by formula: weights {gib(plan.weight_bytes)}, cache {gib(plan.cache_bytes)}; the compiler's inputs "
        f"{gib(plan.token.argument_bytes)}"
    )
    for name, program in (("a token of each row", plan.token), ("prompts that fill the rows", plan.prompts)):
        console.print(
            f"{name}: needs {gib(program.needed_bytes)}, sends {program.wire_bytes / GB:.3f} GB, estimated "
            f"{program.seconds * 1000:.1f} ms"
        )
    console.print(f"estimated: {plan.tokens_per_s:,.0f} tokens/s/GPU after the prompts (docs/generate.md)")
    console.print("  seconds of generation were compared with no run; memory is the compiler's own count")


def short(place: str) -> str:
    """Cut the working directory off a line of source."""
    return place.replace(f"{Path.cwd()}/", "")


_NUMBERS = ("GiB", "share", "times", "GB sent", "GB by theory", "ms", "tokens/s/GPU", "rows/s/GPU", "MFU")


def _table(*columns: str) -> Any:
    return make_table(*columns, right=_NUMBERS)


def _memory(plan: Plan) -> Any:
    from jfsdp.plan.memory.peak import largest_buffers

    memory = plan.memory
    table = make_table("memory at the peak", "GiB", "share", "largest there", right=_NUMBERS)
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
    from jfsdp.plan.traffic.ledger import OWN

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
    ledger, name = plan.ledger, "in all"
    if ledger.own_bytes:
        name, own = "weights", ledger.own_theory
        ratio = f"ratio {ledger.own_ratio or 0:.4f}{f' ({own.unread[0]}?)' if own and own.unread else ''}"
        sent, theory = f"{ledger.own_bytes / GB:.3f}", f"{ledger.own_bytes_theory / GB:.3f}"
        table.add_row("the model's own", "", "", "", "", "", sent, theory, ratio)
    sent, theory = f"{(ledger.wire_bytes - ledger.own_bytes) / GB:.3f}", f"{ledger.wire_bytes_theory / GB:.3f}"
    table.add_row(name, "", "", "", "", "", sent, theory, f"ratio {ledger.wire_ratio:.4f}")
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
    table = _table("mesh, and what is changed", "GiB", f"{search.item}s/s/GPU", "MFU", "ms", "")
    table.columns[0].max_width = _LABEL_WIDTH
    front = set(map(id, search.front))
    for one in search.tried:
        if one.is_planned:
            mark = "best" if one is search.best else "front" if id(one) in front else "" if one.fits else "too large"
            mfu = "" if one.mfu is None else f"{one.mfu:.1%}"
            rate, ms = f"{one.items_per_s:,.0f}", f"{one.step_s * 1e3:.0f}"
            sizes = ",".join(f"{axis}={size}" for axis, size in one.mesh.items())
            others = [word for word in _short_label(one).split() if not word.startswith("mesh=")]
            table.add_row(" ".join([sizes, *others]), f"{one.needed_bytes / GIB:.1f}", rate, mfu, ms, mark)
    console.print(search.title)
    console.print(table)
    for line in _not_planned(search):
        console.print(line)
    if search.best is None:
        console.print(search.advice)
        return
    gain = "what was given does not fit" if search.gain is None else f"{search.gain:.2f} times what was given"
    planned = [one for one in search.tried if one.is_planned]
    of = "" if search.is_complete else f" of the {len(planned)} that were planned"
    console.print(f"best{of}: {search.best.label}")
    console.print(f"{gain}; {len(planned)} of {len(search.tried)} candidates planned in {search.elapsed_s:.0f} s")
    _print_error()
    if not search.is_complete:
        longest = max(one.compile_s for one in planned)
        console.print(f"--budget ended the search; give it more seconds (a candidate takes up to {longest:.0f})")


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
        line = f"{len(several)} {reason}{', first' * (len(several) > 1)}: {_short_label(several[0])}"
        if several[0].outcome.value == "impossible":  # the reason says what to change
            yield textwrap.fill(line, _LINE_WIDTH, subsequent_indent="    ")
        else:
            yield textwrap.shorten(line, _LINE_WIDTH, placeholder=" ...")


def print_estimate(estimate: dict[str, Any], cluster: Cluster) -> None:
    """Print what is known without compiling."""
    gib = {name: estimate[name] / GIB for name in ("state_bytes", "unit_bytes", "limit_bytes")}
    ms = {name: (estimate[name] or 0.0) * 1e3 for name in ("wire_s", "compute_s", "step_s_at_least")}
    verdict = "the state fits: it needs" if estimate["state_fits"] else "DOES NOT FIT: the state needs"
    lines = [
        f"ANALYTIC, nothing was compiled: {estimate['strategy']} on {cluster.num_devices} x {cluster.gpu.full_name}",
        f"{verdict} {gib['state_bytes']:.2f} GiB of {gib['limit_bytes']:.2f} GiB per GPU; the largest unit "
        f"takes {gib['unit_bytes']:.2f} GiB while it is gathered",
        f"on the wire by theory: {estimate['wire_bytes_theory'] / GB:.3f} GB, {ms['wire_s']:.1f} ms per step",
        f"computing at the datasheet's peak: {ms['compute_s']:.1f} ms per step",
        f"so a step takes at least {ms['step_s_at_least']:.1f} ms; activations and logits are not counted",
        "a bound by arithmetic, compared with no run; a compiled plan says how near plans were",
    ]
    make_console().print("\n".join(lines))
