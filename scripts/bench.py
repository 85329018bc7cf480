"""Time one training step under several settings, in pairs: `python scripts/bench.py --model llama-1b --remat none`.

Settings: `plain`, the same model, loss and optimizer under jax.jit, without jfsdp (one device); `xla`; `manual`;
`flat`, which is manual with flat storage; `auto`, which chooses; `watched`, which is auto as a run takes it, under the
watch of `--timeout`. Several processes (`jfsdp launch --nproc 2 scripts/bench.py ...`) take their steps together. Every
round takes one step under each, in random order, so that what disturbs the machine disturbs all alike; reported are
ratios to the first, with 95 % bootstrap intervals.
"""

from __future__ import annotations

import dataclasses
import sys
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import tyro
from flax import nnx

from jfsdp.launch.environment import Place
from jfsdp.launch.processes import initialize
from jfsdp.launch.watch import Watch
from jfsdp.layout.mesh import make_mesh, num_data_shards, parse_mesh
from jfsdp.train.step.loss import as_loss
from jfsdp.train.update.update import clip_by_norm
from jfsdp.trainer.job import Job, load_job, parse_config
from jfsdp.trainer.options import StepOptions, make_optimizer, shard_job, train_arguments
from jfsdp.trainer.step import own_rows

SETTINGS: dict[str, dict[str, Any]] = {
    "xla": {"engine": "xla", "prefetch": None},
    "manual": {"engine": "manual"},
    "flat": {"engine": "manual", "storage": "flat"},
    "auto": {},
    "watched": {},
}
Step = Callable[[Any, Any], tuple[Any, Any]]


@dataclasses.dataclass(frozen=True)
class BenchOptions(StepOptions):
    """What to time."""

    settings: Annotated[tuple[str, ...], tyro.conf.arg(metavar="NAMES")] = ("plain", "xla", "manual", "flat")
    """plain, xla, manual, flat, auto, watched: ratios are to the first."""
    rounds: Annotated[int, tyro.conf.arg(metavar="N")] = 30
    """Steps under each setting."""


def main(argv: Sequence[str]) -> int:
    """Time the settings and print a table; return the exit status."""
    options = tyro.cli(BenchOptions, args=list(argv), prog="bench.py", description=__doc__)
    unknown = [name for name in options.settings if name not in ("plain", *SETTINGS)]
    if unknown:
        print(f"bench.py: --settings {unknown[0]}: use plain, {', '.join(SETTINGS)}", file=sys.stderr)
        return 2
    place = initialize()
    job = load_job(options.model, options.factory).with_config(**parse_config(options.model_config))
    mesh = make_mesh(**{"fsdp": 1, **parse_mesh(options.mesh)})  # type: ignore[arg-type]
    if "plain" in options.settings and mesh.devices.size > 1:
        print(
            f"bench.py: plain runs on one device, and the mesh has {mesh.devices.size}; leave it out", file=sys.stderr
        )
        return 2
    runs = {name: _make(name, options, job, mesh, place) for name in options.settings}
    seconds = _time(runs, options.rounds)
    if jax.process_index() == 0:
        _print(options, runs, seconds)
    return 0


@dataclasses.dataclass
class Run:
    """A step on its way: what compiles to what, and the state that it has reached."""

    step: Step
    state: Any
    batch: Any
    peak_bytes: int


def _make(name: str, options: BenchOptions, job: Job, mesh: Any, place: Place | None) -> Run:
    rows = options.batch_per_device * num_data_shards(dict(mesh.shape))
    batch = jax.tree.map(_fill, job.batch(rows, options.seq_len or job.seq_len))
    tx = make_optimizer(options, job, 3e-4)
    if name == "plain":
        step, state = _plain(job, tx, options)
        lowered = step.lower(state, batch)  # type: ignore[attr-defined]
    else:
        model = shard_job(dataclasses.replace(options, **SETTINGS[name]), job, mesh)
        step, state = model.train_step(job.loss, tx, **train_arguments(options)), model.init(tx)
        lowered = step.lower(model.abstract_state(tx), batch)
        own = own_rows(mesh, rows)
        batch = jax.tree.map(lambda x: x[own.start : own.stop] if np.ndim(x) else x, batch)
    if name == "watched":
        step = _watched(step, place)
    peak = lowered.compile().memory_analysis().peak_memory_in_bytes
    for _ in range(2):
        state, metrics = step(state, batch)
    jax.block_until_ready(metrics)
    return Run(step, state, batch, peak)


def _watched(step: Step, place: Place | None) -> Step:
    def watched(state: Any, batch: Any) -> tuple[Any, Any]:
        with Watch(600, place) as watch:  # of this step alone: its threads must not run beside the others
            with watch.at("the data of step 1"):
                pass
            with watch.at("step 1"):
                state, metrics = step(state, batch)
                jax.block_until_ready(metrics)
                return state, metrics

    return watched


def _fill(x: Any) -> np.ndarray:
    rng = np.random.default_rng(0)
    is_whole = jnp.issubdtype(x.dtype, jnp.integer)
    return (rng.integers(1, 100, x.shape) if is_whole else rng.normal(size=x.shape)).astype(x.dtype)


def _plain(job: Job, tx: optax.GradientTransformation, options: BenchOptions) -> tuple[Any, Any]:
    """Return a step of plain Flax and optax, in the dtype of `param_dtype`, and its first state."""
    dtype = None if options.param_dtype in (None, "none") else options.param_dtype
    if isinstance(job.model, tuple):
        module, inputs = job.model[:2]
        variables = dict(module.init(jax.random.key(0), *(jnp.zeros(x.shape, x.dtype) for x in inputs)))
        params, rest = variables.pop("params"), variables

        def bind(params: Any) -> Any:
            return lambda *args, **kwargs: module.apply({"params": params, **rest}, *args, **kwargs)
    else:
        graph, params, rest = nnx.split(job.model(nnx.Rngs(0)), nnx.Param, ...)

        def bind(params: Any) -> Any:
            return nnx.merge(graph, params, jax.tree.map(lambda x: x, rest))

    def total(params: Any, batch: Any) -> Any:
        cast = jax.tree.map(lambda x: x.astype(dtype or x.dtype), params)
        loss = as_loss(job.loss(bind(cast), batch))
        return loss.total / loss.weight

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        params, opt_state = state
        loss, grads = jax.value_and_grad(total)(params, batch)
        leaves, tree = jax.tree.flatten(grads)
        clipped = clip_by_norm(dict(enumerate(leaves)), optax.tree.norm(grads), options.max_grad_norm)  # type: ignore[arg-type]
        updates, opt_state = tx.update(jax.tree.unflatten(tree, list(clipped.values())), opt_state, params)
        return (optax.apply_updates(params, updates), opt_state), {"loss": loss}

    params = jax.tree.map(jnp.asarray, params)
    return jax.jit(step, donate_argnums=0), (params, tx.init(params))


def _time(runs: dict[str, Run], rounds: int) -> dict[str, np.ndarray]:
    rng, seconds = np.random.default_rng(0), {name: np.zeros(rounds) for name in runs}
    for place in range(rounds):
        for name in rng.permutation(list(runs)):
            run, start = runs[name], time.perf_counter()
            run.state, metrics = run.step(run.state, run.batch)
            jax.block_until_ready((run.state, metrics))
            seconds[name][place] = time.perf_counter() - start
    return seconds


def _print(options: BenchOptions, runs: dict[str, Run], seconds: dict[str, np.ndarray]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("setting", "ms, median", "ratio", "95 %", "peak GiB by XLA", box=None, pad_edge=False)
    first, rng = seconds[options.settings[0]], np.random.default_rng(0)
    for name, own in seconds.items():
        ratios = own / first
        draws = np.median(rng.choice(ratios, (2000, len(ratios))), axis=1)
        low, high = np.quantile(draws, [0.025, 0.975])
        peak = f"{runs[name].peak_bytes / 2**30:.3f}"
        table.add_row(name, f"{np.median(own) * 1e3:.2f}", f"{np.median(ratios):.4f}", f"{low:.4f}..{high:.4f}", peak)
    device = jax.devices()[0]
    console = Console()
    console.print(
        f"{options.model or options.factory} on {jax.device_count()} x {device.device_kind}, {options.rounds} rounds"
    )
    console.print(table)
    used = (device.memory_stats() or {}).get("peak_bytes_in_use")
    if used:
        console.print(f"most memory in use on {device}, all settings together: {used / 2**30:.3f} GiB")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
