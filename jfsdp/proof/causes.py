"""The cause of a difference from one device, from its signature.

[Note: signatures]
A gradient is compared with the gradients of parts of the batch, as the user's code computes them on one device from the
rows of one device and microbatch. A sum that is missing, doubled or divided wrongly is a combination of these with
other coefficients, which least squares find: all equal for a wrong factor, zero for parts that are missing, inverse to
the weights for a mean of means. If all coefficients are right but the gradient of all rows together is another one, the
rows depend on each other. What no combination explains is a rounding (by its size), other values at the same places (by
their order), or unknown.
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
    """Why a value differs: a name of `CAUSES`, and the facts."""

    name: str
    text: str


CAUSES = {
    "not-finite": "a value is not finite",
    "partial-copies": "devices have different values of a replicated array: a sum over their axis is missing",
    "missing-sum": "a gradient has the rows of some devices only: a sum over their axis is missing",
    "factor": "a gradient is multiplied by a constant: summed twice, divided twice, or divided by another number",
    "unequal-weights": "rows of different devices count differently: a mean of means, or a sum over some devices twice",
    "coupled-rows": "rows depend on each other, and each device computed its own rows",
    "coupled-tokens": "tokens depend on their number or order in the row, and each device computed its own tokens",
    "random-masks": "devices draw other random numbers than one device",
    "shared-key": "all devices draw the same random numbers for their rows",
    "cast": "a value is rounded to a narrower dtype",
    "detached": "a gradient is zero: a collective without derivative, or a stop_gradient",
    "wrong-place": "the values are right, but at other places",
    "frozen": "a frozen parameter changed, or a trained one did not",
    "optimizer": "the gradients agree, and the update does not",
    "model-state": "the model's other state does not agree",
    "refused-loss": "the loss is not what the step's program needs",
    "forward": "devices compute another loss: a collective in the model, a count of devices, or wrong weights",
    "backward": "the loss agrees and its gradient does not: a derivative that is missing, or summed twice",
    "unknown": "no known cause has this signature",
}


@dataclasses.dataclass(frozen=True, eq=False)
class _Cells:
    """Gradients of the loss of the rows (and tokens) of each device and microbatch.

    Attributes:
      axes: name and size of each dim of the cells: mesh axes, and "microbatch".
      grads: by cell, of the total, by name; weights: by cell.
    """

    axes: tuple[tuple[str, int], ...]
    grads: tuple[Mapping[str, Any], ...]
    weights: np.ndarray

    @property
    def expected(self) -> float:
        """The coefficient of each cell in the gradient of the mean loss."""
        is_mean = np.all(self.weights == 1)  # the loss is a scalar: a mean of the parts' means
        return 1 / (len(self.grads) if is_mean else self.weights.sum())

    def matrix(self, names: Sequence[str], select: Any = ...) -> np.ndarray:
        """Return a column for each cell, of the elements of some leaves."""
        return np.stack([np.concatenate([np.ravel(cell[name][select]) for name in names]) for cell in self.grads], 1)


def explain(reference: Reference, one: Values, run: Run, accumulate: int, found: Sequence[Difference]) -> Cause:
    """Return the cause of differences; see [Note: signatures]."""
    checks = (_not_finite, _copies, _frozen, _of_gradients, _of_updates)
    return next(cause for check in checks for cause in check(reference, one, run, accumulate, found))


def _not_finite(reference: Reference, one: Values, run: Run, accumulate: int, found: Any) -> Iterator[Cause]:
    for item in found:
        value = run.values.arrays.get((item.kind, item.name))
        if value is not None and value.dtype.kind == "f" and not np.isfinite(value).all():
            yield Cause("not-finite", f"{item.kind} {item.name} is not finite")


def _copies(reference: Reference, one: Values, run: Run, accumulate: int, found: Any) -> Iterator[Cause]:
    kinds = {kind for kind, _ in run.copies}
    if kinds & {"gradient", "parameter", "model state"}:
        kind, name = run.copies[0]
        count = f"{len(run.copies)} arrays, the first {kind} {name}"
        if "gradient" not in kinds and "model state" in kinds:
            yield Cause("model-state", f"devices have different copies of {count}: computed from their own rows")
        yield Cause("partial-copies", f"devices have different copies of {count}: over {_shape(run)}")


def _frozen(reference: Reference, one: Values, run: Run, accumulate: int, found: Any) -> Iterator[Cause]:
    names = [item.name for item in found if item.kind == "parameter"]
    if bad := [name for name in names if name not in reference.trained]:
        yield Cause("frozen", f"{_list(bad)}: frozen, and changed by the steps")
    same = [name for name in names if np.array_equal(run.values.of("parameter")[name], reference.params[name])]
    has_moved = [name for name in same if np.any(one.of("gradient").get(name, 0))]
    if has_moved and not any(item.kind == "gradient" for item in found):
        yield Cause("frozen", f"{_list(has_moved)}: trained, and not changed by the steps")


def _of_gradients(reference: Reference, one: Values, run: Run, accumulate: int, found: Any) -> Iterator[Cause]:
    names = [item.name for item in found if item.kind == "gradient"]
    given, wanted = run.values.of("gradient"), one.of("gradient")
    if not names:
        return
    if zero := [name for name in names if not np.any(given[name])]:
        yield Cause("detached", f"{_list(zero)}: the gradient is zero")
    ratios = {name: _ratio(given[name], wanted[name]) for name in names}
    if None not in ratios.values():
        values = list(dict.fromkeys(round(ratio, 4) for ratio in ratios.values() if ratio is not None))
        where = _list(names) if len(names) < len(wanted) else "every gradient"
        meaning = _meaning(values[0], reference, run, accumulate) if len(values) == 1 else "no single factor"
        yield Cause(
            "factor", f"{where}: {', '.join(f'{value:g}' for value in values[:4])} times one device's, {meaning}"
        )
    totals = [x.gradient(x.params, x.state, x.batches[0])[0] for x in (reference, dataclasses.replace(reference))]
    if not math.isclose(*totals, rel_tol=_CLOSE):
        yield Cause("random-masks", "the loss is another one in each trace: it draws numbers of Python or NumPy")
    cells = _make_cells(reference, run, accumulate, split_tokens=False)
    yield from _of_cells(cells, run, given, wanted, names)
    if num_parts(run, (CONTEXT,)) > 1:
        cells = _make_cells(reference, run, accumulate, split_tokens=True)
        for cause in _of_cells(cells, run, given, wanted, names):
            yield dataclasses.replace(cause, name=cause.name.replace("coupled-rows", "coupled-tokens"))
    if moved := [name for name in names if _is_moved(given[name], wanted[name])]:
        yield Cause("wrong-place", f"{_list(moved)}: the elements are one device's in another order")
    if dtype := _dtype(given, wanted, names, run.values.weights[0]):
        yield Cause("cast", f"{_list(names)}: differ by the rounding error of {dtype}")
    if "step 1" not in [item.name for item in found]:
        share = sum(np.vdot(given[n], wanted[n]) for n in names) / sum(np.vdot(wanted[n], wanted[n]) for n in names)
        what = "a derivative may be missing" if share < 1 else "one may be summed twice"
        yield Cause("backward", f"{_list(names)}: {share:.3g} of one device's, though the loss agrees; {what}")
    message = run.check_loss()
    if not reference.draws and _adds_up(cells, wanted, names):
        yield Cause("forward", message or f"{_list(names)}: of another loss, though one device's rows add up")
    if num_parts(run, (CONTEXT,)) > 1:
        yield Cause("coupled-tokens", message or "only meshes with axis 'context' can tell")
    if reference.draws:
        yield Cause("random-masks", f"{_list(names)}: the loss draws random numbers. {message}".rstrip(". "))
    yield Cause("coupled-rows" if message else "unknown", message or f"{_list(names)}: no known signature")


def _of_updates(reference: Reference, one: Values, run: Run, accumulate: int, found: Any) -> Iterator[Cause]:
    by_kind = {kind: [item for item in found if item.kind == kind] for kind in dict.fromkeys(x.kind for x in found)}
    if loss := by_kind.get("loss"):
        pairs = [(float(run.values.arrays["loss", x.name]), float(one.arrays["loss", x.name])) for x in loss]
        ratio = pairs[0][0] / pairs[0][1] if pairs[0][1] else math.inf
        if loss[0].name == "step 1":
            meaning = _meaning(round(ratio, 4), reference, run, accumulate)
            yield Cause("factor", f"the loss is {ratio:g} times one device's, {meaning}; its gradient agrees")
    if "parameter" in by_kind or "optimizer state" in by_kind:
        names = [item.name for item in (*by_kind.get("optimizer state", ()), *by_kind.get("parameter", ()))]
        yield Cause("optimizer", f"{_list(names)}: the gradients agree, and the update does not")
    if state := by_kind.get("model state"):
        yield Cause("model-state", f"{_list([item.name for item in state])}: not one device's")
    yield Cause("unknown", "; ".join(f"{item.kind} {item.name}" for item in found[:4]))


# Combinations of the gradients of parts.


def _make_cells(reference: Reference, run: Run, accumulate: int, *, split_tokens: bool) -> _Cells:
    sizes = dict(run.layout.mesh_sizes)
    axes = [(axis, sizes[axis]) for axis in axes_of_layout(run) if axis != CONTEXT or split_tokens]
    dims = (*((axis, size) for axis, size in axes if axis != CONTEXT), ("microbatch", accumulate))
    tokens = dict(axes).get(CONTEXT, 1)
    num_rows = math.prod(size for axis, size in dims if axis != "microbatch")
    grads, weights = [], []
    for row, micro, token in itertools.product(range(num_rows), range(accumulate), range(tokens)):

        def cut(x: Any, row: int = row, micro: int = micro, token: int = token) -> Any:
            if not jnp.ndim(x):
                return x
            own = x[row * len(x) // num_rows : (row + 1) * len(x) // num_rows][micro::accumulate]
            if tokens == 1 or own.ndim < 2:
                return own
            return own[:, token * own.shape[1] // tokens : (token + 1) * own.shape[1] // tokens]

        _, weight, _, grad = reference.gradient(
            reference.params, reference.state, jax.tree.map(cut, reference.batches[0])
        )
        grads.append(jax.device_get(grad))
        weights.append(float(weight))
    dims += ((CONTEXT, tokens),) if tokens > 1 else ()
    return _Cells(dims, tuple(grads), np.array(weights))


def _of_cells(cells: _Cells, run: Run, given: Any, wanted: Any, names: Sequence[str]) -> Iterator[Cause]:
    if not 1 < len(cells.grads) <= _MOST_CELLS:
        return
    target = np.concatenate([np.ravel(given[name]) for name in names])
    factors = _fit(cells.matrix(names), target)
    if factors is not None:
        whole = _fit(cells.matrix(names), np.concatenate([np.ravel(wanted[name]) for name in names]))
        one = cells.expected if whole is None else whole  # parts of other weights on one device: a mean of means
        yield _of_factors(factors / one, cells, names)
        return
    for name in names:
        leaf = run.layout.by_path[name]
        axes = leaf.stage("grad").axes or leaf.stage("opt").axes
        parts = math.prod([run.layout.num_shards(axes), *(cut.parts for cut in leaf.cuts if cut.dim == leaf.dim)])
        if leaf.dim is None or parts == 1:
            continue
        size, own = -(-leaf.shape[leaf.dim] // parts), []
        for part in range(parts):
            select = (*[slice(None)] * leaf.dim, slice(part * size, (part + 1) * size))
            if given[name][select].size and np.any(given[name][select]):
                own.append(_fit(cells.matrix([name], select), np.ravel(given[name][select])))
        if own and all(x is not None for x in own):
            few = [int(np.sum(np.abs(x / cells.expected) > _CLOSE)) for x in own if x is not None]
            text = f"{name}: each of its {parts} shards has the gradient of {max(few)} of {len(cells.grads)} parts"
            yield Cause("missing-sum", f"{text}: over {' or '.join(axes)}")
            return


def _of_factors(factors: np.ndarray, cells: _Cells, names: Sequence[str]) -> Cause:
    """Name the coefficients of the parts, relative to the right ones."""
    shown = ", ".join(f"{x:.3g}" for x in factors[:8])
    grid, mean = factors.reshape([size for _, size in cells.axes]), factors.mean()
    if np.allclose(factors, 1, atol=1e-3):
        return Cause("coupled-rows", f"{_list(names)}: the sum over parts of the batch, not the gradient of all rows")
    if np.allclose(factors, mean, atol=1e-3 * abs(mean)):
        return Cause("factor", f"{_list(names)}: {mean:.4g} times the sum over parts of the batch")
    varying = [axis for place, (axis, _) in enumerate(cells.axes) if np.ptp(grid, axis=place).max() > 1e-3]
    if np.any(np.abs(factors) < 1e-3):
        return Cause(
            "missing-sum", f"{_list(names)}: parts of the batch count {shown} times: over {', '.join(varying)}"
        )
    by_weight = factors * cells.weights
    what = "each part is divided by its own weight (a mean of means)"
    what = what if np.allclose(by_weight, by_weight.mean(), rtol=1e-3) else f"parts count {shown} times"
    return Cause("unequal-weights", f"{_list(names)}: {what}, over {', '.join(varying)}")


def _fit(columns: np.ndarray, target: np.ndarray) -> np.ndarray | None:
    """Return the coefficients of the columns that give the target; None if none do, or several choices."""
    if len(target) < 2 * columns.shape[1] or np.linalg.matrix_rank(columns) < columns.shape[1]:
        return None
    factors = np.linalg.lstsq(columns, target, rcond=None)[0]
    return factors if np.linalg.norm(columns @ factors - target) <= _CLOSE * np.linalg.norm(target) else None


def _adds_up(cells: _Cells, wanted: Any, names: Sequence[str]) -> bool:
    """Return whether the gradient of all rows is the sum over parts: no row or token depends on another part's."""
    target = np.concatenate([np.ravel(wanted[name]) for name in names])
    return bool(np.linalg.norm(cells.matrix(names).sum(1) * cells.expected - target) <= _CLOSE * np.linalg.norm(target))


# Other signatures.


def _ratio(given: np.ndarray, wanted: np.ndarray) -> float | None:
    """Return the constant by which an array differs from another; None if it is no constant, or 1."""
    size = float(np.vdot(wanted, wanted))
    ratio = float(np.vdot(wanted, given)) / size if size else 0.0
    is_close = np.linalg.norm(given - ratio * wanted) <= _CLOSE * abs(ratio) * math.sqrt(size)
    return ratio if is_close and size and abs(ratio - 1) > _CLOSE else None


def _meaning(ratio: float, reference: Reference, run: Run, accumulate: int) -> str:
    """Name the numbers of a step that equal a factor or its inverse."""
    axes = [(axis, size) for axis, size in run.layout.mesh_sizes if size > 1]
    named = {}
    for count in range(1, len(axes) + 1):
        for some in itertools.combinations(axes, count):
            named[f"the size of {' x '.join(axis for axis, _ in some)}"] = math.prod(size for _, size in some)
    rows = [x.shape for x in jax.tree.leaves(reference.batches[0]) if jnp.ndim(x)]
    named |= {"the number of microbatches": accumulate, "the number of rows": rows[0][0]}
    named["the number of tokens of a row"] = max((shape[1] for shape in rows if len(shape) > 1), default=1)
    named["the weight of the loss"] = run.values.weights[0]
    found = [name for name, size in named.items() if size != 1 and math.isclose(ratio, size, rel_tol=1e-3)]
    below = [name for name, size in named.items() if size != 1 and math.isclose(ratio * size, 1, rel_tol=1e-3)]
    if found:
        return f"which is {' or '.join(found)}: summed twice, or not divided"
    return f"which is one over {' or '.join(below)}: divided twice, or a sum is missing" if below else "no known number"


def _is_moved(given: np.ndarray, wanted: np.ndarray) -> bool:
    one, other = np.sort(np.ravel(given)), np.sort(np.ravel(wanted))
    return np.allclose(one, other, rtol=_CLOSE, atol=1e-9 * np.abs(other).max())


def _dtype(given: Mapping[str, Any], wanted: Mapping[str, Any], names: Sequence[str], weight: float) -> str:
    """Return the dtype whose rounding explains a difference; "" if none does."""
    arrays = [(np.asarray(given[name], np.float64), np.asarray(wanted[name], np.float64)) for name in names]
    for dtype in reversed(_DTYPES):
        if all(
            np.array_equal(x * f, (x * f).astype(jnp.dtype(dtype)).astype(np.float64))
            for x, _ in arrays
            for f in (1, weight)
        ):
            return dtype
    error = max(np.linalg.norm(x - y) / np.linalg.norm(y) for x, y in arrays)
    near = [dtype for dtype in _DTYPES[:3] if 0.02 < error / float(jnp.finfo(dtype).eps) < 1.5]
    return near[0] if near else ""


def axes_of_layout(run: Run) -> list[str]:
    """Return the data axes of size 2 or more, rows before tokens."""
    sizes = dict(run.layout.mesh_sizes)
    return [axis for axis in (*ROW_AXES, CONTEXT) if sizes.get(axis, 1) > 1]


def num_parts(run: Run, axes: Sequence[str]) -> int:
    return run.layout.num_shards(axes)


def _shape(run: Run) -> str:
    return " or ".join(axes_of_layout(run)) or "one device"


def _list(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
