"""The cause of a difference from one device, from its signature.

[Note: signatures]
A gradient is compared with the gradients of parts of the batch, as the user's code computes them on one device from the
rows of one device and microbatch. A sum that is missing, doubled or divided wrongly is a combination of these with
other coefficients, which least squares find: all equal for a wrong factor, zero for parts that are missing, inverse to
the weights for a mean of means. If all coefficients are right but the gradient of all rows together is another one, the
rows depend on each other. What no combination explains is a rounding (by its size), other values at the same places (by
their order), or unknown.

[Note: causes]
    not-finite       a value is not finite
    partial-copies   devices have different values of a replicated array: a sum over their axis is missing
    missing-sum      a gradient has the rows of some devices only: a sum over their axis is missing
    factor           a gradient is multiplied by a constant: summed twice, divided twice, or divided by another number
    unequal-weights  rows of different devices count differently: a mean of means, or a sum over some devices twice
    coupled-rows     rows depend on each other, and each device computed its own rows
    coupled-tokens   tokens depend on their number or order in the row, and each device computed its own tokens
    random-masks     devices draw other random numbers than one device
    shared-key       all devices draw the same random numbers for their rows
    cast             a value is rounded to a narrower dtype
    detached         a gradient, or a part of it, is zero: a collective without derivative, or a stop_gradient
    wrong-place      the values are right, but at other places
    frozen           a frozen parameter changed, or a trained one did not
    optimizer        the gradients agree, and the update does not
    model-state      the model's other state does not agree
    refused          the loss is not what the step's program needs
    forward          devices compute another loss: a collective in the model, a count of devices, wrong weights, a mean
                     added to a sum
    backward         the loss agrees and its gradient does not: a derivative that is missing, or summed twice
    unknown          no known cause has this signature
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jfsdp.layout.mesh import CONTEXT, ROW_AXES
from jfsdp.proof.compare import Difference, Run
from jfsdp.proof.reference import Reference, Values

_MOST_CELLS = 64
_CLOSE = 1e-4  # relative residual of a combination that explains a gradient
_DTYPES = ("float32", "float16", "bfloat16", "float8_e4m3fn")


@dataclasses.dataclass(frozen=True)
class Cause:
    """Why a value differs: a name of [Note: causes], and the facts."""

    name: str
    text: str


@dataclasses.dataclass(frozen=True)
class Cells:
    """Gradients of the loss of the rows (and tokens) of each device and microbatch.

    Attributes:
      axes: name and size of each dim of the cells: mesh axes, and "microbatch".
      columns: a column for each cell with the gradients of the total, one leaf after another.
      weights: by cell.
      places: the rows of each leaf in `columns`.
    """

    axes: tuple[tuple[str, int], ...]
    columns: np.ndarray
    weights: np.ndarray
    places: Mapping[str, np.ndarray]

    @property
    def expected(self) -> float:
        """The coefficient of each cell in the gradient of the mean loss."""
        is_mean = np.all(self.weights == 1)  # the loss is a scalar: a mean of the parts' means
        return 1 / (len(self.weights) if is_mean else self.weights.sum())

    def varying(self, factors: np.ndarray) -> list[str]:
        """Return the axes along which coefficients differ."""
        grid = factors.reshape([size for _, size in self.axes])
        return [axis for dim, (axis, _) in enumerate(self.axes) if np.ptp(grid, axis=dim).max() > 1e-3]

    def is_sum(self, target: np.ndarray, close: float = _CLOSE) -> bool:
        """Return whether a gradient is the sum over parts, so that no row depends on another part's."""
        return bool(np.linalg.norm(self.columns.sum(1) * self.expected - target) <= close * np.linalg.norm(target))


class Diagnosis:
    """The search for the cause of differences; see [Note: signatures]."""

    def __init__(self, reference: Reference, one: Values, run: Run, accumulate: int, found: Sequence[Difference]):
        self.reference, self.one, self.run, self.accumulate, self.found = reference, one, run, accumulate, found
        self.given, self.wanted = run.values.of("gradient"), one.of("gradient")
        self.names, self.sizes = self._of("gradient") or list(self.wanted), dict(run.layout.mesh_sizes)
        self.axes = [axis for axis in (*ROW_AXES, CONTEXT) if self.sizes.get(axis, 1) > 1]

    def _of(self, kind: str) -> list[str]:
        return [item.name for item in self.found if item.kind == kind]

    def cause(self) -> Cause:
        """Return the first cause whose signature the differences have."""
        searches = (self._copies, self._values, self._gradients if self._of("gradient") else self._updates)
        return next(cause for search in searches for cause in search())

    def _copies(self) -> Iterator[Cause]:
        kinds = {kind for kind, _ in self.run.copies} & {"gradient", "parameter", "model state"}
        if kinds:
            kind, name = self.run.copies[0]
            text = f"devices have different copies of {len(self.run.copies)} arrays, the first {kind} {name}"
            if kinds == {"model state"}:
                yield Cause("model-state", f"{text}: computed from their own rows")
            yield Cause("partial-copies", f"{text}: over {' or '.join(self.axes) or 'one device'}")

    def _values(self) -> Iterator[Cause]:
        for item in self.found:
            value = self.run.values.arrays.get((item.kind, item.name))
            if value is not None and jnp.issubdtype(value.dtype, jnp.inexact) and not np.isfinite(value).all():
                yield Cause("not-finite", f"{item.kind} {item.name} is not finite")
        names, after, before = self._of("parameter"), self.run.values.of("parameter"), self.reference.params
        if bad := [name for name in names if name not in self.reference.trained]:
            yield Cause("frozen", f"{_list(bad)}: frozen, and changed by the steps")
        same = [name for name in names if np.array_equal(after[name], before[name]) and np.any(self.wanted[name])]
        if same and not self._of("gradient"):
            yield Cause("frozen", f"{_list(same)}: trained, and not changed by the steps")

    def _gradients(self) -> Iterator[Cause]:
        given, wanted, names, reference = self.given, self.wanted, self.names, self.reference
        listed = _list(names)
        if zero := [name for name in names if not np.any(given[name])]:
            yield Cause("detached", f"{_list(zero)}: the gradient is zero")
        ratios = [ratio for name in names if (ratio := _ratio(given[name], wanted[name]))]
        if len(ratios) == len(names):
            values = list(dict.fromkeys(1 + float(f"{ratio - 1:.4g}") for ratio in ratios))
            meaning = self._meaning(values[0]) if len(values) == 1 else "no single factor"
            shown = ", ".join(f"{value:.8g}" for value in values[:4])
            where = listed if len(names) < len(wanted) else "every gradient"
            yield Cause("factor", f"{where}: {shown} times one device's, {meaning}")
        totals = [x.gradient(x.params, x.state, x.batches[0])[0] for x in (reference, dataclasses.replace(reference))]
        if not math.isclose(*totals, rel_tol=_CLOSE):
            yield Cause("random-masks", "the loss is another one in each trace: it draws numbers of Python or NumPy")
        is_split = self.sizes.get(CONTEXT, 1) > 1
        for with_tokens in (False, True)[: 1 + is_split]:
            cells = self.cells(with_tokens=with_tokens)
            for cause in self._parts(cells):
                name = cause.name.replace("coupled-rows", "coupled-tokens") if with_tokens else cause.name
                yield dataclasses.replace(cause, name=name)
        if moved := [name for name in names if _is_moved(given[name], wanted[name])]:
            yield Cause("wrong-place", f"{_list(moved)}: the elements are one device's in another order")
        if all(np.allclose(given[name], wanted[name] * (given[name] != 0), _CLOSE, 0) for name in names):
            yield Cause("detached", f"{listed}: some elements are zero, and the others right")
        if dtype := self._dtype(is_exact=True):
            yield Cause("cast", f"{listed}: numbers of {dtype}")
        near = cells.is_sum(self.flat(wanted)) and self._dtype(is_exact=False)
        message = "" if "step 1" not in self._of("loss") else self.run.check_loss()
        if near and (not message or self.found[0].error < 0.02 * self.error):  # roundings cancel out in the loss
            yield Cause("cast", f"{listed}: differ by about the rounding error of {near}")
        if "step 1" not in self._of("loss"):
            share = (np.vdot(self.flat(wanted), self.flat(given)) / np.vdot(self.flat(wanted), self.flat(wanted))).real
            what = "a derivative may be missing" if share < 1 else "one may be summed twice"
            yield Cause("backward", f"{listed}: {share:.3g} of one device's, though the loss agrees; {what}")
        if not reference.draws and cells.is_sum(self.flat(wanted)):
            yield Cause("forward", message or f"{listed}: of another loss, though one device's rows add up")
        if is_split:
            yield Cause("coupled-tokens", message or "only meshes with axis 'context' can tell")
        if reference.draws:
            yield Cause("random-masks", f"{listed}: the loss draws random numbers. {message}".rstrip(". "))
        yield Cause("forward" if message else "unknown", message or f"{listed}: no known signature")

    def _updates(self) -> Iterator[Cause]:
        if "step 1" in self._of("loss"):
            one = float(self.one.arrays["loss", "step 1"])
            ratio = float(self.run.values.arrays["loss", "step 1"]) / one if one else math.inf
            meaning = self._meaning(round(ratio, 4))
            yield Cause("factor", f"the loss is {ratio:g} times one device's, {meaning}; its gradient agrees")
        if names := [*self._of("optimizer state"), *self._of("parameter")]:
            yield Cause("optimizer", f"{_list(names)}: the gradients agree, and the update does not")
        if names := self._of("model state"):
            yield Cause("model-state", f"{_list(names)}: not one device's")
        yield Cause("unknown", "; ".join(f"{item.kind} {item.name}" for item in self.found[:4]))

    def flat(self, values: Mapping[str, Any]) -> np.ndarray:
        """Return the gradients that differ as one vector, all if none does."""
        return np.concatenate([np.ravel(values[name]) for name in self.names])

    @property
    def error(self) -> float:
        """The norm of the difference of `flat`, divided by that of one device's."""
        wanted = self.flat(self.wanted)
        return float(np.linalg.norm(self.flat(self.given) - wanted) / np.linalg.norm(wanted))

    def cells(self, *, with_tokens: bool = False) -> Cells:
        """Return the gradients of parts of the first batch on one device.

        Args:
          with_tokens: whether axis `context` splits the parts.
        """
        reference, tokens = self.reference, self.sizes.get(CONTEXT, 1) if with_tokens else 1
        axes = *((axis, self.sizes[axis]) for axis in self.axes if axis != CONTEXT), ("microbatch", self.accumulate)
        rows = math.prod(size for _, size in axes[:-1])
        columns, weights = [], []
        for row, micro, token in itertools.product(range(rows), range(self.accumulate), range(tokens)):

            def cut(x: Any, row: int = row, micro: int = micro, token: int = token) -> Any:
                own = np.array_split(x, rows)[row][micro :: self.accumulate] if np.ndim(x) else x
                return np.array_split(own, tokens, 1)[token] if tokens > 1 and np.ndim(x) > 1 else own

            part = jax.tree.map(cut, reference.batches[0])
            _, weight, _, grads = reference.gradient(reference.params, reference.state, part)
            columns.append(self.flat(grads))
            weights.append(float(weight))
        ends = itertools.accumulate(np.size(self.wanted[name]) for name in self.names)
        places = {name: np.arange(end - np.size(self.wanted[name]), end) for name, end in zip(self.names, ends)}
        axes += ((CONTEXT, tokens),) if tokens > 1 else ()
        return Cells(axes, np.stack(columns, 1), np.array(weights), places)

    def _parts(self, cells: Cells) -> Iterator[Cause]:
        if not 1 < len(cells.weights) <= _MOST_CELLS:
            return
        factors = _fit(cells.columns, self.flat(self.given))
        if factors is not None:
            whole = _fit(cells.columns, self.flat(self.wanted))
            one: Any = cells.expected
            if whole is not None and np.abs(whole).min() > 1e-3 * np.abs(whole).max():
                is_own = np.allclose(factors, one, rtol=1e-3)  # each device has the gradient of its part
                is_weighted = "step 1" in self._of("loss") and cells.varying(whole / whole.mean()) != [CONTEXT]
                one = whole if is_weighted or not is_own else one  # other weights on one device: a mean of means
            adds_up = cells.is_sum(self.flat(self.wanted), min(_CLOSE, 0.1 * self.error))
            are_right = np.allclose(factors / one, 1, atol=1e-3)
            if not (adds_up and are_right):
                if are_right and self._has_constant(cells):
                    text = "a part of the loss does not grow with the rows (a mean, a penalty), and counts once"
                    yield Cause("forward", f"{text} for each of {len(factors)} parts; multiply it by the weight")
                yield _of_factors(factors / one, cells, _list(self.names))
            return
        for name in self.names:
            leaf, value = self.run.layout.by_path[name], self.given[name]
            axes = leaf.stage("grad").axes or leaf.stage("opt").axes
            cut = [cut.parts for cut in leaf.cuts if cut.dim == leaf.dim]
            parts = math.prod([self.run.layout.num_shards(axes), *cut])
            if leaf.dim is None or parts == 1:
                continue
            width = -(-leaf.shape[leaf.dim] // parts)
            shards = np.split(
                cells.places[name].reshape(leaf.shape), range(width, leaf.shape[leaf.dim], width), leaf.dim
            )
            pairs = [(np.ravel(one), np.ravel(value)[np.ravel(one) - cells.places[name][0]]) for one in shards]
            own = [_fit(cells.columns[rows], elements) for rows, elements in pairs if np.any(elements)]
            if own and all(x is not None for x in own):
                most = max(int(np.sum(np.abs(x / cells.expected) > _CLOSE)) for x in own if x is not None)
                text = f"{name}: each of its {parts} shards has the gradient of {most} of {len(cells.weights)} parts"
                yield Cause("missing-sum", f"{text}: over {' or '.join(axes)}")
                return

    def _has_constant(self, cells: Cells) -> bool:
        """Return whether parts differ from the whole by a part of the loss that is the same for twice the rows."""
        reference, rows = self.reference, self.reference.batches[0]
        twice = jax.tree.map(lambda x: jnp.concatenate([x, x]) if np.ndim(x) else x, rows)
        once, two = (self.flat(reference.gradient(reference.params, reference.state, x)[3]) for x in (rows, twice))
        found = cells.columns.sum(1)
        gap = found - once - (len(cells.weights) - 1) * (2 * once - two)
        return bool(np.linalg.norm(gap) <= _CLOSE * np.linalg.norm(found))

    def _meaning(self, ratio: float) -> str:
        """Name the numbers of a step that equal a factor or its inverse."""
        axes = [axis for axis, size in self.sizes.items() if size > 1]
        groups = [some for count in range(1, len(axes) + 1) for some in itertools.combinations(axes, count)]
        named: dict[str, float] = {
            f"the size of {' x '.join(some)}": math.prod(self.sizes[axis] for axis in some) for some in groups
        }
        shapes = [np.shape(x) for x in jax.tree.leaves(self.reference.batches[0]) if np.ndim(x)]
        named |= {"the number of microbatches": self.accumulate, "the number of rows": shapes[0][0]}
        named["the number of tokens of a row"] = max((shape[1] for shape in shapes if len(shape) > 1), default=1)
        named["the weight of the loss"] = self.run.values.weights[0]
        found = [name for name, size in named.items() if size != 1 and math.isclose(ratio, size, rel_tol=1e-3)]
        below = [name for name, size in named.items() if size != 1 and math.isclose(ratio * size, 1, rel_tol=1e-3)]
        if found:
            return f"which is {' or '.join(found)}: summed twice, or not divided"
        if below:
            return f"which is one over {' or '.join(below)}: divided twice, or a sum is missing"
        return "no known number"

    def _dtype(self, *, is_exact: bool) -> str:
        """Return the dtype that gradients were rounded to: exactly, or by the size of the difference; "" if none."""
        given, wanted = (np.asarray(self.flat(values), np.float64) for values in (self.given, self.wanted))
        factors = (1.0, self.run.values.weights[0]) if is_exact else ()
        for dtype, factor in itertools.product(reversed(_DTYPES), factors):
            pair = [factor * x for x in (given, wanted)]
            exact = [np.allclose(x, np.asarray(x.astype(dtype), np.float64), 1e-12, 0) for x in pair]
            if exact == [True, False] and self.error < 4 * float(jnp.finfo(dtype).eps):
                return dtype
        near = [
            dtype for dtype in _DTYPES[:3] if not is_exact and 0.02 < self.error / float(jnp.finfo(dtype).eps) < 1.5
        ]
        return near[0] if near else ""


def _of_factors(factors: np.ndarray, cells: Cells, listed: str) -> Cause:
    """Name the coefficients of the parts, relative to the right ones."""
    mean, by_weight = factors.mean(), factors * cells.weights
    if np.allclose(factors, 1, atol=1e-3):
        return Cause("coupled-rows", f"{listed}: the sum over parts of the batch, not the gradient of all rows")
    if np.allclose(factors, mean, atol=1e-3 * abs(mean)):
        return Cause("factor", f"{listed}: {mean:.4g} times the sum over parts of the batch")
    varying = ", ".join(cells.varying(factors))
    what = f"parts count {', '.join(f'{x:.3g}' for x in factors[:8])} times"
    if np.any(np.abs(factors) < 1e-3):
        return Cause("missing-sum", f"{listed}: {what}, over {varying}")
    if np.allclose(by_weight, by_weight.mean(), rtol=1e-3):
        what = "each part is divided by its own weight (a mean of means)"
    return Cause("unequal-weights", f"{listed}: {what}, over {varying}")


def _fit(columns: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    """Return the coefficients of the columns that give the target; None if none do, or several choices."""
    if len(target) < 2 * columns.shape[1] or np.linalg.matrix_rank(columns) < columns.shape[1]:
        return None
    factors = np.linalg.lstsq(columns, target, rcond=None)[0]
    return factors if np.linalg.norm(columns @ factors - target) <= _CLOSE * np.linalg.norm(target) else None


def _ratio(given: np.ndarray, wanted: np.ndarray) -> float | None:
    """Return the constant by which an array differs from another; None if it varies, or is 1."""
    size = float(np.vdot(wanted, wanted).real)
    ratio = float(np.vdot(wanted, given).real) / size if size else 0.0
    allowed = min(_CLOSE, abs(ratio - 1) / 10) * abs(ratio) * math.sqrt(size)
    return ratio if size and np.linalg.norm(given - ratio * wanted) <= allowed else None


def _is_moved(given: np.ndarray, wanted: np.ndarray) -> bool:
    one, other = np.sort(np.ravel(given)), np.sort(np.ravel(wanted))
    if np.linalg.norm(given - wanted) <= 1e-2 * np.linalg.norm(wanted):  # at their own places
        return False
    return np.allclose(one, other, rtol=_CLOSE, atol=1e-9 * np.abs(other).max())


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
