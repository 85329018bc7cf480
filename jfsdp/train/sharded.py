"""A sharded model: makes states, training steps and evaluations."""

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

# How many compiled updates `apply_gradients` keeps.
_MAX_UPDATES = 8


@checked
class ShardedModel:
    """A model and its layout, without arrays.

    The arrays are in the `TrainState` that `init` returns. An instance passed as the model is kept as well.
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
        """Raise: a ShardedModel has no arrays."""
        raise TypeError(
            "a ShardedModel has no arrays and cannot be called; evaluate it with model.forward(lambda model, x: "
            "model(x))(state, x); in a loss function call the model that it receives"
        )

    def abstract_state(self, tx: optax.GradientTransformation) -> TrainState:
        """Return shapes, dtypes and shardings of the state that `init` makes. Moves no data and needs no devices."""
        return states.abstract_state(self._optimizer(tx), self.model.state, self.loss_scale)

    def init(self, tx: optax.GradientTransformation, seed: Seed = 0) -> TrainState:
        """Make the first state, created sharded: one seed gives the same bits for every mesh and strategy.

        Layout:  each leaf directly in the layout of its `param` stage.
        Memory:  a device computes only its shard of each leaf. The weights of a model passed as an instance are moved
                 from their devices.

        Raises:
          ValueError: for an instance without weights, such as `nnx.eval_shape` makes.
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
        return jax.jit(make, out_shardings=self._shardings(tx))(stored, jax.device_put(model_state, self._replicated()))

    def init_from(
        self, tx: optax.GradientTransformation, params: Mapping[str, jax.Array], seed: Seed = 0
    ) -> TrainState:
        """Make the first state from parameters that are on the devices; they are donated.

        Layout:  each leaf in its stored shape, in the layout of its `param` stage (`leaf_shapes`).
        Memory:  the state; no second copy of the parameters.

        Args:
          params: every leaf, by name. The parts of adapters may be left out, all or none, and so may numbers of layers;
            they are then made as in `init`.
          seed: seed of the model's other state (rng keys).

        Raises:
          ValueError: listing the parameters that are missing, unknown, or of another shape or dtype; as `init`.
        """
        params = {**self._init_adapters(params, seed), **params}
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
            warnings.filterwarnings("ignore", "Some donated buffers were not usable")  # of leaves that are cut
            return made(dict(params), jax.device_put(model_state, self._replicated()))

    def adopt(self, state: TrainState, tx: optax.GradientTransformation) -> TrainState:
        """Continue from a state of the same model with other trained leaves or another optimizer; it is donated.

        Adapters that the state lacks are made as in `init`. Arrays of the optimizer's state with the same name, shape
        and dtype are kept (moments, the count of updates); new ones are initialized by `tx.init`, and others dropped.

        Layout:  as `init`; no array moves if only frozen leaves differ.
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
                f"adopt: the state differs from this model in leaves other than adapters:\n{lines}\n  first move it to "
                "a layout of this model with jfsdp.checkpoint.reshard"
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
        """Return the stored shape, dtype and sharding of every leaf, by name."""
        return {leaf.path: self.layout.abstract(self.mesh, leaf, "param") for leaf in self.layout.leaves}

    def adapter_shapes(self) -> dict[str, jax.ShapeDtypeStruct]:
        """Return the part of `leaf_shapes` that belongs to low-rank adapters."""
        parts = part_shapes(self.model.adapters)
        return {name: shape for name, shape in self.leaf_shapes().items() if name in parts}

    def trained_arrays(self, state: TrainState) -> dict[str, np.ndarray]:
        """Return the trained leaves of a state, gathered, as NumPy arrays.

        Cost:    one all-gather per sharded leaf. Every process must call it.
        """
        check_state(state, self.layout, self.loss_scale)
        leaves = state.params
        shapes = {leaf.path: leaf.shape for leaf in self.layout.leaves if leaf.trainable}
        return {name: np.asarray(self._gather_leaf(leaves[name], shape)) for name, shape in shapes.items()}

    def _init_adapters(self, params: Mapping[str, jax.Array], seed: Any) -> dict[str, jax.Array]:
        """Make the missing leaves of adapters of parameters that are on the devices, as in `init`."""
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
        """Lower `init` of a model passed as a factory. Accepts the devices of a deviceless topology."""
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

    def _replicated(self) -> NamedSharding:
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
          loss_fn: `f(model, batch)`, with the user's unmodified model. Returns a scalar, the mean over the rows that it
            receives, or `scalar, aux` with metrics; or a `Loss`, a sum with its weight. The form decides the program of
            the step (see `StepConfig`). With `accumulate`, a scalar is the mean of the microbatches' means.
          tx: any optax transformation; the same one as in `init`.
          max_grad_norm, skip_nonfinite, compiler_options, check_loss, and all others: see `StepConfig`.

        Raises:
          ValueError: for an optimizer or options that this layout does not support.
        """
        accumulate, pipe_repeats = int(accumulate), int(pipe_repeats)
        return TrainStep(self.apply, loss_fn, tx, StepConfig.of(locals()), self.loss_scale)

    def _optimizer(self, tx: optax.GradientTransformation) -> ShardedOptimizer:
        return ShardedOptimizer(self.engine, self.model.tree, tx)

    def forward(self, fn: Callable[..., Any], *, donate: Sequence[Size] = ()) -> Callable[..., Any]:
        """Compile `fn(model, *inputs)` to a function `f(state, *inputs)`, for evaluation and generation.

        State that the model changes is dropped.

        Layout:  inputs in any sharding; outputs as XLA shards them. With several processes, inputs that are not global
                 arrays must be equal in all processes; make a global batch of local rows with `TrainStep.shard_batch`.
        Cost:    each unit is gathered once per call. With several processes, the first call compares the inputs that
                 have dims and are not global arrays.

        Args:
          donate: indices of the inputs, counted from 0, whose memory outputs may reuse.

        Raises:
          ValueError: for indices in `donate` without an input; in every process, if an input that is not a global array
            differs between processes.
        """

        def run(state: TrainState, *inputs: Any) -> Any:
            if not isinstance(state, TrainState):
                raise TypeError(f"the state given is a {type(state).__name__}; call an evaluation as f(state, *inputs)")
            check_sharding(state, self.layout)
            check_donated(donate, len(inputs))
            with model_mesh(self.mesh):
                return self.apply(fn, state.source, state.model_state, *inputs)[0]

        argnums = tuple(index + 1 for index in donate)
        compiled = jax.jit(run, compiler_options=compiler_options(self.mesh), donate_argnums=argnums)
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
        """Make a gradient function for a custom training loop: `state, grads, metrics = grads_fn(state, batch)`.

        Args:
          skip_nonfinite: keep the model's other state unchanged if the loss or a gradient is not finite.
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
        """Update a state with gradients. The state is donated, the gradients are not.

        Args:
          grads: a tree like the one that `grads` returns, in stored or logical shapes, without frozen leaves.
          tx: the optimizer passed to `init`. The update is compiled once per optimizer: make it outside the loop.
          skip_nonfinite: keep the state unchanged (except `step` and `num_skipped`) if a gradient is not finite.
          extra: extra arguments of `tx.update`, by name. Arrays and numbers, equal in every process, are traced; other
            values are static.

        Raises:
          ValueError: naming a parameter whose gradient is missing or of another shape, or an argument in `extra` that
            `tx` would ignore; for the state of another `tx`.
        """
        check_state(state, self.layout, self.loss_scale)
        named = named_gradients(self.layout, self.mesh, self.model.tree, grads)
        kinds = (jax.Array, np.ndarray, np.generic, float, int)
        arrays = {name: x for name, x in extra.items() if isinstance(x, kinds) and not isinstance(x, bool)}
        static = {name: x for name, x in extra.items() if name not in arrays}
        if not all(isinstance(x, Hashable) for x in static.values()):
            raise ValueError(
                f"apply_gradients: {', '.join(static)}: a value that is not an array must be hashable; pass a tuple "
                "instead of a list"
            )
        key = tx, skip_nonfinite, tuple(sorted(arrays)), tuple(sorted(static.items()))
        if key not in self._apply_steps:
            while len(self._apply_steps) >= _MAX_UPDATES:
                self._apply_steps.pop(next(iter(self._apply_steps)))
            update = Update(self._optimizer(tx), self.loss_scale, skip_nonfinite)
            self._apply_steps[key] = ApplyStep(update, static)
        return self._apply_steps[key](dataclasses.replace(state, layout=self.layout), named, arrays)

    def to_flax(self, state: TrainState) -> Any:
        """Return the plain model with the weights of a state: an `nnx.Module`, or the variables of a Linen module.

        The arrays are copies, so the state can be trained further.

        Layout:  [D+pad/axes F] -> [D F] on the first device of this process, in the dtype at rest;
                 matrices with an adapter in the dtype that the model creates.
        Cost:    one all-gather per parameter, one after another. Every process must call it.
        Memory:  the whole model on that device, and one whole parameter at a time on every device.
        """
        check_state(state, self.layout, self.loss_scale)
        params = {path: self._gather_leaf(x, self.layout.by_path[path].shape) for path, x in state.params.items()}
        return self.model.plain(params, {name: self._gather_leaf(x, x.shape) for name, x in state.model_state.items()})

    def _gather_leaf(self, value: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        whole = jax.device_put(value, self._replicated(), may_alias=False).addressable_data(0)
        return whole[tuple(map(slice, shape))]


def _check_values(arrays: Any) -> None:
    """Check that arrays have values."""
    for path, x in jax.tree_util.tree_leaves_with_path(arrays):
        if isinstance(x, jax.ShapeDtypeStruct):
            name = jax.tree_util.keystr(path, simple=True, separator=".").removesuffix(".value")
            raise ValueError(
                f"{name}: is a shape without values, such as nnx.eval_shape makes; pass fully_shard a factory of the "
                "model, such as lambda rngs: Net(rngs)"
            )


def _differences(given: Mapping[str, Any], wanted: Mapping[str, Any], owners: tuple[str, str]) -> str:
    """List the differences of leaves from a model's in names, dtypes and shapes; "" if there are none."""
    found, expected = ({path: f"{x.dtype}{list(x.shape)}" for path, x in tree.items()} for tree in (given, wanted))
    kinds = ("unknown to the model", "missing", "of another shape or dtype")
    return list_differences(found, expected, owners=owners, kinds=kinds)
