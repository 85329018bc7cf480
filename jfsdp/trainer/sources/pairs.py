"""Choices between two answers as the data of a run."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from jfsdp.trainer.data.iterator import Batch
from jfsdp.trainer.data.pipeline import make_pass_iterator
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.sources.tokens import TokenSource


class PairSource(TokenSource):
    """Pairs of answers, one row [2 T] each; see `jfsdp.trainer.sources.source.Source`.

    Attributes:
      reference: float32 [N 2], by number of document: the log-likelihoods of both answers by the frozen reference. To
        be set before a batch is prepared.
    """

    form, counted, num_rows = "pairs", "pair", 2

    def __init__(self, config: TrainConfig, job: Job, seq_len: int):
        super().__init__(config, job, seq_len)
        self.reference = np.zeros((0, 2), np.float32)

    @property
    def num_documents(self) -> int:
        """Return how many rows `reference` has."""
        splits = (split for split in (self.data.train, self.data.eval) if len(split))
        return 1 + max(split.number(len(split) - 1) for split in splits)

    def every_batch(self, **share: int) -> Iterator[Batch]:
        """Pass once over all pairs, of training and held out."""
        for split in (self.data.train, self.data.eval):
            if len(split):
                yield from make_pass_iterator(self.data, split, **share)

    def describe_batch(self, rows: int) -> str:
        return f"{rows} pairs of {self.seq_len} tokens each"

    def prepare(self, batch: dict[str, Any]) -> dict[str, Any]:
        return {name: x for name, x in batch.items() if name != "index"} | {"reference": self.reference[batch["index"]]}
