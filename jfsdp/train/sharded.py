"""The facade: a model, its layout on a mesh, and the ways to make a state and take steps."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.auto import AutoEngine, pad_leaf
from jfsdp.engine.options import compiler_options, init_options
from jfsdp.layout.mesh import DATA_AXES, make_mesh
from jfsdp.layout.policy import Remat, resolve_policies
from jfsdp.layout.precision import MixedPrecisionPolicy
from jfsdp.layout.rules import DEFAULT_MIN_SIZE
from jfsdp.layout.strategy import Strategy, get_strategy
from jfsdp.layout.table import Layout, ShardDim, build_layout
from jfsdp.layout.units import resolve_units
from jfsdp.modules.nnx import NNXModel
from jfsdp.train import state as states
from jfsdp.train.state import TrainState
from jfsdp.train.step import LossFn, StepConfig, TrainStep, check_lowers


def fully_shard(
    model: Any,
    *,
    mesh: Mesh | AbstractMesh | None = None,
    strategy: str | Strategy = "full_shard",
    units: Any = (),
    mp_policy: MixedPrecisionPolicy | None = None,
    offload_policy: None = None,
    reshard_after_forward: bool | None = None,
    remat: Remat = "full",
    engine: str = "auto",
    prefetch: None = None,
    storage: str = "per_parameter",
    min_size: int = DEFAULT_MIN_SIZE,
    shard_dim: ShardDim | None = None,
    frozen: None = None,
    per_unit: Mapping[str, Mapping[str, Any]] | None = None,
) -> ShardedModel:
    """Decide where every parameter of a Flax NNX model stands on a mesh. Moves no data and allocates nothing.

    Args:
      model: a factory `f(rngs) -> nnx.Module`, or an `nnx.Module` whose weights are kept.
      mesh: from `make_mesh`, default all devices on axis `fsdp`; or from `make_abstract_mesh`, for layouts only.
      strategy: a name of `STRATEGIES`, or a `Strategy`.
      units: what is gathered together: module classes, path globs, predicates, `by_size(n)`, `Unit`s; the rest is the
        root unit, gathered once per step.
      mp_policy: precision; default none, everything in the dtype of the parameters.
      reshard_after_forward: None: every unit but the root is freed after its forward, where the strategy says so.
      remat: what a unit saves between forward and backward; see `UnitPolicy`.
      min_size: leaves with fewer elements (per layer) are replicated.
      shard_dim: `f(path, shape) -> dim or None` to choose the split dim of a leaf.
      per_unit: overrides of `mp_policy`, `reshard_after_forward` and `remat` for globs over unit names ("" is the
        root).
      engine, storage, prefetch, offload_policy, frozen: only "auto", "per_parameter", None, None and None are
        available.

    Raises:
      ValueError: for unknown names, units that match nothing or claim one leaf twice, contradictions.
    """
    _check_available(engine, storage, prefetch, offload_policy, frozen)
    nnx_model, mp_policy = NNXModel(model), mp_policy or MixedPrecisionPolicy()
    mesh, strategy = make_mesh() if mesh is None else mesh, get_strategy(strategy)
    _check_mesh(mesh)
    shapes = {path: tuple(leaf.shape) for path, leaf in nnx_model.params.items()}
    resolved = resolve_units(units, nnx_model.modules, shapes)
    policies = resolve_policies(
        resolved,
        strategy=strategy,
        mp_policy=mp_policy,
        reshard_after_forward=reshard_after_forward,
        remat=remat,
        per_unit=per_unit,
    )
    for name, policy in policies.items():
        _check_reduce_dtype(name, policy.mp_policy)
    layout = build_layout(
        nnx_model.params,
        resolved,
        policies,
        mesh=mesh,
        strategy=strategy,
        mp_policy=mp_policy,
        min_size=min_size,
        shard_dim=shard_dim,
    )
    return ShardedModel(nnx_model, layout, mesh)


def _check_reduce_dtype(unit: str, policy: MixedPrecisionPolicy) -> None:
    if policy.param_dtype == "float16":
        raise ValueError(
            f"unit {unit or '(root)'}: param_dtype 'float16' needs loss scaling, which is not supported; use 'bfloat16'"
        )
    if policy.reduce_dtype not in (None, policy.param_dtype):
        raise ValueError(
            f"unit {unit or '(root)'}: reduce_dtype {policy.reduce_dtype!r} differs from param_dtype "
            f"{policy.param_dtype!r}: engine 'auto' reduces gradients in the dtype of the parameters in use; leave "
            "reduce_dtype None, or make both equal"
        )


def _check_mesh(mesh: Mesh | AbstractMesh) -> None:
    for axis, size in mesh.shape.items():
        if axis not in DATA_AXES and size > 1:
            raise ValueError(
                f"mesh axis {axis!r} (size {size}): nothing is split over it yet, so its devices would only "
                f"repeat each "
                f"other's work; give them to {' or '.join(map(repr, DATA_AXES))}"
            )


def _check_available(engine: str, storage: str, prefetch: Any, offload_policy: Any, frozen: Any) -> None:
    if frozen is not None:
        raise ValueError("frozen: leaves without a gradient are not supported; leave it None")
    if engine != "auto":
        raise ValueError(f"engine {engine!r} is unknown; the engines are auto")
    if storage != "per_parameter":
        raise ValueError(f"storage {storage!r} is unknown; the storage forms are per_parameter")
    if prefetch is not None:
        raise ValueError(f"prefetch={prefetch!r}: engine 'auto' leaves the order of gathers to XLA; leave it None")
    if offload_policy is not None:
        raise ValueError("offload_policy: offloading is not supported; leave it None")


class ShardedModel:
    """A model and its layout. The arrays are in the `TrainState` that `init` returns; a model given as an instance is
    kept too, for as long as this object lives.
    """

    def __init__(self, model: NNXModel, layout: Layout, mesh: Mesh | AbstractMesh):
        self.model, self.layout, self.mesh = model, layout, mesh
        self.engine = AutoEngine(layout, mesh)  # type: ignore[arg-type]
        self.apply = ShardedApply(model, self.engine)

    def abstract_state(self, tx: optax.GradientTransformation) -> TrainState:
        """Return shapes, dtypes and shardings of the state that `init` makes. Moves no data and needs no devices."""
        return states.abstract_state(self.engine, tx, self.model.state)

    def init(self, tx: optax.GradientTransformation, seed: int = 0) -> TrainState:
        """Make the first state, born sharded: the same seed gives the same bits on every mesh and strategy.

        Layout:  each leaf directly as its `param` stage says.
        Memory:  a device computes its part of each leaf only. A model given as an instance keeps its weights; they are
                 moved from where they are.
        """
        if isinstance(self.mesh, AbstractMesh):
            raise ValueError("init: the mesh has no devices; build the model on jfsdp.make_mesh()")
        if not 0 <= seed < 2**31:
            raise ValueError(f"seed={seed} must be in 0..2**31-1")
        if self.model.instance is None:
            return self._compile_init(tx)(seed)
        params, model_state = self.model.create(seed)
        shardings = self._shardings(tx)
        stored = {path: self._place(path, value, shardings.params[path]) for path, value in params.items()}
        make = functools.partial(states.make_state, self.engine, tx)
        return jax.jit(make, out_shardings=shardings)(stored, jax.device_put(model_state, self._whole()))

    def _place(self, path: str, value: jax.Array, sharding: Any) -> jax.Array:
        """Send each device its part of a leaf of the given instance."""
        leaf = self.layout.by_path[path]
        return jax.device_put(pad_leaf(value, leaf), sharding)

    def lower_init(self, tx: optax.GradientTransformation) -> Any:
        """Lower `init` of a model given as a factory; the devices of a deviceless topology will do."""
        check_lowers(self.mesh)
        return self._compile_init(tx).lower(jax.ShapeDtypeStruct((), jax.numpy.int32))

    def _compile_init(self, tx: optax.GradientTransformation) -> Any:
        def make(seed: Any) -> TrainState:
            params, model_state = self.model.create(seed)
            stored = {path: pad_leaf(value, self.layout.by_path[path]) for path, value in params.items()}
            return states.make_state(self.engine, tx, stored, model_state)

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
        accumulate: int = 1,
        reduce: str = "every",
        max_grad_norm: float | None = None,
        skip_nonfinite: bool = False,
    ) -> TrainStep:
        """Make the training step `state, metrics = step(state, batch)`.

        Args:
          loss_fn: `f(model, batch)` with the user's model as they wrote it; returns a scalar or a `Loss`.
          tx: any optax transformation whose state `init` was given.
          accumulate, reduce, max_grad_norm, skip_nonfinite: see `StepConfig`.
        """
        self._check_optimizer(tx)
        return TrainStep(self.apply, loss_fn, tx, StepConfig(accumulate, reduce, max_grad_norm, skip_nonfinite))

    def _check_optimizer(self, tx: optax.GradientTransformation) -> None:
        from jfsdp.train.optimizer import check_elementwise

        check_elementwise(self.layout, tx)

    def forward(self, fn: Callable[..., Any]) -> Callable[..., Any]:
        """Compile `fn(model, *inputs)` for a state: returns `f(state, *inputs)`. For evaluation and generation.

        Layout:  inputs as they come; outputs as XLA leaves them.
        Cost:    every unit is gathered once per call of the unit. State that the model changes is dropped.
        """

        def run(state: TrainState, *inputs: Any) -> Any:
            return self.apply(fn, state.source, state.model_state, *inputs)[0]

        return jax.jit(run, compiler_options=compiler_options(self.mesh))
