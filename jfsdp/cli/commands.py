"""`jfsdp`: the entry point and its subcommands."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import operator
import sys
from collections.abc import Sequence
from typing import Annotated, Any

import tyro

import jfsdp
from jfsdp.checkpoint.disk.files import is_damage
from jfsdp.cli.audit import AuditProgram
from jfsdp.cli.checkpoint import BROKEN, KINDS, Checkpoint
from jfsdp.cli.doctor import Doctor
from jfsdp.cli.explain import Explain
from jfsdp.cli.models import Models
from jfsdp.cli.plan import FactoryError, PlanJob
from jfsdp.launch.runtime import plain_warnings
from jfsdp.trainer.options import ShardingOptions, describe_error
from jfsdp.trainer.recipes import recipe_defaults
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.spelling import check_known

DESCRIPTION = """Fully Sharded Data Parallel for JAX.

Will a model fit on a cluster that nobody has rented, what crosses its wires, how long does a step take? `jfsdp plan`
compiles the step and says so, without a GPU; `jfsdp audit` compares a compiled step with its layout.
Where does every parameter of a model stand on a mesh, in which dtype, and why? `jfsdp explain` answers without devices.
What is in a checkpoint, is it whole, how does it get elsewhere? `jfsdp checkpoint` looks, checks, converts and exports.
Is this machine set up well? `jfsdp doctor` looks.
To train, use scripts/train.py of the repository, or `import jfsdp` in your own program (see the README)."""

COMMANDS = {
    "plan": PlanJob,
    "audit": AuditProgram,
    "explain": Explain,
    "checkpoint": Checkpoint,
    "models": Models,
    "doctor": Doctor,
}


def make_command(args: Sequence[str]) -> Any:
    """Return the type of all subcommands, with the defaults of the recipe that the arguments name.

    Raises:
      ValueError: for a recipe that cannot be had.
    """
    given: dict[str, Any] = {}
    if args and args[0] in ("plan", "audit"):
        others = frozenset(field.name for field in dataclasses.fields(TrainConfig))
        given[args[0]] = recipe_defaults(COMMANDS[args[0]](), args, ignore=others)
    commands = [
        Annotated[
            kind,
            tyro.conf.subcommand(
                name, description=inspect.getdoc(kind), **({"default": given[name]} if name in given else {})
            ),
        ]
        for name, kind in COMMANDS.items()
    ]
    return functools.reduce(operator.or_, commands)


def kind_of(args: Sequence[str]) -> type | None:
    """Return the type of the subcommand that arguments name; None: they name none."""
    kinds: dict[str, type] = COMMANDS
    for arg in args[:2]:
        kind = kinds.get(arg)
        if kind is not Checkpoint:
            return kind
        kinds = KINDS
    return None


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; print errors of the user's making in one line.

    Returns the exit status: 0; 1 where `doctor` found something wrong or a factory failed; 2 for bad arguments; 3 for a
    plan that does not fit; 4 for a program that an audit found something in, a damaged checkpoint, or two that
    differ.
    """
    args = sys.argv[1:] if args is None else args
    if list(args) in (["--version"], ["-V"]):
        print(f"jfsdp {jfsdp.__version__}")
        return 0
    try:
        if kind := kind_of(args):
            check_known(args, kind)
        kinds = make_command(args)
    except ValueError as error:
        print(f"jfsdp: error: {describe_error(error, kind or ShardingOptions)}", file=sys.stderr)
        return 2
    command = tyro.cli(
        kinds,
        prog="jfsdp",
        args=list(args) or ["--help"],
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    try:
        with plain_warnings():
            return command.run()
    except FactoryError as error:
        print(f"jfsdp: error: {error}", file=sys.stderr)
        return 1
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "Unable to initialize backend" not in str(error):
            raise
        print(f"jfsdp: error: {describe_error(error, kind or ShardingOptions)}", file=sys.stderr)
        return BROKEN if is_damage(error) else 2
