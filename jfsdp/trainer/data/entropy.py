"""Entropies of a corpus under n-gram contexts: the losses that a model must beat to have learned more than counts."""

from __future__ import annotations

import dataclasses

import numpy as np

from jfsdp.trainer.data.documents import INPUT, START, TARGET, Joined

# Below this many possible n-grams a table is faster than sorting; the table of byte trigrams has 17 million.
_MAX_TABLE = 1 << 25


@dataclasses.dataclass(frozen=True)
class NgramEntropies:
    """Empirical entropies in nats per token; printing it gives one line.

    Attributes:
      unigram: H(x_t).
      bigram: H(x_t | x_t-1).
      trigram: H(x_t | x_t-2, x_t-1).
      num_tokens: targets counted.
      is_sample: whether `max_tokens` left some out.
    """

    unigram: float
    bigram: float
    trigram: float
    num_tokens: int
    is_sample: bool

    def __str__(self) -> str:
        return (
            f"unigram {self.unigram:.4f}, bigram {self.bigram:.4f}, trigram {self.trigram:.4f} nats per token "
            f"over {self.num_tokens} tokens{' (a sample)' if self.is_sample else ''}"
        )


def ngram_entropies(documents: Joined, *, max_tokens: int = 30_000_000) -> NgramEntropies:
    """Count the (context, target) pairs that training sees and return their conditional entropies.

    Counted are the same transitions, with the same boundaries, as one epoch trains on without `cross_documents`: each
    target once, its context the last 0, 1 or 2 inputs of its own document (at a document's start there are fewer, which
    counts as a context of its own). The end-of-document token counts like any other, once per document.

    Each is the lowest loss in nats per token that *any* model of that context can reach on these very tokens (the
    plug-in estimate). On other text of the same kind such a model does worse, and the more so the more contexts there
    are for the number of tokens: with a large vocabulary the trigram value is far too low to serve as a baseline.

    Cost: reads and tokenizes the documents once, up to `max_tokens`; about 1 s per 10 million byte tokens.
    Memory: about 60 bytes per token counted (measured: 1.7 GB at the default limit).

    Args:
      documents: `TokenData.train`, or `.eval`.
      max_tokens: stop at the end of the document that reaches this many; the documents are then a fixed random sample.

    Raises:
      ValueError: if there are no documents.
    """
    target, previous, before, is_sample = _sample(documents, max_tokens)
    size, num_tokens = int(max(target.max(), previous.max())) + 1, len(target)
    contexts = (np.zeros(num_tokens, np.int64), 1), (previous, size), (before * size + previous, size * (size + 1))
    unigram, bigram, trigram = (_conditional_entropy(target, size, *context) for context in contexts)
    return NgramEntropies(unigram, bigram, trigram, num_tokens, is_sample)


def _sample(documents: Joined, max_tokens: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, bool]:
    """Return, as int64 [n], each target, the input before it, and 1 + the input before that (0: none)."""
    if not len(documents):
        raise ValueError("no documents to count; for the held-out ones set eval_fraction above 0")
    parts, num_tokens = [], 0
    for index in np.random.default_rng(0).permutation(len(documents)):
        if num_tokens >= max_tokens:
            break
        pairs = documents[int(index)]
        before = np.concatenate([[0], pairs[:-1, INPUT] + 1])[: len(pairs)]
        parts.append(np.stack([pairs[:, TARGET], pairs[:, INPUT], np.where(pairs[:, START], 0, before)]))
        num_tokens += len(pairs)
    target, previous, before = np.concatenate(parts, axis=1, dtype=np.int64)
    return target, previous, before, len(parts) < len(documents)


def _conditional_entropy(target: np.ndarray, num_targets: int, context: np.ndarray, num_contexts: int) -> float:
    joint = _c_log_c(context * num_targets + target, num_contexts * num_targets)
    return (_c_log_c(context, num_contexts) - joint) / len(target)


def _c_log_c(codes: np.ndarray, size: int) -> float:
    """Return the sum of c log c over the counts c of each code; codes are below `size`."""
    counts = np.bincount(codes) if size <= _MAX_TABLE else np.unique(codes, return_counts=True)[1]
    counts = counts[counts > 0].astype(np.float64)
    return float(np.sum(counts * np.log(counts)))
