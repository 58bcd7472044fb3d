"""How the processes of a run find each other before JAX is used, and who is missing if they do not.

Process 0 listens where JAX's coordinator will, for as long as it takes all others to come; then
that address is free again for JAX, and the connections stay as their `Companions`. A program that
has initialized `jax.distributed` by itself is met later, at a port that process 0 tells by JAX.
"""

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from weft.errors import ProcessesNotReadyError
from weft.trainer.companions import (
    HEARTBEAT_TIMEOUT_SECONDS,
    Companions,
    line_of,
    parse,
)

_HELLO_SECONDS = 5.0
_ADDRESS_BYTES = 1024


def meet(
    address: str,
    *,
    process_id: int,
    num_processes: int,
    timeout_seconds: float,
    heartbeat_timeout_seconds: float = HEARTBEAT_TIMEOUT_SECONDS,
) -> Companions:
    """Waits for all processes, and opens the lines between them.

    Args:
        address: host:port where process 0 listens.
        process_id: which this one is.
        num_processes: how many there are.
        timeout_seconds: how long to wait for the others.
        heartbeat_timeout_seconds: after how long a silent process counts as gone.

    Raises:
        ProcessesNotReadyError: if some do not come; the message names them.
    """
    host, _, port = address.rpartition(":")
    host = host.strip("[]")
    if process_id == 0:
        # Nobody else is to hear of what stays on this machine.
        here = host in ("localhost", "::1") or host.startswith("127.")
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host if here else "", int(port)), family=family) as server:
            return _receive(
                server, num_processes, "", timeout_seconds, heartbeat_timeout_seconds, address
            )
    return _join(
        [(host, int(port))],
        process_id,
        num_processes,
        "",
        timeout_seconds,
        heartbeat_timeout_seconds,
    )


def open_companions(timeout_seconds: float) -> Companions | None:
    """Lines to the other processes of `jax.distributed`, if there are any; all have to call this.

    Args:
        timeout_seconds: how long to wait for the others.

    Returns:
        None for a process that is alone.
    """
    if jax.process_count() == 1:
        return None
    count, index = jax.process_count(), jax.process_index()
    if index:
        hosts, port, token = _broadcast(None)
        addresses = [(host, port) for host in hosts]
        return _join(addresses, index, count, token, timeout_seconds, HEARTBEAT_TIMEOUT_SECONDS)
    with socket.create_server(("", 0)) as server:
        name, port, token = socket.gethostname(), server.getsockname()[1], secrets.token_hex(16)
        _broadcast([[_own_address(name), name], port, token])
        return _receive(
            server, count, token, timeout_seconds, HEARTBEAT_TIMEOUT_SECONDS, f"{name}:{port}"
        )


def _own_address(name: str) -> str:
    try:
        return socket.gethostbyname(name)
    except OSError:
        return name


def _broadcast(value: Any) -> Any:
    """A JSON value of process 0, in all processes."""
    padded = np.zeros(_ADDRESS_BYTES, np.uint8)
    if value is not None:
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        padded[: data.size] = data
    told = np.asarray(multihost_utils.broadcast_one_to_all(padded), np.uint8)
    return json.loads(told.tobytes().rstrip(b"\0"))


def _receive(
    server: socket.socket,
    count: int,
    token: str,
    timeout_seconds: float,
    heartbeat_timeout_seconds: float,
    address: str,
) -> Companions:
    """Process 0: takes in one process after the other."""
    names = {0: _name(0, count, socket.gethostname(), os.getpid())}
    connections: dict[int, socket.socket] = {}
    deadline = time.monotonic() + timeout_seconds
    while len(names) < count:
        server.settimeout(max(deadline - time.monotonic(), 0.001))
        try:
            connection, _ = server.accept()
        except TimeoutError:
            text = _missing(names, count, address, timeout_seconds)
            for connection in connections.values():
                connection.sendall(line_of({"refused": text}))
                connection.close()
            raise ProcessesNotReadyError(text) from None
        hello = _read_line(connection, _HELLO_SECONDS)
        index = hello.get("process")
        if hello.get("token") != token or not isinstance(index, int):
            connection.close()  # none of ours
            continue
        if hello["of"] != count or not 0 < index < count or index in names:
            text = f"process {index} of {hello['of']} came to a run of {count} processes"
            if index in names:
                text += f", in which {names[index]} is there already"
            connection.sendall(line_of({"refused": f"{text}. Give each process a number."}))
            connection.close()
            continue
        names[index] = _name(index, count, str(hello["host"]), hello["pid"])
        connections[index] = connection
    for connection in connections.values():
        connection.sendall(line_of({"welcome": names[0]}))
    return Companions(0, connections, names, heartbeat_timeout_seconds=heartbeat_timeout_seconds)


def _join(
    addresses: Sequence[tuple[str, int]],
    index: int,
    count: int,
    token: str,
    timeout_seconds: float,
    heartbeat_timeout_seconds: float,
) -> Companions:
    """The others: come to process 0, and wait until it has all."""
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
                # Process 0 waits for the rest; it speaks first if they do not come.
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
        f"process {index} of {count} did not get through to process 0 at "
        f"{' or '.join(f'{host}:{port}' for host, port in addresses)} within "
        f"{timeout_seconds:g} s ({error}). Its log says whether it runs, and what it waits for."
    )


def _read_line(connection: socket.socket, timeout_seconds: float) -> dict[str, Any]:
    """The first line that comes; nothing of what follows it is taken."""
    connection.settimeout(max(timeout_seconds, 0.001))
    line = b""
    try:
        while not line.endswith(b"\n") and len(line) < _ADDRESS_BYTES:
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
    missing = ", ".join(str(i) for i in range(count) if i not in names)
    there = "; ".join(names[i] for i in sorted(names))
    plural = "processes" if count - len(names) > 1 else "process"
    return (
        f"{plural} {missing} of {count} did not come to {address} within {seconds:g} s. Those that "
        f"are there: {there}. See in the logs of the others whether they were started."
    )
