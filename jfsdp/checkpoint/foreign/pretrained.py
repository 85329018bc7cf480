"""Weights of Hugging Face checkpoints as a source under a model's own names, after every check."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfsdp.arguments import PathLike, Seed, checked
from jfsdp.checkpoint.disk.logical_arrays import one_array
from jfsdp.checkpoint.disk.paths import existing_path, find_checkpoint, find_checkpoints
from jfsdp.checkpoint.disk.processes import gather_json, in_all
from jfsdp.checkpoint.disk.reader import CACHE_BYTES, CheckpointSource
from jfsdp.checkpoint.finite import Counted, refuse_nonfinite
from jfsdp.checkpoint.foreign.mapping import Imported, NameMap, Names, Shapes, as_name_map
from jfsdp.checkpoint.foreign.peft import adapter_source
from jfsdp.checkpoint.foreign.peft_files import open_peft
from jfsdp.checkpoint.foreign.safetensors import CONFIG, INDEX, WEIGHTS, SafetensorsSource, check_index, weight_files
from jfsdp.checkpoint.foreign.torch_source import open_torch
from jfsdp.checkpoint.layers import OtherLayers
from jfsdp.checkpoint.source import Encoded, Joined, Recast, Renamed, Source
from jfsdp.checkpoint.to_devices import place
from jfsdp.compat import warn
from jfsdp.layout.codec import scales_of
from jfsdp.layout.lora import A, layer_shapes
from jfsdp.layout.report import list_differences

# What no model computes with, and an export is to say again.
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LENGTH = "max_position_embeddings"
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def foreign_source(path: Any, key: str | None = None) -> Source:
    """Open weights under their own names: safetensors, or what PyTorch wrote (DCP, `.pt`, `.pth`, `.bin`, its index).

    Args:
      key: of PyTorch's, the dict that holds the model; see `open_torch`.

    Raises:
      ValueError: if there are none, or they are damaged.
    """
    path = existing_path(path)
    is_dcp = path.name == ".metadata" or (path / ".metadata").is_file()
    if path.is_dir() and not any((path / name).exists() for name in (WEIGHTS, INDEX)):
        path = next((path / name for name in _TORCH if (path / name).exists()), path)
    if path.name.endswith(".bin.index.json"):
        files = weight_files(path)
        sources = {file: open_torch(file, key) for file in files}
        for file, source in sources.items():
            check_index(file, files, source.arrays)
        return Joined(*sources.values())
    if is_dcp or path.suffix in (".pt", ".pth", ".bin", ".distcp"):
        return open_torch(path, key)
    if key is not None:
        raise ValueError(f"{path}: is not of PyTorch, and {key!r} (--key, --init-key) is a dict of that; leave it out")
    return SafetensorsSource(path)


def pretrained_source(
    path: Any, names: Names, leaves: Shapes, *, config: Any = None, key: str | None = None
) -> Imported:
    """Open weights under the names of a model. Reads headers, and no weights but copies of tied ones.

    Args:
      path: a directory of Hugging Face, `model.safetensors`, or its index; a directory of PyTorch's DCP, a `.pt`, or
        `pytorch_model.bin` and its index.
      key: see `foreign_source`.
      names: the mapping, such as a job's field `pretrained`.
      leaves: the model's parameters by name, without `params.`, with logical shapes.
      config: the model's configuration, compared with the `config.json` beside the weights, which PyTorch's may lack;
        None: not compared.

    Raises:
      ValueError: if the files are not there or damaged, `config.json` describes another model or one that this
        architecture cannot compute, or weights are left over on either side. The messages name path and remedy.
    """
    names, source = as_name_map(names), foreign_source(path, key)
    may_lack = not isinstance(source, SafetensorsSource) and not _config_file(path).is_file()
    if config is not None and names.from_config is not None and not may_lack:
        _compare(path, names, pretrained_fields(path, names), config, CONFIG)
    return Imported(source, names, leaves, where=path)


@checked
def load_pretrained(
    path: PathLike,
    model: Any,
    tx: optax.GradientTransformation,
    names: Names = None,
    *,
    config: Any = None,
    key: str | None = None,
    seed: Seed = 0,
    one_replica: bool = False,
    allow_nonfinite: bool = False,
    adapter: PathLike | None = None,
) -> Any:
    """Make the first state of a run around weights from elsewhere: each process reads what its devices hold.

    Floating weights are cast to the dtype of the model's parameters while they are read.

    Layout:  files -> each leaf as its `param` stage says; nothing is gathered, and no device holds more than its part.
    Memory:  on the host as `restore`: 2 GiB, or twice one device's part of the largest leaf if that is larger.

    Args:
      path: see `pretrained_source`; or a checkpoint of ours or a run, whose parameters alone are read.
      model: a `ShardedModel`.
      tx: the optimizer; its states begin from these parameters.
      names: the mapping, such as a job's field `pretrained`; not needed for checkpoints of ours.
      config: see `pretrained_source`.
      key: see `foreign_source`.
      seed: of the rest of the model's state (rng keys).
      one_replica: see `restore`.
      allow_nonfinite: begin from NaN and infinite values too, and warn.
      adapter: a directory of PEFT's, for a model wrapped by `jfsdp.lora` with its `jfsdp.peft.read_loras`.
        None: a model's adapters begin as `init` makes them.

    Raises:
      ValueError: as `pretrained_source` and `restore`; and if values are not finite, with the arrays and how many.
    """
    if not hasattr(model, "leaf_shapes"):
        raise TypeError(f"load_pretrained: model (a {type(model).__name__}) must be what jfsdp.fully_shard returned")
    adapters, added = model.model.adapters, model.adapter_shapes()
    every = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in model.layout.leaves}
    codecs = model.model.codecs
    values = {name: jax.ShapeDtypeStruct(codecs[name].value_shape(every[name].shape), jnp.float32) for name in codecs}
    layers = layer_shapes(adapters)
    beside = {*added, *layers, *map(scales_of, codecs)}
    leaves = {name: values.get(name, leaf) for name, leaf in every.items() if name not in beside}
    made = layers if adapter is not None else {**added, **layers}
    read = {name: leaf for name, leaf in every.items() if name not in made}
    if adapter is not None and not adapters:
        raise ValueError(f"{adapter}: is an adapter, and the model has none; give jfsdp.lora(model, read_loras(...))")

    source: Source
    if key is None and is_ours(path):
        source = our_parameters(path, leaves, names, config)
    else:
        source = in_all(lambda: pretrained_source(path, names, leaves, config=config, key=key))
    if adapter is not None:
        source = Joined(source, in_all(lambda: adapter_source(open_peft(adapter), names, adapters, leaves)))
    stored = [one_array(path, read[path], shape) for path, shape in model.leaf_shapes().items() if path in read]
    counted = Counted(source)
    cast = Recast(counted, {name: leaf.dtype for name, leaf in read.items() if name not in codecs})
    arrays = place(stored, Encoded(cast, codecs) if codecs else cast, one_replica=one_replica)
    lines = sorted({line for found in gather_json(counted.lines()) for line in found})
    refuse_nonfinite(path, lines, allow=allow_nonfinite)
    if lines:
        warn(f"{path}: {'; '.join(lines)}")
    return model.init_from(tx, dict(zip((path for path in every if path in read), arrays, strict=True)), seed)


def is_ours(path: Any) -> bool:
    """Tell whether a path is a checkpoint of ours, or a run of them."""
    try:
        return bool(find_checkpoints(path))
    except ValueError:
        return False


def our_parameters(
    path: Any,
    leaves: Shapes,
    names: Names = None,
    config: Any = None,
    *,
    averages: bool = False,
    cache_bytes: int = CACHE_BYTES,
) -> Source:
    """Return the parameters of a checkpoint of ours, checked, under their names without `params.`.

    Every process calls this.

    Args:
      names, config: see `pretrained_source`; compared with what the checkpoint says of weights that its run began with.
      averages: give those of `jfsdp.optim.track_ema` in place of the parameters that have one.
      cache_bytes: see `CheckpointSource`.

    Raises:
      ValueError: if it is damaged, or of another model, listing what differs; or has no averages where they are asked.
    """

    def open_source() -> tuple[CheckpointSource, dict[str, str], Source]:
        source = CheckpointSource(find_checkpoint(path), cache_bytes=cache_bytes)
        stated = source.stated("pretrained")
        if stated and config is not None and names is not None and (name_map := as_name_map(names)).from_config:
            _compare(source.path, name_map, dict(name_map.from_config(stated)), config, "the checkpoint")
        inner = {name: name for name in source.arrays if name.startswith("params.")}
        inner |= find_averages(source, inner) if averages else {}
        view = OtherLayers(Renamed(source, inner), [f"params.{name}" for name in leaves])
        there = {name.removeprefix("params."): _show(array) for name, array in view.arrays.items()}
        if lines := list_differences(there, {name: _show(leaf) for name, leaf in leaves.items()}):
            remedy = "give the model's config the sizes of the checkpoint; `jfsdp checkpoint inspect` shows them"
            if any(name.endswith(f".{A}") for name in there):
                remedy = "it holds adapters: restore it (--resume), or export them, and begin there (--init-adapter)"
            raise ValueError(f"checkpoint {source.path} is of another model:\n{lines}\n  {remedy}")
        return source, inner, Renamed(view, {name.removeprefix("params."): name for name in view.arrays})

    source, inner, parameters = in_all(open_source)
    source.check(inner.values())
    return parameters


def find_averages(source: CheckpointSource, params: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the averages that `track_ema` kept, by those of their parameters, `params.` first.

    Raises:
      ValueError: if there are none, or several of one parameter.
    """
    found: dict[str, dict[str, str]] = {}
    for name in source.arrays:
        where, mark, leaf = name.partition(".ema.")
        if mark and where.startswith("opt_state") and f"params.{leaf}" in params:
            found.setdefault(where, {})[f"params.{leaf}"] = name
    if len(found) != 1:
        raise ValueError(f"checkpoint {source.path}: has {len(found) or 'no'} averages of parameters; train with --ema")
    return next(iter(found.values()))


def _show(array: Any) -> str:
    """Describe an array as far as it must be the same: floating ones are cast, and others are not."""
    kind = "" if jnp.issubdtype(array.dtype, jnp.floating) else f" {jnp.dtype(array.dtype).name}"
    return f"{list(array.shape)}{kind}"


def pretrained_fields(path: Any, names: Names) -> dict[str, Any]:
    """Read from `config.json` the fields that a job's config must have for these weights: for `job.with_config`.

    Raises:
      ValueError: if there is no such file, or it asks for what the model cannot compute.
    """
    names = as_name_map(names)
    if names.from_config is None:
        raise ValueError(f"{path}: the mapping of names has no from_config to read {CONFIG} with; add one to the job's")
    options = read_config(path)
    try:
        return dict(names.from_config(options))
    except (ValueError, TypeError, AttributeError) as error:  # the latter two of values of the wrong kind
        kind = "" if isinstance(error, ValueError) else "has an option of the wrong kind, such as text for a number: "
        raise ValueError(f"{_config_file(path)}: {kind}{error}") from error


def fit_job(job: Any, path: Any, changed: Mapping[str, Any]) -> Any:
    """Return a job with the sizes and options that the `config.json` beside weights says, if any, and others changed.

    Its default length of rows is at most `max_position_embeddings`.

    Args:
      path: of weights; None: there are none.

    Raises:
      ValueError: as `pretrained_fields`, and if the job's configuration refuses what it says.
    """
    if path is None or not job.pretrained or not has_config(path):
        return job.with_config(**changed)
    fields, length = pretrained_fields(path, job.pretrained), read_config(path).get(_LENGTH)
    try:
        fitted = job.with_config(**{**fields, **changed})
    except ValueError as error:
        raise ValueError(f"{_config_file(path)}{', with the fields changed' if changed else ''}: {error}") from error
    return fitted if length is None else dataclasses.replace(fitted, seq_len=min(fitted.seq_len, length))


def config_json(names: Names, config: Any, seq_len: int, theirs: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return what `config.json` is to say of a model: for `export_safetensors`.

    Args:
      config: the job's configuration.
      seq_len: the longest row that the model is for.
      theirs: what it said of the weights that the model began with: special tokens stay, and a greater length.

    Raises:
      ValueError: if no architecture of Hugging Face computes what the model does.
    """
    names = as_name_map(names)
    if names.to_config is None:
        raise ValueError(f"the mapping of names has no to_config to write {CONFIG} with; add one to the job's")
    ours = dict(names.to_config(config, seq_len))
    kept = {name: value for name, value in (theirs or {}).items() if name in _SPECIAL_TOKENS}
    if _LENGTH in ours:
        before = (theirs or {}).get(_LENGTH)
        kept[_LENGTH] = max(ours[_LENGTH], before if isinstance(before, int) else 0)
    return ours | kept


def stated_config(path: Any) -> dict[str, Any]:
    """Return what is said of weights in the words of Hugging Face: beside theirs, or in a checkpoint of ours.

    Empty where nothing is.
    """
    if has_config(path):
        return read_config(path)
    return (CheckpointSource(find_checkpoint(path)).stated("pretrained") if is_ours(path) else None) or {}


def has_config(path: Any) -> bool:
    """Tell whether a `config.json` of Hugging Face stands beside weights; a run of ours has another one."""
    return _config_file(path).is_file() and not is_ours(path)


def read_config(path: Any) -> dict[str, Any]:
    """Read the `config.json` beside weights.

    Raises:
      ValueError: if it is no JSON, not there, or a run's that has no checkpoint.
    """
    file = _config_file(path)
    directory = file.parent
    if not file.is_file():
        raise ValueError(f"{directory}: has no {CONFIG} to compare the model with; put it there (or pass config=None)")
    try:
        options = json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file}: is no JSON ({error}); fetch it again") from error
    if not isinstance(options, dict):
        raise ValueError(f"{file}: is no configuration but a {type(options).__name__}; fetch it again")
    if "decides" in options:
        raise ValueError(f"{directory}: is a run without a checkpoint; go on with it by --resume, or name another")
    if not isinstance(options.get(_LENGTH), int | None):
        raise ValueError(f"{file}: {_LENGTH}={options[_LENGTH]!r} must be a whole number; fetch it again")
    return options


def _config_file(path: Any) -> Path:
    path = Path(path).expanduser()
    return (path if path.is_dir() else path.parent) / CONFIG


def _compare(path: Any, names: NameMap, wanted: Mapping[str, Any], config: Any, who: str) -> None:
    """Refuse weights of a model that computes something else, though its shapes may be the same."""
    ours: Mapping[str, Any] = vars(config)
    if names.from_config and names.to_config:  # as if read from a file, where one value may be written in two ways
        ours = names.from_config(names.to_config(config, 1))
    differing = [(name, theirs) for name, theirs in wanted.items() if ours.get(name) != theirs]
    if differing:
        lines = [f"  {name}: {who} says {theirs!r}, the model has {ours.get(name)!r}" for name, theirs in differing]
        remedy = " ".join(f"{name}={theirs!r}" for name, theirs in differing)
        raise ValueError("\n".join([f"{path}: is of another model:", *lines, f"  give the model's config {remedy}"]))
