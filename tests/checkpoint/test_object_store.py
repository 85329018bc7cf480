"""Checkpoints in an object store: complete or not listed, whatever the store and the process do meanwhile."""

import contextlib
import functools
import itertools
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, ClassVar

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import settings
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

import jfsdp
from jfsdp.checkpoint.convert import convert, write_source
from jfsdp.checkpoint.disk.digest import list_files
from jfsdp.checkpoint.disk.files import COMMIT, SUMS, DamagedError, content_path
from jfsdp.checkpoint.disk.paths import find_checkpoints
from jfsdp.checkpoint.objects import place, writer
from jfsdp.checkpoint.objects.reader import open_checkpoint
from jfsdp.checkpoint.source import read_whole
from jfsdp.checkpoint.verify import verify
from jfsdp.objects import lease as leases
from jfsdp.objects.path import ObjectPath, StoreError
from tests.checkpoint.arrays import Arrays
from tests.checkpoint.test_damage import TX, Net, damage, damages, model, state_of
from tests.objects.faulty import Killed, faulty_store, s3_server
from tests.objects.gcs import gcs_server
from tests.processes import Processes
from tests.refusals import refuses, warning
from tests.sharding import fully_shard
from tests.states import logical

NUMBERS = itertools.count()


def new_root() -> ObjectPath:
    return ObjectPath(f"memory://checkpoints-{next(NUMBERS)}/run")


def check_equal(one: Any, other: Any) -> None:
    first, second = logical(one), logical(other)
    assert first.keys() == second.keys()
    for name, value in first.items():
        np.testing.assert_array_equal(value, second[name], err_msg=name)


def save_steps(run: Any, *steps: int) -> None:
    for step in steps:
        run.save(step, state_of(step), extra={"position": step})
    run.wait()


@pytest.fixture
def quick_leases(monkeypatch) -> None:
    monkeypatch.setattr(leases, "LEASE_S", 0.1)
    monkeypatch.setattr(leases, "RENEW_S", 60.0)
    monkeypatch.setattr(place, "GARBAGE_S", 0.0)


MESHES = [
    ({"fsdp": 8}, {}),
    ({"replica": 2, "fsdp": 4}, {"strategy": "zero2", "storage": "flat"}),
    ({"replica": 4, "fsdp": 2}, {"strategy": "ddp"}),
]


@functools.cache
def on(at: int) -> Any:
    mesh, options = MESHES[at]
    return fully_shard(Net, mesh=jfsdp.make_mesh(**mesh), min_size=8, **options)


def check_round_trip(root: ObjectPath, at: int, directory: Path) -> None:
    state = on(at).init(TX, seed=3)
    jfsdp.checkpoint.save(root, state, extra=[1], config={"a": 2})
    for other in range(len(MESHES)):
        check_equal(jfsdp.checkpoint.restore(str(root), on(other).abstract_state(TX)), state)
    found = verify(str(root))
    assert found.is_ok and not found.remarks
    again = root.parent / "again"
    convert(str(root), directory / "c")
    convert(directory / "c", str(again))
    check_equal(jfsdp.checkpoint.restore(again, on(at).abstract_state(TX)), state)
    assert find_checkpoints(str(again)) == [again]
    refuses(lambda: jfsdp.checkpoint.save(root, state), f"{root}: already exists")


@pytest.mark.parametrize("at", range(3))
def test_a_state_comes_back_to_the_bit_on_any_mesh_and_goes_to_disk_and_back(at, tmp_path, monkeypatch):
    monkeypatch.setattr(writer, "PACK_BYTES", 2000)
    check_round_trip(new_root(), at, tmp_path)


@pytest.mark.parametrize("kind", ["s3", "gs"])
def test_a_server_stores_the_same(kind, tmp_path, monkeypatch):
    with s3_server(monkeypatch) if kind == "s3" else gcs_server(monkeypatch, tmp_path) as bucket:
        check_round_trip(ObjectPath(f"{bucket}/runs/c"), 1, tmp_path)


@pytest.fixture(scope="module")
def saved() -> Any:
    """A run of the steps 1, 2 and 3."""
    with jfsdp.checkpoint.Checkpointer(new_root()) as run:
        for step in (1, 2, 3):
            run.save(step, state_of(step), {"data": step}, config={"lr": 1e-3}, metrics={"loss": 0.5})
        run.wait()
        yield run


def check_damages(run: Any, num: int, seed: int) -> None:
    """Damage each object of step 3 in turn: it is named, nothing of it is restored, and a run falls back to step 2."""
    path = run.directory / "3"
    content = content_path(path)
    files = {name: content / name for name in [*list_files(content), SUMS]} | {COMMIT: path / COMMIT}
    chosen = damages(list(files), num, seed)
    assert {name for name, *_ in chosen} == set(files)
    for name, kind, where, bit in chosen:
        if name == COMMIT and kind == "delete":
            continue  # such a step is not listed; see the test below
        whole = files[name].read_bytes()
        damage(files[name], kind, where, bit)
        try:
            problems = verify(path).problems
            assert problems and (name == COMMIT or name in problems[0]), (name, kind, problems)
            refuses(lambda: run.restore(state_of(1)), f"checkpoint {path}", "is damaged", error=DamagedError)
            with warning("Falling back to step 2"):
                state, extra = run.restore(state_of(1), fall_back=True)
            assert extra == {"data": 2}
            check_equal(state, state_of(2))
        finally:
            files[name].write_bytes(whole)
    assert verify(path).is_ok


def test_forty_damages_are_named_and_refused(saved):
    check_damages(saved, 40, seed=0)


@pytest.mark.proof
def test_each_of_a_thousand_damages_is_named_and_refused(saved):
    check_damages(saved, 1000, seed=1)


def test_steps_are_kept_listed_and_removed_with_all_their_objects():
    root = new_root()
    with jfsdp.checkpoint.Checkpointer(root, keep=2, keep_every=4) as run:
        assert run.steps() == [] and run.latest() is None
        save_steps(run, 1, 2, 3, 4, 5, 6)
        assert run.steps() == [4, 5, 6]
        state, extra = run.restore(model().abstract_state(TX), step=5)
        assert extra == {"position": 5}
        check_equal(state, state_of(5))
        refuses(lambda: run.restore(state_of(1), step=2), "no step 2", "4, 5, 6")
        refuses(lambda: run.save(6, state_of(6)), f"{root}/6", "already exists")
    assert {name.partition("/")[0] for name in root.walk()} == {"4", "5", "6", "lease"}


def test_what_a_dead_writer_left_is_removed_and_never_listed(quick_leases):
    root = new_root()
    with faulty_store(root.root) as store:
        run = jfsdp.checkpoint.Checkpointer(root)
        save_steps(run, 1)
        for after in range(3, 18, 2):
            store.until_killed = after
            with pytest.raises(Killed):
                save_steps(run, 2)
            store.until_killed = None
            assert run.steps() == [1]
        assert len(list((root / "2").iterdir())) > 1
        again = jfsdp.checkpoint.Checkpointer(root)
        save_steps(again, 3)
        assert again.steps() == [1, 3] and not (root / "2").exists()
        again.close()


def test_of_two_writers_the_paused_one_commits_nothing_more(quick_leases):
    root = new_root()
    paused = jfsdp.checkpoint.Checkpointer(root)
    save_steps(paused, 1)
    second = jfsdp.checkpoint.Checkpointer(root)
    save_steps(second, 2)
    with pytest.raises(StoreError, match="another process"):
        save_steps(paused, 3)
    assert second.steps() == [1, 2]
    paused.close()
    save_steps(second, 4)
    assert second.steps() == [1, 2, 4] and not (root / "3").exists()
    second.close()


def test_a_commit_after_a_pause_is_taken_back(quick_leases, monkeypatch):
    """The process is paused between its last renewal and COMMIT, and another one takes the lease."""
    root = new_root()
    first, create = jfsdp.checkpoint.Checkpointer(root), ObjectPath.create
    save_steps(first, 1)

    def pause(self: ObjectPath, data: Any) -> Any:
        if self == root / "2" / COMMIT:
            monkeypatch.undo()
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(leases, "LEASE_S", 0.1)
                second = jfsdp.checkpoint.Checkpointer(root)
                save_steps(second, 3)
        return create(self, data)

    monkeypatch.setattr(ObjectPath, "create", pause)
    with pytest.raises(StoreError, match="another process"):
        save_steps(first, 2)
    assert first.steps() == [1, 3]


def test_an_upload_that_outlives_its_save_changes_no_later_one(monkeypatch):
    """A pack fails while the chunks of another one are being copied slowly."""
    root, send, copy = new_root(), ObjectPath.write_bytes, writer._bytes_of
    monkeypatch.setattr(writer, "PACK_BYTES", 2000)

    def copy_slowly(part: Any, *args: Any) -> Any:
        time.sleep(0.02)
        return copy(part, *args)

    def fail(self: ObjectPath, data: Any) -> Any:
        raise StoreError(5, "told to fail", str(self))

    with jfsdp.checkpoint.Checkpointer(root) as run:
        with monkeypatch.context() as patch:
            patch.setattr(writer, "_bytes_of", copy_slowly)
            patch.setattr(
                ObjectPath, "write_bytes", lambda path, data: (send if "2" in path.name else fail)(path, data)
            )
            with pytest.raises(StoreError, match="told to fail"):
                save_steps(run, 1)
        save_steps(run, 2)
        time.sleep(0.5)
        assert not (root / "1").exists()
        check_equal(run.restore(state_of(0))[0], state_of(2))


def test_arrays_without_elements_and_of_odd_dtypes_come_back(tmp_path):
    import ml_dtypes

    arrays = {
        "params.empty": np.zeros((0, 3), np.float32),
        "params.scalar": np.array(2.5, ml_dtypes.bfloat16),
        "params.small": np.arange(-8, 7).astype(ml_dtypes.int4).reshape(3, 5),
        "params.bits": np.array([True, False, True]),
    }
    source, root = Arrays(arrays), new_root()
    write_source(str(root), source, {}, {"layout.json": None, "config.json": None, "extra.json": [None]})
    found = open_checkpoint(root)
    for name, value in arrays.items():
        read = read_whole(found, name)
        assert (read.dtype, read.shape, read.tobytes()) == (value.dtype, value.shape, value.tobytes())


def test_a_commit_whose_answer_is_lost_counts_and_its_objects_stay(monkeypatch):
    root = new_root()
    create = ObjectPath.create

    def lose(self: ObjectPath, data: Any) -> Any:
        tag = create(self, data)
        if self.name == COMMIT:
            raise StoreError(5, "timed out", str(self))
        return tag

    monkeypatch.setattr(ObjectPath, "create", lose)
    with jfsdp.checkpoint.Checkpointer(root) as run:
        save_steps(run, 1)
        check_equal(run.restore(state_of(0))[0], state_of(1))


def test_an_upload_that_fails_is_told_and_leaves_earlier_steps_and_the_run_usable():
    root = new_root()
    with faulty_store(root.root) as store, jfsdp.checkpoint.Checkpointer(root) as run:
        save_steps(run, 1)
        store.rate, store.random = (
            1.0,
            type("Always", (), {"random": lambda _: 0.0, "choice": lambda _, faults: "drop"})(),
        )
        with pytest.raises(StoreError, match="503"):
            save_steps(run, 2)
        store.rate = 0.0
        save_steps(run, 3)
        assert run.steps() == [1, 3]


class Runs(RuleBasedStateMachine):
    """A run whose process is killed, paused and followed by others, on a store with faults.

    Attributes:
      committed: steps that a save reported as complete.
      unknown: steps of saves that raised, which may be complete.
    """

    totals: ClassVar[dict[str, int]] = {}

    @initialize(seed=st.integers(0, 2**32))
    def begin(self, seed: int) -> None:
        self.root, self.step = new_root(), 0
        self.context = faulty_store(self.root.root, seed)
        self.store = self.context.__enter__()
        self.committed: set[int] = set()
        self.unknown: set[int] = set()
        self.run, self.paused = jfsdp.checkpoint.Checkpointer(self.root, keep=None), []

    def teardown(self) -> None:
        if hasattr(self, "store"):
            Runs.totals["faults"] += sum(self.store.counts.values())
            self.context.__exit__(None, None, None)

    def _save(self, run: Any) -> None:
        self.step += 1
        try:
            save_steps(run, self.step)
            self.committed.add(self.step)
        except (OSError, ValueError, Killed):
            self.unknown.add(self.step)
        finally:
            self.store.rate, self.store.until_killed = 0.0, None

    @rule(rate=st.sampled_from([0.0, 0.02, 0.2]))
    def save(self, rate: float) -> None:
        self.store.rate = rate
        self._save(self.run)

    @rule(after=st.integers(0, 25))
    def kill(self, after: int) -> None:
        self.store.until_killed = after
        self._save(self.run)
        self.run = jfsdp.checkpoint.Checkpointer(self.root, keep=None)

    @rule()
    def pause(self) -> None:
        self.paused.append(self.run)
        self.run = jfsdp.checkpoint.Checkpointer(self.root, keep=None)

    @rule()
    def resume_paused(self) -> None:
        """The paused process goes on, and commits only if nobody has its lease."""
        if self.paused:
            self._save(self.paused.pop())

    @rule(keep=st.integers(1, 3), rate=st.sampled_from([0.0, 0.1]))
    def prune(self, keep: int, rate: float) -> None:
        listed, run = self.run.steps(), jfsdp.checkpoint.Checkpointer(self.root, keep=keep)
        self.store.rate = rate
        with contextlib.suppress(OSError, ValueError):
            run.prune()
        self.store.rate = 0.0
        self.run = jfsdp.checkpoint.Checkpointer(self.root, keep=None)
        assert run.steps()[-keep:] == listed[-keep:]
        self.committed &= {*listed[-keep:], *run.steps()}

    @invariant()
    def every_listed_step_is_one_that_was_saved_and_restores(self) -> None:
        if not hasattr(self, "run"):
            return
        Runs.totals["steps"] += 1
        steps = self.run.steps()
        assert self.committed <= {*steps} <= self.committed | self.unknown
        for step in steps[-2:]:
            check_equal(self.run.restore(state_of(0), step=step)[0], state_of(step))


def run_machine(monkeypatch: Any, num: int, length: int) -> None:
    from hypothesis.stateful import run_state_machine_as_test

    monkeypatch.setattr(place, "GARBAGE_S", 0.0)
    monkeypatch.setattr(leases, "LEASE_S", 0.02)
    monkeypatch.setattr(leases, "RENEW_S", 60.0)
    Runs.totals = {"steps": 0, "faults": 0}
    options = settings(max_examples=num, stateful_step_count=length, deadline=None, database=None, derandomize=True)
    run_state_machine_as_test(Runs, settings=options)
    print(f"steps and faults tried: {Runs.totals}")


@pytest.mark.filterwarnings("ignore:.*older steps cannot be deleted")
def test_a_run_on_a_store_with_faults_lists_only_what_restores(monkeypatch):
    run_machine(monkeypatch, num=10, length=12)
    assert Runs.totals["faults"]


@pytest.mark.proof
@pytest.mark.filterwarnings("ignore:.*older steps cannot be deleted")
def test_many_runs_on_a_store_with_faults_list_only_what_restores(monkeypatch):
    run_machine(monkeypatch, num=300, length=30)


# What the interrupted process runs: it saves step after step until it is killed, resuming where it was.
ENDLESS = """
import itertools, sys
from tests.checkpoint.arrays import Arrays
from tests.checkpoint.test_damage import jfsdp, state_of

run = jfsdp.checkpoint.Checkpointer(sys.argv[1], keep=3)
for step in itertools.count((run.latest() or 0) + 1):
    run.save(step, state_of(step), extra={"position": step})
    print(step, flush=True)
"""


def check_kills(root: ObjectPath, num: int) -> None:
    """Kill processes that save to a server, each at another moment; after each, all steps are whole and go on."""
    latest = 0
    for number in range(num):
        command = [sys.executable, "-c", ENDLESS, str(root)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]) as process:
            assert process.stdout is not None
            for _ in range(3):
                assert process.stdout.readline(), "the saving process ended by itself"
            time.sleep(0.3 * number / num)
            process.send_signal(signal.SIGKILL)
        run = jfsdp.checkpoint.Checkpointer(root)
        assert run.steps()[-1] > latest
        latest = run.steps()[-1]
        for step in run.steps():
            state, extra = run.restore(state_of(0), step=step)
            assert extra == {"position": step}
            check_equal(state, state_of(step))


@pytest.mark.parametrize("num", [2, pytest.param(50, marks=pytest.mark.proof)])
def test_kill_while_saving_to_a_server_leaves_only_steps_that_restore(num, monkeypatch):
    with s3_server(monkeypatch) as bucket:
        check_kills(ObjectPath(f"{bucket}/run"), num)


def test_two_processes_write_each_its_packs_and_a_failure_of_one_is_raised_in_both(monkeypatch):
    with s3_server(monkeypatch) as bucket:
        running = Processes(2, devices_each=2)
        try:
            path = f"{bucket}/two"
            running.call("tests.checkpoint.remote:save", "full_shard", "per_parameter", path)
            packs = {name for name in content_path(ObjectPath(path)).walk() if name.endswith(".bin")}
            assert {name.rpartition("/")[2].partition("-")[0] for name in packs} == {"0", "1"}
            found = running.call("tests.checkpoint.remote:read_back", path)
            assert found == ["equal", "equal"]
            told = running.call("tests.checkpoint.remote:fail_to_upload", f"{bucket}/three")
            assert "told to fail" in told[1] and "process" in told[0]
            assert not (ObjectPath(f"{bucket}/three") / COMMIT).exists()
        finally:
            running.close()
