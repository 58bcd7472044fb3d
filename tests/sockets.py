"""Ends of TCP connections within one process, a free port, and a pipe without a reader."""

import contextlib
import os
import random
import socket
import threading


def free_port():
    """Returns the number of a TCP port that no process listens to.

    It is below those that the system gives to connections: one could take it before it is used.
    """
    while True:
        port = random.SystemRandom().randrange(20_000, 32_768)
        with socket.socket() as s, contextlib.suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


def connected(buffer=None):
    """Returns two ends of a TCP connection; the second one takes about as many bytes before it
    reads.
    """
    with socket.create_server(("127.0.0.1", 0)) as server:
        if buffer is not None:
            server.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer)
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


def all_from(connection):
    """Reads until the other end closes."""
    return b"".join(iter(lambda: connection.recv(1 << 16), b""))


def reading(connection):
    """Reads all that comes in a thread and closes then; gives a function that waits for it all."""
    came = []

    def read():
        with connection:
            came.append(all_from(connection))

    thread = threading.Thread(target=read)
    thread.start()

    def wait():
        thread.join(timeout=30)
        return came[0]

    return wait


@contextlib.contextmanager
def full_pipe():
    """Yields the write end of a full pipe: writers block, as with a frozen reader."""
    read, write = os.pipe()
    os.set_blocking(write, False)
    with contextlib.suppress(BlockingIOError):
        while True:
            os.write(write, b"x" * 4096)
    os.set_blocking(write, True)
    try:
        yield write
    finally:
        os.close(read)
        os.close(write)
