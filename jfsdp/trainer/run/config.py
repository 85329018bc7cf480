"""The configuration of a training run: plain data, which a command line shows as it stands. Importing it is cheap."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from jfsdp.trainer.options import Count, Dtype, Location, Name, Number, Real, StepOptions, optional


@dataclasses.dataclass(frozen=True)
class TrainConfig(StepOptions):
    """What to train, on what, where and for how long."""

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "none"
    """Named defaults, which any other option overrides; or a file of them, as `jfsdp plan --search` writes it."""

    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = "stdlib"
    """What to train on: a directory, a glob, *.jsonl, token files *.bin, or stdlib (Python's own sources); or several
    with weights, a.jsonl:0.7,b.jsonl:0.3. JSONL may hold texts, conversations, prompts and completions, or choices;
    `jfsdp data show FILE` shows how it is read."""
    tokenizer: Annotated[str | None, optional(str, "byte|PATH")] = None
    """byte, or the path of a tokenizer.json or of its directory. none: the tokenizer of --init-from; without that byte;
    on resume, what it was."""
    text_field: Name = None
    """The field of a JSONL object that holds the text. none: what an object holds is found by looking."""
    chat_template: Location = None
    """A file with the jinja template of conversations, or one of the tokenizer's by name. none: the tokenizer's own."""
    answers: Annotated[str, tyro.conf.arg(metavar="all|last")] = "all"
    """Which of the assistant's messages in a conversation are trained."""
    eod_token: Name = None
    """The token of a tokenizer.json that ends a document. none: a known one, or eos_token of its configuration."""
    extensions: Annotated[tuple[str, ...], tyro.conf.arg(metavar=".EXT ...")] = ()
    """Keep only these files of a directory or glob: --extensions .py .md"""
    token_dtype: Dtype = None
    """uint16 or uint32, for token files without a sidecar FILE.bin.json."""
    eod_id: Number = None
    """The id between documents, for token files without a sidecar."""
    eval_fraction: Real = 0.05
    """The part of the documents that is held out."""
    shuffle_rows: Count = 1024
    """Rows that are shuffled among themselves. 0: keep the rows of a document together."""

    global_batch: Number = None
    """Rows per step of all devices together, whatever their number. --batch-per-device over --accumulate are then the
    rows that a device computes at once, and how many microbatches make a step follows. none: as those two say."""
    steps: Count = 1000
    """Steps of the whole run; what was done before a resume counts."""
    seed: Count = 0
    """Of the first weights, the order of the data and the sample."""

    learning_rate: Real = 3e-4
    """The peak of the schedule: a linear warm-up, then a cosine."""
    warmup: Number = None
    """Steps up to the peak. none: 5 % of --decay-steps."""
    decay_steps: Number = None
    """Steps until the cosine reaches its floor. none: --steps; on resume, what it was."""
    min_learning_rate: Real = 0.1
    """The floor of the schedule, as a fraction of the peak."""

    check_loss: bool = True
    """For manual: before the first step, compare the loss per device with that over all rows."""

    init_from: Location = None
    """Start from these weights: Hugging Face, PyTorch, or a checkpoint or run of jfsdp."""
    init_key: Name = None
    """Of a PyTorch checkpoint, the dict that holds the model, such as model."""
    init_adapter: Location = None
    """Start from this adapter of PEFT's, a directory, and train it further; --lora follows from it."""

    reference: Annotated[str | None, optional(str, "RUN|HF_DIR")] = None
    """With --preference: the frozen weights that the model is compared with, of a model like it. none: those that the
    run begins with."""

    allow_nonfinite: bool = False
    """Start also from weights with NaN or infinite values."""

    run_dir: Location = None
    """Where everything is written. none: a new runs/NAME-DATE-TIME; with --resume the newest of these."""
    resume: Annotated[str | None, optional(str, "auto|STEP")] = None
    """auto: go on from the newest checkpoint, or begin if there is none. STEP: go on from that step.
    --resume alone is --resume auto. The schedule, clipping, and what is saved and kept stay as the run had them, unless
    given anew."""
    checkpoint_every: Count = 200
    """Steps between checkpoints. 0: only the last step, which is always saved."""
    checkpoint_minutes: Real = 0.0
    """Minutes between checkpoints, besides; several processes look every --log-every steps. 0: never."""
    keep: Count = 3
    """Keep the newest N checkpoints. 0: all."""
    keep_every: Number = None
    """Keep also every step that is a multiple of N."""
    keep_best: Annotated[str | None, optional(str, "METRIC[:min|max[:N]]")] = None
    """Keep also the best by a metric: eval_loss, eval_correct:max, eval_correct:max:2."""
    restart_data: bool = False
    """With --resume STEP, begin the data anew instead of with what was not seen yet."""
    fall_back: bool = False
    """If the checkpoint to resume from is damaged, take the newest whole one before it."""
    snapshot_every: Count = 0
    """Steps between snapshots in the memory of the hosts, for a restart on the same hosts. 0: none."""
    compare_replicas: Count = 0
    """Steps between comparisons of what several devices hold, by digests. 0: never."""
    eval_every: Count = 0
    """Steps between evaluations. 0: only after the last step."""
    eval_batches: Count = 32
    """Held-out batches per evaluation, always the same ones. 0: all."""
    log_every: Count = 10
    """Steps between lines of metrics.jsonl. 0: only evaluations and the last step."""
    sample_tokens: Count = 200
    """Length of the text that a token model generates at the end, up to --seq-len. 0: none."""
    prompt: Annotated[str, tyro.conf.arg(metavar="TEXT")] = ""
    """How that text begins."""
    temperature: Real = 0.8
    """How random that text is. 0: always the likeliest token."""
    tracker: Annotated[str | None, optional(str, "MODULE:FUNCTION")] = None
    """A tracker of your own: called in process 0 with the run's configuration; returns what has write and close."""
    profile: Annotated[str | None, optional(str, "START:STOP")] = None
    """The first and the last step of a trace, written to profile/ of the run."""

    simulate_devices: Count = 0
    """Make the CPU look like N devices. 0: the real ones."""
    deterministic: bool = False
    """GPU kernels that give the same bits every time, and are slower."""
    cache_dir: Location = None
    """Where compiled programs are kept, but those for several CPU devices. none: ~/.cache/jfsdp."""
    coordinator: Annotated[str | None, optional(str, "HOST:PORT|auto")] = None
    """HOST:PORT of process 0. none: as JAX_COORDINATOR_ADDRESS, torchrun, `jfsdp launch`, Kubernetes, Open MPI or Slurm
    say in the environment, else one process. auto: the same, and they must say something."""
    num_processes: Number = None
    """How many processes; needed with HOST:PORT."""
    process_id: Number = None
    """Which of them this is, from 0; needed with HOST:PORT."""
    timeout: Real = 600.0
    """Seconds that a step, a batch or a batch of the evaluation may take; three times that for the start, the first
    step, restoring and a save; 72 times for the first look at the data. Then one of several processes ends with the
    reason, and so do the others. 0: any number."""
    debug: bool = False
    """Show the traceback of an error."""


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """Read START:STOP."""
    if text is None:
        return None
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit()):
        raise ValueError(f"--profile {text!r} is not START:STOP, such as 10:12")
    return int(start), int(stop)
