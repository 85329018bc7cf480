"""Updates that need whole matrices, such as Muon's: every matrix is updated on one device.

[Note: where an update is computed]
An update is a program on arrays that are split over devices. Operations by element, and reductions to small arrays, run
on the split arrays. Others (products, transpositions, decompositions) need whole matrices. An array that is used in
both forms is moved by an all-to-all. The choice of a form for each operation is a minimum cut of the update's trace:
gradients, states and updates are split, products are not, and every moved array costs its bytes. For Muon two arrays
of each matrix are moved: the momentum before the first product, and the update after the last.

Layers of a stack, and leaves of equal shapes, are matrices of one batch. A second trace, with stacks of one layer, is
the computation of one matrix. The dims in which it differs from the first are those of layers. An operation treats
layers separately if every operand with such dims keeps them, by rules for each kind of operation. If one does not, or
has no rule, the whole stack is one matrix.
"""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax

from jfsdp.arguments import checked
from jfsdp.compat import warn
from jfsdp.engine.driver.program import eval_eqn, inline_jits, is_jit, only, read
from jfsdp.engine.engine import SCOPE, Engine
from jfsdp.engine.movements import ALL_TO_ALL, GATHER, MATRICES, Move, wire_bytes
from jfsdp.jaxprs import all_eqns, inner_jaxprs, is_literal, scan_counts
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.precision import item_bytes
from jfsdp.layout.select import Selectors, select_leaves
from jfsdp.modules.model import ParamTree
from jfsdp.train.update.exchange import Form, Part, compute_whole

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

    def has_product(eqns: Sequence[Any]) -> bool:  # a product of vectors is a reduction
        found = (x for x in all_eqns(closed.jaxpr.replace(eqns=eqns)) if x.primitive.name in _PRODUCTS)
        return any(x.outvars[0].aval.shape for x in found)

    if not has_product(closed.jaxpr.eqns):
        return
    trace = _Trace(engine, closed, _split_leaves(engine, tree, shapes))
    eqns = {leaf: [trace.eqns[i] for i in some] for leaf, some in trace.of_leaf.items()}
    found = [x for x, some in eqns.items() if has_product([e for e in some if e.primitive.name != "shard_map"])]
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


def _split_leaves(engine: Engine, tree: ParamTree, given: Any) -> list[Leaf | None]:
    """Return for each array of an update's arguments its leaf, if this is trained and split."""
    names = [tree.find(path)[1] or "" for path, _ in jax.tree_util.tree_leaves_with_path(given)]
    trained = {leaf.path: leaf for leaf in engine.layout.leaves if leaf.trainable}
    split = {path: leaf for path, leaf in trained.items() if Form(engine, leaf, leaf.shape, leaf.stacked).splits}
    return [split.get(name) for name in names]


def _run_by_matrix(
    engine: Engine, tree: ParamTree, moves: list[Move], selectors: Selectors, update: Callable[[Any], Any], given: Any
) -> Any:
    leaves, (values, structure) = _split_leaves(engine, tree, given), jax.tree.flatten(given)

    def make_trace(shapes: Sequence[tuple[int, ...]]) -> tuple[_Trace, Any]:
        abstract = [jax.ShapeDtypeStruct(shape, x.dtype) for shape, x in zip(shapes, values, strict=True)]
        closed, results = jax.make_jaxpr(update, return_shape=True)(structure.unflatten(abstract))
        return _Trace(engine, closed, leaves), jax.tree.structure(results)

    trace, after = make_trace([x.shape for x in values])
    costs = {leaf: {i: _split_cost(trace.eqns[i]) for i in some} for leaf, some in trace.of_leaf.items()}
    costs = {leaf: some for leaf, some in costs.items() if math.inf in some.values()}
    if selectors is not None:
        selected = _select(engine, selectors, leaves, [leaf.path for leaf in costs])
        costs = {leaf: some for leaf, some in costs.items() if leaf.path in selected}
    if not costs:
        return update(given)
    if any(leaf.stacked for leaf in costs):
        with contextlib.suppress(TypeError, ValueError):  # the update may fail with stacks of one layer
            one, _ = make_trace([_one_layer(x.shape, leaf) for x, leaf in zip(values, leaves, strict=True)])
            if _without_sizes(trace.jaxpr) == _without_sizes(one.jaxpr):
                trace.one, trace.twins = one.jaxpr, dict(zip(trace.twins, one.twins, strict=True))
    whole = {i: leaf for leaf, some in costs.items() for i in trace.cheapest(leaf, some)}
    return after.unflatten(trace.run(values, whole, moves))


def _select(engine: Engine, selectors: Selectors, split: Collection[Leaf | None], found: list[str]) -> Collection[str]:
    trained = {leaf.path: leaf for leaf in engine.layout.leaves if leaf.trainable}
    shapes = {path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in trained.items()}
    selected = select_leaves("by_matrix: matrices=", selectors, shapes, {})
    for path, selector in selected.items():
        leaf = trained[path]
        if path not in found and (leaf in split or len(leaf.shape) - leaf.stacked < 2):
            raise ValueError(
                f"by_matrix: matrices={selector} selects {path} of shape {leaf.shape}, whose update needs no "
                f"whole matrix; select {', '.join(found[:3]) or 'nothing: use the optimizer without by_matrix'}"
            )
    return selected


def _split_cost(eqn: Any) -> float:
    """Return the bytes that an operation on split arrays sends; infinite if it needs whole matrices."""
    name, out = eqn.primitive.name, eqn.outvars[0].aval
    shapes = [atom.aval.shape for atom in eqn.invars]
    if max(map(math.prod, shapes), default=1) <= 1 or _is_by_element(eqn):
        return 0
    if name in ("reshape", "squeeze", "expand_dims"):  # only dims of size 1 come or go
        dims = [[size for size in shape if size != 1] for shape in (shapes[0], out.shape)]
        return 0 if dims[0] == dims[1] else math.inf
    return 2 * out.size * out.dtype.itemsize if name.startswith(("reduce_", "arg")) else math.inf


_ELEMENTWISE: dict[Any, bool] = {}


def _is_by_element(eqn: Any) -> bool:
    """Tell whether an operation broadcasts, or accepts scalars in place of arrays of one shape (or of size 1)."""
    avals = [atom.aval for atom in (*eqn.invars, *eqn.outvars)]
    sizes = [list(zip(x.shape, avals[-1].shape, strict=False)) for x in avals if x.shape]
    fits = all(len(some) == len(avals[-1].shape) and all(n in (1, m) for n, m in some) for some in sizes)
    if inner_jaxprs(eqn) or not fits or eqn.primitive.name in ("broadcast_in_dim", "sort"):  # JAX sorts scalars too
        return eqn.primitive.name == "broadcast_in_dim"
    key = (eqn.primitive, str(eqn.params), *(str(x.dtype) for x in avals))
    if key not in _ELEMENTWISE:
        scalars = [jax.ShapeDtypeStruct((), atom.aval.dtype) for atom in eqn.invars]
        try:
            found = jax.eval_shape(lambda *values: eqn.primitive.bind(*values, **eqn.params), *scalars)
            _ELEMENTWISE[key] = all(x.shape == () for x in jax.tree.leaves(found))
        except (TypeError, ValueError, IndexError, AssertionError, NotImplementedError):
            _ELEMENTWISE[key] = False
    return _ELEMENTWISE[key]


# ---- layers


def _one_layer(shape: tuple[int, ...], leaf: Leaf | None) -> tuple[int, ...]:
    num = leaf.stacked if leaf and shape[: leaf.stacked] == leaf.shape[: leaf.stacked] else 0
    return (*[1] * num, *shape[num:])


def _variables(jaxpr: Any) -> list[Any]:
    return [*jaxpr.constvars, *jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]


def _without_sizes(jaxpr: Any) -> Any:
    """Return the operations of a jaxpr, also inner ones, with operands, literals and numbers of dims."""
    place = {var: (i, len(var.aval.shape)) for i, var in enumerate(_variables(jaxpr))}
    read = lambda x: np.asarray(x.val).tolist() if is_literal(x) else place[x]  # noqa: E731
    eqns = [(x.primitive, *map(read, x.invars), *map(_without_sizes, inner_jaxprs(x))) for x in jaxpr.eqns]
    return list(place.values()), eqns, [read(x) for x in jaxpr.outvars]


_CALLS = {"jit", "pjit", "closed_call", "checkpoint", "custom_jvp_call", "custom_vjp_call", "custom_linear_solve"}
_BODIES = {"scan", "while", "cond", *_CALLS}
_BY_LAYER = {"squeeze", "expand_dims", "slice", "dynamic_slice", "concatenate", "argmax", "argmin", *_PRODUCTS}
_BY_LAYER |= {f"reduce_{name}" for name in ("sum", "max", "min", "prod", "and", "or")}


def _keeps_layers(eqn: Any, one: Any, num: int) -> bool:
    """Tell whether an operation treats `num` layers separately; `one` is the same operation for one layer."""
    atoms = zip((*eqn.invars, *eqn.outvars), (*one.invars, *one.outvars), strict=True)
    shapes = [(x.aval.shape, y.aval.shape) for x, y in atoms]
    dims = [[dim for dim in range(len(a)) if a[dim] != b[dim]] for a, b in shapes]  # of layers
    sizes = {tuple(math.prod(x[dim] for dim in some) for x in pair) for pair, some in zip(shapes, dims, strict=True)}
    name, given, made = eqn.primitive.name, dims[: len(eqn.invars)], dims[len(eqn.invars) :]
    if sizes - {(1, 1), (num, 1)}:
        return False
    if name in _BODIES:  # the operations inside are separate; a carry mixes layers if a scan is over them
        return name != "scan" or eqn.params["length"] == one.params["length"] or not scan_counts(eqn)[1]
    if not any(given):
        return not any(made) or name == "broadcast_in_dim"
    if name == "transpose":
        return [dim for dim in eqn.params["permutation"] if dim in given[0]] == given[0]
    if name == "reshape":  # layers come first
        return all(some and math.prod(a[: some[-1] + 1]) == num for (a, _), some in zip(shapes, dims, strict=True))
    if name in ("dot_general", "gather") and all(given):
        numbers = eqn.params["dimension_numbers"]
        batch = numbers[1] if name == "dot_general" else numbers[-2:]  # batch dims of the operands
        return set(zip(*given, strict=False)) <= set(zip(*batch, strict=True))
    if name == "sort":
        return all(given) and eqn.params["dimension"] not in given[0]
    if name in _PRODUCTS - {"dot_general"} and max(given[0], default=-1) >= len(shapes[0][0]) - 2:
        return False
    return all(made) and (name in _BY_LAYER or _is_by_element(eqn))


# ---- operations on whole matrices


class _Trace:
    """The trace of an update, without calls, with the leaves that its values depend on.

    Attributes:
      made_by, readers: the operations that make and read each variable; a result of the update has reader -1.
      leaves: the leaves that each variable depends on.
      of_leaf: the operations that depend on one leaf only, by leaf.
      one, twins: the same operations for stacks of one layer, if there are such, and their variables.
    """

    def __init__(self, engine: Engine, closed: Any, leaves: Sequence[Leaf | None]):
        closed = inline_jits(closed, is_jit)
        self.engine, self.jaxpr, self.eqns, self.consts = engine, closed.jaxpr, closed.jaxpr.eqns, closed.consts
        self.one, self.twins = self.jaxpr, {var: var for var in _variables(self.jaxpr)}
        self.readers: dict[Any, set[int]] = {var: set() for var in self.twins}
        self.leaves: dict[Any, set[Leaf]] = {var: set() for var in self.twins}
        self.leaves |= {var: {leaf} for var, leaf in zip(self.jaxpr.invars, leaves, strict=True) if leaf}
        self.made_by: dict[Any, int] = {}
        self.of_leaf: dict[Leaf, list[int]] = {}
        for var in (atom for atom in self.jaxpr.outvars if not is_literal(atom)):
            self.readers[var].add(-1)
        for i, eqn in enumerate(self.eqns):
            found: set[Leaf] = set()
            for var in _inputs(eqn):
                self.readers[var].add(i)
                found |= self.leaves[var]
            if len(found) > 1 and all(var.aval.size == 1 for var in eqn.outvars):
                found = set()  # such as a global norm: its value is on every device
            for var in eqn.outvars:
                self.leaves[var], self.made_by[var] = found, i
            if len(found) == 1:
                self.of_leaf.setdefault(next(iter(found)), []).append(i)

    def cheapest(self, leaf: Leaf, costs: Mapping[int, float]) -> list[int]:
        """Choose operations of a leaf to run on whole matrices, so that the fewest bytes are moved: a minimum cut.

        Args:
          costs: the bytes that the leaf's operations send on split arrays.
        """
        from scipy.sparse import csr_matrix  # a dependency of JAX; slow to import
        from scipy.sparse.csgraph import breadth_first_order, maximum_flow

        node = {i: place for place, i in enumerate(costs, start=2)}  # 0: on whole matrices; 1: on split arrays
        edges = {(0, node[i]): cost for i, cost in costs.items() if cost}
        count = len(node) + 2
        atoms = (x for i in costs for x in (*_inputs(self.eqns[i]), *self.eqns[i].outvars) if leaf in self.leaves[x])
        for var in dict.fromkeys(atoms):
            made, *readers = (node.get(i, 1) for i in (self.made_by.get(var, -1), *self.readers[var]))
            form = Form(self.engine, leaf, var.aval.shape, leaf.stacked)
            size = var.aval.size * var.aval.dtype.itemsize / math.prod(num for _, num in form.splits.values())
            edges[count, made] = edges[made, count + 1] = max(size, 1)
            for reader in readers:
                edges[reader, count] = edges[count + 1, reader] = math.inf
            count += 2
        sizes = np.array(list(edges.values()), float)
        unit = max(sizes[np.isfinite(sizes)].sum() / 2**24, 1)
        capacity = np.minimum(np.ceil(sizes / unit), 2**30).astype(np.int32)
        graph = csr_matrix((capacity, tuple(zip(*edges, strict=True))), shape=(count, count))
        rest = graph - maximum_flow(graph, 0, 1).flow
        whole = breadth_first_order(rest, 0, return_predecessors=False)
        return [i for i in costs if node[i] in whole]

    def run(self, values: Sequence[Any], whole: Mapping[int, Leaf], moves: list[Move]) -> list[Any]:
        """Return the results of the update.

        Args:
          whole: the operations that run on whole matrices, with their leaves.
          moves: a list to which the movements are added.
        """
        env = dict(zip([*self.jaxpr.constvars, *self.jaxpr.invars], [*self.consts, *values], strict=True))
        waiting = list(range(len(self.eqns)))
        while waiting:
            indices, waiting, of_leaf = waiting, [], {}
            for i in indices:
                missing = {self.made_by[x] for x in _inputs(self.eqns[i]) if x not in env}
                if i in whole and missing <= of_leaf.get(whole[i], set()):
                    of_leaf.setdefault(whole[i], set()).add(i)
                elif i in whole or missing:
                    waiting.append(i)
                else:
                    found = eval_eqn(self.jaxpr, self.eqns[i], [read(env, atom) for atom in self.eqns[i].invars])
                    env.update(zip(self.eqns[i].outvars, found, strict=True))
            batches: dict[Any, list[Part]] = {}
            for part in itertools.starmap(self._part, of_leaf.items()):
                batches.setdefault(part.key(self.engine), []).append(part)
            for parts in batches.values():
                with jax.named_scope(f"{SCOPE}.{MATRICES}.{parts[0].leaf.path}"):
                    found, moved = compute_whole(self.engine, parts, env)
                env |= found
                moves += moved
        return [read(env, atom) for atom in self.jaxpr.outvars]

    def _part(self, leaf: Leaf, inside: set[int]) -> Part:
        for i in reversed(range(max(inside))):  # arrays made of scalars are made again
            var = self.eqns[i].outvars[0]
            if self.readers[var] & inside and not self.leaves[var] and var.aval.shape and _is_by_element(self.eqns[i]):
                inside.add(i)
        eqns, ones = ([jaxpr.eqns[i] for i in sorted(inside)] for jaxpr in (self.jaxpr, self.one))
        made = [var for eqn in eqns for var in eqn.outvars]
        given = dict.fromkeys(x for eqn in eqns for x in _inputs(eqn) if x not in made)
        moved, shared = ([x for x in given if bool(self.leaves[x]) is is_moved] for is_moved in (True, False))
        results = [x for x in made if self.leaves[x] and self.readers[x] - inside]
        num = math.prod(leaf.shape[: leaf.stacked])
        shapes = {x: _one_layer(x.aval.shape, leaf if self.leaves[x] else None) for x in (*given, *results)}
        pairs = zip(*(all_eqns(self.jaxpr.replace(eqns=some)) for some in (eqns, ones)), strict=True)
        if (
            all(self.twins[x].aval.shape == shape for x, shape in shapes.items())
            and all(x.aval.shape[: leaf.stacked] == leaf.shape[: leaf.stacked] for x in results)
            and all(_keeps_layers(a, b, num) for a, b in pairs)
        ):
            inputs, outputs = ([self.twins[x] for x in some] for some in ([*moved, *shared], results))
            return Part(leaf, leaf.stacked, only(self.one, ones, inputs, outputs), moved, shared, results)
        return Part(leaf, 0, only(self.jaxpr, eqns, [*moved, *shared], results), moved, shared, results)


def _inputs(eqn: Any) -> list[Any]:
    return [atom for atom in eqn.invars if not is_literal(atom)]
