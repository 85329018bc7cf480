"""Write the checkpoints of jfsdp 0.2 beside this file. Ran once, at commit 29246b3, and does not run at later ones.

    JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m tests.checkpoint.v0_2.write

Every case is a checkpoint after two steps, as `jfsdp.save` wrote it, with `expected.npz`, its arrays by name. `run` is
the directory of a run of scripts/train.py after two steps, with `next_batch.npz`, the batch of the third.
"""

import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import tyro

import jfsdp
from jfsdp.trainer.run.build import build
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.source import open_source
from tests.models_small import Block, Tower, make_batches, token_loss
from tests.scripts.command import TINY
from tests.states import logical

HERE = Path(__file__).parent
CASES: dict[str, dict[str, Any]] = {
    "full_shard": {"mesh": {"fsdp": 4}},
    "hybrid_shard": {"mesh": {"replica": 2, "fsdp": 2}, "strategy": "hybrid_shard"},
    "flat": {"mesh": {"fsdp": 4}, "engine": "manual", "storage": "flat"},
    "lora": {"mesh": {"fsdp": 4}, "lora": jfsdp.LoRA(["**.up.kernel"], rank=2, dropout=0.1, dora=True)},
    "nf4": {"mesh": {"fsdp": 4}, "frozen": "blocks", "quantized": {"**.up.kernel": "nf4"}},
    "ema": {"mesh": {"fsdp": 4}},
    "float16": {"mesh": {"fsdp": 4}, "units": [Block], "mp_policy": jfsdp.MixedPrecisionPolicy("float16")},
    "pipe": {"mesh": {"pipe": 2, "fsdp": 2}},
}
RUN = [
    *["--model", "llama-tiny", "--model-config", *TINY, "vocab_size=257", "--seq-len", "16", "--batch-per-device", "2"],
    *["--data", "corpus", "--tokenizer", "byte", "--eval-batches", "1", "--log-every", "1", "--sample-tokens", "0"],
    *["--checkpoint-every", "2", "--simulate-devices", "4", "--mesh", "replica=2,fsdp=2", "--strategy", "hybrid_shard"],
    *["--learning-rate", "1e-2", "--decay-steps", "4", "--remat", "none"],
]


def write_case(name: str, mesh: dict[str, int], **options: Any) -> None:
    devices = jax.devices()[: math.prod(mesh.values())]
    dim = 16 if name == "nf4" else 4
    model = jfsdp.fully_shard(
        lambda rngs: Tower(rngs, name != "float16", dim=dim, num_layers=2),
        mesh=jfsdp.make_mesh(**mesh, devices=devices),
        min_size=8,  # pyright: ignore[reportCallIssue]: an argument of 0.2
        **{"units": ["blocks", "embed"], **options},
    )
    tx = optax.adamw(1e-2)
    tx = optax.chain(tx, jfsdp.track_ema(0.9)) if name == "ema" else tx
    step = model.train_step(token_loss, tx, accumulate=2)
    state = model.init(tx, seed=0)
    for batch in make_batches(2):
        state, _ = step(state, batch)
    shutil.rmtree(HERE / name, ignore_errors=True)
    jfsdp.save(HERE / name, state)
    np.savez_compressed(HERE / name / "expected.npz", **logical(state))  # pyright: ignore[reportArgumentType]


def write_run() -> None:
    run = HERE / "run"
    shutil.rmtree(run, ignore_errors=True)
    command = [sys.executable, str(HERE.parents[2] / "scripts" / "train.py"), *RUN, "--run-dir", "run", "--steps", "2"]
    subprocess.run(command, cwd=HERE, check=True)
    for name in ("tensorboard", "goodput.json", "loss.png", "summary.json", "lock"):
        path = run / name
        shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)
    os.chdir(HERE)  # where `corpus` is
    np.savez_compressed(run / "next_batch.npz", **next_batch())


def next_batch() -> Any:
    """Return the batch of the third step, from a run of three steps that was not interrupted."""
    config = tyro.cli(TrainConfig, args=[*RUN, "--steps", "3"])
    parts = build(config, {}, jax.devices()[:4])
    source = open_source(parts.config, parts.job, parts.row_items)
    iterator = source.train_batches(batch_size=8, process_index=0, process_count=1)
    return [source.prepare(next(iterator)) for _ in range(3)][2]


if __name__ == "__main__":
    (HERE / "corpus").mkdir(exist_ok=True)
    for number in range(8):
        text = "".join(f"def f{number}_{line}(x):\n    return x * {line * number}\n\n" for line in range(12))
        (HERE / "corpus" / f"{number}.txt").write_text(text)
    for case, options in CASES.items():
        write_case(case, **options)
    write_run()
