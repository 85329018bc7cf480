"""The options that `scripts/train.py` and `jfsdp explain` share, and what they mean to `fully_shard` and `train_step`.

One word, one meaning: both commands inherit `ShardingOptions`, and only this module turns its texts into arguments.
Importing it imports neither JAX nor the rest of jfsdp, since a training script has to set XLA's flags before.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jfsdp.trainer import parse
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.parse import Pairs, pairs, words

if TYPE_CHECKING:
    import optax

    from jfsdp.train.sharded import ShardedModel
    from jfsdp.trainer.job import Job


def text(metavar: str, write: Callable[[Any], str] = parse.write) -> Any:
    """Describe an option whose text its field's `read` makes a value: for `Annotated`."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: texts[0],
        is_instance=lambda value: True,
        str_from_instance=lambda value: [write(value)],
    )


def optional(kind: type, metavar: str) -> Any:
    """Describe an option that is a value or the word none: for `Annotated`."""
    return _value(kind, f"{metavar}|none")


def _value(kind: type, metavar: str) -> Any:
    may_be_none = metavar.endswith("|none")

    def read(texts: list[str]) -> Any:
        if may_be_none and texts[0].lower() == "none":
            return None
        if kind is str and not texts[0]:
            raise ValueError(f"'' is no {metavar.removesuffix('|none')}; give one, or none")
        try:
            return kind(texts[0])
        except ValueError:
            what = "a whole number" if kind is int else "a number"
            raise ValueError(f"{texts[0]!r} is not {what}{', or none' if may_be_none else ''}") from None

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=read,
        is_instance=lambda value: (value is None and may_be_none) or isinstance(value, kind | int),
        str_from_instance=lambda value: [f"{value:g}" if isinstance(value, float) else parse.write(value)],
    )


Count = Annotated[int, _value(int, "N")]
Real = Annotated[float, _value(float, "X")]
Number = Annotated[int | None, optional(int, "N")]
Decimal = Annotated[float | None, optional(float, "X")]
Name = Annotated[str | None, optional(str, "NAME")]
Location = Annotated[str | None, optional(str, "PATH")]
File = Annotated[str | None, optional(str, "FILE")]
Dtype = Annotated[str | None, optional(str, "DTYPE")]
Words = Annotated[tuple[str, ...], tyro.conf.UseAppendAction]
Mesh = Annotated[tuple[tuple[str, int], ...], text("AXIS=SIZE,...")]
read_config = pairs("KEY=VALUE, such as num_layers=2", parse.read_literal)
Fields = tuple[Annotated[tuple[str, Any], text("KEY=VALUE", lambda pair: parse.write((pair,)))], ...]


@dataclasses.dataclass(frozen=True)
class ShardingOptions(Options):
    """Which model, and how it is sharded and stepped: the arguments of `fully_shard` and `train_step`, as text."""

    model: Name = option(None, "most used", "refused")
    """A model by name, such as llama-8b; `jfsdp models` lists them."""
    factory: Annotated[str | None, optional(str, "MODULE:FUNCTION")] = option(None, "model", "refused")
    """Instead of --model: a function that returns a jfsdp.trainer.Job or a dict of its fields. It is imported from the
    working directory or from what is installed."""
    model_config: Fields = option((), "model", "refused", read=read_config)
    """Fields of the model's configuration: --model-config num_layers=2 stacked=false."""

    mesh: Mesh = option((("fsdp", -1),), "most used", "rounding", read=parse.read_mesh)
    """How many devices each axis has: pipe, replica, fsdp, tensor. -1 takes the rest.
    fsdp shards what --strategy says. replica replicates it: replica=-1,fsdp=8 shards over groups of 8 devices. tensor
    cuts the weights that the model says, and what it computes with them. pipe cuts the layers into stages."""
    strategy: Annotated[str | int, text("NAME|0..3")] = option(
        "full_shard", "most used", "rounding", read=parse.read_strategy
    )
    """What is sharded: ddp, zero1, zero2 or full_shard.
    Also a name of PyTorch FSDP (FULL_SHARD, HYBRID_SHARD, hsdp, ...), or a DeepSpeed stage, 0 to 3."""
    opt_over: Annotated[tuple[str, ...] | None, optional(str, "AXIS,...")] = option(
        None, "sharding and memory", "rounding", read=words()
    )
    """The axes that split optimizer states, and gradients where the strategy splits them. replica,fsdp: over all
    devices, also where parameters are sharded in groups. none: fsdp."""
    reshard_after_forward: Annotated[bool | int | str | None, text("true|false|node|N|none")] = option(
        None, "sharding and memory", "rounding", read=parse.read_reshard
    )
    """What becomes of a unit's gathered parameters after its forward. true: freed. false: kept until its backward.
    N: kept split N ways over neighbouring devices, so that the second gather is cheap. node: over those of a host.
    none: true, but for the root unit."""
    remat: Annotated[str | Pairs, text("none|full|dots|names:A,B+offload:C")] = option(
        "full", "sharding and memory", "rounding", read=parse.read_remat
    )
    """What a unit's backward recomputes. none: nothing. full: everything. dots: all but matrix products and cuDNN's
    attention. names:A,B: all but the values that the model named so (jax.ad_checkpoint.checkpoint_name).
    offload:C: all but these, which wait in host memory. Both are joined by +. The library's own default is none."""
    offload: Annotated[Words, tyro.conf.arg(metavar="WHAT,...")] = option(
        (),
        "sharding and memory",
        "rounding",
        read=words("params", "grads", "opt_state", remedy=" (activations: --remat offload:NAME)"),
    )
    """What waits in the host's pinned memory while unused: params, grads, opt_state; several with commas."""
    program: Annotated[str | None, optional(str, "xla|manual")] = option(None, "sharding and memory", "rounding")
    """xla: XLA inserts the collectives. manual: jfsdp does, and --prefetch orders them. none: manual for a loss that
    is a sum with its weight, as those of the models here, and xla for a mean."""
    prefetch: Number = option(None, "sharding and memory", "rounding")
    """For manual: gather the weights of N units ahead of the compute, forward and backward. none: 1."""
    storage: Annotated[str, tyro.conf.arg(metavar="per_parameter|flat")] = option(
        "per_parameter", "sharding and memory", "rounding"
    )
    """per_parameter: each parameter moves by itself. flat (for manual): the parameters of a unit move as one array."""
    min_size: Number = option(None, "sharding and memory", "rounding")
    """Parameters with fewer elements per layer are replicated, and never offloaded. none: 1024; flat storage: 0."""

    param_dtype: Dtype = option("bfloat16", "precision", "refused")
    """Dtype of the parameters in compute and all-gather: bfloat16, float32, float16, or none (as they are stored).
    float16 (on GPUs only, for the models here) scales the loss dynamically."""
    reduce_dtype: Dtype = option(None, "precision", "refused")
    """Dtype of the gradients in their reduction; another than --param-dtype needs manual. none: --param-dtype."""
    frozen: Annotated[Words, tyro.conf.arg(metavar="GLOB,...")] = option(
        (), "frozen weights and adapters", "refused", read=words()
    )
    """Parameters that are not trained, by path or glob, such as embed or 'layers.attn.*'; several with commas.
    They have no gradient and no optimizer state."""
    frozen_dtype: Dtype = option(None, "frozen weights and adapters", "refused")
    """Dtype at rest of parameters that are not trained, such as bfloat16. none: as the model makes them."""
    quantized: Annotated[Fields, tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GLOB=CODEC")] = option(
        (), "frozen weights and adapters", "refused", read=pairs("GLOB=CODEC, such as '**.mlp.*.kernel=nf4'")
    )
    """Keep and gather frozen matrices in 8 or 4 bits: --quantized **.mlp.*.kernel=nf4. nf4, int4 or int8; may be
    repeated."""
    lora: Annotated[tuple[Annotated[Pairs, text("KEY=VALUE,...")], ...], tyro.conf.UseAppendAction] = option(
        (), "frozen weights and adapters", "refused", read=parse.read_lora
    )
    """Train low-rank adapters and freeze the rest: --lora rank=16,alpha=32,targets=**.q_proj.kernel,**.v_proj.kernel.
    Also dropout=0.05, rslora=true, dora=true, also=GLOB,... (parameters trained as they are). Several: for different
    targets."""

    accumulate: Count = option(1, "gradient accumulation", "said", least=1)
    """Microbatches per step; must divide --batch-per-device."""
    sync: Annotated[str | None, optional(str, "every|last")] = option(None, "gradient accumulation", "rounding")
    """every: reduce gradients after each microbatch. last: after the last; whole gradients are kept until then.
    last needs manual. none: the strategy's."""
    reshard_after_backward: bool = option(True, "gradient accumulation", "rounding")
    """on: free gathered parameters after each microbatch. off: gather them once per step, and keep them."""
    pipe_schedule: Annotated[str, tyro.conf.arg(metavar="1f1b|gpipe")] = option(
        "1f1b", "gradient accumulation", "rounding"
    )
    """Of a pipeline (--mesh pipe=P): the order in which its stages compute the microbatches of --accumulate.
    1f1b: at most 2P-1 of them wait for their backward. gpipe: all do."""
    pipe_repeats: Count = option(1, "gradient accumulation", "rounding", least=1)
    """Of a pipeline: into how many parts the layers of a stage fall. N parts make the bubble N times smaller."""
    opt_state_dtype: Annotated[str | None, optional(str, "bfloat16")] = option(None, "precision", "refused")
    """bfloat16: moments of the optimizer in half the bytes, rounded stochastically. none: as they come."""
    ema: Annotated[float | None, optional(float, "DECAY")] = option(None, "optimizer", "refused")
    """Keep moving averages of the parameters; evaluation and sample then use them. 0.999: over about 1000 steps."""

    rate_scale: Annotated[Fields, tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GLOB=X")] = option(
        (), "optimizer", "refused", read=pairs("GLOB=X with a number X from 0 on, such as embed=0.1", parse.read_factor)
    )
    """Multiply the learning rate of some parameters: --rate-scale embed=0.1. May be repeated; the last that fits
    holds."""


@dataclasses.dataclass(frozen=True)
class StepOptions(ShardingOptions):
    """All that decides the program of a training step."""

    batch_per_device: Count = option(1, "most used", "refused", least=1)
    """Rows per step for each of the replica x fsdp data shards."""
    seq_len: Number = option(None, "most used", "refused", least=1)
    """Tokens per sequence. none: the model's."""
    cross_documents: bool = option(False, "data", "refused")
    """Let attention and positions cross documents in a row."""
    preference: Annotated[str | None, optional(str, "dpo|dpo_norm|ipo|ipo_norm")] = option(
        None, "preferences", "refused"
    )
    """Train on choices between two answers, by direct preference optimization or a kin of it. _norm: per token of an
    answer, so that its length does not count. Rows are pairs then. none: on tokens."""
    beta: Real = option(0.1, "preferences", "refused")
    """With --preference: larger stays closer to the reference."""
    max_grad_norm: Decimal = option(1.0, "optimizer", "said, kept")
    """Clip gradients to this global norm. none: do not clip."""
    skip_nonfinite: bool = option(False, "optimizer", "said, kept")
    """Skip steps whose loss or gradient is not finite, and count them."""
    xla: Annotated[Fields, tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = option(
        (),
        "XLA and debugging",
        "rounding",
        read=pairs("NAME=VALUE, such as xla_gpu_enable_latency_hiding_scheduler=true", parse.read_xla_value),
    )
    """An option of XLA's compiler, over those that jfsdp sets; NAME=none removes one. May be repeated.
    `jfsdp plan` prints what is used."""


def shard_job(options: ShardingOptions, job: Job, mesh: Any) -> ShardedModel:
    """Shard a job's model on a mesh as the options say.

    Raises:
      ValueError: for values and combinations that cannot be.
    """
    from jfsdp.layout.placements import placements
    from jfsdp.train.fully_shard import fully_shard

    places: dict[str, Any] = {"units": job.units, "axis_rules": job.axis_rules, "placements": job.placements}
    if options.min_size is not None:
        places["placements"] = {**(job.placements or {}), **placements(min_size=options.min_size)}
    return fully_shard(wrap_model(options, job), mesh=mesh, **places, **sharding_arguments(options))


def wrap_model(options: ShardingOptions, job: Job) -> Any:
    """Return the job's model, wrapped by `jfsdp.lora` and `jfsdp.quantize` where the options say so.

    Raises:
      ValueError: naming the option that cannot be read, and what it takes.
    """
    from jfsdp.layout.lora import LoRA
    from jfsdp.layout.wrapped import lora, quantize

    loras, adapter = [LoRA(**dict(fields)) for fields in options.lora], getattr(options, "init_adapter", None)
    if adapter is not None and not loras:
        from jfsdp.checkpoint.foreign.peft import read_loras
        from jfsdp.layout.mesh import make_abstract_mesh
        from jfsdp.train.fully_shard import fully_shard

        alone = fully_shard(job.model, mesh=make_abstract_mesh({"fsdp": 1}), units=job.units)
        loras = read_loras(adapter, job.pretrained, alone)
    model = lora(job.model, loras) if loras else job.model
    return quantize(model, dict(options.quantized)) if options.quantized else model


def sharding_arguments(options: ShardingOptions) -> dict[str, Any]:
    """Return the options as arguments of `fully_shard`, but for model, mesh and units."""
    from jfsdp.layout.policy import OffloadPolicy, SaveNames
    from jfsdp.layout.precision import MixedPrecisionPolicy

    dtypes = ("param_dtype", "reduce_dtype", "frozen_dtype")
    policy: dict[str, Any] = {name: getattr(options, name) for name in dtypes}
    plain = ("strategy", "opt_over", "reshard_after_forward", "storage")
    return {name: getattr(options, name) for name in plain} | {
        "mp_policy": MixedPrecisionPolicy(**policy),
        "offload_policy": OffloadPolicy(**dict.fromkeys(options.offload, True)),
        "remat": options.remat if isinstance(options.remat, str) else SaveNames(**dict(options.remat)),
        "frozen": options.frozen or None,
    }


def step_arguments(options: ShardingOptions) -> dict[str, Any]:
    """Return the options as arguments of `train_step`."""
    names = ("accumulate", "program", "prefetch", "sync", "reshard_after_backward", "pipe_schedule", "pipe_repeats")
    return {name: getattr(options, name) for name in names}


def train_arguments(options: StepOptions) -> dict[str, Any]:
    """Return the options as keyword arguments of `train_step`.

    Raises:
      ValueError: for a batch that cannot be cut.
    """
    arguments = step_arguments(options)
    if options.preference is not None and options.cross_documents:
        raise ValueError("--cross-documents joins texts, and --preference trains on pairs of answers; leave one out")
    rows, parts = options.batch_per_device, options.accumulate
    if rows % parts:
        raise ValueError(
            f"--batch-per-device {rows} cannot be cut into --accumulate {parts} microbatches; make it a multiple of "
            f"{parts}"
        )
    return arguments | {
        "max_grad_norm": options.max_grad_norm,
        "skip_nonfinite": options.skip_nonfinite,
        "compiler_options": dict(options.xla),
    }


def make_optimizer(options: ShardingOptions, job: Job, learning_rate: Any) -> optax.GradientTransformation:
    """Return the job's optimizer with moments and averages as the options say; averages stay in float32.

    Raises:
      ValueError: for another dtype than bfloat16, or a decay out of range.
    """
    import optax

    from jfsdp.train.update.ema import track_ema
    from jfsdp.train.update.low_precision import low_precision_state
    from jfsdp.train.update.rates import scale_rates

    tx, dtype, decay = job.optimizer(learning_rate), options.opt_state_dtype, options.ema
    if dtype not in (None, "bfloat16"):
        raise ValueError(f"--opt-state-dtype {dtype!r} is not available; use bfloat16, or leave it out")
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"--ema {decay} must be at least 0 and below 1; 0.999 averages over about 1000 steps")
    tx = tx if dtype is None else low_precision_state(tx, dtype)
    if options.rate_scale:
        tx = optax.chain(tx, scale_rates(dict(options.rate_scale)))
    return tx if decay is None else optax.chain(tx, track_ema(decay))


def describe_error(error: Exception, kind: Any) -> str:
    """Say an error in one line, in the words of the command that `kind` is the options of."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {str(error.filename)!r}"
    message = as_options(str(error), kind)
    if "not supported by dot_general on CPU" in message:
        return (
            f"--param-dtype float16: this model computes what CPUs cannot ({message}); use bfloat16 or float32, or GPUs"
        )
    return message


def as_options(message: str, kind: Any = ShardingOptions) -> str:
    """Say a message of the library in the words of a command line: `--sync last` for `sync="last"`.

    Args:
      kind: the dataclass of the command's options, or one of it.
    """
    names = "|".join(["check_loss", *(field.name for field in dataclasses.fields(kind))])

    def say(found: re.Match[str]) -> str:
        option, value = spell(found[1]), (found[2] or "").strip("\"'")
        if value in ("True", "False"):
            return option if value == "True" else option.replace("--", "--no-", 1)
        return f"{option} {value}".strip()

    message = re.sub(rf"(^|: )({names})(?= ['\"\d])", lambda found: found[1] + spell(found[2]), message)
    message = message.replace("jfsdp.lora", "--lora").replace("jfsdp.quantize", "--quantized")
    message = re.sub(r"compiler_options\['(\w+)'\]", r"--xla \1", message).replace("or None", "or none")
    value = r"\"[^\"\s]+\"|'[^'\s]+'|-?[\w.]*\w(?:[+-]\d+)?"
    return re.sub(rf"(?<![\w.-])({names})=(?:({value})|(?=[\s,.;:)]|$))", say, message)
