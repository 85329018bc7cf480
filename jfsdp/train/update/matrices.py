"""Updates that need whole matrices, such as Muon's: every matrix is updated on one device.

[Note: where an update is computed]
An update is a program on arrays that are split over devices. Operations by element, and reductions to small arrays, run
on the split arrays. Others (products, transpositions, decompositions) need whole matrices. An array that is used in
both forms is moved by an all-to-all. The choice of a form for each operation is a minimum cut of the update's trace:
gradients, states and updates are split, products are not, and every moved array costs its bytes. For Muon two arrays
of each matrix are moved: the momentum before the first product, and the update after the last.

Layers of a stack, and leaves of equal shapes, are matrices of one batch. A second trace, with stacks of one layer,
shows whether an update treats layers separately: an operation mixes layers if an operand grows with the number of
layers and its result does not. Then the whole stack is one matrix.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jfsdp.arguments import checked
from jfsdp.compat import core, warn
from jfsdp.engine.dataflow import all_eqns, inner_jaxprs, is_literal
from jfsdp.engine.driver.program import eval_eqn, inline_jits, is_jit, only, read
from jfsdp.engine.engine import SCOPE, Engine
from jfsdp.engine.movements import ALL_TO_ALL, GATHER, MATRICES, Move, wire_bytes
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.select import Selectors, select_leaves
from jfsdp.modules.model import ParamTree
from jfsdp.train.update.exchange import Form, compute_whole

Vars = tuple[Any, ...]
_MODELS: list[tuple[Engine, ParamTree, list[Move]]] = []


@contextlib.contextmanager
def model_of_update(engine: Engine, tree: ParamTree) -> Iterator[list[Move]]:
    """Tell `by_matrix` which model an optimizer updates, while the update is traced; collect what it moves."""
    _MODELS.append((engine, tree, []))
    try:
        yield _MODELS[-1][2]
    finally:
        _MODELS.pop()


@checked
def by_matrix(tx: optax.GradientTransformation, matrices: Selectors = None) -> optax.GradientTransformationExtraArgs:
    """Compute the operations of an update that need whole matrices on one device for each matrix.

    Updates and states are those of `tx`. Without it, XLA gathers whole stacks of matrices on every device for
    optimizers such as Muon. Outside of a sharded model this is `tx`.

    Layout:  states as those of `tx`. Arrays that operations on whole matrices read: [L, m, n/N] -> [L/N, m, n] -> back.
             If devices outnumber matrices, several devices compute the same one, or some none: whichever sends less.
    Cost:    for Muon two all-to-alls of each matrix, which send 2 (N-1)/N of its shard.
    Memory:  the whole matrices of a device, and the temporaries of their updates.

    Args:
      tx: any transformation. Parameters may depend on each other only through reductions, such as a global norm.
      matrices: the parameters that are moved: path globs, predicates, or a list of them. None: all whose update needs
        whole matrices.

    Raises:
      ValueError: in the update, for a selector that matches no parameter, or one whose update needs no whole matrix.
    """

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        run = optax.with_extra_args_support(tx).update
        if not _MODELS:
            return run(updates, state, params, **extra)
        return _run_by_matrix(*_MODELS[-1], matrices, lambda given: run(*given, **extra), (updates, state, params))

    return optax.GradientTransformationExtraArgs(tx.init, update)


_PRODUCTS = {"dot_general", "eigh", "svd", "qr", "cholesky", "triangular_solve", "lu", "householder_product"}


def warn_of_products(engine: Engine, tree: ParamTree, closed: Any, shapes: Any) -> None:
    """Warn of products of split matrices in the trace of an update, outside of `by_matrix`.

    Args:
      closed: the trace; its inputs have the tree of `shapes`.
    """

    def is_product(eqn: Any) -> bool:  # a product of vectors is a reduction
        return any(x.primitive.name in _PRODUCTS and x.outvars[0].aval.shape for x in (eqn, *_inside(eqn)))

    if not any(map(is_product, closed.jaxpr.eqns)):
        return
    split = _split_leaves(engine)
    leaves = [split.get(tree.find(path)[1] or "") for path, _ in jax.tree_util.tree_leaves_with_path(shapes)]
    trace = _Trace(closed, leaves)
    eqns = {leaf: [trace.jaxpr.eqns[i] for i in some] for leaf, some in trace.of_leaf().items()}
    found = [x for x, some in eqns.items() if any(e.primitive.name != "shard_map" and is_product(e) for e in some)]
    if not found:
        return
    parts = [engine.layout.num_parts(leaf.stage("opt")) for leaf in found]
    sizes = [math.prod(leaf.cut_shape) * item_bytes(leaf.dtype) for leaf in found]
    gathered = sum(wire_bytes(GATHER, size, num) for size, num in zip(sizes, parts, strict=True))
    moved = sum(2 * wire_bytes(ALL_TO_ALL, size / num, num) for size, num in zip(sizes, parts, strict=True))
    warn(
        f"optimizer: its update multiplies whole matrices, but {len(found)} of them ({found[0].path}, ...) are split "
        f"over {', '.join(found[0].stage('opt').axes)}: XLA gathers them on every device in every step, at least "
        f"{gathered / 1e9:.3g} GB; jfsdp.optim.by_matrix(tx) sends about {moved / 1e9:.3g} GB instead"
    )


def _inside(eqn: Any) -> Iterator[Any]:
    return (inner for body in inner_jaxprs(eqn) for inner in all_eqns(body))


def _split_leaves(engine: Engine) -> dict[str, Leaf]:
    trained = (leaf for leaf in engine.layout.leaves if leaf.trainable)
    return {leaf.path: leaf for leaf in trained if Form(engine, leaf, leaf.shape, leaf.stacked).splits}


def _run_by_matrix(
    engine: Engine,
    tree: ParamTree,
    moves: list[Move],
    selectors: Selectors,
    update: Callable[[Any], Any],
    given: Any,
) -> Any:
    pairs, structure = jax.tree_util.tree_flatten_with_path(given)
    values, after = [x for _, x in pairs], []

    def flat(*values: Any) -> list[Any]:
        results, result_structure = jax.tree.flatten(update(structure.unflatten(values)))
        after[:] = [result_structure]
        return results

    names = [tree.find(path)[1] or "" for path, _ in pairs]
    split = _split_leaves(engine)
    leaves = [split.get(name) for name in names]
    trace = _Trace(jax.make_jaxpr(flat)(*[jax.ShapeDtypeStruct(x.shape, x.dtype) for x in values]), leaves)
    labels = _label(engine, trace)
    if selectors is not None:
        labels = _select(engine, selectors, split, labels)
    if not labels:
        return update(given)
    has_layers = any(leaf.stacked for leaf in labels)
    run = _Run(engine, trace, labels, _trace_one_layer(flat, values, leaves) if has_layers else None)
    results = run.run(values)
    moves += run.moves
    return after[0].unflatten(results)


class _Trace:
    """The trace of an update, with the leaves that its values depend on."""

    def __init__(self, closed: Any, leaves: Sequence[Leaf | None]):
        closed = inline_jits(closed, is_jit)
        self.jaxpr, self.consts = closed.jaxpr, closed.consts
        self.leaves: dict[Any, tuple[Leaf, ...]] = {}
        self.readers: dict[Any, list[int | None]] = {}  # None: a result
        self.made_by: dict[Any, int] = {}
        for var, leaf in zip(self.jaxpr.invars, leaves, strict=True):
            self.leaves[var] = (leaf,) if leaf else ()
        for i, eqn in enumerate(self.jaxpr.eqns):
            atoms = [atom for atom in eqn.invars if not is_literal(atom)]
            found = tuple(dict.fromkeys(leaf for atom in atoms for leaf in self.leaves.get(atom, ())))
            for var in eqn.outvars:
                self.leaves[var], self.made_by[var] = found, i
            for atom in atoms:
                self.readers.setdefault(atom, []).append(i)
        for atom in self.jaxpr.outvars:
            if not is_literal(atom):
                self.readers.setdefault(atom, []).append(None)

    def of_leaf(self) -> dict[Leaf, list[int]]:
        """Return the operations that depend on one leaf only, by leaf."""
        found: dict[Leaf, list[int]] = {}
        for i, eqn in enumerate(self.jaxpr.eqns):
            for leaf in self.leaves[eqn.outvars[0]] if len(self.leaves[eqn.outvars[0]]) == 1 else ():
                found.setdefault(leaf, []).append(i)
        return found


# ---- which operations run on whole matrices


def _label(engine: Engine, trace: _Trace) -> dict[Leaf, set[int]]:
    """Return the operations that run on whole matrices, by leaf."""
    found = {}
    for leaf, eqns in trace.of_leaf().items():
        costs = {i: _split_cost(trace.jaxpr.eqns[i]) for i in eqns}
        if math.inf in costs.values():
            found[leaf] = _cheapest(engine, leaf, trace, costs)
    return found


def _split_cost(eqn: Any) -> float:
    """Return the bytes that an operation on split arrays sends; infinite if it needs whole matrices."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    shapes = [atom.aval.shape for atom in eqn.invars]
    if max(map(math.prod, shapes), default=1) <= 1 or name == "broadcast_in_dim" or _is_elementwise(eqn):
        return 0
    if name in ("reshape", "squeeze", "expand_dims"):  # only dims of size 1 come or go
        dims = [[size for size in shape if size != 1] for shape in (shapes[0], out.shape)]
        return 0 if dims[0] == dims[1] else math.inf
    return 2 * _num_bytes(eqn.outvars[0]) if name.startswith(("reduce_", "arg")) else math.inf


def _is_elementwise(eqn: Any) -> bool:
    """Tell whether an operation works by element: it accepts scalars in place of arrays of one shape (or of size 1)."""
    shape, shapes = eqn.outvars[0].aval.shape, [atom.aval.shape for atom in (*eqn.invars, *eqn.outvars)]
    if inner_jaxprs(eqn) or not all(x == () or (len(x) == len(shape) and all(map(_fits, x, shape))) for x in shapes):
        return False
    key = (eqn.primitive, str(eqn.params), *(str(atom.aval.dtype) for atom in eqn.invars))
    if key not in _ELEMENTWISE:
        scalars = [jax.ShapeDtypeStruct((), atom.aval.dtype) for atom in eqn.invars]
        try:
            found = jax.eval_shape(lambda *values: eqn.primitive.bind(*values, **eqn.params), *scalars)
        except (TypeError, ValueError, IndexError, AssertionError, NotImplementedError):
            found = jax.ShapeDtypeStruct((1,), float)
        _ELEMENTWISE[key] = all(x.shape == () for x in jax.tree.leaves(found))
    return _ELEMENTWISE[key]


_ELEMENTWISE: dict[Any, bool] = {}


def _fits(size: int, whole: int) -> bool:
    return size in (1, whole)


def _num_bytes(var: Any) -> int:
    return math.prod(var.aval.shape) * var.aval.dtype.itemsize


def _cheapest(engine: Engine, leaf: Leaf, trace: _Trace, costs: Mapping[int, float]) -> set[int]:
    """Choose the operations of a leaf that run on whole matrices, so that the fewest bytes are moved: a minimum cut."""
    from scipy.sparse import csr_matrix  # a dependency of JAX; slow to import
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    source, sink, infinite = 0, 1, 2**30
    node = {i: place for place, i in enumerate(costs, start=2)}
    edges: dict[tuple[int, int], float] = {(node[i], sink): cost for i, cost in costs.items() if cost}
    atoms = (atom for i in costs for atom in (*trace.jaxpr.eqns[i].invars, *trace.jaxpr.eqns[i].outvars))
    count = len(node) + 2
    for var in dict.fromkeys(x for x in atoms if not is_literal(x) and leaf in trace.leaves.get(x, ())):
        made = node.get(trace.made_by.get(var, -1), source)
        readers = [source if i is None else node.get(i, source) for i in trace.readers.get(var, ())]
        form = Form(engine, leaf, var.aval.shape, leaf.stacked)
        size = max(_num_bytes(var) / math.prod(num for _, num in form.splits.values()), 1)
        edges[made, count], edges[count + 1, made] = size, size
        for reader in readers:
            edges[count, reader] = edges[reader, count + 1] = math.inf
        count += 2
    unit = max(sum(size for size in edges.values() if size < math.inf) / 2**24, 1)
    capacity = [infinite if size == math.inf else math.ceil(size / unit) for size in edges.values()]
    rows, columns = zip(*edges, strict=True)
    graph = csr_matrix((np.array(capacity, np.int32), (rows, columns)), shape=(count, count))
    rest = graph - maximum_flow(graph, source, sink).flow
    rest.data[rest.data < 0] = 0
    rest.eliminate_zeros()
    whole = set(breadth_first_order(rest.T.tocsr(), sink, return_predecessors=False).tolist())
    return {i for i, place in node.items() if place in whole}


def _select(
    engine: Engine, selectors: Selectors, split: Mapping[str, Leaf], labels: dict[Leaf, set[int]]
) -> dict[Leaf, set[int]]:
    shapes = {x.path: jax.ShapeDtypeStruct(x.shape, x.dtype) for x in engine.layout.leaves if x.trainable}
    selected = select_leaves("by_matrix: matrices=", selectors, shapes, {})
    found = {leaf.path: leaf for leaf in labels}
    for path, selector in selected.items():
        leaf = engine.layout.by_path[path]
        if path not in found and (path in split or len(leaf.shape) - leaf.stacked < 2):
            raise ValueError(
                f"by_matrix: matrices={selector} selects {path} of shape {shapes[path].shape}, whose update needs no "
                f"whole matrix; select {', '.join(list(found)[:3]) or 'nothing: use the optimizer without by_matrix'}"
            )
    return {leaf: eqns for leaf, eqns in labels.items() if leaf.path in selected}


# ---- one layer


def _trace_one_layer(flat: Callable[..., list[Any]], values: Sequence[Any], leaves: Sequence[Leaf | None]) -> Any:
    """Trace the update with stacks of one layer; None if it fails."""
    shapes = [jax.ShapeDtypeStruct(_one_layer(x.shape, leaf), x.dtype) for x, leaf in zip(values, leaves, strict=True)]
    try:
        return _Trace(jax.make_jaxpr(flat)(*shapes), leaves)
    except (TypeError, ValueError):
        return None


def _one_layer(shape: tuple[int, ...], leaf: Leaf | None) -> tuple[int, ...]:
    num = leaf.stacked if leaf and shape[: leaf.stacked] == leaf.shape[: leaf.stacked] else 0
    return (*[1] * num, *shape[num:])


def _pair_up(trace: _Trace, other: _Trace | None) -> dict[Any, Any] | None:
    """Return the variables of the other trace by those of a trace, if both have the same operations."""
    if other is None or len(trace.jaxpr.eqns) != len(other.jaxpr.eqns):
        return None
    heads = [(*x.jaxpr.constvars, *x.jaxpr.invars) for x in (trace, other)]
    if len(heads[0]) != len(heads[1]):
        return None
    twins = dict(zip(*heads, strict=True))
    for a, b in zip(trace.jaxpr.eqns, other.jaxpr.eqns, strict=True):
        if a.primitive.name != b.primitive.name or len(a.invars) != len(b.invars):
            return None
        for x, y in zip(a.invars, b.invars, strict=True):
            if is_literal(x) != is_literal(y) or (x.val != y.val if is_literal(x) else twins.get(x) is not y):
                return None
        twins.update(zip(a.outvars, b.outvars, strict=True))
    return twins


_ALONG = ("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp", "sort", "rev", "split")


def _keeps_layers(pairs: Iterator[tuple[Any, Any]], num_layers: int) -> bool:
    """Tell whether operations, each with its twin for one layer, treat layers separately."""
    for a, b in pairs:
        inner = list(zip(inner_jaxprs(a), inner_jaxprs(b), strict=True))
        if inner and (a.primitive.name in ("scan", "while", "cond") or "call" in a.primitive.name):
            if not all(_keeps_layers(zip(x.eqns, y.eqns, strict=True), num_layers) for x, y in inner):
                return False
            continue
        sizes = [
            [math.prod(x.aval.shape) / max(math.prod(y.aval.shape), 1) for x, y in zip(*atoms, strict=True)]
            for atoms in ((a.invars, b.invars), (a.outvars, b.outvars))
        ]
        if {*sizes[0], *sizes[1]} - {1, num_layers} or (num_layers > 1 and a.primitive.name in _ALONG):
            return False
        if num_layers in sizes[0] and num_layers > 1 and 1 in sizes[1]:
            return False
    return True


@dataclasses.dataclass(frozen=True)
class _Part:
    """Operations on the whole matrices of one leaf.

    Attributes:
      leaf: the leaf.
      layers: the number of leading layer dims that are a batch; the operations are traced for one layer.
      jaxpr: the operations, from `moved` and `shared` to `results`.
      moved, shared, results: variables of the update's trace: arrays of the leaf, other arrays, and results.
    """

    leaf: Leaf
    layers: int
    jaxpr: Any
    moved: Vars
    shared: Vars
    results: Vars

    def key(self, engine: Engine) -> Any:
        """Parts of equal keys are computed as one batch."""
        forms = [Form(engine, self.leaf, var.aval.shape, self.layers) for var in (*self.moved, *self.results)]
        return str(self.jaxpr), self.shared, tuple(form.key for form in forms)


class _Run:
    """Runs the trace of an update, in which some operations run on whole matrices."""

    def __init__(self, engine: Engine, trace: _Trace, labels: Mapping[Leaf, set[int]], one: _Trace | None):
        self.engine, self.trace = engine, trace
        self.owner = {i: leaf for leaf, eqns in labels.items() for i in eqns}
        twins = _pair_up(trace, one)
        self.one, self.twins = (one, twins) if one and twins else (trace, None)
        self.stage = self._stages()
        self.moves: list[Move] = []

    def _stages(self) -> list[int]:
        """Number the operations: one on whole matrices comes after all on split arrays with a smaller number."""
        stages: list[int] = []
        for i, eqn in enumerate(self.trace.jaxpr.eqns):
            before = [self.trace.made_by[x] for x in eqn.invars if not is_literal(x) and x in self.trace.made_by]
            is_whole = i in self.owner
            stages.append(max([int(is_whole), *(stages[j] + (is_whole and j not in self.owner) for j in before)]))
        return stages

    def run(self, values: Sequence[Any]) -> list[Any]:
        jaxpr = self.trace.jaxpr
        env = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*self.trace.consts, *values], strict=True))
        for stage in range(max(self.stage, default=0) + 1):
            for parts in self._batches(stage):
                with jax.named_scope(f"{SCOPE}.{MATRICES}.{parts[0].leaf.path}"):
                    env |= self._run_batch(parts, env)
            for i, eqn in enumerate(jaxpr.eqns):
                if self.stage[i] == stage and i not in self.owner:
                    found = eval_eqn(jaxpr, eqn, [read(env, atom) for atom in eqn.invars])
                    env.update(zip(eqn.outvars, found, strict=True))
        return [read(env, atom) for atom in jaxpr.outvars]

    def _batches(self, stage: int) -> list[list[_Part]]:
        by_leaf: dict[Leaf, list[int]] = {}
        for i, leaf in sorted(self.owner.items()):
            if self.stage[i] == stage:
                by_leaf.setdefault(leaf, []).append(i)
        batches: dict[Any, list[_Part]] = {}
        for leaf, eqns in by_leaf.items():
            part = self._part(leaf, eqns)
            batches.setdefault(part.key(self.engine), []).append(part)
        return list(batches.values())

    def _part(self, leaf: Leaf, indices: list[int]) -> _Part:
        eqns, inside = [self.trace.jaxpr.eqns[i] for i in indices], set(indices)
        made = [var for eqn in eqns for var in eqn.outvars]
        atoms = dict.fromkeys(x for eqn in eqns for x in eqn.invars if not is_literal(x) and x not in made)
        moved = tuple(x for x in atoms if self.trace.leaves.get(x))
        shared = tuple(x for x in atoms if x not in moved)
        results = tuple(x for x in made if set(self.trace.readers.get(x, ())) - inside)
        if leaf.stacked and (part := self._part_of_layers(leaf, indices, moved, shared, results)):
            return part
        return _Part(leaf, 0, only(self.trace.jaxpr, eqns, [*moved, *shared], results), moved, shared, results)

    def _part_of_layers(self, leaf: Leaf, indices: list[int], moved: Vars, shared: Vars, results: Vars) -> _Part | None:
        """Return a part with layers as a batch; None if an operation mixes layers."""
        if self.twins is None:
            return None
        eqns, twins = ([jaxpr.eqns[i] for i in indices] for jaxpr in (self.trace.jaxpr, self.one.jaxpr))
        if not _keeps_layers(zip(eqns, twins, strict=True), math.prod(leaf.shape[: leaf.stacked])):
            return None
        for var in (*moved, *results):
            if self.twins[var].aval.shape != _one_layer(var.aval.shape, leaf):
                return None
        made_again: list[int] = []
        needed, common = list(shared), []
        while needed:  # arrays of other shapes for one layer: made again from scalars
            var = needed.pop()
            if self.twins[var].aval.shape == var.aval.shape:
                common.append(var)
                continue
            i = self.trace.made_by.get(var)
            if i is None:
                return None
            eqn = self.trace.jaxpr.eqns[i]
            if eqn.primitive.name != "broadcast_in_dim" and not _is_elementwise(eqn):
                return None
            made_again.append(i)
            needed += [x for x in eqn.invars if not is_literal(x)]
        common = tuple(dict.fromkeys(common))
        all_eqns = [self.one.jaxpr.eqns[i] for i in sorted({*made_again, *indices})]
        given, wanted = ([self.twins[x] for x in some] for some in ((*moved, *common), results))
        return _Part(leaf, leaf.stacked, only(self.one.jaxpr, all_eqns, given, wanted), moved, common, results)

    def _run_batch(self, parts: Sequence[_Part], env: Mapping[Any, Any]) -> dict[Any, Any]:
        """Run parts of equal keys on whole matrices; return their results by variable."""
        found, moves = compute_whole(
            self.engine,
            [(part.leaf, part.layers) for part in parts],
            [[env[var] for var in part.moved] for part in parts],
            [[var.aval.shape for var in part.results] for part in parts],
            functools.partial(core.eval_jaxpr, parts[0].jaxpr, ()),
            [env[var] for var in parts[0].shared],
        )
        self.moves += moves
        pairs = [zip(part.results, some, strict=True) for part, some in zip(parts, found, strict=True)]
        return {var: x for some in pairs for var, x in some}
