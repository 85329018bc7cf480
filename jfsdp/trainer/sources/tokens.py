"""Data sources for texts and for pairs of answers."""

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
    """Documents as rows of `seq_len` tokens, opened once in every process.

    Attributes:
      item: unit of rates: "token" or "row".
      loss_unit: unit of losses: "nats per token" or "nats per pair"; "" for custom data without a vocabulary.
      num_rows: sequences per row of a batch: 2 for pairs.
    """

    item, form, loss_unit, num_rows = "token", "tokens", "nats per token", 1

    def __init__(self, config: TrainConfig, job: Job, seq_len: int):
        names = ("data", "tokenizer", "text_field", "eval_fraction", "chat_template", "answers", "eod_token")
        names += ("eval_data", "cross_documents", "seed")
        options = {name: getattr(config, name) for name in names}
        if config.eval_data is not None and config.eval_fraction == TrainConfig.eval_fraction:
            options["eval_fraction"] = 0.0
        data = DataConfig(seq_len=seq_len, documents_per_row=job.documents_per_row, **options)
        self.data = open_data(data, vocab_size=job.vocab_size)
        # Older versions accepted these options without effect, so resumed runs may have them.
        self.data.check_used(None if config.resume is None else ("chat_template", "answers"))
        form = self.data.form
        if form == "pairs" and self.form != "pairs":
            raise ValueError(f"data {config.data!r}: are pairs of answers; choose a loss with --preference (dpo)")
        if form != "pairs" and self.form == "pairs":
            raise ValueError(
                f"data {config.data!r}: are {'texts' if form == 'text' else 'conversations or completions'}, and "
                f"--preference {config.preference} needs records with chosen and rejected and without messages (a "
                "record with messages is a conversation); remove messages, or leave --preference out"
            )
        self.config, self.seq_len = config, seq_len

    @classmethod
    def check(cls, config: TrainConfig, job: Job) -> int:
        """Check that the job trains on tokens. Return the tokens per row."""
        seq_len = job.seq_len if config.seq_len is None else config.seq_len
        batch = job.batch(1, seq_len)
        if job.vocab_size is None or not isinstance(batch, Mapping) or not {"tokens", "targets"} <= batch.keys():
            raise ValueError(
                f"job {job.name!r} has data={job.data!r}, but no vocab_size, or batches without tokens and targets; "
                "add these, or use custom data with data=f(share)"
            )
        return seq_len

    @property
    def has_eval(self) -> bool:
        """Whether any documents are held out."""
        return bool(len(self.data.eval))

    def describe(self, hf_config: Mapping[str, Any]) -> str:
        """Describe the data, and contradictions to the `config.json` of the initial weights, in one line."""
        tokenizer, end = self.data.tokenizer, hf_config.get("eos_token_id")
        line = f"{self.config.data!r}: {self.data.found}{self._padding()}"
        length = hf_config.get("max_position_embeddings")
        if tokenizer:
            line += f"; tokenizer {self.config.tokenizer}"
        if length and self.seq_len > length:
            line += f"; NOTE: rows of {self.seq_len} tokens exceed the weights' max_position_embeddings={length}"
        ends = [] if end is None else np.atleast_1d(end).tolist()
        if tokenizer and ends and not self.data.has_conversations and tokenizer.eod_id not in ends:
            ours = f"{tokenizer.decode([tokenizer.eod_id], special=True)!r} ({tokenizer.eod_id})"
            line += f"; NOTE: documents end with {ours}, but the weights have eos_token_id={end}: see --eod-token"
        return f"{line}; {len(self.data.eval)} held out"

    def _padding(self) -> str:
        """Describe the padding caused by `documents_per_row`, if it is at least 10 %.

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
            f"; about {padding:.0%} of each row is padding: documents have {mean:.0f} tokens, and a row has at most "
            f"{config.documents_per_row} documents, including padding; raise --model-config documents_per_row=N"
        )

    def describe_batch(self, rows: int) -> str:
        """Describe the batch of a step."""
        return f"{rows} rows of {self.seq_len} tokens"

    def decides(self) -> dict[str, Any]:
        """Return all properties of the data on which losses depend, for `config.json`."""
        names = ("eval_fraction", "cross_documents")
        data = {"data (digest)": self.data.digest, "tokenizer": self.data.encoding}
        return data | {name: getattr(self.data.config, name) for name in names}

    def train_batches(self, **share: int) -> DataIterator:
        """Return an endless iterator over the training batches of this process; see `make_train_iterator`."""
        return make_train_iterator(self.data, **share)

    def eval_batches(self, **share: int) -> DataIterator:
        """Return an iterator over the held-out batches of this process; see `make_eval_iterator`."""
        return make_eval_iterator(self.data, **share)

    def prepare(self, batch: Batch) -> Batch:
        """Return a batch in the form for the model."""
        return without_packing(batch) if self.config.cross_documents else batch

    def sample(self, job: Job, model: Any, state: Any) -> list[str]:
        """Generate one text per data shard: the prompt and its continuation, up to the end of a document.

        Raises:
          ValueError: for token files, a job without a cache, and a prompt that fills a row.
        """
        tokenizer, config = self.data.tokenizer, self.config
        if tokenizer is None:
            raise ValueError("token files have no tokenizer")
        prompt = np.concatenate([[tokenizer.eod_id], tokenizer.encode(config.prompt)])
        generate = Generator(model, job, Sampling(0.8, seed=config.seed), stop=[tokenizer.eod_id])
        prompts = [prompt] * num_data_shards(dict(model.layout.mesh_sizes))
        answers = generate(state, prompts, min(config.sample_tokens, self.seq_len - len(prompt)))
        return [tokenizer.decode([id for id in (*prompt, *answer) if id != tokenizer.eod_id]) for answer in answers]


class PairSource(TokenSource):
    """Pairs of answers, one row [2 T] each; see `TokenSource`.

    Attributes:
      reference: float32 [N 2] by document number, the log-likelihoods of both answers under the frozen reference. Set
        it before `prepare`.
    """

    form, loss_unit, num_rows = "pairs", "nats per pair", 2

    def __init__(self, config: TrainConfig, job: Job, seq_len: int):
        super().__init__(config, job, seq_len)
        self.reference = np.zeros((0, 2), np.float32)

    @property
    def num_documents(self) -> int:
        """The number of rows of `reference`."""
        parts = (*self.data.train.parts, *self.data.eval.parts)
        return 1 + max(part.number(len(part) - 1) for part in parts if len(part))

    def every_batch(self, **share: int) -> Iterator[Batch]:
        """Yield all pairs once, training and held-out."""
        for split in (self.data.train, self.data.eval):
            if len(split):
                yield from make_pass_iterator(self.data, split, **share)

    def describe_batch(self, rows: int) -> str:
        return f"{rows} pairs of {self.seq_len} tokens each, {len(self.data.train) / rows:.1f} steps per epoch"

    def prepare(self, batch: Batch) -> Batch:
        return {name: x for name, x in batch.items() if name != "index"} | {"reference": self.reference[batch["index"]]}
