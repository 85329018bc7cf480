"""A model and its layout: the ways to make a state, to take steps, and to evaluate."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfsdp.arguments import Count, Seed, Size, checked
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.driver.schedule import Prefetch
from jfsdp.engine.engine import stored_leaf, to_device, unpad_all
from jfsdp.engine.options import compiler_options, init_options
from jfsdp.engine.pipeline.schedule import Schedule
from jfsdp.engine.xla import XlaEngine
from jfsdp.layout.codec import scales_of
from jfsdp.layout.layout import Layout, num_parameters
from jfsdp.layout.lora import layer_shapes, part_shapes
from jfsdp.layout.loss_scale import LossScale
from jfsdp.layout.mesh import model_mesh, spans_run, split_mesh
from jfsdp.layout.report import describe_mesh, list_differences
from jfsdp.modules.adapted import create_adapters, decode_all
from jfsdp.modules.model import FlaxModel
from jfsdp.train import state as states
from jfsdp.train.checks import check_donated, check_lowers, check_sharding, check_state
from jfsdp.train.process_checks import compare_inputs
from jfsdp.train.state import TrainState
from jfsdp.train.step.config import StepConfig
from jfsdp.train.step.grad_step import ApplyStep, GradStep, named_gradients
from jfsdp.train.step.inspect_loss import LossFn
from jfsdp.train.step.step import TrainStep
from jfsdp.train.update.optimizer import ShardedOptimizer
from jfsdp.train.update.roles import Role
from jfsdp.train.update.update import Update

# Compiled updates that `apply_gradients` keeps.
_MOST_UPDATES = 8


@checked
class ShardedModel:
    """A model and its layout. The arrays are in the `TrainState` that `init` returns; a model given as an instance is
    kept too, for as long as this object lives.
    """

    def __init__(self, model: FlaxModel, layout: Layout, mesh: Mesh | AbstractMesh, loss_scale: LossScale | None):
        self.model, self.layout, self.loss_scale = model, layout, loss_scale
        self.mesh = split_mesh(mesh, layout.sub_axes)  # type: ignore[arg-type]
        self.engine = XlaEngine(layout, self.mesh)
        self.apply = ShardedApply(model, self.engine)
        self._apply_steps: dict[Any, ApplyStep] = {}

    def __repr__(self) -> str:
        (root,) = (unit.cls for unit in self.layout.units if not unit.name)
        counted = f"{num_parameters(self.layout.leaves):,} parameters, {len(self.layout.units)} units"
        return f"ShardedModel({root}, {describe_mesh(self.layout)}: {counted})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse a call: the arrays are in a state."""
        raise TypeError(
            "a ShardedModel has no arrays, and is not called: model.forward(lambda model, x: model(x))(state, x) "
            "evaluates it, and a loss function calls the model that it is given"
        )

    def abstract_state(self, tx: optax.GradientTransformation) -> TrainState:
        """Return shapes, dtypes and shardings of the state that `init` makes. Moves no data and needs no devices."""
        return states.abstract_state(self._optimizer(tx), self.model.state, self.loss_scale)

    def init(self, tx: optax.GradientTransformation, seed: Seed = 0) -> TrainState:
        """Make the first state, born sharded: the same seed gives the same bits on every mesh and strategy.

        Layout:  each leaf directly as its `param` stage says.
        Memory:  a device computes its part of each leaf only. A model given as an instance keeps its weights; they are
                 moved from where they are.

        Raises:
          ValueError: for an instance without weights, as `nnx.eval_shape` makes it.
        """
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError("init: the mesh has no devices; build the model on jfsdp.make_mesh()")
        if self.model.instance is None:
            return self._compile_init(tx)(seed)
        _check_values(self.model.instance)
        params, model_state = self.model.create(seed)
        shapes = self.leaf_shapes()
        stored = {
            path: jax.device_put(stored_leaf(value, self.layout.by_path[path]), shapes[path].sharding)
            for path, value in params.items()
        }
        make = functools.partial(states.make_state, self._optimizer(tx), loss_scale=self.loss_scale)
        return jax.jit(make, out_shardings=self._shardings(tx))(stored, jax.device_put(model_state, self._whole()))

    def init_from(
        self, tx: optax.GradientTransformation, params: Mapping[str, jax.Array], seed: Seed = 0
    ) -> TrainState:
        """Make the first state around parameters that are on the devices already; they are given up.

        Layout:  each leaf in its stored shape, as its `param` stage says (`leaf_shapes`).
        Memory:  the state; no second copy of the parameters.

        Args:
          params: by name, every leaf; parts of adapters may be left out, all or none, and are made as `init` does, as
            are numbers of layers.
          seed: of the rest of the model's state (rng keys).

        Raises:
          ValueError: listing the parameters that are missing, unknown, or of another shape or dtype; as `init`.
        """
        params = {**self._first_adapters(params, seed), **params}
        if lines := _differences(params, self.leaf_shapes(), ("params have", "model.leaf_shapes() has")):
            raise ValueError(
                f"init_from: params are not the leaves of this model:\n{lines}\n  give one array for each of "
                "model.leaf_shapes(), of its shape and dtype"
            )
        with model_mesh(self.mesh):
            keys = jax.jit(lambda seed: self.model.create(seed)[1]) if self.model.instance is None else None
            model_state = keys(seed) if keys is not None else self.model.create(seed)[1]
        _check_values(model_state)
        make = functools.partial(states.make_state, self._optimizer(tx), loss_scale=self.loss_scale)
        made = jax.jit(make, out_shardings=self._shardings(tx), donate_argnums=0)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # those that are cut
            return made(dict(params), jax.device_put(model_state, self._whole()))

    def adopt(self, state: TrainState, tx: optax.GradientTransformation) -> TrainState:
        """Go on from a state of the same model that trained other leaves, or with another optimizer; it is given up.

        Adapters that the state has not are made as `init` makes them, beside the weights that it has.

        Of the optimizer's state, what has the same name, shape and dtype is kept (moments, the count of updates); what
        is new is as `tx.init` makes it, and what `tx` has no place for is dropped.

        Layout:  as `init`; parameters and what is kept stand there already, where only frozen leaves differ.
        Memory:  the state, and for a moment the old optimizer's state.

        Raises:
          ValueError: listing the parameters that are stored in another shape or dtype.
        """
        states.check_live("adopt", state)
        leaves, wanted = state.params, self.leaf_shapes()
        added = {*part_shapes(self.model.adapters), *layer_shapes(self.model.adapters)}
        wanted = {path: x for path, x in wanted.items() if path in leaves or path not in added}
        if lines := _differences(leaves, wanted, ("the state stores", "this model")):
            raise ValueError(
                f"adopt takes a state of the same model on the same mesh, and adds adapters; of this state leaves are\n"
                f"{lines}\n  first move it, by jfsdp.checkpoint.reshard, to one that stores as this model does"
            )
        fresh = self.init_from(tx, {path: jax.device_put(leaves[path], x.sharding) for path, x in wanted.items()})
        kept = dict(zip((role.name for role in state.roles.arrays), jax.tree.leaves(state.opt_state)))

        def take(role: Role, new: jax.Array) -> jax.Array:
            old = kept.get(role.name, new)
            return jax.device_put(old, new.sharding) if (old.shape, old.dtype) == (new.shape, new.dtype) else new

        return dataclasses.replace(
            fresh,
            step=state.step,
            opt_state=fresh.roles.map(take, fresh.opt_state),
            model_state={name: state.model_state.get(name, x) for name, x in fresh.model_state.items()},
            num_skipped=state.num_skipped,
            loss_scale=(state.loss_scale if fresh.loss_scale else {}) or fresh.loss_scale,
        )

    def leaf_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the leaves as they are stored one by one: shape, dtype and sharding."""
        return {leaf.path: self.layout.abstract(self.mesh, leaf, "param") for leaf in self.layout.leaves}

    def adapter_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return those of `leaf_shapes` that are parts of low-rank adapters."""
        parts = part_shapes(self.model.adapters)
        return {name: shape for name, shape in self.leaf_shapes().items() if name in parts}

    def trained_arrays(self, state: TrainState) -> dict[str, np.ndarray]:
        """Return the leaves of a state that are trained, whole, on the host.

        Cost:    one all-gather of each that is split. With several processes each calls it.
        """
        check_state(state, self.layout, self.loss_scale)
        leaves = state.params
        shapes = {leaf.path: leaf.shape for leaf in self.layout.leaves if leaf.trainable}
        return {name: np.asarray(self._whole_leaf(leaves[name], shape)) for name, shape in shapes.items()}

    def _first_adapters(self, params: Mapping[str, jax.Array], seed: Any) -> dict[str, jax.Array]:
        """Make what is not given of the adapters of parameters on the devices, as `init` makes them."""
        adapters, parts = self.model.adapters, self.adapter_shapes()
        missing = {*layer_shapes(adapters)} | ({*parts} if not parts.keys() & params.keys() else set())
        if not missing - params.keys():
            return {}
        shapes = {path: x for path, x in self.leaf_shapes().items() if path in missing}
        normed = [path for path, one in adapters.items() if one.has_magnitude]
        wanted = {name for path in normed for name in (path, scales_of(path))}
        adapted = {path: value for path, value in params.items() if path in wanted}

        def make(adapted: dict[str, jax.Array], seed: Any) -> dict[str, jax.Array]:
            here = {path: to_device(x) for path, x in adapted.items()}
            logical = decode_all(self.model.codecs, unpad_all(self.engine.pairs(here), here))
            made = create_adapters(adapters, logical, seed)
            return {path: stored_leaf(x, self.layout.by_path[path]) for path, x in made.items() if path in missing}

        return jax.jit(make, out_shardings={path: x.sharding for path, x in shapes.items()})(adapted, seed)

    def lower_init(self, tx: optax.GradientTransformation) -> Any:
        """Lower `init` of a model given as a factory; the devices of a deviceless topology will do."""
        check_lowers(self.mesh)
        return self._compile_init(tx).lower(jax.ShapeDtypeStruct((), jax.numpy.int32))

    def _compile_init(self, tx: optax.GradientTransformation) -> Any:
        def make(seed: Any) -> TrainState:
            with model_mesh(self.mesh):
                params, model_state = self.model.create(seed)
            stored = {path: stored_leaf(value, self.layout.by_path[path]) for path, value in params.items()}
            return states.make_state(self._optimizer(tx), stored, model_state, self.loss_scale)

        return jax.jit(make, out_shardings=self._shardings(tx), compiler_options=init_options(self.mesh))

    def _shardings(self, tx: optax.GradientTransformation) -> TrainState:
        return states.state_shardings(self.layout, self.mesh, self.abstract_state(tx))

    def _whole(self) -> NamedSharding:
        return NamedSharding(self.mesh, PartitionSpec())  # type: ignore[arg-type]

    def train_step(
        self,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        *,
        accumulate: Count = 1,
        program: str | None = None,
        prefetch: Size | Prefetch | None = None,
        sync: str | None = None,
        reshard_after_backward: bool | Mapping[str, bool] = True,
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
        check_loss: bool = True,
        pipe_schedule: str | Schedule = "1f1b",
        pipe_repeats: Count = 1,
    ) -> TrainStep:
        """Make the training step `state, metrics = step(state, batch)`.

        Args:
          loss_fn: `f(model, batch)` with the user's model as they wrote it. Returns a scalar, the mean over the
            rows that it is given, or with metrics `scalar, aux`; or a `Loss`, a sum with its weight. This decides the
            step's program (see `StepConfig`), and with `accumulate` a scalar is the mean of the microbatches' means.
          tx: any optax transformation whose state `init` was given.
          max_grad_norm, skip_nonfinite, compiler_options, check_loss, and all others: see `StepConfig`.

        Raises:
          ValueError: for an optimizer or a reduction that this layout cannot have.
        """
        accumulate, pipe_repeats = int(accumulate), int(pipe_repeats)
        return TrainStep(self.apply, loss_fn, tx, StepConfig.of(locals()), self.loss_scale)

    def _optimizer(self, tx: optax.GradientTransformation) -> ShardedOptimizer:
        return ShardedOptimizer(self.engine, self.model.tree, tx)

    def forward(self, fn: Callable[..., Any], *, donate: Sequence[Size] = ()) -> Callable[..., Any]:
        """Compile `fn(model, *inputs)` for a state: returns `f(state, *inputs)`. For evaluation and generation.

        Layout:  inputs as they come; outputs as XLA leaves them. With several processes, an input that is not a global
                 array is the same in all of them; rows of each process's own go through `TrainStep.shard_batch` first.
        Cost:    every unit is gathered once per call of the unit. State that the model changes is dropped. With several
                 processes, the first call compares inputs that have dims and are not global arrays.

        Args:
          donate: which of the inputs, counted from 0, are given up: their memory is that of outputs like them.

        Raises:
          ValueError: for places in `donate` that no input has; in every process, if an input that is to be the same in
            all differs between them.
        """

        def run(state: TrainState, *inputs: Any) -> Any:
            if not isinstance(state, TrainState):
                raise TypeError(
                    f"the state given is a {type(state).__name__}; an evaluation is called f(state, *inputs)"
                )
            check_sharding(state, self.layout)
            check_donated(donate, len(inputs))
            with model_mesh(self.mesh):
                return self.apply(fn, state.source, state.model_state, *inputs)[0]

        given_up = tuple(place + 1 for place in donate)
        compiled = jax.jit(run, compiler_options=compiler_options(self.mesh), donate_argnums=given_up)
        first_checks = [compare_inputs] if spans_run(self.mesh) else []

        def call(state: TrainState, *inputs: Any) -> Any:
            while first_checks:
                first_checks.pop()(inputs)
            return compiled(state, *inputs)

        return call if first_checks else compiled

    def grads(
        self,
        loss_fn: LossFn,
        *,
        accumulate: Count = 1,
        program: str | None = None,
        prefetch: Size | Prefetch | None = None,
        sync: str | None = None,
        reshard_after_backward: bool | Mapping[str, bool] = True,
        skip_nonfinite: bool = False,
        compiler_options: Mapping[str, Any] | None = None,
        check_loss: bool = True,
        pipe_schedule: str | Schedule = "1f1b",
        pipe_repeats: Count = 1,
    ) -> GradStep:
        """Make the gradients of a loss for a loop of one's own: `state, grads, metrics = grads_fn(state, batch)`.

        Args:
          skip_nonfinite: leave the model's other state as it was where the loss or a gradient is not finite.
          loss_fn, and all others: as in `train_step`.
        """
        accumulate, pipe_repeats = int(accumulate), int(pipe_repeats)
        return GradStep(self.apply, loss_fn, StepConfig.of(locals()), self.loss_scale)

    def apply_gradients(
        self,
        state: TrainState,
        grads: Any,
        tx: optax.GradientTransformation,
        *,
        skip_nonfinite: bool = False,
        **extra: Any,
    ) -> TrainState:
        """Update a state with gradients; the state given is donated, the gradients are not.

        Args:
          grads: a tree like the one that `grads` returns, in stored or logical shapes; those of frozen leaves are left
            out.
          tx: the optimizer that `init` was given. The update is compiled once for each: make it outside the loop.
          skip_nonfinite: leave the state as it was (but for `step` and `num_skipped`) where a gradient is not finite.
          extra: what `tx.update` takes besides, by name: arrays and numbers, the same in every process, are traced,
            anything else is static.

        Raises:
          ValueError: naming the parameter whose gradient is missing or of another shape, or what `tx` would ignore of
            `extra`; for the state of another tx.
        """
        check_state(state, self.layout, self.loss_scale)
        named = named_gradients(self.layout, self.mesh, self.model.tree, grads)
        kinds = (jax.Array, np.ndarray, np.generic, float, int)
        arrays = {name: x for name, x in extra.items() if isinstance(x, kinds) and not isinstance(x, bool)}
        static = {name: x for name, x in extra.items() if name not in arrays}
        if not all(isinstance(x, Hashable) for x in static.values()):
            raise ValueError(f"apply_gradients: {', '.join(static)}: what is no array must be hashable, as a tuple is")
        key = tx, skip_nonfinite, tuple(sorted(arrays)), tuple(sorted(static.items()))
        if key not in self._apply_steps:
            while len(self._apply_steps) >= _MOST_UPDATES:
                self._apply_steps.pop(next(iter(self._apply_steps)))
            update = Update(self._optimizer(tx), self.loss_scale, skip_nonfinite)
            self._apply_steps[key] = ApplyStep(update, static)
        return self._apply_steps[key](dataclasses.replace(state, layout=self.layout), named, arrays)

    def to_flax(self, state: TrainState) -> Any:
        """Return the plain model with the weights of a state: an `nnx.Module`, or the variables of a Linen module.

        Layout:  [D+pad/axes F] -> [D F] on the first device of this process, in the dtype at rest;
                 matrices with an adapter in the dtype that the model makes them in.
        Cost:    one all-gather per parameter, one after another. With several processes each calls it.
        Memory:  the whole model on that device; of one parameter at a time, all of it on every device. The arrays are
                 copies: the state may be trained on.
        """
        check_state(state, self.layout, self.loss_scale)
        params = {path: self._whole_leaf(x, self.layout.by_path[path].shape) for path, x in state.params.items()}
        return self.model.plain(params, {name: self._whole_leaf(x, x.shape) for name, x in state.model_state.items()})

    def _whole_leaf(self, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        whole = jax.device_put(value, self._whole(), may_alias=False).addressable_data(0)
        return whole[tuple(map(slice, shape))]


def _check_values(arrays: Any) -> None:
    """Refuse shapes in place of arrays."""
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        if isinstance(x, jax.ShapeDtypeStruct):
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"{name}: was given as a shape without values, as nnx.eval_shape makes it; give fully_shard what makes "
                "the model, such as lambda rngs: Net(rngs)"
            )


def _differences(given: Mapping[str, Any], wanted: Mapping[str, Any], owners: tuple[str, str]) -> str:
    """List how leaves differ from those that a model stores: in names, dtypes and shapes; "": not at all."""
    there, here = ({path: f"{x.dtype}{list(x.shape)}" for path, x in of.items()} for of in (given, wanted))
    kinds = ("unknown to the model", "missing", "of another shape or dtype")
    return list_differences(there, here, owners=owners, kinds=kinds)
