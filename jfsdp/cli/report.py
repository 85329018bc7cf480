"""Printed reports of `jfsdp plan`: plans, searches and estimates."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jfsdp.cli.console import make_console, make_table, print_facts, print_verdict
from jfsdp.layout.layout import num_parameters
from jfsdp.layout.mesh import SHARED_AXES, num_data_shards
from jfsdp.layout.report import describe_mesh, frozen_leaves, show_bytes, summary
from jfsdp.plan.cluster.hardware import Cluster
from jfsdp.plan.launches import Launch, Launches, Loop, count_launches, total_launches
from jfsdp.plan.memory.peak import largest_buffers
from jfsdp.plan.time.work import describe_products
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.options import StepOptions, as_options
from jfsdp.trainer.parse import write

if TYPE_CHECKING:
    from jfsdp.plan.advice import Advice
    from jfsdp.plan.plan import Plan, Training
    from jfsdp.plan.search.search import Candidate, Search

GB, GIB = 1e9, 2**30
_SIZES = {"GiB": GIB, "MiB": 2**20, "KiB": 2**10}
_SENT = {"GB": GB, "MB": 1e6, "kB": 1e3}
_TIMES = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9}
_SECONDS = {"hours": 3600, "min": 60, "s": 1, "ms": 1e-3}


def print_plan(
    plan: Plan, job: StepOptions, advice: Sequence[Advice], outlook: Mapping[str, str], *, verbose: bool
) -> None:
    """Print a plan: the verdict, the facts of the job and its training, memory, communication and time, and advice."""
    console = make_console()
    host_bytes = plan.memory.host_bytes * plan.cluster.gpus_per_node
    print_fit(console, plan.needed_bytes, plan.limit_bytes, host_bytes=host_bytes)
    for found in plan.miscompiles:
        console.print(f"miscompiled: {found.trap}: {found.message}{f' ({short(found.source)})' * bool(found.source)}\n")
    print_facts(console, _facts(plan, job, verbose) | dict(outlook))
    console.print("", _memory(plan, verbose), "", _communication(plan, verbose))
    console.print(_ratios(plan), "", _time(plan), sep="\n")
    for x in plan.ledger.unknown:
        console.print(f"belongs to no parameter: {x.kind} {x.dtype} {x.total_bytes / GB:.3f} GB {short(x.source)}")
    print_advice(console, advice, plan.limit_bytes, plan.cluster.nodes, plan.limit_bytes - plan.needed_bytes)
    if plan.launches:
        console.print(*_launches(plan.launches, verbose), sep="\n", soft_wrap=True)
    if verbose:
        console.print("\nXLA options")
        console.print(*(f"{x}={value}" for x, value in plan.compiled.options.items()), sep="\n", soft_wrap=True)


def print_fit(console: Any, needed_bytes: int, limit_bytes: int, verdict: str = "FITS", host_bytes: int = 0) -> None:
    """Print whether a step fits into the available GPU memory, and the host memory that it takes per node."""
    fits = needed_bytes <= limit_bytes
    margin = f"{show_bytes(abs(limit_bytes - needed_bytes))} {'free' if fits else 'too much'}"
    host = f"; takes {show_bytes(host_bytes)} of host memory per node" if host_bytes else ""
    sizes = f"{show_bytes(needed_bytes)} of {show_bytes(limit_bytes)} per GPU, {margin}{host}"
    print_verdict(console, fits, verdict if fits else "DOES NOT FIT", sizes)
    console.print()


def print_advice(console: Any, advice: Sequence[Advice], limit_bytes: int, nodes: int, free_bytes: int = 0) -> None:
    """Print each advised change of options with its estimated memory, one option per line."""
    if not advice:
        return
    fits = any(one.needed_bytes <= limit_bytes for one in advice if "nodes" not in one.changes)
    title = "to make it fit" if fits else f"no option fits on {nodes} node{'s' * (nodes > 1)}"
    title = f"to use {show_bytes(free_bytes)} of free memory" if free_bytes > 0 else title
    unit, size = _unit(min(one.needed_bytes for one in advice), _SIZES)
    table = make_table(title, f"about {unit}", "what changes", right=(f"about {unit}",))
    for one in advice:
        options = [f"{spell(name)} {write(value)}" for name, value in one.changes.items()]
        table.add_row("\n".join(options), f"{one.needed_bytes / size:.1f}", one.parts)
    console.print("", table)


def _facts(plan: Plan, job: StepOptions, verbose: bool) -> dict[str, str]:
    """Return the facts of the job and its speed, by title."""
    layout, work, pipe = plan.layout, plan.work, plan.pipeline
    name = f"{job.model or job.factory} {write(job.model_config)}".rstrip()
    prefetch = f", prefetch {plan.spec.prefetch.forward}" if plan.spec.prefetch else ""
    rows = {
        "cluster": plan.cluster.describe(),
        "model": f"{name}: {num_parameters(layout.leaves):,} parameters in {len(layout.units)} FSDP units",
        "batch": _batch(plan, job),
        "sharding": f"{describe_mesh(layout)}, remat {write(job.remat)}",
        "program": f"{plan.spec.program}{prefetch}" + f" ({as_options(plan.spec.reason)})" * verbose,
    }
    if work.attention:
        rows["attention"] = work.attention
    if "float8" in plan.products:
        rows["products"] = describe_products(plan.products)
    if pipe:
        rows["pipeline"] = (
            f"{pipe.name}: {pipe.stages} stages, {pipe.microbatches} microbatches, at most {pipe.live} waiting for "
            f"their backward; bubble {pipe.bubble:.1%} of passes, {pipe.bubble_share:.1%} of the step"
        )
    if frozen := num_parameters(frozen_leaves(layout)):
        rows["model"] += f", {num_parameters(layout.leaves) - frozen:,} of them trained"
    if job.offload:
        rows["sharding"] += f", offload {write(job.offload)}"
    rows["sharding"] += f"; state {show_bytes(plan.state.total)} per GPU"
    if host := plan.memory.host_bytes:
        state, node = show_bytes(plan.state.host_total), show_bytes(host * plan.cluster.gpus_per_node)
        rows["host memory"] = f"{node} per node; {show_bytes(host)} per GPU, {state} of it state"
    where = "in float8" if "float8" in plan.products else "on this GPU or mesh"
    compared = f"; not compared with runs {where}"
    unit, size = ("s", 1.0) if plan.step_s >= 0.01 else _unit(plan.step_s, _TIMES)
    if found := plan.step_range_s:
        compared = f"; {found[0] / size:.2f} to {found[1] / size:.2f} {unit} by the spread of published runs (90%)"
    rows["step"] = f"{plan.step_s / size:.3f} {unit}{compared}"
    mfu = "" if plan.mfu is None else f", MFU {plan.mfu:.1%}"
    if mfu and plan.mfu_causal not in (None, plan.mfu):
        mfu += f" ({plan.mfu_causal:.1%} with causal attention)"
    rows["throughput"] = f"{plan.items_per_s:,.0f} {work.item}s/s per GPU{mfu}"
    waits, least = plan.timeline.host_exposed_s / plan.step_s, plan.compute_bound_rows
    note = f"; by compute from {least} rows per data shard on" if least > work.rows else ""
    rows["bound by"] = plan.bound_by + (f"; {waits:.0%} of the step waits for host memory" if waits > 0.02 else note)
    rows["compiling"] = f"{plan.compiled.compile_s:.0f} s on this machine, without tuning of kernels on GPUs"
    return rows


def describe_training(plan: Plan, training: Training, failures: Mapping[str, Any] | None) -> dict[str, str]:
    """Return the facts of a training, by title; with the result of `Failures.to_dict`, also those of failures."""
    rate, size = f"{training.storage_bandwidth / GB:g} GB/s per node", show_bytes(training.checkpoint_bytes)
    written = f"copied in {_show(training.copy_s, _SECONDS, 1)}, written in {training.checkpoint_s:.0f} s at {rate}"
    rows = {
        "training": f"{training.steps:,} steps: {_time_of(training.days)}, {training.gpu_hours:,.0f} GPU-hours",
        "checkpoints": f"{training.num_checkpoints:,} of {size}, each {written}",
    }
    if failures:
        best, given = failures["best_every"], failures["goodput"]
        often, restart = (_show(failures[name], _SECONDS, 1) for name in ("mtbf_s", "restart_s"))
        found = f"--checkpoint-every {best} ({_show(best * failures['step_s'], _SECONDS, 1)}), the best"
        days = _time_of(training.days / given) if given > 1e-6 else "never done"
        rows["failures"] = f"every {often} on average, each with a restart of {restart}"
        rows["goodput"] = (
            f"{failures['best_goodput']:.2%} with {found}; {given:.2%} with {failures['every']}, so {days}"
        )
    return rows


def _time_of(days: float) -> str:
    return f"{days:,.1f} days" if days >= 2 else f"{24 * days:.1f} hours"


def _batch(plan: Plan, job: StepOptions) -> str:
    work, where = plan.work, "data shard" if plan.layout.num_shards(SHARED_AXES) > 1 else "GPU"
    length = f" x {work.items // work.rows:,} tokens" if work.item == "token" else ""
    total = work.items * num_data_shards(dict(plan.layout.mesh_sizes))
    parts = f", in {job.accumulate} microbatches" if job.accumulate > 1 else ""
    return f"{work.rows} row{'s' * (work.rows > 1)}{length} per {where}; {total:,} {work.item}s per step{parts}"


def print_inference(plan: Any) -> None:
    """Print a plan of generation."""
    console = make_console()
    print_fit(console, plan.needed_bytes, plan.limit_bytes)
    rows = {"cluster": plan.cluster.describe(), "model": summary(plan.layout)}
    rows["batch"] = f"{plan.rows} rows of {plan.length} tokens, prompts included, for each data shard"
    rows["memory"] = f"weights {show_bytes(plan.weight_bytes)}, cache {show_bytes(plan.cache_bytes)}, by formula"
    rows["inputs"] = f"{show_bytes(plan.token.argument_bytes)}, as compiled"
    for name, program in (("one token", plan.token), ("prompts", plan.prompts)):
        sent, time = _show(program.wire_bytes, _SENT, 3), _show(program.seconds, _TIMES, 1)
        rows[name] = f"needs {show_bytes(program.needed_bytes)}, sends {sent}, {time}"
    rows["throughput"] = f"{plan.tokens_per_s:,.0f} tokens/s per GPU after the prompts; not compared with runs"
    print_facts(console, rows)


def short(place: str) -> str:
    """Remove the working directory, or that of installed packages, from a source line's path."""
    return re.sub(r"\S*/site-packages/", "", place).replace(f"{Path.cwd()}/", "")


def _unit(value: float, units: Mapping[str, float]) -> tuple[str, float]:
    """Return the first unit of which a value has at least 1, with its size; the last unit if there is none."""
    return next((one for one in units.items() if value >= one[1]), [*units.items()][-1])


def _show(value: float, units: Mapping[str, float], decimals: int) -> str:
    unit, size = _unit(value, units)
    return f"{value / size:.{decimals}f} {unit}"


_NUMBERS = ("share", "times", "formula", "tokens/s/GPU", "rows/s/GPU", "MFU", *_SIZES, *_TIMES)
_NUMBERS += tuple(f"{unit} sent" for unit in _SENT)


def _table(*columns: str) -> Any:
    return make_table(*columns, right=_NUMBERS)


def _memory(plan: Plan, verbose: bool) -> Any:
    memory, (unit, scale) = plan.memory, _unit(plan.needed_bytes, _SIZES)
    table = _table("memory at the peak", unit, "share", *["largest buffers"] * verbose)
    names: dict[str, list[str]] = {}
    for part, name, count, size in largest_buffers(memory, 40):
        names.setdefault(part, []).append(f"{name}{f' x{count}' if count > 1 else ''} {size / scale:.2f}")
    rows = {**memory.parts, "fragmentation": memory.fragmentation_bytes}
    for part, size in sorted(rows.items(), key=lambda row: -row[1]):
        if size >= min(2**20, plan.needed_bytes / 1000):
            largest = ", ".join(names.get(part, [])[:2])
            table.add_row(part, f"{size / scale:.3f}", f"{size / plan.needed_bytes:.1%}", *[largest] * verbose)
    table.add_row("total", f"{plan.needed_bytes / scale:.3f}", "100.0%", *[short(memory.moment)] * verbose)
    if memory.host_bytes:
        table.add_row("host memory per GPU", f"{memory.host_bytes / scale:.3f}", "")
    return table


def _communication(plan: Plan, verbose: bool) -> Any:
    """Return a table with a row per kind of collective; if verbose, also per unit, with the bytes by formula."""
    from jfsdp.plan.traffic.ledger import OWN

    unit, scale = _unit(plan.ledger.wire_bytes, _SENT)
    numbers = [f"{unit} sent", *["formula"] * verbose]
    table = _table("communication", "collective", "dtype", "axes", "times", *numbers, "nodes")
    table.columns[1].no_wrap, table.padding = True, (0, 2 - verbose, 0, 0)
    rows: dict[tuple[str, ...], list[float]] = {}
    for row in plan.ledger.rows:
        what = row.what.replace("replicated", "whole gradients")
        what = f"{row.unit or '(root)'} {what}" if verbose and row.what != OWN else what
        place = "across" if row.crosses_nodes else "inside"
        key = (what, row.kind, row.dtype, f"{'/'.join(row.axes)} ({row.group_size})", place)
        counts = rows.setdefault(key, [0, 0.0, 0.0])
        rows[key] = [sum(pair) for pair in zip(counts, (row.count, row.measured_bytes, row.expected_bytes))]
    for (*key, place), (count, *sizes) in rows.items():
        if max(sizes) >= min(_MIN_SENT_BYTES, plan.ledger.wire_bytes / 1000):
            table.add_row(*key, f"{count}", *(f"{size / scale:.3f}" for size in sizes[: len(numbers)]), place)
    sizes = [plan.ledger.wire_bytes, plan.ledger.wire_bytes_theory + plan.ledger.own_bytes_theory]
    table.add_row("total", "", "", "", "", *(f"{size / scale:.3f}" for size in sizes[: len(numbers)]))
    return table


def _ratios(plan: Plan) -> str:
    """Return the ratios of bytes sent to theory, of the strategy and of the model's collectives."""
    ledger, own = plan.ledger, plan.ledger.own_theory
    found = f"bytes sent / bytes by formula: {ledger.wire_ratio:.4f}"
    if ledger.own_bytes:
        found += f"; the model's own collectives {ledger.own_ratio or 0:.4f}"
        found += f" (no rule for {own.unknown[0]})" if own and own.unknown else ""
    return found


_MIN_SENT_BYTES = 1e5  # of a printed row


def _time(plan: Plan) -> Any:
    clock, (unit, scale) = plan.timeline, _unit(plan.timeline.step_s, _TIMES)
    table = _table("time of a step", unit, "share")
    for name, seconds in clock.critical.items():
        if seconds >= min(5e-5, clock.step_s / 1000) or name == "exposed_s":
            table.add_row(CLOCK[name], f"{seconds / scale:.1f}", f"{seconds / clock.step_s:.1%}")
    table.add_row("total", f"{clock.step_s / scale:.1f}", "100.0%")
    for link, seconds in plan.link_s.items():
        if seconds:
            table.add_row(f"sending over {link}", f"{seconds / scale:.1f}", "")
    if clock.overlapped_share is not None:
        table.add_row("bytes in loops, sent during compute", "", f"{clock.overlapped_share:.1%}")
    if plan.ledger.own_bytes and plan.state_overlapped_share is not None:
        table.add_row("of parameters and gradients", "", f"{plan.state_overlapped_share:.1%}")
    return table


CLOCK = {
    "matmul_s": "matrix products",
    "attention_s": "fused attention",
    "memory_s": "memory-bound kernels",
    "slowdown_s": "slowed by communication",
    "exposed_s": "waiting for communication",
    "host_exposed_s": "waiting for host memory",
}


def _launches(found: Launches, verbose: bool) -> Iterator[str]:
    """Yield the lines of a list of launches."""
    yield f"\n{total_launches(found.items):,} launches per step: {_numbers(found.items)}"
    yield f"{len(found.buffer_bytes)} buffers of {show_bytes(sum(found.buffer_bytes))}"
    yield from (f"DISAGREEMENT: {line}" for line in found.disagreements)
    yield from _outline(found.items, verbose)


def _outline(items: Iterable[Launch | Loop], verbose: bool, indent: str = "  ") -> Iterator[str]:
    """Yield a line per loop, wait, and launch on another stream or with other devices, and one for those in between."""
    for fold, run in itertools.groupby(items, lambda item: "" if verbose else _fold(item)):
        for item in () if fold else run:
            if isinstance(item, Loop):
                yield f"{indent}loop {item.name}, {item.times or 'unknown'} times: {_numbers(item.body)}"
                yield from _outline(item.body, verbose, f"{indent}  ")
            else:
                yield f"{indent}{_describe(item, verbose)}"
        if fold:
            yield f"{indent}{_numbers(run)}"


def _fold(item: Launch | Loop) -> str:
    if isinstance(item, Loop) or item.dtype or item.token is not None:
        return ""
    return "large copies" if item.num_bytes >= _SENT["MB"] else "others"


def _describe(launch: Launch, verbose: bool) -> str:
    words = [launch.kind, launch.name * verbose, f"#{launch.token}" * (launch.token is not None), launch.dtype]
    words += [_show(launch.num_bytes, _SENT, 3)] * bool(launch.num_bytes)
    words += [f"over {len(launch.group)}"] * bool(launch.group) + [f"on {launch.stream}"] * bool(launch.stream)
    return " ".join(word for word in words if word)


def _numbers(items: Iterable[Launch | Loop]) -> str:
    """Write how many launches of each kind there are, with the bytes of copies and of full values of collectives."""
    words = []
    for kind, row in count_launches(items).items():
        plural = f"{kind[:-1]}ies" if kind.endswith("copy") else f"{kind}s"
        size = f" of {_show(row['bytes'], _SENT, 3)}" * bool(row["bytes"])
        words.append(f"{row['count']:,} {kind if row['count'] == 1 else plural}{size}")
    return ", ".join(words)


def print_differences(changes: Sequence[Mapping[str, Any]]) -> None:
    """Print the differences between two plans."""
    console, table = make_console(), make_table("what", "old", "new", "new / old", right=("old", "new", "new / old"))
    for row in changes:
        old, new = row["old"], row["new"]
        shown = ("-" if x is None else f"{x:,.6g}" if isinstance(x, float) else str(x) for x in (old, new))
        has_ratio = old and {type(old), type(new)} <= {int, float}
        table.add_row(row["what"], *shown, f"{new / old:.4f}" if has_ratio else "")
    console.print(table if changes else "no differences")


def print_search(search: Search) -> None:
    """Print the planned candidates of a search, the reasons why others were not planned, and the best."""
    console = make_console()
    planned = [one for one in search.tried if one.is_planned]
    size_unit, size = _unit(max((one.needed_bytes for one in planned), default=GIB), _SIZES)
    time_unit, time = _unit(max((one.step_s for one in planned), default=1.0), _TIMES)
    table = _table("mesh and changed options", size_unit, f"{search.item}s/s/GPU", "MFU", time_unit, "")
    table.columns[0].max_width = _LABEL_WIDTH
    front = set(map(id, search.front))
    for one in planned:
        mark = "best" if one is search.best else "front" if id(one) in front else "" if one.fits else "too large"
        mfu = "" if one.mfu is None else f"{one.mfu:.1%}"
        sizes = ",".join(f"{axis}={num}" for axis, num in one.mesh.items())
        others = [word for word in _short_label(one).split() if not word.startswith("mesh=")]
        numbers = f"{one.needed_bytes / size:.1f}", f"{one.items_per_s:,.0f}", mfu, f"{one.step_s / time:.0f}"
        table.add_row(" ".join([sizes, *others]), *numbers, mark)
    console.print(search.title, table, *_not_planned(search), sep="\n")
    if search.best is None:
        console.print(search.advice)
        return
    gain = "the given options do not fit" if search.gain is None else f"{search.gain:.2f}x as fast as the given options"
    of = "" if search.is_complete else f" of {len(planned)} planned candidates"
    console.print(f"best{of}: {search.best.label}")
    console.print(f"{gain}; {len(planned)} of {len(search.tried)} candidates planned in {search.elapsed_s:.0f} s")
    if not search.is_complete:
        longest = max(one.compile_s for one in planned)
        console.print(f"--budget ended the search; raise it (a candidate takes up to {longest:.0f} s)")


_LABEL_WIDTH, _LINE_WIDTH = 54, 100  # the table fits into the line


def _short_label(one: Candidate) -> str:
    return one.label.replace(",xla_gpu_", " ").replace("xla_gpu_", "")


def _not_planned(search: Search) -> Iterator[str]:
    """Yield a line for each reason why candidates were not planned, with their number and the first of them."""
    groups: dict[str, list[Candidate]] = {}
    for one in search.tried:
        if not one.is_planned:
            is_skipped = one.outcome.value == "skipped"  # their reasons end with numbers, after a colon
            reason = one.reason.partition(":")[0] if is_skipped else one.reason
            groups.setdefault(f"{one.outcome.value}: {reason}", []).append(one)
    for reason, several in groups.items():
        line = f"{len(several)} {reason}{', first' * (len(several) > 1)}: {_short_label(several[0])}"
        if several[0].outcome.value == "impossible":  # the reason has a remedy
            yield textwrap.fill(line, _LINE_WIDTH, subsequent_indent="    ")
        else:
            yield textwrap.shorten(line, _LINE_WIDTH, placeholder=" ...")


def print_estimate(estimate: dict[str, Any], cluster: Cluster, advice: Sequence[Advice] = ()) -> None:
    """Print an estimate without compilation: the state, and bounds of communication and time."""
    console, limit, state = make_console(), estimate["limit_bytes"], estimate["state_bytes"]
    times = {name: _show(estimate[name] or 0.0, _TIMES, 1) for name in ("wire_s", "compute_s", "step_s_at_least")}
    print_fit(console, state, limit, "THE STATE FITS")
    facts = {
        "cluster": cluster.describe(),
        "sharding": f"{estimate['strategy']}; the largest unit is {show_bytes(estimate['unit_bytes'])} gathered",
        "not counted": "gradients, activations and logits: nothing was compiled",
        "communication": f"{_show(estimate['wire_bytes_theory'], _SENT, 3)} per step by formula, {times['wire_s']}",
        "compute": f"{times['compute_s']} per step at the datasheet's peak",
        "step": f"at least {times['step_s_at_least']}: a bound, not a prediction",
    }
    print_facts(console, facts)
    print_advice(console, advice, limit, cluster.nodes)
