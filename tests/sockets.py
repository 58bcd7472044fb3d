"""Ends of TCP connections within one process, as the lines between processes have them."""

import socket
import threading


def connected():
    """Two ends of a TCP connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        here = socket.create_connection(server.getsockname())
        there, _ = server.accept()
    return here, there


def all_from(connection):
    """What comes until the other end says that nothing more does."""
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
