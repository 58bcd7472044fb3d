import contextlib
import hashlib
import hmac
import itertools
import json
import socket
import threading
import time

import pytest

from tests.sockets import free_port
from weft.distributed.peers import Peers
from weft.distributed.rendezvous import rendezvous, versions
from weft.errors import (
    CoordinatorNotFoundError,
    ProcessesDifferError,
    ProcessesNotReadyError,
    ProcessLostError,
)


@pytest.fixture(autouse=True)
def no_forced_exits(monkeypatch):
    """Disables forced exits: several processes are simulated in this one."""
    monkeypatch.setattr(Peers, "_force_exit", lambda peers, text: None)


@pytest.fixture
def address():
    return f"127.0.0.1:{free_port()}"


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
        except (ProcessesNotReadyError, ProcessesDifferError) as error:
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


def proof(token, *facts):
    """Computes what `weft.distributed.rendezvous` describes."""
    message = json.dumps(facts).encode()
    return hmac.new(token.encode("utf-8", "surrogatepass"), message, hashlib.sha256).hexdigest()


def read_line(connection):
    """Returns the message of one line, and reads no further."""
    line = b""
    while not line.endswith(b"\n"):
        received = connection.recv(1)
        assert received, line
        line += received
    return json.loads(line)


def come(address, index, of, pid, token="", **more):
    connection = connected(address)
    challenge = read_line(connection)["challenge"]
    hello = {"process": index, "of": of, "challenge": "0123", "host": "h", "pid": pid}
    hello |= {"versions": versions(), "proof": proof(token, "join", challenge, "0123", index, of)}
    connection.sendall(json.dumps(hello | more).encode() + b"\n")
    return connection


def test_duplicates_and_strangers_are_rejected(address):
    def refused(*hello):
        with come(address, *hello) as connection, connection.makefile() as lines:
            return json.loads(lines.readline())["refused"]

    with first_of(address, 3), come(address, 1, 3, 7) as ours:
        for text in (b"GET / HTTP/1.1\r\n\r\n", json.dumps({"proof": "?"}).encode() + b"\n"):
            with connected(address) as stranger:
                assert read_line(stranger)["challenge"]
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
        read_line(stranger)
        stranger.sendall(b'{"process": 1, "proof": ""}\n')  # without the rest
        assert stranger.recv(10) == b""
        flood = stack.enter_context(connected(address))
        with contextlib.suppress(ConnectionError):
            flood.sendall(b"x" * (1 << 20))
        with come(address, 1, 2, 7) as ours:
            assert b"welcome" in ours.recv(1000)
        assert time.monotonic() - started < 12
        for silent in (scanner, dribbling):
            assert read_line(silent)["challenge"] and silent.recv(10) == b""


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


class Recorder(threading.Thread):
    """Stranger that listens at the address first, and answers what it likes."""

    def __init__(self, address, *answers):
        super().__init__(daemon=True)
        host, _, port = address.rpartition(":")
        self.server = socket.create_server((host, int(port)))
        self.answers, self.heard = answers, []
        self.start()

    def run(self):
        with contextlib.suppress(OSError):  # closed
            for answer in itertools.cycle(self.answers):
                connection, _ = self.server.accept()
                with connection:
                    connection.sendall(b'{"challenge": "00"}\n')
                    self.heard.append(read_line(connection))
                    connection.sendall(json.dumps(answer(self.heard[-1])).encode() + b"\n")

    def stop(self):
        self.server.shutdown(socket.SHUT_RDWR)  # ends `accept`
        self.server.close()
        self.join(timeout=10)


def test_token_is_not_sent_to_who_listens_there_first(address):
    """A stranger learns nothing that lets it join, or pass for process 0."""
    stranger = Recorder(
        address,
        lambda hello: {"welcome": "process 0"},
        lambda hello: {"welcome": "process 0", "proof": hello["proof"]},  # reflected
        lambda hello: {"welcome": "process 0", "proof": proof("", "welcome", "00", "", 1, 2)},
    )
    with pytest.raises(
        ProcessesNotReadyError,
        match=r"could not join process 0 at .* \(what listens there does not have the token",
    ):
        rendezvous(address, process_id=1, num_processes=2, timeout_seconds=0.8, token="s3cret")
    stranger.stop()
    assert len(stranger.heard) >= 3 and "s3cret" not in json.dumps(stranger.heard)
    # A new one for each connection.
    assert len({hello["proof"] for hello in stranger.heard}) == len(stranger.heard)

    # What it has heard is of no use for a connection of its own.
    with first_of(address, 2, token="s3cret"):
        with connected(address) as replaying, replaying.makefile() as lines:
            lines.readline()
            replaying.sendall(json.dumps(stranger.heard[0]).encode() + b"\n")
            assert "does not have the token" in json.loads(lines.readline())["refused"]
        with come(address, 1, 2, 8, token="s3cret") as ours:
            assert b"welcome" in ours.recv(1000)


def test_taken_address_is_an_error_of_process_0(address):
    host, _, port = address.rpartition(":")
    with (
        socket.create_server((host, int(port))),
        pytest.raises(CoordinatorNotFoundError, match="process 0 of 2 cannot listen at 127") as e,
    ):
        rendezvous(address, process_id=0, num_processes=2, timeout_seconds=1)
    assert "Address already in use. If another program has taken the port" in str(e.value)


def test_what_is_not_process_0_is_not_waited_for(address):
    host, _, port = address.rpartition(":")
    with socket.create_server((host, int(port))) as server:

        def answer():
            with server.accept()[0] as connection:
                connection.sendall(b"SSH-2.0\r\n")

        threading.Thread(target=answer).start()
        with pytest.raises(ProcessesNotReadyError, match="is not process 0 of a run"):
            rendezvous(address, process_id=1, num_processes=2, timeout_seconds=0.1)


def test_other_versions_are_refused_in_all_processes(address):
    other = "weft 0.1.0, jax 0.4.1, jaxlib 0.4.1, Python 3.9"
    with (
        first_of(address, 3) as found,
        come(address, 2, 3, 7) as third,
        come(address, 1, 3, 8, versions=other) as second,
    ):
        texts = [read_line(connection)["differs"] for connection in (second, third)]
    (error,) = found
    assert isinstance(error, ProcessesDifferError) and texts == [str(error)] * 2
    assert texts[0].startswith(f"process 1 of 3 (host h, pid 8) has {other}, but process 0 of 3 (")
    assert texts[0].endswith(f"has {versions()}. Install the same versions for all processes.")
    assert "weft 0." in versions() and ", Python 3." in versions()


def test_refused_version_is_raised(address):
    stranger = Recorder(address, lambda hello: {"differs": "process 1 of 2 has weft 0.1.0"})
    with pytest.raises(ProcessesDifferError, match=r"process 1 of 2 has weft 0\.1\.0"):
        rendezvous(address, process_id=1, num_processes=2, timeout_seconds=5)
    stranger.stop()


def test_many_strangers_do_not_block(address):
    with contextlib.ExitStack() as stack, first_of(address, 2):
        strangers = [stack.enter_context(connected(address)) for _ in range(200)]
        read_line(strangers[0])
        assert strangers[0].recv(10) == b""  # dropped for the sake of those that came later
        with come(address, 1, 2, 7) as ours:
            assert b"welcome" in ours.recv(1000)


def test_rejected_process_fails_at_once(address):
    started = time.monotonic()
    with first_of(address, 2, token="secret"):
        with pytest.raises(ProcessesNotReadyError, match="set the same WEFT_REND"):
            rendezvous(address, process_id=1, num_processes=2, timeout_seconds=20, token="other")
        assert time.monotonic() - started < 10
        with come(address, 1, 2, 8, token="secret") as ours:
            assert b"welcome" in ours.recv(1000)
