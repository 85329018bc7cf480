"""A Job: what the training script, explain, and every other tool mean by "a model". Found by name or by factory."""

from __future__ import annotations

import dataclasses
import importlib
import os
import sys
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Any

from jfsdp.arguments import Count, check_call, checked, did_you_mean
from jfsdp.layout.cuts import AxisRules

ENTRY_POINT_GROUP = "jfsdp.jobs"
DATA_KINDS = ("tokens", "pairs")


@checked
@dataclasses.dataclass(frozen=True)
class Job:
    """A model with everything needed to train it on any mesh. Plain data: packages offer jobs as dicts of these fields.

    Attributes:
      model: whatever `fully_shard` takes as model: a factory `f(rngs) -> nnx.Module`, a module, or
        `(linen module, example inputs)`.
      loss: `f(model, batch)`; returns a scalar or an object with `total` and `weight`, and perhaps `aux`; see
        `jfsdp.Loss`. An aux value `correct` is shown as accuracy.
      batch: `f(batch_size, seq_len) -> pytree of jax.ShapeDtypeStruct`, the shapes of one global batch.
      units: what is gathered together, as `fully_shard` takes it.
      axis_rules, placements: which dims of its parameters axis `tensor` cuts, as `fully_shard` takes them.
      optimizer: `f(learning_rate or schedule) -> optax.GradientTransformation`.
      name: what it is called in messages and run directories.
      eval_loss: the loss of held-out batches, where it is another than `loss`: without dropout, with stored batch
        statistics. None: `loss`.
      row_loss: `f(model, batch) -> object` with `total` and `weight` [B]: what `loss` sums, of each row by itself and
        without dropout; for losses of preferences. None: the job cannot be trained on them.
      data: what the training script trains on: "tokens" (batches are dicts with `tokens` and `targets` [B T]), "pairs"
        (dicts with `tokens`, `targets` and `weights` [B 2 T], and `reference` [B 2]: two answers to choose between), or
        `f(share)`, which returns custom data: a `grain.MapDataset` of rows, or an iterable over this
        process's batches whose iterator has `get_state` and `set_state` (docs/models.md). The library itself takes any
        batch.
      eval_data: `f(share)` as in `data`, of held-out rows; with custom data only. None: nothing is evaluated.
      seq_len: default sequence length; means nothing where rows are not tokens.
      documents_per_row: the most documents of a packed row, padding included, that the model takes; the data of a run
        keep to it. None: any number.
      attention: `f(dtype, seq_len, is_packed=...) -> str`: which kernel computes attention on the device that a trace
        is for, and why, in words; None: nothing is said of it.
      vocab_size: how many token ids the model knows; None for models without tokens.
      flops_per_token: `f(num_keys) -> FLOPs` forward and backward of one token (of a row, where `item` is "row")
        that attends to so many keys, for MFU; called with `seq_len`, and for MFU of causal attention with the mean
        number that tokens see. None if unknown.
      configure: `f(**fields) -> job as a dict`: the same job with fields of its config changed; None if it has none.
        What `dataclasses.replace` changed of a job stays: see `with_config`.
      config: the model's configuration, any dataclass; written beside checkpoints.
      pretrained: how checkpoints of Hugging Face call the model's parameters, a dict (docs/pretrained.md); None: the
        model has none there.
      cache: `f(rows, length, dtype) -> pytree of jax.ShapeDtypeStruct`, of what generation keeps of tokens seen, empty
        where it is zeros; its arrays are [rows .. heads length size]. The model is then called as `model(tokens [B T],
        positions=[B T], cache=, lengths=[B]) -> (logits [B V] of each row's last token, cache)`: with prompts, padded
        at their ends by positions of `length`, and then with one token at a time. `f` is to raise a ValueError for
        a `length` that the model does not reach. None: `jfsdp generate` does not take the job.

    Raises:
      ValueError: for an unknown kind of data.
    """

    model: Any
    loss: Callable[[Any, Any], Any]
    batch: Callable[[int, int], Any]
    units: Any
    optimizer: Callable[[Any], Any]
    name: str = "job"
    eval_loss: Callable[[Any, Any], Any] | None = None
    row_loss: Callable[[Any, Any], Any] | None = None
    data: str | Callable[[Any], Any] = "tokens"
    eval_data: Callable[[Any], Any] | None = None
    seq_len: Count = 1024
    documents_per_row: Count | None = None
    attention: Callable[..., str] | None = None
    vocab_size: Count | None = None
    flops_per_token: Callable[[float], float] | None = None
    configure: Callable[..., Any] | None = None
    config: Any = None
    pretrained: Mapping[str, Any] | None = None
    axis_rules: AxisRules | None = None
    placements: Mapping[Any, Any] | None = None
    cache: Callable[..., Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.data) and self.data not in DATA_KINDS:
            raise ValueError(
                f"job {self.name!r}: data={self.data!r} is not a kind of data; the kinds are {', '.join(DATA_KINDS)}, "
                "or a function f(share) that returns custom data"
            )
        if self.eval_data is not None and not callable(self.data):
            raise ValueError(f"job {self.name!r}: eval_data= goes with data=f(share), not with data={self.data!r}")
        if self.configure is not None and not isinstance(self.configure, _Configure):
            names = [field.name for field in dataclasses.fields(self) if field.name not in ("config", "configure")]
            made = {name: getattr(self, name) for name in names}
            object.__setattr__(self, "configure", _Configure(self.configure, made))

    @property
    def item(self) -> str:
        """What rates and losses are per: "token", or "row" for custom data without a vocabulary."""
        return "row" if callable(self.data) and self.vocab_size is None else "token"

    def with_config(self, **fields: Any) -> Job:
        """Return this job with fields of its model configuration changed.

        What was replaced of the job since its `configure` was given (a loss, units) is kept as it is.

        Raises:
          ValueError: if the job has no `configure`, its model was replaced, or its configuration refuses a field.
        """
        if not fields:
            return self
        if self.configure is None:
            raise ValueError(f"job {self.name!r} has no configurable fields; asked to change {', '.join(fields)}")
        known = [f.name for f in dataclasses.fields(self.config)] if dataclasses.is_dataclass(self.config) else []
        if unknown := [name for name in fields if known and name not in known]:
            raise ValueError(
                f"job {self.name!r}: its configuration has no field {unknown[0]!r}; its fields are {', '.join(known)}"
            )
        assert isinstance(self.configure, _Configure)
        replaced = {name: now for name, was in self.configure.made.items() if (now := getattr(self, name)) is not was}
        if "model" in replaced:
            raise ValueError(
                f"job {self.name!r}: its model was replaced, and configure= makes another; asked to change "
                f"{', '.join(fields)}: give the job a configure= that makes this model"
            )
        try:
            made = self.configure.make(**fields)
        except TypeError as error:
            raise ValueError(f"job {self.name!r}: {error}; its fields are {', '.join(known) or 'unknown'}") from error
        return dataclasses.replace(as_job(made, self.name), **replaced)


@dataclasses.dataclass(frozen=True)
class _Configure:
    """A job's `configure`, and the other fields of the job to which it was given."""

    make: Callable[..., Any]
    made: Mapping[str, Any]

    def __call__(self, **fields: Any) -> Any:
        return self.make(**fields)


def as_job(value: Any, name: str) -> Job:
    """Bring a `Job`, or a mapping of its fields, into a `Job`.

    Raises:
      TypeError: for anything else, and for a field of another type.
      ValueError: for missing or unknown fields, and values out of range.
    """
    if isinstance(value, Job):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: a job is a jfsdp.trainer.Job or a dict of its fields, not {type(value).__name__}")
    known = {field.name: field for field in dataclasses.fields(Job)}
    if "cuts" in value:
        raise ValueError(
            f"job {name!r}: cuts is placements now: {{'**.kernel': PartitionSpec(None, 'tensor')}} for the dim 1 of "
            "these over axis 'tensor'"
        )
    unknown = [key for key in value if key not in known]
    missing = [key for key, field in known.items() if field.default is dataclasses.MISSING and key not in value]
    if unknown or missing:
        raise ValueError(
            f"job {name!r}: unknown fields {unknown}, missing fields {missing}; fields: {', '.join(known)}"
        )
    try:
        return Job(**{"name": name, **value})
    except TypeError as error:
        raise TypeError(f"job {name!r}: {error}") from error


def job_names() -> list[str]:
    """List the jobs that installed packages offer in the entry-point group `jfsdp.jobs`."""
    return sorted({point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)})


@checked
def find_job(name: str) -> Job:
    """Load the job of that name: an entry point that gives a Job, a dict of its fields, or a dict of jobs by name.

    Raises:
      TypeError: as `as_job`.
      ValueError: if no installed package offers it; lists those there are.
    """
    return as_job(_load_entry(name), name)


def _load_entry(name: str) -> Any:
    points = [point for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if not points:
        there = ", ".join(job_names()) or "none (install a package that offers some, or pass --factory)"
        raise ValueError(f"model {name!r} is unknown{did_you_mean(name, job_names())}; the models are {there}")
    value = points[0].load()
    if isinstance(value, Mapping) and name in value:
        value = value[name]
    return value() if callable(value) else value


def load_named(spec: str, what: str) -> Any:
    """Return what `module:name` names, importing from the working directory as `python -m` would.

    Args:
      what: what it is for, for messages.

    Raises:
      ValueError: if the spec is malformed, or names no module, or nothing in it.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"{what} {spec!r} is not module:function")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ValueError(f"{what} {spec!r}: no module named {error.name!r} from {os.getcwd()}") from error
    if not hasattr(module, name):
        raise ValueError(f"{what} {spec!r}: module {module_name} has no {name!r}")
    return getattr(module, name)


def load_job(model: str | None, factory: str | None) -> Job:
    """Load a job by name, or from the `module:function` of a factory (see `load_named`): exactly one of them.

    Errors of the factory itself pass through.

    Raises:
      ValueError: as `find_job` and `load_named`; for a factory that takes arguments; where `as_job` raises a TypeError.
    """
    if (model is None) == (factory is None):
        raise ValueError("give exactly one of --model NAME and --factory module:function")
    name = model or factory or ""
    value = _load_entry(name) if model is not None else load_named(name, "factory")
    if model is None and callable(value):
        check_call(f"factory {name!r}", value)
        value = value()
    try:
        return as_job(value, name)
    except TypeError as error:
        raise ValueError(str(error)) from error
