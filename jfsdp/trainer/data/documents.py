"""Documents as (input, target) pairs, read and tokenized on access, and counts over all records."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import threading
from collections.abc import Callable, Sequence

import numpy as np

from jfsdp.trainer.data.corpus import Corpus, Document
from jfsdp.trainer.data.examples import Example, Examples
from jfsdp.trainer.data.tokenizer import Tokenizer

# [Note: pairs] A document d0 d1 .. dn becomes inputs [eod d0 d1 .. dn] and targets [d0 d1 .. dn eod]. Because the shift
# comes before packing, rows can be cut anywhere, and every target is the next token of the same document. Every token
# is a target exactly once, and the first one is predicted from the separator, as in generation. Concatenated inputs are
# the stream "eod document eod document ..", and each target is the next input, so cross_documents uses the same pairs.
# Column 2 is 1 at the start of a document or of a piece of a file. Column 3 is 1 if the target is trained; in
# conversations and other records these are only tokens of answers.
INPUT, TARGET, START, TRAINED = COLUMNS = range(4)
PADDING = -1  # in the START column


class Documents:
    """A sequence of documents as int32 [n, 4] arrays of (input, target, start, trained); read and tokenized on access.

    See [Note: pairs]. A pair of answers is [2, seq_len, 4], padded. Memory: 8 bytes per document, and the corpus.

    Args:
      tokenizer: None for token files.
      examples: encoder of records; None: documents are texts or tokens.
      vocab_size: upper bound of ids; None: no check.
      first: number of the corpus's first document among all sources.
    """

    def __init__(
        self,
        corpus: Corpus,
        tokenizer: Tokenizer | None,
        examples: Examples | None,
        vocab_size: int | None,
        first: int = 0,
    ):
        self._corpus, self._tokenizer, self._vocab_size, self._first = corpus, tokenizer, vocab_size, first
        self.examples, self._indices = examples, np.arange(len(corpus))

    def select(self, indices: np.ndarray) -> Documents:
        """Return the documents at these indices."""
        chosen = copy.copy(self)
        chosen._indices = self._indices[indices]
        return chosen

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, index: int) -> str:
        """Return "path@offset"."""
        return self._corpus.name(int(self._indices[index]))

    def place(self, index: int) -> str:
        """Return "path, line N", or "path at offset" for files other than JSONL."""
        return self._corpus.place(int(self._indices[index]))

    def number(self, index: int) -> int:
        """Return the number of a document among all sources, counted from 0."""
        return self._first + int(self._indices[index])

    def __getitem__(self, index: int) -> np.ndarray:
        """Read and tokenize one document.

        Raises:
          ValueError: as `Corpus.read` and `Examples.encode`, and if an id is beyond the vocabulary.
        """
        if self.examples is None:
            document = self._corpus.read(int(self._indices[index]))
            return self._pairs(self._tokens(document), index)
        found = [self._pairs(one.tokens, index, one.trained) for one in self.read_examples(index)]
        if len(found) == 1:
            return found[0]
        pairs = np.zeros((len(found), self.examples.seq_len, len(COLUMNS)), np.int32)
        pairs[:, :, START] = PADDING
        for row, one in zip(pairs, found, strict=True):
            row[: len(one)] = one
        return pairs

    def read_examples(self, index: int) -> list[Example]:
        """Return the examples of a record.

        Raises:
          ValueError: as `Examples.encode`; names the line.
        """
        assert self.examples is not None
        record = self._corpus.read(int(self._indices[index])).content
        try:
            return self.examples.encode(record)  # type: ignore[arg-type]
        except ValueError as error:
            raise ValueError(f"{self.place(index)}: {error}") from error

    def _pairs(self, tokens: np.ndarray, index: int, trained: np.ndarray | None = None) -> np.ndarray:
        self._check_ids(tokens, index)
        pairs = np.ones((len(tokens) - 1, len(COLUMNS)), np.int32)
        pairs[:, INPUT], pairs[:, TARGET] = tokens[:-1], tokens[1:]
        token_format = self._corpus.token_format
        eod_id = token_format.eod_id if token_format else None
        pairs[1:, START] = 0 if eod_id is None else pairs[1:, INPUT] == eod_id
        if trained is not None:
            pairs[:, TRAINED] = trained[1:]
        return pairs

    def _tokens(self, document: Document) -> np.ndarray:
        if not isinstance(document.content, str):
            return document.content  # type: ignore[return-value]
        assert self._tokenizer is not None
        eod = np.array([self._tokenizer.eod_id], np.int32)
        text = self._tokenizer.encode(document.content)
        return np.concatenate([eod[: document.starts], text, eod[: document.ends]])

    def _check_ids(self, tokens: np.ndarray, index: int):
        limit = self._vocab_size or 2**31
        if len(tokens) and (largest := int(tokens.max())) >= limit:
            raise ValueError(
                f"{self.name(index)}: token id {largest} is not below the vocabulary size {limit}; give the model a "
                "larger vocabulary, use its tokenizer, or check the dtype in the sidecar of a token file"
            )


class Joined:
    """Concatenated documents of several sources."""

    def __init__(self, parts: Sequence[Documents]):
        self.parts = tuple(parts)
        self._ends = np.cumsum([len(part) for part in parts])

    def __len__(self) -> int:
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> np.ndarray:
        part, place = self._find(index)
        return part[place]

    def place(self, index: int) -> str:
        """Return "path, line N", or "path at offset" for files other than JSONL."""
        part, place = self._find(index)
        return part.place(place)

    def _find(self, index: int) -> tuple[Documents, int]:
        part = int(np.searchsorted(self._ends, index, side="right"))
        return self.parts[part], index - (int(self._ends[part - 1]) if part else 0)


@dataclasses.dataclass
class Survey:
    """Counts over all records of a source; `str` gives one line.

    Attributes:
      form: form of the records.
      seq_len: tokens of a row, to which examples are truncated.
      num_tokens: all tokens, before truncation.
      num_trained: trained tokens per epoch.
      num_packed: targets per epoch, trained or not, after truncation.
      longest: tokens of the longest example.
      num_cut, num_cut_tokens: number of truncated examples, and of the trained tokens removed from them.
      num_left_out: records omitted because an answer was removed entirely.
      left_out: position of the first of these.
      unread: fields that are not used; see `Examples`.
    """

    form: str
    seq_len: int
    num_tokens: int = 0
    num_trained: int = 0
    num_packed: int = 0
    longest: int = 0
    num_cut: int = 0
    num_cut_tokens: int = 0
    num_left_out: int = 0
    left_out: str = ""
    unread: Sequence[str] = ()

    def __str__(self) -> str:
        line = (
            f"records of form {self.form}: {self.num_trained:,} of {self.num_tokens:,} tokens are trained, the longest "
            f"example has {self.longest:,}"
        )
        if self.form != "pairs":
            line += f"; they fill about {-(-self.num_packed // self.seq_len):,} rows of {self.seq_len:,} tokens"
        if self.num_cut:
            line += f"; {self.num_cut:,} are cut at {self.seq_len:,}, with {self.num_cut_tokens:,} tokens of answers"
        if self.num_left_out:
            line += f"; {self.num_left_out:,} are left out, because all of an answer is cut (first: {self.left_out})"
        line += "; raise --seq-len to cut none" if self.num_cut else ""
        unread = [f"{one} (--text-field text trains it)" if one == "text" else one for one in self.unread]
        return line + (f"; fields not read: {', '.join(unread)}" if unread else "")


def survey_examples(documents: Documents) -> tuple[np.ndarray, Survey]:
    """Read all records. Return whether each can be trained, bool [len(documents)], and the counts.

    Raises:
      ValueError: for the first invalid record; see `Examples.encode`.
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
            survey.num_packed += sum(len(one.tokens) - 1 for one in examples)
        else:
            kept[index] = False
            survey.num_left_out += 1
            survey.left_out = survey.left_out or documents.place(index)
    survey.unread = sorted(documents.examples.unread)
    return kept, survey


MOST_SECONDS = 20.0


def _check_time(read: Callable[[], object], place: str) -> None:
    """Check in a separate thread that the chat template renders the first record in time, without an endless loop."""

    def run() -> None:
        with contextlib.suppress(ValueError):  # raised again when all records are read
            read()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(MOST_SECONDS)
    if thread.is_alive():
        raise ValueError(
            f"{place}: took over {MOST_SECONDS:.0f} s to render and tokenize; if its chat template loops forever, "
            "repair it, or give another by --chat-template"
        )
