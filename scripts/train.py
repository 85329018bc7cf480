"""Train a model, fully sharded, from one command: `python scripts/train.py --recipe stdlib`.

A recipe names defaults; any option on the command line overrides it. Exit status: 0 also after SIGINT or SIGTERM during
training (the step is finished and saved; a second signal kills), 2 for a wrong option or name, 1 for other errors.
"""

from __future__ import annotations

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
from jfsdp.train.recipes import recipe_defaults, recipe_names
from jfsdp.train.run import directory as runs
from jfsdp.train.run.config import TrainConfig


class UsageError(ValueError):
    """An option or a name that cannot be: exit status 2."""


def parse(argv: Sequence[str]) -> TrainConfig:
    """Read the command line over the defaults of its recipe."""
    args = _with_bare_resume(argv)
    try:
        default = recipe_defaults(TrainConfig(), args)
    except ValueError as error:
        raise UsageError(str(error)) from error
    description = f"{(__doc__ or '').strip()}\n\nRecipes: {', '.join(recipe_names())}."
    return tyro.cli(TrainConfig, args=args, default=default, prog="train.py", description=description)


def _with_bare_resume(argv: Sequence[str]) -> list[str]:
    args = list(argv)
    for place in reversed([i for i, arg in enumerate(args) if arg == "--resume"]):
        if place + 1 == len(args) or args[place + 1].startswith("-"):
            args.insert(place + 1, "auto")
    return args


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
