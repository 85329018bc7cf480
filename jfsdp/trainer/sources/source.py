"""Selection of the data source for a job."""

from __future__ import annotations

from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.custom import CustomSource
from jfsdp.trainer.sources.tokens import PairSource, TokenSource

Source = TokenSource | CustomSource


def source_of(job: Job) -> type[TokenSource] | type[CustomSource]:
    """Return the class of a job's data source. Its `check` validates options and job without reading data."""
    return CustomSource if callable(job.data) else {"tokens": TokenSource, "pairs": PairSource}[job.data]


def open_source(config: TrainConfig, job: Job, row_items: int) -> Source:
    """Open the data of a run.

    Raises:
      ValueError: for data that cannot be read, or do not fit the model.
    """
    return source_of(job)(config, job, row_items)
