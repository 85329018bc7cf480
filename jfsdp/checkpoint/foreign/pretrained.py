"""Pretrained weights as a source under a model's names, after all checks."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jfsdp.arguments import PathLike, Seed, checked
from jfsdp.checkpoint.disk.logical_arrays import Stored, single_array
from jfsdp.checkpoint.disk.paths import existing_path, find_checkpoint, find_checkpoints
from jfsdp.checkpoint.disk.processes import gather_json, in_all
from jfsdp.checkpoint.disk.reader import CACHE_BYTES, CheckpointSource
from jfsdp.checkpoint.finite import Counted, refuse_nonfinite
from jfsdp.checkpoint.foreign.adam import AdamArrays, open_adam
from jfsdp.checkpoint.foreign.deepspeed import DeepSpeedSource, find_deepspeed
from jfsdp.checkpoint.foreign.mapping import Imported, NameMap, Names, Shapes, as_name_map
from jfsdp.checkpoint.foreign.peft import adapter_source
from jfsdp.checkpoint.foreign.peft_files import open_peft
from jfsdp.checkpoint.foreign.safetensors import CONFIG, INDEX, WEIGHTS, SafetensorsSource, check_index, weight_files
from jfsdp.checkpoint.foreign.torch_source import open_torch
from jfsdp.checkpoint.layers import ConvertedLayers
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.source import Encoded, Joined, Recast, Renamed, Source
from jfsdp.checkpoint.to_devices import place
from jfsdp.compat import warn
from jfsdp.layout.codec import Codec, scales_of
from jfsdp.layout.lora import A, layer_shapes
from jfsdp.layout.report import list_differences
from jfsdp.objects.path import as_path, is_address, read_json

# Options that no model reads, and that exports keep.
_SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
_LENGTH = "max_position_embeddings"
_TORCH = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def foreign_source(path: Any, key: str | None = None, *, training: bool = False) -> Source:
    """Open weights under their own names: safetensors, PyTorch (DCP, `.pt`, `.pth`, `.bin`, its index), DeepSpeed ZeRO.

    Args:
      key: for PyTorch and DeepSpeed, the dict that contains the model; see `open_torch`.
      training: open the checkpoint of a run, with optimizer states, also if there are other weights in its directory.

    Raises:
      ValueError: if there are no weights, or they are damaged.
    """
    path = existing_path(path)
    is_dcp = path.name == ".metadata" or (path / ".metadata").is_file()
    if not is_dcp and path.is_dir():
        files = [path / name for name in (WEIGHTS, INDEX, *_TORCH) if (path / name).exists()]
        if not is_address(path) and (training or not files):
            if (directory := find_deepspeed(path)) is not None:
                return DeepSpeedSource(directory, key)
            if below := sorted(
                {x.parent.name for end in (".metadata", "latest", "*_model_states.pt") for x in path.glob(f"*/{end}")}
            ):
                raise ValueError(f"{path}: contains no weights, but {', '.join(below[:4])} in it do; pass one of them")
        path = files[0] if files and files[0].name in _TORCH else path
    if path.name.endswith(".bin.index.json"):
        files = weight_files(path)
        sources = {file: open_torch(file, key) for file in files}
        for file, source in sources.items():
            check_index(file, files, source.arrays)
        return Joined(*sources.values())
    if is_dcp or path.suffix in (".pt", ".pth", ".bin", ".distcp"):
        return open_torch(path, key)
    if training:
        raise ValueError(f"{path}: has no optimizer states of PyTorch or DeepSpeed; leave out --init-optimizer")
    if key is not None:
        raise ValueError(f"{path}: is not a PyTorch file, for which {key!r} (--key, --init-key) names a dict; omit it")
    return SafetensorsSource(path)


def pretrained_source(
    path: Any, names: Names, leaves: Shapes, *, config: Any = None, key: str | None = None, training: bool = False
) -> Imported:
    """Open weights under a model's names. Reads headers, and of the weights only copies of tied ones.

    Args:
      path: a Hugging Face directory, `model.safetensors` or its index; a DCP directory of PyTorch, a `.pt`, or
        `pytorch_model.bin` and its index; a directory of DeepSpeed.
      key, training: see `foreign_source`.
      names: the mapping, such as a job's field `pretrained`.
      leaves: the model's parameters by name, without `params.`, with logical shapes.
      config: the model's configuration, which is compared with the `config.json` next to the weights; PyTorch formats
        may lack the file. None: not compared.

    Raises:
      ValueError: if files are missing or damaged, `config.json` describes another model or one that this architecture
        cannot compute, or weights are missing or extra. Messages name path and remedy.
    """
    source = foreign_source(path, key, training=training)
    names = as_name_map(names).chosen_for(source)
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
    optimizer: bool = False,
) -> Any:
    """Create the first state of a run from pretrained weights. Each process reads the slices of its devices.

    Floating weights are cast to the dtype of the model's parameters while they are read.

    Layout:  files -> each leaf in its `param` stage; nothing is gathered, and no device receives more than its shard.
    Memory:  on the host as `restore`: 2 GiB, or twice one device's part of the largest leaf if that is larger.

    Args:
      path: see `pretrained_source`; or a jfsdp checkpoint or run, of which only the parameters are read.
      model: a `ShardedModel`.
      tx: the optimizer; its states are initialized from these parameters.
      names: the mapping, such as a job's field `pretrained`; not needed for jfsdp checkpoints.
      config: see `pretrained_source`.
      key: see `foreign_source`.
      seed: seed for the rest of the model's state (rng keys).
      one_replica: see `restore`.
      allow_nonfinite: warn about NaN and infinite values instead of raising.
      optimizer: also read the moments of Adam and the number of updates, from a training checkpoint of PyTorch (DCP or
        torch.save, with states by parameter name) or of DeepSpeed ZeRO-1, 2 or 3. `tx` must contain one
        `optax.scale_by_adam` for all trained parameters. Its counts, those of schedules and `state.step` are set to the
        number of updates. Hyperparameters are those of `tx`.
      adapter: a PEFT directory, for a model wrapped by `jfsdp.lora` with the directory's `jfsdp.peft.read_loras`.
        None: adapters are initialized as in `init`.

    Raises:
      ValueError: as `pretrained_source` and `restore`; if values are not finite, with arrays and counts.
    """
    if not hasattr(model, "leaf_shapes"):
        raise TypeError(f"load_pretrained: model (a {type(model).__name__}) must be the result of jfsdp.fully_shard")
    adapters, added = model.model.adapters, model.adapter_shapes()
    every = {leaf.path: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for leaf in model.layout.leaves}
    codecs = model.model.codecs
    values = {name: jax.ShapeDtypeStruct(codecs[name].value_shape(every[name].shape), jnp.float32) for name in codecs}
    layers = layer_shapes(adapters)
    excluded = {*added, *layers, *map(scales_of, codecs)}
    leaves = {name: values.get(name, leaf) for name, leaf in every.items() if name not in excluded}
    made = layers if adapter is not None else {**added, **layers}
    read = {name: leaf for name, leaf in every.items() if name not in made}
    if adapter is not None and not adapters:
        raise ValueError(f"{adapter}: the model has no adapters; wrap it: jfsdp.lora(model, read_loras(...))")

    if optimizer and (adapters or is_checkpoint(path)):
        problem, remedy = "the model has adapters", "leave out --init-optimizer"
        if not adapters:
            problem, remedy = "is a checkpoint of jfsdp", "restore it with its optimizer (--resume)"
        raise ValueError(f"{path}: {problem}, and only states of other libraries' runs are read; {remedy}")
    adam = AdamArrays(model.abstract_state(tx)) if optimizer else None

    source: Source
    if key is None and is_checkpoint(path):
        source = our_parameters(path, leaves, names, config)
    else:
        imported = in_all(lambda: pretrained_source(path, names, leaves, config=config, key=key, training=optimizer))
        source = imported
        if adam is not None:
            trained = [leaf.path for leaf in model.layout.leaves if leaf.trainable]
            run = in_all(lambda: foreign_source(path, "", training=True))
            moments, step = in_all(lambda: open_adam(run, imported.names, leaves, trained, where=path))
    if adapter is not None:
        source = Joined(source, in_all(lambda: adapter_source(open_peft(adapter), names, adapters, leaves)))
    stored = [single_array(path, read[path], shape) for path, shape in model.leaf_shapes().items() if path in read]
    how = {"one_replica": one_replica, "allow_nonfinite": allow_nonfinite}
    arrays = _place_finite(path, stored, source, codecs, **how)
    state = model.init_from(tx, dict(zip((path for path in every if path in read), arrays, strict=True)), seed)
    if adam is None:
        return state
    if adam.others:
        lacking = f"{', '.join(adam.others[:8])} (and {len(adam.others[8:])} more)"
        warn(f"{path}: lacks states of the optimizer, which begin anew: {lacking}")
    return adam.fill(state, step, lambda wanted: _place_finite(path, wanted, moments, {}, **how))


def _place_finite(
    path: Any,
    arrays: list[Stored],
    source: Source,
    codecs: Mapping[str, Codec],
    *,
    one_replica: bool,
    allow_nonfinite: bool,
) -> list[jax.Array]:
    """Read arrays to the devices, in their own dtypes. Refuse NaN and infinite values, or warn of them."""
    counted = Counted(source)
    cast = Recast(counted, {one.name: one.logical.dtype for one in arrays if one.name not in codecs})
    placed = place(arrays, Encoded(cast, codecs) if codecs else cast, one_replica=one_replica)
    lines = sorted({line for found in gather_json(counted.lines()) for line in found})
    refuse_nonfinite(path, lines, allow=allow_nonfinite)
    if lines:
        warn(f"{path}: {'; '.join(lines)}")
    return placed


def is_checkpoint(path: Any) -> bool:
    """Return whether a path is a jfsdp checkpoint, or a run with checkpoints."""
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
    """Return the parameters of a jfsdp checkpoint, checked, under the model's names.

    Every process must call this.

    Args:
      names, config: see `pretrained_source`; compared with the configuration of the weights with which the run began.
      averages: return the averages of `jfsdp.optim.track_ema` instead of the parameters that have one.
      cache_bytes: see `CheckpointSource`.

    Raises:
      ValueError: if it is damaged, is of another model (lists the differences), or lacks the requested averages.
    """

    def open_source() -> tuple[CheckpointSource, dict[str, str], Source]:
        source = open_checkpoint(find_checkpoint(path), cache_bytes=cache_bytes)
        stated = source.stated("pretrained")
        if stated and config is not None and names is not None and (name_map := as_name_map(names)).from_config:
            _compare(source.path, name_map, dict(name_map.from_config(stated)), config, "the checkpoint")
        inner = {name: name for name in source.arrays if name.startswith("params.")}
        inner |= find_averages(source, inner) if averages else {}
        view = ConvertedLayers(Renamed(source, inner), [f"params.{name}" for name in leaves])
        found = {name.removeprefix("params."): _show(array) for name, array in view.arrays.items()}
        if lines := list_differences(found, {name: _show(leaf) for name, leaf in leaves.items()}):
            remedy = "set the model's config to the sizes of the checkpoint; `jfsdp checkpoint inspect` shows them"
            if any(name.endswith(f".{A}") for name in found):
                remedy = "it contains adapters: restore it (--resume), or export them and use --init-adapter"
            raise ValueError(f"checkpoint {source.path} is of another model:\n{lines}\n  {remedy}")
        return source, inner, Renamed(view, {name.removeprefix("params."): name for name in view.arrays})

    source, inner, parameters = in_all(open_source)
    source.check(inner.values())
    return parameters


def find_averages(source: CheckpointSource, params: Mapping[str, str]) -> dict[str, str]:
    """Return the names of the averages of `track_ema`, by the names of their parameters, with `params.`.

    Raises:
      ValueError: if there are none, or several per parameter.
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
    """Describe an array as far as it must be equal: the dtype only if it is not floating, since others are cast."""
    kind = "" if jnp.issubdtype(array.dtype, jnp.floating) else f" {jnp.dtype(array.dtype).name}"
    return f"{list(array.shape)}{kind}"


def pretrained_fields(path: Any, names: Names) -> dict[str, Any]:
    """Return the fields, from `config.json`, that a job's config must have for these weights: for `job.with_config`.

    Raises:
      ValueError: if there is no such file, or the model cannot compute what it configures.
    """
    names = as_name_map(names)
    if names.from_config is None:
        raise ValueError(f"{path}: the mapping of names has no from_config to read {CONFIG} with; add one to the job's")
    options = read_config(path)
    try:
        return dict(names.from_config(options))
    except (ValueError, TypeError, AttributeError) as error:  # the latter two for values of the wrong type
        kind = "" if isinstance(error, ValueError) else "has an option of the wrong kind, such as text for a number: "
        raise ValueError(f"{_config_file(path)}: {kind}{error}") from error


def fit_job(job: Any, path: Any, changed: Mapping[str, Any]) -> Any:
    """Return a job with the sizes and options of the `config.json` next to weights, if any, and with changed fields.

    The default row length is at most `max_position_embeddings`.

    Args:
      path: path of the weights; None: no weights.

    Raises:
      ValueError: as `pretrained_fields`, and if the job's configuration refuses the fields.
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
    """Return the contents of `config.json` for a model, to pass to `export_safetensors`.

    Args:
      config: the job's configuration.
      seq_len: the longest row of the model.
      theirs: the `config.json` of the weights that the model began with. Its special tokens are kept, and its length if
        it is greater.

    Raises:
      ValueError: if no Hugging Face architecture computes the model.
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
    """Return the Hugging Face configuration of weights, from `config.json` or a jfsdp checkpoint; empty without one."""
    if has_config(path):
        return read_config(path)
    return (open_checkpoint(find_checkpoint(path)).stated("pretrained") if is_checkpoint(path) else None) or {}


def has_config(path: Any) -> bool:
    """Return whether there is a Hugging Face `config.json` next to weights that is not a jfsdp run's."""
    return _config_file(path).is_file() and not is_checkpoint(path)


def read_config(path: Any) -> dict[str, Any]:
    """Read the `config.json` next to weights.

    Raises:
      ValueError: if it is missing or not valid, or belongs to a jfsdp run without a checkpoint.
    """
    file = _config_file(path)
    directory = file.parent
    if not file.is_file():
        raise ValueError(f"{directory}: has no {CONFIG} to compare the model with; put it there (or pass config=None)")
    options = read_json(file, "download it again")
    if not isinstance(options, dict):
        raise ValueError(f"{file}: is a {type(options).__name__}, not a configuration; download it again")
    if "decides" in options:
        raise ValueError(f"{directory}: is a run without a checkpoint; continue it with --resume, or name another")
    if not isinstance(options.get(_LENGTH), int | None):
        raise ValueError(f"{file}: {_LENGTH}={options[_LENGTH]!r} must be a whole number; download it again")
    return options


def _config_file(path: Any) -> Path:
    path = as_path(path)
    return (path if path.is_dir() else path.parent) / CONFIG


def _compare(path: Any, names: NameMap, wanted: Mapping[str, Any], config: Any, who: str) -> None:
    """Check that weights are of a model that computes the same, since shapes alone do not show all differences."""
    ours: Mapping[str, Any] = vars(config)
    if names.from_config and names.to_config:  # normalized as if read from a file, which may write a value in two ways
        ours = names.from_config(names.to_config(config, 1))
    differing = [(name, theirs) for name, theirs in wanted.items() if ours.get(name) != theirs]
    if differing:
        lines = [f"  {name}: {who} says {theirs!r}, the model has {ours.get(name)!r}" for name, theirs in differing]
        remedy = " ".join(f"{name}={theirs!r}" for name, theirs in differing)
        raise ValueError("\n".join([f"{path}: is of another model:", *lines, f"  set in the model's config {remedy}"]))
