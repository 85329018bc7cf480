"""`jfsdp evaluate`: compute the loss of a trained model on data."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from typing import Annotated, Any

import tyro

from jfsdp.cli.console import Reporting
from jfsdp.cli.load_options import OpenOptions
from jfsdp.extras import need
from jfsdp.layout.mesh import num_data_shards
from jfsdp.trainer.data.pipeline import make_pass_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Name, Number, optional

_SEQ_LEN = 2048


@dataclasses.dataclass(frozen=True)
class Evaluate(Reporting, OpenOptions):
    """Print the loss of a model on data. For conversations and completions, only the answers' tokens count.

    All documents are evaluated, each token once, without dropout. Longer documents than a row are truncated as in
    training, and the first line reports how much. The JSON has loss, weight (trained tokens), and other metrics of the
    loss, such as correct.
    """

    data: Annotated[str, tyro.conf.arg(metavar="PATH")] = ""
    """As --data of scripts/train.py, but without choices between two answers."""
    seq_len: Number = option(None, least=1)
    """Tokens per row. none: the run's value, else 2048, or the model's if that is less."""
    rows: Count = option(8, least=1)
    """Rows per data shard and batch."""
    answers: Annotated[str | None, optional(str, "all|last")] = None
    """Which of the assistant's messages in a conversation count. none: the run's value, or all."""
    text_field: Name = None
    """Field of a JSONL object that contains the text. none: the run's value, or detected from the objects."""

    def run(self) -> int:
        need("train")
        if not self.data:
            raise ValueError("no data is given; pass --data PATH")
        from jfsdp.trainer.run.evaluate import make_evaluator

        opened = self.open()
        job, model, stored = opened.job, opened.model, opened.config
        config = DataConfig(
            self.data,
            seq_len=self.seq_len or stored.seq_len or min(job.seq_len, _SEQ_LEN),
            tokenizer=stored.tokenizer or "byte",
            chat_template=stored.chat_template,
            eod_token=stored.eod_token,
            answers=self.answers or stored.answers,
            text_field=self.text_field or stored.text_field,
            documents_per_row=job.documents_per_row,
            eval_fraction=0,
        )
        data = open_data(config, vocab_size=job.vocab_size)
        given = ("chat_template", "answers", "text_field")  # the run's values may be for other data
        data.check_used([name for name in given if getattr(self, name) is not None])
        if data.form == "pairs":
            raise ValueError(
                f"--data {self.data}: contains choices between two answers; evaluate them in a run with --preference"
            )
        print(f"{opened.description}; {data.found}", file=sys.stderr)
        rows = self.rows * num_data_shards(dict(model.layout.mesh_sizes))

        def batches() -> Iterator[Any]:
            with contextlib.closing(make_pass_iterator(data, data.train, batch_size=rows)) as iterator:
                yield from iterator

        found = make_evaluator(model, job.eval_loss or job.loss, batches)(opened.state)
        correct = f", accuracy {100 * found.aux['correct']:.2f} %" if "correct" in found.aux else ""
        text = f"loss {found.loss:.4f} nats per token{correct}, of {found.weight:,.0f} tokens"
        self.report({"loss": found.loss, "weight": found.weight, **found.aux}, lambda: print(text))
        return 0
