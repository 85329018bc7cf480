"""`jfsdp explain`: the layout of a job on a mesh, in words or as JSON."""

from __future__ import annotations

import dataclasses
import json
import warnings
from typing import TYPE_CHECKING, Any

from jfsdp.cli.console import make_console, make_table, progress
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Mesh, ShardingOptions, as_options, make_optimizer, shard_job, step_arguments
from jfsdp.trainer.parse import read_mesh

if TYPE_CHECKING:
    from jfsdp.layout.layout import Layout
    from jfsdp.layout.policy import UnitPolicy
    from jfsdp.train.state import TrainState
    from jfsdp.train.state_bytes import StateBytes


@dataclasses.dataclass(frozen=True)
class Explain(ShardingOptions):
    """Print where every parameter of a model stands on a mesh: split dim, dtype, padding, bytes per device, and why.

    Needs no devices and no memory: a 405B model on 1024 GPUs takes seconds. The options are those of scripts/train.py.
    """

    mesh: Mesh = option((("fsdp", 8),), "most used", read=read_mesh)
    """How many devices each axis has: replica, fsdp, tensor.
    fsdp shards what --strategy says; replica replicates it."""
    json: bool = option(False, "output")
    """Print JSON."""

    def run(self) -> int:
        with progress(quiet=self.json) as tell:
            tell(f"tracing {self.model or self.factory} and its step")
            state, program = self._abstract()
        if self.json:
            from jfsdp.train.state_bytes import explain_to_dict

            table = explain_to_dict(state)
            table["warnings"] = [*program["warnings"], *table["warnings"]]
            print(json.dumps(program | table, indent=2))
        else:
            _print(state, program)
        return 0

    def _abstract(self) -> tuple[TrainState, dict[str, Any]]:
        """Return the shapes of the state, and the program of the step with the reason."""
        from jfsdp.layout.lint import LayoutWarning
        from jfsdp.layout.mesh import make_abstract_mesh, num_data_shards
        from jfsdp.trainer.job import load_job
        from jfsdp.trainer.step import make_batch

        job = load_job(self.model, self.factory).with_config(**dict(self.model_config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", LayoutWarning)  # all advice is printed below the table
            model = shard_job(self, job, make_abstract_mesh(dict(self.mesh)))
        tx = make_optimizer(self, job, 1e-3)
        step, state = model.train_step(job.loss, tx, **step_arguments(self)), model.abstract_state(tx)
        rows = num_data_shards(dict(model.layout.mesh_sizes)) * self.accumulate
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            spec = step.resolve(make_batch(job, rows, job.seq_len))  # refuses what training would refuse
        told = [str(warning.message) for warning in found]
        return state, {"program": spec.program, "reason": as_options(spec.reason), "warnings": told}


def _print(state: TrainState, program: dict[str, Any]) -> None:
    from jfsdp.layout.layout import num_parameters
    from jfsdp.layout.lint import advise
    from jfsdp.layout.report import frozen_leaves, strategy_stages, summary
    from jfsdp.train.state_bytes import account

    layout, count = state.layout, account(state)
    frozen, stages = frozen_leaves(layout), strategy_stages(layout.strategy)
    console = make_console()
    console.print(summary(layout))
    console.print(f"strategy {layout.strategy.name}: {', '.join(f'{name} {split}' for name, split in stages.items())}")
    console.print(f"program {program['program']}: {program['reason']}")
    if frozen:
        console.print(f"frozen, without gradient and optimizer: {num_parameters(frozen):,} of these parameters")
    console.print(_units(layout))
    console.print(_leaves(layout, count))
    console.print(_totals(count))
    for warning in [*program["warnings"], *advise(layout)]:
        console.print(f"warning: {warning}")


def _leaves(layout: Layout, count: StateBytes) -> Any:
    from jfsdp.layout.report import describe_stage, reason

    numbers = ("bytes/device", "on the host") if count.host_total else ("bytes/device",)
    columns = ("path", "shape", "unit", "param at rest", "in use", "optimizer", *numbers, "reason")
    table = make_table(*columns, right=numbers)
    for leaf in layout.leaves:
        stages = [describe_stage(leaf, dict(leaf.stages)[name]) for name in ("param", "use", "opt")]
        sizes = [count.by_leaf[leaf.path], *([count.host_by_leaf[leaf.path]] if count.host_total else [])]
        shape = " ".join(map(str, leaf.shape)) or "scalar"
        counted = (f"{size:,}" for size in sizes)
        table.add_row(leaf.path, shape, leaf.unit or "(root)", *stages, *counted, reason(layout, leaf))
    return table


def _units(layout: Layout) -> Any:
    table = make_table("unit", "class", "layers", "leaves", "after forward", "remat")
    for unit, policy in zip(layout.units, layout.policies, strict=True):
        stacked = [layout.by_path[path].shape[0] for path in unit.leaves[:1]] if unit.stacked else []
        layers = (str(stacked[0]) if stacked else "1") + (" (guessed)" if unit.is_guessed else "")
        remat = str(policy.remat)
        table.add_row(unit.name or "(root)", unit.cls, layers, str(len(unit.leaves)), _after_forward(policy), remat)
    return table


def _after_forward(policy: UnitPolicy) -> str:
    reshard = policy.reshard_after_forward
    if isinstance(reshard, bool):
        return "resharded" if reshard else "kept whole"
    return f"kept split {reshard} ways"


def _totals(count: StateBytes) -> str:
    device = {
        "parameters": count.params,
        "low-precision copies": count.work,
        "optimizer": count.opt,
        "counters": count.counters,
        "model state": count.model_state,
    }
    host = {"parameters": count.host_params, "low-precision copies": count.host_work, "optimizer": count.host_opt}
    lines = [f"state per device: {_sum(count.total, device)}"]
    if count.host_total:
        lines.append(f"in host memory, per device: {_sum(count.host_total, host)}")
    return "\n".join([*lines, f"of these, padding {count.padding:,} and replicated {count.replicated:,} bytes"])


def _sum(total: int, parts: dict[str, int]) -> str:
    listed = ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return f"{total:,} bytes ({total / 2**30:.3f} GiB): {listed}"
