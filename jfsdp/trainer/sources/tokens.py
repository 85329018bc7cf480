"""Texts, and choices between two answers, as the data of a run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from jfsdp.layout.mesh import num_data_shards
from jfsdp.trainer.data.documents import START
from jfsdp.trainer.data.iterator import Batch, DataIterator
from jfsdp.trainer.data.pipeline import make_eval_iterator, make_pass_iterator, make_train_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from jfsdp.trainer.generate import Generator, Sampling
from jfsdp.trainer.job import Job
from jfsdp.trainer.run.config import TrainConfig
from jfsdp.trainer.step import without_packing


class TokenSource:
    """Documents as rows of `seq_len` tokens: the data of a run, opened once, in every process.

    Attributes:
      item: what rates are per: "token" or "row".
      counted: what losses are per: "token", "row" or "pair".
      num_rows: rows of items that a row of a batch has: 2 where it is a pair.
    """

    item, form, counted, num_rows = "token", "tokens", "token", 1

    def __init__(self, config: TrainConfig, job: Job, seq_len: int):
        names = ("data", "tokenizer", "text_field", "eval_fraction", "chat_template", "answers", "eod_token")
        names += ("cross_documents", "seed")
        options = {name: getattr(config, name) for name in names}
        data = DataConfig(seq_len=seq_len, documents_per_row=job.documents_per_row, **options)
        self.data = open_data(data, vocab_size=job.vocab_size)
        # A run that was begun when options without effect were taken goes on with them.
        self.data.check_used(None if config.resume is None else ("chat_template", "answers"))
        form = self.data.form
        if form == "pairs" and self.form != "pairs":
            raise ValueError(
                f"data {config.data!r}: are choices between two answers; name the loss with --preference, such as dpo"
            )
        if form != "pairs" and self.form == "pairs":
            raise ValueError(
                f"data {config.data!r}: are {'texts' if form == 'text' else 'conversations or completions'}, and "
                f"--preference {config.preference} takes records with chosen and rejected, and no messages next to "
                "them: these make a record a conversation; take messages out of it, or leave --preference out"
            )
        self.config, self.seq_len = config, seq_len

    @classmethod
    def check(cls, config: TrainConfig, job: Job) -> int:
        """Refuse a job that is not trained on tokens, and data that are none; return the tokens of a row."""
        seq_len = job.seq_len if config.seq_len is None else config.seq_len
        batch = job.batch(1, seq_len)
        if job.vocab_size is None or not isinstance(batch, Mapping) or not {"tokens", "targets"} <= batch.keys():
            raise ValueError(
                f"job {job.name!r} does not take batches of tokens and targets (with a vocab_size), which is what "
                "field `data` of a job, 'tokens', says; a job may bring other data by data=f(share)"
            )
        return seq_len

    @property
    def has_eval(self) -> bool:
        """Tell whether anything is held out."""
        return bool(len(self.data.eval))

    def describe(self, theirs: Mapping[str, Any]) -> str:
        """Describe the data in a line, and where they contradict `theirs`, the `config.json` of the first weights."""
        tokenizer, end = self.data.tokenizer, theirs.get("eos_token_id")
        line = f"{self.config.data!r}: {self.data.found}{self._padding()}"
        length = theirs.get("max_position_embeddings")
        if tokenizer:
            line += f"; tokenizer {self.config.tokenizer}"
        if length and self.seq_len > length:
            line += f"; NOTE: rows of {self.seq_len} tokens exceed the weights' max_position_embeddings={length}"
        ends = [] if end is None else np.atleast_1d(end).tolist()
        if tokenizer and ends and not self.data.has_conversations and tokenizer.eod_id not in ends:
            ours = f"{tokenizer.decode([tokenizer.eod_id], special=True)!r} ({tokenizer.eod_id})"
            line += f"; NOTE: documents end with {ours}, the weights say eos_token_id={end}: --eod-token names another"
        return f"{line}; {len(self.data.eval)} held out"

    def _padding(self) -> str:
        """Say how much of a row is padding because of its bounded number of documents, where that is much.

        Cost: reads at most 64 documents.
        """
        config, train = self.data.config, self.data.train
        if config.documents_per_row is None or config.cross_documents or self.data.form == "pairs":
            return ""
        some = [train[int(at)] for at in np.linspace(0, len(train) - 1, min(64, len(train)))]
        mean = sum(map(len, some)) / max(1, sum(int((pairs[:, START] > 0).sum()) for pairs in some))
        padding = 1 - (config.documents_per_row - 1) * mean / config.seq_len
        if padding < 0.1:
            return ""
        return (
            f"; about {padding:.0%} of each row is padding: documents have {mean:.0f} tokens, and a row holds at most "
            f"{config.documents_per_row}, padding included; raise it with --model-config documents_per_row=N"
        )

    def describe_batch(self, rows: int) -> str:
        """Describe the batch of a step."""
        return f"{rows} rows of {self.seq_len} tokens"

    def decides(self) -> dict[str, Any]:
        """Return all of the data that losses depend on, as `config.json` is to say it."""
        names = ("eval_fraction", "cross_documents")
        data = {"data (digest)": self.data.digest, "tokenizer": self.data.encoding}
        return data | {name: getattr(self.config, name) for name in names}

    def train_batches(self, **share: int) -> DataIterator:
        """Start the endless training batches of this process; see `make_train_iterator`."""
        return make_train_iterator(self.data, **share)

    def eval_batches(self, **share: int) -> DataIterator:
        """Start a pass over the held-out batches of this process; see `make_eval_iterator`."""
        return make_eval_iterator(self.data, **share)

    def prepare(self, batch: Batch) -> Batch:
        """Bring a batch into the form that the model is given."""
        return without_packing(batch) if self.config.cross_documents else batch

    def sample(self, job: Job, model: Any, state: Any) -> list[str]:
        """Generate one text for each data shard: the prompt and what follows, up to the end of a document.

        Raises:
          ValueError: for token files, a job without a cache, and a prompt that fills a row.
        """
        tokenizer, config = self.data.tokenizer, self.config
        if tokenizer is None:
            raise ValueError("token files come without a tokenizer")
        prompt = np.concatenate([[tokenizer.eod_id], tokenizer.encode(config.prompt)])
        generate = Generator(model, job, Sampling(0.8, seed=config.seed), stop=[tokenizer.eod_id])
        prompts = [prompt] * num_data_shards(dict(model.layout.mesh_sizes))
        answers = generate(state, prompts, min(config.sample_tokens, self.seq_len - len(prompt)))
        return [tokenizer.decode([id for id in (*prompt, *answer) if id != tokenizer.eod_id]) for answer in answers]


class PairSource(TokenSource):
    """Pairs of answers, one row [2 T] each; see `TokenSource`.

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
        parts = (*self.data.train.parts, *self.data.eval.parts)
        return 1 + max(part.number(len(part) - 1) for part in parts if len(part))

    def every_batch(self, **share: int) -> Iterator[Batch]:
        """Pass once over all pairs, of training and held out."""
        for split in (self.data.train, self.data.eval):
            if len(split):
                yield from make_pass_iterator(self.data, split, **share)

    def describe_batch(self, rows: int) -> str:
        return f"{rows} pairs of {self.seq_len} tokens each"

    def prepare(self, batch: Batch) -> Batch:
        return {name: x for name, x in batch.items() if name != "index"} | {"reference": self.reference[batch["index"]]}
