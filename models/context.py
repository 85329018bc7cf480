"""How a model reaches tokens of a row that are on other devices, if mesh axis `context` splits rows."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .attention import document_positions


def row_positions(tokens: Any, segment_ids: jax.Array | None = None) -> jax.Array:
    """Return positions in rows, or in documents. Layout: tokens [B T] -> [1 T], with segment ids [B T] -> [B T]."""
    if segment_ids is not None:
        return document_positions(segment_ids)
    return jnp.arange(tokens.shape[1], dtype=jnp.int32)[None, :]


@dataclass(frozen=True)
class Context:
    """Functions for values of whole rows; the default is for rows that are on one device.

    Attributes:
      attention: attention of a device's tokens by gathered keys (`jfsdp.attention`); None: on one device.
      over_context: `f(attend)`, an attention function of whole rows as one of a device's tokens.
      positions: as `row_positions`, of a device's tokens.
      whole_rows: `f(x)`, the tokens of all devices. Layout: [B T/context ...] -> [B T ...].
    """

    attention: Callable[..., jax.Array] | None = None
    over_context: Callable[..., Any] = lambda attend: attend
    positions: Callable[..., jax.Array] = row_positions
    whole_rows: Callable[[Any], Any] = lambda x: x

    def row_length(self, tokens: Any) -> int:
        """Return the number of tokens of a whole row."""
        return jax.eval_shape(self.whole_rows, tokens).shape[1]


WHOLE = Context()
