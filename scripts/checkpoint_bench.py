"""Measure what checkpoints cost in time and memory: `python scripts/checkpoint_bench.py --directory /scratch/bench`.

Writes a checkpoint of random parameters (11 GB unless told otherwise) without holding it, and then runs, one after the
other, `cp -r` of it and the subcommands of `jfsdp checkpoint`, each in a process of its own whose input is not in the
page cache and which ends when its output is on the disk (cp: with `sync` of every copied file). Of each it prints the
time of the whole process, its speed over that of cp, and the most memory that it held (VmHWM) beside the program
itself, which is the same subcommand on a tiny checkpoint, with the bound that it printed. Those that read checkpoints
check digests first, so they read everything twice, and those that write them read all again to hash it. Then, on
simulated devices, for how long an asynchronous save of a state of about 1 GB blocks training, and how long one that is
waited for takes. Disk: three times the checkpoint.
"""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import tyro

from jfsdp.launch.runtime import configure_xla
from jfsdp.trainer.options import read_config

_Fields = Annotated[tuple[str, ...], tyro.conf.arg(metavar="KEY=VALUE")]
_CHILD = """
import sys
from jfsdp.cli import main
status = main(sys.argv[1:])
print(*[line for line in open("/proc/self/status") if line.startswith("VmHWM")])
sys.exit(status)
"""


@dataclasses.dataclass(frozen=True)
class CheckpointBenchOptions:
    """What to measure."""

    directory: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """Where to write; what is written is removed."""
    model: str = "llama-1b"
    """A model's name (`jfsdp models` lists them)."""
    model_config: _Fields = ("num_layers=37", "tied=false")
    """Fields of the model whose parameters are moved; 11.1 GB in float32."""
    tiny_config: _Fields = ("num_layers=1", "tied=false", "vocab_size=256", "dim=64", "ffn_dim=64")
    """Fields of the model on which the program itself is measured."""
    state_config: _Fields = ("num_layers=1", "vocab_size=10240")
    """Fields of the model whose state, with that of AdamW, is saved; 1.0 GB."""
    devices: int = 8
    """Simulated devices that hold that state."""
    rounds: int = 5
    """Saves of each kind; medians are printed."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """A process that ran: its time, the most memory that it held, and what it said that it takes at most."""

    seconds: float
    cpu_seconds: float = 0
    peak_bytes: int = 0
    bound_bytes: int = 0


def main(argv: Sequence[str]) -> int:
    """Measure and print a table; return the exit status."""
    options = tyro.cli(CheckpointBenchOptions, args=list(argv), prog="checkpoint_bench.py", description=__doc__)
    root = Path(options.directory).expanduser().absolute()
    if root.exists():
        print(f"checkpoint_bench.py: error: {root} exists, and is removed at the end; name a new one", file=sys.stderr)
        return 2
    root.mkdir(parents=True)
    configure_xla(simulate_devices=options.devices)
    try:
        num_bytes = write_random(root / "large", options.model, options.model_config)
        write_random(root / "tiny", options.model, options.tiny_config)
        copied = time_copy(root / "large")
        tiny, large = (transfer(root, name, options.model) for name in ("tiny", "large"))
        print_transfers(num_bytes, copied, tiny, large)
        shutil.rmtree(root / "large")
        print_saves(*time_saves(root, options))
    finally:
        shutil.rmtree(root)
    return 0


class RandomSource:
    """Parameters of a model as random numbers, made where they are read."""

    def __init__(self, arrays: Any):
        import numpy as np

        self.arrays = arrays
        self._numbers = np.random.default_rng(0).standard_normal(1 << 24, np.float32)

    def read(self, name: str, index: Any) -> Any:
        import numpy as np

        shape = [part.stop - part.start for part in index]
        first = sum(part.start for part in index) % 4096  # else all pieces were alike
        return np.resize(self._numbers[first:], shape)


def write_random(path: Path, model: str, fields: Sequence[str]) -> int:
    """Write a checkpoint of random parameters; return their bytes."""
    import jax

    from jfsdp.checkpoint.convert import write_source
    from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT
    from jfsdp.modules.adapt import as_model
    from jfsdp.trainer.job import load_job

    job = load_job(model, None).with_config(**dict(pair for text in fields for pair in read_config(text)))
    leaves = as_model(job.model).params
    arrays = {f"params.{name}": jax.ShapeDtypeStruct(x.shape, "float32") for name, x in leaves.items()}
    config = {"config": {"model": model, "model_config": list(fields)}}
    write_source(path, RandomSource(arrays), {}, {LAYOUT: None, CONFIG: config, EXTRA: [None]})
    return sum(4 * array.size for array in arrays.values())


def transfer(root: Path, name: str, model: str) -> dict[str, Measured]:
    """Run every subcommand on a checkpoint."""
    path, weights, other = root / name, root / "weights", root / "other"
    found = {"export": run("export", path, weights)}
    found["import"] = run("import", weights, other, "--model", model)
    shutil.rmtree(weights)
    shutil.rmtree(other)
    found["verify"] = run("verify", path)
    for options in (("--unstack", "layers"), ("--dtype", "bfloat16")):
        found[" ".join(("convert", *options))] = run("convert", path, other, *options)
        shutil.rmtree(other)
    return found


def run(verb: str, path: Path, *args: Any) -> Measured:
    """Run a subcommand in a process of its own, on input that is not in the page cache."""
    forget(path)
    command = [sys.executable, "-c", _CHILD, "checkpoint", verb, str(path), *map(str, args)]
    start, cpu = time.perf_counter(), cpu_seconds()
    done = subprocess.run(command, capture_output=True, text=True)
    seconds, cpu = time.perf_counter() - start, cpu_seconds() - cpu
    peak = re.search(r"VmHWM:\s*(\d+) kB", done.stdout)
    if done.returncode or peak is None:
        raise RuntimeError(f"jfsdp checkpoint {verb} failed: {done.stderr}")
    bounds = [float(bound) for bound in re.findall(r"takes at most ([\d.]+) GiB", done.stderr)]
    return Measured(seconds, cpu, 1024 * int(peak[1]), int(max(bounds) * 2**30))


def time_copy(path: Path) -> Measured:
    """Copy a checkpoint onto the disk."""
    forget(path)
    copy = path.with_name("copy")
    start, cpu = time.perf_counter(), cpu_seconds()
    subprocess.run(["cp", "-r", path, copy], check=True)
    subprocess.run(["sync", *files_below(copy)], check=True)
    found = Measured(time.perf_counter() - start, cpu_seconds() - cpu)
    shutil.rmtree(copy)
    return found


def cpu_seconds() -> float:
    """Return the time that processors spent on the processes that this one started and that have ended."""
    used = os.times()
    return used.children_user + used.children_system


def forget(path: Path) -> None:
    """Take files out of the page cache."""
    for file in files_below(path):
        with file.open("rb") as opened:
            os.fsync(opened.fileno())
            os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def time_saves(root: Path, options: CheckpointBenchOptions) -> tuple[int, list[float], list[float]]:
    """Return the bytes of a state, the seconds that asynchronous saves of it block, and those of synchronous ones."""
    import jax
    import optax

    import jfsdp
    from jfsdp.checkpoint.store import bytes_of
    from jfsdp.trainer.job import load_job
    from jfsdp.trainer.options import StepOptions, shard_job

    job = load_job(options.model, None).with_config(
        **dict(pair for text in options.state_config for pair in read_config(text))
    )
    state = jax.block_until_ready(shard_job(StepOptions(), job, jfsdp.make_mesh()).init(optax.adamw(1e-3)))
    blocked, whole = [], []
    run = jfsdp.checkpoint.Checkpointer(root / "run", keep=1)
    for place in range(options.rounds):
        blocked.append(run.save(place, state))
        run.wait()
        start = time.perf_counter()
        jfsdp.checkpoint.save(root / "state", state)
        whole.append(time.perf_counter() - start)
        shutil.rmtree(root / "state")
    run.close()
    return bytes_of(state), blocked, whole


def print_transfers(num_bytes: int, copied: Measured, tiny: dict[str, Measured], large: dict[str, Measured]) -> None:
    """Print a line for each subcommand."""
    from rich.console import Console
    from rich.table import Table

    right: dict[str, Any] = {"justify": "right"}
    table = Table("what", box=None, pad_edge=False)
    for title in ("s", "GB/s", "of cp", "CPU s", "s, tiny", "MiB held", "MiB stated", "MiB of the program"):
        table.add_column(title, **right)
    for what, found in {"cp -r, sync": copied, **large}.items():
        speeds = (f"{num_bytes / found.seconds / 1e9:.2f}", f"{copied.seconds / found.seconds:.2f}")
        row = [f"{found.seconds:.1f}", *speeds, f"{found.cpu_seconds:.1f}"]
        if base := tiny.get(what):
            sizes = (found.peak_bytes - base.peak_bytes, found.bound_bytes, base.peak_bytes)
            row += [f"{base.seconds:.1f}", *(f"{size / 2**20:,.0f}" for size in sizes)]
        table.add_row(what, *row)
    console = Console(width=120)
    load = " ".join(f"{load:.1f}" for load in os.getloadavg())
    console.print(f"{num_bytes:,} bytes of parameters; load of the last 1, 5, 15 min {load} on {os.cpu_count()} cores")
    console.print(table)


def print_saves(num_bytes: int, blocked: list[float], whole: list[float]) -> None:
    """Print for how long saves block."""
    own, other = statistics.median(blocked), statistics.median(whole)
    print(
        f"a state of {num_bytes:,} bytes: an asynchronous save blocks for {own * 1e3:.0f} ms "
        f"({min(blocked) * 1e3:.0f} to {max(blocked) * 1e3:.0f}), which is {own / other:.3f} of a synchronous one "
        f"({other:.2f} s, {min(whole):.2f} to {max(whole):.2f})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
