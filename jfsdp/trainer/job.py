"""The class Job, a model with all that is needed to train it, and loading of jobs by name or factory."""

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
    """A model with everything needed to train it on any mesh. Packages offer jobs as dicts of these fields.

    Attributes:
      model: the model argument of `fully_shard`: a factory `f(rngs) -> nnx.Module`, a module, or
        `(linen module, example inputs)`.
      loss: `f(model, batch)`; returns a scalar or an object with `total`, `weight` and optionally `aux`; see
        `jfsdp.Loss`. An aux value `correct` is shown as accuracy.
      batch: `f(batch_size, seq_len) -> pytree of jax.ShapeDtypeStruct`, the shapes of one global batch.
      units: the `units` argument of `fully_shard`.
      axis_rules, placements: the arguments of `fully_shard` for axes `tensor` and `expert`.
      optimizer: `f(learning_rate or schedule) -> optax.GradientTransformation`. The script's `--optimizer` replaces it.
      name: name in messages and run directories.
      eval_loss: loss for evaluation: without dropout, with stored batch statistics. None: `loss`.
      row_loss: `f(model, batch) -> object` with `total` and `weight` [B]: the terms of `loss` by row, without dropout.
        Preference losses need it. None: the job cannot be trained on preferences.
      data: training data of the script: "tokens" (batches are dicts with `tokens` and `targets` [B T]), "pairs"
        (dicts with `tokens`, `targets` and `weights` [B 2 T], and `reference` [B 2]: a chosen and a rejected answer),
        or `f(share)`, which returns custom data: a `grain.MapDataset` of rows, or an iterable over this process's
        batches whose iterator has `get_state` and `set_state` (docs/models.md). The library accepts any batch.
      eval_data: `f(share)` as in `data`, for held-out rows; only with custom data. None: no evaluation.
      seq_len: default sequence length; unused if rows are not tokens.
      documents_per_row: largest number of documents in a packed row, including padding; the script's data obey it.
        None: no limit.
      attention: `f(dtype, seq_len, is_packed=...) -> str`: the attention kernel on the device of the trace, and the
        reason, as text. None: not printed.
      vocab_size: number of token ids; None for models without tokens.
      flops_per_token: `f(num_keys) -> FLOPs` of the forward and backward of one token (one row, if `item` is "row")
        that attends to `num_keys` keys. Used for MFU with `seq_len`, and for MFU of causal attention with the mean
        number of keys that tokens attend to. None if unknown.
      configure: `f(**fields) -> job as a dict`: the same job with changed fields of its config; None if it has none.
        Changes made by `dataclasses.replace` are kept: see `with_config`.
      config: the model's configuration, any dataclass; saved in checkpoints.
      pretrained: names of the model's parameters in checkpoints of Hugging Face, a dict (docs/pretrained.md); None: no
        such checkpoints.
      in_context: `f(model, attention=, over_context=, positions=, whole_rows=) -> model`: `model` with these functions
        of jfsdp, for rows that mesh axis `context` splits (docs/context.md). None: the model calls them itself.
      with_dot_general: `f(model, dot_general) -> model`: `model` with this function for the products of its layers'
        projections, for `--matmul float8`. None: the model names `jfsdp.float8_dot_general` itself, or has none.
      with_experts: `f(model, experts) -> model`: `model` with `jfsdp.experts`, for a mixture of experts. None: the
        model calls it itself, or has no experts.
      cache: `f(rows, length, dtype) -> pytree of jax.ShapeDtypeStruct`, the KV cache of generation; arrays are
        [rows .. heads length size], and zeros are an empty cache. The model is then called as `model(tokens [B T],
        positions=[B T], cache=, lengths=[B]) -> (logits [B V] of each row's last token, cache)`: with prompts, padded
        at their ends by positions of `length`, and then with one token at a time. `f` raises a ValueError if `length`
        is beyond the model's. None: `jfsdp generate` does not accept the job.
      decay_mask: `f(params) -> tree of bools`: which parameters decay with `--optimizer`. None: those with at least two
        dims, not counting layer dims.

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
    in_context: Callable[..., Any] | None = None
    with_dot_general: Callable[..., Any] | None = None
    with_experts: Callable[..., Any] | None = None
    cache: Callable[..., Any] | None = None
    decay_mask: Callable[[Any], Any] | None = None

    def __post_init__(self) -> None:
        if not callable(self.data) and self.data not in DATA_KINDS:
            raise ValueError(
                f"job {self.name!r}: data={self.data!r} is not a kind of data; the kinds are {', '.join(DATA_KINDS)}, "
                "or a function f(share) that returns custom data"
            )
        if self.eval_data is not None and not callable(self.data):
            raise ValueError(f"job {self.name!r}: eval_data= needs data=f(share), not data={self.data!r}")
        if self.configure is not None and not isinstance(self.configure, _Configure):
            names = [field.name for field in dataclasses.fields(self) if field.name not in ("config", "configure")]
            made = {name: getattr(self, name) for name in names}
            object.__setattr__(self, "configure", _Configure(self.configure, made))

    @property
    def item(self) -> str:
        """Unit of rates and losses: "token", or "row" for custom data without a vocabulary."""
        return "row" if callable(self.data) and self.vocab_size is None else "token"

    def with_config(self, **fields: Any) -> Job:
        """Return this job with changed fields of its model configuration.

        Fields of the job that were replaced (a loss, units) are kept.

        Raises:
          ValueError: if the job has no `configure`, its model was replaced, or its configuration rejects a field.
        """
        if not fields:
            return self
        if self.configure is None:
            raise ValueError(
                f"job {self.name!r} has no configurable fields, and {', '.join(fields)} cannot change; give the job a "
                "configure="
            )
        known = [f.name for f in dataclasses.fields(self.config)] if dataclasses.is_dataclass(self.config) else []
        if unknown := [name for name in fields if known and name not in known]:
            raise ValueError(
                f"job {self.name!r}: its configuration has no field {unknown[0]!r}; its fields are {', '.join(known)}"
            )
        assert isinstance(self.configure, _Configure)
        replaced = {name: now for name, was in self.configure.made.items() if (now := getattr(self, name)) is not was}
        if "model" in replaced:
            raise ValueError(
                f"job {self.name!r}: cannot change {', '.join(fields)}: its model was replaced, and configure= returns "
                "another; give the job a configure= for this model"
            )
        try:
            made = self.configure.make(**fields)
        except TypeError as error:
            raise ValueError(f"job {self.name!r}: {error}; its fields are {', '.join(known) or 'unknown'}") from error
        return dataclasses.replace(as_job(made, self.name), **replaced)


@dataclasses.dataclass(frozen=True)
class _Configure:
    """A job's `configure`, and the other fields of the job at its creation."""

    make: Callable[..., Any]
    made: Mapping[str, Any]

    def __call__(self, **fields: Any) -> Any:
        return self.make(**fields)


def as_job(value: Any, name: str) -> Job:
    """Convert a `Job` or a mapping of its fields to a `Job`.

    Raises:
      TypeError: for other types, and for a field of the wrong type.
      ValueError: for missing or unknown fields, and values out of range.
    """
    if isinstance(value, Job):
        return value
    if not isinstance(value, Mapping):
        raise TypeError(f"{name}: a job is a jfsdp.trainer.Job or a dict of its fields, not {type(value).__name__}")
    known = {field.name: field for field in dataclasses.fields(Job)}
    extra = [key for key in value if key not in known]
    missing = [key for key, field in known.items() if field.default is dataclasses.MISSING and key not in value]
    if extra or missing:
        raise ValueError(f"job {name!r}: unknown fields {extra}, missing fields {missing}; fields: {', '.join(known)}")
    try:
        return Job(**{"name": name, **value})
    except TypeError as error:
        raise TypeError(f"job {name!r}: {error}") from error


def job_names() -> list[str]:
    """List the jobs that installed packages offer in the entry-point group `jfsdp.jobs`."""
    return sorted({point.name for point in metadata.entry_points(group=ENTRY_POINT_GROUP)})


@checked
def find_job(name: str) -> Job:
    """Load a job by name: an entry point with a Job, a dict of its fields, or a dict of jobs by name.

    Raises:
      TypeError: as `as_job`.
      ValueError: if no installed package offers it; lists the known names.
    """
    return as_job(_load_entry(name), name)


def _load_entry(name: str) -> Any:
    points = [point for point in metadata.entry_points(group=ENTRY_POINT_GROUP) if point.name == name]
    if not points:
        known = ", ".join(job_names()) or "none (install a package that offers some, or pass --factory)"
        raise ValueError(
            f"model {name!r} is unknown{did_you_mean(name, job_names())}; the models are {known}; --model-config sets "
            "other sizes of a model, and training reads the sizes of --init-from"
        )
    value = points[0].load()
    if isinstance(value, Mapping) and name in value:
        value = value[name]
    return value() if callable(value) else value


def load_named(spec: str, what: str) -> Any:
    """Import the object `module:name`, from the working directory too, as `python -m` does.

    Args:
      what: its purpose, for messages.

    Raises:
      ValueError: if the spec is malformed, or the module or the name does not exist.
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
    """Load a job by name, or from a factory `module:function` (see `load_named`). Exactly one must be given.

    Errors raised by the factory are not converted.

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
