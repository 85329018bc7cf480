"""The configuration of a training run: plain data, which a command line shows as it stands. Importing it is cheap."""

from __future__ import annotations

import dataclasses
from typing import Annotated

import tyro

from jfsdp.trainer.options import Dtype, Location, Number, StepOptions, optional


@dataclasses.dataclass(frozen=True)
class TrainConfig(StepOptions):
    """What to train, on what, where and for how long."""

    recipe: Annotated[str, tyro.conf.arg(metavar="NAME|FILE.json")] = "none"
    """Named defaults, which any other option overrides; or a file of such, as `jfsdp plan --search` writes them."""

    data: str = "stdlib"
    """"stdlib" (Python's own sources), a directory, a glob, *.jsonl, or token files *.bin; for models that take images
    "digits" (those of scikit-learn), or a file *.npz with arrays images and labels."""
    tokenizer: str = "byte"
    """"byte", or the path of a tokenizer.json."""
    text_field: str = "text"
    """Field of a JSONL object that holds the text."""
    extensions: tuple[str, ...] = ()
    """Keep only these files of a directory or glob, such as .py .md"""
    token_dtype: Dtype = None
    """uint16 or uint32, for token files without a sidecar."""
    eod_id: Number = None
    """End-of-document id of token files without a sidecar."""
    eval_fraction: float = 0.05
    """Share of the documents or images held out."""
    cross_documents: bool = False
    """Let attention and positions cross documents in a row."""
    shuffle_rows: int = 1024
    """Rows of a window that are shuffled among themselves; 0 keeps the rows of a document together."""

    steps: int = 1000
    """The total of the run, whatever was done before a resume."""
    seed: int = 0
    """Of initialization, data order and sample."""

    learning_rate: float = 3e-4
    """The peak."""
    warmup: Number = None
    """Steps to reach it; default: 5 % of decay_steps."""
    decay_steps: Number = None
    """Steps until the cosine reaches its floor; default: steps, and on resume what the run began with."""
    min_learning_rate: float = 0.1
    """The floor, as a fraction of the peak."""

    check_loss: bool = True
    """Where a step computes the loss device by device, compare it before the first step with that over all rows."""

    init_from: Location = None
    """Start from these weights: a directory of Hugging Face, a PyTorch checkpoint, or a checkpoint or run of ours."""
    init_key: Annotated[str | None, optional(str, "NAME")] = None
    """Of a PyTorch checkpoint, the dict that holds the model, such as model."""

    allow_nonfinite: bool = False
    """Start also from weights with NaN and infinite values."""

    run_dir: Location = None
    """Where everything is written; default: runs/NAME-DATE-TIME (on --resume: the newest of these)."""
    resume: Annotated[str | None, optional(str, "auto|STEP")] = None
    """Continue the run from its latest checkpoint (--resume, --resume auto) or from one (--resume STEP).
    The learning rate, its schedule, clipping and skip_nonfinite may change; left out, they stay as they were."""
    checkpoint_every: int = 200
    """Steps between checkpoints; 0: only the last step. The last step is always saved."""
    checkpoint_minutes: float = 0.0
    """Minutes between checkpoints, beside these; looked at every log_every steps. 0: never."""
    keep: int = 3
    """How many of the newest checkpoints to keep; 0 keeps all."""
    keep_every: Number = None
    """Keep also every checkpoint whose step is a multiple of this."""
    keep_best: Annotated[str | None, optional(str, "METRIC[:min|max[:N]]")] = None
    """Keep also the best by a metric logged at the same step, such as eval_loss, or eval_correct:max:2."""
    fall_back: bool = False
    """Where the checkpoint to resume from is damaged, take the newest whole one before it."""
    eval_every: int = 0
    """Steps between evaluations; 0: only after the last step."""
    eval_batches: int = 32
    """Held-out batches per evaluation, always the same; 0 takes all."""
    log_every: int = 10
    """Steps between lines of metrics.jsonl."""
    sample_tokens: int = 200
    """Length of the text that a model for tokens generates at the end; 0 for none. Ends at seq_len."""
    prompt: str = ""
    """Its beginning."""
    temperature: float = 0.8
    """Its randomness; 0 takes the likeliest token."""
    profile: Annotated[str | None, optional(str, "START:STOP")] = None
    """START:STOP, the first and the last step of a trace."""

    simulate_devices: int = 0
    """Make the CPU look like so many devices; 0 uses the real ones."""
    deterministic: bool = False
    """Bit-for-bit repeatable on GPUs too, and slower."""
    cache_dir: Location = None
    """Compiled programs are kept here, but those for several CPU devices; default: ~/.cache/jfsdp."""
    coordinator: Annotated[str | None, optional(str, "HOST:PORT")] = None
    """HOST:PORT of process 0, or auto under Slurm and the like; default: JAX_COORDINATOR_ADDRESS, or one process."""
    num_processes: Number = None
    """How many processes; with --coordinator HOST:PORT."""
    process_id: Number = None
    """Which of them this is; with --coordinator HOST:PORT."""
    debug: bool = False
    """Show tracebacks of errors."""


def parse_profile(text: str | None) -> tuple[int, int] | None:
    """Read START:STOP."""
    if text is None:
        return None
    start, _, stop = text.partition(":")
    if not (start.isdigit() and stop.isdigit()):
        raise ValueError(f"--profile {text!r} is not START:STOP, such as 10:12")
    return int(start), int(stop)
