"""Rows hold no more documents than they may, nothing of the stream is lost, and a state goes on in the middle."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jfsdp.trainer.data.documents import INPUT, PADDING, START
from jfsdp.trainer.data.pipeline import RowEnds, make_train_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.refusals import refusing


def num_runs(segment_ids):
    return 1 + (segment_ids[:, 1:] != segment_ids[:, :-1]).sum(1)


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=6), min_size=1, max_size=12),
    st.integers(2, 10),
    st.integers(2, 5),
)
def test_a_stream_is_filled_where_its_rows_end(elements, seq_len, most):
    ends, token, given_, filled = RowEnds(seq_len, most), 1, [], []
    for lengths in elements:
        pairs = np.zeros((sum(lengths), 4), np.int32)
        pairs[:, INPUT] = np.arange(token, token + len(pairs))
        token += len(pairs)
        pairs[np.cumsum([0, *lengths[:-1]]), START] = 1
        given_.append(pairs)
        filled.append(ends.fill(pairs))
    stream = np.concatenate(filled)
    is_padding = stream[:, START] == PADDING
    np.testing.assert_array_equal(stream[~is_padding], np.concatenate(given_))
    stream = np.pad(stream, ((0, -len(stream) % seq_len), (0, 0)), constant_values=PADDING)
    rows, is_padding = stream.reshape(-1, seq_len, 4), (stream[:, START] == PADDING).reshape(-1, seq_len)
    is_start = rows[:, :, START] > 0
    is_start[:, 0] = True
    ids = np.cumsum(is_start, axis=1) * ~is_padding
    assert num_runs(ids).max() <= most
    # Padding is a row's end, and there only where one document more would not have had a run of its own.
    assert not (is_padding[:, :-1] & ~is_padding[:, 1:]).any()
    for row in np.flatnonzero(is_padding[:-1].any(1)):
        assert is_start[row].sum() == most - 1


@pytest.fixture(scope="module")
def short_documents(tmp_path_factory):
    path = tmp_path_factory.mktemp("short") / "d.jsonl"
    lengths = np.random.default_rng(0).integers(1, 12, 400)
    path.write_text("".join(json.dumps({"text": "x" * int(n)}) + "\n" for n in lengths))
    return str(path)


def test_batches_keep_to_the_bound_and_a_state_goes_on(short_documents):
    data = open_data(DataConfig(short_documents, seq_len=64, documents_per_row=4, shuffle_rows=8))
    first = make_train_iterator(data, batch_size=3)
    taken = [next(first) for _ in range(5)]
    state = json.loads(json.dumps(first.get_state()))
    later = [next(first) for _ in range(5)]
    again = make_train_iterator(data, batch_size=3)
    again.set_state(state)
    for batch in later:
        found = next(again)
        for name, array in batch.items():
            np.testing.assert_array_equal(found[name], array)
    for batch in taken + later:
        assert num_runs(batch["segment_ids"]).max() <= 4
        np.testing.assert_array_equal(batch["weights"] == 0, batch["segment_ids"] == 0)
    free = open_data(DataConfig(short_documents, seq_len=64))
    assert num_runs(next(make_train_iterator(free, batch_size=3))["segment_ids"]).max() > 4


def test_a_bound_that_leaves_no_room_is_refused():
    with refusing("documents_per_row=1", "2"):
        DataConfig("stdlib", documents_per_row=1)
