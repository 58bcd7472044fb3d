"""What does a step cost for being one of many processes, and how soon do they stop together?"""

import contextlib
import functools
import json
import selectors
import socket
import threading
import time
from collections.abc import Iterator

from benchmarks.harness import Row, ratios, row
from weft.distributed.peers import Peers, StopRequest

_COUNTS = (16, 64, 256, 1024)
_STEPS = 1_000
_ALIVE_SECONDS = 1.0
_AT_MOST = 1.5


class _OtherProcesses(threading.Thread):
    """The other processes of a run, as process 0 sees them: they report, and answer."""

    def __init__(self, connections: list[socket.socket]):
        super().__init__(daemon=True)
        self._connections = connections
        self.is_over = threading.Event()

    def run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for connection in self._connections:
                selector.register(connection, selectors.EVENT_READ, connection)
            reported_at = 0.0
            step = 0
            while not self.is_over.is_set():
                for key, _ in selector.select(0.1):
                    self._answer(key.data)
                if time.monotonic() - reported_at > _ALIVE_SECONDS:
                    reported_at = time.monotonic()
                    step += 1
                    for connection in self._connections:
                        _send(connection, {"alive": f"running step {step}", "next": step})

    def _answer(self, connection: socket.socket) -> None:
        for line in connection.recv(1 << 16).splitlines():
            with contextlib.suppress(ValueError):
                message = json.loads(line)
                if "poll" in message:
                    _send(connection, {"poll": message["poll"], "next": 1})


def _send(connection: socket.socket, message: dict[str, object]) -> None:
    connection.sendall(json.dumps(message).encode() + b"\n")


@contextlib.contextmanager
def _process_0_of(count: int) -> Iterator[Peers]:
    """Yields the connections of process 0 to so many processes."""
    with contextlib.ExitStack() as stack, socket.create_server(("127.0.0.1", 0)) as server:
        here: dict[int, socket.socket] = {}
        there: list[socket.socket] = []
        names: dict[int, str] = {}
        for index in range(1, count):
            there.append(stack.enter_context(socket.create_connection(server.getsockname())))
            here[index], _ = server.accept()
            names[index] = f"process {index} of {count}"
        others = _OtherProcesses(there)
        others.start()
        peers = Peers(0, here, names, end_seconds=1e6)
        yield peers
        peers.leave(patience_seconds=0)
        others.is_over.set()
        others.join()


def _run_steps(peers: Peers) -> None:
    for _ in range(_STEPS):
        peers.begin_step(lambda: None)


def _seconds_to_stop(peers: Peers) -> float:
    """Returns the time from a signal in process 0 until all know before which step they stop."""
    start = time.perf_counter()
    request = StopRequest("signal", "SIGTERM")
    while peers.begin_step(lambda: request) is None:
        pass
    return time.perf_counter() - start


def run() -> list[Row]:
    """Measures the steps of process 0 relative to those of a run of two processes."""
    rows: list[Row] = []
    with _process_0_of(2) as two:
        for count in _COUNTS:
            with _process_0_of(count) as many:
                times = ratios(
                    functools.partial(_run_steps, many),
                    functools.partial(_run_steps, two),
                )
                stop_seconds = _seconds_to_stop(many)
            rows.append(
                row(
                    f"what {count} processes add to a step / 2 processes",
                    times,
                    at_most=_AT_MOST,
                    note=f"of {_STEPS}; a stop is agreed in {stop_seconds * 1e3:.1f} ms",
                )
            )
    return rows
