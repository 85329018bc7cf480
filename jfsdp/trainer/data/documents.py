"""Documents as (input, target) pairs, and their split into training and held-out ones."""

from __future__ import annotations

import dataclasses
import os

import numpy as np

from jfsdp.trainer.data.corpus import Corpus, CorpusStats, open_corpus
from jfsdp.trainer.data.tokenizer import Tokenizer, load_tokenizer

# [Note: pairs] A document d0 d1 .. dn becomes inputs [eod d0 d1 .. dn] and targets [d0 d1 .. dn eod]: shifted before it
# is packed, it can be cut anywhere and every target is still the true next token of the same document. Every token is a
# target exactly once, and the first one is predicted from the separator, as at generation. Laid end to end the inputs
# are the stream "eod document eod document ..", and each target is the next input: the same pairs serve
# cross_documents. Column 2 is 1 where a document, or a piece of a file that was cut, begins.
INPUT, TARGET, START = range(3)
MAX_SHUFFLED_BYTES = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


@dataclasses.dataclass(frozen=True)
class DataConfig:
    """What to train on: plain fields, made for a command line.

    Attributes:
      data: "stdlib" (Python's own sources), a directory, a file, or a glob; see `open_corpus` for what files may hold.
      seq_len: tokens per example, T.
      tokenizer: "byte", or the path of a `tokenizer.json`. Token files (`*.bin`) ignore it.
      eod_token: end-of-document token of the tokenizer.json; default: see `load_tokenizer`.
      extensions: keep only these files of a directory or glob.
      text_field: field of a JSONL object that holds the text.
      token_dtype: "uint16" or "uint32" for token files without a sidecar.
      eod_id: end-of-document id in token files without a sidecar.
      max_document_bytes: files longer than this are cut into pieces.
      eval_fraction: share of the documents held out; 0 holds out none.
      split_seed: chooses which; apart from `seed`, so that runs with other seeds share the held-out text.
      cross_documents: False: a token sees its own document only. True: a row is one segment of the concatenated stream.
      seed: the order of documents and rows.
      documents_per_row: the most documents of a row, its padding included; the row is padded where it would hold more.
        None: any number. Means nothing where documents are crossed.
      shuffle_rows: rows of a training window that are shuffled among themselves; 0 keeps those of a document together.
    """

    data: str
    seq_len: int = 1024
    tokenizer: str = "byte"
    eod_token: str | None = None
    extensions: tuple[str, ...] = ()
    text_field: str = "text"
    token_dtype: str | None = None
    eod_id: int | None = None
    max_document_bytes: int = 65536
    eval_fraction: float = 0.05
    split_seed: int = 0
    cross_documents: bool = False
    seed: int = 0
    shuffle_rows: int = 1024
    documents_per_row: int | None = None

    def __post_init__(self):
        if self.seq_len < 1:
            raise ValueError(f"seq_len={self.seq_len}: must be at least 1")
        if not 0 <= self.eval_fraction < 1:
            raise ValueError(f"eval_fraction={self.eval_fraction}: must be at least 0 and below 1")
        if self.documents_per_row is not None and self.documents_per_row < 2:
            raise ValueError(f"documents_per_row={self.documents_per_row}: must be at least 2, or None for any number")
        if self.shuffle_rows < 0:
            raise ValueError(f"shuffle_rows={self.shuffle_rows}: must be 0 (no shuffling of rows) or more")
        if 12 * self.shuffle_rows * self.seq_len > MAX_SHUFFLED_BYTES:
            raise ValueError(f"shuffle_rows={self.shuffle_rows} would take over {MAX_SHUFFLED_BYTES:,} bytes; lower it")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed={self.seed}: must be in 0..2**32-1")


class Documents:
    """A sequence of documents as int32 [n, 3] arrays of (input, target, start); read and tokenized on access.

    See [Note: pairs]. Memory: 8 bytes per document, beside the corpus.
    """

    def __init__(self, corpus: Corpus, tokenizer: Tokenizer | None, indices: np.ndarray, vocab_size: int | None):
        self._corpus, self._tokenizer, self._indices, self._vocab_size = corpus, tokenizer, indices, vocab_size

    def __len__(self) -> int:
        return len(self._indices)

    def name(self, index: int) -> str:
        """Return "path@offset"."""
        return self._corpus.name(int(self._indices[index]))

    def __getitem__(self, index: int) -> np.ndarray:
        """Read and tokenize one document.

        Raises:
          ValueError: see `Corpus.read`; and if an id does not fit the vocabulary: names id, document, size and remedy.
        """
        document = self._corpus.read(int(self._indices[index]))
        if isinstance(document.content, str):
            tokens = self._encode(document.content, document.starts, document.ends)
        else:
            tokens = document.content
        self._check_ids(tokens, index)
        pairs = np.zeros((len(tokens) - 1, 3), np.int32)
        pairs[:, INPUT], pairs[:, TARGET] = tokens[:-1], tokens[1:]
        token_format = self._corpus.token_format
        if token_format and token_format.eod_id is not None:
            pairs[:, START] = pairs[:, INPUT] == token_format.eod_id
        pairs[:1, START] = 1
        return pairs

    def _encode(self, text: str, starts: bool, ends: bool) -> np.ndarray:
        assert self._tokenizer is not None
        eod = np.array([self._tokenizer.eod_id], np.int32)
        return np.concatenate([eod[:starts], self._tokenizer.encode(text), eod[:ends]])

    def _check_ids(self, tokens: np.ndarray, index: int):
        limit = self._vocab_size or 2**31
        if len(tokens) and (largest := int(tokens.max())) >= limit:
            raise ValueError(
                f"{self.name(index)}: token id {largest} is not below the vocabulary size {limit}; give the model a "
                "larger vocabulary, or tokenize with its own tokenizer (a wrong token_dtype also looks like this)"
            )


@dataclasses.dataclass(frozen=True)
class TokenData:
    """A tokenized corpus, split in two.

    Attributes:
      config: what it was opened with.
      stats: files and documents found and skipped; print it.
      tokenizer: None for token files.
      train: documents to train on.
      eval: held-out documents; empty if `eval_fraction` is 0.
      digest: hash over the contents of the corpus.
      encoding: what the ids mean: the name of the tokenizer, or the format of the token files.
      vocab_size: one more than the largest id the data may hold; None: not known.
    """

    config: DataConfig
    stats: CorpusStats
    tokenizer: Tokenizer | None
    train: Documents
    eval: Documents
    digest: str
    encoding: str
    vocab_size: int | None


def open_data(config: DataConfig, *, vocab_size: int | None = None) -> TokenData:
    """Open a corpus, its tokenizer and its split.

    The split is by document (a piece, where a file was cut): held out are those `round(eval_fraction * n)`, at least
    one, whose hash of path, offset and `split_seed` is smallest. It depends on nothing else, so it is the same in every
    process. The path is relative to `data`: a corpus may move.

    Cost: see `open_corpus`. Moves no data to devices.

    Args:
      config: see `DataConfig`.
      vocab_size: of the model; ids that do not fit it raise, at once for a tokenizer, when read for token files.

    Raises:
      ValueError: see `open_corpus`, `load_tokenizer`; if the tokenizer has more ids than the model, or there
        are too few documents to hold one out.
    """
    corpus = open_corpus(
        config.data,
        extensions=config.extensions,
        text_field=config.text_field,
        max_document_bytes=config.max_document_bytes,
        token_dtype=config.token_dtype,
        eod_id=config.eod_id,
    )
    token_format = corpus.token_format
    tokenizer = None if token_format else load_tokenizer(config.tokenizer, eod_token=config.eod_token)
    needed = tokenizer.vocab_size if tokenizer else token_format and token_format.vocab_size
    if needed and vocab_size and needed > vocab_size:
        what = f"tokenizer {config.tokenizer!r}" if tokenizer else f"data {config.data!r}"
        raise ValueError(
            f"{what}: token ids go up to {needed - 1}, beyond the model's "
            f"vocabulary size {vocab_size}; set the model's vocabulary size to at least {needed}"
        )
    train, held_out = (Documents(corpus, tokenizer, indices, vocab_size) for indices in _split(corpus, config))
    encoding = tokenizer.name if tokenizer else str(token_format)
    return TokenData(config, corpus.stats, tokenizer, train, held_out, corpus.digest, encoding, needed)


def _split(corpus: Corpus, config: DataConfig) -> tuple[np.ndarray, np.ndarray]:
    if config.eval_fraction == 0:
        return np.arange(len(corpus)), np.arange(0)
    num_eval = max(1, round(config.eval_fraction * len(corpus)))
    if num_eval >= len(corpus):
        raise ValueError(
            f"data {config.data!r}: eval_fraction={config.eval_fraction} of {len(corpus)} documents leaves none to "
            "train on; lower it, set it to 0, or give more (a file is cut into documents of "
            f"{config.max_document_bytes} bytes)"
        )
    order = np.argsort(corpus.order_keys(config.split_seed), kind="stable")
    return np.sort(order[num_eval:]), np.sort(order[:num_eval])
