"""Entry point of `jfsdp`, and its subcommands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
import traceback
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

import jfsdp
from jfsdp import arguments
from jfsdp.arguments import did_you_mean
from jfsdp.checkpoint.disk.files import is_damage
from jfsdp.cli.audit import AuditProgram
from jfsdp.cli.checkpoint import CHECKPOINT_COMMANDS, Checkpoint
from jfsdp.cli.console import BROKEN, print_wrapped
from jfsdp.cli.data import DATA_COMMANDS, Data
from jfsdp.cli.doctor import Doctor
from jfsdp.cli.evaluate import Evaluate
from jfsdp.cli.explain import Explain
from jfsdp.cli.generate import Generate
from jfsdp.cli.launch import Launch, split_command
from jfsdp.cli.models import Models
from jfsdp.cli.plan import PlanJob
from jfsdp.cli.profile import ProfileRun
from jfsdp.cli.prove import Prove
from jfsdp.launch.runtime import plain_warnings
from jfsdp.train.step import loss
from jfsdp.trainer.help_groups import read_command
from jfsdp.trainer.option_errors import check_known
from jfsdp.trainer.options import ShardingOptions, StepOptions, describe_error
from jfsdp.trainer.recipes import recipe_defaults
from jfsdp.trainer.run.config import TrainConfig

DESCRIPTION = """Fully Sharded Data Parallel for JAX: plan, launch and inspect runs.

To train, use scripts/train.py of the repository, or `import jfsdp` in a program (see the README).
`jfsdp COMMAND --help` lists the options of a command."""

COMMANDS = {
    "plan": PlanJob,
    "audit": AuditProgram,
    "profile": ProfileRun,
    "explain": Explain,
    "prove": Prove,
    "checkpoint": Checkpoint,
    "data": Data,
    "evaluate": Evaluate,
    "generate": Generate,
    "models": Models,
    "doctor": Doctor,
    "launch": Launch,
}
COMMANDS_OF: dict[type, dict[str, Any]] = {Checkpoint: CHECKPOINT_COMMANDS, Data: DATA_COMMANDS}


def find_command(args: Sequence[str]) -> tuple[str, Any, list[str]]:
    """Split arguments into a command's name, its type (or the table of its subcommands), and the remainder."""
    prog, kind, rest = "jfsdp", COMMANDS, list(args)
    while isinstance(kind, dict) and rest and rest[0] in kind:
        prog, kind, rest = f"{prog} {rest[0]}", kind[rest[0]], rest[1:]
        kind = COMMANDS_OF.get(kind, kind)
    return prog, kind, rest


def parse(args: Sequence[str]) -> Any:
    """Parse a command line into an instance of the command's type.

    Raises:
      ValueError: for an unknown command or option, and for a recipe that cannot be read.
    """
    prog, kind, rest = find_command(args)
    if isinstance(kind, dict):
        if rest and not rest[0].startswith("-"):
            inner = {name: f"{of.__name__.lower()} {name}" for of, table in COMMANDS_OF.items() for name in table}
            meant = did_you_mean(inner.get(rest[0], rest[0]), [*kind, *inner.values()])
            raise ValueError(f"{prog} has no command {rest[0]!r}{meant}; `{prog} --help` lists them")
        listed = [_listed(name, one) for name, one in kind.items()]
        owner = next((inspect.getdoc(one) for one, table in COMMANDS_OF.items() if table is kind), None)
        description = DESCRIPTION if kind is COMMANDS else owner
        # tyro makes no subcommand if there is only one.
        listed = functools.reduce(operator.or_, listed) if len(listed) > 1 else tyro.conf.AvoidSubcommands[listed[0]]
        return tyro.cli(listed, prog=prog, args=rest, description=description, config=(tyro.conf.OmitArgPrefixes,))
    rest, command = split_command(rest) if kind is Launch else (rest, [])
    check_known(rest, kind)
    default = tyro.MISSING_NONPROP
    if issubclass(kind, StepOptions):
        others = frozenset(field.name for field in dataclasses.fields(TrainConfig))
        default = recipe_defaults(kind(), rest, ignore=others)
    parsed = read_command(kind, rest, default=default, prog=prog, description=inspect.getdoc(kind))
    return dataclasses.replace(parsed, command=tuple(command)) if command else parsed


def _listed(name: str, kind: type) -> Any:
    """Annotate a command with the first line of its docstring."""
    return Annotated[kind, tyro.conf.subcommand(name, description=(inspect.getdoc(kind) or "").split("\n")[0])]


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand. Prints errors that the user caused in one line.

    Returns:
      The exit status: 0; 1 for problems found by `doctor`; 2 for bad arguments; 3 for a plan that does not fit; 4 for
      findings of an audit, a damaged checkpoint, or checkpoints that differ; 130 for Ctrl-C.
    """
    args = sys.argv[1:] if args is None else args
    if list(args) in (["--version"], ["-V"]):
        print(f"jfsdp {jfsdp.__version__}")
        return 0
    kind = find_command(args)[1]
    try:
        command = parse(args)
        with plain_warnings():
            return command.run()
    except KeyboardInterrupt:
        print("jfsdp: interrupted", file=sys.stderr)
        return 130
    except (ValueError, TypeError, OSError, RuntimeError, MemoryError) as error:
        if _is_full(error):
            reason = str(error).partition("\n")[0]
            error = ValueError(f"out of memory ({reason}); process less at a time")
        places = traceback.extract_tb(error.__traceback__)
        if isinstance(error, TypeError) and places[-1].filename not in (arguments.__file__, loss.__file__):
            raise  # not the type of an argument or of a loss, but an error of a user's job, for example
        if isinstance(error, RuntimeError) and "Unable to initialize backend" not in str(error):
            raise
        message = describe_error(error, ShardingOptions if isinstance(kind, dict) else kind)
        print_wrapped(f"jfsdp: error: {message}", stderr=True)
        return BROKEN if is_damage(error) else 2


def _is_full(error: Exception) -> bool:
    """Return whether an error of Python or XLA means that device or host memory is exhausted."""
    by_xla = "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and by_xla)
