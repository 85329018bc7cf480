"""Tokenized data of a run: sources, tokenizer, and the split into training and held-out documents."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np

from jfsdp.trainer.data.chat import load_template
from jfsdp.trainer.data.corpus import Corpus, open_corpus
from jfsdp.trainer.data.documents import COLUMNS, Documents, Joined, survey_examples
from jfsdp.trainer.data.examples import ANSWERS, Examples
from jfsdp.trainer.data.tokenizer import Tokenizer, load_tokenizer

MAX_SHUFFLED_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """Options of the data.

    Attributes:
      data: "stdlib" (Python's own sources), a directory, a file, or a glob; see `open_corpus` for formats of files. Or
        several of these with weights: with "a.jsonl:0.7,b.jsonl:0.3", 7 of 10 documents are from the first.
      seq_len: tokens per row, T.
      tokenizer: "byte", or the path of a `tokenizer.json`. Token files (`*.bin`) ignore it.
      eod_token: end-of-document token of the tokenizer.json; default: see `load_tokenizer`.
      text_field: field of a JSONL object that contains the text; None: the fields decide the form (`FORMS`).
      max_document_bytes: length above which files are cut into pieces.
      eval_fraction: fraction of the documents to hold out.
      eval_data: separate data for evaluation, as `data`; `eval_fraction` must be 0 then.
      split_seed: seed of the split. It differs from `seed`, so that runs with other seeds have the same held-out text.
      cross_documents: False: a token attends only to its document. True: a row is one segment of the concatenated
        stream.
      seed: seed of the order of documents and rows.
      documents_per_row: largest number of documents of a row, including padding; the row is padded instead of another
        document. None: no limit. Has no effect with `cross_documents`.
      shuffle_rows: window in which training rows are shuffled; 0: consecutive rows of a document stay together.
      chat_template: file of the chat template, or the name of one of the tokenizer's; None: the tokenizer's.
      answers: "all" or "last": the assistant's messages to train on.
    """

    data: str
    seq_len: int = 1024
    tokenizer: str = "byte"
    eod_token: str | None = None
    text_field: str | None = None
    max_document_bytes: int = 65536
    eval_fraction: float = 0.05
    eval_data: str | None = None
    split_seed: int = 0
    cross_documents: bool = False
    seed: int = 0
    shuffle_rows: int = 1024
    documents_per_row: int | None = None
    chat_template: str | None = None
    answers: str = "all"

    def __post_init__(self):
        if not self.data:
            raise ValueError("data='': is empty; give a directory, a file or a glob")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction}: must be at least 0 and below 1")
        if self.eval_data is not None and self.eval_fraction:
            raise ValueError(
                f"eval_fraction={self.eval_fraction}: eval_data={self.eval_data!r} is for evaluation; set it to 0"
            )
        if self.documents_per_row is not None and self.documents_per_row < 2:
            raise ValueError(f"documents_per_row={self.documents_per_row}: must be at least 2, or None for any number")
        if self.shuffle_rows < 0:
            raise ValueError(f"shuffle_rows={self.shuffle_rows}: must be 0 (no shuffling of rows) or more")
        if self.answers not in ANSWERS:
            raise ValueError(f"answers={self.answers!r}: must be one of {', '.join(ANSWERS)}")
        if 4 * len(COLUMNS) * self.shuffle_rows * self.seq_len > MAX_SHUFFLED_BYTES:
            raise ValueError(
                f"shuffle_rows={self.shuffle_rows} rows of seq_len={self.seq_len} take over "
                f"{MAX_SHUFFLED_BYTES:,} bytes; lower one of them"
            )


@dataclasses.dataclass(frozen=True)
class TokenData:
    """Tokenized documents of one or several sources, split for training and evaluation.

    Attributes:
      config: its configuration.
      found: counts of files and documents, one line per source, to print.
      tokenizer: None for token files.
      train: training documents.
      eval: held-out documents; empty if `eval_fraction` is 0.
      weights: fraction of training documents from each of `train.parts`.
      form: "pairs" for pairs of answers, "text" if all sources are texts, else "answers".
      digest: hash of the contents of all sources.
      encoding: meaning of the ids: the name of the tokenizer, or the format of the token files.
      has_conversations: whether a chat template was needed.
      has_records: whether a file is JSONL.
    """

    config: DataConfig
    found: str
    tokenizer: Tokenizer | None
    train: Joined
    eval: Joined
    weights: tuple[float, ...]
    form: str
    digest: str
    encoding: str
    has_conversations: bool
    has_records: bool

    def check_used(self, names: Collection[str] | None = None) -> None:
        """Check that no option is set that has no effect on these data.

        Args:
          names: options to check; None: all.

        Raises:
          ValueError: naming the option.
        """
        conversations = "conversations", self.has_conversations
        uses = {
            "chat_template": conversations,
            "answers": conversations,
            "eod_token": ("text", self.tokenizer is not None),
            "text_field": ("JSONL", self.has_records),
        }
        for name in uses if names is None else names:
            (what, is_there), value = uses[name], getattr(self.config, name)
            if not is_there and value != getattr(DataConfig, name):
                raise ValueError(f"{name}={value!r} is for {what}, but the data have none; leave it out")


def open_data(config: DataConfig, *, vocab_size: int | None = None) -> TokenData:
    """Open the sources of data, with their tokenizer and their split.

    The split is by document (or piece of a file). Of each source, the `round(eval_fraction * n)` documents, at least
    one, with the smallest hash of path, offset and `split_seed` are held out. It depends on nothing else, so it is
    equal in every process. The path is relative to the source, so a corpus may move.

    All records of conversations, completions and pairs are read once to find invalid ones, and to count truncated and
    omitted ones; see `Survey`.

    Cost: see `open_corpus`; records are also rendered and tokenized. Moves no data to devices.

    Args:
      config: see `DataConfig`.
      vocab_size: the model's number of ids. A tokenizer with larger ids raises here, a token file when it is read.

    Raises:
      ValueError: as `open_corpus`, `load_tokenizer` and `Examples.encode`; if the tokenizer has more ids than the
        model, sources cannot be combined, or there are too few documents to hold one out.
    """
    sources = split_sources(config.data)
    options = {"text_field": config.text_field, "max_document_bytes": config.max_document_bytes}
    sources += [] if config.eval_data is None else [(config.eval_data, 0.0)]
    corpora = [_open_corpus("data" if weight else "eval_data", source, options) for source, weight in sources]
    tokenizer, encoding = _open_encoding(config, corpora, vocab_size)
    found, trained, held_out, first, has_conversations = [], [], [], 0, False
    for (source, weight), corpus in zip(sources, corpora, strict=True):
        examples = None if corpus.form == "text" else _open_examples(corpus.form, tokenizer, config)
        documents, line = Documents(corpus, tokenizer, examples, vocab_size, first), str(corpus.stats)
        kept = np.ones(len(corpus), bool)
        if examples is not None:
            kept, survey = survey_examples(documents)
            line, encoding = f"{line}; {survey}", f"{encoding}:{examples.digest}"
            has_conversations |= examples.has_conversations
        first += len(corpus)
        if not weight:
            found, held_out = [*found, f"for evaluation: {line}"], [documents.select(np.flatnonzero(kept))]
            continue
        train, evaluated = (documents.select(part[kept[part]]) for part in _split(corpus, config, source))
        if not len(train):
            raise ValueError(f"data {source!r}: none of its {len(corpus)} documents is left to train on; {line}")
        found, trained, held_out = [*found, line], [*trained, train], [*held_out, evaluated]
    weights = [weight for _, weight in sources if weight]
    digests = [corpus.digest for corpus, (_, weight) in zip(corpora, sources, strict=True) if weight]
    digest = digests[0] if len(digests) == 1 else f"{list(zip(digests, weights, strict=True))}"
    return TokenData(
        config,
        "\n  ".join(found),
        tokenizer,
        Joined(trained),
        Joined(held_out),
        tuple(weight / sum(weights) for weight in weights),
        _one_form([corpus.form for corpus in corpora]),
        digest,
        encoding,
        has_conversations,
        any(corpus.has_records for corpus in corpora),
    )


def split_sources(data: str) -> list[tuple[str, float]]:
    """Return the sources of `data` with their weights: "a.jsonl:0.7,b.jsonl:0.3", or one source without a weight.

    Raises:
      ValueError: for a weight that is not positive.
    """
    parts = [re.fullmatch(r"(.+):([0-9.eE+-]+)", part) for part in data.split(",")]
    if Path(data).exists() or not any(parts) or (len(parts) == 1 and not all(parts)):
        return [(data, 1.0)]
    if not all(parts):
        raise ValueError(f"data {data!r}: every source needs a weight, as in 'a.jsonl:0.7,b.jsonl:0.3'")
    return [(part[1].strip(), _weight(part[2], data)) for part in parts if part]


def _open_corpus(name: str, source: str, options: dict[str, Any]) -> Corpus:
    """Open a source, with the name of its option in errors."""
    try:
        return open_corpus(source, **options)
    except ValueError as error:
        raise ValueError(f"{name} {str(error).removeprefix('data ')}") from error


def _weight(text: str, data: str) -> float:
    try:
        weight = float(text)
    except ValueError:
        weight = 0.0
    if not 0 < weight < math.inf:
        raise ValueError(f"data {data!r}: weight {text} must be a positive number, as in 'a.jsonl:0.7,b.jsonl:0.3'")
    return weight


def _open_encoding(config: DataConfig, corpora: list[Corpus], vocab_size: int | None) -> tuple[Tokenizer | None, str]:
    """Return the tokenizer of all sources, and the meaning of their ids."""
    formats = {corpus.token_format for corpus in corpora}
    if len(formats) > 1:
        raise ValueError(
            f"data {config.data!r}: token files cannot be combined with text or other formats "
            f"({'; '.join(map(str, formats))}); write all of them with one tokenizer and dtype"
        )
    (token_format,) = formats
    tokenizer = None if token_format else load_tokenizer(config.tokenizer, eod_token=config.eod_token)
    needed = tokenizer.vocab_size if tokenizer else token_format and token_format.vocab_size
    if needed and vocab_size and needed > vocab_size:
        what = f"tokenizer {config.tokenizer!r}" if tokenizer else f"data {config.data!r}"
        raise ValueError(
            f"{what}: token ids go up to {needed - 1}, beyond the model's "
            f"vocabulary size {vocab_size}; use the model's tokenizer, or, without --init-from, a vocabulary size of "
            f"at least {needed} (--model-config vocab_size={needed}); embeddings of --init-from are not resized"
        )
    return tokenizer, tokenizer.name if tokenizer else str(token_format)


def _open_examples(form: str, tokenizer: Tokenizer | None, config: DataConfig) -> Examples:
    assert tokenizer is not None
    if config.cross_documents:
        raise ValueError(
            f"data {config.data!r}: cross_documents joins texts, but these are records of form {form}; leave it out"
        )
    load = functools.partial(load_template, config.tokenizer, config.chat_template)
    return Examples(tokenizer, load, form, answers=config.answers, seq_len=config.seq_len)


def _one_form(forms: list[str]) -> str:
    if "pairs" in forms and len(set(forms)) > 1:
        raise ValueError(
            "data: pairs of answers cannot be mixed with other forms, but the sources are of forms "
            f"{', '.join(forms)}; train on them in separate runs"
        )
    return forms[0] if forms[0] in ("pairs", "text") and len(set(forms)) == 1 else "answers"


def _split(corpus: Corpus, config: DataConfig, source: str) -> tuple[np.ndarray, np.ndarray]:
    if config.eval_fraction == 0:
        return np.arange(len(corpus)), np.arange(0)
    num_eval = max(1, round(config.eval_fraction * len(corpus)))
    if num_eval >= len(corpus):
        raise ValueError(
            f"data {source!r}: eval_fraction={config.eval_fraction} of {len(corpus)} documents leaves none to "
            "train on; lower it, set it to 0, or add documents"
            + (f" (a file is cut into documents of {config.max_document_bytes} bytes)" if corpus.form == "text" else "")
        )
    order = np.argsort(corpus.order_keys(config.split_seed), kind="stable")
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])
