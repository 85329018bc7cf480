"""`jfsdp data`: show training data as the trainer reads it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Annotated, Any

import numpy as np
import tyro
from rich.text import Text

from jfsdp.cli.console import Reporting, make_console, print_wrapped
from jfsdp.extras import need
from jfsdp.trainer.data.documents import INPUT, PADDING, START, TARGET, TRAINED
from jfsdp.trainer.data.tokens import DataConfig, open_data
from jfsdp.trainer.display import harmless
from jfsdp.trainer.help_groups import option
from jfsdp.trainer.options import Count, Location, Name

_DATA = tyro.conf.arg(metavar="DATA", help="As --data of scripts/train.py: file, directory or glob.")


@dataclasses.dataclass(frozen=True)
class Show(Reporting):
    """Show documents and conversations with the trained tokens highlighted, and the counts of all records.

    If the output is not a terminal, trained tokens are between [[ and ]]. The JSON has the tokens of each example, and
    1 or 0 for each trained or untrained token. All records are read and checked, as when
    scripts/train.py starts. Exit status 2 for the first record that cannot be trained on.
    """

    data: tyro.conf.Positional[Annotated[str, _DATA]]
    tokenizer: Annotated[str, tyro.conf.arg(metavar="byte|PATH")] = "byte"
    """byte, or the path of a tokenizer.json or of its directory."""
    seq_len: Count = 2048
    """Tokens per row. Longer examples are truncated."""
    num: Annotated[Count, tyro.conf.arg(aliases=["-n"])] = option(3, least=0)
    """Number of examples to show. 0: only the counts."""
    start: Count = option(0, least=0)
    """First example to show, counted from 0."""
    chat_template: Location = None
    """File with the jinja template of conversations, or the name of one of the tokenizer's templates. none: the
    tokenizer's template."""
    answers: Annotated[str, tyro.conf.arg(metavar="all|last")] = "all"
    """Which of the assistant's messages in a conversation to train on."""
    eod_token: Name = None
    """Token of a tokenizer.json that ends a document. none: a well-known one, or eos_token of its configuration."""
    text_field: Name = None
    """Field of a JSONL object that contains the text. none: detected from the objects."""

    def run(self) -> int:
        need("train")
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("num", "start", "json")]
        data = open_data(DataConfig(eval_fraction=0, **{name: getattr(self, name) for name in names}))
        data.check_used()
        shown = range(min(self.start, len(data.train)), min(self.start + self.num, len(data.train)))
        answers = (" (chosen)", " (rejected)") if data.form == "pairs" else ("",)
        examples = [(data.train.place(i) + mark, *one) for i in shown for mark, one in zip(answers, _examples(data, i))]
        rows = [{"place": place, "tokens": t.tolist(), "trained": m.tolist()} for place, t, m in examples]
        self.report({"found": data.found.split("\n  "), "examples": rows}, lambda: _print(data, examples))
        return 0


def _examples(data: Any, index: int) -> list[tuple[Any, Any]]:
    """Return the tokens [n + 1] of each example of a document, and whether each is trained."""
    pairs = data.train[index]
    found = []
    for one in pairs if pairs.ndim == 3 else [pairs]:
        real = one[one[:, START] != PADDING]
        tokens = np.concatenate([real[:1, INPUT], real[:, TARGET]])
        found.append((tokens, np.concatenate([[0], real[:, TRAINED]])))
    return found


def _print(data: Any, examples: Sequence[tuple[str, Any, Any]]) -> None:
    for place, tokens, trained in examples:
        _print_example(place, data.tokenizer, tokens, trained)
    print_wrapped(data.found)


def _print_example(place: str, tokenizer: Any, tokens: Any, trained: Any) -> None:
    console = make_console()
    console.print(f"--- {place}: {len(tokens)} tokens, {int(trained.sum())} trained")
    text = Text()
    for run in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(trained)) + 1):
        ids, is_trained = tokens[run], bool(trained[run[0]])
        decoded = harmless(" ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, special=True))
        marked = decoded if console.is_terminal or not is_trained else f"[[{decoded}]]"
        text.append(marked, style="bold green" if is_trained else "dim")
    console.print(text, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Data:
    """Show training data as the trainer reads it."""


DATA_COMMANDS = {"show": Show}
