"""Rendezvous of a run's processes before JAX is used.

Process 0 listens at the address of JAX's later coordinator until all others have joined, then
releases that address; the connections remain as `Peers`. A program that has initialized
`jax.distributed` itself meets later, at a port that process 0 broadcasts by JAX.

Anyone who reaches the address can connect, and whoever binds it first can listen there. Both sides
therefore prove that they have the token of the run, which the launcher puts into every process's
environment, without sending it:

    process 0    {"challenge": c}                     random, for this connection alone
    process 1    {"process": 1, "of": 2, …, "challenge": d, "proof": HMAC(token, "join", c, d, …)}
    process 0    {"welcome": …, "proof": HMAC(token, "welcome", c, d, …)}

A proof holds for one connection, one direction and one process, so that to repeat or to reflect it
is of no use. Until it has come a process may send one short line within a few seconds, and only a
few such connections are open at a time.

Processes with other versions of Weft, JAX or Python are refused; what else they must have in common
is compared later, in `weft.trainer.agreement`.
"""

import contextlib
import hashlib
import hmac
import itertools
import json
import logging
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import multihost_utils

import weft
from weft.distributed import peers, watchdog
from weft.errors import (
    CoordinatorNotFoundError,
    ProcessesDifferError,
    ProcessesNotReadyError,
)

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


class _Joined(NamedTuple):
    """Connections to other processes and their names, by index."""

    connections: dict[int, socket.socket]
    names: dict[int, str]


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

    Raises:
        CoordinatorNotFoundError: if process 0 cannot listen at the address.
        ProcessesNotReadyError: if some processes do not come, which it lists, or this one is
            refused.
        ProcessesDifferError: if one has other versions of Weft, JAX or Python.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if process_id == 0:
        # A rendezvous on this machine need not be visible to others.
        is_local = host in ("localhost", "::1") or host.startswith("127.")
        server_address = (host if is_local else "", int(port))
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        try:
            server = socket.create_server(server_address, family=family)
        except OSError as error:
            cause = str(error.strerror).partition(" (")[
                0
            ]  # without the address
            raise CoordinatorNotFoundError(
                f"process 0 of {num_processes} cannot listen at {address}: {cause}. If another "
                "program has taken the port, choose another one for all processes."
            ) from error
        with server:
            joined = _accept_all(
                server, num_processes, token, timeout_seconds, address
            )
    else:
        joined = _join(
            [(host, int(port))],
            process_id,
            num_processes,
            token,
            timeout_seconds,
        )
    return peers.Peers(
        process_id, *joined, heartbeat_timeout_seconds=heartbeat_timeout_seconds
    )


def connect_peers(timeout_seconds: float) -> peers.Peers | None:
    """Opens connections to the other processes of `jax.distributed`; all have to call this.

    The first exchange uses JAX, which would wait forever: if some processes do not join it in time,
    this process prints an error and exits. Returns None if there is one process only.
    """
    count, index = jax.process_count(), jax.process_index()
    if count == 1:
        return None
    if index != 0:
        hosts, port, token = _broadcast(None, timeout_seconds)
        addresses = [(host, port) for host in hosts]
        return peers.Peers(
            index, *_join(addresses, index, count, token, timeout_seconds)
        )
    with socket.create_server(("", 0)) as server:
        host, port, token = (
            socket.gethostname(),
            server.getsockname()[1],
            secrets.token_hex(16),
        )
        hosts = [host, host]
        # Others may not know the name, and the name may be an address that only this host has.
        with contextlib.suppress(OSError):
            hosts[0] = socket.gethostbyname(host)
        _broadcast([hosts, port, token], timeout_seconds)
        joined = _accept_all(
            server, count, token, timeout_seconds, f"{host}:{port}"
        )
        return peers.Peers(0, *joined)


def _broadcast(value: list | None, timeout_seconds: float) -> list:
    """Returns the value of process 0, in all processes."""
    timer = threading.Timer(
        timeout_seconds, _exit_on_timeout, args=(timeout_seconds,)
    )
    timer.daemon = True
    timer.start()
    padded = np.zeros(_ADDRESS_BYTES, np.uint8)  # of one size in all processes
    if value is not None:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        padded[: data.size] = data
    try:
        received = np.asarray(
            multihost_utils.broadcast_one_to_all(padded), np.uint8
        )
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
    server: socket.socket,
    count: int,
    token: str,
    timeout_seconds: float,
    address: str,
) -> _Joined:
    """Waits until all others have joined."""
    with contextlib.ExitStack() as stack:
        selector = stack.enter_context(selectors.DefaultSelector())
        acceptor = _Acceptor(server, count, token, selector)
        stack.callback(acceptor.close)
        deadline = time.monotonic() + timeout_seconds
        while len(acceptor.names) < count:
            remaining_seconds = deadline - time.monotonic()
            if remaining_seconds <= 0:
                text = _missing_text(
                    acceptor.names, count, address, timeout_seconds
                )
                for connection in acceptor.connections.values():
                    _answer(connection, refused=text)
                raise ProcessesNotReadyError(text)
            for key, _ in selector.select(
                min(remaining_seconds, _HELLO_SECONDS)
            ):
                acceptor.take(key.data)
            acceptor.drop_silent()
            if acceptor.difference is not None:
                for connection in acceptor.connections.values():
                    _answer(connection, differs=acceptor.difference)
                raise ProcessesDifferError(acceptor.difference)
        connections, names = acceptor.connections, acceptor.names
        acceptor.connections = {}  # those that remain open
    for index, connection in connections.items():
        _answer(connection, welcome=names[0], proof=acceptor.proofs[index])
    return _Joined(connections, names)


def _proof(token: str, purpose: str, *facts: str | int) -> str:
    """Returns what only a holder of the token can compute."""
    message = json.dumps([purpose, *facts]).encode()
    return hmac.new(
        token.encode("utf-8", "surrogatepass"), message, hashlib.sha256
    ).hexdigest()


def _is_equal(proof: str, expected: str) -> bool:
    return hmac.compare_digest(
        proof.encode("utf-8", "surrogatepass"), expected.encode()
    )


def versions() -> str:
    """Returns the versions that all processes of a run must have in common."""
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    jaxlib = version("jaxlib")
    return f"weft {weft.__version__}, jax {jax.__version__}, jaxlib {jaxlib}, Python {python}"


class _Pending(NamedTuple):
    """Connection that has not yet identified itself.

    Attributes:
        line: what it has sent so far.
    """

    since: float
    challenge: str
    line: bytes


class _Acceptor:
    """Joined processes, and connections that have not yet identified themselves.

    A connection that stays silent, such as one of a port scanner, delays nobody: it is dropped
    after some seconds, or earlier if many more come.
    """

    def __init__(
        self,
        server: socket.socket,
        count: int,
        token: str,
        selector: selectors.BaseSelector,
    ):
        self._server, self._count, self._token, self._selector = (
            server,
            count,
            token,
            selector,
        )
        self.names = {
            0: _process_name(0, count, socket.gethostname(), os.getpid())
        }
        self.connections: dict[int, socket.socket] = {}
        self.proofs: dict[int, str] = {}
        self.difference: str | None = None  # of a process that cannot join
        self._pending: dict[socket.socket, _Pending] = {}
        server.setblocking(False)
        selector.register(server, selectors.EVENT_READ, server)

    def close(self) -> None:
        for connection in (*self._pending, *self.connections.values()):
            connection.close()

    def take(self, source: socket.socket) -> None:
        """Accepts a connection, or reads from one."""
        if source is not self._server:
            if (
                source.fileno() >= 0
            ):  # else it was dropped for one that came at the same time
                self._read(source)
            return
        with contextlib.suppress(OSError):  # closed again
            connection, _ = self._server.accept()
            connection.setblocking(False)
            if len(self._pending) >= _MAX_PENDING:
                oldest_connection = next(iter(self._pending))
                self._drop(oldest_connection)
            challenge = secrets.token_hex(16)
            self._pending[connection] = _Pending(
                time.monotonic(), challenge, b""
            )
            peers.send_messages(connection, {"challenge": challenge})
            self._selector.register(
                connection, selectors.EVENT_READ, connection
            )

    def drop_silent(self) -> None:
        """Closes connections that have not identified themselves in time."""
        earliest_start = time.monotonic() - _HELLO_SECONDS
        for connection, pending in list(self._pending.items()):
            if pending.since < earliest_start:
                self._drop(connection)

    def _read(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(_HELLO_BYTES)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection not in self._pending:
            if not data:
                self._on_end_of_joined(connection)
            return
        pending = self._pending[connection]
        line = pending.line + data
        if not data or len(line) > _HELLO_BYTES:
            self._drop(connection)
        elif line.endswith(b"\n"):
            self._admit(connection, peers.decode_message(line))
        else:
            self._pending[connection] = pending._replace(line=line)

    def _on_end_of_joined(self, ended: socket.socket) -> None:
        """Forgets a process that was killed before all had joined; another may take its place."""
        for index, connection in list(self.connections.items()):
            if connection is ended:
                logger.warning(
                    "%s ended before all others came", self.names.pop(index)
                )
                self._drop(self.connections.pop(index))

    def _admit(self, connection: socket.socket, hello: dict[str, Any]) -> None:
        index, its_count = hello.get("process"), hello.get("of")
        if index is None or its_count is None:
            self._drop(connection)  # not a process of a run
            return
        own_challenge, its_challenge = (
            self._pending[connection].challenge,
            hello.get("challenge"),
        )
        facts = (own_challenge, its_challenge or "", index, its_count)
        # Before this proof, nothing that the process says has an effect, or an answer.
        if not _is_equal(
            hello.get("proof", ""), _proof(self._token, "join", *facts)
        ):
            logger.warning(
                "refused a process with a wrong token or without one"
            )
            self._refuse(connection, _WRONG_TOKEN)
            return
        name = _process_name(
            index, self._count, hello.get("host", "?"), hello.get("pid", "?")
        )
        if hello.get("versions") != versions():
            self.difference = (
                f"{name} has {hello.get('versions', 'another version of Weft')}, but "
                f"{self.names[0]} has {versions()}. Install the same versions for all processes."
            )
            _answer(connection, differs=self.difference)
            self._drop(connection)
            return
        if (
            its_count != self._count
            or not 0 < index < self._count
            or index in self.names
        ):
            text = f"process {index} of {its_count} came to a run of {self._count} processes"
            if index in self.names:
                text += f", in which {self.names[index]} is there already"
            self._refuse(
                connection, f"{text}. Give each process its own number."
            )
            return
        del self._pending[connection]
        self.names[index], self.connections[index] = name, connection
        self.proofs[index] = _proof(self._token, "welcome", *facts)

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
    addresses: Sequence[tuple[str, int]],
    index: int,
    count: int,
    token: str,
    timeout_seconds: float,
) -> _Joined:
    """Joins process 0 at the first of its addresses that leads to it."""
    deadline = time.monotonic() + timeout_seconds
    last_error: OSError | None = None
    for address in itertools.cycle(addresses):
        if time.monotonic() >= deadline:
            break
        with contextlib.ExitStack() as stack:
            answer: dict[str, Any] = {}
            try:
                connection = socket.create_connection(address, timeout=5)
                stack.enter_context(connection)
                answer = _introduce(connection, index, count, token, deadline)
            except OSError as error:
                last_error = error
            if "refused" in answer:
                raise ProcessesNotReadyError(answer["refused"])
            if "differs" in answer:
                raise ProcessesDifferError(answer["differs"])
            if "welcome" in answer:
                stack.pop_all()  # the connection remains open
                return _Joined({0: connection}, {0: answer["welcome"]})
        time.sleep(0.1)
    address_text = " or ".join(f"{host}:{port}" for host, port in addresses)
    raise ProcessesNotReadyError(
        f"process {index} of {count} could not join process 0 at {address_text} within "
        f"{timeout_seconds:g} s ({last_error}). Check in its log whether it runs and what it waits "
        "for."
    )


def _introduce(
    connection: socket.socket,
    index: int,
    count: int,
    token: str,
    deadline: float,
) -> dict[str, Any]:
    """Returns the answer of process 0; {} of what does not prove to be process 0."""
    its_challenge = _read_line(connection, _HELLO_SECONDS).get("challenge")
    if its_challenge is None:
        raise ConnectionError(
            "what listens there is not process 0 of a run of this version"
        )
    own_challenge = secrets.token_hex(16)
    facts = (its_challenge, own_challenge, index, count)
    hello = {
        "process": index,
        "of": count,
        "challenge": own_challenge,
        "versions": versions(),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "proof": _proof(token, "join", *facts),
    }
    peers.send_messages(connection, hello)
    # Process 0 waits for the others and reports first if they do not come.
    answer = _read_line(
        connection, deadline - time.monotonic() + _HELLO_SECONDS
    )
    expected_proof = _proof(token, "welcome", *facts)
    if "welcome" in answer and not _is_equal(
        answer.get("proof", ""), expected_proof
    ):
        raise ConnectionError(
            "what listens there does not have the token of this run"
        )
    return answer


def _read_line(
    connection: socket.socket, timeout_seconds: float
) -> dict[str, Any]:
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


def _missing_text(
    names: dict[int, str], count: int, address: str, seconds: float
) -> str:
    missing_indices = [
        str(index) for index in range(count) if index not in names
    ]
    missing = peers.join_first(missing_indices, _MAX_LISTED, ", ")
    present_names = [names[index] for index in sorted(names)]
    present = peers.join_first(present_names, _MAX_LISTED, "; ")
    noun = "processes" if len(missing_indices) > 1 else "process"
    return (
        f"{noun} {missing} of {count} did not come to {address} within {seconds:g} s. Present: "
        f"{present}. Check in the logs of the missing ones whether they were started."
    )
