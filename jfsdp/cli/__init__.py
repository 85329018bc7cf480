"""The command line: argument parsing and printing only."""

import sys
from collections.abc import Sequence

from jfsdp.extras import MissingExtra, need


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    try:
        need("cli")
    except MissingExtra as error:
        print(f"jfsdp: error: {error}", file=sys.stderr)
        return 2
    from jfsdp.launch.runtime import without_plugin_chatter

    with without_plugin_chatter():  # the commands import JAX
        from jfsdp.cli.commands import main as run

    return run(argv)


__all__ = ["main"]
