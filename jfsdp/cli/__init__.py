"""The command line: argument parsing and printing only."""

from jfsdp.cli.main import main

__all__ = ["main"]
