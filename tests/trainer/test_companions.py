"""Lines between processes: what is agreed on, and how an end, a silence or a delay is told."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from weft.errors import ProcessesNotReadyError, ProcessLostError
from weft.trainer.companions import Companions, Wish, current_companions, in_company

NAMES = {i: f"process {i} of 3 (host h, pid {i})" for i in range(3)}


@pytest.fixture
def three():
    """Three ends of the lines, in one process."""
    opened = []

    def open_lines(**kwargs):
        pairs = {i: socket.socketpair() for i in (1, 2)}
        kwargs = {"end_seconds": 1e6} | kwargs
        made = [Companions(0, {i: pair[0] for i, pair in pairs.items()}, NAMES, **kwargs)]
        made += [Companions(i, {0: pair[1]}, {0: NAMES[0]}, **kwargs) for i, pair in pairs.items()]
        opened.extend(made)
        return made

    yield open_lines
    for companions in opened:
        companions.leave()


def at_once(*calls):
    """What each call gives or raises, all running together."""
    results = [None] * len(calls)

    def run(i):
        try:
            results[i] = calls[i]()
        except Exception as error:
            results[i] = error

    threads = [threading.Thread(target=run, args=(i,)) for i in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=30)
    return results


def all_from(connection):
    """What comes until the other end says that nothing more does."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def go_on():
    return None


def test_all_go_on_together_and_stop_together(three):
    lines = three()
    for _ in range(3):
        assert at_once(*(lambda c=c: c.agree(go_on) for c in lines)) == [None] * 3
    wishes = [go_on, lambda: Wish("end", "input ended"), lambda: Wish("signal", "SIGTERM")]
    agreed = at_once(*(lambda c=c, w=w: c.agree(w) for c, w in zip(lines, wishes, strict=True)))
    assert agreed == [("signal", "SIGTERM")] * 3
    assert at_once(*(lambda c=c: c.agree(go_on) for c in lines)) == [None] * 3
    assert [c.asked for c in lines] == [None] * 3


def test_a_wish_that_comes_while_waiting_is_heard_by_who_has_not_come(three):
    lines, wish = three(), []
    waiting = threading.Thread(target=lambda: lines[1].agree(lambda: wish[0] if wish else None))
    waiting.start()
    time.sleep(0.2)
    assert lines[2].asked is None
    wish.append(Wish("signal", "SIGINT"))
    deadline = time.monotonic() + 10
    while lines[2].asked is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines[2].asked == lines[0].asked == ("signal", "SIGINT")
    agreed = at_once(*(lambda c=c: c.agree(go_on) for c in (lines[0], lines[2])))
    assert agreed == [("signal", "SIGINT")] * 2
    waiting.join()


def test_a_wish_that_comes_after_all_have_gone_on_is_for_the_next_point():
    here, there = socket.socketpair()
    with there:
        companions = Companions(0, {1: here}, NAMES)

        def arrives(at, wish):
            message = {"at": at, "wish": wish, "within": None}
            there.sendall(json.dumps(message).encode() + b"\n")

        def the_other_comes_and_wishes_late():
            arrives(1, None)
            arrives(1, ["signal", "SIGTERM"])
            deadline = time.monotonic() + 10
            while companions.asked is None and time.monotonic() < deadline:
                time.sleep(0.01)

        # The other one has been told to go on, so this one has to go on as well.
        assert companions.agree(go_on, alive=the_other_comes_and_wishes_late) is None
        arrives(2, None)
        assert companions.agree(go_on) == ("signal", "SIGTERM")
        companions.leave()
        sent = [json.loads(line) for line in all_from(there).splitlines()]
        assert [message["stop"] for message in sent if "go" in message] == [
            None,
            ["signal", "SIGTERM"],
        ]


def test_who_is_late_is_named_with_what_it_does_and_shows_where(three, capfd):
    lines = three()
    lines[2].doing = "compiling the step"
    time.sleep(1.5)  # it is told soon, whatever the time between heartbeats
    calls = [lambda c=c: c.agree(go_on, within_seconds=0.5) for c in lines[:2]]
    for error in at_once(*calls):
        assert isinstance(error, ProcessesNotReadyError)
        assert str(error) == (
            "not ready within 0.5 s: process 2 of 3 (host h, pid 2), which is compiling the step. "
            "All others were waiting. If it is not frozen, its log has the stacks of its threads."
        )
    with pytest.raises(ProcessesNotReadyError, match="process 2 of 3"):
        lines[2].agree(go_on)
    stacks = capfd.readouterr().err
    assert stacks.count("Current thread") == 1 and "in test_who_is_late_is_named" in stacks


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda c: c._connections[0].shutdown(socket.SHUT_RDWR), "has ended without a word"),
        (lambda c: c.leave("InputReadError: a.txt"), "has failed: InputReadError: a.txt"),
        (lambda c: c.leave(), "has ended before the others"),
    ],
    ids=["killed", "failed", "left"],
)
def test_who_ends_is_named_to_all(three, how, told):
    lines = three()
    threading.Timer(0.1, how, (lines[1],)).start()
    for error in at_once(*(lambda c=c: c.agree(go_on) for c in (lines[0], lines[2]))):
        assert isinstance(error, ProcessLostError)
        assert str(error).startswith(f"process 1 of 3 (host h, pid 1) {told}")
        assert "cannot go on without it" in str(error)


def test_the_end_of_process_0_is_named_as_well(three):
    lines = three()
    lines[0]._connections[2].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ProcessLostError, match=r"process 0 of 3 .* has ended without a word"):
        lines[2].agree(go_on)
    # And where something else has failed because of it.
    with pytest.raises(ProcessLostError, match="process 0") as lost:
        lines[2].explain(RuntimeError("gloo: connection closed"))
    assert isinstance(lost.value.__cause__, RuntimeError)
    # What another process's end is not behind is left alone.
    three()[1].explain(RuntimeError("mine"), patience_seconds=0.1)


def test_silence_counts_as_an_end():
    here, there = socket.socketpair()
    with there:
        companions = Companions(0, {1: here}, NAMES, heartbeat_timeout_seconds=0.5, end_seconds=1e6)
        with pytest.raises(ProcessLostError, match=r"process 1 of 3 .* has not been heard of for"):
            companions.agree(go_on)
        companions.leave()


def test_what_is_no_message_is_passed_over():
    here, there = socket.socketpair()
    with there:
        companions = Companions(1, {0: here}, NAMES)
        there.sendall(b'GET / HTTP/1.1\r\n\r\n[1]\n{"go": 1, "stop": null}\n')
        assert companions.agree(go_on) is None
        companions.leave()
        sent = all_from(there).splitlines()
        assert {"at": 1, "wish": None, "within": None} in [json.loads(line) for line in sent]


def test_a_thread_finds_the_lines_that_are_open_and_says_goodbye():
    assert current_companions() is None
    here, there = socket.socketpair()
    with there:
        companions = Companions(1, {0: here}, NAMES)
        with pytest.raises(KeyError), in_company(companions):
            assert current_companions() is companions
            raise KeyError("x")
        assert current_companions() is None
        assert b'{"bye": "KeyError: \'x\'"}' in all_from(there)


STUCK = """
import ctypes, socket, sys, time
from weft.trainer.companions import Companions
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
Companions(1, {0: connection}, {0: "process 0 of 2 (host h, pid 7)"}, end_seconds=0.3)
print("ready", flush=True)
ctypes.CDLL(None).sleep(60)  # as in a collective: no error can be raised in this thread
"""


@pytest.mark.long
def test_a_process_whose_main_thread_is_stuck_is_ended_with_the_name():
    with socket.create_server(("127.0.0.1", 0)) as server:
        process = subprocess.Popen(
            [sys.executable, "-c", STUCK, str(server.getsockname()[1])],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        connection, _ = server.accept()
        with process, connection:
            assert process.stdout.readline() == "ready\n"
            connection.shutdown(socket.SHUT_RDWR)
            try:
                _, told = process.communicate(timeout=20)
            finally:
                os.kill(process.pid, signal.SIGKILL) if process.poll() is None else None
    assert process.returncode == 1
    assert "weft: process 0 of 2 (host h, pid 7) has ended without a word" in told
