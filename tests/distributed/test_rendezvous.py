import contextlib
import json
import socket
import threading
import time

import pytest

from weft.distributed.peers import Peers
from weft.distributed.rendezvous import connect_peers, rendezvous
from weft.errors import ProcessesNotReadyError, ProcessLostError


@pytest.fixture(autouse=True)
def no_forced_exits(monkeypatch):
    """Disables forced exits: several processes are simulated in this one."""
    monkeypatch.setattr(Peers, "_force_exit", lambda peers, text: None)


@pytest.fixture
def address():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{s.getsockname()[1]}"


def together(address, places, timeout=10.0):
    """Returns the results or errors of `rendezvous` called with each (id, number) or token."""
    results = {}

    def run(key, index, count, token=""):
        try:
            results[key] = rendezvous(
                address,
                process_id=index,
                num_processes=count,
                timeout_seconds=timeout,
                token=token,
            )
        except ProcessesNotReadyError as error:
            results[key] = error

    threads = [threading.Thread(target=run, args=(key, *place)) for key, place in enumerate(places)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[key] for key in sorted(results)]


def test_all_meet_and_address_is_released(address):
    lines = together(address, [(0, 3), (1, 3), (2, 3)])
    port = int(address.rpartition(":")[2])
    with socket.create_server(("127.0.0.1", port)):
        agreed = []
        threads = [
            threading.Thread(target=lambda c=c: agreed.append(c.agree(lambda: None))) for c in lines
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert agreed == [None] * 3
    for peers in lines:
        peers.leave()


def test_missing_processes_are_named(address):
    for error in together(address, [(0, 4), (2, 4)], timeout=1.5):
        assert isinstance(error, ProcessesNotReadyError)
        assert str(error).startswith(f"processes 1, 3 of 4 did not come to {address} within 1.5 s.")
        assert "Present: process 0 of 4 (host " in str(error) and "process 2 of 4" in str(error)


def test_without_process_0_the_address_is_named(address):
    (error,) = together(address, [(1, 2)], timeout=0.3)
    assert str(error).startswith(f"process 1 of 2 could not join process 0 at {address}")
    assert "Check in its log whether it runs" in str(error)


@contextlib.contextmanager
def first_of(address, count, timeout=20.0, token=""):
    """Process 0 in a thread; gives where to connect, and what it found at the end."""
    found = []

    def run():
        try:
            meeting = rendezvous(
                address,
                process_id=0,
                num_processes=count,
                timeout_seconds=timeout,
                token=token,
            )
            found.append(meeting)
        except ProcessesNotReadyError as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield found
    thread.join(timeout=30)
    for peers in found:
        if not isinstance(peers, Exception):
            peers.leave(patience_seconds=0)


def connected(address):
    host, _, port = address.rpartition(":")
    while True:
        with contextlib.suppress(ConnectionRefusedError):
            return socket.create_connection((host, int(port)), timeout=20)
        time.sleep(0.01)


def come(address, index, of, pid, **more):
    connection = connected(address)
    hello = {"process": index, "of": of, "token": "", "host": "h", "pid": pid}
    connection.sendall(json.dumps(hello | more).encode() + b"\n")
    return connection


def test_duplicates_and_strangers_are_rejected(address):
    def refused(*hello):
        with come(address, *hello) as connection, connection.makefile() as lines:
            return json.loads(lines.readline())["refused"]

    with first_of(address, 3), come(address, 1, 3, 7) as ours:
        for text in (b"GET / HTTP/1.1\r\n\r\n", json.dumps({"token": "?"}).encode() + b"\n"):
            with connected(address) as stranger:
                stranger.sendall(text)
                assert stranger.recv(10) == b""
        told = refused(1, 3, 8)
        assert told.startswith("process 1 of 3 came to a run of 3 processes, in which process 1 of")
        assert told.endswith("is there already. Give each process its own number.")
        assert "process 2 of 5 came to a run of 3 processes. Give each" in refused(2, 5, 9)
        with come(address, 2, 3, 10) as last:
            assert b"welcome" in ours.recv(1000) and b"welcome" in last.recv(1000)


def test_silent_connections_do_not_block(address):
    started = time.monotonic()
    with contextlib.ExitStack() as stack, first_of(address, 2):
        scanner = stack.enter_context(connected(address))
        dribbling = stack.enter_context(connected(address))
        dribbling.sendall(b'{"proc')
        stranger = stack.enter_context(connected(address))
        stranger.sendall(b'{"process": 1, "token": ""}\n')  # without the rest
        assert stranger.recv(10) == b""
        flood = stack.enter_context(connected(address))
        with contextlib.suppress(ConnectionError):
            flood.sendall(b"x" * (1 << 20))
        with come(address, 1, 2, 7) as ours:
            assert b"welcome" in ours.recv(1000)
        assert time.monotonic() - started < 12
        assert scanner.recv(10) == dribbling.recv(10) == b""


def test_restarted_process_retakes_its_place(address, caplog):
    with first_of(address, 3) as found:
        come(address, 1, 3, 7).close()  # killed
        deadline = time.monotonic() + 10
        while "pid 7) ended before all" not in caplog.text and time.monotonic() < deadline:
            time.sleep(0.01)
        with come(address, 1, 3, 8) as again, come(address, 2, 3, 9) as last:
            assert b"welcome" in again.recv(1000) and b"welcome" in last.recv(1000)
            deadline = time.monotonic() + 10
            while not found and time.monotonic() < deadline:
                time.sleep(0.01)
            again.close()
            with pytest.raises(
                ProcessLostError, match=r"process 1 of 3 \(host h, pid 8\) has ended"
            ):
                found[0].agree(lambda: None)


def test_missing_list_is_truncated_and_host_names_are_escaped(address):
    hello = {"host": "h\x1b[2J\nweft: process 2 \ud800"}
    with first_of(address, 300, timeout=2.0) as found:
        here = [come(address, i, 300, i) for i in range(2, 40)]
        for connection in (come(address, 1, 300, 7, **hello), *here):
            with connection, connection.makefile() as lines:
                told = json.loads(lines.readline())["refused"]
            assert told.startswith("processes 40, 41, ") and "55 and 244 more of 300" in told
            assert "process 15 of 300 (host h, pid 15) and 24 more" in told
    assert "(host h\\x1b[2J\n    weft: process 2 \\ud800, pid 7)" in str(found[0])


def test_processes_with_the_token_meet(address):
    lines = together(address, [(0, 2, "secret"), (1, 2, "secret")])
    for peers in lines:
        peers.leave(patience_seconds=0)


@pytest.mark.parametrize(
    ("first", "other"), [("secret", ""), ("secret", "secreT"), ("", "x"), ("s", "\ud800")]
)
def test_wrong_token_is_rejected_and_takes_no_place(address, first, other):
    with first_of(address, 2, token=first):
        with come(address, 1, 2, 7, token=other) as stranger, stranger.makefile() as lines:
            refused = json.loads(lines.readline())["refused"]
            assert lines.readline() == ""
        assert refused.startswith("this process does not have the token of the run")
        assert "WEFT_RENDEZVOUS_TOKEN" in refused and (not first or first not in refused.split())
        with come(address, 1, 2, 8, token=first) as ours:
            assert b"welcome" in ours.recv(1000)


def test_rejected_process_fails_at_once(address):
    started = time.monotonic()
    with first_of(address, 2, token="secret"):
        with pytest.raises(ProcessesNotReadyError, match="set the same WEFT_REND"):
            rendezvous(address, process_id=1, num_processes=2, timeout_seconds=20, token="other")
        assert time.monotonic() - started < 10
        with come(address, 1, 2, 8, token="secret") as ours:
            assert b"welcome" in ours.recv(1000)


def test_many_strangers_do_not_block(address):
    with contextlib.ExitStack() as stack, first_of(address, 2):
        strangers = [stack.enter_context(connected(address)) for _ in range(200)]
        assert strangers[0].recv(10) == b""  # dropped for the sake of those that came later
        with come(address, 1, 2, 7) as ours:
            assert b"welcome" in ours.recv(1000)


def test_single_process_has_no_peers():
    assert connect_peers(1) is None
