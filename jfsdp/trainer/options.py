"""Options of models, sharding and steps, and their conversion to arguments of `fully_shard` and `train_step`.

`scripts/train.py` and `jfsdp explain` inherit `ShardingOptions`. Only this module converts options to arguments.
Importing it does not import JAX, because a training script must set XLA's flags first.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from jfsdp.arguments import did_you_mean
from jfsdp.trainer import parse
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.option_errors import spell
from jfsdp.trainer.parse import Pairs, pairs, words

if TYPE_CHECKING:
    import optax

    from jfsdp.train.sharded import ShardedModel
    from jfsdp.trainer.job import Job


def text(metavar: str, write: Callable[[Any], str] = parse.write) -> Any:
    """Return the annotation of an option whose text is converted by its field's `read`."""
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar=metavar,
        instance_from_str=lambda texts: texts[0],
        is_instance=lambda value: True,
        str_from_instance=lambda value: [write(value)],
    )


def optional(kind: type, metavar: str) -> Any:
    """Return the annotation of an option that takes a value or the word none."""
    return _value(kind, f"{metavar}|none")


def _value(kind: type, metavar: str) -> Any:
    may_be_none = metavar.endswith("|none")

    def read(texts: list[str]) -> Any:
        if may_be_none and texts[0].lower() == "none":
            return None
        if kind is str and not texts[0]:
            raise ValueError(f"must not be empty; give {metavar.removesuffix('|none')}, or none")
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
    """Model, sharding and step: the arguments of `fully_shard` and `train_step` as options."""

    model: Name = option(None, "most used", "refused")
    """Name of a model, such as llama-8b; `jfsdp models` lists them."""
    factory: Annotated[str | None, optional(str, "MODULE:FUNCTION")] = option(None, "model", "refused")
    """Instead of --model: a function that returns a jfsdp.trainer.Job or a dict of its fields. It is imported from the
    working directory or an installed package."""
    model_config: Fields = option((), "model", "refused", read=read_config)
    """Fields of the model's configuration: --model-config num_layers=2 stacked=false."""

    mesh: Mesh = option((("fsdp", -1),), "most used", "rounding", read=parse.read_mesh)
    """Number of devices of each mesh axis: pipe, replica, fsdp, expert, context, tensor. -1 takes the rest.
    fsdp shards the state according to --strategy. replica replicates it: replica=-1,fsdp=8 shards over groups of 8
    devices. expert shards the state like fsdp, and splits the experts of a mixture. context splits the tokens of rows,
    and shards the state like fsdp. tensor splits the weights for which the model has rules, and their computation. pipe
    splits the layers into stages."""
    strategy: Annotated[str | int, text("NAME|0..3")] = option(
        "full_shard", "most used", "rounding", read=parse.read_strategy
    )
    """Sharding strategy: ddp, zero1, zero2 or full_shard.
    Names of PyTorch FSDP (FULL_SHARD, HYBRID_SHARD, hsdp, ...) and DeepSpeed stages (0 to 3) work too."""
    opt_over: Annotated[tuple[str, ...] | None, optional(str, "AXIS,...")] = option(
        None, "sharding and memory", "rounding", read=words()
    )
    """Mesh axes that split optimizer states, and gradients if the strategy splits them. replica,fsdp: all devices, even
    if parameters are sharded in groups. none: fsdp."""
    reshard_after_forward: Annotated[bool | int | str | None, text("true|false|node|N|none")] = option(
        None, "sharding and memory", "rounding", read=parse.read_reshard
    )
    """Whether a unit's gathered parameters are freed after its forward. true: freed. false: kept until its backward.
    N: kept, split over N neighbouring devices, so that the second gather is cheap. node: split over the devices of a
    host. none: true, except for the root unit."""
    remat: Annotated[str | Pairs, text("none|full|dots|names:A,B+offload:C")] = option(
        "full", "sharding and memory", "rounding", read=parse.read_remat
    )
    """Values that a unit's backward recomputes. none: nothing. full: everything. dots: all except matrix products and
    cuDNN's attention. names:A,B: all except values with these names (jax.ad_checkpoint.checkpoint_name).
    offload:C: all except these, which are kept in host memory. Join both with +. The name input is a unit's inputs, and
    attention the result and statistics of cuDNN's attention. In Python the default is none."""
    offload: Annotated[Words, tyro.conf.arg(metavar="WHAT,...")] = option(
        (),
        "sharding and memory",
        "rounding",
        read=words("params", "grads", "opt_state", remedy=" (activations: --remat offload:NAME)"),
    )
    """State to keep in pinned host memory while unused: params, grads, opt_state; several with commas."""
    program: Annotated[str | None, optional(str, "xla|manual")] = option(None, "sharding and memory", "rounding")
    """xla: XLA inserts the collectives. manual: jfsdp inserts them, in the order of --prefetch. none: manual for a loss
    that is a sum with its weight, as in the included models; xla for a mean."""
    prefetch: Number = option(None, "sharding and memory", "rounding")
    """With manual: gather weights N units ahead of the compute, in forward and backward. none: 1."""
    storage: Annotated[str, tyro.conf.arg(metavar="per_parameter|flat")] = option(
        "per_parameter", "sharding and memory", "rounding"
    )
    """per_parameter: one collective per parameter. flat (with manual): one collective per unit, on a flat buffer."""
    min_size: Number = option(None, "sharding and memory", "rounding")
    """Parameters with fewer elements per layer are replicated and not offloaded. none: 1024; flat storage: 0."""

    param_dtype: Dtype = option("bfloat16", "precision", "refused")
    """Dtype of the parameters in compute and all-gather: bfloat16, float32, float16, or none (the stored dtype).
    float16 uses dynamic loss scaling; the included models support it on GPUs only."""
    reduce_dtype: Dtype = option(None, "precision", "refused")
    """Dtype of the gradient reduction; a dtype other than --param-dtype needs manual. none: --param-dtype."""
    gather_wire: Annotated[str | None, optional(str, "DTYPE[:BLOCK][@BETWEEN]|none")] = option(
        None, "precision", "refused"
    )
    """Gather matrices below the root unit in 8 bits: float8 (one scale per matrix) or int8 (one per BLOCK elements,
    256); @node or @N: only between hosts, or groups of N devices. none: --param-dtype."""
    reduce_wire: Annotated[str | None, optional(str, "DTYPE[:BLOCK][@BETWEEN]|none")] = option(
        None, "precision", "refused"
    )
    """Exchange the gradients of these matrices in 8 bits and sum them in float32, such as int8 or int8@node; needs
    manual. none: --reduce-dtype."""
    matmul: Annotated[str | None, optional(str, "float8|none")] = option(None, "precision", "refused")
    """float8: products of the layers' projections in float8, forward and backward, for models that support it; not
    embedding, head and norms. NVIDIA GPUs from Ada and Hopper on. none: in --param-dtype."""
    frozen: Annotated[Words, tyro.conf.arg(metavar="GLOB,...")] = option(
        (), "frozen weights and adapters", "refused", read=words()
    )
    """Parameters to freeze, by path or glob, such as embed or 'layers.attn.*'; several with commas.
    They have no gradient and no optimizer state."""
    frozen_dtype: Dtype = option(None, "frozen weights and adapters", "refused")
    """Dtype in which frozen parameters are stored, such as bfloat16. none: the model's."""
    quantized: Annotated[Fields, tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GLOB=CODEC")] = option(
        (), "frozen weights and adapters", "refused", read=pairs("GLOB=CODEC, such as '**.mlp.*.kernel=nf4'")
    )
    """Store and gather frozen matrices in 8 or 4 bits: --quantized **.mlp.*.kernel=nf4. nf4, int4 or int8; may be
    repeated."""
    lora: Annotated[tuple[Annotated[Pairs, text("KEY=VALUE,...")], ...], tyro.conf.UseAppendAction] = option(
        (), "frozen weights and adapters", "refused", read=parse.read_lora
    )
    """Train low-rank adapters and freeze the rest: --lora rank=16,alpha=32,targets=**.q_proj.kernel,**.v_proj.kernel.
    Also dropout=0.05, rslora=true, dora=true, also=GLOB,... (parameters to train without adapters), stacks=GLOB,...
    (targets that are stacks of matrices, such as experts). May be repeated,
    for different targets."""

    accumulate: Count = option(1, "gradient accumulation", "noted", least=1)
    """Microbatches per step; must divide --batch-per-device."""
    sync: Annotated[str | None, optional(str, "every|last")] = option(None, "gradient accumulation", "rounding")
    """every: reduce gradients after each microbatch. last: reduce after the last one, and keep full gradients until
    then; needs manual. none: the strategy's."""
    reshard_after_backward: bool = option(True, "gradient accumulation", "rounding")
    """on: free gathered parameters after each microbatch. off: gather them once per step and keep them."""
    pipe_schedule: Annotated[str, tyro.conf.arg(metavar="1f1b|gpipe")] = option(
        "1f1b", "gradient accumulation", "rounding"
    )
    """Order in which pipeline stages (--mesh pipe=P) compute the microbatches of --accumulate.
    1f1b: at most 2P-1 of them wait for their backward. gpipe: all wait."""
    pipe_repeats: Count = option(1, "gradient accumulation", "rounding", least=1)
    """Parts per pipeline stage (interleaved stages). N parts make the bubble N times smaller."""
    opt_state_dtype: Annotated[str | None, optional(str, "bfloat16")] = option(None, "precision", "refused")
    """bfloat16: store the optimizer's moments in half the bytes, with stochastic rounding. none: the optimizer's
    dtype."""
    optimizer: Annotated[str | None, optional(str, "adamw|muon|lion|adafactor|sgd")] = option(
        None, "optimizer", "refused"
    )
    """adamw, lion, sgd, adafactor (without parameter scaling), or muon for matrices of layers, with AdamW for the rest.
    none: the job's; of the language models here, adamw."""
    weight_decay: Decimal = option(None, "optimizer", "refused", least=0)
    """Decay per step, as a fraction of the learning rate. none: adamw and muon 0.1, lion 0.001, others 0."""
    beta1: Decimal = option(None, "optimizer", "refused", least=0)
    """Beta 1 of adamw, lion, and muon's AdamW. none: 0.9."""
    beta2: Decimal = option(None, "optimizer", "refused", least=0)
    """Beta 2 of adamw, lion, and muon's AdamW. none: 0.95; lion 0.99."""
    eps: Decimal = option(None, "optimizer", "refused", least=0)
    """Epsilon of adamw and muon. none: 1e-8."""
    momentum: Decimal = option(None, "optimizer", "refused", least=0)
    """Momentum of sgd, adafactor, and muon's matrices. none: muon 0.95, others 0."""
    ema: Annotated[float | None, optional(float, "DECAY")] = option(None, "optimizer", "refused")
    """Keep moving averages of the parameters, for evaluation and samples. 0.999: over about 1000 steps."""

    rate_scale: Annotated[Fields, tyro.conf.UseAppendAction, tyro.conf.arg(metavar="GLOB=X")] = option(
        (), "optimizer", "refused", read=pairs("GLOB=X with a number X from 0 on, such as embed=0.1", parse.read_factor)
    )
    """Multiply the learning rate of some parameters: --rate-scale embed=0.1. May be repeated; the last match
    applies."""


@dataclasses.dataclass(frozen=True)
class StepOptions(ShardingOptions):
    """All options that decide the program of a training step."""

    batch_per_device: Count = option(1, "most used", "refused", least=1)
    """Rows per step for each of the replica x fsdp x expert data shards."""
    seq_len: Number = option(None, "most used", "refused", least=1)
    """Tokens per sequence. none: the model's."""
    cross_documents: bool = option(False, "data", "refused")
    """Let attention and positions cross the documents of a row."""
    preference: Annotated[str | None, optional(str, "dpo|dpo_norm|ipo|ipo_norm")] = option(
        None, "preferences", "refused"
    )
    """Train on pairs of a chosen and a rejected answer, by direct preference optimization or a variant. _norm: per
    token of an answer, so that its length does not count. A row is then a pair. none: train on tokens."""
    beta: Real = option(0.1, "preferences", "refused")
    """With --preference: a larger value stays closer to the reference."""
    max_grad_norm: Decimal = option(1.0, "optimizer", "noted, kept")
    """Clip gradients to this global norm. none: do not clip."""
    skip_nonfinite: bool = option(False, "optimizer", "noted, kept")
    """Skip steps whose loss or gradient is not finite, and count them."""
    xla: Annotated[Fields, tyro.conf.UseAppendAction, tyro.conf.arg(metavar="NAME=VALUE")] = option(
        (),
        "XLA and debugging",
        "rounding",
        read=pairs("NAME=VALUE, such as xla_gpu_enable_latency_hiding_scheduler=true", parse.read_xla_value),
    )
    """An option of XLA's compiler; replaces the value that jfsdp sets, and NAME=none removes it. May be repeated.
    `jfsdp plan` prints all that are used."""


def step_options(options: StepOptions) -> dict[str, Any]:
    """Return the options that decide the step, without those that a command adds."""
    return {field.name: getattr(options, field.name) for field in dataclasses.fields(StepOptions)}


def place_model(options: ShardingOptions, job: Job, mesh: Any) -> Any:
    """Return a job's model with the functions of jfsdp that it needs on a mesh, and the products of `--matmul`."""
    from jfsdp.context.attention import attention, over_context
    from jfsdp.context.rows import positions, whole_rows
    from jfsdp.layout.mesh import num_contexts
    from jfsdp.moe import experts

    model = with_matmul(options, job, mesh)
    model = model if job.with_experts is None else job.with_experts(model, experts)
    if job.in_context is None or num_contexts(mesh) == 1:
        return model
    functions = {"over_context": over_context, "positions": positions, "whole_rows": whole_rows}
    return job.in_context(model, attention=attention, **functions)


def shard_job(options: ShardingOptions, job: Job, mesh: Any) -> ShardedModel:
    """Shard a job's model on a mesh according to the options.

    Raises:
      ValueError: for invalid values and combinations.
    """
    from jfsdp.layout.placements import placements
    from jfsdp.train.fully_shard import fully_shard

    job = dataclasses.replace(job, model=place_model(options, job, mesh))
    places: dict[str, Any] = {"units": job.units, "axis_rules": job.axis_rules, "placements": job.placements}
    if options.min_size is not None:
        places["placements"] = {**(job.placements or {}), **placements(min_size=options.min_size)}
    return fully_shard(wrap_model(options, job), mesh=mesh, **places, **sharding_arguments(options))


def with_matmul(options: ShardingOptions, job: Job, mesh: Any) -> Any:
    """Return the job's model with the matrix products that `--matmul` names.

    Raises:
      ValueError: for an unknown name, adapters, a job without float8, and GPUs without it.
    """
    from jfsdp.float8 import check_devices, float8_dot_general

    if options.matmul is None:
        return job.model
    if options.matmul != "float8":
        raise ValueError(f"--matmul {options.matmul!r} is not float8 or none{did_you_mean(options.matmul, ['float8'])}")
    if options.lora or getattr(options, "init_adapter", None):
        raise ValueError(
            "--matmul float8: a float8 product with an adapter would compute the gradient of the frozen matrix too; "
            "remove --matmul, or train whole matrices without --lora and --init-adapter"
        )
    if job.with_dot_general is None:
        raise ValueError(
            f"--matmul float8: job {job.name!r} has no with_dot_general; give its layers "
            "dot_general=jfsdp.float8_dot_general, and leave the option out"
        )
    check_devices(mesh)
    return job.with_dot_general(job.model, float8_dot_general)


def wrap_model(options: ShardingOptions, job: Job) -> Any:
    """Return the job's model, wrapped by `jfsdp.lora` and `jfsdp.quantize` if the options request it.

    Raises:
      ValueError: naming the invalid option and its valid values.
    """
    from jfsdp.layout.lora import LoRA
    from jfsdp.layout.wrapped import lora, quantize

    loras, adapter = [LoRA(**dict(fields)) for fields in options.lora], getattr(options, "init_adapter", None)
    if adapter is not None and not loras:
        from jfsdp.checkpoint.foreign.peft import read_loras
        from jfsdp.layout.mesh import make_abstract_mesh
        from jfsdp.train.fully_shard import fully_shard

        base = fully_shard(job.model, mesh=make_abstract_mesh({"fsdp": 1}), units=job.units)
        loras = read_loras(adapter, job.pretrained, base)
    model = lora(job.model, loras) if loras else job.model
    return quantize(model, dict(options.quantized)) if options.quantized else model


def sharding_arguments(options: ShardingOptions) -> dict[str, Any]:
    """Return the options as arguments of `fully_shard`, except model, mesh and units."""
    from jfsdp.layout.policy import OffloadPolicy, SaveNames
    from jfsdp.layout.precision import MixedPrecisionPolicy

    dtypes = ("param_dtype", "reduce_dtype", "frozen_dtype", "gather_wire", "reduce_wire")
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
      ValueError: for a batch that cannot be split into microbatches.
    """
    arguments = step_arguments(options)
    if options.preference is not None and options.cross_documents:
        raise ValueError("--cross-documents joins texts, but --preference trains on pairs of answers; leave one out")
    rows, parts = options.batch_per_device, options.accumulate
    if rows % parts:
        raise ValueError(
            f"--batch-per-device {rows} cannot be split into --accumulate {parts} microbatches; use a multiple of "
            f"{parts}"
        )
    return arguments | {
        "max_grad_norm": options.max_grad_norm,
        "skip_nonfinite": options.skip_nonfinite,
        "compiler_options": dict(options.xla),
    }


def make_optimizer(options: ShardingOptions, job: Job, model: ShardedModel, rate: Any) -> optax.GradientTransformation:
    """Return the optimizer of the options, or the job's, with their moments and averages. Averages are float32.

    Args:
      model: the job's model, sharded in any way.
      rate: learning rate or schedule.

    Raises:
      ValueError: as `named_optimizer`; for a dtype other than bfloat16, or a decay out of range.
    """
    import optax

    from jfsdp.train.update.ema import track_ema
    from jfsdp.train.update.low_precision import low_precision_state
    from jfsdp.train.update.rates import scale_rates
    from jfsdp.trainer.optimizers import named_optimizer

    tx, dtype, decay = named_optimizer(options, job, model, rate), options.opt_state_dtype, options.ema
    if dtype not in (None, "bfloat16"):
        raise ValueError(f"--opt-state-dtype {dtype!r} is not available; use bfloat16, or leave it out")
    if decay is not None and not 0 <= decay < 1:
        raise ValueError(f"--ema {decay} must be at least 0 and below 1; 0.999 averages over about 1000 steps")
    tx = tx if dtype is None else low_precision_state(tx, dtype)
    if options.rate_scale:
        tx = optax.chain(tx, scale_rates(dict(options.rate_scale)))
    return tx if decay is None else optax.chain(tx, track_ema(decay))


def describe_error(error: Exception, kind: Any) -> str:
    """Return an error as one line that names the options of `kind` instead of Python arguments."""
    if isinstance(error, OSError) and error.filename:
        return f"{error.strerror}: {str(error.filename)!r}"
    message = as_options(str(error), kind)
    if "not supported by dot_general on CPU" in message:
        return f"--param-dtype float16: CPUs cannot compute this model ({message}); use bfloat16 or float32, or GPUs"
    return message


def as_options(message: str, kind: Any = ShardingOptions) -> str:
    """Return a message of the library with arguments written as options: `--sync last` for `sync="last"`.

    Args:
      kind: the dataclass of the command's options, or an instance.
    """
    names = "|".join(["check_loss", *(field.name for field in dataclasses.fields(kind))])

    def to_option(found: re.Match[str]) -> str:
        option, value = spell(found[1]), (found[2] or "").strip("\"'")
        if value in ("True", "False"):
            return option if value == "True" else option.replace("--", "--no-", 1)
        return f"{option} {value}".strip()

    message = re.sub(rf"(^|: )({names})(?= ['\"\d])", lambda found: found[1] + spell(found[2]), message)
    message = message.replace("jfsdp.lora", "--lora").replace("jfsdp.quantize", "--quantized")
    message = re.sub(r"compiler_options\['(\w+)'\]", r"--xla \1", message).replace("or None", "or none")
    value = r"\"[^\"\s]+\"|'[^'\s]+'|-?[\w.]*\w(?:[+-]\d+)?"
    return re.sub(rf"(?<![\w.-])({names})=(?:({value})|(?=[\s,.;:)]|$))", to_option, message)
