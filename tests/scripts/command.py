"""The training script as users run it, a model of a few thousand weights, and what a run has written."""

import json
import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
TINY = ["dim=16", "num_layers=2", "num_heads=2", "num_kv_heads=1", "ffn_dim=32"]
ONE_LAYER = [size.replace("layers=2", "layers=1") for size in TINY]  # compiles in half the time


def command(*options):
    return [sys.executable, str(ROOT / "scripts" / "train.py"), *map(str, options)]


def environment():
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    flags = [flag for flag in os.environ["XLA_FLAGS"].split() if "device_count" not in flag]
    return {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": path, "XLA_FLAGS": " ".join(flags)}


def train(*options, cwd=None):
    return subprocess.run(command(*options), capture_output=True, text=True, env=environment(), cwd=cwd, timeout=300)


def read_metrics(run_dir):
    return [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


def read_losses(run_dir):
    return [(line["step"], line["loss"], line["grad_norm"], line["eval_loss"]) for line in read_metrics(run_dir)]


def write_corpus(directory):
    directory.mkdir()
    for number in range(40):
        text = "".join(f"def f{number}_{line}(x):\n    return x * {line * number}\n\n" for line in range(20))
        (directory / f"{number:02}.py").write_text(text)
