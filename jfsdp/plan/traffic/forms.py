"""Forms of a value over mesh axes: replicated, sharded along a dim, or a pending sum.

activations.py propagates them through a trace; see [Note: theory of activations] there.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from jfsdp.jaxprs import is_literal
from jfsdp.plan.hlo.parse import Shape, hlo_dtype
from jfsdp.plan.traffic.dims import SUMMED, adds, follow, is_known, is_linear, keeps_sums

ALL_GATHER, ALL_REDUCE, REDUCE_SCATTER, ALL_TO_ALL = "all-gather", "all-reduce", "reduce-scatter", "all-to-all"


@dataclasses.dataclass(eq=False)
class Sum:
    """A pending sum over an axis: it is not yet known whether it becomes replicated or sharded.

    Attributes:
      var: the summed variable.
      is_formed, form: whether it was reduced, and its form after that.
      of: the sum that it is added to, or computed from.
      linked: other sums that are reduced to the same form, each separately.
      has_parts: whether the sum of its parts on all devices is the value itself.
    """

    var: Any
    is_formed: bool = False
    form: Form = None
    of: Sum | None = None
    linked: list[Sum] = dataclasses.field(default_factory=list)
    has_parts: bool = True

    def root(self) -> Sum:
        return self.of.root() if self.of else self


Form = int | None | Sum


class Axis:
    """The forms of all values over some mesh axes."""

    def __init__(self, names: Sequence[str], parts: int, send: Callable[[str, Any, Any], None] = lambda *_: None):
        self.names, self.parts, self.send = frozenset(names), parts, send
        self.forms: dict[Any, Form] = {}
        self.unknown: dict[str, None] = {}

    def read(self, atom: Any) -> Form:
        """Return the form of a value; for a reduced sum, its form after the reduction."""
        form = None if is_literal(atom) else self.forms.get(atom)
        if isinstance(form, Sum) and form.root().is_formed:
            formed = form.root()
            return formed.form if formed.var.aval.shape == atom.aval.shape else None
        return form

    def reshard(self, atom: Any, form: Form, eqn: Any) -> None:
        """Replicate a value, or shard it along a dim. Sharding a replicated value is free."""
        now = self.read(atom)
        if is_literal(atom) or now == form:
            return
        if isinstance(now, Sum):
            self._form(now.root(), atom.aval.shape, form, eqn)
        elif now is not None:
            self.send(ALL_GATHER if form is None else ALL_TO_ALL, atom, eqn)
        self.forms[atom] = form

    def _form(self, found: Sum, shape: tuple[int, ...], form: Form, eqn: Any) -> None:
        if found.is_formed:
            return
        found.is_formed, found.form = True, form if found.var.aval.shape == shape else None
        self.send(ALL_REDUCE if form is None else REDUCE_SCATTER, found.var, eqn)
        for other in found.linked:
            self._form(other.root(), shape, form, eqn)

    def merge_sum(self, atom: Any, eqn: Any) -> bool:
        """Merge a pending sum into an explicit one over another axis; return whether that is possible.

        A value computed from a sum cannot be merged: its sum is reduced first.
        """
        found = self.read(atom)
        if not isinstance(found, Sum):
            return False
        if not found.has_parts or found.root().linked:
            self.reshard(atom, None, eqn)
            return False
        found.root().is_formed = True
        return True

    def set_form(self, out: Any, form: Form | str) -> None:
        """Set the form of a result."""
        self.forms[out] = Sum(out) if form == SUMMED else form  # type: ignore[assignment]

    def compute(self, eqn: Any) -> None:
        """Propagate forms through an operation without a body."""
        if self._defer_sum(eqn):
            return
        for atom in eqn.invars:
            if isinstance(self.read(atom), Sum):
                # In an elementwise operation, a sum is sharded like the other operands.
                forms = (self.read(other) for other in eqn.invars) if keeps_sums(eqn) and atom.aval.shape else ()
                self.reshard(atom, next((form for form in forms if isinstance(form, int)), None), eqn)
        goes = self._agreed(eqn)
        for place, out in enumerate(eqn.outvars):
            self.set_form(out, next((each[place] for each in goes if each[place] is not None), None))

    def _defer_sum(self, eqn: Any) -> bool:
        """Keep a sum pending if its results may decide the form. Sums that are added become one."""
        forms = [self.read(atom) for atom in eqn.invars]
        sums = [form for form in forms if isinstance(form, Sum)]
        if not sums or not keeps_sums(eqn) or any(isinstance(form, int) for form in forms):
            return False
        sizes = {atom.aval.size for atom, form in zip(eqn.invars, forms, strict=True) if isinstance(form, Sum)}
        if sizes != {eqn.outvars[0].aval.size}:
            return False
        has_parts = is_linear(eqn) or (adds(eqn) and len(sums) == len(forms))
        has_parts = has_parts and all(form.has_parts for form in sums)
        first, *others = dict.fromkeys(form.root() for form in sums)
        if has_parts:
            for other in others:
                other.of = first
        else:
            first.linked += others
        out = first if has_parts else Sum(first.var, of=first, has_parts=False)
        self.forms.update(dict.fromkeys(eqn.outvars, out))
        return True

    def _agreed(self, eqn: Any) -> list[list[Any]]:
        """Return the results' dims of each sharded operand; replicate conflicting operands, the smallest first."""
        places = [place for place, atom in enumerate(eqn.invars) if isinstance(self.read(atom), int)]
        goes = {place: follow(eqn, place, self.read(eqn.invars[place]), self.parts) for place in places}  # type: ignore[arg-type]
        for place in sorted(places, key=lambda place: num_bytes(eqn.invars[place].aval)):
            targets = goes.pop(place)
            is_lost = all(found is None for found in targets)
            like = [other for other in goes if self.read(eqn.invars[other]) == self.read(eqn.invars[place])]
            if is_lost and not is_known(eqn) and not like:
                self.unknown[eqn.primitive.name] = None
            pairs = [pair for each in goes.values() for pair in zip(targets, each, strict=True) if None not in pair]
            if (is_lost and (is_known(eqn) or not like)) or any(one != other for one, other in pairs):
                self.reshard(eqn.invars[place], None, eqn)
            else:
                goes[place] = targets
        return list(goes.values())

    def state(self, eqn: Any) -> None:
        """Apply a sharding constraint; along unconstrained dims the sharding is unchanged."""
        (atom,), (out,) = eqn.invars, eqn.outvars
        stated = eqn.params.get("sharding", eqn.params.get("dst_sharding"))
        free = eqn.params.get("unconstrained_dims") or ()
        wanted, now = self.dim(getattr(stated, "spec", ())), self.read(atom)
        if wanted is None and isinstance(now, int) and now in free:
            wanted = now
        self.reshard(atom, wanted, eqn)
        self.forms[out] = wanted

    def enter(self, loop: Loop) -> list[Form]:
        """Return the forms of a body's inputs, of which layer dims are never sharded."""
        forms: list[Form] = []
        for place, atom in enumerate(loop.eqn.invars):
            form, is_row = self.read(atom), place >= loop.num_consts + loop.num_carry
            if (isinstance(form, Sum) and loop.is_loop) or (form == 0 and is_row):
                self.reshard(atom, None, loop.eqn)
                form = None
            forms.append(form - 1 if isinstance(form, int) and is_row else form)
        return forms

    def changes(self, loop: Loop, start: list[Form]) -> bool:
        """Reduce the sums of an iteration; return whether the carry is sharded more than in `start`, and update it."""
        if not loop.is_loop:
            return False
        before = list(start)
        for place, out in enumerate(loop.body.outvars):
            now, at = self.read(out), loop.num_consts + place
            wanted = start[at] if place < loop.num_carry else None
            if isinstance(now, Sum) or (isinstance(wanted, int) and now is not None):
                self.reshard(out, wanted, loop.eqn)
            elif place < loop.num_carry and wanted is None:
                start[at] = now
        return start != before

    def leave(self, loop: Loop, start: list[Form]) -> None:
        """Set the forms of a loop's results; the carry has the forms of `start`."""
        for place, (inside, out) in enumerate(zip(loop.body.outvars, loop.eqn.outvars, strict=True)):
            form = self.read(inside)
            if place >= loop.num_carry:
                self.forms[out] = form + 1 if isinstance(form, int) else form
            else:
                self.forms[out] = start[loop.num_consts + place] if loop.is_loop else form

    def dim(self, spec: Any) -> int | None:
        """Return the dim that a spec splits over these axes."""
        entries = (entry if isinstance(entry, tuple) else (entry,) for entry in spec)
        return next((dim for dim, axes in enumerate(entries) if self.names.intersection(map(str, axes))), None)


@dataclasses.dataclass(frozen=True)
class Loop:
    """A scan: its equation, its body, and the numbers of constant and carried inputs."""

    eqn: Any
    body: Any
    num_consts: int
    num_carry: int

    @property
    def is_loop(self) -> bool:
        """Whether it has several iterations; XLA inlines a loop with one."""
        return self.eqn.params["length"] > 1


def num_bytes(aval: Any) -> int:
    return Shape(hlo_dtype(str(aval.dtype)), aval.shape).num_bytes
