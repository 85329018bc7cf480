"""Train a model, fully sharded, from one command: `python scripts/train.py --recipe stdlib`.

A recipe names defaults; any option on the command line overrides it. Exit status: 0 also after SIGINT or SIGTERM during
training (the step is finished and saved; a second signal kills), 2 for a wrong option or name, 1 for other errors.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import tyro

from jfsdp.launch.runtime import (
    configure_xla,
    enable_compilation_cache,
    initialize_processes,
    without_plugin_chatter,
)
from jfsdp.train.options import as_options
from jfsdp.train.run import directory as runs
from jfsdp.train.run.config import TrainConfig

# A small Llama on the sources of Python's standard library, on eight simulated devices: minutes on two cores.
_STDLIB = TrainConfig(
    recipe="stdlib",
    model="llama-tiny",
    data="stdlib",
    seq_len=256,
    batch_per_device=1,
    steps=800,
    decay_steps=800,
    learning_rate=3e-3,
    remat="none",
    eval_every=200,
    eval_batches=32,
    checkpoint_every=200,
    log_every=10,
    sample_tokens=160,
    prompt="def ",
    simulate_devices=8,
)
RECIPES = {
    "none": TrainConfig(),
    "stdlib": _STDLIB,
    # The same with GPT-2, a model in Flax Linen.
    "gpt2-stdlib": dataclasses.replace(_STDLIB, recipe="gpt2-stdlib", model="gpt2-tiny"),
    # A small Vision Transformer on scikit-learn's handwritten digits, 1438 to learn from and 359 held out.
    "vit-digits": TrainConfig(
        recipe="vit-digits",
        model="vit-tiny",
        data="digits",
        eval_fraction=0.2,
        batch_per_device=8,
        steps=900,
        decay_steps=900,
        learning_rate=2e-3,
        min_learning_rate=0.01,
        remat="none",
        eval_every=100,
        eval_batches=0,
        checkpoint_every=300,
        log_every=10,
        sample_tokens=0,
        simulate_devices=8,
    ),
    # Llama 3 8B from scratch on a cluster, 4M tokens per step on 64 GPUs: give --data, --tokenizer and --run-dir.
    "llama-8b": TrainConfig(
        recipe="llama-8b",
        model="llama-8b",
        data="data/*.jsonl",
        tokenizer="tokenizer.json",
        seq_len=8192,
        batch_per_device=8,
        accumulate=4,
        steps=20_000,
        learning_rate=3e-4,
        warmup=1000,
        skip_nonfinite=True,
        eval_every=500,
        checkpoint_every=500,
        sample_tokens=0,
    ),
}


class UsageError(ValueError):
    """An option or a name that cannot be: exit status 2."""


def parse(argv: Sequence[str]) -> TrainConfig:
    """Read the command line over the defaults of its recipe."""
    args = _with_bare_resume(argv)
    name = _value_of("--recipe", args) or "none"
    if name not in RECIPES:
        raise UsageError(f"recipe {name!r} is unknown; the recipes are {', '.join(RECIPES)}")
    default = RECIPES[name]
    if _value_of("--factory", args) and not _value_of("--model", args):
        default = dataclasses.replace(default, model=None)
    description = f"{(__doc__ or '').strip()}\n\nRecipes: {', '.join(RECIPES)}."
    return tyro.cli(TrainConfig, args=args, default=default, prog="train.py", description=description)


def _with_bare_resume(argv: Sequence[str]) -> list[str]:
    args = list(argv)
    for place in reversed([i for i, arg in enumerate(args) if arg == "--resume"]):
        if place + 1 == len(args) or args[place + 1].startswith("-"):
            args.insert(place + 1, "auto")
    return args


def _value_of(option: str, args: Sequence[str]) -> str | None:
    for place, arg in enumerate(args):
        if arg == option:
            return args[place + 1] if place + 1 < len(args) else None
        if arg.startswith(f"{option}="):
            return arg.partition("=")[2]
    return None


def find_run_dir(config: TrainConfig) -> Path:
    """Return the directory of the run, which may not exist yet."""
    if config.run_dir is not None:
        return Path(config.run_dir).expanduser()
    name = config.recipe if config.recipe != "none" else config.model or (config.factory or "run").replace(":", ".")
    if config.coordinator or "JAX_COORDINATOR_ADDRESS" in os.environ:
        raise UsageError("several processes must agree on the directory of the run: give --run-dir")
    return runs.newest_run_dir(name) if config.resume else runs.new_run_dir(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    is_debug = "--debug" in argv
    try:
        config = parse(argv)
        train(config)
    except (ValueError, OSError) as error:
        if is_debug:
            raise
        print(f"train.py: error: {_describe(error)}", file=sys.stderr)
        return 2 if isinstance(error, UsageError) else 1
    except KeyboardInterrupt:
        print("train.py: interrupted; complete checkpoints stand", file=sys.stderr)
        return 130
    return 0


def start_cpu() -> None:
    """Start JAX on the CPU without remarks on the GPU that is not there."""
    with without_plugin_chatter():
        import jax

        jax.devices()


def _describe(error: ValueError | OSError) -> str:
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {str(error.filename)!r}"
    return as_options(str(error))


def train(config: TrainConfig) -> None:
    """Do everything that the configuration says."""
    begin = time.perf_counter()
    try:
        configure_xla(simulate_devices=config.simulate_devices, deterministic=config.deterministic)
        initialize_processes(config.coordinator, config.num_processes, config.process_id)
        if os.environ.get("JAX_PLATFORMS") == "cpu":
            start_cpu()
        from jfsdp.train.run.build import build

        run_dir = find_run_dir(config)
        stored = runs.read_config(run_dir) if config.resume else {}
        parts = build(config, stored)
    except ValueError as error:
        raise UsageError(str(error)) from error
    enable_compilation_cache(config.cache_dir)
    from jfsdp.checkpoint.manager import Checkpointer
    from jfsdp.train.run.training import Run

    Run(config, parts, run_dir, Checkpointer, begin).run()


if __name__ == "__main__":
    sys.exit(main())
