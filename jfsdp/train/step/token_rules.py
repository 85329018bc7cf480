"""Why a loss over rows that axis `context` splits may differ from the loss over whole rows, from its trace."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp

from jfsdp.context.rows import SCOPE
from jfsdp.jaxprs import all_eqns, describe, inner_jaxprs

# Operations that combine elements along a dim, or cut it.
_MIX = ("conv_general_dilated", "cumsum", "cummax", "cumprod", "cumlogsumexp", "reduce_window", "sort", "fft", "rev")
CHECK = "jfsdp.check"  # in the names of operations of `check_loss` itself
_MOVES = ("all_to_all", "all_gather")
_CUT = ("slice", "concatenate", "pad")


def broken_rule(jaxpr: Any, num_tokens: int) -> str:
    """Describe an operation that may break a rule for models over split rows; the rules themselves if none is found.

    Args:
      jaxpr: the trace of the loss of one device's tokens.
      num_tokens: of a row, on one device.
    """
    if not context_bytes(jaxpr):
        return (
            "no attention is jfsdp.attention or in jfsdp.over_context, so no token sees those of other devices; call "
            "one, or give the devices of the axis to 'fsdp' if tokens are independent"
        )
    eqns = ((eqn, str(eqn.source_info.name_stack)) for eqn in all_eqns(jaxpr))
    own = [eqn for eqn, name in eqns if SCOPE not in name and CHECK not in name]
    for eqn in own:
        if eqn.primitive.name == "iota" and eqn.params["shape"][eqn.params["dimension"]] == num_tokens:
            return (
                f"{describe(eqn)} may number the tokens of one device; take positions from jfsdp.positions, and if it "
                "belongs to a mask of attention, call jfsdp.attention or jfsdp.over_context"
            )
    for combines in (_combines, _cuts):
        for eqn in own:
            if combines(eqn, num_tokens):
                return (
                    f"{describe(eqn)} may combine the tokens of one device only; compute it in the batch, or on "
                    "jfsdp.whole_rows(x), and continue with [:, jfsdp.positions(x)[0]] of the result"
                )
    return (
        "all attention must be jfsdp.attention or in jfsdp.over_context, positions must come from jfsdp.positions, "
        "values per row [B] must count for one token of the row, and all else must be per token"
    )


def context_bytes(jaxpr: Any) -> int:
    """Return the bytes of activations that a device receives over axis `context` in one run of a trace, and its own."""
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name in _MOVES and SCOPE in str(eqn.source_info.name_stack):
            floats = [var.aval for var in eqn.outvars if jnp.issubdtype(var.aval.dtype, jnp.inexact)]  # not segment ids
            total += sum(aval.size * aval.dtype.itemsize for aval in floats)
        times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        total += times * sum(map(context_bytes, inner_jaxprs(eqn)))
    return total


def _combines(eqn: Any, num_tokens: int) -> bool:
    return eqn.primitive.name in _MIX and any(num_tokens in getattr(atom.aval, "shape", ()) for atom in eqn.invars)


def _cuts(eqn: Any, num_tokens: int) -> bool:
    """Return whether an operation changes the number of tokens: a shift, for example."""
    if eqn.primitive.name not in _CUT:
        return False
    pairs = [(a.aval.shape, b.aval.shape) for a in eqn.invars for b in eqn.outvars]
    return any(num_tokens in (x, y) and x != y for old, new in pairs for x, y in zip(old, new, strict=False))
