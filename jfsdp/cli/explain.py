"""`jfsdp explain`: print the layout of a job on a mesh, as text or JSON."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from rich.text import Text

from jfsdp.cli.console import Reporting, make_console, make_table, print_verdict
from jfsdp.cli.report import short
from jfsdp.float8 import TOKENS
from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.lint import LayoutWarning, advise
from jfsdp.layout.mesh import make_abstract_mesh, num_data_shards
from jfsdp.layout.report import describe_stage, format_layout, frozen_leaves, reason, show_bytes
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.job import load_job
from jfsdp.trainer.options import Mesh, ShardingOptions, as_options, make_optimizer, shard_job, step_arguments
from jfsdp.trainer.parse import read_mesh

if TYPE_CHECKING:
    from jfsdp.train.state import TrainState
    from jfsdp.train.state_bytes import StateBytes


@dataclasses.dataclass(frozen=True)
class Explain(Reporting, ShardingOptions):
    """Print the sharding of each parameter of a model, and the size of its state per device.

    Uses no devices and little memory: a 405B model on 1024 GPUs takes seconds. Takes options of scripts/train.py.
    """

    mesh: Mesh = option((("fsdp", 8),), "most used", read=read_mesh)
    """Number of devices of each mesh axis: replica, fsdp, expert, context, tensor.
    fsdp, expert and context shard the state according to --strategy; replica replicates it."""
    wide: bool = option(False, "output")
    """Add a table of leaves with unit, stages, bytes, and the reason for the sharding."""

    activations: bool = option(False, "output")
    """Add a table of the step's matrix products and named values, forward and backward: their shapes, and how each dim
    is split. Inside a shard_map shapes are those of one device."""

    def run(self) -> int:
        from jfsdp.train.state_bytes import explain_to_dict

        with self.phases() as report:
            report(f"tracing {self.model or self.factory} and its step")
            state, program = self._abstract()
        table = explain_to_dict(state)
        table["warnings"] = [*program["warnings"], *table["warnings"]]
        self.report(program | table, lambda: _print(state, program, self.wide))
        return 0

    def _abstract(self) -> tuple[TrainState, dict[str, Any]]:
        """Return the abstract state, and the step's program, its reason, warnings, and activations if wanted."""
        from jfsdp.plan.traffic.activations import list_values
        from jfsdp.trainer.step import make_batch

        job = load_job(self.model, self.factory).with_config(**dict(self.model_config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayoutWarning)  # all advice is printed below the table
            model = shard_job(self, job, make_abstract_mesh(dict(self.mesh)))
        tx = make_optimizer(self, job, model, 1e-3)
        step, state = model.train_step(job.loss, tx, **step_arguments(self)), model.abstract_state(tx)
        batch = make_batch(job, num_data_shards(dict(model.layout.mesh_sizes)) * self.accumulate, job.seq_len)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            spec = step.resolve(batch)  # raises the errors of training
        messages = [str(warning.message) for warning in found]
        program = {"program": spec.program, "reason": as_options(spec.reason), "warnings": messages}
        program["products"] = dict(spec.products)
        if self.activations:
            program["activations"] = list_values(step.read_trace(state, batch), model.layout)
        return state, program


def _print(state: TrainState, program: dict[str, Any], is_wide: bool) -> None:
    from jfsdp.train.state_bytes import account

    layout, count, console = state.layout, account(state), make_console()
    frozen = frozen_leaves(layout)
    sizes = {path: count.by_leaf[path] + count.host_by_leaf[path] for path in count.by_leaf}
    width = console.width if console.is_terminal else 80
    warnings = [*program["warnings"], *advise(layout)]
    num = f"{len(warnings)} warning{'s' * (len(warnings) != 1)}"
    size = f"{show_bytes(count.total)} of state per device"
    print_verdict(console, not warnings, "WARNINGS" if warnings else "OK", f"{size}, {num}")
    table = Text(format_layout(layout, sizes, width))
    table.highlight_regex(r"(?m)^.*state/device$", "bold")
    console.print("", table, sep="\n", soft_wrap=True)
    if is_wide:
        make_console(width=10_000).print(_leaves(layout, count))
    console.print(f"program {program['program']}: {program['reason']}")
    for line in _products(program["products"]):
        console.print(line)
    if frozen:
        console.print(f"frozen, without gradient and optimizer: {num_parameters(frozen):,} of these parameters")
    console.print(_totals(count))
    for warning in warnings:
        console.print(f"warning: {warning}")
    if "activations" in program:
        console.print("", _values(program["activations"], program["program"]))


def _products(products: Mapping[str, str]) -> Iterator[str]:
    """Yield which weights multiply in float8 and which do not, if any does."""
    by_reason: dict[str, list[str]] = {}
    for path, why in products.items():
        by_reason.setdefault(why, []).append(path)
    if num := sum(len(by_reason.get(why, [])) for why in ("", TOKENS)):
        yield f"products in float8: {num} of {len(products)} weights"
        yield from (f"  {why.replace('_', ' ')}: {', '.join(paths)}" for why, paths in by_reason.items() if why)


def _leaves(layout: Layout, count: StateBytes) -> Any:
    numbers = ("bytes per device", "on the host") if count.host_total else ("bytes per device",)
    columns = ("path", "shape", "unit", "parameters at rest", "in use", "optimizer", *numbers, "reason")
    table = make_table(*columns, right=numbers)
    for leaf in layout.leaves:
        stages = [describe_stage(leaf, dict(leaf.stages)[name]) for name in ("param", "use", "opt")]
        sizes = [count.by_leaf[leaf.path], *([count.host_by_leaf[leaf.path]] if count.host_total else [])]
        shape = " ".join(map(str, leaf.shape)) or "scalar"
        counted = (f"{size:,}" for size in sizes)
        table.add_row(leaf.path, shape, leaf.unit or "(root)", *stages, *counted, reason(layout, leaf))
    return table


def _values(values: list[dict[str, Any]], program: str) -> Any:
    whose = "one device's rows and tokens" if program == "manual" else "all devices"
    table = make_table("value", "dtype", f"shape, of {whose}", "split", "pending sum")
    for value in values:
        split = [f"dim {dim} over {' x '.join(axes)}" for dim, axes in enumerate(value["split"]) if axes]
        shape, sums = " ".join(map(str, value["shape"])), ", ".join(value["unreduced"])
        table.add_row(short(value["source"]), value["dtype"], shape, ", ".join(split) or "-", sums)
    return table


def _totals(count: StateBytes) -> str:
    device = {"parameters": count.params, "low-precision copies": count.work, "optimizer": count.opt}
    device |= {"counters": count.counters, "model state": count.model_state}
    host = {"parameters": count.host_params, "low-precision copies": count.host_work, "optimizer": count.host_opt}
    totals = (("state per device", count.total, device), ("in host memory, per device", count.host_total, host))
    lines = []
    for title, total, parts in totals:
        listed = ", ".join(f"{name} {show_bytes(size)}" for name, size in parts.items() if size)
        lines += [f"{title}: {show_bytes(total)} ({total:,} bytes): {listed}"] if total else []
    shown = show_bytes(count.padding), show_bytes(count.replicated)
    return "\n".join([*lines, f"of these, padding {shown[0]} and replicated {shown[1]}"])
