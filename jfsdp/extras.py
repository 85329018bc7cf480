"""Installed packages, and the extras of the command line and the training script."""

import importlib.metadata
from importlib.util import find_spec
from typing import Any

_CLI = ("tyro", "rich")
EXTRAS = {"cli": _CLI, "train": (*_CLI, "grain", "tokenizers", "jinja2", "tensorboardX", "matplotlib")}
EXTRAS["peft"] = ("torch", "transformers", "peft")
EXTRAS["bench"] = ("torch", "transformers")
EXTRAS["store"] = ("obstore", "boto3")
EXTRAS["data"] = ("pyarrow",)
EXTRAS |= {"wandb": ("wandb",), "mlflow": ("mlflow",)}


def install_command(extra: str) -> str:
    """Return the command that installs an extra. jfsdp is not on a package index; constraints.txt pins versions."""
    return f"in the clone of jfsdp: pip install '.[{extra}]' -c constraints.txt"


def installed_version(distribution: str) -> str | None:
    """Return the version of a distribution, or None if it is not installed."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


class MissingExtra(ImportError):
    """The packages of an extra are not installed."""


def need(extra: str) -> None:
    """Check that the packages of an extra are installed, without importing them.

    Raises:
      MissingExtra: naming the missing packages, and the command that installs them.
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
