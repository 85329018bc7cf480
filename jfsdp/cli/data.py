"""`jfsdp data`: what a run would be trained on, as it is read."""

from __future__ import annotations

import dataclasses
import json
from typing import Annotated, Any

import numpy as np
import tyro
from rich.text import Text

from jfsdp.cli.console import make_console
from jfsdp.extras import need
from jfsdp.trainer.data.documents import INPUT, PADDING, START, TARGET, TRAINED
from jfsdp.trainer.data.tokens import DataConfig, open_data
from jfsdp.trainer.display import harmless
from jfsdp.trainer.help_groups import Options, option
from jfsdp.trainer.options import Count, Location, Name

_DATA = tyro.conf.arg(metavar="DATA", help="As --data of scripts/train.py: a file, a directory, a glob.")


@dataclasses.dataclass(frozen=True)
class Show(Options):
    """Show documents and conversations as they are trained on: the trained tokens in colour, and the counts of all.

    Where the output is no terminal, what is trained stands between [[ and ]]. All records are read and checked, as by
    scripts/train.py at its start; exit status 2 for the first that cannot be trained on.
    """

    data: tyro.conf.Positional[Annotated[str, _DATA]]
    tokenizer: Annotated[str, tyro.conf.arg(metavar="byte|PATH")] = "byte"
    """byte, or the path of a tokenizer.json or of its directory."""
    seq_len: Count = 2048
    """Tokens of a row, at which examples are cut."""
    num: Annotated[Count, tyro.conf.arg(aliases=["-n"])] = option(3, least=0)
    """How many to show, from the first on. 0: only the counts."""
    start: Count = option(0, least=0)
    """The first to show, counted from 0."""
    chat_template: Location = None
    """A file with the jinja template of conversations, or one of the tokenizer's by name. none: the tokenizer's own."""
    answers: Annotated[str, tyro.conf.arg(metavar="all|last")] = "all"
    """Which of the assistant's messages in a conversation are trained."""
    eod_token: Name = None
    """The token of a tokenizer.json that ends a document. none: a known one, or eos_token of its configuration."""
    text_field: Name = None
    """The field of a JSONL object that holds the text. none: what an object holds is found by looking."""
    json: bool = False
    """Print JSON: of each example its tokens, and of each token whether it is trained (1) or not."""

    def run(self) -> int:
        need("train")
        names = [field.name for field in dataclasses.fields(self) if field.name not in ("num", "start", "json")]
        data = open_data(DataConfig(eval_fraction=0, **{name: getattr(self, name) for name in names}))
        data.check_used()
        shown = range(min(self.start, len(data.train)), min(self.start + self.num, len(data.train)))
        answers = (" (chosen)", " (rejected)") if data.form == "pairs" else ("",)
        examples = [
            (data.train.place(i) + which, *one) for i in shown for which, one in zip(answers, _examples(data, i))
        ]
        if self.json:
            rows = [{"place": place, "tokens": t.tolist(), "trained": m.tolist()} for place, t, m in examples]
            print(json.dumps({"found": data.found.split("\n  "), "examples": rows}))
            return 0
        for place, tokens, trained in examples:
            _print(place, data.tokenizer, tokens, trained)
        print(data.found)
        return 0


def _examples(data: Any, index: int) -> list[tuple[Any, Any]]:
    """Return tokens [n + 1] and whether each is trained, of each example of a document."""
    pairs = data.train[index]
    found = []
    for one in pairs if pairs.ndim == 3 else [pairs]:
        real = one[one[:, START] != PADDING]
        tokens = np.concatenate([real[:1, INPUT], real[:, TARGET]])
        found.append((tokens, np.concatenate([[0], real[:, TRAINED]])))
    return found


def _print(place: str, tokenizer: Any, tokens: Any, trained: Any) -> None:
    console = make_console()
    console.print(f"--- {place}: {len(tokens)} tokens, {int(trained.sum())} trained")
    text = Text()
    for run in np.split(np.arange(len(tokens)), np.flatnonzero(np.diff(trained)) + 1):
        ids, is_trained = tokens[run], bool(trained[run[0]])
        said = " ".join(map(str, ids)) if tokenizer is None else tokenizer.decode(ids, special=True)
        said = harmless(said)
        marked = said if console.is_terminal or not is_trained else f"[[{said}]]"
        text.append(marked, style="bold green" if is_trained else "dim")
    console.print(text, soft_wrap=True)


@dataclasses.dataclass(frozen=True)
class Data:
    """Look at data as a run is trained on them."""


DATA_COMMANDS = {"show": Show}
