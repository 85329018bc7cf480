"""Packing: against an oracle that lays documents end to end one token at a time."""

import dataclasses
import itertools
import json
import tempfile
from pathlib import Path

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from jfsdp.trainer.data.pipeline import make_eval_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.trainer.chats import with_sidecar

EOD = 256
TEXTS = st.lists(st.text(alphabet="abé", max_size=40), min_size=1, max_size=8)


def _one_pass(data, *, batch_size, process_count=1):
    """Return the rows of one pass over all documents in corpus order, as a dict of [rows T]."""
    data = dataclasses.replace(data, eval=data.train)
    options = {"batch_size": batch_size, "process_count": process_count, "prefetch_batches": 0}
    processes = [make_eval_iterator(data, process_index=i, **options) for i in range(process_count)]
    batches = [batch for step in zip(*processes, strict=True) for batch in step]
    assert {batch["tokens"].shape[0] for batch in batches} == {batch_size}
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}


def _oracle(documents, seq_len, cross_documents):
    """Return (input, target, segment, position) per row, from a list of documents, each a list of (input, target)."""
    rows, row, last = [], [], None
    for number, document in enumerate(documents):
        for pair in document:
            if len(row) == seq_len:
                rows, row = [*rows, row], []
            new = not row or (number != last and not cross_documents)
            segment = 1 if not row else row[-1][2] + new
            row.append((*pair, segment, 0 if new else row[-1][3] + 1))
            last = number
    return [*rows, row]


def _assert_rows_equal(rows, expected, seq_len):
    names = ("tokens", "targets", "segment_ids", "positions")
    for row, columns in enumerate(expected):
        for name, column in zip(names, zip(*columns, strict=True), strict=True):
            np.testing.assert_array_equal(rows[name][row], np.pad(column, (0, seq_len - len(column))), err_msg=name)
        np.testing.assert_array_equal(rows["weights"][row], np.arange(seq_len) < len(columns))
    for name in (*names, "weights"):
        assert not rows[name][len(expected) :].any(), f"padding rows hold {name}"


def _open(directory, texts, **options):
    path = Path(directory, "d.jsonl")
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return open_data(DataConfig(str(path), eval_fraction=0, **options))


@settings(max_examples=60, deadline=None)
@given(TEXTS, st.integers(1, 17), st.integers(1, 3), st.integers(1, 3), st.booleans())
def test_rows_are_the_documents_laid_end_to_end(texts, seq_len, batch_size, process_count, cross_documents):
    with tempfile.TemporaryDirectory() as directory:
        data = _open(directory, texts, seq_len=seq_len, cross_documents=cross_documents)
        rows = _one_pass(data, batch_size=batch_size, process_count=process_count)
    streams = [[EOD, *text.encode(), EOD] for text in texts]
    documents = [list(itertools.pairwise(stream)) for stream in streams]
    _assert_rows_equal(rows, _oracle(documents, seq_len, cross_documents), seq_len)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 3), min_size=2, max_size=80), st.integers(1, 17), st.booleans(), st.booleans())
def test_token_file_loses_no_transition_and_begins_a_segment_at_each_separator(ids, seq_len, cross, has_eod):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory, "t.bin")
        np.array(ids, "<u2").tofile(path)
        with_sidecar(str(path), dtype="uint16", **({"eod_id": 0} if has_eod else {}))
        config = DataConfig(str(path), seq_len=seq_len, cross_documents=cross, max_document_bytes=16, eval_fraction=0)
        rows = _one_pass(open_data(config), batch_size=2)
    documents = []
    for index, pair in enumerate(itertools.pairwise(ids)):
        if index % 8 == 0 or (has_eod and pair[0] == 0):  # 16 bytes hold 8 tokens
            documents.append([])
        documents[-1].append(pair)
    _assert_rows_equal(rows, _oracle(documents, seq_len, cross), seq_len)


def test_cut_file_loses_only_the_transitions_over_its_cuts(tmp_path):
    text = "0123456789abcde\n" * 8
    (tmp_path / "a.txt").write_text(text)
    data = open_data(DataConfig(str(tmp_path), seq_len=10, eval_fraction=0, max_document_bytes=32))
    rows = _one_pass(data, batch_size=1)
    assert len(data.train) == 4
    assert rows["weights"].sum() == len(text) + 1 - 3
