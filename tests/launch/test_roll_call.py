"""Whether all processes of a run are there, once, and alike."""

import re
import socket
import threading
import time
from typing import Any

import pytest

from jfsdp.launch import roll_call
from jfsdp.launch.environment import Place
from jfsdp.launch.roll_call import NotAllThere, call_roll
from jfsdp.launch.supervisor import free_port
from tests.refusals import refusing

SAME = {"jax": "0.10.2", "seed": 0}


def call(ids, *, count=None, told=None, timeout_s=10.0, counts=None, **enough):
    """Call the roll in a thread per process; return what each raised, or "" where all was well, or who came."""
    address, found = f"localhost:{free_port()}", list[Any](["no word"] * len(ids))

    def run(place, process):
        own = (counts or {}).get(place, count or len(ids))
        try:
            came = call_roll(Place("test", address, own, process, **enough), (told or {}).get(place, SAME), timeout_s)
            found[place] = "" if came == list(range(own)) else came
        except ValueError as error:
            found[place] = str(error)

    threads = [threading.Thread(target=run, args=one) for one in enumerate(ids)]
    for thread in reversed(threads):  # process 0 last: the others wait for it
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return found


def test_fewer_go_on_without_those_that_do_not_come():
    assert call([0, 1, 3], count=4, timeout_s=1.0, min_nproc=3) == [[0, 1, 3]] * 3
    found = call([0, 3], count=4, timeout_s=1.0, min_nproc=3)
    assert all("2 of 4 processes did not come" in text for text in found), found


def test_process_0_says_once_for_whom_it_waits_and_nothing_when_all_are_there(monkeypatch, capsys):
    monkeypatch.setattr(roll_call, "SILENT_S", 1.0)
    call([0, 2], count=4, timeout_s=2.0)
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "2 of 4 processes: 1, 3;" in said[0], said
    assert call([0, 1, 2, 3]) == [""] * 4
    assert not capsys.readouterr().err


@pytest.mark.parametrize("absent", [(2,), (0, 1)])
def test_nobody_waits_for_those_that_are_not_started_any_more(absent):
    ids = [process for process in range(4) if process not in absent]
    begin = time.monotonic()
    assert call(ids, count=4, timeout_s=60.0, min_nproc=1, absent=absent) == [ids] * len(ids)
    assert time.monotonic() - begin < 20


@pytest.mark.parametrize(
    ("case", "words"),
    [
        ({"ids": [0, 1, 3], "count": 4, "timeout_s": 1.0}, "1 of 4 processes did not come within 1 s: 2;"),
        ({"ids": [0, 1, 1], "count": 3, "timeout_s": 5.0}, "two processes are process 1:"),
        ({"ids": [0, 1], "counts": {1: 3}}, "process 1 (.*) expects 3 processes, and process 0 (.*) expects 2;"),
        ({"ids": [0, 1, 2], "told": {1: SAME | {"seed": 7}}}, r"seed is 0, but process 1 (.*) has 7;"),
        ({"ids": [0, 1, 2], "told": {0: SAME | {"XLA_FLAGS": "-x"}}}, 'XLA_FLAGS is null, but process 0 .* has "-x"'),
    ],
)
def test_every_process_that_came_says_what_is_wrong(case, words):
    found = call(**case)
    assert found and all(text and re.search(words.replace("(.*)", r"\(.*\)"), text) for text in found), found


def test_a_port_that_another_program_has_and_a_process_0_out_of_reach_are_named_within_the_time():
    with socket.create_server(("", 0)) as other:
        port = other.getsockname()[1]
        with refusing("process 0", f"port {port}", error=NotAllThere):
            call_roll(Place("test", f"localhost:{port}", 2, 0), SAME, 1.0)
    for host in ("localhost", "no-such-host.invalid"):
        begin, port = time.monotonic(), free_port()
        place = Place("test", f"{host}:{port}", 2, 1)
        with refusing("process 1 of 2", f"process 0 at {host}:{port}", error=NotAllThere):  # again may mend it
            call_roll(place, SAME, 1.0)
        assert time.monotonic() - begin < 15


def test_strangers_at_the_port_are_no_processes_and_hold_nobody_up():
    address, silent = f"localhost:{free_port()}", []
    thread = threading.Thread(target=call_roll, args=(Place("test", address, 2, 0), SAME, 20.0))
    thread.start()
    odd = b'{"process": [], "count": 2, "told": 5, "who": ""}\n'
    for told in (b"GET / HTTP/1.1\r\n\r\n", b"", b"[1]\n", odd, b"[" * 100_000 + b"\n", *[None] * 5):
        while True:
            try:
                stranger = socket.create_connection(("localhost", int(address.split(":")[1])))
                break
            except ConnectionRefusedError:
                time.sleep(0.05)
        silent.append(stranger)
        if told is not None:
            stranger.sendall(told)
    begin = time.monotonic()
    call_roll(Place("test", address, 2, 1), SAME, 20.0)
    thread.join(timeout=20)
    assert not thread.is_alive() and time.monotonic() - begin < 4
    for stranger in silent:
        stranger.close()


def test_a_process_of_another_attempt_is_waited_for():
    """A host whose process failed before the others were there starts it again; they are still waiting."""
    address = f"localhost:{free_port()}"
    places = [Place("test", address, 3, process) for process in (1, 0)]
    threads = [threading.Thread(target=call_roll, args=(place, SAME, 20.0)) for place in places]
    for thread in threads:
        thread.start()
    time.sleep(0.5)
    call_roll(Place("test", address, 3, 2), SAME, 20.0)
    for thread in threads:
        thread.join(timeout=20)
        assert not thread.is_alive()


@pytest.mark.parametrize("host", ["localhost", "127.0.0.1", "[::1]"])
def test_addresses_of_both_kinds_are_served_and_the_port_is_free_for_jax_then(host):
    if host == "[::1]" and not socket.has_dualstack_ipv6():
        pytest.skip("this machine has no IPv6")
    for _ in range(2):
        port = free_port()
        other = threading.Thread(target=call_roll, args=(Place("test", f"{host}:{port}", 2, 1), SAME, 20.0))
        other.start()
        call_roll(Place("test", f"{host}:{port}", 2, 0), SAME, 20.0)
        with socket.socket(socket.AF_INET6 if socket.has_dualstack_ipv6() else socket.AF_INET) as jax:
            jax.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            jax.bind(("", port))
            jax.listen()
        other.join(timeout=20)
