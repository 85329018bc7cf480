"""Whether an attention function treats all heads alike, from its trace with another number of heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import jax

from jfsdp.jaxprs import all_eqns, describe

_DIVISIBLE = 12  # heads may be split into halves or thirds
_PRIMES = (61, 67, 71, 73, 79, 83, 89, 97)
# Operations that combine elements along a dim, by the parameter that names it.
_ALONG = {"cumsum": "axis", "cumprod": "axis", "cummax": "axis", "cummin": "axis", "cumlogsumexp": "axis"}
_ALONG |= {"sort": "dimension", "concatenate": "dimension", "iota": "dimension", "rev": "dimensions"}


def check_heads(attend: Callable[..., Any], arrays: Sequence[Any], rows: Sequence[Any]) -> None:
    """Check that a function of query, key, value and rows numbers, combines and selects no heads.

    It is traced with a number of heads that has a prime factor of no other dim. So a dim with this factor has heads. A
    function that cannot be traced with that number is not checked.

    Raises:
      ValueError: naming the operation.
    """
    rest = [size for x in arrays for size in (*x.shape[:2], *x.shape[3:])]
    rest += [size for x in jax.tree.leaves(rows) for size in x.shape]
    num = next((prime for prime in _PRIMES if all(size % prime for size in rest)), None)
    if num is None:
        return
    ratio = arrays[0].shape[2] // arrays[1].shape[2]
    shapes = [
        jax.ShapeDtypeStruct((*x.shape[:2], _DIVISIBLE * num * times, *x.shape[3:]), x.dtype)
        for x, times in zip(arrays, (ratio, 1, 1), strict=True)
    ]
    try:
        jaxpr = jax.make_jaxpr(attend)(
            *shapes, *jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), rows)
        ).jaxpr
    except Exception:  # of any kind: it is the user's function
        return
    if any(size % num == 0 for var in jaxpr.constvars for size in getattr(var.aval, "shape", ())):
        _refuse("an array that the function makes itself")
    for eqn in all_eqns(jaxpr):
        if _uses_heads(eqn, num):
            _refuse(describe(eqn))


def _refuse(what: str) -> NoReturn:
    raise ValueError(
        f"jfsdp.over_context: {what} numbers, combines or selects heads, but the function sees only the heads of one "
        "device; make values per head a part of query, key or value before the call, combine heads after it, and "
        "compute a head by jax.vmap"
    )


def _uses_heads(eqn: Any, num: int) -> bool:
    name, params = eqn.primitive.name, eqn.params
    shapes: list[Any] = [getattr(atoms[0].aval, "shape", ()) if atoms else () for atoms in (eqn.invars, eqn.outvars)]
    old, new = shapes
    if name.startswith(("reduce_", "arg")) and "axes" in params:
        return any(old[axis] % num == 0 for axis in params["axes"])
    if name in _ALONG:
        dims = params[_ALONG[name]]
        return any(new[dim] % num == 0 for dim in (dims if isinstance(dims, tuple) else (dims,)))
    if name == "dot_general":
        return any(old[dim] % num == 0 for dim in params["dimension_numbers"][0][0])
    if name == "random_bits":
        return any(size % num == 0 for size in new)
    if name == "gather":
        batched, sizes = params["dimension_numbers"].operand_batching_dims, params["slice_sizes"]
        return any(old[dim] % num == 0 != sizes[dim] % num for dim in range(len(old)) if dim not in batched)
    if name in ("slice", "split", "pad", "dynamic_slice"):
        return any(one != other and 0 in (one % num, other % num) for one, other in zip(old, new, strict=False))
    return False
