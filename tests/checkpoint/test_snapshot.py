"""Snapshots in memory: bitwise into the layout they were taken in, and refused wherever a part of them is not there."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest

from jfsdp.checkpoint.disk.files import DamagedError
from jfsdp.checkpoint.snapshot import Snapshots, snapshot_dir
from jfsdp.train.replicas import compare_replicas
from jfsdp.trainer.run.stored import StoredRun
from tests.checkpoint.arrays import assert_same_bits
from tests.checkpoint.test_store import TX, make_model, saved_state
from tests.processes import Processes
from tests.refusals import refuses, refusing, warning
from tests.states import logical


def take(snapshots, *steps, name="full4"):
    for step in steps:
        snapshots.take(step, saved_state(name), {"at": step})
    snapshots.wait()


def like(name="full4"):
    return make_model(name).abstract_state(TX)


def test_a_run_in_an_object_store_finds_its_snapshots_again():
    """Its local directory has another path at each start."""
    runs = [StoredRun(f"memory://snapshots/{name}") for name in ("one", "one", "two")]
    places = [snapshot_dir(run) for run in runs]
    assert places[0] == places[1] != places[2]
    assert runs[0].local != runs[1].local and runs[0].local.name == "one"


@pytest.mark.parametrize("name", ["full4", "hybrid2x2", "hfsdp2x3bf16", "ddp4", "flatzero1bf16"])
def test_a_snapshot_is_bitwise_what_was_taken(name, tmp_path):
    take(Snapshots(tmp_path / "memory", "run"), 3, name=name)
    again = Snapshots(tmp_path / "memory", "run")
    assert again.newest(like(name)) == 3
    state, extras = again.restore(like(name), 3)
    assert_same_bits(logical(state), logical(saved_state(name)))
    assert extras == [{"at": 3}]
    for value, wanted in zip(jax.tree.leaves(state), jax.tree.leaves(like(name)), strict=True):
        assert (value.shape, value.dtype, value.sharding) == (wanted.shape, wanted.dtype, wanted.sharding)


def test_one_that_is_whole_stays_until_the_next_is(tmp_path):
    snapshots = Snapshots(tmp_path, "run")
    take(snapshots, 1, 2)
    assert [path.name for path in tmp_path.iterdir()] == ["2"]
    snapshots.take(5, saved_state("full4"))
    assert snapshots._thread is not None
    snapshots._thread.join()
    assert {path.name for path in tmp_path.iterdir()} == {"2", "5"}
    half = tmp_path / "5" / "0"  # as a process leaves it that is killed
    half.write_bytes(half.read_bytes()[:-9])
    assert Snapshots(tmp_path, "run").newest(like()) == 2
    (tmp_path / "2" / "0").write_bytes((tmp_path / "2" / "0").read_bytes().replace(b'"at": 2', b'"at": 3'))
    with pytest.warns(UserWarning, match=r"steps \[2, 5\] cannot be used"):
        assert Snapshots(tmp_path, "run").newest(like()) is None, "what stands beside the blocks has a digest too"


def test_a_step_that_another_process_begins_to_write_keeps_its_directory(tmp_path):
    snapshots = Snapshots(tmp_path, "run")
    snapshots.take(1, saved_state("full4"))
    (tmp_path / "2").mkdir()
    snapshots.wait()
    assert {path.name for path in tmp_path.iterdir()} == {"1", "2"}


@pytest.mark.filterwarnings("ignore:.*cannot be used")
def test_of_another_run_layout_or_process_none_is_taken(tmp_path):
    take(Snapshots(tmp_path, "run"), 4)
    assert Snapshots(tmp_path, "another").newest(like()) is None
    for name in ("full3", "ddp4"):
        assert Snapshots(tmp_path, "run").newest(like(name)) is None
    assert Snapshots(tmp_path, "run").newest(like("flat4")) == 4, "the same blocks, in another array"
    (tmp_path / "4" / "0").rename(tmp_path / "4" / "1")
    assert Snapshots(tmp_path, "run").newest(like()) is None


def test_a_flipped_bit_is_told_and_not_restored(tmp_path):
    take(Snapshots(tmp_path, "run"), 4)
    data = bytearray((tmp_path / "4" / "0").read_bytes())
    data[100] ^= 1
    (tmp_path / "4" / "0").write_bytes(data)
    snapshots = Snapshots(tmp_path, "run")
    assert snapshots.newest(like()) == 4
    refuses(lambda: snapshots.restore(like(), 4), "differ from their digest", error=DamagedError)
    refuses(lambda: snapshots.restore(like(), 5), tmp_path, "step 5")


def test_a_full_memory_keeps_the_one_before(tmp_path, monkeypatch):
    snapshots = Snapshots(tmp_path, "run")
    take(snapshots, 1)

    def full(*args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("jfsdp.checkpoint.snapshot.os.replace", full)
    with warning("step 2", "process 0"):
        take(snapshots, 2)
    monkeypatch.undo()
    assert Snapshots(tmp_path, "run").newest(like()) == 1


def test_where_there_is_no_room_and_what_others_can_write_is_refused(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    (tmp_path / "home" / "7").mkdir(parents=True)
    (tmp_path / "memory").symlink_to(tmp_path / "home")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    linked = Snapshots(tmp_path / "memory", "run")
    for use in (
        lambda: linked.keep(None),
        lambda: linked.newest(like()),
        linked.clear,
        lambda: Snapshots(tmp_path / "open" / "memory", "run").check_room(like()),
    ):
        refuses(use, "only this user")
    assert (tmp_path / "home" / "7").is_dir()
    refuses(lambda: Snapshots(tmp_path / "file" / "m", "run").check_room(like()), tmp_path / "file", "JFSDP_SNAPSHOTS")
    monkeypatch.setattr("shutil.disk_usage", lambda path: SimpleNamespace(free=1000))
    refuses(lambda: Snapshots(tmp_path, "run").check_room(like()), "MiB", "JFSDP_SNAPSHOTS")
    monkeypatch.setenv("JFSDP_SNAPSHOTS", str(tmp_path))
    assert snapshot_dir("runs/one").parent == tmp_path and snapshot_dir("runs/one") != snapshot_dir("runs/two")


def test_what_is_left_of_others_goes_where_a_run_begins_and_its_own_where_it_ends(tmp_path):
    take(Snapshots(tmp_path / "memory", "old"), 7)
    (tmp_path / "memory" / "photos").mkdir()
    snapshots = Snapshots(tmp_path / "memory", "run")
    snapshots.keep(None)
    take(snapshots, 9)
    assert {path.name for path in (tmp_path / "memory").iterdir()} == {"9", "photos"}, "nothing but steps is removed"
    (tmp_path / "memory" / "photos").rmdir()
    snapshots.clear()
    assert not (tmp_path / "memory").exists()


@pytest.fixture(scope="module")
def processes():
    processes = Processes()
    yield processes
    processes.close()


@pytest.mark.parametrize(
    ("num_hosts", "strategy"), [(1, "full_shard"), (2, "full_shard"), (1, "ddp"), (2, "HYBRID_SHARD")]
)
def test_processes_find_on_their_host_what_they_need(tmp_path, processes, num_hosts, strategy):
    told = processes.call("tests.checkpoint.remote:snapshot", str(tmp_path), num_hosts, strategy)
    assert [one["newest"] for one in told] == [2, 2]
    assert all(one["same"] for one in told)
    assert told[0]["extras"] == told[1]["extras"] == [{"of": 0}, {"of": 1}]
    sizes = [one["bytes"] for one in told]
    whole = sum(sizes) / num_hosts if strategy == "ddp" else sum(sizes)
    assert max(sizes) < 0.7 * whole * (1 if num_hosts == 1 else 2), "processes of a host share the work"
    missing = processes.call("tests.checkpoint.remote:newest_without_file", str(tmp_path), strategy)
    assert missing == [None, None]


def test_a_step_that_was_taken_twice_is_not_put_together_of_both(tmp_path, processes):
    assert processes.call("tests.checkpoint.remote:newest_of_two_starts", str(tmp_path / "memory")) == [None, None]


def test_replicas_of_equal_bits_pass_and_one_changed_bit_is_named():
    state = saved_state("ddp4")
    assert 8 < compare_replicas(state) > compare_replicas(saved_state("full4")) >= 1, "the counters"
    assert all(compare_replicas(saved_state(name)) > 4 for name in ("hybrid2x2", "flatzero1bf16"))
    array = state.params["stack.kernel"]
    shards = [np.array(shard.data) for shard in array.addressable_shards]
    shards[3].reshape(-1).view(np.uint32)[17] ^= 1
    changed = jax.make_array_from_single_device_arrays(
        array.shape, array.sharding, [jax.device_put(x, s.device) for x, s in zip(shards, array.addressable_shards)]
    )
    broken = type(state)(**{**vars(state), "params": {**state.params, "stack.kernel": changed}})
    with refusing("stack.kernel", "device 3", "process 0", "4"):
        compare_replicas(broken)
