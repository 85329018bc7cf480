"""The training step: gradients over microbatches, one reduction, clip, update, metrics."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from jfsdp.engine.apply import ShardedApply
from jfsdp.engine.options import compiler_options
from jfsdp.engine.unit import Arrays
from jfsdp.layout.mesh import DATA_AXES, num_data_shards
from jfsdp.layout.report import summary
from jfsdp.train.loss import Loss, as_loss
from jfsdp.train.state import TrainState, make_work, state_shardings, trainable

LossFn = Callable[[Any, Any], Any]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class StepConfig:
    """How a step is taken. Moves no data.

    Attributes:
      accumulate: into how many microbatches the batch is cut; they run one after the other.
      reduce: "every" reduces the gradient of every microbatch into shards (memory of a shard, `accumulate` times the
        traffic). "once" is not available in the auto engine, which cannot defer a reduction.
      max_grad_norm: clip the gradient to this global norm; None does not clip.
      skip_nonfinite: leave the state as it was (but for `step` and `num_skipped`) when the loss or a gradient is not
        finite.
    """

    accumulate: int = 1
    reduce: str = "every"
    max_grad_norm: float | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.accumulate, int) or self.accumulate < 1:
            raise ValueError(f"accumulate={self.accumulate!r} must be a whole number, at least 1")
        if self.reduce == "once":
            raise ValueError('reduce="once" cannot be had from engine "auto", where XLA reduces; use reduce="every"')
        if self.reduce != "every":
            raise ValueError(f'reduce={self.reduce!r} is unknown; use "every"')
        if self.max_grad_norm is not None and not self.max_grad_norm > 0:
            raise ValueError(f"max_grad_norm={self.max_grad_norm} must be positive, or None")


class TrainStep:
    """A compiled training step: `state, metrics = step(state, batch)`. The state given is donated.

    Metrics (float32 scalars): `loss`, `grad_norm` (before clipping), `weight`, `num_skipped`, and what the loss
    returns as `aux`.
    """

    def __init__(self, apply: ShardedApply, loss_fn: LossFn, tx: optax.GradientTransformation, config: StepConfig):
        self.apply, self.loss_fn, self.tx, self.config = apply, loss_fn, tx, config
        self.layout, self.mesh = apply.layout, apply.engine.mesh
        self._jitted: Any = None
        self._batch_shape: Any = None

    def __call__(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        """Take one step.

        Args:
          batch: a pytree of arrays [B, ...]: global arrays, or this process's share as numpy arrays.

        Raises:
          ValueError: if B is not a multiple of the data shards times `accumulate`, or the batch's structure changed.
        """
        if state.step.is_deleted():
            raise ValueError(
                "the state given was donated to an earlier step and is gone; keep what the step returns: "
                "state, metrics = step(state, batch)"
            )
        if state.layout != self.layout:
            raise ValueError(
                f"the state has another layout ({summary(state.layout)}) than this step ({summary(self.layout)}); make "
                "it with this model's init, or restore it with like=model.abstract_state(tx)"
            )
        batch = self.shard_batch(batch)
        result = self._compile_for(state)(state, batch)
        self._batch_shape = _batch_shape(batch)
        return result

    def lower(self, abstract_state: TrainState, abstract_batch: Any) -> Any:
        """Lower the step for shapes, those of a *global* batch; the devices of a deviceless topology will do.

        Raises:
          ValueError: if the mesh names no platform to lower for, or the batch cannot be split.
        """
        check_lowers(self.mesh)
        self._check_batch(abstract_batch, 1)
        sharding = batch_sharding(self.mesh)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), abstract_batch)
        return self._compile_for(abstract_state).lower(abstract_state, batch)

    def shard_batch(self, batch: Any) -> Any:
        """Put this process's share of a batch where the step wants it: dim 0 split over the data axes."""
        if all(isinstance(x, jax.Array) and x.committed for x in jax.tree.leaves(batch)):
            self._check_batch(batch, 1)
            return jax.device_put(batch, batch_sharding(self.mesh))
        self._check_batch(batch, jax.process_count())
        sharding = batch_sharding(self.mesh)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(sharding, x), batch)

    def _check_batch(self, batch: Any, num_processes: int) -> None:
        shards = num_data_shards(dict(self.layout.mesh_sizes))
        accumulate = self.config.accumulate
        leaves = jax.tree_util.tree_leaves_with_path(batch)
        if not leaves:
            raise ValueError("the batch holds no arrays")
        for path, x in leaves:
            size = x.shape[0] * num_processes if getattr(x, "shape", ()) else None
            if size is None or size == 0 or size % (shards * accumulate):
                raise ValueError(
                    f"batch{jax.tree_util.keystr(path)}: dim 0 (size {size}) cannot be split over axes "
                    f"{DATA_AXES} (size "
                    f"{shards}) in {accumulate} microbatches; make the global batch a multiple of {shards * accumulate}"
                )
        shape = _batch_shape(batch)
        if self._batch_shape is not None and shape != self._batch_shape:
            raise ValueError(
                f"the batch changed: this step was built for {self._batch_shape}, and got {shape}; make another "
                f"train_step "
                "for batches of another form"
            )

    def _compile_for(self, state: TrainState) -> Any:
        if self._jitted is None:
            shardings = state_shardings(self.layout, self.mesh, state)
            whole = NamedSharding(self.mesh, PartitionSpec())
            self._jitted = jax.jit(
                self._step,
                in_shardings=(shardings, None),
                out_shardings=(shardings, whole),
                donate_argnums=0,
                compiler_options=compiler_options(self.mesh),
            )
        return self._jitted

    def _step(self, state: TrainState, batch: Any) -> tuple[TrainState, Metrics]:
        grads, loss, model_state = self._gradients(state, batch)
        weight = jnp.where(loss.weight > 0, loss.weight, 1.0)  # nothing counted: no loss, and a gradient of zeros
        grads = self.apply.engine.constrain({path: grad / weight for path, grad in grads.items()}, "opt")
        grad_norm = optax.tree.norm(grads)
        grads = self._to_dtype(clip_by_norm(grads, grad_norm, self.config.max_grad_norm), "param")
        new = dataclasses.replace(self._update(state, grads), model_state=model_state)
        _check_dtypes(state, new)
        new = dataclasses.replace(self._guard(state, new, loss, grad_norm), step=state.step + 1)
        metrics = {
            "loss": loss.total / weight,
            "grad_norm": grad_norm,
            "weight": loss.weight,
            "num_skipped": new.num_skipped.astype(jnp.float32),
        }
        return new, metrics | {key: value / weight for key, value in (loss.aux or {}).items()}

    def _gradients(self, state: TrainState, batch: Any) -> tuple[Arrays, Loss, Arrays]:
        """Sum gradients, totals and weights over the microbatches; gradients at least in float32."""
        weights = trainable(self.layout, state.source)
        others = {path: value for path, value in state.source.items() if path not in weights}

        def total(weights: Arrays, model_state: Arrays, microbatch: Any) -> tuple[jax.Array, tuple[Loss, Arrays]]:
            loss, after = self.apply(self._call_loss, weights | others, model_state, microbatch)
            return loss.total, (loss, after)

        def gradients(model_state: Arrays, microbatch: Any) -> tuple[Arrays, Loss, Arrays]:
            grads, (loss, after) = jax.grad(total, has_aux=True)(weights, model_state, microbatch)
            return self._to_dtype(grads, "grad"), loss, after

        if self.config.accumulate == 1:
            return gradients(state.model_state, batch)
        return self._accumulate(gradients, state.model_state, batch)

    def _call_loss(self, model: Any, microbatch: Any) -> Loss:
        return as_loss(self.loss_fn(model, microbatch))

    def _accumulate(self, gradients: Any, model_state: Arrays, batch: Any) -> tuple[Arrays, Loss, Arrays]:
        micro = split_microbatches(batch, self.config.accumulate, self.mesh)
        shapes = jax.eval_shape(gradients, model_state, jax.tree.map(lambda x: x[0], micro))
        zeros = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes[:2])
        start = (self.apply.engine.constrain(zeros[0], "grad"), zeros[1], model_state)

        def body(carry: Any, microbatch: Any) -> tuple[Any, None]:
            grads, loss, before = carry
            new_grads, new_loss, after = gradients(before, microbatch)
            added = jax.tree.map(jnp.add, (grads, loss), (new_grads, new_loss))
            return (self.apply.engine.constrain(added[0], "grad"), added[1], after), None

        return jax.lax.scan(body, start, micro)[0]

    def _to_dtype(self, grads: Arrays, stage: str) -> Arrays:
        by_path = self.layout.by_path
        return {path: grad.astype(by_path[path].stage(stage).dtype) for path, grad in grads.items()}

    def _update(self, state: TrainState, grads: Arrays) -> TrainState:
        """Update each parameter where the optimizer's states stand, then bring it back to where it rests."""
        engine = self.apply.engine
        params = engine.constrain(trainable(self.layout, state.params), "opt")
        updates, opt_state = self.tx.update(grads, state.opt_state, params)
        updated = engine.constrain(optax.apply_updates(params, updates), "opt")  # type: ignore[arg-type]
        new = {**state.params, **engine.constrain(updated, "param")}
        return dataclasses.replace(state, params=new, work=make_work(engine, new), opt_state=opt_state)

    def _guard(self, old: TrainState, new: TrainState, loss: Loss, grad_norm: jax.Array) -> TrainState:
        if not self.config.skip_nonfinite:
            return new
        finite = jnp.isfinite(grad_norm) & jnp.isfinite(loss.total)
        kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
        return dataclasses.replace(kept, num_skipped=old.num_skipped + (~finite).astype(jnp.int32))


def check_lowers(mesh: Any) -> None:
    """Refuse to lower for a mesh of sizes alone: it does not say for which platform."""
    if isinstance(mesh, AbstractMesh):
        raise ValueError(
            "the mesh has no devices, so there is no platform to lower for; use jfsdp.make_mesh(devices=...), with "
            "those of jax.experimental.topologies where the hardware is elsewhere"
        )


def _batch_shape(batch: Any) -> Any:
    return jax.tree.map(lambda x: f"{x.dtype}{list(x.shape[1:])}", batch)


def _check_dtypes(old: TrainState, new: TrainState) -> None:
    """Refuse an optimizer whose state changes its types: the state would no longer be what its layout says."""
    pairs = zip(jax.tree_util.tree_leaves_with_path(old), jax.tree.leaves(new), strict=True)
    for (path, a), b in pairs:
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            raise ValueError(
                f"state{jax.tree_util.keystr(path)}: the optimizer turns {a.dtype}{list(a.shape)} into "
                f"{b.dtype}{list(b.shape)}; give it a state dtype that stays (mu_dtype=, say)"
            )


def batch_sharding(mesh: Any) -> NamedSharding:
    """Return the sharding of a batch: dim 0 over all data axes. Moves no data."""
    return NamedSharding(mesh, PartitionSpec(DATA_AXES))


def split_microbatches(batch: Any, num: int, mesh: Any) -> Any:
    """Cut a batch [B, ...] into [A, B/A, ...] so that every device keeps the rows it has.

    Layout:  [B/data ...] -> [A B/A/data ...]; microbatch a holds the rows b with b % A == a.
    Cost:    none: a plain reshape to [A, B/A] would move rows between devices.
    """
    sharding = NamedSharding(mesh, PartitionSpec(None, DATA_AXES))

    def split(x: jax.Array) -> jax.Array:
        rows = x.reshape(x.shape[0] // num, num, *x.shape[1:]).swapaxes(0, 1)
        return jax.lax.with_sharding_constraint(rows, sharding)

    return jax.tree.map(split, batch)


def clip_by_norm(grads: Mapping[str, Any], norm: jax.Array, max_norm: float | None) -> dict[str, Any]:
    """Scale gradients so that their global norm is at most `max_norm`. Moves no data: the norm is there already."""
    if max_norm is None:
        return dict(grads)
    scale = jnp.minimum(1.0, max_norm / norm)
    return {path: grad * scale.astype(grad.dtype) for path, grad in grads.items()}
