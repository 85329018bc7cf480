"""Command line: argument parsing and printing only."""

import sys
from collections.abc import Sequence

from jfsdp.extras import MissingExtra, need


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    try:
        need("cli")
    except MissingExtra as error:
        print(f"jfsdp: error: {error}", file=sys.stderr)
        return 2
    from jfsdp.launch.runtime import ending_with_its_reader, without_plugin_chatter

    with ending_with_its_reader():
        with without_plugin_chatter():  # the commands import JAX
            from jfsdp.cli.commands import main as run
        return run(argv)


__all__ = ["main"]
