"""Optimizers of the training script by name, with their options.

A maker is `f(rate, decays, matrices, **options)`. `decays` and `matrices` are functions of the tree of parameters. They
return which parameters decay, and the dims of Muon's matrices, with None for the parameters that AdamW updates. Weight
decay is multiplied by the learning rate and added to the update; for sgd it is added to the gradient, as in PyTorch.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

import jax
import optax
from jax.sharding import PartitionSpec

from jfsdp.arguments import did_you_mean
from jfsdp.layout.leaf import Leaf
from jfsdp.layout.mesh import EXPERT
from jfsdp.layout.select import chooses
from jfsdp.train.sharded import ShardedModel
from jfsdp.train.update.matrices import by_matrix
from jfsdp.trainer.job import Job
from jfsdp.trainer.option_errors import spell

OfParams = Callable[[Any], Any]


def _with_betas(make: Any, rate: Any, decays: OfParams, _: Any, *, beta1: float, beta2: float, **others: float) -> Any:
    return make(rate, beta1, beta2, mask=decays, **others)


def _muon(rate: Any, decays: OfParams, matrices: OfParams, *, weight_decay: float, **options: float) -> Any:
    names = {"momentum": "beta", "beta1": "adam_b1", "beta2": "adam_b2", "eps": "eps"}
    given: Any = {names[name]: value for name, value in options.items()}
    tx = optax.contrib.muon(1.0, muon_weight_dimension_numbers=matrices, consistent_rms=0.2, **given)
    return _with_decay(by_matrix(tx), rate, decays, weight_decay)


def _adafactor(rate: Any, decays: OfParams, _: Any, *, momentum: float, weight_decay: float) -> Any:
    tx = optax.adafactor(multiply_by_parameter_scale=False, momentum=momentum or None)
    return _with_decay(tx, rate, decays, weight_decay)


def _sgd(rate: Any, decays: OfParams, _: Any, *, momentum: float, weight_decay: float) -> Any:
    return optax.chain(optax.add_decayed_weights(weight_decay, decays), optax.sgd(rate, momentum or None))


def _with_decay(tx: optax.GradientTransformation, rate: Any, decays: OfParams, weight_decay: float) -> Any:
    """Add weight decay and the learning rate to an optimizer with learning rate 1."""
    decay = optax.add_decayed_weights(-weight_decay, decays)
    return optax.chain(tx, decay, optax.scale_by_learning_rate(rate, flip_sign=False))


# AdamW has the values of models/optimizers.py. Muon has the momentum of Jordan's recipe, and updates of AdamW's size as
# in Moonlight (arXiv 2502.16982). Adafactor does not scale by parameters, as in Transformers' Trainer.
_ADAMW = {"weight_decay": 0.1, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8}
OPTIMIZERS: dict[str, tuple[Callable[..., Any], dict[str, float]]] = {
    "adamw": (functools.partial(_with_betas, optax.adamw), _ADAMW),
    "muon": (_muon, {**_ADAMW, "momentum": 0.95}),
    "lion": (functools.partial(_with_betas, optax.lion), {"weight_decay": 0.001, "beta1": 0.9, "beta2": 0.99}),
    "adafactor": (_adafactor, {"weight_decay": 0.0, "momentum": 0.0}),
    "sgd": (_sgd, {"weight_decay": 0.0, "momentum": 0.0}),
}
OPTIONS = ("weight_decay", "beta1", "beta2", "eps", "momentum")


def optimizer_settings(options: Any) -> dict[str, Any]:
    """Return the options of the optimizer and its name, with defaults; None for options that it does not have.

    Args:
      options: has the fields `optimizer` and `OPTIONS`.
    """
    defaults = OPTIMIZERS.get(options.optimizer, (None, {}))[1]
    given = {name: getattr(options, name) for name in OPTIONS}
    found = {name: defaults.get(name) if value is None else value for name, value in given.items()}
    return {"optimizer": options.optimizer, **found}


def named_optimizer(options: Any, job: Job, model: ShardedModel, rate: Any) -> optax.GradientTransformation:
    """Return the optimizer that the options name; without a name, the job's.

    Args:
      options: as in `optimizer_settings`.
      rate: learning rate or schedule.

    Raises:
      ValueError: for an unknown optimizer, and for an option that it does not have or whose value is out of range.
    """
    name, given = options.optimizer, {x: getattr(options, x) for x in OPTIONS if getattr(options, x) is not None}
    if name is not None and name not in OPTIMIZERS:
        raise ValueError(
            f"--optimizer {name!r} is unknown{did_you_mean(name, OPTIMIZERS)}; the optimizers are "
            f"{', '.join(OPTIMIZERS)}; a job may have any other"
        )
    make, defaults = OPTIMIZERS.get(name or "", (None, {}))
    for option, value in given.items():
        if make is None:
            raise ValueError(f"{spell(option)} {value:g}: needs --optimizer, such as --optimizer adamw; add it")
        if option not in defaults:
            has = ", ".join(map(spell, defaults))
            raise ValueError(f"{spell(option)} {value:g}: --optimizer {name} does not have it; its options are {has}")
        if option in ("beta1", "beta2", "momentum") and value >= 1:
            raise ValueError(f"{spell(option)} {value:g}: must be at least 0 and below 1; use {defaults[option]:g}")
    if make is None:
        return job.optimizer(rate)
    stacks = _stacks_of_experts(job, model)
    if name == "muon" and not any(_muon_dims(leaf, stacks) for leaf in model.layout.leaves):
        raise ValueError(
            f"--optimizer muon: no unit of job {job.name!r} has a parameter with two dims besides its layer dims; use "
            "--optimizer adamw, or units= of the layers"
        )
    decays = job.decay_mask or _by_leaf(model, lambda leaf: len(leaf.shape) - leaf.stacked >= 2)
    return make(rate, decays, _by_leaf(model, lambda leaf: _muon_dims(leaf, stacks)), **{**defaults, **given})


def _stacks_of_experts(job: Job, model: ShardedModel) -> set[str]:
    """Return the leaves whose first dim, besides layer dims, is experts: those that the job cuts over axis `expert`."""
    placed = {x: spec for x, spec in (job.placements or {}).items() if isinstance(spec, PartitionSpec)}
    chosen = [selector for selector, spec in placed.items() if len(spec) and spec[0] == EXPERT]
    leaves = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in model.layout.leaves}
    return {path for path, x in leaves.items() if any(chooses("placements", one, path, x, {}) for one in chosen)}


def _muon_dims(leaf: Leaf, stacks: Collection[str]) -> Any:
    """Return the dims of a matrix of a unit, also of each expert. Embeddings and heads belong to the root unit."""
    first = leaf.stacked + (leaf.path in stacks)
    is_matrix = leaf.trainable and leaf.unit and len(leaf.shape) - first == 2
    return optax.contrib.MuonDimensionNumbers(first, first + 1) if is_matrix else None


def _by_leaf(model: ShardedModel, decide: Callable[[Leaf], Any]) -> OfParams:
    """Return a function of parameters that decides by leaf, also where some parameters are masked."""
    layout, find = model.layout, model.model.tree.find
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: decide(layout.by_path[find(path)[1] or ""]), params
    )
