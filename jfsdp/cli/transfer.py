"""`jfsdp checkpoint convert`, `export`, `import`, `merge` and `unmerge`."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import jax
import tyro

from jfsdp.checkpoint.disk.files import CONFIG, EXTRA, LAYOUT
from jfsdp.checkpoint.disk.paths import find_checkpoint
from jfsdp.checkpoint.disk.reader import STREAM_BYTES, CheckpointSource
from jfsdp.checkpoint.foreign.mapping import as_name_map
from jfsdp.checkpoint.foreign.peft_files import CONFIG as PEFT_CONFIG
from jfsdp.checkpoint.foreign.safetensors import CONFIG as HF_CONFIG
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.source import Recast, Renamed, Watched, total_bytes
from jfsdp.cli.console import Reporting, print_wrapped
from jfsdp.extras import MissingExtra
from jfsdp.launch.runtime import start_jax
from jfsdp.layout.lora import Adapter
from jfsdp.objects.path import as_path, on_disk
from jfsdp.trainer.data.tokenizer import Tokenizer, load_tokenizer
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.job import Job, load_job
from jfsdp.trainer.options import Dtype, Fields, Name, Number, Real, optional, read_config
from jfsdp.trainer.parse import read_fields

if TYPE_CHECKING:
    from jfsdp.checkpoint.foreign.export import Written

PathArgument = Annotated[str, tyro.conf.arg(metavar="PATH", help="A checkpoint, or the directory of a run.")]
_Target = Annotated[str, tyro.conf.arg(metavar="TARGET", help="The directory to make.")]
Globs = Annotated[tuple[str, ...], tyro.conf.arg(metavar="GLOB ...")]


@dataclasses.dataclass(frozen=True)
class Convert(Reporting):
    """Write a converted copy of a checkpoint: other dtypes, layers stacked or listed, a subset of arrays.

    Not needed to restore a checkpoint on another mesh, strategy, engine, storage or form of layers. For a run, the
    newest step is converted. Exit status: 0; 2 for a wrong path or option, 4 for a damaged checkpoint.
    """

    path: tyro.conf.Positional[PathArgument]
    target: tyro.conf.Positional[_Target]
    dtype: Annotated[tuple[str, ...], tyro.conf.UseAppendAction, tyro.conf.arg(metavar="[GLOB=]DTYPE")] = ()
    """bfloat16 casts the parameters, opt_state=bfloat16 the arrays that match the glob. May be repeated."""
    stack: Name = None
    """Stack a list of layers: layers stacks layers.0.attn, layers.1.attn, ..."""
    unstack: Name = None
    """Split a stack of layers into a list; h_ makes h_0, h_1, ..., as named by flax.linen."""
    only: Globs = ()
    """Convert only arrays whose name matches one of these globs, or a prefix such as params."""
    skip: Globs = ()
    """Omit these arrays, such as opt_state."""

    def run(self) -> int:
        from jfsdp.checkpoint.convert import MEMORY_BYTES, convert

        path = find_checkpoint(self.path)
        total = total_bytes(open_checkpoint(path).arrays.values())
        with self.progress_of("converting", MEMORY_BYTES, total) as progress:
            lines = convert(
                path,
                self.target,
                casts=self.dtype,
                stack=self.stack,
                unstack=self.unstack,
                only=self.only or None,
                skip=self.skip or None,
                progress=progress,
            )
        _print_result(self, {"from": str(path), "to": self.target}, lines)
        return 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class _ModelOptions(Reporting):
    """Options that select the model of the weights."""

    model: Name = None
    """Name of a model (`jfsdp models` lists them). Not needed if a checkpoint of jfsdp names it."""
    factory: Annotated[str | None, optional(str, "MODULE:FUNCTION")] = None
    """Instead of --model: a function that returns a jfsdp.trainer.Job, from the working directory."""
    model_config: Fields = option((), read=read_config)
    """Fields of the model's configuration to change."""


@dataclasses.dataclass(frozen=True)
class Export(_ModelOptions):
    """Write the parameters of a checkpoint as Hugging Face safetensors, with config.json.

    For a run with adapters (--lora), writes only the adapters, for PEFT; `merge` adds them to the weights. For a run,
    exports the newest step, with the run's model. Copies the tokenizer's files, the chat template and
    generation_config.json from the run's sources. Exit status: 0; 2 for a wrong path or option, or non-finite values; 4
    for a damaged checkpoint.
    """

    path: tyro.conf.Positional[PathArgument]
    target: tyro.conf.Positional[_Target]
    dtype: Dtype = None
    """float32, bfloat16 or float16. none: as stored."""
    max_shard_gb: Real = option(5.0, least=1e-6)
    """Maximum GB of a file; several files are listed in an index."""
    max_length: Number = option(None, least=1)
    """max_position_embeddings of config.json. none: the initial weights' value, unless the model was trained on longer
    rows."""
    ema: bool = False
    """Write the moving averages of a run with --ema instead of its parameters. The run's eval losses are of these."""
    allow_nonfinite: bool = False
    """Write NaN and infinite values too."""

    def run(self) -> int:
        source = open_checkpoint(find_checkpoint(self.path))
        stored = {name: found for name in ("config", "pretrained") if isinstance(found := source.stated(name), dict)}
        has_adapters = bool((source.manifest["layout"] or {}).get("adapters"))
        write = self._write_adapters if has_adapters else self._write_weights
        written = write(source, _find_job(self, stored), stored)
        _print_written(self, source.path, written, _copy_model_files(stored.get("config", {}), written.directory))
        return 0

    def _write_weights(self, source: CheckpointSource, job: Job, stored: dict[str, Any]) -> Written:
        from jfsdp.checkpoint.foreign.export import MEMORY_BYTES, export_safetensors
        from jfsdp.checkpoint.foreign.pretrained import config_json, our_parameters

        config = stored.get("pretrained")
        if config is None and as_name_map(job.pretrained).to_config is not None:
            config = config_json(job.pretrained, job.config, self.max_length or job.seq_len)
        if config is None:
            print("note: the name mapping has no to_config, so no config.json is written", file=sys.stderr)
        elif self.max_length is not None:
            config = _with_length(config, self.max_length)
        if config is not None and (tokenizer := _find_tokenizer(stored.get("config", {}))) is not None:
            config = {"eos_token_id": tokenizer.eod_id} | config
        with self.progress_of("reading", 4 * STREAM_BYTES, None):
            weights = our_parameters(source.path, _leaves(job), averages=self.ema, cache_bytes=STREAM_BYTES)
        bound = 6 * STREAM_BYTES + MEMORY_BYTES
        with self.progress_of("exporting", bound, total_bytes(weights.arrays.values())) as progress:
            return export_safetensors(
                Watched(weights, progress),
                on_disk(self.target, "TARGET"),
                job.pretrained,
                config=config,
                dtype=self.dtype,
                max_shard_bytes=int(self.max_shard_gb * 1e9),
                allow_nonfinite=self.allow_nonfinite,
            )

    def _write_adapters(self, source: CheckpointSource, job: Job, stored: dict[str, Any]) -> Written:
        """Write the adapters of a checkpoint for PEFT. The base model is the run's --init-from."""
        from jfsdp.checkpoint.foreign.peft import write_peft
        from jfsdp.checkpoint.foreign.pretrained import find_averages

        if self.max_length is not None:
            raise ValueError(f"{source.path}: contains adapters, which have no config.json; leave out --max-length")
        layout = source.manifest["layout"]
        adapters = {one["path"]: Adapter.from_dict(one) for one in layout["adapters"]}
        names = [leaf["path"] for leaf in layout["leaves"] if leaf["trainable"]]
        if f"params.{names[0]}" not in source.arrays:
            raise ValueError(
                f"{source.path}: is a converted checkpoint without {names[0]}, which its layout requires; export the "
                "checkpoint that it was made from"
            )
        arrays = {f"params.{name}": f"params.{name}" for name in names}
        arrays |= find_averages(source, arrays) if self.ema else {}
        source.check(list(arrays.values()))
        return write_peft(
            Renamed(source, {name: arrays[f"params.{name}"] for name in names}),
            on_disk(self.target, "TARGET"),
            job.pretrained,
            adapters,
            _leaves(job),
            base=stored.get("config", {}).get("init_from"),
            dtype=self.dtype,
            allow_nonfinite=self.allow_nonfinite,
        )


@dataclasses.dataclass(frozen=True)
class Import(_ModelOptions):
    """Write pretrained weights of Hugging Face (safetensors) or PyTorch (DCP, .pt) as a checkpoint.

    TARGET contains the parameters, without optimizer states. `scripts/train.py --init-from` reads both TARGET and PATH.
    With Hugging Face weights, config.json determines the model's sizes and options. Exit status: 0; 2 for a wrong path
    or option, and for weights that do not fit the model or are not finite.
    """

    path: tyro.conf.Positional[Annotated[str, tyro.conf.arg(metavar="PATH", help="The weights.")]]
    target: tyro.conf.Positional[_Target]
    key: Name = None
    """Key of the dict in a PyTorch checkpoint that contains the model, such as model."""
    dtype: Dtype = None
    """Cast floating-point weights to float32, bfloat16 or float16. none: do not cast."""
    allow_nonfinite: bool = False
    """Allow NaN and infinite values."""

    def run(self) -> int:
        from jfsdp.checkpoint.convert import MEMORY_BYTES, choose_dtypes, write_source
        from jfsdp.checkpoint.foreign.pretrained import fit_job, is_checkpoint, pretrained_source

        path = as_path(self.path)
        if is_checkpoint(path):
            raise ValueError(f"{path}: is already a checkpoint of jfsdp; use `jfsdp checkpoint convert` to change it")
        job = fit_job(_find_job(self, {}), path, dict(self.model_config))
        source: Any = pretrained_source(path, job.pretrained, _leaves(job), config=job.config, key=self.key)
        if self.dtype is not None:
            source = Recast(source, choose_dtypes(source.arrays, [f"**={self.dtype}"]))
        with self.progress_of("importing", MEMORY_BYTES, total_bytes(source.arrays.values())) as progress:
            lines = write_source(
                self.target,
                Renamed(Watched(source, progress), {f"params.{name}": name for name in source.arrays}),
                {"imported": {"from": str(path), "model": job.name}},
                {LAYOUT: None, CONFIG: _config_of(self, job), EXTRA: [None]},
                allow_nonfinite=self.allow_nonfinite,
            )
        _print_result(self, {"from": str(path), "to": self.target, "arrays": len(source.arrays)}, lines)
        return 0


_Adapter = Annotated[str, tyro.conf.arg(metavar="ADAPTER", help="Directory of a PEFT adapter.")]
_Base = Annotated[str, tyro.conf.arg(metavar="BASE", help="Directory of Hugging Face safetensors.")]


@dataclasses.dataclass(frozen=True)
class Merge(Reporting):
    """Add a PEFT adapter to its base weights, piece by piece, and write the result to TARGET.

    Sums are computed in float32, and stored in the dtype of the weights. Other files of BASE are copied. Exit status:
    0; 2 for a wrong path, an adapter of another base, or non-finite values.
    """

    SIGN: ClassVar = 1
    base: tyro.conf.Positional[_Base]
    adapter: tyro.conf.Positional[_Adapter]
    target: tyro.conf.Positional[_Target]
    max_shard_gb: Real = option(5.0, least=1e-6)
    """Maximum GB of a file; several files are listed in an index."""

    def run(self) -> int:
        from jfsdp.checkpoint.foreign.merged import merge_peft

        most = int(self.max_shard_gb * 1e9)
        written = merge_peft(self.base, self.adapter, self.target, sign=self.SIGN, max_shard_bytes=most)
        _print_written(self, self.base, written)
        return 0


@dataclasses.dataclass(frozen=True)
class Unmerge(Merge):
    """Subtract a PEFT adapter from weights with which it was merged. Exact up to rounding in low precision. No DoRA.

    Exit status: as merge.
    """

    SIGN: ClassVar = -1


def _find_job(options: _ModelOptions, given: dict[str, Any]) -> Job:
    """Load the options' job, or else the job of the checkpoint's run."""
    start_jax()
    stored = given.get("config", {})
    model, factory, fields = options.model, options.factory, options.model_config
    if model is None and factory is None:
        model, factory = stored.get("model"), stored.get("factory")
        fields = (*read_fields(_ModelOptions, stored).get("model_config", ()), *fields)
        if model is None and factory is None:
            raise ValueError("the model of the weights is unknown; give --model NAME, or --factory")
    job = load_job(model, factory)
    if not job.pretrained:
        raise ValueError(
            f"job {job.name!r} has no mapping to the parameter names of other libraries; add one (docs/pretrained.md)"
        )
    from_config = as_name_map(job.pretrained).from_config
    if "pretrained" in given and from_config is not None:
        try:
            job = job.with_config(**from_config(given["pretrained"]))
        except ValueError as error:
            raise ValueError(f"--model {job.name}: the checkpoint is of another model: {error}") from error
    return job.with_config(**dict(fields))


def _with_length(config: dict[str, Any], max_length: int) -> dict[str, Any]:
    if "max_position_embeddings" not in config:
        raise ValueError(
            f"max_length={max_length}: config.json of a {config.get('model_type')} has no max_position_embeddings; its "
            "table of positions limits the length of a row; leave --max-length out"
        )
    if (config.get("rope_scaling") or {}).get("rope_type") == "dynamic":
        raise ValueError(
            f"max_length={max_length}: rope_type='dynamic' computes with max_position_embeddings="
            f"{config['max_position_embeddings']}, so another length changes the model; leave --max-length out"
        )
    return {**config, "max_position_embeddings": max_length}


def _leaves(job: Job) -> dict[str, Any]:
    """Return the logical shapes and dtypes of a job's parameters by name. Allocates nothing."""
    from jfsdp.modules.adapt import as_model

    return {path: jax.ShapeDtypeStruct(x.shape, x.dtype) for path, x in as_model(job.model).params.items()}


def _config_of(options: Import, job: Job) -> dict[str, Any]:
    """Return the stored configuration of the model, as a run stores it, so that an export needs no options."""
    from jfsdp.checkpoint.foreign.pretrained import config_json, stated_config

    named = {"config": {"model": options.model, "factory": options.factory, "model_config": options.model_config}}
    if as_name_map(job.pretrained).to_config is None:
        return named
    stored = stated_config(options.path)
    seq_len = stored.get("max_position_embeddings") or job.seq_len
    return named | {"pretrained": config_json(job.pretrained, job.config, seq_len, stored)}


_TOKENIZER = ("tokenizer*", "*token*_map.json", "added_tokens.json", "vocab.json", "merges.txt", "chat_template*")
_SPECIAL_FILES = ("tokenizer_config.json", "special_tokens_map.json")  # either states the special tokens


def _find_tokenizer(config: dict[str, Any]) -> Tokenizer | None:
    """Load the tokenizer of a run; None if it has none, or its file cannot be read."""
    name = config.get("tokenizer") or config.get("init_from")
    try:
        return None if name is None else load_tokenizer(name, eod_token=config.get("eod_token"))
    except (ValueError, MissingExtra):
        return None


def _copy_model_files(config: dict[str, Any], target: Path) -> list[str]:
    """Copy the tokenizer's files, the chat template and generation_config.json; return the names of the files.

    transformers reads the end token from tokenizer_config.json. If the tokenizer is only a tokenizer.json, this
    function writes one with the run's end-of-document token.

    Args:
      config: of the run. The tokenizer's files come from its directory, and generation_config.json from the directory
        of the initial weights.
    """

    def place(name: str) -> Any:
        return None if config.get(name) in (None, "byte") else as_path(config[name])

    base, tokenizer, template = map(place, ("init_from", "tokenizer", "chat_template"))
    found: dict[str, Any] = {}
    if source := base if config.get("tokenizer") is None else tokenizer:
        directory = source if source.is_dir() else source.parent
        found = {file.name: file for glob in _TOKENIZER for file in directory.glob(glob)}
    if tokenizer and tokenizer.is_file():
        found["tokenizer.json"] = tokenizer
    if tokenizer and not found:
        print(f"note: the run's tokenizer {tokenizer} was not found; copy its files to {target}", file=sys.stderr)
    if base:
        found["generation_config.json"] = base / "generation_config.json"
    if template:
        found["chat_template.jinja"] = template
    found = {name: file for name, file in found.items() if file.is_file()}
    for name, file in found.items():
        (target / name).write_bytes(file.read_bytes())
    names = set(found)
    if "tokenizer.json" in names and names.isdisjoint(_SPECIAL_FILES) and (loaded := _find_tokenizer(config)):
        end = loaded.decode([loaded.eod_id], special=True)
        stated = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": end}
        (target / "tokenizer_config.json").write_text(json.dumps(stated))
        names.add("tokenizer_config.json")
    return sorted(names)


def _print_written(command: Reporting, origin: Any, written: Written, copied: Sequence[str] = ()) -> None:
    found = {"from": str(origin), "to": str(written.directory), "files": list(written.files)}
    found |= {"copied": list(copied)} if copied else {}
    _print_result(command, found | {"arrays": written.num_arrays, "bytes": written.total_bytes}, written.nonfinite)
    config, kind = written.directory / HF_CONFIG, "peft.AutoPeftModelForCausalLM"
    if config.is_file():
        kind = f"transformers.{(json.loads(config.read_bytes()).get('architectures') or ['AutoModelForCausalLM'])[0]}"
    if not command.json and (config.is_file() or (written.directory / PEFT_CONFIG).is_file()):
        print(f"load it: {kind}.from_pretrained({str(written.directory)!r})")


def _print_result(command: Reporting, found: dict[str, Any], nonfinite: Sequence[str]) -> None:
    """Print the result, and on stderr the arrays with non-finite values."""
    for line in nonfinite:
        print(f"warning: {line}", file=sys.stderr)
    found |= {"not_finite": list(nonfinite)} if nonfinite else {}
    text = "; ".join(f"{name} {_plain(value)}" for name, value in found.items())
    command.report(found, lambda: print_wrapped(text))


def _plain(value: Any) -> str:
    return ", ".join(value) if isinstance(value, list) else f"{value:,}" if isinstance(value, int) else str(value)
