"""Which packages are installed; what the command line and the training script need beyond the library: extras."""

import importlib.metadata
from importlib.util import find_spec
from typing import Any

_CLI = ("tyro", "rich")
EXTRAS = {"cli": _CLI, "train": (*_CLI, "grain", "tokenizers", "jinja2", "tensorboardX", "matplotlib")}
EXTRAS["peft"] = ("torch", "transformers", "peft")
EXTRAS["bench"] = ("torch", "transformers")
EXTRAS |= {"wandb": ("wandb",), "mlflow": ("mlflow",)}


def install_command(extra: str) -> str:
    """Say how to install an extra: jfsdp is on no package index, and constraints.txt holds versions that fit."""
    return f"in the clone of jfsdp: pip install '.[{extra}]' -c constraints.txt"


def installed_version(distribution: str) -> str | None:
    """Return the version of an installed distribution; None: it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class MissingExtra(ImportError):
    """A part of jfsdp was asked for whose packages are not installed."""


def need(extra: str) -> None:
    """Check that the packages of an extra are there. Imports none of them.

    Raises:
      MissingExtra: naming what is missing, and the command that installs it.
    """
    missing = [name for name in EXTRAS[extra] if find_spec(name) is None]
    if missing:
        raise MissingExtra(_lacks(", ".join(missing), extra))


def load(package: str, extra: str = "train") -> Any:
    """Import a package of an extra.

    Raises:
      MissingExtra: as `need`.
    """
    if find_spec(package.partition(".")[0]) is None:
        raise MissingExtra(_lacks(package, extra))
    return importlib.import_module(package)


def _lacks(what: str, extra: str) -> str:
    return f"this part of jfsdp needs {what}; {install_command(extra)}"
