"""What public functions take: their annotations, checked at the call, so that no wrong argument gets further."""

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

# A number with its least value, and perhaps its greatest.
Count = Annotated[int, 1]
Size = Annotated[int, 0]
Seed = Annotated[int, 0, 2**31 - 1]
Share = Annotated[float, 0, 1]
Amount = Annotated[float, 0]
PathLike = str | os.PathLike[str]


def did_you_mean(name: object, known: Iterable[str]) -> str:
    """Return ` (did you mean 'full_shard'?)` with the closest of known names; empty where none is close."""
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""


Public = TypeVar("Public", bound=Callable[..., Any])

_UNIONS = (typing.Union, types.UnionType)
_PLAIN = (str, bytes, int, float, complex, type(None))
_IN_WORDS: dict[Any, str] = {
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
    "TrainState": "a TrainState, as model.init, jfsdp.checkpoint.restore and a step return it",
}


def checked(public: Public) -> Public:
    """Check the arguments of a function, or of a class's constructor and public methods, against their annotations.

    No bool is a number, and neither is NaN; numbers of numpy are, and arrays without dims. Lists and dicts
    are checked item by item. What is annotated by Any or a protocol, and `**extra`, is left to the function.

    Raises:
      TypeError: for a value of a wrong type, naming the argument, the value, and what it must be; for an argument
        that is unknown, missing, or one too many, naming it, and those there are.
      ValueError: for a number out of range, likewise.
    """
    if isinstance(public, type):
        for name, member in list(vars(public).items()):
            if inspect.isfunction(member) and (name == "__init__" or not name.startswith("_")):
                setattr(public, name, checked(member))
        return public  # pyright: ignore[reportReturnType]
    signature = inspect.signature(public)
    known = [name for name, x in signature.parameters.items() if x.kind != x.VAR_KEYWORD and name != "self"]
    hints = functools.cache(lambda: typing.get_type_hints(public, include_extras=True))
    who = public.__qualname__.removesuffix(".__init__").rpartition(".")[2]

    @functools.wraps(public)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            given = signature.bind(*args, **kwargs).arguments
        except TypeError as error:
            raise TypeError(f"{who}: {error}; its arguments are {', '.join(known)}") from None
        for name in known:
            if name in given and (problem := find_problem(name, given[name], hints().get(name, Any))):
                raise type(problem)(f"{who}: {problem}")
        return public(*args, **kwargs)

    return typing.cast(Public, call)


def find_problem(name: str, value: Any, hint: Any) -> Exception | None:
    """Return the error of a value for an annotation, or of the first wrong one in it.

    It is a ValueError where only a range is wrong, else a TypeError. The texts of wrong values begin with `name`.
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
        return None if is_traced(value) or least <= value <= most else wrong(ValueError)
    if not (inner and issubclass(kind, Collection)):
        is_nan = isinstance(value, numbers.Real) and value != value
        return None if _is(value, kind) else wrong(ValueError if kind is float and is_nan else TypeError)
    if kind is tuple and inner[-1] is not Ellipsis:
        if not isinstance(value, tuple) or len(value) != len(inner):
            return wrong(TypeError)
        return next(
            filter(None, (find_problem(f"{name}[{at}]", *one) for at, one in enumerate(zip(value, inner)))), None
        )
    if isinstance(value, Mapping) and issubclass(kind, Mapping):
        words = f"a key must be {_in_words(inner[0])}"
        keys = [TypeError(f"{name}[{key!r}]: {words}") for key in value if find_problem("", key, inner[0])]
        values = (find_problem(f"{name}[{key!r}]", x, inner[1]) for key, x in value.items())
        return next(filter(None, (*keys, *values)), None)
    if issubclass(kind, Mapping) or isinstance(value, (str, bytes, Mapping)) or not isinstance(value, Collection):
        return wrong(TypeError)
    return next(filter(None, (find_problem(f"{name}[{at}]", x, inner[0]) for at, x in enumerate(value))), None)


def _wrong(name: str, value: Any, hint: Any, error: type[Exception]) -> Exception:
    given = f"={value!r:.80}" if isinstance(value, _PLAIN) else f" (a {type(value).__name__})"
    if isinstance(value, type):
        given = f" (class {value.__name__})"
    return error(f"{name}{given} must be {_in_words(hint)}")


def _is(value: Any, kind: Any) -> bool:
    is_bool = type(value).__name__ in ("bool", "bool_")  # the latter of numpy
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
    if kind.__name__.rpartition(".")[2] == "Array":  # of JAX: what has a shape will do
        return hasattr(value, "shape")
    if hasattr(kind, "_fields"):  # of optax: what has the same functions will do
        return not isinstance(value, type) and all(callable(getattr(value, name, None)) for name in kind._fields)
    return isinstance(value, kind)


def is_traced(value: Any) -> bool:
    """Tell a number that is not known yet: JAX's, inside a trace."""
    return any(kind.__name__ == "Tracer" for kind in type(value).__mro__)


def _in_words(hint: Any) -> str:
    kind, inner = typing.get_origin(hint) or hint, typing.get_args(hint)
    if kind in _UNIONS:
        return " or ".join(dict.fromkeys(map(_in_words, inner)))
    if kind is Annotated:
        least, *most = hint.__metadata__
        return f"{_in_words(inner[0])}, {f'{least} to {most[0]}' if most else f'at least {least}'}"
    if kind is tuple and inner[-1] is not Ellipsis:
        return f"a tuple of {' and '.join(map(_in_words, inner))}"
    if inner and issubclass(kind, Collection):
        of = "" if inner[0] is Any else f" of {_in_words(inner[0])}"
        return "a dict" if issubclass(kind, Mapping) else f"a list{of}"
    name = getattr(kind, "__name__", str(kind)).rpartition(".")[2]
    return _IN_WORDS.get(kind) or _IN_WORDS.get(name, f"{'an' if name[0] in 'AEIOU' else 'a'} {name}")


def check_call(what: str, function: Any, *given: str, remedy: str = "") -> None:
    """Refuse a function of the user's that does not take what it will be called with.

    Raises:
      ValueError: naming that.
    """
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):  # of what is written in C there may be none
        return
    try:
        signature.bind(*given)
    except TypeError as error:
        raise ValueError(
            f"{what} is called as f({', '.join(given)}), and takes something else: {error}{remedy}"
        ) from None


def ask(what: str, predicate: Callable[..., Any], **given: Any) -> bool:
    """Return what a predicate of the user's says.

    Raises:
      ValueError: if it takes something else.
      TypeError: if it says neither True nor False.
    """
    check_call(what, predicate, *given)
    answer = predicate(*given.values())
    if not _is(answer, bool):
        raise TypeError(f"{what} returned {answer!r:.80} for {next(iter(given.values()))!r}; return True or False")
    return bool(answer)
