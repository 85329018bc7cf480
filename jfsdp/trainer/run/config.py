"""The configuration of a training run: plain data, which a command line shows as it stands. Importing it is cheap."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Location, Name, Number, Real, StepOptions, optional
from jfsdp.trainer.parse import read_profile


@dataclasses.dataclass(frozen=True)
class TrainConfig(StepOptions):
    """What to train, on what, where and for how long."""

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.toml")] = option("none", "most used", "free")
    """Named defaults, which any other option overrides; or a file of them, *.toml or *.json.
    `jfsdp plan --write-recipe` writes one."""

    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = option("stdlib", "most used", "refused")
    """What to train on: a directory, a glob, *.jsonl, token files *.bin, or stdlib (Python's own sources); or several
    with weights, a.jsonl:0.7,b.jsonl:0.3. JSONL may hold texts, conversations, prompts and completions, or choices;
    `jfsdp data show FILE` shows how it is read."""
    tokenizer: Annotated[str | None, optional(str, "byte|PATH")] = option(None, "most used", "refused")
    """byte, or the path of a tokenizer.json or of its directory. none: the tokenizer of --init-from; without that byte;
    on resume, what it was."""
    text_field: Name = option(None, "data", "refused")
    """The field of a JSONL object that holds the text. none: what an object holds is found by looking."""
    chat_template: Location = option(None, "data", "refused")
    """A file with the jinja template of conversations, or one of the tokenizer's by name. none: the tokenizer's own."""
    answers: Annotated[str, tyro.conf.arg(metavar="all|last")] = option("all", "data", "refused")
    """Which of the assistant's messages in a conversation are trained."""
    eod_token: Name = option(None, "data", "refused")
    """The token of a tokenizer.json that ends a document. none: a known one, or eos_token of its configuration."""
    eval_fraction: Real = option(0.05, "data", "refused")
    """The part of the documents that is held out."""

    global_batch: Number = option(None, "gradient accumulation", "refused", least=1)
    """Rows per step of all devices together, whatever their number. --batch-per-device over --accumulate are then the
    rows that a device computes at once, and how many microbatches make a step follows. none: as those two say."""
    steps: Count = option(1000, "most used", "free", least=1)
    """Steps of the whole run; what was done before a resume counts."""
    seed: Count = option(0, "data", "refused", least=0)
    """Of the first weights, the order of the data and the sample."""

    learning_rate: Real = option(3e-4, "most used", "said, kept")
    """The peak of the schedule: a linear warm-up, then a cosine."""
    warmup: Number = option(None, "optimizer", "said, kept")
    """Steps up to the peak. none: 5 % of --decay-steps."""
    decay_steps: Number = option(None, "optimizer", "said, kept", least=1)
    """Steps until the cosine reaches its floor. none: --steps; on resume, what it was."""
    min_learning_rate: Real = option(0.1, "optimizer", "said, kept")
    """The floor of the schedule, as a fraction of the peak."""

    check_loss: bool = option(True, "XLA and debugging", "free")
    """For manual: before the first step, compare the loss per device with that over all rows."""

    init_from: Location = option(None, "model", "free")
    """Start from these weights: Hugging Face, PyTorch, or a checkpoint or run of jfsdp."""
    init_key: Name = option(None, "model", "free")
    """Of a PyTorch checkpoint, the dict that holds the model, such as model."""
    init_adapter: Location = option(None, "frozen weights and adapters", "free")
    """Start from this adapter of PEFT's, a directory, and train it further; --lora follows from it."""

    reference: Annotated[str | None, optional(str, "RUN|HF_DIR")] = option(None, "preferences", "refused")
    """With --preference: the frozen weights that the model is compared with, of a model like it. none: those that the
    run begins with."""

    run_dir: Location = option(None, "most used", "free")
    """Where everything is written. none: a new runs/NAME-DATE-TIME; with --resume the newest of these."""
    resume: Annotated[str | None, optional(str, "auto|STEP")] = option(None, "most used", "free")
    """auto: go on from the newest checkpoint, or begin if there is none. STEP: go on from that step.
    --resume alone is --resume auto. The schedule, clipping, and what is saved and kept stay as the run had them, unless
    given anew."""
    checkpoint_every: Count = option(200, "checkpoint", "kept", least=0)
    """Steps between checkpoints. 0: only the last step, which is always saved."""
    keep: Count = option(3, "checkpoint", "kept", least=0)
    """Keep the newest N checkpoints. 0: all."""
    keep_every: Number = option(None, "checkpoint", "kept", least=1)
    """Keep also every step that is a multiple of N."""
    keep_best: Annotated[str | None, optional(str, "METRIC[:min|max[:N]]")] = option(None, "checkpoint", "kept")
    """Keep also the best by a metric: eval_loss, eval_correct:max, eval_correct:max:2."""
    restart_data: bool = option(False, "checkpoint", "free")
    """With --resume STEP, begin the data anew instead of with what was not seen yet."""
    fall_back: bool = option(False, "checkpoint", "free")
    """If the checkpoint to resume from is damaged, take the newest whole one before it."""
    snapshot_every: Count = option(0, "checkpoint", "free", least=0)
    """Steps between snapshots in the memory of the hosts, for a restart on the same hosts. 0: none."""
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
    """How that text begins."""
    wandb: Annotated[str | None, optional(str, "PROJECT")] = option(None, "evaluation and logging", "free")
    """Log to this project of Weights & Biases too; with WANDB_MODE=offline to the run's directory."""
    mlflow: Annotated[str | None, optional(str, "EXPERIMENT")] = option(None, "evaluation and logging", "free")
    """Log to this experiment of MLflow too, on the server of MLFLOW_TRACKING_URI."""
    tracker: Annotated[str | None, optional(str, "MODULE:FUNCTION")] = option(None, "evaluation and logging", "free")
    """A tracker of your own: called in process 0 with the run's configuration; returns what has write and close."""
    profile: Annotated[tuple[int, int] | None, optional(str, "START:STOP")] = option(
        None, "evaluation and logging", "free", read=read_profile
    )
    """The first and the last step of a trace, written to profile/ of the run."""

    simulate_devices: Count = option(0, "process and device", "rounding")
    """Make the CPU look like N devices. 0: the real ones."""
    cache_dir: Location = option(None, "XLA and debugging", "free")
    """Where compiled programs are kept, but those for several CPU devices. none: ~/.cache/jfsdp."""
    timeout: Real = option(600.0, "process and device", "free", least=0)
    """Seconds that a step, a batch or a batch of the evaluation may take; three times that for the start, the first
    step, restoring and a save; 72 times for the first look at the data. Then one of several processes ends with the
    reason, and so do the others. 0: any number."""
    debug: bool = option(False, "XLA and debugging", "free")
    """Show the traceback of an error."""
