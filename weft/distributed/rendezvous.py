"""Rendezvous of a run's processes before JAX is used.

Process 0 listens at the address of JAX's later coordinator until all others have joined, then
releases that address; the connections remain as `Peers`. A program that has initialized
`jax.distributed` itself meets later, at a port that process 0 broadcasts by JAX.

Anyone who reaches the address can connect. A process proves by a token, which the launcher puts
into every process's environment, that it belongs to the run. Until then it may send one short line
within a few seconds, and only a few such connections are open at a time.
"""

import contextlib
import hmac
import json
import logging
import os
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from weft.distributed import peers, watchdog
from weft.errors import ProcessesNotReadyError

_HELLO_SECONDS = 5.0
_ADDRESS_BYTES = 1024
_HELLO_BYTES = 1 << 12
_MAX_PENDING = 64
_MAX_LISTED = 16

_WRONG_TOKEN = (
    "this process does not have the token of the run that it tried to join, so it is not one of "
    "its processes. Start all processes with one launcher, or set the same WEFT_RENDEZVOUS_TOKEN "
    "in all of them, or in none."
)

logger = logging.getLogger(__name__)

# Connections to other processes and their names, by index.
_Joined = tuple[dict[int, socket.socket], dict[int, str]]


def rendezvous(
    address: str,
    *,
    process_id: int,
    num_processes: int,
    timeout_seconds: float,
    token: str = "",
    heartbeat_timeout_seconds: float = peers.HEARTBEAT_TIMEOUT_SECONDS,
) -> peers.Peers:
    """Waits for all processes and opens the connections between them.

    Args:
        address: host:port where process 0 listens.
        token: a secret of the run; processes with another token are refused. Without one, anyone
            who reaches the address can join.
        heartbeat_timeout_seconds: time after which a silent process counts as gone.

    Raises ProcessesNotReadyError, listing missing processes, or if this one is refused.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if process_id == 0:
        # A rendezvous on this machine need not be visible to others.
        here = host in ("localhost", "::1") or host.startswith("127.")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host if here else "", int(port)), family=family) as server:
            joined = _accept_all(server, num_processes, token, timeout_seconds, address)
    else:
        joined = _join([(host, int(port))], process_id, num_processes, token, timeout_seconds)
    return peers.Peers(process_id, *joined, heartbeat_timeout_seconds=heartbeat_timeout_seconds)


def connect_peers(timeout_seconds: float) -> peers.Peers | None:
    """Opens connections to the other processes of `jax.distributed`; all have to call this.

    The first exchange uses JAX, which would wait forever: if some processes do not join it in time,
    this process prints an error and exits. Returns None if there is one process only.
    """
    if jax.process_count() == 1:
        return None
    count, index = jax.process_count(), jax.process_index()
    if index:
        hosts, port, token = _broadcast(None, timeout_seconds)
        addresses = [(host, port) for host in hosts]
        return peers.Peers(index, *_join(addresses, index, count, token, timeout_seconds))
    with socket.create_server(("", 0)) as server:
        name, port, token = socket.gethostname(), server.getsockname()[1], secrets.token_hex(16)
        own_address = name
        with contextlib.suppress(OSError):
            own_address = socket.gethostbyname(name)
        _broadcast([[own_address, name], port, token], timeout_seconds)
        address = f"{name}:{port}"
        return peers.Peers(0, *_accept_all(server, count, token, timeout_seconds, address))


def _broadcast(value: list | None, timeout_seconds: float) -> list:
    timer = threading.Timer(timeout_seconds, _exit_on_timeout, args=(timeout_seconds,))
    timer.daemon = True
    timer.start()
    padded = np.zeros(_ADDRESS_BYTES, np.uint8)
    if value is not None:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        padded[: data.size] = data
    try:
        received = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    finally:
        timer.cancel()
    return json.loads(received.tobytes().rstrip(b"\0"))


def _exit_on_timeout(timeout_seconds: float) -> None:
    watchdog.print_error(
        f"weft: process {jax.process_index()} of {jax.process_count()} waited for the other "
        f"processes of its run, and some did not come within {timeout_seconds:g} s. Look for the "
        "cause in their logs. JAX cannot tell which ones are missing; "
        "`weft.launch.distributed.joined_processes` can."
    )
    os._exit(1)


def _accept_all(
    server: socket.socket, count: int, token: str, timeout_seconds: float, address: str
) -> _Joined:
    """Waits until all others have joined."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        acceptor = _Acceptor(server, count, token, selector)
        stack.callback(acceptor.close)
        deadline = time.monotonic() + timeout_seconds
        while len(acceptor.names) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                text = _missing_text(acceptor.names, count, address, timeout_seconds)
                for connection in acceptor.connections.values():
                    _answer(connection, refused=text)
                raise ProcessesNotReadyError(text)
            for key, _ in selector.select(min(left, _HELLO_SECONDS)):
                acceptor.take(key.data)
            acceptor.drop_silent()
        connections, names = acceptor.connections, acceptor.names
        acceptor.connections = {}
    for connection in connections.values():
        _answer(connection, welcome=names[0])
    return connections, names


class _Acceptor:
    """Joined processes, and connections that have not yet identified themselves.

    A connection that stays silent, such as one of a port scanner, delays nobody: it is dropped
    after some seconds, or earlier if many more come.
    """

    def __init__(
        self, server: socket.socket, count: int, token: str, selector: selectors.BaseSelector
    ):
        self._server, self._count, self._token, self._selector = server, count, token, selector
        self.names = {0: _process_name(0, count, socket.gethostname(), os.getpid())}
        self.connections: dict[int, socket.socket] = {}
        self._pending: dict[socket.socket, tuple[float, bytes]] = {}
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, server)

    def close(self) -> None:
        for connection in (*self._pending, *self.connections.values()):
            connection.close()

    def take(self, source: socket.socket) -> None:
        """Accepts a connection, or reads from one."""
        if source is not self._server:
            if source.fileno() >= 0:  # else it was dropped for one that came at the same time
                self._read(source)
            return
        with contextlib.suppress(OSError):  # closed again
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._pending) >= _MAX_PENDING:
                self._drop(next(iter(self._pending)))  # the oldest one
            self._pending[connection] = (time.monotonic(), b"")
            self._selector.register(connection, selectors.EVENT_READ, connection)

    def drop_silent(self) -> None:
        """Closes connections that have not identified themselves in time."""
        now = time.monotonic()
        for connection, (since, _) in list(self._pending.items()):
            if now - since > _HELLO_SECONDS:
                self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection not in self._pending:
            if not data:  # killed before all had joined; another one may take its place
                (index,) = (i for i, c in self.connections.items() if c is connection)
                logger.warning("%s ended before all others came", self.names.pop(index))
                self._drop(self.connections.pop(index))
            return
        since, before = self._pending[connection]
        line = before + data
        if not data or len(line) > _HELLO_BYTES:
            self._drop(connection)
        elif line.endswith(b"\n"):
            self._admit(connection, peers.decode_message(line))
        else:
            self._pending[connection] = (since, line)

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        index, of = hello.get("process"), hello.get("of")
        if index is None or of is None:
            self._drop(connection)  # not a process of a run
            return
        tokens = hello.get("token", ""), self._token
        if not hmac.compare_digest(*(token.encode("utf-8", "surrogatepass") for token in tokens)):
            logger.warning("refused a process with a wrong token or without one")
            self._refuse(connection, _WRONG_TOKEN)
            return
        if of != self._count or not 0 < index < self._count or index in self.names:
            text = f"process {index} of {of} came to a run of {self._count} processes"
            if index in self.names:
                text += f", in which {self.names[index]} is there already"
            self._refuse(connection, f"{text}. Give each process its own number.")
            return
        del self._pending[connection]
        host, pid = hello.get("host", "?"), hello.get("pid", "?")
        self.names[index] = _process_name(index, self._count, host, pid)
        self.connections[index] = connection

    def _refuse(self, connection: socket.socket, text: str) -> None:
        _answer(connection, refused=text)
        self._drop(connection)

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._pending.pop(connection, None)
        connection.close()


def _answer(connection: socket.socket, **message: str) -> None:
    connection.settimeout(_HELLO_SECONDS)
    peers.send_messages(connection, message)


def _join(
    addresses: Sequence[tuple[str, int]], index: int, count: int, token: str, timeout_seconds: float
) -> _Joined:
    hello = {"process": index, "of": count, "token": token}
    hello |= {"host": socket.gethostname(), "pid": os.getpid()}
    deadline = time.monotonic() + timeout_seconds
    attempt, error = 0, None
    while time.monotonic() < deadline:
        with contextlib.ExitStack() as stack:
            try:
                connection = stack.enter_context(
                    socket.create_connection(addresses[attempt % len(addresses)], timeout=5)
                )
                peers.send_messages(connection, hello)
                # Process 0 waits for the others and reports first if they do not come.
                answer = _read_line(connection, deadline - time.monotonic() + _HELLO_SECONDS)
            except OSError as failure:
                answer, error = {}, failure
            if "refused" in answer:
                raise ProcessesNotReadyError(answer["refused"])
            if "welcome" in answer:
                stack.pop_all()
                return {0: connection}, {0: answer["welcome"]}
        attempt += 1
        time.sleep(0.1)
    raise ProcessesNotReadyError(
        f"process {index} of {count} could not join process 0 at "
        f"{' or '.join(f'{host}:{port}' for host, port in addresses)} within "
        f"{timeout_seconds:g} s ({error}). Check in its log whether it runs and what it waits for."
    )


def _read_line(connection: socket.socket, timeout_seconds: float) -> dict[str, Any]:
    """Reads the first line, and nothing that follows it."""
    deadline = time.monotonic() + timeout_seconds
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < peers.MAX_LINE_BYTES:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data = connection.recv(1)
            if not data:
                break
            line += data
    except OSError:
        return {}
    return peers.decode_message(line)


def _process_name(index: int, count: int, host: str, pid: int | str) -> str:
    return f"process {index} of {count} (host {host}, pid {pid})"


def _missing_text(names: dict[int, str], count: int, address: str, seconds: float) -> str:
    missing = peers.join_first([str(i) for i in range(count) if i not in names], _MAX_LISTED, ", ")
    there = peers.join_first([names[i] for i in sorted(names)], _MAX_LISTED, "; ")
    plural = "processes" if count - len(names) > 1 else "process"
    return (
        f"{plural} {missing} of {count} did not come to {address} within {seconds:g} s. Present: "
        f"{there}. Check in the logs of the missing ones whether they were started."
    )
