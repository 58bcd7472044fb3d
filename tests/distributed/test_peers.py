"""Lines between processes: agreements, and how an end, a silence or a delay is reported."""

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest

from tests.sockets import all_from, connected, full_pipe, reading
from weft.distributed import peers as peers_lib
from weft.distributed.peers import Peers, StopRequest
from weft.errors import ProcessesNotReadyError, ProcessLostError

NAMES = {i: f"process {i} of 3 (host h, pid {i})" for i in range(3)}


@pytest.fixture(autouse=True)
def look_often(monkeypatch):
    monkeypatch.setattr(peers_lib, "_ACTIVITY_SECONDS", 0.1)


@pytest.fixture
def three():
    """Yields three ends of the lines, in one process."""
    opened = []

    def open_lines(**kwargs):
        pairs = {i: connected() for i in (1, 2)}
        kwargs = {"end_seconds": 1e6} | kwargs
        made = [Peers(0, {i: pair[0] for i, pair in pairs.items()}, NAMES, **kwargs)]
        made += [Peers(i, {0: pair[1]}, {0: NAMES[0]}, **kwargs) for i, pair in pairs.items()]
        opened.extend(made)
        return made

    yield open_lines
    at_once(*(peers.leave for peers in opened))


@pytest.fixture
def alone():
    """Yields one end of the lines, and the sockets at the other ends."""
    with contextlib.ExitStack() as stack:

        def open_lines(process, *others, buffer=None, **kwargs):
            pairs = {i: connected(buffer) for i in others}
            for _, there in pairs.values():
                stack.enter_context(there)
            here = {i: pair[0] for i, pair in pairs.items()}
            made = Peers(process, here, NAMES, **{"end_seconds": 1e6} | kwargs)
            stack.callback(made.leave, patience_seconds=0)
            return made, *(there for _, there in pairs.values())

        yield open_lines


def at_once(*calls):
    """Returns the results or errors of concurrent calls."""
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


def messages(data):
    return [json.loads(line) for line in data.splitlines()]


def send(connection, **message):
    connection.sendall(json.dumps(message).encode() + b"\n")


def go_on():
    return None


def test_processes_continue_and_stop_together(three):
    lines = three()
    for _ in range(3):
        assert at_once(*(lambda c=c: c.agree(go_on) for c in lines)) == [None] * 3
    requests = [
        go_on,
        lambda: StopRequest("end", "input ended"),
        lambda: StopRequest("signal", "SIGTERM"),
    ]
    agreed = at_once(*(lambda c=c, w=w: c.agree(w) for c, w in zip(lines, requests, strict=True)))
    assert agreed == [("signal", "SIGTERM")] * 3
    assert at_once(*(lambda c=c: c.agree(go_on) for c in lines)) == [None] * 3
    assert [c.requested for c in lines] == [None] * 3


def begin(peers, *requests):
    """Begins steps; returns their number, and why it stopped."""
    for count, request in enumerate(requests):
        stop = peers.begin_step(lambda r=request: r)
        if stop is not None:
            return count, stop
    return len(requests), None


def wait_until_asked(lines):
    """Waits until the request of one has reached all, as it does while the devices compute."""
    deadline = time.monotonic() + 10
    while not all(peers.stops_soon for peers in lines) and time.monotonic() < deadline:
        time.sleep(0.01)


SIGTERM = StopRequest("signal", "SIGTERM")
ENDED = StopRequest("end", "input ended")


def test_steps_need_no_message(three, monkeypatch):
    lines = three()
    sent = []
    monkeypatch.setattr(peers_lib, "send_messages", lambda _, *messages: sent.extend(messages))
    assert [begin(peers, *[None] * 50) for peers in lines] == [(50, None)] * 3
    assert [message for message in sent if "alive" not in message] == []


@pytest.mark.parametrize("asking", range(3))
def test_all_stop_before_the_first_step_that_none_has_begun(three, asking):
    lines = three()
    begun = [4, 5, 6]
    for peers, count in zip(lines, begun, strict=True):
        begin(peers, *[None] * count)
    lines[asking].request_stop(SIGTERM)
    wait_until_asked(lines)
    stops = at_once(*(lambda p=p: begin(p, *[None] * 9) for p in lines))
    assert stops == [(6 - count, SIGTERM) for count in begun]


def test_stops_that_all_request_are_before_that_step(three):
    lines = three()
    end = StopRequest("end", "a hook: accurate")
    stops = at_once(*(lambda p=p: begin(p, None, None, end) for p in lines))
    assert stops == [(2, end)] * 3


def test_data_that_ends_stops_all_where_it_ends(three):
    lines = three()
    begin(lines[1], None, None, None)  # two steps ahead
    begin(lines[0], None)
    begin(lines[2], None)
    # Of two ends the earlier one counts.
    lines[0].request_stop(ENDED, before=5)
    lines[2].request_stop(ENDED, before=4)
    wait_until_asked(lines)
    stops = at_once(*(lambda p=p: begin(p, *[None] * 9) for p in lines))
    assert stops == [(2, ENDED), (0, ENDED), (2, ENDED)]


def test_signal_comes_before_the_end_of_data(three):
    lines = three()
    lines[2].request_stop(ENDED, before=4)
    wait_until_asked(lines)
    lines[0].request_stop(SIGTERM)
    stops = at_once(*(lambda p=p: begin(p, *[None] * 9) for p in lines))
    assert [stop for _, stop in stops] == [SIGTERM] * 3
    assert len({peers.next_step for peers in lines}) == 1 and lines[0].next_step <= 4


def test_error_at_the_end_of_data_is_the_reason(three):
    lines = three()
    error = StopRequest("error", "process 1 of 3 has failed")
    lines[1].request_stop(error, before=3)
    wait_until_asked(lines)
    # Whether it comes while the step is decided or after, the reason stays the first one.
    lines[2].request_stop(ENDED, before=3)
    assert at_once(*(lambda p=p: begin(p, *[None] * 9) for p in lines)) == [(2, error)] * 3


def test_a_stop_holds_for_its_run_only(three):
    lines = three()
    lines[1].request_stop(ENDED, before=4)
    wait_until_asked(lines)
    assert at_once(*(lambda p=p: begin(p, *[None] * 3) for p in lines)) == [(3, None)] * 3
    assert at_once(*(lambda p=p: p.agree(go_on, starts_run=True) for p in lines)) == [None] * 3
    assert at_once(*(lambda p=p: begin(p, *[None] * 3) for p in lines)) == [(3, None)] * 3


def test_steps_that_do_not_depend_on_each_other_are_an_error(three):
    lines = three()
    begin(lines[0], *[None] * 9)
    lines[1].request_stop(ENDED, before=3)
    wait_until_asked(lines)
    errors = at_once(*(lambda p=p: begin(p, None, None, None) for p in lines))
    assert [type(error) for error in errors] == [ProcessLostError] * 3
    assert "the data of one process has ended, and others have begun a later step" in str(errors[0])


def test_process_that_holds_up_the_steps_is_named(three, monkeypatch, caplog):
    monkeypatch.setattr(peers_lib, "_LATE_LOG_SECONDS", 0.3)
    lines = three()
    lines[2].doing = "waiting for the input of step 2"
    begin(lines[0], None, None)
    begin(lines[1], None)
    deadline = time.monotonic() + 10
    while not caplog.text and time.monotonic() < deadline:
        lines[1].doing += "."  # so that it is sent
        time.sleep(0.05)
    assert "still waiting for process 2 of 3" in caplog.text
    assert "which is waiting for the input of step 2" in caplog.text


def test_request_while_waiting_reaches_late_processes(three):
    lines, request = three(), []
    waiting = threading.Thread(
        target=lambda: lines[1].agree(lambda: request[0] if request else None)
    )
    waiting.start()
    time.sleep(0.2)
    assert lines[2].requested is None
    request.append(StopRequest("signal", "SIGINT"))
    deadline = time.monotonic() + 10
    while lines[2].requested is None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert lines[2].requested == lines[0].requested == ("signal", "SIGINT")
    agreed = at_once(*(lambda c=c: c.agree(go_on) for c in (lines[0], lines[2])))
    assert agreed == [("signal", "SIGINT")] * 2
    waiting.join()


def test_late_request_applies_to_the_next_point(alone):
    peers, there = alone(0, 1)

    def arrives(at, request):
        send(there, at=at, request=request, within=None, waits=False)

    def other_requests_late():
        arrives(1, None)
        arrives(1, ["signal", "SIGTERM"])
        deadline = time.monotonic() + 10
        while peers.requested is None and time.monotonic() < deadline:
            time.sleep(0.01)

    # The other one was released, so this one must continue too.
    assert peers.agree(go_on, alive=other_requests_late) is None
    arrives(2, None)
    assert peers.agree(go_on) == ("signal", "SIGTERM")
    peers.leave(patience_seconds=0)
    stops = [m["stop"] for m in messages(all_from(there)) if "go" in m]
    assert stops == [None, ["signal", "SIGTERM"]]


def test_request_is_deferred_at_a_plain_barrier(three):
    lines, request = three(), StopRequest("signal", "SIGTERM")

    def requesting():
        assert lines[1].agree(go_on) is None
        lines[1]._send_to_coordinator(
            {"at": 1, "request": request, "within": None}
        )  # when all have gone on
        assert lines[1].agree(None) is None
        return lines[1].agree(go_on)

    def notified(peers):
        assert peers.agree(go_on) is None
        while peers.requested is None:
            time.sleep(0.01)
        assert peers.agree(None) is None
        assert peers.requested == request
        return peers.agree(go_on)

    asked = [lambda c=c: notified(c) for c in (lines[0], lines[2])]
    assert at_once(requesting, *asked) == [request] * 3


def test_late_process_is_named_and_prints_stacks(three, capfd):
    lines = three()
    lines[2].doing = "compiling the step"
    time.sleep(0.5)  # it is reported soon, whatever the time between heartbeats
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
    assert stacks.count("Current thread") == 1 and "in test_late_process_is_named" in stacks


@pytest.mark.parametrize(
    ("how", "told"),
    [
        (lambda c: c._connections[0].shutdown(socket.SHUT_RDWR), "has ended without notice"),
        (lambda c: c.leave("InputReadError: a.txt"), "has failed: InputReadError: a.txt"),
        (lambda c: c.leave(), "has ended before the others"),
    ],
    ids=["killed", "failed", "left"],
)
def test_ended_process_is_named(three, how, told):
    lines = three()
    threading.Timer(0.1, how, (lines[1],)).start()
    for error in at_once(*(lambda c=c: c.agree(go_on) for c in (lines[0], lines[2]))):
        assert isinstance(error, ProcessLostError)
        assert str(error).startswith(f"process 1 of 3 (host h, pid 1) {told}")
        assert "cannot continue without it" in str(error)


def test_ended_process_0_is_named(three):
    lines = three()
    lines[0]._connections[2].shutdown(socket.SHUT_RDWR)
    with pytest.raises(ProcessLostError, match=r"process 0 of 3 .* has ended without notice"):
        lines[2].agree(go_on)
    # And where something else has failed because of it.
    with pytest.raises(ProcessLostError, match="process 0") as lost:
        lines[2].raise_cause(RuntimeError("gloo: connection closed"))
    assert isinstance(lost.value.__cause__, RuntimeError)
    # Unrelated errors are not changed.
    three()[1].raise_cause(RuntimeError("mine"), patience_seconds=0.1)


def test_silence_means_loss(alone):
    peers, _ = alone(0, 1, heartbeat_timeout_seconds=0.5)
    with pytest.raises(ProcessLostError, match=r"process 1 of 3 .* has sent nothing for"):
        peers.agree(go_on)


def test_process_arriving_after_others_left_fails(three, alone):
    lines = three()
    left = threading.Thread(target=lines[0].leave)
    left.start()
    left.join()
    with pytest.raises(ProcessLostError, match=r"process 0 of 3 .* has ended before the others"):
        lines[1].agree(go_on)
    peers, there = alone(0, 1)
    send(there, bye=None)
    there.close()
    time.sleep(0.2)
    with pytest.raises(ProcessLostError, match=r"process 1 of 3 .* has ended before the others"):
        peers.agree(go_on)


def keep_sending(connection):
    """Says that it is alive again and again, so that the other end never has read everything."""
    with contextlib.suppress(OSError):
        while True:
            send(connection, alive="x" * 100)


def test_last_message_arrives_despite_unread_data(alone):
    for _ in range(2):
        _, frozen, other = alone(0, 1, 2, heartbeat_timeout_seconds=0.2)
        heard = reading(other)
        threading.Thread(target=keep_sending, args=(other,)).start()
        time.sleep(0.6)
        other.shutdown(socket.SHUT_WR)
        frozen.shutdown(socket.SHUT_RDWR)
        (over,) = [m["over"] for m in messages(heard()) if "over" in m]
        assert over.startswith("process 1 of 3 (host h, pid 1) has sent nothing for")


def test_coordinator_leaves_last_with_bounded_wait(alone):
    first, killed, slow = alone(0, 1, 2)
    killed.close()
    with pytest.raises(ProcessLostError, match="process 1 of 3"):
        first.agree(go_on)
    started = time.monotonic()
    threading.Timer(0.5, slow.shutdown, (socket.SHUT_WR,)).start()
    first.leave("ProcessLostError: process 1 of 3")
    assert 0.4 < time.monotonic() - started < 4

    first, _ = alone(0, 1)
    started = time.monotonic()
    first.leave(patience_seconds=0.2)
    assert 0.15 < time.monotonic() - started < 4


def test_failed_reader_thread_ends_the_run(alone, monkeypatch):
    def fails(peers, index, line):
        raise TypeError("unhashable")

    monkeypatch.setattr(Peers, "_on_line", fails)
    peers, there = alone(1, 0)
    send(there, asked=None)
    with pytest.raises(ProcessLostError, match="to other processes failed: TypeError: "):
        peers.agree(go_on)


def test_coordinator_is_named_with_activity(alone, capfd):
    peers, there = alone(0, 1)
    peers.doing = "restoring the checkpoint"
    send(there, at=1, request=None, within=0.1, waits=True)
    with there.makefile() as lines:
        over = next(m["over"] for m in map(json.loads, lines) if "over" in m)
    assert "process 0 of 3 (host h, pid 0), which is restoring the checkpoint." in over
    with pytest.raises(ProcessesNotReadyError):
        peers.raise_cause(RuntimeError("a collective that was cut"))
    assert "in test_coordinator_is_named" in capfd.readouterr().err


def test_messages_of_peers_are_escaped(alone):
    peers, there = alone(0, 1)
    send(there, bye="\x1b]0;title\x07 a\nweft: \x9b2J \u202e \ud800")
    shown = r"\x1b]0;title\x07 a" "\n    weft: " r"\x9b2J \u202e \ud800\."
    with pytest.raises(ProcessLostError, match="has failed: " + re.escape(shown[:-2])):
        peers.agree(go_on)


STUCK = """
import ctypes, socket, sys, time
from weft.distributed import watchdog
from weft.distributed.peers import Peers
watchdog._PRINT_SECONDS = 0.2
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
Peers(1, {0: connection}, {0: "process 0 of 2 (host h, pid 7)"}, end_seconds=0.3)
print("ready", flush=True)
ctypes.CDLL(None).sleep(60)  # as in a collective: no error can be raised in this thread
"""


@pytest.mark.long
def test_process_with_full_stderr_is_ended():
    with (
        full_pipe() as pipe,
        socket.create_server(("127.0.0.1", 0)) as server,
        subprocess.Popen(
            [sys.executable, "-c", STUCK, str(server.getsockname()[1])],
            stdout=subprocess.PIPE,
            stderr=pipe,
        ) as process,
    ):
        connection, _ = server.accept()
        with connection:
            assert process.stdout.readline() == b"ready\n"
            send(connection, over="process 2 of 3 is gone", late=True, missing=[1])
            try:
                assert process.wait(timeout=20) == 1
            finally:
                process.kill()


@pytest.mark.long
def test_stuck_process_is_ended_and_names_the_cause(python_server):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        process = python_server.start("-c", STUCK, port, stderr=subprocess.PIPE)
        connection, _ = server.accept()
        with process, connection:
            assert process.stdout.readline() == "ready\n"
            connection.shutdown(socket.SHUT_RDWR)
            try:
                _, told = process.communicate(timeout=20)
            finally:
                process.kill()
    assert process.returncode == 1
    assert "weft: process 0 of 2 (host h, pid 7) has ended without notice" in told


STOPPED = """
import socket, sys
from weft.distributed.peers import Peers
connection = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
names = {1: "process 1 of 2 (host h, pid 7)"}
first = Peers(0, {1: connection}, names, heartbeat_timeout_seconds=1)
print("ready", flush=True)
first.agree(lambda: None)
print("went on", flush=True)
first.leave()
"""


@pytest.mark.long
def test_suspension_of_all_is_not_a_lost_heartbeat(python_server):
    """As when Slurm suspends a job: all stop, and one is awake a moment before the others."""
    with (
        socket.create_server(("127.0.0.1", 0)) as server,
        python_server.start("-c", STOPPED, server.getsockname()[1]) as process,
    ):
        connection, _ = server.accept()
        with connection:
            try:
                assert process.stdout.readline() == "ready\n"
                send(connection, alive="waiting")
                process.send_signal(signal.SIGSTOP)
                time.sleep(1.5)
                process.send_signal(signal.SIGCONT)
                time.sleep(0.3)
                send(connection, at=1, request=None, within=None, waits=False)
                assert process.stdout.readline() == "went on\n"
                connection.shutdown(socket.SHUT_WR)
                assert process.wait(timeout=20) == 0
            finally:
                process.kill()
