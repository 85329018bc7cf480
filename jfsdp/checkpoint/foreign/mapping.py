"""Rules between a model's array names and another library's, usable in both directions.

[Note: rules of names]
A rule is `(ours, theirs)` or `(ours, theirs, dims)`: the model's name, the checkpoint's name and, if the arrays differ
in their dims, how (`dims.py`). A word in braces, such as `{i}`, matches a number in both names. If the model's layers
are stacked, the number is a leading dim and not part of the name: the rule `layers.{i}.norm.scale` also applies to a
leaf `layers.norm.scale` with a leading dim L. A number that is only in `theirs` is always a leading dim. The first rule
that matches a leaf applies.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.arguments import checked
from jfsdp.checkpoint.foreign.dims import Dims, parse_dims, same_dims
from jfsdp.checkpoint.foreign.torch_names import plain_name
from jfsdp.checkpoint.source import Index, Source, are_equal
from jfsdp.layout.report import list_differences

Shapes = Mapping[str, jax.ShapeDtypeStruct]
_NUMBER = re.compile(r"\{(\w+)\}")
MAX_ARRAYS = 1 << 20  # ten times the largest known model; each takes a kilobyte of memory


@checked
@dataclasses.dataclass(frozen=True)
class NameMap:
    """Mapping of a model's array names to another library's. A job provides it as a dict of these fields.

    Attributes:
      rules: see [Note: rules of names].
      ignored: globs of names in checkpoints that are not weights, such as stored masks, and may be present.
      tied: names in checkpoints that may be copies of other arrays, such as a head tied to the embedding, by the
        other's name. Copies are compared and never written.
      prefix: beginning of most names in checkpoints, which may be missing from all (`transformer.` of GPT-2).
      from_config: `f(config.json as a dict) -> fields of the job's config`; refuses what the model cannot compute.
      to_config: `f(the job's config, seq_len) -> config.json as a dict`.
      view: `f(source) -> source` to which the rules apply, if one array of a checkpoint becomes several of the model's.
      others: mappings for other formats, by a glob; the first whose glob matches a name in a checkpoint applies to it.

    Raises:
      ValueError: if a rule is malformed.
    """

    rules: Sequence[Any]
    ignored: Sequence[str] = ()
    tied: Mapping[str, str] = dataclasses.field(default_factory=dict)
    prefix: str = ""
    from_config: Callable[[Mapping[str, Any]], Mapping[str, Any]] | None = None
    to_config: Callable[[Any, int], Mapping[str, Any]] | None = None
    view: Callable[[Source], Source] | None = None
    others: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for rule in self.rules:
            parts = rule if isinstance(rule, (list, tuple)) else ()
            if len(parts) not in (2, 3) or not all(isinstance(part, str) for part in parts):
                raise ValueError(f"rule {rule!r}: write (our name, their name) or (our name, their name, dims)")
            ours, theirs = (_NUMBER.findall(name) for name in parts[:2])
            if lost := [number for number in ours if number not in theirs]:
                raise ValueError(f"rule {rule!r}: number {{{lost[0]}}} of our name is missing from theirs; add it")
            for dims in parts[2:]:
                parse_dims(dims)

    def chosen_for(self, source: Source) -> NameMap:
        """Return the mapping for a checkpoint: one of `others`, or this one."""
        plain = [plain_name([name]) for name in source.arrays]
        return as_name_map(next((x for glob, x in self.others.items() if fnmatch.filter(plain, glob)), self))


Names = NameMap | Mapping[str, Any] | None  # None (a job without a mapping) is refused


def as_name_map(value: Any) -> NameMap:
    """Convert a `NameMap`, or a dict of its fields, to a `NameMap`.

    Raises:
      ValueError: if it is neither, or has unknown fields or malformed rules.
    """
    if isinstance(value, NameMap):
        return value
    known = [field.name for field in dataclasses.fields(NameMap)]
    if not isinstance(value, Mapping) or "rules" not in value or set(value) - set(known):
        got = f"a dict of {', '.join(value)}" if isinstance(value, Mapping) else repr(value)
        raise ValueError(f"a mapping of names is a dict with rules and optionally {', '.join(known[1:])}, not {got}")
    return NameMap(**value)


@dataclasses.dataclass(frozen=True)
class Piece:
    """An array of the other library as a part of a leaf.

    Attributes:
      at: index in each stacked dim of the leaf.
      num_stacks: how many of these dims are in no name of ours, such as experts.
      shape: the other dims of the leaf.
    """

    leaf: str
    at: tuple[int, ...]
    shape: tuple[int, ...]
    dims: Dims
    num_stacks: int = 0

    @property
    def their_shape(self) -> tuple[int, ...]:
        return self.dims.their_shape(self.shape)


def bind(names: NameMap, leaves: Shapes) -> dict[str, Piece]:
    """Find the arrays of the other library that make up the leaves.

    Returns:
      Pieces by the other library's names, in the order of the leaves.

    Raises:
      ValueError: if leaves have no rule (lists them), a rule has another number of dims, two leaves have one name, or
        there are more than `MAX_ARRAYS` arrays.
    """
    forms = [form for rule in names.rules for form in forms_of(rule)]
    found: dict[str, Piece] = {}
    orphans, num_arrays = [], 0
    for leaf, array in leaves.items():
        matches = ((form, match) for form in forms if (match := form.ours.fullmatch(leaf)))
        form, match = next(matches, (None, None))
        if form is None or match is None:
            orphans.append(leaf)
            continue
        num_arrays += math.prod(array.shape[: len(form.stacked)])
        if num_arrays > MAX_ARRAYS:
            what = f"{list(array.shape)} makes {num_arrays:,} arrays of the other checkpoint"
            raise ValueError(f"{leaf}: {what}, which can have at most {MAX_ARRAYS:,}; correct the number of layers")
        for theirs, piece in _pieces(leaf, array.shape, form, match.groupdict()):
            if theirs in found:
                raise ValueError(f"{leaf} and {found[theirs].leaf}: rules give both the name {theirs!r}; change one")
            found[theirs] = piece
    if orphans:
        raise ValueError(f"no rule for {', '.join(orphans)}; add rules to the mapping of names")
    return found


@dataclasses.dataclass(frozen=True)
class Form:
    """A rule with some of its numbers as leading dims."""

    ours: re.Pattern[str]
    theirs: str
    stacked: tuple[str, ...]
    dims: str
    num_stacks: int


def forms_of(rule: Sequence[str]) -> Iterator[Form]:
    """Yield the forms of a rule, with each subset of its numbers as leading dims."""
    ours, theirs, dims = (*rule, "")[:3]
    numbers, always = _NUMBER.findall(ours), [n for n in _NUMBER.findall(theirs) if n not in _NUMBER.findall(ours)]
    for count in range(len(numbers) + 1):
        for stacked in itertools.combinations(numbers, count):
            kept = ours
            for number in stacked:
                kept = re.sub(rf"[._]?\{{{number}\}}", "", kept)
            pattern = "".join(
                f"(?P<{part}>\\d+)" if place % 2 else re.escape(part) for place, part in enumerate(_NUMBER.split(kept))
            )
            leading = [n for n in dict.fromkeys(_NUMBER.findall(theirs)) if n in (*stacked, *always)]
            yield Form(re.compile(pattern), theirs, tuple(leading), dims, len(always))


def _pieces(leaf: str, shape: tuple[int, ...], form: Form, numbers: Mapping[str, str]) -> Iterator[tuple[str, Piece]]:
    stacked, rest = shape[: len(form.stacked)], shape[len(form.stacked) :]
    dims = parse_dims(form.dims) if form.dims else same_dims(len(rest))
    if len(stacked) < len(form.stacked) or len(dims.ours) != len(rest):
        raise ValueError(f"{leaf}: its rule for {form.theirs!r} does not fit {len(shape)} dims {list(shape)}")
    for at in itertools.product(*map(range, stacked)):
        values = {**numbers, **dict(zip(form.stacked, map(str, at), strict=True))}
        piece = Piece(leaf, at, rest, dims, form.num_stacks)
        yield _NUMBER.sub(lambda found, values=values: values[found[1]], form.theirs), piece


class Imported:
    """Another library's arrays as a source under the model's names. Reading a slice reads only the parts it needs.

    Args:
      source: arrays under the other library's names.
      names: the mapping, or a dict of its fields.
      leaves: the model's parameters by name, with logical shapes. Of their dtypes, only the kind is checked.
      partial: leave out the leaves of which the source has no array.
      where: name of the source in messages.

    Raises:
      ValueError: if arrays are missing, extra or of another shape, or a copy of a tied array differs; lists them.
    """

    def __init__(
        self, source: Source, names: Names, leaves: Shapes, *, where: Any = "checkpoint", partial: bool = False
    ):
        self.names, self._where = as_name_map(names), where
        self._source = source if self.names.view is None else self.names.view(source)
        self._pieces = bind(self.names, leaves)
        self._found = self._canonical()
        if partial:
            present = {piece.leaf for name, piece in self._pieces.items() if name in self._found}
            self._pieces = {name: piece for name, piece in self._pieces.items() if piece.leaf in present}
        self._check_complete()
        self._check_kinds(leaves)
        self._check_tied()
        self._parts: dict[str, dict[tuple[int, ...], tuple[str, Piece]]] = {}
        for theirs, piece in self._pieces.items():
            self._parts.setdefault(piece.leaf, {})[piece.at] = (self._found[theirs], piece)
        self.arrays: dict[str, jax.ShapeDtypeStruct] = {}
        for leaf, parts in self._parts.items():
            first, *others = {self._source.arrays[theirs].dtype for theirs, _ in parts.values()}
            dtype = jnp.result_type(first, *others) if others else first
            self.arrays[leaf] = jax.ShapeDtypeStruct(leaves[leaf].shape, dtype)

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one leaf; of stacked layers only those in the slice."""
        parts = self._parts[name]
        num_stacked = len(next(iter(parts)))
        leading, rest = index[:num_stacked], index[num_stacked:]
        if not num_stacked:
            return self._read_part(*parts[()], rest)
        out = np.empty([part.stop - part.start for part in index], self.arrays[name].dtype)
        for place in np.ndindex(*out.shape[:num_stacked]):
            at = tuple(part.start + offset for part, offset in zip(leading, place, strict=True))
            out[place] = self._read_part(*parts[at], rest)
        return out

    def _read_part(self, theirs: str, piece: Piece, index: Index) -> np.ndarray:
        block = self._source.read(theirs, piece.dims.their_index(piece.shape, index))
        return piece.dims.to_ours(block, piece.shape, index)

    def _canonical(self) -> dict[str, str]:
        """Return the source's name of each name in the rules. The source may lack the prefix and have wrappers
        ([Note: names from PyTorch]).
        """
        names, found = self.names, dict[str, str]()
        for name in self._source.arrays:
            plain = name if name in self._pieces else plain_name([name])
            is_known = plain in self._pieces or plain in names.tied or plain.startswith(names.prefix)
            known = plain if is_known else names.prefix + plain
            if known in found:
                raise ValueError(f"{self._where}: {found[known]} and {name} are one array, {known}; remove one")
            found[known] = name
        return found

    def _check_complete(self) -> None:
        found = {
            self._label(name): str(list(self._source.arrays[theirs].shape))
            for name, theirs in self._found.items()
            if name in self._pieces or not self._is_ignored(name)
        }
        wanted = {self._label(name): str(list(piece.their_shape)) for name, piece in self._pieces.items()}
        if lines := list_differences(found, wanted):
            raise ValueError(
                f"{self._where}: does not fit the model:\n{lines}\n  set the model's sizes and options to those of the "
                "checkpoint (such as vocab_size and num_layers), or correct the mapping of names (docs/pretrained.md)"
            )

    def _label(self, name: str) -> str:
        return f"{name} ({self._pieces[name].leaf})" if name in self._pieces else self._found[name]

    def _is_ignored(self, name: str) -> bool:
        globs, forms = self.names.ignored, (name, self._found[name])
        return name in self.names.tied or any(fnmatch.fnmatchcase(form, glob) for glob in globs for form in forms)

    def _check_kinds(self, leaves: Shapes) -> None:
        for theirs, piece in self._pieces.items():
            name, ours = self._found[theirs], leaves[piece.leaf].dtype
            dtype = self._source.arrays[name].dtype
            if jnp.issubdtype(dtype, jnp.floating) != jnp.issubdtype(ours, jnp.floating):
                raise ValueError(f"{self._where}: {name} is {dtype}, not {ours}; quantized weights are not supported")

    def _check_tied(self) -> None:
        found = self._found
        for copy, original in self.names.tied.items():
            is_copy = copy in found and copy not in self._pieces and original in found
            if is_copy and not are_equal(self._source, found[copy], found[original]):
                raise ValueError(
                    f"{self._where}: {found[copy]} differs from {found[original]}, but the model has one array for "
                    'both; to have two, set "tie_word_embeddings": false in config.json (or tied=False in the model)'
                )


class Exported:
    """A model's arrays as a source under another library's names: the inverse of `Imported`.

    Args:
      source: arrays under the model's names, without `params.`.
      names: the mapping, or a dict of its fields.

    Attributes:
      pieces: by the other library's names, the part of a leaf that each array is.

    Raises:
      ValueError: if leaves have no rule; lists them.
    """

    def __init__(self, source: Source, names: Names):
        self._source = source
        self.pieces = bind(as_name_map(names), source.arrays)
        self.arrays = {
            theirs: jax.ShapeDtypeStruct(piece.their_shape, source.arrays[piece.leaf].dtype)
            for theirs, piece in self.pieces.items()
        }

    def read(self, name: str, index: Index) -> np.ndarray:
        """Read one slice of one array of the other library."""
        piece = self.pieces[name]
        ours = piece.dims.our_index(piece.shape, index)
        block = self._source.read(piece.leaf, (*(slice(place, place + 1) for place in piece.at), *ours))
        return piece.dims.to_theirs(block.reshape(block.shape[len(piece.at) :]), piece.shape, index)
