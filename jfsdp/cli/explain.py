"""`jfsdp explain`: the layout of a job on a mesh, in words or as JSON."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Annotated, Any

import tyro

if TYPE_CHECKING:
    from jfsdp.layout.table import Layout
    from jfsdp.train.sharded import ShardedModel
    from jfsdp.train.state import TrainState


@dataclasses.dataclass(frozen=True)
class Explain:
    """Print where every parameter of a model stands on a mesh: split dim, dtype, padding, bytes per device, and why.

    Needs no devices and no memory: a 405B model on 1024 GPUs takes seconds.
    """

    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """A model by name; `jfsdp models` lists them."""
    factory: Annotated[str | None, tyro.conf.arg(metavar="MODULE:FUNCTION")] = None
    """Instead of --model: a function, importable from here, that returns a jfsdp.Job or a dict of its fields."""
    model_config: Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")] = ()
    """Fields of the model's configuration to change, such as num_layers=2 stacked=false."""
    mesh: Annotated[str, tyro.conf.arg(metavar="AXIS=SIZE,...")] = "fsdp=8"

    """Sizes of the axes: fsdp splits parameters, replica numbers the groups of hybrid strategies."""
    strategy: str = "full_shard"
    """ddp, zero1, zero2, full_shard (zero3), shard_grad_op, hybrid_shard (hsdp), hybrid_shard_zero2, hfsdp."""
    param_dtype: str = "bfloat16"
    """Dtype of parameters in use and on the wire: bfloat16 or float32."""
    min_size: int = 1024
    """Leaves with fewer elements per layer are replicated."""
    json: bool = False
    """Print JSON."""

    def run(self) -> int:
        state, model = self._abstract()
        if self.json:
            from jfsdp.train.account import explain_to_dict

            print(json.dumps(explain_to_dict(state), indent=2))
        else:
            _print(state, model)
        return 0

    def _abstract(self) -> tuple[TrainState, ShardedModel]:
        import jfsdp
        from jfsdp.train.job import load_job, parse_config

        job = load_job(self.model, self.factory).with_config(**parse_config(self.model_config))
        model = jfsdp.fully_shard(
            job.model,
            mesh=jfsdp.make_abstract_mesh(jfsdp.parse_mesh(self.mesh)),
            strategy=self.strategy,
            units=job.units,
            mp_policy=jfsdp.MixedPrecisionPolicy(param_dtype=self.param_dtype),
            min_size=self.min_size,
        )
        return model.abstract_state(job.optimizer(1e-3)), model


def _print(state: TrainState, model: ShardedModel) -> None:
    from rich.table import Table

    from jfsdp.layout.report import describe_stage, summary
    from jfsdp.train.account import account

    layout, count = model.layout, account(state)
    table = Table("path", "shape", "unit", "param at rest", "in use", "optimizer", box=None, pad_edge=False)
    table.add_column("bytes/device", justify="right")
    table.add_column("reason")
    for leaf in layout.leaves:
        stages = dict(leaf.stages)
        shown = [describe_stage(leaf, stages[name]) for name in ("param", "use", "opt")]
        shape, unit = " ".join(map(str, leaf.shape)) or "scalar", leaf.unit or "(root)"
        table.add_row(leaf.path, shape, unit, *shown, f"{count.by_leaf[leaf.path]:,}", leaf.reason)
    console = _console()
    console.print(summary(layout))
    console.print(_units(layout))
    console.print(table)
    console.print(_totals(count))


def _units(layout: Layout) -> Any:
    from rich.table import Table

    table = Table("unit", "class", "layers", "leaves", "after forward", "remat", box=None, pad_edge=False)
    for unit, policy in zip(layout.units, layout.policies, strict=True):
        stacked = [layout.by_path[path].shape[0] for path in unit.leaves[:1]] if unit.stacked else []
        kept = "resharded" if policy.reshard_after_forward else "kept whole"
        layers = str(stacked[0]) if stacked else "1"
        table.add_row(unit.name or "(root)", unit.cls, layers, str(len(unit.leaves)), kept, str(policy.remat))
    return table


def _console() -> Any:
    """Print wide where nobody's terminal wraps: a table in a file or a pipe keeps one line per leaf."""
    from rich.console import Console

    console = Console(highlight=False, markup=False, soft_wrap=False)
    return console if console.is_terminal else Console(highlight=False, markup=False, width=240)


def _totals(count: Any) -> str:
    parts = {
        "parameters": count.params,
        "low-precision copies": count.work,
        "optimizer": count.opt,
        "counters": count.counters,
        "model state": count.model_state,
    }
    listed = ", ".join(f"{name} {size:,}" for name, size in parts.items() if size)
    return (
        f"state per device: {count.total:,} bytes ({count.total / 2**30:.3f} GiB): {listed}\n"
        f"of these, padding {count.padding:,} and replicated {count.replicated:,} bytes"
    )
