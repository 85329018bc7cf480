"""`jfsdp`: the entry point and its subcommands."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

import jfsdp
from jfsdp.cli.doctor import Doctor
from jfsdp.cli.explain import Explain
from jfsdp.cli.models import Models
from jfsdp.launch.runtime import without_plugin_chatter
from jfsdp.train.options import as_options

DESCRIPTION = """Fully Sharded Data Parallel for JAX.

Where does every parameter of a model stand on a mesh, in which dtype, and why? `jfsdp explain` answers without devices.
Is this machine set up well? `jfsdp doctor` looks.
To train, use scripts/train.py of the repository, or `import jfsdp` in your own program (see the README)."""

Command = (
    Annotated[Explain, tyro.conf.subcommand("explain", description=inspect.getdoc(Explain))]
    | Annotated[Models, tyro.conf.subcommand("models", description=inspect.getdoc(Models))]
    | Annotated[Doctor, tyro.conf.subcommand("doctor", description=inspect.getdoc(Doctor))]
)


def main(args: Sequence[str] | None = None) -> int:
    """Run a subcommand; print errors of the user's making in one line.

    Returns the exit status: 0, 1 where `doctor` found something wrong, or 2 for bad arguments.
    """
    args = sys.argv[1:] if args is None else args
    if list(args) in (["--version"], ["-V"]):
        print(f"jfsdp {jfsdp.__version__}")
        return 0
    command = tyro.cli(
        Command,  # type: ignore[arg-type]
        prog="jfsdp",
        args=list(args) or ["--help"],
        description=DESCRIPTION,
        config=(tyro.conf.OmitArgPrefixes, tyro.conf.FlagCreatePairsOff),
    )
    with without_plugin_chatter():
        import jax  # noqa: F401
    try:
        return command.run()
    except (ValueError, OSError) as error:
        print(f"jfsdp: error: {as_options(str(error))}", file=sys.stderr)
        return 2
