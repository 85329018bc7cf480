"""What a run asks of its data, whatever they are: which kind a job takes, and what each kind is good for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from jfsdp.trainer.data import DataIterator
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.own import OwnSource
from jfsdp.trainer.sources.pairs import PairSource
from jfsdp.trainer.sources.tokens import TokenSource


class Source(Protocol):
    """The data of a run: opened once, in every process.

    Attributes:
      item: what rates are per: "token" or "row".
      counted: what losses are per: "token", "row" or "pair".
      num_rows: rows of items that a row of a batch has: 2 where it is a pair.
      makes_text: whether `sample` can be asked for.
    """

    item: str
    counted: str
    num_rows: int
    makes_text: bool

    @property
    def has_eval(self) -> bool:
        """Tell whether anything is held out."""
        ...

    def describe(self, theirs: Mapping[str, Any]) -> str:
        """Describe the data in a line, and where they contradict `theirs`, the `config.json` of the first weights."""
        ...

    def describe_batch(self, rows: int) -> str:
        """Say what a step of so many rows takes."""
        ...

    def decides(self) -> dict[str, Any]:
        """Return all of the data that losses depend on, as `config.json` is to say it."""
        ...

    def train_batches(self, **share: int) -> DataIterator:
        """Start the endless training batches of this process; see `make_train_iterator`."""
        ...

    def eval_batches(self, **share: int) -> DataIterator:
        """Start a pass over the held-out batches of this process; see `make_eval_iterator`."""
        ...

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        """Bring a batch into the form that the model is given."""
        ...

    def sample(self, model: Any, state: Any) -> list[str]:
        """Generate texts. Raises: ValueError, if this model or these data cannot."""
        ...


def _kind(job: Job) -> type[TokenSource] | type[OwnSource]:
    return OwnSource if callable(job.data) else {"tokens": TokenSource, "pairs": PairSource}[job.data]


def check_source(config: TrainConfig, job: Job) -> int:
    """Refuse a configuration whose data are not what the job takes; return how many items a row holds. Reads no data.

    Raises:
      ValueError: says what does not fit together.
    """
    return _kind(job).check(config, job)


def open_source(config: TrainConfig, job: Job, row_items: int) -> Source:
    """Open the data that a run trains on.

    Raises:
      ValueError: for data that cannot be had, or do not fit the model.
    """
    return _kind(job)(config, job, row_items)
