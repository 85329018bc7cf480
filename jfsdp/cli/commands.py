"""`jfsdp`: the entry point and its subcommands."""

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
from jfsdp.checkpoint.disk.files import is_damage
from jfsdp.cli.audit import AuditProgram
from jfsdp.cli.checkpoint import CHECKPOINT_COMMANDS, Checkpoint
from jfsdp.cli.console import BROKEN
from jfsdp.cli.data import DATA_COMMANDS, Data
from jfsdp.cli.doctor import Doctor
from jfsdp.cli.evaluate import Evaluate
from jfsdp.cli.explain import Explain
from jfsdp.cli.generate import Generate
from jfsdp.cli.launch import Launch, split_command
from jfsdp.cli.models import Models
from jfsdp.cli.plan import PlanJob
from jfsdp.launch.runtime import plain_warnings
from jfsdp.trainer.help_groups import read_command
from jfsdp.trainer.option_errors import check_known
from jfsdp.trainer.options import ShardingOptions, StepOptions, describe_error
from jfsdp.trainer.recipes import recipe_defaults
from jfsdp.trainer.run.config import TrainConfig

DESCRIPTION = """Fully Sharded Data Parallel for JAX: look before a run, and at what it saved.

To train, use scripts/train.py of the repository, or `import jfsdp` in your own program (see the README).
`jfsdp COMMAND --help` lists the options of a command."""

COMMANDS = {
    "plan": PlanJob,
    "audit": AuditProgram,
    "explain": Explain,
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
    """Return the name of the command that arguments begin with, its type or the table of its commands, and the rest."""
    prog, kind, rest = "jfsdp", COMMANDS, list(args)
    while isinstance(kind, dict) and rest and rest[0] in kind:
        prog, kind, rest = f"{prog} {rest[0]}", kind[rest[0]], rest[1:]
        kind = COMMANDS_OF.get(kind, kind)
    return prog, kind, rest


def parse(args: Sequence[str]) -> Any:
    """Read a command line into one of a command's type.

    Raises:
      ValueError: for an option that the command does not have, or a recipe that cannot be had.
    """
    prog, kind, rest = find_command(args)
    if isinstance(kind, dict):
        listed = [_listed(name, one) for name, one in kind.items()]
        owner = next((inspect.getdoc(one) for one, table in COMMANDS_OF.items() if table is kind), None)
        description = DESCRIPTION if kind is COMMANDS else owner
        # Of one command alone tyro would make no subcommand.
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
    """Show of a command what its first line says."""
    return Annotated[kind, tyro.conf.subcommand(name, description=(inspect.getdoc(kind) or "").split("\n")[0])]


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; print errors of the user's making in one line.

    Returns the exit status: 0; 1 where `doctor` found something wrong; 2 for bad arguments; 3 for a
    plan that does not fit; 4 for a program that an audit found something in, a damaged checkpoint, or two that
    differ; 130 for Ctrl-C.
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
            told = str(error).partition("\n")[0]
            error = ValueError(f"the memory does not suffice for what was asked ({told}); ask for less at a time")
        if (
            isinstance(error, TypeError)
            and traceback.extract_tb(error.__traceback__)[-1].filename != arguments.__file__
        ):
            raise  # it is not the type of an argument that was refused, such as a field of a user's job
        if isinstance(error, RuntimeError) and "Unable to initialize backend" not in str(error):
            raise
        told = describe_error(error, ShardingOptions if isinstance(kind, dict) else kind)
        print(f"jfsdp: error: {told}", file=sys.stderr)
        return BROKEN if is_damage(error) else 2


def _is_full(error: Exception) -> bool:
    """Tell the errors of Python, and of XLA on a device and on a host, where memory does not suffice."""
    by_xla = "RESOURCE_EXHAUSTED" in str(error) or "Out of memory" in str(error)
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and by_xla)
