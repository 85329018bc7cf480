"""Two processes that share a checkpoint: the work is shared, nothing is written or read twice, and none waits for ever.

Each has two of the four devices.
"""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jfsdp.checkpoint.disk.digest import list_files, read_digests
from jfsdp.checkpoint.disk.files import read_manifest
from tests.checkpoint.remote import num_elements
from tests.launch.raised import all_raise
from tests.processes import Processes

WAYS = [("full_shard", "per_parameter"), ("HYBRID_SHARD", "per_parameter"), ("ddp", "flat")]
HERE = "tests.checkpoint.remote"


@pytest.fixture(scope="module")
def processes():
    running = Processes(2, devices_each=2)
    yield running
    running.close()


@pytest.fixture(scope="module")
def saved(processes, tmp_path_factory) -> Any:
    """Save a state once; return where, and what each process says of it."""

    @functools.cache
    def save(strategy, storage):
        path = tmp_path_factory.mktemp("saved") / "c"
        return path, processes.call(f"{HERE}:save", strategy, storage, str(path))

    return save


@pytest.mark.parametrize(("strategy", "storage"), WAYS)
def test_every_element_is_written_once_by_both_and_each_hashes_what_it_wrote(strategy, storage, saved):
    path, (first, second) = saved(strategy, storage)
    counts = {name: np.zeros(shape, int) for name, shape in first["shapes"].items()}
    for name, index in [*first["parts"], *second["parts"]]:
        counts[name][tuple(slice(*pair) for pair in index)] += 1
    for name, count in counts.items():
        assert (count == 1).all(), name
    assert 0.4 < first["bytes"] / (first["bytes"] + second["bytes"]) < 0.6
    assert set(read_digests(path)) == set(list_files(path))
    assert second["hashed"] and all("/ocdbt.process_1/" in name for name in second["hashed"])
    assert not [name for name in first["hashed"] if "ocdbt.process_1" in name]
    manifest = read_manifest(path)
    assert (manifest["num_processes"], manifest["extra"]) == (2, [{"process": 0}, {"process": 1}])


@pytest.mark.parametrize(("strategy", "storage"), WAYS)
def test_each_process_reads_only_the_slices_of_its_devices(strategy, storage, saved, processes):
    path, (wrote, _) = saved("full_shard", "per_parameter")
    found = processes.call(f"{HERE}:restore", strategy, storage, str(path), False)
    total = sum(int(np.prod(shape)) for shape in wrote["shapes"].values())
    for one in found:
        assert one["bits"] == wrote["bits"]
        assert len(one["reads"]) == len({str(read) for read in one["reads"]}), "nothing is read twice"
        part = num_elements(one["reads"]) / total
        assert 0.45 < part < 0.55 if strategy == "full_shard" else part == pytest.approx(1, abs=1e-3), part


def test_one_replica_reads_and_the_other_process_reads_nothing(saved, processes):
    strategy = "HYBRID_SHARD"
    path, (wrote, _) = saved("full_shard", "per_parameter")
    first, second = processes.call(f"{HERE}:restore", strategy, "per_parameter", str(path), True)
    assert second["reads"] == []
    assert num_elements(first["reads"]) == sum(int(np.prod(shape)) for shape in wrote["shapes"].values())
    assert first["bits"] == second["bits"] == wrote["bits"]


def largest(path: Path, part: str) -> Path:
    return max((path / "arrays" / part).rglob("d/*"), key=lambda file: file.stat().st_size)


@pytest.mark.parametrize("name", ["array", "manifest.json", "SHA256SUMS"])
def test_damage_stops_every_process_by_the_same_name(name, saved, processes):
    path, _ = saved("HYBRID_SHARD", "per_parameter")
    file = largest(path, "params") if name == "array" else path / name
    whole = file.read_bytes()
    data = bytearray(whole)
    data[len(data) // 2] ^= 4
    file.write_bytes(data)
    words = ["DamagedError: ", str(file.relative_to(path))]
    all_raise(processes, words, f"{HERE}:restore", "full_shard", "per_parameter", str(path), False)
    file.write_bytes(whole)


@pytest.fixture(scope="module")
def begun_run(processes, tmp_path_factory):
    directory = tmp_path_factory.mktemp("runs") / "run"
    assert processes.call(f"{HERE}:save_step", str(directory), 1) == [[1], [1]]
    return directory


def test_each_process_gets_back_what_it_gave(begun_run, processes):
    found = processes.call(f"{HERE}:restore_step", str(begun_run), False)
    assert [one["extra"] for one in found] == [{"process": index, "step": 1} for index in range(2)]
    assert [one["bits"] for one in found] == processes.call(f"{HERE}:bits_of", 1)


@pytest.mark.parametrize(("process", "where"), [(0, "write"), (1, "write"), (1, "hash"), (0, "merge"), (0, "commit")])
def test_a_full_disk_in_one_process_is_an_error_in_all_and_the_run_goes_on(process, where, begun_run, processes):
    """Simulated where one of the processes writes, hashes, merges or commits; the step before stands."""
    before = max(int(path.name) for path in begun_run.glob("*") if path.name.isdigit())
    words = ["OSError: [Errno 28]", "earlier checkpoints are untouched", "it needs about"]
    all_raise(processes, words, f"{HERE}:save_step", str(begun_run), before + 1, [process, where])
    assert not list(begun_run.glob(f"{before + 1}*")), "the next save needs the room of what is half written"
    assert max(processes.call(f"{HERE}:save_step", str(begun_run), before + 1)[0]) == before + 1


def test_what_one_process_cannot_write_beside_a_state_is_an_error_in_all(processes, tmp_path):
    all_raise(processes, ["extra: Object of type set"], f"{HERE}:save_unwritable_extra", str(tmp_path / "c"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(("place", "process"), [("documents", 0), ("documents", 1), ("digests", 1), ("array", 0)])
def test_what_one_process_cannot_read_is_an_error_in_all(place, process, begun_run, processes):
    newest = max(int(path.name) for path in begun_run.glob("*") if path.name.isdigit())
    all_raise(
        processes, ["DamagedError: ", "not here"], f"{HERE}:restore_unreadable", str(begun_run), place, process, newest
    )


def test_all_fall_back_where_one_process_cannot_read(processes, tmp_path):
    for step in (1, 2):
        processes.call(f"{HERE}:save_step", str(tmp_path / "run"), step)
    found = processes.call(f"{HERE}:restore_unreadable", str(tmp_path / "run"), "array", 1, 2, True, timeout_s=60)
    assert [extra["step"] for extra in found] == [1, 1]


def test_memory_that_one_process_lacks_is_an_error_in_all_and_the_run_goes_on(processes, tmp_path):
    processes.call(f"{HERE}:save_step", str(tmp_path / "run"), 1)
    processes.start(f"{HERE}:save_without_memory", str(tmp_path / "run"), 2)
    first, second = processes.results(timeout_s=60)
    assert str(first) == "RuntimeError: process 1: no memory" and str(second) == "MemoryError: no memory"
    assert processes.call(f"{HERE}:save_step", str(tmp_path / "run"), 3) == [[1, 3], [1, 3]]


def test_a_process_that_ends_with_an_error_waits_for_no_other(processes, tmp_path):
    assert processes.call(f"{HERE}:leave_alone", str(tmp_path / "run"), 1, timeout_s=60) == [[1], []]
