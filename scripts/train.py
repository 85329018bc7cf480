"""Train a fully sharded model: `python scripts/train.py --recipe stdlib`.

A recipe sets defaults. Options on the command line override it. Exit status:
- 0: all steps are done; or SIGINT, SIGTERM, SIGUSR1 or SIGHUP stopped training, and the last step is saved (a second
  signal kills the process)
- 1: an error after training began, or no answer of an object store
- 2: training cannot begin: an invalid option, path, data or weights, or a missing checkpoint
- 4: the checkpoint to start or resume from is damaged
- 75: some processes never joined, or no progress within --timeout; 76: another process failed
"""

from __future__ import annotations

import dataclasses
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from typing import Any

from jfsdp.extras import MissingExtra, need

try:
    need("train")
except MissingExtra as error:
    sys.exit(f"train.py: error: {error}")

from jfsdp.launch.environment import DEVICES, RESTART
from jfsdp.launch.processes import initialize
from jfsdp.launch.roll_call import NotAllThere
from jfsdp.launch.runtime import (
    configure_xla,
    enable_compilation_cache,
    ending_with_its_reader,
    plain_warnings,
    start_jax,
)
from jfsdp.launch.watch import DAMAGED, PATIENT, STUCK, USAGE, Watch, say, tell_and_end
from jfsdp.objects.path import StoreError
from jfsdp.trainer.help_groups import read_command
from jfsdp.trainer.option_errors import check_known
from jfsdp.trainer.options import describe_error
from jfsdp.trainer.recipes import recipe_defaults, recipe_names
from jfsdp.trainer.run import directory as runs
from jfsdp.trainer.run import resume_rules
from jfsdp.trainer.run.config import TrainConfig

INTERRUPTED = 130


class UsageError(ValueError):
    """Error before training begins: exit status 2."""


def usage_error(error: ValueError | StoreError) -> Exception:
    """Return a `UsageError` for an error before training begins, except if the store may answer later."""
    if isinstance(error, StoreError) and error.is_passing:
        return error
    return UsageError(describe_error(error, TrainConfig))


def parse(argv: Sequence[str], kept: Mapping[str, Any] | None = None) -> TrainConfig:
    """Parse the command line. Defaults come from the resumed run (`kept`), then from the recipe."""
    args = _with_bare_resume(argv)
    description = f"{(__doc__ or '').strip()}\n\nRecipes: {', '.join(recipe_names())}."
    try:
        check_known(args, TrainConfig)
        default = dataclasses.replace(recipe_defaults(TrainConfig(), args), **kept or {})
        if launched := os.environ.get(DEVICES):  # the launcher overrides a recipe
            default = dataclasses.replace(default, simulate_devices=int(launched))
        with ending_with_its_reader():
            return read_command(TrainConfig, args, default=default, prog="train.py", description=description)
    except (TypeError, ValueError) as error:
        raise UsageError(str(error)) from error


def _with_bare_resume(argv: Sequence[str]) -> list[str]:
    args = list(argv)
    for place in reversed([i for i, arg in enumerate(args) if arg == "--resume"]):
        if place + 1 == len(args) or re.match(r"-\D", args[place + 1]):
            args.insert(place + 1, "auto")
    return args


def find_run_dir(config: TrainConfig) -> runs.RunDir:
    """Return the directory of the run. It may not exist yet."""
    if config.run_dir is not None:
        return runs.open_run_dir(config.run_dir)
    name = config.recipe if config.recipe != "none" else config.model or (config.factory or "run").replace(":", ".")
    import jax

    if jax.process_count() > 1:
        raise UsageError("several processes need the same directory of the run; give --run-dir")
    return runs.newest_run_dir(name) if config.resume else runs.new_run_dir(name)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    argv = sys.argv[1:] if argv is None else argv
    is_debug = "--debug" in argv
    try:
        config = parse(argv)
        with plain_warnings():
            train(config, argv)
    except (ValueError, OSError) as error:
        if is_debug:
            say(traceback.format_exc())
        message = describe_error(error, TrainConfig)
        say(f"train.py: error: {message}")
        from jfsdp.checkpoint.disk.files import is_damage

        kinds = {DAMAGED: is_damage(error), STUCK: isinstance(error, NotAllThere), USAGE: isinstance(error, UsageError)}
        status = next((status for status, is_so in kinds.items() if is_so), 1)
        tell_and_end(message, status)
        return status
    except Exception as error:
        say(traceback.format_exc())
        # Gloo, the backend for CPUs, has a time limit for collectives. Another process hangs.
        status = STUCK if "Gloo" in str(error) and "timed out" in str(error).lower() else 1
        tell_and_end(f"{type(error).__name__}: {error}", status, getattr(error, "explain", None))
        return status
    except KeyboardInterrupt:
        print("train.py: interrupted; earlier checkpoints are kept", file=sys.stderr)
        return INTERRUPTED
    return 0


def with_kept_options(config: TrainConfig, stored: Mapping[str, Any], argv: Sequence[str]) -> TrainConfig:
    """Return the configuration with the resumed run's values of omitted options (`resume_rules.RULES`)."""
    kept = resume_rules.kept(stored)
    again = parse(argv, kept)
    restored = {name: getattr(again, name) for name in kept if getattr(again, name) != getattr(config, name)}
    if restored:
        shown = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in restored.items())
        print(f"note: options of the resumed run: {shown}")
    for name, instead in resume_rules.removed(stored).items():
        was = stored["config"][name]
        print(f"note: this run had --{name.replace('_', '-')} {was}, an option that was removed; use {instead}")
    return again


def train(config: TrainConfig, argv: Sequence[str]) -> None:
    """Train with a configuration that was read from the command line `argv`."""
    begin = time.perf_counter()
    try:
        configure_xla(simulate_devices=config.simulate_devices)
        compare = {name: value for name, value in dataclasses.asdict(config).items() if name != "cache_dir"}
        place = initialize(compare=compare)
    except NotAllThere:
        raise
    except ValueError as error:
        raise UsageError(str(error)) from error
    with Watch(config.timeout, place) as watch:
        _run(config, argv, begin, watch)


def _check_program(step: Any, batch: Any) -> list[str]:
    """Search the compiled step for known miscompiles of XLA on GPUs."""
    import jax

    from jfsdp.plan.miscompiles import check_step

    if jax.default_backend() != "gpu":
        return []
    try:
        return [f"warning: {found.trap}: {found.message}" for found in check_step(step, batch)]
    except Exception as error:  # the run continues
        return [f"note: known miscompiles were not searched for: {type(error).__name__}: {error}"]


def _run(config: TrainConfig, argv: Sequence[str], begin: float, watch: Watch) -> None:
    try:
        with watch.at("the start", PATIENT):
            try:
                start_jax()
            except RuntimeError as error:
                raise UsageError(f"JAX does not start: {error}") from error
            from jfsdp.trainer.run.build import build
            from jfsdp.trainer.run.training import Run

            run_dir = find_run_dir(config)
            if config.resume is None and os.environ.get(RESTART, "0") != "0":
                print("note: restarted by jfsdp launch with --resume auto")
                argv = [*argv, "--resume", "auto"]
                config = parse(argv)
            stored = runs.read_config(run_dir) if config.resume else {}
            config = with_kept_options(config, stored, argv) if stored else config
            run = Run(build(config, stored), run_dir, stored, begin, watch, _check_program)
            is_cached = enable_compilation_cache(config.cache_dir) is not None
    except (ValueError, StoreError) as error:
        raise usage_error(error) from error
    if not is_cached and config.cache_dir is not None:
        print("note: --cache-dir is not used: cached programs for several CPU devices lose the order of collectives")
    try:
        run.run()
    except (ValueError, StoreError) as error:
        if run.loop is not None and (run.first or run.loop.first_step_s is not None):  # training began
            raise
        raise usage_error(error) from error
    except RuntimeError as error:
        from jfsdp.cli.out_of_memory import OutOfMemory, is_out_of_memory

        if is_out_of_memory(error):
            raise OutOfMemory(error, run.config, run.parts.job) from error
        raise
    except OSError as error:
        if error.filename or str(run_dir) in str(error):
            raise
        raise OSError(error.errno, f"{error.strerror or error}; the run directory is {run_dir}") from error


if __name__ == "__main__":
    status = main()
    sys.stderr.flush()
    try:
        sys.stdout.flush()
    except BrokenPipeError:  # already reported; the interpreter would report it again at exit
        os._exit(status)
    if status == INTERRUPTED:
        os._exit(status)  # compilation threads would crash during interpreter exit
    sys.exit(status)
