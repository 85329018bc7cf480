"""What a look at all records finds: how much is trained, cut and left out."""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jfsdp.trainer.data.documents import Documents

_MOST_SECONDS = 20.0


@dataclasses.dataclass
class Survey:
    """Counts over all records of a source; printing it gives one line.

    Attributes:
      form: of the records.
      num_tokens: of all of them, before any is cut.
      num_trained: tokens that are trained on once per epoch.
      longest: tokens of the longest example.
      seq_len: tokens of a row, at which examples are cut.
      num_cut, num_cut_tokens: examples longer than that, and the trained tokens that they lost by it.
      num_left_out: records that lost an answer whole, and are not trained on.
      left_out: where the first of these stands.
      unread: fields that nothing is made of; see `Examples`.
    """

    form: str
    seq_len: int
    num_tokens: int = 0
    num_trained: int = 0
    longest: int = 0
    num_cut: int = 0
    num_cut_tokens: int = 0
    num_left_out: int = 0
    left_out: str = ""
    unread: Sequence[str] = ()

    def __str__(self) -> str:
        line = (
            f"records of form {self.form}: {self.num_trained:,} of {self.num_tokens:,} tokens are trained, the longest "
            f"has {self.longest:,}"
        )
        if self.num_cut:
            line += f"; {self.num_cut:,} are cut at {self.seq_len:,}, with {self.num_cut_tokens:,} tokens of answers"
        if self.num_left_out:
            line += f"; {self.num_left_out:,} left out, whose answer was cut off whole (first: {self.left_out})"
        line += "; raise --seq-len to cut none" if self.num_cut else ""
        unread = [f"{one} (--text-field text trains it)" if one == "text" else one for one in self.unread]
        return line + (f"; fields not read: {', '.join(unread)}" if unread else "")


def survey_examples(documents: Documents) -> tuple[np.ndarray, Survey]:
    """Read all records; return which of them can be trained on, bool [len(documents)], and the counts.

    Raises:
      ValueError: for the first record that cannot be understood; see `Examples.encode`.
    """
    assert documents.examples is not None
    survey = Survey(documents.examples.form, documents.examples.seq_len)
    kept = np.ones(len(documents), bool)
    _check_time(lambda: documents[0], documents.place(0))
    for index in range(len(documents)):
        examples = documents.read_examples(index)
        for one in examples:
            survey.num_tokens += one.num_tokens
            survey.longest = max(survey.longest, one.num_tokens)
            survey.num_cut += one.num_tokens > len(one.tokens)
            survey.num_cut_tokens += one.num_cut
        if all(one.trained[1:].any() for one in examples):
            survey.num_trained += sum(int(one.trained[1:].sum()) for one in examples)
        else:
            kept[index] = False
            survey.num_left_out += 1
            survey.left_out = survey.left_out or documents.place(index)
    survey.unread = sorted(documents.examples.unread)
    return kept, survey


def _check_time(read: Callable[[], object], place: str) -> None:
    """Refuse a chat template that loops for ever: try the first record in a thread of its own."""

    def run() -> None:
        with contextlib.suppress(ValueError):  # comes again below, and is said there
            read()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(_MOST_SECONDS)
    if thread.is_alive():
        raise ValueError(
            f"{place}: took over {_MOST_SECONDS:.0f} s to render and tokenize; its chat template may loop for ever: "
            "repair it, or give another by --chat-template"
        )
