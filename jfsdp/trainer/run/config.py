"""The configuration of a training run, with one field per option. Importing it is cheap."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Location, Name, Number, Real, StepOptions, optional
from jfsdp.trainer.parse import read_profile


@dataclasses.dataclass(frozen=True)
class TrainConfig(StepOptions):
    """Options of the training script: model, data, devices, schedule, checkpoints, logging."""

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("none", "most used", "free")
    """Named defaults, or a file of defaults (*.toml, *.json). Other options override them.
    `jfsdp plan --write-recipe` writes such a file."""

    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = option("stdlib", "most used", "refused")
    """Training data: a directory, a glob, *.jsonl, *.parquet, token files *.bin, or stdlib (Python's own sources), also
    at s3:// or gs://; or several with weights, a.jsonl:0.7,b.jsonl:0.3. Records may be texts, conversations, prompts
    with completions, or choices; `jfsdp data show FILE` shows how they are read."""
    tokenizer: Annotated[str | None, optional(str, "byte|PATH")] = option(None, "most used", "refused")
    """byte, or the path of a tokenizer.json or of its directory. none: the tokenizer of --init-from, or byte without
    it; on resume, the run's tokenizer."""
    text_field: Name = option(None, "data", "refused")
    """Field of a JSONL object, or column of a table, that contains the text. none: detected."""
    chat_template: Location = option(None, "data", "refused")
    """File with the jinja template of conversations, or the name of one of the tokenizer's templates. none: the
    tokenizer's template."""
    answers: Annotated[str, tyro.conf.arg(metavar="all|last")] = option("all", "data", "refused")
    """Which of the assistant's messages in a conversation to train on."""
    eod_token: Name = option(None, "data", "refused")
    """Token of a tokenizer.json that ends a document. none: a well-known one, or eos_token of its configuration."""
    eval_fraction: Real = option(0.05, "data", "refused")
    """Fraction of the documents to hold out for evaluation."""
    eval_data: Location = option(None, "data", "free")
    """Separate data for evaluation, as --data. none: --eval-fraction of the training data."""

    global_batch: Number = option(None, "gradient accumulation", "refused", least=1)
    """Rows per step of all devices together, for any number of devices. A device then computes
    --batch-per-device / --accumulate rows at once, and the number of microbatches follows. none: those two decide."""
    steps: Count = option(1000, "most used", "free", least=1)
    """Steps of the whole run, including those before a resume."""
    seed: Count = option(0, "data", "refused", least=0)
    """Seed of the initial weights, the order of the data and the sample."""

    learning_rate: Real = option(3e-4, "most used", "noted, kept")
    """Peak of the schedule, after the warmup."""
    lr_schedule: Annotated[str, tyro.conf.arg(metavar="cosine|linear|wsd|constant")] = option(
        "cosine", "optimizer", "noted, kept"
    )
    """Schedule after a linear warmup. cosine, linear: decay to the floor at --decay-steps. wsd: warmup, stable, decay:
    the peak, then linear decay in the last tenth of --decay-steps. constant: the peak."""
    warmup: Number = option(None, "optimizer", "noted, kept")
    """Warmup steps. none: 5 % of --decay-steps."""
    decay_steps: Number = option(None, "optimizer", "noted, kept", least=1)
    """Steps until the schedule reaches its floor. none: --steps; on resume, the run's value."""
    min_learning_rate: Real = option(0.1, "optimizer", "noted, kept")
    """Floor of the schedule, as a fraction of the peak."""

    check_loss: bool = option(True, "XLA and debugging", "free")
    """With manual: before the first step, compare the loss over all rows with the sum of the losses of the devices."""

    init_from: Location = option(None, "model", "free")
    """Weights to start from: Hugging Face, PyTorch, or a checkpoint or run of jfsdp."""
    init_key: Name = option(None, "model", "free")
    """Key of the dict in a PyTorch checkpoint that contains the model, such as model."""
    init_optimizer: bool = option(False, "model", "free")
    """Continue the run of --init-from, a checkpoint of torchtitan, PyTorch or DeepSpeed ZeRO: also read its states of
    Adam and its number of steps."""
    init_adapter: Location = option(None, "frozen weights and adapters", "free")
    """Directory of a PEFT adapter to start from and train further; --lora is read from it."""

    reference: Annotated[str | None, optional(str, "RUN|HF_DIR")] = option(None, "preferences", "refused")
    """With --preference: weights of the frozen reference, of the same model. none: the initial weights of the run."""

    run_dir: Location = option(None, "most used", "free")
    """Directory of the run, with all its files; also s3://BUCKET/PATH or gs://BUCKET/PATH. none: a new
    runs/NAME-DATE-TIME; with --resume, the newest of these."""
    resume: Annotated[str | None, optional(str, "auto|STEP")] = option(None, "most used", "free")
    """auto: continue from the newest checkpoint, or begin if there is none. STEP: continue from that step.
    --resume without a value is --resume auto. The run's schedule, clipping and checkpoint options stay, unless given
    again."""
    checkpoint_every: Count = option(200, "checkpoint", "kept", least=0)
    """Steps between checkpoints. 0: only the last step, which is always saved."""
    keep: Count = option(3, "checkpoint", "kept", least=0)
    """Keep the newest N checkpoints. 0: all."""
    keep_every: Number = option(None, "checkpoint", "kept", least=1)
    """Also keep every step that is a multiple of N."""
    keep_best: Annotated[str | None, optional(str, "METRIC[:min|max[:N]]")] = option(None, "checkpoint", "kept")
    """Also keep the best by a metric: eval_loss, eval_correct:max, eval_correct:max:2."""
    restart_data: bool = option(False, "checkpoint", "free")
    """With --resume STEP: start the data from the beginning instead of the saved position."""
    fall_back: bool = option(False, "checkpoint", "free")
    """If the checkpoint to resume from is damaged, use the newest intact one before it."""
    snapshot_every: Count = option(0, "checkpoint", "free", least=0)
    """Steps between snapshots in host memory, for a restart on the same hosts. 0: none."""
    eval_every: Count = option(0, "evaluation and logging", "free", least=0)
    """Steps between evaluations. 0: only after the last step."""
    eval_batches: Count = option(32, "evaluation and logging", "free", least=0)
    """Held-out batches per evaluation, always the same ones. 0: all."""
    log_every: Count = option(10, "evaluation and logging", "free", least=0)
    """Steps between lines of metrics.jsonl. 0: only evaluations and the last step."""
    sample_tokens: Count = option(200, "evaluation and logging", "free", least=0)
    """Length of the text that a token model with a cache (`Job.cache`) generates at the end, up to --seq-len. 0:
    none."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = option("", "evaluation and logging", "free")
    """Beginning of the text of --sample-tokens."""
    wandb: Annotated[str | None, optional(str, "PROJECT")] = option(None, "evaluation and logging", "free")
    """Also log to this project of Weights & Biases; with WANDB_MODE=offline, to the run's directory."""
    mlflow: Annotated[str | None, optional(str, "EXPERIMENT")] = option(None, "evaluation and logging", "free")
    """Also log to this experiment of MLflow, on the server of MLFLOW_TRACKING_URI."""
    tracker: Annotated[str | None, optional(str, "MODULE:FUNCTION")] = option(None, "evaluation and logging", "free")
    """Custom tracker: called in process 0 with the run's configuration; returns an object with write and close."""
    profile: Annotated[tuple[int, int] | None, optional(str, "START:STOP")] = option(
        None, "evaluation and logging", "free", read=read_profile
    )
    """First and last step of a trace, written to profile/ in the run's directory."""

    simulate_devices: Count = option(0, "process and device", "rounding")
    """Simulate N devices on the CPU. 0: use the real devices."""
    cache_dir: Location = option(None, "XLA and debugging", "free")
    """Directory of the compilation cache. Programs for several CPU devices are not cached. none: compiled/ in the run's
    directory for the step, ~/.cache/jfsdp for all others."""
    timeout: Real = option(600.0, "process and device", "free", least=0)
    """Limit in seconds for a step, a batch, or a batch of the evaluation. The start, the first step, restoring and
    saving may take three times as long, indexing the data 72 times. With several processes, a process that exceeds it
    ends with the reason, and so do the others. 0: no limit."""
    debug: bool = option(False, "XLA and debugging", "free")
    """Show the traceback of an error."""
