"""`jfsdp evaluate`: the loss of a trained model on data."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

from jfsdp.cli.load_options import OpenOptions
from jfsdp.extras import need
from jfsdp.layout.mesh import num_data_shards
from jfsdp.trainer.data.pipeline import make_pass_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Name, Number, optional

_SEQ_LEN = 2048


@dataclasses.dataclass(frozen=True)
class Evaluate(OpenOptions):
    """Print the loss of a model on data: of conversations and completions that of the answers' tokens alone.

    All documents count, each token once, without dropout. What is longer than a row is cut as for training, and the
    first line says how much that is.
    """

    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """As --data of scripts/train.py; choices between two answers apart."""
    seq_len: Number = option(None, least=1)
    """Tokens of a row. none: as the run had it, else 2048, or the model's if that is less."""
    rows: Count = option(8, least=1)
    """Rows of each data shard computed together."""
    answers: Annotated[str | None, optional(str, "all|last")] = None
    """Which of the assistant's messages in a conversation count. none: as the run had it, or all."""
    text_field: Name = None
    """The field of a JSONL object that holds the text. none: as the run had it, or found by looking."""
    json: bool = False
    """Print JSON: loss, weight (trained tokens), and what the loss reports besides, such as correct."""

    def run(self) -> int:
        need("train")
        if not self.data:
            raise ValueError("give the data by --data PATH")
        from jfsdp.trainer.run.evaluate import make_evaluator

        opened = self.open()
        job, model, theirs = opened.job, opened.model, opened.config
        config = DataConfig(
            self.data,
            seq_len=self.seq_len or theirs.seq_len or min(job.seq_len, _SEQ_LEN),
            tokenizer=theirs.tokenizer or "byte",
            chat_template=theirs.chat_template,
            eod_token=theirs.eod_token,
            answers=self.answers or theirs.answers,
            text_field=self.text_field or theirs.text_field,
            documents_per_row=job.documents_per_row,
            eval_fraction=0,
        )
        data = open_data(config, vocab_size=job.vocab_size)
        given = ("chat_template", "answers", "text_field")
        data.check_used([name for name in given if getattr(self, name) is not None])  # the run's may be of other data
        if data.form == "pairs":
            raise ValueError(f"--data {self.data}: are choices between two answers; a run with --preference shows them")
        print(f"{opened.description}; {data.found}", file=sys.stderr)
        rows = self.rows * num_data_shards(dict(model.layout.mesh_sizes))

        def batches() -> Iterator[Any]:
            with contextlib.closing(make_pass_iterator(data, data.train, batch_size=rows)) as iterator:
                yield from iterator

        found = make_evaluator(model, job.eval_loss or job.loss, batches)(opened.state)
        if self.json:
            print(json.dumps({"loss": found.loss, "weight": found.weight, **found.aux}))
            return 0
        correct = f", accuracy {100 * found.aux['correct']:.2f} %" if "correct" in found.aux else ""
        print(f"loss {found.loss:.4f} nats per token{correct}, of {found.weight:,.0f} tokens")
        return 0
