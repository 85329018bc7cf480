"""Train the same job under several strategies, plot their losses, and print the largest difference.

`python scripts/compare.py` trains the recipe `stdlib` for 200 steps under every strategy, on two groups of four
simulated devices in float32. (In bfloat16, losses differ by percents after some steps because of rounding.) It runs
`scripts/train.py` once per strategy, with the options after `--`.

`python scripts/compare.py --formats --steps 800 --mesh fsdp=8 --plot formats.png` compares bfloat16 with products,
gathers and reductions in 8 bits, and prints their held-out losses.
"""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import tyro

TRAIN = Path(__file__).with_name("train.py")
FULL, BOTH = ["--strategy", "full_shard"], ["--opt-over", "replica,fsdp"]
WAYS = {
    "ddp": ["--strategy", "ddp"],
    "zero1": ["--strategy", "zero1"],
    "zero2": ["--strategy", "zero2"],
    "zero2 over both axes": ["--strategy", "zero2", *BOTH],
    "full_shard": FULL,
    "full_shard, kept": [*FULL, "--reshard-after-forward", "false"],
    "full_shard, kept over 2": [*FULL, "--reshard-after-forward", "2"],
    "full_shard, states over both axes": [*FULL, *BOTH],
}
PRODUCTS, GATHERS, SUMS = ["--matmul", "float8"], ["--gather-wire", "float8"], ["--reduce-wire", "int8:32"]
FORMATS = {
    "bfloat16": [],
    "float8 products": PRODUCTS,
    "float8 gathers": GATHERS,
    "int8 gradients": SUMS,
    "all three": [*PRODUCTS, *GATHERS, *SUMS],
}


@dataclasses.dataclass(frozen=True)
class CompareConfig:
    """Options of the comparison.

    Attributes:
      ways: keys of `WAYS`, or of `FORMATS`; empty: all.
      formats: compare `FORMATS` in bfloat16, instead of strategies in float32.
      recipe: recipe of scripts/train.py.
      mesh: mesh with two data axes, so that there are replicas.
      steps: steps of each run.
      plot: path of the plot.
      keep: directory of the runs; None: delete them. Runs that ended there before are not repeated.
    """

    ways: tuple[str, ...] = ()
    formats: bool = False
    recipe: str = "stdlib"
    mesh: str = "replica=2,fsdp=4"
    steps: int = 200
    plot: Path = Path("strategies.png")
    keep: Path | None = None


def train(config: CompareConfig, way: str, run_dir: Path, passed_on: Sequence[str]) -> tuple[list[float], float | None]:
    """Run the training script. Return the losses and, for a format, the last held-out loss."""
    options = {"recipe": config.recipe, "mesh": config.mesh, "steps": str(config.steps)}
    options |= {"run-dir": str(run_dir), "log-every": "1", "checkpoint-every": "0", "sample-tokens": "0"}
    options |= {"log-every": "10"} if config.formats else {"eval-every": "0", "param-dtype": "none"}
    named = [part for name, value in options.items() for part in (f"--{name}", value)]
    command = [sys.executable, str(TRAIN), *named, *(FORMATS if config.formats else WAYS)[way], *passed_on]
    if not (run_dir / "summary.json").exists():
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"compare.py: {way}: {' '.join(command)} failed:\n{done.stderr[-2000:]}")
    records = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [record["loss"] for record in records if "loss" in record], records[-1].get("eval_loss")


def largest_difference(losses: dict[str, list[float]]) -> tuple[float, int]:
    """Return the largest relative difference of two curves at one step, and that step."""
    spreads = [(max(row) - min(row)) / min(row) for row in zip(*losses.values(), strict=True)]
    return max((spread, step + 1) for step, spread in enumerate(spreads))


def plot(losses: dict[str, list[float]], path: Path, title: str, every: int) -> None:
    """Plot all curves in one figure, the first one widest, and below their differences from the first."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, (above, below) = plt.subplots(2, 1, figsize=(8, 6.5), sharex=True, layout="constrained")
    first, floor = next(iter(losses)), 1e-8
    for place, (name, curve) in enumerate(losses.items()):
        steps, width = range(every, every * len(curve) + 1, every), 1 + 1.5 * (len(losses) - 1 - place)
        (line,) = above.plot(steps, curve, label=name, linewidth=width)
        apart = [max(abs(a / b - 1), floor) for a, b in zip(curve, losses[first], strict=True)]
        if name != first:
            below.plot(steps, apart, linewidth=1.2, color=line.get_color())
    above.set(title=title, ylabel="training loss (nats per token)")
    above.legend(fontsize="small", ncols=2)
    below.set(xlabel="step", ylabel=f"difference from {first}\n(relative)", yscale="log", ylim=(floor, 1))
    below.grid(alpha=0.3)
    figure.savefig(path, dpi=100)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line."""
    args = list(sys.argv[1:] if argv is None else argv)
    cut = args.index("--") if "--" in args else len(args)
    config = tyro.cli(CompareConfig, args=args[:cut], prog="compare.py", description=__doc__)
    names = config.ways or tuple(FORMATS if config.formats else WAYS)
    with tempfile.TemporaryDirectory() as scratch:
        root, losses = config.keep or Path(scratch), {}
        for name in names:
            losses[name], held_out = train(config, name, root / name.replace(" ", "-"), args[cut + 1 :])
            end = f", held-out {held_out:.4f}" if held_out else ""
            print(f"{name:34} loss {losses[name][0]:.6f} ... {losses[name][-1]:.6f}{end}", flush=True)
    every = config.steps // len(losses[names[0]])
    difference, step = largest_difference(losses)
    print(f"largest relative difference at one step: {difference:.2e}, at step {step * every} of {config.steps}")
    what = "formats, bfloat16 first" if config.formats else "strategies, one loss, float32"
    plot(losses, config.plot, f"{len(losses)} {what}: {config.recipe} on {config.mesh}", every)
    print(f"plot: {config.plot}")


if __name__ == "__main__":
    main()
