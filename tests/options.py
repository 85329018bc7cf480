"""Options made from their command-line texts."""

import dataclasses
from typing import Any

from jfsdp.trainer.options import ShardingOptions
from jfsdp.trainer.parse import read_fields


def made(kind: Any, **texts: Any) -> Any:
    """Return options of a class, parsed from texts."""
    return kind(**read_fields(kind, texts))


def changed(options: Any, **texts: Any) -> Any:
    """Return options with changed values, parsed from texts."""
    return dataclasses.replace(options, **read_fields(type(options), texts))


def config_of(texts: Any) -> dict[str, Any]:
    """Return the fields of a model's configuration in texts of --model-config."""
    return dict(made(ShardingOptions, model_config=tuple(texts)).model_config)
