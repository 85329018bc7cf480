"""Units: which leaves are gathered and freed together.

A unit is one module, named by its path. The root unit, whose name is the empty path, owns all leaves that no other unit
owns. A leaf in two nested units belongs to the inner one. This package knows modules only as `ModuleInfo`: path, class
and leaves.

[Note: shared leaves]
A leaf may be reached by several paths: a module with two parents, or a weight tied between two modules. A unit gathers
its leaves around its own calls, so it can own only leaves whose paths *all* go through it. A shared module that is a
unit is one unit: it is gathered for each call, from any parent. A leaf that two units share belongs to the innermost
unit around both, mostly the root, and the leaf's reason mentions this.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Generic

from jfsdp.arguments import Count, Size, ask, checked

ROOT = ""


@dataclasses.dataclass(frozen=True)
class ModuleInfo:
    """One module of a model; see [Note: shared leaves].

    Attributes:
      path: its dotted path: the first of several.
      leaves: the names of the leaves whose paths all go through it.
      shared: the names of the leaves that it reaches and that are also reached without it.
    """

    path: str
    cls: type
    leaves: tuple[str, ...]
    shared: tuple[str, ...] = ()


@checked
@dataclasses.dataclass(frozen=True)
class Unit:
    """A selection of modules that become units.

    Attributes:
      match: a module class; a glob over dotted paths (`layers.*`, `*` stays within one name); or a predicate
        `f(path, cls, num_parameters) -> bool`, called for modules with a `__call__`, inner ones first.
      stacked: how many leading dims of the leaves are layer dims of a scan. None: guessed from the shapes (all leaves
        share their first dim, and one has three dims or more), and checked when the model is traced.
    """

    match: Any
    stacked: Size | None = None


@dataclasses.dataclass(frozen=True)
class UnitInfo:
    """A unit in a layout.

    Attributes:
      name, cls: its module's path and class name.
      stacked: how many leading dims of its leaves are layer dims.
      leaves: the leaves that it owns.
      shared: its leaves that units inside it share, each with the names of these units.
      is_guessed: whether layer dims were guessed from shapes and not declared; `explain` shows it.
    """

    name: str
    cls: str
    stacked: int
    leaves: tuple[str, ...]
    shared: tuple[tuple[str, tuple[str, ...]], ...] = ()
    is_guessed: bool = dataclasses.field(default=False, compare=False)


def list_modules(
    classes: Mapping[str, type], leaves: Sequence[str], entries: Mapping[str, Sequence[str]]
) -> list[ModuleInfo]:
    """List a model's modules with their leaves, owned and shared.

    Args:
      classes: by dotted path, the root first.
      leaves: names of the parameters.
      entries: by module or leaf with several paths, the paths of the modules (or containers) that lead to it, in
        addition to the one in its name.
    """
    nodes = {ROOT}
    for name in (*classes, *leaves, *(path for paths in entries.values() for path in paths)):
        while name not in nodes:
            nodes.add(name)
            name = name.rpartition(".")[0]
    every: dict[str, frozenset[str]] = {ROOT: frozenset({ROOT})}  # the nodes on all paths to a node
    some, before = dict(every), None  # the nodes on some path
    while before != (every, some):  # paths may be cyclic
        before = dict(every), dict(some)
        for name in sorted(nodes - {ROOT}, key=_depth):
            above = [path for path in (name.rpartition(".")[0], *entries.get(name, ())) if path in every]
            every[name] = frozenset.intersection(*(every[path] for path in above)) | {name}
            some[name] = frozenset.union(*(some[path] for path in above)) | {name}
    owned = {path: tuple(leaf for leaf in leaves if path in every[leaf]) for path in classes}
    used = {path: tuple(leaf for leaf in leaves if path in some[leaf] and path not in every[leaf]) for path in classes}
    return [ModuleInfo(path, cls, owned[path], used[path]) for path, cls in classes.items()]


@checked
def by_size(min_parameters: Count) -> Callable[[str, type, int], bool]:
    """Make a unit of every module with at least `min_parameters` parameters outside inner units.

    Source: `size_based_auto_wrap_policy` of PyTorch FSDP.
    """

    def is_large(path: str, cls: type, num_parameters: int) -> bool:
        del path, cls
        return num_parameters >= min_parameters

    return is_large


@checked
def resolve_units(
    units: Any, modules: Sequence[ModuleInfo], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, UnitInfo]:
    """Match unit selections against a model's modules, and assign every leaf to a unit.

    Args:
      units: a list of `Unit`s, of dicts of their fields, or of values for `Unit.match`; or a single one of these.
      modules: all modules of the model, the root first.
      shapes: logical shapes by leaf name.

    Returns:
      Units by name, the root first; every leaf is in exactly one.

    Raises:
      TypeError: for a selection that is a module instance or of another type.
      ValueError: if a selection matches no module; if two selections match one module; for more layer dims than a leaf
        has.
    """
    if isinstance(units, (str, Unit, Mapping)) or callable(units):
        units = [units]
    if not isinstance(units, (list, tuple, set, frozenset)):
        raise TypeError(f"units={units!r} is neither a list of module classes, globs, predicates and Units, nor one")
    chosen = _match_all([_as_unit(unit) for unit in units], modules, shapes)
    by_path = {module.path: module for module in modules}
    owners = {leaf: _owner(leaf, [by_path[path] for path in chosen]) for leaf in shapes}
    shared = _shared(owners, [by_path[path] for path in chosen])
    resolved = {}
    for path in [ROOT, *(path for path in chosen if path != ROOT)]:
        leaves = tuple(leaf for leaf in shapes if owners[leaf] == path)
        given = chosen[path].stacked if path in chosen else 0
        if few := [leaf for leaf in leaves if len(shapes[leaf]) < (given or 0)]:
            raise ValueError(f"{few[0]}: shape {shapes[few[0]]} has no {given} layer dims; lower stacked={given}")
        guess = _guess_stacked([shapes[leaf] for leaf in leaves]) if given is None and path != ROOT else 0
        own = tuple((leaf, shared[leaf]) for leaf in leaves if leaf in shared)
        resolved[path] = UnitInfo(path, by_path[path].cls.__name__, given or guess, leaves, own, guess > 0)
    return resolved


def with_added_leaves(unit: UnitInfo, added: Iterable[str]) -> UnitInfo:
    """Return a unit with the leaves of `added` that are named after one of the unit's, such as `kernel.lora_a`."""
    names = [name for name in added if name.rpartition(".")[0] in unit.leaves]
    return dataclasses.replace(unit, leaves=(*unit.leaves, *names))


def _as_unit(unit: Any) -> Unit:
    return unit if isinstance(unit, Unit) else Unit(**unit) if isinstance(unit, Mapping) else Unit(unit)


def _match_all(
    units: Sequence[Unit], modules: Sequence[ModuleInfo], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, Unit]:
    """Return the selected unit of each matched module path, in the order of the modules."""
    matched: dict[str, Unit] = {}
    for unit in units:
        paths = _match(unit, modules, shapes)
        if not paths:
            raise ValueError(_nothing_matches(unit.match, modules))
        for path in paths:
            if path in matched:
                raise ValueError(
                    f"{path or '(root)'}: units {describe(matched[path].match)} and {describe(unit.match)} "
                    "both claim this module and its leaves; remove one of them"
                )
            matched[path] = unit
    return {module.path: matched[module.path] for module in modules if module.path in matched}


def _match(unit: Unit, modules: Sequence[ModuleInfo], shapes: Mapping[str, tuple[int, ...]]) -> list[str]:
    match: Any = unit.match
    if isinstance(match, type):
        return [module.path for module in modules if issubclass(module.cls, match)]
    if isinstance(match, str):
        return [module.path for module in modules if matches_glob(match, module.path)]
    is_method = getattr(match, "__name__", "") == "__call__"
    if is_method or _is_module(match, modules):  # these are callable too, but are not predicates
        name = match.__qualname__.split(".")[-2] if is_method else type(match).__name__
        raise TypeError(
            f"unit {f'{name}.__call__ is a method' if is_method else f'{name}(...) is a module'}; pass the class: "
            f"units=[{name}], or a path glob for some modules of that class"
        )
    if callable(match):
        return _match_predicate(match, modules, shapes)  # type: ignore[arg-type]
    raise TypeError(f"unit {match!r} is neither a module class, a path glob, nor a predicate f(path, cls, size)")


def _is_module(value: Any, modules: Sequence[ModuleInfo]) -> bool:
    """Tell by common base classes whether a value is a module like those of the model."""
    return bool(set(type(value).__mro__) & set(modules[0].cls.__mro__) - {object, Generic})


def _has_call(cls: type) -> bool:
    return any("__call__" in vars(base) for base in cls.__mro__)


def _match_predicate(
    predicate: Callable[..., bool], modules: Sequence[ModuleInfo], shapes: Mapping[str, tuple[int, ...]]
) -> list[str]:
    """Call the predicate for children before parents; parents do not count parameters of selected children."""
    claimed: set[str] = set()
    paths = []
    for module in sorted(modules, key=lambda m: -_depth(m.path)):
        free = [leaf for leaf in module.leaves if leaf not in claimed]
        size = sum(math.prod(shapes[leaf]) for leaf in free)
        if module.path == ROOT or not free or not _has_call(module.cls):
            continue
        if ask(f"unit {describe(predicate)}", predicate, path=module.path, cls=module.cls, num_parameters=size):
            claimed.update(free)
            paths.append(module.path)
    return paths


def _depth(path: str) -> int:
    return len(path.split(".")) if path else 0


def matches_glob(pattern: str, path: str) -> bool:
    """Match a dotted path name by name: `*` matches within one name, `**` any number of names.

    So `layers.*` does not match inside a layer, and `layers.**` does.
    """
    return _matches(pattern.split("."), path.split("."))


def _matches(patterns: Sequence[str], names: Sequence[str]) -> bool:
    if not patterns:
        return not names
    if patterns[0] == "**":
        return any(_matches(patterns[1:], names[skipped:]) for skipped in range(len(names) + 1))
    return bool(names) and fnmatch.fnmatchcase(names[0], patterns[0]) and _matches(patterns[1:], names[1:])


def _owner(leaf: str, units: Sequence[ModuleInfo]) -> str:
    return max((unit.path for unit in units if leaf in unit.leaves), key=_depth, default=ROOT)


def _shared(owners: Mapping[str, str], units: Sequence[ModuleInfo]) -> dict[str, tuple[str, ...]]:
    """Return the units that use a leaf but cannot own it, for leaves that are named after one of them."""
    pairs = [(leaf, unit.path) for unit in units for leaf in unit.shared if is_within(unit.path, owners[leaf])]
    by_name = {leaf for leaf, path in pairs if is_within(leaf, path)}
    return {leaf: tuple(path for other, path in pairs if other == leaf) for leaf in by_name}


def is_within(path: str, ancestor: str) -> bool:
    """Tell whether a dotted path is another one or below it."""
    return ancestor == ROOT or path == ancestor or path.startswith(ancestor + ".")


def _guess_stacked(shapes: Sequence[tuple[int, ...]]) -> int:
    """Treat leaves that share their first dim as a stack of layers, if some have three dims or more.

    Matrices are not sufficient: those of an attention without biases all share the model's dim. A wrong guess of a
    stack keeps that dim from being split and compares `min_size` without it; a missed stack is an error when the model
    is traced.
    """
    same = len({shape[0] if shape else None for shape in shapes}) == 1
    ranks = sorted(map(len, shapes))
    return int(len(shapes) > 1 and same and ranks[0] >= 2 and ranks[-1] >= 3)


def describe(choice: Any) -> str:
    """Return a glob, a class or a function as text, without its address, which differs between processes."""
    return getattr(choice, "__name__", None) or re.sub(r" at 0x[0-9a-f]+", "", repr(choice))


def _nothing_matches(match: Any, modules: Sequence[ModuleInfo]) -> str:
    classes = sorted({module.cls.__name__ for module in modules})
    paths = sorted((module.path for module in modules if module.path), key=_depth)
    shown = ", ".join(paths[:12]) + (f", ... ({len(paths)} in all)" if len(paths) > 12 else "")
    if match in classes:
        return f"unit {match!r} is the name of a class; pass the class itself, units=[{match}], or a path glob: {shown}"
    return f"unit {describe(match)} matches no module; classes: {', '.join(classes)}; paths: {shown}"
