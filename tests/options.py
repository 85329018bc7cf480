"""Options as a command line writes them: their texts are read as there."""

import dataclasses
from typing import Any

from jfsdp.trainer.options import ShardingOptions
from jfsdp.trainer.parse import read_fields


def made(kind: Any, **texts: Any) -> Any:
    """Make options of a kind."""
    return kind(**read_fields(kind, texts))


def changed(options: Any, **texts: Any) -> Any:
    """Return options with other values of some."""
    return dataclasses.replace(options, **read_fields(type(options), texts))


def config_of(texts: Any) -> dict[str, Any]:
    """Return the fields of a model's configuration that --model-config gives."""
    return dict(made(ShardingOptions, model_config=tuple(texts)).model_config)
