"""The training step: gradients over microbatches, one reduction, clip, update, metrics."""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jfsdp.arguments import check_call, checked
from jfsdp.compat import limit_running
from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.engine import SCOPE, to_device
from jfsdp.engine.movements import Move
from jfsdp.engine.options import compiler_options, naming_options
from jfsdp.engine.pipeline.schedule import schedule_of
from jfsdp.engine.spec import StepSpec
from jfsdp.engine.unit import Arrays
from jfsdp.layout.loss_scale import LossScale
from jfsdp.layout.mesh import ROW_AXES, batch_spec, model_mesh, num_contexts, num_data_shards, row_shares, spans_run
from jfsdp.train import checks
from jfsdp.train.process_checks import compare_batches, is_global
from jfsdp.train.state import TrainState, abstract_state, state_shardings
from jfsdp.train.step.config import StepConfig
from jfsdp.train.step.gradients import Gradients, nonzero
from jfsdp.train.step.inspect_loss import LossFn
from jfsdp.train.step.loss import divide, metrics_of
from jfsdp.train.step.loss_check import compare_loss
from jfsdp.train.step.resolve import check_needs, resolve_step
from jfsdp.train.update.optimizer import ShardedOptimizer
from jfsdp.train.update.update import Update, clip_by_norm, lend_host_params, with_lent

Metrics = dict[str, jax.Array]
_BIND = (
    "; bind other arguments: lambda model, batch: loss_fn(model, batch, ...); random keys belong in the model "
    "(nnx.Rngs, or Linen rngs), or without axis 'context' in rows of the batch"
)


@dataclasses.dataclass(frozen=True, eq=False)
class Trace:
    """A traced step: its jaxpr, and the PartitionSpec of each input."""

    jaxpr: Any
    specs: tuple[PartitionSpec, ...]


@dataclasses.dataclass
class _Cache:
    """Results of earlier calls of a step."""

    first_checks: list[Any]
    spec: StepSpec | None = None
    batch_shape: Any = None
    num_own_rows: dict[str, int] = dataclasses.field(default_factory=dict)
    is_checked: bool = False
    roles: Any = None
    jitted: Any = None


class MeanGradients(NamedTuple):
    """Gradients of the mean loss of a step, with the model's state and metrics.

    Attributes:
      grads: by the names of the state's arrays, on the device in the layout of stage `opt`; not clipped.
      is_finite: whether the norm of the gradients and the loss are finite.
      model_state: the model's other state after the step.
      metrics: the metrics that every step returns.
    """

    grads: Arrays
    is_finite: jax.Array
    model_state: Arrays
    metrics: Metrics


@checked
class BatchStep:
    """Base of steps over batches: checks of state and batch, and gradients of a loss."""

    def __init__(self, apply: ShardedApply, loss_fn: LossFn, config: StepConfig, loss_scale: LossScale | None):
        check_call("loss_fn", loss_fn, "model", "batch", remedy=_BIND)
        self.apply, self.config, self.loss_scale = apply, config, loss_scale
        self.layout, self.mesh = apply.layout, apply.engine.mesh
        if not any(leaf.trainable for leaf in self.layout.leaves):
            raise ValueError("nothing is trained: every parameter is frozen or not floating; change frozen=")
        check_needs(self.layout, config)
        schedule_of(self.layout, config.pipe_schedule, config.accumulate, config.pipe_repeats)  # raises if unknown
        config.gathered_units(self.layout)
        self._update_moves: tuple[Move, ...] = ()
        self._loss_fn, self._shares = loss_fn, row_shares(self.mesh)
        first_checks = [lambda batch: compare_batches(batch, self._shares)] if spans_run(self.mesh) else []
        self._cache = _Cache(first_checks)

    def __repr__(self) -> str:
        found = self._cache.spec and f"program={self._cache.spec.program!r}"
        return f"{type(self).__name__}({found or 'not traced'})"

    @property
    def spec(self) -> StepSpec:
        """All decisions about the step.

        Raises:
          ValueError: before the step is resolved.
        """
        if self._cache.spec is None:
            raise ValueError("step.spec: depends on the loss and the batch; call step.resolve(batch), also with shapes")
        return self._cache.spec

    def resolve(self, batch: Any) -> StepSpec:
        """Decide once how the step runs, from a trace of its loss on a *global* batch or its shapes.

        `lower` and the first step call this.

        Raises, Warns: as `resolve_step`; ValueError for a batch that cannot be split.
        """
        batch = checks.as_arrays(batch)
        checks.check_same_batch(batch, self._cache.batch_shape)
        self._check_batch(batch, self.config.accumulate)
        return self._resolve(batch)

    def _resolve(self, batch: Any) -> StepSpec:
        if self._cache.spec is None:
            with model_mesh(self.mesh):
                spec = resolve_step(self.apply, self._loss_fn, self.config, batch)
            self._cache.spec = dataclasses.replace(spec, update_moves=self._update_moves)
            self._cache.batch_shape = checks.batch_shape(batch)
        return self._cache.spec

    @property
    def compiler_options(self) -> dict[str, Any]:
        """XLA options of the compiled step: jfsdp's, overridden by the configuration's. Final once resolved."""
        default = compiler_options(self.mesh, self.layout, is_scheduled=bool(self._cache.spec and self.spec.prefetch))
        options = default | dict(self.config.compiler_options or {})
        return {name: value for name, value in options.items() if value is not None}

    @property
    def _gradients(self) -> Gradients:
        return Gradients(self.apply, self._loss_fn, self.config, self.loss_scale is not None, self.spec)

    def prepare(self, state: Any, batch: Any) -> tuple[TrainState, Any]:
        """Check a state and a batch, and before the first step the loss; return the state and the sharded batch."""
        checks.check_state(state, self.layout, self.loss_scale)
        state = dataclasses.replace(state, layout=self.layout)
        batch = self._shard(batch, self.config.accumulate)
        checks.check_same_batch(batch, self._cache.batch_shape)
        self._resolve(batch)
        if self.config.check_loss and not self._cache.is_checked:
            with model_mesh(self.mesh):
                compare_loss(self._gradients, (state.source, state.model_state, batch), self.compiler_options)
            self._cache.is_checked = True
        return state, batch

    def record_step(self, batch: Any, metrics: Metrics) -> None:
        """Record that a step over this batch was taken: later batches must have the same structure."""
        self._cache.batch_shape = checks.batch_shape(batch)
        limit_running(metrics["loss"])

    def own_rows(self, num_rows: int) -> range:
        """Return the rows of a global batch that this process passes to the step, which are on its devices.

        Processes that differ only along axes `context`, `tensor` and `pipe` have the same rows.

        Raises:
          ValueError: if the data shards do not divide `num_rows`, or if the rows are not adjacent, because the mesh
            mixes the devices of processes.
        """
        shards = num_data_shards(dict(self.layout.mesh_sizes))
        if num_rows < 1 or num_rows % shards:
            raise ValueError(
                f"own_rows: num_rows={num_rows} cannot be split over axes {ROW_AXES} (size {shards}); pass a multiple "
                f"of {shards}"
            )
        sharding = NamedSharding(self.mesh, batch_spec(self.mesh, 1))
        places = sharding.addressable_devices_indices_map((num_rows,)).values()
        rows = sorted({row for (place,) in places for row in range(num_rows)[place]})  # type: ignore[misc]
        local_rows = range(rows[0], rows[-1] + 1)
        if len(local_rows) != len(rows) or local_rows.start % len(local_rows):
            raise ValueError(
                f"process {jax.process_index()} has rows {rows} of a batch, which are not adjacent; make the mesh with "
                "jfsdp.make_mesh, which keeps the devices of a process together"
            )
        return local_rows

    def shard_batch(self, batch: Any) -> Any:
        """Shard a batch as the step needs it: dim 0, the rows, over `replica` and `fsdp`, dim 1 over `context`.

        If axis `context` is larger than 1, dim 1 of every leaf with two dims or more is the tokens of a row. A leaf [B]
        has one value per row, which every device of the axis gets. A leaf without dims, or a number, is one value for
        all rows, the same in all processes. With several processes, every process must call this. All other leaves must
        be of one kind, the same in all processes:

        - [B/num_processes ...], NumPy or on this process's devices: the rows of this process only. Processes that share
          rows, because `context`, `tensor` or `pipe` spans them, count as one (see `own_rows`). Rows have all tokens.
        - [B ...], a jax.Array over the devices of several processes: the global batch.

        Batches for `model.forward` may differ from the step's in leaves and in the number of rows.

        Cost: if the mesh spans all processes, the first call compares their batches and waits for all processes.

        Raises:
          ValueError: as a step; in every process, if leaves, dtypes or rows differ between processes.
        """
        return self._shard(batch, 1)

    def _shard(self, batch: Any, accumulate: int) -> Any:
        batch = checks.as_arrays(batch)
        num, is_alone = len(set(self._shares.values())), len(self._shares) == 1
        while self._cache.first_checks:
            self._cache.first_checks.pop()(batch)
        rows = [x for x in jax.tree.leaves(batch) if np.ndim(x)]
        is_whole = all(isinstance(x, jax.Array) and x.committed and (is_alone or is_global(x)) for x in rows)
        self._check_batch(batch, accumulate, 1 if is_whole else num)
        if not is_alone and not is_whole:
            form = str(checks.batch_shape(batch))
            self._cache.num_own_rows[form] = checks.check_own_rows(len(rows[0]), self._cache.num_own_rows.get(form))

        def put(x: Any) -> jax.Array:
            sharding = batch_sharding(self.mesh, x)
            # With several processes device_put compares numbers between them; numbers keep their weak type.
            if is_whole or not np.ndim(x):
                return jax.device_put(x, sharding)
            return place_rows(sharding, x, num)

        return jax.tree.map(put, batch)

    def _check_batch(self, batch: Any, accumulate: int, num_processes: int = 1) -> None:
        shards = num_data_shards(dict(self.layout.mesh_sizes))
        checks.check_batch(batch, shards=shards, accumulate=accumulate, num_processes=num_processes)
        checks.check_tokens(batch, num_contexts(self.mesh))

    def mean_gradients(self, state: TrainState, batch: Any) -> MeanGradients:
        """Compute the gradients of the mean loss, inside a `jit`: the sums divided by their weight."""
        scale = state.loss_scale["scale"] if self.loss_scale else 1.0
        with model_mesh(self.mesh):
            sums, loss, model_state, rounding = self._gradients(state.source, state.model_state, batch, scale)
        with jax.named_scope(f"{SCOPE}.update"):
            # With weight 0 and total 0, the loss and gradients are 0. With another total the quotient is not finite.
            weight = jnp.where(loss.total == 0, nonzero(loss.weight), loss.weight)
            here = {path: (to_device(grad) / (weight * scale)).astype(grad.dtype) for path, grad in sums.items()}
            grads = self.apply.engine.constrain(here, "opt")
            norm, value = optax.tree.norm(grads), loss.total / weight
        metrics = {"loss": value, "grad_norm": norm, "weight": loss.weight}
        metrics |= {"loss_scale": jnp.asarray(scale)} if self.loss_scale else {}
        metrics |= {f"{name}_rounding": jnp.sqrt(error / nonzero(size)) for name, (error, size, _) in rounding.items()}
        metrics |= {"wire_overflows": sum(num for _, _, num in rounding.values())} if rounding else {}
        metrics |= metrics_of(loss.aux or {}, loss.weight, divide)
        is_finite = jnp.isfinite(norm) & jnp.isfinite(value)
        return MeanGradients(grads, is_finite, model_state, metrics)


@checked
class TrainStep(BatchStep):
    """A compiled training step: `state, metrics = step(state, batch)`. The input state is donated.

    Metrics (scalars in float32, or float64 for sums of a loss or gradients in float64): `loss`, `grad_norm` (before
    clipping), `weight`, `num_skipped`, `loss_scale` with a loss scale, `learning_rate` if the optimizer's state has one
    (`optax.inject_hyperparams`), and the `aux` of the loss.
    """

    def __init__(
        self,
        apply: ShardedApply,
        loss_fn: LossFn,
        tx: optax.GradientTransformation,
        config: StepConfig,
        loss_scale: LossScale | None,
    ):
        super().__init__(apply, loss_fn, config, loss_scale)
        self._optimizer = ShardedOptimizer(apply.engine, apply.model.tree, tx)
        self._update_moves = self._optimizer.check()
        self._update = Update(self._optimizer, loss_scale, config.skip_nonfinite)

    def abstract_state(self) -> TrainState:
        """Return shapes, dtypes and shardings of the step's state, as `ShardedModel.abstract_state`."""
        return abstract_state(self._optimizer, self.apply.model.state, self.loss_scale)

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step.

        Args:
          batch: a pytree of arrays [B, ...], where B is the global number of rows. With several processes see
            `shard_batch`.

        Raises:
          ValueError: if B is not a multiple of the data shards times `accumulate`, or the batch's structure changed;
            before the first step, if the loss is not the sum over devices, or XLA rejects a compiler option. The state
            is not donated then.
        """
        with naming_options():
            state, batch = self.prepare(state, batch)
            donated, lent = lend_host_params(state)
            result = self._compile_for(state)(donated, lent, batch)
        for value in jax.tree.leaves(lent):
            value.delete()
        self.record_step(batch, result[1])
        return result

    def fingerprint(self, state: TrainState, batch: Any) -> str:
        """Return a digest of the lowered step, for processes to compare: different programs hang or mix arrays.

        Cost: a trace, which the first step reuses, and a lowering.
        """
        state, batch = self.prepare(state, batch)
        lowered = self._compile_for(state).lower(*lend_host_params(state), batch)
        return hashlib.blake2b(lowered.as_text().encode(), digest_size=8).hexdigest()

    def lower(self, abstract_state: TrainState, abstract_batch: Any) -> Any:
        """Lower the step for the shapes of a *global* batch. Accepts the devices of a deviceless topology.

        Raises:
          ValueError: if the mesh has no devices, or the batch cannot be split.
        """
        checks.check_lowers(self.mesh)
        return self.trace(abstract_state, abstract_batch).lower()

    def trace(self, abstract_state: TrainState, abstract_batch: Any) -> Any:
        """Trace the step for the shapes of a *global* batch. Accepts an abstract mesh.

        Raises:
          ValueError: if the batch cannot be split.
        """
        batch = self._placed(abstract_batch)
        # Lets models choose kernels for the devices of the mesh, which this machine may lack.
        device = None if isinstance(self.mesh, AbstractMesh) else self.mesh.devices.flat[0]
        is_there = device is None or device.platform == jax.default_backend()
        with contextlib.nullcontext() if is_there else jax.default_device(device):
            self.resolve(batch)
            return self._compile_for(abstract_state).trace(*lend_host_params(abstract_state), batch)

    def read_trace(self, abstract_state: TrainState, abstract_batch: Any, traced: Any = None) -> Trace:
        """Return the jaxpr of the step, with the PartitionSpec of each input.

        Args:
          traced: the result of `trace` for the same shapes; None: trace now.
        """
        traced = traced or self.trace(abstract_state, abstract_batch)
        given = jax.tree.leaves((*lend_host_params(abstract_state), self._placed(abstract_batch)))
        return Trace(traced.jaxpr.jaxpr, tuple(getattr(x.sharding, "spec", PartitionSpec()) for x in given))

    def _placed(self, batch: Any) -> Any:
        self._check_batch(batch, self.config.accumulate)

        def place(x: Any) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(x), jnp.result_type(x), sharding=batch_sharding(self.mesh, x))

        return jax.tree.map(place, batch)

    def _compile_for(self, state: TrainState) -> Any:
        if self._cache.roles is not state.roles:  # steps keep it
            self._optimizer.check_state(state.opt_state)
            self._cache.roles = state.roles
        if self._cache.jitted is None:
            shardings = state_shardings(self.layout, self.mesh, state)
            whole = NamedSharding(self.mesh, PartitionSpec())
            self._cache.jitted = jax.jit(
                self._step,
                in_shardings=(*lend_host_params(shardings), None),
                out_shardings=(shardings, whole),
                donate_argnums=0,
                compiler_options=self.compiler_options,
            )
        return self._cache.jitted

    def _step(self, state: TrainState, lent: dict[str, Arrays], batch: Any) -> tuple[TrainState, Metrics]:
        state = with_lent(state, lent)
        found = self.mean_gradients(state, batch)
        with jax.named_scope(f"{SCOPE}.update"):
            grads = clip_by_norm(found.grads, found.metrics["grad_norm"], self.config.max_grad_norm)
            extra = self._optimizer.extra_arguments(found.metrics["loss"])
            new = self._update(state, grads, found.is_finite, found.model_state, extra)
        more = {"num_skipped": new.num_skipped.astype(jnp.float32)} | learning_rate(new.opt_state)
        return new, more | found.metrics


def learning_rate(opt_state: Any) -> dict[str, jax.Array]:
    """Return the learning rate in an optimizer's state, if there is exactly one (`optax.inject_hyperparams`)."""
    has_rates = lambda x: isinstance(getattr(x, "hyperparams", None), dict)  # noqa: E731
    found = [x.hyperparams for x in jax.tree.leaves(opt_state, is_leaf=has_rates) if has_rates(x)]
    return {name: found[0][name] for name in ("learning_rate",) if len(found) == 1 and name in found[0]}


def batch_sharding(mesh: Any, value: Any) -> NamedSharding:
    """Return the sharding of a leaf of a batch: rows, then tokens; replicated if it has no dims."""
    return NamedSharding(mesh, batch_spec(mesh, np.ndim(value)))


def place_rows(sharding: NamedSharding, rows: Any, num_shares: int) -> jax.Array:
    """Make a global array of each process's rows, which have all tokens."""
    shape = (len(rows) * num_shares, *rows.shape[1:]) if rows.shape else ()
    return jax.make_array_from_process_local_data(sharding, rows, shape)
