"""Dependencies of a jaxpr's outputs on its inputs, through calls, loops and branches."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax.numpy as jnp

from jfsdp.compat import Literal, manual_axes, source_line

_CALLS = ("jaxpr", "call_jaxpr", "fun_jaxpr")
_CUTS = ("slice", "dynamic_slice", "squeeze")
_LOOPS = ("scan", "while", "cond")
_FLAT = ("stop_gradient", "floor", "ceil", "round", "sign")  # operations with derivative 0


def cuts(eqn: Any) -> bool:
    """Tell whether an operation takes a part of its first operand without changing any value."""
    return eqn.primitive.name in _CUTS


def _cuts_nothing(eqn: Any) -> bool:
    return False


def carries_tangents(eqn: Any, var: Any) -> bool:
    """Tell whether an output of an operation may have a derivative; for argument `carries` of `depends_on`."""
    return eqn.primitive.name not in _FLAT and jnp.issubdtype(getattr(var.aval, "dtype", bool), jnp.inexact)


def depends_on(
    jaxpr: Any,
    marked: Sequence[bool],
    visit: Callable[[Any], Any] | None = None,
    carries: Callable[[Any, Any], bool] = lambda eqn, var: True,
) -> list[bool]:
    """Tell for each output whether it depends on a marked input.

    Calls (jit, checkpoint, custom derivatives) are followed to each output; loops are followed through their
    carries to a fixed point; an output of `cond` also depends on its predicate; an output of a barrier is its input;
    every output of any other equation depends on all its inputs.

    Args:
      visit: called with every equation that a marked input reaches, perhaps several times.
      carries: tells whether an output of an equation may depend on marked inputs.
    """
    follow = functools.partial(depends_on, visit=visit, carries=carries)
    reached = {var for var, mark in zip(jaxpr.invars, marked, strict=True) if mark}

    def is_reached(atom: Any) -> bool:
        return not is_literal(atom) and atom in reached

    for eqn in jaxpr.eqns:
        marks = [is_reached(atom) for atom in eqn.invars]
        if visit is not None and any(marks):
            visit(eqn)
        outs = _eqn_depends_on(eqn, marks, follow)
        reached.update(var for var, mark in zip(eqn.outvars, outs, strict=True) if mark and carries(eqn, var))
    return [is_reached(atom) for atom in jaxpr.outvars]


def passes_through(jaxpr: Any, is_cut: Callable[[Any], bool] = _cuts_nothing) -> list[int | None]:
    """Return for each output the input that it equals, looking through calls; None if it is a new value.

    Args:
      is_cut: see `reads`.
    """
    origin: dict[Any, int] = {var: index for index, var in enumerate(jaxpr.invars)}
    for eqn in jaxpr.eqns:
        for var, index in zip(eqn.outvars, _unchanged(eqn, is_cut), strict=True):
            atom = None if index is None else eqn.invars[index]
            if atom is not None and not is_literal(atom) and atom in origin:
                origin[var] = origin[atom]
    return [None if is_literal(atom) else origin.get(atom) for atom in jaxpr.outvars]


def _unchanged(eqn: Any, is_cut: Callable[[Any], bool]) -> list[int | None]:
    """Return for each output of an equation the index of the input that it equals or is a slice of."""
    if eqn.primitive.name == "optimization_barrier":
        return list(range(len(eqn.outvars)))
    if is_cut(eqn):
        return [0]
    inner = _called(eqn)
    if inner is not None and eqn.primitive.name == "scan":
        return _scan_passes_through(eqn, inner, is_cut)
    if inner is not None and eqn.primitive.name != "while" and _is_call(inner, eqn):
        return passes_through(inner, is_cut)
    return [None] * len(eqn.outvars)


def reads(
    jaxpr: Any,
    marked: Sequence[bool],
    is_cut: Callable[[Any], bool] = _cuts_nothing,
    is_one: Callable[[Any], bool] = lambda eqn: False,
) -> Iterator[tuple[int, Any]]:
    """Yield every operation that reads a marked input, and the input's index; calls, loops and branches are followed.

    Args:
      is_cut: tells whether an operation only slices its input. It is not a read; operations on the slice are.
      is_one: tells whether an operation with a body counts as one read of its inputs, without following the body.
    """
    origin = {var: place for place, (var, mark) in enumerate(zip(jaxpr.invars, marked, strict=True)) if mark}
    for eqn in jaxpr.eqns:
        places = [None if is_literal(atom) else origin.get(atom) for atom in eqn.invars]
        if all(place is None for place in places):
            continue
        bodies = [] if is_one(eqn) else list(_bodies(eqn))
        for inner, inputs in bodies:
            inside = [places[index] for index in inputs]
            for index, reader in reads(inner, [place is not None for place in inside], is_cut, is_one):
                yield inside[index], reader  # type: ignore[misc]
            if is_cut is not _cuts_nothing and eqn.primitive.name in _LOOPS:  # slices that leave it are not followed
                pairs = zip(passes_through(inner, is_cut), passes_through(inner), strict=True)
                left = (inside[cut] for cut, whole in pairs if cut is not None and whole is None)
                yield from ((place, eqn) for place in left if place is not None)
        if not bodies and eqn.primitive.name != "optimization_barrier" and not is_cut(eqn):
            yield from ((place, eqn) for place in places if place is not None)
        for var, index in zip(eqn.outvars, _unchanged(eqn, is_cut), strict=True):
            if index is not None and places[index] is not None:
                origin[var] = places[index]  # type: ignore[assignment]


def _bodies(eqn: Any) -> Iterator[tuple[Any, Sequence[int]]]:
    """Yield each jaxpr that an equation runs, with the indices of its inputs among the equation's inputs."""
    num = len(eqn.invars)
    if eqn.primitive.name == "while":
        cond, both = eqn.params["cond_nconsts"], eqn.params["cond_nconsts"] + eqn.params["body_nconsts"]
        yield _open(eqn.params["cond_jaxpr"]), [*range(cond), *range(both, num)]
        yield _open(eqn.params["body_jaxpr"]), range(cond, num)
    elif eqn.primitive.name == "cond":
        yield from ((_open(branch), range(1, num)) for branch in eqn.params["branches"])
    else:
        inner = _called(eqn)
        if inner is not None and len(inner.invars) == num:
            yield inner, range(num)


def _scan_passes_through(eqn: Any, body: Any, is_cut: Callable[[Any], bool]) -> list[int | None]:
    """Return which outputs of a scan are inputs: a carry that the body returns unchanged, ys that are rows of xs."""
    num_consts, num_carry = scan_counts(eqn)
    found = passes_through(body, is_cut)
    carry = [index if index == num_consts + place else None for place, index in enumerate(found[:num_carry])]
    is_xs = (index is not None and index >= num_consts + num_carry for index in found[num_carry:])
    return carry + [index if mark else None for index, mark in zip(found[num_carry:], is_xs, strict=True)]


def keep_outputs(jaxpr: Any, wanted: Sequence[bool]) -> Any:
    """Reduce a jaxpr to the equations that the wanted outputs need; other effects are dropped."""
    outvars = [atom for atom, keep in zip(jaxpr.outvars, wanted, strict=True) if keep]
    needed = {atom for atom in outvars if not is_literal(atom)}
    eqns = []
    for eqn in reversed(jaxpr.eqns):
        if needed.intersection(eqn.outvars):
            eqns.append(eqn)
            needed.update(atom for atom in eqn.invars if not is_literal(atom))
    return jaxpr.replace(eqns=eqns[::-1], outvars=outvars)


_SAME_VALUE = ("convert_element_type", "transpose", "reshape", "squeeze", "copy", "optimization_barrier")


def num_readers(jaxpr: Any, is_one: Callable[[Any], bool] | None = None, but: str = "") -> list[int]:
    """Count for each input the operations that read it, looking through calls, casts and reshapes.

    Args:
      is_one: tells whether an equation counts as one reader, without following it. None: all equations except calls.
      but: prefix of the names of calls that are not followed either; "": none.
    """
    readers: dict[Any, int] = {}
    for atom in jaxpr.outvars:
        if not is_literal(atom) and is_one is None:
            readers[atom] = readers.get(atom, 0) + 1
    for eqn in reversed(jaxpr.eqns):
        inner = _called(eqn)
        if eqn.primitive.name in _SAME_VALUE:
            counts = [readers.get(var, 0) for var in eqn.outvars]
        elif is_one and is_one(eqn):
            counts = [1] * len(eqn.invars)
        elif but and str(eqn.params.get("name", "")).startswith(but):
            counts = [0] * len(eqn.invars)
        elif inner is not None and eqn.primitive.name not in ("scan", "while") and _is_call(inner, eqn):
            counts = num_readers(inner, is_one, but)
        else:
            counts = [int(is_one is None)] * len(eqn.invars)
        for atom, count in zip(eqn.invars, counts, strict=False):
            if not is_literal(atom):
                readers[atom] = readers.get(atom, 0) + count
    return [readers.get(var, 0) for var in jaxpr.invars]


def has_own_derivative(eqn: Any) -> bool:
    """Tell whether an equation calls a function with a custom reverse derivative (`jax.custom_vjp`)."""
    return eqn.primitive.name.startswith("custom_vjp_call")


def stated_axes(jaxpr: Any, but: str) -> list[frozenset[str]]:
    """Return the mesh axes of each sharding that an operation states, except operations with `but` in their names.

    A sharding without axes is an empty set; a sharding without a spec is {"?"}.
    """
    found = (eqn for eqn in all_eqns(jaxpr) if but not in str(eqn.source_info.name_stack))
    return [axes for axes in map(_stated_by, found) if axes is not None]


def _stated_by(eqn: Any) -> frozenset[str] | None:
    if eqn.primitive.name == "shard_map":
        return manual_axes(eqn)
    if eqn.primitive.name != "sharding_constraint":
        return None
    spec = getattr(eqn.params["sharding"], "spec", None)
    if spec is None:
        return frozenset("?")
    entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
    return frozenset(axis for axes in entries for axis in axes if isinstance(axis, str))


def is_in_condition(jaxpr: Any, name: str) -> bool:
    """Tell whether an operation with `name` in its name is inside a branch or a while loop."""
    conditional = (eqn for eqn in all_eqns(jaxpr) if eqn.primitive.name in ("cond", "while"))
    inside = (inner for eqn in conditional for body in inner_jaxprs(eqn) for inner in all_eqns(body))
    return any(name in str(eqn.source_info.name_stack) for eqn in inside)


# Known operations with a body: followed, with scalar bodies, or kernels that are treated as one operation.
_CALLED = ("jit", "pjit", "closed_call", "core_call", "checkpoint", "remat", "remat2", "shard_map", "composite")
_DERIVED = ("custom_jvp_call", "custom_vjp_call", "custom_vjp_call_jaxpr", "custom_lin", "linear_call")
_TAKEN = ("custom_linear_solve", "custom_root", "custom_partitioning", "pallas_call", "run_scoped", "run_state")
_SCALARS = ("reduce", "reduce_window", "select_and_scatter", "select_and_scatter_add", "scatter", "sort")
_SCATTERS = tuple(f"scatter{sign}{kind}" for sign in "-_" for kind in ("add", "sub", "mul", "min", "max"))
_READ = {*_LOOPS, *_CALLED, *_DERIVED, *_TAKEN, *_SCALARS, *_SCATTERS}


def unread(jaxpr: Any) -> list[str]:
    """Return the operations with a body that are unknown here, so that effects in them may be missed."""
    names = {eqn.primitive.name for eqn in all_eqns(jaxpr) if inner_jaxprs(eqn)}
    return sorted(names - _READ)


_DRAWS = ("random_bits", "random_gamma", "threefry2x32", "rng_bit_generator", "rng_uniform")


def draws(eqn: Any) -> bool:
    """Tell whether an operation draws random bits from a key."""
    return eqn.primitive.name in _DRAWS


_CALLBACKS = ("debug_callback", "debug_print", "io_callback")


def calls_back(eqn: Any) -> bool:
    """Tell whether an operation calls Python for a side effect (such as printing), not only for a value."""
    return eqn.primitive.name in _CALLBACKS


def value_names(jaxpr: Any) -> set[str]:
    """Return the names that `checkpoint_name` gave to values, also in calls, loops and branches."""
    return {eqn.params["name"] for eqn in all_eqns(jaxpr) if eqn.primitive.name == "name"}


def describe(eqn: Any) -> str:
    """Return the name of an operation, and the user's line that made it."""
    return " ".join(filter(None, (eqn.primitive.name, source_line(eqn))))


def all_eqns(jaxpr: Any) -> Iterator[Any]:
    """Yield the equations of a jaxpr and of the jaxprs in its calls, loops and branches."""
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in inner_jaxprs(eqn):
            yield from all_eqns(inner)


def is_literal(atom: Any) -> bool:
    """Tell whether an atom of a jaxpr is a literal, not a variable."""
    return isinstance(atom, Literal)


def inner_jaxprs(eqn: Any) -> list[Any]:
    """Return the jaxprs among an equation's parameters."""
    found = []
    for param in eqn.params.values():
        parts = param if isinstance(param, (tuple, list)) else (param,)
        found += [inner for inner in map(_open, parts) if hasattr(inner, "eqns")]
    return found


def scan_counts(eqn: Any) -> tuple[int, int]:
    """Return the number of constants and of carried values of a scan.

    They are counted by type: both have the same type outside and inside the body, while xs and ys lose a dim. The
    equation's own counts have different names in different JAX versions.
    """
    body = _open(eqn.params["jaxpr"])
    num_carry = _num_same(eqn.outvars, body.outvars)
    return _num_same(eqn.invars, body.invars) - num_carry, num_carry


def _eqn_depends_on(eqn: Any, marked: list[bool], follow: Any) -> list[bool]:
    if not any(marked):
        return [False] * len(eqn.outvars)
    name = eqn.primitive.name
    if name == "optimization_barrier":
        return marked
    if name == "scan":
        return _scan_depends_on(eqn, marked, follow)
    inner = _called(eqn)
    if name != "while" and inner is not None and _is_call(inner, eqn):
        return follow(inner, marked)
    if name == "cond" and not marked[0]:
        branches = [follow(_open(branch), marked[1:]) for branch in eqn.params["branches"]]
        return [any(marks) for marks in zip(*branches, strict=True)]
    return [True] * len(eqn.outvars)


def _scan_depends_on(eqn: Any, marked: list[bool], follow: Any) -> list[bool]:
    """Follow a scan to a fixed point of its carry."""
    body = _open(eqn.params["jaxpr"])
    num_consts, num_carry = scan_counts(eqn)
    carry = marked[num_consts : num_consts + num_carry]
    while True:
        outs = follow(body, [*marked[:num_consts], *carry, *marked[num_consts + num_carry :]])
        new = [old or out for old, out in zip(carry, outs[:num_carry], strict=True)]
        if new == carry:
            return [*new, *outs[num_carry:]]
        carry = new


def _num_same(outside: Sequence[Any], inside: Sequence[Any]) -> int:
    return sum(a.aval.shape == b.aval.shape for a, b in zip(outside, inside, strict=True))


def _called(eqn: Any) -> Any:
    """Return the jaxpr that a call or a scan runs; None for any other equation."""
    return next((_open(eqn.params[key]) for key in _CALLS if key in eqn.params), None)


def _is_call(inner: Any, eqn: Any) -> bool:
    return len(inner.invars) == len(eqn.invars) and len(inner.outvars) == len(eqn.outvars)


def _open(jaxpr: Any) -> Any:
    return getattr(jaxpr, "jaxpr", jaxpr)
