"""Checks of the arguments of public functions against their annotations."""

from __future__ import annotations

import difflib
import functools
import inspect
import math
import numbers
import os
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Annotated, Any, TypeVar

# Annotated: a number with its minimum, and optionally its maximum; or a value with its description.
Count = Annotated[int, 1]
Size = Annotated[int, 0]
Seed = Annotated[int, 0, 2**31 - 1]
Share = Annotated[float, 0, 1]
Amount = Annotated[float, 0]
PathLike = str | os.PathLike[str]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ` (did you mean 'full_shard'?)` with the closest known name; empty if none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


Public = TypeVar("Public", bound=Callable[..., Any])

_UNIONS = (typing.Union, types.UnionType)
_PLAIN = (str, bytes, int, float, complex, type(None))
_DESCRIPTIONS: dict[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "True or False",
    str: "text",
    type(None): "None",
    "PathLike": "a path",
    "Callable": "a function",
    "GradientTransformation": "an optax transformation, such as optax.adamw(3e-4)",
    "MixedPrecisionPolicy": "a MixedPrecisionPolicy, such as jfsdp.MixedPrecisionPolicy('bfloat16')",
    "Mesh": "a mesh of jfsdp.make_mesh",
    "TrainState": "a TrainState, as returned by model.init, jfsdp.checkpoint.restore or a step",
}


def checked(public: Public) -> Public:
    """Check the arguments of a function, or of a class's constructor and public methods, against their annotations.

    NumPy numbers and arrays without dims are numbers; bools and NaN are not. Lists and dicts are checked item by item.
    Arguments annotated by Any or a protocol, and `**extra`, are not checked.

    Raises:
      TypeError: for a value of a wrong type, naming the argument, its value and the allowed values; for an argument
        that is unknown, missing or one too many, naming it and the function's arguments.
      ValueError: for a number out of range, with the same facts.
    """
    if isinstance(public, type):
        for name, member in list(vars(public).items()):
            if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
                setattr(public, name, checked(member))
        return public  # pyright: ignore[reportReturnType]
    signature = inspect.signature(public)
    known = [name for name, x in signature.parameters.items() if x.kind != x.VAR_KEYWORD and name != "self"]
    hints = functools.cache(lambda: typing.get_type_hints(public, include_extras=True))
    function = public.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(public)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{function}: {error}; its arguments are {', '.join(known)}") from None
        for name in known:
            if name in given and (problem := find_problem(name, given[name], hints().get(name, Any))):
                raise type(problem)(f"{function}: {problem}")
        return public(*args, **kwargs)

    return typing.cast(Public, call)


def find_problem(name: str, value: Any, hint: Any) -> Exception | None:
    """Return the error of a value that does not match an annotation, or of its first such item; None if it matches.

    A number out of range is a ValueError, other errors are TypeErrors. Messages begin with `name`.
    """
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    wrong = functools.partial(_wrong, name, value, hint)
    if kind in _UNIONS:
        found = [find_problem(name, value, one) for one in inner]
        errors = [error for error in found if error is not None]
        if len(errors) < len(found):
            return None
        within = [error for error in errors if str(error).startswith(f"{name}[")]
        return within[0] if within else wrong(next((e for e in map(type, errors) if e is ValueError), TypeError))
    if kind is Annotated:
        least, most = (*hint.__metadata__, math.inf)[:2]
        if problem := find_problem(name, value, inner[0]):
            return wrong(type(problem))
        if isinstance(least, str):
            return None
        return None if is_traced(value) or least <= value <= most else wrong(ValueError)
    if not (inner and issubclass(kind, Collection)):
        is_nan = isinstance(value, numbers.Real) and value != value
        return None if _is(value, kind) else wrong(ValueError if kind is float and is_nan else TypeError)
    if kind is tuple and inner[-1] is not Ellipsis:
        if not isinstance(value, tuple) or len(value) != len(inner):
            return wrong(TypeError)
        return next(filter(None, (find_problem(f"{name}[{i}]", *one) for i, one in enumerate(zip(value, inner)))), None)
    if isinstance(value, Mapping) and issubclass(kind, Mapping):
        rule = f"a key must be {_describe(inner[0])}"
        keys = [TypeError(f"{name}[{key!r}]: {rule}") for key in value if find_problem("", key, inner[0])]
        values = (find_problem(f"{name}[{key!r}]", x, inner[1]) for key, x in value.items())
        return next(filter(None, (*keys, *values)), None)
    if issubclass(kind, Mapping) or isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return wrong(TypeError)
    return next(filter(None, (find_problem(f"{name}[{at}]", x, inner[0]) for at, x in enumerate(value))), None)


def _wrong(name: str, value: Any, hint: Any, error: type[Exception]) -> Exception:
    given = f"={value!r:.80}" if isinstance(value, _PLAIN) else f" (a {type(value).__name__})"
    if isinstance(value, type):
        given = f" (class {value.__name__})"
    return error(f"{name}{given} must be {_describe(hint)}")


def _is(value: Any, kind: Any) -> bool:
    is_bool = type(value).__name__ in ("bool", "bool_")  # bool_ is NumPy's
    if kind is bool:
        return is_bool
    if kind in (int, float):
        if hasattr(value, "dtype") and getattr(value, "ndim", None) == 0:
            is_number = getattr(value.dtype, "kind", "no") in ("iu" if kind is int else "iufV")  # V: bfloat16
            return is_number and (is_traced(value) or bool(value == value))
        is_number = isinstance(value, numbers.Integral if kind is int else numbers.Real)
        return is_number and not is_bool and value == value
    if kind is Any or not isinstance(kind, type) or getattr(kind, "_is_protocol", False):
        return True
    if kind.__name__.rpartition(".")[2] == "Array":  # JAX's: accepts anything with a shape
        return hasattr(value, "shape")
    if hasattr(kind, "_fields"):  # optax's: accepts anything with the same functions
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in kind._fields)
    return isinstance(value, kind)


def is_traced(value: Any) -> bool:
    """Return whether a value is a JAX tracer, whose number is not known."""
    return any(kind.__name__ == "Tracer" for kind in type(value).__mro__)


def _describe(hint: Any) -> str:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in _UNIONS:
        return " or ".join(dict.fromkeys(map(_describe, inner)))
    if kind is Annotated:
        least, *most = hint.__metadata__
        if isinstance(least, str):
            return least
        return f"{_describe(inner[0])}, {f'{least} to {most[0]}' if most else f'at least {least}'}"
    if kind is tuple and inner[-1] is not Ellipsis:
        return f"a tuple of {' and '.join(map(_describe, inner))}"
    if inner and issubclass(kind, Collection):
        of = "" if inner[0] is Any else f" of {_describe(inner[0])}"
        return "a dict" if issubclass(kind, Mapping) else f"a list{of}"
    name = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    return _DESCRIPTIONS.get(kind) or _DESCRIPTIONS.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def check_call(what: str, function: Any, *given: str, remedy: str = "") -> None:
    """Check that a user's function accepts the arguments that it will be called with.

    Raises:
      ValueError: naming these arguments.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # functions written in C may have no signature
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ValueError(
            f"{what} is called as f({', '.join(given)}), and takes other arguments: {error}{remedy}"
        ) from None


def ask(what: str, predicate: Callable[..., Any], **given: Any) -> bool:
    """Return the result of a user's predicate.

    Raises:
      ValueError: if it takes other arguments.
      TypeError: if it returns neither True nor False.
    """
    check_call(what, predicate, *given)
    answer = predicate(*given.values())
    if not _is(answer, bool):
        raise TypeError(f"{what} returned {answer!r:.80} for {next(iter(given.values()))!r}; return True or False")
    return bool(answer)
