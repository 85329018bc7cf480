"""The kinds of data of a run, and which of them a job takes."""

from __future__ import annotations

from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.own import OwnSource
from jfsdp.trainer.sources.tokens import PairSource, TokenSource

Source = TokenSource | OwnSource


def source_of(job: Job) -> type[TokenSource] | type[OwnSource]:
    """Return the class of a job's data. Its `check` refuses options and jobs, and reads no data."""
    return OwnSource if callable(job.data) else {"tokens": TokenSource, "pairs": PairSource}[job.data]


def open_source(config: TrainConfig, job: Job, row_items: int) -> Source:
    """Open the data that a run trains on.

    Raises:
      ValueError: for data that cannot be had, or do not fit the model.
    """
    return source_of(job)(config, job, row_items)
