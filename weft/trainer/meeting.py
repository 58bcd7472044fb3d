"""Rendezvous of a run's processes before JAX is used.

Process 0 listens at the address of JAX's later coordinator until all others have joined, then
releases that address; the connections remain as `Companions`. A program that has initialized
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

from weft.errors import ProcessesNotReadyError
from weft.trainer.companions import (
    HEARTBEAT_TIMEOUT_SECONDS,
    LONGEST_LINE,
    Companions,
    line_of,
    parse,
)
from weft.trainer.stacks import print_error

_HELLO_SECONDS = 5.0
_ADDRESS_BYTES = 1024
_HELLO_BYTES = 1 << 12
_MAX_STRANGERS = 64
_SHOWN = 16

_WRONG_TOKEN = (
    "this process does not have the token of the run that it tried to join, so it is not one of "
    "its processes. Start all processes with one launcher, or set the same WEFT_RENDEZVOUS_TOKEN "
    "in all of them, or in none."
)

logger = logging.getLogger(__name__)


def meet(
    address: str,
    *,
    process_id: int,
    num_processes: int,
    timeout_seconds: float,
    token: str = "",
    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
) -> Companions:
    """Waits for all processes and opens the connections between them.

    Args:
        address: host:port where process 0 listens.
        timeout_seconds: time to wait for the others.
        token: a secret of the run; processes with another token are refused. Without one, anyone
            who reaches the address can join.
        heartbeat_timeout_seconds: time after which a silent process counts as gone.

    Raises:
        ProcessesNotReadyError: if processes are missing, which the message lists, or this one is
            refused.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if process_id == 0:
        # A rendezvous on this machine need not be visible to others.
        here = host in ("localhost", "::1") or host.startswith("127.")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host if here else "", int(port)), family=family) as server:
            return _receive(
                server, num_processes, token, timeout_seconds, heartbeat_timeout_seconds, address
            )
    return _join(
        [(host, int(port))],
        process_id,
        num_processes,
        token,
        timeout_seconds,
        heartbeat_timeout_seconds,
    )


def open_companions(timeout_seconds: float) -> Companions | None:
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
        return _join(addresses, index, count, token, timeout_seconds, HEARTBEAT_TIMEOUT_SECONDS)
    with socket.create_server(("", 0)) as server:
        name, port, token = socket.gethostname(), server.getsockname()[1], secrets.token_hex(16)
        _broadcast([[_own_address(name), name], port, token], timeout_seconds)
        return _receive(
            server, count, token, timeout_seconds, HEARTBEAT_TIMEOUT_SECONDS, f"{name}:{port}"
        )


def _own_address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def _broadcast(value: Any, timeout_seconds: float) -> Any:
    """Broadcasts a JSON value of process 0 to all processes."""
    timer = threading.Timer(timeout_seconds, _end_alone, args=(timeout_seconds,))
    timer.daemon = True
    timer.start()
    padded = np.zeros(_ADDRESS_BYTES, np.uint8)
    if value is not None:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        padded[: data.size] = data
    try:
        told = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    finally:
        timer.cancel()
    return json.loads(told.tobytes().rstrip(b"\0"))


def _end_alone(timeout_seconds: float) -> None:
    print_error(
        f"weft: process {jax.process_index()} of {jax.process_count()} waited for the other "
        f"processes of its run, and some did not come within {timeout_seconds:g} s. Look for the "
        "cause in their logs. JAX cannot tell which ones are missing; "
        "`weft.launch.distributed.joined_processes` can."
    )
    os._exit(1)


def _receive(
    server: socket.socket,
    count: int,
    token: str,
    timeout_seconds: float,
    heartbeat_timeout_seconds: float,
    address: str,
) -> Companions:
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        reception = stack.enter_context(_Reception(server, count, token, selector))
        deadline = time.monotonic() + timeout_seconds
        while len(reception.names) < count:
            left = deadline - time.monotonic()
            if left <= 0:
                text = _missing(reception.names, count, address, timeout_seconds)
                for connection in reception.connections.values():
                    _tell(connection, {"refused": text})
                raise ProcessesNotReadyError(text)
            for key, _ in selector.select(min(left, _HELLO_SECONDS)):
                reception.take(key.fileobj)
            reception.drop_the_silent()
        connections, names = reception.connections, reception.names
        reception.connections = {}
    for connection in connections.values():
        _tell(connection, {"welcome": names[0]})
    return Companions(0, connections, names, heartbeat_timeout_seconds=heartbeat_timeout_seconds)


class _Reception:
    """Joined processes, and connections that have not yet identified themselves.

    A connection that stays silent, such as one of a port scanner, delays nobody: it is dropped
    after some seconds, or earlier if many more come.
    """

    def __init__(
        self, server: socket.socket, count: int, token: str, selector: selectors.BaseSelector
    ):
        self._server, self._count, self._token, self._selector = server, count, token, selector
        self.names = {0: _name(0, count, socket.gethostname(), os.getpid())}
        self.connections: dict[int, socket.socket] = {}
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ)

    def __enter__(self) -> "_Reception":
        return self

    def __exit__(self, *exc_info: object) -> None:
        for connection in (*self._strangers, *self.connections.values()):
            connection.close()

    def take(self, source: Any) -> None:
        """Accepts a connection, or reads from one."""
        if source is not self._server:
            if source.fileno() >= 0:  # else it was dropped for one that came at the same time
                self._read(source)
            return
        with contextlib.suppress(OSError):  # closed again
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._strangers) >= _MAX_STRANGERS:
                self._drop(next(iter(self._strangers)))  # the oldest one
            self._strangers[connection] = (time.monotonic(), b"")
            self._selector.register(connection, selectors.EVENT_READ)

    def drop_the_silent(self) -> None:
        """Closes connections that have not identified themselves in time."""
        now = time.monotonic()
        for connection, (since, _) in list(self._strangers.items()):
            if now - since > _HELLO_SECONDS:
                self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection not in self._strangers:
            if not data:  # killed before all had joined; another one may take its place
                (index,) = (i for i, c in self.connections.items() if c is connection)
                logger.warning("%s ended before all others came", self.names.pop(index))
                self._drop(self.connections.pop(index))
            return
        since, before = self._strangers[connection]
        line = before + data
        if not data or len(line) > _HELLO_BYTES:
            self._drop(connection)
        elif line.endswith(b"\n"):
            self._meet(connection, parse(line))
        else:
            self._strangers[connection] = (since, line)

    def _meet(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        index, of = hello.get("process"), hello.get("of")
        if index is None or of is None:
            self._drop(connection)  # not a process of a run
            return
        if not hmac.compare_digest(_token_bytes(hello.get("token", "")), _token_bytes(self._token)):
            logger.warning("refused a process with a wrong token or without one")
            _tell(connection, {"refused": _WRONG_TOKEN})
            self._drop(connection)
            return
        if of != self._count or not 0 < index < self._count or index in self.names:
            text = f"process {index} of {of} came to a run of {self._count} processes"
            if index in self.names:
                text += f", in which {self.names[index]} is there already"
            _tell(connection, {"refused": f"{text}. Give each process its own number."})
            self._drop(connection)
            return
        del self._strangers[connection]
        self.names[index] = _name(index, self._count, hello.get("host", "?"), hello.get("pid", "?"))
        self.connections[index] = connection

    def _drop(self, connection: socket.socket) -> None:
        self._selector.unregister(connection)
        self._strangers.pop(connection, None)
        connection.close()


def _token_bytes(token: str) -> bytes:
    return token.encode("utf-8", "surrogatepass")


def _tell(connection: socket.socket, message: dict[str, Any]) -> None:
    # A process that is gone is missed later.
    with contextlib.suppress(OSError):
        connection.settimeout(_HELLO_SECONDS)
        connection.sendall(line_of(message))


def _join(
    addresses: Sequence[tuple[str, int]],
    index: int,
    count: int,
    token: str,
    timeout_seconds: float,
    heartbeat_timeout_seconds: float,
) -> Companions:
    """Connects to process 0 and waits until it has all processes."""
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
                connection.sendall(line_of(hello))
                # Process 0 waits for the others and reports first if they do not come.
                answer = _read_line(connection, deadline - time.monotonic() + _HELLO_SECONDS)
            except OSError as failure:
                answer, error = {}, failure
            if "refused" in answer:
                raise ProcessesNotReadyError(answer["refused"])
            if "welcome" in answer:
                stack.pop_all()
                names = {0: answer["welcome"]}
                return Companions(
                    index,
                    {0: connection},
                    names,
                    heartbeat_timeout_seconds=heartbeat_timeout_seconds,
                )
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
        while not line.endswith(b"\n") and len(line) < LONGEST_LINE:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
            data = connection.recv(1)
            if not data:
                break
            line += data
    except OSError:
        return {}
    return parse(line)


def _name(index: int, count: int, host: str, pid: Any) -> str:
    return f"process {index} of {count} (host {host}, pid {pid})"


def _missing(names: dict[int, str], count: int, address: str, seconds: float) -> str:
    missing = _listed([str(i) for i in range(count) if i not in names], ", ")
    there = _listed([names[i] for i in sorted(names)], "; ")
    plural = "processes" if count - len(names) > 1 else "process"
    return (
        f"{plural} {missing} of {count} did not come to {address} within {seconds:g} s. Present: "
        f"{there}. Check in the logs of the missing ones whether they were started."
    )


def _listed(texts: Sequence[str], separator: str) -> str:
    more = len(texts) - _SHOWN
    shown = separator.join(texts[:_SHOWN])
    return f"{shown} and {more} more" if more > 0 else shown
