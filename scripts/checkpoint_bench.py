"""Measure time and memory of checkpoint commands: `python scripts/checkpoint_bench.py --directory /scratch/bench`.

It writes a checkpoint of random parameters (default: 11 GB) and runs `cp -r` and the subcommands of `jfsdp checkpoint`
on it. Each runs in a new process with an empty page cache, until its output is on disk (cp: with `sync` of every file).

It prints the time of each process, its speed relative to cp, the bound of memory that it printed, and its peak memory
(VmHWM) minus the peak for a tiny checkpoint. Commands that read checkpoints also check digests, so they read everything
twice. Commands that write checkpoints read them again to hash them.

Then it measures on simulated devices how long an asynchronous save of about 1 GB blocks training, and how long a
synchronous save takes. Disk space: three times the checkpoint.
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
    """Options of the measurement."""

    directory: Annotated[str, tyro.conf.arg(metavar="PATH")]
    """New directory for all files; it is removed at the end."""
    model: str = "llama-1b"
    """Name of a model (`jfsdp models` lists them)."""
    model_config: _Fields = ("num_layers=37", "tied=false")
    """Fields of the large model; 11.1 GB in float32."""
    tiny_config: _Fields = ("num_layers=1", "tied=false", "vocab_size=256", "dim=64", "ffn_dim=64")
    """Fields of the tiny model, whose memory is subtracted."""
    state_config: _Fields = ("num_layers=1", "vocab_size=10240")
    """Fields of the model whose state, including AdamW's, is saved; 1.0 GB."""
    devices: int = 8
    """Simulated devices for this state."""
    rounds: int = 5
    """Saves of each kind; medians are printed."""


@dataclasses.dataclass(frozen=True)
class Measured:
    """Time of a process, its peak memory, and the bound of memory that it printed."""

    seconds: float
    cpu_seconds: float = 0
    peak_bytes: int = 0
    bound_bytes: int = 0


def main(argv: Sequence[str]) -> int:
    """Measure and print a table. Return the exit status."""
    options = tyro.cli(CheckpointBenchOptions, args=list(argv), prog="checkpoint_bench.py", description=__doc__)
    root = Path(options.directory).expanduser().absolute()
    if root.exists():
        print(f"checkpoint_bench.py: error: --directory {root}: exists already; name a new one", file=sys.stderr)
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
    """Source of random parameters, generated on read."""

    def __init__(self, arrays: Any):
        import numpy as np

        self.arrays = arrays
        self._numbers = np.random.default_rng(0).standard_normal(1 << 24, np.float32)

    def read(self, name: str, index: Any) -> Any:
        import numpy as np

        shape = [part.stop - part.start for part in index]
        first = sum(part.start for part in index) % 4096  # different numbers in each piece
        return np.resize(self._numbers[first:], shape)


def write_random(path: Path, model: str, fields: Sequence[str]) -> int:
    """Write a checkpoint of random parameters. Return its bytes."""
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
    """Run a subcommand in a new process, with its input not in the page cache."""
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
    """Copy a checkpoint to disk."""
    forget(path)
    copy = path.with_name("copy")
    start, cpu = time.perf_counter(), cpu_seconds()
    subprocess.run(["cp", "-r", path, copy], check=True)
    subprocess.run(["sync", *files_below(copy)], check=True)
    found = Measured(time.perf_counter() - start, cpu_seconds() - cpu)
    shutil.rmtree(copy)
    return found


def cpu_seconds() -> float:
    """Return the CPU time of all finished child processes."""
    used = os.times()
    return used.children_user + used.children_system


def forget(path: Path) -> None:
    """Remove files from the page cache."""
    for file in files_below(path):
        with file.open("rb") as stream:
            os.fsync(stream.fileno())
            os.posix_fadvise(stream.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def files_below(path: Path) -> list[Path]:
    return [file for file in path.rglob("*") if file.is_file()]


def time_saves(root: Path, options: CheckpointBenchOptions) -> tuple[int, list[float], list[float]]:
    """Return the bytes of a state, the seconds that asynchronous saves block, and the seconds of synchronous saves."""
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
    """Print a table with a row for each subcommand."""
    from rich.console import Console
    from rich.table import Table

    right: dict[str, Any] = {"justify": "right"}
    table = Table("what", box=None, pad_edge=False)
    for title in ("s", "GB/s", "of cp", "CPU s", "s, tiny", "MiB peak", "MiB bound", "MiB peak, tiny"):
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
    """Print how long saves block."""
    blocked_s, whole_s = statistics.median(blocked), statistics.median(whole)
    print(
        f"state of {num_bytes:,} bytes: an asynchronous save blocks for {blocked_s * 1e3:.0f} ms "
        f"({min(blocked) * 1e3:.0f} to {max(blocked) * 1e3:.0f}), {blocked_s / whole_s:.3f} of a synchronous save "
        f"({whole_s:.2f} s, {min(whole):.2f} to {max(whole):.2f})"
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
