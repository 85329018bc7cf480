"""The pipeline: order, shares, and a state that restores the stream bit for bit."""

import json
import subprocess
import sys
import threading
import zlib
from typing import Any

import numpy as np
import pytest

from jfsdp.trainer.data import lanes
from jfsdp.trainer.data.pipeline import make_eval_iterator, make_train_iterator
from jfsdp.trainer.data.tokens import DataConfig, open_data
from tests.refusals import refuses, refusing

NUM_DOCUMENTS = 12


@pytest.fixture(scope="module")
def one_row_documents(tmp_path_factory):
    """Twelve documents of 7 bytes: with the separator, each is exactly one row of 8."""
    path = tmp_path_factory.mktemp("rows") / "d.jsonl"
    path.write_text("".join(json.dumps({"text": f"text {i:02}"}) + "\n" for i in range(NUM_DOCUMENTS)))
    return str(path)


@pytest.fixture(scope="module")
def uneven_documents(tmp_path_factory):
    """Forty documents of 0 to 400 bytes; a row holds several, or a part of one."""
    path = tmp_path_factory.mktemp("uneven") / "d.jsonl"
    lengths = np.random.default_rng(0).integers(0, 400, 40)
    path.write_text("".join(json.dumps({"text": f"{i:02} " * (n // 3)}) + "\n" for i, n in enumerate(lengths)))
    return str(path)


def _config(path, **options: Any):
    """Windows of few rows: to fill one of 1024, the default, takes longer than most tests."""
    return DataConfig(path, **{"shuffle_rows": 32, **options})


def _take(iterator, count):
    return [next(iterator) for _ in range(count)]


def _assert_batches_equal(actual, expected):
    assert len(actual) == len(expected)
    for a, b in zip(actual, expected, strict=True):
        assert a.keys() == b.keys()
        for name in a:
            np.testing.assert_array_equal(a[name], b[name], err_msg=name)


def _number(batch):
    return int(bytes(batch["tokens"][0, 6:8].astype(np.uint8)))


def _epochs(data, process_count, num_epochs):
    """Return the document of each row, [epochs, processes, documents per process]."""
    per_process = NUM_DOCUMENTS // process_count
    rows = []
    for i in range(process_count):
        iterator = make_train_iterator(data, batch_size=1, process_index=i, process_count=process_count)
        rows += [_number(batch) for batch in _take(iterator, per_process * num_epochs)]
    return np.array(rows).reshape(process_count, num_epochs, per_process).swapaxes(0, 1)


@pytest.mark.parametrize("process_count", [1, 3])
def test_each_epoch_gives_every_document_to_exactly_one_process(one_row_documents, process_count):
    data = open_data(_config(one_row_documents, seq_len=8, eval_fraction=0, shuffle_rows=0))
    for epoch in _epochs(data, process_count, num_epochs=3):
        assert sorted(epoch.ravel()) == list(range(NUM_DOCUMENTS))


@pytest.mark.parametrize("shares", [(3, 3, 2, 2, 2), (1,) * 13])
def test_processes_that_do_not_divide_the_documents_still_share_them_all(one_row_documents, shares):
    data = open_data(_config(one_row_documents, seq_len=8, eval_fraction=0, shuffle_rows=0))
    seen = []
    for i, share in enumerate(shares):
        iterator = make_train_iterator(data, batch_size=1, process_index=i, process_count=len(shares))
        seen += [_number(batch) for batch in _take(iterator, share)]
    assert len(set(seen)) == NUM_DOCUMENTS


@pytest.mark.parametrize("shuffle_rows", [0, 32])
def test_order_differs_by_epoch_and_by_seed_and_repeats_for_a_seed(one_row_documents, shuffle_rows):
    options = {"seq_len": 8, "eval_fraction": 0, "shuffle_rows": shuffle_rows}
    first, again, other = (
        _epochs(open_data(_config(one_row_documents, seed=seed, **options)), 1, 2) for seed in (0, 0, 9)
    )
    assert (first == again).all()
    assert (first[0] != first[1]).any() and (first[0] != other[0]).any()


def test_rows_of_a_window_are_the_same_rows_in_another_order(uneven_documents):
    def rows(shuffle_rows):
        data = open_data(_config(uneven_documents, seq_len=16, eval_fraction=0, shuffle_rows=shuffle_rows))
        return [batch["tokens"].tobytes() for batch in _take(make_train_iterator(data, batch_size=1), 40)]

    in_order, shuffled = rows(0), rows(8)
    assert in_order != shuffled
    for start in range(0, 40, 8):
        assert sorted(in_order[start : start + 8]) == sorted(shuffled[start : start + 8])


def test_rows_are_shuffled_otherwise_in_each_lane_and_with_each_seed(one_row_documents, monkeypatch):
    monkeypatch.setattr(lanes, "DOCUMENTS_PER_LANE", 1)
    num_rows = NUM_DOCUMENTS // 2  # of each of two lanes

    def rows(seed, shuffle_rows):
        data = open_data(_config(one_row_documents, seq_len=8, eval_fraction=0, seed=seed, shuffle_rows=shuffle_rows))
        batches = _take(make_train_iterator(data, batch_size=2), num_rows)
        return [[batch["tokens"][lane].tobytes() for batch in batches] for lane in range(2)]

    pairs = [pair for seed in (0, 9) for pair in zip(rows(seed, 0), rows(seed, NUM_DOCUMENTS), strict=True)]
    assert len({tuple(map(in_order.index, shuffled)) for in_order, shuffled in pairs}) == 4


@pytest.mark.parametrize(
    ("prefetch", "num_consumed", "shuffle_rows"), [(0, 7, 24), (2, 0, 0), (2, 60, 150), (0, 1, 150), (2, 7, 0)]
)
def test_restored_state_continues_bit_for_bit_in_a_fresh_pipeline(
    uneven_documents, prefetch, num_consumed, shuffle_rows
):
    config = _config(uneven_documents, seq_len=64, eval_fraction=0.1, shuffle_rows=shuffle_rows)
    options = {"batch_size": 2, "process_index": 1, "process_count": 2, "prefetch_batches": prefetch}
    original = make_train_iterator(open_data(config), **options)
    _take(original, num_consumed)
    state = json.dumps(original.get_state())
    expected = _take(original, 40)
    restored = make_train_iterator(open_data(config), **options)
    restored.set_state(json.loads(state))
    _assert_batches_equal(_take(restored, 40), expected)
    assert restored.get_state() == original.get_state()
    original.set_state(json.loads(state))
    _assert_batches_equal(_take(original, 40), expected)
    alone = make_train_iterator(open_data(config), **options | {"prefetch_batches": 0})
    _assert_batches_equal(_take(alone, num_consumed + 40)[num_consumed:], expected)


@pytest.mark.parametrize(
    ("name", "config", "options"),
    [
        ("seed", {"seed": 5}, {}),
        ("seq_len", {"seq_len": 32}, {}),
        ("split_seed", {"split_seed": 5}, {}),
        ("eval_fraction", {"eval_fraction": 0.5}, {}),
        ("cross_documents", {"cross_documents": True}, {}),
        ("max_document_bytes", {"max_document_bytes": 100}, {}),
        ("shuffle_rows", {"shuffle_rows": 8}, {}),
        ("documents_per_row", {"documents_per_row": 4}, {}),
        ("global_batch", {}, {"batch_size": 3}),
        ("global_batch", {}, {"process_count": 3}),
    ],
)
def test_state_of_another_stream_raises_naming_what_differs(uneven_documents, name, config, options):
    shared = {"batch_size": 2, "process_index": 0, "process_count": 2}
    state = make_train_iterator(open_data(_config(uneven_documents, seq_len=64)), **shared).get_state()
    other_config = _config(uneven_documents, **{"seq_len": 64} | config)
    other = make_train_iterator(open_data(other_config), **shared | options)
    with refusing(f"{name} was ", ", is "):
        other.set_state(other.get_state(), state)  # of two processes


def test_state_of_other_data_or_of_the_other_split_raises(one_row_documents, uneven_documents):
    train = make_train_iterator(open_data(_config(one_row_documents)), batch_size=1)
    other = make_train_iterator(open_data(_config(uneven_documents)), batch_size=1)
    held_out = make_eval_iterator(open_data(_config(one_row_documents)), batch_size=1)
    refuses(lambda: other.set_state(train.get_state()), "other data", "data was")
    refuses(lambda: held_out.set_state(train.get_state()), "'train'", "'eval'")
    refuses(lambda: train.set_state(train.get_state() | {"version": 0}), "version 0")
    none = open_data(_config(one_row_documents, eval_fraction=0))
    refuses(lambda: make_eval_iterator(none, batch_size=1), "eval_fraction", "0")


@pytest.mark.parametrize("prefetch", [0, 2])
def test_evaluation_is_one_pass_and_its_state_restores(uneven_documents, prefetch):
    data = open_data(_config(uneven_documents, seq_len=64, eval_fraction=0.3))
    whole = list(make_eval_iterator(data, batch_size=2, prefetch_batches=prefetch))
    assert sum(batch["weights"].sum() for batch in whole) == sum(len(data.eval[i]) for i in range(len(data.eval)))
    iterator = make_eval_iterator(data, batch_size=2, prefetch_batches=prefetch)
    _take(iterator, 3)
    restored = make_eval_iterator(data, batch_size=2, prefetch_batches=prefetch)
    restored.set_state(iterator.get_state())
    _assert_batches_equal(list(restored), whole[3:])


@pytest.mark.parametrize("process_count", [3, 50])
def test_evaluation_rows_do_not_depend_on_the_number_of_processes(uneven_documents, process_count):
    data = open_data(_config(uneven_documents, seq_len=64, eval_fraction=0.3))
    one = np.concatenate([batch["tokens"] for batch in make_eval_iterator(data, batch_size=1)])
    shares = [
        list(make_eval_iterator(data, batch_size=1, process_index=i, process_count=process_count))
        for i in range(process_count)
    ]
    assert len({len(share) for share in shares}) == 1
    together = np.concatenate([batch["tokens"] for step in zip(*shares, strict=True) for batch in step])
    np.testing.assert_array_equal(together[: len(one)], one)
    assert not together[len(one) :].any()


ROWS = 12  # of a global batch


def _global_batches(data, process_count, num, states=()):
    """Return so many whole batches of all processes, and the states of all of them afterwards, as a checkpoint has."""
    size = ROWS // process_count
    iterators = [
        make_train_iterator(data, batch_size=size, process_index=i, process_count=process_count, prefetch_batches=0)
        for i in range(process_count)
    ]
    for iterator in iterators:
        if states:
            iterator.set_state(*states)
    steps = [[next(iterator) for iterator in iterators] for _ in range(num)]
    batches = [{name: np.concatenate([own[name] for own in step]) for name in step[0]} for step in steps]
    return batches, [json.loads(json.dumps(iterator.get_state())) for iterator in iterators]


@pytest.mark.parametrize(("per_lane", "num_lanes", "shuffle_rows"), [(1000, 1, 24), (10, 4, 96), (3, 12, 0)])
def test_batches_do_not_depend_on_the_number_of_processes(
    uneven_documents, monkeypatch, per_lane, num_lanes, shuffle_rows
):
    monkeypatch.setattr(lanes, "DOCUMENTS_PER_LANE", per_lane)
    assert lanes.count_lanes(40, ROWS) == num_lanes
    data = open_data(_config(uneven_documents, seq_len=64, eval_fraction=0, shuffle_rows=shuffle_rows))
    expected, _ = _global_batches(data, 1, 12)
    _assert_batches_equal(_global_batches(data, 6, 3)[0], expected[:3])
    for process_count, others in ((3, 4), (12, 1)):  # the run goes on with another number, and that with another
        found, states = _global_batches(data, process_count, 5)
        more, later = _global_batches(data, others, 3, states)
        last, _ = _global_batches(data, 3, 4, later)
        _assert_batches_equal([*found, *more, *last], expected)


def test_a_run_goes_on_with_the_lanes_that_it_began_with(uneven_documents, monkeypatch):
    data = open_data(_config(uneven_documents, seq_len=64, eval_fraction=0))
    expected, _ = _global_batches(data, 1, 9)
    found, states = _global_batches(data, 2, 4)
    monkeypatch.setattr(lanes, "DOCUMENTS_PER_LANE", 3)  # as where data have grown, or jfsdp counts otherwise
    more, states = _global_batches(data, 3, 2, states)
    last, _ = _global_batches(data, 1, 3, states)
    _assert_batches_equal([*found, *more, *last], expected)


def test_a_process_reads_the_lanes_of_its_own_rows_alone(uneven_documents, monkeypatch):
    monkeypatch.setattr(lanes, "DOCUMENTS_PER_LANE", 3)
    data = open_data(_config(uneven_documents, seq_len=64, eval_fraction=0))
    read = [set(state["position"]["lanes"]) for state in _global_batches(data, 4, 2)[1]]
    assert read == [{str(3 * i), str(3 * i + 1), str(3 * i + 2)} for i in range(4)]


def test_closing_ends_the_thread_and_says_so_afterwards(uneven_documents):
    before = set(threading.enumerate())
    iterator = make_train_iterator(open_data(_config(uneven_documents, seq_len=64)), batch_size=2)
    next(iterator)
    ours = set(threading.enumerate()) - before
    iterator.close()
    for thread in ours:
        thread.join(timeout=10)
    assert ours and not any(thread.is_alive() for thread in ours)
    with pytest.raises(ValueError, match="was closed"):
        next(iterator)


def test_exit_with_an_open_iterator_is_silent_and_the_stream_is_the_same_in_every_process(uneven_documents):
    code = (
        "import sys, zlib\n"
        "from jfsdp.trainer.data.pipeline import make_train_iterator\n"
        "from jfsdp.trainer.data.tokens import DataConfig, open_data\n"
        "it = make_train_iterator(open_data(DataConfig(sys.argv[1], seq_len=64, shuffle_rows=32)), batch_size=2)\n"
        "print(zlib.crc32(b''.join(next(it)['tokens'].tobytes() for _ in range(20))))\n"
    )
    command = [sys.executable, "-c", code, uneven_documents]
    run = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    assert "Traceback" not in run.stderr and "Exception" not in run.stderr
    data = open_data(DataConfig(uneven_documents, seq_len=64, shuffle_rows=32))
    batches = _take(make_train_iterator(data, batch_size=2), 20)
    assert int(run.stdout) == zlib.crc32(b"".join(batch["tokens"].tobytes() for batch in batches))
