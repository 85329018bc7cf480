"""A process that does not get on, and what the others are told."""

import threading
import time

import pytest

from jfsdp import compat
from jfsdp.launch import watch
from jfsdp.launch.environment import RESTART, Place
from tests.refusals import check_facts

PLACE = Place("test", None, 2, 1)


class Store:
    """The key-value store of JAX's coordination service, as far as it is used."""

    def __init__(self):
        self.told = {}

    def key_value_set(self, key, value):
        if key in self.told:
            raise RuntimeError("ALREADY_EXISTS")
        self.told[key] = value

    def key_value_try_get(self, key):
        return self.told[key]


class Silent(Store):
    """One whose process is stopped: it never answers."""

    def key_value_set(self, key, value):
        threading.Event().wait()

    key_value_try_get = key_value_set  # type: ignore[assignment]


@pytest.fixture
def ended(monkeypatch):
    """With which statuses this process would have ended, in the order of the calls."""
    statuses = []
    monkeypatch.setattr(watch, "end_process", lambda _, status: statuses.append(status))
    for name in ("_PERIOD_S", "_REPORT_S", "_LINGER_S"):
        monkeypatch.setattr(watch, name, 0.05)
    return statuses


@pytest.fixture
def join(monkeypatch):
    def join(store, process=1, count=2):
        monkeypatch.setattr(compat, "coordination_store", lambda: (store, process, count))

    return join


def wait_for(condition, timeout_s=10.0):
    until = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    assert condition()


@pytest.mark.parametrize("store", [Store(), Silent()])
def test_what_takes_too_long_ends_the_process_with_its_place_and_stacks(store, join, ended, capfd):
    join(store)
    with watch.Watch(0.2, PLACE) as watching, watching.at("step 7"):
        wait_for(lambda: ended)
    assert ended == [watch.STUCK]
    said = capfd.readouterr().err
    check_facts(said, "process 1 of 2", "step 7", "0.2 s", "test_watch.py")


def test_what_gets_on_is_left_alone_and_what_is_inside_counts_for_itself(join, ended):
    join(Store())
    with watch.Watch(0.3, PLACE) as watching, watching.at("an evaluation"):
        for batch in range(6):
            with watching.at(f"batch {batch}"):
                time.sleep(0.1)
    with watch.Watch(0.1, PLACE) as watching, watching.at("a save", times=20):
        time.sleep(0.5)
    with watch.Watch(0, PLACE) as watching, watching.at("anything"):
        time.sleep(0.2)
    assert not ended


@pytest.mark.parametrize(("last", "ends"), [(10**9, False), (4, True)])
def test_what_says_that_it_gets_on_has_its_time_anew(join, ended, last, ends):
    """As a save does, whose bytes on disk grow: a slow file system is no hang, and one that stands still is."""
    join(Store())
    begin = time.monotonic()

    def progress():
        return min(int((time.monotonic() - begin) / 0.1), last)

    with watch.Watch(0.2, PLACE) as watching, watching.at("a save", 1, progress):
        time.sleep(1.5)
    assert ended[:1] == [watch.STUCK] * ends


def test_what_ends_while_it_is_asked_is_no_hang(join, ended):
    join(Store())
    with watch.Watch(0.1, PLACE) as watching:
        with watching.at("a save", 1, lambda: time.sleep(0.4)):
            time.sleep(0.6)  # it is asked at its begin, and again when its time is over
        time.sleep(0.6)
    assert not ended


def test_a_file_system_that_does_not_answer_has_stopped(join, ended, monkeypatch):
    monkeypatch.setattr(watch, "ANSWER_S", 0.1)
    join(Store())
    with watch.Watch(0.1, PLACE) as watching, watching.at("a save", 1, lambda: time.sleep(20)):
        wait_for(lambda: ended)


def test_the_others_end_with_the_error_of_the_one_that_failed(join, ended, capfd):
    """Also one whose own error followed from it."""
    store = Store()
    join(store, process=0)
    watch.tell_and_end("disk full", 4)
    join(store, process=1)
    with watch.Watch(0, PLACE):
        wait_for(lambda: watch.ENDED_BY_OTHERS in ended)
    assert "process 0 of 2: disk full" in capfd.readouterr().err
    del ended[1:]
    watch.tell_and_end("connection closed", 1)
    assert ended == [4, watch.ENDED_BY_OTHERS]
    assert "before: process 0 of 2: disk full" in capfd.readouterr().err


def test_where_one_cannot_begin_the_others_are_not_to_be_restarted_either(join, ended):
    store = Store()
    join(store, process=0)
    watch.tell_and_end("no such data", watch.USAGE)
    join(store, process=1)
    watch.tell_and_end("connection closed", 1)
    with watch.Watch(0, PLACE):
        wait_for(lambda: len(ended) > 2)
    assert set(ended) == {watch.USAGE}


def test_one_process_alone_is_told_and_goes_on_or_ends_where_a_launcher_starts_it_again(ended, capfd, monkeypatch):
    with watch.Watch(0.1) as watching, watching.at("the data of step 3"):
        time.sleep(0.5)
    watch.tell_and_end("anything", 1)
    assert not ended and capfd.readouterr().err.count("the data of step 3 takes more than 0.1 s") == 2
    monkeypatch.setenv(RESTART, "0")
    with watch.Watch(0.1) as watching, watching.at("the data of step 3"):
        wait_for(lambda: ended)
    assert ended == [watch.STUCK]


def test_the_store_of_this_jax_is_found():
    assert compat.coordination_store() == (None, 0, 1)
