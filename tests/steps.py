"""Models all of whose steps run as one program, for tests that are about both."""

import functools
from typing import Any

from tests import sharding


def fully_shard(model: Any, *, program: str | None = None, prefetch: Any = None, **options: Any) -> Any:
    """Shard a model as `tests.sharding` does; its steps have this program and prefetch unless they say others."""
    sharded: Any = sharding.fully_shard(model, **options)
    for name in ("train_step", "grads"):
        setattr(sharded, name, functools.partial(getattr(sharded, name), program=program, prefetch=prefetch))
    return sharded
