"""A lease: one holder, renewed while it lives, taken over when it is dead, and lost by who could not renew it."""

import gc
import itertools
import json
import os
import subprocess
import sys
import threading
import time

import pytest

from jfsdp.objects import lease as leases
from jfsdp.objects.lease import Lease
from jfsdp.objects.path import ChangedError, ObjectPath, StoreError
from tests.objects.faulty import faulty_store
from tests.refusals import refuses

NUMBERS = itertools.count()


@pytest.fixture
def path(monkeypatch):
    monkeypatch.setattr(leases, "LEASE_S", 0.6)
    monkeypatch.setattr(leases, "RENEW_S", 0.1)
    return ObjectPath(f"memory://lease-{next(NUMBERS)}/run/lease")


def take(path):
    return Lease(path, "run x is in use by", "stop it")


def elsewhere(path, **changed):
    """Write what another process's lease would have written."""
    body = {"process": 1, "node": "other", "place": "elsewhere", "id": "b", "count": 7, "is_held": True} | changed
    path.write_bytes(json.dumps(body).encode())


def test_a_living_holder_refuses_others_until_it_releases(path):
    lease = take(path)
    refuses(lambda: take(path), f"run x is in use by process {os.getpid()}", "stop it")
    lease.check()
    lease.release()
    begin = time.monotonic()
    take(path).release()
    assert time.monotonic() - begin < 0.3, "nothing to wait for"


def test_a_dead_holder_elsewhere_is_replaced_after_the_lease_and_a_dead_process_of_this_host_at_once(path):
    elsewhere(path)
    begin = time.monotonic()
    take(path).release()
    assert time.monotonic() - begin > 0.6
    gone = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True)
    elsewhere(path, place=leases._place(), process=int(gone.stdout))
    begin = time.monotonic()
    take(path).release()
    assert time.monotonic() - begin < 0.3
    elsewhere(path, place=leases._place(), process=os.getpid())
    begin = time.monotonic()
    take(path).release()
    assert time.monotonic() - begin > 0.6, "a process of that number runs"


def test_a_paused_holder_finds_that_it_lost_the_lease(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda self: None)  # never renews
        paused = take(path)
    elsewhere(path)
    with pytest.raises(ChangedError):
        paused.check()
    paused.release()
    assert json.loads(path.read_bytes())["id"] == "b", "the new holder's lease stays"


def test_a_deleted_lease_is_lost_and_one_of_other_contents_is_named(path):
    lease = take(path)
    path.unlink()
    with pytest.raises(ChangedError, match="deleted"):
        lease.check()
    path.write_bytes(b"garbage")
    with pytest.raises(StoreError, match="not a lease"):
        take(path)


def test_of_many_that_begin_at_once_one_gets_the_lease(path):
    elsewhere(path)
    got, refused, begin = [], [], threading.Barrier(8)

    def run():
        begin.wait()
        try:
            got.append(take(path))
        except ValueError as error:
            refused.append(error)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert (len(got), len(refused)) == (1, 7)
    got[0].release()


@pytest.mark.parametrize("ignored", ["If-None-Match", "If-Match"])
def test_a_store_that_ignores_conditions_is_refused(path, ignored):
    with faulty_store(path.root) as store:
        put = store.store.put

        def ignore(*args, mode=None, **options):
            is_kept = mode is not None and (mode == "create") != (ignored == "If-None-Match")
            return put(*args, **({"mode": mode} if is_kept else {}), **options)

        store.put = ignore
        with pytest.raises(StoreError, match=f"ignores {ignored}"):
            take(path)


def test_a_holder_that_is_dropped_does_not_block_its_own_process(path):
    take(path)
    gc.collect()
    time.sleep(0.3)
    take(path).release()


def test_a_lease_survives_a_store_that_does_not_answer_for_a_while(path):
    with faulty_store(path.root, seed=3) as store:
        lease = take(path)
        store.rate = 0.5
        time.sleep(1.0)
        store.rate = 0.0
        lease.check()
        lease.release()
        assert sum(store.counts.values())
