"""Four processes of one device each: which of them share a host, and whose rows a batch holds."""

import jax
import numpy as np
import pytest

from jfsdp.layout.mesh import make_mesh
from tests.launch import remote
from tests.launch.raised import all_raise
from tests.processes import Processes

HERE = "tests.launch.remote"


@pytest.fixture(scope="module")
def processes():
    running = Processes(4, devices_each=1)
    yield running
    running.close()


@pytest.mark.parametrize(
    ("names", "order", "kept"), [(None, [0, 1, 2, 3], 4), ("abab", [0, 2, 1, 3], 2), ("abcd", [0, 1, 2, 3], False)]
)
def test_node_splits_over_the_processes_of_a_host(processes, names, order, kept):
    for found, ways, told in processes.call(f"{HERE}:node_on", names):
        assert (found, ways) == (order, [kept])
        assert any("one device each" in text for text in told) == (kept is False)


def test_node_over_interleaved_hosts_computes_what_one_device_does(processes):
    one = remote.model_of(make_mesh(fsdp=1, devices=jax.devices()[:1]))
    expected = remote.train(one, remote.rows(0, 16))
    np.testing.assert_allclose(processes.call(f"{HERE}:train_on", "abab"), [expected] * 4, rtol=1e-5)


@pytest.mark.parametrize(
    ("function", "names", "words"),
    [
        ("node_on", ["a", "", "a", "a"], ["process 1 cannot identify its host"]),
        ("node_on", "aaab", ["[(0, 3), (3, 1)]", "reshard_after_forward=n"]),
    ],
)
def test_what_hosts_and_processes_do_not_allow_is_refused_in_every_process(processes, function, names, words):
    all_raise(processes, words, f"{HERE}:{function}", names)


def test_rows_of_each_process_and_global_arrays_are_taken_once(processes):
    for kind in ("own", "on own device", "global"):
        for index, (shape, here, told) in enumerate(processes.call(f"{HERE}:shard_batch", kind)):
            assert (shape, told) == ([16, 8], [])
            assert here == remote.rows(4 * index, 4 * index + 4)["x"].tolist()
    for shape, _, (told,) in processes.call(f"{HERE}:shard_batch", "same"):
        assert shape == [16, 8]
        assert "processes 0, 1, 2, 3 gave the same batch" in told and "4 times" in told


def test_processes_that_tensor_spans_give_the_same_rows_and_count_as_one(processes):
    """Of 4 processes with a device each, 0 and 1 share a part of the batch, and 2 and 3."""
    found = processes.call(f"{HERE}:shard_over_tensor", "alike")
    assert [shape for shape, *_ in found] == [[8, 8]] * 4
    assert found[0][1] == found[1][1] != found[2][1] == found[3][1]
    assert all(told == [] for *_, told in found)
    all_raise(processes, ["processes 0 and 1 gave different rows"], f"{HERE}:shard_over_tensor", "each its own")


def test_batches_that_do_not_fit_each_other_are_refused_in_every_process(processes):
    for kind, words in (
        ("uneven", "process 0 gives own float32[4, 8], and process 1 own float32[5, 8]"),
        ("other leaves", "process 0 gives nothing"),
        ("mixed", "mixes"),
    ):
        all_raise(processes, [words], f"{HERE}:shard_batch", kind)


def test_an_evaluation_refuses_inputs_that_differ_between_processes(processes):
    all_raise(processes, ["shard_batch"], f"{HERE}:evaluate", False)
    assert processes.call(f"{HERE}:evaluate", True) == [32.0] * 4


@pytest.mark.parametrize("is_shared", [True, False])
def test_the_processes_of_a_cluster_are_examined_together(processes, tmp_path, is_shared):
    for topics, links, count in processes.call(f"{HERE}:examine", str(tmp_path), is_shared):
        assert topics == ["run directory"] * (not is_shared) + ["process 2: NCCL_P2P_DISABLE=1"]
        assert [link[:2] for link in links] == [["replica", 2], ["fsdp", 2]] and count == 4
        assert all(crosses != "nothing" for *_, crosses in links)
    assert not list(tmp_path.glob("*/*")), "nothing is left"
