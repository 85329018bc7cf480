"""Entropies: against counting with dictionaries, and what they mean."""

import itertools
import json
from collections import Counter
from math import log

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfsdp.trainer.data import DataConfig, entropy, ngram_entropies, open_data

EOD = 256


def _open(tmp_path, texts):
    path = tmp_path / "d.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_data(DataConfig(str(path), eval_fraction=0)).train


def _oracle(streams, order):
    """Return H(target | last `order - 1` inputs of the same document), by dictionaries."""
    events = []
    for stream in streams:
        events += [(tuple(stream[max(0, i - order + 1) : i]), stream[i]) for i in range(1, len(stream))]
    joint, contexts = Counter(events), Counter(context for context, _ in events)
    return -sum(c * log(c / contexts[event[0]]) for event, c in joint.items()) / len(events)


@pytest.mark.parametrize("max_table", [0, 1 << 25])
@settings(max_examples=25, deadline=None)
@given(texts=st.lists(st.text(alphabet="abc", max_size=30), min_size=1, max_size=6))
def test_entropies_equal_counting_with_dictionaries(tmp_path_factory, max_table, texts):
    documents = _open(tmp_path_factory.mktemp("entropy"), texts)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(entropy, "_MAX_TABLE", max_table)
        found = ngram_entropies(documents)
    streams = [[EOD, *text.encode(), EOD] for text in texts]
    expected = [_oracle(streams, order) for order in (1, 2, 3)]
    np.testing.assert_allclose([found.unigram, found.bigram, found.trigram], expected, atol=1e-12)
    assert found.num_tokens == sum(len(text) + 1 for text in texts) and not found.is_sample


@pytest.mark.parametrize("eod_id", [None, 0])
@settings(max_examples=25, deadline=None)
@given(ids=st.lists(st.integers(0, 2), min_size=2, max_size=60))
def test_contexts_in_a_token_file_end_at_its_separators_and_cuts(tmp_path_factory, eod_id, ids):
    path = tmp_path_factory.mktemp("entropy") / "t.bin"
    np.array(ids, "<u2").tofile(path)
    options = {"token_dtype": "uint16", "eod_id": eod_id, "max_document_bytes": 16}
    found = ngram_entropies(open_data(DataConfig(str(path), eval_fraction=0, **options)).train)
    starts = [i for i in range(len(ids) - 1) if i % 8 == 0 or ids[i] == eod_id]
    streams = [ids[start : end + 1] for start, end in itertools.pairwise([*starts, len(ids) - 1])]
    expected = [_oracle(streams, order) for order in (1, 2, 3)]
    np.testing.assert_allclose([found.unigram, found.bigram, found.trigram], expected, atol=1e-12)


def test_longer_context_never_raises_the_entropy(tmp_path):
    rng = np.random.default_rng(0)
    found = ngram_entropies(_open(tmp_path, ["".join(rng.choice(list("abcdefgh"), 500)) for _ in range(20)]))
    assert log(9) > found.unigram > found.bigram > found.trigram > 0


def test_alternating_text_needs_one_token_of_context(tmp_path):
    found = ngram_entropies(_open(tmp_path, ["ab" * 5000]))
    assert found.unigram == pytest.approx(log(2), abs=1e-2) and found.bigram < 1e-2


def test_limit_stops_counting_and_says_so(tmp_path):
    found = ngram_entropies(_open(tmp_path, ["x" * 99] * 50), max_tokens=250)
    assert found.num_tokens == 300 and found.is_sample and "sample" in str(found)


def test_no_documents_raises(tmp_path):
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(ValueError, match="eval_fraction above 0"):
        ngram_entropies(open_data(DataConfig(str(tmp_path), eval_fraction=0)).eval)


def test_bigram_entropy_of_the_standard_library_is_about_2_4_nats():
    found = ngram_entropies(open_data(DataConfig("stdlib")).train, max_tokens=2_000_000)
    assert 3.0 < found.unigram < 3.5 and 2.3 < found.bigram < 2.5 and 1.5 < found.trigram < 1.8
